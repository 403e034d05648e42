// Package datapath is the host agent's packet path: it takes load-balanced
// packets out of their tunnels, translates VIPs to DIPs, and translates the
// replies back so that they go straight to the client (Ananta section 3.4.1).
package datapath

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/lb"
)

// Config says where and how large the packet path is.
type Config struct {
	// Interfaces are the uplinks by name, at least one: where tunnelled packets
	// come in and replies leave. Their drivers must run XDP natively. Replies of
	// more than 64 KiB (BIG TCP, a raised gso_max_size) are not read: leave it off.
	// A VM's interface is one as well if the VM is to be a client of VIPs that
	// servers of its own host serve: those replies leave there.
	Interfaces []string
	// PinDir is a directory on bpffs that keeps programs and maps alive while
	// no daemon runs. Default DefaultPinDir.
	PinDir string
	// MSS is the highest TCP maximum segment size, in bytes, that servers may
	// announce to clients, 88..65495. 0 computes it for each connection: the
	// uplink's MTU less the tunnel headers its SYN came with.
	MSS uint16
	// Flows is how many trusted flows are remembered, 1024..16777216, at about
	// 112 bytes each; the least recently used goes first. Default DefaultFlows.
	// A quarter as many untrusted ones (of which one packet was seen) have a
	// table of their own.
	Flows uint32
	// Rules is how many rules there may be, 1..1048576. Default DefaultRules.
	Rules uint32
	// Meters is how many (VIP, peer prefix, direction) are counted; the least
	// recently used goes first. Default DefaultMeters.
	Meters uint32
}

// Defaults of Config.
const (
	DefaultPinDir = "/sys/fs/bpf/quartet/hostagent"
	DefaultFlows  = 256 << 10
	DefaultRules  = 64 << 10
	DefaultMeters = 16 << 10
)

// Rule sends what arrives in a tunnel to Tunnel for Endpoint to a DIP (Ananta
// section 3.4.1). Tunnel and Endpoint are the key.
type Rule struct {
	Tunnel   netip.Addr // outer destination, of either family
	Endpoint lb.Endpoint
	DIP      netip.Addr // of the VIP's family
	DIPPort  uint16     // 0 keeps the packet's port
}

// String is "10.1.3.11: TCP 203.0.113.10:80 to 10.1.3.11:8080".
func (r Rule) String() string {
	return fmt.Sprintf("%s: %s to %s", r.Tunnel, r.Endpoint, lb.DIP{Addr: r.DIP, Port: r.DIPPort})
}

// Delta is a change to the rules. Of a rule to delete only the key matters;
// deleting one that is not there is no error.
type Delta struct {
	Put, Delete []Rule
}

// Meter counts the traffic between a VIP and a prefix of peers since the maps
// were made. Bytes are those of the IP packets without tunnel headers, each
// segment with its own headers.
type Meter struct {
	VIP     netip.Addr
	Peer    netip.Prefix // IPv4 /24, IPv6 /48
	Inbound bool         // client to VIP
	Packets uint64
	Bytes   uint64
}

// FlowStats says how full the flow tables are.
type FlowStats struct {
	Trusted, TrustedMax     uint64
	Untrusted, UntrustedMax uint64
	Created                 uint64 // by a first packet: TCP SYN, or UDP
	Recreated               uint64 // by a TCP packet in mid-connection
	Promoted                uint64 // untrusted to trusted
	Clamped                 uint64 // SYNs and SYN-ACKs whose MSS was lowered
	Bytes                   uint64 // kernel memory of both tables
}

// layoutVersion changes when a map's contents change meaning though its sizes
// stay the same; sizes are part of the layout's name by themselves.
const layoutVersion = 1

// Datapath is the packet path of one host. Its methods may be called by
// several goroutines at once.
type Datapath struct {
	config     Config
	objects    agentObjects
	exitLabels []string
	dir        string // of this layout's maps, below config.PinDir

	mu       sync.Mutex
	uplinks  []uplink
	rules    map[ruleKey]targets // what the map holds
	used     references
	previous []string // directories of other layouts' maps, until the links left them
	running  string   // the one of previous that links ran over when this was opened; "" if none did
}

