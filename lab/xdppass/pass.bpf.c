// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
// clang-format off
//go:build ignore
// clang-format on

#include <linux/bpf.h>
#include <bpf_helpers.h>

/* A veth end takes frames that its peer sent by XDP only while it has an XDP
 * program itself. */
SEC("xdp")
int pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
