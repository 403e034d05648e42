/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One cursor over a packet, one helper per header. Each helper checks its
 * header against the packet's end, notes in struct packet what the later
 * stages need, and leaves the cursor behind the header.
 *
 * Pointers into a packet die with each change of its head or tail, so struct
 * packet holds offsets and values, never pointers.
 */
#ifndef QUARTET_PARSE_H
#define QUARTET_PARSE_H

#include <linux/bpf.h>
#include <linux/icmp.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf_endian.h>
#include <bpf_helpers.h>

#ifndef INLINE
#define INLINE static __always_inline
#endif

/* What a helper found. */
enum parsed {
	PARSED_OK,
	PARSED_NOT_IP,	  /* an EtherType that is neither IPv4 nor IPv6 */
	PARSED_TRUNCATED, /* the packet ends inside the header */
	PARSED_INVALID,	  /* a field of the header contradicts the packet or the RFC */
};

/* Bits of packet.flags. */
#define PACKET_FIRST_FRAGMENT (1 << 0) /* offset 0, more follow */
#define PACKET_LATER_FRAGMENT (1 << 1) /* offset not 0: no layer 4 header */
#define PACKET_DF	      (1 << 2) /* must not be fragmented: IPv4 DF, every IPv6 packet */
#define PACKET_SYN	      (1 << 3) /* TCP SYN without ACK and RST */
#define PACKET_RST_OR_FIN     (1 << 4) /* TCP */
#define PACKET_VERSION6	      (1 << 5) /* addresses are IPv6 */
#define PACKET_SYN_ACK	      (1 << 6) /* TCP SYN with ACK */

/* IPv6 extension headers walked before a packet counts as invalid, and IEEE
 * 802.1Q/802.1ad tags read before one counts as not IP. */
#define MAX_EXTENSION_HEADERS 6
#define MAX_VLAN_TAGS	      2

/* struct packet describes one packet. Addresses are in network byte order as
 * they stand in the header; an IPv4 address is in word 0, the rest is zero. */
struct packet {
	__be32 src[4];
	__be32 dst[4];
	__be16 src_port; /* 0 without a layer 4 header, or for protocols without ports */
	__be16 dst_port;
	__be32 fragment_id; /* network byte order; IPv4's 16 bits as a __be16 */
	__u16 l3_offset;    /* bytes from the frame's start: 14, 18 or 22 */
	__u16 l4_offset;    /* bytes from the frame's start */
	__u32 l3_length;    /* bytes of the IP packet with its header, by its own field */
	__be16 l3_proto;    /* ETH_P_IP or ETH_P_IPV6, network byte order */
	__u8 l4_proto;	    /* after IPv6 extension headers */
	__u8 flags;
	__u8 ttl; /* or hop limit */
	__u8 tos; /* or traffic class: DSCP and ECN */
	__u8 icmp_type;
	__u8 icmp_code;
	__u8 vlan_tags; /* tags between the MAC addresses and l3_proto */
};

struct cursor {
	void *ctx;   /* struct xdp_md or struct __sk_buff */
	int skb;     /* which of the two */
	void *start; /* the frame's first byte */
	void *pos;
	void *end; /* behind the frame's last byte */
};

struct vlan_header {
	__be16 tci;
	__be16 proto;
};

INLINE struct cursor cursor_xdp(struct xdp_md *ctx)
{
	struct cursor c = {
	    .ctx = ctx,
	    .start = (void *)(long)ctx->data,
	    .pos = (void *)(long)ctx->data,
	    .end = (void *)(long)ctx->data_end,
	};
	return c;
}

/* The linear part of an skb; tc programs pull what they need into it first. */
INLINE struct cursor cursor_skb(struct __sk_buff *ctx)
{
	struct cursor c = {
	    .ctx = ctx,
	    .skb = 1,
	    .start = (void *)(long)ctx->data,
	    .pos = (void *)(long)ctx->data,
	    .end = (void *)(long)ctx->data_end,
	};
	return c;
}

/* The cursor's distance from the frame's start, in bytes. */
#define CURSOR_OFFSET(c) ((__u16)((c)->pos - (c)->start))

