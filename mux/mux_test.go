package mux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/lab/fabric"
	"github.com/quartet-lb/quartet/lab/xdppass"
)

// The network of these tests. Router, manager and muxes are the real daemons;
// the server's end of the tunnel is a packet socket, so that each packet that
// a mux forwarded can be told.
//
//	client 10.98.1.2 ── router (BIRD, AS 65001) ── 10.98.11.2 m1 (AS 65101)
//	                    │  manager 10.98.1.1:7470 └ 10.98.12.2 m2 (AS 65102)
//	                    └ 10.98.2.2 server, the DIP
//
// The muxes' IPv6 addresses are 2001:db8:98:11::2 and 2001:db8:98:12::2.
const (
	vip        = "203.0.113.10"
	vip6       = "2001:db8:100::10"
	dip        = "10.98.2.2"
	dip6       = "2001:db8:98:2::2"
	managerURL = "https://10.98.1.1:7470"
	password   = "correct-horse"
)

var pool4, pool6 = netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8:100::/64")

// binaries is the folder of the daemons under test.
var binaries string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if binaries, err = os.MkdirTemp("", "quartet-mux-test"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(binaries)
		build := exec.Command("go", "build", "-o", binaries+"/", "../cmd/quartet-mux", "../cmd/quartet-manager")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

type network struct {
	t      *testing.T
	prefix string
	dir    string
	nodes  map[string]*fabric.Node
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{t: t, prefix: fmt.Sprintf("qmux%d-", os.Getpid()), dir: t.TempDir(), nodes: map[string]*fabric.Node{}}
	for _, name := range []string{"client", "router", "server", "m1", "m2"} {
		node, err := fabric.Create(n.prefix + name)
		must(t, err)
		n.nodes[name] = node
		t.Cleanup(func() {
			node.Close()
			if err := fabric.Delete(n.prefix + name); err != nil {
				t.Error(err)
			}
		})
	}
	pass, err := xdppass.Load()
	must(t, err)
	defer pass.Close()
	router := n.nodes["router"]
	for name, net := range map[string]string{"client": "1", "server": "2", "m1": "11", "m2": "12"} {
		node := n.nodes[name]
		must(t, fabric.Connect(router, name, node, "eth0", 1500))
		for _, end := range []struct {
			node *fabric.Node
			link string
			host string
		}{{router, name, "1"}, {node, "eth0", "2"}} {
			must(t, end.node.AddAddress(end.link, netip.MustParsePrefix("10.98."+net+"."+end.host+"/24")))
			must(t, end.node.AddAddress(end.link, netip.MustParsePrefix("2001:db8:98:"+net+"::"+end.host+"/64")))
		}
		must(t, node.AddRoute(fabric.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.98." + net + ".1")}))
		must(t, node.AddRoute(fabric.Route{Dst: netip.MustParsePrefix("::/0"), Via: netip.MustParseAddr("2001:db8:98:" + net + "::1")}))
		if strings.HasPrefix(name, "m") {
			must(t, router.SetXDP(name, pass.Pass.FD()))
		}
	}
	must(t, n.nodes["client"].OffloadsOff("eth0"))
	must(t, router.Sysctl("net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1"))
	return n
}

type process struct {
	n    *network
	name string
	cmd  *exec.Cmd
	log  *os.File
	done chan struct{}
	err  error // of Wait; valid once done is closed
}

// start runs a daemon in a node until the test ends.
func (n *network) start(node, name string, args ...string) *process {
	n.t.Helper()
	log, err := os.OpenFile(filepath.Join(n.dir, node+"-"+name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(n.t, err)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	must(n.t, n.nodes[node].StartIn(cmd))
	p := &process{n: n, name: node + " " + name, cmd: cmd, log: log, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	n.t.Cleanup(func() {
		p.kill()
		log.Close()
		if n.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			n.t.Logf("%s:\n%s", filepath.Base(log.Name()), text)
		}
	})
	return p
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

func (p *process) terminate() {
	p.n.t.Helper()
	must(p.n.t, p.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-p.done:
		if p.err != nil {
			p.n.t.Errorf("%s: %v", p.name, p.err)
		}
	case <-time.After(30 * time.Second):
		p.n.t.Fatalf("%s does not stop", p.name)
	}
}

// certificates makes the fabric's.
func (n *network) certificates() {
	n.t.Helper()
	must(n.t, certs.Init(n.dir))
	for name, role := range map[string]string{"manager": certs.Manager, "operator": certs.Operator, "m1": certs.Mux, "m2": certs.Mux} {
		must(n.t, certs.Issue(n.dir, role, name, []string{"10.98.1.1"}))
	}
}

func (n *network) tls(name string) []string {
	return []string{"--ca", n.dir + "/ca.crt", "--cert", n.dir + "/" + name + ".crt", "--key", n.dir + "/" + name + ".key"}
}

func (n *network) bird() {
	n.t.Helper()
	r := fabric.Router{ID: netip.MustParseAddr("10.98.1.1"), ASN: 65001}
	for i, m := range []string{"m1", "m2"} {
		r.Peers = append(r.Peers, fabric.Peer{
			Name: m, Interface: m, Local: netip.MustParseAddr(fmt.Sprintf("10.98.1%d.1", i+1)),
			Address: netip.MustParseAddr(fmt.Sprintf("10.98.1%d.2", i+1)), ASN: uint32(65101 + i), Password: password,
			BFD: 500 * time.Millisecond, // no failure of a busy machine's
		})
	}
	must(n.t, os.WriteFile(fabric.BirdConfig(n.dir), []byte(r.Config(n.dir+"/bird.log")), 0o600))
	c := fabric.BirdCommand(n.dir)
	n.start("router", "bird", c.Args...)
}

func (n *network) manager() *process {
	n.t.Helper()
	p := n.start("router", "manager", append([]string{binaries + "/quartet-manager", "--name", "manager",
		"--data-dir", n.dir + "/data", "--listen", "10.98.1.1:7470"}, n.tls("manager")...)...)
	eventually(n.t, "the manager answers", func() string {
		if _, err := n.operator().List(context.Background(), &quartetv1.ListRequest{Kind: "Mux"}); err != nil {
			return err.Error()
		}
		return ""
	})
	return p
}

func (n *network) pin(m string) string { return "/sys/fs/bpf/" + n.prefix + m }

func (n *network) mux(m string, more ...string) *process {
	n.t.Helper()
	i := m[1:]
	must(n.t, os.WriteFile(n.dir+"/md5", []byte(password+"\n"), 0o600))
	n.t.Cleanup(func() {
		if out, err := exec.Command(binaries+"/quartet-mux", "detach", "--pin-dir", n.pin(m)).CombinedOutput(); err != nil {
			n.t.Errorf("detach: %v %s", err, out)
		}
	})
	args := []string{binaries + "/quartet-mux", "--name", m, "--address", "10.98.1" + i + ".2", "--address", "2001:db8:98:1" + i + "::2",
		"--manager", managerURL, "--interface", "eth0", "--pin-dir", n.pin(m), "--state-dir", n.dir + "/" + m, "--flows", "4096",
		"--bgp-asn", "6510" + i, "--bgp-peer",
		"address=10.98.1" + i + ".1,asn=65001,hold=9s,bfd=500ms*3,password-file=" + n.dir + "/md5,next-hop6=2001:db8:98:1" + i + "::2",
		"--drain-time", "5s"}
	return n.start(m, "mux", slices.Concat(args, n.tls(m), more)...)
}

// httpIn is an HTTP client in a node.
func (n *network) httpIn(node string) *http.Client {
	return &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
			err = n.nodes[node].Do(func() error {
				c, err = (&net.Dialer{}).DialContext(ctx, network, address)
				return err
			})
			return c, err
		}}}
}

func (n *network) get(node, path string) (int, string) {
	n.t.Helper()
	r, err := n.httpIn(node).Get("http://127.0.0.1:7471" + path)
	if err != nil {
		return 0, ""
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	must(n.t, err)
	return r.StatusCode, string(body)
}

func (n *network) operator() quartetv1connect.OperatorServiceClient {
	n.t.Helper()
	tls, err := certs.LoadClient(n.dir+"/ca.crt", n.dir+"/operator.crt", n.dir+"/operator.key")
	must(n.t, err)
	c := n.httpIn("router")
	c.Transport.(*http.Transport).TLSClientConfig = tls
	return quartetv1connect.NewOperatorServiceClient(c, managerURL)
}

func (n *network) apply(objects ...map[string]any) *quartetv1.ApplyResponse {
	n.t.Helper()
	r := &quartetv1.ApplyRequest{}
	for _, o := range objects {
		s, err := structpb.NewStruct(o)
		must(n.t, err)
		r.Objects = append(r.Objects, s)
	}
	out, err := n.operator().Apply(context.Background(), r)
	if err != nil {
		n.t.Fatalf("apply: %v", err)
	}
	return out
}

var poolObject = map[string]any{"kind": "VipPool", "name": "pool", "prefixes": []any{pool4.String(), pool6.String()}}

func webObject(consistency string) map[string]any {
	return map[string]any{"kind": "Vip", "name": "web", "tenant": "shop", "addresses": []any{vip, vip6}, "endpoints": []any{
		map[string]any{"name": "dns", "protocol": "UDP", "port": 53, "consistency": consistency,
			"backends": []any{map[string]any{"dip": dip, "dip6": dip6, "port": 5353}}},
	}}
}

func eventually(t *testing.T, what string, ok func() string) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		state := ok()
		if state == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s: %s", what, state)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// wantWays waits until the router has these ways to the VIPs of both families.
func (n *network) wantWays(muxes ...string) {
	n.t.Helper()
	n.wantRoutes([]netip.Prefix{pool4, pool6}, muxes...)
}

// wantRoutes waits until the router's routes to each prefix are these.
func (n *network) wantRoutes(prefixes []netip.Prefix, muxes ...string) {
	n.t.Helper()
	slices.Sort(muxes)
	eventually(n.t, fmt.Sprintf("ways to %v by %v", prefixes, muxes), func() string {
		hops, err := n.nodes["router"].NextHops()
		must(n.t, err)
		for _, prefix := range prefixes {
			var have []string
			for hop := range hops[prefix] {
				have = append(have, hop)
			}
			slices.Sort(have)
			if !slices.Equal(have, muxes) {
				return fmt.Sprintf("%s has %v", prefix, have)
			}
		}
		return ""
	})
}

func (n *network) wantReady(m string, want string) {
	n.t.Helper()
	eventually(n.t, m+" /readyz is "+want, func() string {
		_, text := n.get(m, "/readyz")
		if slices.Contains(strings.Split(text, "\n"), want) {
			return ""
		}
		return "it is " + text
	})
}

// server receives what the muxes send: it takes the tunnel off and notes each
// datagram's number.
type server struct {
	t  *testing.T
	fd int

	mu   sync.Mutex
	seen map[uint64]string // guarded by mu: number to "outer source > inner destination"
}

func (n *network) server() *server {
	n.t.Helper()
	s := &server{t: n.t, seen: map[uint64]string{}}
	must(n.t, n.nodes["server"].Do(func() (err error) {
		if s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM, int(unix.ETH_P_ALL<<8&0xff00|unix.ETH_P_ALL>>8)); err != nil {
			return err
		}
		return unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
	}))
	must(n.t, unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2048)
		for {
			k, _, err := unix.Recvfrom(s.fd, b, 0)
			select {
			case <-stop:
				return
			default:
			}
			if err == nil {
				s.packet(b[:k])
			} else if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
				s.t.Errorf("receive: %v", err)
				return
			}
		}
	}()
	n.t.Cleanup(func() {
		close(stop)
		<-done
		unix.Close(s.fd)
	})
	return s
}

func (s *server) packet(b []byte) {
	source := ""
	switch {
	case len(b) > 40 && b[0]>>4 == 4 && b[9] == 4:
		source, b = netip.AddrFrom4([4]byte(b[12:16])).String(), b[20:]
	case len(b) > 80 && b[0]>>4 == 6 && b[6] == 41:
		source, b = netip.AddrFrom16([16]byte(b[8:24])).String(), b[40:]
	default:
		return
	}
	destination := ""
	switch {
	case b[0]>>4 == 4 && b[9] == 17:
		destination, b = netip.AddrFrom4([4]byte(b[16:20])).String(), b[28:]
	case len(b) >= 56 && b[0]>>4 == 6 && b[6] == 17:
		destination, b = netip.AddrFrom16([16]byte(b[24:40])).String(), b[48:]
	default:
		return
	}
	if len(b) < 8 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[binary.BigEndian.Uint64(b)] = source + " > " + destination
}

// last is how a load's last datagram arrived.
func (s *server) last(l *load) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[l.next-1]
}

