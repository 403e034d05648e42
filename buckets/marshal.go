package buckets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/bits"
	"net/netip"
	"slices"
)

// The format, numbers as unsigned varints unless said otherwise:
//
//	version            1 byte, 1
//	paused             1 byte, 1 if the buckets are history, else 0
//	DIPs               count, then each: 1 byte 4 or 16, the address, port as 2 bytes, big-endian
//	generations        count, then each ascending one less the one before
//	buckets            2^k, or 0
//	runs of buckets    each: length, current, previous + 1 or 0, index into generations
//	checksum           CRC-32C of all before, 4 bytes, little-endian
const formatVersion = 1

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Marshal is the table with its history in a form to store; equal tables give
// equal bytes. A table nobody has churned takes some 5 bytes a DIP beside its
// address, and any table at most some 7 bytes a bucket.
func (t Table) Marshal() []byte {
	all, paused := t.Buckets, byte(0)
	if len(all) == 0 && len(t.history) > 0 {
		all, paused = t.history, 1
	}
	out := []byte{formatVersion, paused}
	out = binary.AppendUvarint(out, uint64(len(t.DIPs)))
	for _, dip := range t.DIPs {
		address := dip.Addr().AsSlice()
		out = append(out, byte(len(address)))
		out = append(out, address...)
		out = binary.BigEndian.AppendUint16(out, dip.Port())
	}

	var generations []uint64
	for i, b := range all {
		if i == 0 || b.Generation != all[i-1].Generation {
			generations = append(generations, b.Generation)
		}
	}
	slices.Sort(generations)
	generations = slices.Compact(generations)
	out = binary.AppendUvarint(out, uint64(len(generations)))
	for i, g := range generations {
		if i > 0 {
			g -= generations[i-1]
		}
		out = binary.AppendUvarint(out, g)
	}

	out = binary.AppendUvarint(out, uint64(len(all)))
	for i := 0; i < len(all); {
		b, length := all[i], 1
		for i+length < len(all) && all[i+length] == b {
			length++
		}
		i += length
		generation, _ := slices.BinarySearch(generations, b.Generation)
		out = binary.AppendUvarint(out, uint64(length))
		out = binary.AppendUvarint(out, uint64(b.Current))
		out = binary.AppendUvarint(out, uint64(b.Previous+1))
		out = binary.AppendUvarint(out, uint64(generation))
	}
	return binary.LittleEndian.AppendUint32(out, crc32.Checksum(out, castagnoli))
}

// Unmarshal reads what Marshal wrote. Its errors say what is wrong with data.
func Unmarshal(data []byte) (Table, error) {
	t, err := unmarshal(data)
	if err != nil {
		return Table{}, fmt.Errorf("read bucket table: %w", err)
	}
	return t, nil
}

func unmarshal(data []byte) (Table, error) {
	if len(data) < 6 {
		return Table{}, fmt.Errorf("%d bytes, too short", len(data))
	}
	if data[0] != formatVersion {
		return Table{}, fmt.Errorf("version %d, only %d is known", data[0], formatVersion)
	}
	body := len(data) - 4
	if crc32.Checksum(data[:body], castagnoli) != binary.LittleEndian.Uint32(data[body:]) {
		return Table{}, errors.New("checksum does not match")
	}
	paused := data[1]
	r := reader{data: data[2:body]}
	var t Table
	for range r.number("number of DIPs", MaxMembers) {
		var addr netip.Addr
		switch n := r.bytes(1); {
		case n == nil:
		case n[0] == 4:
			if b := r.bytes(4); b != nil {
				addr = netip.AddrFrom4([4]byte(b))
			}
		case n[0] == 16:
			if b := r.bytes(16); b != nil {
				addr = netip.AddrFrom16([16]byte(b))
			}
		default:
			r.fail("address of %d bytes", n[0])
		}
		port := r.bytes(2)
		if r.err != nil {
			return Table{}, r.err
		}
		dip := netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port))
		if n := len(t.DIPs); n > 0 && t.DIPs[n-1].Compare(dip) >= 0 {
			r.fail("DIP %s out of order", dip)
		}
		t.DIPs = append(t.DIPs, dip)
	}
	var generations []uint64
	for range r.number("number of generations", MaxBuckets) {
		g := r.number("generation", 1<<64-1)
		if n := len(generations); n > 0 {
			if g += generations[n-1]; g <= generations[n-1] {
				r.fail("generations out of order")
			}
		}
		if r.err != nil {
			return Table{}, r.err
		}
		generations = append(generations, g)
	}

	size := r.number("number of buckets", MaxBuckets)
	if r.err == nil && size != 0 && (size < MinBuckets || bits.OnesCount64(size) != 1) {
		r.fail("%d buckets, not a power of two from %d to %d", size, MinBuckets, MaxBuckets)
	}
	if r.err == nil && (size == 0) != (len(t.DIPs) == 0) {
		r.fail("%d buckets and %d DIPs", size, len(t.DIPs))
	}
	if r.err == nil && size > 0 && len(generations) == 0 {
		r.fail("%d buckets and no generation", size)
	}
	if r.err == nil && (paused > 1 || paused == 1 && size == 0) {
		r.fail("paused is %d with %d buckets", paused, size)
	}
	if r.err != nil {
		return Table{}, r.err
	}
	var all []Bucket
	if size > 0 {
		all = make([]Bucket, 0, size)
	}
	for uint64(len(all)) < size {
		length := r.number("run of buckets", size-uint64(len(all)))
		current := r.number("current DIP", uint64(len(t.DIPs)-1))
		previous := r.number("previous DIP", uint64(len(t.DIPs)))
		generation := r.number("generation's index", uint64(len(generations)-1))
		if r.err == nil && length == 0 {
			r.fail("empty run of buckets")
		}
		if r.err == nil && previous == current+1 {
			r.fail("DIP %d is its own previous", current)
		}
		if r.err != nil {
			return Table{}, r.err
		}
		b := Bucket{Current: uint16(current), Previous: uint16(previous) - 1, Generation: generations[generation]}
		for range length {
			all = append(all, b)
		}
	}
	if len(r.data) > 0 {
		return Table{}, fmt.Errorf("%d bytes too many", len(r.data))
	}
	if paused == 1 {
		t.history = all
	} else {
		t.Buckets = all
	}
	return t, nil
}

// reader takes fields off the front of data and keeps the first error.
type reader struct {
	data []byte
	err  error
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

func (r *reader) bytes(n int) []byte {
	if r.err == nil && len(r.data) < n {
		r.fail("cut short")
	}
	if r.err != nil {
		return nil
	}
	out := r.data[:n]
	r.data = r.data[n:]
	return out
}

// number is 0 after an error.
func (r *reader) number(name string, limit uint64) uint64 {
	if r.err != nil {
		return 0
	}
	v, n := binary.Uvarint(r.data)
	if n <= 0 {
		r.fail("%s cut short", name)
		return 0
	}
	if v > limit {
		r.fail("%s is %d, above %d", name, v, limit)
		return 0
	}
	r.data = r.data[n:]
	return v
}
