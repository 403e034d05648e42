package lab

import (
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/quartet-lb/quartet/lab/scenario"
)

//go:embed scenarios/*.txt
var shipped embed.FS

// Scenarios are the names of the scenarios that come with Quartet.
func Scenarios() []string {
	// The pattern is fixed: Glob can't fail.
	files, _ := fs.Glob(shipped, "scenarios/*.txt")
	var names []string
	for _, f := range files {
		names = append(names, strings.TrimSuffix(path.Base(f), ".txt"))
	}
	return names
}

// Scenario reads a scenario that comes with Quartet, or the file of that name.
func Scenario(name string) (*scenario.Scenario, error) {
	if text, err := fs.ReadFile(shipped, "scenarios/"+name+".txt"); err == nil {
		return scenario.Parse(name+".txt", string(text))
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read scenario: %q is neither a file nor one of: %s", name, strings.Join(Scenarios(), ", "))
	}
	return scenario.Parse(name, string(text))
}
