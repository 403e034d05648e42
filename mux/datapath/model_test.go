package datapath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/quartet-lb/quartet/flowhash"
	"github.com/quartet-lb/quartet/lb"
)

// model is the packet path's slow twin: what mux.bpf.c should do with a frame,
// written from its description and without its tables' tricks. Time stands still
// in it: nothing expires.
type model struct {
	seed      flowhash.Seed
	vips      map[netip.Addr]bool
	endpoints map[lb.Endpoint]*Endpoint
	flows     []modelLine
	fragments map[modelFragment]modelChoice
	ways      []modelWay
	ingress   int
}

type modelWay struct {
	prefix  netip.Prefix
	ifindex int // that packets leave by
	mtu     int
	macs    []byte // next hop's, interface's
	vlan    uint16 // 0: untagged
	exit    string // instead, if there is no way
}

type modelLine [8]modelFlow

type modelFlow struct {
	used        bool
	fingerprint uint64
	endpoint    lb.Endpoint
	dip         lb.DIP
	trusted     bool
}

type modelFragment struct {
	src, dst netip.Addr
	id       uint32
	protocol uint8
}

type modelChoice struct {
	endpoint lb.Endpoint
	dip      lb.DIP
	entropy  uint32
	newFlow  bool
}

// result is everything about a packet that can be seen from outside.
type result struct {
	exit    string
	verdict uint32
	out     []byte
	counted *Counter // what the DIP's counter grew by
}

// linearBytes is how much of a frame a test run gives a program at once: a
// page less headroom and struct skb_shared_info. Headers are read there.
const linearBytes = 4096 - 256 - 320

// modelPacket is a parsed frame.
type modelPacket struct {
	frame    []byte
	linear   int // bytes of frame that headers may be in
	l3       int // offset
	l4       int
	length   int // of the IP packet
	v6       bool
	src, dst netip.Addr
	protocol uint8
	ttl, tos uint8
	df       bool
	first    bool
	later    bool
	id       uint32
}

func newModel(t Tables, d *Datapath, ingress int, ways []modelWay) *model {
	m := &model{
		seed: t.Seed, vips: map[netip.Addr]bool{}, endpoints: map[lb.Endpoint]*Endpoint{},
		flows: make([]modelLine, len(d.flowLines)), fragments: map[modelFragment]modelChoice{},
		ways: ways, ingress: ingress,
	}
	for _, v := range t.VIPs {
		m.vips[v.Addr] = true
	}
	for i := range t.Endpoints {
		m.endpoints[t.Endpoints[i].Endpoint] = &t.Endpoints[i]
	}
	return m
}

func addrAt(b []byte, at, n int) netip.Addr {
	a, _ := netip.AddrFromSlice(b[at : at+n])
	return a
}

// parse returns an exit if the frame is not an IP packet in order.
func (m *model) parse(f []byte) (p modelPacket, exit string) {
	p.frame, p.linear = f, min(len(f), linearBytes)
	be := binary.BigEndian
	if len(f) < 14 {
		return p, "truncated"
	}
	proto := be.Uint16(f[12:])
	p.l3 = 14
	for tags := 0; tags < 2 && (proto == 0x8100 || proto == 0x88a8); tags++ {
		if len(f) < p.l3+4 {
			return p, "truncated"
		}
		proto = be.Uint16(f[p.l3+2:])
		p.l3 += 4
	}
	switch proto {
	case 0x0800:
		return m.parse4(p)
	case 0x86dd:
		return m.parse6(p)
	}
	return p, "not_ip"
}

func (m *model) parse4(p modelPacket) (modelPacket, string) {
	be, f := binary.BigEndian, p.frame
	if p.linear < p.l3+20 {
		return p, "truncated"
	}
	ip := f[p.l3:]
	header := int(ip[0]&15) * 4
	p.length = int(be.Uint16(ip[2:]))
	if ip[0]>>4 != 4 || header < 20 || p.length < header {
		return p, "malformed"
	}
	p.l4 = p.l3 + header
	if len(f) < p.l3+p.length {
		return p, "truncated"
	}
	p.src, p.dst = addrAt(ip, 12, 4), addrAt(ip, 16, 4)
	p.protocol, p.ttl, p.tos = ip[9], ip[8], ip[1]
	fragment := be.Uint16(ip[6:])
	p.df = fragment&0x4000 != 0
	p.later = fragment&0x1fff != 0
	p.first = !p.later && fragment&0x2000 != 0
	p.id = uint32(be.Uint16(ip[4:]))
	return p, ""
}

