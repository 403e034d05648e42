package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"gonum.org/v1/gonum/stat/distuv"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/lab/fabric"
)

func (l *Lab) list(ctx context.Context, kind string) (*quartetv1.ListResponse, error) {
	api, err := l.client()
	if err != nil {
		return nil, err
	}
	return api.List(ctx, &quartetv1.ListRequest{Kind: kind})
}

// observe answers the observations of package scenario.
func (r *runner) observe(name string, args []string) (value, error) {
	number := func(f float64, err error) (value, error) { return value{number: f}, err }
	switch name {
	case "state":
		n, err := r.node(args[0])
		if err != nil {
			return value{}, err
		}
		if n.Role == Mux || n.Role == Host && !r.isDIP(n) {
			nodes, err := r.lab.observed(r.ctx)
			if err != nil {
				return value{}, err
			}
			s, ok := nodes[n.Name]
			switch {
			case !ok:
				return value{word: "unknown"}, nil
			case !s.GetConnected():
				return value{word: "gone"}, nil
			}
			return value{word: s.GetState()}, nil
		}
		dips, err := r.dips(n)
		if err != nil {
			return value{}, err
		}
		states := map[string]bool{}
		for _, d := range dips {
			states[d.GetState()] = true
		}
		if len(states) == 0 {
			return value{word: "absent"}, nil
		}
		return value{word: strings.Join(sortedKeys(states), "+")}, nil
	case "buckets":
		n, err := r.node(args[0])
		if err != nil {
			return value{}, err
		}
		dips, err := r.dips(n)
		total := 0.0
		for _, d := range dips {
			total += float64(d.GetBuckets())
		}
		return number(total, err)
	case "unreached":
		n, err := r.node(args[0])
		if err != nil {
			return value{}, err
		}
		dips, err := r.dips(n)
		total := 0.0
		for _, d := range dips {
			total += float64(len(d.GetUnreachableFrom()))
		}
		return number(total, err)
	case "hops":
		p, err := netip.ParsePrefix(args[1])
		if err != nil {
			return value{}, fmt.Errorf("%q is not a prefix", args[1])
		}
		hops, err := r.lab.hops(args[0], p)
		return number(float64(len(hops)), err)
	case "sessions":
		if _, err := r.node(args[0]); err != nil {
			return value{}, err
		}
		sessions, err := fabric.Sessions(r.lab.nodeDir(args[0]))
		up := 0.0
		for _, s := range sessions {
			if s.State == "established" {
				up++
			}
		}
		return number(up, err)
	case "rx", "tx":
		return r.linkCounter(name, args[0], args[1])
	case "forwarded":
		return number(r.lab.metric(r.ctx, args[0], "quartet_mux_forwarded_packets_total", nil))
	case "exit", "event":
		return number(r.counter(name, args[0], args[1]))
	case "current":
		a, err := r.lab.list(r.ctx, "Vip")
		if err != nil {
			return value{}, err
		}
		for _, v := range a.GetVips() {
			if v.GetVip().GetName() == args[0] {
				return number(truth(v.GetMuxesCurrent() == v.GetMuxes() && v.GetMuxes() > 0), nil)
			}
		}
		return value{}, fmt.Errorf("there is no Vip %q", args[0])
	case "healthy":
		a, err := r.lab.list(r.ctx, "Dip")
		total := 0.0
		for _, d := range a.GetDips() {
			if d.GetVip() == args[0] {
				total += truth((d.GetState() == "healthy" || d.GetState() == "unchecked") && d.GetBuckets() > 0)
			}
		}
		return number(total, err)
	case "flows":
		n, err := r.node(args[0])
		if err != nil {
			return value{}, err
		}
		total := 0.0
		for _, m := range r.lab.Topology.Role(Mux) {
			for _, a := range []netip.Addr{n.Addr4, n.Addr6} {
				f, err := r.lab.metric(r.ctx, m.Name, "quartet_mux_new_flows_total", map[string]string{"dip": a.String()})
				if err != nil {
					return value{}, err
				}
				total += f
			}
		}
		return number(total, nil)
	case "servers":
		report, ok := r.loads[args[0]]
		if !ok {
			return value{}, fmt.Errorf("load %s has not ended", args[0])
		}
		return number(float64(len(report.Servers)), nil)
	case "share":
		n, err := r.node(args[1])
		if err != nil {
			return value{}, err
		}
		what := "servers"
		if n.Role == Mux {
			what = "muxes"
		}
		observed, _, err := r.spread(args[0], what)
		total := 0.0
		for _, v := range observed {
			total += v
		}
		if err == nil && total == 0 {
			err = errors.New("nothing was counted")
		}
		return number(observed[n.Name]/total, err)
	case "chi2", "dof", "p":
		chi2, dof, err := r.chiSquared(args[0], args[1])
		switch name {
		case "chi2":
			return number(chi2, err)
		case "dof":
			return number(dof, err)
		}
		return number(distuv.ChiSquared{K: dof}.Survival(chi2), err)
	case "clock":
		return number(float64(time.Since(r.start).Microseconds())/1000, nil)
	case "errors_log":
		n, err := r.node(args[0])
		if err != nil {
			return value{}, err
		}
		return number(countErrors(filepath.Join(r.lab.nodeDir(n.Name), r.lab.daemon(n)+".log")))
	}
	return value{}, fmt.Errorf("%s can't be observed", name)
}

