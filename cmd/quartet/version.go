package main

import (
	"fmt"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/daemon"
)

func versionCommand(c *cli) *cobra.Command {
	var client bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the versions of this command, the manager and the nodes",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintf(c.out, "quartet %s\n", daemon.Version())
			if client {
				return nil
			}
			api, err := c.conn.client()
			if err != nil && !c.conn.configured() {
				fmt.Fprintln(c.err, "no manager is configured, so this is the client's version only: see 'quartet --help'")
				return nil
			}
			if err != nil {
				return err
			}
			lists, err := list(cmd.Context(), api, []kind{kinds[2], kinds[3]}, nil)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.out, "manager %s\n", lists[0].GetVersion())
			t := &table{}
			t.add("NODE", "ROLE", "VERSION", "STATE")
			for _, n := range append(append([]*quartetv1.NodeStatus(nil), lists[0].GetNodes()...), lists[1].GetNodes()...) {
				t.add(n.GetName(), n.GetRole(), n.GetVersion(), n.GetState())
			}
			if len(t.rows) == 1 {
				return nil
			}
			return t.print(c.out)
		},
	}
	cmd.Flags().BoolVar(&client, "client", false, "only of this command; asks no manager")
	return cmd
}
