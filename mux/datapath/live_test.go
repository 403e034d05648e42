package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/lb"
)

// client is the far side of up0, in a namespace of its own, with an XDP program
// that counts what comes back in tunnels.
//
//	client: up0p ---- up0 :mux
type client struct {
	socket int
	index  int
	back   *ebpf.Map
}

func newClient(t *testing.T, n *testNet) *client {
	t.Helper()
	peer, err := netlink.LinkByName("up0p")
	must(t, err)
	ns, err := netns.New()
	must(t, err)
	must(t, netns.Set(n.ns))
	must(t, netlink.LinkSetNsFd(peer, int(ns)))
	must(t, netns.Set(ns))
	t.Cleanup(func() { ns.Close() })
	defer func() { must(t, netns.Set(n.ns)) }()
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/up0p/disable_ipv6", []byte("1"), 0))
	peer, err = netlink.LinkByName("up0p")
	must(t, err)
	must(t, netlink.LinkSetUp(peer))

	c := &client{index: peer.Attrs().Index}
	c.back, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	must(t, err)
	counter, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.LoadMem(asm.R2, asm.R1, 0, asm.Word), // data
			asm.LoadMem(asm.R3, asm.R1, 4, asm.Word), // data_end
			asm.Mov.Reg(asm.R4, asm.R2),
			asm.Add.Imm(asm.R4, 34),
			asm.JGT.Reg(asm.R4, asm.R3, "pass"),
			asm.LoadMem(asm.R4, asm.R2, 23, asm.Byte), // IPv4 protocol
			asm.JNE.Imm(asm.R4, 4, "pass"),
			asm.LoadMapValue(asm.R1, c.back.FD(), 0),
			asm.Mov.Imm(asm.R2, 1),
			asm.StoreXAdd(asm.R1, asm.R2, asm.DWord),
			asm.Mov.Imm(asm.R0, 1),
			asm.Return(),
			asm.Mov.Imm(asm.R0, 2).WithSymbol("pass"),
			asm.Return(),
		},
	})
	must(t, err)
	l, err := link.AttachXDP(link.XDPOptions{Program: counter, Interface: c.index, Flags: link.XDPDriverMode})
	must(t, err)
	c.socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	must(t, err)
	t.Cleanup(func() {
		unix.Close(c.socket)
		l.Close()
		counter.Close()
		c.back.Close()
	})
	return c
}

func (c *client) returned() uint64 {
	var n uint64
	if err := c.back.Lookup(uint32(0), &n); err != nil {
		panic(err)
	}
	return n
}

// exchange sends a window of packets, all of which must come back.
func (c *client) exchange(frames [][]byte) error {
	want := c.returned() + uint64(len(frames))
	for _, f := range frames {
		if err := unix.Sendto(c.socket, f, 0, &unix.SockaddrLinklayer{Ifindex: c.index}); err != nil {
			return err
		}
	}
	for end := time.Now().Add(20 * time.Second); c.returned() != want; runtime.Gosched() {
		if time.Now().After(end) {
			return fmt.Errorf("%d of %d packets did not come back", want-c.returned(), len(frames))
		}
	}
	return nil
}

// TestRestartLosesNothing: while packets go, the daemon is restarted, killed
// without a goodbye, upgraded to another layout and reconfigured; each packet
// comes back encapsulated.
func TestRestartLosesNothing(t *testing.T) {
	n := newTestNet(t)
	c := newClient(t, n)
	config := testConfig(pinDir(t))
	tables := Tables{
		Seed: testSeed, VIPs: []VIP{{Addr: vip4, Name: "web"}},
		Endpoints: []Endpoint{
			evenly(vip4, lb.TCP, 80, lb.ConsistencyHash, 256, ipip("10.1.0.1", 80), ipip("10.1.0.2", 80)),
			evenly(vip4, lb.UDP, 53, lb.ConsistencyTable, 256, ipip("10.1.0.1", 53), ipip("10.1.0.2", 53)),
		},
	}
	d := openTest(t, config)
	must(t, d.Replace(tables))

	var frames [][]byte
	for i := range 16 {
		port := func(s *spec) { s.srcPort = uint16(1000 + i) }
		frames = append(frames, packet(port), packet(udp(), to(vip4, 53), port))
	}
	must(t, c.exchange(frames))
	var sent atomic.Uint64
	stop, done := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if err := c.exchange(frames); err != nil {
				done <- err
				return
			}
			sent.Add(uint64(len(frames)))
		}
	}()
	// Packets go on between the steps.
	flow := func() {
		from := sent.Load()
		for sent.Load() < from+64 {
			select {
			case err := <-done:
				t.Fatal(err)
			default:
				runtime.Gosched()
			}
		}
	}
	for i := range 3 {
		flow()
		must(t, d.Close())
		flow()
		d = openTest(t, config)
		flow()
		must(t, d.Replace(tables))
		flow()
		abandoned := d // as a killed process leaves it
		d = openTest(t, config)
		must(t, d.Replace(tables))
		flow()
		must(t, abandoned.Close())
		config.Flows *= 2 // another layout
		must(t, d.Close())
		d = openTest(t, config)
		flow()
		if got := must2(d.Exits())["tx"]; got != 0 {
			t.Errorf("%d packets went through tables that were not complete", got)
		}
		must(t, d.Replace(tables))
		flow()
		for j := range 20 {
			changed := tables.Endpoints[0]
			changed.DIPs = []lb.DIP{ipip("10.1.0.1", 80), ipip(fmt.Sprintf("10.1.%d.%d", i+1, j+1), 80)}
			must(t, d.Apply(Delta{PutEndpoints: []Endpoint{changed}}))
		}
	}
	flow()
	close(stop)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	t.Logf("%d packets, each came back", sent.Load())
	if entries, err := os.ReadDir(config.PinDir); err != nil || len(entries) != 2 {
		t.Errorf("pinned: %v, want the links and one layout's maps (%v)", entries, err)
	}
}

