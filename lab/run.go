package lab

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/lab/fabric"
	"github.com/quartet-lb/quartet/lab/scenario"
	"github.com/quartet-lb/quartet/lab/traffic"
	"github.com/quartet-lb/quartet/manager/object"
)

// RunOptions say how a scenario runs.
type RunOptions struct {
	// Short takes the parameters' short sizes.
	Short bool
	// Params override parameters.
	Params map[string]string
	// Program is how the user calls quartet, for what a scenario says; ""
	// means "quartet".
	Program string
	// Out gets the transcript.
	Out io.Writer
}

// Result is what a scenario measured, in the form that all measuring commands
// of Quartet print.
type Result struct {
	Name       string             `json:"name"`
	Version    string             `json:"version"`
	Seed       uint64             `json:"seed"` // always 0: a scenario draws nothing at random, and the kernel picks ports
	Parameters map[string]any     `json:"parameters"`
	Figures    map[string]float64 `json:"figures"`
	Paper      map[string]float64 `json:"paper"`
	Spread     map[string]Spread  `json:"spread"` // of figures that are a median

	// Plots are what the scenario asked to have drawn.
	Plots []Plot `json:"-"`
}

// Spread is the smallest and the largest of the values behind a figure.
type Spread struct {
	Min float64 `json:"min"`
	Max float64 `json:"max"`
}

// Plot is one bar chart.
type Plot struct {
	Title  string
	Labels []string
	Values []float64
}

// runner is one run of one scenario.
type runner struct {
	lab    *Lab
	ctx    context.Context
	script *scenario.Scenario
	RunOptions
	progress
	result Result
	values map[string]value          // remembered
	loads  map[string]traffic.Report // that have ended
	under  map[string]*background    // that run
	vars   map[string]string         // what {name} stands for
	undo   map[string]func() error   // by what was done; each puts one thing back
	order  []string                  // of undo
	vips   map[string]bool           // applied and not deleted
	pools  map[string]bool           // the same of VipPools
	// Of each load: the muxes' new flows when it began, the client, and
	// whether it uses IPv6.
	before map[string]map[string]float64
	from   map[string]string
	six    map[string]bool
}

type background struct {
	cmd *exec.Cmd
	out *bytes.Buffer
	err *bytes.Buffer
	end chan error
}

// value is a number or a word.
type value struct {
	number float64
	word   string
}

func (v value) String() string {
	if v.word != "" {
		return v.word
	}
	return strconv.FormatFloat(v.number, 'f', -1, 64)
}

// rounded has three significant digits, and all of an integer's.
func (v value) rounded() string {
	if v.word != "" || v.number == math.Trunc(v.number) {
		return v.String()
	}
	if math.Abs(v.number) >= 100 {
		return strconv.FormatFloat(v.number, 'f', 0, 64)
	}
	return strconv.FormatFloat(v.number, 'g', 3, 64)
}

