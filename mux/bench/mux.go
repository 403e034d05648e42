package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/buckets"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/mux/datapath"
)

// Idle times of connection entries: none may expire while a mux is measured.
const (
	idleTrusted   = 8 * time.Hour
	idleUntrusted = time.Hour
)

// counts of ways out or of events, by name.
type counts map[string]uint64

func (c counts) minus(before counts) counts {
	d := make(counts)
	for name, n := range c {
		if n != before[name] {
			d[name] = n - before[name]
		}
	}
	return d
}

func (c counts) total() (sum uint64) {
	for n := range maps.Values(c) {
		sum += n
	}
	return sum
}

type counters struct{ exits, events counts }

// mux is one attached mux in a network of its own.
type mux struct {
	*datapath.Datapath
	network *network
	slot    int // of the driver
}

func (m *mux) counters() (c counters, err error) {
	if c.exits, err = m.Exits(); err != nil {
		return c, err
	}
	c.events, err = m.Events()
	return c, err
}

// bench is what a measurement runs on; all of it belongs to one thread.
type bench struct {
	options Options
	stopped func() error // not nil once the measurement is to end
	random  *rand.Rand
	driver  *driver
	muxes   map[situation]*mux
}

func newBench(ctx context.Context, o Options) (*bench, error) {
	if err := o.complete(runtime.NumCPU()); err != nil {
		return nil, err
	}
	if err := isolate(o.CPU); err != nil {
		return nil, err
	}
	b := &bench{
		options: o,
		stopped: ctx.Err,
		random:  rand.New(rand.NewPCG(o.Seed, 0)),
		muxes:   make(map[situation]*mux),
	}
	if err := b.setUp(); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

func (b *bench) setUp() (err error) {
	if b.driver, err = newDriver(); err != nil {
		return err
	}
	for s, name := range map[situation]string{steady: "steady", room: "room", full: "full"} {
		b.options.Progress("open mux %q", name)
		if b.muxes[s], err = b.newMux(name); err != nil {
			return err
		}
	}
	b.options.Progress("establish %d flows", b.options.Flows)
	if err := b.establish(b.muxes[steady], b.options.Flows); err != nil {
		return err
	}
	for _, s := range []situation{room, full} {
		if err := b.establish(b.muxes[s], 1); err != nil {
			return err
		}
	}
	b.options.Progress("fill a connection table")
	return b.fill(b.muxes[full])
}

func (b *bench) close() {
	for _, m := range b.muxes {
		if m != nil {
			m.close()
		}
	}
	if b.driver != nil {
		_ = b.driver.Close()
	}
}

func (m *mux) close() {
	if m.Datapath != nil {
		_ = m.Detach()
	}
	m.network.close()
}

// newMux opens a datapath as the mux's daemon does, in a network of its own.
func (b *bench) newMux(name string) (*mux, error) {
	n, err := newNetwork()
	if err != nil {
		return nil, err
	}
	m := &mux{network: n}
	if err := n.attachSink(b.driver.Sink); err != nil {
		m.close()
		return nil, err
	}
	m.Datapath, err = datapath.Open(datapath.Config{
		Interfaces:    []string{n.mux.Attrs().Name},
		PinDir:        filepath.Join(bpffs, "bench-"+name),
		Source4:       muxAddr(false),
		Source6:       muxAddr(true),
		Flows:         b.options.Flows,
		IdleTrusted:   idleTrusted,
		IdleUntrusted: idleUntrusted,
	})
	if err != nil {
		m.close()
		return nil, err
	}
	if err := m.Replace(b.tables()); err != nil {
		m.close()
		return nil, fmt.Errorf("load tables: %w", err)
	}
	if m.slot, err = b.driver.add(m.Program()); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// tables has the endpoints under measurement.
func (b *bench) tables() datapath.Tables {
	var t datapath.Tables
	binary.LittleEndian.PutUint64(t.Seed[:], b.options.Seed)
	for _, consistency := range []lb.Consistency{lb.ConsistencyHash, lb.ConsistencyTable} {
		for _, ipv6 := range []bool{false, true} {
			addr := vip(consistency, ipv6)
			t.VIPs = append(t.VIPs, datapath.VIP{Addr: addr, Name: consistency.String(), Tenant: "bench"})
			for _, e := range []lb.Endpoint{{VIP: addr, Protocol: lb.TCP, Port: tcpPort},
				{VIP: addr, Protocol: lb.UDP, Port: udpPort}} {
				t.Endpoints = append(t.Endpoints, endpoint(e, consistency, b.options.DIPs, len(t.Endpoints)))
			}
		}
	}
	return t
}

// endpoint with n DIPs of its own, the number-th such.
func endpoint(e lb.Endpoint, consistency lb.Consistency, n, number int) datapath.Endpoint {
	members := make([]buckets.Member, n)
	for i := range members {
		id := uint32(number*n + i + 1)
		dip := netip.AddrFrom4([4]byte{10, byte(id >> 16), byte(id >> 8), byte(id)})
		if e.VIP.Is6() {
			a := netip.MustParseAddr("2001:db8:d1::").As16()
			binary.BigEndian.PutUint32(a[12:], id)
			dip = netip.AddrFrom16(a)
		}
		members[i] = buckets.Member{DIP: netip.AddrPortFrom(dip, e.Port), Weight: 1}
	}
	table := buckets.New(members, 1)
	out := datapath.Endpoint{
		Endpoint:    e,
		VIPName:     consistency.String(),
		Name:        e.Protocol.String(),
		Tenant:      "bench",
		Consistency: consistency,
		Buckets:     make([]uint16, len(table.Buckets)),
		Generation:  1,
	}
	for _, dip := range table.DIPs {
		out.DIPs = append(out.DIPs, lb.DIP{Addr: dip.Addr(), Port: dip.Port(), Tunnel: lb.Tunnel{Dst: dip.Addr()}})
	}
	for i, bucket := range table.Buckets {
		out.Buckets[i] = bucket.Current
	}
	return out
}

// run presents packets to a mux or, in its place, to the stub.
func (b *bench) run(m *mux, t traffic, slot, packets int) (batch, error) {
	if err := b.stopped(); err != nil {
		return batch{}, err
	}
	if err := m.network.enter(); err != nil {
		return batch{}, err
	}
	return b.driver.run(m.network, t, slot, packets)
}

// establish makes flows of every table endpoint known and trusted: a SYN (or a
// datagram) and another packet of each.
func (b *bench) establish(m *mux, flows int) error {
	for _, c := range cases(b.options.Flows) {
		t := c.traffic
		if c.situation != steady || c.event == "" || 1<<t.flowBits > flows {
			continue
		}
		// In steps, for a line has room for few flows that are not trusted yet.
		step := min(16, t.flowBits)
		steps := 1 << (t.flowBits - step)
		t.flowBits = step
		for i := range steps {
			t.firstFlow = uint32(i) << step
			for _, flags := range []uint8{synFlags, ackFlags} {
				t.tcpFlags = flags
				if _, err := b.run(m, t, m.slot, 1<<step); err != nil {
					return fmt.Errorf("establish flows of %s: %w", c.name, err)
				}
			}
		}
	}
	return nil
}

// fill the connection table with SYNs of other flows than the cases' until
// nearly none finds room.
func (b *bench) fill(m *mux) error {
	t := traffic{
		dst: netip.AddrPortFrom(tableVIP, tcpPort), protocol: lb.TCP, tcpFlags: synFlags,
		flowBits: 25, firstFlow: 1 << 27, growth: ipv4InIPv4,
	}
	for range 64 {
		before, err := m.counters()
		if err != nil {
			return err
		}
		got, err := b.run(m, t, m.slot, max(b.options.Flows/2, blockPackets))
		if err != nil {
			return fmt.Errorf("fill the connection table: %w", err)
		}
		after, err := m.counters()
		if err != nil {
			return err
		}
		if after.events.minus(before.events)["flow_full"] >= got.packets-got.packets/1000 {
			return nil
		}
	}
	return errors.New("fill the connection table: flows still find room")
}

// refreshRoom takes the flows of the last round out of the connection table.
func (b *bench) refreshRoom() {
	b.muxes[room].Sweep(datapath.Monotonic() + 2*idleUntrusted)
}

// measureMemory finds bytes per flow with the connection table at its nominal
// load, and the kernel memory of many endpoints.
func (b *bench) measureMemory(r *Report) error {
	m := b.muxes[steady]
	table := m.Sweep(datapath.Monotonic())
	flows := uint64(table.Trusted + table.Untrusted)
	sizes, err := mapMemory(m.Program())
	if err != nil {
		return err
	}
	if flows == 0 {
		return errors.New("measure memory: the connection table is empty")
	}
	r.Figures["table_bytes_per_flow"] = float64(sizes["flows"]) / float64(flows)
	r.Figures["table_flows"] = float64(flows)
	// Flows of the one-flow cases are in the table too.
	missing := max(0, float64(b.options.Flows)-float64(flows))
	r.Figures["table_no_room_share"] = missing / float64(b.options.Flows)
	r.Figures["table_untrusted_share"] = float64(table.Untrusted) / float64(flows)
	if b.options.Endpoints < 0 {
		return nil
	}
	if err := b.stopped(); err != nil {
		return err
	}
	b.options.Progress("load %d endpoints of ten DIPs", b.options.Endpoints)
	t := b.tables()
	base := len(t.Endpoints) * b.options.DIPs / 10
	for i := range b.options.Endpoints {
		addr := netip.AddrFrom4([4]byte{198, 18, byte(i / 2 >> 8), byte(i / 2)})
		if i%2 == 0 {
			t.VIPs = append(t.VIPs, datapath.VIP{Addr: addr, Name: "many", Tenant: "bench"})
		}
		e := lb.Endpoint{VIP: addr, Protocol: lb.TCP, Port: uint16(80 + i%2)}
		t.Endpoints = append(t.Endpoints, endpoint(e, lb.ConsistencyHash, 10, base+1+i))
	}
	start := time.Now()
	if err := m.Replace(t); err != nil {
		return fmt.Errorf("load %d endpoints: %w", b.options.Endpoints, err)
	}
	r.Figures["endpoints_load_ms"] = float64(time.Since(start).Milliseconds())
	if sizes, err = mapMemory(m.Program()); err != nil {
		return err
	}
	var total uint64
	for name, bytes := range sizes {
		total += bytes
		r.Parameters["memory_bytes_"+name] = bytes
	}
	const mib = 1 << 20
	r.Figures["endpoints_kernel_memory_mib"] = float64(total) / mib
	r.Figures["flows_kernel_memory_mib"] = float64(sizes["flows"]) / mib
	return nil
}

// mapMemory is the kernel's account of the memory of a program's maps, in
// bytes, by name; maps in an array of maps count for it.
func mapMemory(p *ebpf.Program) (map[string]uint64, error) {
	info, err := p.Info()
	if err != nil {
		return nil, fmt.Errorf("measure memory: %w", err)
	}
	ids, _ := info.MapIDs()
	sizes := make(map[string]uint64)
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return nil, fmt.Errorf("measure memory: %w", err)
		}
		name, bytes, err := memory(m)
		_ = m.Close()
		if err != nil {
			return nil, fmt.Errorf("measure memory: %w", err)
		}
		sizes[name] += bytes
	}
	return sizes, nil
}

