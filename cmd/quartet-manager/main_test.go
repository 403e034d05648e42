package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
)

var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "quartet-manager")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "quartet-manager")
	out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s", out)
		os.Exit(1)
	}
	status := m.Run()
	os.RemoveAll(dir)
	os.Exit(status)
}

// output may be read while the process writes.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

type process struct {
	cmd  *exec.Cmd
	err  output
	done chan error
}

func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.Command(binary, args...), done: make(chan error, 1)}
	p.cmd.Stderr = &p.err
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() { p.cmd.Process.Kill() })
	return p
}

// exit waits for the process and returns its status and its last line.
func (p *process) exit(t *testing.T) (int, string) {
	t.Helper()
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		t.Fatalf("it still runs:\n%s", p.err.String())
	}
	lines := strings.Split(strings.TrimSpace(p.err.String()), "\n")
	return p.cmd.ProcessState.ExitCode(), lines[len(lines)-1]
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (p *process) ready(t *testing.T, address string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		resp, err := http.Get("http://" + address + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case <-p.done:
			t.Fatalf("it ended:\n%s", p.err.String())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("not ready:\n%s", p.err.String())
		}
	}
}

func post(address, method, body string) (string, error) {
	resp, err := http.Post("http://"+address+"/quartet.v1.OperatorService/"+method, "application/json", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	return string(out), err
}

// A small file system of its own, to be filled up.
func tmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatalf("mount tmpfs: %v", err)
	}
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	return dir
}

// What can't run says why in one line, and exits with status 1.
func TestCannotStart(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("listne: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	pki := t.TempDir()
	if err := certs.Init(pki); err != nil {
		t.Fatal(err)
	}
	if err := certs.Issue(pki, certs.Mux, "mux1", nil); err != nil {
		t.Fatal(err)
	}
	used := t.TempDir()
	address := freePort(t)
	holder := start(t, "--insecure-loopback", "--listen", address, "--data-dir", used)
	holder.ready(t, address)
	plain := func(args ...string) []string {
		return append([]string{"--insecure-loopback", "--listen", "127.0.0.1:0", "--data-dir", t.TempDir()}, args...)
	}
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"port", plain("--listen", taken.Addr().String()), "another process has this port"},
		{"metrics port", plain("--metrics-listen", taken.Addr().String()), "another process has this port"},
		{"not loopback", plain("--listen", "0.0.0.0:0"), "is not a loopback address"},
		{"a file as directory", plain("--data-dir", file), "--data-dir"},
		{"directory in use", plain("--data-dir", used), "another manager runs on it"},
		{"full disk", plain("--data-dir", tmpfs(t, "1m")), "no space left on device"},
		{"log level", plain("--log-level", "loud"), "--log-level"},
		{"configuration", plain("--config", file), "listne: unknown field"},
		{"agent timeout", plain("--agent-timeout", "1s"), "--agent-timeout: 1s is too short"},
		{"flag", plain("--nonsense"), "--nonsense"},
		{"no certificate", []string{"--listen", "127.0.0.1:0", "--ca", file + "x"}, "quartet certs issue"},
		{"a mux's certificate", []string{"--listen", "127.0.0.1:0", "--ca", filepath.Join(pki, "ca.crt"),
			"--cert", filepath.Join(pki, "mux1.crt"), "--key", filepath.Join(pki, "mux1.key")}, "must be a manager's"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, c.args...)
			status, last := p.exit(t)
			if all := strings.TrimSpace(p.err.String()); status != 1 || !strings.Contains(last, c.want) || strings.Contains(all, "\n") {
				t.Errorf("status %d, and not one line with %q:\n%s", status, c.want, all)
			}
		})
	}
}

