package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func good() options {
	return options{
		name: "m1", addresses: []string{"10.1.1.1", "2001:db8:f::1"}, managers: []string{"http://127.0.0.1:7470"}, insecure: true,
		interfaces: []string{"eth0"}, asn: "65301", peers: []string{"address=10.1.1.254,asn=65201"}, drainTime: time.Second,
	}
}

func TestConfig(t *testing.T) {
	o := good()
	c, err := o.config()
	if err != nil {
		t.Fatal(err)
	}
	if c.BGP.ASN != 65301 || c.BGP.RouterID.String() != "10.1.1.1" || len(c.BGP.Peers) != 1 ||
		c.Datapath.Source4.String() != "10.1.1.1" || c.Datapath.Source6.String() != "2001:db8:f::1" || !c.Link.AllowPlain {
		t.Errorf("%+v", c)
	}
	o.asn, o.peers = "", nil
	if c, err := o.config(); err != nil || c.BGP != nil {
		t.Errorf("without BGP: %+v, %v", c.BGP, err)
	}
}

// Each error names the flag and what would be valid.
func TestBadFlags(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none")
	if _, err := os.Stat(missing); err == nil {
		t.Fatal("it is there")
	}
	for want, spoil := range map[string]func(*options){
		"--name: is empty":                             func(o *options) { o.name = "" },
		"--interface: missing: name at least one":      func(o *options) { o.interfaces = nil },
		"--address: missing":                           func(o *options) { o.addresses = nil },
		`--address: "web" is not an address`:           func(o *options) { o.addresses = []string{"web"} },
		"--address: 10.1.1.1 and 10.1.1.2 are of one":  func(o *options) { o.addresses = []string{"10.1.1.1", "10.1.1.2"} },
		"--drain-time: -1s is negative":                func(o *options) { o.drainTime = -time.Second },
		"--bgp-asn: no --bgp-peer is given":            func(o *options) { o.peers = nil },
		`--bgp-asn: "" is not an AS number`:            func(o *options) { o.asn = "" },
		`--router-id: "::1" is not an IPv4 address`:    func(o *options) { o.routerID = "::1" },
		"--router-id: missing":                         func(o *options) { o.addresses = []string{"::2"} },
		"hold: 1s is not within 3s..65535s":            func(o *options) { o.peers[0] += ",hold=1s" },
		"password-file: stat " + missing + ": no such": func(o *options) { o.peers[0] += ",password-file=" + missing },
		"load certificate: stat " + missing:            func(o *options) { o.managers[0], o.ca = "https://10.1.4.9:7470", missing },
	} {
		o := good()
		spoil(&o)
		if _, err := o.config(); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}
