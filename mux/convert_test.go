package mux

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/bgp"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/lab/fabric"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/mux/datapath"
	"github.com/quartet-lb/quartet/mux/reach"
	"github.com/quartet-lb/quartet/nodelink"
)

func goodTables() *quartetv1.MuxTables {
	key := &quartetv1.EndpointKey{Vip: []byte{203, 0, 113, 10}, Protocol: 6, Port: 80}
	return &quartetv1.MuxTables{
		Generation: 7, FlowSeed: []byte("0123456789abcdef"), Announce: []string{"203.0.113.0/24"},
		Vips: []*quartetv1.VipAddress{{Address: key.Vip, Vip: "web", Tenant: "shop"}},
		Endpoints: []*quartetv1.MuxEndpoint{{
			Key: key, Vip: "web", Name: "http", Tenant: "shop", Table: true, Gue: true, Generation: 7,
			Dips: []*quartetv1.Dip{
				{Address: []byte{10, 1, 3, 11}, Port: 8080, Tunnel: []byte{10, 1, 3, 11}},
				{Address: []byte{10, 1, 3, 12}, Port: 8080, Tunnel: []byte{10, 1, 3, 12}},
			},
			Buckets: []byte{0, 0, 1, 0}, Previous: []byte{255, 255, 0, 0},
			BucketGenerations: []byte{7, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0},
		}},
	}
}

func TestConvertTables(t *testing.T) {
	got, err := convertTables(goodTables())
	if err != nil {
		t.Fatal(err)
	}
	tunnel := func(a string) lb.Tunnel { return lb.Tunnel{Dst: netip.MustParseAddr(a), Encap: lb.EncapGUE} }
	want := datapath.Tables{
		Seed: [16]byte([]byte("0123456789abcdef")),
		VIPs: []datapath.VIP{{Addr: netip.MustParseAddr("203.0.113.10"), Name: "web", Tenant: "shop"}},
		Endpoints: []datapath.Endpoint{{
			Endpoint: lb.Endpoint{VIP: netip.MustParseAddr("203.0.113.10"), Protocol: lb.TCP, Port: 80},
			VIPName:  "web", Name: "http", Tenant: "shop", Consistency: lb.ConsistencyTable, Generation: 7,
			DIPs: []lb.DIP{
				{Addr: netip.MustParseAddr("10.1.3.11"), Port: 8080, Tunnel: tunnel("10.1.3.11")},
				{Addr: netip.MustParseAddr("10.1.3.12"), Port: 8080, Tunnel: tunnel("10.1.3.12")},
			},
			Buckets: []uint16{0, 1},
		}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	announce, err := convertAnnounce(goodTables().Announce)
	if err != nil || len(announce) != 1 || announce[0] != netip.MustParsePrefix("203.0.113.0/24") {
		t.Errorf("announce %v, %v", announce, err)
	}
	e := goodTables().Endpoints[0]
	if previous, generation := bucketHistory(e, 1); previous != "10.1.3.11:8080" || generation != 6 {
		t.Errorf("bucket 1 had %q, changed in %d", previous, generation)
	}
	if previous, generation := bucketHistory(e, 0); previous != "" || generation != 7 {
		t.Errorf("bucket 0 had %q, changed in %d", previous, generation)
	}
}

// Tables that are wrong in any field are refused with its name, and the last
// good ones stay, to the last endpoint, in the real packet path.
func TestBadTablesKeepTheLastGood(t *testing.T) {
	node, err := fabric.Create(fmt.Sprintf("qmuxbad%d", os.Getpid()))
	must(t, err)
	far, err := fabric.Create(fmt.Sprintf("qmuxfar%d", os.Getpid()))
	must(t, err)
	t.Cleanup(func() {
		for _, n := range []*fabric.Node{node, far} {
			n.Close()
			must(t, fabric.Delete(n.Name))
		}
	})
	must(t, fabric.Connect(node, "eth0", far, "eth0", 1500))
	m := &mux{
		config: Config{Ready: daemon.NewReadiness(ReadyTables)}, log: slog.New(slog.DiscardHandler),
		endpoints: map[lb.Endpoint]*quartetv1.MuxEndpoint{},
	}
	m.routes, err = newAnnouncer(context.Background(), nil, m.log)
	must(t, err)
	m.prober, err = reach.Open(reach.Config{})
	must(t, err)
	must(t, node.Do(func() (err error) {
		m.data, err = datapath.Open(datapath.Config{
			Interfaces: []string{"eth0"}, PinDir: "/sys/fs/bpf/" + node.Name, Source4: netip.MustParseAddr("10.0.0.2"), Flows: 1024,
		})
		return err
	}))
	t.Cleanup(func() { must(t, m.data.Detach()) })
	ctx := context.Background()
	must(t, m.ApplySnapshot(ctx, goodTables(), nodelink.FromManager))
	before := m.data.Endpoints()

	wide := make([]byte, 16)
	wide[0] = 0x20
	for _, c := range []struct {
		want  string
		spoil func(*quartetv1.MuxTables)
	}{
		{"flow_seed: 3 bytes; 16 are wanted", func(t *quartetv1.MuxTables) { t.FlowSeed = []byte("abc") }},
		{"vips[0].address: 5 bytes; 4 or 16 are wanted", func(t *quartetv1.MuxTables) { t.Vips[0].Address = make([]byte, 5) }},
		{"0.0.0.0", func(t *quartetv1.MuxTables) { t.Vips[0].Address = make([]byte, 4) }},
		{"there twice", func(t *quartetv1.MuxTables) { t.Vips = append(t.Vips, t.Vips[0]) }},
		{"endpoints[0].key: protocol: 1; 6 (TCP) or 17 (UDP)", func(t *quartetv1.MuxTables) { t.Endpoints[0].Key.Protocol = 1 }},
		{"endpoints[0].key: port: 70000", func(t *quartetv1.MuxTables) { t.Endpoints[0].Key.Port = 70000 }},
		{"endpoints[0].key: vip: 0 bytes", func(t *quartetv1.MuxTables) { t.Endpoints[0].Key = nil }},
		{"endpoints are left", func(t *quartetv1.MuxTables) { t.Vips = nil }},
		{"there twice", func(t *quartetv1.MuxTables) { t.Endpoints = append(t.Endpoints, t.Endpoints[0]) }},
		{"dips[1].port: 65536", func(t *quartetv1.MuxTables) { t.Endpoints[0].Dips[1].Port = 65536 }},
		{"dips[1].address: 3 bytes", func(t *quartetv1.MuxTables) { t.Endpoints[0].Dips[1].Address = []byte{1, 2, 3} }},
		{"dips[1].address", func(t *quartetv1.MuxTables) { t.Endpoints[0].Dips[1].Address = wide }},
		{"dips[1].tunnel: 0 bytes", func(t *quartetv1.MuxTables) { t.Endpoints[0].Dips[1].Tunnel = nil }},
		{"no source address", func(t *quartetv1.MuxTables) { t.Endpoints[0].Dips[1].Tunnel = wide }},
		{"packets would come back", func(t *quartetv1.MuxTables) { t.Endpoints[0].Dips[1].Tunnel = []byte{203, 0, 113, 10} }},
		{"buckets: 3 bytes; two a bucket", func(t *quartetv1.MuxTables) { t.Endpoints[0].Buckets = make([]byte, 3) }},
		{"buckets: 3 of them", func(t *quartetv1.MuxTables) { t.Endpoints[0].Buckets = make([]byte, 6) }},
		{"buckets[1]: index 9", func(t *quartetv1.MuxTables) { t.Endpoints[0].Buckets[2] = 9 }},
		{`announce[0]: "203.0.113.1/24" is not a prefix`, func(t *quartetv1.MuxTables) { t.Announce[0] = "203.0.113.1/24" }},
		{"announce[1]: 203.0.113.0/24 is there twice", func(t *quartetv1.MuxTables) { t.Announce = append(t.Announce, t.Announce[0]) }},
	} {
		bad := proto.CloneOf(goodTables())
		bad.Endpoints[0].Name = "changed"
		c.spoil(bad)
		if err := m.ApplySnapshot(ctx, bad, nodelink.FromManager); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("snapshot: error %v, want %q", err, c.want)
		}
		d := &quartetv1.MuxDelta{Base: 7, Generation: 8, PutVips: bad.Vips, PutEndpoints: bad.Endpoints, Announce: bad.Announce}
		if len(bad.FlowSeed) == 16 && len(bad.Vips) == 1 {
			if err := m.ApplyDelta(ctx, d); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("delta: error %v, want %q", err, c.want)
			}
		}
		if after := m.data.Endpoints(); !reflect.DeepEqual(after, before) {
			t.Fatalf("%s: what runs has changed: %+v", c.want, after)
		}
	}
}

