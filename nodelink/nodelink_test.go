package nodelink

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
)

// fakeManager speaks NodeService as the test tells it to: each Watch waits for
// the test to take it.
type fakeManager struct {
	quartetv1connect.UnimplementedNodeServiceHandler
	url     string
	streams chan *stream
	replies chan *quartetv1.TraceReplyRequest

	mu      sync.Mutex
	reports []*quartetv1.ReportRequest // guarded by mu
	lose    bool                       // guarded by mu: fail reports
}

type stream struct {
	request *quartetv1.WatchRequest
	updates chan *quartetv1.Update // closed: the manager ends the stream
	gone    <-chan struct{}        // the node ended it
}

func (s *stream) send(us ...*quartetv1.Update) {
	for _, u := range us {
		s.updates <- u
	}
}

func (m *fakeManager) Watch(ctx context.Context, r *quartetv1.WatchRequest, out *connect.ServerStream[quartetv1.Update]) error {
	s := &stream{request: r, updates: make(chan *quartetv1.Update, 64), gone: ctx.Done()}
	select {
	case m.streams <- s:
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		select {
		case u, ok := <-s.updates:
			if !ok {
				return nil
			}
			if err := out.Send(u); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (m *fakeManager) Report(_ context.Context, r *quartetv1.ReportRequest) (*quartetv1.ReportResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lose {
		return nil, errors.New("lost")
	}
	m.reports = append(m.reports, r)
	return &quartetv1.ReportResponse{}, nil
}

func (m *fakeManager) TraceReply(_ context.Context, r *quartetv1.TraceReplyRequest) (*quartetv1.TraceReplyResponse, error) {
	m.replies <- r
	return &quartetv1.TraceReplyResponse{}, nil
}

func (m *fakeManager) reported(t *testing.T, what string, is func(*quartetv1.ReportRequest) bool) {
	t.Helper()
	eventually(t, "a report with "+what, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return slices.ContainsFunc(m.reports, is)
	})
}

func (m *fakeManager) stream(t *testing.T) *stream {
	t.Helper()
	select {
	case s := <-m.streams:
		return s
	case <-time.After(20 * time.Second):
		t.Fatal("the node does not watch")
		return nil
	}
}

func serve(t *testing.T, listener net.Listener) *fakeManager {
	t.Helper()
	m := &fakeManager{url: "http://" + listener.Addr().String(), streams: make(chan *stream), replies: make(chan *quartetv1.TraceReplyRequest, 1)}
	mux := http.NewServeMux()
	mux.Handle(quartetv1connect.NewNodeServiceHandler(m))
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Handler: mux, Protocols: &protocols}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	return m
}

func manager(t *testing.T) *fakeManager {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, listener)
}

// node is a handler that runs what it is told, by a merge of its own.
type node struct {
	mu      sync.Mutex
	runs    muxState // guarded by mu
	from    []Source // guarded by mu: of each snapshot
	refuse  string   // guarded by mu: VIP name that it can't run
	results []*quartetv1.CheckResult
}

func (n *node) ApplySnapshot(_ context.Context, t *quartetv1.MuxTables, from Source) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, v := range t.Vips {
		if n.refuse != "" && v.Vip == n.refuse {
			return errors.New("no room for " + v.Vip)
		}
	}
	n.runs.replace(t)
	n.from = append(n.from, from)
	return nil
}

func (n *node) ApplyDelta(_ context.Context, d *quartetv1.MuxDelta) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, v := range d.PutVips {
		if n.refuse != "" && v.Vip == n.refuse {
			return errors.New("no room for " + v.Vip)
		}
	}
	n.runs.merge(d)
	return nil
}

func (n *node) Trace(_ context.Context, p *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	if p.Protocol != "TCP" {
		return nil, fmt.Errorf("protocol %q is not TCP", p.Protocol)
	}
	return &quartetv1.TraceResponse{Exit: "encapsulated"}, nil
}

func (n *node) Report(r *quartetv1.ReportRequest, want Want) {
	r.State = "ready"
	if want.AllResults {
		r.Results = n.results
	}
	if want.Counters {
		r.Exits = map[string]uint64{"encapsulated": 1}
	}
}

func (n *node) tables() *quartetv1.MuxTables {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.runs.tables()
	sortTables(t)
	return t
}

