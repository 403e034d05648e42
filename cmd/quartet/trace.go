package main

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

func traceCommand(c *cli) *cobra.Command {
	var mux string
	var format output
	packet := &quartetv1.TracePacket{}
	cmd := &cobra.Command{
		Use:   "trace tcp|udp|icmp SOURCE[:PORT] DESTINATION[:PORT]",
		Short: "Run the mux program on a described packet and show where it goes and why",
		Long: `Run the mux program on a described packet and show where it goes and why.

The mux runs the very program and tables that it forwards with, on a packet made
for this; nothing is sent. TCP and UDP want a port on both sides. An IPv6
address with a port stands in brackets.`,
		Example: `  quartet trace tcp 198.51.100.7:40000 203.0.113.10:80 --syn
  quartet trace udp '[2001:db8:f::7]:5000' '[2001:db8::10]:53' --mux mux2
  quartet trace tcp 198.51.100.7:40000 203.0.113.10:80 --length 1500 --df`,
		Args: args(cobra.ExactArgs(3)),
		ValidArgsFunction: func(_ *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(a) == 0 {
				return []string{"tcp", "udp", "icmp"}, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			if err := parsePacket(a, packet); err != nil {
				return usageError{err}
			}
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			response, err := client.Trace(cmd.Context(), &quartetv1.TraceRequest{Mux: mux, Packet: packet})
			if err != nil {
				return err
			}
			if format.set() {
				return format.print(c.out, response)
			}
			printTrace(c.out, packet, response)
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&mux, "mux", "", "`name` of the mux; default: any that is connected")
	flags.BoolVar(&packet.Syn, "syn", false, "TCP: a connection's first packet")
	flags.Uint32Var(&packet.Length, "length", 0, "IP packet's length in `bytes`; default: the smallest")
	flags.BoolVar(&packet.DontFragment, "df", false, "IPv4: set Don't Fragment")
	format.add(cmd, "json", "yaml")
	_ = cmd.RegisterFlagCompletionFunc("mux", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return c.namesOf(cmd.Context(), kinds[2]), cobra.ShellCompDirectiveNoFileComp
	})
	return cmd
}

func parsePacket(a []string, p *quartetv1.TracePacket) error {
	protocol := strings.ToUpper(a[0])
	if !slices.Contains([]string{"TCP", "UDP", "ICMP"}, protocol) {
		return fmt.Errorf("%q is not a protocol: tcp, udp or icmp", a[0])
	}
	p.Protocol = protocol
	source, sourcePort, err := parseSide(a[1], protocol != "ICMP")
	if err != nil {
		return fmt.Errorf("source: %w", err)
	}
	destination, port, err := parseSide(a[2], protocol != "ICMP")
	if err != nil {
		return fmt.Errorf("destination: %w", err)
	}
	if source.Is6() != destination.Is6() {
		return fmt.Errorf("%s and %s are not of one family", source, destination)
	}
	if p.Syn && protocol != "TCP" {
		return fmt.Errorf("--syn goes with tcp")
	}
	if p.GetLength() > 65535 {
		return fmt.Errorf("--length: %d is not an IP packet's length: up to 65535", p.GetLength())
	}
	p.Source, p.Destination = source.String(), destination.String()
	p.SourcePort, p.DestinationPort = uint32(sourcePort), uint32(port)
	return nil
}

func parseSide(text string, port bool) (netip.Addr, uint16, error) {
	if !port {
		a, err := netip.ParseAddr(text)
		if err != nil || a.Zone() != "" {
			return a, 0, fmt.Errorf("%q is not an address", text)
		}
		return a, 0, nil
	}
	ap, err := netip.ParseAddrPort(text)
	if err != nil || ap.Port() == 0 || ap.Addr().Zone() != "" {
		return netip.Addr{}, 0, fmt.Errorf("%q is not an address and port: 198.51.100.7:40000 or [2001:db8::7]:40000", text)
	}
	return ap.Addr(), ap.Port(), nil
}

// printTrace tells a packet's way in the order in which the mux decides.
func printTrace(w io.Writer, p *quartetv1.TracePacket, r *quartetv1.TraceResponse) {
	syn := ""
	if p.GetSyn() {
		syn = " SYN"
	}
	fmt.Fprintf(w, "%s%s %s > %s\n", p.GetProtocol(), syn, side(p.GetSource(), p.GetSourcePort()), side(p.GetDestination(), p.GetDestinationPort()))
	step := func(what, format string, a ...any) { fmt.Fprintf(w, "  %-9s %s\n", what, fmt.Sprintf(format, a...)) }
	step("mux", "%s, generation %d", r.GetMux(), r.GetGeneration())
	if r.GetVip() != "" {
		step("vip", "%s of tenant %s", r.GetVip(), r.GetTenant())
	}
	if r.GetEndpoint() != "" {
		step("endpoint", "%s", r.GetEndpoint())
	}
	if r.GetBuckets() > 0 {
		step("hash", "%016x", r.GetHash())
		text := fmt.Sprintf("%d of %d", r.GetBucket(), r.GetBuckets())
		if r.GetBucketGeneration() > 0 {
			text += fmt.Sprintf(", moved in generation %d", r.GetBucketGeneration())
		}
		if r.GetPreviousDip() != "" {
			text += ", previous DIP " + r.GetPreviousDip()
		}
		step("bucket", "%s", text)
	}
	if r.GetDip() != "" {
		step("dip", "%s, chosen by %s", side(r.GetDip(), r.GetDipPort()), r.GetChosenBy())
	}
	if r.GetTunnel() != "" {
		step("tunnel", "%s to %s", r.GetEncapsulation(), r.GetTunnel())
	}
	if r.GetInterface() != "" {
		text := r.GetInterface()
		if r.GetNextHopMac() != "" {
			text += ", next hop " + r.GetNextHopMac()
		}
		step("out", "%s", text)
	}
	step("exit", "%s (%s)", r.GetExit(), r.GetVerdict())
	if len(r.GetSteps()) > 0 {
		fmt.Fprintln(w, "why")
		for _, s := range r.GetSteps() {
			fmt.Fprintf(w, "  %s\n", s)
		}
	}
}

func side(address string, port uint32) string {
	a, err := netip.ParseAddr(address)
	if err != nil || port == 0 {
		return address
	}
	return netip.AddrPortFrom(a, uint16(port)).String()
}
