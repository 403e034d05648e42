// Package scenario reads the lab's scenario files: a picture of what is there,
// then steps and what must be observed, one a line.
//
// A file begins with comments that say and draw what it is about. Then each
// line is a verb and its arguments; "key=value" arguments may come in any
// order; {name} stands for a parameter or for a node's address, {lab} for
// the command that speaks to this lab; indented lines
// belong to the step above them.
package scenario

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Scenario is one file.
type Scenario struct {
	Name string
	// About is the comment at the file's head, without the comment signs.
	About  string
	Params []Param
	Steps  []Step
}

// Param is a quantity that a scenario has in two sizes.
type Param struct {
	Name        string
	Full, Short string
}

// Step is one line.
type Step struct {
	Line    int
	Verb    string
	Args    []string
	Options map[string]string
	Body    string // the indented lines below it, unindented
	Text    string // the line as it stands

	Limit     time.Duration // wait: at most
	Condition Condition     // wait and expect; spread: from Left to Right
	Value     Sum           // report and remember: what
}

// Condition compares two observed values.
type Condition struct {
	Left, Right Sum
	Op          string // one of Ops
}

// Ops are the comparisons.
var Ops = []string{"==", "!=", "<=", ">=", "<", ">"}

// Sum is one or more terms. A sum of one term may be a word instead of a number.
type Sum []Term

// Term is a number, a word, a load's figure ("load.errors") or an observation
// of the lab ("hops(core1,203.0.113.0/24)").
type Term struct {
	Minus bool
	Name  string
	Args  []string // of an observation; nil for the rest
	Call  bool
}

// verb says what a step looks like.
type verb struct {
	usage    string
	min, max int // positional arguments; max -1: any number
	options  []string
	body     bool
	free     bool // the rest of the line is text
}

var traffic = []string{"mode", "count", "parallel", "interval", "timeout", "retries", "bytes", "sources"}

// verbs are all steps, with what `quartet lab run --help` says of them.
var verbs = map[string]verb{
	"param":      {usage: "param NAME FULL SHORT", min: 3, max: 3},
	"say":        {usage: "say TEXT, in which \\n begins a line", free: true, max: -1},
	"draw":       {usage: "draw"},
	"show":       {usage: "show COMMAND...: run quartet with these arguments and show what it prints", min: 1, max: -1, free: true},
	"apply":      {usage: "apply, with objects in YAML indented below it", body: true},
	"delete":     {usage: "delete VIP", min: 1, max: 1},
	"drain":      {usage: "drain NODE: a mux, VM or host", min: 1, max: 1},
	"undrain":    {usage: "undrain NODE", min: 1, max: 1},
	"connect":    {usage: "connect LOAD from CLIENT to ADDRESS:PORT [mode= count= parallel= interval= timeout= retries= bytes= sources=]", min: 5, max: 5, options: traffic},
	"start":      {usage: "start LOAD from CLIENT to ADDRESS:PORT [as connect]", min: 5, max: 5, options: traffic},
	"stop":       {usage: "stop LOAD: end it and take its report", min: 1, max: 1},
	"join":       {usage: "join LOAD: wait for its end and take its report", min: 1, max: 1},
	"ping":       {usage: "ping CLIENT ADDRESS answered|unanswered", min: 3, max: 3},
	"kill":       {usage: "kill NODE: its daemon, by SIGKILL", min: 1, max: 1},
	"terminate":  {usage: "terminate NODE: its daemon, by SIGTERM, and wait for its end", min: 1, max: 1},
	"launch":     {usage: "launch NODE: its daemon, and wait until it is ready", min: 1, max: 1},
	"silence":    {usage: "silence NODE: links stay up, nothing comes out", min: 1, max: 1},
	"unsilence":  {usage: "unsilence NODE", min: 1, max: 1},
	"unplug":     {usage: "unplug NODE: its uplink loses the carrier", min: 1, max: 1},
	"plug":       {usage: "plug NODE", min: 1, max: 1},
	"cut":        {usage: "cut MUX HOST: tunnel packets from a mux to a host and its VMs are lost on the way, nothing else is", min: 2, max: 2},
	"mend":       {usage: "mend MUX HOST", min: 2, max: 2},
	"mtu":        {usage: "mtu NODE NEIGHBOUR BYTES: of NODE's end of the link between them", min: 3, max: 3},
	"ignore-mss": {usage: "ignore-mss CLIENT: it takes each server's MSS for what its own MTU has room for", min: 1, max: 1},
	"bfd":        {usage: "bfd INTERVAL: between muxes and their ToRs", min: 1, max: 1},
	"configure":  {usage: "configure LABEL vip=NAME changes=N: change a VIP N times, one after the other", min: 1, max: 1, options: []string{"vip", "changes"}},
	"expect":     {usage: "expect VALUE OP VALUE", min: 3, max: -1},
	"wait":       {usage: "wait LIMIT until VALUE OP VALUE", min: 5, max: -1},
	"pause":      {usage: "pause DURATION: let time pass that is itself the subject", min: 1, max: 1},
	"remember":   {usage: "remember NAME = VALUE", min: 3, max: -1},
	"report":     {usage: "report FIGURE = VALUE", min: 3, max: -1},
	"paper":      {usage: "paper FIGURE NUMBER: what the paper has", min: 2, max: 2},
	"spread":     {usage: "spread FIGURE = VALUE to VALUE: the smallest and the largest behind a figure", min: 5, max: -1},
	"plot":       {usage: "plot LOAD servers|gaps TITLE...: for --plot", min: 3, max: -1},
}

