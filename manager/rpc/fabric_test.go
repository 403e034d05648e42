package rpc_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/manager"
	"github.com/quartet-lb/quartet/manager/object"
	"github.com/quartet-lb/quartet/manager/rpc"
	"github.com/quartet-lb/quartet/manager/store"
)

// fabric is a manager with its store, served over TLS on loopback.
type fabric struct {
	t      testing.TB
	dir    string // of the state
	pki    string // of the certificates
	cfg    manager.Config
	store  *store.Store
	url    string
	op     quartetv1connect.OperatorServiceClient
	cancel func()
	done   chan struct{}
}

func newFabric(t testing.TB, cfg manager.Config) *fabric {
	t.Helper()
	f := &fabric{t: t, dir: t.TempDir(), pki: t.TempDir(), cfg: cfg}
	if err := certs.Init(f.pki); err != nil {
		t.Fatal(err)
	}
	f.issue(certs.Manager, "m1")
	f.issue(certs.Operator, "alice")
	f.start()
	t.Cleanup(func() { f.stop() })
	return f
}

func (f *fabric) issue(role, name string) {
	f.t.Helper()
	if err := certs.Issue(f.pki, role, name, nil); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fabric) file(name string) string { return filepath.Join(f.pki, name) }

func (f *fabric) start() {
	f.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	log := slog.New(slog.NewTextHandler(f.t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	s, err := store.Open(ctx, store.Config{Dir: f.dir, Name: "m1", Log: log})
	if err != nil {
		f.t.Fatal(err)
	}
	cfg := f.cfg
	cfg.Log = log
	m, err := manager.New(ctx, s, cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	tlsConfig, err := certs.LoadServer(f.file("ca.crt"), f.file("m1.crt"), f.file("m1.key"))
	if err != nil {
		f.t.Fatal(err)
	}
	address := "127.0.0.1:0"
	if f.url != "" { // a restart is found where it was
		address = strings.TrimPrefix(f.url, "https://")
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		f.t.Fatal(err)
	}
	process := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	server := rpc.NewServer(ctx, m, rpc.Config{TLS: tlsConfig, Log: log, Process: process, Ready: func() bool { return true }})
	server.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	f.done = make(chan struct{})
	go func() {
		defer close(f.done)
		if err := m.Run(ctx); err != nil {
			f.t.Errorf("run: %v", err)
		}
	}()
	go server.ServeTLS(l, "", "")
	f.store, f.url = s, "https://"+l.Addr().String()
	f.cancel = func() {
		cancel()
		<-f.done
		server.Close()
		if err := s.Close(); err != nil {
			f.t.Errorf("close: %v", err)
		}
	}
	f.op = quartetv1connect.NewOperatorServiceClient(f.client("alice"), f.url)
}

func (f *fabric) stop() {
	if f.cancel != nil {
		f.cancel()
		f.cancel = nil
	}
}

func (f *fabric) restart() {
	f.t.Helper()
	f.stop()
	f.start()
}

// client speaks HTTP/2 with a certificate.
func (f *fabric) client(name string) *http.Client {
	f.t.Helper()
	var c *tls.Config
	if name != "" {
		var err error
		if c, err = certs.LoadClient(f.file("ca.crt"), f.file(name+".crt"), f.file(name+".key")); err != nil {
			f.t.Fatal(err)
		}
	} else {
		c = &tls.Config{InsecureSkipVerify: true}
	}
	tr := &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: true}
	f.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func (f *fabric) dump() map[string]string {
	f.t.Helper()
	d, err := f.store.Dump(context.Background())
	if err != nil {
		f.t.Fatal(err)
	}
	return d
}

// docs reads YAML documents.
func docs(t testing.TB, text string) []*structpb.Struct {
	t.Helper()
	out, err := object.Read([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (f *fabric) apply(text string) *quartetv1.ApplyResponse {
	f.t.Helper()
	resp, err := f.op.Apply(context.Background(), &quartetv1.ApplyRequest{Objects: docs(f.t, text)})
	if err != nil {
		f.t.Fatalf("apply: %v", err)
	}
	return resp
}

func (f *fabric) list(kind, name string) *quartetv1.ListResponse {
	f.t.Helper()
	resp, err := f.op.List(context.Background(), &quartetv1.ListRequest{Kind: kind, Name: name})
	if err != nil {
		f.t.Fatalf("list %s %s: %v", kind, name, err)
	}
	return resp
}

func (f *fabric) drain(kind, name, vip string, undo bool) *quartetv1.DrainResponse {
	f.t.Helper()
	resp, err := f.op.Drain(context.Background(), &quartetv1.DrainRequest{Kind: kind, Name: name, Vip: vip, Undo: undo})
	if err != nil {
		f.t.Fatalf("drain %s %s: %v", kind, name, err)
	}
	return resp
}

// until polls for what can be observed.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20s: %s", what)
		}
	}
}

// tables is what a node has put together from its stream.
type tables struct {
	Generation uint64
	Seed       string
	Vips       map[string]*quartetv1.VipAddress
	Endpoints  map[string]*quartetv1.MuxEndpoint
	Announce   []string
	Drain      bool
	Rules      map[string]*quartetv1.NatRule
	Checks     map[string]*quartetv1.Check
}

func endpointKey(k *quartetv1.EndpointKey) string {
	return fmt.Sprintf("%x %d %d", k.Vip, k.Protocol, k.Port)
}
func ruleKey(r *quartetv1.NatRule) string {
	return fmt.Sprintf("%x %x %d %d", r.Tunnel, r.Vip, r.Protocol, r.Port)
}

// apply runs one update, as a node would.
func (t *tables) apply(u *quartetv1.Update) error {
	switch w := u.What.(type) {
	case *quartetv1.Update_MuxSnapshot:
		s := w.MuxSnapshot
		*t = tables{Generation: s.Generation, Seed: string(s.FlowSeed), Announce: s.Announce, Drain: s.Drain,
			Vips: map[string]*quartetv1.VipAddress{}, Endpoints: map[string]*quartetv1.MuxEndpoint{}}
		for _, v := range s.Vips {
			t.Vips[string(v.Address)] = v
		}
		for _, e := range s.Endpoints {
			t.Endpoints[endpointKey(e.Key)] = e
		}
		if len(t.Vips) != len(s.Vips) || len(t.Endpoints) != len(s.Endpoints) {
			return errors.New("a snapshot has a key twice")
		}
	case *quartetv1.Update_MuxDelta:
		d := w.MuxDelta
		if d.Base != t.Generation {
			return fmt.Errorf("delta from %d to %d onto %d", d.Base, d.Generation, t.Generation)
		}
		t.Generation, t.Announce, t.Drain = d.Generation, d.Announce, d.Drain
		for _, a := range d.DeleteVips {
			if t.Vips[string(a)] == nil {
				return fmt.Errorf("deletes VIP %x, which is not there", a)
			}
			delete(t.Vips, string(a))
		}
		for _, v := range d.PutVips {
			t.Vips[string(v.Address)] = v
		}
		for _, k := range d.DeleteEndpoints {
			if t.Endpoints[endpointKey(k)] == nil {
				return fmt.Errorf("deletes endpoint %s, which is not there", endpointKey(k))
			}
			delete(t.Endpoints, endpointKey(k))
		}
		for _, e := range d.PutEndpoints {
			t.Endpoints[endpointKey(e.Key)] = e
		}
	case *quartetv1.Update_HostSnapshot:
		s := w.HostSnapshot
		*t = tables{Generation: s.Generation, Seed: string(s.FlowSeed),
			Rules: map[string]*quartetv1.NatRule{}, Checks: map[string]*quartetv1.Check{}}
		for _, r := range s.Rules {
			t.Rules[ruleKey(r)] = r
		}
		for _, c := range s.Checks {
			t.Checks[c.Id] = c
		}
		if len(t.Rules) != len(s.Rules) || len(t.Checks) != len(s.Checks) {
			return errors.New("a snapshot has a key twice")
		}
	case *quartetv1.Update_HostDelta:
		d := w.HostDelta
		if d.Base != t.Generation {
			return fmt.Errorf("delta from %d to %d onto %d", d.Base, d.Generation, t.Generation)
		}
		t.Generation = d.Generation
		for _, r := range d.DeleteRules {
			if t.Rules[ruleKey(r)] == nil {
				return fmt.Errorf("deletes rule %s, which is not there", ruleKey(r))
			}
			delete(t.Rules, ruleKey(r))
		}
		for _, r := range d.PutRules {
			t.Rules[ruleKey(r)] = r
		}
		for _, id := range d.DeleteChecks {
			if t.Checks[id] == nil {
				return fmt.Errorf("deletes check %s, which is not there", id)
			}
			delete(t.Checks, id)
		}
		for _, c := range d.PutChecks {
			t.Checks[c.Id] = c
		}
	}
	return nil
}

func sameMap[V proto.Message](a, b map[string]V) bool {
	return maps.EqualFunc(a, b, func(x, y V) bool { return proto.Equal(x, y) })
}

// differs names a part that two nodes' tables do not share; "" if they are the
// same but for the generation.
func (t *tables) differs(u *tables) string {
	switch {
	case t.Seed != u.Seed:
		return "seed"
	case !sameMap(t.Vips, u.Vips):
		return fmt.Sprintf("VIPs: %v\n%v", t.Vips, u.Vips)
	case !sameMap(t.Endpoints, u.Endpoints):
		return fmt.Sprintf("endpoints: %v\n%v", t.Endpoints, u.Endpoints)
	case !slices.Equal(t.Announce, u.Announce):
		return fmt.Sprintf("announce: %v\n%v", t.Announce, u.Announce)
	case t.Drain != u.Drain:
		return "drain"
	case !sameMap(t.Rules, u.Rules):
		return fmt.Sprintf("rules: %v\n%v", t.Rules, u.Rules)
	case !sameMap(t.Checks, u.Checks):
		return fmt.Sprintf("checks: %v\n%v", t.Checks, u.Checks)
	}
	return ""
}

// watcher is a node: it follows its stream and acknowledges.
type watcher struct {
	t      testing.TB
	name   string
	role   string
	client quartetv1connect.NodeServiceClient
	cancel context.CancelFunc
	ended  chan struct{}
	gate   chan struct{} // nil, or closed when it may read on

	mu       sync.Mutex
	tables   tables
	messages int
	traces   []*quartetv1.TraceCommand
	err      error
}

type watchOption func(*watcher)

// held makes a watcher that reads nothing after the first message until
// release is closed.
func held(release chan struct{}) watchOption { return func(w *watcher) { w.gate = release } }

func (f *fabric) watch(role, name string, addresses []string, options ...watchOption) *watcher {
	f.t.Helper()
	if _, err := certs.Read(f.file(name + ".crt")); err != nil {
		f.issue(role, name)
	}
	w := &watcher{t: f.t, name: name, role: role, ended: make(chan struct{})}
	w.client = quartetv1connect.NewNodeServiceClient(f.client(name), f.url, connect.WithGRPC())
	for _, o := range options {
		o(w)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	f.t.Cleanup(w.stop)
	stream, err := w.client.Watch(ctx, &quartetv1.WatchRequest{Name: name, Role: role, Addresses: addresses, Version: "test"})
	if err != nil {
		f.t.Fatal(err)
	}
	go func() {
		defer close(w.ended)
		defer stream.Close()
		for stream.Receive() {
			w.mu.Lock()
			w.messages++
			if t := stream.Msg().GetTrace(); t != nil {
				w.traces = append(w.traces, t)
			} else if w.err = w.tables.apply(stream.Msg()); w.err != nil {
				w.mu.Unlock()
				return
			}
			generation := w.tables.Generation
			w.mu.Unlock()
			if _, err := w.client.Report(ctx, &quartetv1.ReportRequest{Name: name, Generation: generation, State: "ready"}); err != nil {
				break
			}
			if w.gate != nil {
				<-w.gate
			}
		}
		w.mu.Lock()
		w.err = stream.Err()
		w.mu.Unlock()
	}()
	until(f.t, name+" has tables", func() bool { return w.generation() > 0 })
	return w
}

func (w *watcher) stop() {
	w.cancel()
	if w.gate != nil {
		select {
		case <-w.gate:
		default:
			return
		}
	}
	<-w.ended
}

func (w *watcher) generation() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err != nil && w.tables.Generation == 0 {
		w.t.Fatalf("%s: %v", w.name, w.err)
	}
	return w.tables.Generation
}

// snapshot is a copy of what the node has.
func (w *watcher) snapshot() *tables {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.tables
	c.Vips, c.Endpoints, c.Rules, c.Checks = maps.Clone(c.Vips), maps.Clone(c.Endpoints), maps.Clone(c.Rules), maps.Clone(c.Checks)
	return &c
}

func (w *watcher) endpoint(t testing.TB, name string) *quartetv1.MuxEndpoint {
	t.Helper()
	s := w.snapshot()
	for _, e := range s.Endpoints {
		if e.Vip+"/"+e.Name == name {
			return e
		}
	}
	t.Fatalf("%s has no endpoint %s", w.name, name)
	return nil
}

// report sends health results.
func (w *watcher) report(results ...*quartetv1.CheckResult) {
	w.t.Helper()
	_, err := w.client.Report(context.Background(), &quartetv1.ReportRequest{
		Name: w.name, Generation: w.generation(), State: "ready", Results: results})
	if err != nil {
		w.t.Fatal(err)
	}
}

const pool = "kind: VipPool\nname: pool\nprefixes: [203.0.113.0/24, \"2001:db8::/64\"]\n---\n"

// vip is a VIP with DIPs 10.0.<n>.1 and so on, on hosts of the same address.
func vip(name string, last, dips int, more string) string {
	text := fmt.Sprintf("kind: Vip\nname: %s\naddresses: [203.0.113.%d]\nendpoints:\n- {name: http, protocol: TCP, port: 80, %sbackends: [", name, last, more)
	for i := range dips {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("{dip: 10.0.%d.%d, port: 8080}", last, i+1)
	}
	return text + "]}\n---\n"
}

const check = "health: {tcp: {}}, "
