package encap

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/quartet-lb/quartet/lb"
)

var (
	mux4, mux6 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	dip4, dip6 = netip.MustParseAddr("10.1.3.11"), netip.MustParseAddr("fd00:1:3::b")
)

func bytesOf(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(text), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// 198.51.100.7 > 203.0.113.10 UDP 40000 > 80, four bytes, TTL 62, DSCP 46, ECN 2, id 1234, and the same over IPv6.
const (
	udp4 = "45ba0020 1234 0000 3e11 039a c6336407 cb00710a  9c400050 000c0000 61626364"
	udp6 = "6ba00000 000c 113e 20010db8000100000000000000000007 20010db8000000000000000000000010  9c400050 000c0000 61626364"
)

func checksumOK(h []byte) bool {
	var sum uint32
	for i := 0; i < int(h[0]&15)*4; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	return fold(sum) == 0xffff
}

// Bytes written by hand from WIRE.md's diagrams.
func TestWireFormat(t *testing.T) {
	const hash = 0xabcde123_00000000
	for _, c := range []struct {
		name  string
		t     lb.Tunnel
		inner string
		want  string
	}{
		{"IPv4 in IPv4", lb.Tunnel{Dst: dip4}, udp4,
			// id 1234 with 23 and e1 XORed in; DF as inside
			"45ba0034 31d5 0000 4004 XXXX 0a000001 0a01030b" +
				"45ba0020 1234 0000 3d11 049a c6336407 cb00710a  9c400050 000c0000 61626364"},
		{"IPv4 with DF in IPv4", lb.Tunnel{Dst: dip4}, strings.Replace(strings.Replace(udp4, "1234 0000", "1234 4000", 1), "039a", "c399", 1),
			"45ba0034 0000 4000 4004 XXXX 0a000001 0a01030b" +
				"45ba0020 1234 4000 3d11 c499 c6336407 cb00710a  9c400050 000c0000 61626364"},
		{"IPv6 in IPv4", lb.Tunnel{Dst: dip4}, udp6,
			"45ba0048 0000 4000 4029 XXXX 0a000001 0a01030b" + strings.Replace(udp6, "113e", "113d", 1)},
		{"IPv4 in IPv6", lb.Tunnel{Dst: dip6}, udp4,
			"6badE123 0020 0440 fd000000000000000000000000000001 fd00000100030000000000000000000b" +
				"45ba0020 1234 0000 3d11 049a c6336407 cb00710a  9c400050 000c0000 61626364"},
		{"IPv6 in IPv6", lb.Tunnel{Dst: dip6}, udp6,
			"6badE123 0034 2940 fd000000000000000000000000000001 fd00000100030000000000000000000b" +
				strings.Replace(udp6, "113e", "113d", 1)},
		{"IPv4 in GUE over IPv4", lb.Tunnel{Dst: dip4, Encap: lb.EncapGUE}, udp4,
			"45ba003c 31d5 0000 4011 XXXX 0a000001 0a01030b  e12317c0 00280000" +
				"45ba0020 1234 0000 3d11 049a c6336407 cb00710a  9c400050 000c0000 61626364"},
		{"IPv6 in GUE over IPv6", lb.Tunnel{Dst: dip6, Encap: lb.EncapGUE}, udp6,
			"6badE123 003c 1140 fd000000000000000000000000000001 fd00000100030000000000000000000b  e12317c0 003c0000" +
				strings.Replace(udp6, "113e", "113d", 1)},
	} {
		src := mux4
		if c.t.Dst.Is6() {
			src = mux6
		}
		packet := bytesOf(t, c.inner)
		if packet[0]>>4 == 4 && !checksumOK(packet) {
			t.Errorf("%s: the test's own packet has a bad checksum", c.name)
		}
		before := bytes.Clone(packet)
		got, err := Encapsulate(c.t, src, hash, packet)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !bytes.Equal(packet, before) {
			t.Errorf("%s: the packet given was changed", c.name)
		}
		want := strings.Join(strings.Fields(strings.ToLower(c.want)), "")
		text := hex.EncodeToString(got)
		if c.t.Dst.Is4() {
			if !checksumOK(got) {
				t.Errorf("%s: outer checksum is wrong", c.name)
			}
			text = text[:20] + "xxxx" + text[24:]
		}
		if text != want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, text, want)
		}
		if n := len(got) - len(packet); n != Overhead(c.t) {
			t.Errorf("%s: grew by %d bytes, Overhead says %d", c.name, n, Overhead(c.t))
		}

		inner, tunnel, from, err := Decapsulate(got)
		if err != nil || tunnel != c.t || from != src {
			t.Errorf("%s: back: %v, %v from %v", c.name, err, tunnel, from)
			continue
		}
		if !bytes.Equal(inner, got[Overhead(c.t):]) {
			t.Errorf("%s: came back as %x", c.name, inner)
		}
	}
}

