// Package nodelink is a node's line to the manager: it receives the tables that
// the node runs, keeps the last good ones in a file for when the manager is
// away, and reports back what the node runs and sees.
package nodelink

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"github.com/prometheus/client_golang/prometheus"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
)

// Source is where tables come from.
type Source int

// Sources of tables.
const (
	FromManager Source = iota
	FromFile           // the last good ones, kept over a restart
)

// String is "manager" or "file".
func (s Source) String() string {
	if s == FromFile {
		return "file"
	}
	return "manager"
}

// Handler is the node's side of the line. S is the message of whole tables, D
// of a change to them. Calls of ApplySnapshot and ApplyDelta never overlap.
// Messages stay the link's: a handler may keep and read but not write them.
type Handler[S, D any] interface {
	// ApplySnapshot runs tables instead of all that ran before. After an error
	// the handler runs what it ran before; the manager is told the error.
	ApplySnapshot(ctx context.Context, tables S, from Source) error
	// ApplyDelta changes what runs, which is the delta's base. After an error
	// the handler runs what it ran before; the manager is told the error.
	ApplyDelta(ctx context.Context, delta D) error
	// Trace runs the node's program on a described packet.
	Trace(ctx context.Context, packet *quartetv1.TracePacket) (*quartetv1.TraceResponse, error)
	// Report fills in what want asks for and the node's state. The link fills
	// in name, generation and error. It may run beside the other methods.
	Report(r *quartetv1.ReportRequest, want Want)
}

// MuxHandler is a mux's side of the line.
type MuxHandler = Handler[*quartetv1.MuxTables, *quartetv1.MuxDelta]

// HostHandler is a host agent's side of the line.
type HostHandler = Handler[*quartetv1.HostTables, *quartetv1.HostDelta]

// Want says which parts a report is to have besides state, which all have.
type Want struct {
	// AllResults: every health result; else those that changed since the last
	// call of Report.
	AllResults bool
	// Counters: counters, exits, BGP peers, announced prefixes and meters.
	Counters bool
}

// Config is a link's configuration. The zero value of a duration means its default.
type Config struct {
	Name      string   // the node's name; the certificate's
	Addresses []string // the node's own, shown to operators
	Version   string
	// Managers are base URLs, https://host:port. They are tried in turn, from a
	// random one on.
	Managers []string
	// TLS is the node's side of mutual TLS (certs.LoadClient).
	TLS *tls.Config
	// AllowPlain permits http:// to loopback addresses.
	AllowPlain bool
	// State is the directory of the last good tables and the highest term. It
	// is made if it is missing.
	State string

	Log     *slog.Logger
	Metrics prometheus.Registerer // nil: no metrics

	MinBackoff  time.Duration // before the second attempt; default 100ms
	MaxBackoff  time.Duration // default 5s
	ReportEvery time.Duration // default 1s
	// PingEvery is how long a silent connection is trusted before it is pinged,
	// and how long the answer may take; default 5s.
	PingEvery time.Duration
}

// Link is a node's line to the manager. Make it with NewMux or NewHost.
type Link[S, D message] struct {
	config  Config
	log     *slog.Logger
	handler Handler[S, D]
	kind    kind[S, D]
	store   *store
	metrics *metrics
	urls    []string
	http    *http.Client

	// wake has a token when a report is due at once.
	wake chan struct{}

	connected  atomic.Bool
	generation atomic.Uint64 // that the handler runs; 0 before the first
	client     atomic.Pointer[quartetv1connect.NodeServiceClient]
	session    atomic.Uint64 // counts streams; reports send all results first on each

	mu       sync.Mutex
	applyErr string // guarded by mu: why the last update does not run; "" if it does
}

// NewMux links a mux.
func NewMux(c Config, h MuxHandler) (*Link[*quartetv1.MuxTables, *quartetv1.MuxDelta], error) {
	return newLink(c, h, kind[*quartetv1.MuxTables, *quartetv1.MuxDelta]{role: "mux", state: &muxState{}, open: openMux})
}

// NewHost links a host agent.
func NewHost(c Config, h HostHandler) (*Link[*quartetv1.HostTables, *quartetv1.HostDelta], error) {
	return newLink(c, h, kind[*quartetv1.HostTables, *quartetv1.HostDelta]{role: "host", state: &hostState{}, open: openHost})
}

