/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What encap.h does not write and a host agent reads all the same: VXLAN, GUE variant 0, and which
 * ICMP messages quote a packet. WIRE.md in package encap specifies the formats. */
#ifndef QUARTET_DECAP_H
#define QUARTET_DECAP_H

#include <parse.h>

#define VXLAN_PORT    4789
#define VXLAN_HAS_VNI 0x08
#define GUE_HEADER    4 /* bytes of variant 0 without optional fields */

/* A VXLAN header (RFC 7348) and the Ethernet header behind it. */
struct vxlan_ethernet {
	__u8 flags;
	__u8 reserved[3];
	__u8 vni[3];
	__u8 reserved2;
	__u8 macs[12];
	__be16 proto;
};

/* True for the ICMP and ICMPv6 messages that quote the packet they are about: destination
 * unreachable, time exceeded, parameter problem; and for ICMPv6 packet too big. */
INLINE int icmp_error(const struct packet *p)
{
	if (p->flags & PACKET_VERSION6)
		return p->icmp_type >= 1 && p->icmp_type <= 4;
	return p->icmp_type == 3 || p->icmp_type == 11 || p->icmp_type == 12;
}

#endif
