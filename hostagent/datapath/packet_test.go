package datapath

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/quartet-lb/quartet/lb"
)

var pinDirs atomic.Uint32

func newPinDir() string {
	return fmt.Sprintf("/sys/fs/bpf/quartet-agent-test-%d-%d", os.Getpid(), pinDirs.Add(1))
}

// testPinDir is a directory on bpffs for one test.
func testPinDir(t testing.TB) string {
	dir := newPinDir()
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// programs are the real programs on no interface, by what they were loaded
// with: the verifier takes most of a packet test's time.
var programs = map[loadConfig]*Datapath{}

// loadConfig is what of Config the programs and maps depend on.
type loadConfig struct {
	MSS          uint16
	Flows, Rules uint32
}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, d := range programs {
		if err := errors.Join(d.Close(), os.RemoveAll(d.config.PinDir)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// loaded is the real programs on no interface, with these rules and no state.
func loaded(t testing.TB, c loadConfig, rules ...Rule) *Datapath {
	t.Helper()
	d := programs[c]
	if d == nil {
		config := Config{PinDir: newPinDir(), MSS: c.MSS, Flows: c.Flows, Rules: c.Rules}
		if err := config.complete(); err != nil {
			t.Fatal(err)
		}
		if err := mountBPFFS(config.PinDir); err != nil {
			t.Fatal(err)
		}
		d = &Datapath{config: config}
		if _, err := d.load(); err != nil {
			t.Fatalf("%+v", err)
		}
		programs[c] = d
	}
	if err := d.readRules(); err != nil {
		t.Fatal(err)
	}
	// Without rules first: a rule remembers what it was.
	if err := errors.Join(d.Replace(nil), d.Replace(rules)); err != nil {
		t.Fatal(err)
	}
	empty(t, d)
	for _, counters := range []*ebpf.Map{d.objects.Exits, d.objects.Events} {
		zeros := make([]uint64, ebpf.MustPossibleCPU())
		for i := range counters.MaxEntries() {
			if err := counters.Put(i, zeros); err != nil {
				t.Fatal(err)
			}
		}
	}
	return d
}

func rule(tunnel string, protocol lb.Protocol, vip, dip string, dipPort uint16) Rule {
	v := addrPort(vip)
	return Rule{addr(tunnel), lb.Endpoint{VIP: v.Addr(), Protocol: protocol, Port: v.Port()}, addr(dip), dipPort}
}

// run hands a frame to a program and returns verdict, bytes and the one exit
// that it took.
func run(t testing.TB, d *Datapath, p *ebpf.Program, in []byte) (verdict int32, out []byte, exit string) {
	t.Helper()
	before := exits(t, d)
	verdict, out = runOnly(t, p, in)
	for label, n := range exits(t, d) {
		switch n - before[label] {
		case 0:
		case 1:
			exit += label
		default:
			t.Fatalf("counter %s moved by %d", label, n-before[label])
		}
	}
	return verdict, out, exit
}

func runOnly(t testing.TB, p *ebpf.Program, in []byte) (verdict int32, out []byte) {
	t.Helper()
	o := ebpf.RunOptions{Data: in, DataOut: make([]byte, len(in)+256)}
	ret, err := p.Run(&o)
	if err != nil {
		t.Fatalf("run %s on %d bytes: %v", p, len(in), err)
	}
	return int32(ret), o.DataOut
}

func exits(t testing.TB, d *Datapath) map[string]uint64 {
	t.Helper()
	all, err := d.Exits()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// step is one packet through a program and what must come of it. Dropped and
// untouched packets leave out as it is.
type step struct {
	program string // "in" or "out"
	packet  []byte
	exit    string
	out     []byte
}

func (s step) verdict() int32 {
	const xdpDrop, xdpPass, xdpRedirect, tcxDrop, tcxNext = 1, 2, 4, 2, -1
	switch {
	case s.exit == "in_probe_answered":
		return xdpRedirect
	case s.program == "out" && s.exit == "out_failed":
		return tcxDrop
	case s.program == "out":
		return tcxNext
	case s.exit == "in_not_tunnel" || s.exit == "in_not_ours" || strings.HasPrefix(s.exit, "in_delivered"):
		return xdpPass
	}
	return xdpDrop
}

func (s step) run(t testing.TB, d *Datapath, name string) {
	t.Helper()
	p := d.objects.Inbound
	if s.program == "out" {
		p = d.objects.Outbound
	}
	want := s.out
	if want == nil {
		want = s.packet
	}
	verdict, out, exit := run(t, d, p, s.packet)
	if exit != s.exit || verdict != s.verdict() {
		t.Errorf("%s: exit %q, verdict %d; want %q, %d", name, exit, verdict, s.exit, s.verdict())
	} else if !bytes.Equal(out, want) {
		t.Errorf("%s: bytes out\n%s\nwant\n%s", name, hex.Dump(out), hex.Dump(want))
	}
}

// family is one set of addresses that the tests run with.
type family struct {
	name                      string
	mux, tunnel               netip.Addr
	client, vip, dip          string // with port
	client2, vipAny, dipAny   string
	router, vipOther, dipPort string
}

var families = []family{
	{"v4 in v4", addr("10.0.0.1"), addr("10.1.3.11"),
		"198.51.100.7:40000", "203.0.113.10:80", "10.1.3.11:8080",
		"198.51.100.7:40001", "203.0.113.20:7777", "10.1.3.12:7777", "192.0.2.1", "203.0.113.99:80", "10.1.3.11:9999"},
	{"v4 in v6", addr("fd00::1"), addr("fd00:1::11"),
		"198.51.100.7:40000", "203.0.113.10:80", "10.1.3.11:8080",
		"198.51.100.7:40001", "203.0.113.20:7777", "10.1.3.12:7777", "192.0.2.1", "203.0.113.99:80", "10.1.3.11:9999"},
	{"v6 in v4", addr("10.0.0.1"), addr("10.1.3.11"),
		"[2001:db8:1::7]:40000", "[2001:db8::10]:80", "[fd00:1::11]:8080",
		"[2001:db8:1::7]:40001", "[2001:db8::20]:7777", "[fd00:1::12]:7777", "2001:db8:9::1", "[2001:db8::99]:80", "[fd00:1::11]:9999"},
	{"v6 in v6", addr("fd00::1"), addr("fd00:1::11"),
		"[2001:db8:1::7]:40000", "[2001:db8::10]:80", "[fd00:1::11]:8080",
		"[2001:db8:1::7]:40001", "[2001:db8::20]:7777", "[fd00:1::12]:7777", "2001:db8:9::1", "[2001:db8::99]:80", "[fd00:1::11]:9999"},
}

// rules are TCP and UDP on the VIP's port, and any UDP port of a second VIP.
func (f family) rules() []Rule {
	dip := addrPort(f.dip)
	anyPort := addrPort(f.vipAny)
	return []Rule{
		rule(f.tunnel.String(), lb.TCP, f.vip, dip.Addr().String(), dip.Port()),
		rule(f.tunnel.String(), lb.UDP, f.vip, dip.Addr().String(), dip.Port()),
		rule(f.tunnel.String(), lb.UDP, netip.AddrPortFrom(anyPort.Addr(), 0).String(), addrPort(f.dipAny).Addr().String(), 0),
	}
}

func TestConnection(t *testing.T) {
	for _, f := range families {
		for format, encap := range tunnelFormats {
			t.Run(f.name+"/"+format, func(t *testing.T) {
				d := loaded(t, loadConfig{}, f.rules()...)
				in := func(p, want ip) step {
					return step{"in", frame(encap(f.mux, f.tunnel, p.bytes()).bytes()), "in_delivered", frame(want.bytes())}
				}
				for i, s := range []step{
					in(tcpPacket(f.client, f.vip, syn, ""), tcpPacket(f.client, f.dip, syn, "")),
					{"out", frame(tcpPacket(f.dip, f.client, syn|ack, "").bytes()), "out_translated",
						frame(tcpPacket(f.vip, f.client, syn|ack, "").bytes())},
					in(tcpPacket(f.client, f.vip, ack, ""), tcpPacket(f.client, f.dip, ack, "")),
					in(tcpPacket(f.client, f.vip, ack|psh, "GET / HTTP/1.1\r\n\r"), tcpPacket(f.client, f.dip, ack|psh, "GET / HTTP/1.1\r\n\r")),
					{"out", frame(tcpPacket(f.dip, f.client, ack|psh, "HTTP/1.1 200 OK").bytes()), "out_translated",
						frame(tcpPacket(f.vip, f.client, ack|psh, "HTTP/1.1 200 OK").bytes())},
					in(tcpPacket(f.client, f.vip, fin|ack, ""), tcpPacket(f.client, f.dip, fin|ack, "")),
					in(udpPacket(f.client, f.vip, "query"), udpPacket(f.client, f.dip, "query")),
					{"out", frame(udpPacket(f.dip, f.client, "answer").bytes()), "out_translated",
						frame(udpPacket(f.vip, f.client, "answer").bytes())},
					in(udpPacket(f.client, f.vipAny, "any port"), udpPacket(f.client, f.dipAny, "any port")),
					{"out", frame(udpPacket(f.dipAny, f.client, "answer").bytes()), "out_translated",
						frame(udpPacket(f.vipAny, f.client, "answer").bytes())},
					// Nobody's: other client port, other server port, other address.
					{"out", frame(tcpPacket(f.dip, f.client2, ack, "direct").bytes()), "out_not_ours", nil},
					{"out", frame(tcpPacket(f.dipPort, f.client, ack, "direct").bytes()), "out_not_ours", nil},
					{"out", frame(tcpPacket(f.vipOther, f.client, ack, "direct").bytes()), "out_not_ours", nil},
					{"in", frame(tcpPacket(f.client, f.dip, ack, "direct").bytes()), "in_not_tunnel", nil},
				} {
					s.run(t, d, fmt.Sprintf("step %d", i))
				}
				meters := meterMap(t, d)
				if len(meters) != 4 {
					t.Errorf("meters: %v; want two VIPs, both directions", meters)
				}
			})
		}
	}
}

// meterMap is Meters by "VIP peer direction".
func meterMap(t testing.TB, d *Datapath) map[string]Meter {
	t.Helper()
	all, err := d.Meters()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]Meter{}
	for _, m := range all {
		byName[fmt.Sprintf("%s %s inbound=%t", m.VIP, m.Peer, m.Inbound)] = m
	}
	return byName
}

func passAll() asm.Instructions {
	const xdpPass = 2
	return asm.Instructions{asm.Mov.Imm(asm.R0, xdpPass), asm.Return()}
}

// in is an inbound step in IP-in-IP.
func (f family) in(p ip, exit string, want ...ip) step {
	s := step{program: "in", packet: frame(ipip(f.mux, f.tunnel, p.bytes()).bytes()), exit: exit}
	if len(want) > 0 {
		s.out = frame(want[0].bytes())
	}
	return s
}

func (f family) out(p ip, exit string, want ...ip) step {
	s := step{program: "out", packet: frame(p.bytes()), exit: exit}
	if len(want) > 0 {
		s.out = frame(want[0].bytes())
	}
	return s
}

func runAll(t *testing.T, d *Datapath, steps ...step) {
	t.Helper()
	for i, s := range steps {
		s.run(t, d, fmt.Sprintf("step %d", i))
	}
}

// at is an address with another port.
func at(a string, port uint16) string { return netip.AddrPortFrom(addrPort(a).Addr(), port).String() }

// A connection stays with the target that it began with through three changes
// of its rule; a SYN takes the current one, on the same ports as well.
func TestRuleChangeKeepsConnections(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			d := loaded(t, loadConfig{}, f.rules()...)
			runAll(t, d,
				f.in(tcpPacket(f.client, f.vip, syn, ""), "in_delivered", tcpPacket(f.client, f.dip, syn, "")),
				f.in(tcpPacket(f.client, f.vip, ack, ""), "in_delivered", tcpPacket(f.client, f.dip, ack, "")),
				f.in(udpPacket(f.client, f.vip, "a"), "in_delivered", udpPacket(f.client, f.dip, "a")),
			)
			for i := range uint16(3) {
				rules := f.rules()
				rules[0].DIPPort, rules[1].DIPPort = 9001+i, 9001+i
				if err := d.Replace(rules); err != nil {
					t.Fatal(err)
				}
				current := at(f.dip, 9001+i)
				runAll(t, d,
					f.in(tcpPacket(f.client, f.vip, ack, "x"), "in_delivered", tcpPacket(f.client, f.dip, ack, "x")),
					f.out(tcpPacket(f.dip, f.client, ack, "y"), "out_translated", tcpPacket(f.vip, f.client, ack, "y")),
					f.in(udpPacket(f.client, f.vip, "b"), "in_delivered", udpPacket(f.client, f.dip, "b")),
					f.in(tcpPacket(f.client2, f.vip, syn, ""), "in_delivered", tcpPacket(f.client2, current, syn, "")),
					f.out(tcpPacket(current, f.client2, syn|ack, ""), "out_translated", tcpPacket(f.vip, f.client2, syn|ack, "")),
				)
			}
			// Idle, the UDP flow moves.
			var key agentFlowKey
			var value agentFlow
			for it := d.objects.Flows.Iterate(); it.Next(&key, &value); {
				if key.Protocol == 17 {
					value.Seen -= 61
					if err := d.objects.Flows.Put(key, value); err != nil {
						t.Fatal(err)
					}
				}
			}
			current := at(f.dip, 9003)
			runAll(t, d,
				f.in(udpPacket(f.client, f.vip, "c"), "in_delivered", udpPacket(f.client, current, "c")),
				f.in(tcpPacket(f.client, f.vip, syn, ""), "in_delivered", tcpPacket(f.client, current, syn, "")),
				f.in(tcpPacket(f.client, f.vip, ack, "x"), "in_delivered", tcpPacket(f.client, current, ack, "x")),
			)
			// A fourth change forgets the first target.
			rules := f.rules()
			rules[0].DIPPort = 9004
			if err := d.Replace(rules[:1]); err != nil {
				t.Fatal(err)
			}
			runAll(t, d,
				f.in(tcpPacket(f.client, f.vip, ack, "x"), "in_delivered", tcpPacket(f.client, current, ack, "x")),
				f.in(udpPacket(f.client, f.vip, "c"), "in_no_rule"),
			)
		})
	}
}

