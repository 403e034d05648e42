package manager

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/manager/compile"
	"github.com/quartet-lb/quartet/manager/object"
)

// Kinds that List knows beside object.Kinds, and Delete for nodes that are gone.
const (
	KindMux  = "Mux"
	KindHost = "Host"
	KindDip  = "Dip"
)

// Apply creates or replaces objects, all or none, and waits for the nodes that
// they concern. Errors: *Invalid, store.ErrTooLarge, store.ErrNoSpace.
func (m *Manager) Apply(ctx context.Context, docs []*structpb.Struct, dryRun bool, waitMs uint32) (*quartetv1.ApplyResponse, error) {
	arrived := time.Now()
	objects, violations := object.Decode(docs)
	if len(violations) > 0 {
		return nil, m.refuse(violations)
	}
	changes, rollout, err := m.change(ctx, arrived, waitMs, dryRun, func(b *batch) ([]*quartetv1.Change, error) {
		return b.change(objects, nil, dryRun)
	})
	if err != nil {
		return nil, err
	}
	return &quartetv1.ApplyResponse{Changes: changes, Rollout: rollout}, nil
}

func (m *Manager) refuse(violations []*quartetv1.FieldViolation) error {
	m.metrics.refused.Inc()
	return &Invalid{violations}
}

// change runs one operator's change and waits for its rollout.
func (m *Manager) change(ctx context.Context, arrived time.Time, waitMs uint32, dryRun bool, stage func(*batch) ([]*quartetv1.Change, error)) ([]*quartetv1.Change, *quartetv1.Rollout, error) {
	o, err := m.do(ctx, m.changes, &request{stage: stage, waits: true})
	if err != nil {
		return nil, nil, err
	}
	m.metrics.count(o.changes)
	if dryRun {
		return o.changes, nil, nil
	}
	return o.changes, m.await(ctx, o.rollout, arrived, waitMs), nil
}

// change stages objects to put and to remove.
func (b *batch) change(put []object.Object, remove []object.Ref, dryRun bool) ([]*quartetv1.Change, error) {
	m := b.m
	violations := m.set.Check(put, remove)
	if len(violations) == 0 {
		violations = m.checkFamilies(put)
	}
	if len(violations) > 0 {
		return nil, m.refuse(violations)
	}
	var changes []*quartetv1.Change
	var changed, undo []object.Object
	var created []object.Ref
	for _, o := range put {
		ref := o.Ref()
		c := &quartetv1.Change{Kind: ref.Kind, Name: ref.Name, Action: "updated"}
		changes = append(changes, c)
		switch old, ok := m.object(ref); {
		case !ok:
			c.Action = "created"
			created = append(created, ref)
		case object.Equal(old, o):
			c.Action = "unchanged"
			continue
		default:
			undo = append(undo, old)
		}
		changed = append(changed, o)
	}
	for _, ref := range remove {
		changes = append(changes, &quartetv1.Change{Kind: ref.Kind, Name: ref.Name, Action: "deleted"})
		old, _ := m.object(ref)
		undo = append(undo, old)
	}
	if dryRun {
		return changes, nil
	}
	m.set.Apply(changed, remove)
	b.undo = append(b.undo, func() { m.set.Apply(undo, created) })
	for _, o := range changed {
		if o.Pool != nil {
			b.pools = true
			b.txn.PutPool(o.Pool)
			continue
		}
		b.vips[o.Vip.Name] = true
		b.txn.PutVip(&quartetv1.VipState{Generation: m.generation + 1, Vip: o.Vip})
	}
	for _, ref := range remove {
		if ref.Kind == object.KindVipPool {
			b.pools = true
			b.txn.DeletePool(ref.Name)
			continue
		}
		b.vips[ref.Name] = true
		b.txn.DeleteVip(ref.Name)
		for k, at := range m.drainedDIPs {
			if k[1] == ref.Name {
				b.undrainDIP(k, at)
			}
		}
	}
	return changes, nil
}

