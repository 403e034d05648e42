// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// clang-format off
//go:build ignore

// clang-format on
/* The mux: takes a packet for a VIP to one of the DIPs behind it.
 *
 * One struct packet is carried through the stages parse, find endpoint, choose
 * DIP, find next hop, encapsulate. Each way out is a value of enum exit and
 * counted; mux() at the bottom is the only place that counts them.
 */
#include <parse.h>
#include <csum.h>
#include <encap.h>
#include <flowhash.h>

/* Ways out of the packet path. Their names, less the prefix and in lower case,
 * are the operator's: the loader reads them from this program's BTF. */
enum exit {
	EXIT_TX,		   /* encapsulated, out by the interface it came from */
	EXIT_REDIRECT,		   /* encapsulated, out by another interface */
	EXIT_NO_VIP,		   /* passed: destination is not a VIP */
	EXIT_NOT_IP,		   /* passed: ARP, LLDP, ... */
	EXIT_ECHO_REPLY,	   /* answered: echo request to a VIP */
	EXIT_FRAGMENTATION_NEEDED, /* answered: DF or IPv6, over the MTU once encapsulated */
	EXIT_OVERSIZE,		   /* answered alike: over the MTU though DF was not set */
	EXIT_TIME_EXCEEDED,	   /* answered: TTL or hop limit was 1 or 0 */
	EXIT_ANSWER_LIMITED,	   /* dropped: an ICMP error was due, over the rate limit */
	EXIT_ANSWER_FORBIDDEN,	   /* dropped: an ICMP error was due, RFC 1122 3.2.2 forbids one */
	EXIT_TRUNCATED,	       /* dropped: ends inside a header, or before its length field says */
	EXIT_MALFORMED,	       /* dropped: header fields contradict each other */
	EXIT_NO_ENDPOINT,      /* dropped: VIP has no endpoint for protocol and port */
	EXIT_NO_DIP,	       /* dropped: endpoint has no DIP that can serve */
	EXIT_UNKNOWN_FRAGMENT, /* dropped: first fragment was not seen */
	EXIT_UNSUPPORTED_PROTOCOL, /* dropped: to a VIP, neither TCP, UDP nor ICMP */
	EXIT_UNSUPPORTED_ICMP,	   /* dropped: to a VIP, neither echo request nor error */
	EXIT_UNRELATED_ICMP,	   /* dropped: error that quotes no flow of that VIP */
	EXIT_NESTED_TUNNEL,	   /* dropped: IP in IP to a VIP */
	EXIT_TUNNEL_TO_MUX,	   /* dropped: IP in IP or GUE to the mux's own tunnel source */
	EXIT_NO_ROUTE,	   /* dropped: FIB has no way to the tunnel's end, or no source for it */
	EXIT_NO_NEIGHBOUR, /* dropped: next hop's MAC is being asked for */
	EXIT_FORWARDING_DISABLED, /* dropped: sysctl forwarding is off on the ingress interface */
	EXIT_NO_HEADROOM,	  /* dropped: driver leaves no room for the tunnel header */
	EXIT_INTERNAL,		  /* dropped: a table contradicts itself */
	EXIT_COUNT,
};

/* What happened beside the way out; named as enum exit is. */
enum event {
	EVENT_FLOW_HIT,	      /* connection table decided */
	EVENT_FLOW_INSERTED,  /* entry written for a flow that had none */
	EVENT_FLOW_FULL,      /* no room: the flow went by its bucket, statelessly */
	EVENT_FLOW_UNTRUSTED, /* trusted quota of the line was full: entry stayed untrusted */
	EVENT_FLOW_STALE,     /* entry's DIP is gone: the flow went by its bucket */
	EVENT_NEXT_HOP_MISS,  /* FIB was asked */
	EVENT_COUNT,
};

/* Who chose the DIP. */
enum chosen_by {
	CHOSEN_BY_NOTHING,
	CHOSEN_BY_BUCKET,
	CHOSEN_BY_CONNECTION_TABLE,
	CHOSEN_BY_FRAGMENT_TABLE,
};

/* Set by the loader. A program that explains shares the others' maps, writes
 * struct trace, and changes neither counters nor flows nor fragments. */
const volatile __u8 explain = 0;
const volatile __u32 flow_line_mask = 1; /* lines of the connection table, less one */
const volatile __u32 vip4_line_mask = 0;
const volatile __u32 vip6_line_mask = 0;
const volatile __u32 endpoint_line_mask = 0;
const volatile __u64 tick_ns = 4000000; /* length of a jiffy */

struct settings {
	struct flow_seed seed;
	__be32 source6[4]; /* outer source; zero: no IPv6 tunnels */
	__be32 source4;	   /* outer source; zero: no IPv4 tunnels */
	__u32 next_hop_generation;
	__u32 idle_trusted;	  /* FLOW_TIME_UNITs */
	__u32 idle_untrusted;	  /* FLOW_TIME_UNITs */
	__u64 answers_per_second; /* ICMP errors, each CPU */
	__u64 fragment_lifetime;  /* ns between a first fragment and its last */
};

/* VIPs and endpoints are kept in open-addressed tables of cache lines that the
 * loader writes through memory maps: a look-up is one hash, mostly one line and
 * no call. Keys are the operator's, so nobody can aim at a line. A slot is a
 * line's number times its entries, plus the entry's place; slots are ids.
 *
 * A look-up goes over up to PROBE_LINES lines and ends at the first entry that
 * was never used; an entry that was deleted is DELETED, not zero. */
#define PROBE_LINES	 8
#define PROBE_ON	 (~0ULL) /* lines were full, and the key not in them */
#define PROBE_LINES_VIP6 16

#define VIP_USED    (1 << 0)
#define VIP_DELETED (1 << 1)
#define VIP_ANY_TCP (1 << 2) /* has an endpoint for any TCP port */
#define VIP_ANY_UDP (1 << 3)

#define VIPS4_PER_LINE	   8
#define VIPS6_PER_LINE	   2
#define ENDPOINTS_PER_LINE 4

