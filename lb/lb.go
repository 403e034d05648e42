// Package lb has Quartet's nouns, which every other package speaks in: VIP,
// endpoint, DIP and tunnel. They are values without I/O.
package lb

import (
	"fmt"
	"net/netip"
)

// Protocol is an IP protocol number (IANA "Protocol Numbers").
type Protocol uint8

// Protocols that endpoints and the packet paths know.
const (
	ICMP   Protocol = 1
	IPIP   Protocol = 4
	TCP    Protocol = 6
	UDP    Protocol = 17
	IPv6   Protocol = 41
	ICMPv6 Protocol = 58
)

// String is the protocol's name as in the schema and on the command line.
func (p Protocol) String() string {
	switch p {
	case ICMP:
		return "ICMP"
	case IPIP:
		return "IPIP"
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case IPv6:
		return "IPv6"
	case ICMPv6:
		return "ICMPv6"
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// ParseProtocol reads an endpoint's protocol: "TCP" or "UDP", in either case.
func ParseProtocol(s string) (Protocol, error) {
	switch s {
	case "TCP", "tcp":
		return TCP, nil
	case "UDP", "udp":
		return UDP, nil
	}
	return 0, fmt.Errorf("%q is not a protocol: TCP or UDP", s)
}

// Endpoint names what a packet asks for: (VIP, protocol, port), Ananta section 3.2.1.
type Endpoint struct {
	VIP      netip.Addr
	Protocol Protocol
	Port     uint16 // host byte order; 0 means any port
}

// String is "TCP 203.0.113.10:80"; any port is "*".
func (e Endpoint) String() string {
	port := "*"
	if e.Port != 0 {
		port = fmt.Sprint(e.Port)
	}
	host := e.VIP.String()
	if e.VIP.Is6() {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("%s %s:%s", e.Protocol, host, port)
}

// DIP is one server behind an endpoint: the address and port that packets are
// NATed to, and the tunnel that takes them to its host.
type DIP struct {
	Addr   netip.Addr // the packet's family
	Port   uint16     // host byte order; 0 keeps the packet's own
	Tunnel Tunnel
}

// String is "10.1.3.11:8080".
func (d DIP) String() string {
	if d.Port == 0 {
		return d.Addr.String()
	}
	return netip.AddrPortFrom(d.Addr, d.Port).String()
}

// Encapsulation is the tunnel's format; WIRE.md in package encap specifies each.
type Encapsulation uint8

// Encapsulations. Muxes send IPIP and GUE; host agents accept all three.
const (
	EncapIPIP  Encapsulation = iota // IP in IP, RFC 2003, RFC 2473, RFC 4213
	EncapGUE                        // GUE variant 1 on UDP port 6080
	EncapVXLAN                      // RFC 7348, from switches that know nothing else
)

// String is the name in the schema.
func (e Encapsulation) String() string {
	switch e {
	case EncapIPIP:
		return "ipip"
	case EncapGUE:
		return "gue"
	case EncapVXLAN:
		return "vxlan"
	}
	return fmt.Sprintf("encapsulation %d", uint8(e))
}

// Tunnel is how a packet travels from mux to host.
type Tunnel struct {
	Dst   netip.Addr // outer destination; either family, whatever the packet's is
	Encap Encapsulation
}

// String is "ipip to 10.1.3.11".
func (t Tunnel) String() string { return fmt.Sprintf("%s to %s", t.Encap, t.Dst) }

// Flow is a packet's 5-tuple in the direction client to VIP. Ports are in host
// byte order; both are 0 for packets without them.
type Flow struct {
	Src, Dst         netip.Addr
	Protocol         Protocol
	SrcPort, DstPort uint16
}

// Reverse is the same flow seen from the other side.
func (f Flow) Reverse() Flow {
	f.Src, f.Dst = f.Dst, f.Src
	f.SrcPort, f.DstPort = f.DstPort, f.SrcPort
	return f
}

// String is "TCP 198.51.100.7:40000 > 203.0.113.10:80".
func (f Flow) String() string {
	return fmt.Sprintf("%s %s > %s", f.Protocol,
		netip.AddrPortFrom(f.Src, f.SrcPort), netip.AddrPortFrom(f.Dst, f.DstPort))
}

// Consistency is how a mux keeps a connection on its DIP.
type Consistency uint8

// Consistencies.
const (
	ConsistencyHash  Consistency = iota // by the lookup table alone; no state in the mux
	ConsistencyTable                    // connection table first (Ananta section 3.3.3)
)

// String is the name in the schema.
func (c Consistency) String() string {
	if c == ConsistencyTable {
		return "table"
	}
	return "hash"
}