// checkFamilies refuses tunnels that a mux has no source address for. Such a mux
// would refuse the generation as a whole, and every later one: one tenant's VIP
// would keep all others' changes from it.
func (m *Manager) checkFamilies(put []object.Object) []*quartetv1.FieldViolation {
	var lacks [2]string // a mux without an IPv4, an IPv6 address
	m.mu.RLock()
	for _, n := range m.nodes {
		if n.role != RoleMux || len(n.addresses) == 0 {
			continue
		}
		for f := range lacks {
			if !slices.ContainsFunc(n.addresses, func(a netip.Addr) bool { return a.Is6() == (f == 1) }) {
				lacks[f] = max(lacks[f], n.name)
			}
		}
	}
	m.mu.RUnlock()
	if lacks == [2]string{} {
		return nil
	}
	var out []*quartetv1.FieldViolation
	for _, o := range put {
		for i, e := range o.Vip.GetEndpoints() {
			for j, b := range e.Backends {
				for f, mux := range []string{lacks[0], lacks[1]} {
					if mux == "" {
						continue
					}
					field, tunnel := tunnelTo(o.Vip, b, f == 1)
					if field == "" {
						continue
					}
					family := []string{"IPv4", "IPv6"}[f]
					out = append(out, &quartetv1.FieldViolation{
						Object: o.Ref().String(), Path: fmt.Sprintf("endpoints[%d].backends[%d].%s", i, j, field),
						Message: fmt.Sprintf("%s would be reached by an %s tunnel, and mux %s has no %s address to send it from", tunnel, family, mux, family),
						Valid:   "a tunnel of a family that each mux has an --address of; a mux that is gone for good can be deleted",
					})
				}
			}
		}
	}
	return out[:min(len(out), 20)]
}

// tunnelTo is a backend's tunnel of a family, and the field that it stands in;
// "" if the VIP's packets have none of that family.
func tunnelTo(v *quartetv1.Vip, b *quartetv1.Backend, is6 bool) (field string, tunnel netip.Addr) {
	for _, text := range v.Addresses {
		vip, err := netip.ParseAddr(text)
		if err != nil || !object.BackendDIP(b, vip.Is6()).IsValid() {
			continue
		}
		if tunnel = object.BackendTunnel(b, vip.Is6()); tunnel.Is6() != is6 {
			continue
		}
		switch tunnel.String() {
		case b.Dip:
			return "dip", tunnel
		case b.Dip6:
			return "dip6", tunnel
		}
		return "tunnel", tunnel
	}
	return "", netip.Addr{}
}

func (m *Manager) object(ref object.Ref) (object.Object, bool) {
	if ref.Kind == object.KindVipPool {
		p := m.set.Pool(ref.Name)
		return object.Object{Pool: p}, p != nil
	}
	v := m.set.Vip(ref.Name)
	return object.Object{Vip: v}, v != nil
}

// Delete removes objects, all or none, and nodes that are gone. Errors: as Apply,
// and ErrNotFound, ErrPrecondition.
func (m *Manager) Delete(ctx context.Context, refs []*quartetv1.ObjectRef, waitMs uint32) (*quartetv1.DeleteResponse, error) {
	arrived := time.Now()
	var remove []object.Ref
	var nodes []*quartetv1.ObjectRef
	for _, r := range refs {
		switch {
		case slices.Contains(object.Kinds, r.Kind):
			remove = append(remove, object.Ref{Kind: r.Kind, Name: r.Name})
		case r.Kind == KindMux || r.Kind == KindHost:
			nodes = append(nodes, r)
		default:
			return nil, m.refuse([]*quartetv1.FieldViolation{{
				Object: r.Kind + "/" + r.Name, Path: "kind", Message: fmt.Sprintf("%q can't be deleted", r.Kind),
				Valid: strings.Join(append(slices.Clone(object.Kinds), KindMux, KindHost), ", "),
			}})
		}
	}
	changes, rollout, err := m.change(ctx, arrived, waitMs, false, func(b *batch) ([]*quartetv1.Change, error) {
		for _, r := range nodes {
			if err := m.mayForget(r); err != nil {
				return nil, err
			}
		}
		changes, err := b.change(nil, remove, false)
		if err != nil {
			return nil, err
		}
		for _, r := range nodes {
			b.forgetNode(r.Name)
			changes = append(changes, &quartetv1.Change{Kind: r.Kind, Name: r.Name, Action: "deleted"})
		}
		return changes, nil
	})
	if err != nil {
		return nil, err
	}
	return &quartetv1.DeleteResponse{Changes: changes, Rollout: rollout}, nil
}

func kindOf(role string) string {
	if role == RoleMux {
		return KindMux
	}
	return KindHost
}

