package bgp

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"
)

// Config is a speaker's configuration.
type Config struct {
	ASN      uint32     // the speaker's own, 1..4294967295
	RouterID netip.Addr // IPv4, unique in the fabric
	Peers    []Peer     // at least one
	// ListenPort is the TCP port for sessions that peers open; 0: 179.
	ListenPort uint16
	// NoListen leaves it to the speaker to open all sessions.
	NoListen bool
	Log      *slog.Logger
}

// Peer is a router to announce to. IPv4 prefixes go to peers with an IPv4
// address; IPv6 prefixes to peers with an IPv6 address and to those with NextHop6.
type Peer struct {
	Address netip.Addr
	ASN     uint32
	// Password is the TCP MD5 key (RFC 2385), up to 80 bytes; empty: none.
	Password string
	// HoldTime is proposed to the peer; at least 3 s, default 30 s. The lower of
	// both proposals counts.
	HoldTime  time.Duration
	Keepalive time.Duration // default HoldTime/3
	BFD       BFD
	// NextHop6 carries IPv6 prefixes over this IPv4 session, with this next hop.
	NextHop6 netip.Addr
	Local    netip.Addr // source address; zero: as routed
	Port     uint16     // the peer's TCP port; 0: 179
	Passive  bool       // wait for the peer to open the session
	Multihop uint8      // TTL for an eBGP peer that is not on the link; 0: on the link
}

// BFD is Bidirectional Forwarding Detection on one hop (RFC 5880, RFC 5881),
// asynchronous mode. A peer is dead after Interval × Multiplier without a packet.
type BFD struct {
	Interval   time.Duration // of sending, and the least that is accepted; 1 ms..1 h; 0: no BFD
	Multiplier uint8         // 1..255
}

// String is "5ms*3", or "off".
func (b BFD) String() string {
	if b.Interval == 0 {
		return "off"
	}
	return fmt.Sprintf("%s*%d", b.Interval, b.Multiplier)
}

// ParseBFD reads "5ms*3".
func ParseBFD(text string) (BFD, error) {
	interval, multiplier, ok := strings.Cut(text, "*")
	d, err := time.ParseDuration(interval)
	m, merr := strconv.ParseUint(multiplier, 10, 8)
	if !ok || err != nil || merr != nil || m == 0 || d < time.Millisecond || d > time.Hour {
		return BFD{}, fmt.Errorf("%q is not interval*multiplier: 1ms..1h, 1..255, as in 5ms*3", text)
	}
	return BFD{Interval: d, Multiplier: uint8(m)}, nil
}

// ParsePeer reads "address=10.0.0.1,asn=65001,password-file=/etc/quartet/md5,hold=30s,keepalive=10s,
// bfd=5ms*3,next-hop6=2001:db8::1,local=10.0.0.2,port=179,multihop=2,passive". Only
// address and asn must be there.
func ParsePeer(text string) (Peer, error) {
	p := Peer{}
	seen := map[string]bool{}
	for _, pair := range strings.Split(text, ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(pair), "=")
		if seen[key] {
			return Peer{}, fmt.Errorf("%s: given twice", key)
		}
		seen[key] = true
		var err error
		switch key {
		case "address":
			p.Address, err = parseAddr(value)
		case "asn":
			p.ASN, err = ParseASN(value)
		case "password-file":
			p.Password, err = readPassword(value)
		case "hold":
			p.HoldTime, err = parseSeconds(value)
		case "keepalive":
			p.Keepalive, err = parseSeconds(value)
		case "bfd":
			p.BFD, err = ParseBFD(value)
		case "next-hop6":
			p.NextHop6, err = parseAddr(value)
		case "local":
			p.Local, err = parseAddr(value)
		case "port":
			var n uint64
			if n, err = strconv.ParseUint(value, 10, 16); err != nil || n == 0 {
				err = fmt.Errorf("%q is not a port: 1..65535", value)
			}
			p.Port = uint16(n)
		case "multihop":
			var n uint64
			if n, err = strconv.ParseUint(value, 10, 8); err != nil || n == 0 {
				err = fmt.Errorf("%q is not a number of hops: 1..255", value)
			}
			p.Multihop = uint8(n)
		case "passive":
			if value != "" && value != "true" && value != "false" {
				err = fmt.Errorf("%q is not true or false", value)
			}
			p.Passive = value != "false"
		default:
			err = fmt.Errorf("unknown field; valid: address, asn, password-file, hold, keepalive, bfd, " +
				"next-hop6, local, port, multihop, passive")
		}
		if err != nil {
			return Peer{}, fmt.Errorf("%s: %w", key, err)
		}
	}
	for _, key := range []string{"address", "asn"} {
		if !seen[key] {
			return Peer{}, fmt.Errorf("%s: missing", key)
		}
	}
	if err := p.check(); err != nil {
		return Peer{}, err
	}
	return p, nil
}

