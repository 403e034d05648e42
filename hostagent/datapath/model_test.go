package datapath

import (
	"net/netip"

	"github.com/quartet-lb/quartet/lb"
)

// model is what both programs should do, written for reading instead of speed.
type model struct {
	mss                                   uint16
	rules                                 map[ruleKey]targets
	trusted                               map[modelFlow]modelVIP
	untrusted                             map[modelFlow]modelVIP
	fragments                             map[modelFragment]netip.Addr
	meters                                map[modelMeter]Meter
	created, recreated, promoted, clamped uint64
}

type modelFlow struct {
	dip, client         netip.Addr
	dipPort, clientPort uint16
	proto               uint8
}

type modelVIP struct {
	vip  netip.Addr
	port uint16
}

type modelFragment struct {
	src, dst netip.Addr
	id       uint32
	proto    uint8 // 0 for IPv6
	outbound bool
}

type modelMeter struct {
	vip     netip.Addr
	peer    netip.Prefix
	inbound bool
}

func newModel(mss uint16) *model {
	m := &model{mss: mss, rules: map[ruleKey]targets{}}
	m.forget()
	return m
}

// forget drops all state but the rules.
func (m *model) forget() {
	m.trusted, m.untrusted = map[modelFlow]modelVIP{}, map[modelFlow]modelVIP{}
	m.fragments = map[modelFragment]netip.Addr{}
	m.meters = map[modelMeter]Meter{}
}

func (m *model) put(r Rule)  { m.rules[r.key()] = m.rules[r.key()].with(target{r.DIP, r.DIPPort}) }
func (m *model) drop(r Rule) { delete(m.rules, r.key()) }
func (m *model) ours(tunnel netip.Addr) bool {
	for k := range m.rules {
		if k.tunnel == tunnel {
			return true
		}
	}
	return false
}

// bits are the ports of a DIP that replies may come from.
func (m *model) bits(dip netip.Addr) uint64 {
	var bits uint64
	for k, ts := range m.rules {
		for _, u := range ts.uses(k) {
			if u.dip == dip && u.bit == anyPort {
				return ^uint64(0)
			} else if u.dip == dip {
				bits |= 1 << u.bit
			}
		}
	}
	return bits
}

type parsed int

const (
	ok parsed = iota
	truncated
	invalid
)

// header is what the programs know of a packet.
type header struct {
	src, dst         netip.Addr
	srcPort, dstPort uint16
	l3, l4, length   int
	id               uint32
	six              bool
	vlans            int
	proto, tos, icmp uint8
	first, later     bool
	syn, synAck      bool
}

func (h *header) end() int { return h.l3 + h.length }

func (h *header) ethernet(b []byte) (proto uint16, good bool) {
	if len(b) < 14 {
		return 0, false
	}
	proto = be.Uint16(b[12:])
	h.l3 = 14
	for range 2 {
		if proto != 0x8100 && proto != 0x88a8 {
			break
		}
		if len(b) < h.l3+4 {
			return 0, false
		}
		proto = be.Uint16(b[h.l3+2:])
		h.l3 += 4
		h.vlans++
	}
	return proto, proto == 0x0800 || proto == 0x86dd
}

func (h *header) ip(b []byte, etherType uint16) parsed {
	if etherType == 0x0800 {
		return h.ipv4(b)
	}
	return h.ipv6(b)
}

func (h *header) ipv4(b []byte) parsed {
	if len(b) < h.l3+20 {
		return truncated
	}
	p := b[h.l3:]
	size, length := int(p[0]&15)*4, int(be.Uint16(p[2:]))
	if p[0]>>4 != 4 || size < 20 || length < size {
		return invalid
	}
	h.src, h.dst = netip.AddrFrom4([4]byte(p[12:])), netip.AddrFrom4([4]byte(p[16:]))
	h.proto, h.tos, h.length = p[9], p[1], length
	if f := be.Uint16(p[6:]); f&0x3fff != 0 {
		h.id = uint32(be.Uint16(p[4:]))
		h.first, h.later = f&0x1fff == 0, f&0x1fff != 0
	}
	h.l4 = h.l3 + size
	if h.l4 > len(b) {
		return truncated
	}
	return ok
}