func (m *Manager) mayForget(r *quartetv1.ObjectRef) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	n := m.nodes[r.Name]
	switch {
	case n == nil || kindOf(n.role) != r.Kind:
		return fmt.Errorf("%w: %s/%s", ErrNotFound, r.Kind, r.Name)
	case n.stream != nil:
		return fmt.Errorf("%w: %s/%s is connected: stop it first", ErrPrecondition, r.Kind, r.Name)
	}
	return nil
}

func (b *batch) forgetNode(name string) {
	m := b.m
	b.txn.DeleteNode(name)
	if at, ok := m.drainedMuxes[name]; ok {
		b.txn.UndrainMux(name)
		delete(m.drainedMuxes, name)
		b.muxes[name] = true
		b.undo = append(b.undo, func() { m.drainedMuxes[name] = at })
	}
	b.after = append(b.after, func() {
		if n := m.nodes[name]; n != nil && n.stream == nil {
			delete(m.nodes, name)
		}
	})
}

// Drain stops new flows to a DIP or a mux, or undoes that. Errors: *Invalid,
// ErrNotFound, ErrPrecondition.
func (m *Manager) Drain(ctx context.Context, req *quartetv1.DrainRequest) (*quartetv1.DrainResponse, error) {
	arrived := time.Now()
	var stage func(*batch) ([]*quartetv1.Change, error)
	switch strings.ToLower(req.Kind) {
	case "mux":
		if req.Vip != "" {
			return nil, m.refuse([]*quartetv1.FieldViolation{{Object: "mux/" + req.Name, Path: "vip", Message: "a mux drains for all VIPs", Valid: "no vip"}})
		}
		stage = func(b *batch) ([]*quartetv1.Change, error) { return b.drainMux(req.Name, req.Undo) }
	case "dip":
		dip, err := netip.ParseAddr(req.Name)
		if err != nil {
			return nil, m.refuse([]*quartetv1.FieldViolation{{Object: "dip/" + req.Name, Path: "name", Message: fmt.Sprintf("%q is not an address", req.Name), Valid: "a DIP's IPv4 or IPv6 address"}})
		}
		stage = func(b *batch) ([]*quartetv1.Change, error) { return b.drainDIP(dip.String(), req.Vip, req.Undo) }
	default:
		return nil, m.refuse([]*quartetv1.FieldViolation{{Object: req.Kind + "/" + req.Name, Path: "kind", Message: fmt.Sprintf("%q can't be drained", req.Kind), Valid: "dip or mux"}})
	}
	changes, rollout, err := m.change(ctx, arrived, req.WaitMs, false, stage)
	if err != nil {
		return nil, err
	}
	return &quartetv1.DrainResponse{Changes: changes, Rollout: rollout}, nil
}

func (b *batch) drainMux(name string, undo bool) ([]*quartetv1.Change, error) {
	m := b.m
	m.mu.RLock()
	n := m.nodes[name]
	known := n != nil && n.role == RoleMux
	m.mu.RUnlock()
	if !known {
		return nil, fmt.Errorf("%w: mux %q: a mux is known once it has connected", ErrNotFound, name)
	}
	at, is := m.drainedMuxes[name]
	change := &quartetv1.Change{Kind: KindMux, Name: name, Action: "unchanged"}
	if is != undo {
		return []*quartetv1.Change{change}, nil
	}
	change.Action = "updated"
	b.muxes[name] = true
	if undo {
		b.txn.UndrainMux(name)
		delete(m.drainedMuxes, name)
		b.undo = append(b.undo, func() { m.drainedMuxes[name] = at })
	} else {
		b.txn.DrainMux(name, b.now)
		m.drainedMuxes[name] = b.now
		b.undo = append(b.undo, func() { delete(m.drainedMuxes, name) })
	}
	return []*quartetv1.Change{change}, nil
}

