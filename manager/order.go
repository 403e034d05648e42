package manager

import (
	"math"
	"time"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// A packet must not reach a host agent before the rule that it needs, nor after
// that is gone. So muxes hear of a generation when the host agents that it gives
// rules have acknowledged it, and a rule leaves its host agent when all muxes
// run tables without it. Neither waits for the dead: the times below bound it.
const (
	// agentsLead is how long muxes wait for host agents at most. An agent that
	// let it pass is not waited for again until it has caught up.
	agentsLead = 100 * time.Millisecond
	// rulesOutlast is how long a host agent keeps a rule at most that is not wanted.
	rulesOutlast = 5 * time.Second
)

// ruleKey names a rule on its host agent.
type ruleKey struct {
	tunnel, vip    string
	protocol, port uint32
}

func keyOf(r *quartetv1.NatRule) ruleKey {
	return ruleKey{string(r.Tunnel), string(r.Vip), r.Protocol, r.Port}
}

// lateRule is one that a host agent keeps until muxes run a generation.
type lateRule struct {
	rule       *quartetv1.NatRule
	generation uint64
	since      time.Time
}

// lead makes muxes wait until a host agent runs a generation; mu is held.
func (m *Manager) lead(n *node, generation uint64) {
	if n.tardy {
		return
	}
	if len(m.leading) == 0 {
		var timer *time.Timer
		timer = time.AfterFunc(m.agentsLead, func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.leadTimer == timer {
				m.overtake()
			}
		})
		m.leadTimer = timer
	}
	m.leading[n.name] = generation
}

// overtake ends the muxes' wait for host agents; mu is held.
func (m *Manager) overtake() {
	for name := range m.leading {
		m.nodes[name].tardy = true
		m.log.Info("muxes do not wait for a host agent", "node", name, "after", m.agentsLead)
	}
	clear(m.leading)
	m.follow()
}

// led notes that muxes need not wait for a host agent up to a generation; mu is held.
func (m *Manager) led(name string, generation uint64) {
	if g, ok := m.leading[name]; !ok || generation < g {
		return
	}
	delete(m.leading, name)
	if len(m.leading) == 0 {
		m.follow()
	}
}

// follow wakes the muxes' streams; mu is held.
func (m *Manager) follow() {
	if m.leadTimer != nil {
		m.leadTimer.Stop()
		m.leadTimer = nil
	}
	for _, n := range m.nodes {
		if n.role == RoleMux && n.stream != nil {
			n.stream.wake()
		}
	}
}

// muxesRun is the least generation that connected muxes run; mu is held.
func (m *Manager) muxesRun() uint64 {
	least := uint64(math.MaxUint64)
	for _, n := range m.nodes {
		if n.role == RoleMux && n.stream != nil {
			least = min(least, n.generation)
		}
	}
	return least
}

// expireRules wakes the host agents that keep rules which are not wanted; mu is held.
func (m *Manager) expireRules() {
	for s := range m.late {
		s.wake()
	}
}

// dueRules takes out what a host agent need not keep any longer; mu is held.
func (m *Manager) dueRules(s *stream) []*quartetv1.NatRule {
	if len(s.late) == 0 {
		return nil
	}
	var due []*quartetv1.NatRule
	run, now := m.muxesRun(), time.Now()
	for k, l := range s.late {
		if l.generation <= run || now.Sub(l.since) >= m.rulesOutlast {
			due = append(due, l.rule)
			delete(s.late, k)
		}
	}
	if len(s.late) == 0 {
		delete(m.late, s)
	}
	return due
}

// orderRules has a delta delete what is due, and keeps back what muxes may still use.
func (m *Manager) orderRules(n *node, s *stream, d *quartetv1.HostDelta, due []*quartetv1.NatRule) {
	m.mu.Lock()
	defer m.mu.Unlock()
	put := make(map[ruleKey]bool, len(d.PutRules))
	for _, r := range d.PutRules {
		put[keyOf(r)] = true
		delete(s.late, keyOf(r))
	}
	deleted := d.DeleteRules
	d.DeleteRules = nil
	for _, r := range due {
		if !put[keyOf(r)] {
			d.DeleteRules = append(d.DeleteRules, r)
		}
	}
	run, now := m.muxesRun(), time.Now()
	for _, r := range deleted {
		if d.Generation <= run {
			d.DeleteRules = append(d.DeleteRules, r)
			continue
		}
		if s.late == nil {
			s.late = map[ruleKey]lateRule{}
		}
		s.late[keyOf(r)] = lateRule{r, d.Generation, now}
	}
	if len(s.late) > 0 && n.stream == s {
		m.late[s] = true
	} else {
		delete(m.late, s)
	}
}
