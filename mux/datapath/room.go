package datapath

import (
	"errors"
	"fmt"
	"math/bits"

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

// grace returns when every packet that was under way has left the program:
// MEMBARRIER_CMD_GLOBAL is the kernel's synchronize_rcu.
func grace() error {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return fmt.Errorf("membarrier: %w", errno)
	}
	return nil
}

// ids hands out DIP ids, 1..end-1. A retired id may still be in a packet's
// hands or in the connection table: a sweep makes it free.
type ids struct {
	next    uint32 // never used yet, and all above it
	end     uint32
	free    []uint32
	retired []uint32
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
	if len(p.retired) > 0 {
		d.sweep(Monotonic())
	}
	if len(p.free) == 0 {
		return 0, fmt.Errorf("the mux is full: %d DIPs", p.end-1)
	}
	return p.take(d)
}

func (p *ids) giveBack(id uint32) { p.free = append(p.free, id) }
func (p *ids) retire(id uint32)   { p.retired = append(p.retired, id) }

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
	retired []block
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

func (b *bucketSpace) take(d *Datapath, lines int) (block, error) {
	size := uint32(lines)
	if bl, ok := b.find(size); ok {
		return bl, nil
	}
	// Rather wait for packets in flight than grow by more than a chunk's worth.
	var waiting uint32
	for _, r := range b.retired {
		waiting += r.size
	}
	if waiting >= linesPerChunk {
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
	if len(b.retired) == 0 {
		return nil
	}
	if err := grace(); err != nil {
		return err
	}
	for _, r := range b.retired {
		b.put(r)
	}
	b.retired = b.retired[:0]
	return nil
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
		b.retired = append(b.retired, bl)
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
