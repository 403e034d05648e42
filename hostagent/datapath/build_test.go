package datapath

import (
	"encoding/binary"
	"net/netip"
)

// Builders of packets with right checksums: what tests send, and what they
// expect, are both made of these.

var be = binary.BigEndian

func addr(s string) netip.Addr         { return netip.MustParseAddr(s) }
func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// sum adds 16-bit words; a last odd byte counts as high.
func sum(n uint64, b []byte) uint64 {
	for ; len(b) > 1; b = b[2:] {
		n += uint64(be.Uint16(b))
	}
	if len(b) == 1 {
		n += uint64(b[0]) << 8
	}
	return n
}

func fold(n uint64) uint16 {
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return ^uint16(n)
}

func pseudo(src, dst netip.Addr, proto uint8, length int) uint64 {
	return sum(sum(uint64(proto)+uint64(length), src.AsSlice()), dst.AsSlice())
}

// ip is an IP packet to be built.
type ip struct {
	src, dst netip.Addr
	proto    uint8
	tos      uint8
	ttl      uint8 // 0: 61
	df       bool
	id       uint32
	offset   int  // of a fragment, in bytes
	more     bool // fragments
	options  []byte
	// IPv6 extension headers, and the first one's number; the last's next
	// header is proto already.
	extensions []byte
	first      uint8
	payload    []byte
}

func (p ip) bytes() []byte {
	ttl := p.ttl
	if ttl == 0 {
		ttl = 61
	}
	if p.src.Is4() {
		b := make([]byte, 20, 20+len(p.options)+len(p.payload))
		b[0] = 0x40 | uint8(5+len(p.options)/4)
		b[1] = p.tos
		be.PutUint16(b[2:], uint16(20+len(p.options)+len(p.payload)))
		be.PutUint16(b[4:], uint16(p.id))
		fragment := uint16(p.offset / 8)
		if p.more {
			fragment |= 0x2000
		}
		if p.df {
			fragment |= 0x4000
		}
		be.PutUint16(b[6:], fragment)
		b[8], b[9] = ttl, p.proto
		copy(b[12:], p.src.AsSlice())
		copy(b[16:], p.dst.AsSlice())
		b = append(b, p.options...)
		be.PutUint16(b[10:], fold(sum(0, b)))
		return append(b, p.payload...)
	}
	b := make([]byte, 40)
	be.PutUint32(b, 6<<28|uint32(p.tos)<<20|0x12345)
	next := p.proto
	var extensions []byte
	if p.offset != 0 || p.more {
		next = 44
		extensions = make([]byte, 8)
		extensions[0] = p.proto
		fragment := uint16(p.offset)
		if p.more {
			fragment |= 1
		}
		be.PutUint16(extensions[2:], fragment)
		be.PutUint32(extensions[4:], p.id)
	}
	if p.extensions != nil {
		next = p.first
		extensions = append(append([]byte{}, p.extensions...), extensions...)
	}
	be.PutUint16(b[4:], uint16(len(extensions)+len(p.payload)))
	b[6], b[7] = next, ttl
	copy(b[8:], p.src.AsSlice())
	copy(b[24:], p.dst.AsSlice())
	return append(append(b, extensions...), p.payload...)
}

const (
	fin = 1 << iota
	syn
	rst
	psh
	ack
)

func tcp(src, dst netip.AddrPort, flags uint8, options, payload []byte) []byte {
	b := make([]byte, 20)
	be.PutUint16(b, src.Port())
	be.PutUint16(b[2:], dst.Port())
	be.PutUint32(b[4:], 0x01020304)
	be.PutUint32(b[8:], 0x05060708)
	b[12] = uint8(5+len(options)/4) << 4
	b[13] = flags
	be.PutUint16(b[14:], 512)
	b = append(append(b, options...), payload...)
	be.PutUint16(b[16:], fold(sum(pseudo(src.Addr(), dst.Addr(), 6, len(b)), b)))
	return b
}

