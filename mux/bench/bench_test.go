package bench

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// The real program takes every case's packets the case's way: Run fails where
// a count is not as it should be. How long it takes decides nothing here.
func TestEveryCaseGoesItsWay(t *testing.T) {
	r, err := Run(context.Background(), Options{
		Rounds: 1, Packets: 4096, Flows: 1 << 14, Endpoints: 100, CPU: -1, Version: "test",
	})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	for _, c := range cases(1 << 14) {
		if _, measured := r.Figures[c.key()]; !measured {
			t.Errorf("no figure %s", c.key())
		}
	}
	for _, key := range []string{"stub_ns", "table_bytes_per_flow", "endpoints_kernel_memory_mib"} {
		if r.Figures[key] <= 0 {
			t.Errorf("%s is %v", key, r.Figures[key])
		}
	}
	if share := r.Figures["table_no_room_share"]; share > 0.01 {
		t.Errorf("%.2f %% of the flows found no room in a table meant for them", 100*share)
	}
	if share := r.Figures["live_arrived_share"]; share <= 0 || share > 1 {
		t.Errorf("share of live frames that arrived is %v", share)
	}

	var text, svg strings.Builder
	if err := r.Write(&text); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"16 K flows", "Katran", "156-258", "bytes a flow"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
	if err := r.Plot(&svg); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(svg.String(), "NaN") || strings.Count(svg.String(), "<polyline") != 2 {
		t.Errorf("plot is\n%s", svg.String())
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

// Packets that take another way out than the case's, grow otherwise, or miss
// the connection table are an error, however many took the right one.
func TestPacketsThatGoAstrayAreAnError(t *testing.T) {
	c := cases(1 << 10)[0]
	for _, c2 := range cases(1 << 10) {
		if c2.name == "table_flows_1k" {
			c = c2
		}
	}
	right := batch{packets: 1000, grown: 1000}
	after := func(exit string, exits uint64, event string, events uint64) counters {
		return counters{counts{"tx": 1000 - exits, exit: exits}, counts{"flow_hit": 1000 - events, event: events}}
	}
	if err := check(c, right, counters{}, counters{counts{"tx": 1000}, counts{"flow_hit": 1000}}); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"one not grown":        check(c, batch{packets: 1000, grown: 999}, counters{}, after("no_vip", 0, "flow_full", 0)),
		"one passed":           check(c, right, counters{}, after("no_vip", 1, "flow_full", 0)),
		"one more than sent":   check(c, right, counters{}, counters{counts{"tx": 1001}, counts{"flow_hit": 1000}}),
		"many without a flow":  check(c, right, counters{}, after("no_vip", 0, "flow_full", 20)),
		"counted by none":      check(c, right, counters{}, counters{}),
		"only counted earlier": check(c, right, after("no_vip", 0, "flow_full", 0), after("no_vip", 0, "flow_full", 0)),
	} {
		if !errors.Is(err, ErrWrongWay) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOptionsOutOfRange(t *testing.T) {
	for want, o := range map[string]Options{
		"rounds: -1; at least 1 is valid":                                {Rounds: -1},
		"packets: 8387585; 1 to 8387584 are valid":                       {Packets: 8387585},
		"flows: 1000; a power of two from 1024 to 16777216 is valid":     {Flows: 1000},
		"flows: 33554432; a power of two from 1024 to 16777216 is valid": {Flows: 1 << 25},
		"dips: 4097; 1 to 4096 are valid":                                {DIPs: 4097},
		"cpu: 100000; -1 to":                                             {CPU: 100000},
	} {
		if _, err := Run(context.Background(), o); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// An interrupted measurement ends without a report.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if r, err := Run(ctx, Options{Rounds: 1, Packets: 1024, Flows: 1 << 10, CPU: -1}); !errors.Is(err, context.Canceled) {
		t.Errorf("report %v, error %v", r, err)
	}
}
