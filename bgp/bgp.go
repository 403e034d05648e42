// Package bgp announces routes to the fabric's routers and withdraws them. It
// is the only door to GoBGP.
package bgp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/osrg/gobgp/v4/api"
	"github.com/osrg/gobgp/v4/pkg/apiutil"
	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"github.com/osrg/gobgp/v4/pkg/server"
)

// Community is a BGP community, RFC 1997.
type Community uint32

// Well-known communities.
const (
	GracefulShutdown Community = 0xffff0000 // RFC 8326: prefer any other path, this one is about to go
	Blackhole        Community = 0xffff029a // RFC 7999: discard traffic to this prefix
	NoExport         Community = 0xffffff01 // RFC 1997: stay within the neighbouring AS
)

// Route is what a speaker announces.
type Route struct {
	Prefix      netip.Prefix
	NextHop     netip.Addr // zero: the speaker's own address on each session
	Communities []Community
}

// Speaker is a BGP speaker whose routes are declared as a whole set.
type Speaker interface {
	// Set makes routes all that is announced. It returns when the changes are
	// queued to the peers; peers that come up later get the whole set.
	Set(ctx context.Context, routes []Route) error
	// Peers is the state of each configured peer, in the order of Config.Peers.
	Peers(ctx context.Context) []PeerStatus
	// Stop withdraws every route, waits until that is sent to all established
	// peers or ctx ends, and closes the sessions.
	Stop(ctx context.Context) error
}

// PeerStatus is what is observed of a peer.
type PeerStatus struct {
	Address netip.Addr
	ASN     uint32
	State   string // RFC 4271 section 8.2.2, lower case: "idle", "active", "established", …
	BFD     bool   // BFD is configured
	BFDUp   bool
}

// Start starts a speaker that announces nothing yet. It fails if the
// configuration is bad or another process has the BGP port.
func Start(ctx context.Context, c Config) (Speaker, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("start BGP: %w", err)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	log := c.Log
	s := &speaker{
		server:    server.NewBgpServer(server.LoggerOption(slog.New(demoted{log.Handler()}), nil)),
		config:    c,
		announced: map[netip.Prefix]Route{},
	}
	go s.server.Serve()
	if err := s.start(ctx); err != nil {
		s.server.Stop()
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("start BGP: listen on port %d: another process has this port", c.ListenPort)
		}
		return nil, fmt.Errorf("start BGP: %w", err)
	}
	var err error
	if s.bfd, err = startBFD(c.Peers, log, s.bfdDown); err != nil {
		s.server.Stop()
		return nil, err
	}
	return s, nil
}

// bfdDown closes the BGP session with a peer that BFD found silent.
func (s *speaker) bfdDown(peer netip.Addr) {
	ctx := context.Background()
	// GoBGP would keep the order to close for the next session if there is none.
	if s.observe(ctx)[peer].state != "established" {
		return
	}
	if err := s.server.ResetPeer(ctx, &api.ResetPeerRequest{Address: peer.String(), Communication: "BFD is down"}); err != nil {
		s.config.Log.Warn("close BGP session", "peer", peer, "error", err)
	}
}

type speaker struct {
	server *server.BgpServer
	bfd    *bfdSpeaker
	config Config

	mu        sync.Mutex
	announced map[netip.Prefix]Route // guarded by mu: what GoBGP has
	stopped   bool                   // guarded by mu
}

var (
	ipv4Unicast = &api.Family{Afi: api.Family_AFI_IP, Safi: api.Family_SAFI_UNICAST}
	ipv6Unicast = &api.Family{Afi: api.Family_AFI_IP6, Safi: api.Family_SAFI_UNICAST}
)

func (s *speaker) start(ctx context.Context) error {
	port := int32(s.config.ListenPort)
	if s.config.NoListen {
		port = -1
	}
	if err := s.server.StartBgp(ctx, &api.StartBgpRequest{Global: &api.Global{
		Asn: s.config.ASN, RouterId: s.config.RouterID.String(), ListenPort: port,
	}}); err != nil {
		return err
	}
	if err := s.policies(ctx); err != nil {
		return err
	}
	for _, p := range s.config.Peers {
		if err := s.server.AddPeer(ctx, &api.AddPeerRequest{Peer: s.peer(p)}); err != nil {
			return fmt.Errorf("add peer %s: %w", p.Address, err)
		}
	}
	return nil
}

