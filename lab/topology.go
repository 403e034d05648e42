package lab

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/quartet-lb/quartet/lab/fabric"
)

// Size says how large a lab's data centre is. Switches and what hangs on them
// are numbered from 1 through the whole data centre.
type Size struct {
	Cores      int `json:"cores" yaml:"cores"`           // core switches; each links to every aggregation switch
	Containers int `json:"containers" yaml:"containers"` // containers of aggregation and ToR switches
	Aggs       int `json:"aggs" yaml:"aggs"`             // aggregation switches a container
	ToRs       int `json:"tors" yaml:"tors"`             // ToR switches a container
	Muxes      int `json:"muxes" yaml:"muxes"`           // in all; mux n is on ToR n, round and round
	Hosts      int `json:"hosts" yaml:"hosts"`           // in all, spread evenly over the ToRs
	VMs        int `json:"vms" yaml:"vms"`               // a host
	Clients    int `json:"clients" yaml:"clients"`       // in all; client n is on core n, round and round
}

// DefaultSize is Duet's test bed (section 3.7, Figure 3.10): two containers of
// two aggregation and two ToR switches under two core switches, and SMuxes on
// ToRs 1, 2 and 3.
var DefaultSize = Size{Cores: 2, Containers: 2, Aggs: 2, ToRs: 2, Muxes: 3, Hosts: 8, VMs: 2, Clients: 2}

// Check says what is wrong with a size, naming the field.
func (s Size) Check() error {
	for _, f := range []struct {
		name     string
		value    int
		min, max int
	}{
		{"cores", s.Cores, 1, 99},
		{"containers", s.Containers, 1, 49},
		{"aggs", s.Aggs, 1, 49},
		{"tors", s.ToRs, 1, 49},
		{"muxes", s.Muxes, 1, 99},
		{"hosts", s.Hosts, 1, 1000},
		{"vms", s.VMs, 0, 9},
		{"clients", s.Clients, 1, 200},
	} {
		if f.value < f.min || f.value > f.max {
			return fmt.Errorf("%s: %d is outside %d to %d", f.name, f.value, f.min, f.max)
		}
	}
	tors := s.Containers * s.ToRs
	if tors > 99 || s.Containers*s.Aggs > 99 {
		return fmt.Errorf("containers: %d containers make more than 99 ToR or aggregation switches", s.Containers)
	}
	if n := (s.Hosts + tors - 1) / tors; n > 24 {
		return fmt.Errorf("hosts: %d a ToR are more than the 24 that a ToR's prefix has room for", n)
	}
	if n := (s.Muxes + tors - 1) / tors; n > 8 {
		return fmt.Errorf("muxes: %d a ToR are more than the 8 that a ToR's prefix has room for", n)
	}
	return nil
}

// Role is what a node is for.
type Role string

// Roles.
const (
	Core    Role = "core"
	Agg     Role = "agg"
	ToR     Role = "tor"
	Mux     Role = "mux"
	Host    Role = "host"
	VM      Role = "vm"
	Client  Role = "client"
	Manager Role = "manager"
)

// Switch says whether the node is a router of the fabric.
func (r Role) Switch() bool { return r == Core || r == Agg || r == ToR }

// Node is one machine of the lab.
type Node struct {
	Name  string
	Role  Role
	Index int    // in its role, from 1; a VM's host's index
	ASN   uint32 // switches and muxes
	// Addr4 and Addr6 are the node's own addresses: a switch's router ID, a
	// VM's or host's DIP, a client's first address.
	Addr4, Addr6 netip.Addr
	Up           *Node // what a server, VM or client hangs on
	Container    int   // from 1; 0 for cores and clients
	Links        []*Link
}

// Link is a virtual cable between two nodes. Its prefix is a /31 and a /127,
// or none for the link of a VM.
type Link struct {
	A, B         *Node
	AName, BName string // interface names
	A4, B4       netip.Addr
	A6, B6       netip.Addr
}

