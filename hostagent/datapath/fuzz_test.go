package datapath

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/quartet-lb/quartet/encap"
	"github.com/quartet-lb/quartet/lb"
)

const fuzzMSS = 1400

// compared is the programs beside the model.
type compared struct {
	d      *Datapath
	m      *model
	counts map[string]uint64
	n      int
}

func newCompared(t testing.TB) *compared {
	c := &compared{d: loaded(t, loadConfig{MSS: fuzzMSS}), m: newModel(fuzzMSS)}
	c.counts = exits(t, c.d)
	return c
}

func (c *compared) apply(t testing.TB, delta Delta) {
	t.Helper()
	if err := c.d.Apply(delta); err != nil {
		t.Fatal(err)
	}
	for _, r := range delta.Put {
		c.m.put(r)
	}
	for _, r := range delta.Delete {
		c.m.drop(r)
	}
}

// packet runs one frame through program and model and compares verdict, bytes
// and every counter.
func (c *compared) packet(t testing.TB, program string, in []byte) (exit string) {
	t.Helper()
	c.n++
	s := step{program: program, packet: in}
	p := c.d.objects.Inbound
	if program == "out" {
		p = c.d.objects.Outbound
		s.exit, s.out = c.m.outbound(in)
	} else {
		s.exit, s.out = c.m.inbound(in)
	}
	c.counts[s.exit]++
	verdict, out := runOnly(t, p, in)
	counts := exits(t, c.d)
	if !maps.Equal(counts, c.counts) || verdict != s.verdict() || !bytes.Equal(out, s.out) {
		for label := range counts {
			if counts[label] != c.counts[label] {
				t.Errorf("counter %s: %d, want %d", label, counts[label], c.counts[label])
			}
		}
		t.Fatalf("packet %d (%s): verdict %d, want %d (%s)\nin\n%s\nout\n%s\nwant\n%s", c.n, program,
			verdict, s.verdict(), s.exit, hex.Dump(in), hex.Dump(out), hex.Dump(s.out))
	}
	if strings.HasPrefix(s.exit, "in_delivered") {
		c.specified(t, in, s.out)
	}
	return s.exit
}

// specified compares a delivered packet with what package encap takes out of
// the tunnel: all but the address, the port and checksums is the same.
func (c *compared) specified(t testing.TB, in, out []byte) {
	t.Helper()
	var outer, got header
	if _, good := outer.ethernet(in); !good {
		t.Fatal("a delivered frame has an outer header")
	}
	etherType, _ := got.ethernet(out)
	inner, _, _, err := encap.Decapsulate(in[outer.l3:])
	if err != nil {
		t.Fatalf("delivered, but package encap says: %v\n%s", err, hex.Dump(in))
	}
	if p := got.ip(out, etherType); p != ok {
		t.Fatalf("delivered header is unreadable: %v", p)
	}
	have := append([]byte{}, out[got.l3:][:len(inner)]...)
	for _, b := range [][]byte{have, inner} {
		if got.six {
			clear(b[24:40])
		} else {
			clear(b[10:12])
			clear(b[16:20])
		}
		if l4 := got.l4 - got.l3; got.isICMP() {
			clear(b[l4:])
		} else if !got.later {
			clear(b[l4+2 : l4+4])
			clear(b[l4+6 : min(l4+18, len(b))])
		}
	}
	if !bytes.Equal(have, inner) {
		t.Fatalf("delivered\n%s\npackage encap\n%s", hex.Dump(have), hex.Dump(inner))
	}
}

// end compares what is left in the maps, and empties them.
func (c *compared) end(t testing.TB) {
	t.Helper()
	s, err := c.d.Flows()
	if err != nil {
		t.Fatal(err)
	}
	got := [...]uint64{s.Trusted, s.Untrusted, s.Created, s.Recreated, s.Promoted, s.Clamped}
	want := [...]uint64{uint64(len(c.m.trusted)), uint64(len(c.m.untrusted)), c.m.created, c.m.recreated, c.m.promoted, c.m.clamped}
	if got != want {
		t.Errorf("trusted, untrusted, created, recreated, promoted, clamped: %v, want %v", got, want)
	}
	meters, err := c.d.Meters()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range meters {
		k := modelMeter{m.VIP, m.Peer, m.Inbound}
		if c.m.meters[k] != m {
			t.Errorf("meter %+v, want %+v", m, c.m.meters[k])
		}
	}
	if len(meters) != len(c.m.meters) {
		t.Errorf("%d meters, want %d", len(meters), len(c.m.meters))
	}
	empty(t, c.d)
	c.m.forget()
}

