package rpc_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc/health/grpc_health_v1"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/manager"
	"github.com/quartet-lb/quartet/manager/compile"
	"github.com/quartet-lb/quartet/manager/health"
	"github.com/quartet-lb/quartet/manager/rpc"
)

func counts(e *quartetv1.MuxEndpoint) []int {
	out := make([]int, len(e.Dips))
	for i := 0; i < len(e.Buckets); i += 2 {
		out[binary.LittleEndian.Uint16(e.Buckets[i:])]++
	}
	return out
}

// A change reaches three muxes and the host agent it concerns, and is
// acknowledged with their number.
func TestApply(t *testing.T) {
	f := newFabric(t, manager.Config{})
	var muxes []*watcher
	for i := range 3 {
		muxes = append(muxes, f.watch("mux", fmt.Sprintf("mux%d", i+1), nil))
	}
	host := f.watch("host", "host1", []string{"10.0.10.1"})
	f.watch("host", "host2", []string{"10.0.99.1"})

	resp := f.apply(pool + vip("web", 10, 2, check+"consistency: table, "))
	r := resp.Rollout
	if r.Muxes != 3 || r.MuxesAcked != 3 || r.Hosts != 1 || r.HostsAcked != 1 || len(r.Waiting) > 0 || r.ElapsedMs < r.MuxesElapsedMs {
		t.Errorf("rollout %v", r)
	}
	if len(resp.Changes) != 2 || resp.Changes[1].Action != "created" || resp.Changes[1].Name != "web" {
		t.Errorf("changes %v", resp.Changes)
	}
	for _, m := range muxes {
		if m.generation() != r.Generation {
			t.Errorf("%s runs %d, not %d", m.name, m.generation(), r.Generation)
		}
		if d := m.snapshot().differs(muxes[0].snapshot()); d != "" {
			t.Errorf("%s differs: %s", m.name, d)
		}
	}
	e := muxes[0].endpoint(t, "web/http")
	if !e.Table || e.Gue || e.Tenant != "default" || len(e.Dips) != 2 || e.Dips[0].Port != 8080 ||
		!bytes.Equal(e.Dips[0].Tunnel, []byte{10, 0, 10, 1}) || e.Key.Port != 80 || e.Key.Protocol != 6 {
		t.Errorf("endpoint %v", e)
	}
	if a := muxes[0].snapshot().Announce; !slices.Equal(a, []string{"203.0.113.0/24"}) {
		t.Errorf("announce %v", a)
	}
	s := host.snapshot()
	if len(s.Rules) != 1 || len(s.Checks) != 1 || s.Checks["web/http/10.0.10.1"].GetPort() != 8080 {
		t.Errorf("host runs %v, %v", s.Rules, s.Checks)
	}

	// The same again changes nothing, and says how many run it.
	resp = f.apply(pool + vip("web", 10, 2, check+"consistency: table, "))
	if resp.Changes[1].Action != "unchanged" || resp.Rollout.Generation != r.Generation || resp.Rollout.MuxesAcked != 3 {
		t.Errorf("again: %v", resp)
	}
	// A dry run says what would change.
	before := f.dump()
	dry, err := f.op.Apply(t.Context(), &quartetv1.ApplyRequest{Objects: docs(t, vip("web", 11, 1, "")), DryRun: true})
	if err != nil || dry.Changes[0].Action != "updated" || dry.Rollout != nil || !maps.Equal(before, f.dump()) {
		t.Errorf("dry run: %v, %v", dry, err)
	}

	resp = f.apply(vip("web", 10, 3, ""))
	if resp.Changes[0].Action != "updated" {
		t.Errorf("update: %v", resp.Changes)
	}
	del, err := f.op.Delete(t.Context(), &quartetv1.DeleteRequest{Objects: []*quartetv1.ObjectRef{{Kind: "Vip", Name: "web"}, {Kind: "VipPool", Name: "pool"}}})
	if err != nil || del.Rollout.MuxesAcked != 3 || del.Rollout.HostsAcked != 1 {
		t.Errorf("delete: %v, %v", del, err)
	}
	for _, w := range append(muxes, host) {
		if s := w.snapshot(); len(s.Vips)+len(s.Endpoints)+len(s.Rules)+len(s.Checks)+len(s.Announce) > 0 {
			t.Errorf("%s still runs %+v", w.name, s)
		}
	}
	for k := range f.dump() {
		if strings.Contains(k, "web") {
			t.Errorf("%s is left in the store", k)
		}
	}
}

