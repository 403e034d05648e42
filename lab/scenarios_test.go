package lab

import (
	"strings"
	"testing"

	"github.com/quartet-lb/quartet/lab/scenario"
)

// Each shipped scenario can be read, and names only nodes of the default lab.
func TestScenariosParse(t *testing.T) {
	if len(Scenarios()) < 18 {
		t.Errorf("%d scenarios", len(Scenarios()))
	}
	top, err := NewTopology(DefaultSize)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range Scenarios() {
		s, err := Scenario(name)
		if err != nil {
			t.Error(err)
			continue
		}
		l := &Lab{Topology: top}
		r := &runner{lab: l, script: s, vars: map[string]string{}, values: map[string]value{}, result: Result{Parameters: map[string]any{}}}
		if err := r.bind(); err != nil {
			t.Error(err)
		}
		for _, step := range s.Steps {
			for _, text := range append(step.Args, step.Body) {
				filled := r.fill(text)
				// What is left of braces must be YAML's own, which hold a colon.
				for _, part := range strings.Split(filled, "{")[1:] {
					inside, _, _ := strings.Cut(part, "}")
					if !strings.Contains(inside, ":") && inside != "" {
						t.Errorf("%s:%d: {%s} stands for nothing", name, step.Line, inside)
					}
				}
			}
		}
	}
}

// A node that the lab has not is found before anything is done.
func TestUnknownNodes(t *testing.T) {
	top, err := NewTopology(DefaultSize)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ step, want string }{
		{"kill mux9", `x.txt:2: kill mux9: there is no node "mux9"`},
		{"cut mux1 host99", `"host99"`},
		{"start a from moon to 203.0.113.1:80", `"moon"`},
		{"expect 1 == rx(tor1,mux9)", `"mux9"`},
		{"report x = 1 - state(vm9-9)", `"vm9-9"`},
	} {
		s, err := scenario.Parse("x.txt", "# nothing\n"+c.step+"\n")
		if err != nil {
			t.Fatal(err)
		}
		r := &runner{lab: &Lab{Topology: top}, script: s, vars: map[string]string{}, values: map[string]value{}, result: Result{Parameters: map[string]any{}}}
		if err := r.bind(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %s", c.step, err, c.want)
		}
	}
}

func TestRounded(t *testing.T) {
	for v, want := range map[value]string{
		{number: 12345}: "12345", {number: 1234.56}: "1235", {number: 0.98765}: "0.988", {number: 12.345}: "12.3",
		{number: -0.5}: "-0.5", {word: "ready"}: "ready",
	} {
		if got := v.rounded(); got != want {
			t.Errorf("%v: %s, want %s", v.number, got, want)
		}
	}
}