/* Bits 0-31: address in network byte order; 32-39: flags. */
struct vip4_line {
	__u64 entry[VIPS4_PER_LINE];
};

struct vip6_line {
	struct {
		__be32 addr[4];
		__u64 flags;
		__u64 pad;
	} entry[VIPS6_PER_LINE];
};

/* An endpoint's table is swapped by one store to word. */
struct endpoint_line {
	struct {
		/* Bits 0-30: VIP's slot; 31: IPv6; 32-47: port in network byte
		 * order, 0 for any; 48-55: protocol; 56: used; 57: deleted. */
		__u64 key;
		/* Bits 0-23: first line of its buckets; 24-31: log2 of their
		 * number, or NO_BUCKETS; 32: consistency table. */
		__u64 word;
	} entry[ENDPOINTS_PER_LINE];
};

#define KEY_VIP6	   (1ULL << 31)
#define KEY_USED	   (1ULL << 56)
#define KEY_PORT_SHIFT	   32
#define KEY_PROTOCOL_SHIFT 48

#define NO_BUCKETS	 0xff
#define WORD_LINE(w)	 ((__u32)(w) & 0xffffff)
#define WORD_LOG2(w)	 ((__u32)(w) >> 24)
#define WORD_IS_TABLE(w) ((w) >> 32 & 1)

/* Buckets come in chunks, each a map of its own, so that memory grows with use. */
#define BUCKETS_PER_LINE 16
#define LINES_PER_CHUNK	 16384
#define MAX_CHUNKS	 1024

struct bucket_line {
	__u32 dip[BUCKETS_PER_LINE]; /* ids; 0 is none */
};

/* All that a packet needs to know of a DIP, in one cache line. A record is
 * written while dead and never changed while alive. */
struct dip {
	__be32 tunnel[4]; /* outer destination; IPv4 in word 0 */
	__be32 addr[4];	  /* the DIP itself, for the loader and trace */
	__u32 endpoint;	  /* id of its endpoint plus 1; 0: dead */
	__be16 port;
	__u16 slot;  /* line of the next-hop cache */
	__u8 outer6; /* outer header is IPv6 */
	__u8 gue;
	__u8 overhead; /* bytes of the outer headers */
	__u8 addr6;    /* the DIP's own family */
	__u8 pad[20];
};

struct dip_counters {
	__u64 packets;
	__u64 bytes; /* of IP packets as they came */
	__u64 new_flows;
};

struct cpu_stats {
	__u64 exits[EXIT_COUNT];
	__u64 events[EVENT_COUNT];
	__u64 answer_tokens; /* nanoseconds' worth of answers left */
	__u64 answer_time;   /* ns when they were counted */
};

/* Connection table (Ananta section 3.3.3). An entry, from the top bit:
 * trusted 1, fingerprint 28, DIP id 22, time 13. Zero is a free entry: DIP
 * ids begin at 1. Entries change by compare-and-swap only. */
#define FLOW_TRUSTED	    (1ULL << 63)
#define FLOW_FINGERPRINT    0x7ffffff800000000ULL
#define FLOW_DIP(e)	    ((__u32)((e) >> 13) & 0x3fffff)
#define FLOW_TIME(e)	    ((__u32)(e) & 0x1fff)
#define FLOW_TIME_MASK	    0x1fff
#define FLOW_TIME_UNIT_BITS 32 /* 2^32 ns, 4.3 s; the clock goes round in 9.8 h */
#define FLOW_LINE_ENTRIES   8
#define FLOW_MAX_TRUSTED    7 /* of a line's entries */
#define FLOW_MAX_UNTRUSTED  6

struct flow_line {
	__u64 entry[FLOW_LINE_ENTRIES];
};

struct fragment_key {
	__be32 src[4];
	__be32 dst[4];
	__be32 id;
	__u32 protocol;
};

struct fragment {
	__u64 time; /* ns of the first fragment */
	__u32 dip;
	__u32 endpoint; /* slot plus 1, as in struct dip */
	__u32 entropy;
	__u32 pad;
};

struct next_hop {
	__u64 dst[2];  /* outer destination */
	__u8 macs[16]; /* of the next hop, of the interface, and 4 unused */
	__u64 expires; /* ns */
	__u32 generation;
	__u32 ifindex;
	__u16 mtu;
	__be16 vlan; /* TCI, or 0: untagged */
	__u32 pad;
};

#define NEXT_HOP_SLOTS	     4096
#define NEXT_HOP_LIFETIME_NS 1000000000ULL

/* A VLAN interface as packets must leave through the one below it. */
struct vlan_link {
	__u32 ifindex;
	__be16 vlan;
	__u16 pad;
};

/* The verifier's bounds for what struct packet's offsets can be. */
#define PACKET_QUOTED (1 << 7) /* the tuple is of the flow that an ICMP error quotes */
#define L3_OFFSET(p)  ((p)->l3_offset & 0x1f)
#define L4_OFFSET(p)  ((p)->l4_offset & 0x3fff)

struct wanted_neighbour {
	__be32 addr[4];
	__u32 ifindex;
	__u32 is6;
};

struct trace {
	__u64 hash;
	__u32 exit;
	__u32 chosen_by;
	__u32 vip;	/* id, 0 none */
	__u32 endpoint; /* id plus 1, 0 none */
	__u32 buckets;
	__u32 bucket;
	__u32 bucket_dip; /* id */
	__u32 dip;	  /* id */
	__u32 mtu;
	__u32 ifindex;
	__u32 trusted; /* the entry that chose */
	__u32 quoted;  /* the flow is one that an ICMP error quotes */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct settings);
} config SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct vip4_line);
} vips4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct vip6_line);
} vips6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct endpoint_line);
} endpoints SEC(".maps");

struct chunk {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LINES_PER_CHUNK);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct bucket_line));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_CHUNKS);
	__type(key, __u32);
	__array(values, struct chunk);
} chunks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct dip);
} dips SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct dip_counters);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_line);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, NEXT_HOP_SLOTS);
	__type(key, __u32);
	__type(value, struct next_hop);
} next_hops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct vlan_link);
} vlan_links SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} wanted_neighbours SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cpu_stats);
} stats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct trace);
} traces SEC(".maps");