// A flood of first packets, many times the tables' size, leaves every trusted
// flow in place (Ananta section 3.3.3). A flood of flows of two packets evicts
// idle ones, and an inbound packet makes them again.
func TestFloodSparesTrustedFlows(t *testing.T) {
	f := families[0]
	d := loaded(t, loadConfig{Flows: 1024}, f.rules()...)
	client := func(n int) string {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(n >> 8), byte(n)}), 40000).String()
	}
	flooder := func(n int) string {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{100, 64 + byte(n>>16), byte(n >> 8), byte(n)}), 1234).String()
	}
	send := func(p ip) {
		if verdict, _ := runOnly(t, d.objects.Inbound, f.in(p, "").packet); verdict != 2 {
			t.Fatalf("verdict %d", verdict)
		}
	}
	const established = 300
	for n := range established {
		send(tcpPacket(client(n), f.vip, syn, ""))
		send(tcpPacket(client(n), f.vip, ack, ""))
	}
	for n := range 20_000 {
		send(tcpPacket(flooder(n), f.vip, syn, ""))
	}
	s, err := d.Flows()
	if err != nil {
		t.Fatal(err)
	}
	if s.Trusted != established || s.Untrusted > s.UntrustedMax || s.Promoted != established || s.Recreated != 0 {
		t.Fatalf("%+v: want %d trusted and none recreated", s, established)
	}
	for n := range established {
		// The server speaks first: nothing could make the flow again.
		f.out(tcpPacket(f.dip, client(n), ack, "y"), "out_translated", tcpPacket(f.vip, client(n), ack, "y")).run(t, d, client(n))
	}
	for n := range 20_000 {
		send(tcpPacket(flooder(n), f.vip, syn, ""))
		send(tcpPacket(flooder(n), f.vip, ack, ""))
	}
	for n := range established {
		f.in(tcpPacket(client(n), f.vip, ack, "x"), "in_delivered", tcpPacket(client(n), f.dip, ack, "x")).run(t, d, client(n))
		f.out(tcpPacket(f.dip, client(n), ack, "y"), "out_translated", tcpPacket(f.vip, client(n), ack, "y")).run(t, d, client(n))
	}
}

