// Package encap wraps packets into the tunnels that take them from mux to host,
// and unwraps them, as WIRE.md specifies. The packet paths do the same in BPF;
// this is the model they are tested against, and the simulator's tunnel.
package encap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/quartet-lb/quartet/lb"
)

// UDP ports of tunnels.
const (
	GUEPort   = 6080
	VXLANPort = 4789
)

const (
	outerTTL    = 64
	ipv4Header  = 20
	ipv6Header  = 40
	udpHeader   = 8
	gueHeader   = 4 // variant 0; variant 1 has none
	vxlanHeader = 8
	etherHeader = 14
)

// ErrECN is the error of a packet that met congestion in its tunnel and can't
// say so; RFC 6040 section 4.2 has it dropped.
var ErrECN = errors.New("congestion experienced in the tunnel, but the inner packet is not ECN-capable")

// Overhead is how many bytes a tunnel adds to an IP packet.
func Overhead(t lb.Tunnel) int {
	n := ipv4Header
	if t.Dst.Is6() {
		n = ipv6Header
	}
	switch t.Encap {
	case lb.EncapGUE:
		n += udpHeader
	case lb.EncapVXLAN:
		n += udpHeader + vxlanHeader + etherHeader
	}
	return n
}

// Encapsulate is the IP packet in a tunnel from src, its own TTL one less. src
// has the family of dst.Dst. hash is the packet's flowhash. packet stays as it is.
//
// The errors name what can't be sent: a packet that is not a whole IP packet,
// whose TTL ends here, or that grows over 65,535 bytes; families that differ;
// VXLAN, which muxes don't send.
func Encapsulate(dst lb.Tunnel, src netip.Addr, hash uint64, packet []byte) ([]byte, error) {
	if !dst.Dst.IsValid() || dst.Dst.Is6() != src.Is6() || !src.IsValid() {
		return nil, fmt.Errorf("encapsulate %s: source %s is not of the same family", dst, src)
	}
	if dst.Encap != lb.EncapIPIP && dst.Encap != lb.EncapGUE {
		return nil, fmt.Errorf("encapsulate %s: only ipip and gue are sent", dst)
	}
	inner, err := parse(packet)
	if err != nil {
		return nil, fmt.Errorf("encapsulate %s: %w", dst, err)
	}
	if inner.end != len(packet) {
		return nil, fmt.Errorf("encapsulate %s: the packet has %d bytes, its header says %d", dst, len(packet), inner.end)
	}
	if inner.ttl() <= 1 {
		return nil, fmt.Errorf("encapsulate %s: the packet's TTL is %d", dst, inner.ttl())
	}
	length := Overhead(dst) + len(packet)
	if over := length - 0xffff; over > 0 && (dst.Dst.Is4() || over > ipv6Header) {
		return nil, fmt.Errorf("encapsulate %s: %d bytes do not fit into an IP packet", dst, length)
	}

	entropy := uint32(hash >> 32)
	next := byte(lb.IPIP)
	if inner.six {
		next = byte(lb.IPv6)
	}
	if dst.Encap == lb.EncapGUE {
		next = byte(lb.UDP)
	}
	out := make([]byte, 0, length)
	if dst.Dst.Is6() {
		out = binary.BigEndian.AppendUint32(out, 6<<28|uint32(inner.trafficClass())<<20|entropy&0xfffff)
		out = binary.BigEndian.AppendUint16(out, uint16(length-ipv6Header))
		out = append(out, next, outerTTL)
		out = append(out, src.AsSlice()...)
		out = append(out, dst.Dst.AsSlice()...)
	} else {
		var id, fragment uint16 = 0, 0x4000
		if !inner.six && packet[6]&0x40 == 0 {
			id = binary.BigEndian.Uint16(packet[4:]) ^ uint16(entropy&0xff<<8|entropy>>8&0xff)
			fragment = 0
		}
		out = append(out, 0x45, inner.trafficClass())
		out = binary.BigEndian.AppendUint16(out, uint16(length))
		out = binary.BigEndian.AppendUint16(out, id)
		out = binary.BigEndian.AppendUint16(out, fragment)
		out = append(out, outerTTL, next, 0, 0)
		out = append(out, src.AsSlice()...)
		out = append(out, dst.Dst.AsSlice()...)
		setChecksum(out)
	}
	if dst.Encap == lb.EncapGUE {
		out = binary.BigEndian.AppendUint16(out, uint16(0xc000|entropy&0x3fff))
		out = binary.BigEndian.AppendUint16(out, GUEPort)
		out = binary.BigEndian.AppendUint16(out, uint16(udpHeader+len(packet)))
		out = binary.BigEndian.AppendUint16(out, 0)
	}
	at := len(out)
	out = append(out, packet...)
	if inner.six {
		out[at+7]--
	} else {
		out[at+8]--
		addToChecksum(out[at:], uint16(packet[8])<<8, uint16(packet[8]-1)<<8)
	}
	return out, nil
}