func udp(src, dst netip.AddrPort, payload []byte) []byte {
	b := make([]byte, 8)
	be.PutUint16(b, src.Port())
	be.PutUint16(b[2:], dst.Port())
	be.PutUint16(b[4:], uint16(8+len(payload)))
	b = append(b, payload...)
	check := fold(sum(pseudo(src.Addr(), dst.Addr(), 17, len(b)), b))
	if check == 0 {
		check = 0xffff
	}
	be.PutUint16(b[6:], check)
	return b
}

func tcpPacket(src, dst string, flags uint8, payload string) ip {
	s, d := addrPort(src), addrPort(dst)
	return ip{src: s.Addr(), dst: d.Addr(), proto: 6, payload: tcp(s, d, flags, nil, []byte(payload))}
}

func udpPacket(src, dst string, payload string) ip {
	s, d := addrPort(src), addrPort(dst)
	return ip{src: s.Addr(), dst: d.Addr(), proto: 17, payload: udp(s, d, []byte(payload))}
}

// icmpError is an ICMP or ICMPv6 error with the quoted bytes.
func icmpError(src, dst netip.Addr, typ, code uint8, rest uint32, quoted []byte) ip {
	b := make([]byte, 8)
	b[0], b[1] = typ, code
	be.PutUint32(b[4:], rest)
	b = append(b, quoted...)
	if src.Is4() {
		be.PutUint16(b[2:], fold(sum(0, b)))
		return ip{src: src, dst: dst, proto: 1, payload: b}
	}
	be.PutUint16(b[2:], fold(sum(pseudo(src, dst, 58, len(b)), b)))
	return ip{src: src, dst: dst, proto: 58, payload: b}
}

// fragments splits a packet's payload at the given offsets, multiples of 8.
func (p ip) fragments(at ...int) []ip {
	var all []ip
	from := 0
	for _, to := range append(at, len(p.payload)) {
		f := p
		f.payload = p.payload[from:to]
		f.offset = from
		f.more = to < len(p.payload)
		all = append(all, f)
		from = to
	}
	return all
}

var macs = []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2}

// frame is an Ethernet frame around an IP packet, with VLAN tags.
func frame(packet []byte, vlans ...uint16) []byte {
	b := append([]byte{}, macs...)
	for i, v := range vlans {
		proto := uint16(0x8100)
		if i < len(vlans)-1 {
			proto = 0x88a8
		}
		b = be.AppendUint16(b, proto)
		b = be.AppendUint16(b, v)
	}
	proto := uint16(0x0800)
	if len(packet) > 0 && packet[0]>>4 == 6 {
		proto = 0x86dd
	}
	b = be.AppendUint16(b, proto)
	return append(b, packet...)
}

// Tunnels: each puts an inner packet into an outer one.

func innerProto(inner []byte) uint8 {
	if inner[0]>>4 == 6 {
		return 41
	}
	return 4
}

func ipip(src, dst netip.Addr, inner []byte) ip {
	return ip{src: src, dst: dst, proto: innerProto(inner), df: true, ttl: 64, payload: inner}
}

func overUDP(src, dst netip.Addr, port uint16, payload []byte) ip {
	b := make([]byte, 8)
	be.PutUint16(b, 0xc123)
	be.PutUint16(b[2:], port)
	be.PutUint16(b[4:], uint16(8+len(payload)))
	return ip{src: src, dst: dst, proto: 17, df: true, ttl: 64, payload: append(b, payload...)}
}

func gue1(src, dst netip.Addr, inner []byte) ip { return overUDP(src, dst, 6080, inner) }

func gue0(src, dst netip.Addr, inner []byte) ip {
	return overUDP(src, dst, 6080, append([]byte{0, innerProto(inner), 0, 0}, inner...))
}

func vxlan(src, dst netip.Addr, inner []byte) ip {
	header := []byte{0x08, 0, 0, 0, 0x12, 0x34, 0x56, 0}
	return overUDP(src, dst, 4789, append(header, frame(inner)...))
}

var tunnelFormats = map[string]func(src, dst netip.Addr, inner []byte) ip{
	"ipip": ipip, "gue1": gue1, "gue0": gue0, "vxlan": vxlan,
}