// What is refused changes nothing, and says which field and what would be valid.
func TestBadInput(t *testing.T) {
	f := newFabric(t, manager.Config{})
	m := f.watch("mux", "mux1", nil)
	f.apply(pool + vip("web", 10, 2, ""))
	before, tables := f.dump(), m.snapshot()
	for _, c := range []struct{ text, object, path string }{
		{vip("good", 11, 1, "") + vip("bad", 10, 1, ""), "Vip/bad", "addresses[0]"}, // another's address
		{strings.Replace(vip("bad", 11, 1, ""), "203.0.113.11", "198.51.100.1", 1), "Vip/bad", "addresses[0]"},
		{strings.Replace(vip("bad", 11, 1, ""), "port: 80,", "port: 70000,", 1), "Vip/bad", "endpoints[0].port"},
		{strings.Replace(vip("bad", 11, 1, ""), "port: 80,", "prot: 80,", 1), "Vip/bad", "endpoints[0].prot"},
		{vip("bad", 11, 0, ""), "Vip/bad", "endpoints[0].backends"},
		{"kind: VipPool\nname: pool\nprefixes: [198.51.100.0/24]\n", "VipPool/pool", "prefixes"}, // leaves web outside
		{"kind: Nonsense\nname: x\n", "document 1", "kind"},
	} {
		_, err := f.op.Apply(t.Context(), &quartetv1.ApplyRequest{Objects: docs(t, c.text)})
		var e *connect.Error
		if !errors.As(err, &e) || e.Code() != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", c.text, err)
			continue
		}
		found := false
		for _, d := range e.Details() {
			v, err := d.Value()
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range v.(*quartetv1.FieldViolations).Violations {
				found = found || v.Object == c.object && v.Path == c.path && v.Message != "" && v.Valid != ""
			}
		}
		if !found {
			t.Errorf("%s: no violation at %s %s in %v", c.text, c.object, c.path, err)
		}
	}
	for _, refs := range [][]*quartetv1.ObjectRef{
		{{Kind: "Vip", Name: "web"}, {Kind: "Vip", Name: "nobody"}},
		{{Kind: "VipPool", Name: "pool"}}, // in use
		{{Kind: "Mux", Name: "mux1"}},     // connected
		{{Kind: "Mux", Name: "mux9"}},
		{{Kind: "Nonsense", Name: "x"}},
	} {
		if _, err := f.op.Delete(t.Context(), &quartetv1.DeleteRequest{Objects: refs}); err == nil {
			t.Errorf("deleted %v", refs)
		}
	}
	for _, d := range []*quartetv1.DrainRequest{
		{Kind: "mux", Name: "mux9"}, {Kind: "dip", Name: "10.9.9.9"}, {Kind: "dip", Name: "x"}, {Kind: "vip", Name: "web"},
		{Kind: "dip", Name: "10.0.10.1", Vip: "nobody"}, {Kind: "mux", Name: "mux1", Vip: "web"},
	} {
		if _, err := f.op.Drain(t.Context(), d); err == nil {
			t.Errorf("drained %v", d)
		}
	}
	if after := f.dump(); !maps.Equal(before, after) {
		t.Errorf("the store changed:\n%q\n%q", before, after)
	}
	if d := m.snapshot().differs(tables); d != "" || m.generation() != tables.Generation {
		t.Errorf("the mux was sent something: %s", d)
	}
	// The set is as it was, too: what was refused can be applied where it fits.
	f.apply(vip("good", 11, 1, ""))
}

// A restart goes on with the same seed, tables and generation, bit for bit.
func TestRestart(t *testing.T) {
	f := newFabric(t, manager.Config{})
	host := f.watch("host", "host1", []string{"10.0.10.1", "10.0.10.2", "10.0.10.3"})
	mux := f.watch("mux", "mux1", nil)
	f.apply(pool + vip("web", 10, 3, check) + vip("db", 11, 2, "consistency: table, "))
	for i := range 3 {
		host.report(&quartetv1.CheckResult{Id: fmt.Sprintf("web/http/10.0.10.%d", i+1), Healthy: true})
	}
	host.report(&quartetv1.CheckResult{Id: "web/http/10.0.10.2", Reason: "connection refused"})
	f.drain("dip", "10.0.11.1", "db", false)
	f.drain("mux", "mux1", "", false)
	until(t, "both nodes are current", func() bool {
		return mux.generation() == f.list("Mux", "").Generation && len(mux.endpoint(t, "web/http").Previous) > 0
	})
	term := f.store.Term()
	dump, muxTables, hostTables := f.dump(), mux.snapshot(), host.snapshot()
	vips, dips := f.list("Vip", "").Vips, f.list("Dip", "").Dips
	mux.stop()
	host.stop()
	f.restart()
	if f.store.Term() <= term {
		t.Errorf("term %d after %d", f.store.Term(), term)
	}
	after := f.dump()
	for _, d := range []map[string]string{dump, after} { // last seen differs
		maps.DeleteFunc(d, func(k, _ string) bool { return strings.HasPrefix(k, "/quartet/nodes/") })
	}
	if !maps.Equal(dump, after) {
		t.Errorf("the store changed:\n%q\n%q", dump, after)
	}
	nodes := f.list("Mux", "").Nodes
	if len(nodes) != 1 || nodes[0].State != "gone" || nodes[0].Connected {
		t.Errorf("muxes after a restart: %v", nodes)
	}
	for i, v := range f.list("Vip", "").Vips {
		if v.Generation != vips[i].Generation {
			t.Errorf("%s was changed by %d, and before the restart by %d", v.Vip.Name, v.Generation, vips[i].Generation)
		}
	}
	for i, d := range f.list("Dip", "").Dips {
		if d.State != dips[i].State || d.Reason != dips[i].Reason || d.Buckets != dips[i].Buckets {
			t.Errorf("after a restart %v, before %v", d, dips[i])
		}
	}
	mux2 := f.watch("mux", "mux1", nil)
	host2 := f.watch("host", "host1", []string{"10.0.10.1", "10.0.10.2", "10.0.10.3"})
	if d := mux2.snapshot().differs(muxTables); d != "" || mux2.generation() != muxTables.Generation {
		t.Errorf("generation %d for %d; %s", mux2.generation(), muxTables.Generation, d)
	}
	if d := host2.snapshot().differs(hostTables); d != "" {
		t.Errorf("host: %s", d)
	}
	r := f.apply(vip("db", 11, 3, "consistency: table, ")).Rollout
	if r.Generation != muxTables.Generation+1 || r.MuxesAcked != 1 {
		t.Errorf("after a restart: %v", r)
	}
	// A health state that was known stays; the agent need not report it again.
	if c := counts(mux2.endpoint(t, "web/http")); c[0] == 0 || c[1] != 0 || c[2] == 0 {
		t.Errorf("buckets %v", c)
	}
}

