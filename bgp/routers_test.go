package bgp

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The router and the speakers of these tests, each in a namespace of its own:
//
//	m1 (GoBGP, AS 65101) eth0 10.99.1.2 ─── m1 10.99.1.1 ┐
//	                          2001:db8:1::2  2001:db8:1::1 ├ router (BIRD or FRR, AS 65001)
//	m2 (GoBGP, AS 65102) eth0 10.99.2.2 ─── m2 10.99.2.1 ┘
//	                          2001:db8:2::2  2001:db8:2::1
//
// The speakers are this test binary, run again inside the namespace.

const password = "correct-horse"

func TestMain(m *testing.M) {
	if os.Getenv("BGP_TEST_SPEAKER") != "" {
		if err := speak(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// command is one line to a speaker process; it answers with one line.
type command struct {
	Start  *Config
	Set    []Route
	Do     string // "set", "peers", "stop"
	Answer *answer
}

type answer struct {
	Error string
	Peers []PeerStatus
}

func speak() error {
	in := json.NewDecoder(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	ctx := context.Background()
	var s Speaker
	for {
		var c command
		if err := in.Decode(&c); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		var a answer
		var err error
		switch {
		case c.Start != nil:
			c.Start.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
			s, err = Start(ctx, *c.Start)
		case c.Do == "set":
			err = s.Set(ctx, c.Set)
		case c.Do == "peers":
			a.Peers = s.Peers(ctx)
		case c.Do == "stop":
			stop, cancel := context.WithTimeout(ctx, 10*time.Second)
			err = s.Stop(stop)
			cancel()
		}
		if err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

type speakerProcess struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   *json.Encoder
	out  *json.Decoder
	name string
}

func (s *speakerProcess) do(c command) answer {
	s.t.Helper()
	if err := s.in.Encode(c); err != nil {
		s.t.Fatalf("%s: %v", s.name, err)
	}
	var a answer
	if err := s.out.Decode(&a); err != nil {
		s.t.Fatalf("%s: %v", s.name, err)
	}
	return a
}

func (s *speakerProcess) set(prefixes ...string) {
	s.t.Helper()
	var routes []Route
	for _, p := range prefixes {
		routes = append(routes, Route{Prefix: netip.MustParsePrefix(p)})
	}
	s.setRoutes(routes)
}

func (s *speakerProcess) setRoutes(routes []Route) {
	s.t.Helper()
	if a := s.do(command{Do: "set", Set: routes}); a.Error != "" {
		s.t.Fatalf("%s: %s", s.name, a.Error)
	}
}

func (s *speakerProcess) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

type fabric struct {
	t      *testing.T
	prefix string
	dir    string
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (f *fabric) ns(name string) string { return f.prefix + name }

func (f *fabric) in(ns string, args ...string) string {
	f.t.Helper()
	return run(f.t, "ip", append([]string{"netns", "exec", f.ns(ns)}, args...)...)
}

// newFabric makes the namespaces router, m1 and m2.
func newFabric(t *testing.T) *fabric {
	t.Helper()
	f := &fabric{t: t, prefix: fmt.Sprintf("qbgp%d-", os.Getpid()), dir: t.TempDir()}
	// bgpd and bfdd give up root and need a way to their sockets.
	for d := f.dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o755)
	}
	add := func(name string) {
		run(t, "ip", "netns", "add", f.ns(name))
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", f.ns(name)).Run() })
		f.in(name, "ip", "link", "set", "lo", "up")
		f.in(name, "sysctl", "-qw", "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
			"net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	}
	add("router")
	for i, m := range []string{"m1", "m2"} {
		add(m)
		run(t, "ip", "link", "add", m, "netns", f.ns("router"), "type", "veth", "peer", "name", "eth0", "netns", f.ns(m))
		for _, end := range []struct{ ns, link, host string }{{"router", m, "1"}, {m, "eth0", "2"}} {
			f.in(end.ns, "ip", "addr", "add", fmt.Sprintf("10.99.%d.%s/30", i+1, end.host), "dev", end.link)
			f.in(end.ns, "ip", "addr", "add", fmt.Sprintf("2001:db8:%d::%s/64", i+1, end.host), "dev", end.link, "nodad")
			f.in(end.ns, "ip", "link", "set", end.link, "up")
		}
	}
	return f
}

// daemon runs a process in a namespace until the test ends.
func (f *fabric) daemon(ns string, args ...string) *exec.Cmd {
	f.t.Helper()
	cmd := exec.Command("ip", append([]string{"netns", "exec", f.ns(ns)}, args...)...)
	log, err := os.Create(filepath.Join(f.dir, ns+"-"+filepath.Base(args[0])+".log"))
	if err != nil {
		f.t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if f.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			f.t.Logf("%s:\n%s", filepath.Base(log.Name()), text)
		}
		log.Close()
	})
	return cmd
}

func (f *fabric) speaker(ns string, c Config) *speakerProcess {
	f.t.Helper()
	cmd := exec.Command("ip", "netns", "exec", f.ns(ns), "/proc/self/exe")
	exe, err := os.Executable()
	if err != nil {
		f.t.Fatal(err)
	}
	cmd.Args[len(cmd.Args)-1] = exe
	cmd.Env = append(os.Environ(), "BGP_TEST_SPEAKER=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		f.t.Fatal(err)
	}
	log := &strings.Builder{}
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		f.t.Fatal(err)
	}
	s := &speakerProcess{t: f.t, cmd: cmd, in: json.NewEncoder(in), out: json.NewDecoder(bufio.NewReader(out)), name: ns}
	f.t.Cleanup(func() {
		s.kill()
		if f.t.Failed() {
			f.t.Logf("speaker %s:\n%s", ns, log)
		}
	})
	if a := s.do(command{Start: &c}); a.Error != "" {
		f.t.Fatalf("%s: %s", ns, a.Error)
	}
	return s
}

// config is speaker m1's or m2's, with an IPv4 session that carries both families.
func config(m int, p Peer) Config {
	p.Address, p.ASN = netip.MustParseAddr(fmt.Sprintf("10.99.%d.1", m)), 65001
	return Config{
		ASN: uint32(65100 + m), RouterID: netip.MustParseAddr(fmt.Sprintf("10.99.%d.2", m)), Peers: []Peer{p},
	}
}

func nextHop6(m int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("2001:db8:%d::2", m)) }

// within polls until ok says "".
func (f *fabric) within(d time.Duration, what string, ok func() string) time.Duration {
	f.t.Helper()
	start := time.Now()
	for {
		state := ok()
		if state == "" {
			return time.Since(start)
		}
		if time.Since(start) > d {
			f.t.Fatalf("%s: not within %s: %s", what, d, state)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// nextHops are the gateways of a prefix in the router's kernel.
func (f *fabric) nextHops(prefix string) string {
	f.t.Helper()
	version := "-4"
	if strings.Contains(prefix, ":") {
		version = "-6"
	}
	var routes []struct {
		Gateway  string
		Nexthops []struct{ Gateway string }
	}
	if err := json.Unmarshal([]byte(f.in("router", "ip", "-j", version, "route", "show", prefix)), &routes); err != nil {
		f.t.Fatal(err)
	}
	var hops []string
	for _, r := range routes {
		if r.Gateway != "" {
			hops = append(hops, r.Gateway)
		}
		for _, n := range r.Nexthops {
			hops = append(hops, n.Gateway)
		}
	}
	slices.Sort(hops)
	return strings.Join(hops, " ")
}

func (f *fabric) wantHops(prefix, want string) time.Duration {
	f.t.Helper()
	return f.within(30*time.Second, prefix+" via "+want, func() string {
		if got := f.nextHops(prefix); got != want {
			return fmt.Sprintf("it is via %q", got)
		}
		return ""
	})
}

// router is a real routing daemon under test.
type router struct {
	name  string
	start func(f *fabric, o routerOptions)
	// sessions describes the router's view of m's session, and says whether it is up.
	established func(f *fabric, m int) bool
}

type routerOptions struct {
	bfd      string // "" or the interval in ms
	hold     int    // seconds
	announce string // a prefix that the router announces to the speakers
}

var routers = []router{
	{name: "BIRD", start: startBird, established: func(f *fabric, m int) bool {
		return strings.Contains(f.in("router", "birdc", "-s", f.dir+"/bird.ctl", "show", "protocols", fmt.Sprintf("m%d", m)), "Established")
	}},
	{name: "FRR", start: startFRR, established: func(f *fabric, m int) bool {
		out, _ := exec.Command("ip", "netns", "exec", f.ns("router"), "vtysh", "--vty_socket", f.dir, "-c",
			fmt.Sprintf("show bgp neighbor 10.99.%d.2 json", m)).Output()
		return strings.Contains(string(out), `"bgpState":"Established"`)
	}},
}

func startBird(f *fabric, o routerOptions) {
	f.t.Helper()
	var b strings.Builder
	fmt.Fprintln(&b, "router id 10.99.0.1;\nlog stderr all;\nprotocol device { }")
	for _, v := range []string{"4", "6"} {
		fmt.Fprintf(&b, "protocol kernel { ipv%s { export where source = RTS_BGP; }; merge paths on; }\n", v)
	}
	fmt.Fprintln(&b, "protocol bfd { }")
	if o.announce != "" {
		fmt.Fprintf(&b, "protocol static { ipv4; route %s blackhole; }\n", o.announce)
	}
	for m := 1; m <= 2; m++ {
		bfd := ""
		if o.bfd != "" {
			bfd = fmt.Sprintf("bfd { interval %s ms; multiplier 3; };", o.bfd)
		}
		fmt.Fprintf(&b, `protocol bgp m%d {
  local as 65001; neighbor 10.99.%d.2 as %d; password "%s"; hold time %d; connect delay time 1; connect retry time 1; error wait time 1,1;
  ipv4 { import all; export all; }; ipv6 { import all; export none; }; %s
}
`, m, m, 65100+m, password, o.hold, bfd)
	}
	path := filepath.Join(f.dir, "bird.conf")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		f.t.Fatal(err)
	}
	f.daemon("router", "bird", "-f", "-c", path, "-s", f.dir+"/bird.ctl", "-P", f.dir+"/bird.pid")
}

func startFRR(f *fabric, o routerOptions) {
	f.t.Helper()
	var b strings.Builder
	fmt.Fprintln(&b, "router bgp 65001\n bgp router-id 10.99.0.1\n no bgp ebgp-requires-policy\n no bgp network import-check\n bgp bestpath as-path multipath-relax")
	for m := 1; m <= 2; m++ {
		n := fmt.Sprintf(" neighbor 10.99.%d.2", m)
		fmt.Fprintf(&b, "%s remote-as %d\n%s password %s\n%s timers %d %d\n%s timers connect 1\n", n, 65100+m, n, password, n, max(o.hold/3, 1), o.hold, n)
		if o.bfd != "" {
			fmt.Fprintf(&b, "%s bfd\n%s bfd profile quartet\n", n, n)
		}
	}
	for _, v := range []string{"ipv4", "ipv6"} {
		fmt.Fprintf(&b, " address-family %s unicast\n  maximum-paths 8\n", v)
		if o.announce != "" && v == "ipv4" {
			fmt.Fprintf(&b, "  network %s\n", o.announce)
		}
		for m := 1; m <= 2; m++ {
			fmt.Fprintf(&b, "  neighbor 10.99.%d.2 activate\n", m)
		}
		fmt.Fprintln(&b, " exit-address-family")
	}
	configs := map[string]string{"bgpd": b.String(), "zebra": ""}
	if o.bfd != "" {
		configs["bfdd"] = fmt.Sprintf("bfd\n profile quartet\n  detect-multiplier 3\n  receive-interval %s\n  transmit-interval %s\n", o.bfd, o.bfd)
	}
	for name, text := range configs {
		if err := os.WriteFile(filepath.Join(f.dir, name+".conf"), []byte(text), 0o644); err != nil {
			f.t.Fatal(err)
		}
	}
	run(f.t, "chown", "frr:frr", f.dir)
	zserv := f.dir + "/zserv.api"
	common := func(name string) []string {
		return []string{"/usr/lib/frr/" + name, "--vty_socket", f.dir, "-A", "127.0.0.1",
			"-i", f.dir + "/" + name + ".pid", "-f", f.dir + "/" + name + ".conf", "-z", zserv, "--log", "stdout"}
	}
	f.daemon("router", common("zebra")...)
	f.within(20*time.Second, "zebra", func() string {
		if _, err := os.Stat(zserv); err != nil {
			return err.Error()
		}
		return ""
	})
	if o.bfd != "" {
		f.daemon("router", append(common("bfdd"), "--bfdctl", f.dir+"/bfdd.sock")...)
	}
	f.daemon("router", common("bgpd")...)
}

func (f *fabric) peer(s *speakerProcess) PeerStatus {
	f.t.Helper()
	return s.do(command{Do: "peers"}).Peers[0]
}

func (f *fabric) wantEstablished(s *speakerProcess) {
	f.t.Helper()
	f.within(30*time.Second, s.name+" session", func() string {
		if p := f.peer(s); p.State != "established" {
			return "state " + p.State
		}
		return ""
	})
}

func eachRouter(t *testing.T, test func(t *testing.T, f *fabric, r router)) {
	for _, r := range routers {
		t.Run(r.name, func(t *testing.T) { test(t, newFabric(t), r) })
	}
}

// Two speakers, both families over MD5 sessions; ECMP; changes; the router's
// own routes are not passed on; a stop withdraws.
func TestAnnounceAndWithdraw(t *testing.T) {
	eachRouter(t, func(t *testing.T, f *fabric, r router) {
		r.start(f, routerOptions{hold: 30, announce: "192.0.2.0/24"})
		m1 := f.speaker("m1", config(1, Peer{Password: password, NextHop6: nextHop6(1)}))
		m2 := f.speaker("m2", config(2, Peer{Password: password, NextHop6: nextHop6(2)}))
		f.wantEstablished(m1)
		f.wantEstablished(m2)
		for _, p := range []string{"203.0.113.0/24", "2001:db8:100::/64"} {
			if hops := f.nextHops(p); hops != "" {
				t.Errorf("%s via %q before anybody announced it", p, hops)
			}
		}
		m1.set("203.0.113.0/24", "2001:db8:100::/64", "203.0.113.7/32")
		f.wantHops("203.0.113.0/24", "10.99.1.2")
		f.wantHops("203.0.113.7/32", "10.99.1.2")
		f.wantHops("2001:db8:100::/64", "2001:db8:1::2")
		m2.set("203.0.113.0/24", "2001:db8:100::/64")
		f.wantHops("203.0.113.0/24", "10.99.1.2 10.99.2.2")
		f.wantHops("2001:db8:100::/64", "2001:db8:1::2 2001:db8:2::2")

		m1.set("203.0.113.0/24", "2001:db8:100::/64", "203.0.113.8/32")
		f.wantHops("203.0.113.8/32", "10.99.1.2")
		f.wantHops("203.0.113.7/32", "")

		if a := m1.do(command{Do: "stop"}); a.Error != "" {
			t.Errorf("stop: %s", a.Error)
		}
		f.wantHops("203.0.113.0/24", "10.99.2.2")
		f.wantHops("2001:db8:100::/64", "2001:db8:2::2")
		f.wantHops("203.0.113.8/32", "")
		if a := m1.do(command{Do: "set", Set: []Route{{Prefix: netip.MustParsePrefix("203.0.113.0/24")}}}); !strings.Contains(a.Error, "stopped") {
			t.Errorf("set after stop: error %q", a.Error)
		}
	})
}

// A mux whose VIPs are announced one by one: thousands of host routes come, most
// go and some come again.
func TestManyRoutes(t *testing.T) {
	f := newFabric(t)
	startBird(f, routerOptions{hold: 30})
	m1 := f.speaker("m1", config(1, Peer{Password: password}))
	f.wantEstablished(m1)
	host := func(i int) string { return fmt.Sprintf("203.%d.%d.%d/32", i>>16, i>>8&255, i&255) }
	for _, c := range []struct{ from, to int }{{0, 5000}, {4000, 6000}, {0, 0}, {5999, 6000}} {
		var prefixes []string
		for i := c.from; i < c.to; i++ {
			prefixes = append(prefixes, host(i))
		}
		m1.set(prefixes...)
		f.within(30*time.Second, fmt.Sprintf("routes %d to %d", c.from, c.to), func() string {
			n := strings.Count(f.in("router", "ip", "-4", "route", "show", "proto", "bird"), "via 10.99.1.2")
			if n != c.to-c.from {
				return fmt.Sprintf("%d routes", n)
			}
			return ""
		})
		if c.to > c.from && (f.nextHops(host(c.from)) == "" || f.nextHops(host(c.to-1)) == "") {
			t.Errorf("not the routes from %d to %d", c.from, c.to)
		}
	}
}

// What the router announces must not come back to it from the other speaker,
// nor a speaker's routes by way of the other.
func TestNoTransit(t *testing.T) {
	f := newFabric(t)
	startBird(f, routerOptions{hold: 30, announce: "192.0.2.0/24"})
	m1 := f.speaker("m1", config(1, Peer{Password: password}))
	m2 := f.speaker("m2", config(2, Peer{Password: password}))
	f.wantEstablished(m1)
	f.wantEstablished(m2)
	m1.set("203.0.113.0/24")
	m2.set("203.0.113.128/25")
	f.wantHops("203.0.113.0/24", "10.99.1.2")
	f.wantHops("203.0.113.128/25", "10.99.2.2")
	for _, m := range []string{"m1", "m2"} {
		out := f.in("router", "birdc", "-s", f.dir+"/bird.ctl", "show", "route", "all", "protocol", m)
		if n := strings.Count(out, "BGP.as_path:"); n != 1 {
			t.Errorf("%s announces %d routes, want its own one:\n%s", m, n, out)
		}
	}
}

// Communities reach the router: drain's graceful shutdown and a black hole.
func TestCommunities(t *testing.T) {
	f := newFabric(t)
	startBird(f, routerOptions{hold: 30})
	m1 := f.speaker("m1", config(1, Peer{Password: password}))
	f.wantEstablished(m1)
	m1.setRoutes([]Route{
		{Prefix: netip.MustParsePrefix("203.0.113.0/24"), Communities: []Community{GracefulShutdown}},
		{Prefix: netip.MustParsePrefix("203.0.113.9/32"), Communities: []Community{Blackhole, NoExport}},
	})
	f.wantHops("203.0.113.0/24", "10.99.1.2")
	f.wantHops("203.0.113.9/32", "10.99.1.2")
	for prefix, want := range map[string]string{"203.0.113.0/24": "(65535,0)", "203.0.113.9/32": "(65535,666) (65535,65281)"} {
		out := f.in("router", "birdc", "-s", f.dir+"/bird.ctl", "show", "route", "all", prefix)
		if !strings.Contains(out, "BGP.community: "+want) {
			t.Errorf("%s: no community %s in\n%s", prefix, want, out)
		}
	}
}

// IPv6 prefixes over an IPv6 session of their own.
func TestIPv6Session(t *testing.T) {
	f := newFabric(t)
	conf := fmt.Sprintf(`router id 10.99.0.1; log stderr all; protocol device { }
protocol kernel { ipv6 { export where source = RTS_BGP; }; }
protocol bgp m1 { local as 65001; neighbor 2001:db8:1::2 as 65101; password "%s"; connect delay time 1; ipv6 { import all; export none; }; }
`, password)
	path := filepath.Join(f.dir, "bird.conf")
	if err := os.WriteFile(path, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	f.daemon("router", "bird", "-f", "-c", path, "-s", f.dir+"/bird.ctl", "-P", f.dir+"/bird.pid")
	m1 := f.speaker("m1", Config{ASN: 65101, RouterID: netip.MustParseAddr("10.99.1.2"), Peers: []Peer{
		{Address: netip.MustParseAddr("2001:db8:1::1"), ASN: 65001, Password: password},
	}})
	m1.set("2001:db8:100::/64", "203.0.113.0/24")
	f.wantHops("2001:db8:100::/64", "2001:db8:1::2")
}

// A wrong password never gets a session, and a right one beside it does.
func TestWrongPassword(t *testing.T) {
	eachRouter(t, func(t *testing.T, f *fabric, r router) {
		r.start(f, routerOptions{hold: 30})
		m1 := f.speaker("m1", config(1, Peer{Password: "wrong"}))
		m2 := f.speaker("m2", config(2, Peer{Password: password}))
		dropped := func() int {
			var n int
			for _, ns := range []string{"router", "m1"} {
				for line := range strings.SplitSeq(f.in(ns, "nstat", "-asz", "TcpExtTCPMD5Failure"), "\n") {
					var name string
					var count int
					if k, _ := fmt.Sscan(line, &name, &count); k == 2 && name == "TcpExtTCPMD5Failure" {
						n += count
					}
				}
			}
			return n
		}
		f.wantEstablished(m2)
		f.within(30*time.Second, "segments with a wrong signature", func() string {
			if n := dropped(); n < 3 {
				return fmt.Sprintf("%d dropped", n)
			}
			return ""
		})
		if p := f.peer(m1); p.State == "established" || r.established(f, 1) {
			t.Errorf("a session came up with the wrong password: %+v", p)
		}
	})
}

// silence drops everything that arrives at or leaves from m1: it is dead, but
// no carrier is lost and no connection closed.
func (f *fabric) silence(ns string) {
	f.t.Helper()
	f.in(ns, "nft", "add table inet silence; add chain inet silence in { type filter hook prerouting priority -500; policy drop; }; "+
		"add chain inet silence out { type filter hook output priority -500; policy drop; }")
}

// A speaker that dies silently is out of the router's FIB when the hold time
// ends, not before, and the speaker sees its session end too.
func TestHoldTime(t *testing.T) {
	eachRouter(t, func(t *testing.T, f *fabric, r router) {
		r.start(f, routerOptions{hold: 3})
		m1 := f.speaker("m1", config(1, Peer{Password: password, HoldTime: 3 * time.Second}))
		m2 := f.speaker("m2", config(2, Peer{Password: password, HoldTime: 3 * time.Second}))
		f.wantEstablished(m1)
		m1.set("203.0.113.0/24")
		m2.set("203.0.113.0/24")
		f.wantHops("203.0.113.0/24", "10.99.1.2 10.99.2.2")
		f.silence("m1")
		took := f.wantHops("203.0.113.0/24", "10.99.2.2")
		t.Logf("route gone after %s", took)
		f.within(10*time.Second, "m1 sees it", func() string {
			if p := f.peer(m1); p.State == "established" {
				return p.State
			}
			return ""
		})
	})
}

// BFD finds a silent death long before the hold time of 240 s could, in either
// direction, and the session comes back when the link does.
func TestBFD(t *testing.T) {
	eachRouter(t, func(t *testing.T, f *fabric, r router) {
		bfd := BFD{Interval: 50 * time.Millisecond, Multiplier: 3}
		interval := "50"
		r.start(f, routerOptions{hold: 240, bfd: interval})
		m1 := f.speaker("m1", config(1, Peer{Password: password, HoldTime: 240 * time.Second, BFD: bfd}))
		m2 := f.speaker("m2", config(2, Peer{Password: password, HoldTime: 240 * time.Second, BFD: bfd}))
		bfdUp := func(s *speakerProcess) {
			t.Helper()
			f.within(30*time.Second, s.name+" BFD", func() string {
				if p := f.peer(s); !p.BFDUp || p.State != "established" {
					return fmt.Sprintf("%+v", p)
				}
				return ""
			})
		}
		m1.set("203.0.113.0/24")
		m2.set("203.0.113.0/24")
		bfdUp(m1)
		bfdUp(m2)
		f.wantHops("203.0.113.0/24", "10.99.1.2 10.99.2.2")
		f.silence("m1")
		took := f.wantHops("203.0.113.0/24", "10.99.2.2")
		t.Logf("route gone %s after the silence began", took)
		f.within(10*time.Second, "m1 sees it", func() string {
			if p := f.peer(m1); p.BFDUp || p.State == "established" {
				return fmt.Sprintf("%+v", p)
			}
			return ""
		})
		f.in("m1", "nft", "delete table inet silence")
		bfdUp(m1)
		f.wantHops("203.0.113.0/24", "10.99.1.2 10.99.2.2")
	})
}

// A killed speaker's connections close, which the router sees at once.
func TestKilled(t *testing.T) {
	f := newFabric(t)
	startBird(f, routerOptions{hold: 240})
	m1 := f.speaker("m1", config(1, Peer{Password: password, HoldTime: 240 * time.Second}))
	m1.set("203.0.113.0/24")
	f.wantHops("203.0.113.0/24", "10.99.1.2")
	m1.kill()
	f.wantHops("203.0.113.0/24", "")
}

func TestPortTaken(t *testing.T) {
	f := newFabric(t)
	f.speaker("m1", config(1, Peer{}))
	cmd := exec.Command("ip", "netns", "exec", f.ns("m1"), os.Args[0])
	cmd.Env = append(os.Environ(), "BGP_TEST_SPEAKER=1")
	c := config(1, Peer{})
	line, err := json.Marshal(command{Start: &c})
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = strings.NewReader(string(line))
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), "start BGP: listen on port 179: another process has this port") {
		t.Errorf("second speaker: %v, %s", err, out)
	}
}
