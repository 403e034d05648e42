package fabric

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Command is a program to run in a node.
type Command struct {
	Args  []string // Args[0] is looked up in PATH
	Env   []string // added to the caller's own
	Dir   string
	Stdin string
	// Nice is the process's scheduling priority, -20 (first) to 19.
	Nice int
}

func (c Command) exec() *exec.Cmd {
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Env = append(os.Environ(), c.Env...)
	cmd.Dir = c.Dir
	return cmd
}

// Exec prepares a command for the caller to wire; start it with StartIn, so
// that it runs in the node's network namespace and in everything else of the
// caller's, /sys/fs/bpf among it.
func (c Command) Exec() *exec.Cmd { return c.exec() }

// StartIn starts a prepared command in the node.
func (n *Node) StartIn(cmd *exec.Cmd) error { return n.Do(cmd.Start) }

// Run runs a command in the node to its end and returns what it wrote.
func (n *Node) Run(c Command) (string, error) {
	cmd := c.exec()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if c.Stdin != "" {
		cmd.Stdin = strings.NewReader(c.Stdin)
	}
	if err := n.StartIn(cmd); err != nil {
		return "", err
	}
	err := cmd.Wait()
	return out.String(), err
}

// Process is a background process, identified so that no other that gets its
// number later is taken for it.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // ticks since boot, /proc/<pid>/stat field 22
}

// Spawn starts a process in the node that outlives the caller, in a session of
// its own, with its output appended to the log file.
func (n *Node) Spawn(c Command, log string) (Process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return Process{}, fmt.Errorf("open log: %w", err)
	}
	defer f.Close()
	cmd := c.exec()
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := n.StartIn(cmd); err != nil {
		return Process{}, fmt.Errorf("start %s: %w", c.Args[0], err)
	}
	if c.Nice != 0 {
		if err := syscall.Setpriority(syscall.PRIO_PROCESS, cmd.Process.Pid, c.Nice); err != nil && !errors.Is(err, syscall.ESRCH) {
			return Process{}, fmt.Errorf("start %s: set its priority: %w", c.Args[0], err)
		}
	}
	// Reaped here while the caller lives, else by init.
	go func() { _ = cmd.Wait() }()
	start, err := startTime(cmd.Process.Pid)
	if err != nil {
		return Process{}, fmt.Errorf("start %s: it ended at once: see %s", c.Args[0], log)
	}
	return Process{PID: cmd.Process.Pid, Start: start}, nil
}

// Alive says whether the process still runs (a zombie does not).
func (p Process) Alive() bool {
	if p.PID <= 0 {
		return false
	}
	start, err := startTime(p.PID)
	return err == nil && start == p.Start
}

// Signal sends a signal; it is no error if the process has ended.
func (p Process) Signal(s syscall.Signal) error {
	if !p.Alive() {
		return nil
	}
	if err := syscall.Kill(p.PID, s); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// WaitGone waits until the process has ended.
func (p Process) WaitGone(timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for p.Alive() {
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d still runs after %s", p.PID, timeout)
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

func startTime(pid int) (uint64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The command's name, in parentheses, may hold spaces.
	_, rest, ok := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')'):]), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat: unreadable", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		// The first thread may be dead while others still hold the sockets.
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil || len(threads) <= 1 {
			return 0, os.ErrProcessDone
		}
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// KillIn kills the recorded processes and every process in the named namespaces,
// except the caller, and waits until they are gone. It returns how many there were.
func KillIn(names []string, recorded []Process) (int, error) {
	ours := map[uint64]bool{}
	for _, name := range names {
		// A leftover that is no namespace's mount has the inode of a file in /run.
		if i, err := namespaceInode(name); err == nil {
			ours[i] = true
		}
	}
	killed := map[Process]bool{}
	for _, p := range recorded {
		if !p.Alive() || p.PID == os.Getpid() {
			continue
		}
		killed[p] = true
		if err := p.Signal(syscall.SIGKILL); err != nil {
			return len(killed), err
		}
		if err := p.WaitGone(10 * time.Second); err != nil {
			return len(killed), err
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		found := 0
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return 0, fmt.Errorf("list processes: %w", err)
		}
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err != nil || pid == os.Getpid() {
				continue
			}
			i, err := inode(fmt.Sprintf("/proc/%d/ns/net", pid))
			if err != nil || !ours[i] {
				continue
			}
			start, err := startTime(pid)
			if err != nil {
				continue
			}
			p := Process{pid, start}
			found++
			killed[p] = true
			if err := p.Signal(syscall.SIGKILL); err != nil {
				return len(killed), err
			}
		}
		if found == 0 {
			return len(killed), nil
		}
		if time.Now().After(deadline) {
			return len(killed), fmt.Errorf("%d processes in the lab's namespaces survive SIGKILL", found)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func namespaceInode(name string) (uint64, error) {
	path := filepath.Join(netnsDir, name)
	i, err := inode(path)
	if err != nil {
		return 0, err
	}
	var fs syscall.Statfs_t
	if err := syscall.Statfs(path, &fs); err != nil {
		return 0, err
	}
	if fs.Type != 0x6e736673 { // NSFS_MAGIC, linux/magic.h
		return 0, fmt.Errorf("%s is not a namespace", path)
	}
	own, err := inode("/proc/self/ns/net")
	if err != nil {
		return 0, err
	}
	if i == own {
		return 0, fmt.Errorf("%s is the caller's own namespace", path)
	}
	return i, nil
}
