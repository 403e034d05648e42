// Package datapath is the mux's packet path: it takes each packet for a VIP to
// one of the DIPs behind it, by an XDP program on the mux's interfaces.
//
// The program (mux.bpf.c), its maps and its links are pinned, so they go on
// forwarding while no daemon runs; Open adopts what it finds.
package datapath

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/flowhash"
	"github.com/quartet-lb/quartet/lb"
)

// besideSuffix marks the maps of a layout that has not taken over yet (no dot
// is allowed there).
const besideSuffix = "-beside"

// layoutVersion changes with the meaning of any pinned map's contents.
const layoutVersion = 2

// fragmentLifetime is how long after its first fragment a packet's others are
// let through: Linux's own limit, net.ipv4.ipfrag_time.
const fragmentLifetime = 30 * time.Second

// Config is what a datapath is opened with. Sizes are of memory that is
// reserved at once, but for buckets, whose memory grows with use.
type Config struct {
	// Interfaces that packets come in by. Packets may leave by others, whose
	// drivers must then take redirected frames: one that doesn't (a veth
	// without GRO or an XDP program at its far side) drops them, counted as
	// redirect here, seen by the kernel's tracepoint xdp:xdp_redirect_err only.
	Interfaces []string
	// PinDir is a directory on a BPF filesystem; one is mounted at
	// /sys/fs/bpf if PinDir is below it and it is not. Default
	// /sys/fs/bpf/quartet-mux.
	PinDir string
	// Source4 and Source6 are the outer sources of tunnels. A family without
	// one has no tunnels.
	Source4, Source6 netip.Addr
	Flows            int // connections that the connection table is meant for, 16 bytes each; default 1 M
	VIPs             int // addresses; default 32,768
	Endpoints        int // default 32,768
	DIPs             int // over all endpoints, up to 4 M; default 262,144
	// IdleTrusted is how long a flow that sent more than one packet keeps its
	// connection entry; 1 min to 8 h, default 30 min. IdleUntrusted is the same
	// for one packet; 5 s to 1 h, default 20 s. Granularity 4.3 s.
	IdleTrusted, IdleUntrusted time.Duration
	AnswersPerSecond           int // ICMP errors that each CPU may send; default 1,000
	// Generic attaches by the kernel's generic hook where a driver has no XDP.
	// It costs several times as much a packet.
	Generic bool
}

// endpointRecord is one of muxEndpointLine's entries.
type endpointRecord struct{ Key, Word uint64 }

// Datapath is an attached mux. Its methods may be called concurrently.
type Datapath struct {
	config      Config
	made        bool // by Open: dir
	spec        *ebpf.CollectionSpec
	dir         string // of this layout's maps, below Config.PinDir
	maps        muxMaps
	mux         *ebpf.Program
	trace       *ebpf.Program
	clockOffset time.Duration // of the packet path's clock from Monotonic
	hops        *neighbours

	settings      *muxSettings
	vip4Lines     []muxVip4Line
	vip6Lines     []muxVip6Line
	endpointLines []muxEndpointLine
	dipRecords    []muxDip
	flowLines     []muxFlowLine
	traces        []muxTrace

	exitNames, eventNames []string

	// injectFailure makes a named step of apply fail, for tests.
	injectFailure func(step string) error

	// Taken before mu, which is held for short: a change waits for nobody who
	// reads for long.
	inUse    sync.RWMutex // held while maps and memory are read without mu; Close waits for it
	sweeping sync.Mutex   // one Sweep at a time
	tracing  sync.Mutex   // guards trace and traces

	mu            sync.Mutex
	closed        bool
	vips          map[netip.Addr]*vip
	endpoints     map[lb.Endpoint]*endpoint
	vip4Table     slotTable
	vip6Table     slotTable
	endpointTable slotTable
	dipIDs        ids
	buckets       bucketSpace
	lastSweep     FlowTable
	links         map[string]link.Link
	pending       bool // another layout's program forwards until the first Replace
}

