package health

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// Defaults and limits of a check, as in the schema.
const (
	defaultInterval = 2 * time.Second
	defaultTimeout  = time.Second
	defaultRise     = 2
	defaultFall     = 3
	minInterval     = 100 * time.Millisecond
	maxInterval     = time.Hour
	maxInRow        = 100

	// maxPhase is the longest that a check waits before its first turn, so that
	// checks that came together don't stay together.
	maxPhase = time.Second
)

// Config is a monitor's configuration.
type Config struct {
	// Commands is the directory of the programs that command checks may name;
	// "" runs none.
	Commands string
	// Changed is called, from any goroutine and without a lock held, when a
	// DIP's status has changed.
	Changed func()
	Log     *slog.Logger
	Metrics prometheus.Registerer // nil: no metrics
}

// Monitor runs checks. Its methods may be called by several goroutines.
type Monitor struct {
	config  Config
	metrics *metrics
	ctx     context.Context
	stop    context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex
	checks map[string]*check // by id
}

// check is one that runs.
type check struct {
	spec   *quartetv1.Check
	kind   string
	rule   Rule
	ask    checker
	cancel context.CancelFunc

	state State // guarded by Monitor.mu
	dirty bool  // guarded by Monitor.mu: Status is not in a result yet
}

// New makes a monitor without checks.
func New(c Config) *Monitor {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Changed == nil {
		c.Changed = func() {}
	}
	m := &Monitor{config: c, checks: map[string]*check{}}
	m.ctx, m.stop = context.WithCancel(context.Background())
	m.metrics = newMetrics(c.Metrics, m)
	return m
}

// Close ends all checks and waits for them.
func (m *Monitor) Close() {
	m.stop()
	m.running.Wait()
}

// Change is a validated change to the checks, which Commit carries out and
// can't fail to.
type Change struct {
	put    []*check
	remove []string
	all    bool // put is the whole set
}

// Prepare validates checks to put and ids to remove; with all, the checks are
// the whole set. A check that can't run here (a command of another directory, a
// kind that only a newer agent knows) fails for that reason, and only its DIP
// is unhealthy. Errors are for ids that are missing or given twice.
func (m *Monitor) Prepare(put []*quartetv1.Check, remove []string, all bool) (*Change, error) {
	change := &Change{remove: remove, all: all}
	seen := map[string]bool{}
	for i, spec := range put {
		switch id := spec.GetId(); {
		case id == "":
			return nil, fmt.Errorf("checks[%d]: id: is empty", i)
		case seen[id]:
			return nil, fmt.Errorf("checks[%d] (%s): id: given twice", i, id)
		}
		seen[spec.Id] = true
		c, err := newCheck(spec, m.config.Commands)
		if err != nil {
			m.config.Log.Error("check can't run here", "check", spec.Id, "error", err)
			c = &check{
				spec: spec, kind: "invalid",
				rule: Rule{Interval: defaultInterval, Timeout: defaultTimeout, Rise: 1, Fall: 1},
				ask:  func(context.Context) error { return err },
			}
		}
		change.put = append(change.put, c)
	}
	return change, nil
}

// Commit runs the change. A check whose definition is the same goes on; one
// that has another keeps the DIP's status.
func (m *Monitor) Commit(change *Change) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range change.remove {
		m.remove(id)
	}
	if change.all {
		keep := map[string]bool{}
		for _, c := range change.put {
			keep[c.spec.Id] = true
		}
		for id := range m.checks {
			if !keep[id] {
				m.remove(id)
			}
		}
	}
	for _, c := range change.put {
		phase := phaseOf(c.spec.Id, c.rule.Interval)
		if old, ok := m.checks[c.spec.Id]; ok {
			if proto.Equal(old.spec, c.spec) {
				continue
			}
			old.cancel()
			// Counts toward another rise and fall, or of another port, mean nothing.
			c.state, c.dirty = old.state, old.dirty
			c.state.InRow = 0
		}
		ctx, cancel := context.WithCancel(m.ctx)
		c.cancel = cancel
		m.checks[c.spec.Id] = c
		m.running.Go(func() { m.run(ctx, c, phase) })
	}
}

func (m *Monitor) remove(id string) {
	if c, ok := m.checks[id]; ok {
		c.cancel()
		delete(m.checks, id)
	}
}

