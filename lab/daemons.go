package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/lab/fabric"
)

// spawn starts a node's daemon and records which process it is.
func (l *Lab) spawn(node, daemon string, c fabric.Command) error {
	net, err := l.Net(node)
	if err != nil {
		return err
	}
	p, err := net.Spawn(c, filepath.Join(l.nodeDir(node), daemon+".log"))
	if err != nil {
		return fmt.Errorf("%s: %w", node, err)
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := os.WriteFile(l.pidFile(node, daemon), text, 0o644); err != nil {
		return fmt.Errorf("record %s of %s: %w", daemon, node, err)
	}
	return nil
}

func (l *Lab) pidFile(node, daemon string) string {
	return filepath.Join(l.nodeDir(node), daemon+".pid")
}

// process is a node's daemon, running or not; the zero Process if it was never
// started.
func (l *Lab) process(node, daemon string) fabric.Process {
	return readProcess(l.pidFile(node, daemon))
}

func readProcess(file string) fabric.Process {
	var p fabric.Process
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return fabric.Process{}
	}
	return p
}

// recorded are all processes that a lab has started.
func recorded(name string) []fabric.Process {
	// The pattern is fixed: Glob can't fail.
	files, _ := filepath.Glob(filepath.Join(stateDir(name), "*", "*.pid"))
	var all []fabric.Process
	for _, f := range files {
		all = append(all, readProcess(f))
	}
	return all
}

// Daemons by role; a host also has a server of its own.
const (
	birdDaemon    = "bird"
	managerDaemon = "quartet-manager"
	muxDaemon     = "quartet-mux"
	hostDaemon    = "quartet-hostagent"
	serverDaemon  = "server"
)

// ServerPort is where the servers in VMs and hosts answer HTTP and UDP.
const ServerPort = 8080

// daemon is what a node is for; empty for clients.
func (l *Lab) daemon(n *Node) string {
	switch n.Role {
	case Core, Agg, ToR:
		return birdDaemon
	case Manager:
		return managerDaemon
	case Mux:
		return muxDaemon
	case Host:
		return hostDaemon
	case VM:
		return serverDaemon
	}
	return ""
}

// command is how a node's daemon is started.
func (l *Lab) command(n *Node, daemon string) fabric.Command {
	dir := l.nodeDir(n.Name)
	args := []string{filepath.Join(l.Binaries, daemon)}
	ca, cert, key := l.cert(n.Name)
	tls := []string{"--ca", ca, "--cert", cert, "--key", key}
	node := append([]string{
		"--name", n.Name, "--manager", l.ManagerURL(), "--metrics-listen", metricsAddress,
		"--address", n.Addr4.String(), "--address", n.Addr6.String(), "--interface", "eth0",
	}, tls...)
	switch daemon {
	case managerDaemon:
		args = append(args, "--name", n.Name, "--data-dir", filepath.Join(dir, "data"),
			"--listen", net.JoinHostPort(n.Addr4.String(), strconv.Itoa(managerPort)), "--metrics-listen", metricsAddress)
		args = append(args, tls...)
	case muxDaemon:
		link := n.Uplink()
		args = append(args, node...)
		args = append(args,
			"--state-dir", filepath.Join(dir, "state"), "--pin-dir", l.PinDir(n.Name), "--bgp-asn", strconv.Itoa(int(n.ASN)),
			"--bgp-peer", fmt.Sprintf("address=%s,asn=%d,password-file=%s,hold=9s,bfd=%s*3,next-hop6=%s",
				link.A4, link.A.ASN, l.passwordFile(), fastBFD, link.B6))
	case hostDaemon:
		args = append(args, node...)
		args = append(args, "--state-dir", filepath.Join(dir, "state"), "--pin-dir", l.PinDir(n.Name))
	case serverDaemon:
		args = []string{filepath.Join(l.Binaries, "quartet"), "lab", "serve", "--name", n.Name, "--port", strconv.Itoa(ServerPort)}
	case birdDaemon:
		return fabric.BirdCommand(dir)
	}
	return fabric.Command{Args: args, Dir: dir}
}

// fastBFD is the interval that muxes offer; the slower side's counts, which is
// the ToR's unless a scenario asks for more speed.
const fastBFD = 5 * time.Millisecond

func (l *Lab) passwordFile() string { return filepath.Join(l.Dir(), "bgp-password") }

// start starts a node's daemon unless it runs.
func (l *Lab) start(_ context.Context, n *Node) error { return l.startDaemon(n, l.daemon(n)) }

func (l *Lab) startDaemon(n *Node, daemon string) error {
	if l.process(n.Name, daemon).Alive() {
		return nil
	}
	return l.spawn(n.Name, daemon, l.command(n, daemon))
}

