package lab

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/quartet-lb/quartet/lab/scenario"
	"github.com/quartet-lb/quartet/manager/object"
)

// nodeArgs are the arguments of each verb that name a node.
var nodeArgs = map[string][]int{
	"connect": {2}, "start": {2}, "ping": {0}, "drain": {0}, "undrain": {0}, "kill": {0}, "terminate": {0}, "launch": {0},
	"silence": {0}, "unsilence": {0}, "unplug": {0}, "plug": {0}, "cut": {0, 1}, "mend": {0, 1}, "mtu": {0, 1}, "ignore-mss": {0},
}

// nodeObserved are the same of each observation.
var nodeObserved = map[string][]int{
	"state": {0}, "buckets": {0}, "unreached": {0}, "hops": {0}, "sessions": {0}, "rx": {0, 1}, "tx": {0, 1},
	"forwarded": {0}, "flows": {0}, "share": {1}, "errors_log": {0},
}

// at is an error of one line of the scenario.
func (r *runner) at(s scenario.Step, err error) error {
	return fmt.Errorf("%s.txt:%d: %s: %w", r.script.Name, s.Line, r.fill(s.Text), err)
}

// checkNodes finds steps and observations of nodes that the lab has not.
func (r *runner) checkNodes() error {
	for _, s := range r.script.Steps {
		for _, i := range nodeArgs[s.Verb] {
			if _, err := r.node(r.fill(s.Args[i])); err != nil {
				return r.at(s, err)
			}
		}
		for _, sum := range []scenario.Sum{s.Condition.Left, s.Condition.Right, s.Value} {
			for _, t := range sum {
				if !t.Call {
					continue
				}
				for _, i := range nodeObserved[t.Name] {
					if _, err := r.node(r.fill(t.Args[i])); err != nil {
						return r.at(s, err)
					}
				}
			}
		}
	}
	return nil
}

// answers says in one sentence what to do if the manager does not answer.
func (l *Lab) answers(ctx context.Context, program string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := l.list(ctx, object.KindVipPool)
	if err == nil {
		return nil
	}
	m, _ := l.Topology.Node("manager")
	what := "does not answer"
	if !l.process(m.Name, l.daemon(m)).Alive() {
		what = "does not run"
	}
	lab := Command(program, l.Name)
	return fmt.Errorf("the lab's manager %s (%w): its log is %s; '%s down' and then '%s up' raise the lab afresh",
		what, err, filepath.Join(l.nodeDir(m.Name), l.daemon(m)+".log"), lab, lab)
}

// checkObjects refuses a scenario that would replace, change or delete an
// object that is there, or that wants an address of one.
func (r *runner) checkObjects(ctx context.Context) error {
	vips, err := r.lab.list(ctx, object.KindVip)
	if err != nil {
		return err
	}
	pools, err := r.lab.list(ctx, object.KindVipPool)
	if err != nil {
		return err
	}
	there, owner := map[object.Ref]bool{}, map[netip.Addr]object.Ref{}
	for _, v := range vips.GetVips() {
		ref := object.Ref{Kind: object.KindVip, Name: v.GetVip().GetName()}
		there[ref] = true
		for _, text := range v.GetVip().GetAddresses() {
			if a, err := netip.ParseAddr(text); err == nil {
				owner[a] = ref
			}
		}
	}
	for _, p := range pools.GetPools() {
		there[object.Ref{Kind: object.KindVipPool, Name: p.GetName()}] = true
	}
	lab := Command(cmp.Or(r.Program, "quartet"), r.lab.Name)
	remedy := func(ref object.Ref) string {
		return fmt.Sprintf("the scenario leaves what is there alone: '%s exec manager -- quartet delete %s %s' first, or rename yours",
			lab, strings.ToLower(ref.Kind), ref.Name)
	}
	for _, s := range r.script.Steps {
		var refs []object.Ref
		switch s.Verb {
		case "delete":
			refs = append(refs, object.Ref{Kind: object.KindVip, Name: r.fill(s.Args[0])})
		case "configure":
			refs = append(refs, object.Ref{Kind: object.KindVip, Name: r.fill(s.Options["vip"])})
		case "apply":
			docs, err := object.Read([]byte(r.fill(s.Body)))
			if err != nil {
				return r.at(s, err)
			}
			objects, wrong := object.Decode(docs)
			if len(wrong) > 0 {
				return r.at(s, fmt.Errorf("%s", object.Format(wrong[0])))
			}
			for _, o := range objects {
				refs = append(refs, o.Ref())
				if there[o.Ref()] {
					break
				}
				for _, text := range o.Vip.GetAddresses() {
					// Decode has made sure that it is one.
					a, _ := netip.ParseAddr(text)
					if ref, taken := owner[a]; taken {
						return r.at(s, fmt.Errorf("%s has the address %s that %s is to have: %s", ref, a, o, remedy(ref)))
					}
				}
			}
		}
		for _, ref := range refs {
			if there[ref] {
				return r.at(s, fmt.Errorf("%s exists: %s", ref, remedy(ref)))
			}
		}
	}
	return nil
}
