package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/quartet-lb/quartet/lab/fabric"
)

// spawn starts a node's daemon and records which process it is.
func (l *Lab) spawn(node, daemon string, c fabric.Command) error {
	net, err := l.Net(node)
	if err != nil {
		return err
	}
	p, err := net.Spawn(c, filepath.Join(l.nodeDir(node), daemon+".log"))
	if err != nil {
		return fmt.Errorf("%s: %w", node, err)
	}
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := os.WriteFile(l.pidFile(node, daemon), text, 0o644); err != nil {
		return fmt.Errorf("record %s of %s: %w", daemon, node, err)
	}
	return nil
}

func (l *Lab) pidFile(node, daemon string) string {
	return filepath.Join(l.nodeDir(node), daemon+".pid")
}

// process is a node's daemon, running or not; the zero Process if it was never
// started.
func (l *Lab) process(node, daemon string) fabric.Process { return readProcess(l.pidFile(node, daemon)) }

func readProcess(file string) fabric.Process {
	var p fabric.Process
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		return fabric.Process{}
	}
	return p
}

// recorded are all processes that a lab has started.
func recorded(name string) []fabric.Process {
	// The pattern is fixed: Glob can't fail.
	files, _ := filepath.Glob(filepath.Join(stateDir(name), "*", "*.pid"))
	var all []fabric.Process
	for _, f := range files {
		all = append(all, readProcess(f))
	}
	return all
}

func (l *Lab) startDaemons(_ context.Context, _ progress) error { return nil }