// While traffic moves to maps of another layout, replies are translated by the
// flows of both.
func TestMovingReadsBothLayouts(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			before, d := loaded(t, loadConfig{Flows: 1024}, f.rules()...), loaded(t, loadConfig{}, f.rules()...)
			former, err := openTables(before.dir)
			if err != nil {
				t.Fatal(err)
			}
			defer former.close()
			both, err := d.loadMoving(former)
			if err != nil {
				t.Fatalf("%+v", err)
			}
			defer both.Close()

			third := at(f.client, 40002)
			f.in(tcpPacket(f.client, f.vip, syn, ""), "in_delivered", tcpPacket(f.client, f.dip, syn, "")).run(t, before, "untrusted before")
			f.in(tcpPacket(third, f.vip, syn, ""), "in_delivered", tcpPacket(third, f.dip, syn, "")).run(t, before, "before")
			f.in(tcpPacket(third, f.vip, ack, ""), "in_delivered", tcpPacket(third, f.dip, ack, "")).run(t, before, "trusted before")
			f.in(tcpPacket(f.client2, f.vip, syn, ""), "in_delivered", tcpPacket(f.client2, f.dip, syn, "")).run(t, d, "after")
			for _, client := range []string{f.client, f.client2, third} {
				reply, want := frame(tcpPacket(f.dip, client, ack, "y").bytes()), frame(tcpPacket(f.vip, client, ack, "y").bytes())
				if _, out, exit := run(t, d, both, reply); exit != "out_translated" || !bytes.Equal(out, want) {
					t.Errorf("reply to %s: %s\n%s", client, exit, hex.Dump(out))
				}
			}
		})
	}
}

