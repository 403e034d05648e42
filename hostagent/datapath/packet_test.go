package datapath

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/quartet-lb/quartet/lb"
)

var pinDirs atomic.Uint32

// testPinDir is a directory on bpffs for one test.
func testPinDir(t testing.TB) string {
	dir := fmt.Sprintf("/sys/fs/bpf/quartet-agent-test-%d-%d", os.Getpid(), pinDirs.Add(1))
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// loaded is the real programs on no interface.
func loaded(t testing.TB, c Config, rules ...Rule) *Datapath {
	t.Helper()
	c.PinDir = testPinDir(t)
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	if err := mountBPFFS(c.PinDir); err != nil {
		t.Fatal(err)
	}
	d := &Datapath{config: c}
	if _, err := d.load(); err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := d.readRules(); err != nil {
		t.Fatal(err)
	}
	if err := d.Replace(rules); err != nil {
		t.Fatal(err)
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
	const xdpDrop, xdpPass, tcxDrop, tcxNext = 1, 2, 2, -1
	switch {
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
				d := loaded(t, Config{}, f.rules()...)
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
