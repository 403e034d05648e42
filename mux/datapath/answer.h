/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the mux answers itself: echo requests to a VIP, and the ICMP errors
 * that a packet on its way to a DIP calls for. Answers leave by the interface
 * that the packet came by, to the neighbour that sent it, tags as they were. */
#ifndef QUARTET_ANSWER_H
#define QUARTET_ANSWER_H

#define QUOTED_BYTES	128	     /* of the packet that an ICMP error is about */
#define ANSWER_BURST_NS 100000000ULL /* answers saved up, as time */
#define L2_WORDS_MAX	(7 + 2 * MAX_VLAN_TAGS)

/* What an answer needs to know of the packet. */
struct answer {
	enum exit exit;
	__u16 l3_offset;
	__u16 l4_offset;
	__u32 l3_length;
	__u16 mtu; /* largest packet that would have passed */
	__u8 icmp_type;
	__u8 icmp_code;
	__u8 l4_proto;
	__u8 vlan_tags;
	__u8 flags; /* as struct packet's */
};

/* ICMP errors are limited per CPU (RFC 1812 section 4.3.2.8, RFC 4443 section
 * 2.4 f): time fills the bucket, each answer takes its share of a second. */
INLINE int may_answer(struct cpu_stats *s, __u64 rate, __u64 now)
{
	if (!rate)
		return 0;
	__u64 price = 1000000000ULL / rate;
	__u64 most = ANSWER_BURST_NS > price ? ANSWER_BURST_NS : price;
	__u64 tokens = s->answer_tokens + now - s->answer_time;
	if (tokens > most)
		tokens = most;
	int may = tokens >= price;
	if (!explain) {
		s->answer_time = now;
		s->answer_tokens = may ? tokens - price : tokens;
	}
	return may;
}

/* RFC 1122 section 3.2.2, RFC 4443 section 2.4 e: never about an ICMP error,
 * a later fragment, or a source that is not one host. */
INLINE int answer_forbidden(const struct answer *a, const __be32 *src)
{
	if (a->flags & (PACKET_LATER_FRAGMENT | PACKET_QUOTED))
		return 1;
	if (a->flags & PACKET_VERSION6)
		return (src[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000) ||
		       is_zero_addr(src);
	return (src[0] & bpf_htonl(0xe0000000)) == bpf_htonl(0xe0000000) || !src[0];
}

INLINE void swap_macs(void *frame)
{
	__u32 high = *(__u32 *)frame;
	__u16 low = *(__u16 *)(frame + 4);
	*(__u32 *)frame = *(__u32 *)(frame + 6);
	*(__u16 *)(frame + 4) = *(__u16 *)(frame + 10);
	*(__u32 *)(frame + 6) = high;
	*(__u16 *)(frame + 10) = low;
}

RARE int answer_echo(struct xdp_md *ctx, const struct answer *a)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	struct icmphdr *icmp = data + L4_OFFSET(a);

	if (data + sizeof(struct ethhdr) > end || (void *)(icmp + 1) > end)
		return EXIT_INTERNAL;
	swap_macs(data);
	if (a->flags & PACKET_VERSION6) {
		struct ipv6hdr *ip = data + L3_OFFSET(a);
		if ((void *)(ip + 1) > end)
			return EXIT_INTERNAL;
		struct in6_addr client = ip->saddr;
		ip->saddr = ip->daddr;
		ip->daddr = client;
		ip->hop_limit = OUTER_TTL;
		icmp->type = ICMPV6_ECHO_REPLY;
		csum_replace2(&icmp->checksum, bpf_htons(ICMPV6_ECHO_REQUEST << 8 | a->icmp_code),
			      bpf_htons(ICMPV6_ECHO_REPLY << 8 | a->icmp_code));
		return EXIT_ECHO_REPLY;
	}
	struct iphdr *ip = data + L3_OFFSET(a);
	if ((void *)(ip + 1) > end)
		return EXIT_INTERNAL;
	__be32 client = ip->saddr;
	ip->saddr = ip->daddr;
	ip->daddr = client;
	csum_replace2(&ip->check, bpf_htons(ip->ttl << 8), bpf_htons(OUTER_TTL << 8));
	ip->ttl = OUTER_TTL;
	icmp->type = ICMP_ECHOREPLY;
	csum_replace2(&icmp->checksum, bpf_htons(ICMP_ECHO << 8 | a->icmp_code),
		      bpf_htons(ICMP_ECHOREPLY << 8 | a->icmp_code));
	return EXIT_ECHO_REPLY;
}

