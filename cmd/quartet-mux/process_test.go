package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// host is a namespace with the real binary beside it.
//
//	eth0 10.1.1.1 ──── far, in the same namespace, MTU as eth0's
type host struct {
	t   *testing.T
	dir string
	ns  string
}

func newHost(t *testing.T) *host {
	t.Helper()
	// Nobody is to reach the binary and the state, which t.TempDir keeps from others.
	dir, err := os.MkdirTemp("", "quartet-mux-test-")
	must(t, err)
	must(t, os.Chmod(dir, 0o755))
	h := &host{t: t, dir: dir, ns: fmt.Sprintf("qmx%d", os.Getpid())}
	t.Cleanup(func() { os.RemoveAll(dir) })
	h.sh("ip", "netns", "add", h.ns)
	t.Cleanup(func() { h.sh("ip", "netns", "del", h.ns) })
	for _, c := range []string{
		"link set lo up", "link add eth0 type veth peer name far", "link set eth0 up", "link set far up",
		"addr add 10.1.1.1/24 dev eth0",
	} {
		h.sh("ip", append([]string{"-n", h.ns}, strings.Fields(c)...)...)
	}
	h.sh("go", "build", "-o", dir, ".")
	h.sh("mkdir", "-m", "0777", h.file("nobody"))
	t.Cleanup(func() { h.run(nil, "detach", "--pin-dir", h.pins()) })
	return h
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (h *host) file(name string) string { return filepath.Join(h.dir, name) }
func (h *host) pins() string            { return "/sys/fs/bpf/quartet-test-" + h.ns }

func (h *host) sh(command string, args ...string) {
	h.t.Helper()
	if out, err := exec.Command(command, args...).CombinedOutput(); err != nil {
		h.t.Fatalf("%s %s: %v: %s", command, strings.Join(args, " "), err, out)
	}
}

// args are flags that the mux starts with, and more.
func (h *host) args(more ...string) []string {
	return append([]string{"--name", "mux1", "--address", "10.1.1.1", "--manager", "http://127.0.0.1:7470", "--insecure-loopback",
		"--interface", "eth0", "--pin-dir", h.pins(), "--state-dir", h.file("state"), "--metrics-listen", "", "--flows", "4096"}, more...)
}

// command is the mux in the namespace, by way of the commands before, if any.
func (h *host) command(before []string, args ...string) *exec.Cmd {
	words := append([]string{"--net=/run/netns/" + h.ns}, before...)
	return exec.Command("nsenter", append(append(words, h.file("quartet-mux")), args...)...)
}

// run runs the mux to its end, which a refusal comes to by itself.
func (h *host) run(before []string, args ...string) (output string, status int) {
	h.t.Helper()
	c := h.command(before, args...)
	var out bytes.Buffer
	c.Stdout, c.Stderr, c.WaitDelay = &out, &out, time.Second
	must(h.t, c.Start())
	late := time.AfterFunc(20*time.Second, func() { c.Process.Kill() })
	defer late.Stop()
	if err := c.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		h.t.Error(err)
	}
	return out.String(), c.ProcessState.ExitCode()
}

// listen takes a port in the namespace for the test's time.
func (h *host) listen(address string) {
	h.t.Helper()
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		fd, err := unix.Open("/run/netns/"+h.ns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			defer unix.Close(fd)
			err = unix.Setns(fd, unix.CLONE_NEWNET)
		}
		if err == nil {
			var l net.Listener
			if l, err = net.Listen("tcp", address); err == nil {
				h.t.Cleanup(func() { l.Close() })
			}
		}
		failed <- err
	}()
	must(h.t, <-failed)
}

// starts runs the mux until its log says until, stops it, and returns all that
// it logged.
func (h *host) starts(until string, before []string, args ...string) string {
	h.t.Helper()
	c := h.command(before, args...)
	r, w, err := os.Pipe()
	must(h.t, err)
	defer r.Close()
	c.Stdout, c.Stderr = w, w
	must(h.t, c.Start())
	w.Close()
	late := time.AfterFunc(20*time.Second, func() { c.Process.Kill() })
	defer late.Stop()
	var log []byte
	stopped := false // a second signal would kill it
	for buffer := make([]byte, 4096); ; {
		n, err := r.Read(buffer)
		log = append(log, buffer[:n]...)
		if !stopped && bytes.Contains(log, []byte(until)) {
			c.Process.Signal(syscall.SIGTERM)
			stopped = true
		}
		if errors.Is(err, io.EOF) {
			break
		}
	}
	if err := c.Wait(); err != nil || !bytes.Contains(log, []byte(until)) {
		h.t.Errorf("did not log %s, or not stop: %v\n%s", until, err, log)
	}
	return string(log)
}

