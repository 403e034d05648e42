package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
)

func topCommand(c *cli) *cobra.Command {
	interval := time.Second
	var once bool
	var format output
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch packets, bits and new flows a second by VIP and DIP, and the muxes' ways out",
		Long: `Watch packets, bits and new flows a second by VIP and DIP, and the muxes' ways out.

Keys: p, b and n sort by packets, bits and new flows; q quits. Without a
terminal, or with --once or -o json, one measurement over --interval is printed.`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, err := c.conn.client()
			if err != nil {
				return err
			}
			in, inOK := c.in.(*os.File)
			out, outOK := c.out.(*os.File)
			if once || format.set() || !inOK || !outOK || !term.IsTerminal(int(in.Fd())) || !term.IsTerminal(int(out.Fd())) {
				return c.topOnce(cmd.Context(), client, interval, format)
			}
			return topLive(cmd.Context(), client, interval, in, out)
		},
	}
	cmd.Flags().Var(&waitValue{&interval}, "interval", "time between measurements, 1ms..1h")
	cmd.Flags().BoolVar(&once, "once", false, "print one measurement and end")
	format.add(cmd, "json", "yaml")
	return cmd
}

// rate is what one VIP, or one DIP of it, gets a second.
type rate struct {
	Packets  float64 `json:"packets_per_second"`
	Bits     float64 `json:"bits_per_second"`
	NewFlows float64 `json:"new_flows_per_second"`
}

func (r *rate) add(o rate) {
	r.Packets += o.Packets
	r.Bits += o.Bits
	r.NewFlows += o.NewFlows
}

type dipRate struct {
	Address  string `json:"address"` // of the VIP
	Endpoint string `json:"endpoint"`
	DIP      string `json:"dip"`
	rate
}

type vipRate struct {
	VIP string `json:"vip"`
	rate
	DIPs []dipRate `json:"dips"`
}

type exitRate struct {
	Node    string  `json:"node"`
	Exit    string  `json:"exit"`
	Verdict string  `json:"verdict"` // sent, passed, answered, dropped or unknown ("")
	Packets float64 `json:"packets_per_second"`
	Total   uint64  `json:"packets"` // since the mux started
}

// rates are what happened between two answers of the manager.
type rates struct {
	At       time.Time  `json:"at"`
	Interval float64    `json:"interval_seconds"`
	Total    rate       `json:"total"`
	VIPs     []vipRate  `json:"vips"`
	Exits    []exitRate `json:"exits"`
}

// sortings are the keys of the live view, and what they sort by.
var sortings = map[byte]struct {
	name string
	of   func(rate) float64
}{
	'p': {"packets", func(r rate) float64 { return r.Packets }},
	'b': {"bits", func(r rate) float64 { return r.Bits }},
	'n': {"new flows", func(r rate) float64 { return r.NewFlows }},
}