// empty deletes all state that packets made.
func empty(t testing.TB, d *Datapath) {
	t.Helper()
	for _, err := range []error{
		sweep(d.objects.Flows, new(agentFlowKey), new(agentFlow), func() bool { return false }),
		sweep(d.objects.Untrusted, new(agentFlowKey), new(agentFlow), func() bool { return false }),
		sweep(d.objects.Fragments, new(agentFragmentKey), new(agentFragment), func() bool { return false }),
		sweep(d.objects.Meters, new(agentMeterKey), new([]agentMeter), func() bool { return false }),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// traffic makes packets that mostly make sense, from small sets of everything,
// so that they meet each other's state.
type traffic struct {
	*rand.Rand
	world []family
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func (g traffic) port(of string) string {
	a := addrPort(of)
	if g.IntN(12) == 0 {
		return netip.AddrPortFrom(a.Addr(), pick(g.Rand, uint16(80), 443, 6080, 4789, 0)).String()
	}
	return of
}

func (g traffic) l4(src, dst string) ip {
	src, dst = g.port(src), g.port(dst)
	s, d := addrPort(src), addrPort(dst)
	p := ip{src: s.Addr(), dst: d.Addr(), tos: uint8(g.IntN(256)), id: uint32(g.IntN(3)), df: g.IntN(2) == 0}
	data := make([]byte, pick(g.Rand, 0, 1, 7, 64, 200))
	for i := range data {
		data[i] = byte(g.Uint32())
	}
	if g.IntN(5) < 3 {
		p.proto = 6
		var options []byte
		if g.IntN(2) == 0 {
			options = pick(g.Rand, []byte{2, 4, 5, 180}, []byte{1, 2, 4, 5, 180, 1, 1, 0}, []byte{8, 10, 0, 0, 0, 0, 0, 0, 0, 0, 2, 4, 0x23, 0, 1, 1},
				[]byte{2, 4, 4, 0}, []byte{3, 0, 2, 4}, []byte{0, 2, 4, 9}, []byte{2, 5, 9, 9, 9, 1, 1, 1}, []byte{3, 3, 7, 2, 4, 5, 180, 0})
		}
		p.payload = tcp(s, d, pick[uint8](g.Rand, syn, syn, syn|ack, ack, ack, ack|psh, fin|ack, rst, syn|rst, syn|fin), options, data)
	} else {
		p.proto = 17
		p.payload = udp(s, d, data)
		if g.IntN(3) == 0 {
			p.payload[6], p.payload[7] = 0, 0
		}
	}
	if g.IntN(8) == 0 {
		if p.src.Is4() {
			p.options = []byte{148, 4, 0, 0, 1, 1, 1, 1}
		} else {
			p.first = pick[uint8](g.Rand, 0, 60, 43, 51)
			for range pick(g.Rand, 0, 0, 0, 5, 6) { // six are the most
				p.extensions = append(p.extensions, p.first, 0, 1, 4, 0, 0, 0, 0)
			}
			p.extensions = append(p.extensions, p.proto, 0, 1, 4, 0, 0, 0, 0)
		}
	}
	return p
}

// packet is one packet and its direction.
func (g traffic) packet() (string, []byte) {
	f := pick(g.Rand, g.world...)
	client := pick(g.Rand, f.client, f.client2)
	vip, dip := f.vip, f.dip
	if g.IntN(3) == 0 {
		vip, dip = f.vipAny, f.dipAny
	}
	if g.IntN(20) == 0 {
		vip, dip = f.vipOther, f.dipPort
	}
	vlans := make([]uint16, max(0, g.IntN(6)-3))
	out := g.IntN(3) == 0
	src, dst := client, vip
	if out {
		src, dst = dip, client
	}
	p := g.l4(src, dst)
	switch g.IntN(10) {
	case 0, 1: // a fragment
		if p.extensions == nil {
			at := pick(g.Rand, 8, 24, 32) // 8 is too small for TCP's header
			if at < len(p.payload) {
				p = pick(g.Rand, p.fragments(at)...)
			}
		}
	case 2, 3: // an ICMP error about the other direction's packet
		quoted := g.l4(dst, src).bytes()
		if !out || g.IntN(2) == 0 {
			quoted = g.l4(addrPort(dst).String(), src).bytes()
		}
		if n := pick(g.Rand, 28, 36, 46, 48, 60, 68); n < len(quoted) {
			quoted = quoted[:n]
		}
		from := addr(f.router)
		if g.IntN(3) == 0 {
			from = addrPort(src).Addr()
		}
		types := pick(g.Rand, [2]uint8{3, 4}, [2]uint8{11, 0}, [2]uint8{8, 0})
		if from.Is6() {
			types = pick(g.Rand, [2]uint8{2, 0}, [2]uint8{1, 4}, [2]uint8{128, 0})
		}
		to := addrPort(dst).Addr()
		p = icmpError(from, to, types[0], types[1], 1300, quoted)
	case 4: // a mux's probe
		if !out {
			p = echoPacket(f.mux, pick(g.Rand, f.tunnel, f.tunnel, f.tunnel.Next()), false)
		}
	}
	inner := p.bytes()
	if out {
		return "out", frame(inner, vlans...)
	}
	names := []string{"ipip", "gue1", "gue0", "vxlan"}
	for range 1 + g.IntN(12)/11 { // sometimes a tunnel in a tunnel
		o := tunnelFormats[pick(g.Rand, names...)](f.mux, f.tunnel, inner)
		o.tos = uint8(g.IntN(256))
		switch g.IntN(30) {
		case 0:
			o.dst = addr("10.1.3.250")
			o.src = addr("10.0.0.1")
		case 1:
			o.more = true
		case 2:
			o.offset = 1480
		}
		inner = o.bytes()
	}
	return "in", frame(inner, vlans...)
}

// runnable says whether BPF_PROG_TEST_RUN takes the frame: an skb must hold the
// IP header that its EtherType promises.
func runnable(program string, b []byte) bool {
	if len(b) < 15 || program == "in" {
		return len(b) >= 15
	}
	switch be.Uint16(b[12:]) {
	case 0x0800:
		return len(b) >= 14+20
	case 0x86dd:
		return len(b) >= 14+40
	}
	return true
}

// mutate damages a frame.
func (g traffic) mutate(b []byte) []byte {
	b = append([]byte{}, b...)
	for range 1 + g.IntN(3) {
		switch g.IntN(6) {
		case 0:
			b[g.IntN(len(b))] ^= 1 << g.IntN(8)
		case 1:
			b[g.IntN(len(b))] = pick[byte](g.Rand, 0, 1, 4, 5, 6, 17, 41, 44, 0x45, 0x60, 0x7f, 0x80, 0xff)
		case 2:
			b = b[:15+g.IntN(len(b)-14)]
		case 3:
			b = append(b, make([]byte, g.IntN(40))...)
		case 4: // in the headers
			b[g.IntN(min(len(b), 80))] = byte(g.Uint32())
		case 5:
			at := g.IntN(len(b) - 1)
			be.PutUint16(b[at:], pick[uint16](g.Rand, 0, 1, 20, 40, 0x2000, 0x3fff, 0x0800, 0x86dd, 0x8100, 0xffff))
		}
		if len(b) < 15 {
			b = append(b, make([]byte, 15-len(b))...)
		}
	}
	return b
}

// TestModel runs generated packets, whole and damaged, with changes of rules
// among them.
func TestModel(t *testing.T) {
	g := traffic{rand.New(rand.NewPCG(2013, 8)), families}
	c := newCompared(t)
	seen := map[string]int{}
	for round := range 20 {
		for _, f := range families {
			c.apply(t, Delta{Put: f.rules()})
		}
		for i := range 2000 {
			if i%100 == 99 {
				f := pick(g.Rand, families...)
				dip := addrPort(f.dip)
				// The last rule shares its DIP and port with another VIP's.
				r := pick(g.Rand, append(f.rules(), rule(f.tunnel.String(), lb.TCP, f.vipOther, dip.Addr().String(), dip.Port()))...)
				r.DIPPort = pick[uint16](g.Rand, 0, 8080, 8080, 8080, 8081, 8082, 8083, 8084, 8085)
				if g.IntN(6) == 0 {
					c.apply(t, Delta{Delete: []Rule{r}})
				} else {
					c.apply(t, Delta{Put: []Rule{r}})
				}
			}
			program, b := g.packet()
			if g.IntN(3) == 0 {
				b = g.mutate(b)
			}
			if runnable(program, b) {
				seen[c.packet(t, program, b)]++
			}
		}
		c.end(t)
		if t.Failed() {
			t.Fatalf("round %d", round)
		}
	}
	for label := range c.counts {
		if seen[label] == 0 && label != "in_failed" && label != "out_failed" {
			t.Errorf("no packet left by %s: the test is too narrow", label)
		}
	}
	t.Log(fmt.Sprint(seen))
}

// FuzzPackets reads frames, each after two bytes: program, length.
func FuzzPackets(f *testing.F) {
	g := traffic{rand.New(rand.NewPCG(2013, 8)), families}
	for range 200 {
		var all []byte
		for range 1 + g.IntN(4) {
			program, b := g.packet()
			if len(b) > 255 {
				b = b[:255]
			}
			all = append(all, byte(len(program)), byte(len(b)))
			all = append(all, b...)
		}
		f.Add(all)
	}
	c := newCompared(f)
	for _, x := range families {
		c.apply(f, Delta{Put: x.rules()})
	}
	f.Fuzz(func(t *testing.T, all []byte) {
		for len(all) > 2 {
			program := "in"
			if all[0]%2 == 1 {
				program = "out"
			}
			n := min(int(all[1]), len(all)-2)
			b := all[2 : 2+n]
			all = all[2+n:]
			if runnable(program, b) {
				c.packet(t, program, b)
			}
		}
		c.end(t)
	})
}
