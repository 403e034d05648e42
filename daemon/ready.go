package daemon

import (
	"fmt"
	"net/http"
	"sync"
)

// Readiness is a set of named conditions that must all hold before a process
// is ready. It serves /readyz.
type Readiness struct {
	mu         sync.Mutex
	names      []string          // in the order they were named
	conditions map[string]string // why a condition does not hold; "" if it does
}

// NewReadiness has the named conditions, none of which holds yet.
func NewReadiness(conditions ...string) *Readiness {
	r := &Readiness{conditions: map[string]string{}}
	for _, name := range conditions {
		r.Missing(name, "not yet")
	}
	return r
}

// Met says that a condition holds.
func (r *Readiness) Met(name string) { r.set(name, "") }

// Missing says that a condition does not hold, and why.
func (r *Readiness) Missing(name, why string) { r.set(name, why) }

func (r *Readiness) set(name, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.conditions[name]; !ok {
		r.names = append(r.names, name)
	}
	r.conditions[name] = why
}

// Lacks lists the conditions that do not hold as "name: why"; empty if ready.
func (r *Readiness) Lacks() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var lacks []string
	for _, name := range r.names {
		if why := r.conditions[name]; why != "" {
			lacks = append(lacks, name+": "+why)
		}
	}
	return lacks
}

// ServeHTTP answers 200 "ready", or 503 and one line for each missing condition.
func (r *Readiness) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	lacks := r.Lacks()
	if len(lacks) == 0 {
		fmt.Fprintln(w, "ready")
		return
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	for _, l := range lacks {
		fmt.Fprintln(w, l)
	}
}
