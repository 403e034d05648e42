package datapath

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/quartet-lb/quartet/lb"
)

// bed is a loaded datapath with its twin, both with the tables of testTables.
type bed struct {
	*testNet
	d *Datapath
	m *model
}

func gue(addr string, port uint16, tunnel string) lb.DIP {
	return lb.DIP{
		Addr: netip.MustParseAddr(addr), Port: port,
		Tunnel: lb.Tunnel{Dst: netip.MustParseAddr(tunnel), Encap: lb.EncapGUE},
	}
}

// testTables has one endpoint for each way that a packet can go.
func testTables() Tables {
	over6 := ipip("10.1.0.9", 80)
	over6.Tunnel.Dst = netip.MustParseAddr("fd01::9")
	over4 := ipip("fd01::8", 80)
	over4.Tunnel.Dst = netip.MustParseAddr("10.1.0.8")
	return Tables{
		Seed: testSeed,
		VIPs: []VIP{{Addr: vip4, Name: "web", Tenant: "shop"}, {Addr: vip6, Name: "web", Tenant: "shop"},
			{Addr: anyVIP, Name: "any", Tenant: "shop"}},
		Endpoints: []Endpoint{
			evenly(vip4, lb.TCP, 80, lb.ConsistencyHash, 256, ipip("10.1.0.1", 80), ipip("10.1.0.2", 80), ipip("10.1.0.3", 80)),
			evenly(vip4, lb.TCP, 443, lb.ConsistencyTable, 256, ipip("10.1.0.1", 443), ipip("10.1.0.2", 443)),
			evenly(vip4, lb.UDP, 53, lb.ConsistencyTable, 16, ipip("10.1.0.1", 53), ipip("10.1.0.2", 53)),
			evenly(vip4, lb.TCP, 1, lb.ConsistencyHash, 1, gue("10.1.0.1", 80, "10.1.0.1")),
			evenly(vip4, lb.TCP, 2, lb.ConsistencyHash, 1, over6),
			evenly(vip4, lb.TCP, 3, lb.ConsistencyHash, 1, gue("10.1.0.9", 80, "fd01::9")),
			evenly(vip4, lb.TCP, 4, lb.ConsistencyHash, 2, ipip("10.2.0.1", 80)),
			evenly(vip4, lb.TCP, 5, lb.ConsistencyHash, 2, ipip("10.3.0.1", 80)),
			evenly(vip4, lb.TCP, 6, lb.ConsistencyHash, 2, ipip("10.7.0.1", 80)),
			evenly(vip4, lb.TCP, 7, lb.ConsistencyHash, 2, ipip("10.99.0.1", 80)),
			evenly(vip4, lb.TCP, 8, lb.ConsistencyHash, 2, ipip("10.0.0.77", 80)),
			evenly(vip4, lb.TCP, 10, lb.ConsistencyHash, 2, ipip("10.4.0.1", 80)),
			evenly(vip4, lb.UDP, 10, lb.ConsistencyHash, 2, gue("10.4.0.1", 80, "10.4.0.1")),
			{Endpoint: lb.Endpoint{VIP: vip4, Protocol: lb.TCP, Port: 9}, VIPName: "web", Name: "nobody"},
			evenly(anyVIP, lb.UDP, 0, lb.ConsistencyHash, 256, ipip("10.1.0.1", 0), ipip("10.1.0.2", 0)),
			evenly(anyVIP, lb.UDP, 53, lb.ConsistencyHash, 256, ipip("10.1.0.3", 0)),
			evenly(vip6, lb.TCP, 80, lb.ConsistencyTable, 256, ipip("fd01::1", 80), ipip("fd01::2", 80)),
			evenly(vip6, lb.UDP, 53, lb.ConsistencyHash, 256, over4),
			evenly(vip6, lb.TCP, 10, lb.ConsistencyTable, 2, gue("fd01::7", 80, "10.4.0.1")),
			evenly(vip6, lb.TCP, 1, lb.ConsistencyHash, 1, gue("fd01::9", 80, "fd01::9")),
		},
	}
}

var anyVIP = netip.MustParseAddr("203.0.113.11")