// Tables that take no more, as the kernel may refuse a write for want of memory:
// a flow that can't be trusted stays untrusted, a packet whose flow can't be
// kept is dropped, because its reply would leave as the DIP.
func TestRefusedFlow(t *testing.T) {
	f := families[0]
	spec, err := loadAgent()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range spec.Maps {
		if m.Type == ebpf.Hash {
			m.MaxEntries = 100
		}
	}
	for name, n := range map[string]uint32{"flows": 1, "untrusted": 2} {
		spec.Maps[name].Type, spec.Maps[name].MaxEntries = ebpf.Hash, n
	}
	d := &Datapath{config: Config{Rules: 100}, rules: map[ruleKey]targets{}, used: newReferences()}
	if d.exitLabels, err = labels(spec, "exit"); err != nil {
		t.Fatal(err)
	}
	if err := spec.LoadAndAssign(&d.objects, nil); err != nil {
		t.Fatalf("%+v", err)
	}
	defer d.Close()
	if err := d.Replace(f.rules()); err != nil {
		t.Fatal(err)
	}
	for n := range uint16(4) {
		client := at(f.client, 40000+n)
		for _, flags := range []uint8{syn, ack} {
			if n < 3 {
				f.in(tcpPacket(client, f.vip, flags, ""), "in_delivered", tcpPacket(client, f.dip, flags, "")).run(t, d, client)
				f.out(tcpPacket(f.dip, client, ack, "y"), "out_translated", tcpPacket(f.vip, client, ack, "y")).run(t, d, client)
			} else {
				f.in(tcpPacket(client, f.vip, flags, ""), "in_failed").run(t, d, client)
			}
		}
	}
}