func (c *Config) setDefaults() error {
	if len(c.Interfaces) == 0 {
		return errors.New("interfaces: none; name at least one")
	}
	if c.PinDir == "" {
		c.PinDir = "/sys/fs/bpf/quartet-mux"
	}
	for _, n := range []struct {
		name           string
		value          *int
		otherwise, max int
	}{
		{"flows", &c.Flows, 1 << 20, 1 << 26},
		{"vips", &c.VIPs, 1 << 15, 1 << 24},
		{"endpoints", &c.Endpoints, 1 << 15, 1 << 24},
		{"dips", &c.DIPs, 1 << 18, 1<<22 - 1},
		{"answers_per_second", &c.AnswersPerSecond, 1000, 1e9},
	} {
		if *n.value == 0 {
			*n.value = n.otherwise
		}
		if *n.value < 1 || *n.value > n.max {
			return fmt.Errorf("%s: %d; 1 to %d", n.name, *n.value, n.max)
		}
	}
	for _, t := range []struct {
		name                string
		value               *time.Duration
		otherwise, min, max time.Duration
	}{
		{"idle_trusted", &c.IdleTrusted, 30 * time.Minute, time.Minute, 8 * time.Hour},
		{"idle_untrusted", &c.IdleUntrusted, 20 * time.Second, 5 * time.Second, time.Hour},
	} {
		if *t.value == 0 {
			*t.value = t.otherwise
		}
		if *t.value < t.min || *t.value > t.max {
			return fmt.Errorf("%s: %s; %s to %s", t.name, *t.value, t.min, t.max)
		}
	}
	if c.Source4.IsValid() && !c.Source4.Is4() {
		return fmt.Errorf("source4: %s is not an IPv4 address", c.Source4)
	}
	if c.Source6.IsValid() && !c.Source6.Is6() {
		return fmt.Errorf("source6: %s is not an IPv6 address", c.Source6)
	}
	return nil
}

// Open attaches the mux to the interfaces of the calling thread's network
// namespace. It adopts the pinned datapath of an earlier process if its layout
// is this one's, with its tables, flows and counters. Else it builds one beside,
// which takes over at the first Replace; until then the earlier one forwards.
// No packet is lost either way.
func Open(config Config) (*Datapath, error) {
	if err := config.setDefaults(); err != nil {
		return nil, fmt.Errorf("open mux datapath: %w", err)
	}
	d := &Datapath{
		config:    config,
		vips:      map[netip.Addr]*vip{},
		endpoints: map[lb.Endpoint]*endpoint{},
		links:     map[string]link.Link{},
	}
	if err := d.open(); err != nil {
		d.Close()
		d.discard()
		return nil, fmt.Errorf("open mux datapath: %w", explainError(err))
	}
	return d, nil
}

// discard removes what a failed Open made.
func (d *Datapath) discard() {
	if d.made {
		_ = os.RemoveAll(d.dir)
		_ = os.Remove(d.linkDir()) // these unless something is in them
		_ = os.Remove(d.config.PinDir)
	}
}

func (d *Datapath) open() error {
	// No program of the mux reads the kernel's own types, but host agents' do:
	// one rule for all nodes.
	if !exists("/sys/kernel/btf/vmlinux") {
		return errors.New("this kernel has no BTF; valid: a kernel with CONFIG_DEBUG_INFO_BTF")
	}
	_ = rlimit.RemoveMemlock() // kernels since 5.11 don't need it
	if err := mountBPF(d.config.PinDir); err != nil {
		return err
	}
	spec, err := loadMux()
	if err != nil {
		return err
	}
	d.spec = spec
	d.resize()
	if d.exitNames, err = enumNames(spec, "exit", "EXIT_"); err != nil {
		return err
	}
	if d.eventNames, err = enumNames(spec, "event", "EVENT_"); err != nil {
		return err
	}
	links, err := filepath.Glob(filepath.Join(d.linkDir(), "*"))
	if err != nil {
		return err
	}
	d.dir = filepath.Join(d.config.PinDir, d.layout())
	if !exists(d.dir) && len(links) > 0 {
		d.pending = true
		d.dir += besideSuffix
		if err := os.RemoveAll(d.dir); err != nil {
			return err
		}
	}
	d.made = !exists(d.dir)
	if err := d.load(); err != nil {
		return err
	}
	if err := d.mapAll(); err != nil {
		return err
	}
	if err := d.recover(); err != nil {
		return fmt.Errorf("adopt %s: %w (remove it to start afresh)", d.dir, err)
	}
	d.applySettings()
	if d.hops, err = watchNextHops(d); err != nil {
		return err
	}
	if d.pending {
		return nil
	}
	if err := d.attach(); err != nil {
		return err
	}
	return d.removeOtherLayouts()
}

