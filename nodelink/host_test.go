package nodelink

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

type hostNode struct {
	mu   sync.Mutex
	runs hostState // guarded by mu
}

func (n *hostNode) ApplySnapshot(_ context.Context, t *quartetv1.HostTables, _ Source) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.runs.replace(t)
	return nil
}

func (n *hostNode) ApplyDelta(_ context.Context, d *quartetv1.HostDelta) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.runs.merge(d)
	return nil
}

func (n *hostNode) Trace(context.Context, *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	return &quartetv1.TraceResponse{}, nil
}

func (n *hostNode) Report(*quartetv1.ReportRequest, Want) {}

func (n *hostNode) tables() *quartetv1.HostTables {
	n.mu.Lock()
	defer n.mu.Unlock()
	t := n.runs.tables()
	slices.SortFunc(t.Rules, func(a, b *quartetv1.NatRule) int {
		return cmp.Or(bytes.Compare(a.Tunnel, b.Tunnel), cmp.Compare(a.Port, b.Port))
	})
	return t
}

// A host's rules and checks are merged by their keys, and the file gives back
// what ran.
func TestHostTables(t *testing.T) {
	state := t.TempDir()
	m := manager(t)
	start := func() (*hostNode, func()) {
		n := &hostNode{}
		link, err := NewHost(Config{Name: "host1", Managers: []string{m.url}, AllowPlain: true, State: state,
			MinBackoff: 5 * time.Millisecond, MaxBackoff: 50 * time.Millisecond}, n)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- link.Run(ctx) }()
		return n, sync.OnceFunc(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	rule := func(tunnel byte, port, dipPort uint32) *quartetv1.NatRule {
		return &quartetv1.NatRule{Tunnel: []byte{10, 1, 3, tunnel}, Vip: []byte{203, 0, 113, 1}, Protocol: 6, Port: port,
			Dip: []byte{10, 1, 3, tunnel}, DipPort: dipPort}
	}
	check := func(id string, port uint32) *quartetv1.Check { return &quartetv1.Check{Id: id, Port: port} }
	seed := []byte("0123456789abcdef")

	n, stop := start()
	defer stop()
	s := m.stream(t)
	if s.request.Role != "host" {
		t.Errorf("watches as %q", s.request.Role)
	}
	s.send(
		&quartetv1.Update{Term: 1, What: &quartetv1.Update_HostSnapshot{HostSnapshot: &quartetv1.HostTables{
			Generation: 1, FlowSeed: seed, Rules: []*quartetv1.NatRule{rule(1, 80, 8080), rule(2, 80, 8080), rule(2, 443, 8443)},
			Checks: []*quartetv1.Check{check("a", 1), check("b", 1)},
		}}},
		&quartetv1.Update{Term: 1, What: &quartetv1.Update_HostDelta{HostDelta: &quartetv1.HostDelta{
			Base: 1, Generation: 3, PutRules: []*quartetv1.NatRule{rule(2, 80, 9090), rule(3, 80, 8080)},
			DeleteRules: []*quartetv1.NatRule{{Tunnel: []byte{10, 1, 3, 1}, Vip: []byte{203, 0, 113, 1}, Protocol: 6, Port: 80}},
			PutChecks:   []*quartetv1.Check{check("b", 2)}, DeleteChecks: []string{"a"},
		}}})
	m.reported(t, "generation 3", runs(3))
	want := &quartetv1.HostTables{
		Generation: 3, FlowSeed: seed, Rules: []*quartetv1.NatRule{rule(2, 80, 9090), rule(2, 443, 8443), rule(3, 80, 8080)},
		Checks: []*quartetv1.Check{check("b", 2)},
	}
	if got := n.tables(); !proto.Equal(got, want) {
		t.Errorf("runs %v\nwant %v", got, want)
	}
	stop()
	n, stop = start()
	defer stop()
	s = m.stream(t)
	if got := n.tables(); !proto.Equal(got, want) {
		t.Errorf("the file gives %v\nwant %v", got, want)
	}
	// A mux's tables are no host's.
	s.send(snapshot(1, 9))
	m.stream(t)
	if got := n.tables(); !proto.Equal(got, want) {
		t.Errorf("after a mux's tables it runs %v", got)
	}
}