func newLink[S, D message](c Config, h Handler[S, D], k kind[S, D]) (*Link[S, D], error) {
	c.MinBackoff = orDefault(c.MinBackoff, 100*time.Millisecond)
	c.MaxBackoff = orDefault(c.MaxBackoff, 5*time.Second)
	c.ReportEvery = orDefault(c.ReportEvery, time.Second)
	c.PingEvery = orDefault(c.PingEvery, 5*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Name == "" {
		return nil, errors.New("link to manager: name is empty: the name in the node's certificate is wanted")
	}
	urls, err := managerURLs(c)
	if err != nil {
		return nil, err
	}
	st, err := openStore(c.State, k.role, c.Log)
	if err != nil {
		return nil, err
	}
	return &Link[S, D]{
		config: c, log: c.Log, handler: h, kind: k, store: st, urls: urls,
		metrics: newMetrics(c.Metrics),
		http:    httpClient(c),
		wake:    make(chan struct{}, 1),
	}, nil
}

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

func managerURLs(c Config) ([]string, error) {
	if len(c.Managers) == 0 {
		return nil, errors.New("link to manager: no manager given: https://host:port is wanted")
	}
	var urls []string
	for i, m := range c.Managers {
		u, err := url.Parse(m)
		if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") || (u.Path != "" && u.Path != "/") {
			return nil, fmt.Errorf("link to manager: manager[%d]: %q is not a manager's URL: https://host:port is wanted", i, m)
		}
		switch {
		case u.Scheme == "http" && !c.AllowPlain:
			return nil, fmt.Errorf("link to manager: manager[%d]: %s is not encrypted: https is wanted, "+
				"or a loopback address and the flag that allows plain connections to it", i, m)
		case u.Scheme == "http" && !loopback(u.Hostname()):
			return nil, fmt.Errorf("link to manager: manager[%d]: %s is not encrypted and not a loopback address: https is wanted", i, m)
		case u.Scheme == "https" && c.TLS == nil:
			return nil, fmt.Errorf("link to manager: manager[%d]: %s needs the node's certificate, key and CA", i, m)
		}
		urls = append(urls, strings.TrimSuffix(u.String(), "/"))
	}
	rand.Shuffle(len(urls), func(i, j int) { urls[i], urls[j] = urls[j], urls[i] })
	return urls, nil
}

func loopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

func httpClient(c Config) *http.Client {
	var protocols http.Protocols
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	var tlsConfig *tls.Config
	if c.TLS != nil {
		tlsConfig = c.TLS.Clone()
	}
	return &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: c.PingEvery}).DialContext,
		TLSClientConfig:     tlsConfig,
		TLSHandshakeTimeout: c.PingEvery,
		Protocols:           &protocols,
		HTTP2:               &http.HTTP2Config{SendPingTimeout: c.PingEvery, PingTimeout: c.PingEvery},
	}}
}

// Notify makes a report go out at once: health or state has changed.
func (l *Link[S, D]) Notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Generation is the generation that the node runs; 0 before the first.
func (l *Link[S, D]) Generation() uint64 { return l.generation.Load() }

// Connected says whether the manager's stream has delivered tables and is open.
func (l *Link[S, D]) Connected() bool { return l.connected.Load() }