// Run carries a scenario out on the lab and then puts the lab back as it was,
// also if a step fails. The error says which line it was.
func (l *Lab) Run(ctx context.Context, s *scenario.Scenario, o RunOptions) (Result, error) {
	r := &runner{
		lab: l, ctx: ctx, script: s, RunOptions: o,
		progress: progress{o.Out, time.Now()},
		values:   map[string]value{}, loads: map[string]traffic.Report{}, under: map[string]*background{},
		vars: map[string]string{}, undo: map[string]func() error{}, vips: map[string]bool{}, pools: map[string]bool{},
		before: map[string]map[string]float64{}, from: map[string]string{}, six: map[string]bool{},
		result: Result{
			Name: s.Name, Version: l.version(), Parameters: map[string]any{"size": l.Size, "mtu": l.MTU},
			Figures: map[string]float64{}, Paper: map[string]float64{}, Spread: map[string]Spread{},
		},
	}
	if l.FabricOnly {
		return r.result, fmt.Errorf("run %s: lab %s has a fabric only: raise it without --fabric-only", s.Name, l.Name)
	}
	if err := r.bind(); err != nil {
		return r.result, fmt.Errorf("run %s: %w", s.Name, err)
	}
	if err := l.answers(ctx, cmp.Or(o.Program, "quartet")); err != nil {
		return r.result, fmt.Errorf("run %s: %w", s.Name, err)
	}
	if err := r.checkObjects(ctx); err != nil {
		return r.result, fmt.Errorf("run %s: %w", s.Name, err)
	}
	err := r.settled(ctx)
	if err != nil {
		err = fmt.Errorf("the lab is not in order to begin with: %w", err)
	}
	for _, step := range s.Steps {
		if err != nil {
			break
		}
		if err = r.step(step); err != nil {
			err = r.at(step, err)
		}
	}
	interrupted := ctx.Err() != nil && err != nil
	if err != nil && !interrupted {
		fmt.Fprint(r.Out, l.Diagnose(ctx))
	}
	// Putting back must happen even if ctx has ended.
	back, cancel := context.WithTimeout(context.WithoutCancel(ctx), 60*time.Second)
	defer cancel()
	undone := r.restore(back)
	switch {
	case undone == nil && interrupted:
		err = errors.New("interrupted; the lab is put back as it was")
		fmt.Fprintln(r.Out, err)
		return r.result, err
	case interrupted:
		err = errors.New("interrupted")
	}
	if err = errors.Join(err, undone); err != nil {
		fmt.Fprintf(r.Out, "failed: %s\n", daemon.OneLine(err))
		return r.result, err
	}
	r.say("passed after %.1f s", time.Since(r.start).Seconds())
	return r.result, nil
}

// placeholder is what stands for a node's address.
var placeholder = regexp.MustCompile(`\{((?:core|agg|tor|mux|host|vm|client|manager)[-0-9]*(?:\.6|\.host)?)\}`)

// bind gives names their meaning: parameters and the nodes' addresses.
func (r *runner) bind() error {
	for _, n := range r.lab.Topology.Nodes {
		r.vars[n.Name] = n.Addr4.String()
		r.vars[n.Name+".6"] = n.Addr6.String()
		if n.Up != nil && n.Role == VM {
			r.vars[n.Name+".host"] = n.Up.Addr4.String()
		}
	}
	r.vars["lab"] = Command(cmp.Or(r.Program, "quartet"), r.lab.Name)
	known := map[string]bool{}
	for _, p := range r.script.Params {
		v := p.Full
		if r.Short {
			v = p.Short
		}
		if override, ok := r.Params[p.Name]; ok {
			v = override
		}
		known[p.Name] = true
		r.vars[p.Name] = v
		r.result.Parameters[p.Name] = v
		if f, err := strconv.ParseFloat(v, 64); err == nil {
			r.result.Parameters[p.Name] = f
			r.values[p.Name] = value{number: f}
		}
	}
	for _, step := range r.script.Steps {
		for _, text := range append(step.Args, step.Body) {
			for _, m := range placeholder.FindAllStringSubmatch(text, -1) {
				if _, ok := r.vars[m[1]]; !ok {
					return fmt.Errorf("%s.txt:%d: {%s}: this lab has no such node: raise one of the size that the scenario draws", r.script.Name, step.Line, m[1])
				}
			}
		}
	}
	for name := range r.Params {
		if !known[name] {
			return fmt.Errorf("%s has no parameter %q", r.script.Name, name)
		}
	}
	return r.checkNodes()
}

// fill puts meanings in place of {name}s.
func (r *runner) fill(text string) string {
	var b strings.Builder
	for {
		before, rest, found := strings.Cut(text, "{")
		b.WriteString(before)
		if !found {
			return b.String()
		}
		name, after, closed := strings.Cut(rest, "}")
		v, known := r.vars[name]
		if !closed || !known {
			// YAML has braces of its own.
			b.WriteString("{")
			text = rest
			continue
		}
		b.WriteString(v)
		text = after
	}
}

