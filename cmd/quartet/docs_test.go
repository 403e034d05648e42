package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/reflect/protoreflect"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

const root = "../.."

func operate(t *testing.T, page string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "docs/operate", page))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// docs/operate/objects.md has a row for each field of the schema.
func TestObjectsAreDocumented(t *testing.T) {
	page := operate(t, "objects.md")
	var walk func(protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		for i := range m.Fields().Len() {
			fd := m.Fields().Get(i)
			// GrpcCheck and CommandCheck have one field each, told in their row.
			if one := "`" + string(fd.Name()) + "`"; !strings.Contains(page, "\n| "+one+" |") && (m.Fields().Len() > 1 || !strings.Contains(page, one)) {
				t.Errorf("objects.md does not tell of %s", fd.FullName())
			}
			if fd.Kind() == protoreflect.MessageKind && fd.Message().ParentFile().Package() == "quartet.v1" {
				walk(fd.Message())
			}
		}
	}
	walk((&quartetv1.Vip{}).ProtoReflect().Descriptor())
	walk((&quartetv1.VipPool{}).ProtoReflect().Descriptor())
}

// docs/operate/cli.md has each command and each flag, but leaves those of lab
// and bench to their help.
func TestCommandsAreDocumented(t *testing.T) {
	page := operate(t, "cli.md")
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		path := "quartet " + cmd.CommandPath()
		if !cmd.HasSubCommands() && !strings.Contains(page, "`"+path) || !strings.Contains(page, path) {
			t.Errorf("cli.md does not tell of %s", path)
		}
		if cmd.Name() == "lab" || cmd.Name() == "bench" {
			return
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" && !strings.Contains(page, "`--"+f.Name+"`") {
				t.Errorf("cli.md does not tell of %s --%s", path, f.Name)
			}
		})
		for _, sub := range cmd.Commands() {
			walk(sub)
		}
	}
	for _, cmd := range (&cli{}).commands() {
		walk(cmd)
	}
}

// A metric's name stands whole, or a file adds a prefix to names given to desc.
var (
	metric       = regexp.MustCompile(`"(quartet_[a-z0-9_]*[a-z0-9])"`)
	metricPrefix = regexp.MustCompile(`"(quartet_[a-z0-9_]*_)"`)
	metricRow    = regexp.MustCompile("(?m)^\\| `(quartet_[a-z0-9_]+)`")
	metricSuffix = regexp.MustCompile(`\bdesc\("([a-z0-9_]+)"`)
)

// docs/operate/metrics.md has each metric that a daemon names, and no other.
func TestMetricsAreDocumented(t *testing.T) {
	page := operate(t, "metrics.md")
	known := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && path == filepath.Join(root, "lab") { // it reads metrics and has none
			return fs.SkipDir
		}
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var names []string
		for _, m := range metric.FindAllSubmatch(b, -1) {
			names = append(names, string(m[1]))
		}
		if prefix := metricPrefix.FindSubmatch(b); prefix != nil {
			for _, m := range metricSuffix.FindAllSubmatch(b, -1) {
				names = append(names, string(prefix[1])+string(m[1]))
			}
		}
		for _, name := range names {
			known[name] = true
			if !strings.Contains(page, "\n| `"+name+"` |") {
				t.Errorf("metrics.md does not tell of %s (%s)", name, path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range metricRow.FindAllStringSubmatch(page, -1) {
		if !known[row[1]] {
			t.Errorf("metrics.md tells of %s, which no daemon has", row[1])
		}
	}
}

var (
	exitEnum = regexp.MustCompile(`(?s)\nenum exit \{(.*?)\n\};`)
	exitName = regexp.MustCompile(`(?m)^\tEXIT_([A-Z0-9_]+),`)
)

// docs/operate/troubleshooting.md has each way out of the packet programs.
func TestExitsAreDocumented(t *testing.T) {
	page := operate(t, "troubleshooting.md")
	for _, file := range []string{"mux/datapath/mux.bpf.c", "hostagent/datapath/agent.bpf.c"} {
		b, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		enum := exitEnum.FindSubmatch(b)
		if enum == nil {
			t.Fatalf("%s has no enum exit", file)
		}
		names := exitName.FindAllSubmatch(enum[1], -1)
		if len(names) < 10 {
			t.Fatalf("%s: found %d exits", file, len(names))
		}
		for _, n := range names {
			if name := strings.ToLower(string(n[1])); name != "count" && !strings.Contains(page, "\n| `"+name+"` |") {
				t.Errorf("troubleshooting.md does not tell of exit %s of %s", name, file)
			} else if v := verdictOf(name); strings.HasPrefix(file, "mux/") && name != "count" && (v == "" || !strings.Contains(page, "\n| `"+name+"` | "+v)) {
				t.Errorf("top says of exit %s that it is %q, troubleshooting.md does not", name, v)
			}
		}
	}
}