func TestBuildFrameRefuses(t *testing.T) {
	good := &quartetv1.TracePacket{Source: "198.51.100.7", Destination: "203.0.113.10", Protocol: "TCP", SourcePort: 4000, DestinationPort: 80}
	if frame, flow, err := buildFrame(good, nil); err != nil || len(frame) != 54 || flow.String() != "TCP 198.51.100.7:4000 > 203.0.113.10:80" {
		t.Fatalf("%d bytes, %s, %v", len(frame), flow, err)
	}
	for want, spoil := range map[string]func(*quartetv1.TracePacket){
		`source: "" is not an address`:         func(p *quartetv1.TracePacket) { p.Source = "" },
		`destination: "web" is not an address`: func(p *quartetv1.TracePacket) { p.Destination = "web" },
		"not of one family":                    func(p *quartetv1.TracePacket) { p.Source = "::1" },
		`protocol: "SCTP" is not one of`:       func(p *quartetv1.TracePacket) { p.Protocol = "SCTP" },
		"0 to 65535 are wanted":                func(p *quartetv1.TracePacket) { p.SourcePort = 65536 },
		"length: 39; 40 to 9000":               func(p *quartetv1.TracePacket) { p.Length = 39 },
	} {
		p := proto.CloneOf(good)
		spoil(p)
		if _, _, err := buildFrame(p, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// refusing is a speaker that does not take the first routes.
type refusing struct {
	bgp.Speaker
	a     *announcer
	shown []int // announced prefixes at each call
}

func (r *refusing) Set(_ context.Context, routes []bgp.Route) error {
	_, announced := r.a.status()
	if r.shown = append(r.shown, len(announced)); len(r.shown) == 1 {
		return errors.New("busy")
	}
	return nil
}

// Routes that the speaker refuses are told again, and are not shown as announced
// before it has taken them.
func TestRefusedRoutesAreToldAgain(t *testing.T) {
	a, err := newAnnouncer(t.Context(), nil, slog.New(slog.DiscardHandler))
	must(t, err)
	speaker := &refusing{a: a}
	a.speaker = speaker
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { a.run(ctx); close(ended) }()
	a.set([]netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}, false)
	if !a.withdrawn(t.Context()) {
		t.Error("not settled")
	}
	cancel()
	<-ended
	if _, announced := a.status(); !slices.Equal(speaker.shown, []int{0, 0}) || len(announced) != 1 {
		t.Errorf("shown as announced: %v, then %v", speaker.shown, announced)
	}
}
