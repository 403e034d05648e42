// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// clang-format off
//go:build ignore
// clang-format on

/*
 * The driver is what BPF_PROG_TEST_RUN repeats. The kernel hands it the same buffer each time, so
 * it first takes off what the last run's target put on, then writes the next flow's headers and
 * tail-calls the target. A program may only tail-call one that is for frames of several parts
 * (xdp.frags) as it is itself.
 */
#include <linux/bpf.h>
#include <bpf_helpers.h>
#include <bpf_endian.h>

#define ETH_LEN	     14
#define FRAME4_LEN   64 /* Ethernet, IPv4, TCP or UDP, zeros */
#define FRAME6_LEN   84
#define PROTO_TCP    6
#define PROTO_UDP    17
#define BLOCK_SHIFT  10 /* packets in a block: 1024 */
#define BLOCKS	     8192
#define TARGET_SLOTS 32

/* Which packets to present to which target. Addresses and ports are in network byte order. */
struct driver_config {
	__u64 dst6[2];
	__u64 src6_prefix;
	__u64 macs;	/* destination, first two bytes of the source */
	__u32 macs_end; /* rest of the source */
	__u32 dst4;
	__u16 dst_port;
	__u8 protocol;
	__u8 ipv6;
	__u8 tcp_flags;
	__u8 target;	/* slot in targets */
	__u8 flow_bits; /* the flow set has 2^flow_bits flows */
	__u8 pad;
	__u32 first_flow; /* number of the set's first flow */
	__u32 growth;	  /* bytes that the target is to put on each packet */
};

/* What happened; the loader zeroes it before each batch. */
struct driver_progress {
	__u64 packets;	/* packets presented */
	__u64 as_grown; /* packets that the next run found grown by config.growth */
	__u64 failed;	/* packets that could not be presented */
};

struct driver_config config;
struct driver_progress progress;
__u32 sequence;	      /* place in the order of flows; goes on from batch to batch */
__u64 stamps[BLOCKS]; /* monotonic ns at each 1024th packet of the batch */

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, TARGET_SLOTS);
	__type(key, __u32);
	__type(value, __u32);
} targets SEC(".maps");

/*
 * next_flow walks through the whole flow set in an order that prefetchers can't follow: odd
 * multiplications and right shifts are bijections of flow_bits-bit numbers.
 */
static __always_inline __u32 next_flow(void)
{
	__u32 mask = (1u << (config.flow_bits & 31)) - 1;
	__u32 x = sequence++ & mask;

	x = (x * 0x9E3779B1u) & mask;
	x ^= x >> (config.flow_bits / 2 + 1);
	x = (x * 0x85EBCA6Bu) & mask;
	x ^= x >> (config.flow_bits / 2 + 1);
	return config.first_flow + x;
}

static __always_inline __u16 fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

static __always_inline __u64 words(__u64 x)
{
	return (x & 0xffffffff) + (x >> 32);
}

/*
 * Fields that a program would load together are stored together, for a load that spans two recent
 * stores waits for both, which a packet from a NIC never makes it do.
 */
#define PUT(type, at, value) (*(type *)(data + (at)) = (value))

static __always_inline void put_ethernet(void *data, __u16 type)
{
	PUT(__u64, 0, config.macs);
	PUT(__u32, 8, config.macs_end);
	PUT(__u16, 12, type);
}

/* Writes the transport header; sum is the pseudo-header's without the length. */
static __always_inline void put_l4(void *data, __u32 at, __u32 len, __u32 ports, __u64 sum)
{
	__u64 first = bpf_htonl(0x51554152) | ((__u64)bpf_htonl(0x54455420) << 32);
	__u32 offset_flags = bpf_htonl(0x50000400 | (__u32)config.tcp_flags << 16);

	sum += ports + (__u64)bpf_htons(len);
	PUT(__u32, at, ports);
	if (config.protocol == PROTO_UDP) {
		__u16 check = fold(sum + bpf_htons(len));

		PUT(__u32, at + 4, bpf_htons(len) | (__u32)(check ? check : 0xffff) << 16);
		PUT(__u64, at + 8, 0);
		PUT(__u32, at + 16, 0);
		return;
	}
	if (config.tcp_flags == 2) /* a SYN acknowledges nothing */
		first &= 0xffffffff;
	sum += words(first) + offset_flags;
	PUT(__u64, at + 4, first);
	PUT(__u64, at + 12, offset_flags | (__u64)fold(sum) << 32);
}