func (h *header) ipv6(b []byte) parsed {
	if len(b) < h.l3+40 {
		return truncated
	}
	p := b[h.l3:]
	if p[0]>>4 != 6 {
		return invalid
	}
	length := 40 + int(be.Uint16(p[4:]))
	h.six = true
	h.src, h.dst = netip.AddrFrom16([16]byte(p[8:])), netip.AddrFrom16([16]byte(p[24:]))
	h.length, h.tos = length, p[0]<<4|p[1]>>4
	next, at := p[6], h.l3+40
	for n := 0; next == 0 || next == 43 || next == 60 || next == 51 || next == 44; n++ {
		if at+8 > len(b) {
			return truncated
		}
		x := b[at:]
		size := (int(x[1]) + 1) * 8
		switch next {
		case 51:
			size = (int(x[1]) + 2) * 4
		case 44:
			size = 8
			f := be.Uint16(x[2:])
			if f&0xfff9 != 0 {
				h.id = be.Uint32(x[4:])
			}
			h.later = f&0xfff8 != 0
			h.first = h.first || !h.later && f&1 != 0
		}
		next = x[0]
		at += size
		if h.later {
			break
		}
		if n == 6 {
			return invalid
		}
	}
	h.proto, h.l4 = next, at
	if h.l4 > h.l3+length {
		return truncated
	}
	return ok
}

// holds says whether n bytes of layer 4 are there.
func (h *header) holds(b []byte, n int) bool { return h.l4+n <= len(b) && h.l4+n <= h.end() }

func (h *header) ports(b []byte) {
	h.srcPort, h.dstPort = be.Uint16(b[h.l4:]), be.Uint16(b[h.l4+2:])
}

func (h *header) tcp(b []byte) parsed {
	if !h.holds(b, 20) {
		return truncated
	}
	if b[h.l4+12]>>4 < 5 {
		return invalid
	}
	h.ports(b)
	if f := b[h.l4+13]; f&syn != 0 && f&rst == 0 {
		h.syn, h.synAck = f&ack == 0, f&ack != 0
	}
	return ok
}

func (h *header) udp(b []byte) parsed {
	if !h.holds(b, 8) {
		return truncated
	}
	h.ports(b)
	return ok
}

func (h *header) isICMP() bool { return h.six && h.proto == 58 || !h.six && h.proto == 1 }

// quote reads the packet that an ICMP error quotes.
func (h *header) quote(b []byte) (q header, p parsed) {
	if !h.holds(b, 8) {
		return q, truncated
	}
	h.icmp = b[h.l4]
	isError := h.six && h.icmp >= 1 && h.icmp <= 4 || !h.six && (h.icmp == 3 || h.icmp == 11 || h.icmp == 12)
	if !isError || h.first {
		return q, invalid
	}
	q.l3 = h.l4 + 8
	etherType := uint16(0x0800)
	if h.six {
		etherType = 0x86dd
	}
	if q.ip(b, etherType) != ok || q.later || q.proto != 6 && q.proto != 17 ||
		q.l4+8 > h.end() || q.l4+8 > len(b) {
		return q, invalid
	}
	q.ports(b)
	return q, ok
}

func exitOf(p parsed) string {
	if p == truncated {
		return "in_truncated"
	}
	return "in_invalid"
}

// isProbe says whether it is a whole echo request.
func (h *header) isProbe(b []byte) bool {
	return (h.six && h.icmp == 128 || !h.six && h.icmp == 8) && b[h.l4+1] == 0 && !h.first
}

