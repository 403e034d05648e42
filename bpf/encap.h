/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writers of outer headers: IP in IP and GUE variant 1, over IPv4 and IPv6.
 * WIRE.md in package encap specifies the formats. */
#ifndef QUARTET_ENCAP_H
#define QUARTET_ENCAP_H

#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <csum.h>

/* Values of lb.Encapsulation. */
enum encapsulation {
	ENCAP_IPIP = 0,
	ENCAP_GUE = 1,
};

#define GUE_PORT  6080
#define OUTER_TTL 64

/* Bytes that an outer header adds. */
INLINE __u32 encap_overhead(int outer6, int gue)
{
	return (outer6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
	       (gue ? sizeof(struct udphdr) : 0);
}

/* The sum of an outer IPv4 header's words that no packet changes: version,
 * TTL, protocol and addresses. The rest is added for each packet. */
INLINE __u32 outer_ipv4_sum(__be32 src, __be32 dst, __u8 proto)
{
	__u32 sum = bpf_htons(0x4500);
	sum += bpf_htons(OUTER_TTL << 8 | proto);
	sum = csum_add_word(sum, src);
	return csum_add_word(sum, dst);
}

/* length is the whole outer packet's, in bytes; sum is outer_ipv4_sum's. */
INLINE void write_outer_ipv4(struct iphdr *ip, __be32 src, __be32 dst, __u8 proto, __u32 sum,
			     __u16 length, __u8 tos, __be16 id, int df)
{
	__be16 frag_off = df ? bpf_htons(0x4000) : 0;

	*(__u8 *)ip = 0x45; /* version and length; bit fields would be read first */
	ip->tos = tos;
	ip->tot_len = bpf_htons(length);
	ip->id = id;
	ip->frag_off = frag_off;
	ip->ttl = OUTER_TTL;
	ip->protocol = proto;
	ip->check = csum_fold(sum + bpf_htons(tos) + bpf_htons(length) + id + frag_off);
	ip->saddr = src;
	ip->daddr = dst;
}

/* length is of what follows this header, in bytes; label is 20 bits. */
INLINE void write_outer_ipv6(struct ipv6hdr *ip, const __be32 src[4], const __be32 dst[4],
			     __u8 proto, __u16 length, __u8 tos, __u32 label)
{
	*(__be32 *)ip = bpf_htonl(6u << 28 | (__u32)tos << 20 | (label & 0xfffff));
	ip->payload_len = bpf_htons(length);
	ip->nexthdr = proto;
	ip->hop_limit = OUTER_TTL;
	__builtin_memcpy(&ip->saddr, src, 16);
	__builtin_memcpy(&ip->daddr, dst, 16);
}

/* length is of the inner packet, in bytes. The source port carries the flow's
 * entropy for ECMP. No checksum: the inner packet has its own (RFC 6935). */
INLINE void write_gue(struct udphdr *udp, __u16 entropy, __u16 length)
{
	udp->source = bpf_htons(0xc000 | entropy);
	udp->dest = bpf_htons(GUE_PORT);
	udp->len = bpf_htons(sizeof(*udp) + length);
	udp->check = 0;
}

#endif