// load sends numbered datagrams to a VIP, by turns from several ports.
type load struct {
	n       *network
	s       *server
	sockets []net.Conn
	next    uint64
}

func (n *network) load(s *server, destination string) *load {
	n.t.Helper()
	l := &load{n: n, s: s}
	for range 32 {
		must(n.t, n.nodes["client"].Do(func() error {
			c, err := net.Dial("udp", net.JoinHostPort(destination, "53"))
			l.sockets = append(l.sockets, c)
			return err
		}))
	}
	n.t.Cleanup(func() {
		for _, c := range l.sockets {
			c.Close()
		}
	})
	return l
}

func (l *load) send() uint64 {
	l.n.t.Helper()
	b := binary.BigEndian.AppendUint64(nil, l.next)
	for {
		// A refused datagram of before shows as an error here.
		if _, err := l.sockets[l.next%uint64(len(l.sockets))].Write(b); err == nil {
			break
		} else if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
			l.n.t.Fatal(err)
		}
	}
	l.next++
	return l.next - 1
}

// missing lists datagrams from number on that have not arrived.
func (l *load) missing(from uint64) []uint64 {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	var out []uint64
	for i := from; i < l.next; i++ {
		if _, ok := l.s.seen[i]; !ok {
			out = append(out, i)
		}
	}
	return out
}

