package lab

import (
	"context"
	"fmt"
	"strings"
	"time"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/lab/fabric"
)

// Status is a picture of the lab for people: the topology with what is up, and
// where each switch sends the VIPs.
func (l *Lab) Status(ctx context.Context) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "lab %s   namespaces %s-<node>   files %s\n\n", l.Name, l.Name, l.Dir())
	nodes := map[string]*quartetv1.NodeStatus{}
	var trouble string
	if !l.FabricOnly {
		var err error
		ask, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if nodes, err = l.observed(ask); err != nil {
			trouble = fmt.Sprintf("the manager does not answer: %v\n", err)
		}
	}
	b.WriteString(l.Topology.Draw(func(n *Node) string {
		if l.FabricOnly && !n.Role.Switch() || n.Role == Client {
			return ""
		}
		if !l.process(n.Name, l.daemon(n)).Alive() {
			return "[DOWN]"
		}
		switch n.Role {
		case Core, Agg, ToR:
			sessions, err := fabric.Sessions(l.nodeDir(n.Name))
			if err != nil {
				return "[BIRD does not answer]"
			}
			up := 0
			for _, s := range sessions {
				if s.State == "established" {
					up++
				}
			}
			if up < len(sessions) {
				return fmt.Sprintf("[BGP %d of %d up]", up, len(sessions))
			}
			return fmt.Sprintf("[BGP %d]", up)
		case Mux, Host:
			s, ok := nodes[n.Name]
			if !ok && trouble != "" {
				return "[no answer from the manager]"
			}
			if !ok {
				return "[unknown to the manager]"
			}
			if !s.GetConnected() {
				return "[not connected]"
			}
			return fmt.Sprintf("[%s, generation %d]", s.GetState(), s.GetGeneration())
		default:
			return ""
		}
	}))
	b.WriteString("\nways to the VIPs (switch: next hops)\n")
	for _, pool := range VIPPools {
		fmt.Fprintf(&b, "  %s\n", pool)
		for _, n := range l.Topology.Nodes {
			if !n.Role.Switch() {
				continue
			}
			net, err := l.Net(n.Name)
			if err != nil {
				return "", err
			}
			routes, err := net.NextHops()
			if err != nil {
				return "", err
			}
			for p, hops := range routes {
				if !pool.Overlaps(p) || p.Bits() < pool.Bits() {
					continue
				}
				fmt.Fprintf(&b, "    %-6s", n.Name)
				if p != pool {
					fmt.Fprintf(&b, " %s:", p)
				}
				for _, hop := range sortedKeys(hops) {
					fmt.Fprintf(&b, " %s", hop)
				}
				b.WriteString("\n")
			}
		}
	}
	b.WriteString(trouble)
	return b.String(), nil
}