func (r *runner) step(s scenario.Step) error {
	if err := r.ctx.Err(); err != nil {
		return errors.New("interrupted")
	}
	args := make([]string, len(s.Args))
	for i, a := range s.Args {
		args[i] = r.fill(a)
	}
	if s.Verb != "say" && s.Verb != "draw" && s.Verb != "show" && s.Verb != "paper" && s.Verb != "plot" && s.Verb != "remember" {
		r.say("%s", r.fill(s.Text))
	}
	switch s.Verb {
	case "say":
		fmt.Fprintf(r.Out, "\n%s\n", wrap(strings.ReplaceAll(args[0], `\n`, "\n"), 100))
		return nil
	case "draw":
		fmt.Fprintf(r.Out, "\n%s\n", r.script.About)
		return nil
	case "show":
		return r.show(args[0])
	case "apply":
		return r.apply(s.Body)
	case "delete":
		return r.deleteVIP(args[0])
	case "drain":
		return r.drain(args[0], false)
	case "undrain":
		return r.undone("drain " + args[0])
	case "connect":
		if err := r.begin(args, s.Options); err != nil {
			return err
		}
		return r.finish(args[0], false)
	case "start":
		return r.begin(args, s.Options)
	case "stop":
		return r.finish(args[0], true)
	case "join":
		return r.finish(args[0], false)
	case "ping":
		return r.ping(args[0], args[1], args[2] == "answered")
	case "kill":
		return r.end(args[0], syscall.SIGKILL)
	case "terminate":
		return r.end(args[0], syscall.SIGTERM)
	case "launch":
		return r.launch(args[0])
	case "silence":
		return r.links(args[0], "silence", (*fabric.Node).Mute, (*fabric.Node).Unmute)
	case "unsilence":
		return r.undone("silence " + args[0])
	case "unplug":
		return r.links(args[0], "unplug", (*fabric.Node).SetDown, (*fabric.Node).SetUp)
	case "plug":
		return r.undone("unplug " + args[0])
	case "cut":
		return r.cut(args[0], args[1])
	case "mend":
		return r.undone("cut " + args[0] + " " + args[1])
	case "mtu":
		return r.mtu(args[0], args[1], args[2])
	case "ignore-mss":
		net, err := r.lab.Net(args[0])
		if err != nil {
			return err
		}
		r.later("ignore-mss "+args[0], func() error { return errors.Join(net.HeedMSS(), r.forgetPaths()) })
		return net.IgnoreMSS(r.lab.MTU)
	case "bfd":
		return r.bfd(args[0])
	case "configure":
		return r.configure(args[0], s.Options)
	case "expect":
		return r.expect(s.Condition)
	case "wait":
		err := poll(r.ctx, s.Limit, func() error { return r.expect(s.Condition) })
		if err == nil {
			r.say("  it is so")
		}
		return err
	case "pause":
		d, err := time.ParseDuration(args[0])
		if err != nil || d <= 0 {
			return fmt.Errorf("%q is not a duration such as 2s", args[0])
		}
		select {
		case <-time.After(d):
			return nil
		case <-r.ctx.Done():
			return errors.New("interrupted")
		}
	case "spread":
		low, err := r.sum(s.Condition.Left)
		if err != nil {
			return err
		}
		high, err := r.sum(s.Condition.Right)
		if err != nil {
			return err
		}
		if low.word+high.word != "" {
			return fmt.Errorf("%s and %s are not two numbers", low, high)
		}
		r.result.Spread[args[0]] = Spread{low.number, high.number}
		return nil
	case "remember", "report":
		v, err := r.sum(s.Value)
		if err != nil {
			return err
		}
		switch {
		case s.Verb == "remember":
			r.values[args[0]] = v
		case v.word != "":
			return fmt.Errorf("%q is not a number", v.word)
		default:
			r.result.Figures[args[0]] = v.number
			r.say("  %s = %s", args[0], v.rounded())
		}
		return nil
	case "paper":
		v, err := strconv.ParseFloat(args[1], 64)
		r.result.Paper[args[0]] = v
		return err
	case "plot":
		return r.plot(args[0], args[1], strings.Join(args[2:], " "))
	}
	return fmt.Errorf("%s has no meaning yet", s.Verb)
}

// wrap breaks lines between words; lines that are indented stay as they are.
func wrap(text string, width int) string {
	var out []string
	for _, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(line, " ") {
			out = append(out, line)
			continue
		}
		current := ""
		for _, word := range strings.Fields(line) {
			if current != "" && len(current)+1+len(word) > width {
				out = append(out, current)
				current = ""
			}
			if current != "" {
				current += " "
			}
			current += word
		}
		out = append(out, current)
	}
	return strings.Join(out, "\n")
}