// startDaemons starts manager, servers, host agents and muxes, and waits until
// all are ready.
func (l *Lab) startDaemons(ctx context.Context, p progress) error {
	p.say("making certificates: one authority, one certificate a daemon")
	if err := certs.Init(l.certDir()); err != nil {
		return err
	}
	if err := certs.Issue(l.certDir(), certs.Operator, operator, nil); err != nil {
		return err
	}
	for _, n := range l.Topology.Nodes {
		role := map[Role]string{Manager: certs.Manager, Mux: certs.Mux, Host: certs.Host}[n.Role]
		if role == "" {
			continue
		}
		if err := certs.Issue(l.certDir(), role, n.Name, []string{n.Addr4.String(), n.Addr6.String()}); err != nil {
			return err
		}
	}
	if err := os.WriteFile(l.passwordFile(), []byte(l.Password+"\n"), 0o600); err != nil {
		return fmt.Errorf("write the BGP password: %w", err)
	}
	p.say("starting the manager, %d host agents, %d servers and %d muxes", l.Size.Hosts, l.Size.Hosts*(l.Size.VMs+1), l.Size.Muxes)
	for _, n := range l.Topology.Nodes {
		var daemons []string
		switch n.Role {
		case Manager, Mux, VM:
			daemons = []string{l.daemon(n)}
		case Host:
			daemons = []string{hostDaemon, serverDaemon}
		}
		for _, d := range daemons {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := l.startDaemon(n, d); err != nil {
				return err
			}
		}
	}
	for _, n := range l.Topology.Nodes {
		if err := l.nodeReady(ctx, n, 60*time.Second); err != nil {
			return err
		}
		if n.Role == Manager {
			if err := l.applyFirst(ctx); err != nil {
				return err
			}
		}
	}
	p.say("manager, host agents and servers are ready, and the muxes have their tables")
	if err := l.ready(ctx, 30*time.Second); err != nil {
		return err
	}
	p.say("every switch has a way to the VIPs %v: traffic can come", VIPPools)
	return nil
}

// Hello is the VIP that every lab begins with: the first VM of each host, or
// the host where there are none. While it stands, the muxes announce both pools.
const Hello = "hello"

// applyFirst tells the manager which addresses VIPs may have, and the first VIP.
func (l *Lab) applyFirst(ctx context.Context) error {
	var prefixes, addresses, backends []any
	for _, p := range VIPPools {
		prefixes = append(prefixes, p.String())
		addresses = append(addresses, p.Addr().Next().String())
	}
	for _, h := range l.Topology.Role(Host) {
		dip := h
		if below := l.Topology.Below(h); len(below) > 0 {
			dip = below[0]
		}
		backends = append(backends, map[string]any{
			"dip": dip.Addr4.String(), "dip6": dip.Addr6.String(), "host": h.Addr4.String(), "port": ServerPort,
		})
	}
	var objects []*structpb.Struct
	for _, o := range []map[string]any{
		{"kind": "VipPool", "name": "lab", "prefixes": prefixes},
		{"kind": "Vip", "name": Hello, "addresses": addresses, "endpoints": []any{
			map[string]any{"name": "http", "protocol": "TCP", "port": 80, "backends": backends},
		}},
	} {
		s, err := structpb.NewStruct(o)
		if err != nil {
			return err
		}
		objects = append(objects, s)
	}
	api, err := l.client()
	if err != nil {
		return err
	}
	return poll(ctx, 30*time.Second, func() error {
		_, err := api.Apply(ctx, &quartetv1.ApplyRequest{Objects: objects, WaitMs: 1})
		return err
	})
}

const httpTimeout = 2 * time.Second

type metricFamilies = map[string]*dto.MetricFamily

func (l *Lab) scrape(ctx context.Context, node string) (metricFamilies, error) {
	status, text, err := l.get(ctx, node, "/metrics")
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("%s: /metrics has status %d", node, status)
	}
	return parseMetrics(text)
}