func newBed(t testing.TB) *bed {
	t.Helper()
	b := &bed{testNet: newTestNet(t)}
	c := testConfig(pinDir(t))
	c.AnswersPerSecond = 1e9
	c.DIPs = 64
	b.d = openTest(t, c)
	b.d.settings.FragmentLifetime = uint64(time.Hour) // the twin has no clock
	must(t, b.d.Replace(testTables()))
	// No VLAN interfaces in the smallest kernels: up3 plays one on top of up0.
	must(t, b.d.maps.VlanLinks.Put(uint32(b.index("up3")), muxVlanLink{Ifindex: uint32(b.index("up0")), Vlan: htons(7)}))
	way := func(prefix, link string) modelWay {
		attrs := b.links[link].Attrs()
		return modelWay{
			prefix: netip.MustParsePrefix(prefix), ifindex: attrs.Index, mtu: attrs.MTU,
			macs: append([]byte(gatewayMAC), attrs.HardwareAddr...),
		}
	}
	vlan := way("10.7.0.0/16", "up3")
	vlan.ifindex, vlan.vlan = b.index("up0"), 7
	b.m = newModel(testTables(), b.d, b.index("up0"), []modelWay{
		way("10.1.0.0/16", "up0"), way("fd01::/64", "up0"), way("10.2.0.0/16", "up1"), way("10.3.0.0/16", "up2"), way("10.4.0.0/16", "up4"), vlan,
		{prefix: netip.MustParsePrefix("10.0.0.77/32"), exit: "no_neighbour"},
	})
	return b
}

// check runs a frame through program and twin and returns the program's result.
func (b *bed) check(t testing.TB, frame []byte) result {
	t.Helper()
	b.enter(t)
	want := b.m.run(frame)
	got := runReal(t, b.d, frame, b.index("up0"))
	if diff := got.diff(want); diff != "" {
		t.Fatalf("%s\npacket in %.160x", diff, frame)
	}
	return got
}

// opt changes a packet in the making.
type opt func(*spec)

type spec struct {
	src, dst         netip.Addr
	protocol         layers.IPProtocol
	srcPort, dstPort uint16
	syn, ack, df     bool
	ttl              uint8
	tos              uint8
	payload          int
	options          int // 32-bit words of IPv4 options
	offset           uint16
	more             bool
	id               uint32
	tags             []uint16
	extensions       []uint8
	raw              []byte // instead of a layer 4 header
}

func to(addr netip.Addr, port uint16) opt {
	return func(s *spec) { s.dst, s.dstPort = addr, port }
}
func with6() opt { return func(s *spec) { s.src, s.dst = client6, vip6 } }
func udp() opt   { return func(s *spec) { s.protocol = layers.IPProtocolUDP } }

