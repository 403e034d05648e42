package mux

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

// collector reads the packet path's maps at each scrape.
type collector struct{ m *mux }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("quartet_mux_"+name, help, labels, nil)
}

var (
	exitsDesc       = desc("exits_total", "Packets by way out of the packet path.", "exit")
	eventsDesc      = desc("events_total", "What happened to packets beside their way out.", "event")
	packetsDesc     = desc("forwarded_packets_total", "Packets sent to a DIP.", "vip", "address", "endpoint", "dip")
	bytesDesc       = desc("forwarded_bytes_total", "Bytes of the packets sent to a DIP, as they came, from the IP header on.", "vip", "address", "endpoint", "dip")
	newFlowsDesc    = desc("new_flows_total", "Flows that began: TCP by SYN; UDP under consistency table by first packet.", "vip", "address", "endpoint", "dip")
	entriesDesc     = desc("flow_entries", "Connection table entries at the last sweep; trusted flows have sent more than one packet.", "class")
	capacityDesc    = desc("flow_capacity", "Entries that the connection table has room for.")
	peerDesc        = desc("bgp_peer_established", "1 while the BGP session is established.", "peer", "asn")
	bfdDesc         = desc("bgp_peer_bfd_up", "1 while BFD with the peer is up; only for peers with BFD.", "peer", "asn")
	announcedDesc   = desc("announced_prefixes", "Prefixes announced to the BGP peers.")
	unreachableDesc = desc("unreachable_prefixes", "Announced prefixes, host routes aside, whose unassigned addresses the kernel calls unreachable.")
	tunnelsDesc     = desc("unreachable_tunnels", "Tunnels whose last three probes no host agent answered.")
	scrapeDesc      = desc("scrape_error", "1 if the packet path's maps could not be read.")
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{exitsDesc, eventsDesc, packetsDesc, bytesDesc, newFlowsDesc, entriesDesc,
		capacityDesc, peerDesc, bfdDesc, announcedDesc, unreachableDesc, tunnelsDesc, scrapeDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	failed := 0.0
	count := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	exits, err := c.m.data.Exits()
	if err != nil {
		failed = 1
	}
	for name, n := range exits {
		count(exitsDesc, n, name)
	}
	events, err := c.m.data.Events()
	if err != nil {
		failed = 1
	}
	for name, n := range events {
		count(eventsDesc, n, name)
	}
	counters, err := c.m.data.Counters()
	if err != nil {
		failed = 1
	}
	// One endpoint may have a DIP at several ports or tunnels: one series.
	type key struct{ vip, address, endpoint, dip string }
	type sum struct{ packets, bytes, newFlows uint64 }
	sums := make(map[key]sum, len(counters))
	for _, k := range counters {
		labels := key{k.VIPName, k.Endpoint.VIP.String(), k.Name, k.DIP.Addr.String()}
		s := sums[labels]
		sums[labels] = sum{s.packets + k.Packets, s.bytes + k.Bytes, s.newFlows + k.NewFlows}
	}
	for k, s := range sums {
		count(packetsDesc, s.packets, k.vip, k.address, k.endpoint, k.dip)
		count(bytesDesc, s.bytes, k.vip, k.address, k.endpoint, k.dip)
		count(newFlowsDesc, s.newFlows, k.vip, k.address, k.endpoint, k.dip)
	}
	flows, err := c.m.data.FlowTable()
	if err != nil {
		failed = 1
	}
	gauge(entriesDesc, float64(flows.Trusted), "trusted")
	gauge(entriesDesc, float64(flows.Untrusted), "untrusted")
	gauge(capacityDesc, float64(flows.Capacity))
	for _, p := range c.m.routes.observe(context.Background()) {
		asn := formatASN(p.ASN)
		gauge(peerDesc, truth(p.State == "established"), p.Address.String(), asn)
		if p.BFD {
			gauge(bfdDesc, truth(p.BFDUp), p.Address.String(), asn)
		}
	}
	_, announced := c.m.routes.status()
	gauge(announcedDesc, float64(len(announced)))
	gauge(unreachableDesc, float64(c.m.routes.unassigned.count()))
	gauge(tunnelsDesc, float64(len(c.m.prober.Unreachable())))
	gauge(scrapeDesc, failed)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
