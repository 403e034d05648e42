package bench

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf/link"

	"github.com/quartet-lb/quartet/lb"
)

// inNetwork runs a test on a thread of its own, in a fresh network with a
// driver whose stub is attached to mux0.
func inNetwork(t *testing.T, test func(t *testing.T, n *network, d *driver)) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := isolate(-1); err != nil {
			t.Error(err)
			return
		}
		n, err := newNetwork()
		if err != nil {
			t.Error(err)
			return
		}
		defer n.close()
		d, err := newDriver()
		if err != nil {
			t.Errorf("%+v", err)
			return
		}
		defer d.Close()
		l, err := link.AttachXDP(link.XDPOptions{Program: d.Stub, Interface: n.mux.Attrs().Index})
		if err != nil {
			t.Error(err)
			return
		}
		defer l.Close()
		if err := n.attachSink(d.Sink); err != nil {
			t.Error(err)
			return
		}
		test(t, n, d)
	}()
	<-done
}

var kinds = []traffic{
	{dst: netip.MustParseAddrPort("203.0.113.10:80"), protocol: lb.TCP, tcpFlags: ackFlags},
	{dst: netip.MustParseAddrPort("203.0.113.10:80"), protocol: lb.TCP, tcpFlags: synFlags},
	{dst: netip.MustParseAddrPort("203.0.113.10:53"), protocol: lb.UDP},
	{dst: netip.MustParseAddrPort("[2001:db8::10]:80"), protocol: lb.TCP, tcpFlags: ackFlags},
	{dst: netip.MustParseAddrPort("[2001:db8::10]:53"), protocol: lb.UDP},
}

// Every flow of the set is presented exactly once before any comes again, in
// packets whose checksums are right.
func TestFramesAreValidAndDistinct(t *testing.T) {
	inNetwork(t, func(t *testing.T, n *network, d *driver) {
		for _, kind := range kinds {
			kind.flowBits, kind.firstFlow = 9, 1<<20
			seen := make(map[string]int)
			for range 2 << kind.flowBits {
				b, err := d.runExactly(n, kind, slotStub, 1)
				if err != nil {
					t.Fatal(err)
				}
				seen[string(flowOf(t, kind, b.last))]++
			}
			if len(seen) != 1<<kind.flowBits {
				t.Errorf("%v: %d distinct flows, want %d", kind, len(seen), 1<<kind.flowBits)
			}
			for f, times := range seen {
				if times != 2 {
					t.Fatalf("%v: flow %x came %d times, want 2", kind, f, times)
				}
			}
		}
	})
}

// flowOf checks a packet and returns its addresses and ports.
func flowOf(t *testing.T, kind traffic, p []byte) []byte {
	t.Helper()
	if len(p) != kind.frame() {
		t.Fatalf("%d bytes, want %d: %x", len(p), kind.frame(), p)
	}
	l4, addresses, pseudo := 34, p[26:34], uint32(0)
	if kind.dst.Addr().Is4() {
		if sum := sum16(p[14:34]); sum != 0xffff {
			t.Fatalf("IPv4 checksum is wrong: %x", p)
		}
		if got := int(binary.BigEndian.Uint16(p[16:])); got != kind.frame()-14 {
			t.Fatalf("IPv4 length %d: %x", got, p)
		}
	} else {
		l4, addresses = 54, p[22:54]
		if got := int(binary.BigEndian.Uint16(p[18:])); got != kind.frame()-54 {
			t.Fatalf("IPv6 length %d: %x", got, p)
		}
	}
	pseudo = uint32(sum16(addresses)) + uint32(kind.protocol) + uint32(len(p)-l4) + uint32(sum16(p[l4:]))
	if pseudo = pseudo&0xffff + pseudo>>16; pseudo&0xffff+pseudo>>16 != 0xffff {
		t.Fatalf("%v checksum is wrong: %x", kind.protocol, p)
	}
	if got := binary.BigEndian.Uint16(p[l4+2:]); got != kind.dst.Port() {
		t.Fatalf("port %d, want %d", got, kind.dst.Port())
	}
	if kind.protocol == lb.TCP && p[l4+13] != kind.tcpFlags {
		t.Fatalf("TCP flags %#x, want %#x", p[l4+13], kind.tcpFlags)
	}
	return append(append([]byte(nil), addresses...), p[l4:l4+4]...)
}

// sum16 is the ones' complement sum of RFC 1071.
func sum16(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// The driver takes off what the target put on and counts the packets that grew
// as expected, and none if growth is other than expected.
func TestGrowthIsCounted(t *testing.T) {
	inNetwork(t, func(t *testing.T, n *network, d *driver) {
		for _, kind := range kinds {
			for _, growth := range []uint32{0, 20, 40, 48} {
				kind.flowBits, kind.growth = 4, growth
				b, err := d.run(n, kind, slotStubGrow, 3000)
				if err != nil {
					t.Fatal(err)
				}
				if b.packets < 3000 || b.grown != b.packets {
					t.Errorf("%v: %d packets of at least 3000, %d grown", kind, b.packets, b.grown)
				}
				if b.ns <= 0 {
					t.Errorf("%v: %v ns a packet", kind, b.ns)
				}
				if b, err = d.run(n, kind, slotStub, 3000); err != nil {
					t.Fatal(err)
				}
				if growth != 0 && b.grown != 0 {
					t.Errorf("%v: %d packets grown by a stub that grows none", kind, b.grown)
				}
			}
		}
	})
}