func sortTables(t *quartetv1.MuxTables) {
	slices.SortFunc(t.Vips, func(a, b *quartetv1.VipAddress) int { return bytes.Compare(a.Address, b.Address) })
	slices.SortFunc(t.Endpoints, func(a, b *quartetv1.MuxEndpoint) int {
		return strings.Compare(fmt.Sprint(keyOf(a.Key)), fmt.Sprint(keyOf(b.Key)))
	})
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// run links a node until stop is called.
func run(t *testing.T, c Config, n *node) (link *Link[*quartetv1.MuxTables, *quartetv1.MuxDelta], log *logBuffer, stop func()) {
	t.Helper()
	log = &logBuffer{}
	c.Name, c.AllowPlain = "mux1", true
	c.Log = slog.New(slog.NewTextHandler(io.MultiWriter(log, t.Output()), &slog.HandlerOptions{Level: slog.LevelDebug}))
	c.MinBackoff, c.MaxBackoff, c.ReportEvery = 5*time.Millisecond, 50*time.Millisecond, 20*time.Millisecond
	link, err := NewMux(c, n)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := link.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return link, log, stop
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func vip(i byte, name string) *quartetv1.VipAddress {
	return &quartetv1.VipAddress{Address: []byte{203, 0, 113, i}, Vip: name, Tenant: "t"}
}

func endpoint(i byte, port uint32, generation uint64) *quartetv1.MuxEndpoint {
	return &quartetv1.MuxEndpoint{
		Key: &quartetv1.EndpointKey{Vip: []byte{203, 0, 113, i}, Protocol: 6, Port: port}, Generation: generation,
	}
}

func snapshot(term, generation uint64, vips ...*quartetv1.VipAddress) *quartetv1.Update {
	return &quartetv1.Update{Term: term, What: &quartetv1.Update_MuxSnapshot{MuxSnapshot: &quartetv1.MuxTables{
		Generation: generation, FlowSeed: []byte("0123456789abcdef"), Vips: vips,
	}}}
}

func delta(term, base, generation uint64, vips ...*quartetv1.VipAddress) *quartetv1.Update {
	return &quartetv1.Update{Term: term, What: &quartetv1.Update_MuxDelta{MuxDelta: &quartetv1.MuxDelta{
		Base: base, Generation: generation, PutVips: vips,
	}}}
}

func runs(generation uint64) func(*quartetv1.ReportRequest) bool {
	return func(r *quartetv1.ReportRequest) bool { return r.Generation == generation && r.Error == "" }
}

func TestSnapshotDeltasAcknowledged(t *testing.T) {
	m := manager(t)
	n := &node{}
	link, _, _ := run(t, Config{Managers: []string{m.url}, State: t.TempDir(), Addresses: []string{"10.0.0.2"}, Version: "v1"}, n)
	s := m.stream(t)
	if r := s.request; r.Name != "mux1" || r.Role != "mux" || r.Term != 0 || r.Version != "v1" || r.Addresses[0] != "10.0.0.2" {
		t.Errorf("watches with %v", r)
	}
	s.send(snapshot(1, 10, vip(1, "a")), delta(1, 10, 11, vip(2, "b")), delta(1, 11, 15, vip(3, "c")))
	m.reported(t, "generation 15", runs(15))
	if got := len(n.tables().Vips); got != 3 || !link.Connected() || link.Generation() != 15 {
		t.Errorf("%d VIPs, connected %t, generation %d", got, link.Connected(), link.Generation())
	}
	m.reported(t, "counters", func(r *quartetv1.ReportRequest) bool {
		return r.Exits["encapsulated"] == 1 && r.State == "ready" && r.Name == "mux1"
	})
}

// A delta that was lost, repeated or overtaken by another has a base that does
// not run: the node asks for a snapshot and runs nothing of it meanwhile.
func TestBaseMismatchWatchesAgain(t *testing.T) {
	for name, updates := range map[string][]*quartetv1.Update{
		"lost":      {snapshot(1, 10), delta(1, 11, 12, vip(9, "bad"))},
		"repeated":  {snapshot(1, 10), delta(1, 10, 11), delta(1, 10, 11, vip(9, "bad"))},
		"reordered": {snapshot(1, 10), delta(1, 11, 12, vip(9, "bad")), delta(1, 10, 11, vip(8, "bad"))},
		"first":     {delta(1, 0, 12, vip(9, "bad"))},
	} {
		t.Run(name, func(t *testing.T) {
			m := manager(t)
			n := &node{}
			run(t, Config{Managers: []string{m.url}, State: t.TempDir()}, n)
			first := m.stream(t)
			first.send(updates...)
			second := m.stream(t)
			<-first.gone
			if len(n.tables().Vips) != 0 {
				t.Errorf("runs %v", n.tables().Vips)
			}
			second.send(snapshot(1, 12, vip(1, "a")))
			m.reported(t, "generation 12", runs(12))
		})
	}
}

// Ananta section 6: a node refuses an older term, also after a restart, and the
// stale leader is told.
func TestOlderTermRefused(t *testing.T) {
	state := t.TempDir()
	m := manager(t)
	n := &node{}
	_, _, stop := run(t, Config{Managers: []string{m.url}, State: state}, n)
	m.stream(t).send(snapshot(7, 10, vip(1, "a")), delta(6, 10, 11, vip(2, "stale")))
	m.reported(t, "a refusal", func(r *quartetv1.ReportRequest) bool {
		return strings.Contains(r.Error, "refused an older term: 6, seen 7")
	})
	if again := m.stream(t); again.request.Term != 7 {
		t.Errorf("watches again with term %d", again.request.Term)
	}
	stop()

	n = &node{}
	run(t, Config{Managers: []string{m.url}, State: state}, n)
	s := m.stream(t)
	if s.request.Term != 7 {
		t.Errorf("after a restart it watches with term %d", s.request.Term)
	}
	s.send(snapshot(6, 20, vip(9, "stale")))
	s = m.stream(t)
	if tables := n.tables(); tables.Generation != 10 || len(tables.Vips) != 1 || tables.Vips[0].Vip != "a" {
		t.Errorf("runs %v", tables)
	}
	s.send(snapshot(8, 21, vip(3, "c")))
	m.reported(t, "generation 21", runs(21))
}

// Tables that can't run: the last good ones stay, the manager learns why, and a
// later good change is run at once although a delta to the bad one announces it.
func TestApplyErrorKeepsLastGood(t *testing.T) {
	state := t.TempDir()
	m := manager(t)
	n := &node{refuse: "big"}
	_, _, stop := run(t, Config{Managers: []string{m.url}, State: state}, n)
	s := m.stream(t)
	s.send(snapshot(1, 10, vip(1, "a")), delta(1, 10, 11, vip(2, "big")))
	m.reported(t, "the error", func(r *quartetv1.ReportRequest) bool {
		return r.Generation == 10 && r.Error == "generation 11: no room for big"
	})
	s.send(delta(1, 11, 12))
	s = m.stream(t)
	s.send(snapshot(1, 12, vip(1, "a"), vip(3, "c")))
	m.reported(t, "generation 12", runs(12))

	// A bad snapshot is asked for again until it runs.
	s.send(delta(1, 12, 13, vip(2, "big")))
	for range 2 {
		s = m.stream(t)
		s.send(snapshot(1, 13, vip(2, "big")))
	}
	s = m.stream(t)
	n.mu.Lock()
	n.refuse = ""
	n.mu.Unlock()
	s.send(snapshot(1, 13, vip(2, "big")))
	m.reported(t, "generation 13", runs(13))
	stop()

	n = &node{}
	run(t, Config{Managers: []string{m.url}, State: state}, n)
	eventually(t, "the last good tables run", func() bool { return n.tables().Generation == 13 })
}

// The node serves while the manager is away, from the file, and reconciles.
func TestServesWhileManagerIsAway(t *testing.T) {
	state := t.TempDir()
	m := manager(t)
	_, _, stop := run(t, Config{Managers: []string{m.url}, State: state}, &node{})
	m.stream(t).send(snapshot(1, 10, vip(1, "a")), delta(1, 10, 11, vip(2, "b")))
	m.reported(t, "generation 11", runs(11))
	stop()

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	n := &node{}
	link, _, _ := run(t, Config{Managers: []string{"http://" + address}, State: state}, n)
	eventually(t, "the last good tables run", func() bool { return n.tables().Generation == 11 && len(n.tables().Vips) == 2 })
	if n.from[0] != FromFile || link.Connected() {
		t.Errorf("from %v, connected %t", n.from, link.Connected())
	}
	listener, err = net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	back := serve(t, listener)
	back.stream(t).send(snapshot(1, 12, vip(3, "c")))
	back.reported(t, "generation 12", runs(12))
	if v := n.tables().Vips; len(v) != 1 || v[0].Vip != "c" {
		t.Errorf("after reconciling it runs %v", v)
	}
}

// A manager that is dead, and one that dies, are left for the next.
func TestSeveralManagers(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	deadURL := "http://" + dead.Addr().String()
	dead.Close()
	m1, m2 := manager(t), manager(t)
	n := &node{}
	run(t, Config{Managers: []string{deadURL, m1.url, m2.url}, State: t.TempDir()}, n)
	var first *stream
	other := m2
	select {
	case first = <-m1.streams:
	case first = <-m2.streams:
		other = m1
	case <-time.After(20 * time.Second):
		t.Fatal("the node does not watch")
	}
	first.send(snapshot(1, 1))
	close(first.updates)
	other.stream(t).send(snapshot(2, 2))
	other.reported(t, "generation 2", runs(2))
}

// A manager that falls silent without closing its connections is noticed.
func TestSilentManager(t *testing.T) {
	m := manager(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	silent := make(chan struct{})
	go func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", strings.TrimPrefix(m.url, "http://"))
			if err != nil {
				t.Error(err)
				return
			}
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					buffer := make([]byte, 4096)
					for {
						k, err := way[0].Read(buffer)
						if err != nil {
							return
						}
						select {
						case <-silent:
							continue
						default:
						}
						if _, err := way[1].Write(buffer[:k]); err != nil {
							return
						}
					}
				}()
			}
		}
	}()
	link, _, _ := run(t, Config{Managers: []string{"http://" + listener.Addr().String()}, State: t.TempDir(), PingEvery: 50 * time.Millisecond}, &node{})
	m.stream(t).send(snapshot(1, 1))
	m.reported(t, "generation 1", runs(1))
	close(silent)
	eventually(t, "the manager counts as lost", func() bool { return !link.Connected() })
}

