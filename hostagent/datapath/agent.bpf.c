// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// clang-format off
//go:build ignore
// clang-format on

/*
 * The host agent's two programs. `inbound` (XDP, each uplink) takes packets out of their tunnels
 * and translates (VIP, port) to (DIP, port); the host's own routing then finds the server.
 * `outbound` (tcx egress, each uplink) translates the servers' replies back.
 *
 * A packet of a known flow costs three hash look-ups each way. In: rule, flow, meter. Out: DIP,
 * flow, meter. What is not ours costs one out, and none in unless it looks like a tunnel.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>
#include <parse.h>
#include <csum.h>
#include <encap.h>
#include <decap.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Highest MSS that servers may announce; 0: from the uplink's MTU and the SYN's tunnel headers. */
const volatile __u16 max_mss = 0;

/* 1 while traffic moves from another layout's maps to these: flows may be in either. */
const volatile __u8 moving = 0;

/* Verdicts of tcx programs (Linux 6.6); the packaged headers are older. */
#define TCX_NEXT -1
#define TCX_DROP 2

/* Each way out of the two programs. A packet takes exactly one; a GSO packet counts once. */
enum exit {
	/* Passed untouched. */
	EXIT_IN_NOT_TUNNEL, /* no tunnel format that we read */
	EXIT_IN_NOT_OURS,   /* outer destination is no rule's tunnel */
	/* Passed, out of their tunnel and translated. */
	EXIT_IN_DELIVERED,
	EXIT_IN_DELIVERED_FRAGMENT,   /* later fragment, as its first one was */
	EXIT_IN_DELIVERED_ICMP_ERROR, /* about one of our replies */
	/* Answered, by the uplink that it came by. */
	EXIT_IN_PROBE_ANSWERED, /* a mux's, through one of our tunnels */
	/* Dropped. */
	EXIT_IN_OUTER_FRAGMENT,	  /* the tunnel's own packet was fragmented */
	EXIT_IN_TUNNEL_INVALID,	  /* GUE or VXLAN header that WIRE.md does not allow */
	EXIT_IN_TRUNCATED,	  /* inner packet ends early */
	EXIT_IN_INVALID,	  /* inner header contradicts itself */
	EXIT_IN_NESTED,		  /* a tunnel within the tunnel */
	EXIT_IN_PROTOCOL,	  /* inner packet is not TCP, UDP or ICMP */
	EXIT_IN_NO_RULE,	  /* no endpoint here has this VIP, protocol and port */
	EXIT_IN_ICMP_UNSUPPORTED, /* ICMP, but neither probe nor error about one of our replies */
	EXIT_IN_FRAGMENT_UNKNOWN, /* later fragment whose first one was not seen */
	EXIT_IN_FLOW_CONFLICT,	  /* mid-connection, but DIP and client are bound by another VIP */
	EXIT_IN_ECN,	/* congestion marked, and the inner packet can't say so (RFC 6040) */
	EXIT_IN_FAILED, /* the kernel refused to store the flow or to shorten the frame */
	/* Outbound, passed. */
	EXIT_OUT_NOT_OURS, /* of no flow through a VIP; untouched */
	EXIT_OUT_TRANSLATED,
	EXIT_OUT_FRAGMENT,   /* later fragment, as its first one was */
	EXIT_OUT_ICMP_ERROR, /* about one of our clients' packets */
	/* Outbound, dropped. */
	EXIT_OUT_FAILED, /* the kernel refused a write; half-translated */
	EXIT_COUNT,
};

/* What happens to flows beside. */
enum event {
	EVENT_FLOW_CREATED,   /* by a TCP SYN, or a first UDP packet */
	EVENT_FLOW_RECREATED, /* by a TCP packet in mid-connection, from the rules */
	EVENT_FLOW_PROMOTED,  /* untrusted to trusted */
	EVENT_MSS_CLAMPED,
	EVENT_COUNT,
};

/* In all maps: addresses in network byte order, an IPv4 address in word 0 and the rest zero, as in
 * struct packet; families says which are IPv6. Ports are in network byte order. */
#define TUNNEL6 1
#define VIP6	2

struct tunnel_key {
	__be32 address[4];
	__u32 families; /* TUNNEL6 */
};

struct rule_key {
	__be32 tunnel[4];
	__be32 vip[4];
	__be16 port; /* 0: any */
	__u8 protocol;
	__u8 families; /* TUNNEL6, VIP6 */
};

/* Where a rule sends packets. A DIP of zeros ends a rule's list. */
struct target {
	__be32 dip[4];
	__be16 port; /* 0: the packet's */
	__u16 pad;
};

/* The first target is the current one; the others are what it was before, latest first. A flow
 * stays with the target it has state for, so that connections outlive a change of their rule. */
#define TARGETS 4
struct rule {
	struct target targets[TARGETS];
};

struct dip_key {
	__be32 address[4];
	__u32 families; /* VIP6 */
};

/* Bit port_bit() of ports is set if a rule may send packets to (DIP, protocol, port): what tells
 * most of a DIP's own connections from replies without a look at the flow tables. */
struct dip {
	__u64 ports;
};

/* One flow as the server sees it. Both directions find it by this key: inbound after the rule has
 * named the target. */
struct flow_key {
	__be32 dip[4];
	__be32 client[4];
	__be16 dip_port;
	__be16 client_port;
	__u8 protocol;
	__u8 families; /* VIP6 */
	__u16 pad;
};

struct flow {
	__be32 vip[4];
	__be16 vip_port;
	__u16 overhead; /* bytes of tunnel headers that its last SYN came with */
	__u32 seen;	/* last packet in: seconds of CLOCK_MONOTONIC_COARSE */
};

/* A UDP flow idle for longer takes the current target: nothing else says that it ended. */
#define UDP_IDLE 60 /* seconds */

struct fragment_key {
	__be32 src[4];
	__be32 dst[4];
	__be32 id;
	__u8 protocol; /* IPv4 only (RFC 791); IPv6 tells packets apart by id alone (RFC 8200) */
	__u8 families; /* VIP6 */
	__u8 outbound;
	__u8 pad;
};

/* The address that its first fragment's was replaced with. */
struct fragment {
	__be32 address[4];
};

