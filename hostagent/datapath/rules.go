package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/quartet-lb/quartet/lb"
)

// ruleKey is what tells rules apart.
type ruleKey struct {
	tunnel   netip.Addr
	endpoint lb.Endpoint
}

// target is where a rule sends packets.
type target struct {
	dip  netip.Addr
	port uint16
}

// targets are a rule's current target and those it had before, latest first;
// unused ones are zero. No target is there twice.
type targets [4]target

// with makes t the current target.
func (ts targets) with(t target) targets {
	next := targets{t}
	n := 1
	for _, old := range ts {
		if old != t && old.dip.IsValid() && n < len(next) {
			next[n] = old
			n++
		}
	}
	return next
}

// anyPort is the port number of a portUse by a rule that keeps packets' ports.
const anyPort = 64

// portUse is one reason for a bit in a DIP's map entry.
type portUse struct {
	dip netip.Addr
	bit uint8 // 0..63, or anyPort
}

// references count the rules that need an entry of the maps tunnels and dips.
type references struct {
	tunnels map[netip.Addr]int
	ports   map[portUse]int
}

func newReferences() references {
	return references{map[netip.Addr]int{}, map[portUse]int{}}
}

// uses are the DIP map's bits that a rule needs.
func (ts targets) uses(k ruleKey) []portUse {
	var uses []portUse
	for _, t := range ts {
		if !t.dip.IsValid() {
			continue
		}
		port := t.port
		if port == 0 {
			port = k.endpoint.Port
		}
		u := portUse{t.dip, portBit(k.endpoint.Protocol, port)}
		if port == 0 {
			u.bit = anyPort
		}
		uses = append(uses, u)
	}
	return uses
}

// portBit is port_bit of the programs.
func portBit(p lb.Protocol, port uint16) uint8 {
	return uint8(port^port>>6^uint16(p)) & 63
}

// bits are what the map entry of a DIP holds.
func (r references) bits(dip netip.Addr) uint64 {
	if r.ports[portUse{dip, anyPort}] > 0 {
		return ^uint64(0)
	}
	var bits uint64
	for b := range uint8(64) {
		if r.ports[portUse{dip, b}] > 0 {
			bits |= 1 << b
		}
	}
	return bits
}

// check validates a rule; with key only, the fields of its key.
func (r Rule) check(keyOnly bool) error {
	switch {
	case !usable(r.Tunnel):
		return fmt.Errorf("tunnel: %v; valid: a unicast IPv4 or IPv6 address", r.Tunnel)
	case !usable(r.Endpoint.VIP):
		return fmt.Errorf("vip: %v; valid: a unicast IPv4 or IPv6 address", r.Endpoint.VIP)
	case r.Endpoint.Protocol != lb.TCP && r.Endpoint.Protocol != lb.UDP:
		return fmt.Errorf("protocol: %v; valid: TCP or UDP", r.Endpoint.Protocol)
	case keyOnly:
		return nil
	case !usable(r.DIP):
		return fmt.Errorf("dip: %v; valid: a unicast IPv4 or IPv6 address", r.DIP)
	case r.DIP.Is4() != r.Endpoint.VIP.Is4():
		return fmt.Errorf("dip: %v; valid: an address of the family of VIP %v", r.DIP, r.Endpoint.VIP)
	}
	return nil
}

func usable(a netip.Addr) bool {
	return a.IsValid() && a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsMulticast()
}

func (r Rule) key() ruleKey { return ruleKey{r.Tunnel, r.Endpoint} }

// Replace makes the rules exactly these, at the cost of the difference. A rule
// whose target changes keeps its last three for the connections they have.
// Bad or contradictory rules are refused by index and field, and nothing
// changes. The first Replace after an Open that found another layout swaps the
// programs.
func (d *Datapath) Replace(rules []Rule) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := make(map[ruleKey]target, len(rules))
	index := make(map[ruleKey]int, len(rules))
	for i, r := range rules {
		if err := r.check(false); err != nil {
			return fmt.Errorf("rules[%d].%w", i, err)
		}
		if j, again := index[r.key()]; again {
			return fmt.Errorf("rules[%d]: %s: rules[%d] has the same tunnel and endpoint", i, r, j)
		}
		index[r.key()] = i
		wanted[r.key()] = target{r.DIP, r.DIPPort}
	}
	var gone []ruleKey
	for k := range d.rules {
		if _, stays := wanted[k]; !stays {
			gone = append(gone, k)
		}
	}
	if err := d.change(wanted, gone); err != nil {
		return err
	}
	return d.swap()
}