// Far is the other end of the link as n sees it.
func (l *Link) Far(n *Node) (peer *Node, local, remote string, local4, remote4, remote6 netip.Addr) {
	if n == l.A {
		return l.B, l.AName, l.BName, l.A4, l.B4, l.B6
	}
	return l.A, l.BName, l.AName, l.B4, l.A4, l.A6
}

// Uplink is the link by which a server, VM or client reaches the rest.
func (n *Node) Uplink() *Link { return n.Links[0] }

// Prefixes of the lab's address plan.
var (
	// VIPPools are what the muxes announce.
	VIPPools = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/64")}

	linkBase4 = netip.MustParseAddr("10.2.0.0")
	linkBase6 = netip.MustParseAddr("fd00:2::")
)

// Topology is a lab's nodes and links.
type Topology struct {
	Size  Size
	Nodes []*Node // in the order in which they are drawn: cores first
	Links []*Link
	named map[string]*Node
}

// Node finds a node by name.
func (t *Topology) Node(name string) (*Node, bool) {
	n, ok := t.named[name]
	return n, ok
}

// Role lists the nodes of one role.
func (t *Topology) Role(r Role) []*Node {
	var all []*Node
	for _, n := range t.Nodes {
		if n.Role == r {
			all = append(all, n)
		}
	}
	return all
}