struct meter_key {
	__be32 vip[4];
	__be32 peer[4]; /* IPv4 /24, IPv6 /48 */
	__u8 families;	/* VIP6 */
	__u8 inbound;
	__u16 pad;
};

struct meter {
	__u64 packets;
	__u64 bytes;
};

/* Sizes of the maps that Config sizes are set by the loader. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct tunnel_key);
	__type(value, __u32);
} tunnels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct rule_key);
	__type(value, struct rule);
} rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__type(key, struct dip_key);
	__type(value, struct dip);
} dips SEC(".maps");

/* Flows of which a packet followed the first (Ananta section 3.3.3). Of a flow that a full table
 * let go, replies leave as the DIP until the client's next packet makes it again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

/* Flows of one packet. A flood of first packets evicts only its like. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct flow_key);
	__type(value, struct flow);
} untrusted SEC(".maps");

/* The same of another layout, read if moving is 1. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct flow_key);
	__type(value, struct flow);
} former_flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct flow_key);
	__type(value, struct flow);
} former_untrusted SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_PERCPU_HASH);
	__uint(max_entries, 1);
	__type(key, struct meter_key);
	__type(value, struct meter);
} meters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, EXIT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} exits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, EVENT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} events SEC(".maps");

/* Named for bpf2go, and so that the object's BTF has the names of both enums. */
const enum exit *unused_exit __attribute__((unused));
const enum event *unused_event __attribute__((unused));

INLINE void count_event(enum event event)
{
	__u32 key = event;
	__u64 *n = bpf_map_lookup_elem(&events, &key);
	if (n)
		++*n;
}

INLINE void count_exit(enum exit exit)
{
	__u32 key = exit;
	__u64 *n = bpf_map_lookup_elem(&exits, &key);
	if (n)
		++*n;
}

INLINE void copy_address(__be32 to[4], const __be32 from[4])
{
#pragma unroll
	for (int i = 0; i < 4; i++)
		to[i] = from[i];
}

INLINE int same_address(const __be32 a[4], const __be32 b[4])
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

INLINE __u64 port_bit(__u8 protocol, __be16 port)
{
	return 1ull << ((bpf_ntohs(port) ^ (bpf_ntohs(port) >> 6) ^ protocol) & 63);
}

INLINE __u8 vip_family(const struct packet *p)
{
	return p->flags & PACKET_VERSION6 ? VIP6 : 0;
}

INLINE __u32 now_seconds(void)
{
	return bpf_ktime_get_coarse_ns() / 1000000000;
}

INLINE void meter(const __be32 vip[4], const __be32 peer[4], __u8 families, __u8 inbound,
		  __u64 packets, __u64 bytes)
{
	struct meter_key key = {.families = families, .inbound = inbound};
	copy_address(key.vip, vip);
	if (families & VIP6) {
		key.peer[0] = peer[0];
		key.peer[1] = peer[1] & bpf_htonl(0xffff0000);
	} else {
		key.peer[0] = peer[0] & bpf_htonl(0xffffff00);
	}
	struct meter *m = bpf_map_lookup_elem(&meters, &key);
	if (m) {
		m->packets += packets;
		m->bytes += bytes;
		return;
	}
	struct meter first = {packets, bytes};
	bpf_map_update_elem(&meters, &key, &first, BPF_ANY);
}

/* One packet's way through `inbound`. */
struct inbound {
	struct packet outer;
	struct packet inner;
	/* The packet that names endpoint and flow: inner, or the one that an ICMP error quotes,
	 * reversed. client and VIP are inner's or quoted's, in network byte order. */
	__be32 client[4];
	__be16 client_port;
	__be16 vip_port;
	__u8 protocol;
	__u8 quoted_l4;	     /* bytes of layer 4 quoted that may be changed, 0 without a quote */
	__u16 quoted_offset; /* of the quoted IP header from the frame's start */
	__u16 quoted_l4_offset;
	struct target target; /* port not 0 */
};

/* Offsets beyond this the verifier can't follow, and no header that we write is at. */
#define MAX_OFFSET 0x3fff

/* n bytes at offset in the frame, or NULL. */
INLINE void *at(const struct xdp_md *ctx, __u32 offset, __u32 n)
{
	void *start = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;

	if (offset > MAX_OFFSET || start + offset + n > end)
		return NULL;
	return start + offset;
}

/* Functions that are neither static nor inline are what the verifier reads once, whatever leads to
 * them; that keeps loading these programs in milliseconds. */

/* A tunnel packet that we can't deliver is ours to drop only if it was sent to us. */
__noinline int refuse(const struct packet *outer, enum exit why)
{
	if (!outer)
		return why;
	struct tunnel_key key = {.families = outer->flags & PACKET_VERSION6 ? TUNNEL6 : 0};
	copy_address(key.address, outer->dst);
	return bpf_map_lookup_elem(&tunnels, &key) ? why : EXIT_IN_NOT_OURS;
}

/* Finds the inner packet: leaves the cursor at it, its EtherType in *proto, and returns
 * EXIT_IN_DELIVERED. frame is the frame's length in bytes, which is more than the cursor's where
 * the driver split it. */
