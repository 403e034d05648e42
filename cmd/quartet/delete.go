package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

func deleteCommand(c *cli) *cobra.Command {
	var files []string
	var wait time.Duration
	var format output
	cmd := &cobra.Command{
		Use:   "delete (-f FILE | KIND NAME...)",
		Short: "Delete objects, all of them or none",
		Long: `Delete objects, all of them or none: vips and pools, and muxes and hosts that
are gone, which the manager then forgets.`,
		Example: `  quartet delete vip web
  quartet delete -f site/`,
		ValidArgsFunction: c.completeDesired,
		RunE: func(cmd *cobra.Command, a []string) error {
			request := &quartetv1.DeleteRequest{WaitMs: uint32(wait.Milliseconds())}
			var docs []document
			switch {
			case len(files) > 0 && len(a) > 0:
				return usageError{errors.New("either -f or a kind and names")}
			case len(files) > 0:
				var err error
				if docs, err = c.readDocuments(files); err != nil {
					return err
				}
				for _, d := range docs {
					if d.ref.Name == "" {
						return invalid("%s: document %d: its kind and name don't say what to delete: give kind and name", d.file, d.number)
					}
					request.Objects = append(request.Objects, &quartetv1.ObjectRef{Kind: d.ref.Kind, Name: d.ref.Name})
				}
			case len(a) < 2:
				return usageError{errors.New("a kind and a name are missing, or -f")}
			default:
				k, err := findKind(a[0])
				if err != nil {
					return err
				}
				if k.plural == "dips" {
					return usageError{errors.New("a DIP leaves by applying its Vip without it, or for a while by 'quartet drain dip'")}
				}
				for _, name := range a[1:] {
					request.Objects = append(request.Objects, &quartetv1.ObjectRef{Kind: k.api, Name: name})
				}
			}
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			response, err := client.Delete(cmd.Context(), request)
			var r *refused
			if errors.As(err, &r) {
				return c.report(docs, r.violations)
			}
			if err != nil {
				return err
			}
			return c.changed(response, response.GetChanges(), response.GetRollout(), false, format)
		},
	}
	cmd.Flags().StringArrayVarP(&files, "filename", "f", nil, "`file`, directory, or \"-\" for standard input, whose objects to delete; may be repeated")
	addWait(cmd, &wait)
	format.add(cmd, "json", "yaml")
	_ = cmd.MarkFlagFilename("filename", "yaml", "yml", "json")
	return cmd
}

func (c *cli) completeDesired(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(a) == 0 {
		return []string{"vip", "pool", "mux", "host"}, cobra.ShellCompDirectiveNoFileComp
	}
	return c.completeNames(cmd, a, "")
}
