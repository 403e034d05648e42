package rpc_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/manager"
	"github.com/quartet-lb/quartet/nodelink"
)

// linked is a mux's side of the line, without a data plane.
type linked struct {
	mu        sync.Mutex
	endpoints map[string]*quartetv1.MuxEndpoint
	snapshots int
	deltas    int
}

func (l *linked) ApplySnapshot(_ context.Context, s *quartetv1.MuxTables, _ nodelink.Source) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.snapshots++
	l.endpoints = map[string]*quartetv1.MuxEndpoint{}
	for _, e := range s.Endpoints {
		l.endpoints[endpointKey(e.Key)] = e
	}
	return nil
}

func (l *linked) ApplyDelta(_ context.Context, d *quartetv1.MuxDelta) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deltas++
	for _, k := range d.DeleteEndpoints {
		delete(l.endpoints, endpointKey(k))
	}
	for _, e := range d.PutEndpoints {
		l.endpoints[endpointKey(e.Key)] = e
	}
	return nil
}

func (l *linked) Trace(context.Context, *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	return &quartetv1.TraceResponse{Exit: "tx"}, nil
}

func (l *linked) Report(r *quartetv1.ReportRequest, _ nodelink.Want) { r.State = "ready" }

// The line that muxes use: changes, a trace, and a manager that goes away and
// comes back.
func TestNodeLink(t *testing.T) {
	f := newFabric(t, manager.Config{})
	f.issue(certs.Mux, "mux1")
	tlsConfig, err := certs.LoadClient(f.file("ca.crt"), f.file("mux1.crt"), f.file("mux1.key"))
	if err != nil {
		t.Fatal(err)
	}
	node := &linked{}
	link, err := nodelink.NewMux(nodelink.Config{Name: "mux1", Managers: []string{f.url}, TLS: tlsConfig, State: t.TempDir(),
		MaxBackoff: 200 * time.Millisecond}, node)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		link.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	until(t, "the mux connects", link.Connected)
	for i := range 5 {
		if r := f.apply(pool + vip("web", 10, 1+i, "")).Rollout; r.MuxesAcked != 1 || link.Generation() != r.Generation {
			t.Errorf("rollout %v, the mux runs %d", r, link.Generation())
		}
	}
	if tr, err := f.op.Trace(t.Context(), &quartetv1.TraceRequest{Packet: &quartetv1.TracePacket{}}); err != nil || tr.Exit != "tx" || tr.Mux != "mux1" {
		t.Errorf("trace: %v, %v", tr, err)
	}
	if node.snapshots != 1 || node.deltas != 5 {
		t.Errorf("%d snapshots, %d deltas", node.snapshots, node.deltas)
	}
	f.stop()
	until(t, "the mux notices", func() bool { return !link.Connected() })
	f.start()
	until(t, "the mux comes back", link.Connected)
	if r := f.apply(vip("web", 10, 2, "")).Rollout; r.MuxesAcked != 1 {
		t.Errorf("rollout %v", r)
	}
	fresh := f.watch("mux", "mux2", nil).snapshot()
	node.mu.Lock()
	defer node.mu.Unlock()
	if len(node.endpoints) != 1 {
		t.Fatalf("it runs %v", node.endpoints)
	}
	for k, e := range node.endpoints {
		if !proto.Equal(e, fresh.Endpoints[k]) {
			t.Errorf("it runs %v, not %v", e, fresh.Endpoints[k])
		}
	}
}