// After any sequence of changes a node that followed the deltas runs the same
// as one that is sent a snapshot.
func TestDeltasEqualSnapshot(t *testing.T) {
	f := newFabric(t, manager.Config{})
	hosts := []string{"10.0.1.1", "10.0.2.1", "10.0.2.2"}
	mux, host := f.watch("mux", "mux1", nil), f.watch("host", "host1", hosts)
	f.apply(pool)
	r := rand.New(rand.NewPCG(1, 2))
	exists := map[string]bool{}
	kind := map[string]string{"mux": "Mux", "host": "Host"}
	for i := range 150 {
		name := fmt.Sprintf("v%d", 1+r.IntN(4))
		n := int(name[1] - '0')
		switch op := r.IntN(10); {
		case op < 5:
			more := []string{"", check, "consistency: table, ", "encapsulation: gue, "}[r.IntN(4)]
			text := vip(name, n, 1+r.IntN(4), more)
			if r.IntN(2) == 0 { // a second address, and an IPv6 one whose DIPs some have
				text = strings.Replace(text, "]\n", fmt.Sprintf(", 203.0.113.%d, \"2001:db8::%d\"]\n", 100+n, n), 1)
				text = strings.Replace(text, "port: 8080}", fmt.Sprintf("dip6: \"fd00::%d\", port: 8080}", n), 1)
			}
			if r.IntN(3) == 0 {
				text = strings.Replace(text, "port: 80,", "port: 81,", 1)
			}
			f.apply(text)
			exists[name] = true
		case op < 6 && exists[name]:
			if _, err := f.op.Delete(t.Context(), &quartetv1.DeleteRequest{Objects: []*quartetv1.ObjectRef{{Kind: "Vip", Name: name}}}); err != nil {
				t.Fatal(err)
			}
			delete(exists, name)
		case op < 7 && exists[name]:
			f.drain("dip", fmt.Sprintf("10.0.%d.1", n), "", r.IntN(2) == 0)
		case op < 8:
			f.drain("mux", "mux1", "", r.IntN(2) == 0)
		default:
			host.report(&quartetv1.CheckResult{Id: fmt.Sprintf("%s/http/10.0.%d.%d", name, n, 1+r.IntN(2)), Healthy: r.IntN(3) > 0})
		}
		if i%10 != 9 {
			continue
		}
		for _, n := range append(f.list("Mux", "mux1").Nodes, f.list("Host", "host1").Nodes...) {
			w := map[string]*watcher{"mux1": mux, "host1": host}[n.Name]
			until(t, "the deltas arrive", func() bool {
				return w.generation() >= n.GenerationTarget && w.generation() == f.list(kind[n.Role], n.Name).Nodes[0].Generation
			})
			if w.role == "host" {
				until(t, "the rules go that muxes needed", func() bool { return len(w.snapshot().Rules) == f.rules(hosts) })
			}
			have := w.snapshot()
			w.stop()
			w = f.watch(w.role, w.name, map[string][]string{"host": hosts}[w.role])
			if d := have.differs(w.snapshot()); d != "" {
				t.Fatalf("after %d changes %s differs from a snapshot in %s", i+1, w.name, d)
			}
			if w.role == "mux" {
				mux = w
			} else {
				host = w
			}
		}
	}
}

// rules is how many rules the VIPs give the host agent with these addresses.
func (f *fabric) rules(addresses []string) int {
	f.t.Helper()
	var all []netip.Addr
	for _, a := range addresses {
		all = append(all, netip.MustParseAddr(a))
	}
	var results []*compile.Result
	for _, v := range f.list("Vip", "").Vips {
		r, err := compile.VIP(compile.Input{Vip: v.Vip, Drained: func(netip.Addr) bool { return false }})
		if err != nil {
			f.t.Fatal(err)
		}
		results = append(results, r)
	}
	var t quartetv1.HostTables
	compile.HostSnapshot(results, all, &t)
	return len(t.Rules)
}

// A mux that does not read its stream delays no other, and catches up with
// fewer messages than there were changes.
func TestSlowNode(t *testing.T) {
	f := newFabric(t, manager.Config{})
	fast := f.watch("mux", "fast", nil)
	f.apply(pool + vip("web", 10, 2, ""))
	release := make(chan struct{})
	slow := f.watch("mux", "slow", nil, held(release))
	// More than any buffer between them holds.
	const changes = 60
	text := strings.ReplaceAll(vip("web", 10, 250, ""), "10.0.10.", "10.1.0.")
	for i := range changes {
		doc := strings.ReplaceAll(text, "port: 8080", fmt.Sprintf("port: %d", 9000+i))
		resp, err := f.op.Apply(t.Context(), &quartetv1.ApplyRequest{Objects: docs(t, doc), WaitMs: 1})
		if err != nil {
			t.Fatal(err)
		}
		if r := resp.Rollout; r.Muxes != 2 || !slices.Contains(r.Waiting, "slow") {
			t.Fatalf("change %d: %v", i, r)
		}
		until(t, "the fast mux runs the change", func() bool { return fast.generation() >= resp.Rollout.Generation })
	}
	if g := slow.generation(); g == fast.generation() {
		t.Fatalf("the slow mux reads")
	}
	close(release)
	until(t, "the slow mux catches up", func() bool { return slow.generation() == fast.generation() })
	if d := slow.snapshot().differs(fast.snapshot()); d != "" {
		t.Errorf("it differs in %s", d)
	}
	slow.mu.Lock()
	defer slow.mu.Unlock()
	if slow.messages >= changes {
		t.Errorf("%d messages for %d changes", slow.messages, changes)
	}
}

