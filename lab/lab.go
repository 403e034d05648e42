// Package lab is a data centre in network namespaces: switches that run BIRD,
// and Quartet's real daemons, servers and clients around them.
//
// It is the demonstration, the end-to-end test bed, and where the papers'
// test-bed experiments are repeated (Duet section 3.7). Several labs may exist
// at once under different names.
package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/lab/fabric"
	"github.com/quartet-lb/quartet/lab/xdppass"
)

const (
	stateRoot = "/run/quartet-lab"
	pinRoot   = "/sys/fs/bpf/quartet-lab"
	stateFile = "lab.json"
)

// Duration is a time.Duration that JSON and YAML write as "5ms".
type Duration time.Duration

// Std is the same as a time.Duration.
func (d Duration) Std() time.Duration { return time.Duration(d) }

// String is "5ms".
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalText writes "5ms".
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads "5ms".
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	*d = Duration(v)
	return err
}

// Set is for flags.
func (d *Duration) Set(s string) error { return d.UnmarshalText([]byte(s)) }

// Type is for flags.
func (Duration) Type() string { return "duration" }

// Command is how the named lab is spoken to with a program: its commands go
// behind it.
func Command(program, name string) string {
	if name == Defaults().Name {
		return program + " lab"
	}
	return program + " lab --name " + name
}

// Options say what a lab is like.
type Options struct {
	Name string `json:"name"` // RFC 1123 label of at most 20 characters
	Size Size   `json:"size"`
	// Binaries is the folder with quartet, quartet-manager, quartet-mux and
	// quartet-hostagent.
	Binaries string `json:"binaries"`
	// MTU of every link, 1280 to 9000 bytes.
	MTU int `json:"mtu"`
	// MuxBFD is the BFD interval between muxes and their ToRs, FabricBFD that
	// between switches; three missed intervals are a failure, 0 is no BFD.
	// Short intervals need a machine that answers in time.
	MuxBFD    Duration `json:"mux_bfd"`
	FabricBFD Duration `json:"fabric_bfd"`
	// Password is the TCP MD5 key of the muxes' BGP sessions.
	Password string `json:"password"`
	// FabricOnly leaves out manager, muxes, host agents and servers.
	FabricOnly bool `json:"fabric_only"`
}

// Defaults are the options of `quartet lab up` without flags. The BFD interval
// of the muxes is one that a loaded two-core machine keeps; scenarios that
// measure failover shorten it.
func Defaults() Options {
	return Options{
		Name: "quartet", Size: DefaultSize, MTU: 1500,
		MuxBFD: Duration(50 * time.Millisecond), FabricBFD: Duration(200 * time.Millisecond),
		Password: "quartet-lab",
	}
}

