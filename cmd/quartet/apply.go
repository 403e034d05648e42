package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/manager/object"
)

func applyCommand(c *cli) *cobra.Command {
	var files []string
	var dryRun bool
	var wait time.Duration
	var format output
	cmd := &cobra.Command{
		Use:   "apply -f FILE",
		Short: "Create or replace objects, all of them or none",
		Long: `Create or replace objects, all of them or none.

A file holds YAML or JSON, one document or several: Vips, VipPools, or VIP
configurations in the form of the Ananta paper's Figure 6. The command waits
until the nodes run the change and says how many do.`,
		Example: `  quartet apply -f web.yaml
  quartet apply -f site/ --dry-run
  quartet get vips -o yaml | sed s/weight:\ 1/weight:\ 2/ | quartet apply -f -`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(files) == 0 {
				return usageError{errors.New("-f is missing")}
			}
			docs, err := c.readDocuments(files)
			if err != nil {
				return err
			}
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			request := &quartetv1.ApplyRequest{DryRun: dryRun, WaitMs: uint32(wait.Milliseconds())}
			for _, d := range docs {
				request.Objects = append(request.Objects, d.doc)
			}
			response, err := client.Apply(cmd.Context(), request)
			var r *refused
			if errors.As(err, &r) {
				return c.report(docs, r.violations)
			}
			if err != nil {
				return err
			}
			objects, _ := object.Decode(request.GetObjects())
			for _, o := range objects {
				for _, warning := range object.Warnings(o.Vip) {
					fmt.Fprintf(c.err, "warning: %s: %s\n", o, warning)
				}
			}
			err = c.changed(response, response.GetChanges(), response.GetRollout(), dryRun, format)
			if !dryRun {
				c.outlook(cmd.Context(), client, response.GetChanges(), format)
			}
			return err
		},
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "`file`, directory, or \"-\" for standard input; may be repeated")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "check and say what would change, and change nothing")
	addWait(cmd, &wait)
	format.add(cmd, "json", "yaml")
	_ = cmd.MarkFlagFilename("filename", "yaml", "yml", "json")
	return cmd
}

// outlook says what keeps applied Vips from serving: DIPs that nobody has
// checked yet, hosts without an agent. A manager that does not answer any more
// costs only that: the change stands.
func (c *cli) outlook(ctx context.Context, client quartetv1connect.OperatorServiceClient, changes []*quartetv1.Change, format output) {
	const few = 10 // Vips that are asked about
	asked := 0
	for _, change := range changes {
		if change.GetKind() != object.KindVip || change.GetAction() == "unchanged" {
			continue
		}
		if asked++; asked > few {
			return
		}
		r, err := client.List(ctx, &quartetv1.ListRequest{Kind: object.KindVip, Name: change.GetName()})
		if err != nil {
			return
		}
		for _, v := range r.GetVips() {
			serve, unknown := 0, 0
			for _, d := range v.GetDips() {
				if d.GetBuckets() > 0 {
					serve++
				}
				if d.GetState() == "unknown" {
					unknown++
				}
			}
			why := "the first health checks are under way"
			for _, w := range v.GetWarnings() {
				if strings.HasPrefix(w, "no host agent has connected ") {
					why = "the others wait for a host agent or their first health checks"
					fmt.Fprintf(c.err, "warning: Vip/%s: %s\n", change.GetName(), w)
				}
			}
			if unknown > 0 && !format.set() {
				fmt.Fprintf(c.out, "Vip/%s: %d of %d DIPs in rotation; %s (quartet get dips %s -w)\n",
					change.GetName(), serve, len(v.GetDips()), why, change.GetName())
			}
		}
	}
}

func addWait(cmd *cobra.Command, wait *time.Duration) {
	*wait = 5 * time.Second
	cmd.Flags().Var(&waitValue{wait}, "wait", "how long to wait for nodes to run the change, 1ms..1h")
}

// waitValue is a duration between a millisecond and an hour.
type waitValue struct{ d *time.Duration }

func (w *waitValue) String() string {
	if w.d == nil {
		return ""
	}
	return w.d.String()
}
func (w *waitValue) Type() string { return "duration" }
func (w *waitValue) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < time.Millisecond || d > time.Hour {
		return fmt.Errorf("%q is not a duration of 1ms..1h", s)
	}
	*w.d = d
	return nil
}

// changed says what a change did, and how far it got.
func (c *cli) changed(response message, changes []*quartetv1.Change, rollout *quartetv1.Rollout, dryRun bool, format output) error {
	if format.set() {
		if err := format.print(c.out, response); err != nil {
			return err
		}
	} else {
		for _, change := range changes {
			suffix := ""
			if dryRun {
				suffix = " (dry run)"
			}
			fmt.Fprintf(c.out, "%s/%s %s%s\n", change.GetKind(), change.GetName(), change.GetAction(), suffix)
		}
		if rollout != nil && !dryRun {
			fmt.Fprintf(c.out, "generation %d: %d/%d muxes, %d/%d hosts in %.1f ms\n", rollout.GetGeneration(),
				rollout.GetMuxesAcked(), rollout.GetMuxes(), rollout.GetHostsAcked(), rollout.GetHosts(), rollout.GetElapsedMs())
		}
	}
	if waiting := rollout.GetWaiting(); len(waiting) > 0 && !dryRun {
		return &exitError{exitPartial, fmt.Sprintf("the change stands; not yet run by %s: see 'quartet get muxes' and 'quartet get hosts'", strings.Join(waiting, ", "))}
	}
	return nil
}