// later remembers how to put something back; the first way counts.
func (r *runner) later(what string, undo func() error) {
	if r.undo[what] == nil {
		r.undo[what] = undo
		r.order = append(r.order, what)
	}
}

// undone puts something back.
func (r *runner) undone(what string) error {
	undo := r.undo[what]
	if undo == nil {
		return fmt.Errorf("nothing to undo: %q was not done", what)
	}
	delete(r.undo, what)
	r.order = slices.DeleteFunc(r.order, func(s string) bool { return s == what })
	return undo()
}

// restore puts everything back, last first.
func (r *runner) restore(ctx context.Context) error {
	var errs []error
	for name, b := range r.under {
		if err := b.cmd.Process.Kill(); !errors.Is(err, os.ErrProcessDone) {
			errs = append(errs, err)
		}
		if <-b.end == nil {
			r.say("load %s had ended", name)
		}
		delete(r.under, name)
	}
	r.ctx = ctx
	for _, what := range slices.Backward(slices.Clone(r.order)) {
		if err := r.undone(what); err != nil {
			errs = append(errs, fmt.Errorf("undo %s: %w", what, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("put the lab back: %w", err)
	}
	for _, n := range r.lab.Topology.Nodes {
		if n.Role == Manager {
			if err := r.lab.nodeReady(ctx, n, 30*time.Second); err != nil {
				return fmt.Errorf("put the lab back: %w", err)
			}
		}
	}
	if len(r.vips)+len(r.pools) > 0 {
		api, err := r.lab.client()
		if err != nil {
			return fmt.Errorf("put the lab back: %w", err)
		}
		var refs []*quartetv1.ObjectRef
		for _, name := range sortedKeys(r.vips) {
			refs = append(refs, &quartetv1.ObjectRef{Kind: object.KindVip, Name: name})
		}
		for _, name := range sortedKeys(r.pools) {
			refs = append(refs, &quartetv1.ObjectRef{Kind: object.KindVipPool, Name: name})
		}
		if _, err := api.Delete(ctx, &quartetv1.DeleteRequest{Objects: refs}); err != nil {
			return fmt.Errorf("put the lab back: %w", err)
		}
	}
	if err := r.settled(ctx); err != nil {
		return fmt.Errorf("put the lab back: %w", err)
	}
	return nil
}

// settled waits until everything is as after `lab up`.
func (r *runner) settled(ctx context.Context) error { return r.lab.ready(ctx, 30*time.Second) }

// show runs the quartet command as an operator would.
func (r *runner) show(line string) error {
	line = r.fill(line)
	fmt.Fprintf(r.Out, "\n$ quartet %s\n", line)
	return r.lab.Exec("manager", append([]string{"quartet"}, strings.Fields(line)...), func(c *exec.Cmd) {
		c.Stdout, c.Stderr = r.Out, r.Out
	})
}

func (r *runner) apply(body string) error {
	docs, err := object.Read([]byte(r.fill(body)))
	if err != nil {
		return err
	}
	api, err := r.lab.client()
	if err != nil {
		return err
	}
	answer, err := api.Apply(r.ctx, &quartetv1.ApplyRequest{Objects: docs})
	if err != nil {
		return err
	}
	for _, c := range answer.GetChanges() {
		switch c.GetKind() {
		case object.KindVip:
			r.vips[c.GetName()] = true
		case object.KindVipPool:
			r.pools[c.GetName()] = true
		}
	}
	ro := answer.GetRollout()
	r.say("  generation %d runs on %d of %d muxes after %.1f ms, on %d of %d hosts after %.1f ms", ro.GetGeneration(),
		ro.GetMuxesAcked(), ro.GetMuxes(), ro.GetMuxesElapsedMs(), ro.GetHostsAcked(), ro.GetHosts(), ro.GetElapsedMs())
	r.values["muxes_elapsed_ms"] = value{number: ro.GetMuxesElapsedMs()}
	if len(ro.GetWaiting()) > 0 {
		r.say("  still waiting for %s", strings.Join(ro.GetWaiting(), ", "))
	}
	return nil
}

func (r *runner) deleteVIP(name string) error {
	api, err := r.lab.client()
	if err != nil {
		return err
	}
	_, err = api.Delete(r.ctx, &quartetv1.DeleteRequest{Objects: []*quartetv1.ObjectRef{{Kind: "Vip", Name: name}}})
	if err == nil {
		delete(r.vips, name)
	}
	return err
}

func (r *runner) drain(node string, undo bool) error {
	n, ok := r.lab.Topology.Node(node)
	if !ok {
		return fmt.Errorf("there is no node %q", node)
	}
	requests := []*quartetv1.DrainRequest{{Kind: "mux", Name: node, Undo: undo}}
	if n.Role != Mux {
		requests = []*quartetv1.DrainRequest{{Kind: "dip", Name: n.Addr4.String(), Undo: undo}}
	}
	api, err := r.lab.client()
	if err != nil {
		return err
	}
	for _, q := range requests {
		if _, err := api.Drain(r.ctx, q); err != nil {
			return err
		}
	}
	if !undo {
		r.later("drain "+node, func() error { return r.drain(node, true) })
	}
	return nil
}

// load reads the options of connect and start.
func (r *runner) load(args []string, options map[string]string) []string {
	flags := []string{"--target", args[4]}
	defaults := map[string]string{"mode": "short", "parallel": "1", "timeout": "5s"}
	for key, v := range options {
		defaults[key] = r.fill(v)
	}
	for _, key := range sortedKeys(defaults) {
		flags = append(flags, "--"+key, defaults[key])
	}
	return flags
}

func (r *runner) begin(args []string, options map[string]string) error {
	name := args[0]
	if r.under[name] != nil {
		return fmt.Errorf("load %s runs already", name)
	}
	net, err := r.lab.Net(args[2])
	if err != nil {
		return err
	}
	flags := r.load(args, options)
	if n, _ := r.lab.Topology.Node(args[2]); n.Role == Client && options["sources"] == "" {
		v4, v6 := ClientPrefixes(n.Index)
		sources := v4
		if strings.HasPrefix(args[4], "[") {
			sources = v6
		}
		flags = append(flags, "--sources", sources.String())
	}
	r.from[name], r.six[name], r.before[name] = args[2], strings.HasPrefix(args[4], "["), map[string]float64{}
	for _, m := range r.lab.Topology.Role(Mux) {
		// A dead mux has begun no flows that matter.
		if f, err := r.lab.metric(r.ctx, m.Name, "quartet_mux_new_flows_total", nil); err == nil {
			r.before[name][m.Name] = f
		}
	}
	c := fabric.Command{Args: append([]string{filepath.Join(r.lab.Binaries, "quartet"), "lab", "load"}, flags...)}
	b := &background{cmd: c.Exec(), out: &bytes.Buffer{}, err: &bytes.Buffer{}, end: make(chan error, 1)}
	b.cmd.Stdout, b.cmd.Stderr = b.out, b.err
	// Ctrl-C is for the runner, which ends the load itself.
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := net.StartIn(b.cmd); err != nil {
		return fmt.Errorf("start load: %w", err)
	}
	go func() { b.end <- b.cmd.Wait() }()
	r.under[name] = b
	return nil
}

// finish takes a load's report, telling it to end first if stop is set.
func (r *runner) finish(name string, stop bool) error {
	b := r.under[name]
	if b == nil {
		return fmt.Errorf("there is no load %s under way", name)
	}
	if stop {
		// One that has ended by itself has its report ready.
		if err := b.cmd.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	}
	var err error
	select {
	case err = <-b.end:
	case <-r.ctx.Done():
		return errors.New("interrupted")
	}
	delete(r.under, name)
	if err != nil {
		return fmt.Errorf("load %s: %w: %s", name, err, strings.TrimSpace(b.err.String()))
	}
	var report traffic.Report
	if err := json.Unmarshal(b.out.Bytes(), &report); err != nil {
		return fmt.Errorf("load %s: read its report: %w", name, err)
	}
	r.loads[name] = report
	r.say("  %s", Summary(report))
	return nil
}

// Summary is a report in one line.
func Summary(t traffic.Report) string {
	var parts []string
	add := func(n int, what string) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, what))
		}
	}
	parts = append(parts, fmt.Sprintf("%d answers in %.1f s", t.Requests, t.Seconds), fmt.Sprintf("%d errors", t.Errors))
	add(t.Retries, "retries")
	add(t.Broken, "broken connections")
	add(t.Wrong, "false checksums")
	add(t.Moved, "flows answered by another server")
	if t.Sent > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d datagrams lost", t.Lost, t.Sent))
	}
	if t.Bytes > 0 {
		parts = append(parts, fmt.Sprintf("%.0f MB (%.2f Gbit/s)", float64(t.Bytes)/1e6, float64(t.Bytes)*8e-9/t.Seconds))
	}
	if t.Affected > 0 {
		parts = append(parts, fmt.Sprintf("%d clients affected, longest gap %.0f ms", t.Affected, t.MaxGapMs))
	}
	if t.FirstError != "" {
		parts = append(parts, "first: "+t.FirstError)
	}
	if n := len(t.Servers); n > 0 {
		counts := slices.Collect(maps.Values(t.Servers))
		parts = append(parts, fmt.Sprintf("%d servers with %d to %d each", n, slices.Min(counts), slices.Max(counts)))
	}
	return strings.Join(parts, ", ")
}

