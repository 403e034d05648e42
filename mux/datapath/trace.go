package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"github.com/cilium/ebpf"

	"github.com/quartet-lb/quartet/lb"
)

// Trace is what the packet path would do with a packet, and why.
type Trace struct {
	Exit     string // way out, as in the counters
	Verdict  string // "tx", "redirect", "pass", "drop"
	VIP      string // object's name; empty: no VIP
	Tenant   string
	Endpoint *Endpoint // nil: none
	Hash     uint64
	Buckets  int // size of the table; 0: it was not asked
	Bucket   int
	// BucketDIP is the bucket's, which the connection table may overrule.
	BucketDIP *lb.DIP
	DIP       *lb.DIP // nil: none chosen
	// ChosenBy is "bucket", "connection table", "fragment table" or
	// "quoted packet" (the flow is that of the packet in an ICMP error).
	ChosenBy   string
	Trusted    bool   // the connection entry that chose is
	MTU        int    // of the way to the tunnel's end
	PacketOut  []byte // as it leaves, from the Ethernet header on
	Interface  string // that it leaves by
	NextHopMAC net.HardwareAddr
}

// Trace runs the packet path on a frame as if it came in by the interface. It
// changes no table and counts nothing.
func (d *Datapath) Trace(frame []byte, ifindex int) (Trace, error) {
	d.inUse.RLock()
	defer d.inUse.RUnlock()
	d.tracing.Lock()
	defer d.tracing.Unlock()
	t, err := d.runTrace(frame, ifindex)
	if err != nil {
		return t, fmt.Errorf("trace packet: %w", err)
	}
	return t, nil
}

func (d *Datapath) runTrace(frame []byte, ifindex int) (Trace, error) {
	if d.isClosed() {
		return Trace{}, errors.New("the datapath is closed")
	}
	if len(frame) < 14 {
		return Trace{}, fmt.Errorf("a frame of %d bytes; at least an Ethernet header", len(frame))
	}
	if err := d.loadTrace(); err != nil {
		return Trace{}, err
	}
	d.traces[0] = muxTrace{}
	out := make([]byte, len(frame)+256)
	opts := ebpf.RunOptions{
		Data:    frame,
		DataOut: out,
		Context: xdpContext(len(frame), ifindex),
	}
	code, err := d.trace.Run(&opts)
	if err != nil {
		return Trace{}, err
	}
	r := d.traces[0]
	d.mu.Lock()
	defer d.mu.Unlock()
	t := Trace{
		Exit:      d.exitNames[r.Exit],
		Verdict:   verdictNames[code],
		Hash:      r.Hash,
		Buckets:   int(r.Buckets),
		Bucket:    int(r.Bucket),
		BucketDIP: d.dipByID(r.BucketDip),
		DIP:       d.dipByID(r.Dip),
		Trusted:   r.Trusted == 1,
		MTU:       int(r.Mtu),
		PacketOut: opts.DataOut,
	}
	switch muxChosenBy(r.ChosenBy) {
	case muxChosenByCHOSEN_BY_BUCKET:
		t.ChosenBy = "bucket"
	case muxChosenByCHOSEN_BY_CONNECTION_TABLE:
		t.ChosenBy = "connection table"
	case muxChosenByCHOSEN_BY_FRAGMENT_TABLE:
		t.ChosenBy = "fragment table"
	}
	if r.Quoted == 1 && t.ChosenBy != "" {
		t.ChosenBy = "quoted packet"
	}
	for _, v := range d.vips {
		if r.Vip != 0 && v.slot == r.Vip-1 && v.Addr.Is6() == (etherType(frame) == 0x86dd) {
			t.VIP, t.Tenant = v.Name, v.Tenant
		}
	}
	for _, e := range d.endpoints {
		if r.Endpoint != 0 && e.slot == r.Endpoint-1 {
			found := e.Endpoint
			t.Endpoint = &found
		}
	}
	if t.Verdict == "tx" || t.Verdict == "redirect" {
		out := ifindex
		if r.Ifindex != 0 {
			out = int(r.Ifindex)
		}
		t.Interface = d.hops.interfaceName(out)
		t.NextHopMAC = net.HardwareAddr(t.PacketOut[:6])
	}
	return t, nil
}

var verdictNames = map[uint32]string{0: "aborted", 1: "drop", 2: "pass", 3: "tx", 4: "redirect"}

func (d *Datapath) dipByID(id uint32) *lb.DIP {
	if id == 0 || int(id) >= len(d.dipRecords) {
		return nil
	}
	dip := d.readDIP(&d.dipRecords[id])
	return &dip
}

// etherType is what follows the frame's VLAN tags.
func etherType(frame []byte) uint16 {
	for at := 12; at+2 <= len(frame); at += 4 {
		if t := binary.BigEndian.Uint16(frame[at:]); t != 0x8100 && t != 0x88a8 {
			return t
		}
	}
	return 0
}

// loadTrace loads a second instance of the program, one that explains.
func (d *Datapath) loadTrace() error {
	if d.trace != nil {
		return nil
	}
	spec := d.spec.Copy()
	if err := spec.Variables[muxVarExplain].Set(uint8(1)); err != nil {
		return err
	}
	m := &d.maps
	shared := map[string]*ebpf.Map{
		muxMapChunks: m.Chunks, muxMapConfig: m.Config, muxMapCounters: m.Counters, muxMapDips: m.Dips,
		muxMapEndpoints: m.Endpoints, muxMapFlows: m.Flows,
		muxMapFragments: m.Fragments, muxMapStats: m.Stats, muxMapTraces: m.Traces,
		muxMapVips4: m.Vips4, muxMapVips6: m.Vips6, muxMapVlanLinks: m.VlanLinks,
		muxMapWantedNeighbours: m.WantedNeighbours,
	}
	for name := range shared {
		spec.Maps[name].Pinning = ebpf.PinNone
	}
	var programs muxPrograms
	if err := spec.LoadAndAssign(&programs, &ebpf.CollectionOptions{MapReplacements: shared}); err != nil {
		return err
	}
	d.trace = programs.Mux
	return nil
}

// xdpContext is struct xdp_md for a test run.
func xdpContext(length, ifindex int) []byte {
	c := make([]byte, 24)
	binary.NativeEndian.PutUint32(c[4:], uint32(length))
	binary.NativeEndian.PutUint32(c[12:], uint32(ifindex))
	return c
}