// warm sends until a datagram from each port has arrived.
func (l *load) warm() {
	l.n.t.Helper()
	eventually(l.n.t, "datagrams arrive", func() string {
		from := l.next
		for range l.sockets {
			l.send()
		}
		deadline := time.Now().Add(200 * time.Millisecond)
		for time.Now().Before(deadline) {
			if len(l.missing(from)) == 0 {
				return ""
			}
			time.Sleep(time.Millisecond)
		}
		return fmt.Sprintf("%d of %d are missing", len(l.missing(from)), len(l.sockets))
	})
}

// during sends one datagram a millisecond while f runs and says how many were lost.
func (l *load) during(f func()) (sent, lost int) {
	l.n.t.Helper()
	from := l.next
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				l.send()
			}
		}
	}()
	f()
	close(stop)
	<-done
	deadline := time.Now().Add(5 * time.Second)
	for len(l.missing(from)) > 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	return int(l.next - from), len(l.missing(from))
}

// wantNoLoss runs f under load.
func (l *load) wantNoLoss(what string, f func()) {
	l.n.t.Helper()
	sent, lost := l.during(f)
	if lost > 0 {
		l.n.t.Errorf("%s: %d of %d datagrams lost", what, lost, sent)
	}
	l.n.t.Logf("%s: %d datagrams, %d lost", what, sent, lost)
}