func TestTrace(t *testing.T) {
	m := manager(t)
	run(t, Config{Managers: []string{m.url}, State: t.TempDir()}, &node{})
	s := m.stream(t)
	trace := func(id, protocol string) *quartetv1.TraceReplyRequest {
		s.send(&quartetv1.Update{Term: 1, What: &quartetv1.Update_Trace{Trace: &quartetv1.TraceCommand{Id: id, Packet: &quartetv1.TracePacket{Protocol: protocol}}}})
		return <-m.replies
	}
	s.send(snapshot(1, 5))
	m.reported(t, "generation 5", runs(5))
	if r := trace("t1", "TCP"); r.Id != "t1" || r.Name != "mux1" || r.Error != "" || r.Response.Exit != "encapsulated" || r.Response.Generation != 5 {
		t.Errorf("reply %v", r)
	}
	if r := trace("t2", "SCTP"); r.Id != "t2" || r.Error != `protocol "SCTP" is not TCP` || r.Response != nil {
		t.Errorf("reply %v", r)
	}
}

// All health results go out first on each stream and again when a report was lost.
func TestResultsAfterALostReport(t *testing.T) {
	m := manager(t)
	n := &node{results: []*quartetv1.CheckResult{{Id: "web/http/10.1.3.11", Healthy: true}}}
	link, log, _ := run(t, Config{Managers: []string{m.url}, State: t.TempDir()}, n)
	first := m.stream(t)
	first.send(snapshot(1, 1))
	withResults := func(r *quartetv1.ReportRequest) bool { return len(r.Results) == 1 }
	m.reported(t, "all results", withResults)
	m.mu.Lock()
	m.reports, m.lose = nil, true
	m.mu.Unlock()
	link.Notify()
	eventually(t, "a report is lost", func() bool { return strings.Contains(log.String(), "report lost") })
	m.mu.Lock()
	m.lose = false
	m.mu.Unlock()
	m.reported(t, "all results", withResults)
	m.mu.Lock()
	m.reports = nil
	m.mu.Unlock()
	close(first.updates)
	m.stream(t).send(snapshot(1, 2))
	m.reported(t, "all results on the next stream", withResults)
}

