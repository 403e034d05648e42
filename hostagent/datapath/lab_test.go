package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/encap"
	"github.com/quartet-lb/quartet/lb"
)

// testLab is a data centre of four network namespaces:
//
//	client ── router ── host ── vm
//	            │        └ local DIPs on lo; the agent on eth0
//	          mux0 (TUN): what is sent to a VIP comes to the test, which
//	          encapsulates it and hands it back to the router
type testLab struct {
	prefix string
	tunnel atomic.Pointer[tunnelFormat]
	outer6 atomic.Bool
	// What the test's mux encapsulated.
	packets, bytes atomic.Uint64
	routes         map[netip.Addr]muxRoute
	agent          *Datapath // that is to be detached in the end
}

// tunnelFormat puts a packet into a tunnel.
type tunnelFormat func(src, dst netip.Addr, inner []byte) []byte

// muxFormat is what muxes send.
func muxFormat(e lb.Encapsulation) tunnelFormat {
	return func(src, dst netip.Addr, inner []byte) []byte {
		b, err := encap.Encapsulate(lb.Tunnel{Dst: dst, Encap: e}, src, 0x123456789abcdef0, inner)
		if err != nil {
			return nil // a neighbour discovery packet, or one whose TTL ends
		}
		return b
	}
}

// builtFormat is a format of the tests' builders.
func builtFormat(name string) tunnelFormat {
	return func(src, dst netip.Addr, inner []byte) []byte { return tunnelFormats[name](src, dst, inner).bytes() }
}

// muxRoute is where the test's mux sends a VIP's packets.
type muxRoute struct{ tunnel4, tunnel6 netip.Addr }

var labs atomic.Uint32

const (
	client4, client6 = "198.51.100.7", "2001:db8:1::7"
	hostDIP4         = "10.1.3.11"
	hostDIP6         = "fd00:3::11"
	vmDIP4, vmDIP6   = "10.1.4.2", "fd00:4::2"
	hostVIP4         = "203.0.113.10"
	hostVIP6         = "2001:db8:f::10"
	vmVIP4, vmVIP6   = "203.0.113.20", "2001:db8:f::20"
)

func newLab(t *testing.T) *testLab {
	t.Helper()
	l := &testLab{
		prefix: fmt.Sprintf("qha%d-%d-", os.Getpid(), labs.Add(1)),
		routes: map[netip.Addr]muxRoute{
			addr(hostVIP4): {addr(hostDIP4), addr(hostDIP6)},
			addr(hostVIP6): {addr(hostDIP4), addr(hostDIP6)},
			addr(vmVIP4):   {addr(vmDIP4), addr(vmDIP6)},
			addr(vmVIP6):   {addr(vmDIP4), addr(vmDIP6)},
		},
	}
	l.setTunnel(muxFormat(lb.EncapIPIP), false)
	names := []string{"client", "router", "host", "vm"}
	t.Cleanup(func() {
		for _, n := range names {
			if err := exec.Command("ip", "netns", "del", l.prefix+n).Run(); err != nil {
				t.Errorf("delete namespace %s: %v", n, err)
			}
		}
	})
	for _, n := range names {
		l.sh(t, "ip netns add "+l.prefix+n)
		l.sh(t, "ip -n "+l.prefix+n+" link set lo up")
		for _, sysctl := range []string{
			"net/ipv4/ip_forward=1", "net/ipv6/conf/all/forwarding=1",
			"net/ipv4/conf/all/rp_filter=0", "net/ipv4/conf/default/rp_filter=0",
			"net/ipv6/conf/default/accept_dad=0", "net/ipv6/conf/all/accept_dad=0",
			"net/ipv4/icmp_ratelimit=0", "net/ipv6/icmp/ratelimit=0",
			"net/ipv4/icmp_msgs_per_sec=100000",
		} {
			file, value, _ := strings.Cut(sysctl, "=")
			l.in(t, n, func() error { return os.WriteFile("/proc/sys/"+file, []byte(value), 0) })
		}
	}
	link := func(a, aDev, b, bDev string) {
		l.sh(t, fmt.Sprintf("ip -n %s%s link add %s type veth peer name %s netns %s%s", l.prefix, a, aDev, bDev, l.prefix, b))
		for _, e := range [][2]string{{a, aDev}, {b, bDev}} {
			l.ip(t, e[0], "link set "+e[1]+" up")
		}
	}
	link("client", "eth0", "router", "client0")
	link("router", "host0", "host", "eth0")
	link("host", "vm0", "vm", "eth0")

	l.mux(t)
	for _, c := range []string{
		"client: addr add 198.51.100.7/24 dev eth0", "client: addr add 2001:db8:1::7/64 dev eth0",
		"client: route add default via 198.51.100.1", "client: route add default via 2001:db8:1::1",
		"router: addr add 198.51.100.1/24 dev client0", "router: addr add 2001:db8:1::1/64 dev client0",
		"router: addr add 10.1.0.1/24 dev host0", "router: addr add fd00:1::1/64 dev host0",
		"router: route add 10.1.3.0/24 via 10.1.0.2", "router: route add fd00:3::/64 via fd00:1::2",
		"router: route add 10.1.4.0/24 via 10.1.0.2", "router: route add fd00:4::/64 via fd00:1::2",
		"router: route add 203.0.113.0/24 dev mux0", "router: route add 2001:db8:f::/64 dev mux0",
		"host: addr add 10.1.0.2/24 dev eth0", "host: addr add fd00:1::2/64 dev eth0",
		"host: addr add 10.1.3.11/32 dev lo", "host: addr add fd00:3::11/128 dev lo",
		"host: route add default via 10.1.0.1", "host: route add default via fd00:1::1",
		"host: addr add 10.1.4.1/24 dev vm0", "host: addr add fd00:4::1/64 dev vm0",
		"vm: addr add 10.1.4.2/24 dev eth0", "vm: addr add fd00:4::2/64 dev eth0",
		"vm: route add default via 10.1.4.1", "vm: route add default via fd00:4::1",
	} {
		ns, args, _ := strings.Cut(c, ": ")
		if strings.HasPrefix(args, "addr add fd") || strings.HasPrefix(args, "addr add 2001") {
			args += " nodad" // which also makes it usable at once
		}
		l.ip(t, ns, args)
	}
	return l
}