// ParseASN reads an AS number, 1..4294967295.
func ParseASN(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not an AS number: 1..4294967295", text)
	}
	return uint32(n), nil
}

func parseAddr(text string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(text)
	if err != nil || addr.IsUnspecified() || addr.IsMulticast() {
		return netip.Addr{}, fmt.Errorf("%q is not an IPv4 or IPv6 address of a machine", text)
	}
	return addr.Unmap(), nil
}

func parseSeconds(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d%time.Second != 0 {
		return 0, fmt.Errorf("%q is not a whole number of seconds, as in 30s", text)
	}
	return d, nil
}

// readPassword reads the first line of a file that only its owner may read.
func readPassword(path string) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return "", fmt.Errorf("%s can be read by others: mode 0600 is wanted", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	line = strings.TrimSuffix(line, "\r")
	if line == "" {
		return "", fmt.Errorf("%s has no password in its first line", path)
	}
	return line, nil
}

func (c *Config) check() error {
	if c.ASN == 0 {
		return fmt.Errorf("ASN: 1..4294967295 is wanted")
	}
	if !c.RouterID.Is4() || c.RouterID.IsUnspecified() {
		return fmt.Errorf("router ID: %s is not an IPv4 address", c.RouterID)
	}
	if len(c.Peers) == 0 {
		return fmt.Errorf("peers: at least one is wanted")
	}
	if c.ListenPort == 0 {
		c.ListenPort = 179
	}
	seen := map[netip.Addr]bool{}
	c.Peers = append([]Peer(nil), c.Peers...)
	for i := range c.Peers {
		p := &c.Peers[i]
		if err := p.check(); err != nil {
			return fmt.Errorf("peers[%d] (%s): %w", i, p.Address, err)
		}
		if seen[p.Address] {
			return fmt.Errorf("peers[%d]: %s is given twice", i, p.Address)
		}
		seen[p.Address] = true
	}
	return nil
}

// check fills in defaults and says which field is wrong.
func (p *Peer) check() error {
	if p.HoldTime == 0 {
		p.HoldTime = 30 * time.Second
	}
	if p.Keepalive == 0 {
		p.Keepalive = (p.HoldTime / 3).Truncate(time.Second)
	}
	switch {
	case !p.Address.IsValid():
		return fmt.Errorf("address: missing")
	case p.ASN == 0:
		return fmt.Errorf("asn: 1..4294967295 is wanted")
	case len(p.Password) > 80:
		return fmt.Errorf("password: longer than the 80 bytes that TCP MD5 can use")
	case p.HoldTime < 3*time.Second || p.HoldTime > 65535*time.Second:
		return fmt.Errorf("hold: %s is not within 3s..65535s", p.HoldTime)
	case p.Keepalive < time.Second || p.Keepalive > p.HoldTime/3:
		return fmt.Errorf("keepalive: %s is not within 1s..hold/3 (%s)", p.Keepalive, p.HoldTime/3)
	case p.NextHop6.IsValid() && !p.NextHop6.Is6():
		return fmt.Errorf("next-hop6: %s is not an IPv6 address", p.NextHop6)
	case p.NextHop6.IsValid() && p.Address.Is6():
		return fmt.Errorf("next-hop6: only for a peer with an IPv4 address; this one is %s", p.Address)
	case p.Local.IsValid() && p.Local.Is4() != p.Address.Is4():
		return fmt.Errorf("local: %s is not of the family of %s", p.Local, p.Address)
	case p.BFD.Interval != 0 && (p.BFD.Interval < time.Millisecond || p.BFD.Interval > time.Hour || p.BFD.Multiplier == 0):
		return fmt.Errorf("bfd: %s is not within 1ms..1h*1..255", p.BFD)
	case p.BFD.Interval != 0 && p.Multihop > 1:
		return fmt.Errorf("bfd: only for a peer on the link (RFC 5881), not with multihop=%d", p.Multihop)
	case p.BFD.Interval != 0 && p.Address.IsLinkLocalUnicast():
		return fmt.Errorf("bfd: not with the link-local address %s: give the peer's global one", p.Address)
	}
	return nil
}
