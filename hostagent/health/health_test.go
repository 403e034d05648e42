package health

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	grpchealth "google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/durationpb"
	"pgregory.net/rapid"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// Letters are results in order, o for success and x for failure; below each is
// the status after it.
func TestRiseAndFall(t *testing.T) {
	for _, c := range []struct {
		rise, fall    int
		results, want string
	}{
		{2, 3, "oo", "?H"},
		{2, 3, "xxx", "??U"},
		{2, 3, "xxoo", "???H"},
		{2, 3, "oxxoxx", "??????"},
		{2, 3, "ooxxoxxxoxoo", "?HHHHHHUUUUH"},
		{1, 1, "oxox", "HUHU"},
		{3, 1, "ooxooxooo", "??UUUUUUH"},
	} {
		rule := Rule{Interval: time.Second, Timeout: time.Second, Rise: c.rise, Fall: c.fall}
		start := time.Unix(1000, 0)
		var s State
		got := ""
		for i, r := range c.results {
			was, failure := s, ""
			if r == 'x' {
				failure = "connection refused"
			}
			now := start.Add(time.Duration(i) * time.Second)
			s = s.Next(rule, failure, now)
			got += map[Status]string{Unknown: "?", Healthy: "H", Unhealthy: "U"}[s.Status]
			if s.Status != was.Status && s.Since != now || s.Status == was.Status && s.Since != was.Since {
				t.Errorf("rise %d, fall %d, %s: after result %d, status is %s since %s", c.rise, c.fall, c.results, i, s.Status, s.Since)
			}
			if s.Reason != failure {
				t.Errorf("reason is %q after %q", s.Reason, failure)
			}
		}
		if got != c.want {
			t.Errorf("rise %d, fall %d: %s gives %s, want %s", c.rise, c.fall, c.results, got, c.want)
		}
	}
}

// The package's promise, for a server that dies at any moment between two
// checks and then answers nothing: each check takes its whole timeout.
func TestDeadServerIsOutWithinIntervalTimesFall(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rule := Rule{Rise: 1, Fall: rapid.IntRange(1, 10).Draw(t, "fall")}
		rule.Interval = time.Duration(rapid.IntRange(100, 100000).Draw(t, "interval in ms")) * time.Millisecond
		rule.Timeout = time.Duration(rapid.IntRange(1, int(rule.Interval/time.Millisecond)).Draw(t, "timeout in ms")) * time.Millisecond
		takes := rule.Timeout
		if rapid.Bool().Draw(t, "refuses") {
			takes = 0
		}
		// Death comes right after a check; the next one starts an interval later.
		s := State{}.Next(rule, "", time.Time{})
		start := rule.Interval
		for {
			s = s.Next(rule, "dead", time.Time{}.Add(start+takes))
			if s.Status == Unhealthy {
				break
			}
			wait := s.Wait(rule)
			if wait < takes {
				t.Fatalf("a check starts %s after the last one, which takes %s", wait, takes)
			}
			start += wait
		}
		bound := rule.Interval * time.Duration(rule.Fall)
		if takes*time.Duration(rule.Fall) > rule.Interval*time.Duration(rule.Fall-1) {
			bound += rule.Timeout
		}
		if out := start + takes; out > bound {
			t.Fatalf("out after %s, promised within %s", out, bound)
		}
	})
}

func TestPhaseIsDeterministicAndSpread(t *testing.T) {
	var counts [4]int
	for i := range 4000 {
		id := fmt.Sprintf("web/http/10.1.%d.%d", i/250, i%250)
		p := phaseOf(id, time.Second)
		if p != phaseOf(id, time.Second) || p < 0 || p >= time.Second {
			t.Fatalf("phase of %s is %s", id, p)
		}
		counts[p*4/time.Second]++
	}
	for quarter, n := range counts {
		if n < 800 || n > 1200 {
			t.Errorf("%d of 4000 checks start in quarter %d", n, quarter)
		}
	}
}

// A server that answers as told, and how to reach it.
type server struct {
	addr    netip.AddrPort
	healthy func(bool)
	close   func()
}