// Apply puts and deletes rules, all of them or none. A key may be named once.
func (d *Datapath) Apply(delta Delta) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	put := make(map[ruleKey]target, len(delta.Put))
	for i, r := range delta.Put {
		if err := r.check(false); err != nil {
			return fmt.Errorf("put[%d].%w", i, err)
		}
		if _, again := put[r.key()]; again {
			return fmt.Errorf("put[%d]: %s: another has the same tunnel and endpoint", i, r)
		}
		put[r.key()] = target{r.DIP, r.DIPPort}
	}
	var gone []ruleKey
	for i, r := range delta.Delete {
		if err := r.check(true); err != nil {
			return fmt.Errorf("delete[%d].%w", i, err)
		}
		if _, both := put[r.key()]; both {
			return fmt.Errorf("delete[%d]: %s: put has the same tunnel and endpoint", i, r)
		}
		gone = append(gone, r.key())
	}
	return d.change(put, gone)
}

// change writes the difference to the maps. What packets need is there before
// the rule that leads to it, and goes after it. On an error it writes back what
// was.
func (d *Datapath) change(put map[ruleKey]target, gone []ruleKey) error {
	next := map[ruleKey]targets{} // no target: no rule
	size := len(d.rules)
	for k, t := range put {
		old, there := d.rules[k]
		if there && old[0] == t {
			continue
		}
		if !there {
			size++
		}
		next[k] = old.with(t)
	}
	for _, k := range gone {
		if _, there := d.rules[k]; there {
			next[k] = targets{}
			size--
		}
	}
	if size > int(d.config.Rules) {
		return fmt.Errorf("rules: %d; valid: up to %d, as configured", size, d.config.Rules)
	}
	before := make(map[ruleKey]targets, len(next))
	for k := range next {
		before[k] = d.rules[k]
	}

	d.used.count(next, 1)
	err := d.settle(before, next)
	if err == nil {
		err = d.writeRules(next)
	}
	if err != nil {
		d.used.count(next, -1)
		back := d.writeRules(before)
		if back == nil {
			back = d.settle(before, next)
		}
		if back != nil {
			return fmt.Errorf("%w; write back the former rules: %w", err, back)
		}
		return err
	}
	for k, ts := range next {
		if ts.none() {
			delete(d.rules, k)
		} else {
			d.rules[k] = ts
		}
	}
	d.used.count(before, -1)
	return d.settle(before, next)
}

// count adds by to the references of each rule.
func (r references) count(rules map[ruleKey]targets, by int) {
	for k, ts := range rules {
		if ts.none() {
			continue
		}
		if r.tunnels[k.tunnel] += by; r.tunnels[k.tunnel] == 0 {
			delete(r.tunnels, k.tunnel)
		}
		for _, u := range ts.uses(k) {
			if r.ports[u] += by; r.ports[u] == 0 {
				delete(r.ports, u)
			}
		}
	}
}

// settle writes the entries of tunnels and dips that these rules touch as the
// references say.
func (d *Datapath) settle(sets ...map[ruleKey]targets) error {
	tunnels := map[netip.Addr]bool{}
	dips := map[netip.Addr]bool{}
	for _, rules := range sets {
		for k, ts := range rules {
			tunnels[k.tunnel] = true
			for _, u := range ts.uses(k) {
				dips[u.dip] = true
			}
		}
	}
	for t := range tunnels {
		words, six := rawAddr(t)
		key := agentTunnelKey{Address: words, Families: uint32(six * tunnel6)}
		if err := put(d.objects.Tunnels, key, uint32(0), d.used.tunnels[t] > 0); err != nil {
			return fmt.Errorf("write tunnel %s: %w", t, err)
		}
	}
	for a := range dips {
		words, six := rawAddr(a)
		key := agentDipKey{Address: words, Families: uint32(six * vip6)}
		bits := d.used.bits(a)
		if err := put(d.objects.Dips, key, agentDip{Ports: bits}, bits != 0); err != nil {
			return fmt.Errorf("write DIP %s: %w", a, err)
		}
	}
	return nil
}

func (d *Datapath) writeRules(rules map[ruleKey]targets) error {
	for k, ts := range rules {
		if err := put(d.objects.Rules, k.raw(), ts.raw(), !ts.none()); err != nil {
			return fmt.Errorf("write rule of %s at %s: %w", k.endpoint, k.tunnel, err)
		}
	}
	return nil
}