INLINE enum parsed parse_ethernet(struct cursor *c, struct packet *p)
{
	struct ethhdr *eth = c->pos;
	if ((void *)(eth + 1) > c->end)
		return PARSED_TRUNCATED;
	__be16 proto = eth->h_proto;
	c->pos = eth + 1;

#pragma unroll
	for (int i = 0; i < MAX_VLAN_TAGS; i++) {
		if (proto != bpf_htons(ETH_P_8021Q) && proto != bpf_htons(ETH_P_8021AD))
			break;
		struct vlan_header *tag = c->pos;
		if ((void *)(tag + 1) > c->end)
			return PARSED_TRUNCATED;
		proto = tag->proto;
		c->pos = tag + 1;
	}
	p->l3_proto = proto;
	/* A difference of pointers is a number that the verifier knows nothing
	 * of: what follows is checked once, not for each number of tags. */
	p->l3_offset = CURSOR_OFFSET(c);
	p->vlan_tags = (p->l3_offset - sizeof(*eth)) / sizeof(struct vlan_header);
	c->pos = c->start + (p->l3_offset & 0x1f);
	if (proto != bpf_htons(ETH_P_IP) && proto != bpf_htons(ETH_P_IPV6))
		return PARSED_NOT_IP;
	return PARSED_OK;
}

/* True if the frame holds the whole IP packet whose header was read. Bytes
 * behind it (Ethernet's padding) are allowed. An ICMP error quotes less. */
INLINE int holds_l3(const struct cursor *c, const struct packet *p)
{
	return c->start + p->l3_offset + p->l3_length <= c->end;
}

/* parse_ipv4 accepts options. The header's checksum is the receiver's to check. */
INLINE enum parsed parse_ipv4(struct cursor *c, struct packet *p)
{
	struct iphdr *ip = c->pos;
	if ((void *)(ip + 1) > c->end)
		return PARSED_TRUNCATED;
	__u32 header = ip->ihl * 4;
	__u32 length = bpf_ntohs(ip->tot_len);
	if (ip->version != 4 || header < sizeof(*ip) || length < header)
		return PARSED_INVALID;

	p->src[0] = ip->saddr;
	p->dst[0] = ip->daddr;
	p->l4_proto = ip->protocol;
	p->l3_length = length;
	p->ttl = ip->ttl;
	p->tos = ip->tos;
	__u16 fragment = bpf_ntohs(ip->frag_off);
	p->flags = (fragment >> 14 & 1) * PACKET_DF;
	if (fragment & 0x3fff) {
		p->fragment_id = ip->id;
		p->flags |= fragment & 0x1fff ? PACKET_LATER_FRAGMENT : PACKET_FIRST_FRAGMENT;
	}
	c->pos += header;
	if (c->pos > c->end)
		return PARSED_TRUNCATED;
	p->l4_offset = CURSOR_OFFSET(c);
	return PARSED_OK;
}

/* Where the walk over IPv6 extension headers stands. */
struct ipv6_walk {
	__u32 offset; /* bytes from the frame's start to the next header */
	__u32 next;   /* its protocol number */
	__u32 flags;  /* PACKET_FIRST_FRAGMENT, PACKET_LATER_FRAGMENT */
	__be32 fragment_id;
};

/* Walks to the upper layer's header. A global function, because the verifier
 * checks those once: inline, the loop's paths multiply with all that follows. */
#define DEFINE_WALK_IPV6(name, context)                                                            \
	__attribute__((noinline, weak)) int name(struct context *ctx, struct ipv6_walk *w)         \
	{                                                                                          \
		void *start = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;         \
                                                                                                   \
		if (!w)                                                                            \
			return PARSED_INVALID;                                                     \
		__u32 offset = w->offset, next = w->next;                                          \
		for (int i = 0; i <= MAX_EXTENSION_HEADERS; i++) {                                 \
			if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING &&                  \
			    next != IPPROTO_DSTOPTS && next != IPPROTO_AH &&                       \
			    next != IPPROTO_FRAGMENT) {                                            \
				w->offset = offset;                                                \
				w->next = next;                                                    \
				return PARSED_OK;                                                  \
			}                                                                          \
			if (offset > 0x3fff)                                                       \
				return PARSED_INVALID;                                             \
			__u8 *h = start + offset;                                                  \
			if ((void *)(h + 8) > end)                                                 \
				return PARSED_TRUNCATED;                                           \
			__u32 size = next == IPPROTO_AH ? (h[1] + 2) * 4 : (h[1] + 1) * 8;         \
			if (next == IPPROTO_FRAGMENT) {                                            \
				__u32 field = h[2] << 8 | h[3];                                    \
				size = 8;                                                          \
				if (field & 0xfff9)                                                \
					w->fragment_id = *(__be32 *)(h + 4);                       \
				if (field & 0xfff8) {                                              \
					w->flags |= PACKET_LATER_FRAGMENT;                         \
					w->offset = offset + size;                                 \
					w->next = h[0];                                            \
					return PARSED_OK;                                          \
				}                                                                  \
				if (field & 1)                                                     \
					w->flags |= PACKET_FIRST_FRAGMENT;                         \
			}                                                                          \
			next = h[0];                                                               \
			offset += size;                                                            \
		}                                                                                  \
		return PARSED_INVALID;                                                             \
	}