// measure turns two answers into rates. A counter that shrank (a mux left, or
// restarted without its maps) counts as standing still.
func measure(before, after *quartetv1.TopResponse, sortBy byte) *rates {
	r := &rates{At: after.GetAt().AsTime(), Interval: after.GetAt().AsTime().Sub(before.GetAt().AsTime()).Seconds(), VIPs: []vipRate{}, Exits: []exitRate{}}
	perSecond := func(was, is uint64) float64 {
		if is <= was || r.Interval <= 0 {
			return 0
		}
		return float64(is-was) / r.Interval
	}
	type key struct{ vip, address, endpoint, dip string }
	keyOf := func(c *quartetv1.FlowCounters) key {
		return key{c.GetVip(), c.GetAddress(), c.GetEndpoint(), c.GetDip()}
	}
	was := map[key]*quartetv1.FlowCounters{}
	for _, c := range before.GetCounters() {
		was[keyOf(c)] = c
	}
	vips := map[string]*vipRate{}
	for _, c := range after.GetCounters() {
		w, known := was[keyOf(c)]
		if !known {
			w = &quartetv1.FlowCounters{}
		}
		d := dipRate{c.GetAddress(), c.GetEndpoint(), c.GetDip(), rate{
			perSecond(w.GetPackets(), c.GetPackets()), 8 * perSecond(w.GetBytes(), c.GetBytes()), perSecond(w.GetNewFlows(), c.GetNewFlows())}}
		v := vips[c.GetVip()]
		if v == nil {
			v = &vipRate{VIP: c.GetVip()}
			vips[c.GetVip()] = v
		}
		v.DIPs = append(v.DIPs, d)
		v.add(d.rate)
		r.Total.add(d.rate)
	}
	of := sortings[sortBy].of
	for _, name := range sortedKeys(vips) {
		v := vips[name]
		slices.SortFunc(v.DIPs, func(a, b dipRate) int {
			return cmp.Or(cmp.Compare(of(b.rate), of(a.rate)), cmp.Compare(a.Endpoint, b.Endpoint), cmp.Compare(a.Address, b.Address), cmp.Compare(a.DIP, b.DIP))
		})
		r.VIPs = append(r.VIPs, *v)
	}
	slices.SortStableFunc(r.VIPs, func(a, b vipRate) int { return cmp.Compare(of(b.rate), of(a.rate)) })

	exits := map[string]map[string]uint64{}
	for _, n := range before.GetNodes() {
		exits[n.GetNode()] = n.GetExits()
	}
	for _, n := range after.GetNodes() {
		if n.GetRole() != "mux" {
			continue
		}
		for _, exit := range sortedKeys(n.GetExits()) {
			if is := n.GetExits()[exit]; is > 0 {
				r.Exits = append(r.Exits, exitRate{n.GetNode(), exit, verdictOf(exit), perSecond(exits[n.GetNode()][exit], is), is})
			}
		}
	}
	slices.SortStableFunc(r.Exits, func(a, b exitRate) int {
		return cmp.Or(cmp.Compare(b.Packets, a.Packets), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Exit, b.Exit))
	})
	return r
}

// write prints the rates as text.
func (r *rates) write(w io.Writer) error {
	fmt.Fprintf(w, "%s packets/s   %s bit/s   %s new flows/s\n\n", si(r.Total.Packets), si(r.Total.Bits), si(r.Total.NewFlows))
	t := &table{}
	t.add("VIP", "ENDPOINT", "DIP", "PACKETS/S", "BITS/S", "NEW FLOWS/S")
	for _, v := range r.VIPs {
		t.rows = append(t.rows, []string{v.VIP, "", "", si(v.Packets), si(v.Bits), si(v.NewFlows)})
		for _, d := range v.DIPs {
			t.rows = append(t.rows, []string{"  " + d.Address, d.Endpoint, d.DIP, si(d.Packets), si(d.Bits), si(d.NewFlows)})
		}
	}
	if err := t.print(w); err != nil || len(r.Exits) == 0 {
		return err
	}
	fmt.Fprintln(w)
	t = &table{}
	t.add("MUX", "EXIT", "VERDICT", "PACKETS/S", "PACKETS")
	for _, e := range r.Exits {
		verdict := e.Verdict
		if verdict == "passed" {
			verdict = "passed to the kernel"
		}
		t.add(e.Node, e.Exit, verdict, si(e.Packets), fmt.Sprint(e.Total))
	}
	return t.print(w)
}

// verdictOf is what becomes of packets by a mux's exit, as
// docs/operate/troubleshooting.md has it; "" of an exit of some other version.
func verdictOf(exit string) string {
	switch exit {
	case "tx", "redirect":
		return "sent"
	case "no_vip", "not_ip":
		return "passed"
	case "echo_reply", "fragmentation_needed", "oversize", "time_exceeded":
		return "answered"
	case "answer_limited", "answer_forbidden", "truncated", "malformed", "no_endpoint", "no_dip", "unknown_fragment",
		"unsupported_protocol", "unsupported_icmp", "unrelated_icmp", "nested_tunnel", "tunnel_to_mux", "no_route",
		"no_neighbour", "forwarding_disabled", "no_headroom", "internal":
		return "dropped"
	}
	return ""
}

