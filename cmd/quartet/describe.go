package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func describeCommand(c *cli) *cobra.Command {
	var format output
	cmd := &cobra.Command{
		Use:   "describe KIND NAME",
		Short: "Show everything desired and observed of one object",
		Example: `  quartet describe vip web
  quartet describe mux mux1
  quartet describe dip 10.1.3.11`,
		Args:              args(cobra.ExactArgs(2)),
		ValidArgsFunction: c.completeNames,
		RunE: func(cmd *cobra.Command, a []string) error {
			k, err := findKind(a[0])
			if err != nil {
				return err
			}
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			lists, err := list(cmd.Context(), client, []kind{k}, a[1:])
			if err != nil {
				return err
			}
			if format.set() {
				return format.printAll(c.out, observed(lists[0]))
			}
			return describe(c.out, k, lists[0], time.Now())
		},
	}
	format.add(cmd, "json", "yaml")
	return cmd
}

// observed are a list's rows with what is observed of them.
func observed(r *quartetv1.ListResponse) []message {
	if len(r.GetVips()) == 0 {
		return messages(r)
	}
	out := []message{}
	for _, v := range r.GetVips() {
		out = append(out, v)
	}
	return out
}

func describe(w io.Writer, k kind, r *quartetv1.ListResponse, now time.Time) error {
	line := func(label, format string, a ...any) {
		if text := fmt.Sprintf(format, a...); text != "" {
			fmt.Fprintf(w, "%-12s %s\n", label+":", text)
		}
	}
	for _, v := range r.GetVips() {
		vip := v.GetVip()
		line("Vip", "%s", vip.GetName())
		line("Tenant", "%s", vip.GetTenant())
		line("Addresses", "%s", strings.Join(vip.GetAddresses(), ", "))
		line("SNAT", "%s", strings.Join(vip.GetSnat(), ", "))
		line("Generation", "%d, run by %d of %d muxes", v.GetGeneration(), v.GetMuxesCurrent(), v.GetMuxes())
		for _, text := range v.GetWarnings() {
			line("Warning", "%s", text)
		}
		for _, e := range vip.GetEndpoints() {
			fmt.Fprintf(w, "\nEndpoint %s: %s, consistency %s, encapsulation %s\n", e.GetName(), endpointText(e), e.GetConsistency(), e.GetEncapsulation())
			fmt.Fprintf(w, "  Health: %s\n", healthText(e.GetHealth()))
			t := &table{}
			t.add("  DIP", "PORT", "HOST", "TUNNEL", "STATE", "SINCE", "WEIGHT", "BUCKETS", "REASON")
			tunnels := map[string]string{}
			for _, b := range e.GetBackends() {
				for _, dip := range []string{b.GetDip(), b.GetDip6()} {
					if tunnels[dip] = b.GetTunnel(); b.GetTunnel() == "" {
						tunnels[dip] = dip
					}
				}
			}
			for _, d := range v.GetDips() {
				if d.GetEndpoint() == e.GetName() {
					t.add("  "+d.GetDip(), portText(d.GetPort()), d.GetHost(), tunnels[d.GetDip()], d.GetState(),
						ago(now, d.GetSince().AsTime(), d.GetSince() != nil), fmt.Sprint(d.GetWeight()), share(d), d.GetReason())
				}
			}
			if err := t.print(w); err != nil {
				return err
			}
		}
	}
	for _, p := range r.GetPools() {
		line("VipPool", "%s", p.GetName())
		line("Prefixes", "%s", strings.Join(p.GetPrefixes(), ", "))
		line("Announce", "%s", p.GetAnnounce())
	}
	for _, n := range r.GetNodes() {
		line(strings.ToUpper(k.singular[:1])+k.singular[1:], "%s", n.GetName())
		state := n.GetState()
		if !n.GetConnected() && state != "gone" {
			state += " (disconnected)"
		}
		line("State", "%s", state)
		line("Error", "%s", n.GetError())
		line("Addresses", "%s", strings.Join(n.GetAddresses(), ", "))
		line("Version", "%s", n.GetVersion())
		line("Last seen", "%s", ago(now, n.GetLastSeen().AsTime(), n.GetLastSeen() != nil))
		line("Generation", "%d (target %d)", n.GetGeneration(), n.GetGenerationTarget())
		line("Announced", "%s", strings.Join(n.GetAnnounced(), ", "))
		if len(n.GetBgpPeers()) > 0 {
			fmt.Fprintln(w)
			t := &table{}
			t.add("BGP PEER", "ASN", "STATE", "BFD")
			for _, p := range n.GetBgpPeers() {
				bfd := "down"
				if p.GetBfdUp() {
					bfd = "up"
				}
				t.add(p.GetAddress(), fmt.Sprint(p.GetAsn()), p.GetState(), bfd)
			}
			if err := t.print(w); err != nil {
				return err
			}
		}
	}
	for i, d := range r.GetDips() {
		if i > 0 {
			fmt.Fprintln(w)
		}
		line("Dip", "%s", d.GetDip())
		line("Vip", "%s", d.GetVip())
		line("Endpoint", "%s", d.GetEndpoint())
		line("Port", "%s", portText(d.GetPort()))
		line("Host", "%s", d.GetHost())
		line("State", "%s", d.GetState())
		line("Since", "%s", ago(now, d.GetSince().AsTime(), d.GetSince() != nil))
		line("Reason", "%s", d.GetReason())
		if muxes := d.GetUnreachableFrom(); len(muxes) > 0 {
			line("Unreachable", "from %s", strings.Join(muxes, ", "))
		}
		line("Weight", "%d", d.GetWeight())
		line("Buckets", "%d of %d (%s)", d.GetBuckets(), d.GetBucketsTotal(), share(d))
	}
	return nil
}

func healthText(h *quartetv1.Health) string {
	if h == nil {
		return "not checked"
	}
	var check string
	url := func(scheme string, h *quartetv1.HttpCheck) string {
		text := scheme + " " + h.GetPath()
		if h.GetHost() != "" {
			text += " of " + h.GetHost()
		}
		return text
	}
	switch {
	case h.Http != nil:
		check = url("http", h.Http)
	case h.Https != nil:
		check = url("https", h.Https)
	case h.Tcp != nil:
		check = "tcp connect"
	case h.Grpc != nil:
		check = strings.TrimSpace("grpc " + h.Grpc.GetService())
	case h.Command != nil:
		check = "command " + strings.Join(h.Command.GetArgv(), " ")
	}
	if h.GetPort() != 0 {
		check += fmt.Sprintf(" on port %d", h.GetPort())
	}
	return fmt.Sprintf("%s, every %s within %s, rise %d, fall %d", check, h.GetInterval().AsDuration(), h.GetTimeout().AsDuration(), h.GetRise(), h.GetFall())
}
