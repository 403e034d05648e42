package datapath

import (
	"net/netip"
	"testing"
)

// echoPacket is an echo request, or with answer a reply, with 16 bytes of data.
func echoPacket(src, dst netip.Addr, answer bool) ip {
	typ := map[bool]uint8{false: 8, true: 0}[answer]
	if src.Is6() {
		typ = map[bool]uint8{false: 128, true: 129}[answer]
	}
	p := icmpError(src, dst, typ, 0, 0x00010002, []byte("secret, probe ID"))
	p.ttl = map[bool]uint8{false: 63, true: 64}[answer]
	return p
}

// back is a frame whose MAC addresses are swapped.
func back(f []byte) []byte {
	out := append(append([]byte{}, f[6:12]...), f[:6]...)
	return append(out, f[12:]...)
}

// A mux's probe of a tunnel is answered to the mux, outside the tunnel; of what
// looks almost like one, nothing is (Ananta section 3.4.3).
func TestProbe(t *testing.T) {
	for _, f := range families {
		vip, other := addrPort(f.vip).Addr(), f.tunnel.Next()
		for format, encap := range tunnelFormats {
			t.Run(f.name+"/"+format, func(t *testing.T) {
				d := loaded(t, loadConfig{}, f.rules()...)
				in := func(inner ip, exit string) step {
					return step{"in", frame(encap(f.mux, f.tunnel, inner.bytes()).bytes()), exit, nil}
				}
				answered := in(echoPacket(f.mux, f.tunnel, false), "in_probe_answered")
				answered.out = back(frame(echoPacket(f.tunnel, f.mux, true).bytes()))
				tagged := step{"in", frame(encap(f.mux, f.tunnel, echoPacket(f.mux, f.tunnel, false).bytes()).bytes(), 100, 200),
					"in_probe_answered", back(frame(echoPacket(f.tunnel, f.mux, true).bytes(), 100, 200))}

				stranger := f.mux.Next()
				code := echoPacket(f.mux, f.tunnel, false)
				code.payload[1] = 1
				fragment := echoPacket(f.mux, f.tunnel, false)
				fragment.id = 7
				short := echoPacket(f.mux, f.tunnel, false)
				short.payload = short.payload[:7]
				runAll(t, d, answered, tagged,
					// Who would be answered is not who asks.
					in(echoPacket(stranger, f.tunnel, false), "in_icmp_unsupported"),
					in(echoPacket(f.mux, other, false), "in_icmp_unsupported"),
					in(echoPacket(f.mux, f.tunnel, true), "in_icmp_unsupported"),
					in(code, "in_icmp_unsupported"),
					in(fragment.fragments(16)[0], "in_icmp_unsupported"),
					in(short, "in_truncated"),
					// A tunnel of somebody else's.
					step{"in", frame(encap(f.mux, other, echoPacket(f.mux, other, false).bytes()).bytes()), "in_not_ours", nil},
					// Not in a tunnel.
					step{"in", frame(echoPacket(f.mux, f.tunnel, false).bytes()), "in_not_tunnel", nil},
				)
				if f.mux.Is4() == vip.Is4() {
					// A client's ping is the mux's to answer.
					runAll(t, d, in(echoPacket(addrPort(f.client).Addr(), vip, false), "in_icmp_unsupported"))
				}
				if len(meterMap(t, d)) != 0 {
					t.Errorf("probes are metered: %v", meterMap(t, d))
				}
			})
		}
	}
}
