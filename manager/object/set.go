package object

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// Set is the desired set of objects, with the indexes that let a change be
// checked at the cost of what changes. Its objects satisfy each other: only
// changes that Check found nothing wrong with are applied. Not safe for
// concurrent use.
type Set struct {
	vips  map[string]*quartetv1.Vip
	pools map[string]*quartetv1.VipPool

	owner    map[netip.Addr]string // VIP address to its Vip
	snat     map[netip.Addr]string // DIP to the Vip its outbound connections leave with
	dips     map[netip.Addr]int    // DIPs and tunnels to how many backends have them
	prefixes []poolPrefix          // in order of address; they never overlap
}

type poolPrefix struct {
	prefix netip.Prefix
	pool   string
}

// NewSet is an empty set.
func NewSet() *Set {
	return &Set{
		vips: map[string]*quartetv1.Vip{}, pools: map[string]*quartetv1.VipPool{},
		owner: map[netip.Addr]string{}, snat: map[netip.Addr]string{}, dips: map[netip.Addr]int{},
	}
}

// Vip is the Vip of that name, or nil. It must not be changed.
func (s *Set) Vip(name string) *quartetv1.Vip { return s.vips[name] }

// Pool is the VipPool of that name, or nil. It must not be changed.
func (s *Set) Pool(name string) *quartetv1.VipPool { return s.pools[name] }

// Vips are all Vips in order of their names.
func (s *Set) Vips() []*quartetv1.Vip { return inOrder(s.vips) }

// Pools are all VipPools in order of their names.
func (s *Set) Pools() []*quartetv1.VipPool { return inOrder(s.pools) }

// Owner is the name of the Vip that has the address, or "".
func (s *Set) Owner(a netip.Addr) string { return s.owner[a] }

func inOrder[T any](m map[string]T) []T {
	out := make([]T, 0, len(m))
	for _, name := range slices.Sorted(maps.Keys(m)) {
		out = append(out, m[name])
	}
	return out
}

// Check says what would be wrong after creating or replacing the objects put,
// which come from Decode, and removing others. It changes nothing. Without a
// change of pools it costs as much as what changes has addresses; with one, as
// much as there are VIP addresses.
func (s *Set) Check(put []Object, remove []Ref) []*quartetv1.FieldViolation {
	c := check{set: s, touched: map[Ref]bool{}, owner: map[netip.Addr]string{}, snat: map[netip.Addr]string{}, gone: map[netip.Addr]int{}}
	for _, ref := range remove {
		if s.vips[ref.Name] == nil && ref.Kind == KindVip || s.pools[ref.Name] == nil && ref.Kind == KindVipPool || !slices.Contains(Kinds, ref.Kind) {
			c.add(ref, "", "there is no such object", "a name that 'quartet get' shows")
		}
		c.touch(ref)
	}
	for _, o := range put {
		if c.touched[o.Ref()] {
			c.add(o.Ref(), "", "is changed twice in one request", "each object once")
		}
		c.touch(o.Ref())
	}
	c.checkPools(put)
	for _, o := range put {
		if o.Vip != nil {
			c.checkVip(o)
		}
	}
	for _, o := range put {
		if o.Vip != nil {
			c.checkDIPs(o)
		}
	}
	return limit(c.violations, 0)
}

// Apply makes a change that Check found nothing wrong with. The set keeps the
// objects; the caller must not change them any more.
func (s *Set) Apply(put []Object, remove []Ref) {
	pools := false
	drop := func(ref Ref) {
		if ref.Kind == KindVipPool {
			pools = true
			delete(s.pools, ref.Name)
			return
		}
		old := s.vips[ref.Name]
		if old == nil {
			return
		}
		for a := range addresses(old.GetAddresses()) {
			delete(s.owner, a)
		}
		for a := range addresses(old.GetSnat()) {
			delete(s.snat, a)
		}
		for a := range reached(old) {
			if s.dips[a]--; s.dips[a] == 0 {
				delete(s.dips, a)
			}
		}
		delete(s.vips, ref.Name)
	}
	for _, ref := range remove {
		drop(ref)
	}
	// All old ones go first, for an address may move from one Vip to another.
	for _, o := range put {
		drop(o.Ref())
	}
	for _, o := range put {
		if o.Pool != nil {
			s.pools[o.Pool.GetName()] = o.Pool
			continue
		}
		name := o.Vip.GetName()
		s.vips[name] = o.Vip
		for a := range addresses(o.Vip.GetAddresses()) {
			s.owner[a] = name
		}
		for a := range addresses(o.Vip.GetSnat()) {
			s.snat[a] = name
		}
		for a := range reached(o.Vip) {
			s.dips[a]++
		}
	}
	if pools {
		s.prefixes = sortPrefixes(s.pools)
	}
}

