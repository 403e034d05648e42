package datapath

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/quartet-lb/quartet/flowhash"
	"github.com/quartet-lb/quartet/lb"
)

// state is all that a packet could see of the tables, and what the loader
// believes of them.
type state struct {
	VIPs4     []muxVip4Line
	VIPs6     []muxVip6Line
	Endpoints []muxEndpointLine
	DIPs      map[uint32]muxDip // live ones
	Buckets   map[string][]uint32
	Known     []Endpoint
	Flows     []muxFlowLine
	Counters  map[string]Counter
	Settings  muxSettings
}

func stateOf(t *testing.T, d *Datapath) state {
	t.Helper()
	s := state{
		VIPs4: slices.Clone(d.vip4Lines), VIPs6: slices.Clone(d.vip6Lines), Endpoints: slices.Clone(d.endpointLines),
		DIPs: map[uint32]muxDip{}, Buckets: map[string][]uint32{}, Known: d.Endpoints(),
		Flows: slices.Clone(d.flowLines), Counters: countersByDIP(t, d), Settings: *d.settings,
	}
	s.Settings.NextHopGeneration = 0
	for id, r := range d.dipRecords {
		if r.Endpoint != 0 {
			s.DIPs[uint32(id)] = r
		}
	}
	for key, e := range d.endpoints {
		if e.table.size > 0 {
			for _, line := range d.buckets.lines(e.table) {
				s.Buckets[key.String()] = append(s.Buckets[key.String()], line.Dip[:]...)
			}
		}
	}
	return s
}

// TestApplyChangesAllOrNothing lets each step of a large delta fail in turn.
func TestApplyChangesAllOrNothing(t *testing.T) {
	b := newBed(t)
	b.check(t, packet(to(vip4, 443)))
	newVIP := netip.MustParseAddr("203.0.113.99")
	delta := Delta{
		PutVIPs:    []VIP{{Addr: newVIP, Name: "new"}, {Addr: vip4, Name: "renamed"}, {Addr: netip.MustParseAddr("2001:db8::99"), Name: "new"}},
		DeleteVIPs: []netip.Addr{anyVIP},
		PutEndpoints: []Endpoint{
			evenly(newVIP, lb.TCP, 80, lb.ConsistencyTable, 512, ipip("10.1.0.1", 80), ipip("10.1.0.7", 80)),
			evenly(vip4, lb.TCP, 443, lb.ConsistencyHash, 512, ipip("10.1.0.2", 443), ipip("10.1.0.7", 443)),
			evenly(vip4, lb.UDP, 0, lb.ConsistencyHash, 64, ipip("10.1.0.2", 0)),
		},
		DeleteEndpoints: []lb.Endpoint{
			{VIP: anyVIP, Protocol: lb.UDP}, {VIP: anyVIP, Protocol: lb.UDP, Port: 53}, {VIP: vip4, Protocol: lb.TCP, Port: 80},
		},
	}
	before := stateOf(t, b.d)
	steps := 0
	for fail := 0; ; fail++ {
		n := 0
		b.d.injectFailure = func(string) error {
			if n++; n == fail+1 {
				return errors.New("injected")
			}
			return nil
		}
		err := b.d.Apply(delta)
		b.d.injectFailure = nil
		if err == nil {
			steps = fail
			break
		}
		if !strings.Contains(err.Error(), "injected") {
			t.Fatal(err)
		}
		if after := stateOf(t, b.d); !reflect.DeepEqual(before, after) {
			t.Fatalf("step %d failed (%v) and left its mark", fail, err)
		}
		if got := b.check(t, packet()).exit; got != "tx" {
			t.Fatalf("after step %d failed: exit %s", fail, got)
		}
		before.Counters = countersByDIP(t, b.d)
	}
	if steps < 8 {
		t.Errorf("only %d steps could fail; is the injection in place?", steps)
	}
	b.enter(t)
	run := func(frame []byte) string { return runReal(t, b.d, frame, b.index("up0")).exit }
	for exit, frame := range map[string][]byte{
		"tx": packet(to(newVIP, 80)), "no_endpoint": packet(), "no_vip": packet(udp(), to(anyVIP, 53)),
	} {
		if got := run(frame); got != exit {
			t.Errorf("after the delta: exit %s, want %s", got, exit)
		}
	}
	if got := run(packet(udp(), to(vip4, 9999))); got != "tx" {
		t.Errorf("any port, added: exit %s", got)
	}
}

