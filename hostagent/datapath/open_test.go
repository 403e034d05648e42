package datapath

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/lb"
)

func TestBadConfig(t *testing.T) {
	l := newLab(t)
	pins := testPinDir(t)
	for _, c := range []struct {
		config Config
		want   string
	}{
		{Config{}, "interfaces: none"},
		{Config{Interfaces: []string{"eth9"}}, `interfaces: "eth9" is no interface of this host`},
		{Config{Interfaces: []string{"eth0", "eth0"}}, `interfaces: "eth0" is named twice`},
		{Config{Interfaces: []string{"eth0"}, PinDir: "/run/quartet"}, "pin directory /run/quartet is on no BPF file system; valid: a directory below /sys/fs/bpf"},
		{Config{Interfaces: []string{"eth0"}, PinDir: "quartet"}, `pin directory "quartet": valid: an absolute path`},
		{Config{Interfaces: []string{"eth0"}, MSS: 10}, "mss 10: valid: 88 to 65495"},
		{Config{Interfaces: []string{"eth0"}, Flows: 3}, "flows 3: valid: 1024 to 16777216"},
		{Config{Interfaces: []string{"eth0"}, Rules: 1 << 21}, "rules 2097152: valid: 1 to 1048576"},
		{Config{Interfaces: []string{"eth0"}, Meters: 1}, "meters 1: valid: 256 to 1048576"},
		{Config{Interfaces: []string{"lo"}}, "attach host agent to lo: kernel or driver lacks support; valid: a driver with native XDP"},
		// The second interface fails: the first must be as it was.
		{Config{Interfaces: []string{"eth0", "lo"}}, "attach host agent to lo: "},
	} {
		if c.config.PinDir == "" {
			c.config.PinDir = pins
		}
		err := l.inside("host", func() error {
			d, err := Open(c.config)
			if err == nil {
				_ = d.Detach()
			}
			return err
		})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%+v: %v; want one line with %q", c.config, err, c.want)
		}
	}
	if entries, err := os.ReadDir(pins); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
	if attached := l.attached(t, "eth0"); attached != 0 {
		t.Errorf("%d programs are left on eth0", attached)
	}
}

// attached counts the programs on an interface of the host.
func (l *testLab) attached(t *testing.T, name string) (n int) {
	t.Helper()
	out, err := exec.Command("ip", "-j", "-n", l.prefix+"host", "link", "show", name).Output()
	if err != nil {
		t.Fatalf("ip link show %s: %v", name, err)
	}
	var links []struct {
		Index int             `json:"ifindex"`
		XDP   json.RawMessage `json:"xdp"`
	}
	if err := json.Unmarshal(out, &links); err != nil {
		t.Fatal(err)
	}
	if links[0].XDP != nil {
		n++
	}
	l.in(t, "host", func() error {
		q, err := link.QueryPrograms(link.QueryOptions{Target: links[0].Index, Attach: ebpf.AttachTCXEgress})
		if err == nil {
			n += len(q.Programs)
		}
		return err
	})
	return n
}

func TestMissingCapability(t *testing.T) {
	l := newLab(t)
	pins := testPinDir(t)
	if err := mountBPFFS(pins); err != nil {
		t.Fatal(err)
	}
	err := l.inside("host", func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&header, &data[0]); err != nil {
			return err
		}
		for _, c := range []int{unix.CAP_BPF, unix.CAP_SYS_ADMIN} {
			data[c/32].Effective &^= 1 << (c % 32)
		}
		// Of this thread only, which ends with the goroutine.
		runtime.LockOSThread()
		if err := unix.Capset(&header, &data[0]); err != nil {
			return err
		}
		_, err := Open(Config{Interfaces: []string{"eth0"}, PinDir: pins})
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "CAP_BPF") || strings.Contains(err.Error(), "\n") {
		t.Errorf("%v; want one line that names CAP_BPF", err)
	}
}

// On a host without bpffs, Open mounts it.
func TestMountsBPFFS(t *testing.T) {
	l := newLab(t)
	l.in(t, "host", func() error {
		// A mount namespace of this thread only, which ends with the goroutine.
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		var fs unix.Statfs_t
		for {
			if err := unix.Statfs("/sys/fs/bpf", &fs); err != nil {
				return err
			}
			if fs.Type != unix.BPF_FS_MAGIC {
				break
			}
			if err := unix.Unmount("/sys/fs/bpf", unix.MNT_DETACH); err != nil {
				return err
			}
		}
		d, err := Open(Config{Interfaces: []string{"eth0"}})
		if err != nil {
			return err
		}
		if err := unix.Statfs(DefaultPinDir, &fs); err != nil || fs.Type != unix.BPF_FS_MAGIC {
			t.Errorf("%s: file system %#x, %v", DefaultPinDir, fs.Type, err)
		}
		return d.Detach()
	})
}

