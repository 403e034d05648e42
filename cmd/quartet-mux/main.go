// Command quartet-mux spreads packets to VIPs over the DIPs behind them, and
// announces the VIPs to the routers by BGP.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/quartet-lb/quartet/bgp"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/mux"
	"github.com/quartet-lb/quartet/mux/datapath"
	"github.com/quartet-lb/quartet/nodelink"
)

const defaultPin = "/sys/fs/bpf/quartet/mux"

type options struct {
	daemon       daemon.Options
	name         string
	addresses    []string
	managers     []string
	ca           string
	cert         string
	key          string
	insecure     bool
	interfaces   []string
	pinDir       string
	stateDir     string
	flows        int
	idleTrusted  time.Duration
	idleOther    time.Duration
	generic      bool
	asn          string
	routerID     string
	peers        []string
	drainTime    time.Duration
	detachOnStop bool
}

func main() {
	var o options
	root := &cobra.Command{
		Use:   "quartet-mux",
		Short: "Spread packets to VIPs over the DIPs behind them",
		Long: `quartet-mux loads the mux's XDP program on its interfaces, runs the tables that
the manager sends, and announces the VIPs by BGP as long as it can serve them.

It stops on SIGTERM: it withdraws its routes, forwards until --drain-time is over
or no packet comes, and leaves the program on the interfaces, which goes on
forwarding; the next process adopts it. "quartet-mux detach" takes it off.`,
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
	f.StringVar(&o.name, "name", hostname, "this mux's `name`, as in its certificate")
	f.StringArrayVar(&o.addresses, "address", nil, "this mux's own `address`, which tunnels come from; one IPv4, one IPv6, or both")
	f.StringArrayVar(&o.managers, "manager", nil, "a manager's `URL`, https://host:port; may be repeated")
	f.StringVar(&o.ca, "ca", "/etc/quartet/ca.crt", "certificate authority `file`")
	f.StringVar(&o.cert, "cert", "/etc/quartet/mux.crt", "this mux's certificate `file`")
	f.StringVar(&o.key, "key", "/etc/quartet/mux.key", "key `file` of --cert")
	f.BoolVar(&o.insecure, "insecure-loopback", false, "allow http:// to a manager on a loopback address")
	f.StringArrayVar(&o.interfaces, "interface", nil, "`interface` that packets come in by; may be repeated")
	f.StringVar(&o.pinDir, "pin-dir", defaultPin, "`directory` on a BPF filesystem where program and maps are pinned")
	f.StringVar(&o.stateDir, "state-dir", "/run/quartet/mux", "`directory` of the last good tables")
	f.IntVar(&o.flows, "flows", 1<<20, "connections that the connection table is meant for, 16 bytes each")
	f.DurationVar(&o.idleTrusted, "idle-trusted", 30*time.Minute, "how long an idle flow of more than one packet keeps its connection entry, 1m..8h")
	f.DurationVar(&o.idleOther, "idle-untrusted", 20*time.Second, "the same for a flow of one packet, 5s..1h")
	f.BoolVar(&o.generic, "generic", false, "take the kernel's slower hook on interfaces whose driver has no XDP")
	f.StringVar(&o.asn, "bgp-asn", "", "this mux's AS `number`")
	f.StringVar(&o.routerID, "router-id", "", "BGP identifier, an IPv4 `address`; default: the first IPv4 --address")
	f.StringArrayVar(&o.peers, "bgp-peer", nil, "a router to announce to, as `address=10.0.0.1,asn=65001`"+
		"[,password-file=FILE][,hold=30s][,keepalive=10s][,bfd=5ms*3][,next-hop6=ADDRESS][,local=ADDRESS][,port=179][,multihop=2][,passive]; may be repeated")
	f.DurationVar(&o.drainTime, "drain-time", 10*time.Second, "how long to forward at most after the routes are withdrawn")
	f.BoolVar(&o.detachOnStop, "detach-on-stop", false, "take the program off the interfaces when stopping")
	o.daemon.AddFlags(f, "127.0.0.1:7471")

	pin := defaultPin
	detach := &cobra.Command{
		Use:   "detach",
		Short: "Take the mux's program off all interfaces and remove what is pinned",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return mux.Detach(pin) },
	}
	detach.Flags().StringVar(&pin, "pin-dir", defaultPin, "`directory` where program and maps are pinned")
	root.AddCommand(detach)
	daemon.Main(root)
}

