// Package manager keeps the desired state of a fabric, compiles it to the
// tables of muxes and host agents, and says how many of them run it.
//
// One goroutine (Run) makes all changes: it takes what has arrived, checks it,
// compiles the VIPs it touches, commits objects and tables in one transaction
// under one generation, and then publishes. Reports of health go before
// operators' changes. Each node's stream takes the difference between what it
// was last sent and what is published whenever it is ready for it; so a slow
// node gets fewer and larger deltas. It delays nobody, but that muxes give host
// agents a moment's start with rules.
package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/compile"
	"github.com/quartet-lb/quartet/manager/health"
	"github.com/quartet-lb/quartet/manager/object"
	"github.com/quartet-lb/quartet/manager/store"
)

// Defaults and limits.
const (
	// DefaultAgentTimeout is how long a host agent may be silent before its
	// checked DIPs are taken out of rotation.
	DefaultAgentTimeout = 10 * time.Second
	// DefaultWait is how long a change waits for nodes.
	DefaultWait = 5 * time.Second
	// maxBehind is how many changed VIPs a stream may be behind before it gets
	// a snapshot in place of a delta.
	maxBehind = 4096
	// maxBatch bounds the changes committed together.
	maxBatch = 256
	// tick is how often timers are looked at: silent agents, DIPs held out.
	tick = 250 * time.Millisecond
	// maxWaiters bounds the rollouts that are followed for metrics alone: each
	// costs something at each report, and one node that refuses its tables makes
	// them last.
	maxWaiters = 64
	// maxWaiting is how many names a rollout lists.
	maxWaiting = 20
)

// Errors that services tell apart.
var (
	ErrNotFound     = errors.New("not found")
	ErrPrecondition = errors.New("refused")
	ErrUnavailable  = errors.New("unavailable")
)

// Invalid is the error of a change that was refused for what is in it.
type Invalid struct{ Violations []*quartetv1.FieldViolation }

// Error is the first violation, and how many more there are.
func (e *Invalid) Error() string {
	text := object.Format(e.Violations[0])
	if n := len(e.Violations) - 1; n > 0 {
		text += fmt.Sprintf(" (and %d more)", n)
	}
	return text
}

// Config are the manager's parameters. Zero values mean the defaults.
type Config struct {
	Log          *slog.Logger
	Metrics      prometheus.Registerer // nil: none
	AgentTimeout time.Duration         // negative: silent agents keep their DIPs
	Damping      health.Damping
}

// Manager is the leader's state, a mirror of the store and what follows from it.
type Manager struct {
	log     *slog.Logger
	cfg     Config
	store   *store.Store
	term    uint64
	seed    []byte
	metrics *metrics

	reports chan *request // of health
	changes chan *request // operators'

	// What follows belongs to Run's goroutine.
	set          *object.Set
	states       map[string]map[string]*quartetv1.EndpointState // by VIP, compile.EndpointID
	dips         map[dipKey]health.DIP
	suppressed   map[dipKey]bool
	drainedDIPs  map[[2]string]time.Time
	drainedMuxes map[string]time.Time
	prefixes     announcements
	lastTick     time.Time

	mu sync.RWMutex
	// generation is the published one; results what it consists of.
	generation uint64
	results    map[string]*compile.Result // by VIP name
	changed    map[string]uint64          // last generation that changed a VIP
	byHost     map[netip.Addr]map[string]bool
	pools      []*quartetv1.VipPool
	announce   []string
	drained    map[string]bool // muxes
	distrust   bool            // too many agents are silent to believe it
	nodes      map[string]*node
	waiters    map[*rollout]bool
	traces     map[string]trace // by id
	traceID    uint64
	// leading are the host agents that muxes wait for, with the generation that
	// they must run first; leadTimer ends the wait. late are the streams of host
	// agents that keep rules for muxes.
	leading   map[string]uint64
	leadTimer *time.Timer // nil: nobody is waited for
	late      map[*stream]bool

	agentsLead, rulesOutlast time.Duration // the constants, but in tests
}

// dipKey names a DIP behind one endpoint, as its check does.
type dipKey struct{ vip, endpoint, dip string }

