package reach

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/encap"
	"github.com/quartet-lb/quartet/lab/fabric"
	"github.com/quartet-lb/quartet/lb"
)

// host answers probes as package encap reads them.
//
//	mux 10.97.0.1, 2001:db8:97::1 ── host 10.97.0.2, 2001:db8:97::2, and ::3 and .3
type host struct {
	t      *testing.T
	packet int // socket
	icmp   map[bool]net.PacketConn

	mu    sync.Mutex
	how   func(t lb.Tunnel, reply []byte) (netip.Addr, []byte) // guarded by mu: answer and its source
	asked map[lb.Tunnel]int                                    // guarded by mu
}

func (h *host) serve(stop <-chan struct{}) {
	buffer := make([]byte, 2048)
	for {
		select {
		case <-stop:
			return
		default:
		}
		n, from, err := unix.Recvfrom(h.packet, buffer, 0)
		if link, ok := from.(*unix.SockaddrLinklayer); err != nil || !ok || link.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		inner, tunnel, mux, err := encap.Decapsulate(buffer[:n])
		if err != nil {
			continue // neighbour discovery and the like
		}
		at, source, destination := 20, netip.AddrFrom4([4]byte(inner[12:])), netip.AddrFrom4([4]byte(inner[16:]))
		if mux.Is6() {
			at, source, destination = 40, netip.AddrFrom16([16]byte(inner[8:])), netip.AddrFrom16([16]byte(inner[24:]))
		}
		echo := inner[at:]
		if source != mux || destination != tunnel.Dst || len(echo) != echoSize || echo[0] != echo4 && echo[0] != echo6 {
			h.t.Errorf("probe of %s from %s: %x", tunnel, mux, inner)
			continue
		}
		if mux.Is6() {
			addresses := append(source.AsSlice(), destination.AsSlice()...)
			if checksum(addresses, []byte{0, echoSize, 0, byte(lb.ICMPv6)}, echo) != 0 {
				h.t.Errorf("probe of %s: wrong checksum: %x", tunnel, inner)
			}
		} else if checksum(echo) != 0 || checksum(inner[:20]) != 0 {
			h.t.Errorf("probe of %s: wrong checksum: %x", tunnel, inner)
		}
		reply := slices.Clone(echo)
		reply[0] = map[byte]byte{echo4: echoReply4, echo6: echoReply6}[echo[0]]
		h.mu.Lock()
		h.asked[tunnel]++
		answerFrom, reply := h.how(tunnel, reply)
		h.mu.Unlock()
		if reply == nil {
			continue
		}
		reply[2], reply[3] = 0, 0
		if mux.Is4() { // the kernel writes ICMPv6's
			binary.BigEndian.PutUint16(reply[2:], checksum(reply))
		}
		h.send(answerFrom, mux, reply)
	}
}

