package health

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// The first transitions of a DIP are passed on at once, up and down.
func TestFirstTransitionsAreNotDelayed(t *testing.T) {
	p, d := DefaultDamping, DIP{}
	for i, up := range []bool{true, false, true, false, true, false, true} {
		if d = p.Report(d, up, epoch.Add(time.Duration(i)*time.Second)); d.Healthy() != up {
			t.Errorf("transition %d to %v: healthy is %v", i, up, d.Healthy())
		}
	}
}

// The fourth failure within 20 s holds the DIP out for a minute.
func TestFlapping(t *testing.T) {
	p, d, now := DefaultDamping, DIP{}, epoch
	for range 4 {
		d = p.Report(d, true, now)
		now = now.Add(2 * time.Second)
		d = p.Report(d, false, now)
		now = now.Add(2 * time.Second)
	}
	if d = p.Report(d, true, now); d.Healthy() || !d.Suppressed {
		t.Fatalf("after four failures: %+v", d)
	}
	at := p.ReleaseAt(d)
	if wait := at.Sub(now); wait < 45*time.Second || wait > 75*time.Second {
		t.Errorf("held out for %s", wait)
	}
	if !p.Release(d, at.Add(-time.Millisecond)).Suppressed || p.Release(d, at).Suppressed {
		t.Errorf("not released at %s", at)
	}
}

// For any series of reports: a DIP is never healthy while it is reported down,
// repeating a report changes nothing, what is held out comes back within Max of
// its last failure, and a DIP that never failed is never held out.
func TestDampingProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, d, now := DefaultDamping, DIP{}, epoch
		failed, last := 0, epoch
		for range rapid.IntRange(1, 60).Draw(t, "reports") {
			now = now.Add(time.Duration(rapid.IntRange(0, 60_000).Draw(t, "ms")) * time.Millisecond)
			up := rapid.Bool().Draw(t, "up")
			if d.Known && d.Up && !up {
				failed++
				last = now
			}
			d = p.Report(d, up, now)
			if again := p.Report(d, up, now); again != d {
				t.Fatalf("repeated: %+v, %+v", d, again)
			}
			if d.Healthy() && !up {
				t.Fatalf("healthy while down")
			}
			if failed < 3 && d.Suppressed {
				t.Fatalf("held out after %d failures", failed)
			}
			if d.Suppressed && p.ReleaseAt(d).Sub(last) > p.Max+time.Millisecond {
				t.Fatalf("held out until %s after its last failure", p.ReleaseAt(d).Sub(last))
			}
		}
		if released := p.Release(d, last.Add(p.Max+time.Second)); released.Suppressed {
			t.Fatalf("still held out: %+v", released)
		}
	})
}

func TestSilent(t *testing.T) {
	const timeout = 10 * time.Second
	now := epoch.Add(time.Hour)
	for _, c := range []struct {
		name     string
		silence  []time.Duration // of agents a, b, c, ...
		lost     string
		silent   string
		distrust bool
	}{
		{"nobody", nil, "", "", false},
		{"all heard", []time.Duration{time.Second, 9 * time.Second, 0}, "", "", false},
		{"one of three", []time.Duration{11 * time.Second, 0, 0}, "", "a", false},
		{"one of two", []time.Duration{11 * time.Second, 0}, "", "a", false},
		{"the only one", []time.Duration{11 * time.Second}, "", "", true},
		{"lost before", []time.Duration{time.Hour, 0, 0}, "a", "", false},
		{"two of three", []time.Duration{11 * time.Second, 11 * time.Second, 0}, "", "", true},
		{"the first of a partition", []time.Duration{11 * time.Second, 9 * time.Second, 8 * time.Second, 0}, "", "", true},
		{"two of four", []time.Duration{11 * time.Second, 12 * time.Second, 0, 0}, "", "a b", false},
	} {
		heard, lost := map[string]time.Time{}, map[string]bool{}
		for i, d := range c.silence {
			heard[string(rune('a'+i))] = now.Add(-d)
		}
		for _, r := range c.lost {
			lost[string(r)] = true
		}
		silent, distrust := Silent(heard, lost, timeout, now)
		slices.Sort(silent)
		if got := fmt.Sprint(silent); got != "["+c.silent+"]" || distrust != c.distrust {
			t.Errorf("%s: %s, %v", c.name, got, distrust)
		}
	}
}
