package mux

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/mux/datapath"
)

// routeProtocol marks the mux's routes in the kernel (rtm_protocol).
const routeProtocol netlink.RouteProtocol = 201

// routeMetric is the highest: any other route of the same prefix wins.
const routeMetric = math.MaxUint32

// unassigned keeps an unreachable route for each announced prefix. Routers send
// the mux packets to all of a prefix, and the packet path passes those to no
// VIP: by the default route they would go back to the router, and so on until
// their TTL ends.
type unassigned struct {
	log *slog.Logger

	mu     sync.Mutex
	have   map[netip.Prefix]bool // guarded by mu: nil until read from the kernel
	failed string                // guarded by mu: the last error, logged once
}

// set makes prefixes those with a route. Host routes are left out: they are
// VIPs, whose packets the packet path does not pass, and there may be many.
func (u *unassigned) set(prefixes []netip.Prefix) {
	u.mu.Lock()
	defer u.mu.Unlock()
	failed := ""
	if err := u.reconcile(prefixes); err != nil {
		failed = err.Error()
		if failed != u.failed {
			u.log.Error("packets to unassigned addresses of announced prefixes may loop", "error", err)
		}
	}
	u.failed = failed
}

// reconcile is set; what fails is tried again by the next. The caller has mu.
func (u *unassigned) reconcile(prefixes []netip.Prefix) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	if u.have == nil {
		if u.have, err = unreachableRoutes(h); err != nil {
			u.have = nil
			return err
		}
	}
	want := map[netip.Prefix]bool{}
	for _, p := range prefixes {
		if p.IsSingleIP() {
			continue
		}
		want[p] = true
		if u.have[p] {
			continue
		}
		if e := h.RouteAdd(unreachableRoute(p)); e != nil && !errors.Is(e, unix.EEXIST) {
			err = errors.Join(err, fmt.Errorf("add unreachable route %s: %w", p, e))
			continue
		}
		u.have[p] = true
	}
	for p := range u.have {
		if want[p] {
			continue
		}
		if e := deleteUnreachable(h, p); e != nil {
			err = errors.Join(err, e)
			continue
		}
		delete(u.have, p)
	}
	return err
}

// count is how many prefixes have their route.
func (u *unassigned) count() int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.have)
}

func unreachableRoute(p netip.Prefix) *netlink.Route {
	return &netlink.Route{
		Dst:      &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
		Type:     unix.RTN_UNREACHABLE,
		Protocol: routeProtocol,
		Priority: routeMetric,
	}
}

func deleteUnreachable(h *netlink.Handle, p netip.Prefix) error {
	if err := h.RouteDel(unreachableRoute(p)); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete unreachable route %s: %w", p, err)
	}
	return nil
}

// unreachableRoutes reads the routes that some mux made.
func unreachableRoutes(h *netlink.Handle) (map[netip.Prefix]bool, error) {
	out := map[netip.Prefix]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		filter := &netlink.Route{Protocol: routeProtocol, Type: unix.RTN_UNREACHABLE}
		routes, err := h.RouteListFiltered(family, filter, netlink.RT_FILTER_PROTOCOL|netlink.RT_FILTER_TYPE)
		if err != nil {
			return nil, fmt.Errorf("read routes: %w", err)
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			addr, _ := netip.AddrFromSlice(r.Dst.IP)
			bits, _ := r.Dst.Mask.Size()
			out[netip.PrefixFrom(addr, bits)] = true
		}
	}
	return out, nil
}

// Detach takes the packet path that is pinned in pinDir off its interfaces and
// removes the mux's unreachable routes.
func Detach(pinDir string) error {
	return errors.Join(datapath.Detach(pinDir), deleteRoutes())
}

func deleteRoutes() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	routes, err := unreachableRoutes(h)
	for p := range routes {
		err = errors.Join(err, deleteUnreachable(h, p))
	}
	return err
}
