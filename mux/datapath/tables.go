package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/quartet-lb/quartet/flowhash"
	"github.com/quartet-lb/quartet/lb"
)

// VIP is one address that the mux serves.
type VIP struct {
	Addr   netip.Addr
	Name   string // of the object, for counters and trace
	Tenant string
}

// Endpoint is what answers at one (VIP, protocol, port).
type Endpoint struct {
	lb.Endpoint
	VIPName     string
	Name        string
	Tenant      string
	Consistency lb.Consistency
	// DIPs are all whose flows are to be kept, also those that no bucket
	// names (draining). A DIP's identity is all of it, tunnel included:
	// a DIP whose tunnel changes counts as another.
	DIPs []lb.DIP
	// Buckets has 2^k indices into DIPs, k 0..16. Empty: no DIP can serve.
	Buckets    []uint16
	Generation uint64 // of the configuration, for trace
}

// Tables is everything a mux serves.
type Tables struct {
	Seed      flowhash.Seed
	VIPs      []VIP
	Endpoints []Endpoint
}

// Delta changes tables. Deleting what is not there is no error. A VIP may be
// deleted only with or after its endpoints.
type Delta struct {
	PutVIPs         []VIP
	DeleteVIPs      []netip.Addr
	PutEndpoints    []Endpoint
	DeleteEndpoints []lb.Endpoint
}

// vip and endpoint are what the kernel runs, as the loader knows it.
type vip struct {
	VIP
	slot      uint32
	endpoints int
	any       [2]int // endpoints with any port, TCP and UDP
}

type endpoint struct {
	Endpoint
	slot  uint32
	key   uint64
	dips  map[lb.DIP]uint32 // ids
	table block             // zero size: none
	known bool              // Endpoint is complete, not recovered from the kernel
}

// MaxBuckets is the size of the largest bucket table.
const MaxBuckets = 65536

// Replace makes the mux serve exactly t. Flows of endpoints and DIPs that stay
// keep their connection entries and counters. On error nothing has changed.
func (d *Datapath) Replace(t Tables) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	var delta Delta
	vips := make(map[netip.Addr]bool, len(t.VIPs))
	for i, v := range t.VIPs {
		if vips[v.Addr] {
			return fmt.Errorf("vips[%d]: %s is there twice", i, v.Addr)
		}
		vips[v.Addr] = true
		if had := d.vips[v.Addr]; had == nil || had.VIP != v {
			delta.PutVIPs = append(delta.PutVIPs, v)
		}
	}
	for addr := range d.vips {
		if !vips[addr] {
			delta.DeleteVIPs = append(delta.DeleteVIPs, addr)
		}
	}
	endpoints := make(map[lb.Endpoint]bool, len(t.Endpoints))
	for i, e := range t.Endpoints {
		if endpoints[e.Endpoint] {
			return fmt.Errorf("endpoints[%d]: %s is there twice", i, e.Endpoint)
		}
		endpoints[e.Endpoint] = true
		if had := d.endpoints[e.Endpoint]; had == nil || !had.same(&e) {
			delta.PutEndpoints = append(delta.PutEndpoints, e)
		}
	}
	for key := range d.endpoints {
		if !endpoints[key] {
			delta.DeleteEndpoints = append(delta.DeleteEndpoints, key)
		}
	}
	if err := d.apply(delta); err != nil {
		return err
	}
	d.setSeed(t.Seed)
	return d.attachPending()
}

// Apply changes what the mux serves at a cost that grows with the change only.
// On error nothing has changed.
func (d *Datapath) Apply(delta Delta) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.apply(delta)
}

// Endpoints lists what the mux serves.
func (d *Datapath) Endpoints() []Endpoint {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := make([]Endpoint, 0, len(d.endpoints))
	for _, e := range d.endpoints {
		out = append(out, e.Endpoint)
	}
	slices.SortFunc(out, func(a, b Endpoint) int { return strings.Compare(a.String(), b.String()) })
	return out
}

func (e *endpoint) same(o *Endpoint) bool {
	return e.known && e.VIPName == o.VIPName && e.Name == o.Name && e.Tenant == o.Tenant &&
		e.Consistency == o.Consistency && e.Generation == o.Generation &&
		slices.Equal(e.DIPs, o.DIPs) && slices.Equal(e.Buckets, o.Buckets)
}

