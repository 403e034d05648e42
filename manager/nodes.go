package manager

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/compile"
)

// Roles of nodes, as in WatchRequest.
const (
	RoleMux  = "mux"
	RoleHost = "host"
)

// node is a mux or a host agent that has been seen. Guarded by Manager.mu.
type node struct {
	name, role, version string
	addresses           []netip.Addr
	stream              *stream // nil: not connected
	lastSeen            time.Time
	heard               time.Time // lastSeen, or when this manager began to listen
	lost                bool      // silent for too long, and acted upon
	tardy               bool      // muxes have waited for it in vain

	// As last reported.
	generation uint64
	err, state string
	counters   []*quartetv1.FlowCounters
	exits      map[string]uint64
	peers      []*quartetv1.BgpPeerStatus
	announced  []string
	// unreachable are a mux's tunnels whose host agent does not answer.
	unreachable []*quartetv1.Tunnel
}

// restoredNode is one that the store knows; now is when this manager began to
// listen for it.
func restoredNode(n *quartetv1.NodeState, now time.Time) *node {
	out := &node{name: n.Name, role: n.Role, version: n.Version, lastSeen: n.LastSeen.AsTime(), heard: now}
	out.addresses, _ = parseAddresses(n.Addresses)
	return out
}

func parseAddresses(texts []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, text := range texts {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("addresses: %q is not an address", text)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}

// stream is one node's Watch. Guarded by Manager.mu but for the channels.
type stream struct {
	notify chan struct{} // holds one
	closed chan struct{} // another stream took the node's place

	snapshot     bool   // is to be sent next
	sent, target uint64 // generations
	// before is what the node was last sent of the VIPs that changed since.
	before map[string]*compile.Result
	traces []*quartetv1.TraceCommand
	// late are rules that the host agent has, and is to lose once muxes do not
	// need them.
	late map[ruleKey]lateRule
}

// behind notes a generation that the node is to run.
func (s *stream) behind(generation uint64, changes map[string]compile.Change) {
	s.target = generation
	if !s.snapshot {
		for name, c := range changes {
			if _, ok := s.before[name]; !ok {
				s.before[name] = c.Before
			}
		}
		if len(s.before) > maxBehind {
			s.snapshot, s.before = true, nil
		}
	}
	s.wake()
}

func (s *stream) wake() {
	select {
	case s.notify <- struct{}{}:
	default:
	}
}

// Watch sends a node its tables until ctx ends, the node watches again, or send
// fails.
func (m *Manager) Watch(ctx context.Context, req *quartetv1.WatchRequest, send func(*quartetv1.Update) error) error {
	if req.Term > m.term {
		// Either this manager no longer leads, or it leads with a state that is
		// older than what the node has seen.
		if err := m.store.Confirm(ctx); err != nil {
			return fmt.Errorf("%w: confirm leadership: %w", ErrUnavailable, err)
		}
		m.log.Error("a node has seen a later term than this leader's: the state directory was replaced; remove the node's saved tables to let it follow",
			"node", req.Name, "node_term", req.Term, "term", m.term)
		return fmt.Errorf("%w: %s has seen term %d and the leader's is %d: the manager's state was replaced", ErrPrecondition, req.Name, req.Term, m.term)
	}
	n, s, err := m.connect(req)
	if err != nil {
		return err
	}
	defer m.disconnect(n, s)
	m.log.Info("node connected", "node", req.Name, "role", req.Role, "addresses", req.Addresses, "version", req.Version)
	for {
		updates, err := m.next(n, s)
		if err != nil {
			return err
		}
		for _, u := range updates {
			if err := send(u); err != nil {
				return fmt.Errorf("send to %s: %w", req.Name, err)
			}
		}
		select {
		case <-s.notify:
		case <-s.closed:
			return fmt.Errorf("%w: %s watches on another stream", ErrUnavailable, req.Name)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *Manager) connect(req *quartetv1.WatchRequest) (*node, *stream, error) {
	addresses, err := parseAddresses(req.Addresses)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrPrecondition, err)
	}
	if req.Role != RoleMux && req.Role != RoleHost {
		return nil, nil, fmt.Errorf("%w: role %q is not %s or %s", ErrPrecondition, req.Role, RoleMux, RoleHost)
	}
	if req.Name == "" || strings.Contains(req.Name, "/") {
		return nil, nil, fmt.Errorf("%w: name %q is not a node's name", ErrPrecondition, req.Name)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if req.Role == RoleHost {
		for _, other := range m.nodes {
			if other.name == req.Name || other.role != RoleHost {
				continue
			}
			// An address is the first host's to claim it: nodes report health by it.
			for _, a := range addresses {
				if slices.Contains(other.addresses, a) {
					return nil, nil, fmt.Errorf("%w: address %s is %s/%s's: if %s replaces it, stop and delete that one first", ErrPrecondition, a, KindHost, other.name, req.Name)
				}
			}
		}
	}
	n := m.nodes[req.Name]
	if n == nil {
		n = &node{name: req.Name, role: req.Role}
		m.nodes[req.Name] = n
	}
	if n.stream != nil {
		if n.role != req.Role {
			return nil, nil, fmt.Errorf("%w: %s is connected as a %s", ErrPrecondition, n.name, n.role)
		}
		close(n.stream.closed)
		delete(m.late, n.stream)
	}
	known := n.role == req.Role && n.version == req.Version && slices.Equal(n.addresses, addresses)
	n.role, n.version, n.addresses = req.Role, req.Version, addresses
	n.lastSeen, n.generation, n.err, n.state = time.Now(), 0, "", "starting"
	n.heard = n.lastSeen
	n.stream = &stream{
		notify: make(chan struct{}, 1), closed: make(chan struct{}), snapshot: true, target: m.generation,
	}
	if !known {
		m.keepNode(n)
	}
	return n, n.stream, nil
}

func (m *Manager) disconnect(n *node, s *stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n.stream != s {
		return
	}
	n.stream = nil
	delete(m.late, s)
	m.led(n.name, m.generation)
	m.expireRules()
	m.keepNode(n)
	for r := range m.waiters {
		r.gone(n.name)
	}
	m.log.Warn("node disconnected", "node", n.name, "role", n.role)
}

// keepNode has a node written to the store, for the list after a restart. A
// full queue loses only that.
func (m *Manager) keepNode(n *node) {
	state := &quartetv1.NodeState{Name: n.name, Role: n.role, Version: n.version, LastSeen: timestamppb.New(n.lastSeen)}
	for _, a := range n.addresses {
		state.Addresses = append(state.Addresses, a.String())
	}
	r := &request{done: make(chan outcome, 1), stage: func(b *batch) ([]*quartetv1.Change, error) {
		b.txn.PutNode(state)
		return nil, nil
	}}
	select {
	case m.changes <- r:
	default:
	}
}

// next is what a stream has to send: traces, then a snapshot or a delta. Its
// error ends the stream.
func (m *Manager) next(n *node, s *stream) ([]*quartetv1.Update, error) {
	var out []*quartetv1.Update
	m.mu.Lock()
	for _, t := range s.traces {
		out = append(out, &quartetv1.Update{Term: m.term, What: &quartetv1.Update_Trace{Trace: t}})
	}
	s.traces = nil
	due := m.dueRules(s)
	if !s.snapshot && s.sent == s.target && len(due) == 0 || n.role == RoleMux && len(m.leading) > 0 {
		m.mu.Unlock()
		return out, nil
	}
	// Results are read-only, so that the message is put together without the lock.
	whole, base, generation := s.snapshot, s.sent, m.generation
	announce, drain := m.announce, m.drained[n.name]
	addresses := n.addresses
	var changes []compile.Change
	var results []*compile.Result
	if whole {
		results = m.resultsFor(n)
		s.late = nil
		delete(m.late, s)
	} else {
		for name, before := range s.before {
			changes = append(changes, compile.Change{Before: before, After: m.results[name]})
		}
	}
	s.snapshot, s.sent, s.target, s.before = false, generation, generation, map[string]*compile.Result{}
	m.mu.Unlock()

	slices.SortFunc(results, func(a, b *compile.Result) int { return strings.Compare(a.Vip.Name, b.Vip.Name) })
	slices.SortFunc(changes, func(a, b compile.Change) int { return strings.Compare(a.Name(), b.Name()) })
	u := &quartetv1.Update{Term: m.term}
	kind := "delta"
	switch {
	case whole && n.role == RoleMux:
		t := &quartetv1.MuxTables{Generation: generation, FlowSeed: m.seed, Announce: announce, Drain: drain}
		compile.MuxSnapshot(results, t)
		u.What, kind = &quartetv1.Update_MuxSnapshot{MuxSnapshot: t}, "snapshot"
	case whole:
		t := &quartetv1.HostTables{Generation: generation, FlowSeed: m.seed}
		compile.HostSnapshot(results, addresses, t)
		u.What, kind = &quartetv1.Update_HostSnapshot{HostSnapshot: t}, "snapshot"
	case n.role == RoleMux:
		d := &quartetv1.MuxDelta{Base: base, Generation: generation, Announce: announce, Drain: drain}
		compile.MuxDelta(changes, d)
		u.What = &quartetv1.Update_MuxDelta{MuxDelta: d}
	default:
		if compile.Forgotten(changes, addresses) {
			return nil, fmt.Errorf("%w: a check of %s came back: watch again", ErrUnavailable, n.name)
		}
		d := &quartetv1.HostDelta{Base: base, Generation: generation}
		compile.HostDelta(changes, addresses, d)
		m.orderRules(n, s, d, due)
		u.What = &quartetv1.Update_HostDelta{HostDelta: d}
	}
	m.metrics.updates.WithLabelValues(n.role, kind).Inc()
	return append(out, u), nil
}

// resultsFor are the VIPs that concern a node; mu is held.
func (m *Manager) resultsFor(n *node) []*compile.Result {
	var out []*compile.Result
	if n.role == RoleMux {
		for _, r := range m.results {
			out = append(out, r)
		}
		return out
	}
	names := map[string]bool{}
	for _, a := range n.addresses {
		for name := range m.byHost[a] {
			if !names[name] {
				names[name] = true
				out = append(out, m.results[name])
			}
		}
	}
	return out
}

// Report takes what a node runs and sees.
func (m *Manager) Report(ctx context.Context, req *quartetv1.ReportRequest) error {
	now := time.Now()
	m.mu.Lock()
	n := m.nodes[req.Name]
	if n == nil {
		m.mu.Unlock()
		return fmt.Errorf("%w: %s is not known: watch first", ErrPrecondition, req.Name)
	}
	back := n.lost
	n.lost, n.lastSeen, n.heard, n.err, n.state = false, now, now, req.Error, req.State
	if n.stream != nil {
		if n.role == RoleMux && n.generation != req.Generation {
			m.expireRules()
		}
		n.generation = req.Generation
		if n.role == RoleHost {
			n.tardy = n.tardy && n.generation < n.stream.target
			if req.Error == "" {
				m.led(n.name, req.Generation)
			} else { // it can't run them, and muxes need not wait for that
				m.led(n.name, m.generation)
			}
		}
		for r := range m.waiters {
			if r.ack(n.name, req.Generation, now) {
				delete(m.waiters, r)
				m.metrics.observe(r)
			}
		}
	}
	if len(req.Counters)+len(req.Exits)+len(req.BgpPeers)+len(req.Announced) > 0 { // else a short report
		n.counters, n.exits, n.peers, n.announced = req.Counters, req.Exits, req.BgpPeers, req.Announced
		m.noteUnreachable(n, req.UnreachableTunnels)
	}
	role, addresses := n.role, n.addresses
	m.mu.Unlock()
	if role != RoleHost || !back && len(req.Results) == 0 {
		return nil
	}
	r := &request{done: make(chan outcome, 1), stage: func(b *batch) ([]*quartetv1.Change, error) {
		if back {
			b.agentBack(addresses)
		}
		b.report(addresses, req.Results)
		return nil, nil
	}}
	_, err := m.do(ctx, m.reports, r)
	return err
}

// noteUnreachable keeps which tunnels a mux gets no answer through. That is an
// alert and no more: one mux's view, or a broken probe, must not take DIPs out
// of rotation. mu is held.
func (m *Manager) noteUnreachable(n *node, tunnels []*quartetv1.Tunnel) {
	if !slices.EqualFunc(n.unreachable, tunnels, func(a, b *quartetv1.Tunnel) bool { return proto.Equal(a, b) }) {
		const few = 5
		var some []string
		for _, t := range tunnels[:min(few, len(tunnels))] {
			a, _ := netip.AddrFromSlice(t.Address)
			some = append(some, a.String())
		}
		if len(tunnels) > 0 {
			m.log.Warn("a mux gets no answer from host agents", "mux", n.name, "tunnels", len(tunnels), "among", some)
		} else {
			m.log.Info("a mux gets answers from all host agents again", "mux", n.name)
		}
	}
	n.unreachable = tunnels
}

// rollout follows a generation to the nodes. Guarded by Manager.mu but for done.
type rollout struct {
	generation  uint64
	published   time.Time
	muxes       int
	hosts       int
	muxPending  int
	pending     map[string]pending
	away        map[string]bool // of pending: disconnected since
	lastMux     time.Time       // acknowledgement
	last        time.Time
	done        chan struct{}
	isDone      bool
	hostPending int
}

type pending struct {
	generation uint64
	mux        bool
}

// newRollout follows what the nodes sent were told; nil: what all connected
// nodes were told last. waits: somebody waits for it. mu is held.
func (m *Manager) newRollout(sent []*node, waits bool) *rollout {
	now := time.Now()
	r := &rollout{
		generation: m.generation, published: now, lastMux: now, last: now,
		pending: map[string]pending{}, away: map[string]bool{}, done: make(chan struct{}),
	}
	if sent == nil {
		for _, n := range m.nodes {
			if n.stream != nil {
				sent = append(sent, n)
			}
		}
	}
	for _, n := range sent {
		mux := n.role == RoleMux
		if mux {
			r.muxes++
		} else {
			r.hosts++
		}
		if n.generation >= n.stream.target && n.generation != 0 {
			continue
		}
		r.pending[n.name] = pending{n.stream.target, mux}
		if mux {
			r.muxPending++
		} else {
			r.hostPending++
		}
	}
	if !r.finish() && (waits || len(m.waiters) < maxWaiters) {
		m.waiters[r] = true
	}
	return r
}

// ack notes a node's acknowledgement; true if it was the last.
func (r *rollout) ack(name string, generation uint64, now time.Time) bool {
	p, ok := r.pending[name]
	if !ok || generation < p.generation {
		return false
	}
	delete(r.pending, name)
	delete(r.away, name)
	r.last = now
	if p.mux {
		r.lastMux = now
		r.muxPending--
	} else {
		r.hostPending--
	}
	return r.finish() && len(r.pending) == 0
}

func (r *rollout) gone(name string) {
	if _, ok := r.pending[name]; ok {
		r.away[name] = true
		r.finish()
	}
}

// finish ends the wait when nobody is left who could acknowledge.
func (r *rollout) finish() bool {
	if len(r.pending) > len(r.away) {
		return false
	}
	if !r.isDone {
		r.isDone = true
		close(r.done)
	}
	return true
}

// await waits for a rollout and describes it.
func (m *Manager) await(ctx context.Context, r *rollout, arrived time.Time, waitMs uint32) *quartetv1.Rollout {
	wait := DefaultWait
	if waitMs > 0 {
		wait = min(time.Duration(waitMs)*time.Millisecond, time.Minute)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-r.done:
	case <-timer.C:
	case <-ctx.Done():
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := &quartetv1.Rollout{
		Generation: r.generation,
		Muxes:      uint32(r.muxes), MuxesAcked: uint32(r.muxes - r.muxPending),
		Hosts: uint32(r.hosts), HostsAcked: uint32(r.hosts - r.hostPending),
		ElapsedMs: milliseconds(r.last.Sub(arrived)), MuxesElapsedMs: milliseconds(r.lastMux.Sub(arrived)),
	}
	for name := range r.pending {
		out.Waiting = append(out.Waiting, name)
	}
	slices.Sort(out.Waiting)
	out.Waiting = out.Waiting[:min(len(out.Waiting), maxWaiting)]
	return out
}

func milliseconds(d time.Duration) float64 { return float64(max(d, 0)) / float64(time.Millisecond) }