/* What the stages share about one packet beside its description. */
struct run {
	struct xdp_md *ctx;
	const struct settings *settings;
	struct cpu_stats *stats;
	struct trace *trace; /* NULL unless explaining */
	__u64 now;	     /* ns since boot, by jiffies: reading them is no call */
};

/* Rare ways are functions of their own: they share no registers with the usual
 * one, and the stack only while they run. */
#define RARE static __noinline

/* A global function is checked by the verifier once, not for each way to it. */
#define CHECKED_ONCE __noinline

#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))

#define TRACE(run, field, value)                                                                   \
	do {                                                                                       \
		if (explain && (run)->trace)                                                       \
			(run)->trace->field = (value);                                             \
	} while (0)

INLINE const struct settings *get_settings(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&config, &zero);
}

INLINE struct cpu_stats *get_stats(void)
{
	__u32 zero = 0;
	return bpf_map_lookup_elem(&stats, &zero);
}

INLINE void count_event(struct cpu_stats *s, enum event event)
{
	if (!explain)
		s->events[event]++;
}

INLINE int is6(const struct packet *p)
{
	return p->flags & PACKET_VERSION6;
}

INLINE int same_addr(const __be32 a[4], const __be32 b[4])
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

INLINE int is_zero_addr(const __be32 a[4])
{
	return !(a[0] | a[1] | a[2] | a[3]);
}

/* Multiplicative hashing: the product's upper bits depend on all of the key's. */
INLINE __u32 spread(__u64 key)
{
	return key * 0x9e3779b97f4a7c15ULL >> 40;
}

/* Addresses differ in their last bytes mostly, low's top ones: they are folded
 * down, for products carry upwards only. */
INLINE __u32 spread_addr(__u64 high, __u64 low)
{
	__u64 key = high ^ low * 0xc2b2ae3d27d4eb4fULL;
	return spread(key ^ key >> 32);
}

/* What the packet's stages know of its VIP. */
struct vip {
	__u32 slot;
	__u32 flags; /* 0: not a VIP */
};

/* As one number, for a function checked once. */
#define PACK_VIP(slot, flags) ((__u64)(flags) << 32 | (slot))

INLINE __u64 probe_vip4(__be32 addr, __u32 from, __u32 to)
{
	__u32 first = spread(addr);
	for (__u32 i = from; i < to; i++) {
		__u32 at = (first + i) & vip4_line_mask;
		struct vip4_line *line = bpf_map_lookup_elem(&vips4, &at);
		if (!line)
			return 0;
#pragma unroll
		for (__u32 j = 0; j < VIPS4_PER_LINE; j++) {
			__u64 e = READ_ONCE(line->entry[j]);
			if ((__u32)e == addr && e >> 32 & VIP_USED)
				return PACK_VIP(at * VIPS4_PER_LINE + j, e >> 32);
			if (!e)
				return 0;
		}
	}
	return PROBE_ON;
}

INLINE __u64 probe_vip6(const __be32 addr[4], __u32 from, __u32 to)
{
	__u64 high = addr[0] | (__u64)addr[1] << 32, low = addr[2] | (__u64)addr[3] << 32;
	__u32 first = spread_addr(high, low);
	for (__u32 i = from; i < to; i++) {
		__u32 at = (first + i) & vip6_line_mask;
		struct vip6_line *line = bpf_map_lookup_elem(&vips6, &at);
		if (!line)
			return 0;
#pragma unroll
		for (__u32 j = 0; j < VIPS6_PER_LINE; j++) {
			__u64 flags = READ_ONCE(line->entry[j].flags);
			if (same_addr(line->entry[j].addr, addr) && flags & VIP_USED)
				return PACK_VIP(at * VIPS6_PER_LINE + j, flags);
			if (!flags)
				return 0;
		}
	}
	return PROBE_ON;
}

/* An endpoint's slot plus 1, or 0. */
INLINE __u64 probe_endpoint(__u64 key, __u32 from, __u32 to)
{
	__u32 first = spread(key);
	for (__u32 i = from; i < to; i++) {
		__u32 at = (first + i) & endpoint_line_mask;
		struct endpoint_line *line = bpf_map_lookup_elem(&endpoints, &at);
		if (!line)
			return 0;
#pragma unroll
		for (__u32 j = 0; j < ENDPOINTS_PER_LINE; j++) {
			__u64 k = READ_ONCE(line->entry[j].key);
			if (k == key)
				return at * ENDPOINTS_PER_LINE + j + 1;
			if (!k)
				return 0;
		}
	}
	return PROBE_ON;
}

CHECKED_ONCE __u64 probe_vip4_on(__be32 addr)
{
	return probe_vip4(addr, 1, PROBE_LINES);
}

CHECKED_ONCE __u64 probe_vip6_on(__u64 high, __u64 low)
{
	__be32 addr[4] = {high, high >> 32, low, low >> 32};
	return probe_vip6(addr, 1, PROBE_LINES_VIP6);
}

CHECKED_ONCE __u64 probe_endpoint_on(__u64 key)
{
	return probe_endpoint(key, 1, PROBE_LINES);
}

INLINE struct vip find_vip(const struct packet *p)
{
	__u64 packed;
	if (is6(p)) {
		packed = probe_vip6(p->dst, 0, 1);
		if (packed == PROBE_ON)
			packed = probe_vip6_on(p->dst[0] | (__u64)p->dst[1] << 32,
					       p->dst[2] | (__u64)p->dst[3] << 32);
	} else {
		packed = probe_vip4(p->dst[0], 0, 1);
		if (packed == PROBE_ON)
			packed = probe_vip4_on(p->dst[0]);
	}
	struct vip vip = {.slot = packed, .flags = packed >> 32};
	if (packed == PROBE_ON)
		vip.flags = 0;
	return vip;
}

INLINE __u32 find_key(__u64 key)
{
	__u64 found = probe_endpoint(key, 0, 1);
	if (found == PROBE_ON)
		found = probe_endpoint_on(key);
	return found == PROBE_ON ? 0 : found;
}