// Frames that no generator of sensible packets would make.
func TestStrangeFrames(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			d := loaded(t, loadConfig{}, f.rules()...)
			inner := tcpPacket(f.client, f.vip, ack, "data").bytes()
			tunnelled := ipip(f.mux, f.tunnel, inner).bytes()
			var steps []step
			drop := func(packet []byte, exit string) {
				steps = append(steps, step{"in", packet, exit, nil})
			}
			// A loop: our own tunnel within our own tunnel, however deep.
			looped := tunnelled
			for range 3 {
				looped = ipip(f.mux, f.tunnel, looped).bytes()
				drop(frame(looped), "in_nested")
			}
			drop(frame(gue1(f.mux, f.tunnel, gue1(f.mux, f.tunnel, inner).bytes()).bytes()), "in_nested")
			// Every truncation of the frame; the outer length says otherwise.
			overhead := len(tunnelled) - len(inner)
			for n := 15; n < 14+len(tunnelled); n++ {
				exit := "in_truncated"
				if n < 14+overhead {
					exit = "in_not_tunnel"
				}
				drop(frame(tunnelled)[:n], exit)
			}
			// The inner packet is longer than the outer says.
			short := ipip(f.mux, f.tunnel, inner[:len(inner)-4]).bytes()
			drop(frame(append(short, inner[len(inner)-4:]...)), "in_truncated")
			if f.tunnel.Is6() {
				// A payload length that with its header exceeds 16 bits.
				lying := gue1(f.mux, f.tunnel, inner).bytes()
				be.PutUint16(lying[4:], 0xffff)
				drop(frame(lying), "in_truncated")
			}
			// The most extension headers, and one more.
			if addrPort(f.vip).Addr().Is6() {
				chained := func(dst string, n int) ip {
					p := tcpPacket(f.client, dst, ack, "data")
					for i := range n {
						next := uint8(60)
						if i == n-1 {
							next = p.proto
						}
						p.first, p.extensions = 60, append(p.extensions, next, 0, 1, 4, 0, 0, 0, 0)
					}
					return p
				}
				steps = append(steps, f.in(chained(f.vip, 6), "in_delivered", chained(f.dip, 6)), f.in(chained(f.vip, 7), "in_invalid"))
			}
			// Ethernet's padding behind the packet is carried along.
			padded := append(frame(tunnelled), 0, 0, 0)
			steps = append(steps, step{"in", padded, "in_delivered", append(frame(tcpPacket(f.client, f.dip, ack, "data").bytes()), 0, 0, 0)})
			// VLAN tags stay; a third one is one too many.
			for tags := 1; tags <= 2; tags++ {
				vlans := []uint16{100, 200}[:tags]
				steps = append(steps, step{"in", frame(tunnelled, vlans...), "in_delivered",
					frame(tcpPacket(f.client, f.dip, ack, "data").bytes(), vlans...)})
			}
			drop(frame(tunnelled, 1, 2, 3), "in_not_tunnel")
			// Larger than a page: the driver has it in several buffers.
			jumbo := strings.Repeat("jumbo", 1700)
			steps = append(steps, f.in(tcpPacket(f.client, f.vip, ack, jumbo), "in_delivered", tcpPacket(f.client, f.dip, ack, jumbo)),
				f.in(udpPacket(f.client, f.vip, jumbo), "in_delivered", udpPacket(f.client, f.dip, jumbo)))
			largest := strings.Repeat("x", 65535-8-40-60)
			steps = append(steps, f.in(udpPacket(f.client, f.vip, largest), "in_delivered", udpPacket(f.client, f.dip, largest)))
			runAll(t, d, steps...)
		})
	}
}

