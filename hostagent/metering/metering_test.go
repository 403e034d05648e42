package metering

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/quartet-lb/quartet/hostagent/datapath"
)

func meter(vip, peer string, inbound bool, packets, bytes uint64) datapath.Meter {
	return datapath.Meter{
		VIP: netip.MustParseAddr(vip), Peer: netip.MustParsePrefix(peer),
		Inbound: inbound, Packets: packets, Bytes: bytes,
	}
}

func TestMessagesAreWhatChanged(t *testing.T) {
	web := func(inbound bool, n uint64) datapath.Meter {
		return meter("203.0.113.10", "198.51.100.0/24", inbound, n, 100*n)
	}
	six := meter("2001:db8::10", "2001:db8:1::/48", true, 7, 700)
	var r Reporter
	for i, c := range []struct {
		meters []datapath.Meter
		all    bool
		want   string
	}{
		{[]datapath.Meter{six, web(false, 2), web(true, 1)}, false,
			"203.0.113.10 198.51.100.0/24 true 1 100, 203.0.113.10 198.51.100.0/24 false 2 200, 2001:db8::10 2001:db8:1::/48 true 7 700"},
		{[]datapath.Meter{six, web(false, 2), web(true, 1)}, false, ""},
		{[]datapath.Meter{web(false, 3), six, web(true, 1)}, false, "203.0.113.10 198.51.100.0/24 false 3 300"},
		{[]datapath.Meter{web(false, 3), web(true, 1)}, true, // six was forgotten
			"203.0.113.10 198.51.100.0/24 true 1 100, 203.0.113.10 198.51.100.0/24 false 3 300"},
		{[]datapath.Meter{web(false, 3), web(true, 1), six}, false, "2001:db8::10 2001:db8:1::/48 true 7 700"},
		{[]datapath.Meter{web(false, 1)}, false, "203.0.113.10 198.51.100.0/24 false 1 100"},
	} {
		var got []string
		for _, m := range r.Messages(c.meters, c.all) {
			got = append(got, fmt.Sprint(m.Vip, " ", m.Peer, " ", m.Inbound, " ", m.Packets, " ", m.Bytes))
		}
		if text := strings.Join(got, ", "); text != c.want {
			t.Errorf("report %d:\n got %s\nwant %s", i, text, c.want)
		}
	}
}
