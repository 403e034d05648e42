package datapath

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// neighbours keeps the program's next hops true: it ends cached ones when
// routes, neighbours or interfaces change, asks for MAC addresses that the
// program misses, tells it what lies below VLAN interfaces, and has the kernel
// learn the path MTU of tunnels.
type neighbours struct {
	handle *netlink.Handle // of the namespace that the datapath was opened in
	wanted *ringbuf.Reader
	errors []int // sockets
	done   chan struct{}
	wg     sync.WaitGroup
}

func watchNextHops(d *Datapath) (*neighbours, error) {
	n := &neighbours{done: make(chan struct{})}
	var err error
	if n.handle, err = netlink.NewHandle(); err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	routes := make(chan netlink.RouteUpdate, 64)
	neighs := make(chan netlink.NeighUpdate, 64)
	links := make(chan netlink.LinkUpdate, 64)
	if err := errors.Join(
		netlink.RouteSubscribe(routes, n.done),
		netlink.NeighSubscribe(neighs, n.done),
		netlink.LinkSubscribe(links, n.done),
	); err != nil {
		n.close()
		return nil, fmt.Errorf("watch routes: %w", err)
	}
	if n.wanted, err = ringbuf.NewReader(d.maps.WantedNeighbours); err != nil {
		n.close()
		return nil, fmt.Errorf("watch neighbours: %w", err)
	}
	if err := n.readVLANs(d); err != nil {
		n.close()
		return nil, err
	}
	if err := n.learnPathMTU(); err != nil {
		n.close()
		return nil, fmt.Errorf("learn path MTU: %w", err)
	}
	generation := &d.settings.NextHopGeneration
	atomic.AddUint32(generation, 1)

	n.wg.Add(2)
	go func() {
		defer n.wg.Done()
		for {
			select {
			case <-n.done:
				return
			case _, ok := <-routes:
				if !ok {
					routes = nil
				}
			case _, ok := <-neighs:
				if !ok {
					neighs = nil
				}
			case u, ok := <-links:
				if !ok {
					links = nil
				} else if u.Link.Type() == "vlan" {
					_ = n.readVLANs(d)
				}
			}
			atomic.AddUint32(generation, 1)
		}
	}()
	go func() {
		defer n.wg.Done()
		for {
			record, err := n.wanted.Read()
			if err != nil {
				return
			}
			if len(record.RawSample) >= int(unsafe.Sizeof(muxWantedNeighbour{})) {
				n.resolve((*muxWantedNeighbour)(unsafe.Pointer(&record.RawSample[0])))
			}
		}
	}()
	return n, nil
}

// learnPathMTU opens sockets of the tunnels' protocols. Where there is one, the
// kernel takes a router's "fragmentation needed" or "packet too big" about a
// tunnel's packet to heart, and its FIB tells the program the smaller MTU from
// the next time that it is asked (NEXT_HOP_LIFETIME_NS) until the exception
// ends (net.ipv4.route.mtu_expires). Nothing is received by them.
func (n *neighbours) learnPathMTU() error {
	nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		for _, protocol := range []int{unix.IPPROTO_IPIP, unix.IPPROTO_IPV6, unix.IPPROTO_UDP} {
			s, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
			if errors.Is(err, unix.EAFNOSUPPORT) {
				continue // IPv6 is off
			} else if err != nil {
				return err
			}
			n.errors = append(n.errors, s)
			if err := unix.SetsockoptSockFprog(s, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
				&unix.SockFprog{Len: uint16(len(nothing)), Filter: &nothing[0]}); err != nil {
				return err
			}
			if family == unix.AF_INET {
				continue
			}
			// IPv6 heeds errors for those only who want to hear of them; the
			// queue, never read, stays as small as it can be.
			if err := errors.Join(unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_RCVBUF, 1),
				unix.SetsockoptInt(s, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)); err != nil {
				return err
			}
		}
	}
	return nil
}

// resolve makes the kernel ask for a MAC address; its answer comes as a
// neighbour event. A lost request is made again by the next packet.
func (n *neighbours) resolve(w *muxWantedNeighbour) {
	addr := wordsAddr(w.Addr, w.Is6 == 1)
	family := netlink.FAMILY_V4
	if addr.Is6() {
		family = netlink.FAMILY_V6
	}
	_ = n.handle.NeighAdd(&netlink.Neigh{
		LinkIndex: int(w.Ifindex),
		Family:    family,
		IP:        net.IP(addr.AsSlice()),
		State:     netlink.NUD_NONE,
		Flags:     netlink.NTF_USE,
	})
}

// readVLANs tells the program how packets leave by a VLAN interface.
func (n *neighbours) readVLANs(d *Datapath) error {
	links, err := n.handle.LinkList()
	if err != nil {
		return fmt.Errorf("list interfaces: %w", err)
	}
	for _, l := range links {
		if v, ok := l.(*netlink.Vlan); ok {
			below := muxVlanLink{Ifindex: uint32(v.ParentIndex), Vlan: htons(uint16(v.VlanId))}
			if err := d.maps.VlanLinks.Put(uint32(v.Index), below); err != nil {
				return fmt.Errorf("note VLAN interface %s: %w", v.Name, err)
			}
		}
	}
	return nil
}

func (n *neighbours) interfaceName(ifindex int) string {
	l, err := n.handle.LinkByIndex(ifindex)
	if err != nil {
		return fmt.Sprintf("if%d", ifindex)
	}
	return l.Attrs().Name
}

func (n *neighbours) close() {
	close(n.done)
	for _, s := range n.errors {
		unix.Close(s)
	}
	if n.wanted != nil {
		if err := n.wanted.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			return
		}
	}
	n.wg.Wait()
	if n.handle != nil {
		n.handle.Close()
	}
}