// policies rejects everything that peers announce, or else GoBGP would pass it
// on from one peer to another and make the mux look like a way through. And it
// sets the next hop of IPv6 prefixes on IPv4 sessions.
func (s *speaker) policies(ctx context.Context) error {
	reject := &api.Statement{
		Name:       "reject-learned",
		Conditions: &api.Conditions{NeighborSet: &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: "any"}},
		Actions:    &api.Actions{RouteAction: api.RouteAction_ROUTE_ACTION_REJECT},
	}
	if err := s.server.AddDefinedSet(ctx, &api.AddDefinedSetRequest{DefinedSet: &api.DefinedSet{
		DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: "any", List: []string{"0.0.0.0/0", "::/0"},
	}}); err != nil {
		return err
	}
	if err := s.assign(ctx, "import", api.PolicyDirection_POLICY_DIRECTION_IMPORT, []*api.Statement{reject}); err != nil {
		return err
	}
	var nextHops []*api.Statement
	for _, p := range s.config.Peers {
		if !p.NextHop6.IsValid() {
			continue
		}
		name := "next-hop6-" + p.Address.String()
		if err := s.server.AddDefinedSet(ctx, &api.AddDefinedSetRequest{DefinedSet: &api.DefinedSet{
			DefinedType: api.DefinedType_DEFINED_TYPE_NEIGHBOR, Name: name,
			List: []string{netip.PrefixFrom(p.Address, p.Address.BitLen()).String()},
		}}); err != nil {
			return err
		}
		nextHops = append(nextHops, &api.Statement{
			Name: name,
			Conditions: &api.Conditions{
				NeighborSet: &api.MatchSet{Type: api.MatchSet_TYPE_ANY, Name: name},
				AfiSafiIn:   []*api.Family{ipv6Unicast},
			},
			Actions: &api.Actions{
				RouteAction: api.RouteAction_ROUTE_ACTION_ACCEPT,
				Nexthop:     &api.NexthopAction{Address: p.NextHop6.String()},
			},
		})
	}
	if nextHops == nil {
		return nil
	}
	return s.assign(ctx, "export", api.PolicyDirection_POLICY_DIRECTION_EXPORT, nextHops)
}

func (s *speaker) assign(ctx context.Context, name string, direction api.PolicyDirection, statements []*api.Statement) error {
	policy := &api.Policy{Name: name, Statements: statements}
	if err := s.server.AddPolicy(ctx, &api.AddPolicyRequest{Policy: policy}); err != nil {
		return err
	}
	return s.server.AddPolicyAssignment(ctx, &api.AddPolicyAssignmentRequest{Assignment: &api.PolicyAssignment{
		Name: "global", Direction: direction, Policies: []*api.Policy{{Name: name}},
		DefaultAction: api.RouteAction_ROUTE_ACTION_ACCEPT,
	}})
}

func (s *speaker) peer(p Peer) *api.Peer {
	peer := &api.Peer{
		Conf: &api.PeerConf{
			NeighborAddress: p.Address.String(), PeerAsn: p.ASN, AuthPassword: p.Password,
		},
		Timers: &api.Timers{Config: &api.TimersConfig{
			HoldTime:          uint64(p.HoldTime / time.Second),
			KeepaliveInterval: uint64(p.Keepalive / time.Second),
			// GoBGP's least; its default of 120 s is how long a mux would stay
			// away after its router restarted.
			ConnectRetry:                 2,
			IdleHoldTimeAfterReset:       1,
			MinimumAdvertisementInterval: 0,
		}},
		Transport: &api.Transport{PassiveMode: p.Passive, RemotePort: uint32(p.Port)},
	}
	if p.Local.IsValid() {
		peer.Transport.LocalAddress = p.Local.String()
	}
	if p.Multihop > 0 {
		peer.EbgpMultihop = &api.EbgpMultihop{Enabled: true, MultihopTtl: uint32(p.Multihop)}
	}
	for _, f := range p.families() {
		family := ipv4Unicast
		if f == packet.RF_IPv6_UC {
			family = ipv6Unicast
		}
		peer.AfiSafis = append(peer.AfiSafis, &api.AfiSafi{Config: &api.AfiSafiConfig{Family: family, Enabled: true}})
	}
	return peer
}

