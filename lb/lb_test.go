package lb

import (
	"net/netip"
	"testing"
)

func TestWords(t *testing.T) {
	vip4, vip6 := netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("2001:db8::10")
	flow := Flow{Src: netip.MustParseAddr("198.51.100.7"), Dst: vip4, Protocol: TCP, SrcPort: 40000, DstPort: 80}
	for _, c := range []struct{ got, want string }{
		{Endpoint{VIP: vip4, Protocol: TCP, Port: 80}.String(), "TCP 203.0.113.10:80"},
		{Endpoint{VIP: vip6, Protocol: UDP}.String(), "UDP [2001:db8::10]:*"},
		{DIP{Addr: vip4, Port: 8080}.String(), "203.0.113.10:8080"},
		{DIP{Addr: vip6}.String(), "2001:db8::10"},
		{Tunnel{Dst: vip6, Encap: EncapGUE}.String(), "gue to 2001:db8::10"},
		{flow.String(), "TCP 198.51.100.7:40000 > 203.0.113.10:80"},
		{flow.Reverse().String(), "TCP 203.0.113.10:80 > 198.51.100.7:40000"},
		{Protocol(132).String(), "protocol 132"},
		{ConsistencyTable.String(), "table"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	if flow.Reverse().Reverse() != flow {
		t.Error("reversing twice changes a flow")
	}
	if p, err := ParseProtocol("udp"); err != nil || p != UDP {
		t.Errorf("udp: %v, %v", p, err)
	}
	if _, err := ParseProtocol("SCTP"); err == nil {
		t.Error("SCTP is taken for an endpoint's protocol")
	}
}
