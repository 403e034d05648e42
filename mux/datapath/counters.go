package datapath

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/quartet-lb/quartet/lb"
)

// Counter counts what was sent to one DIP of one endpoint.
type Counter struct {
	Endpoint lb.Endpoint
	VIPName  string
	Name     string // of the endpoint
	Tenant   string
	DIP      lb.DIP
	Packets  uint64
	Bytes    uint64 // of the packets as they came, from the IP header on
	NewFlows uint64 // TCP: SYNs; UDP under consistency table: flows inserted
}

// ExitNames lists every way out of the packet path, in the program's order.
func (d *Datapath) ExitNames() []string { return d.exitNames }

// Exits counts packets by way out since the maps were made.
func (d *Datapath) Exits() (map[string]uint64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	stats, err := d.readStats()
	if err != nil {
		return nil, err
	}
	out := make(map[string]uint64, len(d.exitNames))
	for i, name := range d.exitNames {
		out[name] = stats.Exits[i]
	}
	return out, nil
}

// Events counts what happened to packets beside their way out, by name.
func (d *Datapath) Events() (map[string]uint64, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	stats, err := d.readStats()
	if err != nil {
		return nil, err
	}
	out := make(map[string]uint64, len(d.eventNames))
	for i, name := range d.eventNames {
		out[name] = stats.Events[i]
	}
	return out, nil
}

func (d *Datapath) readStats() (muxCpuStats, error) {
	var sum muxCpuStats
	if d.closed {
		return sum, errors.New("the datapath is closed")
	}
	var cpus []muxCpuStats
	if err := d.maps.Stats.Lookup(uint32(0), &cpus); err != nil {
		return sum, fmt.Errorf("read counters: %w", err)
	}
	for i := range cpus {
		for j, n := range cpus[i].Exits {
			sum.Exits[j] += n
		}
		for j, n := range cpus[i].Events {
			sum.Events[j] += n
		}
	}
	return sum, nil
}

// Counters returns a counter for each DIP of each endpoint, in no order.
func (d *Datapath) Counters() ([]Counter, error) {
	d.inUse.RLock()
	defer d.inUse.RUnlock()
	endpoints, end, err := d.servedEndpoints()
	if err != nil {
		return nil, err
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	sums := make([]muxDipCounters, end)
	const batch = 4096
	keys := make([]uint32, batch)
	values := make([]muxDipCounters, batch*cpus)
	var cursor ebpf.MapBatchCursor
	for done := false; !done; {
		n, err := d.maps.Counters.BatchLookup(&cursor, keys, values, nil)
		if done = errors.Is(err, ebpf.ErrKeyNotExist); err != nil && !done {
			return nil, fmt.Errorf("read counters: %w", err)
		}
		for i, id := range keys[:n] {
			if int(id) >= len(sums) {
				done = true
				break
			}
			for _, v := range values[i*cpus : (i+1)*cpus] {
				sums[id].Packets += v.Packets
				sums[id].Bytes += v.Bytes
				sums[id].NewFlows += v.NewFlows
			}
		}
	}
	var out []Counter
	for _, e := range endpoints {
		for dip, id := range e.dips {
			out = append(out, Counter{
				Endpoint: e.Endpoint.Endpoint, VIPName: e.VIPName, Name: e.Name, Tenant: e.Tenant, DIP: dip,
				Packets: sums[id].Packets, Bytes: sums[id].Bytes, NewFlows: sums[id].NewFlows,
			})
		}
	}
	return out, nil
}

// servedEndpoints lists the endpoints, none of which changes any more (one that
// is put again is another), and where the DIP ids in use end.
func (d *Datapath) servedEndpoints() ([]*endpoint, uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, 0, errors.New("the datapath is closed")
	}
	return slices.Collect(maps.Values(d.endpoints)), d.dipIDs.next, nil
}

func (d *Datapath) clearCounters(id uint32) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return err
	}
	return d.maps.Counters.Put(id, make([]muxDipCounters, cpus))
}
