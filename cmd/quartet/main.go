// Command quartet is the operator's shell: it applies, shows, drains, watches
// and traces what the manager runs.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/quartet-lb/quartet/daemon"
)

// Exit statuses, as docs/operate/cli.md lists them.
const (
	exitFailed      = 1   // anything not below
	exitInvalid     = 2   // command line or objects are wrong; nothing changed
	exitUnreachable = 3   // no manager answers, or it does not accept the certificate
	exitPartial     = 4   // the change stands, but not every node runs it yet
	exitInterrupted = 130 // SIGINT
)

// exitError carries an exit status. An empty text prints nothing.
type exitError struct {
	status int
	text   string
}

func (e *exitError) Error() string { return e.text }

func invalid(format string, args ...any) error {
	return &exitError{exitInvalid, fmt.Sprintf(format, args...)}
}

// cli is what every command shares.
type cli struct {
	in       io.Reader
	out, err io.Writer
	conn     connection
}

func (c *cli) commands() []*cobra.Command {
	return []*cobra.Command{
		applyCommand(c),
		getCommand(c),
		describeCommand(c),
		deleteCommand(c),
		drainCommand(c),
		topCommand(c),
		traceCommand(c),
		versionCommand(c),
		certsCommand(c),
		labCommand(c),
		benchCommand(c),
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal kills
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole process; it returns the exit status.
func run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	c := &cli{in: in, out: out, err: errOut}
	root := &cobra.Command{
		Use:   "quartet",
		Short: "Operate the Quartet load balancer",
		Long: `Operate the Quartet load balancer.

Commands speak to the manager named by --manager, by QUARTET_MANAGER, or by the
configuration file (--config, QUARTET_CONFIG or ~/.config/quartet/config.yaml),
whose keys are the names of these flags.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.conn.addFlags(root.PersistentFlags())
	root.AddCommand(c.commands()...)
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return invalid("%s: see '%s --help'", err, cmd.CommandPath())
	})
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		if exit.text != "" {
			fmt.Fprintf(errOut, "quartet: %s\n", exit.text)
		}
		return exit.status
	case ctx.Err() != nil:
		return exitInterrupted
	case isUsage(err):
		text, meant, _ := strings.Cut(err.Error(), "\n\nDid you mean this?\n") // cobra's, of an unknown command
		fmt.Fprintf(errOut, "quartet: %s%s: see '%s --help'\n", daemon.OneLine(errors.New(text)), didYouMean(strings.Fields(meant)), cmd.CommandPath())
		return exitInvalid
	}
	fmt.Fprintf(errOut, "quartet: %s\n", daemon.OneLine(err))
	return exitFailed
}

// usageError is a wrong number or form of arguments.
type usageError struct{ error }

func isUsage(err error) bool {
	var u usageError
	return errors.As(err, &u) || isUnknownCommand(err)
}

// args makes cobra's complaint about arguments one that shows what is wanted.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, a []string) error {
		if check(cmd, a) == nil {
			return nil
		}
		got := "no arguments"
		if len(a) > 0 {
			got = fmt.Sprintf("arguments %q", a)
		}
		return usageError{fmt.Errorf("%s: want %s", got, cmd.UseLine())}
	}
}

// didYouMean is what follows an unknown word.
func didYouMean(words []string) string {
	if len(words) == 0 {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", strings.Join(words, " or "))
}

// isUnknownCommand recognises cobra's untyped error.
func isUnknownCommand(err error) bool { return strings.HasPrefix(err.Error(), "unknown command ") }
