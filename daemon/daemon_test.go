package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// With DAEMON_TEST set this binary is a daemon by Main.
func TestMain(m *testing.M) {
	if what := os.Getenv("DAEMON_TEST"); what != "" {
		root := &cobra.Command{Use: "quartet-test", RunE: func(c *cobra.Command, _ []string) error {
			if what == "fail" {
				return fmt.Errorf("attach mux to eth0: %w", errors.New("first line\nsecond line"))
			}
			fmt.Println("running")
			<-c.Context().Done()
			fmt.Println("drained")
			return nil
		}}
		root.SetArgs(nil)
		Main(root)
		return
	}
	os.Exit(m.Run())
}

func TestMainEndsWithOneLine(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DAEMON_TEST=fail")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("exit status: %v", err)
	}
	if got, want := stderr.String(), "quartet-test: attach mux to eth0: first line; second line\n"; got != want {
		t.Errorf("standard error %q, want %q", got, want)
	}
}

func TestMainStopsOnSignal(t *testing.T) {
	for _, s := range []os.Signal{syscall.SIGTERM, syscall.SIGINT} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "DAEMON_TEST=run")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, len("running\n"))
		if _, err := io.ReadFull(out, line); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		rest, err := io.ReadAll(out)
		if err != nil || string(rest) != "drained\n" {
			t.Errorf("%v: %q, %v", s, rest, err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v: %v", s, err)
		}
	}
}

func TestServes(t *testing.T) {
	var log bytes.Buffer
	o := &Options{LogLevel: "info", LogFormat: "json", MetricsListen: "127.0.0.1:0"}
	p, err := o.Start("quartet-test", &log, "tables", "bgp")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	get := func(path string) (int, string) {
		r, err := http.Get("http://" + p.Addr.String() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(body)
	}
	if code, text := get("/healthz"); code != 200 || text != "ok\n" {
		t.Errorf("/healthz: %d %q", code, text)
	}
	if code, text := get("/readyz"); code != 503 || text != "tables: not yet\nbgp: not yet\n" {
		t.Errorf("/readyz: %d %q", code, text)
	}
	p.Ready.Met("tables")
	p.Ready.Missing("bgp", "no peer is established")
	if code, text := get("/readyz"); code != 503 || text != "bgp: no peer is established\n" {
		t.Errorf("/readyz: %d %q", code, text)
	}
	p.Ready.Met("bgp")
	if code, text := get("/readyz"); code != 200 || text != "ready\n" {
		t.Errorf("/readyz: %d %q", code, text)
	}
	if code, text := get("/metrics"); code != 200 || !strings.Contains(text, `quartet_build_info{`) || !strings.Contains(text, `process="quartet-test"`) ||
		!strings.Contains(text, "process_cpu_seconds_total") {
		t.Errorf("/metrics: %d\n%s", code, text)
	}
	p.Log.Info("hello", "n", 1)
	p.Log.Debug("not this")
	if got := log.String(); !strings.Contains(got, `"msg":"hello","n":1`) || strings.Contains(got, "not this") {
		t.Errorf("log %q", got)
	}

	taken := &Options{LogLevel: "info", LogFormat: "text", MetricsListen: p.Addr.String()}
	want := "serve metrics (--metrics-listen): listen on " + p.Addr.String() + ": another process has this port"
	if _, err := taken.Start("quartet-test", io.Discard); err == nil || err.Error() != want {
		t.Errorf("error %v, want %q", err, want)
	}
}

func TestBadOptions(t *testing.T) {
	for want, o := range map[string]Options{
		`--log-level: "loud" is not a level: debug, info, warn or error`: {LogLevel: "loud", LogFormat: "text"},
		`--log-format: "xml" is not a format: text or json`:              {LogLevel: "info", LogFormat: "xml"},
		"this machine does not have this address":                        {LogLevel: "info", LogFormat: "text", MetricsListen: "192.0.2.1:1"},
	} {
		if _, err := o.Start("x", io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

func TestReadConfig(t *testing.T) {
	type values struct {
		name  string
		flows int
		peers []string
		on    bool
	}
	read := func(text string, args ...string) (values, error) {
		var v values
		flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
		flags.StringVar(&v.name, "name", "default", "")
		flags.IntVar(&v.flows, "flows", 1, "")
		flags.StringArrayVar(&v.peers, "bgp-peer", nil, "")
		flags.BoolVar(&v.on, "generic", false, "")
		AddConfigFlag(flags)
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := flags.Parse(append(args, "--config", file)); err != nil {
			t.Fatal(err)
		}
		return v, ReadConfig(flags)
	}
	v, err := read("# mux\nname: m1\nflows: 4096\ngeneric: true\nbgp-peer:\n- address=10.0.0.1,asn=65001\n- {address: 10.0.0.2, asn: 65002, bfd: 5ms*3}\n", "--name", "m2")
	if err != nil || v.name != "m2" || v.flows != 4096 || !v.on ||
		!slices.Equal(v.peers, []string{"address=10.0.0.1,asn=65001", "address=10.0.0.2,asn=65002,bfd=5ms*3"}) {
		t.Errorf("%+v, %v", v, err)
	}
	if v, err := read("bgp-peer: a=1"); err != nil || !slices.Equal(v.peers, []string{"a=1"}) {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := read(""); err != nil {
		t.Errorf("empty file: %v", err)
	}
	for text, want := range map[string]string{
		"nom: m1":              "line 1: nom: unknown field; valid: bgp-peer, flows, generic, name",
		"name: [a, b]":         "name: one value is wanted, not a list",
		"flows: many":          `flows: strconv.ParseInt: parsing "many"`,
		"name: a\nname: b":     "name: given twice",
		"- a":                  "a mapping of flag names to values is wanted",
		"config: x":            "config: unknown field",
		"bgp-peer: [{a: [1]}]": "bgp-peer[0]: a: a scalar without a comma is wanted",
		"name: {":              "read configuration",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

func TestVersionIsNotEmpty(t *testing.T) {
	if Version() == "" {
		t.Error("no version")
	}
}
