package hostagent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/hostagent/datapath"
	"github.com/quartet-lb/quartet/nodelink"
)

// newAgent is an agent with a real packet path on a veth interface in a
// namespace of its own, which the test's thread enters for good.
func newAgent(t *testing.T, metrics prometheus.Registerer) *Agent {
	t.Helper()
	runtime.LockOSThread() // and never unlocked: the thread ends with the test
	must(t, unix.Unshare(unix.CLONE_NEWNET))
	if out, err := exec.Command("ip", "link", "add", "up0", "type", "veth", "peer", "name", "down0").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	pins := fmt.Sprintf("/sys/fs/bpf/qhc%d-%s", os.Getpid(), t.Name())
	d, err := datapath.Open(datapath.Config{Interfaces: []string{"up0"}, PinDir: pins, Flows: 1024, Meters: 1024})
	must(t, err)
	t.Cleanup(func() {
		if err := d.Detach(); err != nil {
			t.Error(err)
		}
		os.Remove(pins)
	})
	a := New(Config{Datapath: d, Changed: func() {}, Log: slog.New(slog.DiscardHandler), Metrics: metrics})
	t.Cleanup(a.Close)
	return a
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func ip(s string) []byte { return netip.MustParseAddr(s).AsSlice() }

func rule(tunnel, vip string, port uint32, dip string) *quartetv1.NatRule {
	return &quartetv1.NatRule{Tunnel: ip(tunnel), Vip: ip(vip), Protocol: 6, Port: port, Dip: ip(dip), DipPort: 8080}
}

func check(id string) *quartetv1.Check {
	return &quartetv1.Check{Id: id, Dip: ip("127.0.0.1"), Port: 1, Health: &quartetv1.Health{
		Tcp: &quartetv1.TcpCheck{}, Interval: durationpb.New(100e6), Timeout: durationpb.New(100e6), Rise: 1, Fall: 1,
	}}
}

func tables() *quartetv1.HostTables {
	return &quartetv1.HostTables{
		Generation: 1, FlowSeed: make([]byte, 16),
		Rules:  []*quartetv1.NatRule{rule("10.1.3.11", "203.0.113.10", 80, "10.1.3.11"), rule("10.1.3.12", "203.0.113.10", 80, "10.1.3.12")},
		Checks: []*quartetv1.Check{check("web/http/10.1.3.11")},
	}
}

// checksRunning counts the health checks that run.
func checksRunning(t *testing.T, r *prometheus.Registry) (n float64) {
	t.Helper()
	families, err := r.Gather()
	must(t, err)
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == "quartet_hostagent_checked_dips" {
				n += m.GetGauge().GetValue()
			}
		}
	}
	return n
}

// What is refused names its field and changes nothing.
func TestBadTablesAreRefused(t *testing.T) {
	registry := prometheus.NewRegistry()
	a := newAgent(t, registry)
	must(t, a.ApplySnapshot(t.Context(), tables(), nodelink.FromManager))
	for _, c := range []struct {
		want   string
		change func(*quartetv1.HostTables)
	}{
		{"rules[1].tunnel: has 3 bytes, 4 or 16 are wanted", func(h *quartetv1.HostTables) { h.Rules[1].Tunnel = make([]byte, 3) }},
		{"rules[0].vip: has 0 bytes", func(h *quartetv1.HostTables) { h.Rules[0].Vip = nil }},
		{"rules[0].dip: has 5 bytes", func(h *quartetv1.HostTables) { h.Rules[0].Dip = make([]byte, 5) }},
		{"rules[0].port: is 65536, 0..65535 is wanted", func(h *quartetv1.HostTables) { h.Rules[0].Port = 65536 }},
		{"rules[0].dip_port: is 70000", func(h *quartetv1.HostTables) { h.Rules[0].DipPort = 70000 }},
		{"rules[0].protocol: is 262", func(h *quartetv1.HostTables) { h.Rules[0].Protocol = 262 }},
		{"rules[1]", func(h *quartetv1.HostTables) { h.Rules[1].Dip = ip("2001:db8::1") }},
		{"rules[1]", func(h *quartetv1.HostTables) { h.Rules[1] = h.Rules[0] }},
		{"checks[0]: id: is empty", func(h *quartetv1.HostTables) { h.Checks[0].Id = "" }},
	} {
		bad := tables()
		bad.Checks = append(bad.Checks, check("web/http/10.1.3.12"))
		c.change(bad)
		if err := a.ApplySnapshot(t.Context(), bad, nodelink.FromManager); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("snapshot: %v, want %s", err, c.want)
		}
		delta := &quartetv1.HostDelta{Base: 1, Generation: 2, PutRules: bad.Rules, PutChecks: bad.Checks}
		if err := a.ApplyDelta(t.Context(), delta); err == nil {
			t.Errorf("delta: no error, want %s", c.want)
		}
		if n := checksRunning(t, registry); n != 1 {
			t.Errorf("%s: %v checks run", c.want, n)
		}
	}
	if err := a.ApplyDelta(t.Context(), &quartetv1.HostDelta{DeleteRules: []*quartetv1.NatRule{{Tunnel: ip("10.1.3.11")}}}); err == nil || !strings.Contains(err.Error(), "delete_rules[0].vip") {
		t.Errorf("delete without a VIP: %v", err)
	}
}

