// Package mux is the process quartet-mux: it runs the manager's tables in the
// mux's packet path and announces the VIPs to the routers while it can serve them.
package mux

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/bgp"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/mux/datapath"
	"github.com/quartet-lb/quartet/mux/reach"
	"github.com/quartet-lb/quartet/nodelink"
)

// Config is a mux's configuration.
type Config struct {
	Datapath datapath.Config
	Link     nodelink.Config
	// BGP is nil where routes to the mux are somebody else's business.
	BGP *bgp.Config
	// DrainTime is how long a stopping mux forwards at most after it has
	// withdrawn its routes; it stops sooner when no packet has come for a second.
	DrainTime time.Duration
	// DetachOnStop takes the packet path off the interfaces at the end. Else
	// it stays and forwards, and the next process adopts it.
	DetachOnStop bool

	Log     *slog.Logger
	Metrics prometheus.Registerer
	Ready   *daemon.Readiness
}

// Conditions that a mux must meet to be ready.
const (
	ReadyTables = "tables" // a complete snapshot runs
	ReadyBGP    = "bgp"    // a BGP peer is up, if any is configured
	ReadyTaking = "drain"  // the mux is not draining
)

// Intervals of what the mux looks at by itself.
const (
	sweepEvery   = 5 * time.Second // idle connection entries; their clock ticks every 4.3 s
	observeEvery = 250 * time.Millisecond
	countEvery   = time.Second
	quietFor     = time.Second
	// managerFirst is how long a mux that starts looks for a manager before it
	// announces by the last good tables: those may lack a VIP by now, and its
	// packets would be lost until the manager's tables come.
	managerFirst = 3 * time.Second
	// retryEvery is how often routes are told again that the speaker refused.
	retryEvery = time.Second
)

// mux is a running mux. It is the link's handler.
type mux struct {
	config Config
	log    *slog.Logger
	data   *datapath.Datapath
	prober *reach.Prober
	routes *announcer
	link   *nodelink.Link[*quartetv1.MuxTables, *quartetv1.MuxDelta]
	// adopted: the packet path of an earlier process, of whatever version, was
	// found on an interface.
	adopted bool

	mu        sync.Mutex
	endpoints map[lb.Endpoint]*quartetv1.MuxEndpoint // guarded by mu: what runs, for trace
	complete  bool                                   // guarded by mu: a complete snapshot runs
	drain     bool                                   // guarded by mu: the manager says so
	stopping  bool                                   // guarded by mu: the process is about to stop
	announce  []netip.Prefix                         // guarded by mu: the manager's
	announced []string                               // guarded by mu: announce as it came
	counters  []*quartetv1.FlowCounters              // guarded by mu: as last read
	exits     map[string]uint64                      // guarded by mu: as last read
	unsent    bool                                   // guarded by mu: counters and exits were read since the last report
}

// Run runs a mux until ctx ends, then withdraws its routes, drains and stops.
func Run(ctx context.Context, c Config) error {
	m := &mux{config: c, log: c.Log, endpoints: map[lb.Endpoint]*quartetv1.MuxEndpoint{}}
	c.Ready.Missing(ReadyTables, "no complete snapshot has come")
	c.Ready.Met(ReadyTaking)
	// What can fail without a trace comes before what attaches.
	var err error
	if m.link, err = nodelink.NewMux(c.Link, m); err != nil {
		return err
	}
	m.prober, err = reach.Open(reach.Config{Source4: c.Datapath.Source4, Source6: c.Datapath.Source6, Log: c.Log})
	if err != nil {
		return err
	}
	defer m.prober.Close()
	if m.routes, err = newAnnouncer(ctx, c.BGP, c.Log); err != nil {
		return err
	}
	links, _ := filepath.Glob(filepath.Join(c.Datapath.PinDir, "links", "*")) // the pattern is good
	m.adopted = len(links) > 0
	if m.data, err = datapath.Open(c.Datapath); err != nil {
		closing, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return errors.Join(err, m.routes.stop(closing))
	}
	// The pinned data plane goes on forwarding whatever happens to this process.
	defer func() {
		if err := m.data.Close(); err != nil {
			m.log.Warn("close packet path", "error", err)
		}
	}()
	raisePriority(c.Log)
	c.Log.Info("starting", "name", c.Link.Name, "version", c.Link.Version, "interfaces", c.Datapath.Interfaces, "managers", c.Link.Managers)
	c.Metrics.MustRegister(&collector{m})

	// The link and the announcer outlive ctx: they are needed to drain.
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var background sync.WaitGroup
	background.Go(func() { _ = m.link.Run(running) })
	background.Go(func() { m.routes.run(running) })
	background.Go(func() { m.observe(running) })
	background.Go(func() { m.sweep(running) })
	background.Go(func() { m.count(running) })
	background.Go(func() { m.prober.Run(running) })

	<-ctx.Done()
	m.stop()
	stop()
	background.Wait()
	closing, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err = m.routes.stop(closing)
	if c.DetachOnStop {
		err = errors.Join(err, m.data.Detach(), deleteRoutes())
	}
	return err
}