// The wait for a rollout ends when those who have not answered are gone.
func TestRolloutEndsWithNode(t *testing.T) {
	f := newFabric(t, manager.Config{})
	release := make(chan struct{})
	slow := f.watch("mux", "slow", nil, held(release))
	defer close(release)
	done := make(chan *quartetv1.ApplyResponse, 1)
	go func() {
		resp, err := f.op.Apply(t.Context(), &quartetv1.ApplyRequest{Objects: docs(t, pool+vip("web", 10, 2, "")), WaitMs: 60_000})
		if err != nil {
			t.Error(err)
		}
		done <- resp
	}()
	until(t, "the change is published", func() bool { return f.list("Vip", "").Generation > 1 })
	slow.cancel()
	select {
	case resp := <-done:
		if r := resp.GetRollout(); r.GetMuxes() != 1 || r.GetMuxesAcked() != 0 || !slices.Equal(r.GetWaiting(), []string{"slow"}) {
			t.Errorf("rollout %v", r)
		}
	case <-time.After(30 * time.Second):
		t.Error("apply still waits")
	}
}

// Health of a DIP reaches the muxes; without any report a DIP is out.
func TestHealth(t *testing.T) {
	f := newFabric(t, manager.Config{AgentTimeout: -1})
	mux := f.watch("mux", "mux1", nil)
	host := f.watch("host", "host1", []string{"10.0.10.1", "10.0.10.2"})
	other := f.watch("host", "host2", []string{"10.0.99.1"})
	f.apply(pool + vip("web", 10, 2, check))
	buckets := func() []int { return counts(mux.endpoint(t, "web/http")) }
	state := func(i int) *quartetv1.DipStatus { return f.list("Vip", "web").Vips[0].Dips[i] }
	result := func(i int, healthy bool, reason string) *quartetv1.CheckResult {
		return &quartetv1.CheckResult{Id: fmt.Sprintf("web/http/10.0.10.%d", i), Healthy: healthy, Reason: reason}
	}
	if b := buckets(); b[0]+b[1] != 0 || state(0).State != "unknown" {
		t.Errorf("unknown DIPs have buckets %v, state %v", b, state(0))
	}
	if w := f.list("Vip", "web").Vips[0].Warnings; !slices.ContainsFunc(w, func(s string) bool { return strings.Contains(s, "no_dip") }) {
		t.Errorf("warnings %v", w)
	}
	other.report(result(1, true, "")) // not its DIP
	host.report(result(2, true, ""))
	until(t, "the healthy DIP has all buckets", func() bool { b := buckets(); return b[0] == 0 && b[1] == 256 })
	host.report(result(1, true, ""))
	until(t, "both have half", func() bool { b := buckets(); return b[0] == 128 && b[1] == 128 })
	g := f.list("Vip", "").Generation
	host.report(result(1, true, ""), result(2, true, "")) // nothing new
	host.report(result(2, false, "connection refused"))
	until(t, "the unhealthy DIP is out", func() bool { b := buckets(); return b[0] == 256 && b[1] == 0 })
	if s := state(1); s.State != "unhealthy" || s.Reason != "connection refused" || s.Since == nil || s.BucketsTotal != 256 {
		t.Errorf("state %v", s)
	}
	if got := f.list("Vip", "").Generation; got != g+1 {
		t.Errorf("generation %d after %d: a repeated report made one", got, g)
	}
	host.report(result(1, false, "timeout"))
	until(t, "no DIP is left", func() bool { return len(mux.endpoint(t, "web/http").Buckets) == 0 })
	host.report(result(1, true, ""))
	until(t, "one is back", func() bool { return len(mux.endpoint(t, "web/http").Buckets) > 0 })

	// An endpoint that changes its port keeps its checks, and so what is known;
	// one that changes its name keeps its DIPs until their first report.
	f.apply(strings.Replace(vip("web", 10, 2, check), "port: 80,", "port: 81,", 1))
	if c := counts(mux.endpoint(t, "web/http")); c[0] != 256 || state(1).State != "unhealthy" {
		t.Errorf("after a change of port: %v, %v", c, state(1))
	}
	f.apply(strings.NewReplacer("port: 80,", "port: 81,", "name: http", "name: www").Replace(vip("web", 10, 2, check)))
	if c := counts(mux.endpoint(t, "web/www")); c[0] != 256 || state(1).State != "unhealthy" {
		t.Errorf("after a change of name: %v, %v", c, state(1))
	}
	host.report(&quartetv1.CheckResult{Id: "web/www/10.0.10.2", Healthy: true})
	until(t, "its report counts", func() bool { return counts(mux.endpoint(t, "web/www"))[1] == 128 })

	// A check on a DIP that serves without one leaves it in rotation.
	f.apply(vip("db", 11, 2, ""))
	f.apply(vip("db", 11, 2, check))
	if c := counts(mux.endpoint(t, "db/http")); c[0] != 128 || c[1] != 128 {
		t.Errorf("adding a check took DIPs out: %v", c)
	}
	// One that is added under a check is out until it is reported.
	f.apply(vip("db", 11, 3, check))
	if c := counts(mux.endpoint(t, "db/http")); c[0] == 0 || c[2] != 0 {
		t.Errorf("an unreported DIP: %v", c)
	}
}

