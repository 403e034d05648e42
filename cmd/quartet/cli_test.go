package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/manager"
	"github.com/quartet-lb/quartet/manager/rpc"
	"github.com/quartet-lb/quartet/manager/store"
	"github.com/quartet-lb/quartet/nodelink"
)

var update = flag.Bool("update", false, "write what the transcripts show")

// site is a manager with certificates, as quartet-manager runs it, and the
// nodes that a test gives it.
type site struct {
	t       *testing.T
	dir     string // certificates, and the files that transcripts apply
	url     string
	manager *manager.Manager
}

func newSite(t *testing.T) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir()}
	if err := certs.Init(s.dir); err != nil {
		t.Fatal(err)
	}
	for role, name := range map[string]string{certs.Manager: "manager", certs.Operator: "alice", certs.Mux: "mux1", certs.Host: "host1"} {
		if err := certs.Issue(s.dir, role, name, nil); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	log := slog.New(slog.DiscardHandler)
	st, err := store.Open(ctx, store.Config{Dir: filepath.Join(t.TempDir(), "state"), Name: "manager", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	if s.manager, err = manager.New(ctx, st, manager.Config{Log: log}); err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() { ran <- s.manager.Run(ctx) }()
	tls, err := certs.LoadServer(s.file("ca.crt"), s.file("manager.crt"), s.file("manager.key"))
	if err != nil {
		t.Fatal(err)
	}
	process := &daemon.Process{Ready: daemon.NewReadiness()}
	server := rpc.NewServer(ctx, s.manager, rpc.Config{TLS: tls, Log: slog.New(slog.DiscardHandler), Process: process.Ready, Ready: func() bool { return true }})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.ServeTLS(l, "", "") }()
	s.url = "https://" + l.Addr().String()
	t.Cleanup(func() {
		cancel()
		server.Close()
		<-served
		<-ran
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("QUARTET_MANAGER", s.url)
	t.Setenv("QUARTET_CA", s.file("ca.crt"))
	t.Setenv("QUARTET_CERT", s.file("alice.crt"))
	t.Setenv("QUARTET_KEY", s.file("alice.key"))
	t.Setenv("XDG_CONFIG_HOME", s.dir)
	return s
}

func (s *site) file(name string) string { return filepath.Join(s.dir, name) }

// stand is a node that runs whatever it is sent and forwards nothing.
type stand[S, D any] struct {
	stuck  bool // it never finishes a delta
	report quartetv1.ReportRequest
	trace  *quartetv1.TraceResponse
}

func (h *stand[S, D]) ApplySnapshot(context.Context, S, nodelink.Source) error { return nil }
func (h *stand[S, D]) ApplyDelta(ctx context.Context, _ D) error {
	if h.stuck {
		<-ctx.Done()
	}
	return nil
}
func (h *stand[S, D]) Trace(_ context.Context, p *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	if p.GetProtocol() == "ICMP" {
		return nil, fmt.Errorf("no trace of ICMP")
	}
	return h.trace, nil
}
func (h *stand[S, D]) Report(r *quartetv1.ReportRequest, want nodelink.Want) {
	r.State = "ready"
	if want.Counters {
		r.Counters, r.Exits, r.BgpPeers, r.Announced = h.report.Counters, h.report.Exits, h.report.BgpPeers, h.report.Announced
	}
}

func (s *site) config(name string, addresses ...string) nodelink.Config {
	tls, err := certs.LoadClient(s.file("ca.crt"), s.file(name+".crt"), s.file(name+".key"))
	if err != nil {
		s.t.Fatal(err)
	}
	return nodelink.Config{Name: name, Addresses: addresses, Version: "v1", Managers: []string{s.url}, TLS: tls,
		State: s.t.TempDir(), ReportEvery: 20 * time.Millisecond}
}

func (s *site) run(run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = run(ctx)
	}()
	s.t.Cleanup(func() {
		cancel()
		<-done
	})
}

// nodes connects mux1 and host1.
func (s *site) nodes() {
	h := &stand[*quartetv1.MuxTables, *quartetv1.MuxDelta]{
		trace: &quartetv1.TraceResponse{Generation: 3, Exit: "tx", Verdict: "tx", Vip: "web", Endpoint: "http", Tenant: "shop",
			Hash: 0xabcdef, Bucket: 7, Buckets: 256, ChosenBy: "bucket", Dip: "10.1.3.11", DipPort: 8080, Tunnel: "10.1.3.11",
			Encapsulation: "ipip", Interface: "eth0", NextHopMac: "02:00:00:00:00:01", Steps: []string{"first", "second"},
			PreviousDip: "10.1.3.12", BucketGeneration: 2},
	}
	h.report.Counters = []*quartetv1.FlowCounters{{Vip: "web", Address: "203.0.113.10", Endpoint: "http", Dip: "10.1.3.11", Packets: 10, Bytes: 1000, NewFlows: 1}}
	h.report.Exits = map[string]uint64{"tx": 10, "no_dip": 0}
	h.report.BgpPeers = []*quartetv1.BgpPeerStatus{{Address: "10.1.0.1", Asn: 65001, State: "established", BfdUp: true}, {Address: "10.1.0.2", Asn: 65002, State: "active"}}
	h.report.Announced = []string{"203.0.113.0/24"}
	mux, err := nodelink.NewMux(s.config("mux1", "10.1.1.1"), h)
	if err != nil {
		s.t.Fatal(err)
	}
	s.run(mux.Run)
	host, err := nodelink.NewHost(s.config("host1", "10.1.3.10"), &stand[*quartetv1.HostTables, *quartetv1.HostDelta]{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.run(host.Run)
	s.wait("both nodes are ready", func(out string) bool { return strings.Count(out, "ready") == 2 && strings.Contains(out, "1/2") }, "get", "all")
}

// wait runs a command until its output is as wanted.
func (s *site) wait(what string, ok func(string) bool, args ...string) {
	s.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		out, _, _ := s.quartet("", args...)
		if ok(out) {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("waited in vain until %s:\n%s", what, out)
		}
	}
}

func (s *site) quartet(in string, args ...string) (out, errOut string, status int) {
	var o, e bytes.Buffer
	status = run(context.Background(), args, strings.NewReader(in), &o, &e)
	return o.String(), e.String(), status
}

// varies is what differs from run to run, and what stands for it.
var varies = []struct {
	is *regexp.Regexp
	as string
}{
	{regexp.MustCompile(`in [0-9.]+ ms`), "in N ms"},
	{regexp.MustCompile(`[0-9]+s ago`), "Ns ago"},
	{regexp.MustCompile(`\b20\d\d-\d\d-\d\d(T[0-9:.]+Z)?`), "DATE"},
	{regexp.MustCompile(`[0-9]+ days`), "N days"},
	{regexp.MustCompile(`\b[0-9a-f]{16}\b`), "HASH"},
	{regexp.MustCompile(`"(at|last_seen|since|interval_seconds|elapsed_ms|muxes_elapsed_ms)": ("[^"]*"|[0-9.e-]+)`), `"$1": N`},
	{regexp.MustCompile(`(?m)^( *)(last_seen|since|elapsed_ms|muxes_elapsed_ms): .*$`), `$1$2: N`},
	{regexp.MustCompile(`(quartet|manager) (unknown|[0-9a-f]{12}(-modified)?)\n`), "$1 VERSION\n"},
}

// play runs a transcript: each line "$ quartet ..." with what it prints, errors
// marked with "! ", and its exit status unless 0. "< file" is standard input.
func (s *site) play(file string) {
	t := s.t
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	replace := strings.NewReplacer(s.url, "$MANAGER", s.dir, "$DIR")
	var got strings.Builder
	for _, line := range strings.SplitAfter(string(text), "\n") {
		if strings.HasPrefix(line, "#") {
			got.WriteString(line)
			continue
		}
		command, ok := strings.CutPrefix(line, "$ quartet ")
		if !ok {
			continue
		}
		if got.Len() > 0 && !strings.HasSuffix(got.String(), "\n\n") && !strings.HasPrefix(lastLine(got.String()), "#") {
			got.WriteString("\n")
		}
		got.WriteString(line)
		command, from, _ := strings.Cut(strings.TrimSpace(command), " < ")
		in := ""
		if from != "" {
			b, err := os.ReadFile(from)
			if err != nil {
				t.Fatal(err)
			}
			in = string(b)
		}
		var args []string
		for _, a := range strings.Fields(command) {
			a = strings.NewReplacer("$DIR", s.dir, "$MANAGER", s.url).Replace(a)
			args = append(args, strings.Trim(a, `'"`))
		}
		out, errOut, status := s.quartet(in, args...)
		for _, l := range strings.SplitAfter(errOut, "\n") {
			if l != "" {
				out += "! " + l
			}
		}
		if status != 0 {
			out += fmt.Sprintf("exit %d\n", status)
		}
		out = replace.Replace(out)
		for _, v := range varies {
			out = v.is.ReplaceAllString(out, v.as)
		}
		got.WriteString(out)
	}
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got.String() != string(text) {
		t.Errorf("%s: got\n%s", file, diff(string(text), got.String()))
	}
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSuffix(s, "\n"), "\n")
	return lines[len(lines)-1]
}

// diff shows the first line that differs, with those around it.
func diff(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		if i >= len(w) || i >= len(g) || w[i] != g[i] {
			return fmt.Sprintf("line %d:\n%s\nwant:\n%s", i+1, strings.Join(g[min(i, len(g)):min(i+6, len(g))], "\n"), strings.Join(w[min(i, len(w)):min(i+6, len(w))], "\n"))
		}
	}
	return "the same"
}

func TestTranscripts(t *testing.T) {
	for _, name := range []string{"day", "refused", "certs", "completion"} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			if name != "refused" {
				s.nodes()
			}
			s.play(filepath.Join("testdata", name+".transcript"))
		})
	}
}