// ToRPrefixes are what a ToR announces for the servers below it.
func ToRPrefixes(tor int) (v4, v6 netip.Prefix) {
	return netip.MustParsePrefix(fmt.Sprintf("10.1.%d.0/24", tor)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:1:%d::/64", tor))
}

// ClientPrefixes are the addresses that a client may use as its own.
func ClientPrefixes(client int) (v4, v6 netip.Prefix) {
	return netip.MustParsePrefix(fmt.Sprintf("198.18.%d.0/24", client)),
		netip.MustParsePrefix(fmt.Sprintf("2001:db8:c:%d::/64", client))
}

// NewTopology derives everything about a lab of the given size: this is the
// one place where addresses and AS numbers come from.
//
//	core n     AS 65000+n  10.0.0.n     fd00:0:0::n
//	agg n      AS 65100+n  10.0.1.n     fd00:0:1::n
//	tor n      AS 65200+n  10.0.2.n     fd00:0:2::n
//	mux n      AS 65300+n  10.1.<tor>.1 and up
//	manager                10.1.<tor>.9
//	host                   10.1.<tor>.10, .20, ...
//	VM v of it             10.1.<tor>.10+v    fd00:1:<tor>::<the same digits>
//	client n               198.18.n.1   2001:db8:c:n::1
func NewTopology(s Size) (*Topology, error) {
	if err := s.Check(); err != nil {
		return nil, err
	}
	t := &Topology{Size: s, named: map[string]*Node{}}
	add := func(n *Node) *Node {
		t.Nodes = append(t.Nodes, n)
		t.named[n.Name] = n
		return n
	}
	connect := func(a *Node, aName string, b *Node, bName string) {
		l := &Link{A: a, B: b, AName: aName, BName: bName}
		if b.Role != VM {
			n := len(t.Links)
			l.A4, l.A6 = offset(linkBase4, 2*n), offset(linkBase6, 2*n)
			l.B4, l.B6 = l.A4.Next(), l.A6.Next()
			t.Links = append(t.Links, l)
		} else {
			t.Links = append(t.Links, l)
		}
		a.Links = append(a.Links, l)
		// The way up is a node's first link.
		b.Links = append(b.Links, l)
	}
	newSwitch := func(r Role, place, i, container int) *Node {
		return add(&Node{
			Name: fmt.Sprintf("%s%d", r, i), Role: r, Index: i, Container: container,
			ASN:   uint32(65000 + 100*place + i),
			Addr4: netip.AddrFrom4([4]byte{10, 0, byte(place), byte(i)}),
			Addr6: netip.MustParseAddr(fmt.Sprintf("fd00:0:%d::%d", place, i)),
		})
	}
	var cores, tors []*Node
	for i := range s.Cores {
		cores = append(cores, newSwitch(Core, 0, i+1, 0))
	}
	for c := range s.Containers {
		for a := range s.Aggs {
			agg := newSwitch(Agg, 1, c*s.Aggs+a+1, c+1)
			for _, core := range cores {
				connect(core, agg.Name, agg, core.Name)
			}
		}
	}
	for c := range s.Containers {
		for i := range s.ToRs {
			tor := newSwitch(ToR, 2, c*s.ToRs+i+1, c+1)
			tors = append(tors, tor)
			for a := range s.Aggs {
				agg := t.named[fmt.Sprintf("agg%d", c*s.Aggs+a+1)]
				connect(agg, tor.Name, tor, agg.Name)
			}
		}
	}
	server := func(r Role, name string, index int, up *Node, number int) *Node {
		n := add(&Node{
			Name: name, Role: r, Index: index, Up: up, Container: up.Container,
			Addr4: netip.AddrFrom4([4]byte{10, 1, byte(torOf(up).Index), byte(number)}),
			Addr6: netip.MustParseAddr(fmt.Sprintf("fd00:1:%d::%d", torOf(up).Index, number)),
		})
		connect(up, name, n, "eth0")
		return n
	}
	for i := range s.Muxes {
		mux := server(Mux, fmt.Sprintf("mux%d", i+1), i+1, tors[i%len(tors)], 1+i/len(tors))
		mux.ASN = uint32(65301 + i)
	}
	server(Manager, "manager", 1, tors[len(tors)-1], 9)
	onToR := map[int]int{}
	for i := range s.Hosts {
		at := i * len(tors) / s.Hosts
		if s.Hosts < len(tors) {
			at = i
		}
		onToR[at]++
		host := server(Host, fmt.Sprintf("host%d", i+1), i+1, tors[at], 10*onToR[at])
		for v := range s.VMs {
			server(VM, fmt.Sprintf("vm%d-%d", i+1, v+1), i+1, host, 10*onToR[at]+v+1)
		}
	}
	for i := range s.Clients {
		v4, v6 := ClientPrefixes(i + 1)
		core := cores[i%len(cores)]
		n := add(&Node{
			Name: fmt.Sprintf("client%d", i+1), Role: Client, Index: i + 1, Up: core,
			Addr4: v4.Addr().Next(), Addr6: v6.Addr().Next(),
		})
		connect(core, n.Name, n, "eth0")
	}
	return t, nil
}

func torOf(n *Node) *Node {
	for n.Role != ToR {
		n = n.Up
	}
	return n
}

func offset(a netip.Addr, n int) netip.Addr {
	b := a.AsSlice()
	for i := len(b) - 1; n > 0; i-- {
		n += int(b[i])
		b[i] = byte(n)
		n >>= 8
	}
	r, _ := netip.AddrFromSlice(b)
	return r
}

// Below lists what hangs on a node, and what hangs on that.
func (t *Topology) Below(n *Node) []*Node {
	var all []*Node
	for _, m := range t.Nodes {
		for up := m.Up; up != nil; up = up.Up {
			if up == n {
				all = append(all, m)
			}
		}
	}
	return all
}

// Router is what a switch's BIRD is told.
func (t *Topology) Router(n *Node, o Options) fabric.Router {
	r := fabric.Router{
		ID: n.Addr4, ASN: n.ASN,
		Announce: []netip.Prefix{single(n.Addr4), single(n.Addr6)},
	}
	if n.Role == ToR {
		v4, v6 := ToRPrefixes(n.Index)
		r.Announce = append(r.Announce, v4, v6)
	}
	for _, l := range n.Links {
		peer, name, _, local, remote4, remote6 := l.Far(n)
		switch {
		case peer.Role.Switch():
			r.Peers = append(r.Peers, fabric.Peer{
				Name: peer.Name, Interface: name, Local: local, Address: remote4, ASN: peer.ASN, BFD: o.FabricBFD.Std(),
			})
			continue
		case peer.Role == Mux:
			r.Peers = append(r.Peers, fabric.Peer{
				Name: peer.Name, Interface: name, Local: local, Address: remote4, ASN: peer.ASN, BFD: o.MuxBFD.Std(),
				Password: o.Password, Leaf: true,
			})
		}
		route := func(dst netip.Prefix) {
			via := remote4
			if dst.Addr().Is6() {
				via = remote6
			}
			r.Static = append(r.Static, fabric.Route{Dst: dst, Via: via})
		}
		if peer.Role == Client {
			v4, v6 := ClientPrefixes(peer.Index)
			route(v4)
			route(v6)
			r.Announce = append(r.Announce, v4, v6)
			continue
		}
		for _, m := range append([]*Node{peer}, t.Below(peer)...) {
			route(single(m.Addr4))
			route(single(m.Addr6))
		}
	}
	return r
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// Originated are the prefixes that each switch brings into the fabric.
func (t *Topology) Originated() map[netip.Prefix]*Node {
	all := map[netip.Prefix]*Node{}
	for _, n := range t.Nodes {
		if n.Role.Switch() {
			for _, p := range t.Router(n, Options{}).Announce {
				all[p] = n
			}
		}
	}
	return all
}

// Distances are the numbers of links from each switch to one of them, over
// switches only: eBGP with an AS each prefers the shortest way.
func (t *Topology) Distances(to *Node) map[*Node]int {
	distance := map[*Node]int{to: 0}
	for queue := []*Node{to}; len(queue) > 0; queue = queue[1:] {
		for _, l := range queue[0].Links {
			peer, _, _, _, _, _ := l.Far(queue[0])
			if _, seen := distance[peer]; !seen && peer.Role.Switch() {
				distance[peer] = distance[queue[0]] + 1
				queue = append(queue, peer)
			}
		}
	}
	return distance
}

// Draw is a picture of the topology. mark is called for each node and says
// what to write behind its name, if anything.
func (t *Topology) Draw(mark func(*Node) string) string {
	var b strings.Builder
	label := func(n *Node) string {
		if m := mark(n); m != "" {
			return n.Name + " " + m
		}
		return n.Name
	}
	row := func(indent, what string, nodes []*Node) {
		if len(nodes) == 0 {
			return
		}
		var parts []string
		for _, n := range nodes {
			parts = append(parts, label(n))
		}
		fmt.Fprintf(&b, "%s%-9s %s\n", indent, what, strings.Join(parts, "   "))
	}
	in := func(r Role, container int) []*Node {
		var all []*Node
		for _, n := range t.Role(r) {
			if n.Container == container {
				all = append(all, n)
			}
		}
		return all
	}
	row("", "clients", t.Role(Client))
	b.WriteString("             |  outside\n")
	row("", "core", t.Role(Core))
	b.WriteString("             |  every core to every aggregation switch\n")
	for c := range t.Size.Containers {
		fmt.Fprintf(&b, "container %d\n", c+1)
		row("  ", "agg", in(Agg, c+1))
		for _, tor := range in(ToR, c+1) {
			fmt.Fprintf(&b, "  └ %s\n", label(tor))
			var servers []*Node
			for _, l := range tor.Links {
				if peer, _, _, _, _, _ := l.Far(tor); !peer.Role.Switch() {
					servers = append(servers, peer)
				}
			}
			for i, s := range servers {
				branch := "├"
				if i == len(servers)-1 {
					branch = "└"
				}
				fmt.Fprintf(&b, "      %s %-8s %-12s %s", branch, s.Name, s.Addr4, mark(s))
				for _, vm := range t.Below(s) {
					fmt.Fprintf(&b, "  %s %s", vm.Name, vm.Addr4)
					if m := mark(vm); m != "" {
						b.WriteString(" " + m)
					}
				}
				b.WriteString("\n")
			}
		}
	}
	return b.String()
}
