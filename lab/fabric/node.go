// Package fabric builds networks out of network namespaces: nodes, links,
// addresses and routes, real BIRD routers, and processes that run in a node.
//
// It knows nothing of load balancing. Everything that it makes can be taken
// away by name, whoever made it.
package fabric

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const netnsDir = "/run/netns" // where `ip netns` looks as well

// Node is one network namespace.
type Node struct {
	Name string // the namespace's, as `ip netns list` shows it
	ns   netns.NsHandle
	nl   *netlink.Handle
}

// inNamespace runs f on a thread that is in ns, and puts the thread back.
func inNamespace(ns netns.NsHandle, f func() error) error {
	runtime.LockOSThread()
	old, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("read own namespace: %w", err)
	}
	defer old.Close()
	if err := netns.Set(ns); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter namespace: %w", err)
	}
	err = f()
	if back := netns.Set(old); back != nil {
		// The thread stays locked, so that Go ends it with the goroutine.
		return errors.Join(err, fmt.Errorf("leave namespace: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

// Create makes a namespace with forwarding on, no reverse-path filter, IPv6
// addresses usable at once, and the loopback interface up. It fails if the name
// is taken.
func Create(name string) (*Node, error) {
	made := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		old, err := netns.Get()
		if err != nil {
			made <- err
			return
		}
		defer old.Close()
		ns, err := netns.NewNamed(name)
		if err == nil {
			ns.Close()
		}
		if back := netns.Set(old); back == nil {
			runtime.UnlockOSThread()
		}
		made <- err
	}()
	if err := <-made; err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	n, err := Open(name)
	if err != nil {
		return nil, err
	}
	if err := n.Sysctl(
		"net.ipv4.ip_forward=1",
		"net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0",
		"net.ipv6.conf.all.forwarding=1",
		"net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0",
		"net.ipv6.conf.default.router_solicitations=0",
		// A link that comes back has its IPv6 addresses still.
		"net.ipv6.conf.all.keep_addr_on_down=1", "net.ipv6.conf.default.keep_addr_on_down=1",
	); err != nil {
		n.Close()
		return nil, err
	}
	if err := n.SetUp("lo"); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Open finds a namespace by its name. The error is fs.ErrNotExist if there is none.
func Open(name string) (*Node, error) {
	ns, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	nl, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open netlink in %s: %w", name, err)
	}
	return &Node{Name: name, ns: ns, nl: nl}, nil
}

// Exists says whether the namespace's name is taken.
func Exists(name string) bool {
	_, err := os.Lstat(filepath.Join(netnsDir, name))
	return err == nil
}

// Close lets go of the namespace, which lives on.
func (n *Node) Close() {
	n.nl.Close()
	n.ns.Close()
}

// Delete removes the namespace's name; the namespace goes with its last
// process. It is no error if there is none.
func Delete(name string) error {
	path := filepath.Join(netnsDir, name)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount namespace %s: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove namespace %s: %w", name, err)
	}
	return nil
}

// Do runs f on a thread in the node's namespace: sockets that it opens are the
// node's, and so is /proc/sys/net. f must not start goroutines that need it.
func (n *Node) Do(f func() error) error {
	if err := inNamespace(n.ns, f); err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	return nil
}

// Sysctl sets "net.ipv4.ip_forward=1" and the like.
func (n *Node) Sysctl(settings ...string) error {
	return n.Do(func() error {
		for _, s := range settings {
			key, value, ok := strings.Cut(s, "=")
			if !ok {
				return fmt.Errorf("set %q: key=value is wanted", s)
			}
			path := "/proc/sys/" + strings.ReplaceAll(key, ".", "/")
			if err := os.WriteFile(path, []byte(value), 0); err != nil {
				return fmt.Errorf("set %s: %w", s, err)
			}
		}
		return nil
	})
}

// Connect makes a veth pair with one end in each node, both up.
func Connect(a *Node, aName string, b *Node, bName string, mtu int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Namespace = aName, mtu, netlink.NsFd(a.ns)
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: bName, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(b.ns)}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("connect %s (%s) to %s (%s): %w", a.Name, aName, b.Name, bName, err)
	}
	if err := a.SetUp(aName); err != nil {
		return err
	}
	return b.SetUp(bName)
}

