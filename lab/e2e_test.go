package lab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/lab/scenario"
	"github.com/quartet-lb/quartet/manager/object"
)

// The one lab that the end-to-end tests share. Each scenario leaves it as it
// was; a test that can't takes it down, and the next one raises it again.
//
//	client1   client2
//	  core1   core2
//	 agg1 agg2   agg3 agg4
//	 tor1 tor2   tor3 tor4
//	 mux1 mux2   mux3 manager   and on each ToR two hosts with two VMs each
var shared struct {
	mu       sync.Mutex
	binaries string
	lab      *Lab
}

func TestMain(m *testing.M) {
	status := m.Run()
	if shared.binaries != "" {
		os.RemoveAll(shared.binaries)
	}
	if _, err := Down(sharedName, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, err)
		status = 1
	}
	os.Exit(status)
}

const sharedName = "test-e2e"

// binaries builds the programs once; shared.mu is held.
func binaries(t *testing.T) string {
	t.Helper()
	if shared.binaries != "" {
		return shared.binaries
	}
	dir, err := os.MkdirTemp("", "quartet-lab-test-")
	if err != nil {
		t.Fatal(err)
	}
	shared.binaries = dir
	build := exec.Command("go", "build", "-o", dir+"/", "../cmd/...")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the daemons: %v\n%s", err, out)
	}
	return dir
}

func theLab(t *testing.T) *Lab {
	t.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.lab != nil {
		return shared.lab
	}
	// What a test run that was killed has left.
	if _, err := Down(sharedName, writer{t}); err != nil {
		t.Fatal(err)
	}
	o := Defaults()
	o.Name, o.Binaries = sharedName, binaries(t)
	l, err := Up(t.Context(), o, writer{t})
	if err != nil {
		t.Fatal(err)
	}
	shared.lab = l
	return l
}

func discard(t *testing.T) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.lab != nil {
		shared.lab.Close()
		shared.lab = nil
	}
	if _, err := Down(sharedName, writer{t}); err != nil {
		t.Error(err)
	}
}

// A lab of another size works as the default one does.
//
//	client1 ─ core1 ─ agg1 ─┬─ tor1: mux1, host1, vm1-1
//	                        └─ tor2: mux2, host2, vm2-1, manager
func TestOtherSize(t *testing.T) {
	shared.mu.Lock()
	dir := binaries(t)
	shared.mu.Unlock()
	o := Defaults()
	o.Name, o.Binaries = "test-small", dir
	o.Size = Size{Cores: 1, Containers: 1, Aggs: 1, ToRs: 2, Muxes: 2, Hosts: 2, VMs: 1, Clients: 1}
	if _, err := Down(o.Name, writer{t}); err != nil {
		t.Fatal(err)
	}
	l := raise(t, o)
	s, err := scenario.Parse("small.txt", `# one request by each family
connect four from client1 to 203.0.113.1:80 count=1
expect four.requests == 1
connect six from client1 to [2001:db8::1]:80 count=1
expect six.requests == 1
expect hops(agg1,203.0.113.0/24) == 2
`)
	if err != nil {
		t.Fatal(err)
	}
	var transcript bytes.Buffer
	if _, err := l.Run(t.Context(), s, RunOptions{Out: &transcript}); err != nil {
		t.Errorf("%v\n%s", err, transcript.String())
	}
}

// Every scenario that comes with Quartet on real daemons, in its short size but
// for manager-away.
func TestScenarios(t *testing.T) {
	for _, name := range Scenarios() {
		t.Run(name, func(t *testing.T) {
			s, err := Scenario(name)
			if err != nil {
				t.Fatal(err)
			}
			l := theLab(t)
			var transcript bytes.Buffer
			// A manager's minute away is the subject itself.
			short := name != "manager-away"
			result, err := l.Run(t.Context(), s, RunOptions{Short: short, Out: &transcript})
			if err != nil {
				t.Errorf("%v\n%s", err, transcript.String())
				discard(t)
				return
			}
			for _, step := range s.Steps {
				if step.Verb == "report" {
					if _, ok := result.Figures[step.Args[0]]; !ok {
						t.Errorf("the figure %s is missing", step.Args[0])
					}
				}
			}
			t.Logf("%s: %v", name, result.Figures)
		})
	}
}