func (m *model) parse6(p modelPacket) (modelPacket, string) {
	be, f := binary.BigEndian, p.frame
	if p.linear < p.l3+40 {
		return p, "truncated"
	}
	ip := f[p.l3:]
	if ip[0]>>4 != 6 {
		return p, "malformed"
	}
	p.v6, p.df = true, true
	p.length = 40 + int(be.Uint16(ip[4:]))
	p.src, p.dst = addrAt(ip, 8, 16), addrAt(ip, 24, 16)
	p.ttl, p.tos = ip[7], ip[0]<<4|ip[1]>>4
	p.protocol, p.l4 = ip[6], p.l3+40
	for headers := 0; !p.later; headers++ {
		next, at := p.protocol, p.l4
		if next != 0 && next != 43 && next != 44 && next != 51 && next != 60 {
			break
		}
		if headers > 6 || at > 0x3fff {
			return p, "malformed"
		}
		if p.linear < at+8 {
			return p, "truncated"
		}
		size := (int(f[at+1]) + 1) * 8
		switch next {
		case 51:
			size = (int(f[at+1]) + 2) * 4
		case 44:
			size = 8
			field := be.Uint16(f[at+2:])
			if field&0xfff9 != 0 {
				p.id = be.Uint32(f[at+4:])
			}
			p.later = field&0xfff8 != 0
			p.first = p.first || !p.later && field&1 != 0
		}
		p.protocol = f[at]
		p.l4 = at + size
		if headers == 6 && !p.later {
			return p, "malformed"
		}
	}
	if p.l4 > p.l3+p.length || len(f) < p.l3+p.length {
		return p, "truncated"
	}
	return p, ""
}

// l4 returns n bytes of the layer 4 header, or nil.
func (p *modelPacket) header(n int) []byte {
	if p.l4+n > p.l3+p.length || p.l4+n > p.linear {
		return nil
	}
	return p.frame[p.l4 : p.l4+n]
}

func (m *model) run(frame []byte) result {
	p, exit := m.parse(frame)
	switch {
	case exit == "not_ip":
		return result{exit: exit, verdict: 2, out: frame}
	case exit != "":
		return dropped(exit, frame)
	case !m.vips[p.dst]:
		if m.tunnelsToMux(&p) {
			return dropped("tunnel_to_mux", frame)
		}
		return result{exit: "no_vip", verdict: 2, out: frame}
	}
	if p.later {
		if p.ttl <= 1 {
			return dropped("answer_forbidden", frame)
		}
		choice, ok := m.fragments[p.fragment()]
		if !ok {
			return dropped("unknown_fragment", frame)
		}
		choice.newFlow = false
		return m.forward(&p, choice, false)
	}
	icmp := uint8(lb.ICMP)
	if p.v6 {
		icmp = uint8(lb.ICMPv6)
	}
	switch p.protocol {
	case uint8(lb.TCP), uint8(lb.UDP):
		return m.toEndpoint(&p)
	case icmp:
		return m.icmp(&p)
	case uint8(lb.IPIP), uint8(lb.IPv6):
		return dropped("nested_tunnel", frame)
	}
	return dropped("unsupported_protocol", frame)
}

// fragment is what all fragments of a packet have in common: for IPv6 without
// the protocol (RFC 8200 section 4.5).
func (p *modelPacket) fragment() modelFragment {
	if p.v6 {
		return modelFragment{p.src, p.dst, p.id, 0}
	}
	return modelFragment{p.src, p.dst, p.id, p.protocol}
}

func dropped(exit string, frame []byte) result { return result{exit: exit, verdict: 1, out: frame} }

func (m *model) tunnelsToMux(p *modelPacket) bool {
	if p.dst != source4 && p.dst != source6 {
		return false
	}
	if p.protocol == uint8(lb.IPIP) || p.protocol == uint8(lb.IPv6) {
		return true
	}
	return p.protocol == uint8(lb.UDP) && !p.later && p.l4+8 <= p.linear &&
		binary.BigEndian.Uint16(p.frame[p.l4+2:]) == 6080
}