func (b *batch) drainDIP(dip, vip string, undo bool) ([]*quartetv1.Change, error) {
	m := b.m
	var behind []string // VIPs that the DIP serves
	for name, r := range m.results {
		if (vip == "" || vip == name) && hasDIP(r.Vip, dip) {
			behind = append(behind, name)
		}
	}
	slices.Sort(behind)
	where := cmp.Or(vip, "*")
	_, is := m.drainedDIPs[[2]string{dip, where}]
	if len(behind) == 0 && !is {
		if vip != "" {
			return nil, fmt.Errorf("%w: DIP %s behind Vip/%s", ErrNotFound, dip, vip)
		}
		return nil, fmt.Errorf("%w: DIP %s behind any VIP", ErrNotFound, dip)
	}
	var changes []*quartetv1.Change
	note := func(action string) []*quartetv1.Change {
		for _, name := range behind {
			changes = append(changes, &quartetv1.Change{Kind: KindDip, Name: name + "/" + dip, Action: action})
			if action != "unchanged" {
				b.vips[name] = true
			}
		}
		return changes
	}
	if !undo {
		if is {
			return note("unchanged"), nil
		}
		k := [2]string{dip, where}
		b.txn.DrainDIP(dip, where, b.now)
		m.drainedDIPs[k] = b.now
		b.undo = append(b.undo, func() { delete(m.drainedDIPs, k) })
		return note("updated"), nil
	}
	if _, all := m.drainedDIPs[[2]string{dip, "*"}]; all && vip != "" {
		return nil, fmt.Errorf("%w: DIP %s drains behind all VIPs: undo that, without a VIP", ErrPrecondition, dip)
	}
	undone := false
	for k, at := range m.drainedDIPs {
		if k[0] == dip && (vip == "" || k[1] == vip) {
			b.undrainDIP(k, at)
			undone = true
		}
	}
	if !undone {
		return note("unchanged"), nil
	}
	return note("updated"), nil
}

func (b *batch) undrainDIP(k [2]string, at time.Time) {
	b.txn.UndrainDIP(k[0], k[1])
	delete(b.m.drainedDIPs, k)
	b.undo = append(b.undo, func() { b.m.drainedDIPs[k] = at })
}

func hasDIP(v *quartetv1.Vip, dip string) bool {
	return slices.ContainsFunc(v.Endpoints, func(e *quartetv1.Endpoint) bool {
		return slices.ContainsFunc(e.Backends, func(b *quartetv1.Backend) bool { return b.Dip == dip || b.Dip6 == dip })
	})
}

// List returns desired objects and what is observed of them, in order of their
// names. Errors: *Invalid, ErrNotFound.
func (m *Manager) List(kind, name string) (*quartetv1.ListResponse, error) {
	o := m.observe(kind, name)
	out := &quartetv1.ListResponse{Generation: o.generation, Version: daemon.Version()}
	n := 0
	switch kind {
	case object.KindVip:
		for _, r := range o.results {
			out.Vips = append(out.Vips, o.vipStatus(r))
		}
		n = len(out.Vips)
	case object.KindVipPool:
		for _, p := range o.pools {
			if name == "" || p.Name == name {
				out.Pools = append(out.Pools, p)
			}
		}
		n = len(out.Pools)
	case KindMux, KindHost:
		for _, s := range o.nodes {
			if kindOf(s.Role) == kind && (name == "" || s.Name == name) {
				out.Nodes = append(out.Nodes, s)
			}
		}
		n = len(out.Nodes)
	case KindDip:
		for _, r := range o.results {
			all := name == "" || name == r.Vip.Name
			if !all && !hasDIP(r.Vip, name) {
				continue
			}
			for _, d := range r.Dips(o.unreachable) {
				if all || d.Dip == name {
					out.Dips = append(out.Dips, d)
				}
			}
		}
		n = len(out.Dips)
	default:
		return nil, &Invalid{[]*quartetv1.FieldViolation{{
			Path: "kind", Message: fmt.Sprintf("%q is not a kind", kind),
			Valid: strings.Join(append(slices.Clone(object.Kinds), KindMux, KindHost, KindDip), ", "),
		}}}
	}
	if name != "" && n == 0 {
		return nil, fmt.Errorf("%w: %s/%s", ErrNotFound, kind, name)
	}
	return out, nil
}

// observed is what a list is made from, taken at one moment; making it takes
// longer than the manager's lock should be held.
type observed struct {
	generation uint64
	results    []*compile.Result // in order of their names
	changed    map[string]uint64
	pools      []*quartetv1.VipPool
	nodes      []*quartetv1.NodeStatus // in order of their names
	lost       map[string]bool         // host agents
	agents     map[netip.Addr]*quartetv1.NodeStatus
	distrust   bool
	// unreachable has the connected muxes that get no answer through a tunnel.
	unreachable map[compile.Tunnel][]string
}