// Decapsulate is the packet in a tunnel, the tunnel, and the mux's address. The
// inner packet is a copy whose ECN field says what happened in the tunnel.
//
// The errors say why a packet is refused: it is no tunnel's, or a header is cut
// short or contradicts itself; it is ErrECN where RFC 6040 demands a drop.
func Decapsulate(packet []byte) (inner []byte, t lb.Tunnel, src netip.Addr, err error) {
	refuse := func(err error) ([]byte, lb.Tunnel, netip.Addr, error) {
		return nil, lb.Tunnel{}, netip.Addr{}, fmt.Errorf("decapsulate: %w", err)
	}
	outer, err := parse(packet)
	if err != nil {
		return refuse(err)
	}
	t.Dst, src = outer.dst, outer.src
	payload := packet[outer.payload:outer.end]
	six := false
	switch lb.Protocol(outer.next) {
	case lb.IPIP:
	case lb.IPv6:
		six = true
	case lb.UDP:
		if payload, six, t.Encap, err = openUDP(payload, outer.fragment); err != nil {
			return refuse(err)
		}
	default:
		return refuse(fmt.Errorf("protocol %d is no tunnel's", outer.next))
	}
	if outer.fragment {
		return refuse(errors.New("the outer packet is a fragment"))
	}
	in, err := parse(payload)
	if err != nil {
		return refuse(fmt.Errorf("inner packet: %w", err))
	}
	if in.six != six {
		return refuse(errors.New("inner packet: its version is not the one that the tunnel names"))
	}
	inner = append([]byte(nil), payload[:in.end]...)
	was := in.trafficClass()
	ecn, ok := combineECN(outer.trafficClass()&3, was&3)
	if !ok {
		return refuse(ErrECN)
	}
	if in.six {
		inner[1] = inner[1]&0xcf | ecn<<4
	} else {
		inner[1] = was&0xfc | ecn
		addToChecksum(inner, uint16(was), uint16(inner[1]))
	}
	return inner, t, src, nil
}

// openUDP opens GUE and VXLAN.
func openUDP(udp []byte, fragment bool) (payload []byte, six bool, e lb.Encapsulation, err error) {
	refuse := func(format string, args ...any) ([]byte, bool, lb.Encapsulation, error) {
		return nil, false, 0, fmt.Errorf(format, args...)
	}
	if fragment {
		return refuse("the outer packet is a fragment")
	}
	if len(udp) < udpHeader {
		return refuse("UDP header cut short")
	}
	port, length := binary.BigEndian.Uint16(udp[2:]), int(binary.BigEndian.Uint16(udp[4:]))
	if port != GUEPort && port != VXLANPort {
		return refuse("UDP port %d is no tunnel's", port)
	}
	if length < udpHeader || length > len(udp) {
		return refuse("UDP length is %d of %d bytes", length, len(udp))
	}
	payload = udp[udpHeader:length]
	if port == VXLANPort {
		if len(payload) < vxlanHeader+etherHeader {
			return refuse("VXLAN header cut short")
		}
		if payload[0]&0x08 == 0 {
			return refuse("VXLAN header has no VNI")
		}
		ether := binary.BigEndian.Uint16(payload[vxlanHeader+12:])
		if ether != 0x0800 && ether != 0x86dd {
			return refuse("VXLAN carries EtherType %#04x, not IPv4 or IPv6", ether)
		}
		return payload[vxlanHeader+etherHeader:], ether == 0x86dd, lb.EncapVXLAN, nil
	}
	if len(payload) == 0 {
		return refuse("GUE packet is empty")
	}
	switch payload[0] >> 4 {
	case 4:
		return payload, false, lb.EncapGUE, nil
	case 6:
		return payload, true, lb.EncapGUE, nil
	}
	if len(payload) < gueHeader {
		return refuse("GUE header cut short")
	}
	if payload[0] != 0 || payload[2] != 0 || payload[3] != 0 {
		return refuse("GUE variant %d with C bit, header length or flags %x: only plain data is read", payload[0]>>6, payload[:gueHeader])
	}
	switch lb.Protocol(payload[1]) {
	case lb.IPIP, lb.IPv6:
		return payload[gueHeader:], lb.Protocol(payload[1]) == lb.IPv6, lb.EncapGUE, nil
	}
	return refuse("GUE carries protocol %d, not IPv4 or IPv6", payload[1])
}