// Deltas change what they name; a rule that is deleted and put again is put.
func TestDelta(t *testing.T) {
	registry := prometheus.NewRegistry()
	a := newAgent(t, registry)
	must(t, a.ApplySnapshot(t.Context(), tables(), nodelink.FromFile))
	was := tables().Rules[0]
	is := proto.CloneOf(was)
	is.DipPort = 9090
	must(t, a.ApplyDelta(t.Context(), &quartetv1.HostDelta{
		Base: 1, Generation: 2, DeleteRules: []*quartetv1.NatRule{was}, PutRules: []*quartetv1.NatRule{is},
		PutChecks: []*quartetv1.Check{check("web/http/10.1.3.12"), check("web/http/10.1.3.13")},
	}))
	if n := checksRunning(t, registry); n != 3 {
		t.Errorf("%v checks run", n)
	}
	must(t, a.ApplyDelta(t.Context(), &quartetv1.HostDelta{
		Base: 2, Generation: 3, DeleteRules: []*quartetv1.NatRule{was}, DeleteChecks: []string{"web/http/10.1.3.11"},
	}))
	if n := checksRunning(t, registry); n != 2 {
		t.Errorf("%v checks run", n)
	}

	put, err := rulesOf("put_rules", []*quartetv1.NatRule{is})
	must(t, err)
	gone, err := keysOf("delete_rules", tables().Rules, put)
	must(t, err)
	if len(gone) != 1 || gone[0].Tunnel != netip.MustParseAddr("10.1.3.12") {
		t.Errorf("to delete: %v", gone)
	}
}

func TestReport(t *testing.T) {
	registry := prometheus.NewRegistry()
	a := newAgent(t, registry)
	var r quartetv1.ReportRequest
	a.Report(&r, nodelink.Want{})
	if r.State != "starting" || r.Exits != nil {
		t.Errorf("before the first tables: %v", &r)
	}
	must(t, a.ApplySnapshot(t.Context(), tables(), nodelink.FromManager))
	r = quartetv1.ReportRequest{}
	a.Report(&r, nodelink.Want{AllResults: true, Counters: true})
	if _, ok := r.Exits["in_delivered"]; r.State != "ready" || !ok || len(r.Meters) != 0 {
		t.Errorf("after the first tables: %v", &r)
	}
	families, err := registry.Gather()
	must(t, err)
	names := map[string]int{}
	for _, f := range families {
		names[f.GetName()] = len(f.Metric)
	}
	if names["quartet_hostagent_exits_total"] != len(r.Exits) || names["quartet_hostagent_flows"] != 2 || names["quartet_hostagent_flow_events_total"] != 4 {
		t.Errorf("metrics: %v", names)
	}
	if _, err := a.Trace(t.Context(), nil); err == nil {
		t.Error("a host agent traces")
	}
}
