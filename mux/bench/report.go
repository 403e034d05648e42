package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
)

// Report is what a measurement found, as every command that measures prints
// it. Units are in the keys.
type Report struct {
	Name       string             `json:"name"`
	Version    string             `json:"version"`
	Seed       uint64             `json:"seed"`
	Parameters map[string]any     `json:"parameters"`
	Figures    map[string]float64 `json:"figures"` // medians over the rounds
	Paper      map[string]float64 `json:"paper"`   // Katran's, measured in the same way
	Spread     map[string]Spread  `json:"spread"`  // of the figures, over the rounds
}

// Spread is the smallest and the largest value of the rounds.
type Spread struct {
	Min float64 `json:"min"`
	Max float64 `json:"max"`
}

// katran has Katran's cost of a packet in ns, from its fastest to its slowest
// build and run, on a 2-core virtual machine, by the method of this package.
var katran = map[string]Spread{
	"no_vip":       {22, 26},
	"flows_1":      {65, 76},
	"flows_1k":     {82, 98},
	"flows_16k":    {156, 258},
	"flows_128k":   {414, 574},
	"flows_1m":     {507, 670},
	"ipv6_flows_1": {61, 74},
	"new_room":     {493, 649},
	"new_full":     {1073, 1644},
}

func newReport(o Options) *Report {
	r := &Report{
		Name:    "mux",
		Version: o.Version,
		Seed:    o.Seed,
		Parameters: map[string]any{
			"rounds":       o.Rounds,
			"packets":      o.Packets,
			"flows":        o.Flows,
			"dips":         o.DIPs,
			"cpu":          o.CPU,
			"endpoints":    o.Endpoints,
			"frame4_bytes": frame4,
			"frame6_bytes": frame6,
		},
		Figures: make(map[string]float64),
		Paper:   make(map[string]float64),
		Spread:  make(map[string]Spread),
	}
	for name, ns := range katran {
		r.Paper["katran_"+name+"_ns_min"] = ns.Min
		r.Paper["katran_"+name+"_ns_max"] = ns.Max
	}
	return r
}

// put records the median and the spread of the rounds' values, to a tenth.
func (r *Report) put(key string, rounds []float64) {
	round := func(x float64) float64 { return math.Round(x*10) / 10 }
	r.Figures[key] = round(median(rounds))
	r.Spread[key] = Spread{round(slices.Min(rounds)), round(slices.Max(rounds))}
}

// rows of the table, in order.
var rows = []struct{ name, words string }{
	{"flows_1", "1 flow"},
	{"flows_1k", "1 K flows"},
	{"flows_16k", "16 K flows"},
	{"flows_128k", "128 K flows"},
	{"flows_1m", "1 M flows"},
	{"new_room", "new flow (SYN), room"},
	{"new_full", "new flow (SYN), table full"},
	{"ipv6_flows_1", "IPv6, 1 flow"},
	{"udp_flows_1", "UDP, 1 flow"},
}

// Write prints the report for people.
func (r *Report) Write(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "ns per packet, net of the stub\thash\tspread\ttable\tspread\tKatran\t\n")
	fmt.Fprintf(w, "not to a VIP\t%s\t\t\t%s\t\n", r.cells("no_vip_ns"), katranCell("no_vip"))
	for _, row := range rows {
		if _, measured := r.Figures["hash_"+row.name+"_ns"]; !measured {
			continue
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t\n", row.words, r.cells("hash_"+row.name+"_ns"),
			r.cells("table_"+row.name+"_ns"), katranCell(row.name))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nstub %.1f ns; growing a packet and taking that off again, which is in the figures, %.1f ns\n",
		r.Figures["stub_ns"], r.Figures["growth_ns"])
	fmt.Fprintln(out, "Katran: from its fastest to its slowest build, by the same method on a 2-core virtual machine")
	if live := r.Figures["live_hash_flows_1k_ns"]; live != 0 {
		fmt.Fprintf(out, "cross-check, live frames by the kernel's run-time statistics, 1 K flows: hash %.1f ns, table %.1f ns; %.1f %% of the frames arrived\n",
			live, r.Figures["live_table_flows_1k_ns"], 100*r.Figures["live_arrived_share"])
	}
	if bytes := r.Figures["table_bytes_per_flow"]; bytes != 0 {
		fmt.Fprintf(out, "connection table with %v flows: %.1f bytes a flow, %.3f %% of the flows found no room\n",
			r.Parameters["flows"], bytes, 100*r.Figures["table_no_room_share"])
	}
	if mib := r.Figures["endpoints_kernel_memory_mib"]; mib != 0 {
		fmt.Fprintf(out, "%v endpoints of ten DIPs: %.1f MiB of kernel memory\n", r.Parameters["endpoints"], mib)
	}
	return nil
}

func (r *Report) cells(key string) string {
	s := r.Spread[key]
	return fmt.Sprintf("%.1f\t%.0f-%.0f", r.Figures[key], s.Min, s.Max)
}

func katranCell(name string) string {
	k, known := katran[name]
	if !known {
		return ""
	}
	return fmt.Sprintf("%.0f-%.0f", k.Min, k.Max)
}
