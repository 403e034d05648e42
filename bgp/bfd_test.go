package bgp

import (
	"fmt"
	"testing"
	"time"
)

func TestBFDPacket(t *testing.T) {
	p := bfdPacket{
		diag: bfdNeighborDown, state: bfdUp, poll: true, multiplier: 3, mine: 0x01020304, yours: 0x05060708,
		desiredTx: 5 * time.Millisecond, requireRx: time.Second,
	}
	// RFC 5880 section 4.1: version and diagnostic, state and flags, multiplier,
	// length, discriminators, intervals in microseconds, no echo.
	want := "23e00318 01020304 05060708 00001388 000f4240 00000000"
	b := p.marshal()
	if got := fmt.Sprintf("%x %x %x %x %x %x", b[:4], b[4:8], b[8:12], b[12:16], b[16:20], b[20:24]); got != want {
		t.Errorf("on the wire: %s, want %s", got, want)
	}
	if got, ok := parseBFD(b); !ok || got != p {
		t.Errorf("read back: %+v, %v", got, ok)
	}
	for name, spoil := range map[string]func(){
		"version 0":                      func() { b[0] = 0 },
		"multiplier 0":                   func() { b[2] = 0 },
		"length beyond the packet":       func() { b[3] = 25 },
		"length too small":               func() { b[3] = 23 },
		"authenticated":                  func() { b[1] |= 4 },
		"multipoint":                     func() { b[1] |= 1 },
		"no discriminator":               func() { clear(b[4:8]) },
		"up without knowing the other's": func() { clear(b[8:12]) },
	} {
		b = p.marshal()
		spoil()
		if _, ok := parseBFD(b); ok {
			t.Errorf("%s: taken", name)
		}
	}
	if _, ok := parseBFD(p.marshal()[:23]); ok {
		t.Error("a truncated packet is taken")
	}
}

// bfdWire joins two sessions: what one sends the other gets at once, unless cut.
type bfdWire struct {
	now  time.Time
	ends [2]*bfdSession
	cut  [2]bool // what this end sends is lost
	sent [2]int
}

func newBFDWire(a, b BFD) *bfdWire {
	w := &bfdWire{now: time.Unix(1e9, 0)}
	w.ends = [2]*bfdSession{newBFDSession(a, 11, w.now), newBFDSession(b, 22, w.now)}
	return w
}

func (w *bfdWire) deliver(from int, p bfdPacket) {
	w.sent[from]++
	if w.cut[from] {
		return
	}
	p, ok := parseBFD(p.marshal())
	if !ok {
		return
	}
	if answer, send := w.ends[1-from].receive(p, w.now); send {
		w.deliver(1-from, answer)
	}
}

// run lets d pass in steps of 500 µs.
func (w *bfdWire) run(d time.Duration) {
	for end := w.now.Add(d); w.now.Before(end); w.now = w.now.Add(500 * time.Microsecond) {
		for i, s := range w.ends {
			if p, send := s.tick(w.now, 0.5); send {
				w.deliver(i, p)
			}
		}
	}
}

func (w *bfdWire) states() [2]bfdState { return [2]bfdState{w.ends[0].state, w.ends[1].state} }

func TestBFDSession(t *testing.T) {
	fast := BFD{Interval: 5 * time.Millisecond, Multiplier: 3}
	w := newBFDWire(fast, fast)
	w.run(3 * time.Second)
	if w.states() != [2]bfdState{bfdUp, bfdUp} {
		t.Fatalf("states %v after 3 s", w.states())
	}
	if w.ends[0].polling || w.ends[1].polling {
		t.Error("the change of interval is not acknowledged")
	}
	w.sent = [2]int{}
	w.run(time.Second)
	// 5 ms less the jitter, for a second.
	if w.sent[0] < 190 || w.sent[0] > 270 {
		t.Errorf("%d packets in a second", w.sent[0])
	}
	// One way is enough to be dead, and the other end learns it.
	w.cut[0] = true
	w.run(16 * time.Millisecond)
	if w.ends[1].state != bfdDown || w.ends[1].diag != bfdTimeExpired {
		t.Errorf("state %d, diagnostic %d after 16 ms of silence", w.ends[1].state, w.ends[1].diag)
	}
	w.run(2 * time.Second)
	if w.ends[0].state == bfdUp {
		t.Error("the silent end does not know that it is not heard")
	}
	w.cut[0] = false
	w.run(3 * time.Second)
	if w.states() != [2]bfdState{bfdUp, bfdUp} {
		t.Errorf("states %v after the silence", w.states())
	}
}

