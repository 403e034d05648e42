package compile

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/object"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func none(netip.Addr) bool { return false }

func parse(t rapid.TB, text string) *quartetv1.Vip {
	t.Helper()
	docs, err := object.Read([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	objects, violations := object.Decode(docs)
	if len(violations) > 0 {
		t.Fatal(object.Format(violations[0]))
	}
	return objects[0].Vip
}

func compiled(t rapid.TB, in Input) *Result {
	t.Helper()
	if in.Drained == nil {
		in.Drained = none
	}
	r, err := VIP(in)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func counts(m *quartetv1.MuxEndpoint) []int {
	out := make([]int, len(m.Dips))
	for b := 0; b < len(m.Buckets); b += 2 {
		out[binary.LittleEndian.Uint16(m.Buckets[b:])]++
	}
	return out
}

func states(m *quartetv1.MuxEndpoint) (out []string) {
	for _, d := range m.Dips {
		out = append(out, d.State)
	}
	return out
}

const web = `
kind: Vip
name: web
tenant: shop
addresses: [203.0.113.10, 203.0.113.11, "2001:db8::10"]
endpoints:
- name: http
  protocol: TCP
  port: 80
  health: {http: {path: /healthz}, port: 8081}
  backends:
  - {dip: 10.1.3.11, dip6: "fd00::11", host: 10.1.3.10, port: 8080}
  - {dip: 10.1.3.12, host: 10.1.3.10, port: 8080, weight: 2}
  - {dip: "fd00::13", host: 10.1.3.10, tunnel: 10.1.3.13, weight: 0}
- {name: rest, protocol: UDP, any_port: true, encapsulation: gue, consistency: table, backends: [{dip: 10.1.3.14}, {dip: "fd00::14", host: 10.1.3.14}]}
`

// What muxes and the host agent run for one VIP of both families.
func TestTables(t *testing.T) {
	dips := func(of ...*quartetv1.DipState) map[string]*quartetv1.EndpointState {
		return map[string]*quartetv1.EndpointState{"TCP-80": {Dips: of}}
	}
	r := compiled(t, Input{Vip: parse(t, web), Generation: 7, Now: epoch, States: dips(
		&quartetv1.DipState{Dip: "10.1.3.11", Healthy: true}, &quartetv1.DipState{Dip: "10.1.3.12", Healthy: true},
		&quartetv1.DipState{Dip: "fd00::11", Healthy: true}, &quartetv1.DipState{Dip: "fd00::13", Healthy: true})})
	var got []string
	for _, m := range r.Endpoints {
		line := fmt.Sprintf("%s %s table=%v gue=%v generation=%d", endpointOf(m.Key), m.Name, m.Table, m.Gue, m.Generation)
		for i, d := range m.Dips {
			a, _ := netip.AddrFromSlice(d.Address)
			tunnel, _ := netip.AddrFromSlice(d.Tunnel)
			line += fmt.Sprintf("; %s %d via %s %s %d", a, d.Port, tunnel, d.State, counts(m)[i])
		}
		got = append(got, line)
	}
	want := []string{
		"TCP 203.0.113.10:80 http table=false gue=false generation=7; 10.1.3.11 8080 via 10.1.3.11 healthy 85; 10.1.3.12 8080 via 10.1.3.12 healthy 171",
		"UDP 203.0.113.10:* rest table=true gue=true generation=7; 10.1.3.14 0 via 10.1.3.14 unchecked 256",
		"TCP 203.0.113.11:80 http table=false gue=false generation=7; 10.1.3.11 8080 via 10.1.3.11 healthy 85; 10.1.3.12 8080 via 10.1.3.12 healthy 171",
		"UDP 203.0.113.11:* rest table=true gue=true generation=7; 10.1.3.14 0 via 10.1.3.14 unchecked 256",
		"TCP [2001:db8::10]:80 http table=false gue=false generation=7; fd00::11 8080 via fd00::11 healthy 256; fd00::13 80 via 10.1.3.13 healthy 0",
		"UDP [2001:db8::10]:* rest table=true gue=true generation=7; fd00::14 0 via fd00::14 unchecked 256",
	}
	if !slices.Equal(got, want) {
		t.Errorf("muxes run\n%s\nnot\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if &r.Endpoints[0].Buckets[0] != &r.Endpoints[2].Buckets[0] {
		t.Error("two addresses of a family do not share a table")
	}

	var h quartetv1.HostTables
	HostSnapshot([]*Result{r}, []netip.Addr{netip.MustParseAddr("10.1.3.10")}, &h)
	got = nil
	for _, x := range h.Rules {
		tunnel, _ := netip.AddrFromSlice(x.Tunnel)
		vip, _ := netip.AddrFromSlice(x.Vip)
		dip, _ := netip.AddrFromSlice(x.Dip)
		got = append(got, fmt.Sprintf("%s %s %d %d to %s %d", tunnel, vip, x.Protocol, x.Port, dip, x.DipPort))
	}
	for _, x := range h.Checks {
		got = append(got, fmt.Sprintf("%s %d %s", x.Id, x.Port, x.Health.Http.Path))
	}
	want = []string{
		"10.1.3.11 203.0.113.10 6 80 to 10.1.3.11 8080",
		"10.1.3.11 203.0.113.11 6 80 to 10.1.3.11 8080",
		"fd00::11 2001:db8::10 6 80 to fd00::11 8080",
		"10.1.3.12 203.0.113.10 6 80 to 10.1.3.12 8080",
		"10.1.3.12 203.0.113.11 6 80 to 10.1.3.12 8080",
		"10.1.3.13 2001:db8::10 6 80 to fd00::13 80",
		"web/http/10.1.3.11 8081 /healthz",
		"web/http/fd00::11 8081 /healthz",
		"web/http/10.1.3.12 8081 /healthz",
		"web/http/fd00::13 8081 /healthz",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the host runs\n%s\nnot\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Which DIPs are in rotation, as the package comment says.
func TestRotation(t *testing.T) {
	const text = `{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: 80, health: {tcp: {}}, backends: [{dip: 10.0.0.1}, {dip: 10.0.0.2}]}]}`
	checked := parse(t, text)
	unchecked := proto.Clone(checked).(*quartetv1.Vip)
	unchecked.Endpoints[0].Health = nil
	up := func(n int) *quartetv1.DipState {
		return &quartetv1.DipState{Dip: fmt.Sprintf("10.0.0.%d", n), Healthy: true}
	}
	down := func(n int) *quartetv1.DipState { return &quartetv1.DipState{Dip: fmt.Sprintf("10.0.0.%d", n)} }
	flaps := func(n int) *quartetv1.DipState {
		return &quartetv1.DipState{Dip: fmt.Sprintf("10.0.0.%d", n), Suppressed: true}
	}
	first := netip.MustParseAddr("10.0.0.1")
	for _, c := range []struct {
		name    string
		vip     *quartetv1.Vip
		dips    []*quartetv1.DipState
		drained bool // the first DIP
		states  string
		counts  string
		warns   string
	}{
		{"no check", unchecked, nil, false, "[unchecked unchecked]", "[128 128]", ""},
		{"no report", checked, nil, false, "[unknown unknown]", "[0 0]", "no_dip"},
		{"one reported", checked, []*quartetv1.DipState{up(2)}, false, "[unknown healthy]", "[0 256]", ""},
		{"one down", checked, []*quartetv1.DipState{down(1), up(2)}, false, "[unhealthy healthy]", "[0 256]", ""},
		{"all down", checked, []*quartetv1.DipState{down(1), down(2)}, false, "[unhealthy unhealthy]", "[0 0]", "no_dip"},
		{"one drained", unchecked, nil, true, "[draining unchecked]", "[0 256]", ""},
		{"drained and down", checked, []*quartetv1.DipState{down(1), up(2)}, true, "[draining healthy]", "[0 256]", ""},
		{"one flaps", checked, []*quartetv1.DipState{flaps(1), up(2)}, false, "[unhealthy healthy]", "[0 256]", ""},
		{"only one that flaps", checked, []*quartetv1.DipState{flaps(1), down(2)}, false, "[unhealthy unhealthy]", "[256 0]", "only flapping"},
		{"drained, flaps", checked, []*quartetv1.DipState{flaps(1), down(2)}, true, "[draining unhealthy]", "[0 0]", "no_dip"},
	} {
		in := Input{Vip: c.vip, Generation: 1, Now: epoch, States: map[string]*quartetv1.EndpointState{"TCP-80": {Dips: c.dips}},
			Drained: func(a netip.Addr) bool { return c.drained && a == first }}
		r := compiled(t, in)
		m := r.Endpoints[0]
		if s, n := fmt.Sprint(states(m)), fmt.Sprint(counts(m)); s != c.states || n != c.counts {
			t.Errorf("%s: %s %s, not %s %s", c.name, s, n, c.states, c.counts)
		}
		if w := strings.Join(r.Warnings, "\n"); !strings.Contains(w, c.warns) || c.warns == "" && w != "" {
			t.Errorf("%s: warnings %q", c.name, w)
		}
	}
}

// What the agent of one host reported does not hold for another: a DIP that
// moves is out until it is reported from there, and stays in without a check.
func TestHostChanges(t *testing.T) {
	const text = `{kind: Vip, name: web, addresses: [203.0.113.10], endpoints: [{name: %s, protocol: TCP, port: %d, %s backends: [{dip: 10.0.0.1, host: %s}, {dip: 10.0.0.2, host: 10.0.0.9}]}]}`
	const tcp = "health: {tcp: {}},"
	vip := func(name string, port int, check, host string) *quartetv1.Vip {
		return parse(t, fmt.Sprintf(text, name, port, check, host))
	}
	up := func(r *Result, id string) map[string]*quartetv1.EndpointState {
		e := proto.Clone(r.States[id]).(*quartetv1.EndpointState)
		e.Dips = []*quartetv1.DipState{{Dip: "10.0.0.1", Healthy: true}, {Dip: "10.0.0.2", Healthy: true}}
		return map[string]*quartetv1.EndpointState{id: e}
	}
	for _, c := range []struct {
		name   string
		to     *quartetv1.Vip
		states string
	}{
		{"to another host", vip("http", 80, tcp, "10.0.0.8"), "[unknown healthy]"},
		{"with another name", vip("www", 80, tcp, "10.0.0.8"), "[unknown healthy]"},
		{"with another port", vip("http", 81, tcp, "10.0.0.8"), "[unknown healthy]"},
		{"not at all", vip("http", 80, tcp, "10.0.0.9"), "[healthy healthy]"},
		{"without a check", vip("http", 80, "", "10.0.0.8"), "[unchecked unchecked]"},
	} {
		v := vip("http", 80, tcp, "10.0.0.9")
		before := compiled(t, Input{Vip: v, Generation: 1, Now: epoch})
		before = compiled(t, Input{Vip: v, Generation: 2, Now: epoch, States: up(before, "TCP-80"), Before: before})
		moved := compiled(t, Input{Vip: c.to, Generation: 3, Now: epoch, States: before.States, Before: before})
		after := compiled(t, Input{Vip: c.to, Generation: 4, Now: epoch, States: moved.States, Before: moved})
		for _, r := range []*Result{moved, after} {
			if s := fmt.Sprint(states(r.Endpoints[0])); s != c.states {
				t.Errorf("%s: %s, not %s", c.name, s, c.states)
			}
			if n := counts(r.Endpoints[0]); strings.HasPrefix(c.states, "[unknown") && n[0] != 0 {
				t.Errorf("%s: %v buckets", c.name, n)
			}
		}
		id := EndpointID(c.to.Endpoints[0])
		reported := compiled(t, Input{Vip: c.to, Generation: 5, Now: epoch, States: up(after, id), Before: after})
		if n := fmt.Sprint(counts(reported.Endpoints[0])); n != "[128 128]" {
			t.Errorf("%s, reported: %s buckets", c.name, n)
		}
	}
}

func TestCorruptTable(t *testing.T) {
	_, err := VIP(Input{Vip: parse(t, web), Generation: 1, Now: epoch, Drained: none,
		States: map[string]*quartetv1.EndpointState{"TCP-80": {Table4: []byte("nonsense")}}})
	if err == nil || !strings.Contains(err.Error(), "compile web, endpoint http: read bucket table") {
		t.Errorf("%v", err)
	}
}

// For any series of changes to a VIP: only DIPs in rotation have buckets, an
// outage moves only the buckets of the DIP that is out, a compile that changes
// nothing shares everything with the one before, the generation of an endpoint
// is that of its last change, and what is restored from the states alone is the
// same bit for bit.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		vip := func() *quartetv1.Vip {
			text := "{kind: Vip, name: web, addresses: [203.0.113.10"
			if rapid.Bool().Draw(t, "v6") {
				text += ", \"2001:db8::10\""
			}
			text += "], endpoints: ["
			for e := range rapid.IntRange(1, 3).Draw(t, "endpoints") {
				text += fmt.Sprintf("{protocol: TCP, port: %d, ", 80+e)
				if rapid.Bool().Draw(t, "check") {
					text += "health: {tcp: {}}, "
				}
				text += "backends: ["
				for d := range rapid.IntRange(1, 5).Draw(t, "dips") {
					text += fmt.Sprintf("{dip: 10.0.0.%d, weight: %d}, ", 1+d, rapid.IntRange(1, 9).Draw(t, "weight"))
				}
				text += "]},"
			}
			return parse(t, text+"]}")
		}
		v := vip()
		var before *Result
		states := map[string]*quartetv1.EndpointState{}
		drained := map[netip.Addr]bool{}
		isDrained := func(a netip.Addr) bool { return drained[a] }
		for generation := uint64(1); generation <= 12; generation++ {
			out := "" // the one DIP of port 80 whose health went
			switch rapid.IntRange(0, 3).Draw(t, "change") {
			case 0:
				v = vip()
			case 1:
				a := netip.AddrFrom4([4]byte{10, 0, 0, byte(rapid.IntRange(1, 5).Draw(t, "drain"))})
				drained[a] = !drained[a]
			case 2:
				dip := fmt.Sprintf("10.0.0.%d", rapid.IntRange(1, 5).Draw(t, "dip"))
				states = maps.Clone(states)
				e, _ := proto.Clone(states["TCP-80"]).(*quartetv1.EndpointState)
				if e == nil {
					e = &quartetv1.EndpointState{}
				}
				up := rapid.Bool().Draw(t, "up")
				i := slices.IndexFunc(e.Dips, func(d *quartetv1.DipState) bool { return d.Dip == dip })
				if i < 0 {
					e.Dips = append(e.Dips, &quartetv1.DipState{Dip: dip, Healthy: up})
				} else {
					if e.Dips[i].Healthy && !up {
						out = dip
					}
					e.Dips[i] = &quartetv1.DipState{Dip: dip, Healthy: up}
				}
				states["TCP-80"] = e
			}
			r := compiled(t, Input{Vip: v, Generation: generation, Now: epoch, States: states, Drained: isDrained, Before: before})
			for _, m := range r.Endpoints {
				n := counts(m)
				for i, d := range m.Dips {
					if n[i] > 0 && d.State != Healthy && d.State != Unchecked {
						t.Fatalf("%s DIP has %d buckets", d.State, n[i])
					}
				}
				if len(m.Previous) != 0 && (len(m.Previous) != len(m.Buckets) || len(m.BucketGenerations) != 4*len(m.Buckets)) {
					t.Fatalf("%d buckets, %d previous, %d generations", len(m.Buckets), len(m.Previous), len(m.BucketGenerations))
				}
			}
			if out != "" && before != nil && before.Vip == r.Vip {
				was, is := before.Endpoints[0], r.Endpoints[0]
				moved := 0 // buckets of DIPs that stay
				for i := 0; i < min(len(was.Buckets), len(is.Buckets)); i += 2 {
					from := binary.LittleEndian.Uint16(was.Buckets[i:])
					if from != binary.LittleEndian.Uint16(is.Buckets[i:]) && netip.AddrFrom4([4]byte(was.Dips[from].Address)).String() != out {
						moved++
					}
				}
				if moved > len(is.Dips) { // rounding may cost each of them one (package buckets)
					t.Fatalf("%d buckets of others moved when %s went", moved, out)
				}
			}
			again := compiled(t, Input{Vip: v, Generation: generation + 1, Now: epoch, States: r.States, Drained: isDrained, Before: r})
			var d quartetv1.MuxDelta
			MuxDelta([]Change{{Before: r, After: again}}, &d)
			if len(d.PutVips)+len(d.PutEndpoints)+len(d.DeleteVips)+len(d.DeleteEndpoints) > 0 {
				t.Fatalf("delta of nothing: %v", &d)
			}
			restored := compiled(t, Input{Vip: v, Generation: generation, Now: epoch, States: r.States, Drained: isDrained, Restore: true})
			if !slices.EqualFunc(r.Endpoints, restored.Endpoints, func(a, b *quartetv1.MuxEndpoint) bool { return proto.Equal(a, b) }) ||
				!maps.EqualFunc(r.States, restored.States, func(a, b *quartetv1.EndpointState) bool { return proto.Equal(a, b) }) {
				t.Fatalf("restored\n%v\nfrom\n%v", restored.Endpoints, r.Endpoints)
			}
			for id, e := range r.States {
				if e.Generation > generation || e.Generation == 0 {
					t.Fatalf("%s: generation %d at %d", id, e.Generation, generation)
				}
			}
			before, states = r, r.States
		}
	})
}

// An address that moves from one VIP to another is put, never deleted.
func TestAddressMoves(t *testing.T) {
	const text = `{kind: Vip, name: %s, addresses: [203.0.113.10], endpoints: [{protocol: TCP, port: %d, backends: [{dip: 10.0.0.1}]}]}`
	a := compiled(t, Input{Vip: parse(t, fmt.Sprintf(text, "a", 80)), Generation: 1, Now: epoch})
	b := compiled(t, Input{Vip: parse(t, fmt.Sprintf(text, "b", 80)), Generation: 2, Now: epoch})
	changes := []Change{{Before: a}, {After: b}}
	var m quartetv1.MuxDelta
	MuxDelta(changes, &m)
	if len(m.DeleteVips)+len(m.DeleteEndpoints) > 0 || len(m.PutVips) != 1 || m.PutVips[0].Vip != "b" || len(m.PutEndpoints) != 1 {
		t.Errorf("mux: %v", &m)
	}
	var h quartetv1.HostDelta
	HostDelta(changes, []netip.Addr{netip.MustParseAddr("10.0.0.1")}, &h)
	if len(h.DeleteRules) > 0 || len(h.PutRules) != 1 || h.PutRules[0].VipName != "b" {
		t.Errorf("host: %v", &h)
	}
}
