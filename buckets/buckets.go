// Package buckets computes an endpoint's lookup table: which DIP serves which
// share of the endpoint's flows, moving as few flows as possible when DIPs or
// their weights change.
//
// A table has N = 2^k buckets, and a flow's bucket is its flowhash & (N−1).
// What holds after each update, for a DIP of weight w where all weights add
// up to W:
//
//   - Share: a DIP has N·w/W buckets, rounded up or down to a whole number; so
//     it is always less than one bucket off. Of the ways to round, that one is
//     taken that moves the fewest buckets.
//   - Movement: no bucket moves but from a DIP that has more than its rounded
//     share to one that has less. So with equal weights, removing a DIP moves
//     only its buckets, and adding one moves only as many as it gets. With
//     unequal weights the same is true unless rounding leaves no choice: when
//     the shares of several DIPs pass a whole number at once, another may have
//     to give the bucket that it was rounded up to, or to take one; none more
//     than one. No rule can avoid that (Balinski and Young's theorem on
//     apportionment) without leaving the first guarantee.
//   - Return: a DIP that gets buckets gets those first whose previous DIP it
//     is, the last moved before others.
//   - Growth: a table grows by doubling, which moves no flow, and never shrinks.
//     Shares are then rounded more finely, for which a DIP may give or take two
//     of the smaller buckets.
//
// The result depends on the table before, the set of members and the
// generation; the order of members doesn't matter.
package buckets

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"net/netip"
	"slices"
)

// None is the index of no DIP.
const None = 0xffff

// Limits of a table.
const (
	MinBuckets       = 256
	MaxBuckets       = 65536
	BucketsPerMember = 64 // at least, up to MaxBuckets
	MaxMembers       = 65535
)

// Member is a DIP that can serve, and how much of the endpoint's flows it is
// to have. Port belongs to the DIP's identity. A DIP listed twice has the sum
// of its weights.
type Member struct {
	DIP    netip.AddrPort
	Weight uint32 // relative to the other members'; 0: no new flows
}

// Bucket is one slot of a lookup table.
type Bucket struct {
	// Current is the index into DIPs of the one that serves the bucket.
	Current uint16
	// Previous is the index of the DIP that the bucket had before it last
	// moved, or None. It is never Current.
	Previous uint16
	// Generation is the one that last moved the bucket.
	Generation uint64
}

// Table is an endpoint's lookup table. The zero Table is that of an endpoint
// that never had a DIP. Tables share memory: treat them as read-only.
type Table struct {
	// DIPs are those that a bucket has as its current or previous one, in
	// ascending order.
	DIPs []netip.AddrPort
	// Buckets are 2^k, or none while no DIP can serve.
	Buckets []Bucket
	// history is what Buckets were before the last DIP went, while there are none.
	history []Bucket
}

// New is the table of an endpoint that had none. See Table.Update.
func New(members []Member, generation uint64) Table {
	return Table{}.Update(members, generation)
}

// Update is the table for these members; buckets that move are marked with the
// generation. If no member has a weight above 0, the table has no buckets but
// remembers them, and the next update goes on from there. It panics on more
// than MaxMembers members.
func (t Table) Update(members []Member, generation uint64) Table {
	members = merge(members)
	if len(members) > MaxMembers {
		panic(fmt.Sprintf("buckets: %d members, at most %d", len(members), MaxMembers))
	}
	base := t.Buckets
	if len(base) == 0 {
		base = t.history
	}
	if !slices.ContainsFunc(members, func(m Member) bool { return m.Weight > 0 }) {
		return Table{DIPs: t.DIPs, history: base}
	}

	dips := union(t.DIPs, members)
	buckets := grow(base, t.DIPs, dips, size(len(members), len(base)))
	have := make([]int, len(dips))
	weights := make([]uint64, len(dips))
	for _, b := range buckets {
		if b.Current != None {
			have[b.Current]++
		}
	}
	for _, m := range members {
		weights[find(dips, m.DIP)] = uint64(m.Weight)
	}
	move(buckets, have, targets(have, weights, len(buckets)), generation)
	return compact(dips, buckets)
}

// Lookup is the bucket of a flow's hash and the DIP that serves it; -1 and the
// zero AddrPort if no DIP can.
func (t Table) Lookup(hash uint64) (bucket int, dip netip.AddrPort) {
	if len(t.Buckets) == 0 {
		return -1, netip.AddrPort{}
	}
	bucket = int(hash & uint64(len(t.Buckets)-1))
	return bucket, t.DIPs[t.Buckets[bucket].Current]
}

// Counts is how many buckets each of DIPs serves.
func (t Table) Counts() []int {
	counts := make([]int, len(t.DIPs))
	for _, b := range t.Buckets {
		counts[b.Current]++
	}
	return counts
}

// merge sorts members and adds up the weights of a DIP that is listed twice.
func merge(members []Member) []Member {
	members = slices.Clone(members)
	slices.SortFunc(members, func(a, b Member) int { return a.DIP.Compare(b.DIP) })
	out := members[:0]
	for _, m := range members {
		if n := len(out); n > 0 && out[n-1].DIP == m.DIP {
			out[n-1].Weight = uint32(min(uint64(out[n-1].Weight)+uint64(m.Weight), math.MaxUint32))
			continue
		}
		out = append(out, m)
	}
	return out
}