CHECKED_ONCE __u32 find_any_port(__u64 key)
{
	__u64 found = probe_endpoint(key, 0, PROBE_LINES);
	return found == PROBE_ON ? 0 : found;
}

/* The word of the endpoint whose slot plus 1 is given; 0: it is gone. */
INLINE __u64 endpoint_word(__u32 endpoint)
{
	__u32 slot = endpoint - 1, at = slot / ENDPOINTS_PER_LINE;
	struct endpoint_line *line = bpf_map_lookup_elem(&endpoints, &at);
	return line ? READ_ONCE(line->entry[slot % ENDPOINTS_PER_LINE].word) : 0;
}

INLINE __u32 find_endpoint(const struct vip *vip, const struct packet *p)
{
	__u64 key = KEY_USED | (__u64)p->l4_proto << KEY_PROTOCOL_SHIFT | (is6(p) ? KEY_VIP6 : 0) |
		    vip->slot;
	__u32 id = find_key(key | (__u64)p->dst_port << KEY_PORT_SHIFT);
	if (id || !(vip->flags & (p->l4_proto == IPPROTO_TCP ? VIP_ANY_TCP : VIP_ANY_UDP)))
		return id;
	return find_any_port(key);
}

INLINE __u64 hash_packet(const struct run *run, const struct packet *p)
{
	if (is6(p))
		return flowhash_v6(&run->settings->seed, p->src, p->dst, p->src_port, p->dst_port,
				   p->l4_proto);
	return flowhash_v4(&run->settings->seed, p->src[0], p->dst[0], p->src_port, p->dst_port,
			   p->l4_proto);
}

/* The id of the DIP in the flow's bucket, or 0. */
INLINE __u32 bucket_dip(struct run *run, __u64 word, __u64 hash)
{
	__u32 log2 = WORD_LOG2(word);
	if (log2 > 31)
		return 0;
	__u32 bucket = (__u32)hash & ((1u << log2) - 1);
	__u32 line = WORD_LINE(word) + bucket / BUCKETS_PER_LINE;
	__u32 chunk = line / LINES_PER_CHUNK;
	line %= LINES_PER_CHUNK;
	void *map = bpf_map_lookup_elem(&chunks, &chunk);
	if (!map)
		return 0;
	struct bucket_line *l = bpf_map_lookup_elem(map, &line);
	if (!l)
		return 0;
	__u32 dip = READ_ONCE(l->dip[bucket % BUCKETS_PER_LINE]);
	TRACE(run, buckets, 1u << log2);
	TRACE(run, bucket, bucket);
	TRACE(run, bucket_dip, dip);
	return dip;
}

/* The record of a live DIP of that endpoint, or NULL. */
INLINE struct dip *find_dip(__u32 id, __u32 endpoint)
{
	struct dip *dip = bpf_map_lookup_elem(&dips, &id);
	if (!dip || !id || READ_ONCE(dip->endpoint) != endpoint)
		return NULL;
	return dip;
}

INLINE __u32 flow_time(__u64 now)
{
	return (__u32)(now >> FLOW_TIME_UNIT_BITS) & FLOW_TIME_MASK;
}

INLINE __u32 flow_age(__u64 e, __u64 now)
{
	return (flow_time(now) - FLOW_TIME(e)) & FLOW_TIME_MASK;
}

INLINE __u64 flow_fingerprint(__u64 hash)
{
	return hash << 23 & FLOW_FINGERPRINT;
}

INLINE struct flow_line *flow_line(__u64 hash, __u32 choice)
{
	__u32 i = ((__u32)(hash >> 40) & flow_line_mask) ^ choice;
	return bpf_map_lookup_elem(&flows, &i);
}

INLINE __u64 probe_flow(__u64 hash, __u32 choice)
{
	__u64 fingerprint = flow_fingerprint(hash);
	struct flow_line *line = flow_line(hash, choice);
	if (!line)
		return 0;
#pragma unroll
	for (int i = 0; i < FLOW_LINE_ENTRIES; i++) {
		__u64 e = READ_ONCE(line->entry[i]);
		if (!((e ^ fingerprint) & FLOW_FINGERPRINT) && FLOW_DIP(e))
			return e;
	}
	return 0;
}

CHECKED_ONCE __u64 probe_flow_beside(__u64 hash)
{
	return probe_flow(hash, 1);
}

/* The flow's entry, from its line or the line beside, or 0. */
INLINE __u64 find_flow(__u64 hash)
{
	return probe_flow(hash, 0) ?: probe_flow_beside(hash);
}

/* Note that the flow of entry e lives. A second packet makes it trusted, if
 * the quota of its line allows. */
CHECKED_ONCE int touch_flow(__u64 hash, __u64 e, __u64 now)
{
	__u64 fresh = (e & ~(__u64)FLOW_TIME_MASK) | flow_time(now);
	struct cpu_stats *s = get_stats();

	for (__u32 choice = 0; s && choice < 2; choice++) {
		struct flow_line *line = flow_line(hash, choice);
		if (!line)
			return 0;
		__u32 at = FLOW_LINE_ENTRIES, trusted = 0;
#pragma unroll
		for (int i = 0; i < FLOW_LINE_ENTRIES; i++) {
			__u64 other = READ_ONCE(line->entry[i]);
			if (other == e)
				at = i;
			trusted += other >> 63;
		}
		if (at == FLOW_LINE_ENTRIES)
			continue;
		if (trusted < FLOW_MAX_TRUSTED)
			fresh |= FLOW_TRUSTED;
		else if (!(e & FLOW_TRUSTED))
			count_event(s, EVENT_FLOW_UNTRUSTED);
		if (fresh != e)
			__sync_val_compare_and_swap(&line->entry[at % FLOW_LINE_ENTRIES], e, fresh);
		return 0;
	}
	return 0;
}

/* Write an untrusted entry for a flow that has none that counts; 1 if it was
 * written. A flow's older entry (a SYN on a used 5-tuple, a DIP that is gone)
 * is replaced. */