// TestBadTablesAreRefused: the error names the field, and nothing changes.
func TestBadTablesAreRefused(t *testing.T) {
	b := newBed(t)
	before := stateOf(t, b.d)
	good := ipip("10.1.0.1", 80)
	with := func(change func(*Endpoint)) Delta {
		e := evenly(vip4, lb.TCP, 80, lb.ConsistencyHash, 256, good)
		change(&e)
		return Delta{PutEndpoints: []Endpoint{e}}
	}
	for want, delta := range map[string]Delta{
		"buckets: 3 of them":                with(func(e *Endpoint) { e.Buckets = make([]uint16, 3) }),
		"buckets: 131072 of them":           with(func(e *Endpoint) { e.Buckets = make([]uint16, 1<<17) }),
		"buckets[0]: index 1":               with(func(e *Endpoint) { e.Buckets[0] = 1 }),
		"protocol: ICMP; TCP or UDP":        with(func(e *Endpoint) { e.Protocol = lb.ICMP }),
		"is not a VIP of this mux":          with(func(e *Endpoint) { e.VIP = client4 }),
		"10.1.0.1:80 is there twice":        with(func(e *Endpoint) { e.DIPs = []lb.DIP{good, good} }),
		"is not of the VIP's family":        with(func(e *Endpoint) { e.DIPs = []lb.DIP{ipip("fd01::1", 80)} }),
		"encapsulation: vxlan; ipip or gue": with(func(e *Endpoint) { e.DIPs[0].Tunnel.Encap = lb.EncapVXLAN }),
		"is not a unicast":                  with(func(e *Endpoint) { e.DIPs[0].Tunnel.Dst = netip.Addr{} }),
		"is a VIP: packets would come back": with(func(e *Endpoint) { e.DIPs[0].Tunnel.Dst = vip4 }),
		"4 endpoints are left":              {DeleteVIPs: []netip.Addr{vip6}},
		"is the mux's own tunnel source":    {PutVIPs: []VIP{{Addr: source4}}},
		"10.9.9.9 is a VIP: packets": {PutVIPs: []VIP{{Addr: netip.MustParseAddr("10.9.9.9")}},
			PutEndpoints: []Endpoint{evenly(vip4, lb.TCP, 80, lb.ConsistencyHash, 1, ipip("10.9.9.9", 80))}},
		"vips[0].address": {PutVIPs: []VIP{{Name: "none"}}},
	} {
		if err := b.d.Apply(delta); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("error %v, want one line with %q", err, want)
		}
	}
	if !reflect.DeepEqual(before, stateOf(t, b.d)) {
		t.Error("a refused delta changed something")
	}
}