func TestEncapsulateRefuses(t *testing.T) {
	good := bytesOf(t, udp4)
	change := func(i int, b byte) []byte {
		p := bytes.Clone(good)
		p[i] = b
		return p
	}
	big := make([]byte, 65530)
	copy(big, good)
	binary.BigEndian.PutUint16(big[2:], 65530)
	ipip := lb.Tunnel{Dst: dip4}
	for _, c := range []struct {
		name   string
		t      lb.Tunnel
		src    netip.Addr
		packet []byte
		want   string
	}{
		{"empty", ipip, mux4, nil, "packet is empty"},
		{"version 5", ipip, mux4, change(0, 0x55), "IP version is 5"},
		{"cut short", ipip, mux4, good[:30], "cut short at 30"},
		{"too long", ipip, mux4, append(bytes.Clone(good), 0), "has 33 bytes, its header says 32"},
		{"short header", ipip, mux4, change(0, 0x44), "header of 16 bytes"},
		{"TTL 1", ipip, mux4, change(8, 1), "TTL is 1"},
		{"TTL 0", ipip, mux4, change(8, 0), "TTL is 0"},
		{"families differ", ipip, mux6, good, "not of the same family"},
		{"no tunnel", lb.Tunnel{}, mux4, good, "not of the same family"},
		{"VXLAN", lb.Tunnel{Dst: dip4, Encap: lb.EncapVXLAN}, mux4, good, "only ipip and gue"},
		{"too big", ipip, mux4, big, "65550 bytes do not fit"},
	} {
		if _, err := Encapsulate(c.t, c.src, 0, c.packet); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want …%s…", c.name, err, c.want)
		}
	}
}

const (
	outer4GUE    = "45000000 0000 4000 4011 0000 0a000001 0a01030b"
	vxlanHeader6 = "0800000000123400 020000000001 020000000002 86dd"
)

// wrap puts an outer IPv4 and UDP header before payload.
func wrap(t testing.TB, port uint16, payload ...string) []byte {
	body := bytesOf(t, strings.Join(payload, ""))
	p := bytesOf(t, outer4GUE)
	binary.BigEndian.PutUint16(p[2:], uint16(28+len(body)))
	p = binary.BigEndian.AppendUint16(p, 50000)
	p = binary.BigEndian.AppendUint16(p, port)
	p = binary.BigEndian.AppendUint16(p, uint16(8+len(body)))
	p = binary.BigEndian.AppendUint16(p, 0)
	return append(p, body...)
}

func TestDecapsulateAccepts(t *testing.T) {
	for _, c := range []struct {
		name   string
		packet []byte
		encap  lb.Encapsulation
		want   string
	}{
		{"GUE variant 0 with IPv4", wrap(t, GUEPort, "00040000", udp4), lb.EncapGUE, udp4},
		{"GUE variant 0 with IPv6", wrap(t, GUEPort, "00290000", udp6), lb.EncapGUE, udp6},
		{"VXLAN with IPv4", wrap(t, VXLANPort, strings.Replace(vxlanHeader6, "86dd", "0800", 1), udp4), lb.EncapVXLAN, udp4},
		{"VXLAN with IPv6", wrap(t, VXLANPort, vxlanHeader6, udp6), lb.EncapVXLAN, udp6},
		{"bytes behind the inner packet", wrap(t, GUEPort, udp4, "0000"), lb.EncapGUE, udp4},
		{"Ethernet padding behind the outer packet", append(wrap(t, GUEPort, udp4), 0, 0), lb.EncapGUE, udp4},
		{"outer options", bytesOf(t, "46000038 0000 4000 4004 0000 0a000001 0a01030b 01010101"+udp4), lb.EncapIPIP, udp4},
	} {
		inner, tunnel, src, err := Decapsulate(c.packet)
		if want := (lb.Tunnel{Dst: dip4, Encap: c.encap}); err != nil || tunnel != want || src != mux4 {
			t.Errorf("%s: %v from %v: %v", c.name, tunnel, src, err)
			continue
		}
		if !bytes.Equal(inner, bytesOf(t, c.want)) {
			t.Errorf("%s: inner packet is %x", c.name, inner)
		}
	}
}