// validate checks everything about delta that the kernel doesn't.
func (d *Datapath) validate(delta *Delta) error {
	vips := map[netip.Addr]bool{}
	for i, v := range delta.PutVIPs {
		if !v.Addr.IsValid() || v.Addr.Is4In6() || v.Addr.Zone() != "" || v.Addr.IsUnspecified() || v.Addr.IsMulticast() {
			return fmt.Errorf("vips[%d].address: %q is not a unicast IPv4 or IPv6 address", i, v.Addr)
		}
		if vips[v.Addr] {
			return fmt.Errorf("vips[%d].address: %s is there twice", i, v.Addr)
		}
		if v.Addr == d.config.Source4 || v.Addr == d.config.Source6 {
			return fmt.Errorf("vips[%d].address: %s is the mux's own tunnel source", i, v.Addr)
		}
		vips[v.Addr] = true
	}
	gone := map[lb.Endpoint]bool{}
	for _, key := range delta.DeleteEndpoints {
		gone[key] = true
	}
	left := map[netip.Addr]int{}
	for _, addr := range delta.DeleteVIPs {
		if vips[addr] {
			return fmt.Errorf("vip %s is both put and deleted", addr)
		}
		if v := d.vips[addr]; v != nil {
			left[addr] = v.endpoints
		}
	}
	for key := range gone {
		if _, ok := left[key.VIP]; ok && d.endpoints[key] != nil {
			left[key.VIP]--
		}
	}
	for addr, n := range left {
		if n > 0 {
			return fmt.Errorf("delete vip %s: %d endpoints are left", addr, n)
		}
	}
	puts := map[lb.Endpoint]bool{}
	for i := range delta.PutEndpoints {
		e := &delta.PutEndpoints[i]
		at := fmt.Sprintf("endpoints[%d] (%s)", i, e.Endpoint)
		if e.Protocol != lb.TCP && e.Protocol != lb.UDP {
			return fmt.Errorf("%s.protocol: %s; TCP or UDP", at, e.Protocol)
		}
		if _, leaving := left[e.VIP]; leaving || !vips[e.VIP] && d.vips[e.VIP] == nil {
			return fmt.Errorf("%s.vip: %s is not a VIP of this mux", at, e.VIP)
		}
		if puts[e.Endpoint] || gone[e.Endpoint] {
			return fmt.Errorf("%s is there twice", at)
		}
		puts[e.Endpoint] = true
		if err := d.validateDIPs(e, at, vips); err != nil {
			return err
		}
	}
	return nil
}

// validateDIPs is given the VIPs that come with e.
func (d *Datapath) validateDIPs(e *Endpoint, at string, vips map[netip.Addr]bool) error {
	if n := len(e.Buckets); n&(n-1) != 0 || n > MaxBuckets {
		return fmt.Errorf("%s.buckets: %d of them; none or a power of two up to %d", at, n, MaxBuckets)
	}
	for i, b := range e.Buckets {
		if int(b) >= len(e.DIPs) {
			return fmt.Errorf("%s.buckets[%d]: index %d; there are %d DIPs", at, i, b, len(e.DIPs))
		}
	}
	seen := make(map[lb.DIP]bool, len(e.DIPs))
	for i, dip := range e.DIPs {
		at := fmt.Sprintf("%s.dips[%d]", at, i)
		if seen[dip] {
			return fmt.Errorf("%s: %s is there twice", at, dip)
		}
		seen[dip] = true
		if !dip.Addr.IsValid() || dip.Addr.Is4() != e.VIP.Is4() {
			return fmt.Errorf("%s.address: %q is not of the VIP's family", at, dip.Addr)
		}
		if dip.Tunnel.Encap != lb.EncapIPIP && dip.Tunnel.Encap != lb.EncapGUE {
			return fmt.Errorf("%s.encapsulation: %s; ipip or gue", at, dip.Tunnel.Encap)
		}
		dst := dip.Tunnel.Dst
		if !dst.IsValid() || dst.Is4In6() || dst.IsUnspecified() || dst.IsMulticast() {
			return fmt.Errorf("%s.tunnel: %q is not a unicast IPv4 or IPv6 address", at, dst)
		}
		if dst.Is4() && !d.config.Source4.IsValid() || dst.Is6() && !d.config.Source6.IsValid() {
			return fmt.Errorf("%s.tunnel: %s is of a family that the mux has no source address in", at, dst)
		}
		if vips[dst] || d.vips[dst] != nil {
			return fmt.Errorf("%s.tunnel: %s is a VIP: packets would come back", at, dst)
		}
	}
	return nil
}