// Usage lists all verbs, in order.
func Usage() string {
	var lines []string
	for _, v := range verbs {
		lines = append(lines, "  "+v.usage)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// Observations are what can be asked of the lab, with the number of arguments.
var Observations = map[string]int{
	"state":      1, // of a mux or host by the manager, or of a DIP
	"buckets":    1, // that lead to a DIP, over all VIPs
	"unreached":  1, // muxes that get no answer through a DIP's tunnel, by the manager, over all DIPs of a node
	"hops":       2, // next hops of a switch for a prefix
	"sessions":   1, // established BGP sessions of a switch
	"rx":         2, // packets that a node received from a neighbour
	"tx":         2, // packets that a node sent to a neighbour
	"forwarded":  1, // packets that a mux encapsulated
	"exit":       2, // packets that left a mux or host agent, or all muxes or hosts, by a named exit
	"event":      2, // times that a mux, or all muxes, counted an event: event(muxes,flow_hit)
	"current":    1, // 1 if all muxes run a VIP's last generation
	"healthy":    1, // healthy DIPs of a VIP
	"flows":      1, // flows that the muxes began to a DIP
	"servers":    1, // different servers that answered a load
	"share":      2, // of a load's connections that a mux or server got: share(LOAD,NODE)
	"chi2":       2, // chi-squared of a load's servers, or of muxes' flows: chi2(LOAD,servers), chi2(NAME,muxes)
	"dof":        2, // degrees of freedom of the same
	"p":          2, // probability of a chi-squared as large by chance
	"clock":      0, // milliseconds since the scenario began
	"errors_log": 1, // lines at level ERROR in a daemon's log
}

// Error is a mistake in a file.
type Error struct {
	File    string
	Line    int
	Message string
}

// Error is "file:line: message".
func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Message) }

