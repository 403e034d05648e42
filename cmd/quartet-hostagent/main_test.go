package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/encap"
	"github.com/quartet-lb/quartet/lb"
)

// site is two namespaces with the real binaries in them:
//
//	client ──────────────────────── host
//	eth0 198.51.100.7, 10.1.0.1     eth0 10.1.0.2: quartet-hostagent
//	quartet-manager; the test is    lo 10.1.3.11 (DIP): UDP echo on 5353,
//	client and mux                  HTTP health on 8080
type site struct {
	t              *testing.T
	dir, prefix    string
	operator       quartetv1connect.OperatorServiceClient
	manager, agent *process
}

const (
	clientAddr = "198.51.100.7"
	muxAddr    = "10.1.0.1"
	hostAddr   = "10.1.0.2"
	dipAddr    = "10.1.3.11"
	vipAddr    = "203.0.113.10"
	metrics    = "127.0.0.1:7472"
)

func newSite(t *testing.T) *site {
	s := &site{t: t, dir: t.TempDir(), prefix: fmt.Sprintf("qhd%d-", os.Getpid())}
	for _, ns := range []string{"client", "host"} {
		s.sh("ip netns add " + s.prefix + ns)
		t.Cleanup(func() { s.sh("ip netns del " + s.prefix + ns) })
		s.sh("ip -n " + s.prefix + ns + " link set lo up")
	}
	s.sh("ip -n " + s.prefix + "client link add eth0 type veth peer name eth0 netns " + s.prefix + "host")
	for _, c := range []string{
		"client link set eth0 up", "host link set eth0 up",
		"client addr add 198.51.100.7/32 dev lo", "client addr add 10.1.0.1/24 dev eth0",
		"client route add 10.1.3.0/24 via 10.1.0.2", "client route add 203.0.113.0/24 via 10.1.0.2",
		"host addr add 10.1.0.2/24 dev eth0", "host addr add 10.1.3.11/32 dev lo",
		"host route add default via 10.1.0.1",
	} {
		s.sh("ip -n " + s.prefix + c)
	}
	for _, command := range []string{"quartet-manager", "quartet-hostagent"} {
		if out, err := exec.Command("go", "build", "-o", s.dir, "../"+command).CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v: %s", command, err, out)
		}
	}
	must(t, certs.Init(s.dir))
	must(t, certs.Issue(s.dir, certs.Manager, "manager", []string{muxAddr}))
	must(t, certs.Issue(s.dir, certs.Host, "host1", nil))
	must(t, certs.Issue(s.dir, certs.Operator, "alice", nil))
	tlsConfig, err := certs.LoadClient(s.file("ca.crt"), s.file("alice.crt"), s.file("alice.key"))
	must(t, err)
	s.operator = quartetv1connect.NewOperatorServiceClient(&http.Client{Transport: &http.Transport{
		TLSClientConfig: tlsConfig, DialContext: s.dialIn("client"), ForceAttemptHTTP2: true,
	}}, "https://"+muxAddr+":7470")
	t.Cleanup(func() {
		for _, p := range []*process{s.agent, s.manager} {
			if p != nil {
				p.stop(syscall.SIGKILL)
			}
		}
		s.run("detach", "--pin-dir", s.pins())
		os.Remove(s.pins())
		if t.Failed() {
			logs, _ := filepath.Glob(s.file("*.log"))
			for _, l := range logs {
				text, _ := os.ReadFile(l)
				t.Logf("%s:\n%s", filepath.Base(l), text)
			}
		}
	})
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (s *site) file(name string) string { return filepath.Join(s.dir, name) }
func (s *site) pins() string            { return "/sys/fs/bpf/" + s.prefix + "host" }

func (s *site) sh(command string) {
	s.t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		s.t.Errorf("%s: %v: %s", command, err, out)
	}
}

