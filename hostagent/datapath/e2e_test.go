package datapath

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"
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
	l := newLab(t)
	l.serve(t, "host", hostDIP4, hostDIP6)
	l.serve(t, "vm", vmDIP4, vmDIP6)
	d := l.open(t, Config{PinDir: testPinDir(t)})
	t.Cleanup(func() {
		if err := d.Detach(); err != nil {
			t.Error(err)
		}
	})
	if err := d.Replace(l.rules()); err != nil {
		t.Fatal(err)
	}
	for format, encap := range tunnelFormats {
		for _, outer6 := range []bool{false, true} {
			l.setTunnel(encap, outer6)
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
}