/* Turn the packet into an ICMP error about itself, to its sender. One that is
 * too big is refused by the VIP, which the client takes for its connection's
 * other end; one whose time is over by the mux, which traceroute then shows as
 * a hop. */
RARE int answer_error(struct xdp_md *ctx, const struct answer *a, __u64 now)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	const struct settings *settings = get_settings();
	struct cpu_stats *s = get_stats();
	int v6 = a->flags & PACKET_VERSION6;
	__u32 ip_size = v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u32 front = ip_size + sizeof(struct icmphdr);
	__u32 linear = end - data - L3_OFFSET(a);
	__u32 quoted = a->l3_length > linear ? linear : a->l3_length;

	quoted = quoted > QUOTED_BYTES ? QUOTED_BYTES : quoted & ~1u;
	void *ip = data + L3_OFFSET(a);
	if (!settings || !s || ip + 28 > end)
		return EXIT_INTERNAL;
	if (answer_forbidden(a, v6 ? ip + 8 : ip + 12))
		return EXIT_ANSWER_FORBIDDEN;
	if (!may_answer(s, settings->answers_per_second, now))
		return EXIT_ANSWER_LIMITED;
	if (bpf_xdp_adjust_tail(ctx,
				(int)(L3_OFFSET(a) + quoted) - (int)bpf_xdp_get_buff_len(ctx)) ||
	    bpf_xdp_adjust_head(ctx, -(int)front))
		return EXIT_NO_HEADROOM;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;

	/* Layer 2 as it came, to where it came from. */
	__u16 *to = data, *from = data + front;
	if ((void *)(from + L2_WORDS_MAX) > end)
		return EXIT_INTERNAL;
	for (int i = 0; i < L2_WORDS_MAX; i++) {
		if (i * 2 >= L3_OFFSET(a))
			break;
		to[i] = from[i];
	}
	swap_macs(data);

	/* The quoted packet's header still has the addresses. */
	void *l3 = data + L3_OFFSET(a);
	struct icmphdr *icmp = l3 + ip_size;
	__u32 length = sizeof(*icmp) + quoted;
	__u32 sum = 0;
	if ((void *)(icmp + 1) + 20 > end)
		return EXIT_INTERNAL;
	if (a->exit == EXIT_TIME_EXCEEDED) {
		icmp->type = v6 ? ICMPV6_TIME_EXCEED : ICMP_TIME_EXCEEDED;
		icmp->code = 0;
	} else {
		icmp->type = v6 ? ICMPV6_PKT_TOOBIG : ICMP_DEST_UNREACH;
		icmp->code = v6 ? 0 : ICMP_FRAG_NEEDED;
	}
	icmp->checksum = 0;
	icmp->un.gateway = bpf_htonl(a->mtu);
	if (v6) {
		struct ipv6hdr *about = (void *)(icmp + 1);
		if ((void *)(about + 1) > end)
			return EXIT_INTERNAL;
		const __be32 *src = about->daddr.in6_u.u6_addr32;
		if (a->exit == EXIT_TIME_EXCEEDED && !is_zero_addr(settings->source6))
			src = settings->source6;
		write_outer_ipv6(l3, src, about->saddr.in6_u.u6_addr32, IPPROTO_ICMPV6, length, 0,
				 0);
		sum = csum_add(sum, l3 + 8, 32);
		sum += bpf_htons(length) + bpf_htons(IPPROTO_ICMPV6);
	} else {
		struct iphdr *about = (void *)(icmp + 1);
		__be32 src = about->daddr;
		if (a->exit == EXIT_TIME_EXCEEDED && settings->source4)
			src = settings->source4;
		write_outer_ipv4(l3, src, about->saddr, IPPROTO_ICMP,
				 outer_ipv4_sum(src, about->saddr, IPPROTO_ICMP), ip_size + length,
				 0, 0, 1);
	}
	__u16 *word = (__u16 *)icmp;
	for (int i = 0; i < (int)(sizeof(*icmp) + QUOTED_BYTES) / 2; i++) {
		if ((void *)(word + 1) > end)
			break;
		sum += *word++;
	}
	icmp->checksum = csum_fold(sum);
	return a->exit;
}

#endif