func TestDecapsulateRefuses(t *testing.T) {
	fragment := wrap(t, GUEPort, udp4)
	fragment[6] = 0x20
	for _, c := range []struct {
		name   string
		packet []byte
		want   string
	}{
		{"no tunnel", bytesOf(t, udp4), "port 80 is no tunnel's"},
		{"TCP", bytesOf(t, "45000014 0000 4000 4006 0000 0a000001 0a01030b"), "protocol 6 is no tunnel's"},
		{"outer fragment", fragment, "outer packet is a fragment"},
		{"inner cut short", wrap(t, GUEPort, udp4[:40]), "inner packet"},
		{"IPv6 announced, IPv4 there", wrap(t, GUEPort, "00290000", udp4), "not the one that the tunnel names"},
		{"GUE control message", wrap(t, GUEPort, "20040000", udp4), "only plain data"},
		{"GUE optional field", wrap(t, GUEPort, "01040000 00000000", udp4), "only plain data"},
		{"GUE flags", wrap(t, GUEPort, "00040001", udp4), "only plain data"},
		{"GUE variant 2", wrap(t, GUEPort, "80040000", udp4), "variant 2"},
		{"GUE with TCP", wrap(t, GUEPort, "00060000", udp4), "carries protocol 6"},
		{"GUE empty", wrap(t, GUEPort), "empty"},
		{"GUE of two bytes", wrap(t, GUEPort, "0004"), "cut short"},
		{"VXLAN without VNI", wrap(t, VXLANPort, "00"+vxlanHeader6[2:], udp6), "no VNI"},
		{"VXLAN with ARP", wrap(t, VXLANPort, strings.Replace(vxlanHeader6, "86dd", "0806", 1), udp4), "EtherType 0x0806"},
		{"VXLAN cut short", wrap(t, VXLANPort, "08000000"), "cut short"},
	} {
		if _, _, _, err := Decapsulate(c.packet); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want …%s…", c.name, err, c.want)
		}
	}
}

// As many IPv6 extension headers as the packet paths walk are read, on either
// packet, and not one more.
func TestExtensionHeaders(t *testing.T) {
	for n := range maxExtensions + 2 {
		inner := bytesOf(t, udp6)
		if n > 0 {
			inner[5] += byte(8 * n)
			inner[6] = 60
			inner = slices.Insert(inner, 40, bytesOf(t, strings.Repeat("3c00010400000000", n-1)+"1100010400000000")...)
		}
		out, _, _, err := Decapsulate(wrap(t, GUEPort, hex.EncodeToString(inner)))
		if n > maxExtensions {
			if err == nil || !strings.Contains(err.Error(), "too many IPv6 extension headers") {
				t.Errorf("%d extension headers: %v", n, err)
			}
		} else if err != nil || !bytes.Equal(out, inner) {
			t.Errorf("%d extension headers: %x, %v", n, out, err)
		}
	}
}