// packet builds a frame: TCP ACK from a client to the VIP's port 80 unless told otherwise.
func packet(opts ...opt) []byte {
	s := spec{src: client4, dst: vip4, protocol: layers.IPProtocolTCP, srcPort: 40000, dstPort: 80, ack: true, df: true, ttl: 62}
	for _, o := range opts {
		o(&s)
	}
	if s.dst.Is6() && s.src.Is4() {
		s.src = client6
	}
	var l4 []byte
	be := binary.BigEndian
	switch {
	case s.raw != nil:
		l4 = s.raw
	case s.protocol == layers.IPProtocolTCP:
		flags := byte(0)
		if s.syn {
			flags |= 2
		}
		if s.ack {
			flags |= 16
		}
		l4 = be.AppendUint16(be.AppendUint16(nil, s.srcPort), s.dstPort)
		l4 = append(l4, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 4, 0, 0, 0, 0, 0)
	default:
		l4 = be.AppendUint16(be.AppendUint16(nil, s.srcPort), s.dstPort)
		l4 = be.AppendUint16(l4, uint16(8+s.payload))
		l4 = append(l4, 0, 0)
	}
	l4 = append(l4, make([]byte, s.payload)...)
	frame := []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2}
	for _, tag := range s.tags {
		frame = be.AppendUint16(be.AppendUint16(frame, 0x8100), tag)
	}
	if s.src.Is4() {
		frame = be.AppendUint16(frame, 0x0800)
		h := []byte{0x45 + byte(s.options), s.tos}
		h = be.AppendUint16(h, uint16(20+4*s.options+len(l4)))
		h = be.AppendUint16(h, uint16(s.id))
		fragment := s.offset / 8
		if s.df {
			fragment |= 0x4000
		}
		if s.more {
			fragment |= 0x2000
		}
		h = be.AppendUint16(h, fragment)
		h = append(h, s.ttl, byte(s.protocol), 0, 0)
		h = append(h, s.src.AsSlice()...)
		h = append(h, s.dst.AsSlice()...)
		for range s.options {
			h = append(h, 1, 1, 1, 1)
		}
		be.PutUint16(h[10:], checksum(sum16(h)))
		return append(append(frame, h...), l4...)
	}
	frame = be.AppendUint16(frame, 0x86dd)
	var ext []byte
	chain := append([]uint8{}, s.extensions...)
	chain = append(chain, uint8(s.protocol))
	for i, kind := range chain[:len(chain)-1] {
		switch kind {
		case 44:
			field := s.offset
			if s.more {
				field |= 1
			}
			ext = append(ext, chain[i+1], 0)
			ext = be.AppendUint16(ext, field)
			ext = be.AppendUint32(ext, s.id)
		case 51:
			ext = append(ext, chain[i+1], 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
		default:
			ext = append(ext, chain[i+1], 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
		}
	}
	h := be.AppendUint32(nil, 6<<28|uint32(s.tos)<<20)
	h = be.AppendUint16(h, uint16(len(ext)+len(l4)))
	h = append(h, chain[0], s.ttl)
	h = append(h, s.src.AsSlice()...)
	h = append(h, s.dst.AsSlice()...)
	return append(append(append(frame, h...), ext...), l4...)
}

func icmpPacket(v6 bool, kind, code uint8, rest uint32, about []byte, opts ...opt) []byte {
	raw := []byte{kind, code, 0, 0}
	raw = binary.BigEndian.AppendUint32(raw, rest)
	raw = append(raw, about...)
	all := []opt{func(s *spec) { s.protocol = layers.IPProtocolICMPv4; s.raw = raw }}
	if v6 {
		all = append(all, with6(), func(s *spec) { s.protocol = layers.IPProtocolICMPv6 })
	} else {
		binary.BigEndian.PutUint16(raw[2:], checksum(sum16(raw)))
	}
	return packet(append(all, opts...)...)
}

// reply is the packet from VIP to client that an ICMP error quotes, cut to
// the IP header and n bytes.
func reply(vip netip.Addr, port uint16, n int, opts ...opt) []byte {
	client := client4
	if vip.Is6() {
		client = client6
	}
	f := packet(append([]opt{func(s *spec) {
		s.src, s.dst, s.srcPort, s.dstPort, s.payload = vip, client, port, 40000, 1000
	}}, opts...)...)
	header := 20
	if vip.Is6() {
		header = 40
	}
	return f[14 : 14+header+n]
}

// TestPackets runs one packet for each way out, in each form that takes it.
// The twin checks every byte and counter; this table says what is meant.
func TestPackets(t *testing.T) {
	b := newBed(t)
	size := func(n int) opt { return func(s *spec) { s.payload = n } }
	noDF := func(s *spec) { s.df = false }
	for _, c := range []struct {
		name  string
		frame []byte
		exit  string
	}{
		{"TCP", packet(), "tx"},
		{"TCP SYN", packet(func(s *spec) { s.syn, s.ack = true, false }), "tx"},
		{"TCP with options in the IP header", packet(func(s *spec) { s.options = 3 }), "tx"},
		{"TCP with DSCP and ECN", packet(func(s *spec) { s.tos = 0xbb }), "tx"},
		{"TCP without DF", packet(noDF, func(s *spec) { s.id = 77 }), "tx"},
		{"Ethernet padding", append(packet(), make([]byte, 6)...), "tx"},
		{"connection table, first packet", packet(to(vip4, 443)), "tx"},
		{"connection table, second packet", packet(to(vip4, 443)), "tx"},
		{"UDP, first packet", packet(udp(), to(vip4, 53)), "tx"},
		{"UDP, second packet", packet(udp(), to(vip4, 53)), "tx"},
		{"any port", packet(udp(), to(anyVIP, 4711)), "tx"},
		{"a port of its own beside any port", packet(udp(), to(anyVIP, 53)), "tx"},
		{"IPv6", packet(with6()), "tx"},
		{"IPv6 again", packet(with6()), "tx"},
		{"IPv6 with extension headers", packet(with6(), func(s *spec) { s.extensions = []uint8{0, 43, 60, 51} }), "tx"},
		{"IPv6 atomic fragment", packet(with6(), func(s *spec) { s.extensions = []uint8{44} }), "tx"},
		{"IPv6 in IPv4", packet(with6(), udp(), to(vip6, 53)), "tx"},
		{"IPv6 in GUE", packet(with6(), to(vip6, 1)), "tx"},
		{"IPv4 in GUE", packet(to(vip4, 1)), "tx"},
		{"IPv4 in IPv6", packet(to(vip4, 2)), "tx"},
		{"IPv4 in GUE over IPv6", packet(to(vip4, 3)), "tx"},
		{"one tag", packet(func(s *spec) { s.tags = []uint16{5} }), "tx"},
		{"two tags", packet(func(s *spec) { s.tags = []uint16{5, 6} }), "tx"},
		{"three tags", packet(func(s *spec) { s.tags = []uint16{5, 6, 7} }), "not_ip"},
		{"out by a VLAN interface", packet(to(vip4, 6)), "tx"},
		{"out by a VLAN interface, came tagged", packet(to(vip4, 6), func(s *spec) { s.tags = []uint16{5} }), "tx"},
		{"out by another interface", packet(to(vip4, 4)), "redirect"},
		{"just fits", packet(size(1480 - 40)), "tx"},
		{"one byte over the MTU", packet(size(1480 - 39)), "fragmentation_needed"},
		{"one byte over the MTU, tagged", packet(size(1480-39), func(s *spec) { s.tags = []uint16{5, 6} }), "fragmentation_needed"},
		{"one byte over the MTU, no DF", packet(size(1480-39), noDF), "oversize"},
		{"just fits in GUE", packet(size(1472-40), to(vip4, 1)), "tx"},
		{"one byte over in GUE", packet(size(1472-39), to(vip4, 1)), "fragmentation_needed"},
		{"over a narrow way's MTU", packet(size(1280-20-39), to(vip4, 5)), "fragmentation_needed"},
		{"fits a narrow way", packet(size(1280-20-40), to(vip4, 5)), "redirect"},
		{"4000 bytes", packet(size(4000-40), to(vip4, 10)), "redirect"},
		{"8900 bytes", packet(size(8900-40), to(vip4, 10)), "redirect"},
		{"8900 bytes, no DF, tagged", packet(size(8900-40), noDF, to(vip4, 10), func(s *spec) { s.tags = []uint16{5} }), "redirect"},
		{"4000 bytes of UDP in GUE", packet(size(4000-28), udp(), to(vip4, 10)), "redirect"},
		{"8900 bytes of IPv6 in GUE", packet(size(8900-60), to(vip6, 10)), "redirect"},
		{"just fits a wide way", packet(size(9000-20-40), to(vip4, 10)), "redirect"},
		{"one byte over a wide way's MTU", packet(size(9000-20-39), to(vip4, 10)), "fragmentation_needed"},
		{"one byte over a wide way's MTU, no DF", packet(size(9000-20-39), noDF, to(vip4, 10)), "oversize"},
		{"8900 bytes to a DIP behind 1500", packet(size(8900 - 40)), "fragmentation_needed"},
		{"8900 bytes to a DIP behind 1500, IPv6", packet(with6(), size(8900-60)), "fragmentation_needed"},
		{"8900 bytes, TTL 1", packet(size(8900-40), func(s *spec) { s.ttl = 1 }), "time_exceeded"},
		{"8900 bytes of echo request", icmpPacket(false, 8, 0, 1, make([]byte, 8900-28)), "echo_reply"},
		{"8900 bytes, not a VIP", packet(size(8900-40), to(client4, 80)), "no_vip"},
		{"4000 bytes, the last cut", packet(size(4000-40), to(vip4, 10))[:14+3999], "truncated"},
		{"8900 bytes, the last page cut", packet(size(8900-40), to(vip4, 10))[:8192], "truncated"},
		{"8900 bytes of IPv6, the last cut", packet(size(8900-60), to(vip6, 10))[:14+8899], "truncated"},
		{"8900 bytes and a trailer", append(packet(size(8900-40), to(vip4, 10)), make([]byte, 64)...), "redirect"},
		{"IPv6 just fits", packet(with6(), size(1460-60)), "tx"},
		{"IPv6 over the MTU", packet(with6(), size(1460-59)), "fragmentation_needed"},
		{"over the MTU from a multicast source", packet(size(1480-39), func(s *spec) { s.src = netip.MustParseAddr("224.0.0.1") }), "answer_forbidden"},
		{"TTL 1", packet(func(s *spec) { s.ttl = 1 }), "time_exceeded"},
		{"TTL 0", packet(udp(), to(vip4, 53), func(s *spec) { s.ttl = 0 }), "time_exceeded"},
		{"hop limit 1", packet(with6(), func(s *spec) { s.ttl = 1 }), "time_exceeded"},
		{"TTL 2", packet(func(s *spec) { s.ttl = 2 }), "tx"},
		{"another port", packet(to(vip4, 81)), "no_endpoint"},
		{"another protocol on the port", packet(udp()), "no_endpoint"},
		{"any UDP port is no TCP port", packet(to(anyVIP, 4711)), "no_endpoint"},
		{"no DIP", packet(to(vip4, 9)), "no_dip"},
		{"no route to the DIP", packet(to(vip4, 7)), "no_route"},
		{"no neighbour", packet(to(vip4, 8)), "no_neighbour"},
		{"not a VIP", packet(to(client4, 80)), "no_vip"},
		{"not a VIP, IPv6", packet(to(client6, 80)), "no_vip"},
		{"the mux itself", packet(to(source4, 22)), "no_vip"},
		{"ARP", append([]byte{255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 2, 8, 6}, make([]byte, 28)...), "not_ip"},
		{"echo request", icmpPacket(false, 8, 0, 0x12340001, []byte("ping")), "echo_reply"},
		{"echo request, TTL 1", icmpPacket(false, 8, 0, 0x12340001, []byte("ping"), func(s *spec) { s.ttl = 1 }), "echo_reply"},
		{"echo request, IPv6", icmpPacket(true, 128, 0, 0x12340001, []byte("ping")), "echo_reply"},
		{"echo request, tagged", icmpPacket(false, 8, 0, 1, nil, func(s *spec) { s.tags = []uint16{5} }), "echo_reply"},
		{"echo request to the mux", icmpPacket(false, 8, 0, 1, nil, to(source4, 0)), "no_vip"},
		{"echo reply", icmpPacket(false, 0, 0, 1, nil), "unsupported_icmp"},
		{"timestamp request", icmpPacket(false, 13, 0, 1, make([]byte, 12)), "unsupported_icmp"},
		{"redirect", icmpPacket(false, 5, 0, 1, reply(vip4, 80, 8)), "unsupported_icmp"},
		{"fragmentation needed, 8 bytes quoted", icmpPacket(false, 3, 4, 1400, reply(vip4, 80, 8)), "tx"},
		{"fragmentation needed, of a tracked flow", icmpPacket(false, 3, 4, 1400, reply(vip4, 443, 8)), "tx"},
		{"time exceeded, UDP", icmpPacket(false, 11, 0, 0, reply(vip4, 53, 8, udp())), "tx"},
		{"packet too big", icmpPacket(true, 2, 0, 1400, reply(vip6, 80, 8)), "tx"},
		{"7 bytes quoted", icmpPacket(false, 3, 4, 1400, reply(vip4, 80, 7)), "truncated"},
		{"an error about another VIP's packet", icmpPacket(false, 3, 4, 1400, reply(anyVIP, 53, 8, udp())), "unrelated_icmp"},
		{"an error about no endpoint's packet", icmpPacket(false, 3, 4, 1400, reply(vip4, 81, 8)), "unrelated_icmp"},
		{"an error about an ICMP packet", icmpPacket(false, 3, 4, 1400, icmpPacket(false, 0, 0, 1, nil)[14:]), "unrelated_icmp"},
		{"an error over the MTU", icmpPacket(false, 3, 4, 1400, reply(vip4, 80, 8), size(1480)), "answer_forbidden"},
		{"an error, TTL 1", icmpPacket(false, 3, 4, 1400, reply(vip4, 80, 8), func(s *spec) { s.ttl = 1 }), "answer_forbidden"},
		{"later fragment before the first", packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.offset, s.raw = 5, 8, make([]byte, 16) }), "unknown_fragment"},
		{"first fragment", packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.more = 5, true }, size(16)), "tx"},
		{"later fragment", packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.offset, s.raw = 5, 24, make([]byte, 16) }), "tx"},
		{"later fragment of another packet", packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.offset, s.raw = 6, 24, make([]byte, 16) }), "unknown_fragment"},
		// Overlaps are the receiver's to judge, which needs all fragments of a packet.
		{"fragment that overlaps the first", packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.offset, s.raw = 5, 8, make([]byte, 24) }), "tx"},
		{"fragment that overlaps the last", packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.offset, s.raw = 5, 32, make([]byte, 16) }), "tx"},
		{"the first fragment again, with another port", packet(udp(), to(anyVIP, 4711), noDF, func(s *spec) { s.id, s.more, s.srcPort = 5, true, 40001 }, size(16)), "tx"},
		{"the first fragment of no endpoint's packet, over one's", packet(udp(), to(vip4, 54), noDF, func(s *spec) { s.id, s.more = 5, true }, size(16)), "no_endpoint"},
		{"fragment over TCP's flags", packet(noDF, func(s *spec) { s.id, s.offset, s.raw = 11, 8, make([]byte, 16) }), "unknown_fragment"},
		{"IPv6 later fragment first", packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.extensions, s.id, s.offset, s.raw = []uint8{44}, 9, 16, make([]byte, 16) }), "unknown_fragment"},
		{"IPv6 first fragment", packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.extensions, s.id, s.more = []uint8{60, 44}, 9, true }), "tx"},
		{"IPv6 later fragment", packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.extensions, s.id, s.offset, s.raw = []uint8{44}, 9, 16, make([]byte, 16) }), "tx"},
		{"IPv6 first fragment, options behind the fragment header", packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.extensions, s.id, s.more = []uint8{44, 60}, 10, true }), "tx"},
		{"IPv6 later fragment that names the options", packet(with6(), to(vip6, 53), func(s *spec) {
			s.protocol, s.extensions, s.id, s.offset, s.raw = 60, []uint8{44}, 10, 24, make([]byte, 16)
		}), "tx"},
		{"first fragment of an echo request", icmpPacket(false, 8, 0, 1, make([]byte, 16), noDF, func(s *spec) { s.more = true }), "unsupported_icmp"},
		{"IP in IP to a VIP", packet(func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, packet()[14:] }), "nested_tunnel"},
		{"IPv6 in IPv6 to a VIP", packet(with6(), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv6, packet(with6())[14:] }), "nested_tunnel"},
		{"IP in IP to the mux", packet(to(source4, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, packet()[14:] }), "tunnel_to_mux"},
		{"IPv6 in IPv6 to the mux", packet(to(source6, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv6, packet(with6())[14:] }), "tunnel_to_mux"},
		{"IP in IP in IP to the mux", packet(to(source4, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, nested(source4) }), "tunnel_to_mux"},
		{"IP in IP in IP to a VIP", packet(func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, nested(vip4) }), "nested_tunnel"},
		{"IPv6 in IPv4 in IPv6 to the mux", packet(to(source6, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, nested(source4) }), "tunnel_to_mux"},
		{"a fragment of IP in IP to the mux", packet(to(source4, 0), noDF, func(s *spec) {
			s.protocol, s.id, s.offset, s.raw = layers.IPProtocolIPv4, 12, 64, make([]byte, 40)
		}), "tunnel_to_mux"},
		{"GUE to the mux", packet(udp(), to(source4, 6080), size(40)), "tunnel_to_mux"},
		{"GRE to a VIP", packet(func(s *spec) { s.protocol, s.raw = layers.IPProtocolGRE, make([]byte, 8) }), "unsupported_protocol"},
		{"IPv4 header cut", packet()[:14+19], "truncated"},
		{"IPv4 length beyond the frame", packet()[:14+39], "truncated"},
		{"TCP header cut", packet(func(s *spec) { s.raw = make([]byte, 19) }), "truncated"},
		{"UDP header cut", packet(udp(), func(s *spec) { s.raw = make([]byte, 7) }), "truncated"},
		{"ICMP header cut", icmpPacket(false, 8, 0, 0, nil)[:0:0], ""},
		{"IPv6 header cut", packet(with6())[:14+39], "truncated"},
		{"IPv6 extension header cut", packet(with6(), func(s *spec) { s.extensions, s.raw = []uint8{0}, []byte{} })[:14+44], "truncated"},
		{"IPv6 with seven extension headers", packet(with6(), func(s *spec) { s.extensions = []uint8{60, 60, 60, 60, 60, 60, 60} }), "malformed"},
		{"IPv4 version 5", edit(packet(), 14, 0x55), "malformed"},
		{"IPv4 header of 16 bytes", edit(packet(), 14, 0x44), "malformed"},
		{"IPv4 length below the header's", edit(packet(), 17, 19), "malformed"},
		{"IPv6 version 4", edit(packet(with6()), 14, 0x40), "malformed"},
		{"TCP header of 16 bytes", edit(packet(), 14+20+12, 0x40), "malformed"},
	} {
		if c.exit == "" {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			if got := b.check(t, c.frame); got.exit != c.exit {
				t.Errorf("exit %s, want %s", got.exit, c.exit)
			}
		})
	}
	t.Run("every way out was taken", func(t *testing.T) {
		exits, err := b.d.Exits()
		must(t, err)
		elsewhere := map[string]string{
			"answer_limited":      "TestAnswersAreLimited",
			"forwarding_disabled": "TestForwardingDisabled",
			"no_headroom":         "the test run always has headroom",
			"internal":            "only a damaged table leads there",
		}
		for name, n := range exits {
			if _, other := elsewhere[name]; n == 0 && !other {
				t.Errorf("no packet of the table left by %s", name)
			}
		}
	})
}