func (m *Manager) observe(kind, name string) *observed {
	m.mu.RLock()
	defer m.mu.RUnlock()
	o := &observed{
		generation: m.generation, changed: map[string]uint64{}, pools: m.pools, distrust: m.distrust,
		lost: map[string]bool{}, agents: map[netip.Addr]*quartetv1.NodeStatus{},
		unreachable: m.unreachable(),
	}
	if kind == object.KindVip && name != "" {
		if r := m.results[name]; r != nil {
			o.results = append(o.results, r)
		}
	} else if kind == object.KindVip || kind == KindDip {
		o.results = slices.Collect(maps.Values(m.results))
		slices.SortFunc(o.results, func(a, b *compile.Result) int { return strings.Compare(a.Vip.Name, b.Vip.Name) })
	}
	for _, r := range o.results {
		o.changed[r.Vip.Name] = m.changed[r.Vip.Name]
	}
	for _, n := range m.nodes {
		s := nodeStatus(n, m.generation)
		o.nodes = append(o.nodes, s)
		o.lost[n.name] = n.lost
		if n.role == RoleHost {
			for _, a := range n.addresses {
				o.agents[a] = s
			}
		}
	}
	slices.SortFunc(o.nodes, func(a, b *quartetv1.NodeStatus) int { return strings.Compare(a.Name, b.Name) })
	return o
}

// unreachable has the connected muxes that get no answer through a tunnel, in
// order; mu is held.
func (m *Manager) unreachable() map[compile.Tunnel][]string {
	out := map[compile.Tunnel][]string{}
	for _, n := range m.nodes {
		if n.role != RoleMux || n.stream == nil {
			continue
		}
		for _, t := range n.unreachable {
			k := compile.Tunnel{Address: string(t.Address), GUE: t.Gue}
			out[k] = append(out[k], n.name)
		}
	}
	for _, muxes := range out {
		slices.Sort(muxes)
	}
	return out
}

func (o *observed) vipStatus(r *compile.Result) *quartetv1.VipStatus {
	s := &quartetv1.VipStatus{Vip: r.Vip, Generation: o.changed[r.Vip.Name], Dips: r.Dips(o.unreachable)}
	s.Warnings = append(s.Warnings, r.Warnings...)
	for _, n := range o.nodes {
		if n.Role == RoleMux && n.Connected {
			s.Muxes++
			if n.Generation >= s.Generation {
				s.MuxesCurrent++
			}
		}
	}
	for _, a := range r.Hosts {
		switch n := o.agents[a]; {
		case n == nil:
			s.Warnings = append(s.Warnings, fmt.Sprintf("no host agent has connected from %s: its DIPs get no packets", a))
		case o.lost[n.Name]:
			s.Warnings = append(s.Warnings, fmt.Sprintf("host agent %s (%s) is silent since %s: its checked DIPs are out of rotation", n.Name, a, n.LastSeen.AsTime().Format(time.RFC3339)))
		case !n.Connected:
			s.Warnings = append(s.Warnings, fmt.Sprintf("host agent %s (%s) is not connected: its DIPs keep their last state", n.Name, a))
		}
	}
	if dips, _ := r.Unreachable(o.unreachable); len(dips) > 0 {
		const few = 5
		more := ""
		if len(dips) > few {
			more = fmt.Sprintf(", and %d more", len(dips)-few)
		}
		s.Warnings = append(s.Warnings, "DIPs that serve, but can't be reached: "+strings.Join(dips[:min(few, len(dips))], "; ")+more)
	}
	if o.distrust {
		s.Warnings = append(s.Warnings, "most host agents are silent: DIPs keep their last state")
	}
	return s
}

// nodeStatus is what is observed of a node; mu is held.
func nodeStatus(n *node, generation uint64) *quartetv1.NodeStatus {
	s := &quartetv1.NodeStatus{
		Name: n.name, Role: n.role, Version: n.version, Connected: n.stream != nil,
		LastSeen: timestamppb.New(n.lastSeen), Generation: n.generation, State: n.state, Error: n.err,
		BgpPeers: n.peers, Announced: n.announced,
	}
	for _, a := range n.addresses {
		s.Addresses = append(s.Addresses, a.String())
	}
	if n.stream == nil {
		s.State = "gone"
		s.GenerationTarget = generation
	} else {
		s.GenerationTarget = n.stream.target
	}
	return s
}

