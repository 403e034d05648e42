package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/quartet-lb/quartet/lab"
	"github.com/quartet-lb/quartet/lab/scenario"
	"github.com/quartet-lb/quartet/lab/traffic"
)

func labCommand(c *cli) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "lab",
		Short: "Raise a data centre of network namespaces, and try things in it",
		Long: `Raise a data centre of network namespaces on this machine: switches that run BIRD with
BGP on every link, muxes, host agents, a manager, servers and clients. All of
them are the real programs. It needs root, and touches only namespaces of its own.`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var name string
	cmd.PersistentFlags().StringVar(&name, "name", lab.Defaults().Name, "the lab's `name`; several may exist at once")
	cmd.AddCommand(
		labUpCommand(c, &name), labDownCommand(c, &name), labStatusCommand(c, &name),
		labExecCommand(c, &name), labRunCommand(c, &name), labServeCommand(), labLoadCommand(c),
	)
	return cmd
}

// labFlags adds the flags that say what a lab is like.
func labFlags(cmd *cobra.Command, o *lab.Options, topology *string) {
	f := cmd.Flags()
	f.IntVar(&o.Size.Cores, "cores", o.Size.Cores, "core switches")
	f.IntVar(&o.Size.Containers, "containers", o.Size.Containers, "containers of aggregation and ToR switches")
	f.IntVar(&o.Size.Aggs, "aggs", o.Size.Aggs, "aggregation switches a container")
	f.IntVar(&o.Size.ToRs, "tors", o.Size.ToRs, "ToR switches a container")
	f.IntVar(&o.Size.Muxes, "muxes", o.Size.Muxes, "muxes in all")
	f.IntVar(&o.Size.Hosts, "hosts", o.Size.Hosts, "hosts in all")
	f.IntVar(&o.Size.VMs, "vms", o.Size.VMs, "VMs a host")
	f.IntVar(&o.Size.Clients, "clients", o.Size.Clients, "clients in all")
	f.StringVar(topology, "topology", "", "YAML `file` with these eight flags' names as keys; a flag on the command line wins")
	f.IntVar(&o.MTU, "mtu", o.MTU, "`bytes` that each link takes, 1280..9000")
	f.Var(&o.MuxBFD, "mux-bfd", "BFD interval between muxes and ToRs, times 3; 0: no BFD")
	f.Var(&o.FabricBFD, "fabric-bfd", "BFD interval between switches, times 3; 0: no BFD")
	f.BoolVar(&o.FabricOnly, "fabric-only", false, "switches, links and addresses only: no daemons and servers")
}

// readTopology takes the sizes that the file has and the command line has not.
func readTopology(cmd *cobra.Command, o *lab.Options, file string) error {
	if file == "" {
		return nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read topology: %w", err)
	}
	given := o.Size
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	d.KnownFields(true)
	if err := d.Decode(&o.Size); err != nil {
		return invalid("read topology %s: %s", file, err)
	}
	for _, f := range []struct {
		name      string
		to, given *int
	}{
		{"cores", &o.Size.Cores, &given.Cores}, {"containers", &o.Size.Containers, &given.Containers},
		{"aggs", &o.Size.Aggs, &given.Aggs}, {"tors", &o.Size.ToRs, &given.ToRs},
		{"muxes", &o.Size.Muxes, &given.Muxes}, {"hosts", &o.Size.Hosts, &given.Hosts},
		{"vms", &o.Size.VMs, &given.VMs}, {"clients", &o.Size.Clients, &given.Clients},
	} {
		if cmd.Flags().Changed(f.name) {
			*f.to = *f.given
		}
	}
	return nil
}

// besideUs is the folder of the running program, where the daemons are.
func besideUs() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find own program: %w", err)
	}
	return filepath.Dir(self), nil
}

func labUpCommand(c *cli, name *string) *cobra.Command {
	o := lab.Defaults()
	var topology string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Raise a lab and leave it running",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := readTopology(cmd, &o, topology); err != nil {
				return err
			}
			var err error
			o.Name = *name
			if o.Binaries, err = besideUs(); err != nil {
				return err
			}
			l, err := lab.Up(cmd.Context(), o, c.out)
			if err != nil {
				return err
			}
			defer l.Close()
			fmt.Fprint(c.out, strings.ReplaceAll(`
The lab is up. Look around:
  {lab} status                           the topology, and where VIPs lead
  {lab} exec manager -- quartet get vip  the operator's commands
  {lab} exec client1 -- bash             a shell outside; try: curl http://203.0.113.1
  {lab} run demo                         watch traffic, a mux and a server die
  {lab} down                             take it away
`, "{lab}", lab.Command(os.Args[0], *name)))
			return nil
		},
	}
	labFlags(cmd, &o, &topology)
	return cmd
}

func labDownCommand(c *cli, name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Take a lab away, whatever state it is in",
		Args:  args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			there, err := lab.Down(*name, c.out)
			if err == nil && !there {
				fmt.Fprintf(c.out, "there is no lab %s\n", *name)
			}
			return err
		},
	}
}

func labStatusCommand(c *cli, name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Draw the topology with what is up, and where VIPs lead",
		Args:  args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			defer l.Close()
			status, err := l.Status(cmd.Context())
			fmt.Fprint(c.out, status)
			return err
		},
	}
}

func labExecCommand(c *cli, name *string) *cobra.Command {
	return &cobra.Command{
		Use:   "exec NODE -- COMMAND [ARGUMENT...]",
		Short: "Run a command in a node; quartet there speaks to the lab's manager",
		Args:  args(cobra.MinimumNArgs(2)),
		RunE: func(_ *cobra.Command, a []string) error {
			l, err := lab.Open(*name)
			if err != nil {
				return err
			}
			defer l.Close()
			err = l.Exec(a[0], a[1:], func(cmd *exec.Cmd) {
				cmd.Stdin, cmd.Stdout, cmd.Stderr = c.in, c.out, c.err
			})
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				return &exitError{status: max(exit.ExitCode(), exitFailed)}
			}
			return err
		},
	}
}

