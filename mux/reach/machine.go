package reach

import (
	"cmp"
	"container/list"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/quartet-lb/quartet/lb"
)

const (
	// timeout is how long an answer may take, and the least time between two
	// probes of a tunnel.
	timeout = time.Second
	// misses in a row make a tunnel unreachable.
	misses = 3
)

// probe is one packet to send.
type probe struct {
	id     uint64
	tunnel lb.Tunnel
}

// machine decides which tunnels to probe and what the answers mean. All n
// tunnels are probed once in n/rate seconds, but not more often than once a
// second; a miss is followed up at once, until it is three.
type machine struct {
	rate    float64 // probes a second
	targets map[lb.Tunnel]*target
	sent    map[uint64]*target // by the probe's id
	last    uint64             // id

	// A target is in exactly one queue, but for one that is gone: that leaves its
	// queue when its turn comes.
	next    list.List // added, or missed fewer than three times
	idle    list.List // the rest, oldest first
	waiting list.List // probed less than timeout ago, oldest first

	down    map[lb.Tunnel]bool
	tokens  float64
	ticked  time.Time
	changes []change
}

type target struct {
	tunnel   lb.Tunnel
	uses     int // endpoints' DIPs that have this tunnel; 0: gone
	misses   int
	answered bool // the last probe
	id       uint64
	at       time.Time // of the last probe
}

// change is a tunnel that became unreachable or reachable.
type change struct {
	tunnel lb.Tunnel
	down   bool
}

func newMachine(rate float64) *machine {
	return &machine{rate: rate, targets: map[lb.Tunnel]*target{}, sent: map[uint64]*target{}, down: map[lb.Tunnel]bool{}}
}

// use adds n users to a tunnel; it is probed while it has any.
func (m *machine) use(t lb.Tunnel, n int) {
	x := m.targets[t]
	if x == nil {
		x = &target{tunnel: t}
		m.targets[t] = x
		m.next.PushBack(x)
	}
	if x.uses += n; x.uses <= 0 {
		x.uses = 0
		delete(m.targets, t)
		delete(m.down, t)
	}
}

func (m *machine) set(x *target, down bool) {
	if m.down[x.tunnel] == down {
		return
	}
	if down {
		m.down[x.tunnel] = true
	} else {
		delete(m.down, x.tunnel)
	}
	m.changes = append(m.changes, change{x.tunnel, down})
}

// tick says what to send. Between two ticks at most a tenth of a second's
// probes are saved up.
func (m *machine) tick(now time.Time) []probe {
	m.expire(now)
	if !m.ticked.IsZero() {
		m.tokens = min(m.tokens+m.rate*now.Sub(m.ticked).Seconds(), max(m.rate/10, 1))
	}
	m.ticked = now
	var out []probe
	for m.tokens >= 1 {
		x := pop(&m.next)
		if x == nil {
			x = pop(&m.idle)
		}
		if x == nil {
			break
		}
		if x.uses == 0 {
			continue
		}
		m.tokens--
		m.last++
		x.id, x.at, x.answered = m.last, now, false
		m.sent[x.id] = x
		m.waiting.PushBack(x)
		out = append(out, probe{x.id, x.tunnel})
	}
	return out
}

// expire ends the wait for answers that are due.
func (m *machine) expire(now time.Time) {
	for m.waiting.Len() > 0 && now.Sub(m.waiting.Front().Value.(*target).at) >= timeout {
		x := pop(&m.waiting)
		delete(m.sent, x.id)
		if x.uses == 0 {
			continue
		}
		if x.answered {
			m.idle.PushBack(x)
			continue
		}
		if x.misses < misses {
			x.misses++
		}
		if x.misses < misses {
			m.next.PushBack(x)
			continue
		}
		m.set(x, true)
		m.idle.PushBack(x)
	}
}

func pop(q *list.List) *target {
	if q.Len() == 0 {
		return nil
	}
	return q.Remove(q.Front()).(*target)
}

// answer takes an answer that came from an address. One to no probe that waits
// for it, or from elsewhere than the tunnel's end, says nothing.
func (m *machine) answer(id uint64, from netip.Addr) {
	x := m.sent[id]
	if x == nil || x.uses == 0 || x.tunnel.Dst != from {
		return
	}
	x.answered, x.misses = true, 0
	m.set(x, false)
}

// unreachable lists the tunnels that are, in order.
func (m *machine) unreachable() []lb.Tunnel {
	return slices.SortedFunc(maps.Keys(m.down), func(a, b lb.Tunnel) int {
		return cmp.Or(a.Dst.Compare(b.Dst), cmp.Compare(a.Encap, b.Encap))
	})
}

// changed returns what changed since it was last asked.
func (m *machine) changed() []change {
	out := m.changes
	m.changes = nil
	return out
}