func size(members, had int) int {
	want := min(max(MinBuckets, BucketsPerMember*members), MaxBuckets)
	return max(had, 1<<bits.Len(uint(want-1)))
}

// union is all DIPs in order; only the members where indices wouldn't suffice,
// which forgets the history.
func union(had []netip.AddrPort, members []Member) []netip.AddrPort {
	dips := make([]netip.AddrPort, len(members), len(members)+len(had))
	for i, m := range members {
		dips[i] = m.DIP
	}
	dips = append(dips, had...)
	slices.SortFunc(dips, netip.AddrPort.Compare)
	dips = slices.Compact(dips)
	if len(dips) <= MaxMembers {
		return dips
	}
	dips = dips[:0]
	for _, m := range members {
		dips = append(dips, m.DIP)
	}
	return dips
}

// find is dip's index, or None.
func find(dips []netip.AddrPort, dip netip.AddrPort) uint16 {
	i, ok := slices.BinarySearchFunc(dips, dip, netip.AddrPort.Compare)
	if !ok {
		return None
	}
	return uint16(i)
}

// grow repeats base n/len(base) times and changes its indices from those of
// had to those of dips.
func grow(base []Bucket, had, dips []netip.AddrPort, n int) []Bucket {
	index := make([]uint16, len(had))
	for i, dip := range had {
		index[i] = find(dips, dip)
	}
	renumber := func(i uint16) uint16 {
		if i == None {
			return None
		}
		return index[i]
	}
	buckets := make([]Bucket, n)
	for i := range buckets {
		buckets[i] = Bucket{Current: None, Previous: None}
		if len(base) > 0 {
			b := base[i%len(base)]
			buckets[i] = Bucket{renumber(b.Current), renumber(b.Previous), b.Generation}
		}
	}
	return buckets
}

// targets is how many of n buckets each DIP is to have: its share rounded down,
// and what is left over to one DIP each, first to those that have more than
// their rounded-down share (which saves a move each), then to the largest
// remainders, then in order.
func targets(have []int, weights []uint64, n int) []int {
	var total uint64
	for _, w := range weights {
		total += w
	}
	target := make([]int, len(weights))
	remainder := make([]uint64, len(weights))
	var up []int
	left := n
	for i, w := range weights {
		product := uint64(n) * w // below 2^48
		target[i], remainder[i] = int(product/total), product%total
		left -= target[i]
		if remainder[i] > 0 {
			up = append(up, i)
		}
	}
	slices.SortFunc(up, func(a, b int) int {
		keepsA, keepsB := have[a] > target[a], have[b] > target[b]
		if keepsA != keepsB {
			if keepsA {
				return -1
			}
			return 1
		}
		return cmp.Or(-cmp.Compare(remainder[a], remainder[b]), cmp.Compare(a, b))
	})
	for _, i := range up[:left] {
		target[i]++
	}
	return target
}

// move takes buckets from DIPs that have more than their target, and from
// none, and gives them to those that have less.
func move(buckets []Bucket, have, target []int, generation uint64) {
	give := func(b *Bucket, to uint16) {
		if b.Current != None {
			have[b.Current]--
		}
		have[to]++
		*b = Bucket{Current: to, Previous: b.Current, Generation: generation}
	}
	spare := func(b *Bucket) bool {
		return b.Current == None || have[b.Current] > target[b.Current]
	}
	var returning []*Bucket
	for i := range buckets {
		b := &buckets[i]
		if p := b.Previous; p != None && have[p] < target[p] && spare(b) {
			returning = append(returning, b)
		}
	}
	slices.SortStableFunc(returning, func(a, b *Bucket) int {
		return -cmp.Compare(a.Generation, b.Generation)
	})
	for _, b := range returning {
		if have[b.Previous] < target[b.Previous] && spare(b) {
			give(b, b.Previous)
		}
	}
	to := 0
	for i := range buckets {
		if b := &buckets[i]; spare(b) {
			for have[to] >= target[to] {
				to++
			}
			give(b, uint16(to))
		}
	}
}

// compact leaves out DIPs that no bucket has or had.
func compact(dips []netip.AddrPort, buckets []Bucket) Table {
	used := make([]bool, len(dips))
	for _, b := range buckets {
		used[b.Current] = true
		if b.Previous != None {
			used[b.Previous] = true
		}
	}
	index := make([]uint16, len(dips))
	kept := make([]netip.AddrPort, 0, len(dips))
	for i, dip := range dips {
		index[i] = uint16(len(kept))
		if used[i] {
			kept = append(kept, dip)
		}
	}
	for i := range buckets {
		b := &buckets[i]
		b.Current = index[b.Current]
		if b.Previous != None {
			b.Previous = index[b.Previous]
		}
	}
	return Table{DIPs: kept, Buckets: buckets}
}
