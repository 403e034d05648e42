// Command quartet-manager keeps the desired state of a Quartet fabric and tells
// muxes and host agents what to run.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/manager"
	"github.com/quartet-lb/quartet/manager/rpc"
	"github.com/quartet-lb/quartet/manager/store"
)

type options struct {
	daemon       daemon.Options
	name         string
	dataDir      string
	listen       string
	ca           string
	cert         string
	key          string
	insecure     bool
	agentTimeout time.Duration
}

const shortestAgentTimeout = 3 * time.Second

func main() {
	var o options
	root := &cobra.Command{
		Use:   "quartet-manager",
		Short: "Keep the desired state of a fabric and tell muxes and host agents what to run",
		Long: `quartet-manager keeps VIPs and pools in an embedded etcd, computes the tables of
muxes and host agents from them and from the servers' health, and streams the
tables to the nodes. Operators use it by the command quartet.

--listen serves gRPC, gRPC-web, JSON, /healthz, /readyz and /metrics.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := daemon.ReadConfig(c.Flags()); err != nil {
				return err
			}
			return run(c.Context(), o)
		},
	}
	hostname, _ := os.Hostname()
	f := root.Flags()
	f.StringVar(&o.name, "name", hostname, "this manager's `name`; the data directory belongs to it")
	f.StringVar(&o.dataDir, "data-dir", "/var/lib/quartet/manager", "`directory` of the state")
	f.StringVar(&o.listen, "listen", ":7470", "`address:port` for operators and nodes")
	f.StringVar(&o.ca, "ca", "/etc/quartet/ca.crt", "certificate authority `file`")
	f.StringVar(&o.cert, "cert", "/etc/quartet/manager.crt", "this manager's certificate `file`")
	f.StringVar(&o.key, "key", "/etc/quartet/manager.key", "key `file` of --cert")
	f.BoolVar(&o.insecure, "insecure-loopback", false, "no TLS and no authorization, only on a loopback --listen")
	f.DurationVar(&o.agentTimeout, "agent-timeout", manager.DefaultAgentTimeout,
		"silence of a host agent after which its checked DIPs leave rotation; 0: never")
	o.daemon.AddFlags(f, "")
	daemon.Main(root)
}

// stopped cancels what runs and returns its error.
func stopped(cancel func(), ran <-chan error) error {
	cancel()
	return <-ran
}

func run(ctx context.Context, o options) (err error) {
	var tlsConfig *tls.Config
	if o.insecure {
		if err := rpc.CheckInsecure(o.listen); err != nil {
			return err
		}
	} else if tlsConfig, err = certs.LoadServer(o.ca, o.cert, o.key); err != nil {
		return err
	}
	if o.name == "" {
		return errors.New("--name: is empty: give this manager a name")
	}
	if o.agentTimeout != 0 && o.agentTimeout < shortestAgentTimeout {
		return fmt.Errorf("--agent-timeout: %s is too short, as agents report every second: %s or more, or 0", o.agentTimeout, shortestAgentTimeout)
	}
	const storeOpen = "store"
	p, err := o.daemon.Start("quartet-manager", os.Stderr, storeOpen)
	if err != nil {
		return err
	}
	defer p.Close()
	// The port first: a second manager on this machine fails here, at once.
	listener, err := daemon.Listen(o.listen)
	if err != nil {
		return fmt.Errorf("serve (--listen): %w", err)
	}
	defer func() { _ = listener.Close() }() // Serve closes it as well
	s, err := store.Open(ctx, store.Config{Dir: o.dataDir, Name: o.name, Log: p.Log})
	if err != nil {
		return err
	}
	defer func() {
		if e := s.Close(); err == nil && e != nil {
			p.Log.Warn("close state", "error", e)
		}
	}()
	timeout := o.agentTimeout
	if timeout == 0 {
		timeout = -1
	}
	m, err := manager.New(ctx, s, manager.Config{Log: p.Log, Metrics: p.Metrics, AgentTimeout: timeout})
	if err != nil {
		return err
	}

	// Streams end with their context, so that stopping does not wait for nodes.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server := rpc.NewServer(ctx, m, rpc.Config{
		TLS: tlsConfig, Log: p.Log, Process: p.Handler(), Ready: func() bool { return len(p.Ready.Lacks()) == 0 },
	})
	served := make(chan error, 1)
	go func() {
		if tlsConfig == nil {
			served <- server.Serve(listener)
		} else {
			served <- server.ServeTLS(listener, "", "")
		}
	}()
	ran := make(chan error, 1)
	go func() { ran <- m.Run(ctx) }()
	p.Ready.Met(storeOpen)
	p.Log.Info("serving", "address", listener.Addr(), "name", o.name, "term", s.Term(), "version", daemon.Version(), "tls", tlsConfig != nil)

	select {
	case err = <-ran:
	case err = <-served:
		err = errors.Join(fmt.Errorf("serve: %w", err), stopped(cancel, ran))
	}
	cancel()
	stop, done := context.WithTimeout(context.Background(), 2*time.Second)
	defer done()
	if e := server.Shutdown(stop); e != nil {
		p.Log.Warn("stop serving", "error", e)
	}
	return err
}