func (h *host) send(from, to netip.Addr, message []byte) {
	conn := h.icmp[from.Is6()].(*net.IPConn)
	var control []byte
	if from.Is6() {
		control = make([]byte, unix.CmsgSpace(unix.SizeofInet6Pktinfo))
		binary.NativeEndian.PutUint64(control, uint64(unix.CmsgLen(unix.SizeofInet6Pktinfo)))
		binary.NativeEndian.PutUint32(control[8:], unix.IPPROTO_IPV6)
		binary.NativeEndian.PutUint32(control[12:], unix.IPV6_PKTINFO)
		copy(control[unix.CmsgLen(0):], from.AsSlice())
	} else {
		control = make([]byte, unix.CmsgSpace(unix.SizeofInet4Pktinfo))
		binary.NativeEndian.PutUint64(control, uint64(unix.CmsgLen(unix.SizeofInet4Pktinfo)))
		binary.NativeEndian.PutUint32(control[8:], unix.IPPROTO_IP)
		binary.NativeEndian.PutUint32(control[12:], unix.IP_PKTINFO)
		copy(control[unix.CmsgLen(0)+4:], from.AsSlice())
	}
	if _, _, err := conn.WriteMsgIP(message, control, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		h.t.Errorf("answer from %s: %v", from, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestProbesOnTheWire(t *testing.T) {
	node := func(name string) *fabric.Node {
		n, err := fabric.Create(fmt.Sprintf("qreach%d-%s", os.Getpid(), name))
		must(t, err)
		t.Cleanup(func() {
			n.Close()
			must(t, fabric.Delete(n.Name))
		})
		return n
	}
	mux, far := node("mux"), node("host")
	must(t, fabric.Connect(mux, "eth0", far, "eth0", 1500))
	for _, a := range []string{"10.97.0.1/24", "2001:db8:97::1/64"} {
		must(t, mux.AddAddress("eth0", netip.MustParsePrefix(a)))
	}
	for _, a := range []string{"10.97.0.2/24", "10.97.0.3/24", "2001:db8:97::2/64", "2001:db8:97::3/64"} {
		must(t, far.AddAddress("eth0", netip.MustParsePrefix(a)))
	}

	truthful := func(t lb.Tunnel, reply []byte) (netip.Addr, []byte) { return t.Dst, reply }
	h := &host{t: t, icmp: map[bool]net.PacketConn{}, how: truthful, asked: map[lb.Tunnel]int{}}
	must(t, far.Do(func() (err error) {
		all := uint16(unix.ETH_P_ALL)
		if h.packet, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(all<<8|all>>8)); err != nil {
			return err
		}
		if err := unix.SetsockoptTimeval(h.packet, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}); err != nil {
			return err
		}
		if h.icmp[false], err = net.ListenPacket("ip4:icmp", "0.0.0.0"); err != nil {
			return err
		}
		h.icmp[true], err = net.ListenPacket("ip6:ipv6-icmp", "::")
		return err
	}))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() { defer close(stopped); h.serve(stop) }()
	t.Cleanup(func() {
		close(stop)
		<-stopped
		_ = unix.Close(h.packet)
		_ = h.icmp[false].Close()
		_ = h.icmp[true].Close()
	})

	var p *Prober
	must(t, mux.Do(func() (err error) {
		p, err = Open(Config{
			Source4: netip.MustParseAddr("10.97.0.1"), Source6: netip.MustParseAddr("2001:db8:97::1"),
			Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
		})
		return err
	}))
	var wait sync.WaitGroup
	wait.Go(func() { p.Run(t.Context()) })
	t.Cleanup(wait.Wait)
	var tunnels []lb.Tunnel
	for _, a := range []string{"10.97.0.2", "10.97.0.3", "2001:db8:97::2", "2001:db8:97::3"} {
		for _, e := range []lb.Encapsulation{lb.EncapIPIP, lb.EncapGUE} {
			tunnels = append(tunnels, lb.Tunnel{Dst: netip.MustParseAddr(a), Encap: e})
		}
	}
	p.Update(tunnels, nil)

	// until waits for what is unreachable, after n more probes of each tunnel.
	until := func(what string, n int, want []lb.Tunnel) {
		t.Helper()
		h.mu.Lock()
		clear(h.asked)
		h.mu.Unlock()
		enough := func() bool {
			h.mu.Lock()
			defer h.mu.Unlock()
			return !slices.ContainsFunc(tunnels, func(t lb.Tunnel) bool { return h.asked[t] < n })
		}
		for deadline := time.Now().Add(30 * time.Second); !enough() || !slices.Equal(p.Unreachable(), want); {
			if time.Now().After(deadline) {
				t.Fatalf("%s: unreachable are %v, want %v; probes seen: %v", what, p.Unreachable(), want, h.asked)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	answer := func(how func(lb.Tunnel, []byte) (netip.Addr, []byte)) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.how = how
	}
	until("all answered", misses+1, nil)
	answer(func(x lb.Tunnel, reply []byte) (netip.Addr, []byte) {
		if x.Encap == lb.EncapGUE {
			return x.Dst, nil
		}
		return x.Dst, reply
	})
	until("GUE filtered", misses+1, []lb.Tunnel{tunnels[1], tunnels[3], tunnels[5], tunnels[7]})
	answer(func(x lb.Tunnel, reply []byte) (netip.Addr, []byte) {
		switch x {
		case tunnels[0], tunnels[4]: // by somebody else
			return map[bool]netip.Addr{false: tunnels[2].Dst, true: tunnels[6].Dst}[x.Dst.Is6()], reply
		case tunnels[1], tunnels[5]: // by somebody who has not seen the probe
			reply[icmpHeader] ^= 1
		}
		return x.Dst, reply
	})
	until("forged", misses+1, []lb.Tunnel{tunnels[0], tunnels[1], tunnels[4], tunnels[5]})
	answer(truthful)
	until("all answered again", 1, nil)
}

func TestOpenSaysWhatIsMissing(t *testing.T) {
	source := netip.MustParseAddr("192.0.2.77") // nobody's here
	_, err := Open(Config{Source4: source, Log: slog.New(slog.DiscardHandler)})
	const want = "open sockets to probe tunnels from 192.0.2.77: "
	if err == nil || err.Error()[:len(want)] != want {
		t.Errorf("error %v; want %q and the reason", err, want)
	}
}
