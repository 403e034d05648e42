package compile

import (
	"cmp"
	"net/netip"
	"slices"

	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/manager/object"
)

// Change is one VIP before and after; nil where it did not exist or no longer does.
type Change struct{ Before, After *Result }

// MuxSnapshot fills in a mux's VIPs and endpoints.
func MuxSnapshot(results []*Result, t *quartetv1.MuxTables) {
	for _, r := range results {
		t.Vips = append(t.Vips, r.Addresses...)
		t.Endpoints = append(t.Endpoints, r.Endpoints...)
	}
}

// MuxDelta fills in what the changes put and delete. An address that moved from
// one VIP to another is put, not deleted.
func MuxDelta(changes []Change, d *quartetv1.MuxDelta) {
	vips := differ[string, *quartetv1.VipAddress]{key: func(v *quartetv1.VipAddress) string { return string(v.Address) }}
	endpoints := differ[lb.Endpoint, *quartetv1.MuxEndpoint]{key: func(m *quartetv1.MuxEndpoint) lb.Endpoint { return endpointOf(m.Key) }}
	for _, c := range changes {
		if c.Before != nil {
			vips.before(c.Before.Addresses)
			endpoints.before(c.Before.Endpoints)
		}
		if c.After != nil {
			vips.after(c.After.Addresses)
			endpoints.after(c.After.Endpoints)
		}
	}
	d.PutVips, d.PutEndpoints = vips.put(same), endpoints.put(same)
	for _, v := range vips.deleted() {
		d.DeleteVips = append(d.DeleteVips, v.Address)
	}
	for _, m := range endpoints.deleted() {
		d.DeleteEndpoints = append(d.DeleteEndpoints, m.Key)
	}
}

// HostSnapshot fills in the rules and checks of the host agent with these addresses.
func HostSnapshot(results []*Result, addresses []netip.Addr, t *quartetv1.HostTables) {
	for _, r := range results {
		rules, checks := host(r, addresses)
		t.Rules = append(t.Rules, rules...)
		t.Checks = append(t.Checks, checks...)
	}
}

// HostDelta fills in what the changes put and delete on that host agent.
func HostDelta(changes []Change, addresses []netip.Addr, d *quartetv1.HostDelta) {
	rules := differ[ruleKey, *quartetv1.NatRule]{key: keyOf}
	checks := differ[string, *quartetv1.Check]{key: (*quartetv1.Check).GetId}
	for _, c := range changes {
		if c.Before != nil && c.After != nil && c.Before.Vip == c.After.Vip {
			continue // rules and checks follow from the object alone
		}
		r, k := host(c.Before, addresses)
		rules.before(r)
		checks.before(k)
		r, k = host(c.After, addresses)
		rules.after(r)
		checks.after(k)
	}
	d.PutRules, d.PutChecks = rules.put(equal), checks.put(equal)
	for _, r := range rules.deleted() {
		d.DeleteRules = append(d.DeleteRules, &quartetv1.NatRule{Tunnel: r.Tunnel, Vip: r.Vip, Protocol: r.Protocol, Port: r.Port})
	}
	for _, c := range checks.deleted() {
		d.DeleteChecks = append(d.DeleteChecks, c.Id)
	}
}

// Forgotten says whether the changes leave a host agent with a check that it has
// reported and whose report was dropped: its DIP was removed and came back
// before the agent heard of it, or moved between two addresses of its host. The agent must report again.
func Forgotten(changes []Change, addresses []netip.Addr) bool {
	for _, c := range changes {
		if c.Before == nil || c.After == nil || c.Before.Vip == c.After.Vip {
			continue
		}
		dropped := map[string]bool{}
		c.Before.Reported(func(endpoint string, d *quartetv1.DipState) {
			dropped[CheckID(c.Before.Vip.Name, endpoint, d.Dip)] = true
		})
		c.After.Reported(func(endpoint string, d *quartetv1.DipState) {
			delete(dropped, CheckID(c.After.Vip.Name, endpoint, d.Dip))
		})
		if len(dropped) == 0 {
			continue
		}
		_, had := host(c.Before, addresses)
		_, checks := host(c.After, addresses)
		for _, k := range checks {
			if dropped[k.Id] && slices.ContainsFunc(had, func(x *quartetv1.Check) bool { return x.Id == k.Id }) {
				return true
			}
		}
	}
	return false
}

// ConcernsHosts are the addresses of the host agents that may have anything to do.
func (c Change) ConcernsHosts() []netip.Addr {
	if c.Before != nil && c.After != nil && c.Before.Vip == c.After.Vip {
		return nil
	}
	var out []netip.Addr
	for _, r := range []*Result{c.Before, c.After} {
		if r != nil {
			out = append(out, r.Hosts...)
		}
	}
	return out
}