// A host agent that falls silent loses its checked DIPs, and gets them back
// when it reports again. One that only reconnects loses nothing.
func TestSilentAgent(t *testing.T) {
	t.Parallel()
	f := newFabric(t, manager.Config{AgentTimeout: 2 * time.Second})
	mux := f.watch("mux", "mux1", nil)
	addresses := []string{"10.0.10.1", "10.0.10.2", "10.0.10.3"}
	var hosts []*watcher
	for i, a := range addresses {
		hosts = append(hosts, f.watch("host", fmt.Sprintf("host%d", i+1), []string{a}))
	}
	f.apply(pool + vip("web", 10, 3, check))
	beat := func(all ...*watcher) {
		for _, h := range all {
			h.report()
		}
	}
	for i, h := range hosts {
		h.report(&quartetv1.CheckResult{Id: "web/http/" + addresses[i], Healthy: true})
	}
	buckets := func() []int { return counts(mux.endpoint(t, "web/http")) }
	until(t, "all are in rotation", func() bool {
		beat(hosts...)
		b := buckets()
		return b[0] > 0 && b[1] > 0 && b[2] > 0
	})
	until(t, "the silent agent's DIP is out", func() bool {
		beat(hosts[:2]...)
		b := buckets()
		return b[0] > 0 && b[1] > 0 && b[2] == 0
	})
	if s := f.list("Dip", "10.0.10.3").Dips[0]; s.State != "unhealthy" || !strings.Contains(s.Reason, "host3 silent") {
		t.Errorf("state %v", s)
	}
	if w := strings.Join(f.list("Vip", "web").Vips[0].Warnings, "\n"); !strings.Contains(w, "host3") {
		t.Errorf("warnings %v", w)
	}
	until(t, "it is back", func() bool { beat(hosts...); return buckets()[2] > 0 })

	// All silent: the manager does not believe it.
	until(t, "distrust shows", func() bool {
		return strings.Contains(strings.Join(f.list("Vip", "web").Vips[0].Warnings, "\n"), "most host agents are silent")
	})
	if b := buckets(); b[0] == 0 || b[1] == 0 || b[2] == 0 {
		t.Errorf("buckets %v", b)
	}
}

// A DIP that flaps is held out and comes back by itself; the last one is not
// held out.
func TestFlappingDIP(t *testing.T) {
	t.Parallel()
	damping := health.Damping{Penalty: 1000, Suppress: 2500, Reuse: 1000, HalfLife: 1500 * time.Millisecond, Max: 5 * time.Second}
	f := newFabric(t, manager.Config{AgentTimeout: -1, Damping: damping})
	mux := f.watch("mux", "mux1", nil)
	host := f.watch("host", "host1", []string{"10.0.10.1", "10.0.10.2"})
	f.apply(pool + vip("web", 10, 2, check))
	result := func(i int, healthy bool) *quartetv1.CheckResult {
		return &quartetv1.CheckResult{Id: fmt.Sprintf("web/http/10.0.10.%d", i), Healthy: healthy}
	}
	host.report(result(1, true), result(2, true))
	for range 5 {
		host.report(result(1, false), result(1, true))
	}
	until(t, "it is held out", func() bool {
		d := f.list("Dip", "10.0.10.1").Dips[0]
		return d.State == "unhealthy" && strings.Contains(d.Reason, "flaps") && d.Buckets == 0
	})
	host.report(result(2, false)) // nobody else is left
	until(t, "it serves all the same", func() bool { return counts(mux.endpoint(t, "web/http"))[0] == 256 })
	host.report(result(2, true))
	until(t, "it is back", func() bool { return f.list("Dip", "10.0.10.1").Dips[0].State == "healthy" })
}

// Draining takes buckets or routes away and leaves the rest; undoing it and a
// restart are as one expects.
func TestDrain(t *testing.T) {
	f := newFabric(t, manager.Config{})
	one, two := f.watch("mux", "mux1", nil), f.watch("mux", "mux2", nil)
	f.apply(pool + vip("web", 10, 2, "") + strings.Replace(vip("db", 11, 1, ""), "10.0.11.1", "10.0.10.1", 1))
	r := f.drain("mux", "mux1", "", false).Rollout
	if r.Muxes != 1 || r.MuxesAcked != 1 || !one.snapshot().Drain || two.snapshot().Drain {
		t.Errorf("drained mux1: %v", r)
	}
	f.apply(vip("x", 12, 1, "")) // the other's stream goes on from its own base
	if two.generation() != one.generation() {
		t.Errorf("generations %d and %d", one.generation(), two.generation())
	}
	f.drain("mux", "mux1", "", true)
	if one.snapshot().Drain {
		t.Error("mux1 still drains")
	}
	resp := f.drain("dip", "10.0.10.1", "web", false)
	if len(resp.Changes) != 1 || resp.Changes[0].Name != "web/10.0.10.1" {
		t.Errorf("changes %v", resp.Changes)
	}
	e := one.endpoint(t, "web/http")
	if c := counts(e); c[0] != 0 || c[1] != 256 || e.Dips[0].State != "draining" {
		t.Errorf("web: %v, %v", c, e.Dips)
	}
	if len(one.endpoint(t, "db/http").Buckets) == 0 {
		t.Error("db lost its DIP")
	}
	f.drain("dip", "10.0.10.1", "", false)
	if len(one.endpoint(t, "db/http").Buckets) != 0 {
		t.Error("db still has its DIP")
	}
	if _, err := f.op.Drain(t.Context(), &quartetv1.DrainRequest{Kind: "dip", Name: "10.0.10.1", Vip: "web", Undo: true}); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("undo of one VIP: %v", err)
	}
	if a := f.drain("dip", "10.0.10.1", "", false).Changes[0].Action; a != "unchanged" {
		t.Errorf("drained twice: %s", a)
	}
	f.restart()
	if d := f.list("Dip", "10.0.10.1").Dips; len(d) != 2 || d[0].State != "draining" || d[1].State != "draining" {
		t.Errorf("after a restart: %v", d)
	}
	f.drain("dip", "10.0.10.1", "", true)
	if d := f.list("Dip", "10.0.10.1").Dips; d[0].State != "unchecked" || d[1].State != "unchecked" {
		t.Errorf("undone: %v", d)
	}
}