// A mux announces nothing before it has complete tables; then packets flow, a
// trace tells why, counters count, and the manager sees what the mux runs.
func TestTablesThenRoutes(t *testing.T) {
	n := newNetwork(t)
	n.certificates()
	n.bird()
	n.mux("m1")
	eventually(t, "m1's session is up", func() string {
		_, text := n.get("m1", "/metrics")
		if !strings.Contains(text, `quartet_mux_bgp_peer_established{asn="65001",peer="10.98.11.1"} 1`) {
			return "it is not"
		}
		return ""
	})
	n.wantReady("m1", "tables: no complete snapshot has come")
	n.wantWays()

	n.manager()
	n.wantReady("m1", "ready")
	n.apply(poolObject)
	r := n.apply(webObject("hash"))
	if r.Rollout.Muxes != 1 || r.Rollout.MuxesAcked != 1 {
		t.Errorf("rollout %v", r.Rollout)
	}
	n.wantWays("m1")

	s := n.server()
	l := n.load(s, vip)
	l.warm()
	if got := s.last(l); got != "10.98.11.2 > "+vip {
		t.Errorf("tunnelled %q", got)
	}
	l6 := n.load(s, vip6)
	l6.next = 1 << 32
	l6.warm()
	if got := s.last(l6); got != "2001:db8:98:11::2 > "+vip6 {
		t.Errorf("tunnelled %q", got)
	}

	trace, err := n.operator().Trace(context.Background(), &quartetv1.TraceRequest{Mux: "m1", Packet: &quartetv1.TracePacket{
		Source: "10.98.1.2", Destination: vip, Protocol: "UDP", SourcePort: 40000, DestinationPort: 53,
	}})
	must(t, err)
	if trace.Mux != "m1" || trace.Exit != "tx" || trace.Verdict != "tx" || trace.Vip != "web" || trace.Tenant != "shop" ||
		trace.Endpoint != "dns" || trace.Dip != dip || trace.DipPort != 5353 || trace.Tunnel != dip || trace.Encapsulation != "ipip" ||
		trace.ChosenBy != "bucket" || trace.Buckets == 0 || trace.Interface != "eth0" || trace.Generation == 0 {
		t.Errorf("trace %v", trace)
	}
	for _, want := range []string{"packet UDP 10.98.1.2:40000 > 203.0.113.10:53, 28 bytes, in by eth0", "VIP web of tenant shop",
		"endpoint dns", "flow hash", "has 10.98.2.2:5353", "ipip to 10.98.2.2 of 48 bytes, by eth0", "exit tx, verdict tx"} {
		if !strings.Contains(strings.Join(trace.Steps, "\n"), want) {
			t.Errorf("no %q in the steps\n%s", want, strings.Join(trace.Steps, "\n"))
		}
	}
	trace, err = n.operator().Trace(context.Background(), &quartetv1.TraceRequest{Packet: &quartetv1.TracePacket{
		Source: "2001:db8:98:1::2", Destination: vip6, Protocol: "TCP", SourcePort: 40000, DestinationPort: 80, Syn: true,
	}})
	must(t, err)
	if trace.Exit != "no_endpoint" || trace.Verdict != "drop" || trace.Dip != "" {
		t.Errorf("trace %v", trace)
	}

	eventually(t, "BFD is up", func() string {
		if _, text := n.get("m1", "/metrics"); !strings.Contains(text, `quartet_mux_bgp_peer_bfd_up{asn="65001",peer="10.98.11.1"} 1`) {
			return "it is not"
		}
		return ""
	})
	_, text := n.get("m1", "/metrics")
	for _, want := range []string{
		`quartet_mux_forwarded_packets_total{address="203.0.113.10",dip="10.98.2.2",endpoint="dns",vip="web"}`,
		`quartet_mux_exits_total{exit="no_endpoint"} 0`, `quartet_mux_announced_prefixes 2`, `quartet_node_manager_connected 1`,
		`quartet_mux_flow_capacity`, `quartet_mux_scrape_error 0`,
		`quartet_build_info{`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in /metrics\n%s", want, text)
		}
	}
	eventually(t, "the manager has counters and BGP state", func() string {
		top, err := n.operator().Top(context.Background(), &quartetv1.TopRequest{})
		must(t, err)
		list, err := n.operator().List(context.Background(), &quartetv1.ListRequest{Kind: "Mux"})
		must(t, err)
		if len(list.Nodes) != 1 || len(top.Counters) != 2 {
			return fmt.Sprint(list.Nodes, top.Counters)
		}
		node := list.Nodes[0]
		if node.State != "ready" || node.Generation != node.GenerationTarget || len(node.BgpPeers) != 1 || node.BgpPeers[0].State != "established" ||
			!node.BgpPeers[0].BfdUp || len(node.Announced) != 2 {
			return node.String()
		}
		s.mu.Lock()
		arrived := uint64(len(s.seen))
		s.mu.Unlock()
		if total := top.Counters[0].Packets + top.Counters[1].Packets; total != arrived {
			return fmt.Sprintf("%d packets counted, %d arrived", total, arrived)
		}
		return ""
	})

	// A pool that announces its VIPs one by one.
	hosts := []netip.Prefix{netip.MustParsePrefix(vip + "/32"), netip.MustParsePrefix(vip6 + "/128")}
	n.wantRoutes(hosts)
	byHost := maps.Clone(poolObject)
	byHost["announce"] = "host"
	n.apply(byHost)
	n.wantRoutes(hosts, "m1")
	n.wantWays()
	l.warm()
	if got := s.last(l); got != "10.98.11.2 > "+vip {
		t.Errorf("by the host route: tunnelled %q", got)
	}
	n.apply(poolObject)
	n.wantWays("m1")
	n.wantRoutes(hosts)
}