// uplink is one interface with its two links.
type uplink struct {
	name  string
	index int
	links []*attachment
}

// attachment is one program's pinned link on one interface.
type attachment struct {
	program *ebpf.Program
	pin     string
	link    link.Link
	made    bool // by this process
	behind  bool // runs a program over another layout's maps, or another attachment does
}

// Open attaches the packet path to its interfaces. What an earlier Open pinned
// in the same layout goes on with its rules, flows and counters, under this
// binary's programs. With another layout (a newer binary, other sizes) the old
// programs go on until the first Replace has filled the maps beside and swaps
// them, flows included. No packet is lost either way. An interface that Config no longer names
// is detached. Errors are one line and leave everything as it was.
func Open(c Config) (*Datapath, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	uplinks, err := c.uplinks()
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		return nil, errors.New("load programs: this kernel has no BTF; valid: a kernel with CONFIG_DEBUG_INFO_BTF")
	}
	if err := mountBPFFS(c.PinDir); err != nil {
		return nil, err
	}

	d := &Datapath{config: c}
	fresh, err := d.load()
	if err != nil {
		return nil, err
	}
	if err := d.open(uplinks); err != nil {
		for _, u := range d.uplinks {
			for _, a := range u.links {
				if a.made {
					_ = os.Remove(a.pin)
				}
			}
		}
		_ = d.Close()
		if fresh {
			_ = os.RemoveAll(d.dir)
		}
		return nil, err
	}
	return d, nil
}

func (d *Datapath) open(uplinks []uplink) error {
	if err := d.readRules(); err != nil {
		return err
	}
	entries, err := os.ReadDir(d.config.PinDir)
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	wanted := map[string]bool{}
	for _, u := range uplinks {
		for _, a := range u.attachments(d) {
			wanted[filepath.Base(a.pin)] = true
		}
	}
	for _, e := range entries {
		if dir := filepath.Join(d.config.PinDir, e.Name()); e.IsDir() && dir != d.dir {
			d.previous = append(d.previous, dir)
		}
	}
	if err := d.attach(uplinks); err != nil {
		return err
	}
	if d.running != "" && len(d.rules) == 0 {
		if err := d.inheritRules(d.running); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if name := e.Name(); !e.IsDir() && !wanted[name] {
			if err := os.Remove(filepath.Join(d.config.PinDir, name)); err != nil {
				return fmt.Errorf("detach from an interface that is no longer configured: %w", err)
			}
		}
	}
	for _, u := range d.uplinks {
		for _, a := range u.links {
			if a.behind {
				return nil
			}
		}
	}
	return d.removePrevious()
}

func (c *Config) complete() error {
	if c.PinDir == "" {
		c.PinDir = DefaultPinDir
	}
	if !filepath.IsAbs(c.PinDir) || strings.Contains(filepath.Base(c.PinDir), ".") {
		return fmt.Errorf("pin directory %q: valid: an absolute path whose last name has no dot", c.PinDir)
	}
	if c.MSS != 0 && (c.MSS < 88 || c.MSS > 65495) {
		return fmt.Errorf("mss %d: valid: 88 to 65495, or 0 for the uplink's MTU less the tunnel", c.MSS)
	}
	for _, f := range []struct {
		name         string
		value        *uint32
		least, most  uint32
		defaultValue uint32
	}{
		{"flows", &c.Flows, 1 << 10, 1 << 24, DefaultFlows},
		{"rules", &c.Rules, 1, 1 << 20, DefaultRules},
		{"meters", &c.Meters, 1 << 8, 1 << 20, DefaultMeters},
	} {
		if *f.value == 0 {
			*f.value = f.defaultValue
		}
		if *f.value < f.least || *f.value > f.most {
			return fmt.Errorf("%s %d: valid: %d to %d", f.name, *f.value, f.least, f.most)
		}
	}
	return nil
}