func TestAnotherXDPProgram(t *testing.T) {
	l := newLab(t)
	other, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Instructions: passAll()})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	pins := testPinDir(t)
	l.in(t, "host", func() error {
		ups, err := (&Config{Interfaces: []string{"eth0"}}).uplinks()
		if err != nil {
			return err
		}
		held, err := link.AttachXDP(link.XDPOptions{Program: other, Interface: ups[0].index, Flags: link.XDPDriverMode})
		if err != nil {
			return err
		}
		_, err = Open(Config{Interfaces: []string{"eth0"}, PinDir: pins})
		if err == nil || err.Error() != "attach host agent to eth0: another XDP program is attached; detach it first" {
			t.Errorf("error %v", err)
		}
		return held.Close()
	})
}

// What was pinned goes on: rules, flows and counters, on the same links.
func TestAdopt(t *testing.T) {
	pins := testPinDir(t)
	l, d := ready(t, Config{PinDir: pins})
	c := l.dial(t, "tcp", hostVIP4)
	if err := transfer(c, 1000); err != nil {
		t.Fatal(err)
	}
	before := d.rules
	counted := exits(t, d)["in_delivered"]
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	// A daemon that died in the middle of a change leaves such entries.
	left, err := ebpf.LoadPinnedMap(filepath.Join(d.dir, "tunnels"), nil)
	if err != nil {
		t.Fatal(err)
	}
	stray := agentTunnelKey{Address: [4]uint32{1}}
	if err := left.Put(stray, uint32(0)); err != nil {
		t.Fatal(err)
	}
	d = l.open(t, Config{PinDir: pins})
	l.agent = d
	if !reflect.DeepEqual(d.rules, before) {
		t.Errorf("rules: %v, want %v", d.rules, before)
	}
	if err := left.Lookup(stray, new(uint32)); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("a stray tunnel is still there: %v", err)
	}
	if err := left.Close(); err != nil {
		t.Fatal(err)
	}
	if n := exits(t, d)["in_delivered"]; n < counted {
		t.Errorf("in_delivered fell from %d to %d", counted, n)
	}
	if err := transfer(c, 1000); err != nil {
		t.Error(err)
	}
	if n := l.attached(t, "eth0"); n != 2 {
		t.Errorf("%d programs on eth0, want 2", n)
	}
}

// An uplink that the configuration drops is detached; one that was made anew
// under its old number or name is attached again.
func TestUplinksChange(t *testing.T) {
	l := newLab(t)
	c := Config{PinDir: testPinDir(t)}
	open := func(names ...string) *Datapath {
		var d *Datapath
		l.in(t, "host", func() (err error) {
			c.Interfaces = names
			d, err = Open(c)
			return err
		})
		return d
	}
	expect := func(eth0, vm0 int) {
		t.Helper()
		for name, want := range map[string]int{"eth0": eth0, "vm0": vm0} {
			eventually(t, fmt.Sprintf("%d programs on %s", want, name), func() bool { return l.attached(t, name) == want })
		}
	}
	d := open("eth0", "vm0")
	expect(2, 2)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d = open("eth0")
	expect(2, 0)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	index := func() (n int) {
		l.in(t, "host", func() error {
			ups, err := (&Config{Interfaces: []string{"eth0"}}).uplinks()
			if err == nil {
				n = ups[0].index
			}
			return err
		})
		return n
	}
	was := index()
	l.ip(t, "host", "link del eth0")
	l.sh(t, fmt.Sprintf("ip -n %shost link add eth0 index %d type veth peer name host0 netns %srouter", l.prefix, was, l.prefix))
	if index() != was {
		t.Fatalf("eth0 has number %d, want %d", index(), was)
	}
	l.ip(t, "host", "link set eth0 up")
	d = open("eth0")
	expect(2, 0)
	if err := d.Detach(); err != nil {
		t.Fatal(err)
	}
	expect(0, 0)
	if _, err := os.Stat(c.PinDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Detach left %s: %v", c.PinDir, err)
	}
}