// New loads what the store has and compiles it. Nothing runs before Run.
func New(ctx context.Context, s *store.Store, cfg Config) (*Manager, error) {
	if cfg.AgentTimeout == 0 {
		cfg.AgentTimeout = DefaultAgentTimeout
	}
	if cfg.Damping == (health.Damping{}) {
		cfg.Damping = health.DefaultDamping
	}
	st, err := s.Load(ctx)
	if err != nil {
		return nil, err
	}
	if st.Generation == 0 { // 0 is what nodes report that run nothing
		var txn store.Txn
		st.Generation = 1
		txn.Generation(1)
		if err := s.Commit(&txn); err != nil {
			return nil, err
		}
	}
	m := &Manager{
		log: cfg.Log, cfg: cfg, store: s, term: s.Term(), seed: st.FlowSeed,
		reports: make(chan *request, maxBatch), changes: make(chan *request, maxBatch),
		set: object.NewSet(), states: st.Endpoints, dips: map[dipKey]health.DIP{}, suppressed: map[dipKey]bool{},
		drainedDIPs: st.DrainedDIPs, drainedMuxes: st.DrainedMuxes,
		generation: st.Generation, results: map[string]*compile.Result{}, changed: map[string]uint64{},
		byHost: map[netip.Addr]map[string]bool{}, drained: map[string]bool{}, nodes: map[string]*node{},
		waiters: map[*rollout]bool{}, traces: map[string]trace{}, leading: map[string]uint64{}, late: map[*stream]bool{},
		agentsLead: agentsLead, rulesOutlast: rulesOutlast,
	}
	var objects []object.Object
	for _, p := range st.Pools {
		objects = append(objects, object.Object{Pool: p})
	}
	for _, v := range st.Vips {
		objects = append(objects, object.Object{Vip: v.Vip})
	}
	m.set.Apply(objects, nil)
	m.pools = m.set.Pools()
	now := time.Now()
	for name, v := range st.Vips {
		r, err := m.compile(v.Vip, nil, m.states[name], now, st.Generation, true)
		if err != nil {
			return nil, err
		}
		m.results[name] = r
		m.changed[name] = v.Generation
		for _, e := range r.States {
			m.changed[name] = max(m.changed[name], e.Generation)
		}
		r.Reported(func(endpoint string, d *quartetv1.DipState) {
			if d.Suppressed {
				m.suppressed[dipKey{name, endpoint, d.Dip}] = true
			}
		})
		m.index(name, nil, r)
	}
	m.prefixes.pools(m.pools)
	for _, r := range m.results {
		m.prefixes.add(r, 1)
	}
	m.announce = m.prefixes.list()
	for name := range m.drainedMuxes {
		m.drained[name] = true
	}
	for name, n := range st.Nodes {
		m.nodes[name] = restoredNode(n, now)
	}
	m.metrics = newMetrics(m)
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(m.metrics); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	return m, nil
}

func (m *Manager) compile(v *quartetv1.Vip, before *compile.Result, states map[string]*quartetv1.EndpointState, now time.Time, generation uint64, restore bool) (*compile.Result, error) {
	return compile.VIP(compile.Input{
		Vip: v, Generation: generation, Now: now, States: states, Before: before, Restore: restore,
		Drained: func(dip netip.Addr) bool {
			_, all := m.drainedDIPs[[2]string{dip.String(), "*"}]
			_, here := m.drainedDIPs[[2]string{dip.String(), v.Name}]
			return all || here
		},
	})
}

// index keeps byHost; mu is held, or nobody else knows m.
func (m *Manager) index(name string, before, after *compile.Result) {
	if before != nil {
		for _, a := range before.Hosts {
			delete(m.byHost[a], name)
			if len(m.byHost[a]) == 0 {
				delete(m.byHost, a)
			}
		}
	}
	if after != nil {
		for _, a := range after.Hosts {
			if m.byHost[a] == nil {
				m.byHost[a] = map[string]bool{}
			}
			m.byHost[a][name] = true
		}
	}
}

// request is one change on its way through Run.
type request struct {
	// stage checks the change and notes it in b. An error refuses it, with
	// nothing noted.
	stage func(b *batch) ([]*quartetv1.Change, error)
	done  chan outcome // holds one
	waits bool         // for the rollout

	changes []*quartetv1.Change
}

type outcome struct {
	changes []*quartetv1.Change
	rollout *rollout // nil: nothing was committed
	err     error
}

// batch is the changes of one transaction. What they change in Run's state is
// undone if the transaction can't be committed.
type batch struct {
	m    *Manager
	now  time.Time
	txn  store.Txn
	vips map[string]bool // to be compiled, or deleted
	dips map[dipKey]*quartetv1.DipState
	// pools, muxes: what else nodes have to hear of.
	pools bool
	muxes map[string]bool // whose drain changed
	undo  []func()
	// after is run once the batch is published, under mu.
	after []func()
	waits bool // somebody waits for the rollout
}