// resize sets the maps' sizes by the configuration.
func (d *Datapath) resize() {
	m := d.spec.Maps
	d.vip4Table = newSlotTable("IPv4 VIP addresses", d.config.VIPs, vips4PerLine, probeLines)
	d.vip6Table = newSlotTable("IPv6 VIP addresses", d.config.VIPs, vips6PerLine, probeLinesVIP6)
	d.endpointTable = newSlotTable("endpoints", d.config.Endpoints, endpointsLine, probeLines)
	m[muxMapVips4].MaxEntries = d.vip4Table.mask + 1
	m[muxMapVips6].MaxEntries = d.vip6Table.mask + 1
	m[muxMapEndpoints].MaxEntries = d.endpointTable.mask + 1
	m[muxMapDips].MaxEntries = uint32(d.config.DIPs) + 1
	m[muxMapCounters].MaxEntries = uint32(d.config.DIPs) + 1
	m[muxMapFlows].MaxEntries = d.flowLineCount()
	d.dipIDs = ids{next: 1, end: uint32(d.config.DIPs) + 1}
}

// flowLineCount is the power of two that leaves a line's eight entries four
// flows on average or fewer: beyond that, lines overflow (package test
// TestFlowTableOverflow has the numbers).
func (d *Datapath) flowLineCount() uint32 {
	lines := uint32(256)
	for int(lines)*4 < d.config.Flows {
		lines *= 2
	}
	return lines
}

// layout names what the pinned maps are like.
func (d *Datapath) layout() string {
	h := sha256.New()
	names := make([]string, 0, len(d.spec.Maps))
	for name := range d.spec.Maps {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		m := d.spec.Maps[name]
		fmt.Fprintln(h, name, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags)
	}
	return fmt.Sprintf("v%d-%x", layoutVersion, h.Sum(nil)[:4])
}

func (d *Datapath) linkDir() string { return filepath.Join(d.config.PinDir, "links") }

// load loads the program over the pinned maps, making those that are not there.
func (d *Datapath) load() error {
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return err
	}
	for name, m := range d.spec.Maps {
		if strings.HasPrefix(name, ".") || name == muxMapTraces || name == muxMapNextHops {
			continue
		}
		m.Name = name
		m.Pinning = ebpf.PinByName
	}
	var tick unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &tick); err != nil {
		return fmt.Errorf("length of a tick: %w", err)
	}
	for name, value := range map[string]any{
		muxVarFlowLineMask:     d.flowLineCount() - 1,
		muxVarVip4LineMask:     d.vip4Table.mask,
		muxVarVip6LineMask:     d.vip6Table.mask,
		muxVarEndpointLineMask: d.endpointTable.mask,
		muxVarTickNs:           uint64(tick.Nano()),
	} {
		if err := d.spec.Variables[name].Set(value); err != nil {
			return err
		}
	}
	var objects muxObjects
	if err := d.spec.LoadAndAssign(&objects, &ebpf.CollectionOptions{
		Maps: ebpf.MapOptions{PinPath: d.dir},
	}); err != nil {
		return err
	}
	d.mux, d.maps = objects.Mux, objects.muxMaps
	defer objects.ReadClock.Close()
	return d.readOffset(objects.ReadClock)
}

func (d *Datapath) mapAll() error {
	settings, err := mapMemory[muxSettings](d.maps.Config)
	if err != nil {
		return err
	}
	d.settings = &settings[0]
	if d.vip4Lines, err = mapMemory[muxVip4Line](d.maps.Vips4); err != nil {
		return err
	}
	if d.vip6Lines, err = mapMemory[muxVip6Line](d.maps.Vips6); err != nil {
		return err
	}
	if d.endpointLines, err = mapMemory[muxEndpointLine](d.maps.Endpoints); err != nil {
		return err
	}
	if d.dipRecords, err = mapMemory[muxDip](d.maps.Dips); err != nil {
		return err
	}
	if d.flowLines, err = mapMemory[muxFlowLine](d.maps.Flows); err != nil {
		return err
	}
	d.traces, err = mapMemory[muxTrace](d.maps.Traces)
	return err
}

