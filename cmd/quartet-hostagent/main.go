// Command quartet-hostagent takes a server's load-balanced packets out of their
// tunnels, translates them, and checks and meters the server's DIPs.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/hostagent"
	"github.com/quartet-lb/quartet/hostagent/datapath"
	"github.com/quartet-lb/quartet/nodelink"
)

type options struct {
	daemon        daemon.Options
	name          string
	addresses     []string
	managers      []string
	ca, cert, key string
	insecure      bool
	stateDir      string
	datapath      datapath.Config
	commands      string
}

func main() {
	var o options
	root := &cobra.Command{
		Use:   "quartet-hostagent",
		Short: "Deliver load-balanced packets to this host's servers, check and meter them",
		Long: `quartet-hostagent runs on every server. It takes packets out of the muxes' tunnels
on the uplinks, translates VIPs to DIPs, sends replies straight back to clients,
checks the health of the host's DIPs, and meters traffic.

Packets keep flowing while it is stopped or restarted: what it attached stays,
with the last tables. "quartet-hostagent detach" takes it off.`,
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
	f.StringVar(&o.name, "name", hostname, "this host's `name`, as in its certificate")
	f.StringArrayVar(&o.addresses, "address", nil, "this host's `address`, which backends name as host; may be repeated")
	f.StringArrayVar(&o.managers, "manager", nil, "a manager's `URL`, https://host:port; may be repeated")
	f.StringVar(&o.ca, "ca", "/etc/quartet/ca.crt", "certificate authority `file`")
	f.StringVar(&o.cert, "cert", "/etc/quartet/hostagent.crt", "this host's certificate `file`")
	f.StringVar(&o.key, "key", "/etc/quartet/hostagent.key", "key `file` of --cert")
	f.BoolVar(&o.insecure, "insecure-loopback", false, "no TLS; only to a manager on a loopback address (http://)")
	f.StringVar(&o.stateDir, "state-dir", "/run/quartet/hostagent", "`directory` of the last good tables")
	f.Uint16Var(&o.datapath.MSS, "mss", 0, "highest TCP MSS in `bytes` that servers announce; 0: what the uplink's MTU and the tunnel leave")
	f.Uint32Var(&o.datapath.Flows, "flows", datapath.DefaultFlows, "trusted `flows` to remember")
	f.Uint32Var(&o.datapath.Rules, "rules", datapath.DefaultRules, "most NAT `rules`")
	f.Uint32Var(&o.datapath.Meters, "meters", datapath.DefaultMeters, "most (VIP, peer prefix, direction) `meters`")
	f.StringVar(&o.commands, "check-commands", "", "`directory` of the programs that command checks may run; empty: none may")
	f.StringArrayVar(&o.datapath.Interfaces, "interface", nil, "an uplink, or the interface of a VM that is a client of VIPs, by `name`; may be repeated")
	pinFlag(f, &o.datapath.PinDir)
	o.daemon.AddFlags(f, "127.0.0.1:7472")

	root.AddCommand(detachCommand())
	daemon.Main(root)
}

func pinFlag(f *pflag.FlagSet, dir *string) {
	f.StringVar(dir, "pin-dir", datapath.DefaultPinDir, "`directory` on a BPF file system that keeps the packet path alive")
}

func detachCommand() *cobra.Command {
	var pinDir string
	detach := &cobra.Command{
		Use:   "detach",
		Short: "Take the packet path off the uplinks: this host answers for no VIP any more",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return datapath.Detach(pinDir) },
	}
	pinFlag(detach.Flags(), &pinDir)
	return detach
}

// check finds what is wrong with the flags that no library looks at.
func (o *options) check() error {
	switch {
	case o.name == "":
		return errors.New("--name: is empty: the name in this host's certificate is wanted")
	case len(o.addresses) == 0:
		return errors.New("--address: is missing: the address that backends name as host is wanted")
	case len(o.managers) == 0:
		return errors.New("--manager: is missing: https://host:port is wanted")
	case len(o.datapath.Interfaces) == 0:
		return errors.New("--interface: is missing: an uplink's name is wanted")
	}
	for i, a := range o.addresses {
		if addr, err := netip.ParseAddr(a); err != nil || addr.Zone() != "" {
			return fmt.Errorf("--address[%d]: %q is not an IPv4 or IPv6 address", i, a)
		}
	}
	if o.commands != "" {
		info, err := os.Stat(o.commands)
		switch {
		case err != nil:
			return fmt.Errorf("--check-commands: %w", err)
		case !info.IsDir():
			return fmt.Errorf("--check-commands: %s is not a directory", o.commands)
		case !filepath.IsAbs(o.commands):
			return fmt.Errorf("--check-commands: %s is not an absolute path", o.commands)
		}
	}
	return nil
}

func run(ctx context.Context, o options) (err error) {
	if err := o.check(); err != nil {
		return err
	}
	var tlsConfig *tls.Config
	if !o.insecure || slices.ContainsFunc(o.managers, func(m string) bool { return strings.HasPrefix(m, "https:") }) {
		if tlsConfig, err = certs.LoadClient(o.ca, o.cert, o.key); err != nil {
			return err
		}
	}
	const tables, attached = "tables", "packet path"
	p, err := o.daemon.Start("quartet-hostagent", os.Stderr, attached, tables)
	if err != nil {
		return err
	}
	defer p.Close()

	// The link comes first, so that its errors leave the interfaces as they were.
	h := &handler{tablesRun: func() { p.Ready.Met(tables) }}
	link, err := nodelink.NewHost(nodelink.Config{
		Name: o.name, Addresses: o.addresses, Version: daemon.Version(), Managers: o.managers,
		TLS: tlsConfig, AllowPlain: o.insecure, State: o.stateDir, Log: p.Log, Metrics: p.Metrics,
	}, h)
	if err != nil {
		return err
	}
	d, err := datapath.Open(o.datapath)
	if err != nil {
		return err
	}
	defer func() {
		if e := d.Close(); err == nil && e != nil {
			err = e
		}
	}()
	p.Ready.Met(attached)
	h.Agent = hostagent.New(hostagent.Config{
		Datapath: d, Commands: o.commands, Changed: link.Notify, Log: p.Log, Metrics: p.Metrics,
	})
	defer h.Close()
	p.Log.Info("serving", "name", o.name, "addresses", o.addresses, "interfaces", o.datapath.Interfaces, "version", daemon.Version())
	if err := link.Run(ctx); err != nil {
		return err
	}
	p.Log.Info("stopping; the packet path stays", "generation", link.Generation())
	return nil
}

// handler is an agent that tells /readyz about its first tables.
type handler struct {
	*hostagent.Agent
	tablesRun func()
}

func (h *handler) ApplySnapshot(ctx context.Context, t *quartetv1.HostTables, from nodelink.Source) error {
	err := h.Agent.ApplySnapshot(ctx, t, from)
	if err == nil {
		h.tablesRun()
	}
	return err
}