// si shortens a number to three digits and a decimal prefix.
func si(f float64) string {
	for _, p := range []struct {
		from   float64
		prefix string
	}{{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if f >= p.from*0.9995 {
			return fmt.Sprintf("%.3g%s", f/p.from, p.prefix)
		}
	}
	return fmt.Sprintf("%.3g", f)
}

// sampler asks the manager and keeps the last answer.
type sampler struct {
	client   quartetv1connect.OperatorServiceClient
	interval time.Duration
	last     *quartetv1.TopResponse
}

// next waits until interval after the last answer, or for a key, and asks. A
// nil answer means that a key came.
func (s *sampler) next(ctx context.Context, keys <-chan byte) (*quartetv1.TopResponse, byte, error) {
	if s.last != nil {
		select {
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		case key := <-keys:
			return nil, key, nil
		case <-time.After(s.interval):
		}
	}
	r, err := s.client.Top(ctx, &quartetv1.TopRequest{})
	return r, 0, err
}

func (c *cli) topOnce(ctx context.Context, client quartetv1connect.OperatorServiceClient, interval time.Duration, format output) error {
	s := sampler{client: client, interval: interval}
	first, _, err := s.next(ctx, nil)
	if err != nil {
		return err
	}
	s.last = first
	second, _, err := s.next(ctx, nil)
	if err != nil {
		return err
	}
	r := measure(first, second, 'p')
	if format.set() {
		return format.printJSON(c.out, r)
	}
	return r.write(c.out)
}

// Terminal control, ECMA-48 and xterm's alternate screen.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	home        = "\x1b[H"
	endLine     = "\x1b[K\r\n"
	clearBelow  = "\x1b[J"
)

func topLive(ctx context.Context, client quartetv1connect.OperatorServiceClient, interval time.Duration, in, out *os.File) error {
	s := sampler{client: client, interval: interval}
	first, _, err := s.next(ctx, nil) // a manager out of reach is told on the normal screen
	if err != nil {
		return err
	}
	s.last = first
	state, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return fmt.Errorf("set terminal: %w", err)
	}
	defer term.Restore(int(in.Fd()), state) //nolint:errcheck // nothing is left to do
	fmt.Fprint(out, enterScreen)
	defer fmt.Fprint(out, leaveScreen)

	keys := make(chan byte)
	go func() { // ends with the process
		b := make([]byte, 1)
		for {
			if n, err := in.Read(b); err != nil || n == 0 {
				b[0] = 'q'
			}
			select {
			case keys <- b[0]:
			case <-ctx.Done():
				return
			}
			if b[0] == 'q' {
				return
			}
		}
	}()

	const ctrlC = 3
	before, sortBy, trouble := first, byte('p'), ""
	after := first
	for {
		r := measure(before, after, sortBy)
		var body bytes.Buffer
		if err := r.write(&body); err != nil {
			return err
		}
		status := trouble
		if status == "" {
			status = fmt.Sprintf("quartet top  %s  by %s (p b n), q quits", after.GetAt().AsTime().Local().Format(time.TimeOnly), sortings[sortBy].name)
		}
		width, height, err := term.GetSize(int(out.Fd()))
		if err != nil {
			width, height = 80, 24
		}
		if _, err := io.WriteString(out, frame(status+"\n"+body.String(), width, height)); err != nil {
			return err
		}
		answer, key, err := s.next(ctx, keys)
		switch {
		case ctx.Err() != nil || key == 'q' || key == ctrlC:
			return nil
		case sortings[key].of != nil:
			sortBy = key
		case err != nil:
			trouble = strings.ReplaceAll(err.Error(), "\n", " ")
		case answer != nil:
			before, after, trouble = after, answer, ""
		}
	}
}

// frame cuts a text to the screen and draws it over what is there.
func frame(text string, width, height int) string {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if len(lines) >= height { // the last line stays empty, or the screen would scroll
		lines = lines[:max(height-1, 0)]
	}
	var b strings.Builder
	b.WriteString(home)
	for _, l := range lines {
		if r := []rune(l); len(r) > width {
			l = string(r[:max(width, 0)])
		}
		b.WriteString(l + endLine)
	}
	b.WriteString(clearBelow)
	return b.String()
}