// families are the address families whose prefixes go to a peer.
func (p Peer) families() []packet.Family {
	switch {
	case p.Address.Is6():
		return []packet.Family{packet.RF_IPv6_UC}
	case p.NextHop6.IsValid():
		return []packet.Family{packet.RF_IPv4_UC, packet.RF_IPv6_UC}
	}
	return []packet.Family{packet.RF_IPv4_UC}
}

func family(prefix netip.Prefix) packet.Family {
	if prefix.Addr().Is4() {
		return packet.RF_IPv4_UC
	}
	return packet.RF_IPv6_UC
}

// Set implements Speaker.
func (s *speaker) Set(_ context.Context, routes []Route) error {
	want := make(map[netip.Prefix]Route, len(routes))
	for i, r := range routes {
		if !r.Prefix.IsValid() || r.Prefix.Addr().Is4In6() || r.Prefix != r.Prefix.Masked() {
			return fmt.Errorf("announce: routes[%d]: %s is not a prefix with its host bits zero", i, r.Prefix)
		}
		if _, twice := want[r.Prefix]; twice {
			return fmt.Errorf("announce: routes[%d]: %s is given twice", i, r.Prefix)
		}
		if r.NextHop.IsValid() && r.NextHop.Is4() != r.Prefix.Addr().Is4() {
			return fmt.Errorf("announce: routes[%d]: the next hop %s is not of the family of %s", i, r.NextHop, r.Prefix)
		}
		want[r.Prefix] = r
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errors.New("announce: the speaker is stopped")
	}
	return s.set(want)
}

// set announces what is missing before it withdraws what is too much, so that
// a host route that replaces an aggregate never leaves a gap. The caller has mu.
func (s *speaker) set(want map[netip.Prefix]Route) error {
	for _, r := range inOrder(want) {
		if have, ok := s.announced[r.Prefix]; ok && have.equal(r) {
			continue
		}
		path, err := r.path()
		if err != nil {
			return fmt.Errorf("announce %s: %w", r.Prefix, err)
		}
		if _, err := s.server.AddPath(apiutil.AddPathRequest{Paths: []*apiutil.Path{path}}); err != nil {
			return fmt.Errorf("announce %s: %w", r.Prefix, err)
		}
		s.announced[r.Prefix] = r
	}
	for _, r := range inOrder(s.announced) {
		if _, ok := want[r.Prefix]; ok {
			continue
		}
		path, err := r.path()
		if err != nil {
			return fmt.Errorf("withdraw %s: %w", r.Prefix, err)
		}
		if err := s.server.DeletePath(apiutil.DeletePathRequest{Paths: []*apiutil.Path{path}}); err != nil {
			return fmt.Errorf("withdraw %s: %w", r.Prefix, err)
		}
		delete(s.announced, r.Prefix)
	}
	return nil
}

func inOrder(routes map[netip.Prefix]Route) []Route {
	list := make([]Route, 0, len(routes))
	for _, r := range routes {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b Route) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return list
}

func (r Route) equal(o Route) bool {
	return r.Prefix == o.Prefix && r.NextHop == o.NextHop && slices.Equal(r.Communities, o.Communities)
}

