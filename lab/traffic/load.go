package traffic

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Mode is what a client does.
type Mode string

// Modes.
const (
	Short     Mode = "short"     // a TCP connection for each request
	KeepAlive Mode = "keepalive" // one connection a worker, kept
	Download  Mode = "download"  // GET /bytes/<n>, checked
	Upload    Mode = "upload"    // PUT /upload, checked
	UDP       Mode = "udp"       // numbered datagrams, one flow a worker
)

// Modes are all modes.
var Modes = []Mode{Short, KeepAlive, Download, Upload, UDP}

// Load says what a client is to do.
type Load struct {
	Mode   Mode           `json:"mode"`
	Target netip.AddrPort `json:"target"`
	// Count is how many requests (UDP: datagrams) in all; 0: until stopped.
	Count int `json:"count"`
	// Parallel workers, at least 1.
	Parallel int `json:"parallel"`
	// Interval between a worker's requests; 0: as fast as answers come.
	Interval time.Duration `json:"interval"`
	// Timeout of one attempt.
	Timeout time.Duration `json:"timeout"`
	// Retries of a request that failed, on another connection.
	Retries int `json:"retries"`
	// Bytes of a download or upload.
	Bytes int64 `json:"bytes"`
	// Sources are the addresses that connections come from, in turn; the
	// prefix must be the client's own. Not valid: as the kernel chooses.
	Sources netip.Prefix `json:"sources"`
}

// Check says what is wrong with a load, naming the field.
func (l Load) Check() error {
	switch {
	case !slices.Contains(Modes, l.Mode):
		return fmt.Errorf("mode: %q is none of %v", l.Mode, Modes)
	case !l.Target.IsValid() || l.Target.Port() == 0:
		return fmt.Errorf("target: an address and port are wanted, such as 203.0.113.10:80")
	case l.Count < 0:
		return fmt.Errorf("count: %d is negative", l.Count)
	case l.Parallel < 1 || l.Parallel > 10000:
		return fmt.Errorf("parallel: %d is outside 1 to 10000", l.Parallel)
	case l.Interval < 0:
		return fmt.Errorf("interval: %s is negative", l.Interval)
	case l.Timeout <= 0:
		return fmt.Errorf("timeout: %s is not positive", l.Timeout)
	case l.Retries < 0:
		return fmt.Errorf("retries: %d is negative", l.Retries)
	case l.Bytes < 0 || l.Bytes > MaxBytes:
		return fmt.Errorf("bytes: %d is outside 0 to %d", l.Bytes, int64(MaxBytes))
	case l.Mode == UDP && l.Interval == 0:
		return fmt.Errorf("interval: udp needs one")
	}
	return nil
}

// Report is what a client saw.
type Report struct {
	Requests int `json:"requests"` // answered, each counted once however often it was tried
	Errors   int `json:"errors"`   // not answered in spite of retries
	Retries  int `json:"retries"`  // attempts beyond the first
	Broken   int `json:"broken"`   // kept connections that ended before the client closed them
	Wrong    int `json:"wrong"`    // answers with a false length or checksum
	Moved    int `json:"moved"`    // times a UDP flow was answered by another server than before
	Sent     int `json:"sent"`     // UDP: datagrams
	Lost     int `json:"lost"`     // UDP: datagrams without an answer
	// Affected is the number of workers that saw a failure or a loss.
	Affected int   `json:"affected"`
	Bytes    int64 `json:"bytes"` // of content, either way
	// MaxGapMs is the longest that a worker went without an answer beyond its
	// interval: UDP from loss alone, otherwise between answers.
	MaxGapMs float64 `json:"max_gap_ms"`
	// Gaps has each worker's longest, the affected ones' only, in ms.
	Gaps         []float64      `json:"gaps,omitempty"`
	LatencyP50Ms float64        `json:"latency_p50_ms"`
	LatencyP99Ms float64        `json:"latency_p99_ms"`
	Seconds      float64        `json:"seconds"`
	Servers      map[string]int `json:"servers"` // answers by server
	FirstError   string         `json:"first_error,omitempty"`
}

// worker collects what one worker sees; merged at the end.
type worker struct {
	Report
	latencies []time.Duration
	last      time.Time
}

type client struct {
	Load
	left   atomic.Int64
	source atomic.Uint64
	sum    string // of the content
}