// Overlapping and repeated fragments are the receiver's to judge: each goes
// where its packet's first one went, and only its addresses change.
func TestFragments(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			d := loaded(t, loadConfig{}, f.rules()...)
			send, want := udpPacket(f.client, f.vip, strings.Repeat("0123456789abcdef", 8)), udpPacket(f.client, f.dip, strings.Repeat("0123456789abcdef", 8))
			send.id, want.id = 77, 77
			a, b := send.fragments(64, 104), want.fragments(64, 104)
			overlap, overlapped := a[1], b[1]
			overlap.offset, overlapped.offset = 8, 8
			other := a[1]
			other.id = 78
			runAll(t, d,
				f.in(a[1], "in_fragment_unknown"),
				f.in(a[0], "in_delivered", b[0]),
				f.in(a[2], "in_delivered_fragment", b[2]),
				f.in(a[1], "in_delivered_fragment", b[1]),
				f.in(a[1], "in_delivered_fragment", b[1]),
				f.in(overlap, "in_delivered_fragment", overlapped),
				f.in(other, "in_fragment_unknown"),
			)
			back, home := udpPacket(f.dip, f.client, strings.Repeat("fedcba9876543210", 8)), udpPacket(f.vip, f.client, strings.Repeat("fedcba9876543210", 8))
			back.id, home.id = 99, 99
			a, b = back.fragments(64, 104), home.fragments(64, 104)
			other = a[1]
			other.id = 100
			runAll(t, d,
				f.out(a[0], "out_translated", b[0]),
				f.out(a[2], "out_fragment", b[2]),
				f.out(a[1], "out_fragment", b[1]),
				f.out(other, "out_not_ours"),
			)
		})
	}
}

