package nodelink

import (
	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// message is what tables and deltas have in common.
type message interface {
	proto.Message
	GetGeneration() uint64
}

type updateKind int

const (
	isNeither updateKind = iota
	isSnapshot
	isDelta
)

// kind is what differs between muxes and host agents.
type kind[S, D message] struct {
	role  string
	state merged[S, D]
	open  func(*quartetv1.Update) (S, D, updateKind)
}

// merged is the tables that run, keyed so that a delta costs what it changes.
type merged[S, D message] interface {
	replace(S)
	merge(D)
	clear()
	generation() uint64
	tables() S
	base(D) uint64
	update(S) *quartetv1.Update
}

func (k kind[S, D]) base(d D) uint64 { return k.state.base(d) }

func (k kind[S, D]) update(s S, term uint64) *quartetv1.Update {
	u := k.state.update(s)
	u.Term = term
	return u
}

func (k kind[S, D]) generation(u *quartetv1.Update) uint64 {
	s, d, what := k.open(u)
	if what == isSnapshot {
		return s.GetGeneration()
	}
	return d.GetGeneration()
}

func openMux(u *quartetv1.Update) (*quartetv1.MuxTables, *quartetv1.MuxDelta, updateKind) {
	switch w := u.What.(type) {
	case *quartetv1.Update_MuxSnapshot:
		return w.MuxSnapshot, nil, isSnapshot
	case *quartetv1.Update_MuxDelta:
		return nil, w.MuxDelta, isDelta
	}
	return nil, nil, isNeither
}

func openHost(u *quartetv1.Update) (*quartetv1.HostTables, *quartetv1.HostDelta, updateKind) {
	switch w := u.What.(type) {
	case *quartetv1.Update_HostSnapshot:
		return w.HostSnapshot, nil, isSnapshot
	case *quartetv1.Update_HostDelta:
		return nil, w.HostDelta, isDelta
	}
	return nil, nil, isNeither
}

type endpointKey struct {
	vip            string // 4 or 16 bytes
	protocol, port uint32
}

func keyOf(k *quartetv1.EndpointKey) endpointKey {
	return endpointKey{string(k.GetVip()), k.GetProtocol(), k.GetPort()}
}

type muxState struct {
	gen       uint64
	seed      []byte
	vips      map[string]*quartetv1.VipAddress
	endpoints map[endpointKey]*quartetv1.MuxEndpoint
	announce  []string
	drain     bool
}

func (m *muxState) clear() { *m = muxState{} }

func (m *muxState) replace(s *quartetv1.MuxTables) {
	*m = muxState{
		gen: s.Generation, seed: s.FlowSeed, announce: s.Announce, drain: s.Drain,
		vips:      make(map[string]*quartetv1.VipAddress, len(s.Vips)),
		endpoints: make(map[endpointKey]*quartetv1.MuxEndpoint, len(s.Endpoints)),
	}
	for _, v := range s.Vips {
		m.vips[string(v.Address)] = v
	}
	for _, e := range s.Endpoints {
		m.endpoints[keyOf(e.Key)] = e
	}
}

func (m *muxState) merge(d *quartetv1.MuxDelta) {
	for _, a := range d.DeleteVips {
		delete(m.vips, string(a))
	}
	for _, k := range d.DeleteEndpoints {
		delete(m.endpoints, keyOf(k))
	}
	for _, v := range d.PutVips {
		m.vips[string(v.Address)] = v
	}
	for _, e := range d.PutEndpoints {
		m.endpoints[keyOf(e.Key)] = e
	}
	m.gen, m.announce, m.drain = d.Generation, d.Announce, d.Drain
}

func (m *muxState) generation() uint64 { return m.gen }

func (m *muxState) tables() *quartetv1.MuxTables {
	t := &quartetv1.MuxTables{Generation: m.gen, FlowSeed: m.seed, Announce: m.announce, Drain: m.drain}
	for _, v := range m.vips {
		t.Vips = append(t.Vips, v)
	}
	for _, e := range m.endpoints {
		t.Endpoints = append(t.Endpoints, e)
	}
	return t
}

func (m *muxState) base(d *quartetv1.MuxDelta) uint64 { return d.GetBase() }

func (m *muxState) update(s *quartetv1.MuxTables) *quartetv1.Update {
	return &quartetv1.Update{What: &quartetv1.Update_MuxSnapshot{MuxSnapshot: s}}
}

type ruleKey struct {
	tunnel, vip    string
	protocol, port uint32
}

func ruleKeyOf(r *quartetv1.NatRule) ruleKey {
	return ruleKey{string(r.GetTunnel()), string(r.GetVip()), r.GetProtocol(), r.GetPort()}
}

type hostState struct {
	gen    uint64
	seed   []byte
	rules  map[ruleKey]*quartetv1.NatRule
	checks map[string]*quartetv1.Check
}

func (h *hostState) clear() { *h = hostState{} }

func (h *hostState) replace(s *quartetv1.HostTables) {
	*h = hostState{
		gen: s.Generation, seed: s.FlowSeed,
		rules:  make(map[ruleKey]*quartetv1.NatRule, len(s.Rules)),
		checks: make(map[string]*quartetv1.Check, len(s.Checks)),
	}
	for _, r := range s.Rules {
		h.rules[ruleKeyOf(r)] = r
	}
	for _, c := range s.Checks {
		h.checks[c.Id] = c
	}
}

func (h *hostState) merge(d *quartetv1.HostDelta) {
	for _, r := range d.DeleteRules {
		delete(h.rules, ruleKeyOf(r))
	}
	for _, id := range d.DeleteChecks {
		delete(h.checks, id)
	}
	for _, r := range d.PutRules {
		h.rules[ruleKeyOf(r)] = r
	}
	for _, c := range d.PutChecks {
		h.checks[c.Id] = c
	}
	h.gen = d.Generation
}

func (h *hostState) generation() uint64 { return h.gen }

func (h *hostState) tables() *quartetv1.HostTables {
	t := &quartetv1.HostTables{Generation: h.gen, FlowSeed: h.seed}
	for _, r := range h.rules {
		t.Rules = append(t.Rules, r)
	}
	for _, c := range h.checks {
		t.Checks = append(t.Checks, c)
	}
	return t
}

func (h *hostState) base(d *quartetv1.HostDelta) uint64 { return d.GetBase() }

func (h *hostState) update(s *quartetv1.HostTables) *quartetv1.Update {
	return &quartetv1.Update{What: &quartetv1.Update_HostSnapshot{HostSnapshot: s}}
}
