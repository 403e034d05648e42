package lab

import (
	"strings"
	"testing"
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
