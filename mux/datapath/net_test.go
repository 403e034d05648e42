package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/quartet-lb/quartet/flowhash"
	"github.com/quartet-lb/quartet/lb"
)

// The network of the packet tests, one namespace:
//
//	        up0 10.0.0.1/24, fd00::1/64          up1 10.0.1.1/24
//	         | MTU 1500                           | MTU 1500
//	gateway 10.0.0.254, fd00::fe          gateway 10.0.1.254
//	   10.1.0.0/16, fd01::/64 behind it    10.2.0.0/16 behind it
//	up2 10.0.2.1/24 MTU 1280               up3 10.0.7.1/24 MTU 1500
//	   10.3.0.0/16 behind 10.0.2.254          10.7.0.0/16 behind 10.0.7.254
//	up4 10.0.4.1/24 MTU 9000
//	   10.4.0.0/16 behind 10.0.4.254
var (
	source4    = netip.MustParseAddr("10.0.0.1")
	source6    = netip.MustParseAddr("fd00::1")
	vip4       = netip.MustParseAddr("203.0.113.10")
	vip6       = netip.MustParseAddr("2001:db8::10")
	client4    = netip.MustParseAddr("198.51.100.7")
	client6    = netip.MustParseAddr("2001:db8:1::7")
	gatewayMAC = net.HardwareAddr{0x02, 0, 0, 0, 0xfe, 0}
	testSeed   = flowhash.Seed{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}
)

// testNet is a fresh namespace that the calling test runs in.
type testNet struct {
	links map[string]netlink.Link
	ns    netns.NsHandle
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// enterNamespace puts the test's thread into a new network namespace for as
// long as the test runs. The thread dies with it.
func enterNamespace(t testing.TB) netns.NsHandle {
	t.Helper()
	runtime.LockOSThread()
	before, err := netns.Get()
	must(t, err)
	ns, err := netns.New()
	if err != nil {
		t.Fatalf("make network namespace (are you root?): %v", err)
	}
	t.Cleanup(func() {
		if err := netns.Set(before); err != nil {
			panic(err)
		}
		before.Close()
		ns.Close()
		runtime.UnlockOSThread()
	})
	return ns
}

func addVeth(t testing.TB, name string, mtu int) netlink.Link {
	t.Helper()
	must(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: name, MTU: mtu, TxQLen: 1000},
		PeerName:  name + "p", PeerMTU: uint32(mtu),
	}))
	l, err := netlink.LinkByName(name)
	must(t, err)
	peer, err := netlink.LinkByName(name + "p")
	must(t, err)
	// The far side is to stay silent, so that counters are the tests' own.
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"p/disable_ipv6", []byte("1"), 0))
	must(t, netlink.LinkSetUp(l))
	must(t, netlink.LinkSetUp(peer))
	return l
}

func addAddr(t testing.TB, l netlink.Link, prefix string) {
	t.Helper()
	a, err := netlink.ParseAddr(prefix)
	must(t, err)
	a.Flags |= 2 // IFA_F_NODAD: usable at once
	must(t, netlink.AddrAdd(l, a))
}

// addGateway puts a gateway with a known MAC address behind l and a route by it.
func addGateway(t testing.TB, l netlink.Link, gateway, prefix string) {
	t.Helper()
	addr := netip.MustParseAddr(gateway)
	family := netlink.FAMILY_V4
	if addr.Is6() {
		family = netlink.FAMILY_V6
	}
	must(t, netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: l.Attrs().Index, Family: family, State: netlink.NUD_PERMANENT,
		IP: addr.AsSlice(), HardwareAddr: gatewayMAC,
	}))
	p := netip.MustParsePrefix(prefix)
	must(t, netlink.RouteAdd(&netlink.Route{
		LinkIndex: l.Attrs().Index, Gw: addr.AsSlice(),
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
	}))
}

func newTestNet(t testing.TB) *testNet {
	t.Helper()
	n := &testNet{links: map[string]netlink.Link{}, ns: enterNamespace(t)}
	for name, mtu := range map[string]int{"up0": 1500, "up1": 1500, "up2": 1280, "up3": 1500, "up4": 9000} {
		n.links[name] = addVeth(t, name, mtu)
	}
	addAddr(t, n.links["up0"], "10.0.0.1/24")
	addAddr(t, n.links["up0"], "fd00::1/64")
	addAddr(t, n.links["up1"], "10.0.1.1/24")
	addAddr(t, n.links["up2"], "10.0.2.1/24")
	addAddr(t, n.links["up3"], "10.0.7.1/24")
	addAddr(t, n.links["up4"], "10.0.4.1/24")
	addGateway(t, n.links["up0"], "10.0.0.254", "10.1.0.0/16")
	addGateway(t, n.links["up0"], "fd00::fe", "fd01::/64")
	addGateway(t, n.links["up1"], "10.0.1.254", "10.2.0.0/16")
	addGateway(t, n.links["up2"], "10.0.2.254", "10.3.0.0/16")
	addGateway(t, n.links["up3"], "10.0.7.254", "10.7.0.0/16")
	addGateway(t, n.links["up4"], "10.0.4.254", "10.4.0.0/16")
	return n
}

// enter puts a subtest's thread into the namespace; it dies with the subtest.
func (n *testNet) enter(t testing.TB) {
	t.Helper()
	if here, err := netns.Get(); err == nil {
		same := here.Equal(n.ns)
		here.Close()
		if same {
			return
		}
	}
	runtime.LockOSThread()
	must(t, netns.Set(n.ns))
}

func (n *testNet) index(name string) int { return n.links[name].Attrs().Index }

// pinDir is a directory of the test's own on the BPF filesystem.
func pinDir(t testing.TB) string {
	t.Helper()
	must(t, mountBPF("/sys/fs/bpf/quartet"))
	dir, err := os.MkdirTemp("/sys/fs/bpf", "quartet-test-")
	must(t, err)
	t.Cleanup(func() {
		if err := Detach(dir); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return dir
}

func testConfig(dir string) Config {
	return Config{
		Interfaces: []string{"up0"}, PinDir: dir, Source4: source4, Source6: source6,
		Flows: 4096, VIPs: 1024, Endpoints: 1024, DIPs: 4096,
	}
}

func openTest(t testing.TB, c Config) *Datapath {
	t.Helper()
	d, err := Open(c)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { must(t, d.Close()) })
	return d
}

func ipip(addr string, port uint16) lb.DIP {
	a := netip.MustParseAddr(addr)
	return lb.DIP{Addr: a, Port: port, Tunnel: lb.Tunnel{Dst: a}}
}

// evenly is an endpoint whose buckets go to its DIPs in turn.
func evenly(vip netip.Addr, protocol lb.Protocol, port uint16, c lb.Consistency, buckets int, dips ...lb.DIP) Endpoint {
	e := Endpoint{
		Endpoint:    lb.Endpoint{VIP: vip, Protocol: protocol, Port: port},
		VIPName:     "web",
		Name:        fmt.Sprintf("%s-%d", protocol, port),
		Tenant:      "shop",
		Consistency: c,
		DIPs:        dips,
	}
	for i := range buckets {
		e.Buckets = append(e.Buckets, uint16(i%len(dips)))
	}
	return e
}