// probeAnswer is the echo reply, on its way back to the neighbour that sent the
// tunnelled request.
func (h *header) probeAnswer(b []byte, vlans int, etherType uint16) []byte {
	reply := append([]byte{}, b[h.l3:]...)
	l4 := h.l4 - h.l3
	request, answer := uint16(h.icmp)<<8, uint16(0)
	if h.six {
		answer = 129 << 8
		copy(reply[8:], append(h.dst.AsSlice(), h.src.AsSlice()...))
		reply[7] = 64
	} else {
		copy(reply[12:], append(h.dst.AsSlice(), h.src.AsSlice()...))
		replace(reply, 10, false, []uint16{uint16(reply[8]) << 8}, []uint16{64 << 8})
		reply[8] = 64
	}
	reply[l4] = byte(answer >> 8)
	replace(reply, l4+2, false, []uint16{request}, []uint16{answer})
	head := append(append([]byte{}, b[6:12]...), b[:6]...)
	head = append(head, b[12:12+4*vlans]...)
	return append(be.AppendUint16(head, etherType), reply...)
}

// inbound is what the programs should do with a frame: the way out, and the
// bytes after it.
func (m *model) inbound(b []byte) (string, []byte) {
	var outer header
	etherType, good := outer.ethernet(b)
	if !good || outer.ip(b, etherType) != ok {
		return "in_not_tunnel", b
	}
	refuse := func(exit string) (string, []byte) {
		if !m.ours(outer.dst) {
			exit = "in_not_ours"
		}
		return exit, b
	}

	var inner header
	switch outer.proto {
	case 4, 41:
		if outer.first || outer.later {
			return refuse("in_outer_fragment")
		}
		if outer.end() > len(b) {
			return refuse("in_truncated")
		}
		inner.l3 = outer.l4
		etherType = map[uint8]uint16{4: 0x0800, 41: 0x86dd}[outer.proto]
	case 17:
		if outer.later || outer.udp(b) != ok || outer.dstPort != 6080 && outer.dstPort != 4789 {
			return "in_not_tunnel", b
		}
		if outer.first {
			return refuse("in_outer_fragment")
		}
		length := int(be.Uint16(b[outer.l4+4:]))
		if outer.end() > len(b) {
			return refuse("in_truncated")
		}
		if length < 8 {
			return refuse("in_tunnel_invalid")
		}
		if outer.l4+length > outer.end() {
			return refuse("in_truncated")
		}
		outer.length = outer.l4 + length - outer.l3
		at := outer.l4 + 8
		if outer.dstPort == 4789 {
			if len(b) < at+22 {
				return refuse("in_truncated")
			}
			etherType = be.Uint16(b[at+20:])
			if b[at]&8 == 0 || etherType != 0x0800 && etherType != 0x86dd {
				return refuse("in_tunnel_invalid")
			}
			inner.l3 = at + 22
			break
		}
		if len(b) < at+1 {
			return refuse("in_truncated")
		}
		version := b[at] >> 4
		if version != 4 && version != 6 {
			if len(b) < at+4 {
				return refuse("in_truncated")
			}
			if b[at] != 0 || b[at+2] != 0 || b[at+3] != 0 || b[at+1] != 4 && b[at+1] != 41 {
				return refuse("in_tunnel_invalid")
			}
			version = map[uint8]uint8{4: 4, 41: 6}[b[at+1]]
			at += 4
		}
		inner.l3 = at
		etherType = map[uint8]uint16{4: 0x0800, 6: 0x86dd}[version]
	default:
		return "in_not_tunnel", b
	}

	if p := inner.ip(b, etherType); p != ok {
		return refuse(exitOf(p))
	}
	if inner.end() > outer.end() {
		return refuse("in_truncated")
	}
	if inner.proto == 4 || inner.proto == 41 {
		return refuse("in_nested")
	}
	ecn, fits := modelECN(outer.tos&3, inner.tos&3)
	out := append([]byte{}, b...)
	vip := inner.dst
	exit := "in_delivered"
	var to netip.Addr

	if inner.later {
		if !m.ours(outer.dst) {
			return "in_not_ours", b
		}
		dip, known := m.fragments[inner.fragment(false)]
		if !known {
			return "in_fragment_unknown", b
		}
		if !fits {
			return "in_ecn", b
		}
		exit, to = "in_delivered_fragment", dip
	} else {
		var quoted *header
		client := modelFlow{client: inner.src, proto: inner.proto}
		var port uint16
		if inner.isICMP() {
			q, p := inner.quote(b)
			if p == truncated {
				return refuse("in_truncated")
			}
			if inner.isProbe(b) && inner.src == outer.src && vip == outer.dst {
				if !m.ours(vip) {
					return "in_not_ours", b
				}
				return "in_probe_answered", inner.probeAnswer(b, outer.vlans, etherType)
			}
			if p != ok || q.src != vip {
				return refuse("in_icmp_unsupported")
			}
			quoted = &q
			exit = "in_delivered_icmp_error"
			client = modelFlow{client: q.dst, clientPort: q.dstPort, proto: q.proto}
			port = q.srcPort
		} else {
			var p parsed
			switch inner.proto {
			case 6:
				p = inner.tcp(b)
			case 17:
				p = inner.udp(b)
			default:
				return refuse("in_protocol")
			}
			if p != ok {
				return refuse(exitOf(p))
			}
			client.clientPort, port = inner.srcPort, inner.dstPort
		}

		key := ruleKey{outer.dst, lb.Endpoint{VIP: vip, Protocol: lb.Protocol(client.proto), Port: port}}
		ts, found := m.rules[key]
		if !found {
			key.endpoint.Port = 0
			ts, found = m.rules[key]
		}
		if !found {
			if client.proto == 17 && (inner.dstPort == 6080 || inner.dstPort == 4789) {
				return refuse("in_nested")
			}
			return refuse("in_no_rule")
		}
		if !fits {
			return "in_ecn", b
		}
		t, bound := m.bind(ts, client, modelVIP{vip, port}, inner.syn, quoted != nil)
		if !bound {
			return "in_flow_conflict", b
		}
		to = t.dip
		if inner.first {
			m.fragments[inner.fragment(false)] = to
		}
		if quoted == nil {
			check := inner.l4 + 16
			if inner.proto == 17 {
				check = inner.l4 + 6
			}
			be.PutUint16(out[inner.l4+2:], t.port)
			replace(out, check, inner.proto == 17, append(words(vip), port), append(words(to), t.port))
		} else {
			end := inner.end()
			changeQuote(out, &inner, quoted, 12, 8, quoted.l4, vip, to, port, t.port, end)
			if inner.six {
				replace(out, inner.l4+2, false, words(vip), words(to))
			}
		}
	}

	// The inner IP header, then the tunnel goes.
	if inner.six {
		out[inner.l3+1] = out[inner.l3+1]&0xcf | ecn<<4
		copy(out[inner.l3+24:], to.AsSlice())
	} else {
		tos := out[inner.l3+1]
		out[inner.l3+1] = tos&0xfc | ecn
		copy(out[inner.l3+16:], to.AsSlice())
		replace(out, inner.l3+10, false, append(words(vip), uint16(tos)), append(words(to), uint16(tos&0xfc|ecn)))
	}
	head := append([]byte{}, out[:12+4*outer.vlans]...)
	head = be.AppendUint16(head, etherType)
	m.meter(vip, inner.src, true, 1, uint64(inner.length))
	return exit, append(head, out[inner.l3:]...)
}