var paramName = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// Parse reads a scenario. The error joins one *Error for each bad line.
func Parse(file, text string) (*Scenario, error) {
	name := file[strings.LastIndexByte(file, '/')+1:]
	s := &Scenario{Name: strings.TrimSuffix(name, ".txt")}
	var errs []error
	head := true
	var about []string
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := 0; i < len(lines); i++ {
		line := strings.TrimRight(lines[i], " \t\r")
		number := i + 1
		if comment, ok := strings.CutPrefix(line, "#"); ok {
			if head {
				about = append(about, strings.TrimPrefix(comment, " "))
			}
			continue
		}
		head = head && line == "" && len(about) == 0
		if line == "" {
			continue
		}
		fail := func(format string, args ...any) {
			errs = append(errs, &Error{file, number, fmt.Sprintf(format, args...)})
		}
		if line[0] == ' ' || line[0] == '\t' {
			fail("an indented line belongs to a step above it that takes one: apply")
			continue
		}
		step := Step{Line: number, Text: line, Options: map[string]string{}}
		var rest string
		step.Verb, rest, _ = strings.Cut(line, " ")
		v, ok := verbs[step.Verb]
		if !ok {
			fail("%q is no step; one of: %s", step.Verb, strings.Join(names(), ", "))
			continue
		}
		if v.body {
			var body []string
			for i+1 < len(lines) && (strings.TrimSpace(lines[i+1]) == "" || lines[i+1][0] == ' ' || lines[i+1][0] == '\t') {
				i++
				body = append(body, lines[i])
			}
			step.Body = unindent(body)
			if step.Body == "" {
				fail("what to apply is missing: indented lines below it; usage: %s", v.usage)
				continue
			}
		}
		if v.free {
			step.Args = []string{strings.TrimSpace(rest)}
			if v.min > 0 && step.Args[0] == "" {
				fail("usage: %s", v.usage)
				continue
			}
			s.Steps = append(s.Steps, step)
			continue
		}
		bad := false
		for _, word := range strings.Fields(rest) {
			key, value, isOption := strings.Cut(word, "=")
			if !isOption || len(v.options) == 0 {
				step.Args = append(step.Args, word)
				continue
			}
			if !slices.Contains(v.options, key) {
				fail("%s has no option %q; one of: %s", step.Verb, key, strings.Join(v.options, ", "))
				bad = true
			}
			step.Options[key] = value
		}
		if bad {
			continue
		}
		if len(step.Args) < v.min || v.max >= 0 && len(step.Args) > v.max {
			fail("usage: %s", v.usage)
			continue
		}
		if err := step.refine(); err != nil {
			fail("%s; usage: %s", err, v.usage)
			continue
		}
		if step.Verb == "param" {
			if !paramName.MatchString(step.Args[0]) {
				fail("%q is not a parameter's name: lower-case letters, digits and underscores", step.Args[0])
				continue
			}
			s.Params = append(s.Params, Param{step.Args[0], step.Args[1], step.Args[2]})
			continue
		}
		s.Steps = append(s.Steps, step)
	}
	s.About = strings.Trim(strings.Join(about, "\n"), "\n")
	if len(errs) == 0 && s.About == "" {
		errs = append(errs, &Error{file, 1, "a scenario begins with a comment that says and draws what it is about"})
	}
	if len(errs) == 0 && len(s.Steps) == 0 {
		errs = append(errs, &Error{file, len(lines), "there are no steps"})
	}
	return s, errors.Join(errs...)
}

// refine reads the arguments of the verbs that have a grammar of their own.
func (s *Step) refine() error {
	switch s.Verb {
	case "connect", "start":
		if s.Args[1] != "from" || s.Args[3] != "to" {
			return errors.New("\"from\" and \"to\" are wanted")
		}
	case "ping":
		if s.Args[2] != "answered" && s.Args[2] != "unanswered" {
			return fmt.Errorf("%q is neither answered nor unanswered", s.Args[2])
		}
	case "pause":
		d, err := time.ParseDuration(s.Args[0])
		if strings.Contains(s.Args[0], "{") {
			return nil
		}
		if err != nil || d <= 0 {
			return fmt.Errorf("%q is not a duration such as 2s", s.Args[0])
		}
	case "paper":
		if _, err := strconv.ParseFloat(s.Args[1], 64); err != nil {
			return fmt.Errorf("%q is not a number", s.Args[1])
		}
	case "expect":
		return s.Condition.parse(s.Args)
	case "wait":
		d, err := time.ParseDuration(s.Args[0])
		if err != nil || d <= 0 {
			return fmt.Errorf("%q is not a limit such as 10s", s.Args[0])
		}
		s.Limit = d
		if s.Args[1] != "until" {
			return errors.New("\"until\" is wanted behind the limit")
		}
		return s.Condition.parse(s.Args[2:])
	case "spread":
		to := slices.Index(s.Args, "to")
		if s.Args[1] != "=" || to < 0 {
			return errors.New("\"=\" is wanted behind the name, and \"to\" between two values")
		}
		var err error
		if s.Condition.Left, err = parseSum(s.Args[2:to]); err != nil {
			return err
		}
		s.Condition.Right, err = parseSum(s.Args[to+1:])
		return err
	case "remember", "report":
		if s.Args[1] != "=" {
			return errors.New("\"=\" is wanted behind the name")
		}
		var err error
		s.Value, err = parseSum(s.Args[2:])
		return err
	}
	return nil
}