func (c *Config) uplinks() ([]uplink, error) {
	if len(c.Interfaces) == 0 {
		return nil, errors.New("interfaces: none; valid: the names of the host's uplinks")
	}
	var all []uplink
	for i, name := range c.Interfaces {
		if slices.Contains(c.Interfaces[:i], name) {
			return nil, fmt.Errorf("interfaces: %q is named twice", name)
		}
		ifc, err := net.InterfaceByName(name)
		if err != nil {
			return nil, fmt.Errorf("interfaces: %q is no interface of this host", name)
		}
		all = append(all, uplink{name: name, index: ifc.Index})
	}
	return all, nil
}

// mountBPFFS makes dir on a BPF file system, mounting one at /sys/fs/bpf if
// dir is below it and none is there.
func mountBPFFS(dir string) error {
	const standard = "/sys/fs/bpf"
	onBPFFS := func() bool {
		for p := dir; ; p = filepath.Dir(p) {
			var s unix.Statfs_t
			if err := unix.Statfs(p, &s); err == nil {
				return s.Type == unix.BPF_FS_MAGIC
			}
			if p == "/" {
				return false
			}
		}
	}
	if !onBPFFS() {
		if !strings.HasPrefix(dir, standard+"/") {
			return fmt.Errorf("pin directory %s is on no BPF file system; valid: a directory below %s", dir, standard)
		}
		if err := unix.Mount("bpf", standard, "bpf", 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", standard, err)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make pin directory: %w", err)
	}
	return nil
}

// specification is the programs and maps as configured, and the name of their
// layout's directory.
func (d *Datapath) specification() (*ebpf.CollectionSpec, string, error) {
	spec, err := loadAgent()
	if err != nil {
		return nil, "", fmt.Errorf("read programs: %w", err)
	}
	for name, n := range map[string]uint32{
		"tunnels":   d.config.Rules,
		"rules":     d.config.Rules,
		"dips":      d.config.Rules * uint32(len(targets{})),
		"flows":     d.config.Flows,
		"untrusted": d.config.Flows / 4,
		"meters":    d.config.Meters,
	} {
		spec.Maps[name].MaxEntries = n
	}
	if err := spec.Variables["max_mss"].Set(d.config.MSS); err != nil {
		return nil, "", fmt.Errorf("set mss: %w", err)
	}
	layout := sha256.New()
	fmt.Fprintln(layout, layoutVersion)
	for _, name := range slices.Sorted(maps.Keys(spec.Maps)) {
		if m := spec.Maps[name]; !strings.HasPrefix(name, ".") && !strings.HasPrefix(name, "former_") {
			m.Pinning = ebpf.PinByName
			fmt.Fprintln(layout, name, m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags)
		}
	}
	return spec, fmt.Sprintf("maps-%x", layout.Sum(nil)[:6]), nil
}

// load makes this layout's maps, or adopts them, and loads the programs over
// them. It reports whether the maps are fresh.
func (d *Datapath) load() (fresh bool, err error) {
	spec, layout, err := d.specification()
	if err != nil {
		return false, err
	}
	if d.exitLabels, err = labels(spec, "exit"); err != nil {
		return false, err
	}
	d.dir = filepath.Join(d.config.PinDir, layout)
	if err := os.Mkdir(d.dir, 0o700); err == nil {
		fresh = true
	} else if !errors.Is(err, os.ErrExist) {
		return false, fmt.Errorf("make pin directory: %w", err)
	}

	// Kernels before 5.11 charge maps to this limit; later ones ignore it.
	_ = rlimit.RemoveMemlock()
	err = spec.LoadAndAssign(&d.objects, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: d.dir}})
	if err == nil {
		return fresh, nil
	}
	if fresh {
		_ = os.RemoveAll(d.dir)
	}
	switch {
	case errors.Is(err, unix.EPERM):
		return false, errors.New("load programs: not permitted; valid: root, or the capabilities CAP_BPF and CAP_NET_ADMIN")
	case errors.Is(err, unix.ENOMEM):
		return false, fmt.Errorf("load programs: no memory for %d flows and %d rules", d.config.Flows, d.config.Rules)
	}
	return false, fmt.Errorf("load programs: %w", err)
}