func (r *runner) ping(client, address string, answered bool) error {
	net, err := r.lab.Net(client)
	if err != nil {
		return err
	}
	var ok bool
	if err := net.Do(func() (err error) {
		ok, err = traffic.Ping(address, 2, 500*time.Millisecond)
		return err
	}); err != nil {
		return err
	}
	if ok != answered {
		return fmt.Errorf("answered: %v", ok)
	}
	return nil
}

func (r *runner) node(name string) (*Node, error) {
	n, ok := r.lab.Topology.Node(name)
	if !ok {
		return nil, fmt.Errorf("there is no node %q", name)
	}
	return n, nil
}

func (r *runner) end(name string, signal syscall.Signal) error {
	n, err := r.node(name)
	if err != nil {
		return err
	}
	daemon := r.lab.daemon(n)
	if daemon == "" {
		return fmt.Errorf("%s runs no daemon", name)
	}
	p := r.lab.process(name, daemon)
	if !p.Alive() {
		return fmt.Errorf("%s of %s does not run", daemon, name)
	}
	r.later("end "+name, func() error { return r.lab.start(r.ctx, n) })
	if err := p.Signal(signal); err != nil {
		return err
	}
	return p.WaitGone(30 * time.Second)
}

func (r *runner) launch(name string) error {
	n, err := r.node(name)
	if err != nil {
		return err
	}
	if err := r.undone("end " + name); err != nil {
		return err
	}
	return r.lab.nodeReady(r.ctx, n, 30*time.Second)
}

