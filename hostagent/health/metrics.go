package health

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	monitor  *Monitor
	checks   *prometheus.CounterVec
	duration *prometheus.HistogramVec
	statuses *prometheus.Desc
}

func newMetrics(r prometheus.Registerer, monitor *Monitor) *metrics {
	m := &metrics{
		monitor: monitor,
		checks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quartet_hostagent_checks_total", Help: "Health checks run, by kind and result.",
		}, []string{"kind", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "quartet_hostagent_check_duration_seconds", Help: "How long a health check took.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8),
		}, []string{"kind"}),
		statuses: prometheus.NewDesc("quartet_hostagent_checked_dips",
			"Health checks by the status of their DIP.", []string{"status"}, nil),
	}
	if r != nil {
		r.MustRegister(m.checks, m.duration, m)
	}
	return m
}

func (m *metrics) asked(kind string, ok bool, took time.Duration) {
	result := "success"
	if !ok {
		result = "failure"
	}
	m.checks.WithLabelValues(kind, result).Inc()
	m.duration.WithLabelValues(kind).Observe(took.Seconds())
}

// Describe and Collect count statuses when metrics are read.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) { ch <- m.statuses }

func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	counts := map[Status]int{}
	m.monitor.mu.Lock()
	for _, c := range m.monitor.checks {
		counts[c.state.Status]++
	}
	m.monitor.mu.Unlock()
	for _, s := range []Status{Unknown, Healthy, Unhealthy} {
		ch <- prometheus.MustNewConstMetric(m.statuses, prometheus.GaugeValue, float64(counts[s]), s.String())
	}
}