// labels are an enum's names in the object, without prefix and in lower case,
// by value; its last name is the count.
func labels(spec *ebpf.CollectionSpec, enum string) ([]string, error) {
	var e *btf.Enum
	if err := spec.Types.TypeByName(enum, &e); err != nil {
		return nil, fmt.Errorf("read names of %s: %w", enum, err)
	}
	names := make([]string, len(e.Values)-1)
	for _, v := range e.Values {
		if v.Value < uint64(len(names)) {
			names[v.Value] = strings.ToLower(strings.TrimPrefix(v.Name, strings.ToUpper(enum)+"_"))
		}
	}
	return names, nil
}

func (u *uplink) attachments(d *Datapath) []*attachment {
	// Names on bpffs have no dots, interfaces' may. Replies are translated
	// before anything comes in that they could answer.
	return []*attachment{
		{program: d.objects.Outbound, pin: filepath.Join(d.config.PinDir, fmt.Sprintf("outbound-%d", u.index))},
		{program: d.objects.Inbound, pin: filepath.Join(d.config.PinDir, fmt.Sprintf("inbound-%d", u.index))},
	}
}

// attach puts the programs on each uplink: in place of those on a pinned link,
// else by a link of their own.
func (d *Datapath) attach(uplinks []uplink) error {
	d.uplinks = uplinks
	for i := range d.uplinks {
		u := &d.uplinks[i]
		for _, a := range u.attachments(d) {
			if err := a.adopt(d, u.index); err != nil {
				return fmt.Errorf("adopt the link pinned for %s: %w", u.name, err)
			}
			if a.link == nil {
				if err := a.attach(u); err != nil {
					return err
				}
			}
			u.links = append(u.links, a)
		}
	}
	// A daemon that died while it moved left some behind: the rest move again
	// with them, because their flows are in either layout's maps.
	behind := false
	for _, u := range d.uplinks {
		for _, a := range u.links {
			behind = behind || a.behind
		}
	}
	for _, u := range d.uplinks {
		for _, a := range u.links {
			a.behind = behind && !a.made
		}
	}
	// Only when every attachment is sure to stand do running programs change.
	for _, u := range d.uplinks {
		for _, a := range u.links {
			if !a.behind && !a.made {
				if err := a.link.Update(a.program); err != nil {
					return fmt.Errorf("swap programs on %s: %w", u.name, err)
				}
			}
		}
	}
	return nil
}

// adopt opens the pinned link if there is one and its interface still exists.
func (a *attachment) adopt(d *Datapath, index int) error {
	l, err := link.LoadPinnedLink(a.pin, nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	info, err := l.Info()
	if err != nil {
		return errors.Join(err, l.Close())
	}
	var at uint32
	if x := info.XDP(); x != nil {
		at = x.Ifindex
	} else if x := info.TCX(); x != nil {
		at = x.Ifindex
	}
	if at != uint32(index) {
		// The interface went, and another took its number.
		return errors.Join(os.Remove(a.pin), l.Close())
	}
	a.link = l
	used, err := mapsOf(info.Program)
	if err != nil {
		return err
	}
	own, err := d.objects.Flows.Info()
	if err != nil {
		return err
	}
	id, _ := own.ID()
	former, err := d.former(used)
	a.behind = former != nil || !slices.Contains(used, id)
	return errors.Join(err, former.close())
}

// mapsOf are the maps that a program uses.
func mapsOf(id ebpf.ProgramID) ([]ebpf.MapID, error) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return nil, err
	}
	info, err := program.Info()
	if err := errors.Join(err, program.Close()); err != nil {
		return nil, err
	}
	used, _ := info.MapIDs()
	return used, nil
}

// tables are a layout's flow tables by the map's name.
type tables map[string]*ebpf.Map

func (t tables) close() error {
	var errs []error
	for _, m := range t {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// openTables opens the flow tables pinned in dir.
func openTables(dir string) (tables, error) {
	t := tables{}
	for _, name := range []string{"flows", "untrusted"} {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("open flows of another layout: %w", err), t.close())
		}
		t[name] = m
	}
	return t, nil
}