CHECKED_ONCE int insert_flow(__u64 hash, __u32 dip, __u64 time)
{
	const struct settings *settings = get_settings();
	struct cpu_stats *s = get_stats();
	__u32 now = flow_time(time);
	__u64 fingerprint = flow_fingerprint(hash);
	__u64 fresh = fingerprint | (__u64)dip << 13 | now;

	if (!settings || !s)
		return 0;
	__u32 idle_trusted = settings->idle_trusted, idle_untrusted = settings->idle_untrusted;
	for (__u32 choice = 0; choice < 2; choice++) {
		struct flow_line *line = flow_line(hash, choice);
		if (!line)
			return 0;
		__u32 room = FLOW_LINE_ENTRIES, untrusted = 0;
		__u64 old = 0;
		for (__u32 i = 0; i < FLOW_LINE_ENTRIES; i++) {
			__u64 e = READ_ONCE(line->entry[i]);
			if (!e) {
				room = i;
				old = 0;
				continue;
			}
			if (!((e ^ fingerprint) & FLOW_FINGERPRINT)) {
				if (FLOW_DIP(e) == dip)
					return 0;
				__sync_val_compare_and_swap(&line->entry[i], e, fresh);
				return 1;
			}
			__u32 idle = (now - FLOW_TIME(e)) & FLOW_TIME_MASK;
			/* Ahead of now: another CPU saw the next tick. */
			if (idle < FLOW_TIME_MASK - 1 &&
			    idle > (e & FLOW_TRUSTED ? idle_trusted : idle_untrusted)) {
				room = i;
				old = e;
				continue;
			}
			untrusted += !(e & FLOW_TRUSTED);
		}
		if (room < FLOW_LINE_ENTRIES && untrusted < FLOW_MAX_UNTRUSTED &&
		    __sync_val_compare_and_swap(&line->entry[room], old, fresh) == old) {
			count_event(s, EVENT_FLOW_INSERTED);
			return 1;
		}
	}
	count_event(s, EVENT_FLOW_FULL);
	return 0;
}

/* An older entry that a SYN's flow has in the line beside would bind it to
 * another DIP once the SYN's own has ended. */
CHECKED_ONCE int forget_beside(__u64 hash, __u32 dip)
{
	struct flow_line *line = flow_line(hash, 1);
	if (!line)
		return 0;
	for (__u32 i = 0; i < FLOW_LINE_ENTRIES; i++) {
		__u64 e = READ_ONCE(line->entry[i]);
		if (e && !((e ^ flow_fingerprint(hash)) & FLOW_FINGERPRINT) && FLOW_DIP(e) != dip)
			__sync_val_compare_and_swap(&line->entry[i], e, 0);
	}
	return 0;
}

/* For when the table was swapped, and a DIP of the old one removed, between the
 * look at the one and at the other. */
CHECKED_ONCE __u32 bucket_dip_again(__u64 hash, __u32 endpoint)
{
	struct run untraced = {};
	return bucket_dip(&untraced, endpoint_word(endpoint), hash);
}

struct choice {
	struct dip *dip;
	__u32 id;
	__u32 entropy; /* the flow's, for the outer header's fields that ECMP reads */
	int new_flow;
};

/* The connection table's choice where the endpoint has one, else the bucket's.
 * A flow that an ICMP error quotes is looked up and nothing more. */
INLINE enum exit choose_dip(struct run *run, const struct packet *p, __u32 endpoint,
			    struct choice *choice)
{
	__u64 word = endpoint_word(endpoint);
	__u64 hash = hash_packet(run, p);
	int table = WORD_IS_TABLE(word);
	int syn = p->flags & PACKET_SYN;
	int only_look = explain || p->flags & PACKET_QUOTED;

	TRACE(run, hash, hash);
	TRACE(run, endpoint, endpoint);
	choice->entropy = hash >> 32;
	choice->new_flow = !!syn;
	if (explain)
		choice->id = bucket_dip(run, word, hash);
	if (table && !syn) {
		__u64 e = find_flow(hash);
		if (e) {
			choice->id = FLOW_DIP(e);
			choice->dip = find_dip(choice->id, endpoint);
			if (choice->dip) {
				TRACE(run, chosen_by, CHOSEN_BY_CONNECTION_TABLE);
				TRACE(run, trusted, e >> 63);
				count_event(run->stats, EVENT_FLOW_HIT);
				/* Rarely, so that lines are mostly read; an entry may go
				 * a sixteenth of its idle time early. */
				if (!only_look &&
				    (!(e & FLOW_TRUSTED) ||
				     flow_age(e, run->now) > run->settings->idle_trusted / 16))
					touch_flow(hash, e, run->now);
				return EXIT_TX;
			}
			count_event(run->stats, EVENT_FLOW_STALE);
		}
	}
	choice->id = bucket_dip(run, word, hash);
	choice->dip = find_dip(choice->id, endpoint);
	if (!choice->dip) {
		choice->id = bucket_dip_again(hash, endpoint);
		choice->dip = find_dip(choice->id, endpoint);
	}
	if (!choice->dip)
		return EXIT_NO_DIP;
	TRACE(run, chosen_by, CHOSEN_BY_BUCKET);
	if (table && !only_look && insert_flow(hash, choice->id, run->now))
		choice->new_flow |= p->l4_proto == IPPROTO_UDP;
	if (table && !only_look && syn)
		forget_beside(hash, choice->id);
	return EXIT_TX;
}

INLINE void fragment_key(const struct packet *p, struct fragment_key *key)
{
	__builtin_memcpy(key->src, p->src, sizeof(key->src));
	__builtin_memcpy(key->dst, p->dst, sizeof(key->dst));
	key->id = p->fragment_id;
	/* IPv6's later fragments name the header behind the fragment header, which
	 * need not be the upper layer's; ids are for a pair of addresses (RFC 8200
	 * section 4.5). */
	key->protocol = is6(p) ? 0 : p->l4_proto;
}