// nested is an IP packet in IP to the address, without its Ethernet header.
func nested(address netip.Addr) []byte {
	return packet(to(address, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, packet()[14:] })[14:]
}

func edit(frame []byte, at int, b byte) []byte {
	frame[at] = b
	return frame
}

// TestEncapsulationDecodes has gopacket, not the twin, read a packet out.
func TestEncapsulationDecodes(t *testing.T) {
	b := newBed(t)
	out := b.check(t, packet(to(vip4, 1), func(s *spec) { s.tos = 0xb8 })).out
	p := gopacket.NewPacket(out, layers.LayerTypeEthernet, gopacket.Default)
	ip := p.Layers()[1].(*layers.IPv4)
	if ip.TTL != 64 || ip.TOS != 0xb8 || ip.Protocol != layers.IPProtocolUDP || ip.Flags != layers.IPv4DontFragment {
		t.Errorf("outer header %+v", ip)
	}
	if got := checksum(sum16(ip.Contents)); got != 0 {
		t.Errorf("outer checksum is off by %#x", got)
	}
	u := p.Layers()[2].(*layers.UDP)
	if u.DstPort != 6080 || u.SrcPort < 0xc000 || u.Checksum != 0 {
		t.Errorf("GUE header %+v", u)
	}
	inner := gopacket.NewPacket(u.Payload, layers.LayerTypeIPv4, gopacket.Default)
	in := inner.Layers()[0].(*layers.IPv4)
	if in.TTL != 61 || !in.DstIP.Equal(vip4.AsSlice()) {
		t.Errorf("inner header %+v", in)
	}
	if got := checksum(sum16(in.Contents)); got != 0 {
		t.Errorf("inner checksum is off by %#x", got)
	}
}