// put writes an entry, or deletes it where it is not to be there.
func put(m *ebpf.Map, key, value any, there bool) error {
	if there {
		return m.Put(key, value)
	}
	if err := m.Delete(key); !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// readRules takes over the rules that adopted maps hold, and puts right what a
// daemon that was killed in the middle of a change left beside them.
func (d *Datapath) readRules() error {
	d.rules = map[ruleKey]targets{}
	d.used = newReferences()
	for k, ts := range rulesIn(d.objects.Rules) {
		d.rules[k] = ts
	}
	d.used.count(d.rules, 1)
	if err := d.settle(d.rules); err != nil {
		return err
	}
	var tunnel agentTunnelKey
	if err := sweep(d.objects.Tunnels, &tunnel, new(uint32), func() bool {
		return d.used.tunnels[parseAddr(tunnel.Address, tunnel.Families != 0)] > 0
	}); err != nil {
		return err
	}
	var dip agentDipKey
	return sweep(d.objects.Dips, &dip, new(agentDip), func() bool {
		return d.used.bits(parseAddr(dip.Address, dip.Families != 0)) != 0
	})
}

// rulesIn are a map's rules.
func rulesIn(m *ebpf.Map) iter.Seq2[ruleKey, targets] {
	return func(yield func(ruleKey, targets) bool) {
		var (
			key   agentRuleKey
			value agentRule
		)
		for it := m.Iterate(); it.Next(&key, &value); {
			if !yield(parseRule(key, value)) {
				return
			}
		}
	}
}

// inheritRules writes the rules of the layout in dir to this one's empty maps,
// for the former targets that connections live by.
func (d *Datapath) inheritRules(dir string) error {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, "rules"), nil)
	if err != nil {
		return fmt.Errorf("open rules of another layout: %w", err)
	}
	defer func() { _ = m.Close() }()
	if own := d.objects.Rules; m.KeySize() != own.KeySize() || m.ValueSize() != own.ValueSize() {
		return nil
	}
	inherited := maps.Collect(rulesIn(m))
	if len(inherited) > int(d.config.Rules) {
		return nil // the first Replace says so, if they are still to be that many
	}
	d.used.count(inherited, 1)
	if err := errors.Join(d.settle(inherited), d.writeRules(inherited)); err != nil {
		return err
	}
	d.rules = inherited
	return nil
}

// sweep deletes the entries that are not to be kept. keep looks at *key.
func sweep[K any](m *ebpf.Map, key *K, value any, keep func() bool) error {
	var gone []K
	it := m.Iterate()
	for it.Next(key, value) {
		if !keep() {
			gone = append(gone, *key)
		}
	}
	for _, k := range gone {
		if err := put(m, k, nil, false); err != nil {
			return fmt.Errorf("delete a left-over entry: %w", err)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read pinned rules: %w", err)
	}
	return nil
}

// Bits of families in the maps' keys.
const (
	tunnel6 = 1
	vip6    = 2
)

// rawAddr is an address as the maps have it, and 1 for IPv6, else 0.
func rawAddr(a netip.Addr) (words [4]uint32, six uint8) {
	var b [16]byte
	if copy(b[:], a.AsSlice()) == 16 {
		six = 1
	}
	for i := range words {
		words[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return words, six
}

func parseAddr(words [4]uint32, six bool) netip.Addr {
	var b [16]byte
	for i, w := range words {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	if six {
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte(b[:4]))
}

// networkOrder turns a port from host to network byte order, and back.
func networkOrder(port uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, port))
}

func (k ruleKey) raw() agentRuleKey {
	tunnel, t6 := rawAddr(k.tunnel)
	vip, v6 := rawAddr(k.endpoint.VIP)
	return agentRuleKey{
		Tunnel: tunnel, Vip: vip, Port: networkOrder(k.endpoint.Port),
		Protocol: uint8(k.endpoint.Protocol), Families: t6*tunnel6 | v6*vip6,
	}
}

func (ts targets) none() bool { return !ts[0].dip.IsValid() }

func (ts targets) raw() agentRule {
	var r agentRule
	for i, t := range ts {
		if t.dip.IsValid() {
			r.Targets[i].Dip, _ = rawAddr(t.dip)
			r.Targets[i].Port = networkOrder(t.port)
		}
	}
	return r
}

func parseRule(key agentRuleKey, value agentRule) (ruleKey, targets) {
	six := key.Families&vip6 != 0
	k := ruleKey{parseAddr(key.Tunnel, key.Families&tunnel6 != 0), lb.Endpoint{
		VIP: parseAddr(key.Vip, six), Protocol: lb.Protocol(key.Protocol), Port: networkOrder(key.Port),
	}}
	var ts targets
	for i, t := range value.Targets {
		if t.Dip != [4]uint32{} {
			ts[i] = target{parseAddr(t.Dip, six), networkOrder(t.Port)}
		}
	}
	return k, ts
}