// Run makes changes until ctx ends or the store fails, which is the error. Each
// round takes the reports that wait and then the operators' changes, so that
// neither starves the other.
func (m *Manager) Run(ctx context.Context) error {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	m.lastTick = time.Now()
	for {
		reports, changes := waiting(m.reports, nil), waiting(m.changes, nil)
		if len(reports)+len(changes) == 0 {
			select {
			case r := <-m.reports:
				reports = waiting(m.reports, r)
			case r := <-m.changes:
				changes = waiting(m.changes, r)
			case <-ticker.C:
			case <-m.store.Failed():
			case <-ctx.Done():
			}
		}
		switch {
		case m.store.Err() != nil:
			return fmt.Errorf("keep state: %w", m.store.Err())
		case ctx.Err() != nil:
			return nil
		}
		m.run(reports)
		m.run(changes)
		if now := time.Now(); now.Sub(m.lastTick) >= tick {
			m.timers(now)
		}
	}
}

// waiting takes what waits in a queue, after first if that is not nil.
func waiting(queue chan *request, first *request) []*request {
	var all []*request
	if first != nil {
		all = append(all, first)
	}
	for len(all) < maxBatch {
		select {
		case r := <-queue:
			all = append(all, r)
		default:
			return all
		}
	}
	return all
}

// do sends a request through Run and waits for its outcome.
func (m *Manager) do(ctx context.Context, queue chan *request, r *request) (outcome, error) {
	r.done = make(chan outcome, 1)
	select {
	case queue <- r:
	case <-ctx.Done():
		return outcome{}, ctx.Err()
	}
	select {
	case o := <-r.done:
		return o, o.err
	case <-ctx.Done(): // the change may stand
		return outcome{}, ctx.Err()
	}
}

// run makes one transaction of the requests; of those that do not fit into one,
// one each.
func (m *Manager) run(all []*request) {
	if len(all) == 0 {
		return
	}
	b := &batch{m: m, now: time.Now(), vips: map[string]bool{}, dips: map[dipKey]*quartetv1.DipState{}, muxes: map[string]bool{}}
	var staged []*request
	for _, r := range all {
		changes, err := r.stage(b)
		if err != nil {
			r.done <- outcome{err: err}
			continue
		}
		r.changes = changes
		b.waits = b.waits || r.waits
		staged = append(staged, r)
	}
	o, err := b.commit()
	if err != nil {
		for _, undo := range slices.Backward(b.undo) {
			undo()
		}
		if errors.Is(err, store.ErrTooLarge) && len(staged) > 1 {
			for _, r := range staged {
				m.run([]*request{r})
			}
			return
		}
	}
	for _, r := range staged {
		if err != nil {
			r.done <- outcome{err: err}
			continue
		}
		r.done <- outcome{changes: r.changes, rollout: o}
	}
}

