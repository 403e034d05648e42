package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/lb"
)

// Slots of the driver's program array. Targets under measurement follow.
const (
	slotStub = iota
	slotStubGrow
	slotTarget
)

const (
	blockPackets = 1024 // packets between two time stamps
	maxBlocks    = 8191
	frame4       = 64 // bytes presented to the target, without FCS
	frame6       = 84

	synFlags = 0x02
	ackFlags = 0x10

	// Attribute of BPF_PROG_TEST_RUN: frames are really transmitted and redirected.
	testLiveFrames = 1 << 1
)

// traffic describes the packets of a batch.
type traffic struct {
	dst       netip.AddrPort // VIP and port
	protocol  lb.Protocol
	tcpFlags  uint8
	flowBits  uint8  // 2^flowBits flows
	firstFlow uint32 // number of the first of them; flows of different numbers differ
	growth    uint32 // bytes that the target must put on each packet
}

// frame is the length of each packet in bytes.
func (t traffic) frame() int {
	if t.dst.Addr().Is4() {
		return frame4
	}
	return frame6
}

// batch is what the driver saw of one test run.
type batch struct {
	packets uint64  // presented
	grown   uint64  // of these, grown by exactly traffic.growth
	ns      float64 // per packet: median over blocks of 1024 packets
	verdict uint32  // of the last packet
	last    []byte  // the last packet as the target left it
}

// driver presents packets to programs, each of which has a slot.
type driver struct {
	driverObjects
	slots int
}

func newDriver() (*driver, error) {
	d := &driver{}
	if err := loadDriverObjects(&d.driverObjects, nil); err != nil {
		return nil, fmt.Errorf("load packet driver: %w", err)
	}
	for _, p := range []*ebpf.Program{d.Stub, d.StubGrow} {
		if _, err := d.add(p); err != nil {
			_ = d.Close()
			return nil, err
		}
	}
	return d, nil
}

// add gives a program a slot.
func (d *driver) add(p *ebpf.Program) (slot int, err error) {
	slot = d.slots
	if err := d.Targets.Put(uint32(slot), p); err != nil {
		return 0, fmt.Errorf("give %s to packet driver: %w", p, err)
	}
	d.slots++
	return slot, nil
}

func (d *driver) configure(n *network, t traffic, slot int) error {
	macs := n.macs()
	c := driverDriverConfig{
		Macs:      binary.NativeEndian.Uint64(macs[0:]),
		MacsEnd:   binary.NativeEndian.Uint32(macs[8:]),
		DstPort:   swap16(t.dst.Port()),
		Protocol:  uint8(t.protocol),
		TcpFlags:  t.tcpFlags,
		Target:    uint8(slot),
		FlowBits:  t.flowBits,
		FirstFlow: t.firstFlow,
		Growth:    t.growth,
	}
	if addr := t.dst.Addr(); addr.Is4() {
		a := addr.As4()
		c.Dst4 = binary.NativeEndian.Uint32(a[:])
	} else {
		a := addr.As16()
		c.Ipv6 = 1
		c.Dst6 = [2]uint64{binary.NativeEndian.Uint64(a[:]), binary.NativeEndian.Uint64(a[8:])}
		client := netip.MustParseAddr("2001:db8:c11e::").As16()
		c.Src6Prefix = binary.NativeEndian.Uint64(client[:])
	}
	return errors.Join(d.Config.Set(c), d.Progress.Set(driverDriverProgress{}))
}

// run presents about as many packets as asked for, rounded up to whole blocks,
// to the program in slot. They seem to arrive on mux0 of n, which the thread must
// have entered and which must have an XDP program.
func (d *driver) run(n *network, t traffic, slot, packets int) (batch, error) {
	blocks := min((packets+blockPackets-1)/blockPackets, maxBlocks)
	return d.runExactly(n, t, slot, blocks*blockPackets+1)
}

func (d *driver) runExactly(n *network, t traffic, slot, packets int) (batch, error) {
	if err := d.configure(n, t, slot); err != nil {
		return batch{}, fmt.Errorf("configure packet driver: %w", err)
	}
	out := make([]byte, t.frame()+256)
	options := &ebpf.RunOptions{
		Data:    make([]byte, t.frame()),
		DataOut: out,
		Repeat:  uint32(packets),
		Context: n.context(t),
	}
	verdict, err := d.Driver.Run(options)
	if err != nil {
		return batch{}, fmt.Errorf("run packet driver: %w", err)
	}
	var p driverDriverProgress
	if err := d.Progress.Get(&p); err != nil {
		return batch{}, fmt.Errorf("read packet driver's counts: %w", err)
	}
	if p.Failed != 0 {
		return batch{}, fmt.Errorf("run packet driver: %d packets could not be presented", p.Failed)
	}
	b := batch{packets: p.Packets, grown: p.AsGrown, verdict: verdict, last: options.DataOut}
	if len(b.last) == t.frame()+int(t.growth) {
		b.grown++
	}
	b.ns, err = d.blockMedian(p.Packets)
	return b, err
}

// blockMedian is the median over the last batch's blocks of ns per packet,
// which an interrupt in some of the blocks does not touch; 0 for less than a block.
func (d *driver) blockMedian(packets uint64) (float64, error) {
	n := int((packets - 1) / blockPackets)
	if n < 1 {
		return 0, nil
	}
	stamps := make([]uint64, maxBlocks+1)
	if err := d.Stamps.Get(stamps); err != nil {
		return 0, fmt.Errorf("read packet driver's time stamps: %w", err)
	}
	// An interrupted test run starts over and so presents more blocks than asked for.
	ns := make([]float64, min(n, maxBlocks))
	for i := range ns {
		ns[i] = float64(stamps[i+1]-stamps[i]) / blockPackets
	}
	return median(ns), nil
}

// runLive presents packets as live frames: the kernel allocates each from a
// page pool and does what the verdict says. It returns the kernel's own
// run-time statistics in ns per packet.
func (d *driver) runLive(n *network, t traffic, slot, packets int) (ns float64, err error) {
	if err := d.configure(n, t, slot); err != nil {
		return 0, fmt.Errorf("configure packet driver: %w", err)
	}
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return 0, fmt.Errorf("enable run-time statistics: %w", err)
	}
	defer func() { _ = stats.Close() }()
	before, err := d.Driver.Stats()
	if err != nil {
		return 0, fmt.Errorf("read run-time statistics: %w", err)
	}
	_, err = d.Driver.Run(&ebpf.RunOptions{
		Data:    make([]byte, t.frame()),
		Repeat:  uint32(packets),
		Context: n.context(t),
		Flags:   testLiveFrames,
	})
	if err != nil {
		return 0, fmt.Errorf("run packet driver with live frames: %w", err)
	}
	after, err := d.Driver.Stats()
	if err != nil {
		return 0, fmt.Errorf("read run-time statistics: %w", err)
	}
	runs := after.RunCount - before.RunCount
	if runs == 0 {
		return 0, errors.New("run packet driver with live frames: the kernel counted no runs")
	}
	return float64(after.Runtime-before.Runtime) / float64(runs), nil
}

// xdpMd is struct xdp_md of linux/bpf.h.
type xdpMd struct {
	Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32
}

func (n *network) context(t traffic) xdpMd {
	return xdpMd{DataEnd: uint32(t.frame()), IngressIfindex: uint32(n.mux.Attrs().Index)}
}

func swap16(x uint16) uint16 { return x<<8 | x>>8 }

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	s := slices.Clone(values)
	slices.Sort(s)
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}
