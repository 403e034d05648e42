package bench

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// network is a network namespace:
//
//	mux0 192.0.2.1, 2001:db8:f::1 ---- (veth) ---- wire0, whose XDP program drops and counts
//	        | default route via 192.0.2.2, 2001:db8:f::2, which are wire0's MAC
//
// It has no name, so that the kernel takes it away with the process, however
// that ends.
type network struct {
	namespace *os.File
	mux       netlink.Link
	wire      netlink.Link
	sink      link.Link
}

// newNetwork builds a network and leaves the calling thread, which must be
// locked, in it.
func newNetwork() (*network, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("create network namespace: %w (CAP_SYS_ADMIN is needed)", err)
	}
	namespace, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	n := &network{namespace: namespace}
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "mux0"
	attributes.NumRxQueues, attributes.NumTxQueues = 1, 1
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: "wire0"}); err != nil {
		return nil, fmt.Errorf("create veth mux0: %w", err)
	}
	// wire0 must send nothing of its own, which the mux would count.
	err = os.WriteFile("/proc/sys/net/ipv6/conf/wire0/disable_ipv6", []byte("1"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("disable IPv6 on wire0: %w", err)
	}
	for _, l := range []struct {
		name string
		link *netlink.Link
	}{{"lo", new(netlink.Link)}, {"mux0", &n.mux}, {"wire0", &n.wire}} {
		found, err := netlink.LinkByName(l.name)
		if err != nil {
			return nil, fmt.Errorf("find %s: %w", l.name, err)
		}
		if err := netlink.LinkSetUp(found); err != nil {
			return nil, fmt.Errorf("set %s up: %w", l.name, err)
		}
		*l.link = found
	}
	return n, n.route()
}

func (n *network) route() error {
	for _, family := range []struct{ addr, gateway, any string }{
		{"192.0.2.1/24", "192.0.2.2", "0.0.0.0/0"},
		{"2001:db8:f::1/64", "2001:db8:f::2", "::/0"},
	} {
		addr, err := netlink.ParseAddr(family.addr)
		if err != nil {
			return fmt.Errorf("parse %s: %w", family.addr, err)
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(n.mux, addr); err != nil {
			return fmt.Errorf("add %s to mux0: %w", family.addr, err)
		}
		gateway := net.ParseIP(family.gateway)
		err = netlink.NeighSet(&netlink.Neigh{
			LinkIndex:    n.mux.Attrs().Index,
			State:        netlink.NUD_PERMANENT,
			IP:           gateway,
			HardwareAddr: n.wire.Attrs().HardwareAddr,
		})
		if err != nil {
			return fmt.Errorf("add neighbour %s: %w", gateway, err)
		}
		_, all, err := net.ParseCIDR(family.any)
		if err != nil {
			return fmt.Errorf("parse %s: %w", family.any, err)
		}
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: n.mux.Attrs().Index, Dst: all, Gw: gateway})
		if err != nil {
			return fmt.Errorf("add route %s via %s: %w", all, gateway, err)
		}
	}
	return nil
}

// enter moves the calling thread, which must be locked, into the network.
func (n *network) enter() error {
	if err := unix.Setns(int(n.namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	return nil
}

// attachSink makes wire0 count and drop what arrives; frames sent by XDP reach a
// veth only if its peer has a program.
func (n *network) attachSink(p *ebpf.Program) error {
	l, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: n.wire.Attrs().Index})
	if err != nil {
		return fmt.Errorf("attach sink to wire0: %w", err)
	}
	n.sink = l
	return nil
}

// macs are the Ethernet addresses of a packet that arrives at mux0.
func (n *network) macs() (m [12]byte) {
	copy(m[:6], n.mux.Attrs().HardwareAddr)
	copy(m[6:], n.wire.Attrs().HardwareAddr)
	return m
}

// muxAddr is mux0's address of a family, the outer source of what the mux sends.
func muxAddr(ipv6 bool) netip.Addr {
	if ipv6 {
		return netip.MustParseAddr("2001:db8:f::1")
	}
	return netip.MustParseAddr("192.0.2.1")
}

func (n *network) close() {
	if n.sink != nil {
		_ = n.sink.Close()
	}
	_ = n.namespace.Close()
}