// change is one delta on its way into the kernel. Each step that can fail
// leaves its undoing in undo; what can't fail, the stores that make the change
// visible, comes last.
type change struct {
	d    *Datapath
	undo []func()
}

func (c *change) rollback() {
	for _, f := range slices.Backward(c.undo) {
		f()
	}
}

// try runs one step that can fail.
func (c *change) try(what string, do func() error, undo func()) error {
	if c.d.injectFailure != nil {
		if err := c.d.injectFailure(what); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	c.undo = append(c.undo, undo)
	return nil
}

// staged is an endpoint as it will be.
type staged struct {
	e    *endpoint
	had  *endpoint
	word uint64
}

func (d *Datapath) apply(delta Delta) error {
	if d.closed {
		return errors.New("the datapath is closed")
	}
	if err := d.validate(&delta); err != nil {
		return err
	}
	c := &change{d: d}
	if err := d.stageAndSwap(c, &delta); err != nil {
		c.rollback()
		return err
	}
	return nil
}

func (d *Datapath) stageAndSwap(c *change, delta *Delta) error {
	// VIPs as they will be, with the endpoints counted.
	vips := map[netip.Addr]*vip{}
	edit := func(addr netip.Addr) *vip {
		if v := vips[addr]; v != nil {
			return v
		}
		v := &vip{}
		if had := d.vips[addr]; had != nil {
			*v = *had
		}
		vips[addr] = v
		return v
	}
	for _, put := range delta.PutVIPs {
		edit(put.Addr).VIP = put
	}
	for _, key := range delta.DeleteEndpoints {
		if d.endpoints[key] != nil {
			edit(key.VIP).count(key, -1)
		}
	}
	for i := range delta.PutEndpoints {
		if key := delta.PutEndpoints[i].Endpoint; d.endpoints[key] == nil {
			edit(key.VIP).count(key, +1)
		}
	}
	for addr, v := range vips {
		if d.vips[addr] != nil {
			continue
		}
		table := d.vipTable(addr)
		if err := c.try(fmt.Sprintf("put vip %s", addr), func() (err error) {
			v.slot, err = table.reserve(vipHash(addr))
			return err
		}, func() { table.cancel(v.slot) }); err != nil {
			return err
		}
	}

	// DIP records and bucket tables, beside those in use.
	puts := make([]staged, 0, len(delta.PutEndpoints))
	for i := range delta.PutEndpoints {
		in := &delta.PutEndpoints[i]
		v := vips[in.VIP]
		if v == nil {
			v = d.vips[in.VIP]
		}
		s, err := d.stage(c, in, v)
		if err != nil {
			return fmt.Errorf("put endpoint %s: %w", in.Endpoint, err)
		}
		puts = append(puts, s)
	}

	// From here on nothing fails. What is there appears before what leads to
	// it, and what leads somewhere goes before what is there.
	for _, s := range puts {
		r := d.endpointRecord(s.e.slot)
		storeUint64(&r.Word, s.word)
		if s.had == nil {
			storeUint64(&r.Key, s.e.key)
		} else {
			d.buckets.release(s.had.table)
			for dip, id := range s.had.dips {
				if _, stays := s.e.dips[dip]; !stays {
					d.killDIP(id)
				}
			}
		}
		d.endpoints[s.e.Endpoint.Endpoint] = s.e
	}
	for addr, v := range vips {
		d.writeVIP(v, vipUsed|v.anyFlags())
		d.vips[addr] = v
	}
	for _, addr := range delta.DeleteVIPs {
		if v := d.vips[addr]; v != nil {
			d.writeVIP(v, vipDeleted)
			d.vipTable(addr).remove(v.slot)
			delete(d.vips, addr)
		}
	}
	for _, key := range delta.DeleteEndpoints {
		e := d.endpoints[key]
		if e == nil {
			continue
		}
		r := d.endpointRecord(e.slot)
		storeUint64(&r.Key, keyDeleted)
		storeUint64(&r.Word, wordOf(block{}, 0, lb.ConsistencyHash))
		for _, id := range e.dips {
			d.killDIP(id)
		}
		d.buckets.release(e.table)
		d.endpointTable.remove(e.slot)
		delete(d.endpoints, key)
	}
	return nil
}

// stage writes an endpoint's missing DIP records and its bucket table where no
// packet looks yet.
func (d *Datapath) stage(c *change, in *Endpoint, v *vip) (staged, error) {
	s := staged{had: d.endpoints[in.Endpoint]}
	s.e = &endpoint{Endpoint: *in, dips: make(map[lb.DIP]uint32, len(in.DIPs)), known: true}
	s.e.DIPs = slices.Clone(in.DIPs)
	s.e.Buckets = slices.Clone(in.Buckets)
	if s.had != nil {
		s.e.slot, s.e.key = s.had.slot, s.had.key
	} else {
		s.e.key = endpointKey(v, in.Endpoint)
		if err := c.try("take a slot", func() (err error) {
			s.e.slot, err = d.endpointTable.reserve(spread(s.e.key))
			return err
		}, func() { d.endpointTable.cancel(s.e.slot) }); err != nil {
			return s, err
		}
	}

	ids := make([]uint32, len(in.DIPs))
	for i, dip := range in.DIPs {
		if s.had != nil {
			ids[i] = s.had.dips[dip]
		}
		if ids[i] == 0 {
			id, err := d.dipIDs.take(d)
			if err != nil {
				return s, err
			}
			ids[i] = id
			c.undo = append(c.undo, func() { d.dipIDs.giveBack(id) })
			if err := c.try(fmt.Sprintf("clear counters of %s", dip),
				func() error { return d.clearCounters(id) }, func() {}); err != nil {
				return s, err
			}
			d.writeDIP(id, s.e.slot, dip)
			c.undo = append(c.undo, func() { storeUint32(&d.dipRecords[id].Endpoint, 0) })
		}
		s.e.dips[dip] = ids[i]
	}

	if len(in.Buckets) > 0 {
		lines := max(1, uint32(len(in.Buckets)/bucketsPerLine))
		var table block
		if err := c.try("make room for buckets", func() (err error) {
			table, err = d.buckets.take(d, lines)
			return err
		}, func() { d.buckets.release(table) }); err != nil {
			return s, err
		}
		s.e.table = table
		lineOf := d.buckets.lines(table)
		for i, index := range in.Buckets {
			lineOf[i/bucketsPerLine].Dip[i%bucketsPerLine] = ids[index]
		}
	}
	s.word = wordOf(s.e.table, len(in.Buckets), in.Consistency)
	return s, nil
}

// wordOf is struct endpoint's word.
func wordOf(table block, buckets int, consistency lb.Consistency) uint64 {
	log2 := uint64(noBuckets)
	if buckets > 0 {
		log2 = uint64(bits.Len(uint(buckets)) - 1)
	}
	word := uint64(table.first) | log2<<24
	if consistency == lb.ConsistencyTable {
		word |= 1 << 32
	}
	return word
}

func (v *vip) count(key lb.Endpoint, n int) {
	v.endpoints += n
	if key.Port == 0 {
		v.any[anyIndex(key.Protocol)] += n
	}
}

func anyIndex(p lb.Protocol) int {
	if p == lb.UDP {
		return 1
	}
	return 0
}

// writeDIP fills a dead record and brings it to life by its last store.
func (d *Datapath) writeDIP(id, endpointSlot uint32, dip lb.DIP) {
	r := &d.dipRecords[id]
	*r = muxDip{
		Tunnel: addrWords(dip.Tunnel.Dst),
		Addr:   addrWords(dip.Addr),
		Port:   htons(dip.Port),
	}
	r.Overhead = 20
	if dip.Tunnel.Dst.Is6() {
		r.Outer6, r.Overhead = 1, 40
	}
	if dip.Tunnel.Encap == lb.EncapGUE {
		r.Gue = 1
		r.Overhead += 8
	}
	if dip.Addr.Is6() {
		r.Addr6 = 1
	}
	r.Slot = nextHopSlot(r.Tunnel)
	storeUint32(&r.Endpoint, endpointSlot+1)
}

// nextHopSlot is the line of the next-hop cache that a tunnel's end has.
func nextHopSlot(dst [4]uint32) uint16 {
	return uint16(addrHash(dst) % nextHopSlots)
}

func (d *Datapath) readDIP(r *muxDip) lb.DIP {
	dip := lb.DIP{Addr: wordsAddr(r.Addr, r.Addr6 == 1), Port: htons(r.Port)}
	dip.Tunnel.Dst = wordsAddr(r.Tunnel, r.Outer6 == 1)
	if r.Gue == 1 {
		dip.Tunnel.Encap = lb.EncapGUE
	}
	return dip
}

// killDIP makes connection entries of the DIP stop matching. The id is used
// again only after a sweep has found none of them.
func (d *Datapath) killDIP(id uint32) {
	storeUint32(&d.dipRecords[id].Endpoint, 0)
	d.dipIDs.retire(id)
}