// A step that fails ends the scenario with file and line, and what the steps
// before it did is undone all the same.
func TestScenarioFails(t *testing.T) {
	l := theLab(t)
	s, err := scenario.Parse("fails.txt", `# nothing to draw
apply
  kind: Vip
  name: web
  addresses: [203.0.113.10]
  endpoints: [{protocol: TCP, port: 80, backends: [{dip: "{vm1-1}", host: "{host1}", port: 8080}]}]
start load from client1 to 203.0.113.10:80 interval=10ms
silence mux1
unplug host8
kill vm2-2
terminate host3
drain mux2
mtu core1 client1 1400
ignore-mss client2
expect buckets(vm1-1) == 0
say never
`)
	if err != nil {
		t.Fatal(err)
	}
	var transcript bytes.Buffer
	_, err = l.Run(t.Context(), s, RunOptions{Out: &transcript})
	if err == nil || !strings.Contains(err.Error(), "fails.txt:15: expect buckets(vm1-1) == 0: buckets(vm1-1) is ") {
		discard(t)
		t.Fatalf("error %v\n%s", err, transcript.String())
	}
	if out := transcript.String(); !strings.HasPrefix(final(out), "failed: fails.txt:15: ") {
		t.Errorf("the last line:\n%s", out)
	}
	if strings.Contains(err.Error(), "put the lab back") {
		discard(t)
		t.Fatal(err)
	}
	if strings.Contains(transcript.String(), "never") || !strings.Contains(transcript.String(), "--- diagnosis ---") {
		t.Errorf("transcript:\n%s", transcript.String())
	}
	if err := l.ready(t.Context(), 1e9); err != nil {
		t.Errorf("the lab was not put back: %v", err)
	}
	at, err := l.Net("core1")
	if err != nil {
		t.Fatal(err)
	}
	if mtu, err := at.MTU("client1"); err != nil || mtu != l.MTU {
		t.Errorf("core1's MTU to client1 is %d, %v", mtu, err)
	}
	a, err := l.list(t.Context(), "Vip")
	if err != nil || len(a.GetVips()) != 1 || a.GetVips()[0].GetVip().GetName() != Hello {
		t.Errorf("VIPs are left: %v, %v", a.GetVips(), err)
	}
}

// final is a transcript's last line.
func final(transcript string) string {
	lines := strings.Split(strings.TrimSpace(transcript), "\n")
	return lines[len(lines)-1]
}

