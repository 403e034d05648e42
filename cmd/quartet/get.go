package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
)

// kind is something that get and describe show.
type kind struct {
	plural, singular string
	api              string // ListRequest.kind
}

var kinds = []kind{
	{"vips", "vip", "Vip"},
	{"pools", "pool", "VipPool"},
	{"muxes", "mux", "Mux"},
	{"hosts", "host", "Host"},
	{"dips", "dip", "Dip"},
}

func plurals() []string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.plural)
	}
	return names
}

func findKind(name string) (kind, error) {
	for _, k := range kinds {
		if l := strings.ToLower(name); l == k.plural || l == k.singular || l == strings.ToLower(k.api) || l == strings.ToLower(k.api)+"s" {
			return k, nil
		}
	}
	return kind{}, notAKind(name, plurals())
}

func notAKind(name string, valid []string) error {
	near := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, v := range valid {
		near.AddCommand(&cobra.Command{Use: v, Run: func(*cobra.Command, []string) {}})
	}
	return usageError{fmt.Errorf("%q is not a kind%s: %s", name, didYouMean(near.SuggestionsFor(name)), strings.Join(valid, ", "))}
}

func getCommand(c *cli) *cobra.Command {
	var format output
	var watch bool
	cmd := &cobra.Command{
		Use:   "get KIND|all [NAME...]",
		Short: "List vips, pools, muxes, hosts, dips, or all",
		Long: `List vips, pools, muxes, hosts, dips, or all of them.

With -o json or -o yaml, vips and pools are printed as 'quartet apply' reads
them; 'quartet describe' adds what is observed. The name of a DIP is its address,
or a Vip's name for all of its DIPs.`,
		Example: `  quartet get vips
  quartet get dips -o wide
  quartet get dips web
  quartet get vips web -o yaml
  quartet get muxes --watch`,
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: c.completeNames,
		RunE: func(cmd *cobra.Command, a []string) error {
			var which []kind
			if a[0] == "all" {
				if len(a) > 1 {
					return usageError{fmt.Errorf("all takes no names")}
				}
				which = kinds
			} else {
				k, err := findKind(a[0])
				if err != nil {
					return notAKind(a[0], append(plurals(), "all"))
				}
				which = []kind{k}
			}
			if watch && format.set() {
				return usageError{fmt.Errorf("--watch prints tables: leave -o %s out", format.value)}
			}
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			if watch {
				return c.watch(cmd.Context(), client, which, a[1:], format)
			}
			lists, err := list(cmd.Context(), client, which, a[1:])
			if err != nil {
				return err
			}
			return c.show(lists, which, format)
		},
	}
	format.add(cmd, "json", "yaml", "wide", "name")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "after listing, print what changes until interrupted")
	return cmd
}

// list asks for each kind, and for each name if there are any.
func list(ctx context.Context, client quartetv1connect.OperatorServiceClient, which []kind, names []string) ([]*quartetv1.ListResponse, error) {
	var all []*quartetv1.ListResponse
	for _, k := range which {
		merged := &quartetv1.ListResponse{}
		if len(names) == 0 {
			names = []string{""}
		}
		for _, name := range names {
			r, err := client.List(ctx, &quartetv1.ListRequest{Kind: k.api, Name: name})
			if err != nil {
				return nil, err
			}
			merged.Vips = append(merged.Vips, r.GetVips()...)
			merged.Pools = append(merged.Pools, r.GetPools()...)
			merged.Nodes = append(merged.Nodes, r.GetNodes()...)
			merged.Dips = append(merged.Dips, r.GetDips()...)
			merged.Generation, merged.Version = r.GetGeneration(), r.GetVersion()
		}
		all = append(all, merged)
	}
	return all, nil
}

// messages are a list's rows as get prints them: desired objects without what
// is observed of them.
func messages(r *quartetv1.ListResponse) []message {
	out := []message{}
	for _, v := range r.GetVips() {
		out = append(out, v.GetVip())
	}
	for _, p := range r.GetPools() {
		out = append(out, p)
	}
	for _, n := range r.GetNodes() {
		out = append(out, n)
	}
	for _, d := range r.GetDips() {
		out = append(out, d)
	}
	return out
}