// TestFullMux: too many endpoints are refused whole, and room comes back.
func TestFullMux(t *testing.T) {
	newTestNet(t)
	c := testConfig(pinDir(t))
	c.Endpoints, c.DIPs, c.VIPs = 10, 20, 1
	d := openTest(t, c)
	tables := func(endpoints, dips int) Tables {
		tb := Tables{Seed: testSeed, VIPs: []VIP{{Addr: vip4}}}
		for i := range endpoints {
			var all []lb.DIP
			for j := range dips {
				all = append(all, ipip(fmt.Sprintf("10.1.%d.%d", i, j+1), 80))
			}
			tb.Endpoints = append(tb.Endpoints, evenly(vip4, lb.TCP, uint16(i+1), lb.ConsistencyTable, 256, all...))
		}
		return tb
	}
	must(t, d.Replace(tables(5, 2)))
	before := stateOf(t, d)
	for _, tb := range []Tables{tables(11, 1), tables(8, 3)} {
		if err := d.Replace(tb); err == nil || !strings.Contains(err.Error(), "the mux is full") {
			t.Errorf("error %v, want that the mux is full", err)
		}
		if !reflect.DeepEqual(before, stateOf(t, d)) {
			t.Error("a refused set of tables changed something")
		}
	}
	for i := range 100 {
		must(t, d.Replace(tables(1+i%10, 2)))
		must(t, d.Replace(Tables{Seed: testSeed}))
	}
	if len(d.buckets.chunks) > 1 {
		t.Errorf("%d chunks of buckets for at most ten small tables at once", len(d.buckets.chunks))
	}
}

// TestSynIsNotBoundToAnOldFlow: Ananta section 3.3.3.
func TestSynIsNotBoundToAnOldFlow(t *testing.T) {
	b := newBed(t)
	a, z := ipip("10.1.0.1", 443), ipip("10.1.0.2", 443)
	put := func(e Endpoint) {
		t.Helper()
		must(t, b.d.Apply(Delta{PutEndpoints: []Endpoint{e}}))
	}
	run := func(opts ...opt) lb.DIP {
		t.Helper()
		r := runReal(t, b.d, packet(append([]opt{to(vip4, 443)}, opts...)...), b.index("up0"))
		if r.counted == nil {
			t.Fatalf("exit %s", r.exit)
		}
		return r.counted.DIP
	}
	syn := func(s *spec) { s.syn, s.ack = true, false }
	both := evenly(vip4, lb.TCP, 443, lb.ConsistencyTable, 256, a, z)
	all := func(dip uint16) Endpoint {
		e := both
		e.Buckets = slices.Repeat([]uint16{dip}, 256)
		return e
	}
	put(all(0))
	if run(syn) != a || run() != a {
		t.Fatal("a flow did not go to the bucket's DIP")
	}
	put(all(1)) // a is draining: a DIP without buckets
	if run() != a {
		t.Error("the flow left its draining DIP")
	}
	if run(func(s *spec) { s.srcPort = 40001 }) != z {
		t.Error("an unknown flow did not go to the bucket's DIP")
	}
	if run(syn) != z {
		t.Error("a SYN was bound to an old flow's DIP")
	}
	if run() != z {
		t.Error("the SYN's flow did not follow it")
	}
	put(all(0))
	if run() != z {
		t.Error("the flow moved with its bucket")
	}
	only := evenly(vip4, lb.TCP, 443, lb.ConsistencyTable, 256, a)
	put(only)
	if run() != a {
		t.Error("the flow stayed on a removed DIP")
	}
	put(both)
	if got := run(); got != a {
		t.Errorf("a DIP that came back took flow to %s from before its removal", got)
	}
}