// Results are the statuses that are decided, ordered by id: all of them, or
// those that changed since the last call.
func (m *Monitor) Results(all bool) []*quartetv1.CheckResult {
	m.mu.Lock()
	defer m.mu.Unlock()
	var results []*quartetv1.CheckResult
	for id, c := range m.checks {
		if c.state.Status == Unknown || !all && !c.dirty {
			continue
		}
		c.dirty = false
		results = append(results, &quartetv1.CheckResult{
			Id: id, Healthy: c.state.Status == Healthy, Reason: c.state.Reason,
		})
	}
	slices.SortFunc(results, func(a, b *quartetv1.CheckResult) int { return strings.Compare(a.Id, b.Id) })
	return results
}

// run checks until ctx ends.
func (m *Monitor) run(ctx context.Context, c *check, phase time.Duration) {
	timer := time.NewTimer(phase)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		start := time.Now()
		askCtx, cancel := context.WithTimeout(ctx, c.rule.Timeout)
		err := c.ask(askCtx)
		cancel()
		if ctx.Err() != nil {
			return
		}
		failure := ""
		if err != nil {
			failure = explain(err, c.rule.Timeout)
		}
		m.metrics.asked(c.kind, failure == "", time.Since(start))
		timer.Reset(time.Until(start.Add(m.record(ctx, c, failure))))
	}
}

// record takes a result in and says how long after the check's start the next
// one is due.
func (m *Monitor) record(ctx context.Context, c *check, failure string) time.Duration {
	m.mu.Lock()
	if ctx.Err() != nil { // removed or replaced meanwhile
		m.mu.Unlock()
		return c.rule.Interval
	}
	was := c.state.Status
	c.state = c.state.Next(c.rule, failure, time.Now())
	state := c.state
	changed := state.Status != was
	c.dirty = c.dirty || changed
	m.mu.Unlock()
	if changed {
		m.config.Log.Info("health changed", "check", c.spec.Id, "status", state.Status.String(), "was", was.String(), "reason", state.Reason)
		m.config.Changed()
	}
	return state.Wait(c.rule)
}

// phaseOf is when a check first runs after it is put: the same for the same id,
// and spread evenly over all ids.
func phaseOf(id string, interval time.Duration) time.Duration {
	h := fnv.New64a()
	h.Write([]byte(id))
	return time.Duration(h.Sum64() % uint64(min(interval, maxPhase)))
}

func newCheck(spec *quartetv1.Check, commands string) (*check, error) {
	addr, ok := netip.AddrFromSlice(spec.Dip)
	if !ok {
		return nil, fmt.Errorf("dip: has %d bytes, 4 or 16 are wanted", len(spec.Dip))
	}
	h := spec.Health
	if h == nil {
		return nil, errors.New("health: is missing")
	}
	port := spec.Port
	if h.Port != 0 {
		port = h.Port
	}
	if port > 65535 || port == 0 && h.Command == nil {
		return nil, fmt.Errorf("port: is %d, 1..65535 is wanted", port)
	}
	rule := Rule{
		Interval: durationOr(h.Interval, defaultInterval), Timeout: durationOr(h.Timeout, defaultTimeout),
		Rise: defaultRise, Fall: defaultFall,
	}
	if h.Rise != 0 {
		rule.Rise = int(h.Rise)
	}
	if h.Fall != 0 {
		rule.Fall = int(h.Fall)
	}
	switch {
	case rule.Interval < minInterval || rule.Interval > maxInterval:
		return nil, fmt.Errorf("health.interval: is %s, %s..%s is wanted", rule.Interval, minInterval, maxInterval)
	case h.Timeout == nil:
		rule.Timeout = min(rule.Timeout, rule.Interval)
	case rule.Timeout <= 0 || rule.Timeout > rule.Interval:
		return nil, fmt.Errorf("health.timeout: is %s, more than 0 and up to the interval of %s is wanted", rule.Timeout, rule.Interval)
	}
	if rule.Rise > maxInRow || rule.Fall > maxInRow {
		return nil, fmt.Errorf("health.rise and health.fall: are %d and %d, 1..%d is wanted", rule.Rise, rule.Fall, maxInRow)
	}
	ask, kind, err := newChecker(h, netip.AddrPortFrom(addr, uint16(port)), commands)
	if err != nil {
		return nil, err
	}
	return &check{spec: spec, kind: kind, rule: rule, ask: ask}, nil
}

func durationOr(d *durationpb.Duration, def time.Duration) time.Duration {
	if d == nil {
		return def
	}
	return d.AsDuration()
}