// ICMP errors both ways, with all that routers quote: eight bytes of TCP, more,
// and everything.
func TestICMPErrors(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			d := loaded(t, loadConfig{}, f.rules()...)
			client, router := addrPort(f.client).Addr(), addr(f.router)
			vip, dip := addrPort(f.vip).Addr(), addrPort(f.dip).Addr()
			headers := 20
			tooBig := []uint8{3, 4}
			if vip.Is6() {
				headers, tooBig = 40, []uint8{2, 0}
			}
			var steps []step
			for _, n := range []int{8, 12, 18, 20, 40} {
				ours, theirs := tcpPacket(f.vip, f.client, ack, strings.Repeat("reply", 5)).bytes(), tcpPacket(f.dip, f.client, ack, strings.Repeat("reply", 5)).bytes()
				if n < 18 {
					// A TCP checksum that is not quoted is not to be seen.
					ours, theirs = ours[:headers+n], theirs[:headers+n]
				}
				ours, theirs = ours[:headers+n], theirs[:headers+n]
				steps = append(steps, f.in(icmpError(router, vip, tooBig[0], tooBig[1], 1300, ours), "in_delivered_icmp_error",
					icmpError(router, dip, tooBig[0], tooBig[1], 1300, theirs)))
			}
			u := udpPacket(f.vip, f.client, "reply").bytes()
			steps = append(steps,
				f.in(icmpError(router, vip, tooBig[0], tooBig[1], 1300, u), "in_delivered_icmp_error",
					icmpError(router, dip, tooBig[0], tooBig[1], 1300, udpPacket(f.dip, f.client, "reply").bytes())),
				// Quotes no packet of ours; too short; of another port.
				f.in(icmpError(router, vip, tooBig[0], tooBig[1], 1300, udpPacket(f.client, f.vip, "reply").bytes()), "in_icmp_unsupported"),
				f.in(icmpError(router, vip, tooBig[0], tooBig[1], 1300, u[:headers+7]), "in_icmp_unsupported"),
				f.in(icmpError(router, vip, tooBig[0], tooBig[1], 1300, udpPacket(at(f.vip, 81), f.client, "reply").bytes()), "in_no_rule"),
				// Made by the DIP's host about a client's packet.
				f.out(icmpError(dip, client, tooBig[0], tooBig[1], 1300, udpPacket(f.client, f.dip, "hello").bytes()), "out_not_ours"),
				f.in(udpPacket(f.client, f.vip, "hello"), "in_delivered", udpPacket(f.client, f.dip, "hello")),
				f.out(icmpError(dip, client, tooBig[0], tooBig[1], 1300, udpPacket(f.client, f.dip, "hello").bytes()), "out_icmp_error",
					icmpError(vip, client, tooBig[0], tooBig[1], 1300, udpPacket(f.client, f.vip, "hello").bytes())),
			)
			runAll(t, d, steps...)
		})
	}
}