// Run does what the load says, until it is done or ctx ends; what was under way
// then does not count. It fails only if it can't begin.
func Run(ctx context.Context, l Load) (Report, error) {
	if err := l.Check(); err != nil {
		return Report{}, err
	}
	c := &client{Load: l}
	c.left.Store(int64(l.Count))
	if l.Mode == Download || l.Mode == Upload {
		c.sum = Sum(l.Bytes)
	}
	start := time.Now()
	workers := make([]*worker, l.Parallel)
	var wg sync.WaitGroup
	for i := range workers {
		w := &worker{Report: Report{Servers: map[string]int{}}}
		workers[i] = w
		wg.Add(1)
		go func() {
			defer wg.Done()
			if l.Interval > 0 {
				// Workers take turns instead of sending all at once.
				if !sleep(ctx, l.Interval*time.Duration(i)/time.Duration(l.Parallel)) {
					return
				}
			}
			if l.Mode == UDP {
				c.udp(ctx, w)
			} else {
				c.http(ctx, w)
			}
		}()
	}
	wg.Wait()
	return merge(workers, time.Since(start)), nil
}

func merge(workers []*worker, took time.Duration) Report {
	r := Report{Servers: map[string]int{}, Seconds: took.Seconds()}
	var latencies []time.Duration
	for _, w := range workers {
		r.Requests += w.Requests
		r.Errors += w.Errors
		r.Retries += w.Retries
		r.Broken += w.Broken
		r.Wrong += w.Wrong
		r.Moved += w.Moved
		r.Sent += w.Sent
		r.Lost += w.Lost
		r.Bytes += w.Bytes
		for s, n := range w.Servers {
			r.Servers[s] += n
		}
		if w.Errors+w.Retries+w.Broken+w.Lost > 0 {
			r.Affected++
			r.Gaps = append(r.Gaps, w.MaxGapMs)
		}
		r.MaxGapMs = max(r.MaxGapMs, w.MaxGapMs)
		if r.FirstError == "" {
			r.FirstError = w.FirstError
		}
		latencies = append(latencies, w.latencies...)
	}
	if n := len(latencies); n > 0 {
		slices.Sort(latencies)
		r.LatencyP50Ms, r.LatencyP99Ms = ms(latencies[n/2]), ms(latencies[n*99/100])
	}
	slices.Sort(r.Gaps)
	return r
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// take says whether there is another request to make.
func (c *client) take() bool { return c.Count == 0 || c.left.Add(-1) >= 0 }

func (w *worker) failed(err error) {
	if w.FirstError == "" {
		w.FirstError = err.Error()
	}
}

// dialer opens a socket from the next source address.
func (c *client) dialer() *net.Dialer {
	d := &net.Dialer{Timeout: c.Timeout, KeepAlive: -1}
	if !c.Sources.IsValid() {
		return d
	}
	bits := c.Sources.Addr().BitLen() - c.Sources.Bits()
	// Neither the first nor the last address of the prefix.
	room := uint64(1)
	if bits > 1 {
		room = 1<<min(bits, 16) - 2
	}
	n := c.source.Add(1) % room
	a := c.Sources.Masked().Addr().AsSlice()
	for i, carry := len(a)-1, n+1; carry > 0 && i >= 0; i-- {
		carry += uint64(a[i])
		a[i] = byte(carry)
		carry >>= 8
	}
	if c.Mode == UDP {
		d.LocalAddr = &net.UDPAddr{IP: a}
		return d
	}
	d.LocalAddr = &net.TCPAddr{IP: a}
	d.Control = func(_, _ string, s syscall.RawConn) error {
		// Without it a bound address has one use of each port, whoever the
		// other side is.
		var err error
		if e := s.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
		}); e != nil {
			return e
		}
		return err
	}
	return d
}

// connection is a worker's TCP connection. http.Transport would hide when one
// breaks and open others of its own accord.
type connection struct {
	net.Conn
	in   *bufio.Reader
	used bool
}

func (c *client) http(ctx context.Context, w *worker) {
	kept := c.Mode == KeepAlive
	var conn *connection
	hangUp := func() {
		if conn != nil {
			conn.Close()
			conn = nil
		}
	}
	defer hangUp()
	for c.take() {
		began := time.Now()
		answered := false
		for attempt := 0; attempt <= c.Retries; attempt++ {
			if attempt > 0 {
				w.Retries++
			}
			tried := time.Now()
			server, err := c.attempt(ctx, w, &conn)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				if conn != nil && conn.used {
					w.Broken++
				}
				hangUp()
				w.failed(err)
				continue
			}
			if conn.used = true; !kept {
				hangUp()
			}
			w.Requests++
			w.Servers[server]++
			w.latencies = append(w.latencies, time.Since(tried))
			answered = true
			break
		}
		end := time.Now()
		if answered {
			since := began
			if c.Interval > 0 && !w.last.IsZero() {
				since = w.last.Add(c.Interval)
			}
			w.MaxGapMs = max(w.MaxGapMs, ms(end.Sub(since)))
			w.last = end
		} else {
			w.Errors++
		}
		if !sleep(ctx, c.Interval-time.Since(began)) {
			return
		}
	}
}

