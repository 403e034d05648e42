package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"github.com/quartet-lb/quartet/lb"
)

// What mux.bpf.c has of the tables of VIPs and endpoints.
const (
	probeLines     = 8
	probeLinesVIP6 = 16
	vips4PerLine   = 8
	vips6PerLine   = 2
	endpointsLine  = 4

	vipUsed    = 1 << 0
	vipDeleted = 1 << 1
	vipAnyTCP  = 1 << 2
	vipAnyUDP  = 1 << 3

	keyVIP6          = 1 << 31
	keyPortShift     = 32
	keyProtocolShift = 48
	keyUsed          = 1 << 56
	keyDeleted       = 1 << 57
)

type slotState uint8

const (
	slotEmpty slotState = iota
	slotUsed
	slotDeleted // and no packet is left that has seen it used
	slotDying   // deleted since the last grace period
)

// slotTable knows which slots of an open-addressed table are taken. The tables
// have four times the slots that the configuration asks for: then a key finds
// none free among its lines once in 10^9 insertions.
type slotTable struct {
	what    string
	perLine uint32
	probe   uint32
	mask    uint32 // of line numbers
	state   []slotState
	used    int
	max     int
	dying   waiting[uint32]
}

func newSlotTable(what string, max int, perLine, probe uint32) slotTable {
	// Of few lines the verifier would follow each apart.
	lines := uint32(256)
	for int(lines*perLine) < max*4 {
		lines *= 2
	}
	return slotTable{
		what: what, max: max, perLine: perLine, probe: probe, mask: lines - 1,
		state: make([]slotState, lines*perLine),
	}
}

// reserve takes the slot that a key is to have.
func (t *slotTable) reserve(hash uint32) (uint32, error) {
	if t.used == t.max {
		return 0, fmt.Errorf("the mux is full: %d %s", t.max, t.what)
	}
	for _, want := range []slotState{slotDeleted, slotEmpty, slotDying} {
		for i := range t.probe {
			first := (hash + i) & t.mask * t.perLine
			for slot := first; slot < first+t.perLine; slot++ {
				if t.state[slot] != want {
					continue
				}
				if want == slotDying {
					if err := t.settle(); err != nil {
						return 0, err
					}
				}
				// A look-up ends at the first empty slot, so nothing
				// before this one may be: slots are tried in order.
				t.state[slot] = slotUsed
				t.used++
				return slot, nil
			}
		}
	}
	return 0, fmt.Errorf("the mux is full: no slot for one more of %d %s", t.used, t.what)
}

// settle waits until no packet has a deleted slot in hand.
func (t *slotTable) settle() error {
	t.dying.collect()
	if err := grace(); err != nil {
		return err
	}
	t.settled()
	return nil
}

// settled marks what was collected: a grace period is over.
func (t *slotTable) settled() {
	for _, slot := range t.dying.take() {
		t.state[slot] = slotDeleted
	}
}

// cancel undoes reserve; nothing was written.
func (t *slotTable) cancel(slot uint32) {
	t.state[slot] = slotDeleted
	t.used--
}

func (t *slotTable) remove(slot uint32) {
	t.state[slot] = slotDying
	t.dying.add(slot)
	t.used--
}

func spread(key uint64) uint32 { return uint32(key * 0x9e3779b97f4a7c15 >> 40) }

func vipHash(addr netip.Addr) uint32 {
	w := addrWords(addr)
	if addr.Is4() {
		return spread(uint64(w[0]))
	}
	return addrHash(w)
}

func addrHash(w [4]uint32) uint32 {
	high, low := uint64(w[0])|uint64(w[1])<<32, uint64(w[2])|uint64(w[3])<<32
	key := high ^ low*0xc2b2ae3d27d4eb4f
	return spread(key ^ key>>32)
}

func endpointKey(v *vip, e lb.Endpoint) uint64 {
	key := uint64(v.slot) | uint64(htons(e.Port))<<keyPortShift | uint64(e.Protocol)<<keyProtocolShift | keyUsed
	if v.Addr.Is6() {
		key |= keyVIP6
	}
	return key
}