func (r Route) path() (*apiutil.Path, error) {
	nlri, err := packet.NewIPAddrPrefix(r.Prefix)
	if err != nil {
		return nil, err
	}
	nextHop := r.NextHop
	if !nextHop.IsValid() {
		// GoBGP puts the session's local address in place of the unspecified one.
		nextHop = netip.IPv4Unspecified()
		if r.Prefix.Addr().Is6() {
			nextHop = netip.IPv6Unspecified()
		}
	}
	attrs := []packet.PathAttributeInterface{packet.NewPathAttributeOrigin(packet.BGP_ORIGIN_ATTR_TYPE_IGP)}
	if r.Prefix.Addr().Is4() {
		a, err := packet.NewPathAttributeNextHop(nextHop)
		if err != nil {
			return nil, err
		}
		attrs = append(attrs, a)
	} else {
		a, err := packet.NewPathAttributeMpReachNLRI(packet.RF_IPv6_UC, []packet.PathNLRI{{NLRI: nlri}}, nextHop)
		if err != nil {
			return nil, err
		}
		attrs = append(attrs, a)
	}
	if len(r.Communities) > 0 {
		communities := make([]uint32, len(r.Communities))
		for i, c := range r.Communities {
			communities[i] = uint32(c)
		}
		attrs = append(attrs, packet.NewPathAttributeCommunities(communities))
	}
	return &apiutil.Path{Family: family(r.Prefix), Nlri: nlri, Attrs: attrs, Age: time.Now().Unix()}, nil
}

// Peers implements Speaker.
func (s *speaker) Peers(ctx context.Context) []PeerStatus {
	seen := s.observe(ctx)
	list := make([]PeerStatus, 0, len(s.config.Peers))
	for _, p := range s.config.Peers {
		status := PeerStatus{Address: p.Address, ASN: p.ASN, State: "idle", BFD: p.BFD.Interval > 0}
		if o, ok := seen[p.Address]; ok {
			status.State, status.BFDUp = o.state, s.bfd.isUp(p.Address)
		}
		list = append(list, status)
	}
	return list
}

type observed struct {
	state       string
	updatesSent uint64
}

func (s *speaker) observe(ctx context.Context) map[netip.Addr]observed {
	seen := map[netip.Addr]observed{}
	// After Stop there is nothing to list; the peers are then idle.
	_ = s.server.ListPeer(ctx, &api.ListPeerRequest{}, func(p *api.Peer) {
		addr, err := netip.ParseAddr(p.GetState().GetNeighborAddress())
		if err != nil {
			return
		}
		seen[addr] = observed{
			state:       strings.ToLower(strings.TrimPrefix(p.GetState().GetSessionState().String(), "SESSION_STATE_")),
			updatesSent: p.GetState().GetMessages().GetSent().GetUpdate(),
		}
	})
	return seen
}

// Stop implements Speaker.
func (s *speaker) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	s.stopped = true
	before := s.observe(ctx)
	had := map[packet.Family]bool{}
	for prefix := range s.announced {
		had[family(prefix)] = true
	}
	err := s.set(nil)
	// A family's withdrawals are at least one update of their own.
	sent := func() bool {
		after := s.observe(ctx)
		for _, p := range s.config.Peers {
			b, a := before[p.Address], after[p.Address]
			if b.state != "established" || a.state != "established" {
				continue
			}
			updates := b.updatesSent
			for _, f := range p.families() {
				if had[f] {
					updates++
				}
			}
			if a.updatesSent < updates {
				return false
			}
		}
		return true
	}
	for err == nil && !sent() {
		select {
		case <-ctx.Done():
			err = fmt.Errorf("withdraw: not all peers have it: %w", ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
	closed := make(chan struct{})
	go func() {
		s.server.Stop()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(5 * time.Second):
		err = errors.Join(err, errors.New("close BGP sessions: GoBGP does not answer"))
	}
	s.bfd.stop()
	return err
}

// demoted logs GoBGP's information for debugging only: it is about its own
// doings, "shutting down" among them before the one line of a refusal.
type demoted struct{ slog.Handler }

func (d demoted) Enabled(ctx context.Context, level slog.Level) bool {
	return d.Handler.Enabled(ctx, demote(level))
}

func (d demoted) Handle(ctx context.Context, r slog.Record) error {
	r.Level = demote(r.Level)
	return d.Handler.Handle(ctx, r)
}

func (d demoted) WithAttrs(attrs []slog.Attr) slog.Handler {
	return demoted{d.Handler.WithAttrs(attrs)}
}

func (d demoted) WithGroup(name string) slog.Handler { return demoted{d.Handler.WithGroup(name)} }

func demote(level slog.Level) slog.Level {
	if level == slog.LevelInfo {
		return slog.LevelDebug
	}
	return level
}