INLINE enum exit follow_first_fragment(struct run *run, const struct packet *p,
				       struct choice *choice)
{
	struct fragment_key key;
	fragment_key(p, &key);
	struct fragment *first = bpf_map_lookup_elem(&fragments, &key);
	/* Signed: another CPU may have seen the next tick. */
	if (!first || (__s64)(run->now - first->time) > (__s64)run->settings->fragment_lifetime)
		return EXIT_UNKNOWN_FRAGMENT;
	choice->id = first->dip;
	choice->dip = find_dip(first->dip, first->endpoint);
	if (!choice->dip)
		return EXIT_UNKNOWN_FRAGMENT;
	choice->entropy = first->entropy;
	TRACE(run, endpoint, first->endpoint);
	TRACE(run, chosen_by, CHOSEN_BY_FRAGMENT_TABLE);
	return EXIT_TX;
}

RARE int remember_fragment(const struct fragment_key *key, const struct fragment *first)
{
	return bpf_map_update_elem(&fragments, key, first, BPF_ANY);
}

/* The next hop to dip, by the kernel's FIB: an enum exit. */
RARE int ask_fib(struct xdp_md *ctx, const struct dip *dip, struct next_hop *hop, __u64 now)
{
	struct bpf_fib_lookup fib = {.ifindex = ctx->ingress_ifindex};
	const struct settings *settings = get_settings();
	struct cpu_stats *s = get_stats();

	if (!settings || !s)
		return EXIT_INTERNAL;
	/* Read before the FIB: a change in between bumps it and ends this entry. */
	__u32 generation = READ_ONCE(settings->next_hop_generation);
	if (dip->outer6) {
		fib.family = 10; /* AF_INET6 */
		__builtin_memcpy(fib.ipv6_src, settings->source6, 16);
		__builtin_memcpy(fib.ipv6_dst, dip->tunnel, 16);
		if (is_zero_addr(settings->source6))
			return EXIT_NO_ROUTE;
	} else {
		fib.family = 2; /* AF_INET */
		fib.ipv4_src = settings->source4;
		fib.ipv4_dst = dip->tunnel[0];
		if (!fib.ipv4_src)
			return EXIT_NO_ROUTE;
	}
	hop->expires = 0;
	count_event(s, EVENT_NEXT_HOP_MISS);
	switch (bpf_fib_lookup(ctx, &fib, sizeof(fib), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
		break;
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		if (!explain) {
			struct wanted_neighbour *w =
			    bpf_ringbuf_reserve(&wanted_neighbours, sizeof(*w), 0);
			if (w) {
				__builtin_memcpy(w->addr, fib.ipv6_dst, sizeof(w->addr));
				w->ifindex = fib.ifindex;
				w->is6 = fib.family == 10;
				bpf_ringbuf_submit(w, 0);
			}
		}
		return EXIT_NO_NEIGHBOUR;
	case BPF_FIB_LKUP_RET_FWD_DISABLED:
		return EXIT_FORWARDING_DISABLED;
	default:
		return EXIT_NO_ROUTE;
	}
	struct vlan_link *link = bpf_map_lookup_elem(&vlan_links, &fib.ifindex);
	hop->ifindex = link ? link->ifindex : fib.ifindex;
	hop->vlan = link ? link->vlan : 0;
	hop->mtu = fib.mtu_result;
	__builtin_memcpy(hop->macs, fib.dmac, ETH_ALEN);
	__builtin_memcpy(hop->macs + ETH_ALEN, fib.smac, ETH_ALEN);
	__builtin_memcpy(hop->dst, dip->tunnel, sizeof(hop->dst));
	hop->generation = generation;
	hop->expires = now + NEXT_HOP_LIFETIME_NS;
	return EXIT_TX;
}

INLINE enum exit find_next_hop(struct run *run, const struct dip *dip, struct next_hop **out)
{
	__u32 slot = dip->slot;
	struct next_hop *hop = bpf_map_lookup_elem(&next_hops, &slot);
	if (!hop)
		return EXIT_INTERNAL;
	*out = hop;
	const __u64 *dst = (const __u64 *)dip->tunnel;
	if (!explain && run->now < hop->expires && hop->dst[0] == dst[0] && hop->dst[1] == dst[1] &&
	    hop->generation == READ_ONCE(run->settings->next_hop_generation))
		return EXIT_TX;
	return ask_fib(run->ctx, dip, hop, run->now);
}

/* Put the outer headers and the next hop's Ethernet header before the IP packet,
 * whose TTL goes down by one as a router's would (RFC 2003 section 3.1). Tags
 * that the packet came with end here. */
INLINE enum exit encapsulate(struct run *run, const struct packet *p, const struct dip *dip,
			     const struct next_hop *hop, __u32 entropy)
{
	__u32 overhead = dip->overhead;
	int tag = hop->vlan ? sizeof(struct vlan_header) : 0;
	void *data = (void *)(long)run->ctx->data;
	void *end = (void *)(long)run->ctx->data_end;
	void *inner = data + L3_OFFSET(p);
	__be16 id = 0;

	if (is6(p)) {
		struct ipv6hdr *ip = inner;
		if ((void *)(ip + 1) > end)
			return EXIT_INTERNAL;
		ip->hop_limit--;
	} else {
		struct iphdr *ip = inner;
		if ((void *)(ip + 1) > end)
			return EXIT_INTERNAL;
		ipv4_decrement_ttl(ip);
		/* RFC 6864: ids matter only where fragmentation may follow. */
		if (!(p->flags & PACKET_DF))
			id = ip->id ^ (__be16)entropy;
	}
	if (bpf_xdp_adjust_head(run->ctx,
				(int)(L3_OFFSET(p) - sizeof(struct ethhdr)) - tag - (int)overhead))
		return EXIT_NO_HEADROOM;

	data = (void *)(long)run->ctx->data;
	end = (void *)(long)run->ctx->data_end;
	struct ethhdr *eth = data;
	void *pos = eth + 1;
	__be16 proto = dip->outer6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP);
	if (pos > end)
		return EXIT_INTERNAL;
	/* In words: struct ethhdr is packed, and would be copied by bytes. */
	*(__u64 *)data = *(const __u64 *)hop->macs;
	*(__u32 *)(data + 8) = *(const __u32 *)(hop->macs + 8);
	*(__be16 *)(data + 12) = proto;
	if (tag) {
		struct vlan_header *vlan = pos;
		if ((void *)(vlan + 1) > end)
			return EXIT_INTERNAL;
		*(__be16 *)(data + 12) = bpf_htons(ETH_P_8021Q);
		vlan->tci = hop->vlan;
		vlan->proto = proto;
		pos = vlan + 1;
	}

	__u8 next = dip->gue ? IPPROTO_UDP : is6(p) ? IPPROTO_IPV6 : IPPROTO_IPIP;
	if (dip->outer6) {
		struct ipv6hdr *outer = pos;
		if ((void *)(outer + 1) > end)
			return EXIT_INTERNAL;
		write_outer_ipv6(outer, run->settings->source6, dip->tunnel, next,
				 p->l3_length + overhead - sizeof(*outer), p->tos, entropy);
		pos = outer + 1;
	} else {
		struct iphdr *outer = pos;
		if ((void *)(outer + 1) > end)
			return EXIT_INTERNAL;
		__be32 src = run->settings->source4;
		write_outer_ipv4(outer, src, dip->tunnel[0], next,
				 outer_ipv4_sum(src, dip->tunnel[0], next), p->l3_length + overhead,
				 p->tos, id, p->flags & PACKET_DF);
		pos = outer + 1;
	}
	if (dip->gue) {
		struct udphdr *udp = pos;
		if ((void *)(udp + 1) > end)
			return EXIT_INTERNAL;
		write_gue(udp, entropy, p->l3_length);
	}
	return EXIT_TX;
}