// former are the other layout's flow tables among the maps that a program uses,
// or nil if there are none.
func (d *Datapath) former(used []ebpf.MapID) (tables, error) {
	for _, dir := range d.previous {
		t, err := openTables(dir)
		if errors.Is(err, os.ErrNotExist) {
			continue // its daemon died while it made them
		}
		if err != nil {
			return nil, err
		}
		info, err := t["flows"].Info()
		if err != nil {
			return nil, errors.Join(err, t.close())
		}
		if id, _ := info.ID(); slices.Contains(used, id) {
			d.running = dir
			return t, nil
		}
		if err := t.close(); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func (a *attachment) attach(u *uplink) error {
	var err error
	if a.program.Type() == ebpf.XDP {
		// Not generic XDP: it runs after GRO has joined encapsulated segments.
		a.link, err = link.AttachXDP(link.XDPOptions{
			Program: a.program, Interface: u.index, Flags: link.XDPDriverMode,
		})
	} else {
		a.link, err = link.AttachTCX(link.TCXOptions{
			Program: a.program, Interface: u.index, Attach: ebpf.AttachTCXEgress,
		})
	}
	switch {
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EEXIST):
		return fmt.Errorf("attach host agent to %s: another XDP program is attached; detach it first", u.name)
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, ebpf.ErrNotSupported):
		return fmt.Errorf("attach host agent to %s: kernel or driver lacks support; valid: a driver with native XDP, Linux 6.6 or later for tcx", u.name)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("attach host agent to %s: not permitted; valid: root, or CAP_BPF and CAP_NET_ADMIN", u.name)
	case err != nil:
		return fmt.Errorf("attach host agent to %s: %w", u.name, err)
	}
	if err := a.link.Pin(a.pin); err != nil {
		return errors.Join(fmt.Errorf("pin link of %s: %w", u.name, err), a.link.Close())
	}
	a.made = true
	return nil
}

// swap moves the links that run over another layout's maps to this one's, with
// the flows that those know, and removes those maps.
func (d *Datapath) swap() error {
	var out, in []*attachment
	for _, u := range d.uplinks {
		for _, a := range u.links {
			if a.behind && a.program == d.objects.Outbound {
				out = append(out, a)
			} else if a.behind {
				in = append(in, a)
			}
		}
	}
	if len(out)+len(in) > 0 {
		if err := d.move(out, in); err != nil {
			return fmt.Errorf("move to this layout's maps: %w", err)
		}
	}
	return d.removePrevious()
}

// move swaps programs so that at each instant a flow's replies are translated,
// whichever maps its packets in have reached: before inbound traffic moves,
// outbound reads both layouts' flows.
func (d *Datapath) move(out, in []*attachment) error {
	var former tables
	for _, a := range slices.Concat(out, in) {
		info, err := a.link.Info()
		if err != nil {
			return err
		}
		used, err := mapsOf(info.Program)
		if err != nil {
			return err
		}
		if former, err = d.former(used); err != nil {
			return err
		}
		if former != nil {
			break
		}
	}
	defer func() { _ = former.close() }()
	if !former.like(tables{"flows": d.objects.Flows, "untrusted": d.objects.Untrusted}) {
		// Entries that this binary can't read. Flows begin again with their clients' next packets.
		former = nil
	}
	if err := d.copyFlows(former, ebpf.UpdateAny); err != nil {
		return err
	}
	if former != nil {
		both, err := d.loadMoving(former)
		if err != nil {
			return err
		}
		defer func() { _ = both.Close() }()
		for _, a := range out {
			if err := a.link.Update(both); err != nil {
				return err
			}
		}
	}
	for _, a := range in {
		if err := a.link.Update(a.program); err != nil {
			return err
		}
	}
	// Those that began while the others were copied.
	if err := d.copyFlows(former, ebpf.UpdateNoExist); err != nil {
		return err
	}
	for _, a := range out {
		if err := a.link.Update(a.program); err != nil {
			return err
		}
	}
	for _, a := range slices.Concat(out, in) {
		a.behind = false
	}
	return nil
}