// AddsRules are the addresses of the host agents that get rules which they did
// not have like this.
func (c Change) AddsRules() []netip.Addr {
	if c.After == nil || c.Before != nil && c.Before.Vip == c.After.Vip {
		return nil
	}
	before := map[rule]bool{}
	if c.Before != nil {
		c.Before.eachRule(func(_ netip.Addr, x rule) { before[x] = true })
	}
	var out []netip.Addr
	c.After.eachRule(func(host netip.Addr, x rule) {
		if !before[x] {
			out = append(out, host)
		}
	})
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out)
}

// rule is a NatRule, and whose it is, in a form that compares.
type rule struct {
	host             string
	tunnel, vip, dip netip.Addr
	protocol         string
	port, dipPort    uint32
}

func (r *Result) eachRule(f func(host netip.Addr, x rule)) {
	for _, e := range r.Vip.Endpoints {
		for _, b := range e.Backends {
			host, err := netip.ParseAddr(b.Host)
			if err != nil {
				continue
			}
			for _, v := range r.Addresses {
				vip, _ := netip.AddrFromSlice(v.Address)
				if dip := object.BackendDIP(b, vip.Is6()); dip.IsValid() {
					f(host, rule{b.Host, object.BackendTunnel(b, vip.Is6()), vip, dip, e.Protocol, e.Port, b.Port})
				}
			}
		}
	}
}

type ruleKey struct {
	tunnel, vip    string
	protocol, port uint32
}

func keyOf(r *quartetv1.NatRule) ruleKey {
	return ruleKey{string(r.Tunnel), string(r.Vip), r.Protocol, r.Port}
}

// host is what the host agent with these addresses runs for a VIP.
func host(r *Result, addresses []netip.Addr) (rules []*quartetv1.NatRule, checks []*quartetv1.Check) {
	if r == nil || !slices.ContainsFunc(addresses, func(a netip.Addr) bool {
		_, found := slices.BinarySearchFunc(r.Hosts, a, netip.Addr.Compare)
		return found
	}) {
		return nil, nil
	}
	for i, e := range r.Vip.Endpoints {
		for _, b := range e.Backends {
			if a, err := netip.ParseAddr(b.Host); err != nil || !slices.Contains(addresses, a) {
				continue
			}
			var has [2]bool
			for j, address := range r.Addresses {
				is6 := len(address.Address) == 16
				dip := object.BackendDIP(b, is6)
				if !dip.IsValid() {
					continue
				}
				key := r.Endpoints[j*len(r.Vip.Endpoints)+i].Key
				rules = append(rules, &quartetv1.NatRule{
					Tunnel: object.BackendTunnel(b, is6).AsSlice(), Vip: key.Vip, Protocol: key.Protocol, Port: key.Port,
					Dip: dip.AsSlice(), DipPort: b.Port, VipName: r.Vip.Name, Endpoint: e.Name,
				})
				if has[family(dip)] || e.Health == nil {
					continue
				}
				has[family(dip)] = true
				checks = append(checks, &quartetv1.Check{
					Id: CheckID(r.Vip.Name, e.Name, dip.String()), Dip: dip.AsSlice(),
					Port: cmp.Or(e.Health.Port, b.Port), Health: e.Health,
				})
			}
		}
	}
	return rules, checks
}

// differ compares two lists by key, in their order.
type differ[K comparable, V proto.Message] struct {
	key  func(V) K
	old  []V
	new  []V
	oldK map[K]V
	newK map[K]bool
}

func (d *differ[K, V]) before(all []V) {
	if d.oldK == nil {
		d.oldK = map[K]V{}
	}
	for _, v := range all {
		d.oldK[d.key(v)] = v
	}
	d.old = append(d.old, all...)
}

func (d *differ[K, V]) after(all []V) {
	if d.newK == nil {
		d.newK = map[K]bool{}
	}
	for _, v := range all {
		d.newK[d.key(v)] = true
	}
	d.new = append(d.new, all...)
}

// put are those after that were not the same before.
func (d *differ[K, V]) put(same func(a, b proto.Message) bool) []V {
	var out []V
	for _, v := range d.new {
		if old, ok := d.oldK[d.key(v)]; !ok || !same(old, v) {
			out = append(out, v)
		}
	}
	return out
}

// deleted are those before that are gone.
func (d *differ[K, V]) deleted() []V {
	var out []V
	for _, v := range d.old {
		if !d.newK[d.key(v)] {
			out = append(out, v)
		}
	}
	return out
}

// same holds for what VIP has taken over from the result before.
func same(a, b proto.Message) bool { return a == b }

func equal(a, b proto.Message) bool { return proto.Equal(a, b) }

// Name is the VIP's.
func (c Change) Name() string {
	if c.After != nil {
		return c.After.Vip.Name
	}
	if c.Before != nil {
		return c.Before.Vip.Name
	}
	return ""
}