#include "answer.h"

INLINE enum exit forward(struct run *run, struct packet *p, struct choice *choice, __u16 *mtu)
{
	struct dip *dip = choice->dip;
	struct next_hop *hop;

	TRACE(run, dip, choice->id);
	enum exit exit = find_next_hop(run, dip, &hop);
	if (exit != EXIT_TX)
		return exit;
	TRACE(run, mtu, hop->mtu);
	if (p->l3_length + dip->overhead > hop->mtu) {
		*mtu = hop->mtu - dip->overhead;
		return p->flags & PACKET_DF ? EXIT_FRAGMENTATION_NEEDED : EXIT_OVERSIZE;
	}
	__u32 ifindex = hop->ifindex;
	exit = encapsulate(run, p, dip, hop, choice->entropy);
	if (exit != EXIT_TX)
		return exit;
	TRACE(run, ifindex, ifindex);
	if (!explain) {
		struct dip_counters *n = bpf_map_lookup_elem(&counters, &choice->id);
		if (!n)
			return EXIT_INTERNAL;
		n->packets++;
		n->bytes += p->l3_length;
		n->new_flows += choice->new_flow;
	}
	if (ifindex == run->ctx->ingress_ifindex)
		return EXIT_TX;
	bpf_redirect(ifindex, 0);
	return EXIT_REDIRECT;
}

INLINE int is_icmp_error(const struct packet *p)
{
	if (is6(p))
		return p->icmp_type >= ICMPV6_DEST_UNREACH && p->icmp_type <= ICMPV6_PARAMPROB;
	return p->icmp_type == ICMP_DEST_UNREACH || p->icmp_type == ICMP_TIME_EXCEEDED ||
	       p->icmp_type == ICMP_PARAMETERPROB;
}

/* An ICMP error goes where the flow goes whose packet, VIP to client, it
 * quotes: p's tuple becomes that flow's, client to VIP. */
INLINE enum exit take_quoted_tuple(struct packet *p, struct cursor *c)
{
	struct packet quoted = {.l3_offset = CURSOR_OFFSET(c)};
	enum parsed parsed = is6(p) ? parse_ipv6(c, &quoted) : parse_ipv4(c, &quoted);

	if (parsed == PARSED_OK)
		parsed = parse_ports(c, &quoted);
	if (parsed != PARSED_OK)
		return parsed == PARSED_TRUNCATED ? EXIT_TRUNCATED : EXIT_MALFORMED;
	if (!same_addr(quoted.src, p->dst) || quoted.flags & PACKET_LATER_FRAGMENT ||
	    (quoted.l4_proto != IPPROTO_TCP && quoted.l4_proto != IPPROTO_UDP))
		return EXIT_UNRELATED_ICMP;
	__builtin_memcpy(p->src, quoted.dst, sizeof(p->src));
	p->src_port = quoted.dst_port;
	p->dst_port = quoted.src_port;
	p->l4_proto = quoted.l4_proto;
	p->flags |= PACKET_QUOTED;
	return EXIT_TX;
}