func (n *Node) link(name string) (netlink.Link, error) {
	l, err := n.nl.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("%s: interface %s: %w", n.Name, name, err)
	}
	return l, nil
}

func (n *Node) onLink(name, what string, f func(netlink.Link) error) error {
	l, err := n.link(name)
	if err != nil {
		return err
	}
	if err := f(l); err != nil {
		return fmt.Errorf("%s: %s %s: %w", n.Name, what, name, err)
	}
	return nil
}

// SetUp turns an interface on.
func (n *Node) SetUp(name string) error { return n.onLink(name, "set up", n.nl.LinkSetUp) }

// SetDown turns an interface off: the other end loses its carrier.
func (n *Node) SetDown(name string) error { return n.onLink(name, "set down", n.nl.LinkSetDown) }

// SetMTU sets an interface's MTU in bytes.
func (n *Node) SetMTU(name string, mtu int) error {
	return n.onLink(name, "set MTU of", func(l netlink.Link) error { return n.nl.LinkSetMTU(l, mtu) })
}

// MTU is an interface's MTU in bytes.
func (n *Node) MTU(name string) (int, error) {
	l, err := n.link(name)
	if err != nil {
		return 0, err
	}
	return l.Attrs().MTU, nil
}

// SetXDP attaches a loaded XDP program to an interface for as long as the
// interface lives.
func (n *Node) SetXDP(name string, fd int) error {
	// netlink.LinkSetXdpFd works on the thread's own namespace only.
	return n.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		if err := netlink.LinkSetXdpFd(l, fd); err != nil {
			return fmt.Errorf("attach XDP program to %s: %w", name, err)
		}
		return nil
	})
}

// SetEgress runs a loaded tc program on what an interface sends, for as long as
// the interface lives.
func (n *Node) SetEgress(name string, fd int) error {
	return n.onLink(name, "attach tc program to", func(l netlink.Link) error {
		index := l.Attrs().Index
		qdisc := &netlink.GenericQdisc{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
			QdiscType:  "clsact",
		}
		if err := n.nl.QdiscReplace(qdisc); err != nil {
			return err
		}
		return n.nl.FilterReplace(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
			Fd:          fd, Name: "lab", DirectAction: true,
		})
	})
}

// Counters are an interface's packets and bytes since it was made.
type Counters struct {
	RxPackets, RxBytes, TxPackets, TxBytes uint64
}

// Counters reads an interface's counters.
func (n *Node) Counters(name string) (Counters, error) {
	l, err := n.link(name)
	if err != nil {
		return Counters{}, err
	}
	s := l.Attrs().Statistics
	if s == nil {
		return Counters{}, fmt.Errorf("%s: interface %s has no statistics", n.Name, name)
	}
	return Counters{s.RxPackets, s.RxBytes, s.TxPackets, s.TxBytes}, nil
}

