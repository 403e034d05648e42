package traffic

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"
)

// serve starts a server on a free loopback port.
func serve(t *testing.T, name string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, name, port) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	target := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
	for {
		c, err := net.Dial("tcp", target.String())
		if err == nil {
			c.Close()
			return target
		}
		select {
		case err := <-done:
			t.Fatal(err)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestEachMode(t *testing.T) {
	target := serve(t, "vm1-1")
	for _, mode := range Modes {
		r, err := Run(t.Context(), Load{
			Mode: mode, Target: target, Count: 40, Parallel: 4, Timeout: 5 * time.Second, Bytes: 100_000,
			Interval: time.Millisecond, Sources: netip.MustParsePrefix("127.1.2.0/24"),
		})
		if err != nil {
			t.Fatal(err)
		}
		if r.Requests != 40 || r.Servers["vm1-1"] != 40 || r.Errors+r.Retries+r.Broken+r.Wrong+r.Lost+r.Moved+r.Affected != 0 {
			t.Errorf("%s: %+v", mode, r)
		}
		if (mode == Upload || mode == Download) != (r.Bytes == 40*100_000) {
			t.Errorf("%s: %d bytes", mode, r.Bytes)
		}
	}
}

func TestNobodyAnswers(t *testing.T) {
	for _, mode := range Modes {
		r, err := Run(t.Context(), Load{
			Mode: mode, Target: netip.MustParseAddrPort("127.0.0.1:1"), Count: 4, Parallel: 2,
			Timeout: 100 * time.Millisecond, Interval: time.Millisecond, Retries: 1,
		})
		if err != nil {
			t.Fatal(err)
		}
		if r.Requests != 0 || r.Errors+r.Lost != 4 || r.Affected != 2 || mode != UDP && (r.Retries != 4 || r.FirstError == "") {
			t.Errorf("%s: %+v", mode, r)
		}
	}
}

// A server that goes away and comes back under a kept connection is one broken
// connection and one retry.
func TestKeptConnectionBreaks(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for i := 0; ; i++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 4096)
			for n := 0; n < 3 || i > 0; n++ {
				if _, err := c.Read(b); err != nil {
					break
				}
				if n == 2 && i == 0 {
					break
				}
				if _, err := c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")); err != nil {
					break
				}
			}
			c.Close()
		}
	}()
	r, err := Run(t.Context(), Load{
		Mode: KeepAlive, Target: l.Addr().(*net.TCPAddr).AddrPort(), Count: 10, Parallel: 1,
		Timeout: 5 * time.Second, Retries: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if r.Requests != 10 || r.Broken != 1 || r.Errors != 0 {
		t.Errorf("%+v", r)
	}
}

func TestBadLoads(t *testing.T) {
	good := Load{Mode: Short, Target: netip.MustParseAddrPort("127.0.0.1:80"), Parallel: 1, Timeout: 1}
	if err := good.Check(); err != nil {
		t.Fatal(err)
	}
	for _, change := range []func(*Load){
		func(l *Load) { l.Mode = "fast" },
		func(l *Load) { l.Target = netip.AddrPort{} },
		func(l *Load) { l.Count = -1 },
		func(l *Load) { l.Parallel = 0 },
		func(l *Load) { l.Interval = -1 },
		func(l *Load) { l.Timeout = 0 },
		func(l *Load) { l.Retries = -1 },
		func(l *Load) { l.Bytes = -1 },
		func(l *Load) { l.Mode = UDP },
	} {
		l := good
		change(&l)
		if l.Check() == nil {
			t.Errorf("%+v is taken", l)
		}
	}
}

func TestPing(t *testing.T) {
	for _, a := range []string{"127.0.0.1", "::1"} {
		if ok, err := Ping(a, 2, time.Second); err != nil || !ok {
			t.Errorf("%s: %v, %v", a, ok, err)
		}
	}
	if _, err := Ping("localhost", 1, time.Second); err == nil {
		t.Error("a name is taken")
	}
}
