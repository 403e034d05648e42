package datapath

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/lb"
)

// serve answers on the namespaces' port 8080 until the test ends. TCP: reads
// until the client has sent its all, answers with the sum of that and sends as
// much back as it was told to. UDP: echo.
func (l *testLab) serve(t *testing.T, ns string, dips ...string) {
	t.Helper()
	for _, dip := range dips {
		at := netip.AddrPortFrom(addr(dip), 8080)
		var tcp *net.TCPListener
		var udp *net.UDPConn
		l.in(t, ns, func() (err error) {
			if tcp, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at)); err != nil {
				return err
			}
			udp, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
			return err
		})
		t.Cleanup(func() { _ = tcp.Close(); _ = udp.Close() })
		go func() {
			for {
				c, err := tcp.Accept()
				if err != nil {
					return
				}
				go answer(c)
			}
		}()
		go func() {
			buf := make([]byte, 65536)
			for {
				n, from, err := udp.ReadFromUDPAddrPort(buf)
				if err != nil {
					return
				}
				_, _ = udp.WriteToUDPAddrPort(buf[:n], from)
			}
		}()
	}
}

// answer reads "size seed", size bytes, and answers with their sum, the
// client's address and size bytes more.
func answer(c net.Conn) {
	defer c.Close()
	for {
		var size int
		if _, err := fmt.Fscanf(c, "%d\n", &size); err != nil {
			return
		}
		h := sha256.New()
		if _, err := io.CopyN(h, c, int64(size)); err != nil {
			return
		}
		if _, err := fmt.Fprintf(c, "%s %x\n", c.RemoteAddr(), h.Sum(nil)); err != nil {
			return
		}
		if _, err := c.Write(payload(size)); err != nil {
			return
		}
	}
}

func payload(size int) []byte {
	b := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{byte(size)}).Read(b)
	return b
}

