// Package health decides which reports about servers the manager acts on, so
// that a server that flaps and a host agent that falls silent do as little harm
// as possible. It is pure: the time is an argument.
//
// Rise and fall happen at the host agent; what arrives here are transitions.
// Going down is never delayed. Coming up is delayed for a DIP that flaps, by
// the penalties of RFC 2439: each transition to unhealthy adds Penalty, which
// decays by half in HalfLife; a DIP whose penalty has passed Suppress is held
// out until it is below Reuse again.
package health

import (
	"math"
	"time"
)

// Damping has the parameters of RFC 2439 section 4.2.
type Damping struct {
	Penalty  float64       // added by a transition to unhealthy
	Suppress float64       // above it a DIP is held out
	Reuse    float64       // below it a DIP held out comes back
	HalfLife time.Duration // in which a penalty halves
	Max      time.Duration // no DIP is held out longer after it last failed
}

// DefaultDamping holds a DIP out that failed four times within some 20 s, for a
// minute, and one that goes on failing for two minutes after its last failure.
var DefaultDamping = Damping{Penalty: 1000, Suppress: 3000, Reuse: 1000, HalfLife: 30 * time.Second, Max: 2 * time.Minute}

// DIP is what is known of one DIP. The zero value is one that never was
// reported.
type DIP struct {
	Known bool // reported at least once
	Up    bool // as last reported
	// Suppressed is held out of rotation although it may be up.
	Suppressed bool
	penalty    float64
	at         time.Time // of penalty
}

// Healthy says whether the DIP may be in rotation.
func (d DIP) Healthy() bool { return d.Up && !d.Suppressed }

// decayed is the penalty at now.
func (p Damping) decayed(d DIP, now time.Time) float64 {
	dt := now.Sub(d.at)
	if dt <= 0 || d.penalty == 0 {
		return d.penalty
	}
	return d.penalty * math.Exp2(-float64(dt)/float64(p.HalfLife))
}

// Report is d after a report at now. Repeating a report changes nothing.
func (p Damping) Report(d DIP, up bool, now time.Time) DIP {
	if d.Known && d.Up && !up {
		ceiling := p.Reuse * math.Exp2(float64(p.Max)/float64(p.HalfLife))
		d.penalty = min(p.decayed(d, now)+p.Penalty, ceiling)
		d.at = now
		d.Suppressed = d.Suppressed || d.penalty > p.Suppress
	}
	d.Known, d.Up = true, up
	return p.Release(d, now)
}

// Release is d at now: no longer held out if its penalty is below Reuse.
func (p Damping) Release(d DIP, now time.Time) DIP {
	if d.Suppressed && !now.Before(p.ReleaseAt(d)) {
		d.Suppressed = false
	}
	return d
}

// ReleaseAt is when a DIP that is held out comes back if it does not fail again.
func (p Damping) ReleaseAt(d DIP) time.Time {
	if d.penalty <= p.Reuse {
		return d.at
	}
	return d.at.Add(time.Duration(math.Log2(d.penalty/p.Reuse) * float64(p.HalfLife)))
}

// Silent decides which host agents are lost: those that were not heard of for
// timeout. Their DIPs are taken out of rotation, as a host without power can't
// say so; until then they keep their last state, so that an agent's restart
// moves no flow.
//
// If more than half of all agents are silent or about to be (half of timeout),
// the manager itself is likely cut off: nobody is lost beyond those that were
// before, and distrust is true. heard has the last report of each agent that
// serves a DIP.
func Silent(heard map[string]time.Time, lost map[string]bool, timeout time.Duration, now time.Time) (silent []string, distrust bool) {
	quiet := 0
	for name, at := range heard {
		quietFor := now.Sub(at)
		if quietFor > timeout/2 {
			quiet++
		}
		if quietFor > timeout && !lost[name] {
			silent = append(silent, name)
		}
	}
	if 2*quiet > len(heard) {
		return nil, len(silent) > 0
	}
	return silent, false
}
