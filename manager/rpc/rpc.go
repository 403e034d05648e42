// Package rpc serves the manager's API: operators' calls and nodes' streams, by
// gRPC, gRPC-web and JSON over HTTP, on one port.
package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/manager"
	"github.com/quartet-lb/quartet/manager/store"
)

// maxRequest bounds a request in bytes: some 20,000 VIPs in JSON.
const maxRequest = 64 << 20

// Config says what is served and to whom.
type Config struct {
	// TLS is from certs.LoadServer. nil: anybody may do anything, which only a
	// loopback listener may offer.
	TLS *tls.Config
	// Process serves /healthz, /readyz and /metrics.
	Process http.Handler
	Log     *slog.Logger
	// Ready says whether the manager serves, for grpc.health.v1.
	Ready func() bool
}

// CheckInsecure refuses an address that other machines can reach.
func CheckInsecure(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("--listen: %q is not address:port", address)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return fmt.Errorf("--insecure-loopback: %q is not a loopback address: listen on 127.0.0.1 or [::1], or use --ca, --cert and --key", host)
	}
	return nil
}

// NewServer serves the manager; call ServeTLS on it, or Serve if c.TLS is nil.
// Requests end with ctx.
func NewServer(ctx context.Context, m *manager.Manager, c Config) *http.Server {
	mux := http.NewServeMux()
	auth := connect.WithInterceptors(authorize{secure: c.TLS != nil})
	limit := connect.WithReadMaxBytes(maxRequest)
	mux.Handle(quartetv1connect.NewOperatorServiceHandler(&operators{m}, auth, limit, connect.WithCodec(jsonCodec{})))
	// Tables hardly compress, and each mux would cost a gzip of them.
	mux.Handle(quartetv1connect.NewNodeServiceHandler(&nodes{m}, auth, limit, connect.WithCompression("gzip", nil, nil)))
	h := &healthService{ready: c.Ready}
	mux.Handle("/grpc.health.v1.Health/Check", connect.NewUnaryHandlerSimple("/grpc.health.v1.Health/Check", h.check))
	mux.Handle("/grpc.health.v1.Health/Watch", connect.NewServerStreamHandlerSimple("/grpc.health.v1.Health/Watch", h.watch))
	mux.Handle("/", c.Process)

	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(c.TLS == nil)
	return &http.Server{
		Handler:           identify(mux),
		ErrorLog:          slog.NewLogLogger(c.Log.Handler(), slog.LevelWarn), // failed TLS handshakes
		BaseContext:       func(net.Listener) context.Context { return ctx },
		TLSConfig:         c.TLS,
		Protocols:         protocols,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		HTTP2: &http.HTTP2Config{
			// A node without power is noticed within twice this.
			SendPingTimeout:  5 * time.Second,
			PingTimeout:      5 * time.Second,
			WriteByteTimeout: 30 * time.Second,
		},
	}
}

// jsonCodec is JSON with the schema's names, as operators write them in YAML,
// and refuses fields that it does not know.
type jsonCodec struct{}

func (jsonCodec) Name() string { return "json" }

func (jsonCodec) Marshal(m any) ([]byte, error) {
	return protojson.MarshalOptions{UseProtoNames: true}.Marshal(m.(proto.Message))
}

func (jsonCodec) Unmarshal(b []byte, m any) error {
	if len(b) == 0 {
		return errors.New("an empty body is not JSON: send at least {}")
	}
	return protojson.Unmarshal(b, m.(proto.Message))
}

// peer is who calls, by certificate.
type peer struct{ role, name string }

type peerKey struct{}

// identify notes the caller's certificate in the request's context.
func identify(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil {
			role, name, err := certs.PeerIdentity(*r.TLS)
			if err != nil {
				http.Error(w, err.Error(), http.StatusForbidden)
				return
			}
			r = r.WithContext(context.WithValue(r.Context(), peerKey{}, peer{role, name}))
		}
		next.ServeHTTP(w, r)
	})
}

// may lists the roles that may call a service.
var may = map[string][]string{
	quartetv1connect.OperatorServiceName: {certs.Operator},
	quartetv1connect.NodeServiceName:     {certs.Mux, certs.Host},
}

// authorize is an interceptor that lets only those in who may.
type authorize struct{ secure bool }

func (a authorize) check(ctx context.Context, spec connect.Spec) error {
	if !a.secure {
		return nil
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(spec.Procedure, "/"), "/")
	p, _ := ctx.Value(peerKey{}).(peer)
	if !slices.Contains(may[service], p.role) {
		return connect.NewError(connect.CodePermissionDenied, fmt.Errorf("%s %q may not call %s: a certificate of role %s may",
			p.role, p.name, service, strings.Join(may[service], " or ")))
	}
	return nil
}

func (a authorize) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		if err := a.check(ctx, r.Spec()); err != nil {
			return nil, err
		}
		return next(ctx, r)
	}
}

func (a authorize) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (a authorize) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if err := a.check(ctx, conn.Spec()); err != nil {
			return err
		}
		return next(ctx, conn)
	}
}