func (h *host) refused(want string, before []string, args ...string) {
	h.t.Helper()
	out, status := h.run(before, args...)
	if status != 1 || strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, "quartet-mux: ") || !strings.Contains(out, want) {
		h.t.Errorf("%v %v: status %d: %s\nwant one line with %s", before, args, status, out, want)
	}
}

func (h *host) attached(link string) bool {
	out, err := exec.Command("ip", "-n", h.ns, "link", "show", link).CombinedOutput()
	must(h.t, err)
	return bytes.Contains(out, []byte("xdp"))
}

// A place that is taken, or a thing that is missing: one clear line, status 1,
// nothing attached.
func TestRefusals(t *testing.T) {
	h := newHost(t)
	must(t, os.WriteFile(h.file("taken"), nil, 0o644))
	nobody := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"}
	own := h.args("--state-dir", h.file("nobody"))
	h.refused("CAP_NET_RAW is needed", nobody, own...)
	for missing, want := range map[string]string{
		"net_raw":        "CAP_NET_RAW",
		"bpf,-sys_admin": "CAP_BPF, CAP_NET_ADMIN",
		"net_admin":      "CAP_NET_ADMIN",
	} {
		h.refused(want, []string{"setpriv", "--bounding-set=-" + missing, "--inh-caps=-" + missing}, own...)
	}
	h.refused("this kernel has no BTF", []string{"unshare", "-m", "sh", "-c", `mount -t tmpfs none /sys/kernel/btf && exec "$@"`, "sh"}, h.args()...)
	h.refused(`attach mux to lo: its driver has no XDP`, nil, h.args("--interface", "lo")...)
	h.refused("attach mux to eth7: no such interface", nil, h.args("--interface", "eth7")...)
	h.refused(h.file("taken"), nil, h.args("--state-dir", h.file("taken"))...)
	h.listen("127.0.0.1:7471")
	h.refused("listen on 127.0.0.1:7471: another process has this port", nil, h.args("--metrics-listen", "127.0.0.1:7471")...)
	h.listen(":179")
	h.refused("start BGP: listen on port 179: another process has this port", nil, h.args(bgpFlags...)...)
	if h.attached("eth0") || h.attached("lo") {
		t.Error("something was attached")
	}

	h.starts("msg=starting", nil, h.args()...)
	if !h.attached("eth0") {
		t.Fatal("a stopped mux leaves its program, and it is not there")
	}
	other := h.pins() + "-other"
	defer h.run(nil, "detach", "--pin-dir", other)
	h.refused("attach mux to eth0: another XDP program is on it", nil, h.args("--pin-dir", other)...)
	h.starts("msg=starting", nil, h.args("--generic", "--interface", "lo")...)
	if !h.attached("lo") {
		t.Error("--generic: not attached to lo")
	}
}

var bgpFlags = []string{"--bgp-asn", "65301", "--bgp-peer", "address=10.1.1.254,asn=65201,bfd=50ms*3"}

// The unit's capabilities are enough.
func TestUnitCapabilities(t *testing.T) {
	h := newHost(t)
	unit, err := os.ReadFile("../../packaging/systemd/quartet-mux.service")
	must(t, err)
	_, rest, found := strings.Cut(string(unit), "\nCapabilityBoundingSet=")
	line, _, _ := strings.Cut(rest, "\n")
	if !found {
		t.Fatal("the unit bounds no capabilities")
	}
	within := []string{"setpriv", "--no-new-privs", "--bounding-set=-all"}
	for _, c := range strings.Fields(line) {
		within[2] += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	// The peer's state is looked at once all has been opened.
	log := h.starts(`msg="BGP peer"`, within, h.args(bgpFlags...)...)
	for _, line := range strings.Split(log, "\n") {
		if strings.Contains(line, "permitted") || strings.Contains(line, "permission") || strings.Contains(line, "priority") {
			t.Errorf("under the unit's capabilities: %s", line)
		}
	}
}