func (d *Datapath) applySettings() {
	s := d.settings
	var none [4]uint32
	source4, source6 := none, none
	if d.config.Source4.IsValid() {
		source4 = addrWords(d.config.Source4)
	}
	if d.config.Source6.IsValid() {
		source6 = addrWords(d.config.Source6)
	}
	storeUint32(&s.Source4, source4[0])
	for i, w := range source6 {
		storeUint32(&s.Source6[i], w)
	}
	storeUint32(&s.IdleTrusted, uint32(d.config.IdleTrusted>>flowTimeUnitBits))
	storeUint32(&s.IdleUntrusted, uint32(d.config.IdleUntrusted>>flowTimeUnitBits))
	storeUint64(&s.AnswersPerSecond, uint64(d.config.AnswersPerSecond))
	storeUint64(&s.FragmentLifetime, uint64(fragmentLifetime))
}

// setSeed changes the flow hash's key. Flows move where it differs.
func (d *Datapath) setSeed(seed flowhash.Seed) {
	storeUint64(&d.settings.Seed.K0, binary.LittleEndian.Uint64(seed[:8]))
	storeUint64(&d.settings.Seed.K1, binary.LittleEndian.Uint64(seed[8:]))
}

// recover learns from adopted maps what ids are in use. Names come with the
// next Replace.
func (d *Datapath) recover() error {
	bySlot := d.recoverSlots()
	var blocks []block
	for _, e := range bySlot {
		if e.table.size > 0 {
			blocks = append(blocks, e.table)
		}
	}
	used := map[uint32]bool{}
	for id := range d.dipRecords {
		r := &d.dipRecords[id]
		if r.Endpoint == 0 {
			continue
		}
		e := bySlot[r.Endpoint-1]
		if e == nil {
			storeUint32(&r.Endpoint, 0)
			continue
		}
		dip := d.readDIP(r)
		e.dips[dip] = uint32(id)
		e.DIPs = append(e.DIPs, dip)
		used[uint32(id)] = true
	}
	// Connection entries may still name a DIP that died before this process.
	for i := range d.flowLines {
		for _, entry := range d.flowLines[i].Entry {
			if id := flowDIP(entry); id != 0 && !used[id] && int(id) < len(d.dipRecords) {
				used[id] = true
				d.dipIDs.retire(id)
			}
		}
	}
	d.dipIDs.use(1, used)

	for i := range uint32(maxChunks) {
		var m *ebpf.Map
		if err := d.maps.Chunks.Lookup(i, &m); errors.Is(err, ebpf.ErrKeyNotExist) {
			break
		} else if err != nil {
			return err
		}
		lines, err := mapMemory[muxBucketLine](m)
		m.Close()
		if err != nil {
			return err
		}
		d.buckets.chunks = append(d.buckets.chunks, lines)
	}
	return d.buckets.use(blocks)
}

// attach puts the program on every interface, in place of the one of an
// earlier process, and takes it off those no longer configured. If one fails,
// no other has a program that had none before.
func (d *Datapath) attach() error {
	if err := os.MkdirAll(d.linkDir(), 0o700); err != nil {
		return err
	}
	var fresh []string
	for _, name := range d.config.Interfaces {
		isFresh, err := d.attachTo(name)
		if err != nil {
			for _, other := range fresh {
				_ = unpinLink(filepath.Join(d.linkDir(), other)) // the first error counts
				d.links[other].Close()
				delete(d.links, other)
			}
			return fmt.Errorf("attach mux to %s: %w", name, err)
		}
		if isFresh {
			fresh = append(fresh, name)
		}
	}
	pins, err := os.ReadDir(d.linkDir())
	if err != nil {
		return err
	}
	for _, pin := range pins {
		if !slices.Contains(d.config.Interfaces, pin.Name()) {
			if err := unpinLink(filepath.Join(d.linkDir(), pin.Name())); err != nil {
				return fmt.Errorf("detach mux from %s: %w", pin.Name(), err)
			}
		}
	}
	return nil
}