func labRunCommand(c *cli, name *string) *cobra.Command {
	var (
		o        = lab.Defaults()
		topology string
		short    bool
		asJSON   bool
		plot     string
		keep     bool
		params   map[string]string
	)
	cmd := &cobra.Command{
		Use:   "run SCENARIO",
		Short: "Carry out a scenario: steps, and what must be observed",
		Long: fmt.Sprintf(`Carry out a scenario in the lab, and put the lab back as it was. If no lab is up,
one is raised, and taken down at the end unless --keep is given.

Scenarios that come with Quartet: %s; or a file.

A scenario file begins with a comment that draws the topology. Then each line is one of

%s

VALUE is a number, a name, a load's figure such as web.errors, or an observation
such as hops(core1,203.0.113.0/24), with + and - between them. {name} stands for
a parameter or a node's address: {vm1-1}, {vm1-1.6} its IPv6 address.`,
			strings.Join(lab.Scenarios(), ", "), scenario.Usage()),
		Args: args(cobra.ExactArgs(1)),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return lab.Scenarios(), cobra.ShellCompDirectiveDefault
		},
		RunE: func(cmd *cobra.Command, a []string) (err error) {
			s, err := lab.Scenario(a[0])
			if err != nil {
				return err
			}
			if plot != "" && !slices.ContainsFunc(s.Steps, func(p scenario.Step) bool { return p.Verb == "plot" }) {
				return invalid("--plot: %s has nothing to draw", s.Name)
			}
			transcript := c.out
			if asJSON {
				transcript = c.err
			}
			l, err := lab.Open(*name)
			if errors.Is(err, lab.ErrNoLab) {
				if err := readTopology(cmd, &o, topology); err != nil {
					return err
				}
				o.Name = *name
				if o.Binaries, err = besideUs(); err != nil {
					return err
				}
				l, err = lab.Up(cmd.Context(), o, transcript)
				if err == nil && !keep {
					defer func() {
						_, e := lab.Down(*name, transcript)
						err = errors.Join(err, e)
					}()
				}
			}
			if err != nil {
				return err
			}
			defer l.Close()
			result, err := l.Run(cmd.Context(), s, lab.RunOptions{Short: short, Params: params, Program: os.Args[0], Out: transcript})
			if err != nil {
				return err
			}
			if plot != "" {
				if err := os.WriteFile(plot, []byte(lab.SVG(result.Plots)), 0o644); err != nil {
					return fmt.Errorf("write plot: %w", err)
				}
			}
			if asJSON {
				e := json.NewEncoder(c.out)
				e.SetIndent("", "  ")
				return e.Encode(result)
			}
			return nil
		},
	}
	labFlags(cmd, &o, &topology)
	f := cmd.Flags()
	f.BoolVar(&short, "short", false, "take the scenario's short sizes")
	f.StringToStringVar(&params, "param", nil, "`name=value` of the scenario's parameters")
	f.BoolVar(&asJSON, "json", false, "print what was measured as one JSON object, the transcript on standard error")
	f.StringVar(&plot, "plot", "", "draw it into an SVG `file`")
	f.BoolVar(&keep, "keep", false, "leave a lab that this command raised")
	return cmd
}

func labServeCommand() *cobra.Command {
	var (
		name string
		port uint16
	)
	cmd := &cobra.Command{
		Use:    "serve",
		Short:  "Answer HTTP and UDP with a server's name",
		Hidden: true,
		Args:   args(cobra.NoArgs),
		RunE:   func(cmd *cobra.Command, _ []string) error { return traffic.Serve(cmd.Context(), name, port) },
	}
	cmd.Flags().StringVar(&name, "name", "", "the server's `name`")
	cmd.Flags().Uint16Var(&port, "port", lab.ServerPort, "TCP and UDP port")
	return cmd
}

func labLoadCommand(c *cli) *cobra.Command {
	var (
		l               traffic.Load
		target, sources string
	)
	cmd := &cobra.Command{
		Use:    "load",
		Short:  "Make connections and print what came of them as JSON",
		Hidden: true,
		Args:   args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if l.Target, err = netip.ParseAddrPort(target); err != nil {
				return invalid("--target: %q is not ADDRESS:PORT", target)
			}
			if sources != "" {
				if l.Sources, err = netip.ParsePrefix(sources); err != nil {
					return invalid("--sources: %q is not a prefix", sources)
				}
			}
			report, err := traffic.Run(cmd.Context(), l)
			if err != nil {
				return invalid("%s", err)
			}
			return json.NewEncoder(c.out).Encode(report)
		},
	}
	f := cmd.Flags()
	f.StringVar((*string)(&l.Mode), "mode", string(traffic.Short), "short, keepalive, download, upload or udp")
	f.StringVar(&target, "target", "", "`address:port` to connect to")
	f.IntVar(&l.Count, "count", 0, "requests in all; 0: until interrupted")
	f.IntVar(&l.Parallel, "parallel", 1, "workers")
	f.DurationVar(&l.Interval, "interval", 0, "between a worker's requests")
	f.DurationVar(&l.Timeout, "timeout", 5*time.Second, "of one attempt")
	f.IntVar(&l.Retries, "retries", 0, "of a failed request")
	f.Int64Var(&l.Bytes, "bytes", 0, "of an upload or download")
	f.StringVar(&sources, "sources", "", "`prefix` of source addresses")
	return cmd
}