func (m *model) toEndpoint(p *modelPacket) result {
	be := binary.BigEndian
	syn := false
	if p.protocol == uint8(lb.TCP) {
		tcp := p.header(20)
		if tcp == nil {
			return dropped("truncated", p.frame)
		}
		if tcp[12]>>4 < 5 {
			return dropped("malformed", p.frame)
		}
		syn = tcp[13]&0x16 == 2
	} else if p.header(8) == nil {
		return dropped("truncated", p.frame)
	}
	if p.ttl <= 1 {
		return m.answer(p, "time_exceeded", 0)
	}
	ports := p.header(4)
	flow := lb.Flow{
		Src: p.src, Dst: p.dst, Protocol: lb.Protocol(p.protocol),
		SrcPort: be.Uint16(ports), DstPort: be.Uint16(ports[2:]),
	}
	e := m.find(flow)
	if e == nil {
		return dropped("no_endpoint", p.frame)
	}
	choice, ok := m.choose(e, flow, syn, false)
	if !ok {
		return dropped("no_dip", p.frame)
	}
	if p.first {
		m.fragments[p.fragment()] = choice
	}
	return m.forward(p, choice, false)
}

func (m *model) find(f lb.Flow) *Endpoint {
	key := lb.Endpoint{VIP: f.Dst, Protocol: f.Protocol, Port: f.DstPort}
	if e := m.endpoints[key]; e != nil {
		return e
	}
	key.Port = 0
	return m.endpoints[key]
}

func (m *model) choose(e *Endpoint, flow lb.Flow, syn, onlyLook bool) (modelChoice, bool) {
	hash := flowhash.Hash(m.seed, flow)
	choice := modelChoice{endpoint: e.Endpoint, entropy: uint32(hash >> 32), newFlow: syn}
	table := e.Consistency == lb.ConsistencyTable
	if table && !syn {
		if f := m.flow(hash); f != nil && f.endpoint == e.Endpoint {
			if !onlyLook && !f.trusted {
				trusted := 0
				for _, o := range m.lineOf(f) {
					if o.used && o.trusted {
						trusted++
					}
				}
				f.trusted = trusted < 7
			}
			choice.dip = f.dip
			return choice, true
		}
	}
	if len(e.Buckets) == 0 {
		return choice, false
	}
	choice.dip = e.DIPs[e.Buckets[hash%uint64(len(e.Buckets))]]
	if table && !onlyLook && m.insert(hash, choice) && flow.Protocol == lb.UDP {
		choice.newFlow = true
	}
	if table && !onlyLook && syn {
		beside := m.lines(hash)[1]
		for i := range beside {
			if f := &beside[i]; f.fingerprint == fingerprint(hash) && (f.dip != choice.dip || f.endpoint != choice.endpoint) {
				f.used = false
			}
		}
	}
	return choice, true
}

func fingerprint(hash uint64) uint64 { return hash >> 12 & 0xfffffff }

func (m *model) lines(hash uint64) [2]*modelLine {
	i := int(hash>>40) & (len(m.flows) - 1)
	return [2]*modelLine{&m.flows[i], &m.flows[i^1]}
}

func (m *model) lineOf(f *modelFlow) *modelLine {
	for i := range m.flows {
		for j := range m.flows[i] {
			if &m.flows[i][j] == f {
				return &m.flows[i]
			}
		}
	}
	panic("a flow outside the table")
}

func (m *model) flow(hash uint64) *modelFlow {
	for _, line := range m.lines(hash) {
		for i := range line {
			if line[i].used && line[i].fingerprint == fingerprint(hash) {
				return &line[i]
			}
		}
	}
	return nil
}

func (m *model) insert(hash uint64, c modelChoice) bool {
	fresh := modelFlow{used: true, fingerprint: fingerprint(hash), endpoint: c.endpoint, dip: c.dip}
	for _, line := range m.lines(hash) {
		room, untrusted := -1, 0
		for i := range line {
			switch f := &line[i]; {
			case !f.used:
				room = i
			case f.fingerprint == fresh.fingerprint:
				if f.endpoint == c.endpoint && f.dip == c.dip {
					return false
				}
				*f = fresh
				return true
			case !f.trusted:
				untrusted++
			}
		}
		if room >= 0 && untrusted < 6 {
			line[room] = fresh
			return true
		}
	}
	return false
}

