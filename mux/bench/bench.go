// Package bench measures what a packet costs the mux: nanoseconds for each kind
// of packet, and memory for each flow and endpoint.
//
// Each figure is of the very program that the mux attaches, in BPF_PROG_TEST_RUN,
// net of a stub that returns at once. So the mux is charged with growing the
// packet and with the driver's taking that off again; figure growth_ns says what the
// two cost. The program that is repeated is a driver (driver.bpf.c) that
// presents a different, valid packet each time; a batch in which a packet was
// not encapsulated as it should be, by the driver's count of packets grown and
// by the mux's own counters, is an error. Cases and stub take turns, so that
// what else the machine does falls on all of them.
package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/quartet-lb/quartet/lb"
)

// Options of a measurement. The zero value of a field asks for its default.
type Options struct {
	Rounds  int    // turns that each case has; default 11
	Packets int    // of each case in each round, at most 8,387,584; default 262,144
	Flows   int    // largest flow set, a power of two from 2^10 to 2^24; default 2^20
	DIPs    int    // behind each endpoint, 1 to 4096; default 16
	Seed    uint64 // of the flow hash and of the order of cases; default 1
	CPU     int    // that runs everything; -1 leaves it to the scheduler
	// Endpoints is how many more endpoints, of ten DIPs each, are loaded to measure
	// their memory; default 20,000, and none if negative.
	Endpoints int
	Version   string                           // of Quartet, for the report
	Progress  func(format string, args ...any) // told what is being done; may be nil
}

func (o *Options) complete(cpus int) error {
	setDefault(&o.Rounds, 11)
	setDefault(&o.Packets, 262144)
	setDefault(&o.Flows, 1<<20)
	setDefault(&o.DIPs, 16)
	setDefault(&o.Endpoints, 20000)
	if o.Seed == 0 {
		o.Seed = 1
	}
	if o.Progress == nil {
		o.Progress = func(string, ...any) {}
	}
	switch {
	case o.Rounds < 1:
		return fmt.Errorf("rounds: %d; at least 1 is valid", o.Rounds)
	case o.Packets < 1 || o.Packets > maxBlocks*blockPackets:
		return fmt.Errorf("packets: %d; 1 to %d are valid", o.Packets, maxBlocks*blockPackets)
	case o.Flows < 1<<10 || o.Flows > 1<<24 || o.Flows&(o.Flows-1) != 0:
		return fmt.Errorf("flows: %d; a power of two from 1024 to 16777216 is valid", o.Flows)
	case o.DIPs < 1 || o.DIPs > 4096:
		return fmt.Errorf("dips: %d; 1 to 4096 are valid", o.DIPs)
	case o.CPU < -1 || o.CPU >= cpus:
		return fmt.Errorf("cpu: %d; -1 to %d are valid", o.CPU, cpus-1)
	}
	return nil
}

func setDefault(field *int, value int) {
	if *field == 0 {
		*field = value
	}
}

// Addresses of the endpoints under measurement; each has a DIP set of its own.
var (
	hashVIP    = netip.MustParseAddr("203.0.113.10")
	tableVIP   = netip.MustParseAddr("203.0.113.11")
	hashVIP6   = netip.MustParseAddr("2001:db8:b1::10")
	tableVIP6  = netip.MustParseAddr("2001:db8:b1::11")
	notVIP     = netip.MustParseAddr("203.0.113.99")
	tcpPort    = uint16(80)
	udpPort    = uint16(53)
	newFlowSet = uint32(1 << 26) // first of the flows that no mux has seen
)

// vip is the address of the endpoints of a consistency and family.
func vip(c lb.Consistency, ipv6 bool) netip.Addr {
	switch {
	case c == lb.ConsistencyTable && ipv6:
		return tableVIP6
	case c == lb.ConsistencyTable:
		return tableVIP
	case ipv6:
		return hashVIP6
	}
	return hashVIP
}

// situation is what a mux's connection table holds before a case.
type situation int

const (
	steady situation = iota // every flow of the case, trusted
	room                    // the packets' flows are new and find room
	full                    // the packets' flows are new and find none
)

// A measured case. Each packet must take the way out and, for table
// endpoints, cause the event named.
type testCase struct {
	name      string // key of its figure, without the unit
	situation situation
	traffic   traffic
	exit      string
	event     string
}

func (c testCase) key() string { return c.name + "_ns" }

// Bytes that the mux puts on a packet.
const (
	ipv4InIPv4 = 20
	ipv6InIPv6 = 40
)

