package manager

import (
	"net/netip"
	"slices"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/compile"
)

// announcements counts the VIP addresses behind each prefix that muxes announce.
type announcements struct {
	pooled []pooled // in order of address; pools do not overlap
	counts map[netip.Prefix]int
	sorted []string // nil: to be made
}

type pooled struct {
	prefix netip.Prefix
	host   bool // announce a host route for each address
}

// pools starts again with these pools and no addresses.
func (a *announcements) pools(all []*quartetv1.VipPool) {
	*a = announcements{counts: map[netip.Prefix]int{}}
	for _, p := range all {
		for _, text := range p.Prefixes {
			if prefix, err := netip.ParsePrefix(text); err == nil {
				a.pooled = append(a.pooled, pooled{prefix, p.Announce == "host"})
			}
		}
	}
	slices.SortFunc(a.pooled, func(x, y pooled) int { return x.prefix.Addr().Compare(y.prefix.Addr()) })
}

// add counts a VIP's addresses, or takes them back with by -1.
func (a *announcements) add(r *compile.Result, by int) {
	for _, v := range r.Addresses {
		address, _ := netip.AddrFromSlice(v.Address)
		i, exact := slices.BinarySearchFunc(a.pooled, address, func(p pooled, t netip.Addr) int { return p.prefix.Addr().Compare(t) })
		if !exact {
			i--
		}
		if i < 0 || !a.pooled[i].prefix.Contains(address) {
			continue
		}
		prefix := a.pooled[i].prefix
		if a.pooled[i].host {
			prefix = netip.PrefixFrom(address, address.BitLen())
		}
		before := a.counts[prefix]
		a.counts[prefix] += by
		if a.counts[prefix] == 0 {
			delete(a.counts, prefix)
		}
		if (before == 0) != (a.counts[prefix] == 0) {
			a.sorted = nil
		}
	}
}

// list is what muxes announce, in order. It is not changed afterwards.
func (a *announcements) list() []string {
	if a.sorted == nil {
		prefixes := make([]netip.Prefix, 0, len(a.counts))
		for p := range a.counts {
			prefixes = append(prefixes, p)
		}
		slices.SortFunc(prefixes, netip.Prefix.Compare)
		a.sorted = make([]string, len(prefixes))
		for i, p := range prefixes {
			a.sorted[i] = p.String()
		}
	}
	return a.sorted
}