func (c *cli) show(lists []*quartetv1.ListResponse, which []kind, format output) error {
	if format.set() && len(which) > 1 {
		all := struct {
			Vips  []json.RawMessage `json:"vips"`
			Pools []json.RawMessage `json:"pools"`
			Muxes []json.RawMessage `json:"muxes"`
			Hosts []json.RawMessage `json:"hosts"`
			Dips  []json.RawMessage `json:"dips"`
		}{}
		for i, to := range []*[]json.RawMessage{&all.Vips, &all.Pools, &all.Muxes, &all.Hosts, &all.Dips} {
			var err error
			if *to, err = rawList(messages(lists[i])); err != nil {
				return err
			}
		}
		return format.printJSON(c.out, all)
	}
	for i, r := range lists {
		if format.set() {
			return format.printAll(c.out, messages(r))
		}
		t := rows(which[i], r, format.value == "wide", time.Now())
		switch {
		case format.value == "name":
			for _, row := range t.rows[1:] {
				fmt.Fprintf(c.out, "%s/%s\n", which[i].singular, key(which[i], row))
			}
			continue
		case len(t.rows) == 1:
			if len(which) == 1 {
				fmt.Fprintf(c.err, "no %s\n", which[i].plural)
			}
			continue
		case i > 0:
			fmt.Fprintln(c.out)
		}
		if len(which) > 1 {
			fmt.Fprintln(c.out, strings.ToUpper(which[i].plural))
		}
		if err := t.print(c.out); err != nil {
			return err
		}
	}
	return nil
}

// key is what names a row.
func key(k kind, row []string) string {
	if k.plural == "dips" {
		return strings.Join(row[:3], "/")
	}
	return row[0]
}

// rows is a kind's table, with its header.
func rows(k kind, r *quartetv1.ListResponse, wide bool, now time.Time) *table {
	t := &table{}
	add := func(narrow []string, more ...string) {
		if wide {
			narrow = append(narrow, more...)
		}
		t.add(narrow...)
	}
	switch k.plural {
	case "vips":
		add([]string{"NAME", "TENANT", "ADDRESSES", "ENDPOINTS", "DIPS", "MUXES", "GENERATION"}, "SNAT", "WARNINGS")
		for _, v := range r.GetVips() {
			var endpoints []string
			for _, e := range v.GetVip().GetEndpoints() {
				endpoints = append(endpoints, endpointText(e))
			}
			healthy := 0
			for _, d := range v.GetDips() {
				if d.GetState() == "healthy" || d.GetState() == "unchecked" {
					healthy++
				}
			}
			add([]string{v.GetVip().GetName(), v.GetVip().GetTenant(), strings.Join(v.GetVip().GetAddresses(), ","), some(endpoints, wide),
				fmt.Sprintf("%d/%d", healthy, len(v.GetDips())), fmt.Sprintf("%d/%d", v.GetMuxesCurrent(), v.GetMuxes()), fmt.Sprint(v.GetGeneration())},
				strings.Join(v.GetVip().GetSnat(), ","), strings.Join(v.GetWarnings(), "; "))
		}
	case "pools":
		add([]string{"NAME", "PREFIXES", "ANNOUNCE"})
		for _, p := range r.GetPools() {
			add([]string{p.GetName(), strings.Join(p.GetPrefixes(), ","), p.GetAnnounce()})
		}
	case "muxes", "hosts":
		header := []string{"NAME", "STATE", "ADDRESSES", "GENERATION"}
		more := []string{"VERSION", "LAST SEEN", "ERROR"}
		if k.plural == "muxes" {
			header = append(header, "BGP", "BFD")
			more = append(more, "ANNOUNCED")
		}
		add(header, more...)
		for _, n := range r.GetNodes() {
			state := n.GetState()
			if !n.GetConnected() && state != "gone" {
				state += " (disconnected)"
			}
			generation := fmt.Sprint(n.GetGeneration())
			if n.GetGeneration() != n.GetGenerationTarget() {
				generation += fmt.Sprintf(" of %d", n.GetGenerationTarget())
			}
			row := []string{n.GetName(), state, strings.Join(n.GetAddresses(), ","), generation}
			more := []string{n.GetVersion(), ago(now, n.GetLastSeen().AsTime(), n.GetLastSeen() != nil), n.GetError()}
			if k.plural == "muxes" {
				up, bfd := 0, 0
				for _, p := range n.GetBgpPeers() {
					if p.GetState() == "established" {
						up++
					}
					if p.GetBfdUp() {
						bfd++
					}
				}
				row = append(row, fmt.Sprintf("%d/%d", up, len(n.GetBgpPeers())), fmt.Sprintf("%d/%d", bfd, len(n.GetBgpPeers())))
				more = append(more, strings.Join(n.GetAnnounced(), ","))
			}
			add(row, more...)
		}
	case "dips":
		add([]string{"VIP", "ENDPOINT", "DIP", "PORT", "HOST", "STATE", "WEIGHT", "BUCKETS"}, "SINCE", "UNREACHABLE FROM", "REASON")
		for _, d := range r.GetDips() {
			add([]string{d.GetVip(), d.GetEndpoint(), d.GetDip(), portText(d.GetPort()), d.GetHost(), d.GetState(), fmt.Sprint(d.GetWeight()), share(d)},
				ago(now, d.GetSince().AsTime(), d.GetSince() != nil), strings.Join(d.GetUnreachableFrom(), ","), d.GetReason())
		}
	}
	return t
}