func httpServer(t *testing.T, tls bool) server {
	var healthy atomic.Bool
	healthy.Store(true)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/moved":
			http.Redirect(w, r, "/healthz", http.StatusFound)
		case r.URL.Path == "/host" && r.Host != "shop.example", r.URL.Path == "/query" && r.URL.RawQuery != "deep=1":
			w.WriteHeader(http.StatusNotFound)
		case r.URL.Path == "/slow":
			<-r.Context().Done()
		case !healthy.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	s := httptest.NewUnstartedServer(handler)
	if tls {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return server{netip.MustParseAddrPort(s.Listener.Addr().String()), healthy.Store, s.Close}
}

func tcpServer(t *testing.T) server {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				if n, _ := c.Read(make([]byte, 1)); n > 0 {
					c.Write([]byte("not HTTP\r\n"))
				}
				c.Close()
			}()
		}
	}()
	t.Cleanup(func() { listener.Close() })
	return server{netip.MustParseAddrPort(listener.Addr().String()), nil, func() { listener.Close() }}
}

func grpcServer(t *testing.T) server {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s, h := grpc.NewServer(), grpchealth.NewServer()
	healthpb.RegisterHealthServer(s, h)
	h.SetServingStatus("shop.Cart", healthpb.HealthCheckResponse_SERVING)
	go s.Serve(listener)
	t.Cleanup(s.Stop)
	return server{netip.MustParseAddrPort(listener.Addr().String()), func(ok bool) {
		status := healthpb.HealthCheckResponse_NOT_SERVING
		if ok {
			status = healthpb.HealthCheckResponse_SERVING
		}
		h.SetServingStatus("shop.Cart", status)
	}, s.Stop}
}