// AddAddress gives an interface an address with its prefix length.
func (n *Node) AddAddress(name string, p netip.Prefix) error {
	return n.onLink(name, fmt.Sprintf("add address %s to", p), func(l netlink.Link) error {
		a := &netlink.Addr{IPNet: ipNet(p, false)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		return n.nl.AddrAdd(l, a)
	})
}

// Route is one route; Via or Interface, or both, must be set.
type Route struct {
	Dst       netip.Prefix
	Via       netip.Addr
	Interface string
	Source    netip.Addr // preferred source; may be left out
	OnLink    bool       // Via is on Interface although no route says so
	Local     bool       // Dst's addresses are the node's own
}

// AddRoute adds or replaces a route.
func (n *Node) AddRoute(r Route) error {
	route := &netlink.Route{Dst: ipNet(r.Dst, true), Protocol: unix.RTPROT_STATIC}
	if r.Via.IsValid() {
		route.Gw = r.Via.AsSlice()
	} else {
		route.Scope = netlink.SCOPE_LINK
	}
	if r.Source.IsValid() {
		route.Src = r.Source.AsSlice()
	}
	if r.OnLink {
		route.Flags |= int(netlink.FLAG_ONLINK)
	}
	if r.Local {
		route.Type, route.Scope, route.Table = unix.RTN_LOCAL, netlink.SCOPE_HOST, unix.RT_TABLE_LOCAL
	}
	if r.Interface != "" {
		l, err := n.link(r.Interface)
		if err != nil {
			return err
		}
		route.LinkIndex = l.Attrs().Index
	}
	if err := n.nl.RouteReplace(route); err != nil {
		return fmt.Errorf("%s: add route to %s: %w", n.Name, r.Dst, err)
	}
	return nil
}

// NextHops returns, for each prefix of the main table that leads somewhere, the
// interfaces that it is sent to, with their weights.
func (n *Node) NextHops() (map[netip.Prefix]map[string]int, error) {
	links, err := n.nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("%s: list interfaces: %w", n.Name, err)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	all := map[netip.Prefix]map[string]int{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := n.nl.RouteListFiltered(family, &netlink.Route{}, 0)
		if err != nil {
			return nil, fmt.Errorf("%s: read routes: %w", n.Name, err)
		}
		for _, r := range routes {
			if r.Dst == nil || r.Type != unix.RTN_UNICAST {
				continue
			}
			a, _ := netip.AddrFromSlice(r.Dst.IP)
			bits, _ := r.Dst.Mask.Size()
			p := netip.PrefixFrom(a, bits)
			if all[p] == nil {
				all[p] = map[string]int{}
			}
			if len(r.MultiPath) == 0 {
				all[p][names[r.LinkIndex]]++
			}
			for _, h := range r.MultiPath {
				all[p][names[h.LinkIndex]] += h.Hops + 1
			}
		}
	}
	return all, nil
}

// WatchRoutes calls f on each change of the node's routes until stop is closed.
func (n *Node) WatchRoutes(stop <-chan struct{}, f func(dst *net.IPNet)) error {
	updates := make(chan netlink.RouteUpdate, 64)
	if err := netlink.RouteSubscribeAt(n.ns, updates, stop); err != nil {
		return fmt.Errorf("%s: watch routes: %w", n.Name, err)
	}
	go func() {
		for u := range updates {
			f(u.Dst)
		}
	}()
	return nil
}

// OffloadsOff makes an interface send whole, checksummed packets, as a network
// card does: XDP forwards frames as they are and can't finish a checksum.
func (n *Node) OffloadsOff(name string) error {
	return n.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open socket: %w", err)
		}
		defer unix.Close(fd)
		for _, command := range []uint32{unix.ETHTOOL_STXCSUM, unix.ETHTOOL_SSG, unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO} {
			if err := ethtoolSet(fd, name, command, 0); err != nil {
				return fmt.Errorf("turn offload %#x of %s off: %w", command, name, err)
			}
		}
		return nil
	})
}

// TakeXDP makes a veth interface take what the other end's XDP programs send: it
// needs NAPI, which a veth has while GRO is asked for.
func (n *Node) TakeXDP(name string) error {
	return n.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open socket for ethtool: %w", err)
		}
		defer unix.Close(fd)
		// Only a change is heard, and the flag may be on without NAPI.
		for _, on := range []uint32{0, 1} {
			if err := ethtoolSet(fd, name, unix.ETHTOOL_SGRO, on); err != nil {
				return fmt.Errorf("set GRO of %s: %w", name, err)
			}
		}
		return nil
	})
}

