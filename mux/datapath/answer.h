/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the mux answers itself: echo requests to a VIP, and the ICMP errors
 * that a packet on its way to a DIP calls for. Answers leave by the interface
 * that the packet came by, to the neighbour that sent it, tags as they were. */
#ifndef QUARTET_ANSWER_H
#define QUARTET_ANSWER_H

#define QUOTED_BYTES	  128	       /* of the packet that an ICMP error is about */
#define ANSWER_BURST_NS	  100000000ULL /* answers saved up, as time */
#define L2_WORDS_UNTAGGED 7
#define L2_WORDS_MAX	  (L2_WORDS_UNTAGGED + 2 * MAX_VLAN_TAGS)

/* ICMP errors are limited per CPU (RFC 1812 section 4.3.2.8, RFC 4443 section
 * 2.4 f): time fills the bucket, each answer takes its share of a second. */
INLINE int may_answer(struct run *run)
{
	struct cpu_stats *s = run->stats;
	__u64 rate = run->settings->answers_per_second;
	if (!rate)
		return 0;
	__u64 price = 1000000000ULL / rate;
	__u64 tokens = s->answer_tokens + run->now - s->answer_time;
	__u64 most = ANSWER_BURST_NS > price ? ANSWER_BURST_NS : price;
	if (tokens > most)
		tokens = most;
	int may = tokens >= price;
	if (!explain) {
		s->answer_time = run->now;
		s->answer_tokens = may ? tokens - price : tokens;
	}
	return may;
}

/* RFC 1122 section 3.2.2, RFC 4443 section 2.4 e: never about an ICMP error,
 * a later fragment, or a source that is not one host. */
INLINE int answer_forbidden(const struct packet *p)
{
	if (p->flags & PACKET_LATER_FRAGMENT)
		return 1;
	if (is6(p))
		return (p->l4_proto == IPPROTO_ICMPV6 && p->icmp_type < 128) ||
		       (p->src[0] & bpf_htonl(0xff000000)) == bpf_htonl(0xff000000) ||
		       is_zero_addr(p->src);
	return (p->l4_proto == IPPROTO_ICMP && p->icmp_type != ICMP_ECHO) ||
	       (p->src[0] & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000) || !p->src[0] ||
	       p->src[0] == 0xffffffff;
}

INLINE void swap_macs(struct ethhdr *eth)
{
	__u8 mac[ETH_ALEN];
	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
}

INLINE enum exit answer_echo(struct run *run, const struct packet *p)
{
	void *data = (void *)(long)run->ctx->data;
	void *end = (void *)(long)run->ctx->data_end;
	struct ethhdr *eth = data;
	struct icmphdr *icmp = data + L4_OFFSET(p);

	if ((void *)(eth + 1) > end || (void *)(icmp + 1) > end)
		return EXIT_INTERNAL;
	swap_macs(eth);
	if (is6(p)) {
		struct ipv6hdr *ip = data + L3_OFFSET(p);
		if ((void *)(ip + 1) > end)
			return EXIT_INTERNAL;
		__builtin_memcpy(&ip->saddr, p->dst, 16);
		__builtin_memcpy(&ip->daddr, p->src, 16);
		ip->hop_limit = OUTER_TTL;
		icmp->type = ICMPV6_ECHO_REPLY;
		csum_replace2(&icmp->checksum, bpf_htons(ICMPV6_ECHO_REQUEST << 8 | p->icmp_code),
			      bpf_htons(ICMPV6_ECHO_REPLY << 8 | p->icmp_code));
		return EXIT_ECHO_REPLY;
	}
	struct iphdr *ip = data + L3_OFFSET(p);
	if ((void *)(ip + 1) > end)
		return EXIT_INTERNAL;
	ip->saddr = p->dst[0];
	ip->daddr = p->src[0];
	csum_replace2(&ip->check, bpf_htons(ip->ttl << 8), bpf_htons(OUTER_TTL << 8));
	ip->ttl = OUTER_TTL;
	icmp->type = ICMP_ECHOREPLY;
	csum_replace2(&icmp->checksum, bpf_htons(ICMP_ECHO << 8 | p->icmp_code),
		      bpf_htons(ICMP_ECHOREPLY << 8 | p->icmp_code));
	return EXIT_ECHO_REPLY;
}

/* Turn the packet into an ICMP error about itself, from src to its sender.
 * rest is the header's second word: an MTU, or 0. */
