// Package compile turns a VIP, the health of its DIPs and what is drained into
// what muxes and host agents run. It is pure: the tables before, the generation
// and the time are arguments.
//
// A DIP is in rotation if its weight is above 0, it is not drained, and either
// its endpoint has no health check or its last known health is good. A DIP
// without any report is out, unless it had buckets before (a check was added to
// a DIP that serves, or its record was lost): then it stays in until its first
// report. A DIP whose host has changed is without a report, and out, until the
// agent there has checked it. If none is left in rotation, those that are held
// out for flapping come back, for a server that flaps beats none. If there is none either, the
// table is empty, packets leave the mux by the exit no_dip, and the VIP shows a
// warning: packets sent to servers known to be down would only time out.
package compile

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/buckets"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/manager/object"
)

// States of a DIP, as in DipStatus.
const (
	Healthy   = "healthy"
	Unchecked = "unchecked" // no health check: in rotation
	Unhealthy = "unhealthy"
	Unknown   = "unknown" // no report yet
	Draining  = "draining"
)

// EndpointID names an endpoint within its VIP by what packets show of it, so
// that renaming an endpoint moves no flow: "TCP-80", any port "TCP-0".
func EndpointID(e *quartetv1.Endpoint) string { return fmt.Sprintf("%s-%d", e.Protocol, e.Port) }

// CheckID names the health check of one DIP.
func CheckID(vip, endpoint, dip string) string { return vip + "/" + endpoint + "/" + dip }

// Input is what one VIP's tables follow from.
type Input struct {
	Vip        *quartetv1.Vip // checked, defaults filled in
	Generation uint64         // of this change
	Now        time.Time
	// States are the endpoints' tables before and their DIPs' health, by EndpointID.
	States map[string]*quartetv1.EndpointState
	// Drained says whether a DIP is drained behind this VIP.
	Drained func(dip netip.Addr) bool
	// Before is what the VIP was compiled to last, or nil; what has not changed
	// is taken from it.
	Before *Result
	// Restore makes Endpoints carry the generations in States, for a manager
	// that starts: it changes nothing.
	Restore bool
}

// Result is what one VIP is compiled to. It is read-only: results share parts,
// and what is equal by pointer in two of them has not changed.
type Result struct {
	Vip       *quartetv1.Vip
	Addresses []*quartetv1.VipAddress
	Endpoints []*quartetv1.MuxEndpoint // by address, then as in the VIP
	// Hosts are the addresses of the host agents that serve the VIP's DIPs, sorted.
	Hosts []netip.Addr
	// States are to be persisted with the change.
	States   map[string]*quartetv1.EndpointState
	Warnings []string
}

// VIP compiles one VIP. An error means that a persisted table is corrupt.
func VIP(in Input) (*Result, error) {
	r := &Result{Vip: in.Vip, States: map[string]*quartetv1.EndpointState{}}
	before := Result{}
	if in.Before != nil {
		before = *in.Before
	}
	var addresses []netip.Addr
	var has [2]bool // an IPv4, an IPv6 address
	for _, text := range in.Vip.Addresses {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("compile %s: %w", in.Vip.Name, err)
		}
		addresses = append(addresses, a)
		has[family(a)] = true
		r.Addresses = append(r.Addresses, keep(before.Addresses, &quartetv1.VipAddress{
			Address: a.AsSlice(), Vip: in.Vip.Name, Tenant: in.Vip.Tenant,
		}, func(x, y *quartetv1.VipAddress) bool { return string(x.Address) == string(y.Address) }))
	}

	var tables [2][]*served
	for f := range tables {
		if !has[f] {
			continue
		}
		for _, e := range in.Vip.Endpoints {
			s, err := serve(in, r, e, f == 1)
			if err != nil {
				return nil, fmt.Errorf("compile %s, endpoint %s: %w", in.Vip.Name, e.Name, err)
			}
			tables[f] = append(tables[f], s)
		}
	}
	seal(in, r)
	for i, a := range addresses {
		for j, e := range in.Vip.Endpoints {
			protocol, err := lb.ParseProtocol(e.Protocol)
			if err != nil {
				return nil, fmt.Errorf("compile %s, endpoint %s: %w", in.Vip.Name, e.Name, err)
			}
			s := tables[family(a)][j]
			m := &quartetv1.MuxEndpoint{
				Key:        &quartetv1.EndpointKey{Vip: r.Addresses[i].Address, Protocol: uint32(protocol), Port: e.Port},
				Vip:        in.Vip.Name,
				Name:       e.Name,
				Tenant:     in.Vip.Tenant,
				Table:      e.Consistency == lb.ConsistencyTable.String(),
				Gue:        e.Encapsulation == lb.EncapGUE.String(),
				Dips:       s.dips,
				Generation: r.States[EndpointID(e)].Generation,
			}
			m.Buckets, m.Previous, m.BucketGenerations = s.current, s.previous, s.generations
			r.Endpoints = append(r.Endpoints, keep(before.Endpoints, m, func(x, y *quartetv1.MuxEndpoint) bool {
				return endpointOf(x.Key) == endpointOf(y.Key)
			}))
		}
	}
	for _, e := range in.Vip.Endpoints {
		for _, b := range e.Backends {
			if a, err := netip.ParseAddr(b.Host); err == nil {
				r.Hosts = append(r.Hosts, a)
			}
		}
	}
	slices.SortFunc(r.Hosts, netip.Addr.Compare)
	r.Hosts = slices.Compact(r.Hosts)
	r.Warnings = append(object.Warnings(in.Vip), r.Warnings...)
	return r, nil
}