// A file that can't be used is one warning and no tables; the node starts anyway.
func TestDamagedFile(t *testing.T) {
	good := func(t *testing.T) (string, []byte) {
		state := t.TempDir()
		m := manager(t)
		_, _, stop := run(t, Config{Managers: []string{m.url}, State: state}, &node{})
		m.stream(t).send(snapshot(1, 10, vip(1, "a")), delta(1, 10, 11, vip(2, "b")))
		m.reported(t, "generation 11", runs(11))
		stop()
		content, err := os.ReadFile(filepath.Join(state, "tables"))
		if err != nil {
			t.Fatal(err)
		}
		return state, content
	}
	for _, c := range []struct {
		name   string
		damage func([]byte) []byte
		want   string // in the log; "" for none
		runs   uint64 // generation
	}{
		{"intact", func(b []byte) []byte { return b }, "", 11},
		{"flipped bit in the last record", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, "checksum at byte", 0},
		{"cut off in mid-write", func(b []byte) []byte { return b[:len(b)-3] }, "", 10},
		{"cut off in the snapshot", func(b []byte) []byte { return b[:30] }, "no complete snapshot", 0},
		{"empty", func([]byte) []byte { return nil }, "another version", 0},
		{"newer version", func(b []byte) []byte { return bytes.Replace(b, []byte("tables 1 mux"), []byte("tables 2 mux"), 1) }, "another version", 0},
		{"a host's", func(b []byte) []byte { return bytes.Replace(b, []byte("tables 1 mux"), []byte("tables 1 host"), 1) }, "another version", 0},
		{"noise", func([]byte) []byte { return bytes.Repeat([]byte{0xfe, 0x01}, 999) }, "another version", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			state, content := good(t)
			if err := os.WriteFile(filepath.Join(state, "tables"), c.damage(content), 0o600); err != nil {
				t.Fatal(err)
			}
			m := manager(t)
			n := &node{}
			_, log, _ := run(t, Config{Managers: []string{m.url}, State: state}, n)
			s := m.stream(t) // restore comes first
			if got := n.tables().Generation; got != c.runs {
				t.Errorf("runs generation %d, want %d", got, c.runs)
			}
			if warnings := strings.Count(log.String(), "level=WARN"); c.want == "" && warnings != 0 || c.want != "" && (warnings != 1 || !strings.Contains(log.String(), c.want)) {
				t.Errorf("log is\n%swant one warning with %q", log, c.want)
			}
			s.send(snapshot(1, 12, vip(1, "a")))
			m.reported(t, "generation 12", runs(12))
		})
	}
}