func (m *model) icmp(p *modelPacket) result {
	be := binary.BigEndian
	h := p.header(8)
	if h == nil {
		return dropped("truncated", p.frame)
	}
	request, isError := uint8(8), h[0] == 3 || h[0] == 11 || h[0] == 12
	if p.v6 {
		request, isError = 128, h[0] >= 1 && h[0] <= 4
	}
	if h[0] == request && !p.first {
		return m.echo(p)
	}
	if !isError || p.first {
		return dropped("unsupported_icmp", p.frame)
	}
	if p.ttl <= 1 {
		return dropped("answer_forbidden", p.frame)
	}
	// The quoted packet's own length doesn't count: it is cut.
	q := modelPacket{frame: p.frame[:p.linear], linear: p.linear, l3: p.l4 + 8}
	cut := q.frame
	exit := ""
	if p.v6 {
		if len(cut) < q.l3+40 {
			exit = "truncated"
		} else {
			whole := q
			whole.frame = append(bytes.Clone(cut), make([]byte, 66000)...)
			if q, exit = m.parse6Quoted(whole, len(cut)); exit == "" {
				q.frame = cut
			}
		}
	} else {
		whole := q
		whole.frame = append(bytes.Clone(cut), make([]byte, 66000)...)
		if len(cut) < q.l3+20 {
			exit = "truncated"
		} else if q, exit = m.parse4(whole); exit == "" && len(cut) < q.l4 {
			exit = "truncated"
		}
	}
	if exit == "" && len(cut) < q.l4+8 {
		exit = "truncated"
	}
	if exit != "" {
		return dropped(exit, p.frame)
	}
	if q.src != p.dst || q.later || q.protocol != uint8(lb.TCP) && q.protocol != uint8(lb.UDP) {
		return dropped("unrelated_icmp", p.frame)
	}
	flow := lb.Flow{
		Src: q.dst, Dst: q.src, Protocol: lb.Protocol(q.protocol),
		SrcPort: be.Uint16(cut[q.l4+2:]), DstPort: be.Uint16(cut[q.l4:]),
	}
	e := m.find(flow)
	if e == nil {
		return dropped("unrelated_icmp", p.frame)
	}
	choice, ok := m.choose(e, flow, false, true)
	if !ok {
		return dropped("no_dip", p.frame)
	}
	return m.forward(p, choice, true)
}

// parse6Quoted parses an IPv6 packet of which only cut bytes of the frame are real.
func (m *model) parse6Quoted(q modelPacket, cut int) (modelPacket, string) {
	real := q.frame[:cut]
	padded := q.frame
	q.frame = real
	out, exit := m.parse6(q)
	if exit == "truncated" && out.l4 >= q.l3+40 && out.l4 <= out.l3+out.length && out.walked(real) {
		exit = ""
	}
	out.frame = padded
	return out, exit
}

// walked is true if all extension headers up to l4 were within the frame.
func (p *modelPacket) walked(frame []byte) bool {
	next, at := frame[p.l3+6], p.l3+40
	for next == 0 || next == 43 || next == 44 || next == 51 || next == 60 {
		if at == p.l4 {
			break
		}
		if len(frame) < at+8 {
			return false
		}
		size := (int(frame[at+1]) + 1) * 8
		switch next {
		case 51:
			size = (int(frame[at+1]) + 2) * 4
		case 44:
			size = 8
		}
		next, at = frame[at], at+size
	}
	return at == p.l4 && (p.later || next == p.protocol && next != 0 && next != 43 && next != 44 && next != 51 && next != 60)
}

func sum16(b []byte) uint32 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	return sum
}