// Drained, restarted, killed: the other mux carries on, or the pinned packet
// path does, and no packet is lost.
func TestNoLoss(t *testing.T) {
	n := newNetwork(t)
	n.certificates()
	n.bird()
	n.manager()
	m1 := n.mux("m1")
	n.mux("m2")
	n.wantReady("m1", "ready")
	n.wantReady("m2", "ready")
	n.apply(poolObject, webObject("table"))
	n.wantWays("m1", "m2")
	l := n.load(n.server(), vip)
	l.warm()

	l.wantNoLoss("m2 drained and undrained by the manager", func() {
		if _, err := n.operator().Drain(context.Background(), &quartetv1.DrainRequest{Kind: "mux", Name: "m2"}); err != nil {
			t.Fatal(err)
		}
		n.wantWays("m1")
		n.wantReady("m2", "drain: an operator drains this mux")
		eventually(t, "m2 has withdrawn its routes", func() string {
			if _, text := n.get("m2", "/metrics"); !strings.Contains(text, "quartet_mux_announced_prefixes 0") {
				return "it has not"
			}
			return ""
		})
		n.wantWays("m1")
		if _, err := n.operator().Drain(context.Background(), &quartetv1.DrainRequest{Kind: "mux", Name: "m2", Undo: true}); err != nil {
			t.Fatal(err)
		}
		n.wantWays("m1", "m2")
	})
	l.wantNoLoss("m1 stopped by SIGTERM and started", func() {
		m1.terminate()
		n.wantWays("m2")
		before, err := os.ReadFile(m1.log.Name())
		must(t, err)
		m1 = n.mux("m1")
		n.wantWays("m1", "m2")
		// A VIP may have come meanwhile: the manager speaks before the last good
		// tables are announced.
		text, err := os.ReadFile(m1.log.Name())
		must(t, err)
		since := string(text[len(before):])
		if file, found, routes := strings.Index(since, "last good tables run"), strings.Index(since, "manager found"), strings.Index(since, "msg=routes"); file < 0 || found < 0 || routes < found {
			t.Errorf("routes before the manager's tables:\n%s", since)
		}
	})
	l.wantNoLoss("m1 killed and started", func() {
		m1.kill()
		n.wantWays("m2")
		m1 = n.mux("m1")
		n.wantWays("m1", "m2")
	})
}

