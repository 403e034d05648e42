package manager

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/object"
	"github.com/quartet-lb/quartet/manager/store"
)

func newManager(t *testing.T) (*Manager, *store.Store) {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	s, err := store.Open(t.Context(), store.Config{Dir: t.TempDir(), Name: "m1", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	m, err := New(t.Context(), s, Config{Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return m, s
}

func decode(t *testing.T, text string) []object.Object {
	t.Helper()
	docs, err := object.Read([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	objects, violations := object.Decode(docs)
	if len(violations) > 0 {
		t.Fatal(object.Format(violations[0]))
	}
	return objects
}

// runAll makes each change a request, all of one batch, and returns their errors.
func (m *Manager) runAll(all ...func(b *batch) error) []error {
	var requests []*request
	for _, f := range all {
		requests = append(requests, &request{done: make(chan outcome, 1), stage: func(b *batch) ([]*quartetv1.Change, error) {
			return nil, f(b)
		}})
	}
	m.run(requests)
	var errs []error
	for _, r := range requests {
		errs = append(errs, (<-r.done).err)
	}
	return errs
}

func applying(t *testing.T, text string) func(b *batch) error {
	return func(b *batch) error {
		_, err := b.change(decode(t, text), nil, false)
		return err
	}
}

// A DIP that is removed and added again before its agent hears of it would wait
// for a report that the agent has no reason to send: the agent is made to watch
// again, upon which it reports everything.
func TestCheckComesBack(t *testing.T) {
	m, _ := newManager(t)
	const pool = "{kind: VipPool, name: pool, prefixes: [203.0.113.0/24]}\n---\n"
	const one = "{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, health: {tcp: {}}, backends: [{dip: 10.0.0.1}]}]}\n---\n"
	two := strings.Replace(one, "[{dip: 10.0.0.1}]", "[{dip: 10.0.0.1}, {dip: 10.0.0.2}]", 1)
	addresses := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
	watch := &quartetv1.WatchRequest{Name: "host1", Role: RoleHost, Addresses: []string{"10.0.0.1", "10.0.0.2"}}
	make := func(f func(b *batch) error) {
		t.Helper()
		if errs := m.runAll(f); errs[0] != nil {
			t.Fatal(errs[0])
		}
	}
	make(applying(t, pool+two))
	n, s, err := m.connect(watch)
	if err != nil {
		t.Fatal(err)
	}
	next := func(snapshot bool) {
		t.Helper()
		u, err := m.next(n, s)
		if err != nil || len(u) != 1 || (u[0].GetHostSnapshot() != nil) != snapshot {
			t.Fatalf("%v, %v", u, err)
		}
	}
	next(true)
	make(applying(t, strings.Replace(two, "tcp: {}", "tcp: {}, rise: 3", 1)))
	next(false) // not reported yet: nothing is lost
	make(func(b *batch) error {
		b.report(addresses, []*quartetv1.CheckResult{{Id: "web/tcp-80/10.0.0.1", Healthy: true}, {Id: "web/tcp-80/10.0.0.2", Healthy: true}})
		return nil
	})
	make(applying(t, one))
	next(false)
	make(applying(t, two)) // heard of one by one: the agent starts the check afresh
	next(false)
	make(func(b *batch) error {
		b.report(addresses, []*quartetv1.CheckResult{{Id: "web/tcp-80/10.0.0.2", Healthy: true}})
		return nil
	})
	make(applying(t, one))
	make(applying(t, two))
	if u, err := m.next(n, s); !errors.Is(err, ErrUnavailable) {
		t.Errorf("%v, %v", u, err)
	}
	if n, s, err = m.connect(watch); err != nil {
		t.Fatal(err)
	}
	next(true)
}

// A DIP that moves to another host leaves rotation until the agent there reports
// it, which is sent the check as any other; the old one's word does not count.
func TestHostChanges(t *testing.T) {
	m, _ := newManager(t)
	const web = "{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, health: {tcp: {}}, backends: [{dip: 10.0.0.1, host: 10.0.9.1}]}]}\n---\n"
	change := func(f func(b *batch) error) {
		t.Helper()
		if err := m.runAll(f)[0]; err != nil {
			t.Fatal(err)
		}
	}
	report := func(host string, healthy bool) {
		t.Helper()
		change(func(b *batch) error {
			b.report([]netip.Addr{netip.MustParseAddr(host)}, []*quartetv1.CheckResult{{Id: "web/tcp-80/10.0.0.1", Healthy: healthy}})
			return nil
		})
	}
	state := func(want string) {
		t.Helper()
		if d := m.results["web"].Dips(nil)[0]; d.State != want || (d.Buckets > 0) != (want == "healthy") {
			t.Fatalf("%s with %d buckets, not %s", d.State, d.Buckets, want)
		}
	}
	change(applying(t, orderPool+web))
	next := m.fake(t, RoleHost, "host2", "10.0.9.2")
	next.step(t)
	report("10.0.9.1", true)
	state("healthy")
	change(applying(t, strings.Replace(web, "10.0.9.1", "10.0.9.2", 1)))
	state("unknown")
	report("10.0.9.1", true)
	state("unknown")
	if next.step(t); len(next.rules) != 1 {
		t.Errorf("host2 has %d rules", len(next.rules))
	}
	report("10.0.9.2", true)
	state("healthy")
}

// A change that the store can't take leaves nothing behind, in the store or in
// memory, and does not keep those from being made that came with it.
func TestChangeUndone(t *testing.T) {
	m, s := newManager(t)
	const pool = "{kind: VipPool, name: pool, prefixes: [203.0.113.0/24]}\n---\n"
	const web = "{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, backends: [{dip: 10.0.0.1}, {dip: 10.0.0.2}]}]}\n---\n"
	const db = "{kind: Vip, name: db, addresses: [203.0.113.11], endpoints: [{protocol: TCP, port: 80, backends: [{dip: 10.0.0.1}]}]}\n---\n"
	if errs := m.runAll(applying(t, pool+web)); errs[0] != nil {
		t.Fatal(errs)
	}
	before, err := s.Dump(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	result := m.results["web"]

	tooLarge := func(b *batch) {
		for i := range 100_001 {
			b.txn.DeleteNode(fmt.Sprint(i))
		}
	}
	huge := func(b *batch) error {
		if err := applying(t, strings.Replace(web, "10.0.0.2", "10.0.0.3", 1)+strings.Replace(db, "203.0.113.11", "203.0.113.12", 1))(b); err != nil {
			return err
		}
		if _, err := b.drainDIP("10.0.0.1", "", false); err != nil {
			return err
		}
		tooLarge(b)
		return nil
	}
	removed := func(b *batch) error {
		if _, err := b.change(nil, []object.Ref{{Kind: object.KindVip, Name: "web"}, {Kind: object.KindVipPool, Name: "pool"}}, false); err != nil {
			return err
		}
		tooLarge(b)
		return nil
	}
	for _, f := range []func(b *batch) error{huge, removed} {
		if errs := m.runAll(f); !errors.Is(errs[0], store.ErrTooLarge) {
			t.Fatal(errs)
		}
		after, err := s.Dump(t.Context())
		if err != nil || !maps.Equal(before, after) {
			t.Errorf("the store changed: %v", err)
		}
		if !object.Equal(object.Object{Vip: m.set.Vip("web")}, decode(t, web)[0]) || m.set.Vip("db") != nil || m.set.Pool("pool") == nil ||
			m.set.Owner(netip.MustParseAddr("203.0.113.12")) != "" || len(m.drainedDIPs) > 0 || m.results["web"] != result || m.generation != 2 {
			t.Errorf("memory changed: %v, %v, drained %v, generation %d", m.set.Vips(), m.set.Pools(), m.drainedDIPs, m.generation)
		}
	}
	if errs := m.runAll(applying(t, db), huge); errs[0] != nil || errs[1] == nil {
		t.Errorf("beside one that is too large: %v", errs)
	}
	if m.results["db"] == nil || m.set.Vip("db") == nil || m.generation != 3 {
		t.Errorf("db was not made")
	}
}

// Changes of the same objects that arrive together are made in their order.
func TestSameObjectTwice(t *testing.T) {
	m, s := newManager(t)
	const pool = "{kind: VipPool, name: pool, prefixes: [203.0.113.0/24]}\n---\n"
	const web = "{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, backends: [{dip: 10.0.0.1}]}]}\n---\n"
	drain := func(undo bool) func(b *batch) error {
		return func(b *batch) error {
			_, err := b.drainDIP("10.0.0.1", "", undo)
			return err
		}
	}
	if errs := m.runAll(applying(t, pool+web)); errs[0] != nil {
		t.Fatal(errs)
	}
	for i, err := range m.runAll(
		applying(t, strings.Replace(web, "10.0.0.1", "10.0.0.2", 1)),
		applying(t, strings.Replace(web, "10.0.0.1", "10.0.0.3", 1)),
		drain(false), drain(true),
	) {
		if err != nil {
			t.Errorf("change %d: %v", i, err)
		}
	}
	st, err := s.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := st.Vips["web"].GetVip().Endpoints[0].Backends[0].Dip; got != "10.0.0.3" || len(st.DrainedDIPs) != 0 {
		t.Errorf("DIP %s, drained %v", got, st.DrainedDIPs)
	}
}

// Changes of health that a mux does not answer are not followed without bound.
func TestWaitersAreBounded(t *testing.T) {
	m, _ := newManager(t)
	const web = "{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, health: {tcp: {}}, backends: [{dip: 10.0.0.1}, {dip: 10.0.0.2}]}]}\n---\n"
	if errs := m.runAll(applying(t, orderPool+web)); errs[0] != nil {
		t.Fatal(errs)
	}
	m.fake(t, RoleMux, "mux1").step(t)
	addresses := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	before := m.generation
	m.cfg.Damping.Suppress = 1e9
	for i := range 3 * maxWaiters {
		m.runAll(func(b *batch) error {
			b.report(addresses, []*quartetv1.CheckResult{{Id: "web/tcp-80/10.0.0.1", Healthy: i%2 == 0}})
			return nil
		})
	}
	if made := m.generation - before; made != 3*maxWaiters || len(m.waiters) > maxWaiters {
		t.Errorf("%d rollouts of %d generations are followed", len(m.waiters), made)
	}
}

// A tunnel of a family that a mux has no address of would make it refuse every
// change from then on: the VIP is refused in its place.
func TestTunnelOfAFamilyThatAMuxLacks(t *testing.T) {
	m, _ := newManager(t)
	const pool = "{kind: VipPool, name: pool, prefixes: [203.0.113.0/24, \"2001:db8::/64\"]}\n---\n"
	const web = "{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, backends: [{dip: 10.0.0.1, tunnel: \"fd00::1\"}]}]}\n---\n"
	const web6 = "{kind: Vip, name: web, addresses: [\"2001:db8::1\", 203.0.113.10], endpoints: [{protocol: TCP, port: 80, backends: [{dip: 10.0.0.1, dip6: \"fd00::1\"}]}]}\n---\n"
	if errs := m.runAll(applying(t, pool+web)); errs[0] != nil {
		t.Fatal(errs[0]) // no mux is known
	}
	m.fake(t, RoleMux, "mux1", "10.0.1.1")
	m.fake(t, RoleMux, "mux2", "10.0.1.2", "fd00:1::2")
	for text, want := range map[string]string{
		strings.Replace(web, "80", "81", 1): "Vip/web: endpoints[0].backends[0].tunnel: fd00::1 would be reached by an IPv6 tunnel, and mux mux1 has no IPv6 address",
		web6:                                "Vip/web: endpoints[0].backends[0].dip6: fd00::1 would be reached by an IPv6 tunnel",
		strings.Replace(web6, "dip6: \"fd00::1\"", "tunnel: 10.0.0.1", 1): "",
		strings.Replace(web, ", tunnel: \"fd00::1\"", "", 1):              "",
	} {
		if err := m.runAll(applying(t, text))[0]; want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