// Whatever the deltas, the file gives back what ran; and its size stays within
// a small multiple of the tables'.
func TestFileFollowsDeltas(t *testing.T) {
	state := t.TempDir()
	random := rand.New(rand.NewPCG(1, 2))
	m := manager(t)
	n := &node{}
	_, _, stop := run(t, Config{Managers: []string{m.url}, State: state}, n)
	s := m.stream(t)
	s.send(snapshot(1, 1))
	generation := uint64(1)
	largest := int64(0)
	for range 400 {
		u := delta(1, generation, generation+1)
		d := u.GetMuxDelta()
		for range random.IntN(4) {
			i := byte(random.IntN(20))
			if random.IntN(3) == 0 {
				d.DeleteVips = append(d.DeleteVips, []byte{203, 0, 113, i})
				d.DeleteEndpoints = append(d.DeleteEndpoints, endpoint(i, 80, 0).Key)
			} else {
				e := endpoint(i, uint32(80+random.IntN(2)), generation+1)
				e.Buckets = make([]byte, 8192)
				d.PutVips = append(d.PutVips, vip(i, fmt.Sprintf("v%d", generation)))
				d.PutEndpoints = append(d.PutEndpoints, e)
			}
		}
		d.Drain = random.IntN(2) == 0
		d.Announce = []string{fmt.Sprintf("203.0.%d.0/24", generation%200)}
		generation++
		s.send(u)
		if info, err := os.Stat(filepath.Join(state, "tables")); err == nil {
			largest = max(largest, info.Size())
		}
	}
	m.reported(t, "the last generation", runs(generation))
	stop()
	if limit := int64(2*storeSlack + 3*40*8300); largest > limit {
		t.Errorf("the file grew to %d bytes, want at most %d", largest, limit)
	}
	again := &node{}
	run(t, Config{Managers: []string{m.url}, State: state}, again)
	m.stream(t)
	if want, got := n.tables(), again.tables(); !proto.Equal(want, got) {
		t.Errorf("the file gives generation %d with %d VIPs and %d endpoints; %d, %d and %d ran",
			got.Generation, len(got.Vips), len(got.Endpoints), want.Generation, len(want.Vips), len(want.Endpoints))
	}
}