// longestFrame is the length of the longest frame that tests make: an MTU of
// 9000 and headers beyond.
const longestFrame = 9600

// mutate damages a frame a little.
func mutate(r *rand.Rand, frame []byte) []byte {
	f := append([]byte{}, frame...)
	for range 1 + r.IntN(3) {
		switch r.IntN(5) {
		case 0:
			f[r.IntN(len(f))] = byte(r.Uint32())
		case 1:
			f[r.IntN(len(f))] ^= 1 << r.IntN(8)
		case 2:
			f = f[:14+r.IntN(len(f)-13)]
		case 3: // within the headers, where it matters
			at := 12 + r.IntN(min(len(f), 80)-12)
			f[at] = []byte{0, 1, 4, 6, 17, 41, 43, 44, 51, 58, 60, 0x45, 0x46, 0x60, 0x81, 0xff}[r.IntN(16)]
		case 4:
			f = append(f, make([]byte, r.IntN(64))...)
		}
		if len(f) > longestFrame {
			f = f[:longestFrame]
		}
	}
	return f
}

// seeds are the frames that mutation begins with.
func seeds() [][]byte {
	noDF := func(s *spec) { s.df = false }
	out := [][]byte{
		packet(), packet(func(s *spec) { s.syn, s.ack = true, false }), packet(to(vip4, 443)),
		packet(to(vip4, 443), func(s *spec) { s.syn, s.ack = true, false }),
		packet(udp(), to(vip4, 53)), packet(with6()), packet(udp(), to(anyVIP, 9)),
		packet(with6(), func(s *spec) { s.extensions = []uint8{0, 43, 60, 51, 44} }),
		packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.extensions, s.id, s.more = []uint8{44}, 9, true }),
		packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.extensions, s.id, s.offset, s.raw = []uint8{44}, 9, 16, make([]byte, 16) }),
		packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.more = 5, true }),
		packet(udp(), to(vip4, 53), noDF, func(s *spec) { s.id, s.offset, s.raw = 5, 8, make([]byte, 16) }),
		packet(func(s *spec) { s.options, s.tags = 5, []uint16{9} }),
		packet(func(s *spec) { s.payload = 1450 }), packet(with6(), func(s *spec) { s.payload = 1420 }),
		icmpPacket(false, 8, 0, 0x12340001, []byte("ping!")), icmpPacket(true, 128, 0, 0x12340001, []byte("ping")),
		icmpPacket(false, 3, 4, 1400, reply(vip4, 443, 8)), icmpPacket(true, 2, 0, 1400, reply(vip6, 80, 20)),
		icmpPacket(true, 2, 0, 1400, reply(vip6, 80, 60, func(s *spec) { s.extensions = []uint8{0, 60} })),
		packet(func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, packet()[14:] }),
		packet(to(source4, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, packet()[14:] }),
		packet(udp(), to(source4, 6080), func(s *spec) { s.payload = 40 }),
		packet(func(s *spec) { s.ttl = 1 }),
		packet(to(source4, 0), func(s *spec) { s.protocol, s.raw = layers.IPProtocolIPv4, nested(source4) }),
		packet(to(vip4, 10), func(s *spec) { s.payload = 4000 }), packet(to(vip4, 10), func(s *spec) { s.payload = 8900 }),
		packet(to(vip6, 10), func(s *spec) { s.payload, s.extensions = 8000, []uint8{60, 0} }),
		packet(with6(), func(s *spec) { s.payload = 8900 }), packet(noDF, func(s *spec) { s.payload, s.ttl = 4000, 1 }),
		packet(udp(), to(vip4, 10), noDF, func(s *spec) { s.id, s.more, s.payload = 5, true, 4000 }),
		icmpPacket(false, 8, 0, 1, make([]byte, 5000)),
	}
	for port := uint16(1); port < 9; port++ {
		out = append(out, packet(to(vip4, port)), packet(to(vip4, port), noDF, func(s *spec) { s.payload = 1300 }))
	}
	return out
}

// TestMutatedPackets compares program and twin on damaged packets.
func TestMutatedPackets(t *testing.T) {
	b := newBed(t)
	r := rand.New(rand.NewPCG(1, 2))
	from := seeds()
	for i := range 30000 {
		frame := mutate(r, from[r.IntN(len(from))])
		if len(frame) < 14 {
			continue
		}
		want := b.m.run(frame)
		got := runReal(t, b.d, frame, b.index("up0"))
		if diff := got.diff(want); diff != "" {
			t.Fatalf("packet %d: %s\npacket in %.160x", i, diff, frame)
		}
	}
}

// FuzzPackets is TestMutatedPackets without an end.
func FuzzPackets(f *testing.F) {
	b := newBed(f)
	for _, s := range seeds() {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if len(frame) >= 14 && len(frame) <= longestFrame {
			b.check(t, frame)
		}
	})
}
