/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The Internet checksum (RFC 1071) and its incremental change (RFC 1624).
 * Sums are of 16-bit words in network byte order, kept unfolded in 32 bits. */
#ifndef QUARTET_CSUM_H
#define QUARTET_CSUM_H

#include <linux/types.h>
#include <bpf_endian.h>

#ifndef INLINE
#define INLINE static __always_inline
#endif

/* The sum as a checksum field holds it. */
INLINE __sum16 csum_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

INLINE __u32 csum_add_word(__u32 sum, __be32 word)
{
	return sum + (word & 0xffff) + (word >> 16);
}

/* Up to 64 KiB of 16-bit words may be added before a sum overflows. */
INLINE __u32 csum_add(__u32 sum, const void *bytes, __u32 n)
{
	const __u16 *words = bytes;
#pragma unroll
	for (__u32 i = 0; i < n / 2; i++)
		sum += words[i];
	return sum;
}

/* csum_replace changes a checksum field for a 16-bit word changed beneath it
 * (RFC 1624, equation 3). */
INLINE void csum_replace2(__sum16 *check, __be16 from, __be16 to)
{
	*check = csum_fold((__u16) ~*check + (__u32)(__u16)~from + to);
}

INLINE void csum_replace4(__sum16 *check, __be32 from, __be32 to)
{
	__u32 sum = (__u16) ~*check;
	sum = csum_add_word(sum, ~from);
	sum = csum_add_word(sum, to);
	*check = csum_fold(sum);
}

/* An IPv6 address, or any 16 bytes, changed beneath a checksum. */
INLINE void csum_replace16(__sum16 *check, const __be32 from[4], const __be32 to[4])
{
	__u32 sum = (__u16) ~*check;
#pragma unroll
	for (int i = 0; i < 4; i++) {
		sum = csum_add_word(sum, ~from[i]);
		sum = csum_add_word(sum, to[i]);
	}
	*check = csum_fold(sum);
}

/* The same for UDP, where 0 stands for "no checksum" and is left alone, and a
 * result of 0 is written as all ones (RFC 768). */
INLINE void csum_replace2_udp(__sum16 *check, __be16 from, __be16 to)
{
	if (!*check)
		return;
	csum_replace2(check, from, to);
	if (!*check)
		*check = 0xffff;
}

INLINE void csum_replace4_udp(__sum16 *check, __be32 from, __be32 to)
{
	if (!*check)
		return;
	csum_replace4(check, from, to);
	if (!*check)
		*check = 0xffff;
}

INLINE void csum_replace16_udp(__sum16 *check, const __be32 from[4], const __be32 to[4])
{
	if (!*check)
		return;
	csum_replace16(check, from, to);
	if (!*check)
		*check = 0xffff;
}

/* The TTL, one less, and the header's checksum with it. */
INLINE void ipv4_decrement_ttl(struct iphdr *ip)
{
	__u32 check = (__u32)ip->check + bpf_htons(0x0100);
	ip->check = check + (check >= 0xffff);
	ip->ttl--;
}

#endif