func memory(m *ebpf.Map) (name string, bytes uint64, err error) {
	info, err := m.Info()
	if err != nil {
		return "", 0, err
	}
	bytes, known := info.Memlock()
	if !known {
		return "", 0, fmt.Errorf("map %s: the kernel does not tell its memory", info.Name)
	}
	if m.Type() != ebpf.ArrayOfMaps {
		return info.Name, bytes, nil
	}
	var index uint32
	var inner *ebpf.Map
	for it := m.Iterate(); it.Next(&index, &inner); {
		_, n, err := memory(inner)
		_ = inner.Close()
		if err != nil {
			return "", 0, err
		}
		bytes += n
	}
	return info.Name, bytes, nil
}

// bpffs is a BPF filesystem that only this thread sees, and that goes with it.
const bpffs = "/sys/fs/bpf"

// isolate locks the calling goroutine to its thread, pins that to a CPU, and
// gives it mounts of its own. The thread is never unlocked: it and what it holds end with
// the goroutine.
func isolate(cpu int) error {
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("create mount namespace: %w (CAP_SYS_ADMIN is needed)", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := os.MkdirAll(bpffs, 0o755); err != nil {
		return fmt.Errorf("mount BPF filesystem: %w", err)
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount BPF filesystem on %s: %w", bpffs, err)
	}
	if cpu < 0 {
		return nil
	}
	var set unix.CPUSet
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return fmt.Errorf("pin to CPU %d: %w", cpu, err)
	}
	return nil
}