// A state directory that can't be written does not stop the node from serving.
func TestFullStateDirectory(t *testing.T) {
	state := t.TempDir()
	m := manager(t)
	_, log, _ := run(t, Config{Managers: []string{m.url}, State: state}, &node{})
	s := m.stream(t)
	s.send(snapshot(1, 1))
	m.reported(t, "generation 1", runs(1))
	eventually(t, "the file is there", func() bool {
		_, err := os.Stat(filepath.Join(state, "tables"))
		return err == nil
	})
	if err := os.Mkdir(filepath.Join(state, "tables.tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	close(s.updates)
	m.stream(t).send(snapshot(1, 2))
	m.reported(t, "generation 2", runs(2))
	eventually(t, "an error is logged", func() bool { return strings.Contains(log.String(), "last good tables not kept") })
}

func TestMutualTLS(t *testing.T) {
	dir := t.TempDir()
	if err := certs.Init(dir); err != nil {
		t.Fatal(err)
	}
	for role, name := range map[string]string{certs.Manager: "m1", certs.Mux: "mux1"} {
		if err := certs.Issue(dir, role, name, []string{"127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		t.Fatal(err)
	}
	find := func(part, ext string) string {
		for _, f := range files {
			if strings.Contains(filepath.Base(f), part) && strings.HasSuffix(f, ext) {
				return f
			}
		}
		t.Fatalf("no %s%s in %v", part, ext, files)
		return ""
	}
	serverTLS, err := certs.LoadServer(find("ca", ".crt"), find("m1", ".crt"), find("m1", ".key"))
	if err != nil {
		t.Fatal(err)
	}
	clientTLS, err := certs.LoadClient(find("ca", ".crt"), find("mux1", ".crt"), find("mux1", ".key"))
	if err != nil {
		t.Fatal(err)
	}
	m := &fakeManager{streams: make(chan *stream)}
	mux := http.NewServeMux()
	mux.Handle(quartetv1connect.NewNodeServiceHandler(m))
	protocol := make(chan string, 16)
	server := &http.Server{TLSConfig: serverTLS, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case protocol <- r.Proto:
		default:
		}
		mux.ServeHTTP(w, r)
	})}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go server.ServeTLS(listener, "", "")
	t.Cleanup(func() { server.Close() })
	run(t, Config{Managers: []string{"https://" + listener.Addr().String()}, TLS: clientTLS, State: t.TempDir()}, &node{})
	m.stream(t).send(snapshot(1, 1))
	m.reported(t, "generation 1", runs(1))
	if p := <-protocol; p != "HTTP/2.0" {
		t.Errorf("protocol %s", p)
	}
}

func TestBadConfiguration(t *testing.T) {
	for want, c := range map[string]Config{
		"name is empty":                         {},
		"no manager given":                      {Name: "m"},
		`"10.0.0.1:1" is not a manager's URL`:   {Name: "m", Managers: []string{"10.0.0.1:1"}},
		"is not encrypted: https is wanted":     {Name: "m", Managers: []string{"http://127.0.0.1:1"}},
		"not encrypted and not a loopback":      {Name: "m", Managers: []string{"http://10.0.0.1:1"}, AllowPlain: true},
		"needs the node's certificate":          {Name: "m", Managers: []string{"https://10.0.0.1:1"}},
		"open state: no directory given":        {Name: "m", Managers: []string{"http://[::1]:1"}, AllowPlain: true},
		"open state: mkdir /dev/null: not a di": {Name: "m", Managers: []string{"http://[::1]:1"}, AllowPlain: true, State: "/dev/null/x"},
	} {
		if _, err := NewMux(c, &node{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// Two processes on one directory would write to one packet path: the second is
// refused, until the first has ended.
func TestSecondProcessIsRefused(t *testing.T) {
	c := Config{Name: "mux1", Managers: []string{"http://127.0.0.1:1"}, AllowPlain: true, State: t.TempDir()}
	first, err := NewMux(c, &node{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewMux(c, &node{}); err == nil || err.Error() != "open state: another process runs on "+c.State {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := first.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := NewMux(c, &node{}); err != nil {
		t.Error(err)
	}
}
