package reach

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/quartet-lb/quartet/lb"
)

func tunnel(n int) lb.Tunnel {
	return lb.Tunnel{Dst: netip.AddrFrom4([4]byte{10, 1, byte(n >> 8), byte(n)})}
}

// world answers probes at once but for tunnels that are cut.
type world struct {
	t      *testing.T
	m      *machine
	now    time.Time
	cut    map[lb.Tunnel]bool
	probes map[lb.Tunnel][]time.Time
}

func newWorld(t *testing.T, rate float64) *world {
	return &world{t, newMachine(rate), time.Unix(1000, 0), map[lb.Tunnel]bool{}, map[lb.Tunnel][]time.Time{}}
}

// run lets d go by and checks what holds at any time.
func (f *world) run(d time.Duration) {
	f.t.Helper()
	for end := f.now.Add(d); f.now.Before(end); f.now = f.now.Add(tickEvery) {
		probes := f.m.tick(f.now)
		if most := int(max(f.m.rate/10, 1)); len(probes) > most {
			f.t.Fatalf("%d probes in a tick; at most %d", len(probes), most)
		}
		for _, p := range probes {
			if all := f.probes[p.tunnel]; len(all) > 0 && f.now.Sub(all[len(all)-1]) < timeout {
				f.t.Fatalf("%s probed %s after its last probe", p.tunnel, f.now.Sub(all[len(all)-1]))
			}
			f.probes[p.tunnel] = append(f.probes[p.tunnel], f.now)
			if !f.cut[p.tunnel] {
				f.m.answer(p.id, p.tunnel.Dst)
			}
		}
	}
}

func (f *world) want(tunnels ...lb.Tunnel) {
	f.t.Helper()
	if got := f.m.unreachable(); !slices.Equal(got, tunnels) {
		f.t.Errorf("unreachable: %v; want %v", got, tunnels)
	}
}

func TestThreeMissesAndOneAnswer(t *testing.T) {
	f := newWorld(t, 100)
	f.m.use(tunnel(1), 1)
	f.m.use(tunnel(2), 1)
	f.run(5 * time.Second)
	f.want()
	f.cut[tunnel(1)] = true
	begun := len(f.probes[tunnel(1)])
	for len(f.m.unreachable()) == 0 {
		f.run(tickEvery)
	}
	// A fourth leaves with the tick that ends the third one's time.
	if n := len(f.probes[tunnel(1)]) - begun; n != misses+1 {
		t.Errorf("unreachable after %d probes; want %d", n-1, misses)
	}
	f.want(tunnel(1))
	f.run(10 * time.Second)
	f.want(tunnel(1))
	delete(f.cut, tunnel(1))
	f.run(2 * time.Second)
	f.want()
	if got := f.m.changed(); !slices.Equal(got, []change{{tunnel(1), true}, {tunnel(1), false}}) {
		t.Errorf("changes: %v", got)
	}
	if got := f.m.changed(); len(got) != 0 {
		t.Errorf("changes told twice: %v", got)
	}
}

// Two misses and an answer, over and over, are no partition.
func TestLossIsNoPartition(t *testing.T) {
	f := newWorld(t, 100)
	f.m.use(tunnel(1), 1)
	for i := range 30 {
		f.cut[tunnel(1)] = i%3 != 2
		f.run(time.Second)
	}
	if got := f.m.changed(); len(got) != 0 {
		t.Errorf("changes: %v", got)
	}
}

// What an answer must be: to a probe under way, from the tunnel's own end.
func TestAnswersThatSayNothing(t *testing.T) {
	f := newWorld(t, 100)
	f.m.use(tunnel(1), 1)
	f.cut[tunnel(1)] = true
	for range 5 {
		f.run(time.Second)
		for id := range f.m.last + 10 {
			f.m.answer(id, tunnel(2).Dst)
		}
		f.m.answer(f.m.last+1, tunnel(1).Dst)
		for id := range f.m.last {
			f.m.answer(id, tunnel(1).Dst) // the last probe's is one more
		}
	}
	f.want(tunnel(1))
}

// Many more tunnels than the rate allows: each has its turn, a broken rack
// does not take the others', and what breaks is found within a round and the
// time of three probes.
func TestRateIsShared(t *testing.T) {
	const n, broken, rate = 2000, 500, 100
	f := newWorld(t, rate)
	var want []lb.Tunnel
	for i := range n {
		f.m.use(tunnel(i), 1)
	}
	round := n * time.Second / rate
	f.run(2 * round)
	for i := range broken {
		f.cut[tunnel(i)] = true
		want = append(want, tunnel(i))
	}
	// Each broken one takes three turns.
	f.run(round + 2*broken*time.Second/rate + 3*timeout)
	f.want(want...)
	clear(f.probes)
	f.run(round + 2*timeout)
	for i := range n {
		if len(f.probes[tunnel(i)]) == 0 {
			t.Fatalf("%s got no probe in a round", tunnel(i))
		}
	}
	clear(f.cut)
	f.run(round + 2*timeout)
	f.want()
}

// A tunnel counts while an endpoint uses it, and forgets itself after.
func TestUsers(t *testing.T) {
	f := newWorld(t, 100)
	for i := range 3 {
		f.m.use(tunnel(i), 2)
		f.cut[tunnel(i)] = true
	}
	gue := lb.Tunnel{Dst: tunnel(0).Dst, Encap: lb.EncapGUE}
	f.m.use(gue, 1)
	f.run(5 * time.Second)
	f.want(tunnel(0), tunnel(1), tunnel(2))
	f.m.use(tunnel(0), -1)
	f.m.use(tunnel(1), -2)
	f.want(tunnel(0), tunnel(2))
	f.m.use(tunnel(0), -1)
	f.m.use(tunnel(2), 1)
	f.m.use(tunnel(2), -2)
	f.want(tunnel(2))
	f.m.use(tunnel(2), -1)
	f.want()
	f.m.use(tunnel(1), 1) // anew, with a clean record
	delete(f.probes, tunnel(1))
	f.want()
	f.run(5 * time.Second)
	f.want(tunnel(1))
	f.m.use(tunnel(1), -1)
	f.m.use(gue, -1)
	f.run(2 * time.Second)
	if got := fmt.Sprint(len(f.m.targets), len(f.m.sent), f.m.next.Len(), f.m.idle.Len(), f.m.waiting.Len()); got != "0 0 0 0 0" {
		t.Errorf("left behind: %s", got)
	}
}

func BenchmarkTick(b *testing.B) {
	m := newMachine(100)
	for i := range 10_000 {
		m.use(tunnel(i), 1)
	}
	now := time.Unix(1000, 0)
	for b.Loop() {
		now = now.Add(tickEvery)
		for _, p := range m.tick(now) {
			m.answer(p.id, p.tunnel.Dst)
		}
	}
}
