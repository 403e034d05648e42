package manager

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/compile"
)

// metrics are the manager's own; etcd's are in Prometheus' default registry.
type metrics struct {
	m                *Manager
	compile, commit  prometheus.Histogram
	rollout          prometheus.Histogram
	generations      prometheus.Counter
	refused          prometheus.Counter
	changes, updates *prometheus.CounterVec

	generation, objects, nodes, behind, dips, unreachable *prometheus.Desc
}

func newMetrics(m *Manager) *metrics {
	fine := prometheus.ExponentialBuckets(0.0005, 2, 14) // 0.5 ms to 4 s
	return &metrics{
		m: m,
		compile: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "quartet_manager_compile_seconds", Help: "Compiling one generation.", Buckets: fine}),
		commit: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "quartet_manager_commit_seconds", Help: "Writing one generation to etcd.", Buckets: fine}),
		rollout: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "quartet_manager_rollout_seconds", Help: "From publishing a generation to its last mux's acknowledgement.", Buckets: fine}),
		generations: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "quartet_manager_generations_total", Help: "Generations published by this process."}),
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "quartet_manager_refused_total", Help: "Operators' changes refused as invalid."}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quartet_manager_changes_total", Help: "Objects changed by operators."}, []string{"kind", "action"}),
		updates: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quartet_manager_updates_total", Help: "Messages sent to nodes."}, []string{"role", "type"}),
		generation: prometheus.NewDesc("quartet_manager_generation", "Published generation.", nil, nil),
		objects:    prometheus.NewDesc("quartet_manager_objects", "Desired objects.", []string{"kind"}, nil),
		nodes:      prometheus.NewDesc("quartet_manager_nodes", "Known nodes.", []string{"role", "connected"}, nil),
		dips:       prometheus.NewDesc("quartet_manager_dips", "DIPs of all endpoints, by state.", []string{"state"}, nil),
		unreachable: prometheus.NewDesc("quartet_manager_dips_unreachable",
			"DIPs of all endpoints that serve although a mux gets no answer from their host agent.", nil, nil),
		behind: prometheus.NewDesc("quartet_manager_nodes_behind", "Connected nodes that do not run what they are to.", []string{"role"}, nil),
	}
}

func (x *metrics) own() []prometheus.Collector {
	return []prometheus.Collector{x.compile, x.commit, x.rollout, x.generations, x.refused, x.changes, x.updates}
}

// Describe implements prometheus.Collector.
func (x *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range x.own() {
		c.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{x.generation, x.objects, x.nodes, x.behind, x.dips, x.unreachable} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (x *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range x.own() {
		c.Collect(ch)
	}
	connected, gone, behind := map[string]float64{}, map[string]float64{}, map[string]float64{}
	x.m.mu.RLock()
	generation, vips, pools := float64(x.m.generation), float64(len(x.m.results)), float64(len(x.m.pools))
	for _, n := range x.m.nodes {
		if n.stream == nil {
			gone[n.role]++
			continue
		}
		connected[n.role]++
		if n.generation < n.stream.target {
			behind[n.role]++
		}
	}
	results := slices.Collect(maps.Values(x.m.results))
	tunnels := x.m.unreachable()
	x.m.mu.RUnlock()
	dips, unreachable := map[string]int{}, 0
	for _, r := range results {
		r.CountStates(dips)
		_, n := r.Unreachable(tunnels)
		unreachable += n
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(x.generation, generation)
	gauge(x.unreachable, float64(unreachable))
	gauge(x.objects, vips, "Vip")
	gauge(x.objects, pools, "VipPool")
	for _, state := range []string{compile.Healthy, compile.Unchecked, compile.Unhealthy, compile.Unknown, compile.Draining} {
		gauge(x.dips, float64(dips[state]), state)
	}
	for _, role := range []string{RoleMux, RoleHost} {
		gauge(x.nodes, connected[role], role, "true")
		gauge(x.nodes, gone[role], role, "false")
		gauge(x.behind, behind[role], role)
	}
}

func (x *metrics) count(changes []*quartetv1.Change) {
	for _, c := range changes {
		x.changes.WithLabelValues(c.Kind, c.Action).Inc()
	}
}

func (x *metrics) observe(r *rollout) {
	if r.muxes > 0 {
		x.rollout.Observe(r.lastMux.Sub(r.published).Seconds())
	}
}