func family(a netip.Addr) int {
	if a.Is6() {
		return 1
	}
	return 0
}

// keep is the one of before that m replaces, if they are the same.
func keep[M proto.Message](before []M, m M, sameKey func(a, b M) bool) M {
	for _, b := range before {
		if sameKey(b, m) {
			if proto.Equal(b, m) {
				return b
			}
			break
		}
	}
	return m
}

// served is one endpoint for one family: its DIPs and its table as muxes read it.
type served struct {
	dips                           []*quartetv1.Dip
	current, previous, generations []byte
}

// serve computes an endpoint's table for a family and adds it to the
// endpoint's state.
func serve(in Input, r *Result, e *quartetv1.Endpoint, is6 bool) (*served, error) {
	id := EndpointID(e)
	old := in.States[id]
	state := r.States[id]
	if state == nil {
		state = &quartetv1.EndpointState{}
		r.States[id] = state
	}
	bytes := old.GetTable4()
	if is6 {
		bytes = old.GetTable6()
	}
	var table buckets.Table
	if len(bytes) > 0 {
		var err error
		if table, err = buckets.Unmarshal(bytes); err != nil {
			return nil, err
		}
	}

	hosts := in.Before.hosts(in.Vip, e, is6)
	s := &served{}
	index := map[netip.AddrPort]int{} // into s.dips
	var members, suppressed []buckets.Member
	inRotation := 0
	for _, b := range e.Backends {
		dip := object.BackendDIP(b, is6)
		if !dip.IsValid() {
			continue
		}
		m := buckets.Member{DIP: netip.AddrPortFrom(dip, uint16(b.Port)), Weight: b.GetWeight()}
		var known *quartetv1.DipState
		if e.Health != nil {
			was, had := hosts[dip]
			moved := had && was != b.Host
			if !moved {
				if known = health(old, dip); known == nil {
					known = in.Before.report(e.Name, dip) // the endpoint's port has changed
				}
			}
			if known == nil && !moved && hadBuckets(table, dip) {
				known = &quartetv1.DipState{Dip: dip.String(), Healthy: true, Since: timestamppb.New(in.Now)}
			}
			if known != nil {
				state.Dips = append(state.Dips, known)
			}
		}
		st := stateOf(e, known, in.Drained(dip))
		if st != Healthy && st != Unchecked {
			if known.GetSuppressed() && st != Draining && m.Weight > 0 {
				suppressed = append(suppressed, m)
			}
			m.Weight = 0
		}
		if m.Weight > 0 {
			inRotation++
		}
		members = append(members, m)
		index[m.DIP] = len(s.dips)
		s.dips = append(s.dips, &quartetv1.Dip{
			Address: dip.AsSlice(), Port: b.Port, Tunnel: object.BackendTunnel(b, is6).AsSlice(), State: st,
		})
	}
	if inRotation == 0 && len(members) > 0 {
		if len(suppressed) == 0 {
			r.Warnings = append(r.Warnings, fmt.Sprintf("endpoint %s: no %s DIP is in rotation, packets are dropped (exit no_dip)", e.Name, familyName(is6)))
		} else {
			r.Warnings = append(r.Warnings, fmt.Sprintf("endpoint %s: only flapping %s DIPs are left, and are in rotation", e.Name, familyName(is6)))
		}
		members = append(members, suppressed...) // weights of one DIP add up
	}

	if !in.Restore {
		table = table.Update(members, in.Generation)
		bytes = table.Marshal()
	}
	if is6 {
		state.Table6 = bytes
	} else {
		state.Table4 = bytes
	}
	s.encode(table, index)
	return s, nil
}

