package datapath

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Sizes that mux.bpf.c has too.
const (
	bucketsPerLine = 16
	linesPerChunk  = 16384
	maxChunks      = 1024
	noBuckets      = 0xff
	nextHopSlots   = 4096
)

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// membarrier is the kernel's synchronize_rcu. A variable, for tests.
var membarrier = func() error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// grace returns when every packet that was under way has left the program. It
// takes milliseconds. A variable, for tests.
var grace = func() error {
	err := membarrier()
	if errors.Is(err, unix.EINVAL) { // some CPUs are nohz_full
		err = putMapInMap()
	}
	if err != nil {
		return fmt.Errorf("wait for packets under way: %w", err)
	}
	return nil
}

// putMapInMap changes a map of maps, which returns to its caller only after
// the kernel's synchronize_rcu.
func putMapInMap() error {
	inner := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner})
	if err != nil {
		return err
	}
	defer outer.Close()
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return err
	}
	defer m.Close()
	return outer.Put(uint32(0), m)
}

// waiting is what packets under way may still have in hand. What collect takes
// up is free after a grace period that begins later.
type waiting[T any] struct {
	fresh     []T
	collected []T
}

func (w *waiting[T]) add(v T)  { w.fresh = append(w.fresh, v) }
func (w *waiting[T]) len() int { return len(w.fresh) + len(w.collected) }
func (w *waiting[T]) collect() {
	w.collected = append(w.collected, w.fresh...)
	w.fresh = w.fresh[:0]
}

// take empties what was collected.
func (w *waiting[T]) take() []T {
	taken := w.collected
	w.collected = nil
	return taken
}

// ids hands out DIP ids, 1..end-1. A retired id may still be in a packet's
// hands or in the connection table: a sweep makes it free.
type ids struct {
	next    uint32 // never used yet, and all above it
	end     uint32
	free    []uint32
	waiting waiting[uint32]
}

func (p *ids) take(d *Datapath) (uint32, error) {
	if n := len(p.free); n > 0 {
		id := p.free[n-1]
		p.free = p.free[:n-1]
		return id, nil
	}
	if p.next < p.end {
		p.next++
		return p.next - 1, nil
	}
	if p.waiting.len() > 0 {
		p.waiting.collect()
		if err := grace(); err != nil {
			return 0, err
		}
		d.sweepFlows(Monotonic())
		p.free = append(p.free, p.waiting.take()...)
	}
	if len(p.free) == 0 {
		return 0, fmt.Errorf("the mux is full: %d DIPs", p.end-1)
	}
	return p.take(d)
}

func (p *ids) giveBack(id uint32) { p.free = append(p.free, id) }
func (p *ids) retire(id uint32)   { p.waiting.add(id) }

// use marks the ids in use that a pinned datapath has; the rest is free.
func (p *ids) use(first uint32, used map[uint32]bool) {
	p.next, p.free = first, nil
	for id := range used {
		p.next = max(p.next, id+1)
	}
	for id := first; id < p.next; id++ {
		if !used[id] {
			p.free = append(p.free, id)
		}
	}
}

// block is a run of bucket lines: 2^k of them, at a multiple of 2^k.
type block struct {
	first uint32
	size  uint32
}

// bucketSpace is a buddy allocator over chunks that are made as they are needed.
type bucketSpace struct {
	chunks  [][]muxBucketLine // memory-mapped
	free    [15]map[uint32]struct{}
	waiting waiting[block]
}

func order(size uint32) int { return bits.Len32(size) - 1 }

func (b *bucketSpace) put(bl block) {
	for {
		o := order(bl.size)
		buddy := bl.first ^ bl.size
		if bl.size == linesPerChunk {
			b.free[o] = with(b.free[o], bl.first)
			return
		}
		if _, ok := b.free[o][buddy]; !ok {
			b.free[o] = with(b.free[o], bl.first)
			return
		}
		delete(b.free[o], buddy)
		bl = block{first: bl.first &^ bl.size, size: bl.size * 2}
	}
}

func with(m map[uint32]struct{}, k uint32) map[uint32]struct{} {
	if m == nil {
		m = map[uint32]struct{}{}
	}
	m[k] = struct{}{}
	return m
}

func (b *bucketSpace) find(size uint32) (block, bool) {
	for o := order(size); o < len(b.free); o++ {
		for first := range b.free[o] {
			delete(b.free[o], first)
			for s := uint32(1) << o; s > size; s /= 2 {
				b.put(block{first: first + s/2, size: s / 2})
			}
			return block{first: first, size: size}, true
		}
	}
	return block{}, false
}

func (b *bucketSpace) take(d *Datapath, size uint32) (block, error) {
	if bl, ok := b.find(size); ok {
		return bl, nil
	}
	// Rather wait for packets in flight than grow by more than a chunk's worth.
	var lines uint32
	for _, r := range slices.Concat(b.waiting.fresh, b.waiting.collected) {
		lines += r.size
	}
	if lines >= linesPerChunk {
		if err := b.recycle(); err != nil {
			return block{}, err
		}
		if bl, ok := b.find(size); ok {
			return bl, nil
		}
	}
	if err := b.grow(d); err != nil {
		return block{}, err
	}
	bl, _ := b.find(size)
	return bl, nil
}

func (b *bucketSpace) recycle() error {
	b.waiting.collect()
	if err := grace(); err != nil {
		return err
	}
	b.settled()
	return nil
}

// settled frees what was collected: a grace period is over.
func (b *bucketSpace) settled() {
	for _, bl := range b.waiting.take() {
		b.put(bl)
	}
}

func (b *bucketSpace) grow(d *Datapath) error {
	n := len(b.chunks)
	if n == maxChunks {
		return errors.New("the mux is full: no room for more buckets")
	}
	m, err := ebpf.NewMap(d.spec.Maps[muxMapChunks].InnerMap)
	if err != nil {
		return err
	}
	defer m.Close()
	lines, err := mapMemory[muxBucketLine](m)
	if err != nil {
		return err
	}
	if err := d.maps.Chunks.Put(uint32(n), m); err != nil {
		unmap(lines)
		return err
	}
	b.chunks = append(b.chunks, lines)
	b.put(block{first: uint32(n) * linesPerChunk, size: linesPerChunk})
	return nil
}

func (b *bucketSpace) release(bl block) {
	if bl.size > 0 {
		b.waiting.add(bl)
	}
}

func (b *bucketSpace) lines(bl block) []muxBucketLine {
	return b.chunks[bl.first/linesPerChunk][bl.first%linesPerChunk:][:bl.size]
}

// use takes the blocks in use out of the free space.
func (b *bucketSpace) use(blocks []block) error {
	used := map[uint32]uint32{}
	for _, bl := range blocks {
		used[bl.first] = bl.size
	}
	for c := range b.chunks {
		at := uint32(c) * linesPerChunk
		end := at + linesPerChunk
		for at < end {
			if size := used[at]; size > 0 {
				delete(used, at)
				at += size
				continue
			}
			b.put(block{first: at, size: 1})
			at++
		}
	}
	if len(used) > 0 {
		return errors.New("its bucket tables overlap or lie outside its chunks")
	}
	return nil
}