// RFC 6040, figure 4; rows are the inner codepoint, columns the outer.
func TestECN(t *testing.T) {
	const notECT, ect1, ect0, ce, drop = 0, 1, 2, 3, 4
	want := map[int][4]int{ // by the outer codepoint, 0 to 3
		notECT: {notECT, notECT, notECT, drop},
		ect1:   {ect1, ect1, ect1, ce},
		ect0:   {ect0, ect1, ect0, ce},
		ce:     {ce, ce, ce, ce},
	}
	for _, text := range []string{udp4, udp6} {
		for inner, row := range want {
			for outer, ecn := range row {
				packet := bytesOf(t, text)
				if packet[0]>>4 == 4 {
					packet[1] = 46<<2 | byte(inner)
					packet[10], packet[11] = 0, 0
					setChecksum(packet)
				} else {
					packet[1] = packet[1]&0xcf | byte(inner)<<4
				}
				sent, err := Encapsulate(lb.Tunnel{Dst: dip4}, mux4, 0, packet)
				if err != nil {
					t.Fatal(err)
				}
				if got := sent[1]; got != 46<<2|byte(inner) {
					t.Errorf("inner DSCP 46, ECN %d has outer byte %#02x", inner, got)
				}
				sent[1] = 46<<2 | byte(outer)
				got, _, _, err := Decapsulate(sent)
				if ecn == drop {
					if !errors.Is(err, ErrECN) {
						t.Errorf("inner ECN %d, outer %d: %v, want ErrECN", inner, outer, err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				h, err := parse(got)
				if err != nil || h.trafficClass() != 46<<2|byte(ecn) {
					t.Errorf("inner ECN %d, outer %d: traffic class %#02x, %v, want ECN %d", inner, outer, h.trafficClass(), err, ecn)
				}
				if !h.six && !checksumOK(got) {
					t.Errorf("inner ECN %d, outer %d: inner checksum is wrong", inner, outer)
				}
			}
		}
	}
}

func TestOverhead(t *testing.T) {
	for _, c := range []struct {
		t    lb.Tunnel
		want int
	}{
		{lb.Tunnel{Dst: dip4, Encap: lb.EncapIPIP}, 20}, {lb.Tunnel{Dst: dip6, Encap: lb.EncapIPIP}, 40},
		{lb.Tunnel{Dst: dip4, Encap: lb.EncapGUE}, 28}, {lb.Tunnel{Dst: dip6, Encap: lb.EncapGUE}, 48},
		{lb.Tunnel{Dst: dip4, Encap: lb.EncapVXLAN}, 50}, {lb.Tunnel{Dst: dip6, Encap: lb.EncapVXLAN}, 70},
	} {
		if got := Overhead(c.t); got != c.want {
			t.Errorf("Overhead(%s) = %d, want %d", c.t, got, c.want)
		}
	}
}

// udp6 behind a hop-by-hop options header.
const hopByHop6 = "6ba00000 0014 003e 20010db8000100000000000000000007 20010db8000000000000000000000010  1100010400000000 9c400050 000c0000 61626364"

// Whatever can be sent comes back as it was, one TTL older; whatever is
// accepted is a whole packet.
func FuzzRoundTrip(f *testing.F) {
	for _, text := range []string{udp4, udp6, hopByHop6} {
		f.Add(bytesOf(f, text), uint64(0xabcde12300000000), byte(0))
		f.Add(bytesOf(f, text), uint64(1), byte(3))
	}
	f.Add(wrap(f, GUEPort, "00040000", udp4), uint64(0), byte(1))
	f.Add(wrap(f, VXLANPort, vxlanHeader6, udp6), uint64(0), byte(2))
	f.Fuzz(func(t *testing.T, packet []byte, hash uint64, kind byte) {
		if inner, _, _, err := Decapsulate(packet); err == nil {
			if h, err := parse(inner); err != nil || h.end != len(inner) {
				t.Fatalf("accepted %x: %v", inner, err)
			}
		}
		tunnel, src := lb.Tunnel{Dst: dip4, Encap: lb.Encapsulation(kind & 1)}, mux4
		if kind&2 != 0 {
			tunnel.Dst, src = dip6, mux6
		}
		sent, err := Encapsulate(tunnel, src, hash, packet)
		if err != nil {
			return
		}
		if tunnel.Dst.Is4() && !checksumOK(sent) {
			t.Fatal("outer checksum is wrong")
		}
		got, back, from, err := Decapsulate(sent)
		if err != nil || back != tunnel || from != src {
			t.Fatalf("%x came back as %s from %s: %v", packet, back, from, err)
		}
		ttl, same := 8, []int{8, 10, 11}
		if packet[0]>>4 == 6 {
			ttl, same = 7, []int{7}
		} else if checksumOK(packet) != checksumOK(got) {
			t.Fatal("inner checksum changed its validity")
		}
		if got[ttl] != packet[ttl]-1 {
			t.Fatalf("TTL %d became %d", packet[ttl], got[ttl])
		}
		for _, i := range same {
			got[i] = packet[i]
		}
		if !bytes.Equal(got, packet) {
			t.Fatalf("%x came back as %x", packet, got)
		}
	})
}
