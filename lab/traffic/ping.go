package traffic

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// Ping sends up to count echo requests, one each interval, and says whether
// one was answered in time. It runs on the caller's thread alone.
func Ping(address string, count int, interval time.Duration) (bool, error) {
	a, err := netip.ParseAddr(address)
	if err != nil {
		return false, fmt.Errorf("ping: %q is not an address", address)
	}
	network, protocol := "ip4:icmp", 1
	var request, reply icmp.Type = ipv4.ICMPTypeEcho, ipv4.ICMPTypeEchoReply
	if a.Is6() {
		network, protocol = "ip6:ipv6-icmp", 58
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	c, err := net.DialIP(network, nil, &net.IPAddr{IP: a.AsSlice()})
	if err != nil {
		return false, fmt.Errorf("ping: %w", err)
	}
	defer c.Close()
	id := int(time.Now().UnixNano() & 0xffff)
	b := make([]byte, 1500)
	for seq := range count {
		m := icmp.Message{Type: request, Body: &icmp.Echo{ID: id, Seq: seq, Data: []byte("quartet lab")}}
		out, err := m.Marshal(nil) // the kernel fills in ICMPv6's checksum
		if err != nil {
			return false, err
		}
		if _, err := c.Write(out); err != nil {
			// A route may be missing for a moment; that is no answer.
			time.Sleep(interval)
			continue
		}
		deadline := time.Now().Add(interval)
		for {
			if err := c.SetReadDeadline(deadline); err != nil {
				return false, err
			}
			// Unlike Read it leaves the IPv4 header out.
			n, _, err := c.ReadFrom(b)
			if isTimeout(err) {
				break
			}
			if errors.Is(err, net.ErrClosed) {
				return false, err
			}
			if err != nil {
				continue
			}
			got, err := icmp.ParseMessage(protocol, b[:n])
			if err != nil || got.Type != reply {
				continue
			}
			if e, ok := got.Body.(*icmp.Echo); ok && e.ID == id {
				return true, nil
			}
		}
	}
	return false, nil
}