// A mux alone, with a route of the operator's own: the packet path forwards
// while no process runs, is adopted with the last good tables while the manager
// is away, and is taken off by detach.
func TestPinnedPacketPath(t *testing.T) {
	n := newNetwork(t)
	n.certificates()
	n.bird()
	manager := n.manager()
	m1 := n.mux("m1")
	n.wantReady("m1", "ready")
	n.apply(poolObject, webObject("table"))
	must(t, n.nodes["router"].AddRoute(fabric.Route{Dst: netip.MustParsePrefix(vip + "/32"), Via: netip.MustParseAddr("10.98.11.2")}))
	l := n.load(n.server(), vip)
	l.warm()
	manager.kill()

	l.wantNoLoss("stopped by SIGTERM", func() {
		m1.terminate()
		n.wantWays()
		m1 = n.mux("m1")
		n.wantWays("m1") // announced from the last good tables
		n.wantReady("m1", "ready")
	})
	l.wantNoLoss("killed", func() {
		m1.kill()
		n.wantWays()
		m1 = n.mux("m1")
		n.wantWays("m1")
	})
	l.wantNoLoss("the manager is back", func() {
		manager = n.manager()
		eventually(t, "m1 reconciles", func() string {
			_, text := n.get("m1", "/metrics")
			if !strings.Contains(text, "quartet_node_manager_connected 1") {
				return "not connected"
			}
			return ""
		})
	})

	m1.terminate()
	if out, err := exec.Command(binaries+"/quartet-mux", "detach", "--pin-dir", n.pin("m1")).CombinedOutput(); err != nil {
		t.Fatalf("detach: %v %s", err, out)
	}
	if _, err := os.Stat(n.pin("m1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left: %v", err)
	}
	if sent, lost := l.during(func() { l.send() }); lost != sent {
		t.Errorf("after detach %d of %d packets were forwarded", sent-lost, sent)
	}

	// The packet path is gone, as after a reboot: it runs the last good tables,
	// but only the manager may say that they are to be announced.
	manager.kill()
	m1 = n.mux("m1", "--detach-on-stop")
	l.warm()
	eventually(t, "m1 lacks nothing but the manager", func() string {
		if _, text := n.get("m1", "/readyz"); text != "tables: no complete snapshot has come\n" {
			return text
		}
		return ""
	})
	n.wantWays()
	n.manager()
	n.wantWays("m1")
	n.wantReady("m1", "ready")
	m1.terminate()
	if _, err := os.Stat(n.pin("m1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left after --detach-on-stop: %v", err)
	}
}