// Run applies the last good tables from the file, if there are any, then keeps
// the stream to the manager until ctx ends. It returns only then, with nil.
func (l *Link[S, D]) Run(ctx context.Context) error {
	l.restore(ctx)
	var reports sync.WaitGroup
	reports.Go(func() { l.reportLoop(ctx) })
	defer reports.Wait()
	defer l.http.CloseIdleConnections()
	defer l.store.unlock()

	backoff := l.config.MinBackoff
	for i := 0; ctx.Err() == nil; i++ {
		base := l.urls[i%len(l.urls)]
		progress, err := l.watch(ctx, base)
		if ctx.Err() != nil {
			return nil
		}
		switch {
		case errors.Is(err, errBase):
			i-- // the same manager has the snapshot
			l.log.Info("watch again", "manager", base, "reason", err)
		case errors.Is(err, errApply):
			i--
		default:
			l.log.Warn("manager lost", "manager", base, "error", err)
		}
		if progress {
			backoff = l.config.MinBackoff
		}
		l.metrics.reconnects.Inc()
		// Half of the delay is random, so that nodes that lost a manager
		// together do not come back together.
		delay := backoff/2 + rand.N(backoff/2+1)
		backoff = min(2*backoff, l.config.MaxBackoff)
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
	return nil
}

// restore applies the last good tables.
func (l *Link[S, D]) restore(ctx context.Context) {
	updates := l.store.load()
	if len(updates) == 0 {
		return
	}
	for i, u := range updates {
		snapshot, delta, what := l.kind.open(u)
		switch {
		case what == isSnapshot && i == 0:
			l.kind.state.replace(snapshot)
		case what == isDelta && i > 0 && l.kind.base(delta) == l.kind.state.generation():
			l.kind.state.merge(delta)
		default:
			l.log.Warn("last good tables are damaged and ignored", "file", l.store.path, "error", "records out of order")
			l.forget()
			return
		}
	}
	tables := l.kind.state.tables()
	start := time.Now()
	if err := l.handler.ApplySnapshot(ctx, tables, FromFile); err != nil {
		l.log.Warn("last good tables can't run and are ignored", "file", l.store.path, "error", err)
		l.forget()
		return
	}
	l.ran(start)
	l.log.Info("last good tables run", "file", l.store.path, "generation", l.Generation())
}

func (l *Link[S, D]) forget() {
	l.kind.state.clear()
	l.store.stale = true
}

var (
	errBase  = errors.New("a delta's base is not the generation that runs")
	errTerm  = errors.New("an older term")
	errApply = errors.New("tables can't run")
)

// watch follows one stream until it ends. progress says that it delivered
// something that runs.
func (l *Link[S, D]) watch(ctx context.Context, base string) (progress bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	client := quartetv1connect.NewNodeServiceClient(l.http, base, connect.WithGRPC())
	stream, err := client.Watch(ctx, &quartetv1.WatchRequest{
		Name: l.config.Name, Role: l.kind.role, Addresses: l.config.Addresses,
		Version: l.config.Version, Term: l.store.term,
	})
	if err != nil {
		return false, err
	}
	updates := make(chan *quartetv1.Update)
	ended := make(chan error, 1)
	go func() {
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			// The stream decodes each message into one of its own.
			select {
			case updates <- stream.Msg():
			case <-ctx.Done():
				return
			}
		}
		err := stream.Err()
		if err == nil {
			err = errors.New("the manager closed the stream")
		}
		ended <- err
	}()
	defer func() {
		l.setConnected(false)
		l.client.Store(nil)
	}()

	// A snapshot that can't run is asked for again after a while (the cause may
	// be a full memory), and at once when the manager sends a delta to it.
	var retry <-chan time.Time
	var failed error
	whole := false // this stream's snapshot runs
	for {
		var u *quartetv1.Update
		select {
		case u = <-updates:
		case err := <-ended:
			return progress, err
		case <-retry:
			return progress, failed
		}
		if err := l.checkTerm(ctx, client, u.Term); err != nil {
			return progress, err
		}
		if !l.connected.Load() {
			l.session.Add(1)
			l.client.Store(&client)
			l.setConnected(true)
			l.log.Info("manager found", "manager", base, "term", u.Term)
		}
		if t, ok := u.What.(*quartetv1.Update_Trace); ok {
			go l.trace(ctx, client, t.Trace)
			continue
		}
		snapshot, delta, what := l.kind.open(u)
		switch {
		case what == isNeither:
			return progress, fmt.Errorf("an update that is not for a %s", l.kind.role)
		case what == isDelta && failed != nil:
			return true, fmt.Errorf("%w: the snapshot before it could not run", errBase)
		case what == isDelta && (!whole || l.kind.base(delta) != l.Generation()):
			l.metrics.refused.WithLabelValues("base").Inc()
			return progress, fmt.Errorf("%w: base %d, running %d", errBase, l.kind.base(delta), l.Generation())
		}
		start := time.Now()
		if what == isSnapshot {
			err = l.handler.ApplySnapshot(ctx, snapshot, FromManager)
		} else {
			err = l.handler.ApplyDelta(ctx, delta)
		}
		if err != nil {
			l.metrics.refused.WithLabelValues("apply").Inc()
			l.log.Error("tables refused; the last good ones stay", "generation", l.kind.generation(u),
				"running", l.Generation(), "error", err)
			l.fail(fmt.Sprintf("generation %d: %s", l.kind.generation(u), err))
			failed = fmt.Errorf("%w: %w", errApply, err)
			retry = time.After(l.config.MaxBackoff)
			continue
		}
		if what == isSnapshot {
			l.kind.state.replace(snapshot)
		} else {
			l.kind.state.merge(delta)
		}
		progress, whole, failed, retry = true, true, nil, nil
		l.ran(start)
		l.keep(u, what)
	}
}

// ran records that the handler runs the merged tables.
func (l *Link[S, D]) ran(start time.Time) {
	l.metrics.apply.Observe(time.Since(start).Seconds())
	l.generation.Store(l.kind.state.generation())
	l.metrics.generation.Set(float64(l.Generation()))
	l.fail("")
}

// fail records why the last update does not run and reports.
func (l *Link[S, D]) fail(why string) {
	l.mu.Lock()
	l.applyErr = why
	l.mu.Unlock()
	l.Notify()
}

// keep writes what runs to the file. The node serves on without the file.
func (l *Link[S, D]) keep(u *quartetv1.Update, what updateKind) {
	var err error
	if what == isDelta && !l.store.full() {
		err = l.store.append(u)
	} else {
		err = l.store.rewrite(l.kind.update(l.kind.state.tables(), u.Term))
	}
	if err != nil {
		l.metrics.stateErrors.Inc()
		l.log.Error("last good tables not kept", "error", err)
	}
}