// links does something to the far end of each of a node's links to the fabric,
// a VM's to its host.
func (r *runner) links(name, what string, do, undo func(*fabric.Node, string) error) error {
	n, err := r.node(name)
	if err != nil {
		return err
	}
	each := func(f func(*fabric.Node, string) error) error {
		var errs []error
		for i, link := range n.Links {
			peer, _, far, _, _, _ := link.Far(n)
			// A server's first link is its uplink; behind the rest are its VMs.
			if !n.Role.Switch() && i > 0 {
				break
			}
			net, err := r.lab.Net(peer.Name)
			if err == nil {
				err = f(net, far)
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	}
	r.later(what+" "+name, func() error { return each(undo) })
	return each(do)
}

// cut drops a mux's tunnel packets to a host at the host's ToR: at the host
// itself, XDP comes before any filter.
func (r *runner) cut(mux, host string) error {
	from, err := r.node(mux)
	if err != nil {
		return err
	}
	to, err := r.node(host)
	if err != nil {
		return err
	}
	if from.Role != Mux || to.Role != Host {
		return fmt.Errorf("%s and %s are not a mux and a host", mux, host)
	}
	tor, err := r.lab.Net(to.Up.Name)
	if err != nil {
		return err
	}
	link := to.Uplink().AName
	r.later("cut "+mux+" "+host, func() error { return tor.Mend(from.Addr4, link) })
	return tor.Cut(from.Addr4, from.Addr6, link)
}

// between finds the link of two nodes as a sees it.
func (l *Lab) between(a, b string) (*Link, *Node, *Node, error) {
	n, ok := l.Topology.Node(a)
	if !ok {
		return nil, nil, nil, fmt.Errorf("there is no node %q", a)
	}
	for _, link := range n.Links {
		if peer, _, _, _, _, _ := link.Far(n); peer.Name == b {
			return link, n, peer, nil
		}
	}
	return nil, nil, nil, fmt.Errorf("there is no link between %s and %s", a, b)
}

// mtu narrows a's end of a link only: b would otherwise ask for segments that
// fit, and no router would have anything to say.
func (r *runner) mtu(a, b, bytes string) error {
	size, err := strconv.Atoi(bytes)
	if err != nil || size < 1280 || size > 9000 {
		return fmt.Errorf("%q is not an MTU: 1280 to 9000", bytes)
	}
	link, _, _, err := r.lab.between(a, b)
	if err != nil {
		return err
	}
	net, err := r.lab.Net(a)
	if err != nil {
		return err
	}
	near := link.AName
	if link.B.Name == a {
		near = link.BName
	}
	r.later(fmt.Sprintf("mtu %s %s", a, b), func() error {
		return errors.Join(net.SetMTU(near, r.lab.MTU), r.forgetPaths())
	})
	return net.SetMTU(near, size)
}

// forgetPaths has servers and clients forget the path MTUs that routers told
// them, which they would keep for ten minutes.
func (r *runner) forgetPaths() error {
	for _, n := range r.lab.Topology.Nodes {
		if n.Role != Host && n.Role != VM && n.Role != Client {
			continue
		}
		net, err := r.lab.Net(n.Name)
		if err != nil {
			return err
		}
		for _, family := range []string{"-4", "-6"} {
			if out, err := net.Run(fabric.Command{Args: []string{"ip", family, "route", "flush", "cache"}}); err != nil {
				return fmt.Errorf("flush the route cache of %s: %w: %s", n.Name, err, out)
			}
		}
	}
	return nil
}

// bfd changes the interval that the ToRs ask the muxes for.
func (r *runner) bfd(interval string) error {
	var d Duration
	if err := d.Set(interval); err != nil || d < Duration(time.Millisecond) {
		return fmt.Errorf("%q is not an interval such as 5ms", interval)
	}
	old := r.lab.MuxBFD
	set := func(d Duration) error {
		r.lab.MuxBFD = d
		for _, n := range r.lab.Topology.Role(ToR) {
			if err := r.lab.writeRouterConfig(n); err != nil {
				return err
			}
			if _, err := fabric.Bird(fabric.BirdSocket(r.lab.nodeDir(n.Name)), "configure soft"); err != nil {
				return fmt.Errorf("%s: %w", n.Name, err)
			}
		}
		return nil
	}
	r.later("bfd", func() error { return set(old) })
	return set(d)
}

// configure changes a VIP's first weight to and fro and takes the time until
// all muxes run it, by the manager's clock.
func (r *runner) configure(label string, options map[string]string) error {
	options = maps.Clone(options)
	for k, v := range options {
		options[k] = r.fill(v)
	}
	changes, err := strconv.Atoi(options["changes"])
	if err != nil || changes < 1 {
		return fmt.Errorf("changes: %q is not a number from 1", options["changes"])
	}
	answer, err := r.lab.list(r.ctx, "Vip")
	if err != nil {
		return err
	}
	at := slices.IndexFunc(answer.GetVips(), func(v *quartetv1.VipStatus) bool { return v.GetVip().GetName() == options["vip"] })
	if at < 0 {
		return fmt.Errorf("vip: there is no Vip %q", options["vip"])
	}
	vip := answer.GetVips()[at].GetVip()
	api, err := r.lab.client()
	if err != nil {
		return err
	}
	var muxes, all []float64
	for i := range changes {
		weight := uint32(1 + i%2)
		vip.Endpoints[0].Backends[0].Weight = &weight
		doc, err := toStruct(vip)
		if err != nil {
			return err
		}
		a, err := api.Apply(r.ctx, &quartetv1.ApplyRequest{Objects: doc})
		if err != nil {
			return err
		}
		ro := a.GetRollout()
		if ro.GetMuxes() == 0 || ro.GetMuxesAcked() < ro.GetMuxes() || ro.GetHostsAcked() < ro.GetHosts() {
			return fmt.Errorf("change %d: %d of %d muxes and %d of %d hosts run it; missing %v", i+1,
				ro.GetMuxesAcked(), ro.GetMuxes(), ro.GetHostsAcked(), ro.GetHosts(), ro.GetWaiting())
		}
		if a.GetChanges()[0].GetAction() == "unchanged" {
			continue
		}
		muxes = append(muxes, ro.GetMuxesElapsedMs())
		all = append(all, ro.GetElapsedMs())
	}
	slices.Sort(muxes)
	slices.Sort(all)
	for name, v := range map[string]float64{
		"median_ms": muxes[len(muxes)/2], "min_ms": muxes[0], "p10_ms": muxes[len(muxes)/10], "p90_ms": muxes[len(muxes)*9/10],
		"max_ms": muxes[len(muxes)-1], "hosts_median_ms": all[len(all)/2], "changes": float64(len(muxes)),
	} {
		r.values[label+"."+name] = value{number: v}
	}
	r.say("  %d changes: %.2f ms in the median until all muxes run it, %.2f ms for 90 %%", len(muxes),
		muxes[len(muxes)/2], muxes[len(muxes)*9/10])
	return nil
}

func (r *runner) expect(c scenario.Condition) error {
	left, err := r.sum(c.Left)
	if err != nil {
		return err
	}
	right, err := r.sum(c.Right)
	if err != nil {
		return err
	}
	var ok bool
	if left.word != "" || right.word != "" {
		switch c.Op {
		case "==":
			ok = left == right
		case "!=":
			ok = left != right
		default:
			return fmt.Errorf("%s and %s can't be ordered", left, right)
		}
	} else {
		ok = map[string]bool{
			"==": left.number == right.number, "!=": left.number != right.number,
			"<": left.number < right.number, "<=": left.number <= right.number,
			">": left.number > right.number, ">=": left.number >= right.number,
		}[c.Op]
	}
	if !ok {
		is, wanted := left.rounded(), right.rounded()
		if is == wanted {
			is, wanted = left.String(), right.String()
		}
		return fmt.Errorf("%s is %s, and %s %s is wanted", r.fill(c.Left.String()), is, c.Op, wanted)
	}
	return nil
}

func (r *runner) sum(s scenario.Sum) (value, error) {
	var total value
	for i, t := range s {
		v, err := r.term(t)
		if err != nil {
			return v, err
		}
		if v.word != "" {
			if len(s) > 1 {
				return v, fmt.Errorf("%q is not a number", v.word)
			}
			return v, nil
		}
		if t.Minus {
			v.number = -v.number
		}
		if i == 0 {
			total = v
		} else {
			total.number += v.number
		}
	}
	return total, nil
}

func (r *runner) term(t scenario.Term) (value, error) {
	if t.Call {
		args := make([]string, len(t.Args))
		for i, a := range t.Args {
			args[i] = r.fill(a)
		}
		return r.observe(t.Name, args)
	}
	name := r.fill(t.Name)
	if f, err := strconv.ParseFloat(name, 64); err == nil {
		return value{number: f}, nil
	}
	if v, ok := r.values[name]; ok {
		return v, nil
	}
	load, figure, dotted := strings.Cut(name, ".")
	if report, ok := r.loads[load]; ok && dotted {
		return figureOf(report, figure)
	}
	if dotted {
		return value{}, fmt.Errorf("%s: nothing of that name has ended or was remembered", name)
	}
	return value{word: name}, nil
}

// figureOf finds a report's figure by its JSON name; "servers.<name>" is one
// server's answers.
func figureOf(report traffic.Report, figure string) (value, error) {
	if server, ok := strings.CutPrefix(figure, "servers."); ok {
		return value{number: float64(report.Servers[server])}, nil
	}
	text, err := json.Marshal(report)
	if err != nil {
		return value{}, err
	}
	var all map[string]any
	if err := json.Unmarshal(text, &all); err != nil {
		return value{}, err
	}
	f, ok := all[figure].(float64)
	if !ok {
		return value{}, fmt.Errorf("a load has no figure %q", figure)
	}
	return value{number: f}, nil
}