// Detach takes effect though a daemon still runs and holds the links.
func TestDetachWhileHeld(t *testing.T) {
	l := newLab(t)
	pins := testPinDir(t)
	d := l.open(t, Config{PinDir: pins})
	if n := l.attached(t, "eth0"); n != 2 {
		t.Fatalf("%d programs on eth0, want 2", n)
	}
	if err := Detach(pins); err != nil {
		t.Fatal(err)
	}
	if n := l.attached(t, "eth0"); n != 0 {
		t.Errorf("%d programs are left on eth0", n)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func TestBadRules(t *testing.T) {
	good := rule("10.1.3.11", lb.TCP, "203.0.113.10:80", "10.1.3.11", 8080)
	d := loaded(t, loadConfig{Rules: 3}, good)
	with := func(f func(*Rule)) []Rule {
		r := good
		f(&r)
		return []Rule{good, r}
	}
	for _, c := range []struct {
		rules []Rule
		want  string
	}{
		{with(func(r *Rule) { r.Tunnel = netip.Addr{} }), "rules[1].tunnel: invalid IP; valid: a unicast IPv4 or IPv6 address"},
		{with(func(r *Rule) { r.Tunnel = addr("::ffff:10.0.0.1") }), "rules[1].tunnel: "},
		{with(func(r *Rule) { r.Endpoint.VIP = addr("224.0.0.1") }), "rules[1].vip: 224.0.0.1; valid: "},
		{with(func(r *Rule) { r.Endpoint.Protocol = lb.ICMP }), "rules[1].protocol: ICMP; valid: TCP or UDP"},
		{with(func(r *Rule) { r.DIP = addr("fe80::1%eth0") }), "rules[1].dip: fe80::1%eth0; valid: "},
		{with(func(r *Rule) { r.Endpoint.Port, r.DIP = 81, addr("fd00::1") }), "rules[1].dip: fd00::1; valid: an address of the family of VIP 203.0.113.10"},
		{with(func(r *Rule) {}), "rules[1]: 10.1.3.11: TCP 203.0.113.10:80 to 10.1.3.11:8080: rules[0] has the same tunnel and endpoint"},
		{[]Rule{
			rule("10.1.3.11", lb.TCP, "203.0.113.10:1", "10.1.3.11", 0), rule("10.1.3.11", lb.TCP, "203.0.113.10:2", "10.1.3.11", 0),
			rule("10.1.3.11", lb.TCP, "203.0.113.10:3", "10.1.3.11", 0), rule("10.1.3.11", lb.TCP, "203.0.113.10:4", "10.1.3.11", 0),
		}, "rules: 4; valid: up to 3, as configured"},
	} {
		before := dump(t, d)
		if err := d.Replace(c.rules); err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v: %v; want %q", c.rules, err, c.want)
		}
		if after := dump(t, d); !reflect.DeepEqual(before, after) {
			t.Errorf("%v: changed\n%v\nto\n%v", c.rules, before, after)
		}
	}
	if err := d.Apply(Delta{Put: []Rule{good}, Delete: []Rule{good}}); err == nil || !strings.HasPrefix(err.Error(), "delete[0]: ") {
		t.Errorf("put and deleted: %v", err)
	}
}

// dump is all that rules leave in the maps.
func dump(t *testing.T, d *Datapath) map[any]any {
	t.Helper()
	all := map[any]any{}
	var (
		tunnel agentTunnelKey
		dip    agentDipKey
		ports  agentDip
		key    agentRuleKey
		value  agentRule
	)
	for it := d.objects.Tunnels.Iterate(); it.Next(&tunnel, new(uint32)); {
		all[tunnel] = true
	}
	for it := d.objects.Dips.Iterate(); it.Next(&dip, &ports); {
		all[dip] = ports
	}
	for it := d.objects.Rules.Iterate(); it.Next(&key, &value); {
		all[key] = value
	}
	return all
}

// A kernel that refuses one write in the middle: all is as before.
func TestReplaceIsAllOrNothing(t *testing.T) {
	good := rule("10.1.3.11", lb.TCP, "203.0.113.10:80", "10.1.3.11", 8080)
	stays := rule("10.1.3.12", lb.TCP, "203.0.113.10:80", "10.1.3.12", 8080)
	d := loaded(t, loadConfig{}, good, stays)
	before, rules, used := dump(t, d), fmt.Sprint(d.rules), fmt.Sprint(d.used)

	var next []Rule
	for i := range 20 {
		next = append(next, rule(fmt.Sprintf("10.1.4.%d", i+1), lb.UDP, "203.0.113.11:53", "10.1.4.1", uint16(i)))
	}
	full := d.objects.Rules
	info, err := full.Info()
	if err != nil {
		t.Fatal(err)
	}
	small, err := ebpf.NewMap(&ebpf.MapSpec{Type: info.Type, KeySize: info.KeySize, ValueSize: info.ValueSize, MaxEntries: 10, Flags: info.Flags})
	if err != nil {
		t.Fatal(err)
	}
	for k, ts := range d.rules {
		if err := small.Put(k.raw(), ts.raw()); err != nil {
			t.Fatal(err)
		}
	}
	d.objects.Rules = small
	err = d.Replace(append(next, stays))
	after := dump(t, d)
	d.objects.Rules = full
	if err := small.Close(); err != nil {
		t.Fatal(err)
	}
	if err == nil || !strings.HasPrefix(err.Error(), "write rule of UDP 203.0.113.11:53 at 10.1.4.") || strings.Contains(err.Error(), "former") {
		t.Errorf("error %v", err)
	}
	if !reflect.DeepEqual(before, after) || fmt.Sprint(d.rules) != rules || fmt.Sprint(d.used) != used {
		t.Errorf("changed\n%v\n%s\n%s\nto\n%v\n%v\n%v", before, rules, used, after, d.rules, d.used)
	}
	if err := d.Replace(append(next, stays)); err != nil {
		t.Fatal(err)
	}
	if err := d.Replace(nil); err != nil {
		t.Fatal(err)
	}
	if left := dump(t, d); len(left) != 0 || len(d.rules)+len(d.used.ports)+len(d.used.tunnels) != 0 {
		t.Errorf("left after no rules: %v %v", left, d.used)
	}
}
