package manager

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/compile"
	"github.com/quartet-lb/quartet/manager/health"
)

// report stages what a host agent with these addresses saw of its DIPs. What it
// says of others' DIPs, or of DIPs that were removed meanwhile, is left out.
func (b *batch) report(addresses []netip.Addr, results []*quartetv1.CheckResult) {
	for _, c := range results {
		vip, rest, _ := strings.Cut(c.Id, "/")
		name, dip, _ := strings.Cut(rest, "/")
		v := b.m.set.Vip(vip)
		i := slices.IndexFunc(v.GetEndpoints(), func(e *quartetv1.Endpoint) bool { return e.Name == name })
		if i < 0 || v.Endpoints[i].Health == nil {
			continue
		}
		e := v.Endpoints[i]
		if !slices.ContainsFunc(e.Backends, func(x *quartetv1.Backend) bool {
			return (x.Dip == dip || x.Dip6 == dip) && servedBy(x, addresses)
		}) {
			continue
		}
		k := dipKey{vip, name, dip}
		d := b.m.cfg.Damping.Report(b.m.dip(k), c.Healthy, b.now)
		b.m.dips[k] = d
		reason := c.Reason
		if c.Healthy {
			reason = ""
			if d.Suppressed {
				reason = fmt.Sprintf("it flaps: held out until %s", b.m.cfg.Damping.ReleaseAt(d).UTC().Format(time.RFC3339))
			}
		}
		b.setDIP(k, d, reason, false)
	}
}

// stored is what the store has of a DIP, or nil.
func (m *Manager) stored(k dipKey) *quartetv1.DipState {
	for _, e := range m.set.Vip(k.vip).GetEndpoints() {
		if e.Name != k.endpoint {
			continue
		}
		for _, d := range m.states[k.vip][compile.EndpointID(e)].GetDips() {
			if d.Dip == k.dip {
				return d
			}
		}
	}
	return nil
}

// dip is what is known of a DIP: by its reports, else by what is stored. One
// that was held out for flapping before a restart starts afresh.
func (m *Manager) dip(k dipKey) health.DIP {
	if d, ok := m.dips[k]; ok {
		return d
	}
	s := m.stored(k)
	return health.DIP{Known: s != nil, Up: s.GetHealthy() || s.GetSuppressed()}
}

func servedBy(x *quartetv1.Backend, addresses []netip.Addr) bool {
	a, err := netip.ParseAddr(x.Host)
	return err == nil && slices.Contains(addresses, a)
}

// setDIP stages what is known of a DIP if it differs from what is stored.
func (b *batch) setDIP(k dipKey, d health.DIP, reason string, lost bool) {
	next := &quartetv1.DipState{
		Dip: k.dip, Healthy: d.Healthy() && !lost, Suppressed: d.Up && d.Suppressed && !lost,
		Reason: reason, Since: timestamppb.New(b.now),
	}
	if next.Suppressed {
		b.m.suppressed[k] = true
	} else {
		delete(b.m.suppressed, k)
	}
	was := b.dips[k]
	if was == nil {
		was = b.m.stored(k)
	}
	if was != nil && was.Healthy == next.Healthy && was.Suppressed == next.Suppressed {
		return
	}
	if was != nil && was.Healthy == next.Healthy {
		next.Since = was.Since
	}
	b.dips[k] = next
	b.vips[k.vip] = true
}

// eachChecked calls f for each checked DIP of the host agent with these addresses.
func (b *batch) eachChecked(addresses []netip.Addr, f func(k dipKey)) {
	m := b.m
	seen := map[string]bool{}
	for _, a := range addresses {
		for name := range m.byHost[a] { // only this goroutine writes it
			if seen[name] {
				continue
			}
			seen[name] = true
			for _, e := range m.set.Vip(name).GetEndpoints() {
				if e.Health == nil {
					continue
				}
				for _, x := range e.Backends {
					if !servedBy(x, addresses) {
						continue
					}
					for _, dip := range []string{x.Dip, x.Dip6} {
						if k := (dipKey{name, e.Name, dip}); m.stored(k) != nil {
							f(k)
						}
					}
				}
			}
		}
	}
}

// agentBack stages that a lost agent's DIPs are as it last reported.
func (b *batch) agentBack(addresses []netip.Addr) {
	b.eachChecked(addresses, func(k dipKey) { b.setDIP(k, b.m.dip(k), "", false) })
}

// agentLost stages that a silent agent's DIPs are out of rotation.
func (b *batch) agentLost(name string, addresses []netip.Addr, heard time.Time) {
	reason := fmt.Sprintf("host agent %s silent since %s", name, heard.UTC().Format(time.RFC3339))
	b.eachChecked(addresses, func(k dipKey) { b.setDIP(k, b.m.dip(k), reason, true) })
}

// timers does what is due: rollouts that nobody waits for any more, DIPs that
// come back from damping, agents that fell silent.
func (m *Manager) timers(now time.Time) {
	stalled := now.Sub(m.lastTick) > max(2*time.Second, m.cfg.AgentTimeout/4)
	m.lastTick = now
	heard, lost := map[string]time.Time{}, map[string]bool{}
	addresses := map[string][]netip.Addr{}
	m.mu.Lock()
	m.expireRules()
	for r := range m.waiters {
		if now.Sub(r.published) > 2*time.Minute {
			delete(m.waiters, r)
		}
	}
	for _, n := range m.nodes {
		if n.role != RoleHost || !slices.ContainsFunc(n.addresses, func(a netip.Addr) bool { return len(m.byHost[a]) > 0 }) {
			continue
		}
		if stalled { // this process did not run: others' silence proves nothing
			n.heard = now
		}
		heard[n.name], lost[n.name], addresses[n.name] = n.heard, n.lost, n.addresses
	}
	m.mu.Unlock()

	var silent []string
	if m.cfg.AgentTimeout > 0 {
		var distrust bool
		silent, distrust = health.Silent(heard, lost, m.cfg.AgentTimeout, now)
		m.mu.Lock()
		if distrust && !m.distrust {
			m.log.Error("most host agents are silent: their DIPs keep their last state, as this manager is likely cut off", "agents", len(heard))
		}
		m.distrust = distrust
		for _, name := range silent {
			m.nodes[name].lost = true
			m.log.Warn("host agent is silent: its checked DIPs leave rotation", "node", name, "last_seen", heard[name])
		}
		m.mu.Unlock()
	}
	var due []dipKey
	for k := range m.suppressed {
		if !m.cfg.Damping.Release(m.dip(k), now).Suppressed {
			due = append(due, k)
		}
	}
	if len(silent) == 0 && len(due) == 0 {
		return
	}
	m.run([]*request{{done: make(chan outcome, 1), stage: func(b *batch) ([]*quartetv1.Change, error) {
		for _, name := range silent {
			b.agentLost(name, addresses[name], heard[name])
		}
		for _, k := range due {
			d := m.cfg.Damping.Release(m.dip(k), now)
			m.dips[k] = d
			b.setDIP(k, d, "", false)
		}
		return nil, nil
	}}})
}