INLINE enum exit open_tunnel(struct cursor *c, struct packet *outer, __be16 *proto, __u32 frame)
{
	if (parse_ethernet(c, outer) != PARSED_OK)
		return EXIT_IN_NOT_TUNNEL;
	if (outer->l3_proto == bpf_htons(ETH_P_IP)) {
		if (parse_ipv4(c, outer) != PARSED_OK)
			return EXIT_IN_NOT_TUNNEL;
	} else {
		if (parse_ipv6(c, outer) != PARSED_OK)
			return EXIT_IN_NOT_TUNNEL;
	}

	__u32 outer_end = (__u32)outer->l3_offset + outer->l3_length;
	int fragment = outer->flags & (PACKET_FIRST_FRAGMENT | PACKET_LATER_FRAGMENT);
	if (outer->l4_proto == IPPROTO_IPIP || outer->l4_proto == IPPROTO_IPV6) {
		*proto =
		    outer->l4_proto == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
		if (fragment)
			return EXIT_IN_OUTER_FRAGMENT;
		return outer_end > frame ? EXIT_IN_TRUNCATED : EXIT_IN_DELIVERED;
	}
	if (outer->l4_proto != IPPROTO_UDP || outer->flags & PACKET_LATER_FRAGMENT ||
	    parse_udp(c, outer) != PARSED_OK)
		return EXIT_IN_NOT_TUNNEL;
	if (outer->dst_port != bpf_htons(GUE_PORT) && outer->dst_port != bpf_htons(VXLAN_PORT))
		return EXIT_IN_NOT_TUNNEL;
	if (fragment)
		return EXIT_IN_OUTER_FRAGMENT;
	if (outer_end > frame)
		return EXIT_IN_TRUNCATED;

	/* What UDP carries is what counts, from here on. */
	__u32 length = bpf_ntohs(((struct udphdr *)c->pos)->len);
	if (length < sizeof(struct udphdr))
		return EXIT_IN_TUNNEL_INVALID;
	if (!holds_l4(outer, length))
		return EXIT_IN_TRUNCATED;
	outer->l3_length = outer->l4_offset - outer->l3_offset + length;
	c->pos += sizeof(struct udphdr);
	if (outer->dst_port == bpf_htons(VXLAN_PORT)) {
		struct vxlan_ethernet *v = c->pos;
		if ((void *)(v + 1) > c->end)
			return EXIT_IN_TRUNCATED;
		if (!(v->flags & VXLAN_HAS_VNI))
			return EXIT_IN_TUNNEL_INVALID;
		*proto = v->proto;
		if (*proto != bpf_htons(ETH_P_IP) && *proto != bpf_htons(ETH_P_IPV6))
			return EXIT_IN_TUNNEL_INVALID;
		c->pos = v + 1;
		return EXIT_IN_DELIVERED;
	}

	__u8 *gue = c->pos;
	if ((void *)(gue + 1) > c->end)
		return EXIT_IN_TRUNCATED;
	if (*gue >> 4 == 4) {
		*proto = bpf_htons(ETH_P_IP);
		return EXIT_IN_DELIVERED;
	}
	if (*gue >> 4 == 6) {
		*proto = bpf_htons(ETH_P_IPV6);
		return EXIT_IN_DELIVERED;
	}
	if ((void *)(gue + GUE_HEADER) > c->end)
		return EXIT_IN_TRUNCATED;
	/* Variant 0, a data message, no optional fields, no flags. */
	if (gue[0] || gue[2] || gue[3] || (gue[1] != IPPROTO_IPIP && gue[1] != IPPROTO_IPV6))
		return EXIT_IN_TUNNEL_INVALID;
	*proto = gue[1] == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	c->pos = gue + GUE_HEADER;
	return EXIT_IN_DELIVERED;
}

INLINE enum exit exit_of(enum parsed parsed)
{
	return parsed == PARSED_TRUNCATED ? EXIT_IN_TRUNCATED : EXIT_IN_INVALID;
}

INLINE enum parsed parse_ip(struct cursor *c, struct packet *p)
{
	p->l3_offset = CURSOR_OFFSET(c);
	return p->l3_proto == bpf_htons(ETH_P_IP) ? parse_ipv4(c, p) : parse_ipv6(c, p);
}

/* A mux's probe is an echo request from itself to the tunnel's end. Others' echo requests would
 * have us answer whom they please. */
INLINE int is_probe(const struct inbound *in)
{
	const struct packet *p = &in->inner;
	__u8 request = p->flags & PACKET_VERSION6 ? ICMPV6_ECHO_REQUEST : ICMP_ECHO;

	return p->icmp_type == request && !p->icmp_code && !(p->flags & PACKET_FIRST_FRAGMENT) &&
	       !((p->flags ^ in->outer.flags) & PACKET_VERSION6) &&
	       same_address(p->src, in->outer.src) && same_address(p->dst, in->outer.dst);
}

/* Reads the packet that an inbound ICMP error quotes: one of our replies. */
INLINE enum exit parse_quote(struct cursor *c, struct inbound *in)
{
	struct packet quoted = {.l3_proto = in->inner.l3_proto};
	__u32 inner_end = (__u32)in->inner.l3_offset + in->inner.l3_length;

	if (parse_icmp(c, &in->inner) != PARSED_OK)
		return EXIT_IN_TRUNCATED;
	if (is_probe(in))
		return EXIT_IN_PROBE_ANSWERED;
	if (!icmp_error(&in->inner) || in->inner.flags & PACKET_FIRST_FRAGMENT)
		return EXIT_IN_ICMP_UNSUPPORTED;
	if (parse_ip(c, &quoted) != PARSED_OK || quoted.flags & PACKET_LATER_FRAGMENT ||
	    !same_address(quoted.src, in->inner.dst) ||
	    (quoted.l4_proto != IPPROTO_TCP && quoted.l4_proto != IPPROTO_UDP) ||
	    parse_ports(c, &quoted) != PARSED_OK || quoted.l4_offset + 8 > inner_end)
		return EXIT_IN_ICMP_UNSUPPORTED;

	copy_address(in->client, quoted.dst);
	in->client_port = quoted.dst_port;
	in->vip_port = quoted.src_port;
	in->protocol = quoted.l4_proto;
	in->quoted_offset = quoted.l3_offset;
	in->quoted_l4_offset = quoted.l4_offset;
	in->quoted_l4 = quoted.l4_offset + 18 > inner_end ? 8 : 18;
	return EXIT_IN_DELIVERED_ICMP_ERROR;
}

