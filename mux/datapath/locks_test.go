package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/lb"
)

// TestApplyNeedNotWaitForSweep: while Sweep waits for packets under way, a
// change is made.
func TestApplyNeedNotWaitForSweep(t *testing.T) {
	b := newBed(t)
	change := evenly(vip4, lb.TCP, 443, lb.ConsistencyTable, 256, ipip("10.1.0.3", 443))
	must(t, b.d.Apply(Delta{PutEndpoints: []Endpoint{change}}))
	before := grace
	defer func() { grace = before }()
	during := 0
	grace = func() error {
		during++
		applied := make(chan error, 1)
		change.DIPs = []lb.DIP{ipip("10.1.0.4", 443)}
		go func() { applied <- b.d.Apply(Delta{PutEndpoints: []Endpoint{change}}) }()
		select {
		case err := <-applied:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Error("the change waits for Sweep")
		}
		return before()
	}
	b.d.Sweep(Monotonic())
	if during != 1 {
		t.Fatalf("%d grace periods in a sweep", during)
	}
	// What was retired before Sweep is free, what was retired meanwhile is not.
	if free, waiting := len(b.d.dipIDs.free), len(b.d.dipIDs.waiting.fresh); free < 2 || waiting != 1 {
		t.Errorf("%d ids are free and %d wait, want two or more, and one", free, waiting)
	}
	if n := len(b.d.buckets.waiting.fresh); n != 1 {
		t.Errorf("%d bucket tables wait, want the one that was replaced meanwhile", n)
	}
}

// TestApplyNeedNotWaitForCounters: changes come and go while counters are read.
func TestApplyNeedNotWaitForCounters(t *testing.T) {
	newTestNet(t)
	c := testConfig(pinDir(t))
	c.DIPs, c.Endpoints = 1<<18, 1<<11
	d := openTest(t, c)
	tables := Tables{Seed: testSeed, VIPs: []VIP{{Addr: vip4}}}
	for i := range 2000 {
		var dips []lb.DIP
		for j := range 100 {
			dips = append(dips, ipip(netip.AddrFrom4([4]byte{10, 1, byte(i), byte(j + 1)}).String(), uint16(i+1)))
		}
		tables.Endpoints = append(tables.Endpoints, evenly(vip4, lb.TCP, uint16(i+1), lb.ConsistencyHash, 128, dips...))
	}
	must(t, d.Replace(tables))
	wait(t, "ten changes to begin and end while counters are read once", func() bool {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if n := len(must2(d.Counters())); n != 200000 {
				t.Errorf("%d counters", n)
			}
		}()
		for n := 0; ; n++ {
			select {
			case <-done:
				return n >= 10
			default:
				must(t, d.Apply(Delta{PutEndpoints: tables.Endpoints[n%2 : n%2+1]}))
			}
		}
	})
}

// TestCloseWaitsForReaders, who have the maps in hand.
func TestCloseWaitsForReaders(t *testing.T) {
	b := newBed(t)
	before := grace
	defer func() { grace = before }()
	inGrace, proceed := make(chan struct{}), make(chan struct{})
	grace = func() error {
		close(inGrace)
		<-proceed
		return nil
	}
	swept, closed := make(chan FlowTable, 1), make(chan error, 1)
	go func() { swept <- b.d.Sweep(Monotonic()) }()
	<-inGrace
	go func() { closed <- b.d.Close() }()
	wait(t, "Close to wait", func() bool {
		if b.d.inUse.TryRLock() {
			b.d.inUse.RUnlock()
			return false
		}
		return true
	})
	close(proceed)
	if got := <-swept; got.Capacity == 0 {
		t.Error("Sweep found the datapath closed")
	}
	must(t, <-closed)
	if got := b.d.Sweep(Monotonic()); got.Capacity != 0 {
		t.Errorf("Sweep after Close: %+v", got)
	}
}

// TestGraceWithoutMembarrier: kernels with nohz_full CPUs refuse membarrier.
func TestGraceWithoutMembarrier(t *testing.T) {
	before := membarrier
	defer func() { membarrier = before }()
	membarrier = func() error { return unix.EINVAL }
	must(t, grace())
	membarrier = func() error { return unix.EPERM }
	if err := grace(); !errors.Is(err, unix.EPERM) {
		t.Errorf("grace: %v", err)
	}
}

// TestNextHopSlotsOfOneRack: hosts whose addresses are neighbours have lines of
// their own in the next-hop cache.
func TestNextHopSlotsOfOneRack(t *testing.T) {
	for _, format := range []string{"10.1.3.%d", "10.%d.0.1", "10.1.%d.1", "fd01::%x", "fd01:0:0:%x::1"} {
		slots := map[uint16]int{}
		for i := range 254 {
			slots[nextHopSlot(addrWords(netip.MustParseAddr(fmt.Sprintf(format, i+1))))]++
		}
		if len(slots) < 240 {
			t.Errorf("254 hosts %s share %d lines", format, len(slots))
		}
	}
}

// TestVIPsOfOnePrefix: the mux has room for as many VIPs as it is configured
// for, though they are neighbours.
func TestVIPsOfOnePrefix(t *testing.T) {
	newTestNet(t)
	c := testConfig(pinDir(t))
	for _, prefix := range []string{"2001:db8::", "203.0.0.0", "2001:db8:1:0:5::"} {
		for _, step := range []uint32{1, 256} {
			d := openTest(t, c)
			tables := Tables{Seed: testSeed}
			first := netip.MustParseAddr(prefix).AsSlice()
			for i := range uint32(c.VIPs) {
				last := first[len(first)-4:]
				n := binary.BigEndian.Uint32(last)
				binary.BigEndian.PutUint32(last, n+step)
				addr, _ := netip.AddrFromSlice(first)
				tables.VIPs = append(tables.VIPs, VIP{Addr: addr, Name: fmt.Sprint(i)})
			}
			if err := d.Replace(tables); err != nil {
				t.Errorf("VIPs from %s by %d: %v", prefix, step, err)
			}
			far := 0
			for _, v := range d.vips {
				table := d.vipTable(v.Addr)
				if (v.slot/table.perLine-vipHash(v.Addr))&table.mask != 0 {
					far++
				}
			}
			if far > len(d.vips)/4 {
				t.Errorf("VIPs from %s by %d: %d of %d are not in the first line that is looked at", prefix, step, far, len(d.vips))
			}
			must(t, d.Detach())
		}
	}
}