// RFC 6040, figure 4, with right IPv4 header checksums.
func TestECN(t *testing.T) {
	// By the inner field's value, then the outer's; 9 is a drop.
	want := [4][4]uint8{
		0: {0, 0, 0, 9},
		1: {1, 1, 1, 3},
		2: {2, 1, 2, 3},
		3: {3, 3, 3, 3},
	}
	for _, f := range families {
		d := loaded(t, loadConfig{}, f.rules()...)
		for inner := range uint8(4) {
			for outer := range uint8(4) {
				p, out := udpPacket(f.client, f.vip, "x"), udpPacket(f.client, f.dip, "x")
				p.tos = 0xb8 | inner
				o := ipip(f.mux, f.tunnel, p.bytes())
				o.tos = outer
				s := step{program: "in", packet: frame(o.bytes()), exit: "in_ecn"}
				if want[inner][outer] != 9 {
					out.tos = 0xb8 | want[inner][outer]
					s.exit, s.out = "in_delivered", frame(out.bytes())
				}
				s.run(t, d, fmt.Sprintf("%s inner %d outer %d", f.name, inner, outer))
			}
		}
	}
}

// UDP over IPv4 without a checksum stays without; a sum of 0 is sent as ones.
func TestUDPChecksumZero(t *testing.T) {
	f := families[0]
	d := loaded(t, loadConfig{}, f.rules()...)
	none := func(src, dst string) ip {
		p := udpPacket(src, dst, "x")
		p.payload[6], p.payload[7] = 0, 0
		return p
	}
	runAll(t, d,
		f.in(none(f.client, f.vip), "in_delivered", none(f.client, f.dip)),
		f.out(none(f.dip, f.client), "out_translated", none(f.vip, f.client)))
	zeros := 0
	for n := range 1 << 16 {
		data := string([]byte{byte(n >> 8), byte(n)})
		in, out := udpPacket(f.client, f.vip, data), udpPacket(f.client, f.dip, data)
		back, home := udpPacket(f.dip, f.client, data), udpPacket(f.vip, f.client, data)
		if be.Uint16(out.payload[6:]) == 0xffff {
			zeros++
			f.in(in, "in_delivered", out).run(t, d, "in")
		}
		if be.Uint16(home.payload[6:]) == 0xffff {
			zeros++
			f.out(back, "out_translated", home).run(t, d, "out")
		}
	}
	if zeros == 0 {
		t.Error("no datagram summed to 0")
	}
}

// A segmentation-offloaded packet is metered as the segments that leave.
func TestMeterCountsSegments(t *testing.T) {
	f := families[0]
	d := loaded(t, loadConfig{}, f.rules()...)
	f.in(tcpPacket(f.client, f.vip, syn, ""), "in_delivered", tcpPacket(f.client, f.dip, syn, "")).run(t, d, "SYN")
	packet := frame(tcpPacket(f.dip, f.client, ack, strings.Repeat("x", 2500)).bytes())
	// struct __sk_buff: gso_segs and gso_size.
	context := make([]byte, 192)
	binary.NativeEndian.PutUint32(context[164:], 3)
	binary.NativeEndian.PutUint32(context[176:], 1000)
	if _, err := d.objects.Outbound.Run(&ebpf.RunOptions{Data: packet, DataOut: make([]byte, 4096), Context: context}); err != nil {
		t.Fatal(err)
	}
	got := meterMap(t, d)
	want := map[string]Meter{
		"203.0.113.10 198.51.100.0/24 inbound=true":  {addr("203.0.113.10"), netip.MustParsePrefix("198.51.100.0/24"), true, 1, 40},
		"203.0.113.10 198.51.100.0/24 inbound=false": {addr("203.0.113.10"), netip.MustParsePrefix("198.51.100.0/24"), false, 3, 2500 + 3*40},
	}
	if !maps.Equal(got, want) {
		t.Errorf("meters %v, want %v", got, want)
	}
}

// Each way out has a label, and no two the same.
func TestExitLabels(t *testing.T) {
	d := loaded(t, loadConfig{})
	if len(d.exitLabels) != int(agentExitEXIT_COUNT) || len(exits(t, d)) != int(agentExitEXIT_COUNT) {
		t.Fatalf("%d labels for %d ways out", len(d.exitLabels), agentExitEXIT_COUNT)
	}
	for i, l := range d.exitLabels {
		if !strings.HasPrefix(l, "in_") && !strings.HasPrefix(l, "out_") {
			t.Errorf("label %d is %q", i, l)
		}
	}
	if l := d.exitLabels[agentExitEXIT_OUT_FAILED]; l != "out_failed" {
		t.Errorf("label of the last way out is %q", l)
	}
}