// ApplySnapshot implements nodelink.Handler.
func (m *mux) ApplySnapshot(_ context.Context, t *quartetv1.MuxTables, from nodelink.Source) error {
	tables, err := convertTables(t)
	if err != nil {
		return err
	}
	announce, err := m.convertAnnounce(t.Announce)
	if err != nil {
		return err
	}
	if err := m.data.Replace(tables); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.prober.Update(tunnels(t.Endpoints), tunnels(slices.Collect(maps.Values(m.endpoints))))
	m.endpoints = make(map[lb.Endpoint]*quartetv1.MuxEndpoint, len(t.Endpoints))
	for i, e := range tables.Endpoints {
		m.endpoints[e.Endpoint] = t.Endpoints[i]
	}
	// Tables from a file are announced only if the packet path ran them all the
	// while: after a reboot they may be old, and the manager decides.
	switch {
	case from == nodelink.FromManager:
		m.serve()
	case m.adopted:
		m.config.Ready.Missing(ReadyTables, "the last good ones run; a manager is looked for")
		time.AfterFunc(managerFirst, m.trustFile)
	}
	m.announced = t.Announce
	m.setRoutes(announce, t.Drain)
	return nil
}

// serve notes that complete tables run which may be announced. The caller has mu.
func (m *mux) serve() {
	m.complete = true
	m.config.Ready.Met(ReadyTables)
}

// trustFile announces by the last good tables if no manager has sent others.
func (m *mux) trustFile() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.complete || m.stopping {
		return
	}
	m.log.Warn("no manager has sent tables: the last good ones are announced", "after", managerFirst)
	m.serve()
	m.setRoutes(m.announce, m.drain)
	m.link.Notify()
}

// ApplyDelta implements nodelink.Handler.
func (m *mux) ApplyDelta(_ context.Context, d *quartetv1.MuxDelta) error {
	delta, err := convertDelta(d)
	if err != nil {
		return err
	}
	announce, err := m.convertAnnounce(d.Announce)
	if err != nil {
		return err
	}
	if err := m.data.Apply(delta); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var gone []*quartetv1.MuxEndpoint
	for _, key := range delta.DeleteEndpoints {
		gone = append(gone, m.endpoints[key])
		delete(m.endpoints, key)
	}
	for i, e := range delta.PutEndpoints {
		gone = append(gone, m.endpoints[e.Endpoint])
		m.endpoints[e.Endpoint] = d.PutEndpoints[i]
	}
	m.prober.Update(tunnels(d.PutEndpoints), tunnels(gone))
	m.announced = d.Announce
	m.setRoutes(announce, d.Drain)
	return nil
}

// convertAnnounce reads what to announce. Each delta has all of it, most often
// as it was.
func (m *mux) convertAnnounce(in []string) ([]netip.Prefix, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.Equal(in, m.announced) {
		return m.announce, nil
	}
	return convertAnnounce(in)
}

// setRoutes tells the announcer what to announce. The caller has mu.
func (m *mux) setRoutes(announce []netip.Prefix, drain bool) {
	if drain != m.drain {
		m.log.Info("drain", "on", drain)
	}
	m.announce, m.drain = announce, drain
	switch {
	case m.stopping:
		m.config.Ready.Missing(ReadyTaking, "the process is stopping")
	case m.drain:
		m.config.Ready.Missing(ReadyTaking, "an operator drains this mux")
	default:
		m.config.Ready.Met(ReadyTaking)
	}
	if m.complete {
		m.routes.set(announce, m.drain || m.stopping)
	}
}

