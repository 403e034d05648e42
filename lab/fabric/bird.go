package fabric

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Router is what a BIRD router is told.
type Router struct {
	ID    netip.Addr // IPv4
	ASN   uint32
	Peers []Peer
	// Announce are prefixes that the router originates; packets to what is
	// in none of its Static routes come back as unreachable.
	Announce []netip.Prefix
	// Static are routes of its own to what hangs on it, announced only if
	// their prefix is among Announce.
	Static []Route
}

// Peer is an eBGP neighbour on a link of its own.
type Peer struct {
	Name      string // a BIRD symbol: letters, digits, '_' and '-'
	Interface string
	Local     netip.Addr
	Address   netip.Addr // IPv4; carries both families
	ASN       uint32
	Password  string        // TCP MD5 (RFC 2385); empty: none
	BFD       time.Duration // interval, three missed are a failure; 0: no BFD
	// Leaf peers announce to the router and are told nothing.
	Leaf bool
}

// Config is the router's bird.conf. Each prefix that several neighbours offer
// alike becomes one ECMP route; neighbours that announce GRACEFUL_SHUTDOWN
// (RFC 8326) are used last, except by the router on whose link they are, so
// that traffic leaves them before they do.
func (r Router) Config(log string) string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("router id %s;", r.ID)
	line("log %q { info, warning, error, fatal, bug, auth, remote };", log)
	line("timeformat log iso long ms;")
	line("protocol device { scan time 60; }")
	line("filter drained { if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; }")
	for _, family := range []string{"ipv4", "ipv6"} {
		line("protocol kernel kernel_%s { scan time 60; merge paths on; %s { import none; export all; }; }", family, family)
		line("protocol static announced_%s { %s;", family, family)
		via := map[netip.Prefix]netip.Addr{}
		for _, s := range r.Static {
			via[s.Dst] = s.Via
		}
		announced := map[netip.Prefix]bool{}
		for _, p := range r.Announce {
			announced[p] = true
			if p.Addr().Is4() != (family == "ipv4") {
				continue
			}
			if v, ok := via[p]; ok {
				line("  route %s via %s;", p, v)
			} else {
				line("  route %s unreachable;", p)
			}
		}
		line("}")
		line("protocol static attached_%s { %s;", family, family)
		for _, s := range r.Static {
			if s.Dst.Addr().Is4() == (family == "ipv4") && !announced[s.Dst] {
				line("  route %s via %s;", s.Dst, s.Via)
			}
		}
		line("}")
	}
	line("protocol bfd {")
	for _, p := range r.Peers {
		if p.BFD > 0 {
			line("  interface %q { interval %d us; multiplier 3; };", p.Interface, p.BFD.Microseconds())
		}
	}
	line("}")
	for _, p := range r.Peers {
		line("protocol bgp %s {", p.Name)
		line("  local %s as %d;", p.Local, r.ASN)
		line("  neighbor %s as %d;", p.Address, p.ASN)
		line("  direct; hold time 9; connect delay time 1; connect retry time 1; error wait time 1, 2;")
		if p.Password != "" {
			line("  password %q;", p.Password)
		}
		if p.BFD > 0 {
			line("  bfd on;")
		}
		for _, family := range []string{"ipv4", "ipv6"} {
			if p.Leaf {
				line("  %s { import all; export none; };", family)
				continue
			}
			line("  %s { import filter drained; next hop self;", family)
			line("    export where source = RTS_BGP || proto = \"announced_%s\"; };", family)
		}
		line("}")
	}
	return b.String()
}

// Bird asks a running BIRD over its control socket. The answer is what birdc
// would print, without the codes.
func Bird(socket, command string) ([]string, error) {
	c, err := net.DialTimeout("unix", socket, 2*time.Second)
	if err != nil {
		return nil, fmt.Errorf("ask BIRD %q: %w", command, err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return nil, err
	}
	// BIRD greets before it listens.
	in := bufio.NewScanner(c)
	if !in.Scan() {
		return nil, fmt.Errorf("ask BIRD %q: no greeting", command)
	}
	if _, err := fmt.Fprintln(c, command); err != nil {
		return nil, fmt.Errorf("ask BIRD %q: %w", command, err)
	}
	var lines []string
	for in.Scan() {
		line := in.Text()
		// "1002-text" and " text" go on; "0000 text" ends an answer, as do
		// the errors from 8000 on.
		if rest, more := strings.CutPrefix(line, " "); more {
			lines = append(lines, rest)
			continue
		}
		if len(line) < 5 {
			return nil, fmt.Errorf("ask BIRD %q: answer %q", command, line)
		}
		code, err := strconv.Atoi(line[:4])
		if err != nil {
			return nil, fmt.Errorf("ask BIRD %q: answer %q", command, line)
		}
		if code >= 8000 {
			return nil, fmt.Errorf("ask BIRD %q: %s", command, line[5:])
		}
		if line[5:] != "" {
			lines = append(lines, line[5:])
		}
		if line[4] == ' ' {
			return lines, nil
		}
	}
	return nil, fmt.Errorf("ask BIRD %q: the answer was cut off", command)
}

// BirdSocket is where the BIRD whose files are in dir listens.
func BirdSocket(dir string) string { return filepath.Join(dir, "bird.ctl") }

// BirdConfig is its configuration file.
func BirdConfig(dir string) string { return filepath.Join(dir, "bird.conf") }

// BirdCommand runs a BIRD in the foreground with its files in dir, ahead of
// other processes: BFD has deadlines of milliseconds.
func BirdCommand(dir string) Command {
	return Command{Nice: -20, Args: []string{"bird", "-f", "-c", BirdConfig(dir), "-s", BirdSocket(dir)}}
}

// Session is one BGP session as BIRD sees it.
type Session struct {
	Name  string
	State string // "established", "active", "down", ...
}

// Sessions lists a BIRD's BGP sessions.
func Sessions(dir string) ([]Session, error) {
	lines, err := Bird(BirdSocket(dir), "show protocols")
	if err != nil {
		return nil, err
	}
	var all []Session
	for _, l := range lines {
		// name BGP table state since [info]
		f := strings.Fields(l)
		if len(f) < 5 || f[1] != "BGP" {
			continue
		}
		state := "down"
		for _, word := range f[5:] {
			switch strings.TrimSuffix(word, ":") {
			case "Idle", "Connect", "Active", "OpenSent", "OpenConfirm", "Established", "Close":
				state = strings.ToLower(word)
			}
		}
		all = append(all, Session{Name: f[0], State: state})
	}
	return all, nil
}
