// Package daemon is what every Quartet process does alike: its log, its
// signals, /metrics, /healthz and /readyz, its configuration file, and one
// clear line when it can't run.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// version is set by the linker: -X github.com/quartet-lb/quartet/daemon.version=v1.2.3.
var version string

// Version is the build's version: the linker's, else the version control
// revision that Go recorded, else "unknown".
func Version() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	var revision, modified string
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			revision = s.Value
		case "vcs.modified":
			if s.Value == "true" {
				modified = "-modified"
			}
		}
	}
	if revision == "" {
		return "unknown"
	}
	return revision[:min(12, len(revision))] + modified
}

// Main runs a process's root command until it returns or SIGINT or SIGTERM
// cancels its context, and exits: with status 0, or with one line on standard
// error and status 1. A second signal kills the process at once.
func Main(root *cobra.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	root.SilenceErrors, root.SilenceUsage = true, true
	root.Version = Version()
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", root.Name(), OneLine(err))
		os.Exit(1)
	}
	stop()
}

// OneLine is an error's text without line breaks.
func OneLine(err error) string {
	return strings.Join(strings.FieldsFunc(err.Error(), func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// Options are the flags that all daemons have.
type Options struct {
	LogLevel      string // debug, info, warn, error
	LogFormat     string // text, json
	MetricsListen string // host:port of /metrics, /healthz and /readyz; empty: none
}

// AddFlags adds --log-level, --log-format, --metrics-listen and --config.
func (o *Options) AddFlags(flags *pflag.FlagSet, metricsListen string) {
	flags.StringVar(&o.LogLevel, "log-level", "info", "what to log: debug, info, warn or error")
	flags.StringVar(&o.LogFormat, "log-format", "text", "how to log: text or json")
	flags.StringVar(&o.MetricsListen, "metrics-listen", metricsListen,
		"`address:port` of /metrics, /healthz and /readyz; empty: none")
	AddConfigFlag(flags)
}

// Process is a running daemon's log, metrics and readiness.
type Process struct {
	Log     *slog.Logger
	Metrics *prometheus.Registry
	Ready   *Readiness
	// Addr is where /metrics is served; nil if nowhere.
	Addr net.Addr

	server *http.Server
}

// Start opens the log on w and serves /metrics, /healthz and /readyz. conditions
// are what must come true before /readyz says so. name is the process's name,
// as ps shows it.
func (o *Options) Start(name string, w io.Writer, conditions ...string) (*Process, error) {
	log, err := NewLogger(w, o.LogLevel, o.LogFormat)
	if err != nil {
		return nil, err
	}
	p := &Process{Log: log, Metrics: prometheus.NewRegistry(), Ready: NewReadiness(conditions...)}
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "quartet_build_info",
		Help:        "1; the labels say what was built.",
		ConstLabels: prometheus.Labels{"process": name, "version": Version(), "go_version": runtime.Version()},
	})
	build.Set(1)
	p.Metrics.MustRegister(build, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if o.MetricsListen == "" {
		return p, nil
	}
	listener, err := Listen(o.MetricsListen)
	if err != nil {
		return nil, fmt.Errorf("serve metrics (--metrics-listen): %w", err)
	}
	p.Addr = listener.Addr()
	p.server = &http.Server{
		Handler: p.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	go func() {
		if err := p.server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("metrics server stopped", "error", err)
		}
	}()
	return p, nil
}

// Handler serves /metrics, /healthz (the process answers) and /readyz (all
// conditions hold; else status 503 and one line for each that is missing).
func (p *Process) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(p.Metrics, promhttp.HandlerOpts{Registry: p.Metrics}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.Handle("GET /readyz", p.Ready)
	return mux
}

// Close stops serving metrics.
func (p *Process) Close() {
	if p.server != nil {
		_ = p.server.Close()
	}
}

// NewLogger writes to w what is at least as severe as level (debug, info, warn,
// error) in format (text, json).
func NewLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	switch level {
	case "debug", "info", "warn", "error":
		_ = l.UnmarshalText([]byte(level))
	default:
		return nil, fmt.Errorf("--log-level: %q is not a level: debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not a format: text or json", format)
}

// Listen opens a TCP listener. Its errors say in one line what to do.
func Listen(address string) (net.Listener, error) {
	listener, err := net.Listen("tcp", address)
	switch {
	case err == nil:
		return listener, nil
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("listen on %s: another process has this port", address)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("listen on %s: this machine does not have this address", address)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("listen on %s: not permitted (ports below 1024 need CAP_NET_BIND_SERVICE)", address)
	}
	return nil, fmt.Errorf("listen on %s: %w", address, err)
}