// TestNeighbourIsResolved: the first packet to an unknown next hop is dropped
// by name and makes the kernel ask; when the answer is there, packets go.
func TestNeighbourIsResolved(t *testing.T) {
	n := newTestNet(t)
	c := newClient(t, n)
	d := openTest(t, testConfig(pinDir(t)))
	must(t, d.Replace(Tables{
		Seed: testSeed, VIPs: []VIP{{Addr: vip4}},
		Endpoints: []Endpoint{evenly(vip4, lb.TCP, 80, lb.ConsistencyHash, 1, ipip("10.0.0.77", 80))},
	}))
	if got := runReal(t, d, packet(), n.index("up0")).exit; got != "no_neighbour" {
		t.Fatalf("exit %s", got)
	}
	wait(t, "the kernel to ask for 10.0.0.77", func() bool {
		neighbours, err := netlink.NeighList(n.index("up0"), netlink.FAMILY_V4)
		must(t, err)
		for _, nb := range neighbours {
			if nb.IP.String() == "10.0.0.77" {
				return true
			}
		}
		return false
	})
	must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: n.index("up0"), IP: netip.MustParseAddr("10.0.0.77").AsSlice(),
		HardwareAddr: gatewayMAC, State: netlink.NUD_PERMANENT,
	}))
	must(t, c.exchange([][]byte{packet()}))
	// Another MAC address is used at once, not when the cache expires.
	other := []byte{2, 0, 0, 0, 0xfe, 9}
	must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: n.index("up0"), IP: netip.MustParseAddr("10.0.0.77").AsSlice(),
		HardwareAddr: other, State: netlink.NUD_PERMANENT,
	}))
	wait(t, "packets to go to the neighbour's other MAC address", func() bool {
		return string(runReal(t, d, packet(), n.index("up0")).out[:6]) == string(other)
	})
}

func wait(t *testing.T, what string, until func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !until(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited 20 s for %s", what)
		}
	}
}

// TestDetach leaves nothing behind.
func TestDetach(t *testing.T) {
	n := newTestNet(t)
	dir := pinDir(t)
	d := openTest(t, testConfig(dir))
	attached := func() bool {
		l, err := netlink.LinkByIndex(n.index("up0"))
		must(t, err)
		return l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached
	}
	if !attached() {
		t.Error("not attached")
	}
	must(t, d.Detach())
	if attached() {
		t.Error("still attached")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Errorf("%s is still there", dir)
	}
}

// TestOpenErrors: one line that says what is wrong.
func TestOpenErrors(t *testing.T) {
	n := newTestNet(t)
	dir := pinDir(t)
	for want, change := range map[string]func(*Config){
		"attach mux to nowhere1: no such interface": func(c *Config) { c.Interfaces = []string{"up0", "nowhere1"} },
		"attach mux to nowhere0: no such interface": func(c *Config) { c.Interfaces = []string{"nowhere0"} },
		"interfaces: none":                          func(c *Config) { c.Interfaces = nil },
		"idle_trusted: 24h0m0s; 1m0s to 8h0m0s":     func(c *Config) { c.IdleTrusted = 24 * time.Hour },
		"flows: -1; 1 to":                           func(c *Config) { c.Flows = -1 },
		"source4: fd00::1 is not an IPv4 address":   func(c *Config) { c.Source4 = source6 },
		"attach mux to lo: its driver has no XDP":   func(c *Config) { c.Interfaces = []string{"lo"} },
		"not on a BPF filesystem":                   func(c *Config) { c.PinDir = t.TempDir() + "/pins" },
	} {
		c := testConfig(dir)
		change(&c)
		d, err := Open(c)
		if err == nil {
			d.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("error %q, want one line with %q", err, want)
		}
		if left, err := os.ReadDir(dir); err == nil && len(left) > 0 {
			t.Errorf("%s: %v is left behind", want, left)
		}
		if l := must2(netlink.LinkByIndex(n.index("up0"))); l.Attrs().Xdp != nil && l.Attrs().Xdp.Attached {
			t.Errorf("%s: the program is still on up0", want)
		}
	}
}

