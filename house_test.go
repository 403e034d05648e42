package quartet

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/quartet-lb/quartet/"

// layers orders the folders: a package imports only from layers above its own,
// or from its own layer where peers is set. ARCHITECTURE.md draws it.
var layers = []struct {
	name  string
	dirs  []string // a folder and what is below it, unless another entry is more specific
	peers bool     // packages of the layer may import each other
}{
	{"schema", []string{"api"}, true},
	{"nouns", []string{"lb"}, false},
	{"tables and wire", []string{"flowhash", "buckets", "encap"}, false},
	{"pure cores", []string{"manager/compile", "manager/health", "manager/object"}, true},
	{"adapters", []string{
		"daemon", "certs", "nodelink", "bgp", "manager/store",
		"mux/bench", "mux/datapath", "mux/reach",
		"hostagent/datapath", "hostagent/health", "hostagent/metering",
		"lab/fabric", "lab/xdppass", "lab/scenario", "lab/traffic",
	}, true},
	{"components", []string{"manager", "mux", "hostagent", "lab"}, false},
	{"cmd", []string{"cmd"}, false},
}

// mayCross are imports within a layer that are meant, each with its reason.
var mayCross = map[[2]string]string{
	{"manager", "manager/rpc"}: "the manager's parts are one component",
	{"manager/rpc", "manager"}: "the manager's parts are one component",
}

// doors names the only packages that may import a heavy library.
var doors = map[string][]string{
	"github.com/cilium/ebpf":         {"mux/datapath", "mux/bench", "hostagent/datapath", "lab/xdppass", "flowhash"},
	"github.com/osrg/gobgp":          {"bgp"},
	"go.etcd.io/etcd":                {"manager/store"},
	"github.com/vishvananda/netns":   {"lab/fabric"},
	"github.com/spf13/cobra":         {"cmd", "daemon", "lab"},
	"github.com/gopacket/gopacket":   {"mux"},
	"github.com/vishvananda/netlink": {"lab/fabric", "mux", "mux/bench", "mux/datapath", "hostagent/datapath"},
}

// forbidden libraries, each with its reason.
var forbidden = map[string]string{
	"log":                        "log/slog is the project's logger",
	"github.com/sirupsen/logrus": "log/slog is the project's logger",
	"github.com/pkg/errors":      "fmt.Errorf with %w",
}

type goPackage struct {
	ImportPath, Name, Doc, Dir         string
	GoFiles, TestGoFiles               []string
	Imports, TestImports, XTestImports []string
}

func packages(t *testing.T) []goPackage {
	t.Helper()
	out, err := exec.Command("go", "list", "-json", "./...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []goPackage
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p goPackage
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

// layerOf finds the layer by the longest matching folder.
func layerOf(dir string) int {
	best, length := -1, -1
	for i, l := range layers {
		for _, d := range l.dirs {
			if (dir == d || strings.HasPrefix(dir, d+"/")) && len(d) > length {
				best, length = i, len(d)
			}
		}
	}
	return best
}

func component(dir string) string { return strings.SplitN(dir, "/", 2)[0] }

func TestImportDirection(t *testing.T) {
	for _, p := range packages(t) {
		from := strings.TrimPrefix(p.ImportPath, module)
		if p.ImportPath == strings.TrimSuffix(module, "/") {
			continue
		}
		at := layerOf(from)
		if at < 0 {
			t.Errorf("%s is in no layer: add its folder to layers and to ARCHITECTURE.md", from)
			continue
		}
		for _, path := range p.Imports {
			to, ours := strings.CutPrefix(path, module)
			if !ours {
				continue
			}
			switch below := layerOf(to); {
			case from == "api" || strings.HasPrefix(from, "api/"):
				if !strings.HasPrefix(to, "api/") {
					t.Errorf("%s imports %s: api imports nothing of ours", from, to)
				}
			case below > at:
				t.Errorf("%s (%s) imports %s (%s): imports go the other way", from, layers[at].name, to, layers[below].name)
			case below == at && !layers[at].peers && component(from) != component(to):
				if _, ok := mayCross[[2]string{from, to}]; !ok {
					t.Errorf("%s imports %s: %s never import each other", from, to, layers[at].name)
				}
			}
		}
	}
}

func TestOneDoorPerLibrary(t *testing.T) {
	for _, p := range packages(t) {
		from := strings.TrimPrefix(p.ImportPath, module)
		for _, path := range p.Imports {
			for lib, may := range doors {
				if path != lib && !strings.HasPrefix(path, lib+"/") {
					continue
				}
				if !slices.ContainsFunc(may, func(d string) bool { return from == d || d == component(from) && d == "cmd" }) {
					t.Errorf("%s imports %s: its doors are %v", from, path, may)
				}
			}
			if why, bad := forbidden[path]; bad {
				t.Errorf("%s imports %s: %s", from, path, why)
			}
		}
	}
}

func TestEachPackageOpensWithASentence(t *testing.T) {
	for _, p := range packages(t) {
		if strings.HasPrefix(p.ImportPath, module+"api/") {
			continue
		}
		want := "Package " + p.Name + " "
		if p.Name == "main" {
			want = "Command " + filepath.Base(p.Dir) + " "
		}
		if len(p.GoFiles) > 0 && !strings.HasPrefix(p.Doc, want) {
			t.Errorf("%s: the package comment must begin with %q, and says %q", p.ImportPath, want, p.Doc)
		}
	}
}

func tracked(t *testing.T, patterns ...string) []string {
	t.Helper()
	out, err := exec.Command("git", append([]string{"ls-files", "--"}, patterns...)...).Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	return strings.Fields(string(out))
}

func TestBPFLicences(t *testing.T) {
	files := tracked(t, "*.bpf.c", "bpf/*.h")
	if len(files) == 0 {
		t.Fatal("no BPF sources found")
	}
	for _, f := range files {
		if strings.HasPrefix(f, "bpf/libbpf/") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(text), "\n")
		if !strings.Contains(first, "SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause") {
			t.Errorf("%s: the first line must name the licence GPL-2.0-only OR BSD-2-Clause", f)
		}
	}
}

func TestNoSkippedTests(t *testing.T) {
	skip := regexp.MustCompile(`\b[tbf]\.Skip(Now|f)?\(`)
	for _, f := range tracked(t, "*_test.go") {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if f != "house_test.go" && skip.Match(text) {
			t.Errorf("%s skips a test: where something is missing, fail", f)
		}
	}
}

func TestMakeHelpExplainsEachTarget(t *testing.T) {
	text, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(text), ".PHONY: ")
	list, _, _ = strings.Cut(list, "\n")
	help, err := exec.Command("make", "--no-print-directory", "help").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, target := range strings.Fields(list) {
		if !regexp.MustCompile(`(?m)^  make ` + target + ` +\S`).Match(help) {
			t.Errorf("make help does not explain %s", target)
		}
	}
}

func TestReadmeShowsTheExampleFile(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	example, err := os.ReadFile("docs/operate/shop.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```yaml\n"+string(example)+"```") {
		t.Error("the VIP in README.md is not docs/operate/shop.yaml")
	}
}