// in runs f in a namespace, on a thread that ends with it.
func (s *site) in(ns string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		fd, err := unix.Open("/run/netns/"+s.prefix+ns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd)
			err = unix.Setns(fd, unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

func (s *site) dialIn(ns string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = s.in(ns, func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
}

// process is a daemon in a namespace.
type process struct {
	command *exec.Cmd
	exited  chan struct{}
}

func (s *site) start(ns, log, program string, args ...string) *process {
	s.t.Helper()
	out, err := os.OpenFile(s.file(log), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	must(s.t, err)
	defer out.Close()
	p := &process{exited: make(chan struct{})}
	p.command = exec.Command("nsenter", append([]string{"--net=/run/netns/" + s.prefix + ns, s.file(program)}, args...)...)
	p.command.Stdout, p.command.Stderr = out, out
	must(s.t, p.command.Start())
	go func() {
		p.command.Wait()
		close(p.exited)
	}()
	return p
}

func (p *process) stop(signal syscall.Signal) {
	p.command.Process.Signal(signal)
	<-p.exited
}

func (s *site) startManager() {
	s.manager = s.start("client", "manager.log", "quartet-manager", "--name", "m1", "--data-dir", s.file("data"),
		"--listen", muxAddr+":7470", "--ca", s.file("ca.crt"), "--cert", s.file("manager.crt"), "--key", s.file("manager.key"))
}

func (s *site) agentArgs() []string {
	return []string{"--name", "host1", "--address", hostAddr, "--manager", "https://" + muxAddr + ":7470",
		"--ca", s.file("ca.crt"), "--cert", s.file("host1.crt"), "--key", s.file("host1.key"),
		"--interface", "eth0", "--pin-dir", s.pins(), "--state-dir", s.file("state"), "--metrics-listen", metrics}
}

func (s *site) startAgent() {
	s.agent = s.start("host", "agent.log", "quartet-hostagent", s.agentArgs()...)
}

// run runs a command of the agent's binary in the host to its end.
func (s *site) run(args ...string) (output string, status int) {
	command := exec.Command("nsenter", append([]string{"--net=/run/netns/" + s.prefix + "host", s.file("quartet-hostagent")}, args...)...)
	out, err := command.CombinedOutput()
	if e := (*exec.ExitError)(nil); err != nil && !errors.As(err, &e) {
		s.t.Error(err)
	}
	return string(out), command.ProcessState.ExitCode()
}

// attached says whether the host's uplink has an XDP program.
func (s *site) attached() bool {
	out, err := exec.Command("ip", "-n", s.prefix+"host", "link", "show", "eth0").CombinedOutput()
	must(s.t, err)
	return bytes.Contains(out, []byte("xdp"))
}

// until polls until what holds.
func (s *site) until(what string, holds func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); {
		if time.Now().After(deadline) {
			s.t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// get is a page of the agent's metrics server.
func (s *site) get(path string) (string, bool) {
	client := http.Client{Transport: &http.Transport{DialContext: s.dialIn("host"), DisableKeepAlives: true}}
	r, err := client.Get("http://" + metrics + path)
	if err != nil {
		return err.Error(), false
	}
	defer r.Body.Close()
	text, _ := io.ReadAll(r.Body)
	return string(text), r.StatusCode == http.StatusOK
}

func (s *site) untilReady() {
	s.t.Helper()
	s.until("the agent is ready", func() bool { _, ok := s.get("/readyz"); return ok })
}

func (s *site) apply(objects ...map[string]any) {
	s.t.Helper()
	request := &quartetv1.ApplyRequest{}
	for _, o := range objects {
		object, err := structpb.NewStruct(o)
		must(s.t, err)
		request.Objects = append(request.Objects, object)
	}
	_, err := s.operator.Apply(s.t.Context(), request)
	must(s.t, err)
}

// dipState is the manager's word on the DIP's health.
func (s *site) dipState() string {
	response, err := s.operator.List(s.t.Context(), &quartetv1.ListRequest{Kind: "Dip"})
	if err != nil || len(response.Dips) != 1 {
		return fmt.Sprint(err)
	}
	return response.Dips[0].State
}

var (
	pool = map[string]any{"kind": "VipPool", "name": "p", "prefixes": []any{"203.0.113.0/24"}}
	vip  = map[string]any{"kind": "Vip", "name": "dns", "addresses": []any{vipAddr}, "endpoints": []any{map[string]any{
		"protocol": "UDP", "port": 53,
		"backends": []any{map[string]any{"dip": dipAddr, "host": hostAddr, "port": 5353}},
		"health": map[string]any{"http": map[string]any{"path": "/healthz"}, "port": 8080,
			"interval": "200ms", "timeout": "100ms", "rise": 1, "fall": 2},
	}}}
)

// serveEcho answers UDP on the DIP for the test's time.
func (s *site) serveEcho() {
	must(s.t, s.in("host", func() error {
		c, err := net.ListenPacket("udp4", dipAddr+":5353")
		if err != nil {
			return err
		}
		s.t.Cleanup(func() { c.Close() })
		go func() {
			for buffer := make([]byte, 2000); ; {
				n, from, err := c.ReadFrom(buffer)
				if err != nil {
					return
				}
				c.WriteTo(buffer[:n], from)
			}
		}()
		return nil
	}))
}

// serveHealth answers health checks until stop is called.
func (s *site) serveHealth() (stop func()) {
	server := &http.Server{Handler: http.NotFoundHandler()}
	handler := http.NewServeMux()
	handler.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
	server.Handler = handler
	must(s.t, s.in("host", func() error {
		l, err := net.Listen("tcp", dipAddr+":8080")
		if err == nil {
			go server.Serve(l)
		}
		return err
	}))
	return func() { server.Close() }
}

// pinger is client and mux: it sends numbered datagrams to the VIP, each
// encapsulated to the DIP, and looks for the echoes from the VIP.
type pinger struct {
	raw      int
	socket   *net.UDPConn
	sent     atomic.Uint64
	echoed   atomic.Uint64
	mu       sync.Mutex
	answered map[uint64]bool // guarded by mu
}

func (s *site) newPinger() *pinger {
	p := &pinger{answered: map[uint64]bool{}}
	must(s.t, s.in("client", func() (err error) {
		if p.raw, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW); err != nil {
			return err
		}
		p.socket, err = net.DialUDP("udp4",
			net.UDPAddrFromAddrPort(netip.MustParseAddrPort(clientAddr+":40000")),
			net.UDPAddrFromAddrPort(netip.MustParseAddrPort(vipAddr+":53")))
		return err
	}))
	s.t.Cleanup(func() { unix.Close(p.raw); p.socket.Close() })
	go func() {
		for buffer := make([]byte, 2000); ; {
			n, err := p.socket.Read(buffer)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil && n == 8 {
				p.mu.Lock()
				p.answered[binary.BigEndian.Uint64(buffer)] = true
				p.mu.Unlock()
				p.echoed.Add(1)
			}
		}
	}()
	return p
}

func (p *pinger) send() error {
	inner := make([]byte, 36)
	inner[0], inner[3], inner[6], inner[8], inner[9] = 0x45, 36, 0x40, 64, byte(lb.UDP)
	copy(inner[12:], netip.MustParseAddr(clientAddr).AsSlice())
	copy(inner[16:], netip.MustParseAddr(vipAddr).AsSlice())
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(inner[i:]))
	}
	binary.BigEndian.PutUint16(inner[10:], ^uint16(sum+sum>>16))
	binary.BigEndian.PutUint16(inner[20:], 40000)
	binary.BigEndian.PutUint16(inner[22:], 53)
	inner[25] = 16 // no checksum
	binary.BigEndian.PutUint64(inner[28:], p.sent.Load())
	dip := netip.MustParseAddr(dipAddr)
	packet, err := encap.Encapsulate(lb.Tunnel{Dst: dip}, netip.MustParseAddr(muxAddr), 1, inner)
	if err != nil {
		return err
	}
	p.sent.Add(1)
	return unix.Sendto(p.raw, packet, 0, &unix.SockaddrInet4{Addr: dip.As4()})
}

// echoes says whether a datagram sent comes back within a moment.
func (p *pinger) echoes() bool {
	before := p.echoed.Load()
	if p.send() != nil {
		return false
	}
	for deadline := time.Now().Add(50 * time.Millisecond); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if p.echoed.Load() > before {
			return true
		}
	}
	return false
}

// stream sends a datagram a millisecond until stop, which waits for the last
// echoes and says how many were sent and how many were lost.
func (s *site) stream(p *pinger) (stop func() (sent, lost int)) {
	first := p.sent.Load()
	p.echoed.Store(first) // those lost before don't count
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(time.Millisecond); ; {
			select {
			case <-end:
				return
			case <-tick.C:
				// A busy machine must not overflow the sockets' buffers.
				if p.sent.Load()-p.echoed.Load() > 64 {
					continue
				}
				if err := p.send(); err != nil {
					s.t.Error(err)
					return
				}
			}
		}
	}()
	return func() (sent, lost int) {
		close(end)
		<-ended
		last := p.sent.Load()
		for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
			p.mu.Lock()
			lost = 0
			for i := first; i < last; i++ {
				if !p.answered[i] {
					lost++
				}
			}
			p.mu.Unlock()
			if lost == 0 {
				break
			}
		}
		return int(last - first), lost
	}
}

