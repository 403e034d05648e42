package lab

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/quartet-lb/quartet/lab/fabric"
)

// writer sends a lab's progress to the test's log.
type writer struct{ t *testing.T }

func (w writer) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimRight(string(b), "\n"))
	return len(b), nil
}

func small(name string) Options {
	o := Defaults()
	o.Name, o.FabricOnly = name, true
	o.Size = Size{Cores: 1, Containers: 1, Aggs: 1, ToRs: 1, Muxes: 1, Hosts: 1, VMs: 1, Clients: 1}
	return o
}

func raise(t *testing.T, o Options) *Lab {
	t.Helper()
	l, err := Up(t.Context(), o, writer{t})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Close()
		if _, err := Down(o.Name, writer{t}); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Every server and client of Duet's test bed reaches every other by both
// families, with the routes that BGP brought.
func TestFabric(t *testing.T) {
	o := Defaults()
	o.Name, o.FabricOnly = "test-fabric", true
	l := raise(t, o)
	for _, pair := range [][2]string{{"client1", "vm8-2"}, {"client2", "vm1-1"}, {"vm2-1", "vm7-2"}, {"mux1", "manager"}, {"host1", "vm8-1"}, {"vm1-1", "vm1-2"}} {
		from, err := l.Net(pair[0])
		if err != nil {
			t.Fatal(err)
		}
		to, _ := l.Topology.Node(pair[1])
		for _, a := range []netip.Addr{to.Addr4, to.Addr6} {
			out, err := from.Run(fabric.Command{Args: []string{"ping", "-c", "1", "-W", "2", a.String()}})
			if err != nil {
				t.Errorf("%s does not reach %s at %s: %v\n%s", pair[0], pair[1], a, err, out)
			}
		}
	}
}

// A lab goes away whole after each step at which its maker can die.
func TestDownAfterCrash(t *testing.T) {
	o := small("test-crash")
	l, err := Up(t.Context(), o, writer{t})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	routers := []fabric.Process{l.process("core1", "bird"), l.process("agg1", "bird")}
	for _, p := range routers {
		if !p.Alive() {
			t.Fatal("a switch has no BIRD")
		}
	}
	bystander := raise(t, small("test-crash-2"))
	// As if the maker had died before it was done, with a file half written.
	if err := l.save(false); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(l.Dir(), "lab.json.new"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(l.pidFile("core1", "bird")); err != nil {
		t.Fatal(err)
	}
	if err := fabric.Delete(l.namespace("agg1")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(o.Name); err == nil || !strings.Contains(err.Error(), "quartet lab down --name test-crash") {
		t.Errorf("opening a half-made lab: %v", err)
	}
	if _, err := Up(t.Context(), o, writer{t}); err == nil || !strings.Contains(err.Error(), "quartet lab down") {
		t.Errorf("raising over a half-made lab: %v", err)
	}
	if there, err := Down(o.Name, writer{t}); err != nil || !there {
		t.Fatalf("Down = %v, %v", there, err)
	}
	for _, p := range routers {
		if p.Alive() {
			t.Errorf("BIRD %d still runs", p.PID)
		}
	}
	for _, n := range l.Topology.Nodes {
		if fabric.Exists(l.namespace(n.Name)) {
			t.Errorf("namespace %s is still there", l.namespace(n.Name))
		}
	}
	if _, err := os.Stat(l.Dir()); !os.IsNotExist(err) {
		t.Errorf("%s is still there", l.Dir())
	}
	if there, err := Down(o.Name, writer{t}); err != nil || there {
		t.Errorf("a second Down = %v, %v", there, err)
	}
	if !bystander.process("core1", "bird").Alive() {
		t.Error("the other lab's BIRD is gone")
	}
}

func TestUpInterrupted(t *testing.T) {
	o := small("test-ctrl-c")
	ctx, cancel := context.WithCancel(t.Context())
	// The first progress line ends it, while there is something to clean up.
	_, err := Up(ctx, o, writerFunc(func([]byte) { cancel() }))
	if err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("Up = %v", err)
	}
	labs, err := Labs()
	if err != nil || slices.Contains(labs, o.Name) || fabric.Exists(o.Name+"-core1") {
		t.Errorf("something is left: %v, %v", labs, err)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) { f(b); return len(b), nil }

func TestUpTwice(t *testing.T) {
	o := small("test-twice")
	raise(t, o)
	_, err := Up(t.Context(), o, writer{t})
	if err == nil || !strings.Contains(err.Error(), "lab test-twice is up") {
		t.Errorf("Up = %v", err)
	}
}

func TestBadOptions(t *testing.T) {
	for _, c := range []struct {
		change func(*Options)
		want   string
	}{
		{func(o *Options) { o.Name = "Lab 1" }, "name: "},
		{func(o *Options) { o.MTU = 1000 }, "mtu: "},
		{func(o *Options) { o.MuxBFD = 1 }, "mux-bfd: "},
		{func(o *Options) { o.Password = "" }, "password: "},
		{func(o *Options) { o.Size.Cores = 0 }, "cores: 0 is outside 1 to 99"},
		{func(o *Options) { o.Size.VMs = 10 }, "vms: "},
		{func(o *Options) { o.Size.Hosts = 97 }, "hosts: 25 a ToR"},
		{func(o *Options) { o.Size.Muxes = 33 }, "muxes: 9 a ToR"},
	} {
		o := Defaults()
		c.change(&o)
		if _, err := Up(t.Context(), o, writer{t}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
}

func TestAddresses(t *testing.T) {
	top, err := NewTopology(DefaultSize)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"core2": "10.0.0.2", "agg4": "10.0.1.4", "tor3": "10.0.2.3", "mux3": "10.1.3.1", "manager": "10.1.4.9",
		"host5": "10.1.3.10", "host6": "10.1.3.20", "vm5-1": "10.1.3.11", "vm6-2": "10.1.3.22", "client2": "198.18.2.1",
	} {
		if n, ok := top.Node(name); !ok || n.Addr4.String() != want {
			t.Errorf("%s is %v, want %s", name, n, want)
		}
	}
	seen := map[netip.Addr]string{}
	for _, n := range top.Nodes {
		for _, a := range []netip.Addr{n.Addr4, n.Addr6} {
			if seen[a] != "" {
				t.Errorf("%s is both %s and %s", a, seen[a], n.Name)
			}
			seen[a] = n.Name
		}
	}
}