// dialIn makes HTTP requests in a node's namespace.
func (l *Lab) dialIn(node string) (*http.Transport, error) {
	at, err := l.Net(node)
	if err != nil {
		return nil, err
	}
	return &http.Transport{DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = at.Do(func() error {
			c, err = (&net.Dialer{Timeout: httpTimeout}).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}}, nil
}

// nodeReady waits until a node's daemon says that it is ready.
func (l *Lab) nodeReady(ctx context.Context, n *Node, limit time.Duration) error {
	daemon := l.daemon(n)
	if daemon == "" {
		return nil
	}
	return poll(ctx, limit, func() error {
		if !l.process(n.Name, daemon).Alive() {
			return fmt.Errorf("%s of %s does not run: its last words: %s", daemon, n.Name, lastLine(filepath.Join(l.nodeDir(n.Name), daemon+".log")))
		}
		switch n.Role {
		case Core, Agg, ToR:
			_, err := fabric.Sessions(l.nodeDir(n.Name))
			return err
		case VM:
			at, err := l.Net(n.Name)
			if err != nil {
				return err
			}
			return at.Do(func() error {
				c, err := net.DialTimeout("tcp", net.JoinHostPort(n.Addr4.String(), strconv.Itoa(ServerPort)), time.Second)
				if err == nil {
					c.Close()
				}
				return err
			})
		}
		status, text, err := l.get(ctx, n.Name, "/readyz")
		if err != nil {
			return err
		}
		if status != http.StatusOK {
			return fmt.Errorf("%s of %s is not ready: %s", daemon, n.Name, strings.ReplaceAll(strings.TrimSpace(text), "\n", "; "))
		}
		return nil
	})
}

// ready waits until the lab is as `lab up` leaves it: every daemon ready and
// connected, every route to the VIPs there by all its shortest ways.
func (l *Lab) ready(ctx context.Context, limit time.Duration) error {
	for _, n := range l.Topology.Nodes {
		if err := l.nodeReady(ctx, n, limit); err != nil {
			return err
		}
	}
	if err := poll(ctx, limit, func() error {
		nodes, err := l.observed(ctx)
		if err != nil {
			return err
		}
		for _, n := range l.Topology.Nodes {
			if n.Role != Mux && n.Role != Host {
				continue
			}
			s := nodes[n.Name]
			if !s.GetConnected() || s.GetState() != "ready" {
				return fmt.Errorf("to the manager %s is %q, connected: %v, error %q", n.Name, s.GetState(), s.GetConnected(), s.GetError())
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if err := l.converged(ctx); err != nil {
		return err
	}
	return poll(ctx, limit, func() error { return l.vipRoutes() })
}

// vipRoutes checks that every switch reaches the VIP pools by each neighbour
// that is on a shortest way to a mux.
func (l *Lab) vipRoutes() error {
	nearest := map[*Node]int{}
	for _, m := range l.Topology.Role(Mux) {
		for n, d := range l.Topology.Distances(m.Up) {
			if old, seen := nearest[n]; !seen || d+1 < old {
				nearest[n] = d + 1
			}
		}
		nearest[m] = 0
	}
	for _, n := range l.Topology.Nodes {
		if !n.Role.Switch() {
			continue
		}
		net, err := l.Net(n.Name)
		if err != nil {
			return err
		}
		have, err := net.NextHops()
		if err != nil {
			return err
		}
		want := 0
		for _, link := range n.Links {
			peer, _, _, _, _, _ := link.Far(n)
			if d, ok := nearest[peer]; ok && d == nearest[n]-1 {
				want++
			}
		}
		for _, pool := range VIPPools {
			if len(have[pool]) != want {
				return fmt.Errorf("%s has %d of %d ways to the VIPs %s", n.Name, len(have[pool]), want, pool)
			}
		}
	}
	return nil
}

func (l *Lab) version() string { return daemon.Version() }

func lastLine(file string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}

// Diagnose is what to read when something went wrong: the status, and the end
// of each daemon's log, each switch's routes and each node's exits.
func (l *Lab) Diagnose(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	var b strings.Builder
	b.WriteString("\n--- diagnosis ---\n")
	status, err := l.Status(ctx)
	if err != nil {
		status = err.Error()
	}
	b.WriteString(status)
	for _, n := range l.Topology.Nodes {
		d := l.daemon(n)
		if d == "" || n.Role == VM {
			continue
		}
		text, err := os.ReadFile(filepath.Join(l.nodeDir(n.Name), d+".log"))
		if err != nil {
			text = []byte(err.Error())
		}
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		if n := len(lines) - 15; n > 0 {
			lines = lines[n:]
		}
		fmt.Fprintf(&b, "\n--- %s: %s.log\n%s\n", n.Name, d, strings.Join(lines, "\n"))
		if n.Role != Mux && n.Role != Host {
			continue
		}
		families, err := l.scrape(ctx, n.Name)
		if err != nil {
			fmt.Fprintf(&b, "%v\n", err)
			continue
		}
		for _, name := range sortedKeys(families) {
			if !strings.HasSuffix(name, "_exits_total") {
				continue
			}
			for _, m := range families[name].GetMetric() {
				if v := m.GetCounter().GetValue(); v > 0 {
					fmt.Fprintf(&b, "%s %v %.0f\n", name, m.GetLabel(), v)
				}
			}
		}
	}
	b.WriteString("--- end of diagnosis ---\n")
	return b.String()
}