func (d *Datapath) vipTable(addr netip.Addr) *slotTable {
	if addr.Is4() {
		return &d.vip4Table
	}
	return &d.vip6Table
}

func (v *vip) anyFlags() uint64 {
	var flags uint64
	if v.any[0] > 0 {
		flags |= vipAnyTCP
	}
	if v.any[1] > 0 {
		flags |= vipAnyUDP
	}
	return flags
}

func (d *Datapath) writeVIP(v *vip, flags uint64) {
	w := addrWords(v.Addr)
	if v.Addr.Is4() {
		storeUint64(&d.vip4Lines[v.slot/vips4PerLine].Entry[v.slot%vips4PerLine], uint64(w[0])|flags<<32)
		return
	}
	r := &d.vip6Lines[v.slot/vips6PerLine].Entry[v.slot%vips6PerLine]
	if flags != vipDeleted {
		r.Addr = w
	}
	storeUint64(&r.Flags, flags)
}

func (d *Datapath) endpointRecord(slot uint32) *endpointRecord {
	return (*endpointRecord)(unsafe.Pointer(&d.endpointLines[slot/endpointsLine].Entry[slot%endpointsLine]))
}

// recoverSlots learns VIPs and endpoints from adopted tables. It returns the
// endpoints by slot.
func (d *Datapath) recoverSlots() map[uint32]*endpoint {
	vips := map[uint64]*vip{} // by slot and family, as in an endpoint's key
	add := func(addr netip.Addr, slot uint32, flags uint64) {
		t := d.vipTable(addr)
		switch {
		case flags&vipUsed != 0:
			v := &vip{VIP: VIP{Addr: addr}, slot: slot}
			d.vips[addr] = v
			vips[endpointKey(v, lb.Endpoint{})&^keyUsed] = v
			t.state[slot] = slotUsed
			t.used++
		case flags != 0:
			t.remove(slot)
			t.used++
		}
	}
	for i := range d.vip4Lines {
		for j, e := range d.vip4Lines[i].Entry {
			var b [4]byte
			binary.NativeEndian.PutUint32(b[:], uint32(e))
			add(netip.AddrFrom4(b), uint32(i*vips4PerLine+j), e>>32)
		}
	}
	for i := range d.vip6Lines {
		for j, e := range d.vip6Lines[i].Entry {
			add(wordsAddr(e.Addr, true), uint32(i*vips6PerLine+j), e.Flags)
		}
	}
	bySlot := map[uint32]*endpoint{}
	for i := range d.endpointLines {
		for j := range d.endpointLines[i].Entry {
			slot := uint32(i*endpointsLine + j)
			r := d.endpointRecord(slot)
			if r.Key == 0 {
				continue
			}
			v := vips[r.Key&0xffffffff]
			if r.Key&keyUsed == 0 || v == nil {
				// Deleted, or its VIP was, by a process that then ended.
				storeUint64(&r.Key, keyDeleted)
				d.endpointTable.remove(slot)
				d.endpointTable.used++
				continue
			}
			e := &endpoint{slot: slot, key: r.Key, dips: map[lb.DIP]uint32{}}
			e.Endpoint.Endpoint = lb.Endpoint{
				VIP:      v.Addr,
				Protocol: lb.Protocol(r.Key >> keyProtocolShift),
				Port:     htons(uint16(r.Key >> keyPortShift)),
			}
			if log2 := r.Word >> 24 & 0xff; log2 != noBuckets {
				e.table = block{first: uint32(r.Word & 0xffffff), size: max(1, uint32(1)<<log2/bucketsPerLine)}
			}
			if r.Word>>32&1 == 1 {
				e.Consistency = lb.ConsistencyTable
			}
			v.count(e.Endpoint.Endpoint, 1)
			d.endpoints[e.Endpoint.Endpoint] = e
			d.endpointTable.state[slot] = slotUsed
			d.endpointTable.used++
			bySlot[slot] = e
		}
	}
	return bySlot
}