DEFINE_WALK_IPV6(walk_ipv6_xdp, xdp_md)
DEFINE_WALK_IPV6(walk_ipv6_skb, __sk_buff)

/* parse_ipv6 goes over extension headers to the upper layer's. An atomic
 * fragment (RFC 6946: offset 0, none follow) is a whole packet. A later
 * fragment's l4_proto is what its fragment header names. ESP and "no next
 * header" end the walk as upper layers. */
INLINE enum parsed parse_ipv6(struct cursor *c, struct packet *p)
{
	struct ipv6hdr *ip = c->pos;
	if ((void *)(ip + 1) > c->end)
		return PARSED_TRUNCATED;
	if (ip->version != 6)
		return PARSED_INVALID;

	__u32 length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	p->flags = PACKET_DF | PACKET_VERSION6;
	__builtin_memcpy(p->src, &ip->saddr, sizeof(p->src));
	__builtin_memcpy(p->dst, &ip->daddr, sizeof(p->dst));
	p->l3_length = length;
	p->ttl = ip->hop_limit;
	p->tos = ip->priority << 4 | ip->flow_lbl[0] >> 4;
	p->l4_proto = ip->nexthdr;
	c->pos = ip + 1;
	p->l4_offset = CURSOR_OFFSET(c);
	if (p->l4_proto == IPPROTO_TCP || p->l4_proto == IPPROTO_UDP)
		return PARSED_OK;

	struct ipv6_walk w = {.offset = p->l4_offset, .next = p->l4_proto};
	int parsed = c->skb ? walk_ipv6_skb(c->ctx, &w) : walk_ipv6_xdp(c->ctx, &w);
	if (parsed != PARSED_OK)
		return parsed;
	p->flags |= w.flags;
	p->fragment_id = w.fragment_id;
	p->l4_proto = w.next;
	p->l4_offset = w.offset;
	if (w.offset > (__u32)p->l3_offset + length)
		return PARSED_TRUNCATED;
	c->pos = c->start + (w.offset & 0x3fff);
	return PARSED_OK;
}

/* True if the IP packet, by its own length field, holds n bytes of layer 4. */
INLINE int holds_l4(const struct packet *p, __u32 n)
{
	return p->l4_offset + n <= (__u32)p->l3_offset + p->l3_length;
}

INLINE enum parsed parse_tcp(struct cursor *c, struct packet *p)
{
	struct tcphdr *tcp = c->pos;
	if ((void *)(tcp + 1) > c->end || !holds_l4(p, sizeof(*tcp)))
		return PARSED_TRUNCATED;
	if (tcp->doff < 5)
		return PARSED_INVALID;
	p->src_port = tcp->source;
	p->dst_port = tcp->dest;
	/* Flags FIN, SYN, RST and ACK are bits 0, 1, 2 and 4. Without branches,
	 * whose every outcome the verifier would follow to the program's end. */
	__u32 f = ((__u8 *)tcp)[13];
	__u32 syn = f >> 1 & ~(f >> 2) & 1, ack = f >> 4 & 1;
	p->flags |= (syn & ~ack) * PACKET_SYN | (syn & ack) * PACKET_SYN_ACK |
		    ((f | f >> 2) & 1) * PACKET_RST_OR_FIN;
	return PARSED_OK;
}

INLINE enum parsed parse_udp(struct cursor *c, struct packet *p)
{
	struct udphdr *udp = c->pos;
	if ((void *)(udp + 1) > c->end || !holds_l4(p, sizeof(*udp)))
		return PARSED_TRUNCATED;
	p->src_port = udp->source;
	p->dst_port = udp->dest;
	return PARSED_OK;
}

/* parse_icmp serves ICMP and ICMPv6: both begin with type, code, checksum and
 * four bytes whose meaning depends on the type. */
INLINE enum parsed parse_icmp(struct cursor *c, struct packet *p)
{
	struct icmphdr *icmp = c->pos;
	if ((void *)(icmp + 1) > c->end || !holds_l4(p, sizeof(*icmp)))
		return PARSED_TRUNCATED;
	p->icmp_type = icmp->type;
	p->icmp_code = icmp->code;
	c->pos = icmp + 1;
	return PARSED_OK;
}

/* parse_ports reads only the ports of TCP or UDP: what is certain to be there
 * in the packet that an ICMP error quotes (RFC 792: eight bytes). */
INLINE enum parsed parse_ports(struct cursor *c, struct packet *p)
{
	struct udphdr *ports = c->pos;
	if ((void *)(ports + 1) > c->end)
		return PARSED_TRUNCATED;
	p->src_port = ports->source;
	p->dst_port = ports->dest;
	return PARSED_OK;
}

#endif