// attachTo says whether name had no program of a mux before.
func (d *Datapath) attachTo(name string) (fresh bool, err error) {
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return false, errors.New("no such interface")
	}
	if err := enableForwarding(name); err != nil {
		return false, err
	}
	pin := filepath.Join(d.linkDir(), name)
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		info, err := l.Info()
		if err == nil && info.XDP() != nil && int(info.XDP().Ifindex) == iface.Index {
			if err := l.Update(d.mux); err != nil {
				l.Close()
				return false, err
			}
			d.links[name] = l
			return false, nil
		}
		// The interface that it was on is gone.
		l.Close()
		if err := os.Remove(pin); err != nil {
			return false, err
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return false, err
	}
	flags := link.XDPDriverMode
	l, err := link.AttachXDP(link.XDPOptions{Program: d.mux, Interface: iface.Index, Flags: flags})
	if err != nil && d.config.Generic && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, link.ErrNotSupported)) {
		l, err = link.AttachXDP(link.XDPOptions{Program: d.mux, Interface: iface.Index, Flags: link.XDPGenericMode})
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, link.ErrNotSupported):
		return false, errors.New("its driver has no XDP (generic: true takes the kernel's slower hook)")
	case errors.Is(err, unix.ERANGE):
		return false, fmt.Errorf("its MTU of %d is more than its driver's XDP can take", iface.MTU)
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		return false, errors.New("another XDP program is on it")
	case err != nil:
		return false, err
	}
	if err := l.Pin(pin); err != nil {
		l.Close()
		return false, err
	}
	d.links[name] = l
	return true, nil
}

// attachPending lets this datapath take over from another layout's, once it
// has its tables. Its maps get their name before packets go by them, so that
// whenever this process ends, the next finds complete tables.
func (d *Datapath) attachPending() error {
	if !d.pending {
		return nil
	}
	final := strings.TrimSuffix(d.dir, besideSuffix)
	if d.dir != final {
		if err := os.Rename(d.dir, final); err != nil {
			return err
		}
		d.dir = final
	}
	if err := d.attach(); err != nil {
		return err
	}
	d.pending = false
	return d.removeOtherLayouts()
}

func (d *Datapath) removeOtherLayouts() error {
	dirs, err := filepath.Glob(filepath.Join(d.config.PinDir, "v*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if dir != d.dir {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
		}
	}
	return nil
}

// Program is the loaded packet path, for those who run it on packets of their own.
func (d *Datapath) Program() *ebpf.Program { return d.mux }

// Close lets go of the datapath, which stays attached and goes on forwarding.
func (d *Datapath) Close() error {
	d.inUse.Lock()
	defer d.inUse.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	if d.hops != nil {
		d.hops.close()
	}
	for _, l := range d.links {
		l.Close()
	}
	if d.settings != nil {
		unmap(unsafe.Slice(d.settings, 1))
	}
	unmap(d.vip4Lines)
	unmap(d.vip6Lines)
	unmap(d.endpointLines)
	unmap(d.dipRecords)
	unmap(d.flowLines)
	unmap(d.traces)
	for _, lines := range d.buckets.chunks {
		unmap(lines)
	}
	if d.trace != nil {
		d.trace.Close()
	}
	if d.mux != nil {
		d.mux.Close()
	}
	if d.maps.Config != nil {
		return d.maps.Close()
	}
	return nil
}

func (d *Datapath) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// Detach takes the program off all interfaces and removes everything pinned.
func (d *Datapath) Detach() error {
	if err := d.Close(); err != nil {
		return err
	}
	return Detach(d.config.PinDir)
}

// Detach removes what any process pinned in pinDir; the programs come off
// their interfaces.
func Detach(pinDir string) error {
	pins, err := filepath.Glob(filepath.Join(pinDir, "links", "*"))
	if err != nil {
		return fmt.Errorf("detach mux: %w", err)
	}
	for _, pin := range pins {
		if err := unpinLink(pin); err != nil {
			return fmt.Errorf("detach mux from %s: %w", filepath.Base(pin), err)
		}
	}
	if err := os.RemoveAll(pinDir); err != nil {
		return fmt.Errorf("detach mux: %w", err)
	}
	return nil
}

