package rpc_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager"
)

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// BenchmarkChange applies changes one after the other to a fabric of three muxes
// and ten host agents over TLS: from the request to the last mux's acknowledgement.
// Half of the changes give a host agent rules, which the muxes wait for.
func BenchmarkChange(b *testing.B) {
	f := newFabric(b, manager.Config{})
	for i := range 3 {
		f.watch("mux", fmt.Sprintf("mux%d", i+1), nil)
	}
	for i := range 10 {
		f.watch("host", fmt.Sprintf("host%d", i+1), []string{fmt.Sprintf("10.0.10.%d", i+1)})
	}
	f.apply(pool)
	var took []float64
	for b.Loop() {
		r := f.apply(vip("web", 10, 1+len(took)%10, "")).Rollout
		if r.MuxesAcked != 3 {
			b.Fatal(r)
		}
		took = append(took, r.MuxesElapsedMs)
	}
	b.ReportMetric(median(took), "ms-median")
}

// BenchmarkHealth is BenchmarkChange for what a host agent reports.
func BenchmarkHealth(b *testing.B) {
	f := newFabric(b, manager.Config{AgentTimeout: -1})
	var muxes []*watcher
	for i := range 3 {
		muxes = append(muxes, f.watch("mux", fmt.Sprintf("mux%d", i+1), nil))
	}
	host := f.watch("host", "host1", []string{"10.0.10.1"})
	f.apply(pool + vip("web", 10, 10, check))
	var took []float64
	for b.Loop() {
		before, start := muxes[0].generation(), time.Now()
		host.report(&quartetv1.CheckResult{Id: "web/http/10.0.10.1", Healthy: len(took)%2 == 0})
		for _, m := range muxes {
			for m.generation() == before && f.list("Vip", "").Generation != before {
				time.Sleep(100 * time.Microsecond)
			}
		}
		took = append(took, float64(time.Since(start))/1e6)
	}
	b.ReportMetric(median(took), "ms-median")
}

// BenchmarkEndpoints brings a fabric to 20,000 endpoints of ten DIPs, 500 VIPs
// a change, and then measures single changes and a mux's snapshot.
func BenchmarkEndpoints(b *testing.B) {
	for b.Loop() {
		f := newFabric(b, manager.Config{})
		m := f.watch("mux", "mux1", nil)
		f.apply("kind: VipPool\nname: big\nprefixes: [100.64.0.0/10]\n")
		text := func(i, port int) string {
			var s strings.Builder
			fmt.Fprintf(&s, "kind: Vip\nname: v%d\naddresses: [100.64.%d.%d]\nendpoints:\n", i, i/250, 1+i%250)
			for e := range 2 {
				fmt.Fprintf(&s, "- {protocol: TCP, port: %d, backends: [", 80+e)
				for d := range 10 {
					fmt.Fprintf(&s, "{dip: 10.%d.%d.%d, port: %d}, ", 10+e, i/40, 1+(10*i+d)%250, port)
				}
				s.WriteString("]}\n")
			}
			return s.String() + "---\n"
		}
		var bulk []float64
		start := time.Now()
		for i := 0; i < 10_000; i += 500 {
			var all strings.Builder
			for j := range 500 {
				all.WriteString(text(i+j, 8080))
			}
			r := f.apply(all.String()).Rollout
			if r.MuxesAcked != 1 {
				b.Fatal(r)
			}
			bulk = append(bulk, r.MuxesElapsedMs)
		}
		b.ReportMetric(time.Since(start).Seconds(), "s-all")
		b.ReportMetric(median(bulk), "ms-500-VIPs")
		if n := len(m.snapshot().Endpoints); n != 20_000 {
			b.Fatalf("%d endpoints", n)
		}
		var single []float64
		for i := range 100 {
			single = append(single, f.apply(text(i*97, 8081)).Rollout.MuxesElapsedMs)
		}
		b.ReportMetric(median(single), "ms-1-VIP")
		start = time.Now()
		fresh := f.watch("mux", "mux2", nil)
		b.ReportMetric(time.Since(start).Seconds(), "s-snapshot")
		fresh.stop()
		m.stop()
		var mem runtime.MemStats
		m.tables = tables{}
		fresh.tables = tables{}
		runtime.GC()
		runtime.ReadMemStats(&mem)
		b.ReportMetric(float64(mem.HeapAlloc)/(1<<20), "MB-heap")
		start = time.Now()
		f.restart()
		b.ReportMetric(time.Since(start).Seconds(), "s-restart")
		f.stop()
	}
}