// dial connects from the client.
func (l *testLab) dial(t *testing.T, network, vip string) net.Conn {
	t.Helper()
	var c net.Conn
	l.in(t, "client", func() (err error) {
		c, err = net.DialTimeout(network, netip.AddrPortFrom(addr(vip), 80).String(), 20*time.Second)
		return err
	})
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(60 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

// transfer sends size bytes and gets as many, both checked.
func transfer(c net.Conn, size int) error {
	want := payload(size)
	if _, err := c.Write(append(fmt.Appendf(nil, "%d\n", size), want...)); err != nil {
		return err
	}
	var from string
	var got []byte
	if _, err := fmt.Fscanf(c, "%s %x\n", &from, &got); err != nil {
		return err
	}
	if h := sha256.Sum256(want); !bytes.Equal(got, h[:]) {
		return fmt.Errorf("upload of %d bytes: server saw other bytes", size)
	}
	if from != c.LocalAddr().String() {
		return fmt.Errorf("server saw client %s, want %s", from, c.LocalAddr())
	}
	back := make([]byte, size)
	if _, err := io.ReadFull(c, back); err != nil {
		return err
	}
	if !bytes.Equal(back, want) {
		return fmt.Errorf("download of %d bytes: client saw other bytes", size)
	}
	return nil
}

// echo sends a datagram and gets it back.
func echo(c net.Conn, size int) error {
	want := payload(size)
	if _, err := c.Write(want); err != nil {
		return err
	}
	back := make([]byte, size+1)
	n, err := c.Read(back)
	if err != nil {
		return err
	}
	if !bytes.Equal(back[:n], want) {
		return fmt.Errorf("echo of %d bytes: got %d others", size, n)
	}
	return nil
}

var vips = map[string]string{
	"host v4": hostVIP4, "host v6": hostVIP6, "vm v4": vmVIP4, "vm v6": vmVIP6,
}

func TestEndToEnd(t *testing.T) {
	l, d := ready(t, Config{})
	for format, encapsulate := range map[string]tunnelFormat{
		"ipip": muxFormat(lb.EncapIPIP), "gue": muxFormat(lb.EncapGUE),
		"gue0": builtFormat("gue0"), "vxlan": builtFormat("vxlan"),
	} {
		for _, outer6 := range []bool{false, true} {
			l.setTunnel(encapsulate, outer6)
			for name, vip := range vips {
				t.Run(fmt.Sprintf("%s outer6=%t %s", format, outer6, name), func(t *testing.T) {
					before := exits(t, d)
					c := l.dial(t, "tcp", vip)
					for _, size := range []int{1, 1000, 300_000} {
						if err := transfer(c, size); err != nil {
							t.Errorf("TCP: %v", err)
						}
					}
					u := l.dial(t, "udp", vip)
					for _, size := range []int{0, 1, 1200} {
						if err := echo(u, size); err != nil {
							t.Errorf("UDP: %v", err)
						}
					}
					after := exits(t, d)
					for _, label := range []string{"in_delivered", "out_translated"} {
						if after[label] == before[label] {
							t.Errorf("%s did not move", label)
						}
					}
					for label := range after {
						if after[label] != before[label] && label != "in_delivered" && label != "out_translated" &&
							label != "in_not_tunnel" && label != "out_not_ours" {
							t.Errorf("%s moved by %d", label, after[label]-before[label])
						}
					}
				})
			}
		}
	}

	// Meters against what the mux sent. Its last packets may be on their way.
	var in, out Meter
	eventually(t, "as much metered in as the mux sent", func() bool {
		in, out = Meter{}, Meter{}
		for _, m := range meterMap(t, d) {
			sum := &out
			if m.Inbound {
				sum = &in
			}
			sum.Packets += m.Packets
			sum.Bytes += m.Bytes
		}
		return in.Packets == l.packets.Load() && in.Bytes == l.bytes.Load()
	})
	// Servers' offloads are on: a packet may be many segments.
	if n := exits(t, d)["out_translated"]; out.Packets <= n {
		t.Errorf("%d segments in %d packets out: no segmentation offload was met", out.Packets, n)
	}
}

// ready raises a lab with servers and an agent that has its rules.
func ready(t *testing.T, c Config) (*testLab, *Datapath) {
	t.Helper()
	l := newLab(t)
	l.serve(t, "host", hostDIP4, hostDIP6)
	l.serve(t, "vm", vmDIP4, vmDIP6)
	if c.PinDir == "" {
		c.PinDir = testPinDir(t)
	}
	d := l.open(t, c)
	l.agent = d
	t.Cleanup(func() {
		if err := l.agent.Detach(); err != nil {
			t.Error(err)
		}
	})
	if err := d.Replace(l.rules()); err != nil {
		t.Fatal(err)
	}
	return l, d
}

// A datagram larger than the MTU is fragmented by the client, and the answer
// by the server: each fragment finds its way by what the first one taught.
func TestFragmentedDatagrams(t *testing.T) {
	l, d := ready(t, Config{})
	// Room for the tunnel, as where the fabric's MTU is raised.
	l.ip(t, "router", "link set host0 mtu 1600")
	l.ip(t, "host", "link set eth0 mtu 1600")
	l.ip(t, "host", "route change default via 10.1.0.1 mtu 1500")
	l.ip(t, "host", "route change default via fd00:1::1 mtu 1500")
	for name, vip := range vips {
		before := exits(t, d)
		u := l.dial(t, "udp", vip)
		for range 3 {
			if err := echo(u, 5000); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		after := exits(t, d)
		for _, label := range []string{"in_delivered_fragment", "out_fragment"} {
			if n := after[label] - before[label]; n < 9 {
				t.Errorf("%s: %s moved by %d, want at least 9", name, label, n)
			}
		}
	}
}

// A link on the way back is narrower than the MSS allows for: the router's
// error goes to the VIP, thus through the tunnel, and the server's stack must
// understand it.
func TestPathMTUDiscovery(t *testing.T) {
	l, d := ready(t, Config{})
	l.ip(t, "router", "link set client0 mtu 1300")
	for name, vip := range vips {
		// What the host learnt as an end point it would tell its VM as a router.
		l.ip(t, "host", "-6 route flush cache")
		before := exits(t, d)["in_delivered_icmp_error"]
		if err := transfer(l.dial(t, "tcp", vip), 300_000); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if exits(t, d)["in_delivered_icmp_error"] == before {
			t.Errorf("%s: no ICMP error came through", name)
		}
	}
}

// The server's host or VM answers a datagram to a closed port with an ICMP
// error, which the client's socket must take for its own.
func TestPortUnreachable(t *testing.T) {
	l, d := ready(t, Config{})
	for i, vip := range []string{hostVIP4, hostVIP6, vmVIP4, vmVIP6} {
		dip := []string{hostDIP4, hostDIP6, vmDIP4, vmDIP6}[i]
		r := l.routes[addr(vip)]
		if err := d.Apply(Delta{Put: []Rule{rule(r.tunnel4.String(), lb.UDP, netip.AddrPortFrom(addr(vip), 80).String(), dip, 9)}}); err != nil {
			t.Fatal(err)
		}
		u := l.dial(t, "udp", vip)
		if _, err := u.Write([]byte("anybody?")); err != nil {
			t.Fatal(err)
		}
		_, err := u.Read(make([]byte, 10))
		if !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s: %v, want %v", vip, err, unix.ECONNREFUSED)
		}
	}
	if n := exits(t, d)["out_icmp_error"]; n != 4 {
		t.Errorf("out_icmp_error %d, want 4", n)
	}
}

// The client's SYN offers, and so the server's SYN-ACK must not exceed, what
// fits: the client's segments are at most MTU - tunnel.
func TestMSSClamp(t *testing.T) {
	l, d := ready(t, Config{})
	for _, c := range []struct {
		mss    uint16
		format tunnelFormat
		outer6 bool
		want   map[string]int // by VIP
	}{
		{0, muxFormat(lb.EncapIPIP), false, map[string]int{hostVIP4: 1440, vmVIP4: 1440, hostVIP6: 1420, vmVIP6: 1420}},
		{0, muxFormat(lb.EncapIPIP), true, map[string]int{hostVIP4: 1420, hostVIP6: 1400}},
		{0, muxFormat(lb.EncapGUE), false, map[string]int{hostVIP4: 1432}},
		{0, builtFormat("vxlan"), false, map[string]int{hostVIP4: 1410}},
		{1000, muxFormat(lb.EncapIPIP), false, map[string]int{hostVIP4: 1000, hostVIP6: 1000}},
		{1455, muxFormat(lb.EncapIPIP), false, map[string]int{hostVIP4: 1455, hostVIP6: 1440}}, // lowering only
	} {
		if d.config.MSS != c.mss {
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			// The same layout: only the programs differ.
			d = l.open(t, Config{PinDir: d.config.PinDir, MSS: c.mss})
			l.agent = d
		}
		l.setTunnel(c.format, c.outer6)
		before, err := d.Flows()
		if err != nil {
			t.Fatal(err)
		}
		for vip, want := range c.want {
			conn := l.dial(t, "tcp", vip)
			raw, err := conn.(*net.TCPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			var got int
			if err := raw.Control(func(fd uintptr) {
				// TCP_MAXSEG on a connection: what it sends at most, less options.
				got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
			}); err != nil {
				t.Fatal(err)
			}
			const timestamps = 12 // bytes of options in each segment
			if err != nil || got != want-timestamps {
				t.Errorf("MSS %d, outer6=%t, %s: client sends segments of %d (%v), want %d", c.mss, c.outer6, vip, got, err, want-timestamps)
			}
		}
		if s, err := d.Flows(); err != nil || s.Clamped-before.Clamped < uint64(len(c.want)) && c.mss != 1455 {
			t.Errorf("%+v, %v: want %d clamped", s, err, len(c.want))
		}
	}
}

// The agent is closed and opened under traffic, in the same layout and in
// another one; each datagram must come back, and TCP must not retransmit.
func TestRestartLosesNothing(t *testing.T) {
	pins := testPinDir(t)
	l, d := ready(t, Config{PinDir: pins})
	var (
		wg   sync.WaitGroup
		stop atomic.Bool
		sent atomic.Uint64
	)
	for _, vip := range vips {
		u, c := l.dial(t, "udp", vip), l.dial(t, "tcp", vip)
		wg.Go(func() {
			for !stop.Load() {
				if err := echo(u, 100); err != nil {
					t.Errorf("datagram: %v", err)
					return
				}
				sent.Add(1)
			}
		})
		wg.Go(func() {
			for !stop.Load() {
				if err := transfer(c, 10_000); err != nil {
					t.Errorf("connection: %v", err)
					return
				}
			}
		})
	}
	// more waits for traffic in this very state.
	more := func() {
		n := sent.Load()
		eventually(t, "datagrams go on", func() bool { return sent.Load() > n+20 || t.Failed() })
	}
	for i := range 8 {
		more()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		more()
		d = l.open(t, Config{PinDir: pins, Flows: []uint32{0, 4096}[i/4%2]})
		more()
		if err := d.Replace(l.rules()); err != nil {
			t.Fatal(err)
		}
	}
	more()
	stop.Store(true)
	wg.Wait()
	l.agent = d
	seen := exits(t, d)
	for label, n := range seen {
		if n > 0 && !strings.HasPrefix(label, "in_delivered") && label != "out_translated" &&
			label != "in_not_tunnel" && label != "out_not_ours" {
			t.Errorf("%s: %d", label, n)
		}
	}
}

// Servers speak without pause on connections that begin while the agent moves
// to another layout's maps, with so many flows to copy that it takes a while. A
// reply that left as the DIP would have the client reset the connection.
func TestMoveKeepsNewConnections(t *testing.T) {
	pins := testPinDir(t)
	l, d := ready(t, Config{PinDir: pins})
	rules := append(l.rules(), rule(hostDIP4, lb.TCP, hostVIP4+":81", hostDIP4, 8081))
	if err := d.Replace(rules); err != nil {
		t.Fatal(err)
	}
	const flows = 100_000
	keys, values := make([]agentFlowKey, flows), make([]agentFlow, flows)
	for i := range keys {
		keys[i].Client[0] = uint32(i + 1)
	}
	if _, err := d.objects.Flows.BatchUpdate(keys, values, nil); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}

	var listener net.Listener
	l.in(t, "host", func() (err error) {
		listener, err = net.Listen("tcp", hostDIP4+":8081")
		return err
	})
	defer listener.Close()
	const words = 300
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for range words {
					if _, err := c.Write([]byte("word")); err != nil {
						return
					}
					time.Sleep(time.Millisecond) // the pace, not a wait
				}
			}()
		}
	}()
	var (
		wg    sync.WaitGroup
		stop  atomic.Bool
		begun atomic.Uint64
	)
	dial := func() (net.Conn, error) {
		var c net.Conn
		err := l.inside("client", func() (err error) {
			c, err = net.DialTimeout("tcp", hostVIP4+":81", 20*time.Second)
			return err
		})
		return c, err
	}
	wg.Go(func() {
		for !stop.Load() {
			c, err := dial()
			if err != nil {
				t.Errorf("connect: %v", err)
				return
			}
			begun.Add(1)
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(60 * time.Second))
				if n, err := io.Copy(io.Discard, c); err != nil || n != 4*words {
					t.Errorf("connection: %d bytes, %v", n, err)
				}
			})
		}
	})
	more := func() {
		n := begun.Load()
		eventually(t, "connections begin", func() bool { return begun.Load() > n+20 || t.Failed() })
	}
	more()
	d = l.open(t, Config{PinDir: pins, Flows: 2 * DefaultFlows})
	l.agent = d
	more()
	if err := d.Replace(rules); err != nil {
		t.Fatal(err)
	}
	more()
	stop.Store(true)
	wg.Wait()
	if s, err := d.Flows(); err != nil || s.Trusted < flows {
		t.Errorf("%+v, %v: want %d flows copied", s, err, flows)
	}
}