INLINE enum exit answer_error(struct run *run, const struct packet *p, const __be32 src[4],
			      __u8 type, __u8 code, __be32 rest, enum exit exit)
{
	void *data = (void *)(long)run->ctx->data;
	void *end = (void *)(long)run->ctx->data_end;
	__u16 l2[L2_WORDS_MAX];
	__u32 quoted = p->l3_length;
	__u32 ip_size = is6(p) ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);
	__u32 front = ip_size + sizeof(struct icmphdr);

	if (answer_forbidden(p))
		return EXIT_ANSWER_FORBIDDEN;
	if (!may_answer(run))
		return EXIT_ANSWER_LIMITED;
	if (data + sizeof(l2) > end)
		return EXIT_INTERNAL;
	__builtin_memcpy(l2, data, sizeof(l2));
	if (quoted > QUOTED_BYTES)
		quoted = QUOTED_BYTES;
	quoted &= ~1u;

	if (bpf_xdp_adjust_tail(run->ctx, (int)(p->l3_offset + quoted) - (int)(end - data)) ||
	    bpf_xdp_adjust_head(run->ctx, -(int)front))
		return EXIT_NO_HEADROOM;
	data = (void *)(long)run->ctx->data;
	end = (void *)(long)run->ctx->data_end;

	__u16 *word = data;
	if ((void *)(word + L2_WORDS_MAX) > end)
		return EXIT_INTERNAL;
	__builtin_memcpy(word, l2, L2_WORDS_UNTAGGED * 2);
	if (p->vlan_tags > 0)
		__builtin_memcpy(word + L2_WORDS_UNTAGGED, l2 + L2_WORDS_UNTAGGED, 4);
	if (p->vlan_tags > 1)
		__builtin_memcpy(word + L2_WORDS_UNTAGGED + 2, l2 + L2_WORDS_UNTAGGED + 2, 4);
	swap_macs(data);

	void *l3 = data + L3_OFFSET(p);
	struct icmphdr *icmp = l3 + ip_size;
	__u32 length = sizeof(*icmp) + quoted;
	__u32 sum = 0;
	if (l3 + sizeof(struct ipv6hdr) > end || (void *)(icmp + 1) > end)
		return EXIT_INTERNAL;
	icmp->type = type;
	icmp->code = code;
	icmp->checksum = 0;
	icmp->un.gateway = rest;
	if (is6(p)) {
		write_outer_ipv6(l3, src, p->src, IPPROTO_ICMPV6, length, 0, 0);
		sum = csum_add(sum, src, 16);
		sum = csum_add(sum, p->src, 16);
		sum += bpf_htons(length) + bpf_htons(IPPROTO_ICMPV6);
	} else {
		write_outer_ipv4(l3, src[0], p->src[0], IPPROTO_ICMP,
				 outer_ipv4_sum(src[0], p->src[0], IPPROTO_ICMP), ip_size + length,
				 0, 0, 1);
	}
	word = (__u16 *)icmp;
	for (int i = 0; i < (int)(sizeof(*icmp) + QUOTED_BYTES) / 2; i++) {
		if ((void *)(word + 1) > end)
			break;
		sum += *word++;
	}
	icmp->checksum = csum_fold(sum);
	return exit;
}

/* From the VIP: the client takes it for its connection's other end. */
INLINE enum exit answer_too_big(struct run *run, const struct packet *p, __u32 mtu)
{
	TRACE(run, mtu, mtu);
	if (is6(p))
		return answer_error(run, p, p->dst, ICMPV6_PKT_TOOBIG, 0, bpf_htonl(mtu),
				    EXIT_FRAGMENTATION_NEEDED);
	return answer_error(run, p, p->dst, ICMP_DEST_UNREACH, ICMP_FRAG_NEEDED, bpf_htonl(mtu),
			    p->flags & PACKET_DF ? EXIT_FRAGMENTATION_NEEDED : EXIT_OVERSIZE);
}

/* From the mux, which traceroute then shows as a hop; from the VIP where the
 * mux has no address of that family. */
INLINE enum exit answer_time_exceeded(struct run *run, const struct packet *p)
{
	__be32 src[4] = {};
	if (is6(p)) {
		__builtin_memcpy(src, run->settings->source6, sizeof(src));
		if (is_zero_addr(src))
			__builtin_memcpy(src, p->dst, sizeof(src));
		return answer_error(run, p, src, ICMPV6_TIME_EXCEED, 0, 0, EXIT_TIME_EXCEEDED);
	}
	src[0] = run->settings->source4 ? run->settings->source4 : p->dst[0];
	return answer_error(run, p, src, ICMP_TIME_EXCEEDED, 0, 0, EXIT_TIME_EXCEEDED);
}

#endif
