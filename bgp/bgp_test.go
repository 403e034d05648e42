package bgp

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestParsePeer(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "md5")
	if err := os.WriteFile(secret, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := ParsePeer("address=10.0.0.1,asn=65001,password-file=" + secret + ",hold=9s,bfd=5ms*3,next-hop6=2001:db8::2,passive")
	if err != nil {
		t.Fatal(err)
	}
	want := Peer{
		Address: netip.MustParseAddr("10.0.0.1"), ASN: 65001, Password: "s3cret", HoldTime: 9 * time.Second,
		Keepalive: 3 * time.Second, BFD: BFD{5 * time.Millisecond, 3}, NextHop6: netip.MustParseAddr("2001:db8::2"), Passive: true,
	}
	if p != want {
		t.Errorf("got %+v, want %+v", p, want)
	}
	public := filepath.Join(t.TempDir(), "public")
	if err := os.WriteFile(public, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	for text, wantErr := range map[string]string{
		"asn=65001":                                      "address: missing",
		"address=10.0.0.1":                               "asn: missing",
		"address=10.0.0.1,asn=0":                         `asn: "0" is not an AS number: 1..4294967295`,
		"address=10.0.0,asn=1":                           `address: "10.0.0" is not an IPv4 or IPv6 address`,
		"address=10.0.0.1,asn=1,hold=2s":                 "hold: 2s is not within 3s..65535s",
		"address=10.0.0.1,asn=1,hold=1.5s":               `hold: "1.5s" is not a whole number of seconds`,
		"address=10.0.0.1,asn=1,bfd=5ms":                 `bfd: "5ms" is not interval*multiplier`,
		"address=10.0.0.1,asn=1,bfd=5us*3":               `bfd: "5us*3" is not interval*multiplier`,
		"address=10.0.0.1,asn=1,bfd=5ms*3,multihop=2":    "bfd: only for a peer on the link",
		"address=fe80::1%eth0,asn=1,bfd=5ms*3":           "bfd: not with the link-local address fe80::1%eth0",
		"address=10.0.0.1,asn=1,asn=2":                   "asn: given twice",
		"address=10.0.0.1,asn=1,md5=x":                   "md5: unknown field; valid: address, asn",
		"address=10.0.0.1,asn=1,password-file=":          "password-file:",
		"address=2001:db8::1,asn=1,next-hop6=::1":        "next-hop6: only for a peer with an IPv4 address",
		"address=10.0.0.1,asn=1,password-file=" + public: "mode 0600 is wanted",
	} {
		if _, err := ParsePeer(text); err == nil || !strings.Contains(err.Error(), wantErr) {
			t.Errorf("ParsePeer(%q): error %v, want %q", text, err, wantErr)
		}
	}
}