// attempt makes one request, on a connection of its own if there is none, and
// checks the answer.
func (c *client) attempt(ctx context.Context, w *worker, conn **connection) (server string, err error) {
	deadline := time.Now().Add(c.Timeout)
	if *conn == nil {
		opened, err := c.dialer().DialContext(ctx, "tcp", c.Target.String())
		if err != nil {
			return "", err
		}
		*conn = &connection{Conn: opened, in: bufio.NewReader(opened)}
	}
	at := *conn
	if err := at.SetDeadline(deadline); err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { _ = at.SetDeadline(time.Now()) })
	defer stop()
	url := "http://" + c.Target.String() + "/"
	method, body := http.MethodGet, io.Reader(nil)
	switch c.Mode {
	case Download:
		url += fmt.Sprintf("bytes/%d", c.Bytes)
	case Upload:
		url, method, body = url+"upload", http.MethodPut, Content(c.Bytes)
	}
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return "", err
	}
	if c.Mode == Upload {
		r.ContentLength = c.Bytes
	}
	r.Close = c.Mode != KeepAlive
	if err := r.Write(at); err != nil {
		return "", err
	}
	answer, err := http.ReadResponse(at.in, r)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("HTTP status %s", answer.Status)
	}
	switch c.Mode {
	case Download:
		h := sha256.New()
		n, err := io.Copy(h, answer.Body)
		if err != nil {
			return "", err
		}
		w.Bytes += n
		if n != c.Bytes || hex.EncodeToString(h.Sum(nil)) != c.sum {
			w.Wrong++
		}
		return answer.Header.Get("Server"), nil
	case Upload:
		var u Uploaded
		if err := json.NewDecoder(answer.Body).Decode(&u); err != nil {
			return "", err
		}
		w.Bytes += u.Bytes
		if u.Bytes != c.Bytes || u.SHA256 != c.sum {
			w.Wrong++
		}
		return u.Server, nil
	}
	text, err := io.ReadAll(answer.Body)
	return strings.TrimSpace(string(text)), err
}

// udp sends numbered datagrams and takes note of which come back. A datagram
// counts as lost when the flow has ended and Timeout has passed.
func (c *client) udp(ctx context.Context, w *worker) {
	conn, err := c.dialer().Dial("udp", c.Target.String())
	if err != nil {
		w.Errors++
		w.failed(err)
		return
	}
	defer conn.Close()
	var (
		mu       sync.Mutex
		sent     []time.Time
		answered []bool
		server   string
	)
	received := make(chan struct{})
	go func() {
		defer close(received)
		b := make([]byte, 2048)
		for {
			n, err := conn.Read(b)
			if errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ETIMEDOUT) || isTimeout(err) {
				return
			}
			if err != nil || n < 8 {
				// An ICMP error shows here once; the datagram counts as lost.
				continue
			}
			seq := binary.BigEndian.Uint64(b)
			name := string(b[8:n])
			mu.Lock()
			if seq < uint64(len(sent)) && !answered[seq] {
				answered[seq] = true
				w.Requests++
				w.Servers[name]++
				w.latencies = append(w.latencies, time.Since(sent[seq]))
				if server != "" && server != name {
					w.Moved++
				}
				server = name
			}
			mu.Unlock()
		}
	}()
	tick := time.NewTicker(c.Interval)
	defer tick.Stop()
	for c.take() {
		var b [8]byte
		mu.Lock()
		binary.BigEndian.PutUint64(b[:], uint64(len(sent)))
		sent = append(sent, time.Now())
		answered = append(answered, false)
		mu.Unlock()
		if _, err := conn.Write(b[:]); err != nil {
			w.failed(err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
			continue
		}
		break
	}
	// Wait for the answers that are still under way, no longer than need be.
	deadline := time.Now().Add(c.Timeout)
	for time.Now().Before(deadline) {
		mu.Lock()
		done := w.Requests == len(sent)
		mu.Unlock()
		if done {
			break
		}
		time.Sleep(time.Millisecond)
	}
	// Reading ends by the deadline and not by closing, so that nothing races.
	_ = conn.SetReadDeadline(time.Now())
	<-received
	w.Sent = len(sent)
	w.Lost = w.Sent - w.Requests
	for i := 0; i < len(sent); i++ {
		if answered[i] {
			continue
		}
		first := i
		for i < len(sent) && !answered[i] {
			i++
		}
		// From the first lost datagram to the next that came through.
		end := sent[len(sent)-1]
		if i < len(sent) {
			end = sent[i]
		}
		w.MaxGapMs = max(w.MaxGapMs, ms(end.Sub(sent[first])))
	}
}

func isTimeout(err error) bool {
	var e net.Error
	return errors.As(err, &e) && e.Timeout()
}