// cases for flow sets of up to flows flows.
func cases(flows int) []testCase {
	all := []testCase{{
		name:    "no_vip",
		traffic: traffic{dst: netip.AddrPortFrom(notVIP, tcpPort), protocol: lb.TCP, tcpFlags: ackFlags},
		exit:    "no_vip",
	}}
	for _, consistency := range []lb.Consistency{lb.ConsistencyHash, lb.ConsistencyTable} {
		hit, inserted, noRoom := "", "", ""
		if consistency == lb.ConsistencyTable {
			hit, inserted, noRoom = "flow_hit", "flow_inserted", "flow_full"
		}
		add := func(name string, s situation, ipv6 bool, protocol lb.Protocol, bits uint8, event string) {
			t := traffic{
				dst:      netip.AddrPortFrom(vip(consistency, ipv6), tcpPort),
				protocol: protocol,
				tcpFlags: ackFlags,
				flowBits: bits,
				growth:   ipv4InIPv4,
			}
			if ipv6 {
				t.growth = ipv6InIPv6
			}
			if protocol == lb.UDP {
				t.dst = netip.AddrPortFrom(t.dst.Addr(), udpPort)
			}
			if s != steady {
				t.tcpFlags, t.firstFlow = synFlags, newFlowSet
			}
			all = append(all, testCase{consistency.String() + "_" + name, s, t, "tx", event})
		}
		for _, set := range []struct {
			name string
			bits uint8
		}{{"flows_1", 0}, {"flows_1k", 10}, {"flows_16k", 14}, {"flows_128k", 17}, {"flows_1m", 20}} {
			if 1<<set.bits <= flows {
				add(set.name, steady, false, lb.TCP, set.bits, hit)
			}
		}
		add("new_room", room, false, lb.TCP, 25, inserted)
		add("new_full", full, false, lb.TCP, 25, noRoom)
		add("ipv6_flows_1", steady, true, lb.TCP, 0, hit)
		add("udp_flows_1", steady, false, lb.UDP, 0, hit)
	}
	return all
}

// ErrWrongWay is returned, wrapped, when packets left the mux by another way
// than the case's or were not encapsulated.
var ErrWrongWay = errors.New("packets did not go the case's way")

// Run measures every case and returns the report. It needs CAP_SYS_ADMIN,
// CAP_NET_ADMIN and CAP_BPF; everything it makes is in a network namespace of its own and
// goes with it, also if the process is killed. It stops at ctx's end.
func Run(ctx context.Context, o Options) (*Report, error) {
	type outcome struct {
		report *Report
		err    error
	}
	done := make(chan outcome)
	go func() { // its thread stays locked and so ends here
		r, err := run(ctx, o)
		done <- outcome{r, err}
	}()
	result := <-done
	return result.report, result.err
}

func run(ctx context.Context, o Options) (*Report, error) {
	b, err := newBench(ctx, o)
	if err != nil {
		return nil, err
	}
	defer b.close()
	r := newReport(b.options)
	if err := b.measureCases(r); err != nil {
		return nil, err
	}
	if err := b.crossCheck(r); err != nil {
		return nil, err
	}
	if err := b.measureMemory(r); err != nil {
		return nil, err
	}
	return r, nil
}

// sample is one round of one case, in ns per packet.
type sample struct{ net, stub float64 }

func (b *bench) measureCases(r *Report) error {
	list := cases(b.options.Flows)
	samples := make(map[string][]sample)
	var growth []float64
	for round := range b.options.Rounds {
		b.options.Progress("round %d of %d: %d cases of %d packets", round+1, b.options.Rounds,
			len(list), b.options.Packets)
		b.refreshRoom()
		b.random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
		for _, c := range list {
			s, err := b.measure(c)
			if err != nil {
				return fmt.Errorf("measure %s: %w", c.name, err)
			}
			samples[c.key()] = append(samples[c.key()], s)
		}
		ns, err := b.measureGrowth()
		if err != nil {
			return fmt.Errorf("measure growth: %w", err)
		}
		growth = append(growth, ns)
	}
	r.put("growth_ns", growth)
	var stubs []float64
	for key, rounds := range samples {
		net := make([]float64, len(rounds))
		for i, s := range rounds {
			net[i] = s.net
			stubs = append(stubs, s.stub)
		}
		r.put(key, net)
	}
	r.put("stub_ns", stubs)
	return nil
}

