package hostagent

import (
	"github.com/prometheus/client_golang/prometheus"
)

var (
	exitsDesc = prometheus.NewDesc("quartet_hostagent_exits_total",
		"Packets by way out of the packet path.", []string{"exit"}, nil)
	flowsDesc = prometheus.NewDesc("quartet_hostagent_flows",
		"Flows remembered, by table.", []string{"table"}, nil)
	flowsMaxDesc = prometheus.NewDesc("quartet_hostagent_flows_max",
		"Flows that a table can remember.", []string{"table"}, nil)
	eventsDesc = prometheus.NewDesc("quartet_hostagent_flow_events_total",
		"What happened to flows: created by a first packet, recreated in mid-connection, promoted to trusted, MSS clamped.",
		[]string{"event"}, nil)
	memoryDesc = prometheus.NewDesc("quartet_hostagent_flow_memory_bytes",
		"Kernel memory of the flow tables.", nil, nil)
)

// collector reads the packet path's counters when metrics are read.
type collector struct{ agent *Agent }

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{exitsDesc, flowsDesc, flowsMaxDesc, eventsDesc, memoryDesc} {
		ch <- d
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	d := c.agent.config.Datapath
	exits, err := d.Exits()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(exitsDesc, err)
	}
	for exit, n := range exits {
		ch <- prometheus.MustNewConstMetric(exitsDesc, prometheus.CounterValue, float64(n), exit)
	}
	flows, err := d.Flows()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(flowsDesc, err)
		return
	}
	gauge := func(desc *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), labels...)
	}
	gauge(flowsDesc, flows.Trusted, "trusted")
	gauge(flowsDesc, flows.Untrusted, "untrusted")
	gauge(flowsMaxDesc, flows.TrustedMax, "trusted")
	gauge(flowsMaxDesc, flows.UntrustedMax, "untrusted")
	gauge(memoryDesc, flows.Bytes)
	for event, n := range map[string]uint64{
		"created": flows.Created, "recreated": flows.Recreated, "promoted": flows.Promoted, "mss_clamped": flows.Clamped,
	} {
		ch <- prometheus.MustNewConstMetric(eventsDesc, prometheus.CounterValue, float64(n), event)
	}
}