// counter sums what the packet paths of a node, of all muxes or of all hosts
// counted under an exit's or event's name, which must be one that they know.
func (r *runner) counter(what, nodes, name string) (float64, error) {
	var of []*Node
	switch nodes {
	case "muxes":
		of = r.lab.Topology.Role(Mux)
	case "hosts":
		of = r.lab.Topology.Role(Host)
	default:
		n, err := r.node(nodes)
		if err != nil {
			return 0, err
		}
		of = []*Node{n}
	}
	total := 0.0
	for _, n := range of {
		metric := "quartet_mux_" + what + "s_total"
		if n.Role == Host {
			metric = "quartet_hostagent_" + what + "s_total"
		}
		families, err := r.lab.scrape(r.ctx, n.Name)
		if err != nil {
			return 0, err
		}
		f, found := sumOf(families[metric], map[string]string{what: name})
		if !found {
			return 0, fmt.Errorf("%s counts no %s %q", n.Name, what, name)
		}
		total += f
	}
	return total, nil
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// isDIP says whether a host is a DIP of a VIP that the scenario has applied.
func (r *runner) isDIP(n *Node) bool {
	dips, err := r.dips(n)
	return err == nil && len(dips) > 0
}

// dips are a node's entries among the DIPs of the scenario's VIPs.
func (r *runner) dips(n *Node) ([]*quartetv1.DipStatus, error) {
	a, err := r.lab.list(r.ctx, "Dip")
	if err != nil {
		return nil, err
	}
	var all []*quartetv1.DipStatus
	for _, d := range a.GetDips() {
		if r.vips[d.GetVip()] && (d.GetDip() == n.Addr4.String() || d.GetDip() == n.Addr6.String()) {
			all = append(all, d)
		}
	}
	return all, nil
}

func (l *Lab) hops(node string, p netip.Prefix) (map[string]int, error) {
	net, err := l.Net(node)
	if err != nil {
		return nil, err
	}
	all, err := net.NextHops()
	return all[p.Masked()], err
}

// linkCounter reads the far end's counters: they also count what XDP handles
// at the near end.
func (r *runner) linkCounter(direction, node, neighbour string) (value, error) {
	link, n, peer, err := r.lab.between(node, neighbour)
	if err != nil {
		return value{}, err
	}
	_, _, far, _, _, _ := link.Far(n)
	net, err := r.lab.Net(peer.Name)
	if err != nil {
		return value{}, err
	}
	c, err := net.Counters(far)
	if direction == "rx" {
		return value{number: float64(c.TxPackets)}, err
	}
	return value{number: float64(c.RxPackets)}, err
}

// metricsAddress is where a node's daemon serves its metrics, for who is in
// its namespace.
const metricsAddress = "127.0.0.1:9470"

// metric sums the samples of a daemon's metric that have the labels.
func (l *Lab) metric(ctx context.Context, node, name string, labels map[string]string) (float64, error) {
	families, err := l.scrape(ctx, node)
	if err != nil {
		return 0, err
	}
	// Counters by VIP are absent before there is one.
	total, _ := sumOf(families[name], labels)
	return total, nil
}

// sumOf sums the samples that have the labels, if there are any.
func sumOf(family *dto.MetricFamily, labels map[string]string) (total float64, found bool) {
samples:
	for _, m := range family.GetMetric() {
		for label, want := range labels {
			has := false
			for _, p := range m.GetLabel() {
				has = has || p.GetName() == label && p.GetValue() == want
			}
			if !has {
				continue samples
			}
		}
		total += m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetUntyped().GetValue()
		found = true
	}
	return total, found
}

func (l *Lab) get(ctx context.Context, node, path string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, httpTimeout)
	defer cancel()
	t, err := l.dialIn(node)
	if err != nil {
		return 0, "", err
	}
	defer t.CloseIdleConnections()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+metricsAddress+path, nil)
	if err != nil {
		return 0, "", err
	}
	a, err := t.RoundTrip(q)
	if err != nil {
		return 0, "", fmt.Errorf("%s: ask %s: %w", node, path, err)
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	return a.StatusCode, string(text), err
}