static __always_inline void put_ipv4(void *data, __u32 flow, __u32 ports)
{
	__u32 src = bpf_htonl(0x0a000000 | (flow >> 3 & 0xffffff));
	__u64 addresses = src | (__u64)config.dst4 << 32;
	__u32 len = FRAME4_LEN - ETH_LEN;
	__u64 first = bpf_htons(len) | (__u64)(bpf_htons(0x4000)) << 32 | 64ull << 48 |
		      (__u64)config.protocol << 56;
	__u64 sum = words(addresses);

	put_ethernet(data, bpf_htons(0x0800));
	PUT(__u16, 14, 0x0045);
	PUT(__u64, 16, first);
	PUT(__u16, 24, fold(sum + 0x0045 + words(first)));
	PUT(__u64, 26, addresses);
	put_l4(data, 34, len - 20, ports, sum + bpf_htons(config.protocol));
}

static __always_inline void put_ipv6(void *data, __u32 flow, __u32 ports)
{
	__u32 len = FRAME6_LEN - ETH_LEN - 40;
	__u64 src_low = (__u64)bpf_htonl(flow >> 3) << 32;
	__u64 sum = words(config.src6_prefix) + words(src_low) + words(config.dst6[0]) +
		    words(config.dst6[1]);

	put_ethernet(data, bpf_htons(0x86dd));
	PUT(__u64, 14,
	    0x60 | (__u64)bpf_htons(len) << 32 | (__u64)config.protocol << 48 | 64ull << 56);
	PUT(__u64, 22, config.src6_prefix);
	PUT(__u64, 30, src_low);
	PUT(__u64, 38, config.dst6[0]);
	PUT(__u64, 46, config.dst6[1]);
	put_l4(data, 54, len, ports, sum + bpf_htons(config.protocol));
}

SEC("xdp.frags")
int driver(struct xdp_md *ctx)
{
	__u32 len = config.ipv6 ? FRAME6_LEN : FRAME4_LEN;
	__s32 growth = (__s32)(ctx->data_end - ctx->data) - (__s32)len;
	__u64 n = progress.packets;
	__u32 flow, ports;
	void *data;

	if (!(n & ((1 << BLOCK_SHIFT) - 1)))
		stamps[(n >> BLOCK_SHIFT) & (BLOCKS - 1)] = bpf_ktime_get_ns();
	if (n && growth == config.growth)
		progress.as_grown++;
	if (growth && bpf_xdp_adjust_head(ctx, growth))
		goto failed;

	data = (void *)(long)ctx->data;
	flow = next_flow();
	ports = bpf_htons(16384 + (flow & 7) * 4099) | (__u32)config.dst_port << 16;
	if (config.ipv6) {
		if (data + FRAME6_LEN > (void *)(long)ctx->data_end)
			goto failed;
		put_ipv6(data, flow, ports);
	} else {
		if (data + FRAME4_LEN > (void *)(long)ctx->data_end)
			goto failed;
		put_ipv4(data, flow, ports);
	}
	progress.packets = n + 1;
	bpf_tail_call(ctx, &targets, config.target);
failed:
	progress.failed++;
	return XDP_ABORTED;
}

/* The stub: what is measured with it as the target is the driver's own cost. */
SEC("xdp.frags")
int stub(struct xdp_md *ctx)
{
	return XDP_DROP;
}

/* A stub that also grows the packet, to show what growing and taking it off again cost. */
SEC("xdp.frags")
int stub_grow(struct xdp_md *ctx)
{
	if (bpf_xdp_adjust_head(ctx, -(int)config.growth))
		return XDP_ABORTED;
	return XDP_DROP;
}

/* The far end of the link in live mode: counts what arrives. */
__u64 arrived;

SEC("xdp")
int sink(struct xdp_md *ctx)
{
	__sync_fetch_and_add(&arrived, 1);
	return XDP_DROP;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