// Check says what is wrong with a whole desired set of objects from Decode.
func Check(desired []Object) []*quartetv1.FieldViolation {
	return NewSet().Check(desired, nil)
}

// check is one run of Set.Check: the set, and over it what changes.
type check struct {
	set        *Set
	violations []*quartetv1.FieldViolation
	touched    map[Ref]bool
	owner      map[netip.Addr]string // of the objects put
	snat       map[netip.Addr]string
	gone       map[netip.Addr]int // uses of DIPs and tunnels by the Vips touched
	prefixes   []poolPrefix
}

func (c *check) add(ref Ref, path, message, valid string) {
	c.violations = append(c.violations, &quartetv1.FieldViolation{Object: ref.String(), Path: path, Message: message, Valid: valid})
}

func (c *check) touch(ref Ref) {
	if c.touched[ref] {
		return
	}
	c.touched[ref] = true
	if old := c.set.vips[ref.Name]; ref.Kind == KindVip && old != nil {
		for a := range reached(old) {
			c.gone[a]++
		}
	}
}

// stays is the Vip that the index names, unless the change replaces it.
func (c *check) stays(index map[netip.Addr]string, a netip.Addr) string {
	if name, ok := index[a]; ok && !c.touched[Ref{KindVip, name}] {
		return name
	}
	return ""
}

// checkPools sets prefixes to the pools after the change, and checks that they
// do not overlap and still hold every address of the Vips that stay.
func (c *check) checkPools(put []Object) {
	c.prefixes = c.set.prefixes
	changed := false
	pools := maps.Clone(c.set.pools)
	for ref := range c.touched {
		if ref.Kind == KindVipPool {
			changed = true
			delete(pools, ref.Name)
		}
	}
	if !changed {
		return
	}
	putNames := map[string]bool{}
	for _, o := range put {
		if o.Pool != nil {
			pools[o.Pool.GetName()] = o.Pool
			putNames[o.Pool.GetName()] = true
		}
	}
	c.prefixes = sortPrefixes(pools)
	for i := 1; i < len(c.prefixes); i++ {
		// Prefixes nest or are disjoint, so an overlap is one with the prefix
		// before it that reaches furthest.
		a, b := c.prefixes[i-1], c.prefixes[i]
		if !a.prefix.Overlaps(b.prefix) {
			continue
		}
		c.prefixes[i].prefix, c.prefixes[i].pool = a.prefix, a.pool
		if a.pool == b.pool { // checkPool told it
			continue
		}
		if !putNames[b.pool] {
			a, b = b, a
		}
		c.add(Ref{KindVipPool, b.pool}, c.prefixPath(pools[b.pool], b.prefix), fmt.Sprintf("%s overlaps %s of VipPool/%s", b.prefix, a.prefix, a.pool), "prefixes that no other pool has")
	}

	type use struct {
		vips  map[string]bool
		first netip.Addr
	}
	lost := map[string]*use{}
	for a, vip := range c.set.owner {
		if c.touched[Ref{KindVip, vip}] || find(c.prefixes, a) != "" {
			continue
		}
		pool := find(c.set.prefixes, a)
		u := lost[pool]
		if u == nil {
			u = &use{vips: map[string]bool{}, first: a}
			lost[pool] = u
		}
		u.vips[vip] = true
		if a.Less(u.first) {
			u.first = a
		}
	}
	for _, pool := range slices.Sorted(maps.Keys(lost)) {
		u := lost[pool]
		message := fmt.Sprintf("Vip/%s has %s in it", c.set.owner[u.first], u.first)
		if n := len(u.vips) - 1; n > 0 {
			message += fmt.Sprintf(", and %d Vips more use it", n)
		}
		path := ""
		if putNames[pool] {
			path = "prefixes"
		}
		c.add(Ref{KindVipPool, pool}, path, message, "prefixes that hold every Vip's addresses, or delete those Vips first or with it")
	}
}

func (c *check) prefixPath(p *quartetv1.VipPool, prefix netip.Prefix) string {
	for i, text := range p.GetPrefixes() {
		if text == prefix.String() {
			return fmt.Sprintf("prefixes[%d]", i)
		}
	}
	return "prefixes"
}