/* Describes the inner packet. */
INLINE enum exit parse_inner(struct cursor *c, struct inbound *in)
{
	struct packet *p = &in->inner;
	__u32 outer_end = (__u32)in->outer.l3_offset + in->outer.l3_length;

	enum parsed parsed = parse_ip(c, p);
	if (parsed != PARSED_OK)
		return exit_of(parsed);
	__u32 end = (__u32)p->l3_offset + p->l3_length;
	if (end > outer_end)
		return EXIT_IN_TRUNCATED;
	if (p->l4_proto == IPPROTO_IPIP || p->l4_proto == IPPROTO_IPV6)
		return EXIT_IN_NESTED;
	if (p->flags & PACKET_LATER_FRAGMENT)
		return EXIT_IN_DELIVERED_FRAGMENT;

	if (p->l4_proto == (p->flags & PACKET_VERSION6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return parse_quote(c, in);
	if (p->l4_proto == IPPROTO_TCP)
		parsed = parse_tcp(c, p);
	else if (p->l4_proto == IPPROTO_UDP)
		parsed = parse_udp(c, p);
	else
		return EXIT_IN_PROTOCOL;
	if (parsed != PARSED_OK)
		return exit_of(parsed);
	copy_address(in->client, p->src);
	in->client_port = p->src_port;
	in->vip_port = p->dst_port;
	in->protocol = p->l4_proto;
	return EXIT_IN_DELIVERED;
}

INLINE struct rule *find_rule(const struct inbound *in)
{
	struct rule_key key = {
	    .port = in->vip_port,
	    .protocol = in->protocol,
	    .families = vip_family(&in->inner) | (in->outer.flags & PACKET_VERSION6 ? TUNNEL6 : 0),
	};
	copy_address(key.tunnel, in->outer.dst);
	copy_address(key.vip, in->inner.dst);
	struct rule *rule = bpf_map_lookup_elem(&rules, &key);
	if (rule)
		return rule;
	key.port = 0;
	return bpf_map_lookup_elem(&rules, &key);
}

INLINE int flow_is(const struct flow *f, const struct inbound *in)
{
	return f->vip_port == in->vip_port && same_address(f->vip, in->inner.dst);
}

INLINE void touch(struct flow *f, __u32 now)
{
	if (f->seen != now)
		f->seen = now;
}

/* Chooses the packet's target and keeps its flow's state. Not inlined, for its stack. */
__noinline int bind_flow(struct inbound *in, const struct rule *rule)
{
	if (!in || !rule)
		return EXIT_IN_FAILED;
	struct flow_key key = {
	    .client_port = in->client_port,
	    .protocol = in->protocol,
	    .families = vip_family(&in->inner),
	};
	__u32 now = now_seconds();
	int syn = in->inner.flags & PACKET_SYN;
	int conflict = 0;

	copy_address(key.client, in->client);
	for (int i = 0; i < TARGETS; i++) {
		const struct target *target = &rule->targets[i];
		if (i > 0 && !(target->dip[0] | target->dip[1] | target->dip[2] | target->dip[3]))
			break;
		copy_address(key.dip, target->dip);
		key.dip_port = target->port ?: in->vip_port;

		struct flow *f = bpf_map_lookup_elem(&flows, &key);
		struct flow *u = f ? NULL : bpf_map_lookup_elem(&untrusted, &key);
		if (!u)
			u = f;
		if (u && !flow_is(u, in)) {
			if (i == 0)
				conflict = 1;
			u = NULL;
		}
		if (u && i > 0 && in->protocol == IPPROTO_UDP && now - u->seen > UDP_IDLE)
			u = NULL;
		if (!u) {
			/* A SYN takes the current target, whatever there was. */
			if (syn)
				break;
			continue;
		}

		copy_address(in->target.dip, key.dip);
		in->target.port = key.dip_port;
		touch(u, now);
		if (syn) {
			u->overhead = in->inner.l3_offset - in->outer.l3_offset;
		} else if (!f && !in->quoted_l4) {
			/* What the kernel refuses to store now stays untrusted until later. */
			if (!bpf_map_update_elem(&flows, &key, u, BPF_ANY)) {
				bpf_map_delete_elem(&untrusted, &key);
				count_event(EVENT_FLOW_PROMOTED);
			}
		}
		return EXIT_IN_DELIVERED;
	}

	copy_address(key.dip, rule->targets[0].dip);
	key.dip_port = rule->targets[0].port ?: in->vip_port;
	copy_address(in->target.dip, key.dip);
	in->target.port = key.dip_port;
	if (conflict && in->protocol == IPPROTO_TCP && !syn)
		return EXIT_IN_FLOW_CONFLICT;
	if (in->quoted_l4)
		return conflict ? EXIT_IN_FLOW_CONFLICT : EXIT_IN_DELIVERED;

	struct flow first = {
	    .vip_port = in->vip_port,
	    .overhead = in->inner.l3_offset - in->outer.l3_offset,
	    .seen = now,
	};
	copy_address(first.vip, in->inner.dst);
	if (conflict)
		bpf_map_delete_elem(&flows, &key);
	/* Without its state the reply would leave as the DIP, and the client reset it. */
	if (bpf_map_update_elem(&untrusted, &key, &first, BPF_ANY))
		return EXIT_IN_FAILED;
	count_event(syn || in->protocol == IPPROTO_UDP ? EVENT_FLOW_CREATED : EVENT_FLOW_RECREATED);
	return EXIT_IN_DELIVERED;
}

INLINE void fragment_key(struct fragment_key *key, const struct packet *p, __u8 outbound)
{
	copy_address(key->src, p->src);
	copy_address(key->dst, p->dst);
	key->id = p->fragment_id;
	key->families = vip_family(p);
	key->protocol = p->flags & PACKET_VERSION6 ? 0 : p->l4_proto;
	key->outbound = outbound;
}

static __noinline void remember_fragment(const struct packet *p, const __be32 address[4],
					 __u8 outbound)
{
	struct fragment_key key = {};
	struct fragment fragment = {};

	fragment_key(&key, p, outbound);
	copy_address(fragment.address, address);
	bpf_map_update_elem(&fragments, &key, &fragment, BPF_ANY);
}

static __noinline struct fragment *find_fragment(const struct packet *p, __u8 outbound)
{
	struct fragment_key key = {};

	fragment_key(&key, p, outbound);
	return bpf_map_lookup_elem(&fragments, &key);
}

/* RFC 6040 section 4.2: the inner packet's ECN field after its tunnel, or -1 to drop it. */
INLINE int combine_ecn(__u8 outer, __u8 inner)
{
	outer &= 3;
	inner &= 3;
	if (outer == 3)
		return inner ? 3 : -1;
	return outer == 1 && inner == 2 ? 1 : inner;
}

/* What a change adds to the sum beneath a checksum (RFC 1624, equation 3). */
INLINE __u32 change_address(__u32 sum, const __be32 from[4], const __be32 to[4], int version6)
{
	sum = csum_add_word(sum, ~from[0]);
	sum = csum_add_word(sum, to[0]);
	if (version6) {
#pragma unroll
		for (int i = 1; i < 4; i++) {
			sum = csum_add_word(sum, ~from[i]);
			sum = csum_add_word(sum, to[i]);
		}
	}
	return sum;
}

INLINE __u32 change16(__u32 sum, __be16 from, __be16 to)
{
	return sum + (__u16)~from + to;
}

INLINE void apply_change(__sum16 *check, __u32 change)
{
	*check = csum_fold((__u16) ~*check + change);
}

/* UDP's 0 means "none" and stays; a sum of 0 is written as all ones (RFC 768). */
INLINE void apply_change_udp(__sum16 *check, __u32 change)
{
	if (!*check)
		return;
	apply_change(check, change);
	if (!*check)
		*check = 0xffff;
}

/* Writes ECN and destination address into the inner IP header. */
INLINE int write_inner_ip(struct xdp_md *ctx, const struct inbound *in, __u8 ecn)
{
	const struct packet *p = &in->inner;

	if (p->flags & PACKET_VERSION6) {
		struct ipv6hdr *ip = at(ctx, p->l3_offset, sizeof(*ip));
		if (!ip)
			return -1;
		ip->flow_lbl[0] = (ip->flow_lbl[0] & 0xcf) | ecn << 4;
		__builtin_memcpy(&ip->daddr, in->target.dip, 16);
		return 0;
	}
	struct iphdr *ip = at(ctx, p->l3_offset, sizeof(*ip));
	if (!ip)
		return -1;
	__u8 tos = (ip->tos & 0xfc) | ecn;
	__u32 change = change_address(0, p->dst, in->target.dip, 0);
	change = change16(change, bpf_htons(ip->tos), bpf_htons(tos));
	apply_change(&ip->check, change);
	ip->tos = tos;
	ip->daddr = in->target.dip[0];
	return 0;
}

INLINE int write_inner_l4(struct xdp_md *ctx, const struct inbound *in)
{
	const struct packet *p = &in->inner;
	__u32 change = change_address(0, p->dst, in->target.dip, p->flags & PACKET_VERSION6);
	change = change16(change, in->vip_port, in->target.port);

	if (p->l4_proto == IPPROTO_TCP) {
		struct tcphdr *tcp = at(ctx, p->l4_offset, sizeof(*tcp));
		if (!tcp)
			return -1;
		tcp->dest = in->target.port;
		apply_change(&tcp->check, change);
		return 0;
	}
	struct udphdr *udp = at(ctx, p->l4_offset, sizeof(*udp));
	if (!udp)
		return -1;
	udp->dest = in->target.port;
	apply_change_udp(&udp->check, change);
	return 0;
}

/* Translates the reply that an ICMP error quotes to what the server sent. */
__noinline int write_quote(struct xdp_md *ctx, const struct inbound *in)
{
	if (!in)
		return -1;
	const __be32 *vip = in->inner.dst, *dip = in->target.dip;
	int version6 = in->inner.flags & PACKET_VERSION6;
	__u32 l4_change = change_address(0, vip, dip, version6);
	l4_change = change16(l4_change, in->vip_port, in->target.port);
	__u32 change = l4_change;

	if (version6) {
		struct ipv6hdr *ip = at(ctx, in->quoted_offset, sizeof(*ip));
		if (!ip)
			return -1;
		__builtin_memcpy(&ip->saddr, dip, 16);
		/* ICMPv6's pseudo-header has the error's own destination. */
		change = change_address(change, vip, dip, 1);
	} else {
		struct iphdr *ip = at(ctx, in->quoted_offset, sizeof(*ip));
		if (!ip)
			return -1;
		__sum16 before = ip->check;
		apply_change(&ip->check, change_address(0, vip, dip, 0));
		ip->saddr = dip[0];
		change = change16(change, before, ip->check);
	}

	struct udphdr *l4 = at(ctx, in->quoted_l4_offset, sizeof(*l4));
	if (!l4)
		return -1;
	l4->source = in->target.port;
	if (in->protocol == IPPROTO_UDP) {
		__sum16 before = l4->check;
		apply_change_udp(&l4->check, l4_change);
		change = change16(change, before, l4->check);
	} else if (in->quoted_l4 >= 18) {
		__sum16 *check = at(ctx, in->quoted_l4_offset + 16, sizeof(*check));
		if (!check)
			return -1;
		__sum16 before = *check;
		apply_change(check, l4_change);
		change = change16(change, before, *check);
	}

	struct icmphdr *icmp = at(ctx, in->inner.l4_offset, sizeof(*icmp));
	if (!icmp)
		return -1;
	apply_change(&icmp->checksum, change);
	return 0;
}

/* Takes the tunnel off: Ethernet header and VLAN tags move up to the inner packet. */
INLINE int close_tunnel(struct xdp_md *ctx, const struct inbound *in)
{
	__u8 macs[12];
	__u32 tags[MAX_VLAN_TAGS] = {};
	__u8 n = in->outer.vlan_tags;
	__u8 *frame = at(ctx, 0, sizeof(struct ethhdr) + 4 * MAX_VLAN_TAGS);
	if (!frame)
		return -1;
	__builtin_memcpy(macs, frame, sizeof(macs));
	__builtin_memcpy(tags, frame + sizeof(macs), sizeof(tags));
	if (bpf_xdp_adjust_head(ctx, in->inner.l3_offset - in->outer.l3_offset))
		return -1;
	frame = at(ctx, 0, sizeof(struct ethhdr) + 4 * MAX_VLAN_TAGS);
	if (!frame)
		return -1;
	__builtin_memcpy(frame, macs, sizeof(macs));
	frame += sizeof(macs);
	if (n > 0) {
		__builtin_memcpy(frame, &tags[0], sizeof(tags[0]));
		frame += sizeof(tags[0]);
	}
	if (n > 1) {
		__builtin_memcpy(frame, &tags[1], sizeof(tags[1]));
		frame += sizeof(tags[1]);
	}
	__builtin_memcpy(frame, &in->inner.l3_proto, sizeof(in->inner.l3_proto));
	return 0;
}

/* Turns a mux's probe into its answer, from the tunnel's end to the mux. */
__noinline int answer_probe(struct xdp_md *ctx, const struct inbound *in)
{
	if (!in)
		return EXIT_IN_FAILED;
	const struct packet *p = &in->inner;
	int version6 = p->flags & PACKET_VERSION6;
	__be16 from = bpf_htons((version6 ? ICMPV6_ECHO_REQUEST : ICMP_ECHO) << 8);
	__be16 to = bpf_htons((version6 ? ICMPV6_ECHO_REPLY : ICMP_ECHOREPLY) << 8);

	struct icmphdr *icmp = at(ctx, p->l4_offset, sizeof(*icmp));
	if (!icmp)
		return EXIT_IN_FAILED;
	*(__be16 *)icmp = to;
	apply_change(&icmp->checksum, change16(0, from, to));
	if (version6) {
		struct ipv6hdr *ip = at(ctx, p->l3_offset, sizeof(*ip));
		if (!ip)
			return EXIT_IN_FAILED;
		__builtin_memcpy(&ip->saddr, p->dst, 16);
		__builtin_memcpy(&ip->daddr, p->src, 16);
		ip->hop_limit = OUTER_TTL;
	} else {
		struct iphdr *ip = at(ctx, p->l3_offset, sizeof(*ip));
		if (!ip)
			return EXIT_IN_FAILED;
		ip->saddr = p->dst[0];
		ip->daddr = p->src[0];
		apply_change(&ip->check,
			     change16(0, bpf_htons(ip->ttl << 8), bpf_htons(OUTER_TTL << 8)));
		ip->ttl = OUTER_TTL;
	}
	if (close_tunnel(ctx, in))
		return EXIT_IN_FAILED;
	struct ethhdr *eth = at(ctx, 0, sizeof(*eth));
	if (!eth)
		return EXIT_IN_FAILED;
	__u8 neighbour[ETH_ALEN];
	__builtin_memcpy(neighbour, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, neighbour, ETH_ALEN);
	return EXIT_IN_PROBE_ANSWERED;
}

/* Reads the packet to its inmost header that matters. */
__noinline int read_in(struct xdp_md *ctx, struct inbound *in)
{
	if (!in)
		return EXIT_IN_FAILED;
	struct cursor c = cursor_xdp(ctx);

	enum exit exit =
	    open_tunnel(&c, &in->outer, &in->inner.l3_proto, bpf_xdp_get_buff_len(ctx));
	if (exit != EXIT_IN_DELIVERED)
		return exit;
	return parse_inner(&c, in);
}

INLINE enum exit take_in(struct xdp_md *ctx)
{
	struct inbound in = {};

	enum exit exit = read_in(ctx, &in);
	if (exit == EXIT_IN_NOT_TUNNEL)
		return exit;
	int ecn = combine_ecn(in.outer.tos, in.inner.tos);
	if (exit == EXIT_IN_DELIVERED_FRAGMENT) {
		if (refuse(&in.outer, exit) == EXIT_IN_NOT_OURS)
			return EXIT_IN_NOT_OURS;
		struct fragment *fragment = find_fragment(&in.inner, 0);
		if (!fragment)
			return EXIT_IN_FRAGMENT_UNKNOWN;
		if (ecn < 0)
			return EXIT_IN_ECN;
		copy_address(in.target.dip, fragment->address);
	} else if (exit == EXIT_IN_DELIVERED || exit == EXIT_IN_DELIVERED_ICMP_ERROR) {
		struct rule *rule = find_rule(&in);
		if (!rule) {
			if (in.protocol == IPPROTO_UDP &&
			    (in.inner.dst_port == bpf_htons(GUE_PORT) ||
			     in.inner.dst_port == bpf_htons(VXLAN_PORT)))
				return refuse(&in.outer, EXIT_IN_NESTED);
			return refuse(&in.outer, EXIT_IN_NO_RULE);
		}
		if (ecn < 0)
			return EXIT_IN_ECN;
		enum exit bound = bind_flow(&in, rule);
		if (bound != EXIT_IN_DELIVERED)
			return bound;
		if (in.inner.flags & PACKET_FIRST_FRAGMENT)
			remember_fragment(&in.inner, in.target.dip, 0);
		if (exit == EXIT_IN_DELIVERED ? write_inner_l4(ctx, &in) : write_quote(ctx, &in))
			return EXIT_IN_FAILED;
	} else {
		exit = refuse(&in.outer, exit);
		return exit == EXIT_IN_PROBE_ANSWERED ? answer_probe(ctx, &in) : exit;
	}

	if (write_inner_ip(ctx, &in, ecn) || close_tunnel(ctx, &in))
		return EXIT_IN_FAILED;
	meter(in.inner.dst, in.inner.src, vip_family(&in.inner), 1, 1, in.inner.l3_length);
	return exit;
}

SEC("xdp.frags")
int inbound(struct xdp_md *ctx)
{
	enum exit exit = take_in(ctx);

	count_exit(exit);
	/* Not XDP_TX: that a veth only takes if an XDP program is at its other end as well. */
	if (exit == EXIT_IN_PROBE_ANSWERED)
		return bpf_redirect(ctx->ingress_ifindex, 0);
	return exit <= EXIT_IN_DELIVERED_ICMP_ERROR ? XDP_PASS : XDP_DROP;
}

/* Bytes of headers that we may have to read: two IP headers with options or a few extensions. */
#define HEADERS 256

/* One packet's way through `outbound`. */
struct outbound {
	struct packet p;
	struct packet quoted; /* by an ICMP error: the client's packet, as translated */
	struct flow_key key;
	__be32 vip[4];
	__be16 vip_port;
	__u16 overhead;
};

/* Reads an outgoing packet, and what it quotes if it is an ICMP error. PARSED_TRUNCATED may mean
 * that the headers are not in the linear part. */
__noinline int parse_out(struct __sk_buff *skb, struct packet *p, struct packet *quoted)
{
	if (!p || !quoted)
		return PARSED_INVALID;
	struct cursor c = cursor_skb(skb);

	enum parsed parsed = parse_ethernet(&c, p);
	if (parsed == PARSED_OK)
		parsed = parse_ip(&c, p);
	if (parsed != PARSED_OK || p->flags & PACKET_LATER_FRAGMENT)
		return parsed;
	if (p->l4_proto == IPPROTO_TCP)
		return parse_tcp(&c, p);
	if (p->l4_proto == IPPROTO_UDP)
		return parse_udp(&c, p);
	if (p->l4_proto != (p->flags & PACKET_VERSION6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP))
		return PARSED_INVALID;

	parsed = parse_icmp(&c, p);
	if (parsed != PARSED_OK)
		return parsed;
	if (!icmp_error(p) || p->flags & PACKET_FIRST_FRAGMENT)
		return PARSED_INVALID;
	quoted->l3_proto = p->l3_proto;
	parsed = parse_ip(&c, quoted);
	if (parsed != PARSED_OK)
		return parsed;
	if (quoted->flags & PACKET_LATER_FRAGMENT || !same_address(quoted->src, p->dst) ||
	    (quoted->l4_proto != IPPROTO_TCP && quoted->l4_proto != IPPROTO_UDP))
		return PARSED_INVALID;
	if (quoted->l4_offset + 8 > (__u32)p->l3_offset + p->l3_length)
		return PARSED_INVALID;
	return parse_ports(&c, quoted);
}

INLINE struct dip *find_dip(const __be32 address[4], __u8 families)
{
	struct dip_key key = {.families = families};
	copy_address(key.address, address);
	return bpf_map_lookup_elem(&dips, &key);
}

/* Fills in what the flow says, or returns -1. */
INLINE int find_flow(struct outbound *out)
{
	struct flow *f = bpf_map_lookup_elem(&flows, &out->key);
	if (!f)
		f = bpf_map_lookup_elem(&untrusted, &out->key);
	if (moving && !f)
		f = bpf_map_lookup_elem(&former_flows, &out->key);
	if (moving && !f)
		f = bpf_map_lookup_elem(&former_untrusted, &out->key);
	if (!f)
		return -1;
	copy_address(out->vip, f->vip);
	out->vip_port = f->vip_port;
	out->overhead = f->overhead;
	return 0;
}

/* Replaces an address that a layer 4 checksum covers by its pseudo-header. */
INLINE long replace_pseudo_address(struct __sk_buff *skb, __u32 check, __be32 from[4], __be32 to[4],
				   int version6, __u64 flags)
{
	flags |= BPF_F_PSEUDO_HDR;
	if (!version6)
		return bpf_l4_csum_replace(skb, check, from[0], to[0], flags | 4);
	return bpf_l4_csum_replace(skb, check, 0, bpf_csum_diff(from, 16, to, 16, 0), flags);
}

/* Writes the VIP as the packet's source address, with IPv4's header checksum. */
INLINE long write_source(struct __sk_buff *skb, struct packet *p, __be32 vip[4])
{
	if (p->flags & PACKET_VERSION6)
		return bpf_skb_store_bytes(skb, p->l3_offset + offsetof(struct ipv6hdr, saddr), vip,
					   16, 0);
	return bpf_l3_csum_replace(skb, p->l3_offset + offsetof(struct iphdr, check), p->src[0],
				   vip[0], 4) ||
	       bpf_skb_store_bytes(skb, p->l3_offset + offsetof(struct iphdr, saddr), vip, 4, 0);
}

/* Layer 4 first: bpf_l4_csum_replace leaves alone what the card is to sum (CHECKSUM_PARTIAL). */
INLINE long write_reply(struct __sk_buff *skb, struct outbound *out)
{
	struct packet *p = &out->p;
	__u64 flags = p->l4_proto == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 check = p->l4_offset + (p->l4_proto == IPPROTO_UDP ? offsetof(struct udphdr, check)
								 : offsetof(struct tcphdr, check));

	return replace_pseudo_address(skb, check, p->src, out->vip, p->flags & PACKET_VERSION6,
				      flags) ||
	       bpf_l4_csum_replace(skb, check, p->src_port, out->vip_port, flags | 2) ||
	       bpf_skb_store_bytes(skb, p->l4_offset, &out->vip_port, 2, 0) ||
	       write_source(skb, p, out->vip);
}

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_MSS 2
#define TCP_OPTIONS    40 /* bytes at most */

/* Linux computes with no smaller one (its TCP_MIN_MSS): what a tiny MTU may ask for. */
#define MSS_LEAST 88

/* Lowers the MSS that a server announces to what fits into the tunnel. Not inlined, for its stack.
 */
__noinline int clamp_mss(struct __sk_buff *skb, const struct outbound *out)
{
	if (!out)
		return -1;
	const struct packet *p = &out->p;
	__u8 options[TCP_OPTIONS] = {};
	__u8 offset_byte;
	__u32 limit = max_mss;

	if (!limit) {
		__u32 mtu = 0;
		__u32 headers =
		    (p->flags & PACKET_VERSION6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) +
		    sizeof(struct tcphdr) + out->overhead;
		bpf_check_mtu(skb, 0, &mtu, 0, 0);
		if (mtu < headers + MSS_LEAST)
			return 0;
		limit = mtu - headers;
	}
	if (bpf_skb_load_bytes(skb, p->l4_offset + 12, &offset_byte, 1))
		return -1;
	__u32 n = (offset_byte >> 4) * 4 - sizeof(struct tcphdr);
	if (n == 0 || n > TCP_OPTIONS)
		return 0;
	if (!holds_l4(p, sizeof(struct tcphdr) + n) ||
	    bpf_skb_load_bytes(skb, p->l4_offset + sizeof(struct tcphdr), options, n))
		return 0;

	__u32 at = 0;
	for (int i = 0; i < TCP_OPTIONS; i++) {
		if (at + 4 > n || at + 4 > TCP_OPTIONS || options[at] == TCP_OPTION_END)
			return 0;
		if (options[at] == TCP_OPTION_NOP) {
			at++;
			continue;
		}
		if (options[at + 1] < 2)
			return 0;
		if (options[at] != TCP_OPTION_MSS) {
			at += options[at + 1];
			continue;
		}
		if (options[at + 1] != 4)
			return 0;

		__be16 from = options[at + 2] | options[at + 3] << 8;
		__be16 to = bpf_htons(limit);
		if (bpf_ntohs(from) <= limit)
			return 0;
		count_event(EVENT_MSS_CLAMPED);
		/* A checksum sees a value at an odd offset with its bytes swapped. */
		int odd = at & 1;
		return bpf_l4_csum_replace(skb, p->l4_offset + offsetof(struct tcphdr, check),
					   odd ? bpf_htons(from) : from, odd ? bpf_htons(to) : to,
					   2) ||
		       bpf_skb_store_bytes(skb, p->l4_offset + sizeof(struct tcphdr) + at + 2, &to,
					   2, 0);
	}
	return 0;
}

/* Translates the client's packet that an ICMP error quotes to what the client sent, and the error's
 * own source to the VIP. The quote's checksums change with it, and ICMP's with all of them. */
__noinline int write_icmp_error(struct __sk_buff *skb, struct outbound *out)
{
	if (!out)
		return -1;
	struct packet *p = &out->p, *quoted = &out->quoted;
	int version6 = p->flags & PACKET_VERSION6;
	__u32 icmp_check = p->l4_offset + offsetof(struct icmphdr, checksum);
	__u32 end = (__u32)p->l3_offset + p->l3_length;
	__u32 l4_change = change_address(0, quoted->dst, out->vip, version6);
	l4_change = change16(l4_change, quoted->dst_port, out->vip_port);
	__u32 change = l4_change;
	__sum16 before, after;

	if (version6) {
		if (bpf_skb_store_bytes(skb, quoted->l3_offset + offsetof(struct ipv6hdr, daddr),
					out->vip, 16, 0) ||
		    replace_pseudo_address(skb, icmp_check, p->src, out->vip, 1, 0))
			return -1;
	} else {
		__u32 check = quoted->l3_offset + offsetof(struct iphdr, check);
		if (bpf_skb_load_bytes(skb, check, &before, 2))
			return -1;
		after = before;
		apply_change(&after, change_address(0, quoted->dst, out->vip, 0));
		change = change16(change, before, after);
		if (bpf_skb_store_bytes(skb, check, &after, 2, 0) ||
		    bpf_skb_store_bytes(skb, quoted->l3_offset + offsetof(struct iphdr, daddr),
					out->vip, 4, 0))
			return -1;
	}
	if (bpf_skb_store_bytes(skb, quoted->l4_offset + offsetof(struct udphdr, dest),
				&out->vip_port, 2, 0))
		return -1;

	int udp = quoted->l4_proto == IPPROTO_UDP;
	__u32 check = quoted->l4_offset +
		      (udp ? offsetof(struct udphdr, check) : offsetof(struct tcphdr, check));
	if (check + 2 <= end) {
		if (bpf_skb_load_bytes(skb, check, &before, 2))
			return -1;
		after = before;
		if (udp)
			apply_change_udp(&after, l4_change);
		else
			apply_change(&after, l4_change);
		change = change16(change, before, after);
		if (bpf_skb_store_bytes(skb, check, &after, 2, 0))
			return -1;
	}
	return bpf_l4_csum_replace(skb, icmp_check, 0, change, 0) || write_source(skb, p, out->vip);
}

/* Counts each segment of a GSO packet as the wire will see it, with headers of its own. */
INLINE void meter_out(struct __sk_buff *skb, const struct packet *p, const __be32 vip[4],
		      __u32 headers)
{
	__u64 segments = skb->gso_segs ?: 1;
	__u64 bytes = skb->len - p->l3_offset + (segments - 1) * headers;

	meter(vip, p->dst, vip_family(p), 0, segments, bytes);
}

INLINE enum exit take_out(struct __sk_buff *skb)
{
	struct outbound out = {};
	struct packet *p = &out.p;

	enum parsed parsed = parse_out(skb, p, &out.quoted);
	if (parsed == PARSED_TRUNCATED && skb->data_end - skb->data < skb->len) {
		if (bpf_skb_pull_data(skb, skb->len < HEADERS ? skb->len : HEADERS))
			return EXIT_OUT_NOT_OURS;
		parsed = parse_out(skb, p, &out.quoted);
	}
	if (parsed != PARSED_OK || (__u32)p->l3_offset + p->l3_length > skb->len)
		return EXIT_OUT_NOT_OURS;

	__u8 families = vip_family(p);
	if (p->flags & PACKET_LATER_FRAGMENT) {
		if (!find_dip(p->src, families))
			return EXIT_OUT_NOT_OURS;
		struct fragment *fragment = find_fragment(p, 1);
		if (!fragment)
			return EXIT_OUT_NOT_OURS;
		copy_address(out.vip, fragment->address);
		if (write_source(skb, p, out.vip))
			return EXIT_OUT_FAILED;
		meter_out(skb, p, out.vip, 0);
		return EXIT_OUT_FRAGMENT;
	}

	int quotes = p->l4_proto != IPPROTO_TCP && p->l4_proto != IPPROTO_UDP;
	out.key.families = families;
	copy_address(out.key.client, p->dst);
	if (quotes) {
		copy_address(out.key.dip, out.quoted.dst);
		out.key.dip_port = out.quoted.dst_port;
		out.key.client_port = out.quoted.src_port;
		out.key.protocol = out.quoted.l4_proto;
	} else {
		copy_address(out.key.dip, p->src);
		out.key.dip_port = p->src_port;
		out.key.client_port = p->dst_port;
		out.key.protocol = p->l4_proto;
	}
	struct dip *dip = find_dip(out.key.dip, families);
	if (!dip || !(dip->ports & port_bit(out.key.protocol, out.key.dip_port)) || find_flow(&out))
		return EXIT_OUT_NOT_OURS;

	if (quotes) {
		if (write_icmp_error(skb, &out))
			return EXIT_OUT_FAILED;
		meter_out(skb, p, out.vip, 0);
		return EXIT_OUT_ICMP_ERROR;
	}
	__u32 headers = p->l4_offset - p->l3_offset + sizeof(struct udphdr);
	if (p->l4_proto == IPPROTO_TCP) {
		__u8 offset_byte;
		if (p->flags & (PACKET_SYN | PACKET_SYN_ACK) && clamp_mss(skb, &out))
			return EXIT_OUT_FAILED;
		if (bpf_skb_load_bytes(skb, p->l4_offset + 12, &offset_byte, 1))
			return EXIT_OUT_FAILED;
		headers = p->l4_offset - p->l3_offset + (offset_byte >> 4) * 4;
	}
	if (p->flags & PACKET_FIRST_FRAGMENT)
		remember_fragment(p, out.vip, 1);
	if (write_reply(skb, &out))
		return EXIT_OUT_FAILED;
	meter_out(skb, p, out.vip, headers);
	return EXIT_OUT_TRANSLATED;
}

SEC("tcx/egress")
int outbound(struct __sk_buff *skb)
{
	enum exit exit = take_out(skb);

	count_exit(exit);
	return exit == EXIT_OUT_FAILED ? TCX_DROP : TCX_NEXT;
}