func TestAnnounce(t *testing.T) {
	f := newFabric(t, manager.Config{})
	m := f.watch("mux", "mux1", nil)
	announced := func(want ...string) {
		t.Helper()
		if a := m.snapshot().Announce; !slices.Equal(a, want) {
			t.Errorf("announces %v, not %v", a, want)
		}
	}
	f.apply(pool)
	announced()
	f.apply(strings.Replace(vip("web", 10, 1, ""), "]\n", ", \"2001:db8::10\"]\n", 1))
	announced("203.0.113.0/24", "2001:db8::/64")
	f.apply(vip("db", 11, 1, ""))
	f.apply(strings.Replace(pool, "prefixes", "announce: host\nprefixes", 1))
	announced("203.0.113.10/32", "203.0.113.11/32", "2001:db8::10/128")
	if _, err := f.op.Delete(t.Context(), &quartetv1.DeleteRequest{Objects: []*quartetv1.ObjectRef{{Kind: "Vip", Name: "web"}}}); err != nil {
		t.Fatal(err)
	}
	announced("203.0.113.11/32")
}

// Who may do what, by certificate.
func TestAuthorization(t *testing.T) {
	f := newFabric(t, manager.Config{})
	f.issue(certs.Mux, "mux1")
	f.issue(certs.Host, "host1")
	f.issue(certs.Switch, "switch1")
	watch := func(cert, role, name string) error {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s, err := quartetv1connect.NewNodeServiceClient(f.client(cert), f.url, connect.WithGRPC()).
			Watch(ctx, &quartetv1.WatchRequest{Role: role, Name: name})
		if err != nil {
			return err
		}
		defer s.Close()
		s.Receive()
		return s.Err()
	}
	list := func(cert string) error {
		_, err := quartetv1connect.NewOperatorServiceClient(f.client(cert), f.url).List(t.Context(), &quartetv1.ListRequest{Kind: "Vip"})
		return err
	}
	report := func(cert, name string) error {
		_, err := quartetv1connect.NewNodeServiceClient(f.client(cert), f.url).Report(t.Context(), &quartetv1.ReportRequest{Name: name})
		return err
	}
	reply := func(cert, name string) error {
		_, err := quartetv1connect.NewNodeServiceClient(f.client(cert), f.url).TraceReply(t.Context(), &quartetv1.TraceReplyRequest{Name: name})
		return err
	}
	if err := watch("mux1", "mux", "mux1"); err != nil {
		t.Errorf("a mux: %v", err)
	}
	if err := list("alice"); err != nil {
		t.Errorf("an operator: %v", err)
	}
	for name, err := range map[string]error{
		"an operator watches":        watch("alice", "mux", "alice"),
		"a mux as another":           watch("mux1", "mux", "mux2"),
		"a mux as a host":            watch("mux1", "host", "mux1"),
		"a switch watches":           watch("switch1", "mux", "switch1"),
		"a mux lists":                list("mux1"),
		"a host lists":               list("host1"),
		"a manager lists":            list("m1"),
		"an operator reports":        report("alice", "mux1"),
		"a mux reports as another":   report("mux1", "mux2"),
		"a host replies for another": reply("host1", "mux1"),
	} {
		if connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := list(""); err == nil || connect.CodeOf(err) == connect.CodePermissionDenied {
		t.Errorf("without a certificate: %v", err)
	}
	if resp, err := http.Post(strings.Replace(f.url, "https", "http", 1)+"/quartet.v1.OperatorService/List", "application/json", strings.NewReader("{}")); err == nil {
		if resp.StatusCode == http.StatusOK {
			t.Error("plain HTTP is served")
		}
		resp.Body.Close()
	}
	for address, ok := range map[string]bool{
		"127.0.0.1:1": true, "[::1]:1": true, ":1": false, "0.0.0.0:1": false, "10.0.0.1:1": false, "localhost:1": false, "x": false,
	} {
		if err := rpc.CheckInsecure(address); (err == nil) != ok {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// Nodes are refused what would confuse the fabric.
func TestWatchRefused(t *testing.T) {
	f := newFabric(t, manager.Config{})
	host := f.watch("host", "host1", []string{"10.0.0.1"})
	f.issue(certs.Host, "host2")
	watch := func(r *quartetv1.WatchRequest) error {
		s, err := quartetv1connect.NewNodeServiceClient(f.client(r.Name), f.url, connect.WithGRPC()).Watch(t.Context(), r)
		if err != nil {
			return err
		}
		defer s.Close()
		if s.Receive() {
			return nil
		}
		return s.Err()
	}
	for _, c := range []struct {
		r    *quartetv1.WatchRequest
		want string
	}{
		{&quartetv1.WatchRequest{Name: "host2", Role: "host", Addresses: []string{"10.0.0.1"}}, "address 10.0.0.1 is Host/host1's"},
		{&quartetv1.WatchRequest{Name: "host2", Role: "host", Addresses: []string{"x"}}, `"x" is not an address`},
		{&quartetv1.WatchRequest{Name: "host2", Role: "host", Term: 1 << 40}, "the manager's state was replaced"},
	} {
		if err := watch(c.r); connect.CodeOf(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c.r, err)
		}
	}
	// The same node again takes its own place.
	again := f.watch("host", "host1", []string{"10.0.0.1"})
	<-host.ended
	if err := again.ctxErr(); err != nil {
		t.Error(err)
	}
}

func (w *watcher) ctxErr() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func TestTrace(t *testing.T) {
	f := newFabric(t, manager.Config{})
	packet := &quartetv1.TracePacket{Source: "198.51.100.7", Destination: "203.0.113.10", Protocol: "TCP"}
	trace := func(mux string) (*quartetv1.TraceResponse, error) {
		return f.op.Trace(t.Context(), &quartetv1.TraceRequest{Mux: mux, Packet: packet})
	}
	if _, err := trace(""); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("without muxes: %v", err)
	}
	one, two := f.watch("mux", "mux1", nil), f.watch("mux", "mux2", nil)
	if _, err := trace("mux9"); connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "connected: mux1, mux2") {
		t.Errorf("unknown mux: %v", err)
	}
	if _, err := f.op.Trace(t.Context(), &quartetv1.TraceRequest{}); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("without a packet: %v", err)
	}
	answer := func(reply func(id string)) {
		var command *quartetv1.TraceCommand
		until(t, "the command arrives", func() bool {
			two.mu.Lock()
			defer two.mu.Unlock()
			if len(two.traces) == 0 {
				return false
			}
			command, two.traces = two.traces[0], nil
			return true
		})
		if command.Packet.Source != packet.Source {
			t.Errorf("command %v", command)
		}
		reply(command.Id)
	}
	go answer(func(id string) {
		// Another mux can't answer.
		one.client.TraceReply(t.Context(), &quartetv1.TraceReplyRequest{Name: "mux1", Id: id, Response: &quartetv1.TraceResponse{Exit: "wrong"}})
		two.client.TraceReply(t.Context(), &quartetv1.TraceReplyRequest{Name: "mux2", Id: id, Response: &quartetv1.TraceResponse{Exit: "tx"}})
	})
	if resp, err := trace("mux2"); err != nil || resp.Exit != "tx" || resp.Mux != "mux2" {
		t.Errorf("trace: %v, %v", resp, err)
	}
	go answer(func(id string) {
		two.client.TraceReply(t.Context(), &quartetv1.TraceReplyRequest{Name: "mux2", Id: id, Error: "no such protocol"})
	})
	if _, err := trace("mux2"); connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "no such protocol") {
		t.Errorf("trace: %v", err)
	}
}