// Report implements nodelink.Handler.
func (m *mux) Report(r *quartetv1.ReportRequest, want nodelink.Want) {
	r.State = m.state()
	m.mu.Lock()
	defer m.mu.Unlock()
	if !want.Counters || !m.unsent && !want.AllResults {
		return
	}
	r.Counters, r.Exits, m.unsent = m.counters, m.exits, false
	peers, announced := m.routes.status()
	for _, p := range peers {
		r.BgpPeers = append(r.BgpPeers, &quartetv1.BgpPeerStatus{
			Address: p.Address.String(), Asn: p.ASN, State: p.State, BfdUp: p.BFDUp,
		})
	}
	for _, p := range announced {
		r.Announced = append(r.Announced, p.String())
	}
	for _, t := range m.prober.Unreachable() {
		r.UnreachableTunnels = append(r.UnreachableTunnels, &quartetv1.Tunnel{Address: t.Dst.AsSlice(), Gue: t.Encap == lb.EncapGUE})
	}
}

// count reads the counters for reports. 200,000 DIPs take some 0.2 s, so that
// they are read the more rarely the more there are: a report that acknowledges
// tables must not wait for them.
func (m *mux) count(ctx context.Context) {
	for {
		start := time.Now()
		counters, err := m.data.Counters()
		exits, exitsErr := m.data.Exits()
		if err := errors.Join(err, exitsErr); err != nil {
			m.log.Warn("counters not read", "error", err)
		}
		var flows []*quartetv1.FlowCounters
		for _, c := range counters {
			if c.Packets > 0 {
				flows = append(flows, &quartetv1.FlowCounters{
					Vip: c.VIPName, Address: c.Endpoint.VIP.String(), Endpoint: c.Name, Dip: c.DIP.Addr.String(),
					Packets: c.Packets, Bytes: c.Bytes, NewFlows: c.NewFlows,
				})
			}
		}
		m.mu.Lock()
		m.counters, m.exits, m.unsent = flows, exits, true
		m.mu.Unlock()
		if !wait(ctx, max(countEvery, 20*time.Since(start))) {
			return
		}
	}
}

// state is NodeStatus.state.
func (m *mux) state() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.drain || m.stopping:
		return "draining"
	case !m.complete:
		return "starting"
	}
	return "ready"
}

// observe keeps readiness true to the BGP sessions.
func (m *mux) observe(ctx context.Context) {
	var last []bgp.PeerStatus
	for {
		peers := m.routes.observe(ctx)
		up := 0
		for i, p := range peers {
			if p.State == "established" {
				up++
			}
			if last == nil || last[i].State != p.State && (p.State == "established" || last[i].State == "established") || last[i].BFDUp != p.BFDUp {
				m.log.Info("BGP peer", "address", p.Address, "asn", p.ASN, "state", p.State, "bfd_up", p.BFDUp)
				m.link.Notify()
			}
		}
		last = peers
		if len(peers) == 0 || up > 0 {
			m.config.Ready.Met(ReadyBGP)
		} else {
			m.config.Ready.Missing(ReadyBGP, fmt.Sprintf("none of %d peers is established", len(peers)))
		}
		if !wait(ctx, observeEvery) {
			return
		}
	}
}

func (m *mux) sweep(ctx context.Context) {
	for wait(ctx, sweepEvery) {
		m.data.Sweep(datapath.Monotonic())
	}
}

// stop withdraws the routes, then forwards until DrainTime is over or no packet
// was forwarded for a while.
func (m *mux) stop() {
	m.mu.Lock()
	m.stopping = true
	m.setRoutes(m.announce, m.drain)
	m.mu.Unlock()
	m.link.Notify()
	m.log.Info("stopping: routes are withdrawn, packets are forwarded", "for_at_most", m.config.DrainTime)
	ctx, cancel := context.WithTimeout(context.Background(), m.config.DrainTime)
	defer cancel()
	if !m.routes.withdrawn(ctx) {
		return
	}
	forwarded, since := m.forwarded(), time.Now()
	for wait(ctx, quietFor/4) {
		if n := m.forwarded(); n != forwarded {
			forwarded, since = n, time.Now()
		} else if time.Since(since) >= quietFor {
			return
		}
	}
}

func (m *mux) forwarded() uint64 {
	exits, err := m.data.Exits()
	if err != nil {
		m.log.Warn("exits not read", "error", err)
	}
	return exits["tx"] + exits["redirect"]
}