func familyName(is6 bool) string {
	if is6 {
		return "IPv6"
	}
	return "IPv4"
}

func health(e *quartetv1.EndpointState, dip netip.Addr) *quartetv1.DipState {
	text := dip.String()
	for _, d := range e.GetDips() {
		if d.Dip == text {
			return d
		}
	}
	return nil
}

// report is what is known of the DIP behind the endpoint of this name, or nil.
func (r *Result) report(endpoint string, dip netip.Addr) *quartetv1.DipState {
	if r == nil {
		return nil
	}
	for _, e := range r.Vip.Endpoints {
		if e.Name == endpoint {
			return health(r.States[EndpointID(e)], dip)
		}
	}
	return nil
}

// hosts has where the endpoint's DIPs of a family were, if the VIP has changed
// since r.
func (r *Result) hosts(vip *quartetv1.Vip, e *quartetv1.Endpoint, is6 bool) map[netip.Addr]string {
	if r == nil || r.Vip == vip {
		return nil
	}
	out := map[netip.Addr]string{}
	for _, was := range r.Vip.Endpoints {
		if was.Name != e.Name && EndpointID(was) != EndpointID(e) {
			continue
		}
		for _, b := range was.Backends {
			dip := object.BackendDIP(b, is6)
			if _, has := out[dip]; dip.IsValid() && (!has || EndpointID(was) == EndpointID(e)) {
				out[dip] = b.Host
			}
		}
	}
	return out
}

// Reported calls f for each DIP that has a report.
func (r *Result) Reported(f func(endpoint string, d *quartetv1.DipState)) {
	for _, e := range r.Vip.Endpoints {
		for _, d := range r.States[EndpointID(e)].GetDips() {
			f(e.Name, d)
		}
	}
}

func hadBuckets(t buckets.Table, dip netip.Addr) bool {
	counts := t.Counts()
	for i, d := range t.DIPs {
		if d.Addr() == dip && counts[i] > 0 {
			return true
		}
	}
	return false
}

func stateOf(e *quartetv1.Endpoint, known *quartetv1.DipState, drained bool) string {
	switch {
	case drained:
		return Draining
	case e.Health == nil:
		return Unchecked
	case known.GetHealthy():
		return Healthy
	case known == nil:
		return Unknown
	}
	return Unhealthy
}

// encode writes the table as muxes read it. DIPs that the VIP no longer names
// are left out of the previous ones.
func (s *served) encode(t buckets.Table, index map[netip.AddrPort]int) {
	if len(t.Buckets) == 0 {
		return
	}
	to := make([]uint16, len(t.DIPs))
	for i, d := range t.DIPs {
		to[i] = buckets.None
		if j, ok := index[d]; ok {
			to[i] = uint16(j)
		}
	}
	s.current = make([]byte, 0, 2*len(t.Buckets))
	moved := false
	for _, b := range t.Buckets {
		s.current = binary.LittleEndian.AppendUint16(s.current, to[b.Current])
		moved = moved || b.Previous != buckets.None
	}
	if !moved {
		return
	}
	s.previous = make([]byte, 0, 2*len(t.Buckets))
	s.generations = make([]byte, 0, 8*len(t.Buckets))
	for _, b := range t.Buckets {
		p := uint16(buckets.None)
		if b.Previous != buckets.None {
			p = to[b.Previous]
		}
		s.previous = binary.LittleEndian.AppendUint16(s.previous, p)
		s.generations = binary.LittleEndian.AppendUint64(s.generations, b.Generation)
	}
}