func checksum(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// patch is RFC 1624's incremental update, so that a checksum that was wrong
// stays wrong.
func patch(field []byte, from, to uint16) {
	be := binary.BigEndian
	be.PutUint16(field, checksum(uint32(^be.Uint16(field))+uint32(^from)+uint32(to)))
}

func (m *model) echo(p *modelPacket) result {
	out := bytes.Clone(p.frame)
	copy(out[0:6], p.frame[6:12])
	copy(out[6:12], p.frame[0:6])
	ip, icmp := out[p.l3:], out[p.l4:]
	if p.v6 {
		copy(ip[8:24], p.dst.AsSlice())
		copy(ip[24:40], p.src.AsSlice())
		ip[7] = 64
		patch(icmp[2:], uint16(128)<<8|uint16(icmp[1]), uint16(129)<<8|uint16(icmp[1]))
		icmp[0] = 129
	} else {
		copy(ip[12:16], p.dst.AsSlice())
		copy(ip[16:20], p.src.AsSlice())
		patch(ip[10:], uint16(ip[8])<<8, 64<<8)
		ip[8] = 64
		patch(icmp[2:], uint16(8)<<8|uint16(icmp[1]), uint16(icmp[1]))
		icmp[0] = 0
	}
	return result{exit: "echo_reply", verdict: 3, out: out}
}

func (m *model) forward(p *modelPacket, c modelChoice, quoted bool) result {
	be := binary.BigEndian
	dst := c.dip.Tunnel.Dst
	var way *modelWay
	for i := range m.ways {
		if m.ways[i].prefix.Contains(dst) {
			way = &m.ways[i]
		}
	}
	if way == nil {
		return dropped("no_route", p.frame)
	}
	if way.exit != "" {
		return dropped(way.exit, p.frame)
	}
	overhead := 20
	if dst.Is6() {
		overhead = 40
	}
	gue := c.dip.Tunnel.Encap == lb.EncapGUE
	if gue {
		overhead += 8
	}
	if p.length+overhead > way.mtu {
		if quoted {
			return dropped("answer_forbidden", p.frame)
		}
		if p.df {
			return m.answer(p, "fragmentation_needed", way.mtu-overhead)
		}
		return m.answer(p, "oversize", way.mtu-overhead)
	}

	inner := bytes.Clone(p.frame[p.l3:])
	innerID := be.Uint16(inner[4:])
	if p.v6 {
		inner[7]--
	} else {
		patchTTL(inner)
	}
	out := bytes.Clone(way.macs)
	proto := uint16(0x0800)
	if dst.Is6() {
		proto = 0x86dd
	}
	if way.vlan != 0 {
		out = be.AppendUint16(be.AppendUint16(out, 0x8100), way.vlan)
	}
	out = be.AppendUint16(out, proto)
	next := uint8(4)
	switch {
	case gue:
		next = 17
	case p.v6:
		next = 41
	}
	if dst.Is6() {
		out = be.AppendUint32(out, 6<<28|uint32(p.tos)<<20|c.entropy&0xfffff)
		out = be.AppendUint16(out, uint16(p.length+overhead-40))
		out = append(out, next, 64)
		out = append(out, source6.AsSlice()...)
		out = append(out, dst.AsSlice()...)
	} else {
		var h []byte
		h = append(h, 0x45, p.tos)
		h = be.AppendUint16(h, uint16(p.length+overhead))
		if p.df {
			h = append(h, 0, 0, 0x40, 0)
		} else {
			// Entropy is mixed in as the program holds it, in the machine's order.
			var e [2]byte
			binary.NativeEndian.PutUint16(e[:], uint16(c.entropy))
			h = be.AppendUint16(h, innerID^be.Uint16(e[:]))
			h = append(h, 0, 0)
		}
		h = append(h, 64, next, 0, 0)
		h = append(h, source4.AsSlice()...)
		h = append(h, dst.AsSlice()...)
		be.PutUint16(h[10:], checksum(sum16(h)))
		out = append(out, h...)
	}
	if gue {
		out = be.AppendUint16(out, 0xc000|uint16(c.entropy))
		out = be.AppendUint16(out, 6080)
		out = be.AppendUint16(out, uint16(8+p.length))
		out = append(out, 0, 0)
	}
	r := result{exit: "tx", verdict: 3, out: append(out, inner...)}
	if way.ifindex != m.ingress {
		r.exit, r.verdict = "redirect", 4
	}
	r.counted = &Counter{Endpoint: c.endpoint, DIP: c.dip, Packets: 1, Bytes: uint64(p.length)}
	if c.newFlow {
		r.counted.NewFlows = 1
	}
	return r
}

// patchTTL is RFC 1624 again, as Linux's ip_decrease_ttl does it.
func patchTTL(ip []byte) {
	be := binary.BigEndian
	check := uint32(be.Uint16(ip[10:])) + 0x0100
	if check >= 0xffff {
		check++
	}
	be.PutUint16(ip[10:], uint16(check))
	ip[8]--
}

func (m *model) answer(p *modelPacket, exit string, mtu int) result {
	be := binary.BigEndian
	src := p.src.As16()
	forbidden := p.later
	if p.v6 {
		forbidden = forbidden || src[0] == 0xff || p.src.IsUnspecified()
	} else {
		forbidden = forbidden || src[12] >= 224 || p.src.IsUnspecified()
	}
	if forbidden {
		return dropped("answer_forbidden", p.frame)
	}
	from := p.dst
	quoted := p.frame[p.l3:][:min(p.length&^1, 128)]
	icmp := []byte{3, 4, 0, 0}
	switch {
	case exit == "time_exceeded" && p.v6:
		icmp, from = []byte{3, 0, 0, 0}, source6
	case exit == "time_exceeded":
		icmp, from = []byte{11, 0, 0, 0}, source4
	case p.v6:
		icmp = []byte{2, 0, 0, 0}
	}
	icmp = be.AppendUint32(icmp, uint32(mtu))
	icmp = append(icmp, quoted...)

	out := bytes.Clone(p.frame[:p.l3])
	copy(out[0:6], p.frame[6:12])
	copy(out[6:12], p.frame[0:6])
	var ip []byte
	if p.v6 {
		ip = append(ip, 0x60, 0, 0, 0)
		ip = be.AppendUint16(ip, uint16(len(icmp)))
		ip = append(ip, 58, 64)
		ip = append(ip, from.AsSlice()...)
		ip = append(ip, p.src.AsSlice()...)
		be.PutUint16(icmp[2:], checksum(sum16(ip[8:])+uint32(len(icmp))+58+sum16(icmp)))
	} else {
		ip = append(ip, 0x45, 0)
		ip = be.AppendUint16(ip, uint16(20+len(icmp)))
		ip = append(ip, 0, 0, 0x40, 0, 64, 1, 0, 0)
		ip = append(ip, from.AsSlice()...)
		ip = append(ip, p.src.AsSlice()...)
		be.PutUint16(ip[10:], checksum(sum16(ip)))
		be.PutUint16(icmp[2:], checksum(sum16(icmp)))
	}
	return result{exit: exit, verdict: 3, out: append(append(out, ip...), icmp...)}
}

// runReal runs the loaded program on a frame.
func runReal(t testing.TB, d *Datapath, frame []byte, ifindex int) result {
	t.Helper()
	exits, err := d.Exits()
	must(t, err)
	counters := countersByDIP(t, d)
	opts := ebpf.RunOptions{
		Data: frame, DataOut: make([]byte, len(frame)+512), Context: xdpContext(len(frame), ifindex),
	}
	code, err := d.mux.Run(&opts)
	if err != nil {
		t.Fatalf("run %.160x: %v", frame, err)
	}
	after, err := d.Exits()
	must(t, err)
	r := result{verdict: code, out: opts.DataOut}
	for name, n := range after {
		switch n - exits[name] {
		case 0:
		case 1:
			if r.exit != "" {
				t.Fatalf("%.160x: two exits counted, %s and %s", frame, r.exit, name)
			}
			r.exit = name
		default:
			t.Fatalf("%.160x: exit %s counted %d", frame, name, n-exits[name])
		}
	}
	for key, c := range countersByDIP(t, d) {
		had := counters[key]
		c.Packets -= had.Packets
		c.Bytes -= had.Bytes
		c.NewFlows -= had.NewFlows
		if c.Packets|c.Bytes|c.NewFlows == 0 {
			continue
		}
		if r.counted != nil {
			t.Fatalf("%.160x: two DIPs counted", frame)
		}
		r.counted = &Counter{Endpoint: c.Endpoint, DIP: c.DIP, Packets: c.Packets, Bytes: c.Bytes, NewFlows: c.NewFlows}
	}
	return r
}

func countersByDIP(t testing.TB, d *Datapath) map[string]Counter {
	t.Helper()
	all, err := d.Counters()
	must(t, err)
	out := make(map[string]Counter, len(all))
	for _, c := range all {
		out[fmt.Sprint(c.Endpoint, c.DIP, c.DIP.Tunnel)] = c
	}
	return out
}

// diff says how two results differ, or nothing.
func (r result) diff(want result) string {
	switch {
	case r.exit != want.exit:
		return fmt.Sprintf("exit %s, want %s", r.exit, want.exit)
	case r.verdict != want.verdict:
		return fmt.Sprintf("verdict %d, want %d", r.verdict, want.verdict)
	case (r.counted == nil) != (want.counted == nil) || r.counted != nil && *r.counted != *want.counted:
		return fmt.Sprintf("counted %+v, want %+v", r.counted, want.counted)
	case r.verdict != 1 && !bytes.Equal(r.out, want.out):
		return fmt.Sprintf("packet out\n%.160x, want\n%.160x", r.out, want.out)
	}
	return ""
}