func (l *testLab) sh(t *testing.T, command string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
}

func (l *testLab) ip(t *testing.T, ns, args string) {
	t.Helper()
	l.sh(t, "ip -n "+l.prefix+ns+" "+args)
}

// in runs f in a namespace.
func (l *testLab) in(t *testing.T, ns string, f func() error) {
	t.Helper()
	if err := l.inside(ns, f); err != nil {
		t.Fatalf("in %s: %v", ns, err)
	}
}

func (l *testLab) inside(ns string, f func() error) error {
	done := make(chan error)
	go func() {
		// The thread is not unlocked: it ends with the goroutine, in that namespace.
		runtime.LockOSThread()
		done <- func() error {
			fd, err := unix.Open(filepath.Join("/run/netns", l.prefix+ns), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
				return err
			}
			return f()
		}()
	}()
	return <-done
}

func (l *testLab) setTunnel(format tunnelFormat, outer6 bool) {
	l.tunnel.Store(&format)
	l.outer6.Store(outer6)
}

// mux makes the router's TUN device and the goroutine behind it.
func (l *testLab) mux(t *testing.T) {
	t.Helper()
	var tun *os.File
	l.in(t, "router", func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		var request struct {
			name  [unix.IFNAMSIZ]byte
			flags uint16
			_     [22]byte
		}
		copy(request.name[:], "mux0")
		request.flags = unix.IFF_TUN | unix.IFF_NO_PI
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&request))); errno != 0 {
			return errno
		}
		tun = os.NewFile(uintptr(fd), "mux0")
		return nil
	})
	l.ip(t, "router", "link set mux0 up mtu 1500")
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 65536)
		for {
			n, err := tun.Read(buf)
			if err != nil {
				if !errors.Is(err, os.ErrClosed) {
					t.Errorf("read mux0: %v", err)
				}
				return
			}
			if out := l.encapsulate(buf[:n]); out != nil {
				if _, err := tun.Write(out); err != nil && !errors.Is(err, os.ErrClosed) {
					t.Errorf("write mux0: %v", err)
				}
			}
		}
	})
	t.Cleanup(func() {
		if err := tun.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
}

func (l *testLab) encapsulate(inner []byte) []byte {
	var vip netip.Addr
	if inner[0]>>4 == 4 {
		vip = netip.AddrFrom4([4]byte(inner[16:20]))
	} else {
		vip = netip.AddrFrom16([16]byte(inner[24:40]))
	}
	r, ok := l.routes[vip]
	if !ok {
		return nil
	}
	l.packets.Add(1)
	l.bytes.Add(uint64(len(inner)))
	format := *l.tunnel.Load()
	src, dst := addr("10.0.0.1"), r.tunnel4
	if l.outer6.Load() {
		src, dst = addr("fd00::1"), r.tunnel6
	}
	return format(src, dst, inner)
}

// rules are TCP and UDP port 80 of each VIP to port 8080 of its DIP, in tunnels
// of both families.
func (l *testLab) rules() []Rule {
	var all []Rule
	for _, v := range []struct{ vip, dip string }{
		{hostVIP4, hostDIP4}, {hostVIP6, hostDIP6}, {vmVIP4, vmDIP4}, {vmVIP6, vmDIP6},
	} {
		r := l.routes[addr(v.vip)]
		for _, tunnel := range []netip.Addr{r.tunnel4, r.tunnel6} {
			for _, p := range []lb.Protocol{lb.TCP, lb.UDP} {
				all = append(all, rule(tunnel.String(), p, netip.AddrPortFrom(addr(v.vip), 80).String(), v.dip, 8080))
			}
		}
	}
	return all
}

// open opens the agent's packet path on the host.
func (l *testLab) open(t *testing.T, c Config) *Datapath {
	t.Helper()
	var d *Datapath
	l.in(t, "host", func() (err error) {
		c.Interfaces = []string{"eth0"}
		d, err = Open(c)
		return err
	})
	return d
}

// eventually polls until f holds.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