// TestUpgradeInterrupted: a process that ends while its layout takes over
// leaves complete tables to the next.
func TestUpgradeInterrupted(t *testing.T) {
	newTestNet(t)
	config := testConfig(pinDir(t))
	d := openTest(t, config)
	must(t, d.Replace(testTables()))
	must(t, d.Close())
	config.Flows *= 2 // another layout
	config.Interfaces = []string{"up0", "nowhere0"}
	d = openTest(t, config)
	if err := d.Replace(testTables()); err == nil || !strings.Contains(err.Error(), "nowhere0") {
		t.Fatalf("error %v", err)
	}
	must(t, d.Close())
	config.Interfaces = []string{"up0"}
	d = openTest(t, config)
	if got := len(d.Endpoints()); got != len(testTables().Endpoints) {
		t.Errorf("%d endpoints are left of %d, though packets go by these tables", got, len(testTables().Endpoints))
	}
	if left := must2(os.ReadDir(config.PinDir)); len(left) != 2 {
		t.Errorf("pinned: %v, want the links and one layout's maps", left)
	}
}

// TestNamesAreComplete: a name for each way out and each event of the program.
func TestNamesAreComplete(t *testing.T) {
	spec, err := loadMux()
	must(t, err)
	for _, c := range []struct {
		enum, prefix string
		count        int
	}{
		{"exit", "EXIT_", int(muxExitEXIT_COUNT)},
		{"event", "EVENT_", int(muxEventEVENT_COUNT)},
	} {
		names, err := enumNames(spec, c.enum, c.prefix)
		must(t, err)
		slices.Sort(names)
		if n := len(slices.Compact(names)); n != c.count || names[0] == "" {
			t.Errorf("%d names of %s for %d values: %v", n, c.enum, c.count, names)
		}
	}
}

const nobodysPins = "/sys/fs/bpf/quartet-test-nobody"

// TestOpenWithoutCapabilities runs this test again as nobody.
func TestOpenWithoutCapabilities(t *testing.T) {
	if os.Getuid() != 0 {
		_, err := Open(testConfig(nobodysPins))
		fmt.Println(err)
		return
	}
	t.Cleanup(func() { must(t, Detach(nobodysPins)) })
	self := filepath.Join(t.TempDir(), "test")
	program, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	must(t, os.WriteFile(self, program, 0o755))
	for dir := filepath.Dir(self); dir != "/"; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err == nil && strings.HasPrefix(dir, os.TempDir()+"/") {
			must(t, os.Chmod(dir, info.Mode()|0o055))
		}
	}
	cmd := exec.Command(self, "-test.run", "^TestOpenWithoutCapabilities$")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	must(t, err)
	first, _, _ := strings.Cut(string(out), "\n")
	if !strings.Contains(first, "open mux datapath: ") || !strings.Contains(first, "CAP_BPF, CAP_NET_ADMIN") {
		t.Errorf("%q does not name the missing capabilities", first)
	}
}

// TestJumboFrames: over links with an MTU of 9000, frames of several pages come
// back whole but for what the tunnel adds; truncated ones don't.
func TestJumboFrames(t *testing.T) {
	newTestNet(t)
	config := testConfig(pinDir(t))
	config.Interfaces = []string{"up4"}
	d := openTest(t, config)
	must(t, d.Replace(Tables{
		Seed: testSeed, VIPs: []VIP{{Addr: vip4}},
		Endpoints: []Endpoint{evenly(vip4, lb.TCP, 80, lb.ConsistencyHash, 1, ipip("10.4.0.1", 80))},
	}))
	// A veth end takes what its peer sends by XDP only with a program of its own.
	pass, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "Dual BSD/GPL", Flags: unix.BPF_F_XDP_HAS_FRAGS,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	must(t, err)
	defer pass.Close()
	peer, err := netlink.LinkByName("up4p")
	must(t, err)
	l, err := link.AttachXDP(link.XDPOptions{Program: pass, Interface: peer.Attrs().Index, Flags: link.XDPDriverMode})
	must(t, err)
	defer l.Close()
	socket, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	must(t, err)
	defer unix.Close(socket)
	must(t, unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_IP), Ifindex: peer.Attrs().Index}))
	must(t, unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}))

	for _, length := range []int{1400, 3500, 3600, 4000, 8900, 8980} {
		frame := packet(func(s *spec) { s.payload = length - 40 })
		for i := range frame[54:] {
			frame[54+i] = byte(i * 7 / 5)
		}
		cut := frame[:len(frame)-1]
		for _, f := range [][]byte{cut, frame} {
			must(t, unix.Sendto(socket, f, 0, &unix.SockaddrLinklayer{Ifindex: peer.Attrs().Index}))
		}
		got := make([]byte, 16384)
		size, _, err := unix.Recvfrom(socket, got, 0)
		if err != nil {
			t.Fatalf("%d bytes did not come back: %v", length, err)
		}
		want := slices.Clone(frame[14:])
		patchTTL(want)
		if got = got[:size]; len(got) != 14+20+length || string(got[34:]) != string(want) {
			t.Errorf("%d bytes came back as %d: %.80x", length, len(got)-34, got)
		}
	}
	exits := must2(d.Exits())
	if exits["tx"] != 6 || exits["truncated"] != 6 {
		t.Errorf("exits %v, want 6 tx and 6 truncated", exits)
	}
}