func commandDir(t *testing.T) string {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"good": "test \"$DIP\" = 127.0.0.1 && test \"$PORT\" = 4711 && test \"$1\" = arg && test -z \"$SECRET\"",
		"bad":  "echo disk is full; exit 3",
		"hang": "sleep 1000 & wait",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "data"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCheckers(t *testing.T) {
	t.Setenv("SECRET", "of the agent")
	web, secure, plain, rpc, commands := httpServer(t, false), httpServer(t, true), tcpServer(t), grpcServer(t), commandDir(t)
	refusing := tcpServer(t)
	refusing.close()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	mute := netip.MustParseAddrPort(silent.Addr().String())
	any := netip.MustParseAddrPort("127.0.0.1:4711")

	http := func(h *quartetv1.HttpCheck) *quartetv1.Health { return &quartetv1.Health{Http: h} }
	https := func(h *quartetv1.HttpCheck) *quartetv1.Health { return &quartetv1.Health{Https: h} }
	rpcOf := func(service string) *quartetv1.Health {
		return &quartetv1.Health{Grpc: &quartetv1.GrpcCheck{Service: service}}
	}
	run := func(argv ...string) *quartetv1.Health {
		return &quartetv1.Health{Command: &quartetv1.CommandCheck{Argv: argv}}
	}
	tcp := &quartetv1.Health{Tcp: &quartetv1.TcpCheck{}}
	for _, c := range []struct {
		name   string
		health *quartetv1.Health
		dip    netip.AddrPort
		want   string // "" for healthy
	}{
		{"http", http(&quartetv1.HttpCheck{Path: "/healthz"}), web.addr, ""},
		{"http, no path", http(&quartetv1.HttpCheck{}), web.addr, ""},
		{"http, query", http(&quartetv1.HttpCheck{Path: "/query?deep=1"}), web.addr, ""},
		{"http, host", http(&quartetv1.HttpCheck{Path: "/host", Host: "shop.example"}), web.addr, ""},
		{"http, other host", http(&quartetv1.HttpCheck{Path: "/host"}), web.addr, "status 404, 200..299 is wanted"},
		{"http, redirect", http(&quartetv1.HttpCheck{Path: "/moved"}), web.addr, "status 302, 200..299 is wanted"},
		{"http, redirect wanted", http(&quartetv1.HttpCheck{Path: "/moved", Statuses: []uint32{301, 302}}), web.addr, ""},
		{"http, status not wanted", http(&quartetv1.HttpCheck{Statuses: []uint32{204}}), web.addr, "status 200, one of [204] is wanted"},
		{"http, slow", http(&quartetv1.HttpCheck{Path: "/slow"}), web.addr, "no answer within 300ms"},
		{"http, refused", http(&quartetv1.HttpCheck{}), refusing.addr, "connection refused"},
		{"http, not HTTP", http(&quartetv1.HttpCheck{}), plain.addr, "malformed HTTP"},
		{"http to https", http(&quartetv1.HttpCheck{}), secure.addr, "status 400"},
		{"https", https(&quartetv1.HttpCheck{Path: "/healthz"}), secure.addr, ""},
		{"https, verify", https(&quartetv1.HttpCheck{Verify: true}), secure.addr, "certificate signed by unknown authority"},
		{"https to http", https(&quartetv1.HttpCheck{}), web.addr, "server gave HTTP response to HTTPS client"},
		{"tcp", tcp, plain.addr, ""},
		{"tcp, refused", tcp, refusing.addr, "connection refused"},
		{"grpc", rpcOf("shop.Cart"), rpc.addr, ""},
		{"grpc, the whole server", rpcOf(""), rpc.addr, ""},
		{"grpc, unknown service", rpcOf("shop.Till"), rpc.addr, "unknown service"},
		{"grpc, refused", rpcOf(""), refusing.addr, "connection refused"},
		{"grpc, silent", rpcOf(""), mute, "no answer within 300ms"},
		{"command", run("good", "arg"), any, ""},
		{"command by path", run(filepath.Join(commands, "good"), "arg"), any, ""},
		{"command, other port", run("good", "arg"), netip.MustParseAddrPort("127.0.0.1:1"), "exit status 1"},
		{"command fails", run("bad"), any, "exit status 3: disk is full"},
		{"command hangs", run("hang"), any, "no answer within 300ms"},
		{"command is missing", run("missing"), any, "missing is not in " + commands},
		{"command is no program", run("data"), any, "is not executable"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ask, _, err := newChecker(c.health, c.dip, commands)
			if err != nil {
				t.Fatal(err)
			}
			timeout := 10 * time.Second
			if strings.Contains(c.want, "300ms") {
				timeout = 300 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			defer cancel()
			got := ""
			if err := ask(ctx); err != nil {
				got = explain(err, timeout)
			}
			if got != c.want && (c.want == "" || !strings.Contains(got, c.want)) {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	rpc.healthy(false)
	ask, _, err := newChecker(rpcOf("shop.Cart"), rpc.addr, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := ask(t.Context()); err == nil || !strings.Contains(err.Error(), "NOT_SERVING") {
		t.Errorf("a service that is not serving: %v", err)
	}
	ask, _, err = newChecker(run("good"), any, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := ask(t.Context()); err == nil || !strings.Contains(err.Error(), "--check-commands is not set") {
		t.Errorf("a command without a directory: %v", err)
	}
}

func spec(id string, dip netip.AddrPort, h *quartetv1.Health) *quartetv1.Check {
	if h.Interval == nil {
		h.Interval = durationpb.New(100 * time.Millisecond)
	}
	h.Timeout, h.Rise, h.Fall = durationpb.New(100*time.Millisecond), 1, 2
	return &quartetv1.Check{Id: id, Dip: dip.Addr().AsSlice(), Port: uint32(dip.Port()), Health: h}
}

// A check that can't run makes its own DIP unhealthy and says why; the others run.
func TestCheckThatCannotRun(t *testing.T) {
	dip := netip.MustParseAddrPort("127.0.0.1:80")
	good := func(change func(*quartetv1.Check)) *quartetv1.Check {
		c := spec("web/http/1", dip, &quartetv1.Health{Tcp: &quartetv1.TcpCheck{}})
		change(c)
		return c
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	checks := []*quartetv1.Check{spec("good", netip.MustParseAddrPort(listener.Addr().String()), &quartetv1.Health{Tcp: &quartetv1.TcpCheck{}})}
	wants := map[string]string{}
	for i, c := range []struct {
		want   string
		change func(*quartetv1.Check)
	}{
		{"dip: has 5 bytes, 4 or 16 are wanted", func(c *quartetv1.Check) { c.Dip = make([]byte, 5) }},
		{"health: is missing", func(c *quartetv1.Check) { c.Health = nil }},
		{"health: has 0 checks", func(c *quartetv1.Check) { c.Health.Tcp = nil }},
		{"health: has 2 checks", func(c *quartetv1.Check) { c.Health.Grpc = &quartetv1.GrpcCheck{} }},
		{"port: is 70000", func(c *quartetv1.Check) { c.Port = 70000 }},
		{"port: is 0", func(c *quartetv1.Check) { c.Port = 0 }},
		{"health.interval: is 1ms, 100ms..1h0m0s is wanted", func(c *quartetv1.Check) { c.Health.Interval = durationpb.New(time.Millisecond) }},
		{"health.timeout: is 1s, more than 0 and up to the interval of 100ms is wanted", func(c *quartetv1.Check) { c.Health.Timeout = durationpb.New(time.Second) }},
		{"health.rise and health.fall: are 1 and 101", func(c *quartetv1.Check) { c.Health.Fall = 101 }},
		{"health.http.path: \"x\" is not a path", func(c *quartetv1.Check) {
			c.Health.Tcp, c.Health.Http = nil, &quartetv1.HttpCheck{Path: "x"}
		}},
		{"health.command.argv: is empty", func(c *quartetv1.Check) { c.Health.Tcp, c.Health.Command = nil, &quartetv1.CommandCheck{} }},
		{"health.command.argv[0]: \"/bin/sh\"", func(c *quartetv1.Check) {
			c.Health.Tcp, c.Health.Command = nil, &quartetv1.CommandCheck{Argv: []string{"/bin/sh"}}
		}},
		{"health.command.argv[0]: \"../sh\"", func(c *quartetv1.Check) {
			c.Health.Tcp, c.Health.Command = nil, &quartetv1.CommandCheck{Argv: []string{"../sh"}}
		}},
	} {
		bad := good(c.change)
		bad.Id = fmt.Sprint("bad", i)
		checks, wants[bad.Id] = append(checks, bad), c.want
	}
	w := newWatcher(t, Config{})
	w.commit(t, checks, nil, true)
	w.until(t, "good", true)
	for id, want := range wants {
		if r := w.until(t, id, false); !strings.Contains(r.Reason, want) {
			t.Errorf("%s: %q, want …%s", id, r.Reason, want)
		}
	}
}

func TestPrepareRefuses(t *testing.T) {
	m := New(Config{})
	defer m.Close()
	once := spec("web/http/1", netip.MustParseAddrPort("127.0.0.1:80"), &quartetv1.Health{Tcp: &quartetv1.TcpCheck{}})
	for want, second := range map[string]*quartetv1.Check{
		"checks[1] (web/http/1): id: given twice": once,
		"checks[1]: id: is empty":                 {},
	} {
		if _, err := m.Prepare([]*quartetv1.Check{once, second}, nil, true); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// watcher collects results as a node's reports would.
type watcher struct {
	monitor *Monitor
	changed chan struct{}
	last    map[string]*quartetv1.CheckResult
}

func newWatcher(t *testing.T, c Config) *watcher {
	w := &watcher{changed: make(chan struct{}, 1), last: map[string]*quartetv1.CheckResult{}}
	c.Changed = func() {
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
	w.monitor = New(c)
	t.Cleanup(w.monitor.Close)
	return w
}

func (w *watcher) commit(t *testing.T, put []*quartetv1.Check, remove []string, all bool) {
	t.Helper()
	change, err := w.monitor.Prepare(put, remove, all)
	if err != nil {
		t.Fatal(err)
	}
	w.monitor.Commit(change)
}

// until waits for id's next result to be so.
func (w *watcher) until(t *testing.T, id string, healthy bool) *quartetv1.CheckResult {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		if r := w.last[id]; r != nil && r.Healthy == healthy {
			return r
		}
		select {
		case <-w.changed:
			for _, r := range w.monitor.Results(false) {
				w.last[r.Id] = r
			}
		case <-deadline:
			t.Fatalf("%s is not healthy=%t; last results %v", id, healthy, w.last)
		}
	}
}

// gathered are a registry's counters and gauges by name and label values.
func gathered(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			values[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return values
}

func TestMonitorFollowsServers(t *testing.T) {
	web, secure, plain, rpc := httpServer(t, false), httpServer(t, true), tcpServer(t), grpcServer(t)
	registry := prometheus.NewRegistry()
	w := newWatcher(t, Config{Metrics: registry})
	w.commit(t, []*quartetv1.Check{
		spec("http", web.addr, &quartetv1.Health{Http: &quartetv1.HttpCheck{Path: "/healthz"}}),
		spec("https", secure.addr, &quartetv1.Health{Https: &quartetv1.HttpCheck{}}),
		spec("tcp", plain.addr, &quartetv1.Health{Tcp: &quartetv1.TcpCheck{}}),
		spec("grpc", rpc.addr, &quartetv1.Health{Grpc: &quartetv1.GrpcCheck{Service: "shop.Cart"}}),
	}, nil, true)
	if got := w.monitor.Results(true); len(got) != 0 {
		t.Errorf("results before any check: %v", got)
	}
	for _, id := range []string{"http", "https", "tcp", "grpc"} {
		w.until(t, id, true)
	}
	got := gathered(t, registry)
	for series, want := range map[string]float64{
		"quartet_hostagent_checked_dips healthy": 4, "quartet_hostagent_checked_dips unhealthy": 0,
		"quartet_hostagent_checked_dips unknown": 0,
	} {
		if got[series] != want {
			t.Errorf("%s is %v, want %v", series, got[series], want)
		}
	}
	for _, kind := range []string{"http", "https", "tcp", "grpc"} {
		if series := "quartet_hostagent_checks_total " + kind + " success"; got[series] < 1 {
			t.Errorf("%s is %v", series, got[series])
		}
	}

	web.healthy(false)
	if r := w.until(t, "http", false); r.Reason != "status 503, 200..299 is wanted" {
		t.Errorf("reason is %q", r.Reason)
	}
	rpc.healthy(false)
	w.until(t, "grpc", false)
	plain.close()
	if r := w.until(t, "tcp", false); r.Reason != "connection refused" {
		t.Errorf("reason is %q", r.Reason)
	}
	web.healthy(true)
	w.until(t, "http", true)
	if r := w.last["https"]; !r.Healthy {
		t.Errorf("https: %v", r)
	}
	if all := w.monitor.Results(true); len(all) != 4 || all[0].Id != "grpc" || all[0].Healthy {
		t.Errorf("all results: %v", all)
	}
	if changed := w.monitor.Results(false); len(changed) != 0 {
		t.Errorf("results that did not change: %v", changed)
	}
}

func TestChangedDefinitionKeepsTheStatus(t *testing.T) {
	web := httpServer(t, false)
	w := newWatcher(t, Config{})
	h := func() *quartetv1.Health { return &quartetv1.Health{Http: &quartetv1.HttpCheck{Path: "/healthz"}} }
	w.commit(t, []*quartetv1.Check{spec("a", web.addr, h()), spec("b", web.addr, h())}, nil, true)
	w.until(t, "a", true)
	w.until(t, "b", true)

	slower := h()
	slower.Interval = durationpb.New(time.Hour)
	w.commit(t, []*quartetv1.Check{spec("a", web.addr, slower)}, []string{"b", "absent"}, false)
	if got := w.monitor.Results(true); len(got) != 1 || got[0].Id != "a" || !got[0].Healthy {
		t.Errorf("after a slower check of a and the end of b: %v", got)
	}
	w.commit(t, nil, nil, true)
	if got := w.monitor.Results(true); len(got) != 0 {
		t.Errorf("after the end of all checks: %v", got)
	}
}

// A check that is there already and comes again in a snapshot goes on: its
// phase would otherwise start anew with each reconnection to the manager.
func TestSameDefinitionGoesOn(t *testing.T) {
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked.Add(1) }))
	defer s.Close()
	w := newWatcher(t, Config{})
	h := &quartetv1.Health{Http: &quartetv1.HttpCheck{}, Interval: durationpb.New(time.Hour)}
	again := []*quartetv1.Check{spec("a", netip.MustParseAddrPort(s.Listener.Addr().String()), h)}
	w.commit(t, again, nil, true)
	w.until(t, "a", true)
	before := w.monitor.checks["a"]
	w.commit(t, again, nil, true)
	w.commit(t, again, nil, false)
	if w.monitor.checks["a"] != before || asked.Load() != 1 {
		t.Errorf("the check was made anew; asked %d times", asked.Load())
	}
}

func TestManyChangesAtOnce(t *testing.T) {
	plain := tcpServer(t)
	w := newWatcher(t, Config{})
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			for i := range 50 {
				id := fmt.Sprintf("%d/%d", g, i%7)
				change, err := w.monitor.Prepare([]*quartetv1.Check{spec(id, plain.addr, &quartetv1.Health{Tcp: &quartetv1.TcpCheck{}})}, []string{fmt.Sprintf("%d/%d", g, (i+3)%7)}, false)
				if err != nil {
					t.Error(err)
					return
				}
				w.monitor.Commit(change)
				w.monitor.Results(i%2 == 0)
			}
		})
	}
	all.Wait()
}