// Without a manager each command says what to check, and what is local works.
func TestUnreachable(t *testing.T) {
	s := newSite(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close() // it accepts and never answers
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := gone.Addr().String()
	gone.Close()
	defer func(d time.Duration) { answerTimeout = d }(answerTimeout)
	answerTimeout = 500 * time.Millisecond
	other := newAuthority(t)
	for _, c := range []struct {
		args   []string
		want   string
		status int
	}{
		{[]string{"get", "vips", "--manager", "https://" + closed}, "connection refused: is quartet-manager running there? check --manager", exitUnreachable},
		{[]string{"get", "vips", "--manager", "https://" + silent.Addr().String()}, "no answer: check --manager and the network", exitUnreachable},
		{[]string{"get", "vips", "--manager", "http://" + strings.TrimPrefix(s.url, "https://")}, "something else answers there (400 Bad Request)", exitUnreachable},
		{[]string{"get", "vips", "--manager", "https://nowhere.invalid:7470"}, "no such host: check --manager", exitUnreachable},
		{[]string{"get", "vips", "--manager", "https://10.0.0.1:7470/x"}, "is not a manager's URL", exitInvalid},
		{[]string{"get", "vips", "--manager", "http://10.0.0.1:7470"}, "allowed to a loopback address only", exitInvalid},
		{[]string{"get", "vips", "--ca", filepath.Join(other, "ca.crt")}, "not signed by", exitInvalid},
		{[]string{"get", "vips", "--ca", filepath.Join(other, "ca.crt"), "--cert", filepath.Join(other, "eve.crt"), "--key", filepath.Join(other, "eve.key")}, "check --ca", exitUnreachable},
		{[]string{"get", "vips", "--cert", s.file("mux1.crt"), "--key", s.file("mux1.key")}, "certificate of role operator", exitUnreachable},
		{[]string{"get", "vips", "--cert", s.file("none.crt")}, "none.crt", exitInvalid},
		{[]string{"get", "vips", "--config", s.file("none.yaml")}, "none.yaml", exitInvalid},
	} {
		_, errOut, status := s.quartet("", c.args...)
		if status != c.status || !strings.Contains(errOut, c.want) || strings.Count(errOut, "\n") != 1 {
			t.Errorf("%v: %d %q, want %d and one line with %q", c.args, status, errOut, c.status, c.want)
		}
	}
	if out, errOut, status := s.quartet("", "version", "--client", "--manager", "https://"+closed); status != 0 || !strings.HasPrefix(out, "quartet ") {
		t.Errorf("version --client: %d %q %q", status, out, errOut)
	}
}

func newAuthority(t *testing.T) string {
	dir := t.TempDir()
	if err := certs.Init(dir); err != nil {
		t.Fatal(err)
	}
	if err := certs.Issue(dir, certs.Operator, "eve", nil); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The command line wins over the environment, and that over the file, whose
// paths are relative to it.
func TestConfiguration(t *testing.T) {
	s := newSite(t)
	for _, name := range []string{"MANAGER", "CA", "CERT", "KEY"} {
		t.Setenv("QUARTET_"+name, "")
	}
	if _, errOut, status := s.quartet("", "get", "vips"); status != exitInvalid || !strings.Contains(errOut, "--ca is missing") {
		t.Errorf("without configuration: %d %s", status, errOut)
	}
	if out, note, status := s.quartet("", "version"); status != 0 || !strings.HasPrefix(out, "quartet ") || strings.Count(note, "\n") != 1 || !strings.Contains(note, "no manager is configured") {
		t.Errorf("version without configuration: %d %q %q", status, out, note)
	}
	if _, errOut, status := s.quartet("", "version", "--manager", s.url); status != exitInvalid || !strings.Contains(errOut, "--ca is missing") {
		t.Errorf("version without a certificate: %d %s", status, errOut)
	}
	config := fmt.Sprintf("manager: %s\nca: ../ca.crt\ncert: ../alice.crt\nkey: %s\n", s.url, s.file("alice.key"))
	if err := os.Mkdir(s.file("quartet"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.file("quartet/config.yaml"), []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, errOut, status := s.quartet("", "get", "vips"); status != 0 {
		t.Errorf("~/.config: %d %s", status, errOut)
	}
	t.Setenv("QUARTET_MANAGER", "https://127.0.0.1:1")
	if _, errOut, status := s.quartet("", "get", "vips"); status != exitUnreachable || !strings.Contains(errOut, "127.0.0.1:1:") {
		t.Errorf("environment over file: %d %s", status, errOut)
	}
	if _, errOut, status := s.quartet("", "get", "vips", "--manager", s.url); status != 0 {
		t.Errorf("command line over environment: %d %s", status, errOut)
	}
	bad := s.file("bad.yaml")
	if err := os.WriteFile(bad, []byte("manger: x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("QUARTET_CONFIG", bad)
	if _, errOut, status := s.quartet("", "get", "vips"); status != exitInvalid || !strings.Contains(errOut, "bad.yaml: line 1: manger: unknown field") {
		t.Errorf("QUARTET_CONFIG: %d %s", status, errOut)
	}
}

// A change that a mux has not run in time stands, and the exit status says so.
func TestPartial(t *testing.T) {
	s := newSite(t)
	mux, err := nodelink.NewMux(s.config("mux1", "10.1.1.1"), &stand[*quartetv1.MuxTables, *quartetv1.MuxDelta]{stuck: true})
	if err != nil {
		t.Fatal(err)
	}
	s.run(mux.Run)
	s.wait("the mux is ready", func(out string) bool { return strings.Contains(out, "ready") }, "get", "muxes")
	out, errOut, status := s.quartet("", "apply", "-f", "testdata/site", "--wait", "50ms")
	if status != exitPartial || !strings.Contains(out, "generation 2: 0/1 muxes") || !strings.Contains(errOut, "the change stands; not yet run by mux1") {
		t.Errorf("%d\n%s%s", status, out, errOut)
	}
	if out, _, _ := s.quartet("", "get", "vips"); !strings.Contains(out, "web") {
		t.Errorf("the change does not stand:\n%s", out)
	}
}

// What get prints is what apply reads.
func TestRoundTrip(t *testing.T) {
	s := newSite(t)
	if out, errOut, status := s.quartet("", "apply", "-f", "testdata/site"); status != 0 {
		t.Fatal(out, errOut)
	}
	for _, format := range []string{"json", "yaml"} {
		out, _, _ := s.quartet("", "get", "vips", "-o", format)
		again, errOut, status := s.quartet(out, "apply", "-f", "-")
		if status != 0 || strings.Count(again, "unchanged\n") != 2 {
			t.Errorf("%s: %d %s%s of\n%s", format, status, again, errOut, out)
		}
	}
}

func TestWatch(t *testing.T) {
	s := newSite(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	out := newLines()
	done := make(chan int)
	go func() {
		done <- run(ctx, []string{"get", "vips", "--watch"}, strings.NewReader(""), out, out)
	}()
	out.wait(t, "NAME")
	if o, e, status := s.quartet("", "apply", "-f", "testdata/site"); status != 0 {
		t.Fatal(o, e)
	}
	out.wait(t, "web")
	if o, e, status := s.quartet("", "delete", "vip", "web"); status != 0 {
		t.Fatal(o, e)
	}
	out.wait(t, "(gone)")
	cancel()
	if status := <-done; status != exitInterrupted {
		t.Errorf("status %d", status)
	}
}

// lines is an output that a test waits on.
type lines struct{ text chan string }

func newLines() *lines { return &lines{make(chan string, 1000)} }

func (l *lines) Write(b []byte) (int, error) {
	l.text <- string(b)
	return len(b), nil
}

func (l *lines) wait(t *testing.T, want string) {
	t.Helper()
	all := ""
	for timeout := time.After(20 * time.Second); ; {
		select {
		case text := <-l.text:
			if all += text; strings.Contains(all, want) {
				return
			}
		case <-timeout:
			t.Fatalf("waited in vain for %q in:\n%s", want, all)
		}
	}
}

// The live view draws, sorts, quits on q and leaves the terminal as it was.
func TestTopLive(t *testing.T) {
	s := newSite(t)
	s.nodes()
	ptm, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ptm.Close()
	if err := unix.IoctlSetPointerInt(int(ptm.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(ptm.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	if err := unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 20, Col: 100}); err != nil {
		t.Fatal(err)
	}
	before, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	screen := newLines()
	go func() {
		b := make([]byte, 4096)
		for {
			n, err := ptm.Read(b)
			if err != nil {
				return
			}
			if _, err := screen.Write(b[:n]); err != nil {
				return
			}
		}
	}()
	done := make(chan int)
	go func() { done <- run(context.Background(), []string{"top", "--interval", "10ms"}, tty, tty, tty) }()
	screen.wait(t, "by packets (p b n), q quits")
	screen.wait(t, "10.1.3.11")
	if _, err := ptm.Write([]byte("b")); err != nil {
		t.Fatal(err)
	}
	screen.wait(t, "by bits")
	if _, err := ptm.Write([]byte("q")); err != nil {
		t.Fatal(err)
	}
	screen.wait(t, leaveScreen)
	if status := <-done; status != 0 {
		t.Errorf("status %d", status)
	}
	after, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("terminal is %v, was %v: %v", after, before, err)
	}
}

func TestMeasure(t *testing.T) {
	at := func(sec int64) *timestamppb.Timestamp { return &timestamppb.Timestamp{Seconds: 1700000000 + sec} }
	counter := func(vip, dip string, n uint64) *quartetv1.FlowCounters {
		return &quartetv1.FlowCounters{Vip: vip, Address: "203.0.113.10", Endpoint: "http", Dip: dip, Packets: n, Bytes: 100 * n, NewFlows: n / 10}
	}
	node := func(name, role string, exits map[string]uint64) *quartetv1.NodeCounters {
		return &quartetv1.NodeCounters{Node: name, Role: role, Exits: exits}
	}
	before := &quartetv1.TopResponse{At: at(0), Counters: []*quartetv1.FlowCounters{counter("web", "10.0.0.1", 1000), counter("web", "10.0.0.2", 5000)},
		Nodes: []*quartetv1.NodeCounters{node("mux1", "mux", map[string]uint64{"tx": 1000})}}
	after := &quartetv1.TopResponse{At: at(2), Counters: []*quartetv1.FlowCounters{
		counter("web", "10.0.0.1", 3000), // 1000 a second
		counter("web", "10.0.0.2", 4000), // a mux restarted: stands still
		counter("dns", "10.0.0.3", 9000), // appeared
	}, Nodes: []*quartetv1.NodeCounters{node("mux1", "mux", map[string]uint64{"tx": 5000, "no_dip": 2, "no_vip": 3, "never": 0}), node("host1", "host", map[string]uint64{"tx": 7})}}
	var b bytes.Buffer
	if err := measure(before, after, 'p').write(&b); err != nil {
		t.Fatal(err)
	}
	const want = `5.5k packets/s   4.4M bit/s   550 new flows/s

VIP              ENDPOINT   DIP        PACKETS/S   BITS/S   NEW FLOWS/S
dns                                    4.5k        3.6M     450
  203.0.113.10   http       10.0.0.3   4.5k        3.6M     450
web                                    1k          800k     100
  203.0.113.10   http       10.0.0.1   1k          800k     100
  203.0.113.10   http       10.0.0.2   0           0        0

MUX    EXIT     VERDICT                PACKETS/S   PACKETS
mux1   tx       sent                   2k          5000
mux1   no_vip   passed to the kernel   1.5         3
mux1   no_dip   dropped                1           2
`
	if b.String() != want {
		t.Errorf("got\n%s", b.String())
	}
}

func TestSI(t *testing.T) {
	for f, want := range map[float64]string{0: "0", 1: "1", 999: "999", 999.6: "1k", 1234: "1.23k", 999600: "1M", 12345678: "12.3M", 5e9: "5G", 2e13: "20T"} {
		if got := si(f); got != want {
			t.Errorf("%v: %s, want %s", f, got, want)
		}
	}
}

func TestFrame(t *testing.T) {
	got := frame("one\ntwo is long\nthree\nfour\n", 5, 3)
	if want := "\x1b[Hone\x1b[K\r\ntwo i\x1b[K\r\n\x1b[J"; got != want {
		t.Errorf("%q", got)
	}
}

// A shell accepts the completion script.
func TestCompletionScript(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		var out, errOut bytes.Buffer
		if status := run(context.Background(), []string{"completion", shell}, strings.NewReader(""), &out, &errOut); status != 0 || !strings.Contains(out.String(), "__complete") {
			t.Fatalf("%s: %d %s", shell, status, errOut.String())
		}
		if shell != "bash" {
			continue
		}
		cmd := exec.Command("bash", "-n")
		cmd.Stdin = &out
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("bash: %v: %s", err, text)
		}
	}
}