// like says whether t's entries look like others'.
func (t tables) like(others tables) bool {
	for name, m := range t {
		o := others[name]
		if m.Type() != o.Type() || m.Flags() != o.Flags() || m.KeySize() != o.KeySize() || m.ValueSize() != o.ValueSize() {
			return false
		}
	}
	return true
}

// loadMoving loads outbound so that it reads former flows as well.
func (d *Datapath) loadMoving(former tables) (*ebpf.Program, error) {
	spec, _, err := d.specification()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables["moving"].Set(uint8(1)); err != nil {
		return nil, err
	}
	replacements := map[string]*ebpf.Map{}
	for name, m := range former {
		spec.Maps["former_"+name].MaxEntries = m.MaxEntries()
		replacements["former_"+name] = m
	}
	var p struct {
		Outbound *ebpf.Program `ebpf:"outbound"`
	}
	err = spec.LoadAndAssign(&p, &ebpf.CollectionOptions{
		Maps: ebpf.MapOptions{PinPath: d.dir}, MapReplacements: replacements,
	})
	return p.Outbound, err
}

// copyFlows takes over another layout's flows. Without them a server that
// speaks first would be heard as its DIP until the client's next packet.
func (d *Datapath) copyFlows(former tables, flags ebpf.MapUpdateFlags) error {
	for name, from := range former {
		to := d.objects.Flows
		if name == "untrusted" {
			to = d.objects.Untrusted
		}
		if err := eachFlow(from, func(keys []agentFlowKey, values []agentFlow) error {
			for i := range keys {
				if err := to.Update(&keys[i], &values[i], flags); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
					return err
				}
			}
			return nil
		}); err != nil {
			return fmt.Errorf("copy flows of another layout: %w", err)
		}
	}
	return nil
}

func (d *Datapath) removePrevious() error {
	for _, dir := range d.previous {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove maps of another layout: %w", err)
		}
	}
	d.previous = nil
	return nil
}

// Close lets go of programs and maps and leaves them running.
func (d *Datapath) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for _, u := range d.uplinks {
		for _, a := range u.links {
			errs = append(errs, a.link.Close())
		}
	}
	d.uplinks = nil
	return errors.Join(append(errs, d.objects.Close())...)
}

// Detach closes the packet path and takes it off; see the function Detach.
func (d *Datapath) Detach() error {
	if err := d.Close(); err != nil {
		return err
	}
	return Detach(d.config.PinDir)
}

// ours are the names that Open makes in a pin directory.
var ours = regexp.MustCompile(`^(inbound|outbound)-[0-9]+$|^maps-[0-9a-f]{12}$`)

// Detach takes the packet path that is pinned in pinDir off all interfaces and
// removes all that is pinned: from then on this host answers for no VIP, also
// if a daemon still runs. A directory that holds anything else is refused and
// left as it is.
func Detach(pinDir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(pinDir, &fs); err != nil {
		return fmt.Errorf("read pin directory %s: %w", pinDir, err)
	}
	if fs.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("pin directory %s is on no BPF file system", pinDir)
	}
	entries, err := os.ReadDir(pinDir)
	if err != nil {
		return fmt.Errorf("read pin directory: %w", err)
	}
	for _, e := range entries {
		if !ours.MatchString(e.Name()) {
			return fmt.Errorf("pin directory %s holds %s, which is no host agent's", pinDir, e.Name())
		}
	}
	// In the order of their names: nothing comes in any more before replies are
	// no longer translated.
	for _, e := range entries {
		path := filepath.Join(pinDir, e.Name())
		if !e.IsDir() {
			if err := detachLink(path); err != nil {
				return fmt.Errorf("detach pinned %s: %w", e.Name(), err)
			}
		}
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove pinned %s: %w", e.Name(), err)
		}
	}
	if err := os.Remove(pinDir); err != nil {
		return fmt.Errorf("remove pin directory: %w", err)
	}
	return nil
}

// detachLink takes a pinned link's program off though a process may hold the
// link.
func detachLink(pin string) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	if x, ok := l.(interface{ Detach() error }); ok {
		_ = x.Detach() // fails where the interface is gone
	}
	return l.Close()
}