// The slower side's interval counts, and the detection time follows it.
func TestBFDSlowerSide(t *testing.T) {
	w := newBFDWire(BFD{Interval: 5 * time.Millisecond, Multiplier: 3}, BFD{Interval: 50 * time.Millisecond, Multiplier: 3})
	w.run(3 * time.Second)
	w.sent = [2]int{}
	w.run(time.Second)
	for i, n := range w.sent {
		if n < 19 || n > 28 {
			t.Errorf("end %d: %d packets in a second, at 50 ms", i, n)
		}
	}
	if d := w.ends[0].detection(); d != 150*time.Millisecond {
		t.Errorf("detection time %s", d)
	}
	if w.states() != [2]bfdState{bfdUp, bfdUp} {
		t.Errorf("states %v", w.states())
	}
}

// A peer that asks for a shorter interval counts on it from our answer on.
func TestBFDIntervalShortens(t *testing.T) {
	w := newBFDWire(BFD{Interval: 5 * time.Millisecond, Multiplier: 3}, BFD{Interval: 50 * time.Millisecond, Multiplier: 3})
	w.run(3 * time.Second)
	if p, send := w.ends[0].tick(w.now.Add(50*time.Millisecond), 1); !send || p.state != bfdUp {
		t.Fatalf("no packet is due: %+v", p)
	}
	w.now = w.now.Add(50 * time.Millisecond)
	answer, send := w.ends[0].receive(bfdPacket{
		state: bfdUp, poll: true, multiplier: 3, mine: 22, yours: 11,
		desiredTx: 5 * time.Millisecond, requireRx: 5 * time.Millisecond,
	}, w.now)
	if !send || !answer.final {
		t.Errorf("answer %+v, %v", answer, send)
	}
	if next := w.ends[0].nextTx.Sub(w.now); next > 5*time.Millisecond {
		t.Errorf("the next packet is %s away", next)
	}
}

func TestBFDForeignPackets(t *testing.T) {
	fast := BFD{Interval: 5 * time.Millisecond, Multiplier: 3}
	w := newBFDWire(fast, fast)
	w.run(3 * time.Second)
	before := *w.ends[0]
	for _, p := range []bfdPacket{
		{state: bfdDown, multiplier: 3, mine: 22, yours: 12},
		{state: bfdDown, multiplier: 3, mine: 33},
		{state: bfdAdminDown, multiplier: 3, mine: 33},
	} {
		if _, send := w.ends[0].receive(p, w.now); send || *w.ends[0] != before {
			t.Errorf("%+v has changed the session", p)
		}
	}
	// The peer itself may start again, not knowing us.
	w.ends[0].receive(bfdPacket{state: bfdDown, multiplier: 3, mine: 22}, w.now)
	if w.ends[0].state != bfdDown {
		t.Errorf("state %d after the peer began again", w.ends[0].state)
	}
}

// A router that closes its BGP session drops the BFD session with it; the
// silence that follows must not close the next BGP session.
func TestBFDEndsWithSession(t *testing.T) {
	f := newFabric(t)
	startBird(f, routerOptions{hold: 240, bfd: "50"})
	m1 := f.speaker("m1", config(1, Peer{Password: password, HoldTime: 240 * time.Second, BFD: BFD{Interval: 50 * time.Millisecond, Multiplier: 3}}))
	m1.set("203.0.113.0/24")
	for range 3 {
		f.within(30*time.Second, "m1 BFD", func() string {
			if p := f.peer(m1); !p.BFDUp || p.State != "established" {
				return fmt.Sprintf("%+v", p)
			}
			return ""
		})
		f.wantHops("203.0.113.0/24", "10.99.1.2")
		f.in("router", "birdc", "-s", f.dir+"/bird.ctl", "restart", "m1")
		f.within(10*time.Second, "m1 sees it", func() string {
			if p := f.peer(m1); p.State == "established" && p.BFDUp {
				return fmt.Sprintf("%+v", p)
			}
			return ""
		})
	}
	f.wantHops("203.0.113.0/24", "10.99.1.2")
}