// commit compiles, writes and publishes. Without anything to write it returns a
// rollout of what is published already.
func (b *batch) commit() (*rollout, error) {
	m := b.m
	if len(b.vips) == 0 && !b.pools && len(b.muxes) == 0 {
		if !b.txn.Empty() {
			if err := m.store.Commit(&b.txn); err != nil {
				return nil, err
			}
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, f := range b.after {
			f()
		}
		if !b.waits {
			return nil, nil
		}
		return m.newRollout(nil, true), nil
	}
	start := time.Now()
	generation := m.generation + 1
	b.txn.Generation(generation)
	changes := map[string]compile.Change{}
	states := map[string]map[string]*quartetv1.EndpointState{}
	byVip := map[string]map[dipKey]*quartetv1.DipState{}
	for k, d := range b.dips {
		if byVip[k.vip] == nil {
			byVip[k.vip] = map[dipKey]*quartetv1.DipState{}
		}
		byVip[k.vip][k] = d
	}
	for name := range b.vips {
		before := m.results[name] // only this goroutine writes it
		old := m.states[name]
		vip := m.set.Vip(name)
		if vip == nil {
			for id := range old {
				b.txn.DeleteEndpoint(name, id)
			}
			changes[name] = compile.Change{Before: before}
			continue
		}
		r, err := m.compile(vip, before, withDips(vip, old, byVip[name]), b.now, generation, false)
		if err != nil {
			return nil, err
		}
		for id, e := range r.States {
			if !proto.Equal(old[id], e) {
				b.txn.PutEndpoint(name, id, e)
			}
		}
		for id := range old {
			if r.States[id] == nil {
				b.txn.DeleteEndpoint(name, id)
			}
		}
		states[name] = r.States
		changes[name] = compile.Change{Before: before, After: r}
	}
	compiled := time.Now()
	if err := m.store.Commit(&b.txn); err != nil {
		return nil, err
	}
	m.metrics.compile.Observe(compiled.Sub(start).Seconds())
	m.metrics.commit.Observe(time.Since(compiled).Seconds())
	for name := range b.vips {
		if states[name] == nil {
			delete(m.states, name)
		} else {
			m.states[name] = states[name]
		}
	}
	b.forget(changes)
	return m.publish(b, generation, changes), nil
}

// withDips is a VIP's states with these DIPs' health.
func withDips(vip *quartetv1.Vip, states map[string]*quartetv1.EndpointState, dips map[dipKey]*quartetv1.DipState) map[string]*quartetv1.EndpointState {
	if len(dips) == 0 {
		return states
	}
	out := maps.Clone(states)
	if out == nil {
		out = map[string]*quartetv1.EndpointState{}
	}
	fresh := map[string]bool{}
	for k, d := range dips {
		i := slices.IndexFunc(vip.Endpoints, func(e *quartetv1.Endpoint) bool { return e.Name == k.endpoint })
		if i < 0 {
			continue
		}
		id := compile.EndpointID(vip.Endpoints[i])
		old := out[id]
		if !fresh[id] {
			fresh[id] = true
			old = &quartetv1.EndpointState{
				Generation: old.GetGeneration(), Table4: old.GetTable4(), Table6: old.GetTable6(), Dips: slices.Clone(old.GetDips()),
			}
			out[id] = old
		}
		i = slices.IndexFunc(old.Dips, func(x *quartetv1.DipState) bool { return x.Dip == k.dip })
		if i < 0 {
			old.Dips = append(old.Dips, d)
		} else {
			old.Dips[i] = d
		}
	}
	return out
}

// forget drops what was known of checks that are gone.
func (b *batch) forget(changes map[string]compile.Change) {
	for name, c := range changes {
		if c.Before == nil || c.After != nil && c.After.Vip == c.Before.Vip {
			continue
		}
		kept := map[dipKey]bool{}
		if c.After != nil {
			c.After.Reported(func(endpoint string, d *quartetv1.DipState) { kept[dipKey{name, endpoint, d.Dip}] = true })
		}
		c.Before.Reported(func(endpoint string, d *quartetv1.DipState) {
			if k := (dipKey{name, endpoint, d.Dip}); !kept[k] {
				delete(b.m.dips, k)
				delete(b.m.suppressed, k)
			}
		})
	}
}

// publish makes a committed generation what nodes are to run.
func (m *Manager) publish(b *batch, generation uint64, changes map[string]compile.Change) *rollout {
	ruled := map[netip.Addr]bool{} // host agents that get rules
	for _, c := range changes {
		for _, a := range c.AddsRules() {
			ruled[a] = true
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.generation = generation
	if b.pools {
		m.pools = m.set.Pools()
		m.prefixes.pools(m.pools)
		for name, r := range m.results {
			if _, touched := changes[name]; !touched {
				m.prefixes.add(r, 1)
			}
		}
	}
	hosts := map[netip.Addr]bool{}
	for name, c := range changes {
		if c.After != nil {
			m.prefixes.add(c.After, 1)
			m.results[name] = c.After
			m.changed[name] = generation
		} else {
			delete(m.results, name)
			delete(m.changed, name)
		}
		if !b.pools && c.Before != nil { // after the addition: what stays never counts 0
			m.prefixes.add(c.Before, -1)
		}
		m.index(name, c.Before, c.After)
		for _, a := range c.ConcernsHosts() {
			hosts[a] = true
		}
	}
	announced := m.announce
	m.announce = m.prefixes.list()
	// Muxes hear of each change of a VIP, also of one that only concerns hosts,
	// so that their generation says that they are current.
	everyMux := len(changes) > 0 || !slices.Equal(announced, m.announce)
	for name := range b.muxes {
		_, m.drained[name] = m.drainedMuxes[name]
	}
	sent := []*node{}
	for _, n := range m.nodes {
		if n.stream == nil {
			continue
		}
		concerned := false
		if n.role == RoleMux {
			concerned = everyMux || b.muxes[n.name]
		} else {
			concerned = slices.ContainsFunc(n.addresses, func(a netip.Addr) bool { return hosts[a] })
			if slices.ContainsFunc(n.addresses, func(a netip.Addr) bool { return ruled[a] }) {
				m.lead(n, generation)
			}
		}
		if concerned {
			n.stream.behind(generation, changes)
			sent = append(sent, n)
		}
	}
	for _, f := range b.after {
		f()
	}
	m.metrics.generations.Inc()
	return m.newRollout(sent, b.waits)
}