// modelECN is RFC 6040, figure 4: rows inner, columns outer.
func modelECN(outer, inner uint8) (uint8, bool) {
	const notECT, ect1, ect0, ce = 0, 1, 2, 3
	switch {
	case inner == notECT && outer == ce:
		return 0, false
	case inner == notECT:
		return notECT, true
	case outer == ce:
		return ce, true
	case inner == ect0 && outer == ect1:
		return ect1, true
	}
	_ = ect0
	return inner, true
}

func (h *header) fragment(outbound bool) modelFragment {
	f := modelFragment{src: h.src, dst: h.dst, id: h.id, proto: h.proto, outbound: outbound}
	if h.six {
		f.proto = 0
	}
	return f
}

// bind chooses the target of a packet to a rule's targets.
func (m *model) bind(ts targets, flow modelFlow, vip modelVIP, isSYN, quoted bool) (target, bool) {
	conflict := false
	at := func(t target) (modelFlow, target) {
		f := flow
		f.dip, f.dipPort = t.dip, t.port
		if t.port == 0 {
			f.dipPort = vip.port
		}
		return f, target{t.dip, f.dipPort}
	}
	for i, t := range ts {
		if !t.dip.IsValid() {
			break
		}
		f, to := at(t)
		v, isTrusted := m.trusted[f]
		known := isTrusted
		if !isTrusted {
			v, known = m.untrusted[f]
		}
		if known && v != vip {
			known = false
			conflict = conflict || i == 0
		}
		if known {
			if !isTrusted && !isSYN && !quoted {
				delete(m.untrusted, f)
				m.trusted[f] = vip
				m.promoted++
			}
			return to, true
		}
		if isSYN {
			break
		}
	}
	f, to := at(ts[0])
	if conflict && (quoted || flow.proto == 6 && !isSYN) {
		return to, false
	}
	if quoted {
		return to, true
	}
	if conflict {
		delete(m.trusted, f)
	}
	m.untrusted[f] = vip
	if isSYN || flow.proto == 17 {
		m.created++
	} else {
		m.recreated++
	}
	return to, true
}