// Without TLS the port speaks gRPC as well, by HTTP/2 with prior knowledge.
func TestPlainGRPC(t *testing.T) {
	address := freePort(t)
	p := start(t, "--insecure-loopback", "--listen", address, "--data-dir", t.TempDir())
	p.ready(t, address)
	var h2c http.Protocols
	h2c.SetUnencryptedHTTP2(true)
	client := quartetv1connect.NewOperatorServiceClient(&http.Client{Transport: &http.Transport{Protocols: &h2c}}, "http://"+address, connect.WithGRPC())
	if resp, err := client.List(t.Context(), &quartetv1.ListRequest{Kind: "Vip"}); err != nil || resp.Generation != 1 {
		t.Errorf("%v, %v", resp, err)
	}
	resp, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), "quartet_manager_generation 1") {
		t.Errorf("metrics: %s, %v", text, err)
	}
}

// A stop by SIGTERM is clean, one by SIGKILL loses nothing that was acknowledged.
func TestRestart(t *testing.T) {
	dir, address := t.TempDir(), freePort(t)
	for i, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, syscall.SIGTERM} {
		p := start(t, "--insecure-loopback", "--listen", address, "--data-dir", dir, "--name", "m1")
		p.ready(t, address)
		if out, err := post(address, "List", `{"kind":"VipPool"}`); err != nil || strings.Count(out, "prefixes") != i {
			t.Errorf("start %d: %s, %v", i, out, err)
		}
		body := fmt.Sprintf(`{"objects":[{"kind":"VipPool","name":"p%d","prefixes":["10.%d.0.0/16"]}]}`, i, i)
		if out, err := post(address, "Apply", body); err != nil || !strings.Contains(out, "created") {
			t.Errorf("apply: %s, %v", out, err)
		}
		p.cmd.Process.Signal(signal)
		if status, last := p.exit(t); status != map[syscall.Signal]int{syscall.SIGTERM: 0, syscall.SIGKILL: -1}[signal] {
			t.Errorf("status %d: %s", status, last)
		}
	}
}

// A disk that fills up while the manager runs ends it with one line that says
// so; with room again it goes on with what it had acknowledged.
func TestDiskFills(t *testing.T) {
	disk, address := tmpfs(t, "200m"), freePort(t)
	args := []string{"--insecure-loopback", "--listen", address, "--data-dir", filepath.Join(disk, "state")}
	p := start(t, args...)
	p.ready(t, address)
	if out, err := post(address, "Apply", `{"objects":[{"kind":"VipPool","name":"first","prefixes":["10.0.0.0/16"]}]}`); err != nil || !strings.Contains(out, "created") {
		t.Fatalf("apply: %s, %v", out, err)
	}
	ballast, err := os.Create(filepath.Join(disk, "ballast"))
	if err != nil {
		t.Fatal(err)
	}
	for chunk := make([]byte, 1<<16); ; {
		if _, err := ballast.Write(chunk); err != nil {
			break
		}
	}
	ballast.Close()
	acknowledged := 1
	for i := 0; ; i++ { // the log's file has some room yet
		prefixes := ""
		for j := range 1024 {
			prefixes += fmt.Sprintf(`"11.%d.%d.%d/32",`, i, j/250, j%250)
		}
		body := fmt.Sprintf(`{"objects":[{"kind":"VipPool","name":"p%d","prefixes":[%s]}]}`, i, strings.TrimSuffix(prefixes, ","))
		out, err := post(address, "Apply", body)
		if err != nil || !strings.Contains(out, "created") {
			break
		}
		if acknowledged++; i > 250 {
			t.Fatal("the disk does not fill")
		}
	}
	status, last := p.exit(t)
	if status != 1 || !strings.HasPrefix(last, "quartet-manager: keep state: ") || !strings.Contains(last, "no space left") {
		t.Errorf("status %d: %s", status, last)
	}
	if strings.Contains(p.err.String(), "goroutine") {
		t.Errorf("it panicked:\n%s", p.err.String())
	}
	if err := os.Remove(ballast.Name()); err != nil {
		t.Fatal(err)
	}
	p = start(t, args...)
	p.ready(t, address)
	out, err := post(address, "List", `{"kind":"VipPool"}`)
	if n := strings.Count(out, `"prefixes"`); err != nil || n < acknowledged {
		t.Errorf("%d of %d pools are left, %v", n, acknowledged, err)
	}
}