// wait says whether d went by before ctx ended.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// announcer keeps a BGP speaker's routes as they were set last. It never makes
// the tables wait.
type announcer struct {
	log     *slog.Logger
	speaker bgp.Speaker // nil: no BGP
	changed chan struct{}
	// unassigned has the routes of the announced prefixes in the own kernel.
	// They stay while draining and after: routers take time to heed.
	unassigned *unassigned

	mu        sync.Mutex
	given     bool             // guarded by mu: want was set
	want      []netip.Prefix   // guarded by mu
	drain     bool             // guarded by mu
	announced []netip.Prefix   // guarded by mu: what the speaker was told last
	settled   chan struct{}    // guarded by mu: closed when the speaker has what is wanted
	peers     []bgp.PeerStatus // guarded by mu: as last observed
}

// farewell is how long draining routes carry the graceful shutdown community
// (RFC 8326) before they are withdrawn, so that routers that heed it find
// another way first.
const farewell = 500 * time.Millisecond

func newAnnouncer(ctx context.Context, c *bgp.Config, log *slog.Logger) (*announcer, error) {
	a := &announcer{log: log, changed: make(chan struct{}, 1), settled: make(chan struct{}), unassigned: &unassigned{log: log}}
	close(a.settled)
	if c == nil {
		return a, nil
	}
	var err error
	a.speaker, err = bgp.Start(ctx, *c)
	return a, err
}

// set makes prefixes what is announced; with drain, they are withdrawn instead.
func (a *announcer) set(prefixes []netip.Prefix, drain bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.given && drain == a.drain && slices.Equal(prefixes, a.want) {
		return
	}
	a.given, a.want, a.drain = true, prefixes, drain
	select {
	case <-a.settled:
		a.settled = make(chan struct{})
	default:
	}
	select {
	case a.changed <- struct{}{}:
	default:
	}
}

func (a *announcer) run(ctx context.Context) {
	var retry <-chan time.Time // nil: the speaker has taken the last routes
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.changed:
		case <-retry:
		}
		a.mu.Lock()
		want, drain, announced := a.want, a.drain, a.announced
		a.mu.Unlock()
		a.unassigned.set(want)
		if drain && len(announced) > 0 {
			a.tell(ctx, announced, bgp.GracefulShutdown)
			select {
			case <-a.changed: // it may be undone
				select {
				case a.changed <- struct{}{}:
				default:
				}
				continue
			case <-time.After(farewell):
			}
		}
		if drain {
			want = nil
		}
		if !a.tell(ctx, want) {
			retry = time.After(retryEvery)
			continue
		}
		retry = nil
		a.mu.Lock()
		a.announced = want
		if len(a.changed) == 0 {
			select {
			case <-a.settled:
			default:
				close(a.settled)
			}
		}
		a.mu.Unlock()
	}
}

// tell says whether the speaker has taken the routes.
func (a *announcer) tell(ctx context.Context, prefixes []netip.Prefix, communities ...bgp.Community) bool {
	if a.speaker == nil {
		return true
	}
	routes := make([]bgp.Route, len(prefixes))
	for i, p := range prefixes {
		routes[i] = bgp.Route{Prefix: p, Communities: communities}
	}
	if err := a.speaker.Set(ctx, routes); err != nil {
		a.log.Error("routes not announced", "error", err)
		return false
	}
	a.log.Info("routes", "announced", len(prefixes), "graceful_shutdown", len(communities) > 0)
	return true
}

// withdrawn waits until the speaker has what was set last; false if ctx ended first.
func (a *announcer) withdrawn(ctx context.Context) bool {
	a.mu.Lock()
	settled := a.settled
	a.mu.Unlock()
	select {
	case <-settled:
		return true
	case <-ctx.Done():
		return false
	}
}

// observe asks the speaker for its peers' state.
func (a *announcer) observe(ctx context.Context) []bgp.PeerStatus {
	if a.speaker == nil {
		return nil
	}
	peers := a.speaker.Peers(ctx)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.peers = peers
	return peers
}

func (a *announcer) status() (peers []bgp.PeerStatus, announced []netip.Prefix) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.peers, a.announced
}

func (a *announcer) stop(ctx context.Context) error {
	if a.speaker == nil {
		return nil
	}
	return a.speaker.Stop(ctx)
}
