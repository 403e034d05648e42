package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

func drainCommand(c *cli) *cobra.Command {
	var vip string
	var undo bool
	var wait time.Duration
	var format output
	cmd := &cobra.Command{
		Use:   "drain dip|mux NAME",
		Short: "Take a DIP or a mux out of service without breaking connections, or undo that",
		Long: `Take a DIP or a mux out of service without breaking connections, or undo that.

A drained DIP takes no new connections and keeps those it has, where the endpoint's
consistency is table. A drained mux withdraws its routes and keeps forwarding
what still reaches it.`,
		Example: `  quartet drain dip 10.1.3.11
  quartet drain dip 10.1.3.11 --vip web
  quartet drain mux mux1
  quartet drain mux mux1 --undo`,
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: c.completeDrain,
		RunE: func(cmd *cobra.Command, a []string) error {
			k, err := findKind(a[0])
			if err != nil || k.plural != "dips" && k.plural != "muxes" {
				return usageError{fmt.Errorf("%q can't be drained: dip or mux", a[0])}
			}
			if vip != "" && k.plural != "dips" {
				return usageError{errors.New("--vip goes with a dip")}
			}
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			response, err := client.Drain(cmd.Context(), &quartetv1.DrainRequest{
				Kind: k.singular, Name: a[1], Vip: vip, Undo: undo, WaitMs: uint32(wait.Milliseconds())})
			var r *refused
			if errors.As(err, &r) {
				return c.report(nil, r.violations)
			}
			if err != nil {
				return err
			}
			return c.changed(response, response.GetChanges(), response.GetRollout(), false, format)
		},
	}
	cmd.Flags().StringVar(&vip, "vip", "", "drain the DIP only behind this Vip (`name`)")
	cmd.Flags().BoolVar(&undo, "undo", false, "put it back into service")
	addWait(cmd, &wait)
	format.add(cmd, "json", "yaml")
	_ = cmd.RegisterFlagCompletionFunc("vip", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return c.namesOf(cmd.Context(), kinds[0]), cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

func (c *cli) completeDrain(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	switch len(a) {
	case 0:
		return []string{"dip", "mux"}, cobra.ShellCompDirectiveNoFileComp
	case 1:
		return c.completeNames(cmd, a, "")
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}
