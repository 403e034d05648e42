// Package hostagent is quartet-hostagent, which runs on every server: it keeps
// the packet path, the health checks and the metering of its host as the
// manager says.
package hostagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/hostagent/datapath"
	"github.com/quartet-lb/quartet/hostagent/health"
	"github.com/quartet-lb/quartet/hostagent/metering"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/nodelink"
)

// meterEvery is how often meters are read and reported.
const meterEvery = 10 * time.Second

// Config is an agent's configuration.
type Config struct {
	// Datapath is open; the agent doesn't close it.
	Datapath *datapath.Datapath
	// Commands is the directory of check commands; "" runs none.
	Commands string
	// Changed is called, from any goroutine, when a report is due at once.
	Changed func()
	Log     *slog.Logger
	Metrics prometheus.Registerer // nil: no metrics
}

// Agent is the host's side of the line to the manager (nodelink.HostHandler).
type Agent struct {
	config  Config
	checks  *health.Monitor
	applied atomic.Bool // tables run

	mu     sync.Mutex
	meters metering.Reporter // guarded by mu
	metred time.Time         // guarded by mu: when meters were read last
}

var _ nodelink.HostHandler = (*Agent)(nil)

// New makes an agent that runs what its packet path runs already, and no checks.
func New(c Config) *Agent {
	a := &Agent{config: c, checks: health.New(health.Config{
		Commands: c.Commands, Changed: c.Changed, Log: c.Log, Metrics: c.Metrics,
	})}
	if c.Metrics != nil {
		c.Metrics.MustRegister(&collector{agent: a})
	}
	return a
}

// Close ends the health checks. The packet path goes on.
func (a *Agent) Close() { a.checks.Close() }

// Running says whether tables have been applied since the agent was made.
func (a *Agent) Running() bool { return a.applied.Load() }

// ApplySnapshot runs these tables and nothing else. Errors name the field, and
// change nothing.
func (a *Agent) ApplySnapshot(_ context.Context, tables *quartetv1.HostTables, from nodelink.Source) error {
	rules, err := rulesOf("rules", tables.Rules)
	if err != nil {
		return err
	}
	checks, err := a.checks.Prepare(tables.Checks, nil, true)
	if err != nil {
		return err
	}
	if err := a.config.Datapath.Replace(rules); err != nil {
		return err
	}
	a.checks.Commit(checks)
	a.applied.Store(true)
	a.config.Log.Info("tables run", "generation", tables.Generation, "rules", len(rules), "checks", len(tables.Checks), "from", from.String())
	return nil
}

// ApplyDelta changes the tables. Errors name the field, and change nothing.
func (a *Agent) ApplyDelta(_ context.Context, delta *quartetv1.HostDelta) error {
	put, err := rulesOf("put_rules", delta.PutRules)
	if err != nil {
		return err
	}
	gone, err := keysOf("delete_rules", delta.DeleteRules, put)
	if err != nil {
		return err
	}
	checks, err := a.checks.Prepare(delta.PutChecks, delta.DeleteChecks, false)
	if err != nil {
		return err
	}
	if err := a.config.Datapath.Apply(datapath.Delta{Put: put, Delete: gone}); err != nil {
		return err
	}
	a.checks.Commit(checks)
	a.config.Log.Debug("tables changed", "generation", delta.Generation, "rules_put", len(put),
		"rules_deleted", len(gone), "checks_put", len(delta.PutChecks), "checks_deleted", len(delta.DeleteChecks))
	return nil
}

// Trace is for muxes.
func (a *Agent) Trace(context.Context, *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	return nil, errors.New("a host agent traces no packets; ask a mux")
}

// Report fills in health, counters and state.
func (a *Agent) Report(r *quartetv1.ReportRequest, want nodelink.Want) {
	r.State = "starting"
	if a.Running() {
		r.State = "ready"
	}
	r.Results = a.checks.Results(want.AllResults)
	if !want.Counters {
		return
	}
	exits, err := a.config.Datapath.Exits()
	if err != nil {
		a.config.Log.Warn("counters not reported", "error", err)
	}
	r.Exits = exits

	a.mu.Lock()
	defer a.mu.Unlock()
	if !want.AllResults && time.Since(a.metred) < meterEvery {
		return
	}
	meters, err := a.config.Datapath.Meters()
	if err != nil {
		a.config.Log.Warn("meters not reported", "error", err)
		return
	}
	a.metred = time.Now()
	r.Meters = a.meters.Messages(meters, want.AllResults)
}

func rulesOf(field string, messages []*quartetv1.NatRule) ([]datapath.Rule, error) {
	rules := make([]datapath.Rule, 0, len(messages))
	for i, m := range messages {
		rule, err := keyOf(m)
		if err == nil {
			rule.DIP, err = address("dip", m.Dip)
		}
		if err == nil && m.DipPort > 65535 {
			err = fmt.Errorf("dip_port: is %d, 0..65535 is wanted", m.DipPort)
		}
		if err != nil {
			return nil, fmt.Errorf("%s[%d].%w", field, i, err)
		}
		rule.DIPPort = uint16(m.DipPort)
		rules = append(rules, rule)
	}
	return rules, nil
}

// keysOf are the rules to delete, without those that are put again.
func keysOf(field string, messages []*quartetv1.NatRule, put []datapath.Rule) ([]datapath.Rule, error) {
	type key struct {
		tunnel   netip.Addr
		endpoint lb.Endpoint
	}
	again := map[key]bool{}
	for _, r := range put {
		again[key{r.Tunnel, r.Endpoint}] = true
	}
	var rules []datapath.Rule
	for i, m := range messages {
		rule, err := keyOf(m)
		if err != nil {
			return nil, fmt.Errorf("%s[%d].%w", field, i, err)
		}
		if !again[key{rule.Tunnel, rule.Endpoint}] {
			rules = append(rules, rule)
		}
	}
	return rules, nil
}

// keyOf reads a rule's key; package datapath knows what else is valid.
func keyOf(m *quartetv1.NatRule) (datapath.Rule, error) {
	tunnel, err := address("tunnel", m.GetTunnel())
	if err != nil {
		return datapath.Rule{}, err
	}
	vip, err := address("vip", m.GetVip())
	if err != nil {
		return datapath.Rule{}, err
	}
	if m.Protocol > 255 {
		return datapath.Rule{}, fmt.Errorf("protocol: is %d, 6 (TCP) or 17 (UDP) is wanted", m.Protocol)
	}
	if m.Port > 65535 {
		return datapath.Rule{}, fmt.Errorf("port: is %d, 0..65535 is wanted", m.Port)
	}
	return datapath.Rule{Tunnel: tunnel, Endpoint: lb.Endpoint{
		VIP: vip, Protocol: lb.Protocol(m.Protocol), Port: uint16(m.Port),
	}}, nil
}

func address(field string, b []byte) (netip.Addr, error) {
	addr, ok := netip.AddrFromSlice(b)
	if !ok {
		return netip.Addr{}, fmt.Errorf("%s: has %d bytes, 4 or 16 are wanted", field, len(b))
	}
	return addr, nil
}
