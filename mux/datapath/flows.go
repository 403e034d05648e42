package datapath

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// struct flow_line's entries, as mux.bpf.c describes them.
const (
	flowTimeUnitBits = 32
	flowTimeMask     = 0x1fff
	flowTrusted      = 1 << 63
)

func flowDIP(entry uint64) uint32 { return uint32(entry>>13) & 0x3fffff }

// FlowTable is the connection table's state.
type FlowTable struct {
	Capacity  int // entries that there is room for
	Trusted   int // flows that sent more than one packet, at the last Sweep
	Untrusted int // flows that sent one
	Expired   int // entries that the last Sweep removed
	Hits      uint64
	Inserted  uint64
	Full      uint64 // packets that found no room and went by their bucket alone
	Stale     uint64 // packets whose entry named a DIP that is gone
}

// Monotonic is the clock that Sweep goes by.
func Monotonic() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0 // can't be: the clock's id is right
	}
	return time.Duration(t.Nano())
}

// readOffset learns how far the packet path's clock, the kernel's ticks, is
// ahead of Monotonic. The one is counted by the other, so it stays so.
func (d *Datapath) readOffset(clock *ebpf.Program) error {
	buf := make([]byte, unsafe.Sizeof(muxClock{}))
	if _, err := clock.Run(&ebpf.RunOptions{Context: buf, ContextOut: buf}); err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	d.clockOffset = time.Duration(binary.NativeEndian.Uint64(buf)) - Monotonic()
	return nil
}

// Sweep removes connection entries that have been idle for longer than their
// class allows or whose DIP is gone. now is Monotonic's. Call it at least
// hourly: the entries' clock goes round in 9.8 hours, and an entry not looked
// at for so long seems fresh.
func (d *Datapath) Sweep(now time.Duration) FlowTable {
	d.sweeping.Lock()
	defer d.sweeping.Unlock()
	d.inUse.RLock()
	defer d.inUse.RUnlock()
	if !d.collect() {
		return FlowTable{}
	}
	// After it no packet inserts an entry for a DIP that is dead by now. It
	// takes long, as the table does: changes don't wait for them.
	graced := grace() == nil
	t := d.sweepFlows(now)
	d.mu.Lock()
	defer d.mu.Unlock()
	if graced {
		d.dipIDs.free = append(d.dipIDs.free, d.dipIDs.waiting.take()...)
		d.buckets.settled()
		for _, table := range []*slotTable{&d.vip4Table, &d.vip6Table, &d.endpointTable} {
			table.settled()
		}
	}
	d.lastSweep = t
	return d.flowTable()
}

// collect takes up everything that waits for a grace period, or says that the
// datapath is closed.
func (d *Datapath) collect() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return false
	}
	d.dipIDs.waiting.collect()
	d.buckets.waiting.collect()
	for _, table := range []*slotTable{&d.vip4Table, &d.vip6Table, &d.endpointTable} {
		table.dying.collect()
	}
	return true
}

// sweepFlows needs no lock: entries change by compare-and-swap.
func (d *Datapath) sweepFlows(now time.Duration) FlowTable {
	var t FlowTable
	at := uint32((now+d.clockOffset)>>flowTimeUnitBits) & flowTimeMask
	idle := [2]uint32{d.settings.IdleUntrusted, d.settings.IdleTrusted}
	for i := range d.flowLines {
		line := &d.flowLines[i]
		for j := range line.Entry {
			e := atomic.LoadUint64(&line.Entry[j])
			if e == 0 {
				continue
			}
			id := flowDIP(e)
			age := (at - uint32(e)) & flowTimeMask
			alive := int(id) < len(d.dipRecords) && atomic.LoadUint32(&d.dipRecords[id].Endpoint) != 0
			// A packet may have dated the entry after now was read.
			if ahead := age > flowTimeMask-2; (!alive || age > idle[e>>63] && !ahead) &&
				atomic.CompareAndSwapUint64(&line.Entry[j], e, 0) {
				t.Expired++
				continue
			}
			if e&flowTrusted != 0 {
				t.Trusted++
			} else {
				t.Untrusted++
			}
		}
	}
	return t
}

// FlowTable returns the connection table's state, its numbers of entries as of
// the last Sweep.
func (d *Datapath) FlowTable() (FlowTable, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.flowTable()
	return t, nil
}

func (d *Datapath) flowTable() FlowTable {
	t := d.lastSweep
	t.Capacity = len(d.flowLines) * len(muxFlowLine{}.Entry)
	if stats, err := d.readStats(); err == nil {
		t.Hits = stats.Events[muxEventEVENT_FLOW_HIT]
		t.Inserted = stats.Events[muxEventEVENT_FLOW_INSERTED]
		t.Full = stats.Events[muxEventEVENT_FLOW_FULL]
		t.Stale = stats.Events[muxEventEVENT_FLOW_STALE]
	}
	return t
}