// measureGrowth is what growing an IPv4 packet and taking it off again cost.
func (b *bench) measureGrowth() (ns float64, err error) {
	m := b.muxes[steady]
	t := traffic{dst: netip.AddrPortFrom(hashVIP, tcpPort), protocol: lb.TCP, tcpFlags: ackFlags, growth: ipv4InIPv4}
	without, err := b.run(m, t, slotStub, 1<<16)
	if err != nil {
		return 0, err
	}
	with, err := b.run(m, t, slotStubGrow, 1<<16)
	return with.ns - without.ns, err
}

// measure presents the case's packets to the mux and to the stub.
func (b *bench) measure(c testCase) (sample, error) {
	m := b.muxes[c.situation]
	if err := b.warm(c, m); err != nil {
		return sample{}, err
	}
	stub, err := b.run(m, c.traffic, slotStub, min(b.options.Packets, 1<<16))
	if err != nil {
		return sample{}, err
	}
	before, err := m.counters()
	if err != nil {
		return sample{}, err
	}
	packets := b.options.Packets
	if c.situation == room { // each takes an entry
		packets = min(packets, b.options.Flows/4)
	}
	got, err := b.run(m, c.traffic, m.slot, packets)
	if err != nil {
		return sample{}, err
	}
	after, err := m.counters()
	if err != nil {
		return sample{}, err
	}
	if err := check(c, got, before, after); err != nil {
		return sample{}, err
	}
	return sample{net: got.ns - stub.ns, stub: stub.ns}, nil
}

// warm brings the case's working set into the caches, as far as it fits.
func (b *bench) warm(c testCase, m *mux) error {
	t := c.traffic
	packets := min(1<<t.flowBits, 1<<17)
	if c.situation != steady { // must not use up the room: an established flow warms the rest
		t.flowBits, t.firstFlow, t.tcpFlags, packets = 0, 0, ackFlags, blockPackets
	}
	_, err := b.run(m, t, m.slot, packets)
	return err
}

// check that each packet was encapsulated, left by the case's way out, and
// was or was not found in the connection table. One in a thousand new flows may find
// its line full in a table that has room, and vice versa.
func check(c testCase, got batch, before, after counters) error {
	if got.grown != got.packets {
		return fmt.Errorf("%w: %d of %d packets grew by %d bytes", ErrWrongWay, got.grown, got.packets,
			c.traffic.growth)
	}
	exits := after.exits.minus(before.exits)
	if exits[c.exit] != got.packets || exits.total() != got.packets {
		return fmt.Errorf("%w: %d packets, all by %s expected, ways out were %v", ErrWrongWay, got.packets,
			c.exit, exits)
	}
	if c.event == "" {
		return nil
	}
	events := after.events.minus(before.events)
	if missed := got.packets - events[c.event]; missed > got.packets/100 {
		return fmt.Errorf("%w: %d packets, %s expected for all, events were %v", ErrWrongWay, got.packets,
			c.event, events)
	}
	return nil
}

// crossCheck measures some cases by other means: the kernel's run-time
// statistics of live frames, which really leave by the veth and arrive.
func (b *bench) crossCheck(r *Report) error {
	b.options.Progress("cross-check with live frames")
	const packets = 1 << 17
	wanted := []string{"no_vip", "hash_flows_1", "hash_flows_1k", "hash_flows_128k", "table_flows_1", "table_flows_1k", "table_flows_128k"}
	samples := make(map[string][]float64)
	var sent, arrived uint64
	for range min(b.options.Rounds, 5) {
		for _, c := range cases(b.options.Flows) {
			if !slices.Contains(wanted, c.name) {
				continue
			}
			m := b.muxes[c.situation]
			if err := b.warm(c, m); err != nil { // enters its network, too
				return err
			}
			stub, err := b.driver.runLive(m.network, c.traffic, slotStub, packets)
			if err != nil {
				return fmt.Errorf("measure %s: %w", c.name, err)
			}
			var before, after uint64
			if err := b.driver.Arrived.Get(&before); err != nil {
				return err
			}
			ns, err := b.driver.runLive(m.network, c.traffic, m.slot, packets)
			if err != nil {
				return fmt.Errorf("measure %s: %w", c.name, err)
			}
			if err := b.driver.Arrived.Get(&after); err != nil {
				return err
			}
			if c.exit == "tx" {
				sent += packets
				arrived += after - before
			}
			samples["live_"+c.key()] = append(samples["live_"+c.key()], ns-stub)
		}
	}
	for key, values := range samples {
		r.put(key, values)
	}
	r.Figures["live_arrived_share"] = float64(arrived) / float64(sent)
	return nil
}
