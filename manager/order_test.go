package manager

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/object"
)

// fakeNode runs what its stream has, when the test says so.
type fakeNode struct {
	m          *Manager
	n          *node
	s          *stream
	generation uint64
	rules      map[ruleKey]bool
	endpoints  map[string]*quartetv1.MuxEndpoint
}

func (m *Manager) fake(t *testing.T, role, name string, addresses ...string) *fakeNode {
	t.Helper()
	n, s, err := m.connect(&quartetv1.WatchRequest{Name: name, Role: role, Addresses: addresses})
	if err != nil {
		t.Fatal(err)
	}
	return &fakeNode{m: m, n: n, s: s, rules: map[ruleKey]bool{}, endpoints: map[string]*quartetv1.MuxEndpoint{}}
}

// step takes what the stream has; it says whether that was anything.
func (f *fakeNode) step(t *testing.T) bool {
	t.Helper()
	updates, err := f.m.next(f.n, f.s)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range updates {
		switch {
		case u.GetHostSnapshot() != nil:
			f.generation = u.GetHostSnapshot().Generation
			clear(f.rules)
			for _, r := range u.GetHostSnapshot().Rules {
				f.rules[keyOf(r)] = true
			}
		case u.GetHostDelta() != nil:
			d := u.GetHostDelta()
			if d.Base != f.generation {
				t.Fatalf("%s: delta from %d onto %d", f.n.name, d.Base, f.generation)
			}
			f.generation = d.Generation
			for _, r := range d.DeleteRules {
				if !f.rules[keyOf(r)] {
					t.Fatalf("%s: a rule is deleted that is not there: %v", f.n.name, r)
				}
				delete(f.rules, keyOf(r))
			}
			for _, r := range d.PutRules {
				f.rules[keyOf(r)] = true
			}
		case u.GetMuxSnapshot() != nil:
			f.generation = u.GetMuxSnapshot().Generation
			clear(f.endpoints)
			for _, e := range u.GetMuxSnapshot().Endpoints {
				f.endpoints[e.Key.String()] = e
			}
		case u.GetMuxDelta() != nil:
			d := u.GetMuxDelta()
			f.generation = d.Generation
			for _, k := range d.DeleteEndpoints {
				delete(f.endpoints, k.String())
			}
			for _, e := range d.PutEndpoints {
				f.endpoints[e.Key.String()] = e
			}
		}
	}
	return len(updates) > 0
}

func (f *fakeNode) report(t *testing.T, problem string) {
	t.Helper()
	if err := f.m.Report(t.Context(), &quartetv1.ReportRequest{Name: f.n.name, Generation: f.generation, Error: problem}); err != nil {
		t.Fatal(err)
	}
}

// lacks is a rule that the mux sends packets by and no host agent has, or "".
func (f *fakeNode) lacks(hosts ...*fakeNode) string {
	for _, e := range f.endpoints {
		for i := 0; i < len(e.Buckets); i += 2 {
			d := e.Dips[binary.LittleEndian.Uint16(e.Buckets[i:])]
			k := ruleKey{string(d.Tunnel), string(e.Key.Vip), e.Key.Protocol, e.Key.Port}
			has := false
			for _, h := range hosts {
				has = has || h.rules[k]
			}
			if !has {
				return fmt.Sprintf("%s sends to %v for %v", f.n.name, d.Tunnel, e.Key)
			}
		}
	}
	return ""
}

const orderPool = "{kind: VipPool, name: pool, prefixes: [203.0.113.0/24]}\n---\n"

func orderVIP(port int, dips ...string) string {
	return fmt.Sprintf("{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: %d, backends: [{dip: %s}]}]}\n---\n",
		port, strings.Join(dips, "}, {dip: "))
}