func share(d *quartetv1.DipStatus) string {
	if d.GetBucketsTotal() == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100*float64(d.GetBuckets())/float64(d.GetBucketsTotal()))
}

func portText(port uint32) string {
	if port == 0 {
		return "any"
	}
	return fmt.Sprint(port)
}

func endpointText(e *quartetv1.Endpoint) string { return e.GetProtocol() + ":" + portText(e.GetPort()) }

// some joins a list, shortened unless all are wanted.
func some(list []string, all bool) string {
	const few = 3
	if !all && len(list) > few {
		return fmt.Sprintf("%s,+%d", strings.Join(list[:few], ","), len(list)-few)
	}
	return strings.Join(list, ",")
}

// ago is a time as people compare it: "3s", "5m", "2h10m", "4d".
func ago(now, t time.Time, known bool) string {
	if !known {
		return ""
	}
	d := max(now.Sub(t), 0)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm ago", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd ago", int(d.Hours())/24)
}

// watch prints the table, and then each row that changed, as it changes.
func (c *cli) watch(ctx context.Context, client quartetv1connect.OperatorServiceClient, which []kind, names []string, format output) error {
	before := make([]map[string]string, len(which))
	for first := true; ; first = false {
		lists, err := list(ctx, client, which, names)
		if err != nil && (first || ctx.Err() != nil) {
			return err
		}
		for i, r := range lists {
			t := rows(which[i], r, format.value == "wide", time.Now())
			after := map[string]string{}
			changes := &table{}
			if first {
				changes.rows = t.rows[:1]
			}
			for _, row := range t.rows[1:] {
				k := key(which[i], row)
				// How long ago something was changes by itself.
				after[k] = strings.Join(slices.DeleteFunc(slices.Clone(row), func(s string) bool { return strings.HasSuffix(s, " ago") }), "\t")
				if after[k] != before[i][k] {
					changes.rows = append(changes.rows, row)
				}
			}
			for _, k := range sortedKeys(before[i]) {
				if _, stays := after[k]; !stays {
					changes.rows = append(changes.rows, []string{k, "(gone)"})
				}
			}
			before[i] = after
			var text bytes.Buffer
			if err := changes.print(&text); err != nil {
				return err
			}
			if _, err := c.out.Write(text.Bytes()); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// completeNames completes a kind and then its names, as the manager knows them.
func (c *cli) completeNames(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
	const none = cobra.ShellCompDirectiveNoFileComp
	if len(a) == 0 {
		names := plurals()
		if cmd.Name() == "get" {
			names = append(names, "all")
		}
		return names, none
	}
	k, err := findKind(a[0])
	if err != nil {
		return nil, none
	}
	return c.namesOf(cmd.Context(), k), none
}

func (c *cli) namesOf(ctx context.Context, k kind) []string {
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	client, err := c.conn.client()
	if err != nil {
		return nil
	}
	lists, err := list(ctx, client, []kind{k}, nil)
	if err != nil {
		return nil
	}
	var names []string
	for _, row := range rows(k, lists[0], false, time.Time{}).rows[1:] {
		if k.plural == "dips" {
			names = append(names, row[2])
		} else {
			names = append(names, row[0])
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