func (c *Condition) parse(words []string) error {
	at := slices.IndexFunc(words, func(w string) bool { return slices.Contains(Ops, w) })
	if at < 0 {
		return fmt.Errorf("a comparison is wanted: one of %s between two values", strings.Join(Ops, " "))
	}
	c.Op = words[at]
	var err error
	if c.Left, err = parseSum(words[:at]); err != nil {
		return err
	}
	c.Right, err = parseSum(words[at+1:])
	return err
}

func parseSum(words []string) (Sum, error) {
	if len(words)%2 == 0 {
		return nil, errors.New("a value is wanted, or values with + or - between them")
	}
	var s Sum
	for i := 0; i < len(words); i += 2 {
		t := Term{Name: words[i]}
		if i > 0 {
			switch words[i-1] {
			case "+":
			case "-":
				t.Minus = true
			default:
				return nil, fmt.Errorf("%q is neither + nor -", words[i-1])
			}
		}
		if name, args, call := strings.Cut(words[i], "("); call {
			args, ok := strings.CutSuffix(args, ")")
			if !ok {
				return nil, fmt.Errorf("%q: a closing parenthesis is wanted, and no spaces inside", words[i])
			}
			want, known := Observations[name]
			if !known {
				var all []string
				for o := range Observations {
					all = append(all, o)
				}
				slices.Sort(all)
				return nil, fmt.Errorf("%q is no observation; one of: %s", name, strings.Join(all, ", "))
			}
			t.Name, t.Call = name, true
			if args != "" {
				t.Args = strings.Split(args, ",")
			}
			if len(t.Args) != want {
				return nil, fmt.Errorf("%s takes %d arguments, not %d", name, want, len(t.Args))
			}
		}
		s = append(s, t)
	}
	return s, nil
}

// String is the sum as it stands in a file.
func (s Sum) String() string {
	var b strings.Builder
	for i, t := range s {
		if i > 0 {
			if t.Minus {
				b.WriteString(" - ")
			} else {
				b.WriteString(" + ")
			}
		}
		b.WriteString(t.Name)
		if t.Call {
			b.WriteString("(" + strings.Join(t.Args, ",") + ")")
		}
	}
	return b.String()
}

// String is the condition as it stands in a file.
func (c Condition) String() string { return c.Left.String() + " " + c.Op + " " + c.Right.String() }

func names() []string {
	var all []string
	for n := range verbs {
		all = append(all, n)
	}
	slices.Sort(all)
	return all
}

func unindent(lines []string) string {
	indent := -1
	for _, l := range lines {
		if strings.TrimSpace(l) == "" {
			continue
		}
		n := len(l) - len(strings.TrimLeft(l, " \t"))
		if indent < 0 || n < indent {
			indent = n
		}
	}
	if indent < 0 {
		return ""
	}
	var out []string
	for _, l := range lines {
		if len(l) >= indent {
			l = l[indent:]
		}
		out = append(out, l)
	}
	return strings.TrimRight(strings.Join(out, "\n"), "\n \t") + "\n"
}