// outbound is what the programs should do with a frame that leaves.
func (m *model) outbound(b []byte) (string, []byte) {
	var h header
	etherType, good := h.ethernet(b)
	if !good || h.ip(b, etherType) != ok || h.end() > len(b) {
		return "out_not_ours", b
	}
	out := append([]byte{}, b...)
	if h.later {
		vip, known := m.fragments[h.fragment(true)]
		if !known || m.bits(h.src) == 0 {
			return "out_not_ours", b
		}
		m.source(out, &h, vip)
		m.meter(vip, h.dst, false, 1, uint64(len(b)-h.l3))
		return "out_fragment", out
	}

	var quoted header
	flow := modelFlow{client: h.dst, proto: h.proto}
	switch {
	case h.proto == 6 && h.tcp(b) == ok, h.proto == 17 && h.udp(b) == ok:
		flow.dip, flow.dipPort, flow.clientPort = h.src, h.srcPort, h.dstPort
	case h.isICMP():
		q, p := h.quote(b)
		if p != ok || q.src != h.dst {
			return "out_not_ours", b
		}
		quoted = q
		flow.dip, flow.dipPort, flow.clientPort, flow.proto = q.dst, q.dstPort, q.srcPort, q.proto
	default:
		return "out_not_ours", b
	}
	if m.bits(flow.dip)&(1<<portBit(lb.Protocol(flow.proto), flow.dipPort)) == 0 {
		return "out_not_ours", b
	}
	vip, known := m.trusted[flow]
	if !known {
		vip, known = m.untrusted[flow]
	}
	if !known {
		return "out_not_ours", b
	}

	exit := "out_translated"
	if h.isICMP() {
		exit = "out_icmp_error"
		changeQuote(out, &h, &quoted, 16, 24, quoted.l4+2, quoted.dst, vip.vip, quoted.dstPort, vip.port, h.end())
		if h.six {
			replace(out, h.l4+2, false, words(h.src), words(vip.vip))
		}
	} else {
		check := h.l4 + 6
		if h.proto == 6 {
			check = h.l4 + 16
			if h.syn || h.synAck {
				m.clamp(out, &h)
			}
		}
		if h.first {
			m.fragments[h.fragment(true)] = vip.vip
		}
		replace(out, check, h.proto == 17, words(h.src), words(vip.vip))
		replace(out, check, h.proto == 17, []uint16{h.srcPort}, []uint16{vip.port})
		be.PutUint16(out[h.l4:], vip.port)
	}
	m.source(out, &h, vip.vip)
	m.meter(vip.vip, h.dst, false, 1, uint64(len(b)-h.l3))
	return exit, out
}

