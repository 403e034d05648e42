package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/mux/bench"
)

func benchCommand(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure what packets cost on this machine",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(benchMuxCommand(c))
	return cmd
}

func benchMuxCommand(c *cli) *cobra.Command {
	options := bench.Options{CPU: runtime.NumCPU() - 1, Version: daemon.Version()}
	var asJSON bool
	var plot string
	cmd := &cobra.Command{
		Use:   "mux",
		Short: "Measure ns per packet of the mux's program",
		Long: `Measure ns per packet of the mux's program.

Runs the very program that quartet-mux attaches, on distinct, valid packets, in a
network namespace of its own, and shows its cost net of a stub's beside what Katran
cost by the same method. Takes about two minutes and needs root; nothing outside the
namespace is touched. Where the machine does other work beside, look at the spread.`,
		Example: `  quartet bench mux
  quartet bench mux --json --rounds 21 >mux.json
  quartet bench mux --plot mux.svg`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			options.Progress = func(format string, a ...any) { fmt.Fprintf(c.err, format+"\n", a...) }
			var svg *os.File
			if plot != "" {
				var err error
				if svg, err = os.Create(plot); err != nil {
					return fmt.Errorf("write plot: %w", err)
				}
				defer func() { _ = svg.Close() }()
			}
			report, err := bench.Run(cmd.Context(), options)
			if err != nil {
				return err
			}
			if svg != nil {
				if err := errors.Join(report.Plot(svg), svg.Sync()); err != nil {
					return fmt.Errorf("write plot %s: %w", plot, err)
				}
			}
			if !asJSON {
				return report.Write(c.out)
			}
			out := json.NewEncoder(c.out)
			out.SetIndent("", "  ")
			return out.Encode(report)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "print one JSON object")
	f.StringVar(&plot, "plot", "", "draw ns against flows into this SVG `file`")
	f.IntVar(&options.Rounds, "rounds", 11, "turns that each case has")
	f.IntVar(&options.Packets, "packets", 262144, "packets of each case in each round")
	f.IntVar(&options.Flows, "flows", 1<<20, "largest flow set, a power of two")
	f.IntVar(&options.DIPs, "dips", 16, "DIPs behind each endpoint")
	f.IntVar(&options.Endpoints, "endpoints", 20000, "endpoints of ten DIPs to measure memory with; -1: none")
	f.Uint64Var(&options.Seed, "seed", 1, "of the flow hash and the order of cases")
	f.IntVar(&options.CPU, "cpu", options.CPU, "CPU that runs the program; -1: any")
	return cmd
}