// combineECN is RFC 6040 section 4.2, figure 4; false means drop.
func combineECN(outer, inner byte) (byte, bool) {
	const notECT, ect1, ect0, ce = 0, 1, 2, 3
	switch {
	case outer == ce && inner == notECT:
		return 0, false
	case outer == ce:
		return ce, true
	case outer == ect1 && inner == ect0:
		return ect1, true
	}
	return inner, true
}

// header is an IP header and its extension headers.
type header struct {
	packet   []byte
	six      bool
	src, dst netip.Addr
	next     byte // the upper layer's protocol
	fragment bool // part of a fragmented packet
	payload  int  // where the upper layer begins
	end      int  // the packet's length by its own header
}

func (h header) ttl() byte {
	if h.six {
		return h.packet[7]
	}
	return h.packet[8]
}

// trafficClass is DSCP and ECN.
func (h header) trafficClass() byte {
	if h.six {
		return h.packet[0]<<4 | h.packet[1]>>4
	}
	return h.packet[1]
}

func parse(p []byte) (header, error) {
	h := header{packet: p}
	if len(p) == 0 {
		return h, errors.New("packet is empty")
	}
	switch p[0] >> 4 {
	case 4:
		if len(p) < ipv4Header {
			return h, errors.New("IPv4 header cut short")
		}
		h.payload, h.end = int(p[0]&15)*4, int(binary.BigEndian.Uint16(p[2:]))
		if h.payload < ipv4Header || h.end < h.payload {
			return h, fmt.Errorf("IPv4 header of %d bytes in a packet of %d", h.payload, h.end)
		}
		h.next = p[9]
		h.fragment = binary.BigEndian.Uint16(p[6:])&0x3fff != 0
		h.src, _ = netip.AddrFromSlice(p[12:16])
		h.dst, _ = netip.AddrFromSlice(p[16:20])
	case 6:
		if len(p) < ipv6Header {
			return h, errors.New("IPv6 header cut short")
		}
		h.six = true
		h.payload, h.end = ipv6Header, ipv6Header+int(binary.BigEndian.Uint16(p[4:]))
		h.next = p[6]
		h.src, _ = netip.AddrFromSlice(p[8:24])
		h.dst, _ = netip.AddrFromSlice(p[24:40])
	default:
		return h, fmt.Errorf("IP version is %d", p[0]>>4)
	}
	if h.end > len(p) {
		return h, fmt.Errorf("packet of %d bytes cut short at %d", h.end, len(p))
	}
	if h.six {
		return h, h.walkExtensions()
	}
	return h, nil
}

// maxExtensions is how many extension headers the packet paths walk: one more
// makes the packet invalid, unless it says that this is a later fragment.
const maxExtensions = 6

func (h *header) walkExtensions() error {
	for range maxExtensions + 1 {
		var size int
		switch h.next {
		case 0, 43, 60: // hop-by-hop, routing, destination options
			size = 8
		case 44: // fragment
			size = 8
		case 51: // authentication
			size = 4
		default:
			return nil
		}
		if h.end-h.payload < 8 {
			return errors.New("IPv6 extension header cut short")
		}
		e := h.packet[h.payload:h.end]
		switch h.next {
		case 44:
			if offset := binary.BigEndian.Uint16(e[2:]); offset&0xfff9 != 0 {
				h.fragment = true
				if offset&0xfff8 != 0 {
					h.next, h.payload = e[0], h.payload+size
					return nil
				}
			}
		case 51:
			size = (int(e[1]) + 2) * size
		default:
			size = (int(e[1]) + 1) * size
		}
		h.next, h.payload = e[0], h.payload+size
		if h.payload > h.end {
			return errors.New("IPv6 extension header cut short")
		}
	}
	return errors.New("too many IPv6 extension headers")
}

// setChecksum fills in an IPv4 header without options.
func setChecksum(h []byte) {
	var sum uint32
	for i := 0; i < ipv4Header; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	binary.BigEndian.PutUint16(h[10:], ^fold(sum))
}

// addToChecksum puts an IPv4 header's checksum right after one of its words
// has changed (RFC 1624, equation 3).
func addToChecksum(h []byte, from, to uint16) {
	sum := uint32(^binary.BigEndian.Uint16(h[10:])) + uint32(^from) + uint32(to)
	binary.BigEndian.PutUint16(h[10:], ^fold(sum))
}

func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}