// A client that is a VM of the server's own host: the reply never sees an
// uplink. It is translated on its way to the VM where that interface is named
// as well.
func TestClientOnTheServersHost(t *testing.T) {
	l := newLab(t)
	l.serve(t, "host", hostDIP4, hostDIP6)
	var d *Datapath
	l.in(t, "host", func() (err error) {
		d, err = Open(Config{Interfaces: []string{"eth0", "vm0"}, PinDir: testPinDir(t)})
		return err
	})
	t.Cleanup(func() {
		if err := d.Detach(); err != nil {
			t.Error(err)
		}
	})
	if err := d.Replace(l.rules()); err != nil {
		t.Fatal(err)
	}
	for _, vip := range []string{hostVIP4, hostVIP6} {
		var c net.Conn
		l.in(t, "vm", func() (err error) {
			c, err = net.DialTimeout("tcp", netip.AddrPortFrom(addr(vip), 80).String(), 20*time.Second)
			return err
		})
		if err := errors.Join(c.SetDeadline(time.Now().Add(60*time.Second)), transfer(c, 100_000), c.Close()); err != nil {
			t.Errorf("%s: %v", vip, err)
		}
	}
}

// A connection that lives by its rule's former target outlives a move to
// another layout's maps.
func TestMoveKeepsFormerTargets(t *testing.T) {
	pins := testPinDir(t)
	l, d := ready(t, Config{PinDir: pins})
	c := l.dial(t, "tcp", hostVIP4)
	rules := l.rules()
	for i := range rules {
		rules[i].DIPPort = 9
	}
	if err := errors.Join(transfer(c, 1000), d.Replace(rules), transfer(c, 1000), d.Close()); err != nil {
		t.Fatal(err)
	}
	d = l.open(t, Config{PinDir: pins, Flows: 4096})
	l.agent = d
	if err := errors.Join(d.Replace(rules), transfer(c, 1000)); err != nil {
		t.Error(err)
	}
}