// Counters of all muxes add up, and show what each dropped.
func TestTop(t *testing.T) {
	registry := prometheus.NewRegistry()
	f := newFabric(t, manager.Config{Metrics: registry})
	for i, name := range []string{"mux1", "mux2"} {
		w := f.watch("mux", name, nil)
		if _, err := w.client.Report(t.Context(), &quartetv1.ReportRequest{
			Name: name, Generation: w.generation(), State: "ready",
			Counters:           []*quartetv1.FlowCounters{{Vip: "web", Address: "203.0.113.10", Endpoint: "http", Dip: "10.0.10.1", Packets: uint64(10 + i), Bytes: 100, NewFlows: 1}},
			Exits:              map[string]uint64{"no_vip": uint64(i)},
			BgpPeers:           []*quartetv1.BgpPeerStatus{{Address: "10.0.0.254", State: "established"}},
			Announced:          []string{"203.0.113.0/24"},
			UnreachableTunnels: []*quartetv1.Tunnel{{Address: []byte{10, 0, 10, 1}}, {Address: []byte{10, 0, 10, 2}, Gue: true}},
		}); err != nil {
			t.Fatal(err)
		}
		w.report() // a short one leaves the counters
	}
	top, err := f.op.Top(t.Context(), &quartetv1.TopRequest{})
	if err != nil || len(top.Counters) != 1 || top.Counters[0].Packets != 21 || top.Counters[0].Bytes != 200 || top.Counters[0].NewFlows != 2 ||
		len(top.Nodes) != 2 || top.Nodes[1].Exits["no_vip"] != 1 {
		t.Errorf("top: %v, %v", top, err)
	}
	f.apply(pool + vip("web", 10, 2, ""))
	if d := f.list("Vip", "web").Vips[0].Dips; !slices.Equal(d[0].UnreachableFrom, []string{"mux1", "mux2"}) || len(d[1].UnreachableFrom) > 0 {
		t.Errorf("unreachable: %v", d)
	}
	if w := f.list("Vip", "web").Vips[0].Warnings; !slices.ContainsFunc(w, func(s string) bool {
		return strings.HasSuffix(s, "can't be reached: 10.0.10.1 from mux1, mux2")
	}) {
		t.Errorf("warnings: %q", w)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "quartet_manager_dips_unreachable" }); i < 0 || families[i].Metric[0].GetGauge().GetValue() != 1 {
		t.Errorf("quartet_manager_dips_unreachable is not 1: %v", families)
	}
	n := f.list("Mux", "mux2").Nodes[0]
	if n.State != "ready" || !n.Connected || len(n.BgpPeers) != 1 || len(n.Announced) != 1 || n.Version != "test" {
		t.Errorf("node %v", n)
	}
}

