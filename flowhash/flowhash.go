// Package flowhash computes the one hash by which muxes, switches and host
// agents choose a connection's DIP, so that all of them choose alike.
//
// It is SipHash-1-3 (Aumasson and Bernstein, "SipHash: a fast short-input
// PRF") under a seed that is fabric-wide and secret: whoever doesn't know it
// can't aim connections at one bucket. bpf/flowhash.h is the same function in
// C; both run testdata/vectors.txt.
//
// # Message
//
// The packet's fields in network byte order, client to VIP. Every packet that
// is IPv4 has a message of 13 bytes:
//
//	byte 0       4       8      10      12
//	    | source | dest. | sport | dport | protocol |
//
// and every packet that is IPv6 one of 37:
//
//	byte 0       16      32     34      36
//	    | source | dest. | sport | dport | protocol |
//
// Protocol is the upper-layer protocol's number (6, 17, 1, 58), after any
// extension headers. Ports are 0 for protocols without ports. For an ICMP
// error, the message is that of the quoted packet, reversed. An IPv4-mapped
// IPv6 address is an IPv6 address here.
//
// # Hash
//
// Seed bytes 0 to 7 are k0 and bytes 8 to 15 are k1, each a little-endian
// 64-bit integer. The message is cut into little-endian 64-bit words m; the
// last word is what remains of it (5 bytes for either family), two zero bytes,
// and the message's length in its top byte. With v0 to v3 as
//
//	v0 = k0 ^ 736f6d6570736575   v1 = k1 ^ 646f72616e646f6d
//	v2 = k0 ^ 6c7967656e657261   v3 = k1 ^ 7465646279746573
//
// each word does v3 ^= m, one SipRound, v0 ^= m. Then v2 ^= ff, three
// SipRounds, and the hash is v0 ^ v1 ^ v2 ^ v3.
//
// # Use of the bits
//
//	0..31   bucket: hash & (buckets − 1)
//	12..39  connection table: fingerprint
//	40..63  connection table: line
//	32..63  a tunnel's entropy: source port, flow label
package flowhash

import (
	"encoding/binary"
	"math/bits"

	"github.com/quartet-lb/quartet/lb"
)

// Seed is the hash's key, the flow_seed of the schema. It is drawn at random
// once for a fabric and kept secret.
type Seed [16]byte

// Hash is the flow's hash. Flows are IPv4 if both addresses are, else IPv6.
// It panics on the zero Addr.
func Hash(seed Seed, f lb.Flow) uint64 {
	k0 := binary.LittleEndian.Uint64(seed[:8])
	k1 := binary.LittleEndian.Uint64(seed[8:])
	v0 := k0 ^ 0x736f6d6570736575
	v1 := k1 ^ 0x646f72616e646f6d
	v2 := k0 ^ 0x6c7967656e657261
	v3 := k1 ^ 0x7465646279746573
	length := uint64(13)
	if f.Src.Is4() && f.Dst.Is4() {
		src, dst := f.Src.As4(), f.Dst.As4()
		m := uint64(binary.LittleEndian.Uint32(src[:])) |
			uint64(binary.LittleEndian.Uint32(dst[:]))<<32
		v0, v1, v2, v3 = round(v0, v1, v2, v3^m)
		v0 ^= m
	} else {
		length = 37
		src, dst := f.Src.As16(), f.Dst.As16()
		for _, m := range [4]uint64{
			binary.LittleEndian.Uint64(src[:8]), binary.LittleEndian.Uint64(src[8:]),
			binary.LittleEndian.Uint64(dst[:8]), binary.LittleEndian.Uint64(dst[8:]),
		} {
			v0, v1, v2, v3 = round(v0, v1, v2, v3^m)
			v0 ^= m
		}
	}
	m := uint64(bits.ReverseBytes16(f.SrcPort)) |
		uint64(bits.ReverseBytes16(f.DstPort))<<16 |
		uint64(f.Protocol)<<32 | length<<56
	v0, v1, v2, v3 = round(v0, v1, v2, v3^m)
	v0 ^= m
	v2 ^= 0xff
	for range 3 {
		v0, v1, v2, v3 = round(v0, v1, v2, v3)
	}
	return v0 ^ v1 ^ v2 ^ v3
}

// round is one SipRound, on values so that the compiler inlines it.
func round(v0, v1, v2, v3 uint64) (uint64, uint64, uint64, uint64) {
	v0 += v1
	v2 += v3
	v1 = bits.RotateLeft64(v1, 13) ^ v0
	v3 = bits.RotateLeft64(v3, 16) ^ v2
	v0 = bits.RotateLeft64(v0, 32)
	v2 += v1
	v0 += v3
	v1 = bits.RotateLeft64(v1, 17) ^ v2
	v3 = bits.RotateLeft64(v3, 21) ^ v0
	v2 = bits.RotateLeft64(v2, 32)
	return v0, v1, v2, v3
}