// spread says how a load's answers spread over servers, or the muxes' flows
// since the load began over muxes, and what parts weights and routes ask for.
func (r *runner) spread(load, what string) (observed, expected map[string]float64, err error) {
	observed, expected = map[string]float64{}, map[string]float64{}
	switch what {
	case "servers":
		report, ok := r.loads[load]
		if !ok {
			return nil, nil, fmt.Errorf("load %s has not ended", load)
		}
		a, err := r.lab.list(r.ctx, "Dip")
		if err != nil {
			return nil, nil, err
		}
		for _, d := range a.GetDips() {
			if !r.vips[d.GetVip()] {
				continue
			}
			for _, n := range r.lab.Topology.Nodes {
				if n.Addr4.String() == d.GetDip() {
					expected[n.Name] += float64(d.GetBuckets()) / float64(d.GetBucketsTotal())
					observed[n.Name] = float64(report.Servers[n.Name])
				}
			}
		}
	case "muxes":
		before, ok := r.before[load]
		if !ok {
			return nil, nil, fmt.Errorf("load %s was not begun", load)
		}
		for _, m := range r.lab.Topology.Role(Mux) {
			n, err := r.lab.metric(r.ctx, m.Name, "quartet_mux_new_flows_total", nil)
			if err != nil {
				return nil, nil, err
			}
			observed[m.Name] = n - before[m.Name]
		}
		client, _ := r.lab.Topology.Node(r.from[load])
		pool := VIPPools[0]
		if r.six[load] {
			pool = VIPPools[1]
		}
		expected, err = r.lab.shares(client.Up, pool)
		return observed, expected, err
	default:
		return nil, nil, fmt.Errorf("%q is neither servers nor muxes", what)
	}
	return observed, expected, nil
}

// chiSquared compares the two.
func (r *runner) chiSquared(load, what string) (chi2, dof float64, err error) {
	observed, expected, err := r.spread(load, what)
	if err != nil {
		return 0, 0, err
	}
	total := 0.0
	for _, n := range observed {
		total += n
	}
	if total == 0 {
		return 0, 0, errors.New("nothing was counted")
	}
	sum := 0.0
	for _, share := range expected {
		sum += share
	}
	for name, share := range expected {
		want := total * share / sum
		if want > 0 {
			chi2 += (observed[name] - want) * (observed[name] - want) / want
			dof++
		}
	}
	for name, n := range observed {
		if expected[name] == 0 && n > 0 {
			return 0, 0, fmt.Errorf("%s got %.0f, and nothing should lead there", name, n)
		}
	}
	return chi2, dof - 1, nil
}

// shares follows the kernels' ECMP routes to a prefix from a switch down to
// the muxes, and returns what part of evenly hashed flows ends at each.
func (l *Lab) shares(from *Node, p netip.Prefix) (map[string]float64, error) {
	all := map[string]float64{}
	var follow func(n *Node, part float64, depth int) error
	follow = func(n *Node, part float64, depth int) error {
		if depth > 10 {
			return fmt.Errorf("the routes to %s loop", p)
		}
		hops, err := l.hops(n.Name, p)
		if err != nil {
			return err
		}
		weights := 0
		for _, w := range hops {
			weights += w
		}
		for name, w := range hops {
			next, ok := l.Topology.Node(name)
			if !ok {
				return fmt.Errorf("%s sends %s to %s, which is no node", n.Name, p, name)
			}
			share := part * float64(w) / float64(weights)
			if next.Role == Mux {
				all[name] += share
			} else if err := follow(next, share, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	return all, follow(from, 1, 0)
}

func countErrors(file string) (float64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n := 0.0
	s := bufio.NewScanner(f)
	for s.Scan() {
		if strings.Contains(s.Text(), "level=ERROR") {
			n++
		}
	}
	return n, s.Err()
}

func toStruct(v *quartetv1.Vip) ([]*structpb.Struct, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(v)
	if err != nil {
		return nil, err
	}
	var s structpb.Struct
	if err := s.UnmarshalJSON(text); err != nil {
		return nil, err
	}
	return []*structpb.Struct{&s}, nil
}

func parseMetrics(text string) (metricFamilies, error) {
	p := expfmt.NewTextParser(model.UTF8Validation)
	return p.TextToMetricFamilies(strings.NewReader(text))
}