// is refuses a node that speaks for another one.
func is(ctx context.Context, name, role string) error {
	p, ok := ctx.Value(peerKey{}).(peer)
	if ok && (p.name != name || role != "" && p.role != role) {
		return connect.NewError(connect.CodePermissionDenied,
			fmt.Errorf("the certificate is of %s %q, and the request of %s %q", p.role, p.name, role, name))
	}
	return nil
}

// fail is err with the code that callers act by.
func fail(err error) error {
	if err == nil {
		return nil
	}
	code := connect.CodeInternal
	var invalid *manager.Invalid
	var is *connect.Error
	switch {
	case errors.As(err, &is):
		return err
	case errors.As(err, &invalid):
		e := connect.NewError(connect.CodeInvalidArgument, err)
		if d, err := connect.NewErrorDetail(&quartetv1.FieldViolations{Violations: invalid.Violations}); err == nil {
			e.AddDetail(d)
		}
		return e
	case errors.Is(err, manager.ErrNotFound):
		code = connect.CodeNotFound
	case errors.Is(err, manager.ErrPrecondition):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, manager.ErrUnavailable):
		code = connect.CodeUnavailable
	case errors.Is(err, store.ErrTooLarge), errors.Is(err, store.ErrNoSpace):
		code = connect.CodeResourceExhausted
	case errors.Is(err, context.Canceled):
		code = connect.CodeCanceled
	case errors.Is(err, context.DeadlineExceeded):
		code = connect.CodeDeadlineExceeded
	}
	return connect.NewError(code, err)
}

type operators struct{ m *manager.Manager }

func (s *operators) Apply(ctx context.Context, r *quartetv1.ApplyRequest) (*quartetv1.ApplyResponse, error) {
	resp, err := s.m.Apply(ctx, r.Objects, r.DryRun, r.WaitMs)
	return resp, fail(err)
}

func (s *operators) Delete(ctx context.Context, r *quartetv1.DeleteRequest) (*quartetv1.DeleteResponse, error) {
	resp, err := s.m.Delete(ctx, r.Objects, r.WaitMs)
	return resp, fail(err)
}

func (s *operators) List(_ context.Context, r *quartetv1.ListRequest) (*quartetv1.ListResponse, error) {
	resp, err := s.m.List(r.Kind, r.Name)
	return resp, fail(err)
}

func (s *operators) Drain(ctx context.Context, r *quartetv1.DrainRequest) (*quartetv1.DrainResponse, error) {
	resp, err := s.m.Drain(ctx, r)
	return resp, fail(err)
}

func (s *operators) Top(context.Context, *quartetv1.TopRequest) (*quartetv1.TopResponse, error) {
	return s.m.Top(), nil
}

func (s *operators) Trace(ctx context.Context, r *quartetv1.TraceRequest) (*quartetv1.TraceResponse, error) {
	if r.Packet == nil {
		return nil, fail(&manager.Invalid{Violations: []*quartetv1.FieldViolation{{Path: "packet", Message: "is missing", Valid: "source, destination, protocol"}}})
	}
	resp, err := s.m.Trace(ctx, r.Mux, r.Packet)
	return resp, fail(err)
}

type nodes struct{ m *manager.Manager }

func (s *nodes) Watch(ctx context.Context, r *quartetv1.WatchRequest, stream *connect.ServerStream[quartetv1.Update]) error {
	if err := is(ctx, r.Name, r.Role); err != nil {
		return err
	}
	return fail(s.m.Watch(ctx, r, stream.Send))
}

func (s *nodes) Report(ctx context.Context, r *quartetv1.ReportRequest) (*quartetv1.ReportResponse, error) {
	if err := is(ctx, r.Name, ""); err != nil {
		return nil, err
	}
	return &quartetv1.ReportResponse{}, fail(s.m.Report(ctx, r))
}

func (s *nodes) TraceReply(ctx context.Context, r *quartetv1.TraceReplyRequest) (*quartetv1.TraceReplyResponse, error) {
	if err := is(ctx, r.Name, ""); err != nil {
		return nil, err
	}
	s.m.TraceReply(r)
	return &quartetv1.TraceReplyResponse{}, nil
}

// healthService is grpc.health.v1: one state for all services.
type healthService struct{ ready func() bool }

func (h *healthService) status() *grpc_health_v1.HealthCheckResponse {
	if h.ready() {
		return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_NOT_SERVING}
}

func (h *healthService) check(_ context.Context, r *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	if _, ok := may[r.Service]; r.Service != "" && !ok {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no service %q", r.Service))
	}
	return h.status(), nil
}

func (h *healthService) watch(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest, stream *connect.ServerStream[grpc_health_v1.HealthCheckResponse]) error {
	last := grpc_health_v1.HealthCheckResponse_UNKNOWN
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		if s := h.status(); s.Status != last {
			last = s.Status
			if err := stream.Send(s); err != nil {
				return err
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
