package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
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
			return c.changed(response, response.GetChanges(), response.GetRollout(), dryRun, format)
		},
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "`file`, directory, or \"-\" for standard input; may be repeated")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "check and say what would change, and change nothing")
	addWait(cmd, &wait)
	format.add(cmd, "json", "yaml")
	_ = cmd.MarkFlagFilename("filename", "yaml", "yml", "json")
	return cmd
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