// checkTerm refuses a term older than the highest seen, and tells the manager
// so, which is how a stale leader learns that it is one (Ananta section 6). A
// newer term is on disk before anything of it is obeyed.
func (l *Link[S, D]) checkTerm(ctx context.Context, client quartetv1connect.NodeServiceClient, term uint64) error {
	seen := l.store.term
	if term < seen {
		l.metrics.refused.WithLabelValues("term").Inc()
		err := fmt.Errorf("%w: %d, seen %d", errTerm, term, seen)
		ctx, cancel := context.WithTimeout(ctx, l.config.PingEvery)
		defer cancel()
		if _, rerr := client.Report(ctx, &quartetv1.ReportRequest{
			Name: l.config.Name, Generation: l.Generation(), Error: "refused " + err.Error(),
		}); rerr != nil {
			l.log.Debug("report of a refused term failed", "error", rerr)
		}
		return err
	}
	if term > seen {
		if err := l.store.setTerm(term); err != nil {
			l.metrics.stateErrors.Inc()
			return err
		}
	}
	return nil
}

func (l *Link[S, D]) setConnected(yes bool) {
	l.connected.Store(yes)
	v := 0.0
	if yes {
		v = 1
	}
	l.metrics.connected.Set(v)
}

func (l *Link[S, D]) trace(ctx context.Context, client quartetv1connect.NodeServiceClient, t *quartetv1.TraceCommand) {
	reply := &quartetv1.TraceReplyRequest{Name: l.config.Name, Id: t.GetId()}
	response, err := l.handler.Trace(ctx, t.GetPacket())
	if err != nil {
		reply.Error = err.Error()
	} else {
		response.Mux = l.config.Name
		response.Generation = l.Generation()
		reply.Response = response
	}
	ctx, cancel := context.WithTimeout(ctx, l.config.PingEvery)
	defer cancel()
	if _, err := client.TraceReply(ctx, reply); err != nil {
		l.log.Warn("trace reply lost", "id", t.GetId(), "error", err)
	}
}

// reportLoop reports at each wake and each ReportEvery, one report at a time so
// that an older one never arrives after a newer one.
func (l *Link[S, D]) reportLoop(ctx context.Context) {
	tick := time.NewTicker(l.config.ReportEvery)
	defer tick.Stop()
	var delivered uint64 // session in which all results have arrived
	for {
		var want Want
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			want.Counters = true
		case <-l.wake:
		}
		client := l.client.Load()
		if client == nil {
			continue
		}
		session := l.session.Load()
		if session != delivered {
			want = Want{AllResults: true, Counters: true}
		}
		r := &quartetv1.ReportRequest{}
		l.handler.Report(r, want)
		r.Name = l.config.Name
		l.mu.Lock()
		r.Generation, r.Error = l.Generation(), l.applyErr
		l.mu.Unlock()
		sendCtx, cancel := context.WithTimeout(ctx, l.config.PingEvery)
		_, err := (*client).Report(sendCtx, r)
		cancel()
		if err != nil {
			delivered = 0
			if ctx.Err() == nil {
				l.log.Warn("report lost", "error", err)
			}
			continue
		}
		delivered = session
	}
}

type metrics struct {
	connected, generation   prometheus.Gauge
	apply                   prometheus.Histogram
	reconnects, stateErrors prometheus.Counter
	refused                 *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		connected: prometheus.NewGauge(prometheus.GaugeOpts{Name: "quartet_node_manager_connected",
			Help: "1 while the manager's stream is open."}),
		generation: prometheus.NewGauge(prometheus.GaugeOpts{Name: "quartet_node_generation",
			Help: "Generation of the tables that the node runs; 0 before the first."}),
		apply: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "quartet_node_apply_duration_seconds",
			Help:    "Time to run a snapshot or a delta, from receipt.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 9)}),
		reconnects: prometheus.NewCounter(prometheus.CounterOpts{Name: "quartet_node_reconnects_total",
			Help: "Streams to a manager that ended or could not be opened."}),
		stateErrors: prometheus.NewCounter(prometheus.CounterOpts{Name: "quartet_node_state_errors_total",
			Help: "Failures to write the last good tables or the term."}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "quartet_node_updates_refused_total",
			Help: "Updates refused: an older term, a delta to another base, tables that can't run."}, []string{"reason"}),
	}
	for _, reason := range []string{"term", "base", "apply"} {
		m.refused.WithLabelValues(reason)
	}
	if r != nil {
		r.MustRegister(m.connected, m.generation, m.apply, m.reconnects, m.stateErrors, m.refused)
	}
	return m
}