// unreachable lists the unreachable routes of a mux's own.
func (n *network) unreachable(m string) []string {
	n.t.Helper()
	var out []string
	must(n.t, n.nodes[m].Do(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		routes, err := unreachableRoutes(h)
		for p := range routes {
			out = append(out, p.String())
		}
		slices.Sort(out)
		return err
	}))
	return out
}

// A packet to an address of an announced prefix that is no VIP reaches the mux
// once: it does not go to and fro between router and mux until its TTL ends.
func TestUnassignedAddress(t *testing.T) {
	n := newNetwork(t)
	n.certificates()
	n.bird()
	n.manager()
	leftover := netip.MustParsePrefix("198.18.0.0/24")
	must(t, n.nodes["m1"].Do(func() error { return netlink.RouteAdd(unreachableRoute(leftover)) }))
	m1 := n.mux("m1")
	n.wantReady("m1", "ready")
	n.apply(poolObject, webObject("hash"))
	n.wantWays("m1")
	must(t, n.nodes["router"].Nft(`table inet unassigned {
  counter v4 {}
  counter v6 {}
  chain forward { type filter hook forward priority 0;
    oifname "m1" ip daddr 203.0.113.77 counter name v4; oifname "m1" ip6 daddr 2001:db8:100::77 counter name v6; }
}`))
	for _, c := range []struct {
		counter, address string
		level, option    int
	}{
		{"v4", "203.0.113.77", unix.IPPROTO_IP, unix.IP_RECVERR},
		{"v6", "2001:db8:100::77", unix.IPPROTO_IPV6, unix.IPV6_RECVERR},
	} {
		var conn net.Conn
		must(t, n.nodes["client"].Do(func() (err error) {
			conn, err = net.Dial("udp", net.JoinHostPort(c.address, "53"))
			return err
		}))
		defer conn.Close()
		raw, err := conn.(*net.UDPConn).SyscallConn()
		must(t, err)
		must(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), c.level, c.option, 1) }))
		must(t, err)
		_, err = conn.Write([]byte("x"))
		must(t, err)
		must(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
		// An ICMP error comes either way: "unreachable", or "time exceeded" of
		// the packet that looped.
		if _, err = conn.Read(make([]byte, 1)); !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("%s: the client sees %v", c.address, err)
		}
		out, err := n.nodes["router"].Run(fabric.Command{Args: []string{"nft", "list", "counter", "inet", "unassigned", c.counter}})
		must(t, err)
		if !strings.Contains(out, "packets 1 ") {
			t.Errorf("%s: one packet reached the mux more than once: %s", c.address, out)
		}
	}
	s := n.server()
	n.load(s, vip).warm()
	l6 := n.load(s, vip6)
	l6.next = 1 << 32
	l6.warm()

	want := []string{pool6.String(), pool4.String()}
	if got := n.unreachable("m1"); !slices.Equal(got, want) {
		t.Errorf("unreachable routes %v, want %v", got, want)
	}
	if _, text := n.get("m1", "/metrics"); !strings.Contains(text, "quartet_mux_unreachable_prefixes 2") {
		t.Error("no quartet_mux_unreachable_prefixes 2 in /metrics")
	}
	m1.terminate()
	if got := n.unreachable("m1"); !slices.Equal(got, want) {
		t.Errorf("stopped: unreachable routes %v, want %v", got, want)
	}
	detach := exec.Command(binaries+"/quartet-mux", "detach", "--pin-dir", n.pin("m1"))
	must(t, n.nodes["m1"].StartIn(detach))
	must(t, detach.Wait())
	if got := n.unreachable("m1"); len(got) > 0 {
		t.Errorf("detached: unreachable routes %v", got)
	}
	m1 = n.mux("m1", "--detach-on-stop")
	n.wantWays("m1")
	if got := n.unreachable("m1"); !slices.Equal(got, want) {
		t.Errorf("started again: unreachable routes %v, want %v", got, want)
	}
	m1.terminate()
	if got := n.unreachable("m1"); len(got) > 0 {
		t.Errorf("after --detach-on-stop: unreachable routes %v", got)
	}
}
