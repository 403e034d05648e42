// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// clang-format off
//go:build ignore
// clang-format on

/* Runs bpf/flowhash.h on the flow in its context, for the test vectors. */
typedef unsigned char __u8;
typedef unsigned short __be16;
typedef unsigned int __be32;
typedef unsigned long long __u64;
#define SEC(name)	__attribute__((section(name), used))
#define __always_inline inline __attribute__((always_inline))

#include "flowhash.h"

struct hash_call {
	struct flow_seed seed;
	__be32 saddr[4];
	__be32 daddr[4];
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 v6;
	__u8 pad[2];
	__u64 hash;
};

SEC("syscall")
int hash(struct hash_call *call)
{
	if (call->v6)
		call->hash = flowhash_v6(&call->seed, call->saddr, call->daddr, call->sport,
					 call->dport, call->proto);
	else
		call->hash = flowhash_v4(&call->seed, call->saddr[0], call->daddr[0], call->sport,
					 call->dport, call->proto);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