func (c *check) checkVip(o Object) {
	name := o.Vip.GetName()
	for i, text := range o.Vip.GetAddresses() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		path := fmt.Sprintf("addresses[%d]", i)
		other := c.stays(c.set.owner, a)
		if other == "" {
			other = c.owner[a]
		}
		if other != "" && other != name {
			c.add(o.Ref(), path, fmt.Sprintf("%s belongs to Vip/%s", a, other), "an address of no other Vip; one Vip has all endpoints of an address")
		} else {
			c.owner[a] = name
		}
		if find(c.prefixes, a) == "" {
			c.add(o.Ref(), path, fmt.Sprintf("%s is outside every VipPool", a), poolsText(c.prefixes))
		}
	}
	for i, text := range o.Vip.GetSnat() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		other := c.stays(c.set.snat, a)
		if other == "" {
			other = c.snat[a]
		}
		if other != "" && other != name {
			c.add(o.Ref(), fmt.Sprintf("snat[%d]", i), fmt.Sprintf("%s leaves with Vip/%s already", a, other), "a DIP in the snat of one Vip")
		} else {
			c.snat[a] = name
		}
	}
}

// checkDIPs refuses packets tunnelled to a VIP, which would come back to the
// muxes. It runs after every checkVip.
func (c *check) checkDIPs(o Object) {
	vip := func(text string) string {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return ""
		}
		if name := c.stays(c.set.owner, a); name != "" {
			return name
		}
		return c.owner[a]
	}
	for i, text := range o.Vip.GetAddresses() {
		if a, err := netip.ParseAddr(text); err == nil && c.set.dips[a] > c.gone[a] {
			c.add(o.Ref(), fmt.Sprintf("addresses[%d]", i), fmt.Sprintf("%s is a DIP of another Vip", a), "an address that is no DIP and no tunnel")
		}
	}
	for i, e := range o.Vip.GetEndpoints() {
		for j, b := range e.GetBackends() {
			for _, f := range []struct{ field, text string }{{"dip", b.GetDip()}, {"dip6", b.GetDip6()}, {"tunnel", b.GetTunnel()}} {
				if name := vip(f.text); name != "" {
					c.add(o.Ref(), fmt.Sprintf("endpoints[%d].backends[%d].%s", i, j, f.field), fmt.Sprintf("%s is an address of Vip/%s", f.text, name), "a server's own address")
				}
			}
		}
	}
}

func poolsText(prefixes []poolPrefix) string {
	if len(prefixes) == 0 {
		return "an address in a VipPool, and there is none: apply one first or with it"
	}
	text := "an address in "
	for i, p := range prefixes {
		if i == 4 {
			return fmt.Sprintf("%s or %d prefixes more", text, len(prefixes)-i)
		}
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%s (%s)", p.prefix, p.pool)
	}
	return text
}

func sortPrefixes(pools map[string]*quartetv1.VipPool) []poolPrefix {
	var out []poolPrefix
	for name, p := range pools {
		for _, text := range p.GetPrefixes() {
			if prefix, err := netip.ParsePrefix(text); err == nil {
				out = append(out, poolPrefix{prefix, name})
			}
		}
	}
	slices.SortFunc(out, func(a, b poolPrefix) int {
		return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()), cmp.Compare(a.pool, b.pool))
	})
	return out
}

// find is the pool that holds a, or "".
func find(prefixes []poolPrefix, a netip.Addr) string {
	i, exact := slices.BinarySearchFunc(prefixes, a, func(p poolPrefix, a netip.Addr) int { return p.prefix.Addr().Compare(a) })
	if !exact {
		i--
	}
	if i >= 0 && prefixes[i].prefix.Contains(a) {
		return prefixes[i].pool
	}
	return ""
}

// addresses parses each; a stored object's are valid.
func addresses(texts []string) func(yield func(netip.Addr) bool) {
	return func(yield func(netip.Addr) bool) {
		for _, text := range texts {
			if a, err := netip.ParseAddr(text); err == nil && !yield(a) {
				return
			}
		}
	}
}

// reached are the addresses that packets of the Vip are tunnelled or NATed to,
// one for each mention.
func reached(v *quartetv1.Vip) func(yield func(netip.Addr) bool) {
	return func(yield func(netip.Addr) bool) {
		for _, e := range v.GetEndpoints() {
			for _, b := range e.GetBackends() {
				for a := range addresses([]string{b.GetDip(), b.GetDip6(), b.GetTunnel()}) {
					if !yield(a) {
						return
					}
				}
			}
		}
	}
}
