// Package metering reports how much traffic this host exchanges with whom, by
// VIP, prefix of peers and direction: the raw material of the traffic matrix
// that VIPs are assigned to switches by (Duet section 4).
package metering

import (
	"cmp"
	"net/netip"
	"slices"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/hostagent/datapath"
)

// Reporter turns the packet path's meters into messages. The zero Reporter has
// reported nothing.
type Reporter struct {
	reported map[key]total
}

type key struct {
	vip     netip.Addr
	peer    netip.Prefix
	inbound bool
}

type total struct{ packets, bytes uint64 }

// Messages are the meters that have changed since the last call, or all of
// them, in order. They are totals, so that a report that is lost loses nothing.
// A total below the one before has started anew.
func (r *Reporter) Messages(meters []datapath.Meter, all bool) []*quartetv1.Meter {
	meters = slices.Clone(meters)
	slices.SortFunc(meters, func(a, b datapath.Meter) int {
		return cmp.Or(a.VIP.Compare(b.VIP), a.Peer.Addr().Compare(b.Peer.Addr()), compareBool(a.Inbound, b.Inbound))
	})
	now := make(map[key]total, len(meters))
	var messages []*quartetv1.Meter
	for _, m := range meters {
		k, t := key{m.VIP, m.Peer, m.Inbound}, total{m.Packets, m.Bytes}
		now[k] = t
		if !all && r.reported[k] == t {
			continue
		}
		messages = append(messages, &quartetv1.Meter{
			Vip: m.VIP.String(), Peer: m.Peer.String(), Inbound: m.Inbound,
			Packets: m.Packets, Bytes: m.Bytes,
		})
	}
	r.reported = now
	return messages
}

// compareBool puts true first.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}
