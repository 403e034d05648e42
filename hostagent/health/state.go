// Package health checks whether the DIPs of this host can serve, so that those
// that can't leave rotation (Ananta section 3.4.3).
//
// A DIP that fails is out of rotation within interval × fall of its death,
// plus the report's way (milliseconds): checks start an interval apart, and
// once one has failed the following ones start earlier by what a silent server
// makes them wait for their timeouts. With fall 1, or a timeout above
// interval × (fall − 1) / fall, a server that answers nothing at all takes up
// to one timeout longer; one whose host refuses connections doesn't.
package health

import (
	"fmt"
	"time"
)

// Status is what is known of a DIP.
type Status int

// Statuses. A DIP stays Unknown until rise successes or fall failures in a row
// decide, so that a restarted agent contradicts nobody before it knows.
const (
	Unknown Status = iota
	Healthy
	Unhealthy
)

// String is "unknown", "healthy" or "unhealthy".
func (s Status) String() string {
	switch s {
	case Healthy:
		return "healthy"
	case Unhealthy:
		return "unhealthy"
	}
	return "unknown"
}

// Rule says how many results in a row decide, and how checks are spaced.
type Rule struct {
	Interval, Timeout time.Duration
	Rise, Fall        int // at least 1
}

// State is what a check's results so far say.
type State struct {
	Status Status
	Since  time.Time // when Status was reached
	Reason string    // why the last check failed; "" if it did not
	// InRow counts the last results that were alike, the last one included.
	InRow int
}

// Next is the state after a check that ended at now; failure is why it failed,
// or "". The caller's clock is the only one.
func (s State) Next(rule Rule, failure string, now time.Time) State {
	if s.InRow == 0 || (failure == "") != (s.Reason == "") {
		s.InRow = 0
	}
	s.InRow++
	s.Reason = failure
	switch {
	case failure == "" && s.Status != Healthy && s.InRow >= rule.Rise:
		s.Status, s.Since = Healthy, now
	case failure != "" && s.Status != Unhealthy && s.InRow >= rule.Fall:
		s.Status, s.Since = Unhealthy, now
	}
	return s
}

// Wait is the time from one check's start to the next one's.
func (s State) Wait(rule Rule) time.Duration {
	failing := s.Reason != "" && s.Status != Unhealthy
	if !failing || rule.Fall < 2 {
		return rule.Interval
	}
	gaps := time.Duration(rule.Fall - 1)
	return max(rule.Timeout, rule.Interval-(rule.Timeout+gaps-1)/gaps)
}

// String is "healthy" or "unhealthy: connection refused".
func (s State) String() string {
	if s.Reason == "" {
		return s.Status.String()
	}
	return fmt.Sprintf("%s: %s", s.Status, s.Reason)
}