// In whichever order nodes get to run and acknowledge what they are sent, no mux
// ever sends a packet that its host agent has no rule for; and in the end no
// rule is left that nobody wants.
func TestHostsBeforeMuxes(t *testing.T) {
	m, _ := newManager(t)
	m.agentsLead, m.rulesOutlast = time.Hour, time.Hour
	hosts := []*fakeNode{m.fake(t, RoleHost, "host1", "10.0.0.1"), m.fake(t, RoleHost, "host2", "10.0.0.2"), m.fake(t, RoleHost, "host3", "10.0.0.3")}
	muxes := []*fakeNode{m.fake(t, RoleMux, "mux1"), m.fake(t, RoleMux, "mux2")}
	all := append(append([]*fakeNode{}, hosts...), muxes...)
	if errs := m.runAll(applying(t, orderPool)); errs[0] != nil {
		t.Fatal(errs[0])
	}
	r := rand.New(rand.NewPCG(1, 2))
	exists := false
	for i := range 5000 {
		switch op := r.IntN(20); {
		case op == 0 && exists:
			m.runAll(func(b *batch) error {
				_, err := b.change(nil, []object.Ref{{Kind: object.KindVip, Name: "web"}}, false)
				return err
			})
			exists = false
		case op == 1:
			dips := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}
			r.Shuffle(3, func(i, j int) { dips[i], dips[j] = dips[j], dips[i] })
			if errs := m.runAll(applying(t, orderVIP(80+r.IntN(2), dips[:1+r.IntN(3)]...))); errs[0] != nil {
				t.Fatal(errs[0])
			}
			exists = true
		case op < 11:
			all[r.IntN(len(all))].step(t)
		default:
			all[r.IntN(len(all))].report(t, "")
		}
		for _, x := range muxes {
			if lacks := x.lacks(hosts...); lacks != "" {
				t.Fatalf("step %d: %s", i, lacks)
			}
		}
	}
	for moved := true; moved; {
		moved = false
		for _, x := range all {
			moved = x.step(t) || moved
			x.report(t, "")
		}
	}
	fresh, wanted := 0, 0
	for _, h := range hosts {
		wanted += len(h.rules)
		h.s, h.rules = nil, map[ruleKey]bool{}
		*h = *m.fake(t, RoleHost, h.n.name, h.n.addresses[0].String())
		h.step(t)
		fresh += len(h.rules)
	}
	if wanted != fresh || len(m.late) != 0 {
		t.Errorf("%d rules, %d are wanted; %d streams with late ones", wanted, fresh, len(m.late))
	}
}

// A host agent that does not answer delays muxes once, by agentsLead; one that
// can't run its rules, or leaves, ends the wait; and a mux that does not answer
// keeps no rule for ever.
func TestNobodyWaitsForTheDead(t *testing.T) {
	m, _ := newManager(t)
	m.agentsLead, m.rulesOutlast = time.Hour, time.Hour
	apply := func(text string) {
		t.Helper()
		if errs := m.runAll(applying(t, text)); errs[0] != nil {
			t.Fatal(errs[0])
		}
	}
	host, mux := m.fake(t, RoleHost, "host1", "10.0.0.1", "10.0.0.2"), m.fake(t, RoleMux, "mux1")
	host.step(t)
	mux.step(t)
	host.report(t, "")
	mux.report(t, "")
	held := func(want bool) {
		t.Helper()
		m.mu.RLock()
		got := len(m.leading) > 0
		m.mu.RUnlock()
		if got != want {
			t.Fatalf("held %v", got)
		}
		if mux.step(t) == want {
			t.Fatalf("the mux was sent something: %v", !want)
		}
	}
	apply(orderPool + orderVIP(80, "10.0.0.1"))
	held(true)
	host.step(t)
	host.report(t, "no room")
	held(false)

	apply(orderVIP(81, "10.0.0.1"))
	held(true)
	m.disconnect(host.n, host.s)
	held(false)

	host = m.fake(t, RoleHost, "host1", "10.0.0.1", "10.0.0.2")
	host.step(t)
	host.report(t, "")
	m.agentsLead = time.Millisecond
	for len(mux.s.notify) > 0 {
		<-mux.s.notify
	}
	apply(orderVIP(82, "10.0.0.1"))
	for released := false; !released; {
		select {
		case <-mux.s.notify: // of the change, and of the end of the wait
			released = mux.step(t)
		case <-time.After(30 * time.Second):
			t.Fatal("the mux waits for ever")
		}
	}
	m.agentsLead = time.Hour
	apply(orderVIP(83, "10.0.0.1"))
	held(false) // it is not waited for again
	host.step(t)
	host.report(t, "")
	apply(orderVIP(84, "10.0.0.1"))
	held(true) // until it has caught up

	host.step(t)
	if len(host.rules) < 2 {
		t.Fatalf("the rules that the mux uses are gone: %v", host.rules)
	}
	m.rulesOutlast = 0
	m.timers(time.Now())
	if !host.step(t) || len(host.rules) != 1 {
		t.Errorf("rules %v", host.rules)
	}
}