// TestFloodDoesNotEvictTrustedFlows: untrusted flows fill what is theirs.
func TestFloodDoesNotEvictTrustedFlows(t *testing.T) {
	b := newBed(t)
	const trusted = 500
	flow := func(i int) opt {
		return func(s *spec) {
			s.dst, s.dstPort = vip4, 443
			s.src = netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)})
			s.srcPort = uint16(1024 + i>>16)
		}
	}
	home := map[int]lb.DIP{}
	for i := range trusted {
		b.check(t, packet(flow(i), func(s *spec) { s.syn, s.ack = true, false }))
		home[i] = b.check(t, packet(flow(i))).counted.DIP
	}
	if got := b.d.Sweep(Monotonic()); got.Trusted != trusted || got.Untrusted != 0 || got.Expired != 0 {
		t.Fatalf("%+v, want %d trusted", got, trusted)
	}
	run := func(frame []byte) {
		if _, err := b.d.mux.Run(&ebpf.RunOptions{Data: frame, Context: xdpContext(len(frame), b.index("up0"))}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 40000 {
		run(packet(flow(trusted+i), func(s *spec) { s.syn, s.ack = true, false }))
	}
	got := b.d.Sweep(Monotonic())
	if got.Trusted != trusted {
		t.Errorf("%d trusted flows are left of %d", got.Trusted, trusted)
	}
	if lines := got.Capacity / 8; got.Untrusted > lines*6 || got.Untrusted < lines*5 {
		t.Errorf("%d untrusted flows in %d lines, want about 6 each and no more", got.Untrusted, lines)
	}
	if got.Full == 0 {
		t.Error("nothing counted the flows without room")
	}
	// The flows stay where they were though their buckets moved.
	swapped := evenly(vip4, lb.TCP, 443, lb.ConsistencyTable, 256, ipip("10.1.0.2", 443), ipip("10.1.0.1", 443))
	must(t, b.d.Apply(Delta{PutEndpoints: []Endpoint{swapped}}))
	for i := range trusted {
		if r := runReal(t, b.d, packet(flow(i)), b.index("up0")); r.counted.DIP != home[i] {
			t.Fatalf("flow %d went to %s, its home is %s", i, r.counted.DIP, home[i])
		}
	}
	// Idle flows go, the untrusted ones sooner.
	if got := b.d.Sweep(Monotonic() + 2*time.Minute); got.Trusted != trusted || got.Untrusted != 0 {
		t.Errorf("two idle minutes later: %+v", got)
	}
	if got := b.d.Sweep(Monotonic() + time.Hour); got.Trusted != 0 {
		t.Errorf("an idle hour later: %+v", got)
	}
}

// TestFlowTableOverflow: at the capacity that it is configured for, few flows
// find no room.
func TestFlowTableOverflow(t *testing.T) {
	b := newBed(t)
	n := b.d.config.Flows
	for i := range n {
		f := packet(to(vip4, 443), func(s *spec) { s.src = netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}) })
		for range 2 {
			if _, err := b.d.mux.Run(&ebpf.RunOptions{Data: f, Context: xdpContext(len(f), b.index("up0"))}); err != nil {
				t.Fatal(err)
			}
		}
	}
	got := b.d.Sweep(Monotonic())
	t.Logf("%d flows: %+v", n, got)
	if got.Trusted+got.Untrusted < n*97/100 {
		t.Errorf("%d of %d flows found room, want 97 %%", got.Trusted+got.Untrusted, n)
	}
}

// TestIDsAreStable: a second process finds flows and counters as the first left them.
func TestIDsAreStable(t *testing.T) {
	b := newBed(t)
	for range 5 {
		b.check(t, packet(to(vip4, 443)))
	}
	before := stateOf(t, b.d)
	c := b.d.config
	must(t, b.d.Close())
	d := openTest(t, c)
	d.settings.FragmentLifetime = uint64(time.Hour)
	recovered := stateOf(t, d)
	for _, names := range []*state{&before, &recovered} {
		names.Known = nil
		for k, v := range names.Counters {
			v.VIPName, v.Name, v.Tenant = "", "", ""
			names.Counters[k] = v
		}
	}
	if !reflect.DeepEqual(before, recovered) {
		t.Error("the adopted state is not the one that was left")
	}
	tables := testTables()
	slices.Reverse(tables.Endpoints)
	for i := range tables.Endpoints {
		e := &tables.Endpoints[i]
		slices.Reverse(e.DIPs)
		for j := range e.Buckets {
			e.Buckets[j] = uint16(len(e.DIPs)-1) - e.Buckets[j]
		}
	}
	must(t, d.Replace(tables))
	after := stateOf(t, d)
	if !reflect.DeepEqual(before.DIPs, after.DIPs) {
		t.Error("DIP ids changed, though the DIPs are the same in another order")
	}
	b.d = d
	b.check(t, packet(to(vip4, 443)))
	for key, had := range countersByDIP(t, d) {
		if strings.Contains(key, ":443") && strings.Contains(key, "10.1.0.") && had.Packets == 0 && before.Counters[key].Packets > 0 {
			t.Errorf("counters of %s began anew", key)
		}
	}
}