// seal gives each endpoint its generation: this change's, where its state or
// what the VIP says of it has changed.
func seal(in Input, r *Result) {
	was := map[string]*quartetv1.Endpoint{}
	if in.Before != nil && in.Before.Vip.Tenant == in.Vip.Tenant {
		for _, e := range in.Before.Vip.Endpoints {
			was[EndpointID(e)] = e
		}
	}
	for _, e := range in.Vip.Endpoints {
		id := EndpointID(e)
		state, old := r.States[id], in.States[id]
		state.Generation = old.GetGeneration()
		same := was[id] != nil && proto.Equal(was[id], e) && proto.Equal(old, state)
		if !same && !in.Restore {
			state.Generation = in.Generation
		}
	}
}

func endpointOf(k *quartetv1.EndpointKey) lb.Endpoint {
	a, _ := netip.AddrFromSlice(k.Vip)
	return lb.Endpoint{VIP: a, Protocol: lb.Protocol(k.Protocol), Port: uint16(k.Port)}
}

// Tunnel is one way from muxes to a host agent.
type Tunnel struct {
	Address string // 4 or 16 bytes
	GUE     bool
}

// Dips is what is known of each DIP of a VIP, in its order; unreachable has the
// muxes that get no answer through a tunnel. It costs as much as the VIP's
// tables are long.
func (r *Result) Dips(unreachable map[Tunnel][]string) []*quartetv1.DipStatus {
	var out []*quartetv1.DipStatus
	for f := range 2 {
		for j, m := range r.endpoints(f) {
			e := r.Vip.Endpoints[j]
			counts := make([]uint32, len(m.Dips))
			for b := 0; b < len(m.Buckets); b += 2 {
				counts[binary.LittleEndian.Uint16(m.Buckets[b:])]++
			}
			k := 0
			for _, b := range e.Backends {
				dip := object.BackendDIP(b, f == 1)
				if !dip.IsValid() {
					continue
				}
				known := health(r.States[EndpointID(e)], dip)
				out = append(out, &quartetv1.DipStatus{
					Vip: r.Vip.Name, Endpoint: e.Name, Dip: dip.String(), Port: b.Port, Host: b.Host,
					State: m.Dips[k].State, Reason: known.GetReason(), Since: known.GetSince(),
					Weight: b.GetWeight(), Buckets: counts[k], BucketsTotal: uint32(len(m.Buckets) / 2),
					UnreachableFrom: unreachable[Tunnel{string(m.Dips[k].Tunnel), m.Gue}],
				})
				k++
			}
		}
	}
	slices.SortStableFunc(out, func(a, b *quartetv1.DipStatus) int { return strings.Compare(a.Endpoint, b.Endpoint) })
	return out
}

// endpoints are those of the VIP's first address of a family, as all others are.
func (r *Result) endpoints(family int) []*quartetv1.MuxEndpoint {
	i := slices.IndexFunc(r.Addresses, func(a *quartetv1.VipAddress) bool { return (len(a.Address) == 16) == (family == 1) })
	if i < 0 {
		return nil
	}
	n := len(r.Vip.Endpoints)
	return r.Endpoints[i*n : (i+1)*n]
}

// Unreachable lists the VIP's DIPs that serve, also those that drain, although
// muxes get no answer through their tunnel, each once. n counts a DIP as often
// as endpoints have it.
func (r *Result) Unreachable(unreachable map[Tunnel][]string) (dips []string, n int) {
	if len(unreachable) == 0 {
		return nil, 0
	}
	for f := range 2 {
		for _, m := range r.endpoints(f) {
			for _, d := range m.Dips {
				muxes := unreachable[Tunnel{string(d.Tunnel), m.Gue}]
				if len(muxes) == 0 || d.State != Healthy && d.State != Unchecked && d.State != Draining {
					continue
				}
				n++
				a, _ := netip.AddrFromSlice(d.Address)
				if text := fmt.Sprintf("%s from %s", a, strings.Join(muxes, ", ")); !slices.Contains(dips, text) {
					dips = append(dips, text)
				}
			}
		}
	}
	return dips, n
}

// CountStates adds the number of the VIP's DIPs in each state.
func (r *Result) CountStates(states map[string]int) {
	for f := range 2 {
		for _, m := range r.endpoints(f) {
			for _, d := range m.Dips {
				states[d.State]++
			}
		}
	}
}
