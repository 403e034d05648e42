// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// clang-format off
//go:build ignore
// clang-format on

#include <linux/bpf.h>
#include <bpf_helpers.h>

/* A veth end takes frames that its peer sent by XDP only while it has an XDP
 * program itself, and takes an MTU above a page only if that is for frames of
 * several parts. */
SEC("xdp.frags")
int pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

/* The kernel marks what a TCP socket sends with a hash of the socket's choice, and
 * every router that it reaches in this kernel would choose its ECMP next hop by
 * that one number instead of by one of its own. A cable does not carry it. */
SEC("tc")
int forget_hash(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	return -1; /* TC_ACT_UNSPEC: as if there were no program */
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