// One port speaks gRPC, gRPC-web and JSON, over HTTP/1.1 and HTTP/2.
func TestProtocols(t *testing.T) {
	f := newFabric(t, manager.Config{})
	f.apply(pool + vip("web", 10, 1, ""))
	h2 := f.client("alice")
	h1 := &http.Client{Transport: &http.Transport{TLSClientConfig: h2.Transport.(*http.Transport).TLSClientConfig.Clone(),
		TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}}
	h1.Transport.(*http.Transport).TLSClientConfig.NextProtos = []string{"http/1.1"}
	for name, c := range map[string]quartetv1connect.OperatorServiceClient{
		"gRPC":               quartetv1connect.NewOperatorServiceClient(h2, f.url, connect.WithGRPC()),
		"gRPC-web":           quartetv1connect.NewOperatorServiceClient(h2, f.url, connect.WithGRPCWeb()),
		"gRPC-web, HTTP/1.1": quartetv1connect.NewOperatorServiceClient(h1, f.url, connect.WithGRPCWeb()),
		"connect, HTTP/1.1":  quartetv1connect.NewOperatorServiceClient(h1, f.url),
	} {
		if resp, err := c.List(t.Context(), &quartetv1.ListRequest{Kind: "Vip"}); err != nil || len(resp.Vips) != 1 {
			t.Errorf("%s: %v, %v", name, resp, err)
		}
	}
	for name, c := range map[string]*http.Client{"HTTP/1.1": h1, "HTTP/2.0": h2} {
		resp, err := c.Post(f.url+"/quartet.v1.OperatorService/List", "application/json", strings.NewReader(`{"kind":"Vip"}`))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		var out struct {
			Vips []struct{ Vip struct{ Name string } }
		}
		if err := json.Unmarshal(body, &out); err != nil || resp.Proto != name || len(out.Vips) != 1 || out.Vips[0].Vip.Name != "web" {
			t.Errorf("JSON over %s (%s): %s", name, resp.Proto, body)
		}
		if !strings.Contains(string(body), `"buckets_total"`) {
			t.Errorf("JSON with other names than the schema's: %s", body)
		}
		resp, err = c.Post(f.url+"/quartet.v1.OperatorService/List", "application/json", strings.NewReader(`{"knd":"Vip"}`))
		if err != nil {
			t.Fatal(err)
		}
		body, _ = io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(body), `unknown field \"knd\"`) {
			t.Errorf("an unknown field: %s %s", resp.Status, body)
		}
		resp, err = c.Get(f.url + "/healthz")
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("healthz: %v, %v", resp, err)
		}
		resp.Body.Close()
	}
	check := connect.NewClient[grpc_health_v1.HealthCheckRequest, grpc_health_v1.HealthCheckResponse](h2, f.url+"/grpc.health.v1.Health/Check", connect.WithGRPC())
	resp, err := check.CallUnary(t.Context(), connect.NewRequest(&grpc_health_v1.HealthCheckRequest{}))
	if err != nil || resp.Msg.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("health: %v, %v", resp, err)
	}
	if _, err := check.CallUnary(t.Context(), connect.NewRequest(&grpc_health_v1.HealthCheckRequest{Service: "x"})); connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("health of an unknown service: %v", err)
	}
}

// A node that is gone can be forgotten, with its drain.
func TestForgetNode(t *testing.T) {
	f := newFabric(t, manager.Config{})
	m := f.watch("mux", "mux1", nil)
	f.drain("mux", "mux1", "", false)
	m.stop()
	until(t, "it is gone", func() bool { return !f.list("Mux", "mux1").Nodes[0].Connected })
	ref := []*quartetv1.ObjectRef{{Kind: "Mux", Name: "mux1"}}
	if _, err := f.op.Delete(t.Context(), &quartetv1.DeleteRequest{Objects: ref}); err != nil {
		t.Fatal(err)
	}
	if n := f.list("Mux", "").Nodes; len(n) != 0 {
		t.Errorf("it is still listed: %v", n)
	}
	f.restart()
	for k := range f.dump() {
		if strings.Contains(k, "mux1") {
			t.Errorf("%s is left", k)
		}
	}
	if f.watch("mux", "mux1", nil).snapshot().Drain {
		t.Error("it still drains")
	}
}

// Many operators at once: all changes land, in some order, and generations are
// shared rather than lost.
func TestConcurrentApply(t *testing.T) {
	f := newFabric(t, manager.Config{})
	m := f.watch("mux", "mux1", nil)
	f.apply(pool)
	errs := make(chan error)
	for i := range 50 {
		go func() {
			text := vip(fmt.Sprintf("v%d", i), 1+i%40, 1, "") // ten pairs want one address
			_, err := f.op.Apply(t.Context(), &quartetv1.ApplyRequest{Objects: docs(t, text)})
			errs <- err
		}()
	}
	refused := 0
	for range 50 {
		if err := <-errs; connect.CodeOf(err) == connect.CodeInvalidArgument {
			refused++
		} else if err != nil {
			t.Error(err)
		}
	}
	if n := len(f.list("Vip", "").Vips); refused != 10 || n != 40 || len(m.snapshot().Vips) != 40 {
		t.Errorf("%d refused, %d VIPs, %d on the mux", refused, n, len(m.snapshot().Vips))
	}
}

// What the HTTP server says, such as of a node without a certificate, is in the
// daemon's log and form.
func TestHandshakeFailureIsLogged(t *testing.T) {
	var text strings.Builder
	s := rpc.NewServer(t.Context(), nil, rpc.Config{Log: slog.New(slog.NewJSONHandler(&text, nil)), Process: http.NotFoundHandler()})
	s.ErrorLog.Print("TLS handshake error")
	if got := text.String(); !strings.Contains(got, `"level":"WARN","msg":"TLS handshake error"`) {
		t.Errorf("%q", got)
	}
}