var labName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,18}[a-z0-9])?$`)

// Check says what is wrong with the options, naming the field.
func (o Options) Check() error {
	if !labName.MatchString(o.Name) {
		return fmt.Errorf("name: %q is not a lab's name: 1 to 20 lower-case letters, digits and hyphens", o.Name)
	}
	if o.MTU < 1280 || o.MTU > 9000 {
		return fmt.Errorf("mtu: %d is outside 1280 to 9000", o.MTU)
	}
	for _, f := range []struct {
		name  string
		value Duration
	}{{"mux-bfd", o.MuxBFD}, {"fabric-bfd", o.FabricBFD}} {
		if f.value != 0 && (f.value.Std() < time.Millisecond || f.value.Std() > 10*time.Second) {
			return fmt.Errorf("%s: %s is neither 0 nor within 1ms to 10s", f.name, f.value)
		}
	}
	if o.Password == "" || len(o.Password) > 80 {
		return errors.New("password: 1 to 80 characters are wanted")
	}
	return o.Size.Check()
}

// Lab is a lab that exists.
type Lab struct {
	Options
	Topology *Topology
	nodes    map[string]*fabric.Node
	api      quartetv1connect.OperatorServiceClient
	// lock is held by whoever builds the lab up or takes it down.
	lock *os.File
}

// saved is what a lab leaves on disk before it makes anything else, so that
// it can be taken away after a crash at any instant.
type saved struct {
	Options    Options  `json:"options"`
	Namespaces []string `json:"namespaces"`
	Ready      bool     `json:"ready"`
}

func stateDir(name string) string { return filepath.Join(stateRoot, name) }

// Dir is where the lab keeps its files: a folder a node.
func (l *Lab) Dir() string { return stateDir(l.Name) }

func (l *Lab) nodeDir(node string) string { return filepath.Join(l.Dir(), node) }

func (l *Lab) namespace(node string) string { return l.Name + "-" + node }

// PinDir is where a node's daemon pins its BPF objects: each node has its own,
// because all share one bpffs.
func (l *Lab) PinDir(node string) string { return filepath.Join(pinRoot, l.Name, node) }

// Net is the node's network namespace.
func (l *Lab) Net(node string) (*fabric.Node, error) {
	if n, ok := l.nodes[node]; ok {
		return n, nil
	}
	if _, ok := l.Topology.Node(node); !ok {
		var names []string
		for _, n := range l.Topology.Nodes {
			names = append(names, n.Name)
		}
		return nil, fmt.Errorf("lab %s has no node %q: %s", l.Name, node, strings.Join(names, ", "))
	}
	n, err := fabric.Open(l.namespace(node))
	if err != nil {
		return nil, err
	}
	l.nodes[node] = n
	return n, nil
}

// ErrNoLab is returned by Open for a name that no lab has.
var ErrNoLab = errors.New("there is no such lab")

// Open finds a lab that is up. The error is ErrNoLab if there is none.
func Open(name string) (*Lab, error) {
	s, err := load(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open lab %s: %w: raise it with '%s up'", name, ErrNoLab, Command("quartet", name))
	}
	if err != nil {
		return nil, fmt.Errorf("open lab %s: %w", name, err)
	}
	if !s.Ready {
		return nil, fmt.Errorf("open lab %s: it is being raised, or that was cut short: 'quartet lab down --name %s' clears it", name, name)
	}
	t, err := NewTopology(s.Options.Size)
	if err != nil {
		return nil, fmt.Errorf("open lab %s: %w", name, err)
	}
	return &Lab{Options: s.Options, Topology: t, nodes: map[string]*fabric.Node{}}, nil
}

// Close lets go of the lab, which lives on.
func (l *Lab) Close() {
	for _, n := range l.nodes {
		n.Close()
	}
	if l.lock != nil {
		_ = unlock(l.lock, l.Name)
		l.lock = nil
	}
}

func load(name string) (saved, error) {
	var s saved
	text, err := os.ReadFile(filepath.Join(stateDir(name), stateFile))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("read %s: %w", filepath.Join(stateDir(name), stateFile), err)
	}
	return s, nil
}

func (l *Lab) save(ready bool) error {
	s := saved{Options: l.Options, Ready: ready}
	for _, n := range l.Topology.Nodes {
		s.Namespaces = append(s.Namespaces, l.namespace(n.Name))
	}
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(l.Dir(), stateFile)
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return fmt.Errorf("record the lab: %w", err)
	}
	return os.Rename(path+".new", path)
}

func lockFile(name string) string { return filepath.Join(stateRoot, name+".lock") }

// lock makes the caller the only one to raise or take down the lab. The file
// is beside the lab's folder, and goes with unlock.
func lock(name string) (*os.File, error) {
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", stateRoot, err)
	}
	for {
		f, err := os.OpenFile(lockFile(name), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock the lab: %w", err)
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			f.Close()
			return nil, fmt.Errorf("lab %s is being raised or taken down by another process", name)
		}
		held, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("lock the lab: %w", err)
		}
		// Its last holder may have removed it between the two calls.
		if named, err := os.Stat(lockFile(name)); err == nil && os.SameFile(held, named) {
			return f, nil
		}
		f.Close()
	}
}

func unlock(f *os.File, name string) error {
	return errors.Join(os.Remove(lockFile(name)), f.Close())
}

func diagnosisFile(name string) string { return filepath.Join(stateRoot, name+".diagnosis") }

// progress writes lines with the time since it began.
type progress struct {
	out   io.Writer
	start time.Time
}

func (p progress) say(format string, args ...any) {
	fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// Up raises a lab and returns once every switch has every route and, unless
// FabricOnly, every daemon is ready. If it fails or ctx ends it leaves nothing
// behind. An existing lab is left alone and an error.
func Up(ctx context.Context, o Options, out io.Writer) (*Lab, error) {
	if err := o.Check(); err != nil {
		return nil, fmt.Errorf("raise lab: %w", err)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("raise lab: run as root: it makes network namespaces")
	}
	needed := []string{"bird", "nft"}
	if !o.FabricOnly {
		for _, b := range []string{"quartet", "quartet-manager", "quartet-mux", "quartet-hostagent"} {
			needed = append(needed, filepath.Join(o.Binaries, b))
		}
	}
	for _, program := range needed {
		if _, err := exec.LookPath(program); err != nil {
			return nil, fmt.Errorf("raise lab: %s is missing: %w", program, err)
		}
	}
	t, err := NewTopology(o.Size)
	if err != nil {
		return nil, fmt.Errorf("raise lab: %w", err)
	}
	held, err := lock(o.Name)
	if err != nil {
		return nil, fmt.Errorf("raise lab: %w", err)
	}
	l := &Lab{Options: o, Topology: t, nodes: map[string]*fabric.Node{}, lock: held}
	if s, err := load(o.Name); err == nil {
		l.Close()
		if !s.Ready {
			return nil, fmt.Errorf("raise lab: lab %s was cut short while it was raised: 'quartet lab down --name %s' clears it", o.Name, o.Name)
		}
		return nil, fmt.Errorf("raise lab: lab %s is up: see 'quartet lab status --name %s', or take it down with 'quartet lab down --name %s'", o.Name, o.Name, o.Name)
	}
	if err := l.free(); err != nil {
		l.Close()
		return nil, fmt.Errorf("raise lab: %w", err)
	}
	p := progress{out, time.Now()}
	if err := l.raise(ctx, p); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		} else if file := diagnosisFile(o.Name); os.WriteFile(file, []byte(l.Diagnose(ctx)), 0o644) == nil {
			p.say("it failed: what each node said last is in %s", file)
		}
		p.say("taking down what there is")
		err = errors.Join(fmt.Errorf("raise lab: %w", err), l.remove())
		l.Close()
		return nil, err
	}
	err = unlock(l.lock, o.Name)
	l.lock = nil
	return l, err
}

// free makes sure that the lab takes nobody's names.
func (l *Lab) free() error {
	for _, n := range l.Topology.Nodes {
		if fabric.Exists(l.namespace(n.Name)) {
			return fmt.Errorf("a namespace %s exists that no lab has recorded: choose another --name, or remove it with 'ip netns delete %s'",
				l.namespace(n.Name), l.namespace(n.Name))
		}
	}
	return nil
}

func (l *Lab) raise(ctx context.Context, p progress) error {
	if err := os.MkdirAll(l.Dir(), 0o755); err != nil {
		return fmt.Errorf("make the lab's folder: %w", err)
	}
	if err := l.save(false); err != nil {
		return err
	}
	p.say("%d namespaces, %d links: %d switches, %d muxes, %d hosts with %d VMs each, %d clients",
		len(l.Topology.Nodes), len(l.Topology.Links),
		len(l.Topology.Role(Core))+len(l.Topology.Role(Agg))+len(l.Topology.Role(ToR)),
		l.Size.Muxes, l.Size.Hosts, l.Size.VMs, l.Size.Clients)
	if err := l.wire(ctx); err != nil {
		return err
	}
	p.say("starting BIRD on every switch: eBGP on every link, layer-4 ECMP, BFD")
	for _, n := range l.Topology.Nodes {
		if n.Role.Switch() {
			if err := l.startRouter(n); err != nil {
				return err
			}
		}
	}
	if err := l.converged(ctx); err != nil {
		return err
	}
	p.say("every switch has every route (%d prefixes)", len(l.Topology.Originated()))
	if !l.FabricOnly {
		if err := l.startDaemons(ctx, p); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return l.save(true)
}

// wire makes namespaces, links, addresses and the routes of servers and clients.
func (l *Lab) wire(ctx context.Context) error {
	for i, n := range l.Topology.Nodes {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := os.MkdirAll(l.nodeDir(n.Name), 0o755); err != nil {
			return fmt.Errorf("make folder of %s: %w", n.Name, err)
		}
		net, err := fabric.Create(l.namespace(n.Name))
		if err != nil {
			return err
		}
		l.nodes[n.Name] = net
		if n.Role.Switch() {
			// Each switch its own seed, as ASICs are set up: with one and the
			// same, a second tier only ever sees the flows of one next hop.
			seed := uint32(i+1) * 2654435761
			if err := net.Sysctl("net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1",
				fmt.Sprintf("net.ipv4.fib_multipath_hash_seed=%d", seed)); err != nil {
				return err
			}
		}
		if n.Role != VM {
			for _, a := range []netip.Addr{n.Addr4, n.Addr6} {
				if err := net.AddAddress("lo", single(a)); err != nil {
					return err
				}
			}
		}
	}
	programs, err := xdppass.Load()
	if err != nil {
		return err
	}
	defer programs.Close()
	for _, link := range l.Topology.Links {
		if err := ctx.Err(); err != nil {
			return err
		}
		a, b := l.nodes[link.A.Name], l.nodes[link.B.Name]
		if err := fabric.Connect(a, link.AName, b, link.BName, l.MTU); err != nil {
			return err
		}
		if !link.B.Role.Switch() {
			if err := b.SetEgress(link.BName, programs.ForgetHash.FD()); err != nil {
				return err
			}
		}
		if link.B.Role == VM {
			if err := l.wireVM(link); err != nil {
				return err
			}
			continue
		}
		for _, end := range []struct {
			net  *fabric.Node
			name string
			a    netip.Addr
			bits int
		}{{a, link.AName, link.A4, 31}, {a, link.AName, link.A6, 127}, {b, link.BName, link.B4, 31}, {b, link.BName, link.B6, 127}} {
			if err := end.net.AddAddress(end.name, netip.PrefixFrom(end.a, end.bits)); err != nil {
				return err
			}
		}
		if link.B.Role.Switch() {
			continue
		}
		for _, r := range []fabric.Route{
			{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: link.A4, Interface: link.BName, Source: link.B.Addr4},
			{Dst: netip.MustParsePrefix("::/0"), Via: link.A6, Interface: link.BName, Source: link.B.Addr6},
		} {
			if err := b.AddRoute(r); err != nil {
				return err
			}
		}
		switch link.B.Role {
		case Mux:
			if err := a.SetXDP(link.AName, programs.Pass.FD()); err != nil {
				return err
			}
		case Host:
			if err := a.TakeXDP(link.AName); err != nil {
				return err
			}
		case Client:
			if err := b.OffloadsOff(link.BName); err != nil {
				return err
			}
			// IPv6 has no binding to an address that only a route makes local.
			if err := b.Sysctl("net.ipv6.ip_nonlocal_bind=1"); err != nil {
				return err
			}
			v4, v6 := ClientPrefixes(link.B.Index)
			for _, p := range []netip.Prefix{v4, v6} {
				if err := b.AddRoute(fabric.Route{Dst: p, Interface: "lo", Local: true}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// The gateway that every VM sees, whatever host it is on.
var (
	gateway4 = netip.MustParseAddr("169.254.1.1")
	gateway6 = netip.MustParseAddr("fe80::1")
)

// wireVM routes a VM's address to it: no bridge, no address of the link's own.
func (l *Lab) wireVM(link *Link) error {
	host, vm := l.nodes[link.A.Name], l.nodes[link.B.Name]
	if err := host.AddAddress(link.AName, single(gateway4)); err != nil {
		return err
	}
	if err := host.AddAddress(link.AName, netip.PrefixFrom(gateway6, 64)); err != nil {
		return err
	}
	for _, a := range []netip.Addr{link.B.Addr4, link.B.Addr6} {
		if err := vm.AddAddress(link.BName, single(a)); err != nil {
			return err
		}
	}
	for _, r := range []struct {
		net *fabric.Node
		fabric.Route
	}{
		{host, fabric.Route{Dst: single(link.B.Addr4), Interface: link.AName, Source: link.A.Addr4}},
		{host, fabric.Route{Dst: single(link.B.Addr6), Interface: link.AName, Source: link.A.Addr6}},
		{vm, fabric.Route{Dst: netip.MustParsePrefix("0.0.0.0/0"), Via: gateway4, Interface: link.BName, OnLink: true}},
		{vm, fabric.Route{Dst: netip.MustParsePrefix("::/0"), Via: gateway6, Interface: link.BName}},
	} {
		if err := r.net.AddRoute(r.Route); err != nil {
			return err
		}
	}
	return vm.OffloadsOff(link.BName)
}

func (l *Lab) writeRouterConfig(n *Node) error {
	dir := l.nodeDir(n.Name)
	config := l.Topology.Router(n, l.Options).Config(filepath.Join(dir, "bird.log"))
	if err := os.WriteFile(fabric.BirdConfig(dir), []byte(config), 0o600); err != nil {
		return fmt.Errorf("configure %s: %w", n.Name, err)
	}
	return nil
}

func (l *Lab) startRouter(n *Node) error {
	if err := l.writeRouterConfig(n); err != nil {
		return err
	}
	return l.spawn(n.Name, "bird", fabric.BirdCommand(l.nodeDir(n.Name)))
}

// converged waits until every switch's kernel sends every prefix of the fabric
// by all of its shortest ways.
func (l *Lab) converged(ctx context.Context) error {
	originated := l.Topology.Originated()
	distances := map[*Node]map[*Node]int{}
	for _, origin := range originated {
		if distances[origin] == nil {
			distances[origin] = l.Topology.Distances(origin)
		}
	}
	return poll(ctx, 30*time.Second, func() error {
		for _, n := range l.Topology.Nodes {
			if !n.Role.Switch() {
				continue
			}
			net, err := l.Net(n.Name)
			if err != nil {
				return err
			}
			have, err := net.NextHops()
			if err != nil {
				return err
			}
			for p, origin := range originated {
				if origin == n {
					continue
				}
				want := 0
				for _, link := range n.Links {
					peer, _, _, _, _, _ := link.Far(n)
					if d, ok := distances[origin][peer]; ok && d < distances[origin][n] {
						want++
					}
				}
				if len(have[p]) != want {
					return fmt.Errorf("%s has %d of %d ways to %s: see %s", n.Name, len(have[p]), want, p, filepath.Join(l.nodeDir(n.Name), "bird.log"))
				}
			}
		}
		return nil
	})
}

// poll calls f until it succeeds, and returns its last error if it does not in
// time.
func poll(ctx context.Context, limit time.Duration, f func() error) error {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	wait := time.NewTicker(5 * time.Millisecond)
	defer wait.Stop()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("after %s: %w", limit, err)
		case <-wait.C:
		}
	}
}

// Down takes a lab away, whatever state it is in: its processes, namespaces,
// pinned BPF objects and files, and nothing else. It is no error if there is
// no such lab; the result says whether there was.
func Down(name string, out io.Writer) (there bool, err error) {
	if !labName.MatchString(name) {
		return false, fmt.Errorf("take lab down: name: %q is not a lab's name", name)
	}
	held, err := lock(name)
	if err != nil {
		return false, fmt.Errorf("take lab down: %w", err)
	}
	defer func() { err = errors.Join(err, unlock(held, name), tidy(name)) }()
	s, err := load(name)
	if errors.Is(err, fs.ErrNotExist) {
		// A lab leaves its record first; without one there is only its folder.
		return false, os.RemoveAll(stateDir(name))
	}
	if err != nil {
		return false, fmt.Errorf("take lab down: %w", err)
	}
	p := progress{out, time.Now()}
	killed, err := remove(name, s.Namespaces)
	if err != nil {
		return true, fmt.Errorf("take lab down: %w", err)
	}
	p.say("lab %s is gone: %d processes ended, %d namespaces removed", name, killed, len(s.Namespaces))
	return true, nil
}

func (l *Lab) remove() error {
	var names []string
	for _, n := range l.Topology.Nodes {
		names = append(names, l.namespace(n.Name))
	}
	_, err := remove(l.Name, names)
	return err
}

func remove(name string, namespaces []string) (int, error) {
	killed, err := fabric.KillIn(namespaces, recorded(name))
	if err != nil {
		return killed, err
	}
	if err := os.RemoveAll(filepath.Join(pinRoot, name)); err != nil {
		return killed, fmt.Errorf("remove pinned BPF objects: %w", err)
	}
	for _, n := range namespaces {
		if err := fabric.Delete(n); err != nil {
			return killed, err
		}
	}
	// The record goes last but one, and the folder with it.
	return killed, os.RemoveAll(stateDir(name))
}

// tidy removes what is only there for labs in general, if this was the last.
func tidy(name string) error {
	if err := os.Remove(diagnosisFile(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// They stay while another lab has something in them.
	_, _ = os.Remove(pinRoot), os.Remove(stateRoot)
	return nil
}

// Labs lists the names of the labs that have left a record.
func Labs() ([]string, error) {
	files, err := filepath.Glob(filepath.Join(stateRoot, "*", stateFile))
	var names []string
	for _, f := range files {
		names = append(names, filepath.Base(filepath.Dir(f)))
	}
	return names, err
}
