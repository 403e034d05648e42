/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * flowhash as package flowhash specifies it: SipHash-1-3 of a packet's 5-tuple.
 * Include after vmlinux.h or <linux/types.h>, and bpf_helpers.h.
 */
#ifndef QUARTET_FLOWHASH_H
#define QUARTET_FLOWHASH_H

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "flowhash.h composes message words on little-endian machines only"
#endif

/* The seed's 16 bytes as two little-endian words. */
struct flow_seed {
	__u64 k0;
	__u64 k1;
};

struct flowhash_state {
	__u64 v0, v1, v2, v3;
};

static __always_inline __u64 flowhash_rotl(__u64 x, int bits)
{
	return (x << bits) | (x >> (64 - bits));
}

static __always_inline void flowhash_round(struct flowhash_state *s)
{
	s->v0 += s->v1;
	s->v2 += s->v3;
	s->v1 = flowhash_rotl(s->v1, 13) ^ s->v0;
	s->v3 = flowhash_rotl(s->v3, 16) ^ s->v2;
	s->v0 = flowhash_rotl(s->v0, 32);
	s->v2 += s->v1;
	s->v0 += s->v3;
	s->v1 = flowhash_rotl(s->v1, 17) ^ s->v2;
	s->v3 = flowhash_rotl(s->v3, 21) ^ s->v0;
	s->v2 = flowhash_rotl(s->v2, 32);
}

static __always_inline void flowhash_word(struct flowhash_state *s, __u64 m)
{
	s->v3 ^= m;
	flowhash_round(s);
	s->v0 ^= m;
}

static __always_inline struct flowhash_state flowhash_start(const struct flow_seed *seed)
{
	struct flowhash_state s = {
	    .v0 = seed->k0 ^ 0x736f6d6570736575ULL,
	    .v1 = seed->k1 ^ 0x646f72616e646f6dULL,
	    .v2 = seed->k0 ^ 0x6c7967656e657261ULL,
	    .v3 = seed->k1 ^ 0x7465646279746573ULL,
	};

	return s;
}

/* The last word carries the message's length in bytes on top. */
static __always_inline __u64 flowhash_finish(struct flowhash_state *s, __be16 sport, __be16 dport,
					     __u8 proto, __u64 length)
{
	flowhash_word(s, (__u64)sport | (__u64)dport << 16 | (__u64)proto << 32 | length << 56);
	s->v2 ^= 0xff;
	flowhash_round(s);
	flowhash_round(s);
	flowhash_round(s);
	return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

/* All arguments but the seed are as they stand in the packet. */
static __always_inline __u64 flowhash_v4(const struct flow_seed *seed, __be32 saddr, __be32 daddr,
					 __be16 sport, __be16 dport, __u8 proto)
{
	struct flowhash_state s = flowhash_start(seed);

	flowhash_word(&s, (__u64)saddr | (__u64)daddr << 32);
	return flowhash_finish(&s, sport, dport, proto, 13);
}

/* Addresses are read as 32-bit words: the verifier demands alignment of copies on the stack. */
static __always_inline __u64 flowhash_v6(const struct flow_seed *seed, const __be32 saddr[4],
					 const __be32 daddr[4], __be16 sport, __be16 dport,
					 __u8 proto)
{
	struct flowhash_state s = flowhash_start(seed);

	flowhash_word(&s, (__u64)saddr[0] | (__u64)saddr[1] << 32);
	flowhash_word(&s, (__u64)saddr[2] | (__u64)saddr[3] << 32);
	flowhash_word(&s, (__u64)daddr[0] | (__u64)daddr[1] << 32);
	flowhash_word(&s, (__u64)daddr[2] | (__u64)daddr[3] << 32);
	return flowhash_finish(&s, sport, dport, proto, 37);
}

#endif