// unpinLink detaches at once, though a process may still hold the link.
func unpinLink(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	defer l.Close()
	if x, ok := l.(interface{ Detach() error }); ok {
		_ = x.Detach() // fails where the interface is gone
	}
	return os.Remove(pin)
}

// mountBPF makes sure that dir can hold pins.
func mountBPF(dir string) error {
	const bpffs = "/sys/fs/bpf"
	existing := dir
	for !exists(existing) && existing != "/" {
		existing = filepath.Dir(existing)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(existing, &fs); err != nil {
		return fmt.Errorf("pin directory %s: %w", dir, err)
	}
	if fs.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	if !strings.HasPrefix(dir, bpffs+"/") {
		return fmt.Errorf("pin directory %s: not on a BPF filesystem (there is one at %s)", dir, bpffs)
	}
	if err := unix.Mount("bpf", bpffs, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("mount BPF filesystem on %s: %w", bpffs, err)
	}
	return nil
}

// enableForwarding lets the kernel's FIB be asked on an interface's behalf.
func enableForwarding(name string) error {
	for _, family := range []string{"ipv4", "ipv6"} {
		path := filepath.Join("/proc/sys/net", family, "conf", name, "forwarding")
		if !exists(path) {
			continue // IPv6 is off
		}
		if err := os.WriteFile(path, []byte("1"), 0); err != nil {
			return fmt.Errorf("enable %s forwarding: %w", family, err)
		}
	}
	return nil
}

// explainError puts the usual reasons in one line.
func explainError(err error) error {
	var verifier *ebpf.VerifierError
	switch {
	case errors.As(err, &verifier):
		return fmt.Errorf("this kernel's verifier refuses the program (Linux 6.6 or newer is needed): %w", err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: CAP_BPF, CAP_NET_ADMIN, CAP_NET_RAW and CAP_PERFMON are needed (and memlock, before Linux 5.11)", err)
	case errors.Is(err, ebpf.ErrMapIncompatible):
		return fmt.Errorf("%w: the pin directory belongs to another program", err)
	}
	return err
}

func enumNames(spec *ebpf.CollectionSpec, name, prefix string) ([]string, error) {
	var enum *btf.Enum
	if err := spec.Types.TypeByName(name, &enum); err != nil {
		return nil, fmt.Errorf("read names of %s: %w", name, err)
	}
	var names []string
	for _, v := range enum.Values {
		if v.Name != prefix+"COUNT" {
			names = append(names, strings.ToLower(strings.TrimPrefix(v.Name, prefix)))
		}
	}
	return names, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// mapMemory maps an array map's values into memory.
func mapMemory[T any](m *ebpf.Map) ([]T, error) {
	var t T
	n := int(m.MaxEntries())
	if int(m.ValueSize()) != int(unsafe.Sizeof(t)) {
		return nil, fmt.Errorf("map %s: values of %d bytes, not %d", m, m.ValueSize(), unsafe.Sizeof(t))
	}
	b, err := unix.Mmap(m.FD(), 0, n*int(unsafe.Sizeof(t)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("memory-map %s: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&b[0])), n), nil
}

func unmap[T any](s []T) {
	if len(s) > 0 {
		_ = unix.MunmapPtr(unsafe.Pointer(&s[0]), uintptr(len(s))*unsafe.Sizeof(s[0]))
	}
}

func storeUint64(p *uint64, v uint64) { atomic.StoreUint64(p, v) }
func storeUint32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }

// htons turns a port to network byte order or back.
func htons(v uint16) uint16 { return v<<8 | v>>8 }

// addrWords is an address as the program holds it.
func addrWords(a netip.Addr) [4]uint32 {
	var b [16]byte
	if a.Is4() {
		four := a.As4()
		copy(b[:], four[:])
	} else {
		b = a.As16()
	}
	return [4]uint32{
		binary.NativeEndian.Uint32(b[0:]), binary.NativeEndian.Uint32(b[4:]),
		binary.NativeEndian.Uint32(b[8:]), binary.NativeEndian.Uint32(b[12:]),
	}
}

func wordsAddr(w [4]uint32, is6 bool) netip.Addr {
	var b [16]byte
	for i, v := range w {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	if is6 {
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte(b[:4]))
}