// Top sums the counters that connected muxes last reported.
func (m *Manager) Top() *quartetv1.TopResponse {
	type key struct{ vip, address, endpoint, dip string }
	sums := map[key]*quartetv1.FlowCounters{}
	out := &quartetv1.TopResponse{At: timestamppb.Now()}
	var reported [][]*quartetv1.FlowCounters // read-only
	m.mu.RLock()
	for _, n := range m.nodes {
		if n.stream != nil {
			out.Nodes = append(out.Nodes, &quartetv1.NodeCounters{Node: n.name, Role: n.role, Exits: n.exits})
			reported = append(reported, n.counters)
		}
	}
	m.mu.RUnlock()
	// Summing a million counters takes longer than changes should wait.
	for _, counters := range reported {
		for _, c := range counters {
			k := key{c.Vip, c.Address, c.Endpoint, c.Dip}
			s := sums[k]
			if s == nil {
				s = &quartetv1.FlowCounters{Vip: c.Vip, Address: c.Address, Endpoint: c.Endpoint, Dip: c.Dip}
				sums[k] = s
				out.Counters = append(out.Counters, s)
			}
			s.Packets += c.Packets
			s.Bytes += c.Bytes
			s.NewFlows += c.NewFlows
		}
	}
	slices.SortFunc(out.Counters, func(a, b *quartetv1.FlowCounters) int {
		return cmp.Or(strings.Compare(a.Vip, b.Vip), strings.Compare(a.Address, b.Address), strings.Compare(a.Endpoint, b.Endpoint), strings.Compare(a.Dip, b.Dip))
	})
	slices.SortFunc(out.Nodes, func(a, b *quartetv1.NodeCounters) int { return strings.Compare(a.Node, b.Node) })
	return out
}

// traceTimeout is how long a mux has to answer a trace.
const traceTimeout = 5 * time.Second

// trace is one that a mux has been asked for.
type trace struct {
	mux   string
	reply chan *quartetv1.TraceReplyRequest // holds one
}

// Trace has a mux run a packet through its program; empty: any connected mux
// that runs tables. Errors: ErrNotFound, ErrUnavailable.
func (m *Manager) Trace(ctx context.Context, mux string, packet *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	m.mu.Lock()
	var connected []string
	var to *node
	for _, n := range m.nodes {
		if n.role != RoleMux || n.stream == nil {
			continue
		}
		connected = append(connected, n.name)
		if n.name == mux || mux == "" && (to == nil || n.generation > to.generation || n.generation == to.generation && n.name < to.name) {
			to = n
		}
	}
	slices.Sort(connected)
	if to == nil {
		m.mu.Unlock()
		if len(connected) == 0 {
			return nil, fmt.Errorf("%w: no mux is connected", ErrUnavailable)
		}
		return nil, fmt.Errorf("%w: mux %q is not connected; connected: %s", ErrNotFound, mux, strings.Join(connected, ", "))
	}
	m.traceID++
	id := fmt.Sprint(m.traceID)
	reply := make(chan *quartetv1.TraceReplyRequest, 1)
	m.traces[id] = trace{to.name, reply}
	to.stream.traces = append(to.stream.traces, &quartetv1.TraceCommand{Id: id, Packet: packet})
	to.stream.wake()
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		delete(m.traces, id)
		m.mu.Unlock()
	}()
	timer := time.NewTimer(traceTimeout)
	defer timer.Stop()
	select {
	case r := <-reply:
		if r.Error != "" {
			return nil, &Invalid{[]*quartetv1.FieldViolation{{Object: "packet", Message: r.Error}}}
		}
		if r.Response == nil {
			return nil, fmt.Errorf("%w: %s answered with nothing", ErrUnavailable, to.name)
		}
		r.Response.Mux = to.name
		return r.Response, nil
	case <-timer.C:
		return nil, fmt.Errorf("%w: %s did not answer within %s", ErrUnavailable, to.name, traceTimeout)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// TraceReply takes a mux's answer. An answer that nobody waits for is dropped.
func (m *Manager) TraceReply(req *quartetv1.TraceReplyRequest) {
	m.mu.RLock()
	t, ok := m.traces[req.Id]
	m.mu.RUnlock()
	if !ok || t.mux != req.Name {
		return
	}
	select {
	case t.reply <- req:
	default:
	}
}