func TestHostAgent(t *testing.T) {
	s := newSite(t)
	s.serveEcho()
	stopHealth := s.serveHealth()
	s.startManager()
	s.startAgent()
	s.untilReady()
	p := s.newPinger()
	if p.echoes() {
		t.Fatal("a datagram came back before there was a VIP")
	}
	s.apply(pool, vip)
	s.until("datagrams to the VIP come back from the VIP", p.echoes)
	s.until("the DIP is healthy", func() bool { return s.dipState() == "healthy" })

	// A server that dies leaves rotation, and returns.
	killed := time.Now()
	stopHealth()
	s.until("the DIP is unhealthy", func() bool { return s.dipState() == "unhealthy" })
	t.Logf("out of rotation %d ms after its death; interval × fall is 400 ms", time.Since(killed).Milliseconds())
	stopHealth = s.serveHealth()
	defer stopHealth()
	s.until("the DIP is healthy again", func() bool { return s.dipState() == "healthy" })

	// What the agent counts, it shows and reports.
	page, _ := s.get("/metrics")
	for _, want := range []string{
		`quartet_hostagent_exits_total{exit="in_delivered"} `, `quartet_hostagent_exits_total{exit="out_translated"} `,
		`quartet_hostagent_checked_dips{status="healthy"} 1`, `quartet_node_manager_connected 1`,
		`quartet_hostagent_checks_total{kind="http",result="failure"} `, `quartet_hostagent_flows{table="trusted"} `,
	} {
		if !strings.Contains(page, "\n"+want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	s.until("the manager shows the agent's counters", func() bool {
		r, err := s.operator.Top(t.Context(), &quartetv1.TopRequest{})
		if err != nil {
			return false
		}
		for _, n := range r.Nodes {
			if n.Node == "host1" && n.Role == "host" && n.Exits["in_delivered"] > 0 {
				return true
			}
		}
		return false
	})

	// No packet is lost while the agent is killed, restarted, stopped, and
	// restarted while the manager is away.
	stop := s.stream(p)
	through := func() {
		t.Helper()
		mark := p.echoed.Load() + 100
		s.until("packets keep flowing", func() bool { return p.echoed.Load() >= mark })
	}
	through()
	s.agent.stop(syscall.SIGKILL)
	through()
	s.startAgent()
	s.untilReady()
	through()
	s.agent.stop(syscall.SIGTERM)
	through()
	s.manager.stop(syscall.SIGKILL)
	s.startAgent()
	s.untilReady()
	through()
	if page, _ := s.get("/metrics"); !strings.Contains(page, "\nquartet_node_manager_connected 0") {
		t.Error("the agent says that the manager is there")
	}
	if sent, lost := stop(); lost != 0 {
		t.Errorf("%d of %d datagrams lost over restarts", lost, sent)
	} else {
		t.Logf("none of %d datagrams lost over restarts", sent)
	}

	// The manager returns and is told what the health is.
	s.startManager()
	s.until("the DIP is healthy once the manager is back", func() bool { return s.dipState() == "healthy" })

	// What changed while the agent was away is put right when it is back.
	s.agent.stop(syscall.SIGTERM)
	_, err := s.operator.Delete(t.Context(), &quartetv1.DeleteRequest{
		Objects: []*quartetv1.ObjectRef{{Kind: "Vip", Name: "dns"}}, WaitMs: 1, // the agent is away
	})
	must(t, err)
	if !p.echoes() {
		t.Error("the packet path stopped with the agent")
	}
	s.startAgent()
	s.untilReady()
	s.until("the deleted VIP is not answered", func() bool {
		for range 3 {
			if p.echoes() {
				return false
			}
		}
		return true
	})

	// Detached, nothing is left.
	s.agent.stop(syscall.SIGTERM)
	if out, status := s.run("detach", "--pin-dir", s.pins()); status != 0 || out != "" {
		t.Errorf("detach: status %d: %s", status, out)
	}
	s.until("eth0 has no XDP program", func() bool { return !s.attached() }) // the kernel frees links later
}

// The unit's capabilities are enough: the agent becomes ready, and warns of nothing.
func TestUnitCapabilities(t *testing.T) {
	s := newSite(t)
	unit, err := os.ReadFile("../../packaging/systemd/quartet-hostagent.service")
	must(t, err)
	_, rest, found := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	line, _, _ := strings.Cut(rest, "\n")
	if !found {
		t.Fatal("the unit bounds no capabilities")
	}
	bounding := "--bounding-set=-all"
	for _, c := range strings.Fields(line) {
		bounding += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	s.startManager()
	s.until("the manager answers", func() bool {
		_, err := s.operator.List(t.Context(), &quartetv1.ListRequest{Kind: "Dip"})
		return err == nil
	})
	must(t, os.WriteFile(s.file("bounded"), []byte("#!/bin/sh\nexec setpriv --no-new-privs "+bounding+" "+s.file("quartet-hostagent")+` "$@"`+"\n"), 0o755))
	s.agent = s.start("host", "agent.log", "bounded", s.agentArgs()...)
	s.untilReady()
	s.apply(pool, vip)
	s.until("the DIP is checked", func() bool { return s.dipState() == "unhealthy" })
	log, err := os.ReadFile(s.file("agent.log"))
	must(t, err)
	if strings.Contains(string(log), "level=WARN") || strings.Contains(string(log), "level=ERROR") {
		t.Errorf("under the unit's capabilities:\n%s", log)
	}
}

// Bad flags and a place that is taken: one clear line, status 1, nothing attached.
func TestRefusals(t *testing.T) {
	s := newSite(t)
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer busy.Close()
	var taken net.Listener
	must(t, s.in("host", func() (err error) { taken, err = net.Listen("tcp", metrics); return err }))
	defer taken.Close()
	with := func(change ...string) []string { return append(s.agentArgs(), change...) }
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "--address: is missing"},
		{[]string{"--name", ""}, "--name: is empty"},
		{[]string{"--address", hostAddr}, "--manager: is missing"},
		{[]string{"--address", hostAddr, "--manager", "https://m:1"}, "--interface: is missing"},
		{with("--address", "10.1.0"), `--address[1]: "10.1.0" is not an IPv4 or IPv6 address`},
		{with("--metrics-listen", "", "--manager", "m:7470"), `manager[1]: "m:7470" is not a manager's URL`},
		{with("--mss", "70000"), `"70000"`},
		{with("--mss", "12", "--metrics-listen", ""), "12"},
		{with("--check-commands", "/nonexistent"), "--check-commands: stat /nonexistent"},
		{with("--check-commands", s.file("ca.crt")), "is not a directory"},
		{with("--ca", "/nonexistent"), "/nonexistent"},
		{with(), "listen on " + metrics + ": another process has this port"},
		{with("--metrics-listen", "", "--interface", "eth7"), `"eth7"`},
		{with("--metrics-listen", "", "--state-dir", s.file("ca.crt")), s.file("ca.crt")},
		{with("--log-level", "loud"), "debug, info, warn or error"},
		{[]string{"--nonsense"}, "unknown flag: --nonsense"},
		{[]string{"detach", "--pin-dir", "/sys/fs/bpf/nonexistent"}, "read pin directory /sys/fs/bpf/nonexistent: no such file"},
		{[]string{"detach", "--pin-dir", s.dir}, "is on no BPF file system"},
		{[]string{"detach", "--pin-dir", "/sys/fs/bpf"}, "which is no host agent's"},
		{[]string{"nonsense"}, `unknown command "nonsense"`},
	} {
		out, status := s.run(c.args...)
		lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
		if last := lines[len(lines)-1]; status != 1 || len(lines) != 1 || !strings.HasPrefix(last, "quartet-hostagent: ") || !strings.Contains(last, c.want) {
			t.Errorf("%v: status %d: %s\nwant one line with %s", c.args, status, out, c.want)
		}
	}
	noBTF := exec.Command("nsenter", append([]string{"--net=/run/netns/" + s.prefix + "host", "unshare", "-m", "sh", "-c",
		`mount -t tmpfs none /sys/kernel/btf && exec "$@"`, "sh", s.file("quartet-hostagent")}, with("--metrics-listen", "")...)...)
	if out, _ := noBTF.CombinedOutput(); noBTF.ProcessState.ExitCode() != 1 || bytes.Count(out, []byte("\n")) != 1 ||
		!bytes.Contains(out, []byte("this kernel has no BTF")) {
		t.Errorf("without BTF: status %d: %s", noBTF.ProcessState.ExitCode(), out)
	}
	if s.attached() {
		t.Error("something was attached to eth0")
	}
}
