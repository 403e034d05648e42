package manager

import (
	"fmt"
	"testing"

	"github.com/quartet-lb/quartet/manager/compile"
)

// A stream remembers what its node has of the VIPs that changed since, once,
// and gives up remembering where a snapshot is the smaller message.
func TestBehind(t *testing.T) {
	s := &stream{notify: make(chan struct{}, 1), before: map[string]*compile.Result{}}
	first, second := &compile.Result{}, &compile.Result{}
	s.behind(2, map[string]compile.Change{"web": {Before: first, After: second}})
	s.behind(3, map[string]compile.Change{"web": {Before: second}})
	if s.before["web"] != first || s.target != 3 || s.snapshot || len(s.notify) != 1 {
		t.Errorf("%+v", s)
	}
	for i := range maxBehind {
		s.behind(uint64(4+i), map[string]compile.Change{fmt.Sprint(i): {}})
	}
	if !s.snapshot || s.before != nil || s.target != 3+maxBehind {
		t.Errorf("after %d VIPs: snapshot %v, target %d", maxBehind, s.snapshot, s.target)
	}
	s.behind(9999, map[string]compile.Change{"web": {}}) // and is not nil there
	if s.target != 9999 {
		t.Errorf("target %d", s.target)
	}
}