func run(ctx context.Context, o options) error {
	c, err := o.config()
	if err != nil {
		return err
	}
	p, err := o.daemon.Start("quartet-mux", os.Stderr, mux.ReadyTables, mux.ReadyBGP)
	if err != nil {
		return err
	}
	defer p.Close()
	c.Log, c.Metrics, c.Ready = p.Log, p.Metrics, p.Ready
	c.Link.Log, c.Link.Metrics = p.Log, p.Metrics
	if c.BGP != nil {
		c.BGP.Log = p.Log
	}
	return mux.Run(ctx, c)
}

// config checks the flags, naming the one that is wrong.
func (o *options) config() (mux.Config, error) {
	c := mux.Config{DrainTime: o.drainTime, DetachOnStop: o.detachOnStop}
	if o.name == "" {
		return c, errors.New("--name: is empty: the name in the certificate is wanted")
	}
	if len(o.interfaces) == 0 {
		return c, errors.New("--interface: missing: name at least one")
	}
	if o.drainTime < 0 {
		return c, fmt.Errorf("--drain-time: %s is negative", o.drainTime)
	}
	c.Datapath = datapath.Config{
		Interfaces: o.interfaces, PinDir: o.pinDir, Flows: o.flows, Generic: o.generic,
		IdleTrusted: o.idleTrusted, IdleUntrusted: o.idleOther,
	}
	for _, text := range o.addresses {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.IsUnspecified() || addr.IsMulticast() {
			return c, fmt.Errorf("--address: %q is not an address of this machine", text)
		}
		addr = addr.Unmap()
		source := &c.Datapath.Source6
		if addr.Is4() {
			source = &c.Datapath.Source4
		}
		if source.IsValid() {
			return c, fmt.Errorf("--address: %s and %s are of one family: one each is wanted", source, addr)
		}
		*source = addr
	}
	if len(o.addresses) == 0 {
		return c, errors.New("--address: missing: an IPv4 or an IPv6 address of this mux is wanted, or both")
	}
	c.Link = nodelink.Config{
		Name: o.name, Addresses: o.addresses, Version: daemon.Version(), Managers: o.managers,
		AllowPlain: o.insecure, State: o.stateDir,
	}
	for _, url := range o.managers {
		if strings.HasPrefix(url, "https:") && c.Link.TLS == nil {
			var err error
			if c.Link.TLS, err = certs.LoadClient(o.ca, o.cert, o.key); err != nil {
				return c, err
			}
		}
	}
	return c, o.bgp(&c)
}

func (o *options) bgp(c *mux.Config) error {
	if len(o.peers) == 0 {
		if o.asn != "" {
			return errors.New("--bgp-asn: no --bgp-peer is given to announce to")
		}
		return nil
	}
	b := &bgp.Config{}
	var err error
	if b.ASN, err = bgp.ParseASN(o.asn); err != nil {
		return fmt.Errorf("--bgp-asn: %w", err)
	}
	b.RouterID = c.Datapath.Source4
	if o.routerID != "" {
		if b.RouterID, err = netip.ParseAddr(o.routerID); err != nil || !b.RouterID.Is4() {
			return fmt.Errorf("--router-id: %q is not an IPv4 address", o.routerID)
		}
	}
	if !b.RouterID.IsValid() {
		return errors.New("--router-id: missing, and there is no IPv4 --address to take instead")
	}
	for _, text := range o.peers {
		p, err := bgp.ParsePeer(text)
		if err != nil {
			return fmt.Errorf("--bgp-peer: %q: %w", text, err)
		}
		b.Peers = append(b.Peers, p)
	}
	c.BGP = b
	return nil
}
