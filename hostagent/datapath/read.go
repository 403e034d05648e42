package datapath

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
)

// Exits counts packets by way out of the packet path since the maps were made,
// zeros included. in_… are packets from the uplinks, out_… packets to them; of
// the latter a segmentation-offloaded one counts once.
func (d *Datapath) Exits() (map[string]uint64, error) {
	counts, err := d.sums(d.objects.Exits, len(d.exitLabels))
	if err != nil {
		return nil, fmt.Errorf("read exits: %w", err)
	}
	exits := make(map[string]uint64, len(counts))
	for i, n := range counts {
		exits[d.exitLabels[i]] = n
	}
	return exits, nil
}

// sums are a per-CPU array's counters.
func (d *Datapath) sums(m *ebpf.Map, n int) ([]uint64, error) {
	sums := make([]uint64, n)
	for i := range sums {
		var each []uint64
		if err := m.Lookup(uint32(i), &each); err != nil {
			return nil, err
		}
		for _, c := range each {
			sums[i] += c
		}
	}
	return sums, nil
}

// Meters are all meters, in no order. Each only grows, until it is the least
// recently used of more than Config.Meters and starts anew.
func (d *Datapath) Meters() ([]Meter, error) {
	var (
		all    []Meter
		key    agentMeterKey
		values []agentMeter
	)
	it := d.objects.Meters.Iterate()
	for it.Next(&key, &values) {
		six := key.Families&vip6 != 0
		bits := 24
		if six {
			bits = 48
		}
		m := Meter{
			VIP:     parseAddr(key.Vip, six),
			Peer:    netip.PrefixFrom(parseAddr(key.Peer, six), bits),
			Inbound: key.Inbound != 0,
		}
		for _, v := range values {
			m.Packets += v.Packets
			m.Bytes += v.Bytes
		}
		all = append(all, m)
	}
	// A busy table changes under the iteration; the next reading has the rest.
	if err := it.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, fmt.Errorf("read meters: %w", err)
	}
	return all, nil
}

// Flows counts the entries of the flow tables. It reads them whole: about 50 ms
// for 256 Ki flows.
func (d *Datapath) Flows() (FlowStats, error) {
	var s FlowStats
	events, err := d.sums(d.objects.Events, int(agentEventEVENT_COUNT))
	if err != nil {
		return s, fmt.Errorf("read events: %w", err)
	}
	s.Created = events[agentEventEVENT_FLOW_CREATED]
	s.Recreated = events[agentEventEVENT_FLOW_RECREATED]
	s.Promoted = events[agentEventEVENT_FLOW_PROMOTED]
	s.Clamped = events[agentEventEVENT_MSS_CLAMPED]
	for _, t := range []struct {
		m    *ebpf.Map
		n    *uint64
		most *uint64
	}{
		{d.objects.Flows, &s.Trusted, &s.TrustedMax},
		{d.objects.Untrusted, &s.Untrusted, &s.UntrustedMax},
	} {
		*t.most = uint64(t.m.MaxEntries())
		info, err := t.m.Info()
		if err != nil {
			return s, fmt.Errorf("read flow table: %w", err)
		}
		bytes, _ := info.Memlock()
		s.Bytes += bytes
		if err := eachFlow(t.m, func(keys []agentFlowKey, _ []agentFlow) error {
			*t.n += uint64(len(keys))
			return nil
		}); err != nil {
			return s, fmt.Errorf("count flows: %w", err)
		}
	}
	return s, nil
}

// eachFlow hands over a flow table in batches.
func eachFlow(m *ebpf.Map, f func([]agentFlowKey, []agentFlow) error) error {
	const batch = 4096
	keys := make([]agentFlowKey, batch)
	values := make([]agentFlow, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return err
		}
		if err := f(keys[:n], values[:n]); err != nil {
			return err
		}
		if last {
			return nil
		}
	}
}