// TestTraceChangesNothing and says what the packet path then does.
func TestTraceChangesNothing(t *testing.T) {
	b := newBed(t)
	first := b.check(t, packet(to(vip4, 443)))
	b.check(t, packet(udp(), to(vip4, 53), func(s *spec) { s.df, s.id, s.more = false, 5, true }))
	for _, c := range []struct {
		frame    []byte
		chosenBy string
	}{
		{packet(), "bucket"},
		{packet(to(vip4, 443)), "connection table"},
		{packet(to(vip4, 443), func(s *spec) { s.srcPort = 9 }), "bucket"},
		{packet(udp(), to(vip4, 53), func(s *spec) { s.df, s.id, s.offset, s.raw = false, 5, 8, make([]byte, 8) }), "fragment table"},
		{icmpPacket(false, 3, 4, 1400, reply(vip4, 443, 8)), "quoted packet"},
		{packet(to(client4, 80)), ""},
		{packet(to(vip4, 4)), "bucket"},
		{packet(func(s *spec) { s.payload = 1450 }), "bucket"},
		{packet(func(s *spec) { s.ttl = 1 }), ""},
	} {
		before, exits := stateOf(t, b.d), must2(b.d.Exits())
		events := must2(b.d.Events())
		got, err := b.d.Trace(c.frame, b.index("up0"))
		must(t, err)
		if !reflect.DeepEqual(before, stateOf(t, b.d)) || !maps.Equal(exits, must2(b.d.Exits())) || !maps.Equal(events, must2(b.d.Events())) {
			t.Fatalf("tracing %.60x changed something", c.frame)
		}
		if got.ChosenBy != c.chosenBy {
			t.Errorf("chosen by %q, want %q", got.ChosenBy, c.chosenBy)
		}
		real := runReal(t, b.d, c.frame, b.index("up0"))
		if got.Exit != real.exit || !slices.Equal(got.PacketOut, real.out) {
			t.Errorf("trace says %s, the packet path %s", got.Exit, real.exit)
		}
		if real.counted != nil && (*got.DIP != real.counted.DIP || got.Endpoint.Endpoint != real.counted.Endpoint || got.NextHopMAC.String() != gatewayMAC.String()) {
			t.Errorf("trace says %+v, the packet path %+v", got, real.counted)
		}
	}
	got, err := b.d.Trace(packet(to(vip4, 443)), b.index("up0"))
	must(t, err)
	if *got.DIP != first.counted.DIP || got.VIP != "web" || got.Tenant != "shop" || got.Interface != "up0" || got.Buckets != 256 || got.MTU != 1500 || got.Verdict != "tx" {
		t.Errorf("%+v", got)
	}
}