/* Find the packet's flow, or answer or drop it. */
INLINE enum exit find_tuple(struct packet *p, struct cursor *c)
{
	if (p->l4_proto == IPPROTO_TCP || p->l4_proto == IPPROTO_UDP) {
		enum parsed parsed = p->l4_proto == IPPROTO_TCP ? parse_tcp(c, p) : parse_udp(c, p);
		if (parsed != PARSED_OK)
			return parsed == PARSED_TRUNCATED ? EXIT_TRUNCATED : EXIT_MALFORMED;
		return p->ttl > 1 ? EXIT_TX : EXIT_TIME_EXCEEDED;
	}
	if (p->l4_proto == (is6(p) ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		if (parse_icmp(c, p) != PARSED_OK)
			return EXIT_TRUNCATED;
		if (p->icmp_type == (is6(p) ? ICMPV6_ECHO_REQUEST : ICMP_ECHO) &&
		    !(p->flags & PACKET_FIRST_FRAGMENT))
			return EXIT_ECHO_REPLY;
		if (!is_icmp_error(p) || p->flags & PACKET_FIRST_FRAGMENT)
			return EXIT_UNSUPPORTED_ICMP;
		return p->ttl > 1 ? take_quoted_tuple(p, c) : EXIT_ANSWER_FORBIDDEN;
	}
	if (p->l4_proto == IPPROTO_IPIP || p->l4_proto == IPPROTO_IPV6)
		return EXIT_NESTED_TUNNEL;
	return EXIT_UNSUPPORTED_PROTOCOL;
}

/* A packet for a VIP. */
INLINE enum exit to_vip(struct run *run, struct packet *p, const struct vip *vip, struct cursor *c,
			__u16 *mtu)
{
	struct choice choice = {};
	enum exit exit;

	if (p->flags & PACKET_LATER_FRAGMENT) {
		exit = p->ttl > 1 ? follow_first_fragment(run, p, &choice) : EXIT_ANSWER_FORBIDDEN;
	} else {
		exit = find_tuple(p, c);
		if (exit != EXIT_TX)
			return exit;
		TRACE(run, quoted, !!(p->flags & PACKET_QUOTED));
		__u32 endpoint = find_endpoint(vip, p);
		if (!endpoint)
			return p->flags & PACKET_QUOTED ? EXIT_UNRELATED_ICMP : EXIT_NO_ENDPOINT;
		exit = choose_dip(run, p, endpoint, &choice);
		if (exit == EXIT_TX && p->flags & PACKET_FIRST_FRAGMENT && !explain) {
			struct fragment_key key;
			struct fragment first = {
			    .dip = choice.id,
			    .endpoint = endpoint,
			    .time = run->now,
			    .entropy = choice.entropy,
			};
			fragment_key(p, &key);
			remember_fragment(&key, &first);
		}
	}
	if (exit != EXIT_TX)
		return exit;
	return forward(run, p, &choice, mtu);
}

/* A tunnel to the mux's own source has nothing to end at here: a loop, or a forger. */
INLINE int tunnels_to_mux(struct run *run, const struct packet *p, struct cursor *c)
{
	if (is6(p) ? !same_addr(p->dst, run->settings->source6) || is_zero_addr(p->dst)
		   : p->dst[0] != run->settings->source4 || !p->dst[0])
		return 0;
	if (p->l4_proto == IPPROTO_IPIP || p->l4_proto == IPPROTO_IPV6)
		return 1;
	struct packet ports;
	return p->l4_proto == IPPROTO_UDP && !(p->flags & PACKET_LATER_FRAGMENT) &&
	       parse_ports(c, &ports) == PARSED_OK && ports.dst_port == bpf_htons(GUE_PORT);
}

INLINE enum exit run_packet(struct run *run)
{
	struct packet p = {};
	struct cursor c = cursor_xdp(run->ctx);
	enum parsed parsed = parse_ethernet(&c, &p);

	if (parsed == PARSED_OK)
		parsed =
		    p.l3_proto == bpf_htons(ETH_P_IP) ? parse_ipv4(&c, &p) : parse_ipv6(&c, &p);
	/* Headers are read in the linear part. Asking for the length of the rest,
	 * which only a frame over a page may have, is a call. */
	if (parsed == PARSED_OK && !holds_l3(&c, &p) &&
	    p.l3_offset + p.l3_length > bpf_xdp_get_buff_len(run->ctx))
		parsed = PARSED_TRUNCATED;
	if (parsed != PARSED_OK)
		return parsed == PARSED_NOT_IP	    ? EXIT_NOT_IP
		       : parsed == PARSED_TRUNCATED ? EXIT_TRUNCATED
						    : EXIT_MALFORMED;
	struct vip vip = find_vip(&p);
	if (!vip.flags)
		return tunnels_to_mux(run, &p, &c) ? EXIT_TUNNEL_TO_MUX : EXIT_NO_VIP;
	TRACE(run, vip, vip.slot + 1);
	run->now = bpf_jiffies64() * tick_ns;

	__u16 mtu = 0;
	enum exit exit = to_vip(run, &p, &vip, &c, &mtu);
	if (exit != EXIT_ECHO_REPLY && exit != EXIT_TIME_EXCEEDED &&
	    exit != EXIT_FRAGMENTATION_NEEDED && exit != EXIT_OVERSIZE)
		return exit;
	struct answer a = {
	    .exit = exit,
	    .l3_offset = p.l3_offset,
	    .l4_offset = p.l4_offset,
	    .l3_length = p.l3_length,
	    .icmp_type = p.icmp_type,
	    .icmp_code = p.icmp_code,
	    .l4_proto = p.l4_proto,
	    .vlan_tags = p.vlan_tags,
	    .flags = p.flags,
	    .mtu = mtu,
	};
	if (exit == EXIT_ECHO_REPLY)
		return answer_echo(run->ctx, &a);
	return answer_error(run->ctx, &a, run->now);
}

INLINE int verdict(enum exit exit)
{
	switch (exit) {
	case EXIT_TX:
	case EXIT_ECHO_REPLY:
	case EXIT_FRAGMENTATION_NEEDED:
	case EXIT_OVERSIZE:
	case EXIT_TIME_EXCEEDED:
		return XDP_TX;
	case EXIT_REDIRECT:
		return XDP_REDIRECT;
	case EXIT_NO_VIP:
	case EXIT_NOT_IP:
		return XDP_PASS;
	default:
		return XDP_DROP;
	}
}

SEC("xdp.frags")
int mux(struct xdp_md *ctx)
{
	struct run run = {
	    .ctx = ctx,
	    .settings = get_settings(),
	    .stats = get_stats(),
	};
	if (!run.settings || !run.stats)
		return XDP_ABORTED;
	if (explain) {
		__u32 zero = 0;
		run.trace = bpf_map_lookup_elem(&traces, &zero);
	}

	enum exit exit = run_packet(&run);
	if (explain)
		TRACE(&run, exit, exit);
	else if (exit < EXIT_COUNT)
		run.stats->exits[exit]++;
	return verdict(exit);
}

struct clock {
	__u64 now; /* ns, by the clock that connection entries are dated by */
};

SEC("syscall")
int read_clock(struct clock *clock)
{
	clock->now = bpf_jiffies64() * tick_ns;
	return 0;
}

/* Types that no map's definition names, for the loader. */
const struct bucket_line *unused_bucket_line __attribute__((unused));
const struct wanted_neighbour *unused_wanted_neighbour __attribute__((unused));
const enum exit *unused_exit __attribute__((unused));
const enum event *unused_event __attribute__((unused));
const enum chosen_by *unused_chosen_by __attribute__((unused));

char _license[] SEC("license") = "Dual BSD/GPL";