// TestPathMTU: a router on the way to a DIP says that the tunnel's packets are
// too big for it; the mux then says so to clients, less the outer headers.
func TestPathMTU(t *testing.T) {
	b := newBed(t)
	c := newClient(t, b.testNet)
	mac := b.links["up0"].Attrs().HardwareAddr
	router4, router6 := netip.MustParseAddr("10.0.0.254"), netip.MustParseAddr("fd00::fe")
	const narrow = 1400
	for _, way := range []struct {
		name     string
		frame    []byte // of a client; over narrow bytes with the outer headers
		outer6   bool
		protocol uint8 // of the outer header
		overhead int
	}{
		{"IPv4 in IPv4", packet(func(s *spec) { s.payload = narrow - 59 }), false, 4, 20},
		{"IPv4 in GUE", packet(to(vip4, 1), func(s *spec) { s.payload = narrow - 60 }), false, 17, 28},
		{"IPv4 in IPv6", packet(to(vip4, 2), func(s *spec) { s.payload = narrow - 60 }), true, 4, 40},
		{"IPv4 in GUE over IPv6", packet(to(vip4, 3), func(s *spec) { s.payload = narrow - 60 }), true, 17, 48},
		{"IPv6 in IPv6", packet(with6(), func(s *spec) { s.payload = narrow - 80 }), true, 41, 40},
		{"IPv6 in IPv4", packet(with6(), udp(), to(vip6, 53), func(s *spec) { s.payload = narrow - 60 }), false, 41, 20},
	} {
		t.Run(way.name, func(t *testing.T) {
			b.enter(t)
			// The kernel's exceptions are for a pair of addresses: forget those of the case before.
			for _, r := range must2(netlink.RouteList(b.links["up0"], netlink.FAMILY_ALL)) {
				if r.Gw != nil {
					// What the kernel reports of a link, such as no carrier yet, it refuses to be told.
					r.Flags &= int(netlink.FLAG_ONLINK)
					must(t, netlink.RouteDel(&r))
					must(t, netlink.RouteAdd(&r))
				}
			}
			var sent result
			wait(t, "the packet to pass", func() bool {
				sent = runReal(t, b.d, way.frame, b.index("up0"))
				return sent.exit == "tx"
			})
			about := sent.out[14:]
			var f []byte
			if way.outer6 {
				if about[6] != way.protocol {
					t.Fatalf("outer protocol %d", about[6])
				}
				f = icmpPacket(true, 2, 0, narrow, about[:104], func(s *spec) { s.src, s.dst = router6, source6 })
				sum := sum16(f[22:54]) + uint32(len(f)-54) + 58 + sum16(f[54:])
				binary.BigEndian.PutUint16(f[56:], checksum(sum))
			} else {
				if about[9] != way.protocol {
					t.Fatalf("outer protocol %d", about[9])
				}
				// RFC 792 has a router quote eight bytes behind the header.
				f = icmpPacket(false, 3, 4, narrow, about[:28], func(s *spec) { s.src, s.dst = router4, source4 })
			}
			copy(f, mac)
			var got result
			wait(t, "the mux to answer a packet that is too big for the router", func() bool {
				must(t, unix.Sendto(c.socket, f, 0, &unix.SockaddrLinklayer{Ifindex: c.index}))
				got = runReal(t, b.d, way.frame, b.index("up0"))
				return got.exit == "fragmentation_needed"
			})
			mtu := binary.BigEndian.Uint32(got.out[14+20+4:])
			if way.frame[14]>>4 == 6 {
				mtu = binary.BigEndian.Uint32(got.out[14+40+4:])
			}
			if int(mtu) != narrow-way.overhead {
				t.Errorf("told %d, want %d", mtu, narrow-way.overhead)
			}
		})
	}
}