func must2[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestFlowhashVectors runs those vectors that are packets an endpoint can get.
func TestFlowhashVectors(t *testing.T) {
	b := newBed(t)
	f, err := os.Open("../../flowhash/testdata/vectors.txt")
	must(t, err)
	defer f.Close()
	ran := 0
	for lines := bufio.NewScanner(f); lines.Scan(); {
		field := strings.Fields(lines.Text())
		if len(field) != 7 || field[0][0] == '#' {
			continue
		}
		protocol, err := strconv.Atoi(field[5])
		must(t, err)
		dst := netip.MustParseAddr(field[2])
		if lb.Protocol(protocol) != lb.TCP && lb.Protocol(protocol) != lb.UDP || dst.IsUnspecified() || dst.IsMulticast() || dst.Is4In6() {
			continue
		}
		var seed flowhash.Seed
		if _, err := hex.Decode(seed[:], []byte(field[0])); err != nil {
			t.Fatal(err)
		}
		dip := ipip("10.1.0.1", 0)
		if dst.Is6() {
			dip = ipip("fd01::1", 0)
		}
		must(t, b.d.Replace(Tables{
			Seed: seed, VIPs: []VIP{{Addr: dst}},
			Endpoints: []Endpoint{evenly(dst, lb.Protocol(protocol), 0, lb.ConsistencyHash, 16, dip)},
		}))
		port := func(s string) uint16 { return uint16(must2(strconv.ParseUint(s, 10, 16))) }
		frame := packet(func(s *spec) {
			s.src, s.dst = netip.MustParseAddr(field[1]), dst
			s.srcPort, s.dstPort = port(field[3]), port(field[4])
			if lb.Protocol(protocol) == lb.UDP {
				udp()(s)
			}
		})
		got, err := b.d.Trace(frame, b.index("up0"))
		must(t, err)
		if want := must2(strconv.ParseUint(field[6], 16, 64)); got.Hash != want {
			t.Errorf("%s: hash %016x", lines.Text(), got.Hash)
		}
		ran++
	}
	if ran < 4 {
		t.Errorf("only %d vectors could run", ran)
	}
}

// TestAnswersAreLimited: ICMP errors, each CPU.
func TestAnswersAreLimited(t *testing.T) {
	n := newTestNet(t)
	c := testConfig(pinDir(t))
	c.AnswersPerSecond = 1
	d := openTest(t, c)
	must(t, d.Replace(testTables()))
	frame := packet(func(s *spec) { s.payload = 1450 })
	for range 20 {
		if _, err := d.mux.Run(&ebpf.RunOptions{Data: frame, Context: xdpContext(len(frame), n.index("up0"))}); err != nil {
			t.Fatal(err)
		}
	}
	exits := must2(d.Exits())
	if n := exits["fragmentation_needed"]; n < 1 || n > 2*uint64(runtime.NumCPU()) || n+exits["answer_limited"] != 20 {
		t.Errorf("%d of 20 answered at one a second: %v", n, exits)
	}
}

// TestForwardingDisabled names the reason, which an operator can't see otherwise.
func TestForwardingDisabled(t *testing.T) {
	b := newBed(t)
	must(t, os.WriteFile("/proc/sys/net/ipv4/conf/up0/forwarding", []byte("0"), 0))
	if got := runReal(t, b.d, packet(), b.index("up0")).exit; got != "forwarding_disabled" {
		t.Errorf("exit %s", got)
	}
}

// TestKernelMemory: 20,000 endpoints of ten DIPs in 256 MB.
func TestKernelMemory(t *testing.T) {
	newTestNet(t)
	c := testConfig(pinDir(t))
	c.Flows, c.VIPs, c.Endpoints, c.DIPs = 0, 0, 0, 0 // the defaults
	d := openTest(t, c)
	tables := Tables{Seed: testSeed}
	for i := range 20000 {
		vip := netip.AddrFrom4([4]byte{203, 0, byte(i / 4 >> 8), byte(i / 4)})
		if i%4 == 0 {
			tables.VIPs = append(tables.VIPs, VIP{Addr: vip, Name: fmt.Sprint("vip-", i)})
		}
		var dips []lb.DIP
		for j := range 10 {
			dips = append(dips, ipip(netip.AddrFrom4([4]byte{10, 1, byte(i), byte(i>>8 + j)}).String(), 8080))
		}
		tables.Endpoints = append(tables.Endpoints, evenly(vip, lb.TCP, uint16(80+i%4), lb.ConsistencyTable, 1024, dips...))
	}
	must(t, d.Replace(tables))
	all := []*ebpf.Map{
		d.maps.Chunks, d.maps.Config, d.maps.Counters, d.maps.Dips, d.maps.Endpoints, d.maps.Flows, d.maps.Fragments,
		d.maps.NextHops, d.maps.Stats, d.maps.Traces, d.maps.Vips4, d.maps.Vips6, d.maps.VlanLinks, d.maps.WantedNeighbours,
	}
	if n := reflect.TypeFor[muxMaps]().NumField(); n != len(all) {
		t.Fatalf("the program has %d maps, %d are counted", n, len(all))
	}
	total := uint64(0)
	memlock := func(m *ebpf.Map) uint64 {
		text, err := os.ReadFile(filepath.Join("/proc/self/fdinfo", fmt.Sprint(m.FD())))
		must(t, err)
		for line := range strings.Lines(string(text)) {
			if rest, ok := strings.CutPrefix(line, "memlock:"); ok {
				return must2(strconv.ParseUint(strings.TrimSpace(rest), 10, 64))
			}
		}
		t.Fatalf("no memlock in %s", text)
		return 0
	}
	for _, m := range all {
		n := memlock(m)
		t.Logf("%-60s %8.1f MB", m, float64(n)/1e6)
		total += n
	}
	for i := range d.buckets.chunks {
		var m *ebpf.Map
		must(t, d.maps.Chunks.Lookup(uint32(i), &m))
		total += memlock(m)
		m.Close()
	}
	t.Logf("%d chunks of buckets; %.1f MB in all", len(d.buckets.chunks), float64(total)/1e6)
	if total > 256e6 {
		t.Errorf("%d bytes of kernel memory, want 256 MB", total)
	}
	// A change costs the change, not the set: one endpoint of 20,000 again.
	lines := 0
	d.injectFailure = func(string) error { lines++; return nil }
	must(t, d.Apply(Delta{PutEndpoints: tables.Endpoints[:1]}))
	if lines > 3 {
		t.Errorf("putting one endpoint took %d steps", lines)
	}
}

// TestSynFollowsItsFlowBeside: an older entry in the line beside is not left to
// come back when the SYN's own has ended.
func TestSynFollowsItsFlowBeside(t *testing.T) {
	b := newBed(t)
	b.enter(t)
	a, z := ipip("10.1.0.1", 443), ipip("10.1.0.2", 443)
	e := evenly(vip4, lb.TCP, 443, lb.ConsistencyTable, 1, a, z)
	must(t, b.d.Apply(Delta{PutEndpoints: []Endpoint{e}}))
	run := func(opts ...opt) lb.DIP {
		t.Helper()
		r := runReal(t, b.d, packet(append([]opt{to(vip4, 443)}, opts...)...), b.index("up0"))
		if r.counted == nil {
			t.Fatalf("exit %s", r.exit)
		}
		return r.counted.DIP
	}
	if run() != a {
		t.Fatal("the flow did not go to the bucket's DIP")
	}
	// Its line was full when it came, so that it had to go beside.
	for i := range b.d.flowLines {
		for j, entry := range b.d.flowLines[i].Entry {
			if entry != 0 {
				b.d.flowLines[i].Entry[j] = 0
				b.d.flowLines[i^1].Entry[j] = entry
				i = len(b.d.flowLines)
				break
			}
		}
		if i == len(b.d.flowLines) {
			break
		}
	}
	e.Buckets = []uint16{1}
	must(t, b.d.Apply(Delta{PutEndpoints: []Endpoint{e}}))
	if run() != a {
		t.Fatal("the flow was not found beside")
	}
	if run(func(s *spec) { s.syn, s.ack = true, false }) != z {
		t.Fatal("a SYN was bound to an old flow's DIP")
	}
	entries := 0
	for i := range b.d.flowLines {
		for _, entry := range b.d.flowLines[i].Entry {
			if entry != 0 {
				entries++
			}
		}
	}
	if entries != 1 {
		t.Errorf("the flow has %d entries: the older will bind it to another DIP when the younger has ended", entries)
	}
}