// Nft loads an nftables script in the node.
func (n *Node) Nft(script string) error {
	out, err := n.Run(Command{Args: []string{"nft", "-f", "-"}, Stdin: script})
	if err != nil {
		return fmt.Errorf("%s: load nftables rules: %w: %s", n.Name, err, strings.TrimSpace(out))
	}
	return nil
}

// Mute drops everything that an interface takes or gives, without a change of
// its carrier: to the other side this node is silently dead, and it to this one.
// The other side's XDP programs see nothing either.
func (n *Node) Mute(name string) error {
	return n.Nft(fmt.Sprintf(`table inet lab_mute_%[1]s {
  chain in { type filter hook prerouting priority -500; iifname "%[2]s" drop; }
  chain out { type filter hook postrouting priority -500; oifname "%[2]s" drop; }
}`, strings.ReplaceAll(name, "-", "_"), name))
}

// Unmute undoes Mute, and is no error without it.
func (n *Node) Unmute(name string) error {
	table := "inet lab_mute_" + strings.ReplaceAll(name, "-", "_")
	return n.Nft("table " + table + " {}\ndelete table " + table)
}

// Cut drops tunnel packets that the node forwards from an address of either
// family to an interface. Nothing else is touched.
func (n *Node) Cut(from4, from6 netip.Addr, to string) error {
	return n.Nft(fmt.Sprintf(`table inet %s {
  chain tunnels { meta l4proto { 4, 41 } drop; udp dport 6080 drop; }
  chain forward { type filter hook forward priority -500;
    oifname "%[2]s" ip saddr %[3]s jump tunnels; oifname "%[2]s" ip6 saddr %[4]s jump tunnels; }
}`, cutTable(from4, to), to, from4, from6))
}

// Mend undoes Cut, and is no error without it.
func (n *Node) Mend(from4 netip.Addr, to string) error {
	table := "inet " + cutTable(from4, to)
	return n.Nft("table " + table + " {}\ndelete table " + table)
}

func cutTable(from netip.Addr, to string) string {
	return strings.NewReplacer("-", "_", ".", "_").Replace("lab_cut_" + from.String() + "_" + to)
}

// IgnoreMSS makes the node take a TCP peer's maximum segment size, which a
// tunnel's overhead was taken off, for what the MTU has room for.
//
// nft's own "maxseg size set" only ever lowers, and a raw write leaves the
// checksum alone. So the urgent pointer, which has no meaning without its
// flag, takes back what the size gains. Linux puts the size first among the
// options: 22 bytes into the header.
func (n *Node) IgnoreMSS(mtu int) error {
	var rules strings.Builder
	for _, headers := range []struct {
		family string
		bytes  int
	}{{"ipv4", 40}, {"ipv6", 60}} {
		full := mtu - headers.bytes
		for _, overhead := range []int{20, 28, 40, 48} { // IP in IPv4 and IPv6; GUE in them
			fmt.Fprintf(&rules, "    meta nfproto %s tcp flags & (syn | ack) == syn | ack tcp option maxseg size %d @th,144,16 set %d @th,176,16 set %d accept\n",
				headers.family, full-overhead, 0xffff-overhead, full)
		}
	}
	return n.Nft("table inet lab_mss {\n  chain in { type filter hook prerouting priority -500;\n" + rules.String() + "  }\n}")
}

// HeedMSS undoes IgnoreMSS, and is no error without it.
func (n *Node) HeedMSS() error { return n.Nft("table inet lab_mss {}\ndelete table inet lab_mss") }

func ipNet(p netip.Prefix, masked bool) *net.IPNet {
	if masked {
		p = p.Masked()
	}
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// inode identifies a namespace for as long as it lives.
func inode(path string) (uint64, error) {
	var s syscall.Stat_t
	if err := syscall.Stat(path, &s); err != nil {
		return 0, err
	}
	return s.Ino, nil
}