// A scenario that would touch what the user has applied is refused in one line,
// and what the user has stays; so is one that finds no manager.
func TestScenarioRefused(t *testing.T) {
	l := theLab(t)
	api, err := l.client()
	if err != nil {
		t.Fatal(err)
	}
	run := func(text string) (string, error) {
		s, err := scenario.Parse("mine.txt", "# nothing to draw\n"+text)
		if err != nil {
			t.Fatal(err)
		}
		var transcript bytes.Buffer
		_, err = l.Run(t.Context(), s, RunOptions{Out: &transcript})
		return transcript.String(), err
	}
	web := "kind: Vip\nname: web\naddresses: [203.0.113.77]\nendpoints: [{protocol: TCP, port: 80, backends: [{dip: 10.1.1.11, host: 10.1.1.10, port: 8080}]}]\n"
	docs, err := object.Read([]byte(web))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := api.Apply(t.Context(), &quartetv1.ApplyRequest{Objects: docs}); err != nil {
		t.Fatal(err)
	}
	before, err := l.list(t.Context(), object.KindVip)
	if err != nil {
		t.Fatal(err)
	}
	apply := func(text string) string {
		return "apply\n  " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n  ") + "\n"
	}
	for _, c := range []struct{ text, want string }{
		{apply(web), "mine.txt:2: apply: Vip/web exists: "},
		{apply(strings.Replace(web, "name: web", "name: other", 1)), "Vip/web has the address 203.0.113.77 that Vip/other is to have"},
		{"delete web\n", "mine.txt:2: delete web: Vip/web exists"},
		{"configure c vip=web changes=1\n", "Vip/web exists"},
		{apply("kind: VipPool\nname: lab\nprefixes: [192.0.2.0/24]"), "VipPool/lab exists"},
	} {
		if out, err := run(c.text); err == nil || !strings.Contains(err.Error(), c.want) || out != "" {
			t.Errorf("%s: error %v, want %q; transcript %q", c.text, err, c.want, out)
		}
	}
	out, err := run("param n 3 3\nconnect a from client1 to 203.0.113.77:80 count={n}\nexpect a.requests == 3\n")
	if err != nil || !strings.Contains(out, "count=3") || !strings.Contains(final(out), "passed after ") {
		t.Errorf("%v\n%s", err, out)
	}
	after, err := l.list(t.Context(), object.KindVip)
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range before.GetVips() {
		if len(after.GetVips()) != len(before.GetVips()) || !proto.Equal(v.GetVip(), after.GetVips()[i].GetVip()) {
			t.Fatalf("the user's VIPs were %v and are %v", before.GetVips(), after.GetVips())
		}
	}
	if _, err := api.Delete(t.Context(), &quartetv1.DeleteRequest{Objects: []*quartetv1.ObjectRef{{Kind: object.KindVip, Name: "web"}}}); err != nil {
		t.Fatal(err)
	}

	m, _ := l.Topology.Node("manager")
	p := l.process(m.Name, l.daemon(m))
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.WaitGone(30e9); err != nil {
		t.Fatal(err)
	}
	if out, err := run("expect 1 == 1\n"); err == nil || !strings.Contains(err.Error(), "the lab's manager does not run") || out != "" {
		t.Errorf("without a manager: %v\n%s", err, out)
	}
	status, err := l.Status(t.Context())
	if err != nil || !strings.Contains(status, "[no answer from the manager]") {
		t.Errorf("%v\n%s", err, status)
	}
	if err := l.start(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	if err := l.ready(t.Context(), 30e9); err != nil {
		t.Error(err)
		discard(t)
	}
}

// An interrupted scenario says one line, and the lab is as it was.
func TestScenarioInterrupted(t *testing.T) {
	l := theLab(t)
	s, err := scenario.Parse("long.txt", "# nothing to draw\nsilence mux1\nwait 5m until hops(agg1,203.0.113.0/24) == 99\n")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var transcript bytes.Buffer
	_, err = l.Run(ctx, s, RunOptions{Out: writerFunc(func(p []byte) {
		transcript.Write(p)
		if bytes.Contains(p, []byte("wait 5m")) {
			cancel()
		}
	})})
	out := transcript.String()
	if err == nil || !strings.HasSuffix(out, "\ninterrupted; the lab is put back as it was\n") || strings.Contains(out, "diagnosis") {
		t.Errorf("%v\n%s", err, out)
	}
	if err := l.ready(t.Context(), 1e9); err != nil {
		t.Errorf("the lab was not put back: %v", err)
	}
}

// The operator's command works in the lab without further flags.
func TestExec(t *testing.T) {
	l := theLab(t)
	var out bytes.Buffer
	err := l.Exec("client1", []string{"quartet", "get", "mux"}, func(c *exec.Cmd) { c.Stdout, c.Stderr = &out, &out })
	if err != nil || strings.Count(out.String(), "ready") != 3 {
		t.Errorf("quartet get mux: %v\n%s", err, out.String())
	}
	if err := l.Exec("moon", []string{"true"}, func(*exec.Cmd) {}); err == nil || !strings.Contains(err.Error(), `no node "moon": core1, core2`) {
		t.Errorf("a node that is not there: %v", err)
	}
}

// The picture shows a dead daemon.
func TestStatus(t *testing.T) {
	l := theLab(t)
	before, err := l.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"core1 [BGP 4]", "mux3", "[ready, generation", "vm8-2 10.1.4.22", "agg1   tor1 tor2"} {
		if !strings.Contains(before, want) {
			t.Errorf("%q is missing:\n%s", want, before)
		}
	}
	if strings.Contains(before, "DOWN") {
		t.Errorf("something is down:\n%s", before)
	}
	s, err := scenario.Parse("status.txt", "# nothing\nkill vm8-2\nwait 5s until rx(vm8-2,host8) >= 0\nexpect 1 == 2\n")
	if err != nil {
		t.Fatal(err)
	}
	var transcript bytes.Buffer
	if _, err := l.Run(t.Context(), s, RunOptions{Out: &transcript}); err == nil || !strings.Contains(transcript.String(), "vm8-2 10.1.4.22 [DOWN]") {
		t.Errorf("%v\n%s", err, transcript.String())
	}
}

func TestSVG(t *testing.T) {
	svg := SVG([]Plot{{Title: "a < b", Labels: []string{"x", "y"}, Values: []float64{1, 2}}})
	for _, want := range []string{"<svg ", "a &lt; b", "y: 2", "</svg>"} {
		if !strings.Contains(svg, want) {
			t.Errorf("%q is missing in\n%s", want, svg)
		}
	}
}