func (m *model) source(b []byte, h *header, vip netip.Addr) {
	if h.six {
		copy(b[h.l3+8:], vip.AsSlice())
		return
	}
	replace(b, h.l3+10, false, words(h.src), words(vip))
	copy(b[h.l3+12:], vip.AsSlice())
}

// clamp lowers the MSS option to m.mss.
func (m *model) clamp(b []byte, h *header) {
	n := int(b[h.l4+12]>>4)*4 - 20
	if !h.holds(b, 20+n) {
		return
	}
	o := b[h.l4+20 : h.l4+20+n]
	for at := 0; at+4 <= n; {
		switch {
		case o[at] == 0:
			return
		case o[at] == 1:
			at++
			continue
		case o[at+1] < 2:
			return
		case o[at] != 2:
			at += int(o[at+1])
			continue
		case o[at+1] != 4 || be.Uint16(o[at+2:]) <= m.mss:
			return
		}
		from, to := be.Uint16(o[at+2:]), m.mss
		be.PutUint16(o[at+2:], to)
		if at%2 == 1 {
			from, to = from>>8|from<<8, to>>8|to<<8
		}
		replace(b, h.l4+16, false, []uint16{from}, []uint16{to})
		m.clamped++
		return
	}
}

// changeQuote changes an address and a port of a quoted packet, the quote's own
// checksums with them, and ICMP's.
func changeQuote(b []byte, h, q *header, at4, at6, portAt int, from, to netip.Addr, fromPort, toPort uint16, end int) {
	old := append(words(from), fromPort)
	changed := append(words(to), toPort)
	oldAll, newAll := append([]uint16{}, old...), append([]uint16{}, changed...)
	noted := func(check int, udp bool, from, to []uint16) {
		oldAll = append(oldAll, be.Uint16(b[check:]))
		replace(b, check, udp, from, to)
		newAll = append(newAll, be.Uint16(b[check:]))
	}
	if h.six {
		copy(b[q.l3+at6:], to.AsSlice())
	} else {
		noted(q.l3+10, false, words(from), words(to))
		copy(b[q.l3+at4:], to.AsSlice())
	}
	be.PutUint16(b[portAt:], toPort)
	check := q.l4 + 16
	if q.proto == 17 {
		check = q.l4 + 6
	}
	if check+2 <= end {
		noted(check, q.proto == 17, old, changed)
	}
	replace(b, h.l4+2, false, oldAll, newAll)
}

// words are an address's 16-bit words.
func words(a netip.Addr) []uint16 {
	var w []uint16
	for b := a.AsSlice(); len(b) > 0; b = b[2:] {
		w = append(w, be.Uint16(b))
	}
	return w
}

// replace changes a checksum for words changed beneath it (RFC 1624).
func replace(b []byte, check int, udp bool, from, to []uint16) {
	old := be.Uint16(b[check:])
	if udp && old == 0 {
		return
	}
	n := uint64(^old)
	for i := range from {
		n += uint64(^from[i]) + uint64(to[i])
	}
	sum := fold(n)
	if udp && sum == 0 {
		sum = 0xffff
	}
	be.PutUint16(b[check:], sum)
}

func (m *model) meter(vip, peer netip.Addr, inbound bool, packets, bytes uint64) {
	bits := 24
	if peer.Is6() {
		bits = 48
	}
	prefix, _ := peer.Prefix(bits)
	k := modelMeter{vip, prefix, inbound}
	x := m.meters[k]
	x.VIP, x.Peer, x.Inbound = vip, prefix, inbound
	x.Packets += packets
	x.Bytes += bytes
	m.meters[k] = x
}
