package bgp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// bfdState is a session's state, RFC 5880 section 4.1.
type bfdState uint8

const (
	bfdAdminDown bfdState = iota
	bfdDown
	bfdInit
	bfdUp
)

// Diagnostics, RFC 5880 section 4.1.
const (
	bfdNone         = 0
	bfdTimeExpired  = 1
	bfdNeighborDown = 3
	bfdAdminDowned  = 7
)

const (
	bfdPort = 3784 // RFC 5881 section 4
	// bfdSlow is the least interval of a session that is not up, RFC 5880 section 6.8.3.
	bfdSlow   = time.Second
	bfdLength = 24
	bfdTTL    = 255 // both sent and demanded, RFC 5881 section 5
)

// bfdPacket is a control packet without authentication.
type bfdPacket struct {
	diag                 uint8
	state                bfdState
	poll, final          bool
	multiplier           uint8
	mine, yours          uint32
	desiredTx, requireRx time.Duration
}

func (p bfdPacket) marshal() []byte {
	b := make([]byte, bfdLength)
	b[0] = 1<<5 | p.diag
	b[1] = byte(p.state) << 6
	if p.poll {
		b[1] |= 1 << 5
	}
	if p.final {
		b[1] |= 1 << 4
	}
	b[2], b[3] = p.multiplier, bfdLength
	binary.BigEndian.PutUint32(b[4:], p.mine)
	binary.BigEndian.PutUint32(b[8:], p.yours)
	binary.BigEndian.PutUint32(b[12:], uint32(p.desiredTx.Microseconds()))
	binary.BigEndian.PutUint32(b[16:], uint32(p.requireRx.Microseconds()))
	return b
}

// parseBFD makes the checks of RFC 5880 section 6.8.6 that need no session.
func parseBFD(b []byte) (p bfdPacket, ok bool) {
	if len(b) < bfdLength || b[0]>>5 != 1 || int(b[3]) < bfdLength || int(b[3]) > len(b) {
		return p, false
	}
	p = bfdPacket{
		diag: b[0] & 31, state: bfdState(b[1] >> 6), poll: b[1]&(1<<5) != 0, final: b[1]&(1<<4) != 0, multiplier: b[2],
		mine: binary.BigEndian.Uint32(b[4:]), yours: binary.BigEndian.Uint32(b[8:]),
		desiredTx: time.Duration(binary.BigEndian.Uint32(b[12:])) * time.Microsecond,
		requireRx: time.Duration(binary.BigEndian.Uint32(b[16:])) * time.Microsecond,
	}
	const authenticated, multipoint = 1 << 2, 1 << 0
	ok = p.multiplier != 0 && p.mine != 0 && b[1]&(authenticated|multipoint) == 0 &&
		(p.yours != 0 || p.state == bfdDown || p.state == bfdAdminDown)
	return p, ok
}

// bfdSession is one session, RFC 5880 section 6.8: packets and time go in,
// packets come out. It does no I/O.
type bfdSession struct {
	interval   time.Duration
	multiplier uint8
	mine       uint32 // discriminators
	yours      uint32

	state    bfdState
	diag     uint8
	polling  bool          // we announced another interval and await the answer
	remoteTx time.Duration // the peer's DesiredMinTxInterval
	remoteRx time.Duration // the peer's RequiredMinRxInterval
	remoteN  uint8         // the peer's multiplier
	nextTx   time.Time
	deadline time.Time // when the peer counts as dead; zero: never
}

func newBFDSession(c BFD, mine uint32, now time.Time) *bfdSession {
	return &bfdSession{
		interval: c.Interval, multiplier: c.Multiplier, mine: mine,
		state: bfdDown, remoteRx: time.Microsecond, nextTx: now,
	}
}

func (s *bfdSession) desiredTx() time.Duration {
	if s.state != bfdUp {
		return max(s.interval, bfdSlow)
	}
	return s.interval
}

func (s *bfdSession) packet(final bool) bfdPacket {
	return bfdPacket{
		diag: s.diag, state: s.state, poll: s.polling && !final, final: final, multiplier: s.multiplier,
		mine: s.mine, yours: s.yours, desiredTx: s.desiredTx(), requireRx: s.interval,
	}
}

func (s *bfdSession) set(state bfdState, diag uint8, now time.Time) {
	before := s.desiredTx()
	s.state, s.diag = state, diag
	if s.desiredTx() != before {
		s.polling = state == bfdUp
		s.nextTx = now
	}
	if state == bfdDown {
		s.deadline = time.Time{}
	}
}

// receive takes a packet. What it returns is to be sent at once.
func (s *bfdSession) receive(p bfdPacket, now time.Time) (answer bfdPacket, send bool) {
	if p.yours != 0 && p.yours != s.mine || p.yours == 0 && s.state == bfdUp && p.mine != s.yours {
		return bfdPacket{}, false
	}
	s.yours = p.mine
	s.remoteTx, s.remoteRx, s.remoteN = p.desiredTx, p.requireRx, p.multiplier
	if p.final {
		s.polling = false
	}
	switch {
	case p.state == bfdAdminDown:
		if s.state != bfdDown {
			s.set(bfdDown, bfdNeighborDown, now)
		}
	case s.state == bfdDown && p.state == bfdDown:
		s.set(bfdInit, bfdNone, now)
		s.nextTx = now
	case s.state == bfdDown && p.state == bfdInit, s.state == bfdInit && p.state >= bfdInit:
		s.set(bfdUp, bfdNone, now)
	case s.state == bfdUp && p.state == bfdDown:
		s.set(bfdDown, bfdNeighborDown, now)
	}
	if s.state == bfdInit || s.state == bfdUp {
		s.deadline = now.Add(s.detection())
	}
	// The peer may ask for more packets than before, and counts on them from
	// our answer on.
	if next := now.Add(s.txInterval()); next.Before(s.nextTx) {
		s.nextTx = next
	}
	return s.packet(true), p.poll
}

// txInterval is the time between packets without jitter, RFC 5880 section 6.8.7.
func (s *bfdSession) txInterval() time.Duration { return max(s.desiredTx(), s.remoteRx) }

// detection is how long the peer may be silent, RFC 5880 section 6.8.4.
func (s *bfdSession) detection() time.Duration {
	return time.Duration(s.remoteN) * max(s.interval, s.remoteTx)
}

// tick says whether a packet is due, and declares a silent peer dead. jitter is
// 0..1.
func (s *bfdSession) tick(now time.Time, jitter float64) (p bfdPacket, send bool) {
	if !s.deadline.IsZero() && !now.Before(s.deadline) {
		s.set(bfdDown, bfdTimeExpired, now)
		s.yours = 0
	}
	if now.Before(s.nextTx) || s.remoteRx == 0 {
		return bfdPacket{}, false
	}
	// RFC 5880 section 6.8.7: 75 to 100 %, or to 90 % with a multiplier of 1.
	share := 0.75 + 0.25*jitter
	if s.multiplier == 1 {
		share = 0.75 + 0.15*jitter
	}
	s.nextTx = now.Add(time.Duration(float64(s.txInterval()) * share))
	return s.packet(false), true
}

// wake is when tick is due.
func (s *bfdSession) wake() time.Time {
	if !s.deadline.IsZero() && s.deadline.Before(s.nextTx) {
		return s.deadline
	}
	return s.nextTx
}

// bfdSpeaker runs the sessions with a speaker's peers on one thread of its own,
// outside Go's scheduler and ahead of other processes: it must send every few
// milliseconds on a busy machine.
//
// GoBGP's own BFD is not used: when a peer is silent it closes the BGP session
// also while there is none, which then hits the next one.
type bfdSpeaker struct {
	log   *slog.Logger
	down  func(netip.Addr)
	peers []*bfdPeer
	// listen has a socket by family; -1: none of that family.
	listen [2]int
	wakeup [2]int // a pipe: closing the far end stops the thread
	done   sync.WaitGroup
}

type bfdPeer struct {
	address netip.Addr
	session *bfdSession
	socket  int
	up      atomic.Bool
}

// startBFD starts sessions with the peers that have BFD configured. down is
// called, on a goroutine of its own, when a session was up and the peer falls silent.
func startBFD(peers []Peer, log *slog.Logger, down func(netip.Addr)) (_ *bfdSpeaker, err error) {
	s := &bfdSpeaker{log: log, down: down, listen: [2]int{-1, -1}, wakeup: [2]int{-1, -1}}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	now := time.Now()
	for _, p := range peers {
		if p.BFD.Interval == 0 {
			continue
		}
		family := 0
		if p.Address.Is6() {
			family = 1
		}
		if s.listen[family] < 0 {
			if s.listen[family], err = bfdListen(family == 1); err != nil {
				return nil, err
			}
		}
		socket, err := bfdDial(p)
		if err != nil {
			return nil, err
		}
		s.peers = append(s.peers, &bfdPeer{
			address: p.Address.WithZone(""), socket: socket,
			session: newBFDSession(p.BFD, rand.Uint32N(1<<32-1)+1, now),
		})
	}
	if len(s.peers) == 0 {
		return s, nil
	}
	if err := unix.Pipe2(s.wakeup[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("start BFD: make pipe: %w", err)
	}
	s.done.Add(1)
	go s.run()
	return s, nil
}

func bfdSockaddr(a netip.Addr, port int) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4(), Port: port}
	}
	return &unix.SockaddrInet6{Addr: a.As16(), Port: port}
}

func bfdSocket(is6 bool) (int, error) {
	family := unix.AF_INET
	if is6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("start BFD: open socket: %w", err)
	}
	return fd, nil
}

func bfdListen(is6 bool) (int, error) {
	fd, err := bfdSocket(is6)
	if err != nil {
		return -1, err
	}
	any4, level, option := netip.IPv4Unspecified(), unix.IPPROTO_IP, unix.IP_RECVTTL
	if is6 {
		any4, level, option = netip.IPv6Unspecified(), unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err = errors.Join(err, unix.SetsockoptInt(fd, level, option, 1)); err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("start BFD: ask for TTLs: %w", err)
	}
	if err := unix.Bind(fd, bfdSockaddr(any4, bfdPort)); err != nil {
		_ = unix.Close(fd)
		if errors.Is(err, unix.EADDRINUSE) {
			return -1, fmt.Errorf("start BFD: listen on UDP port %d: another process has this port", bfdPort)
		}
		return -1, fmt.Errorf("start BFD: listen on UDP port %d: %w", bfdPort, err)
	}
	return fd, nil
}

func bfdDial(p Peer) (int, error) {
	is6 := p.Address.Is6()
	fd, err := bfdSocket(is6)
	if err != nil {
		return -1, err
	}
	level, option := unix.IPPROTO_IP, unix.IP_TTL
	local := netip.IPv4Unspecified()
	if is6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		local = netip.IPv6Unspecified()
	}
	if p.Local.IsValid() {
		local = p.Local
	}
	err = unix.SetsockoptInt(fd, level, option, bfdTTL)
	// RFC 5881 section 4: the source port is within 49152..65535, fixed for the session.
	for range 64 {
		if err != nil {
			break
		}
		if err = unix.Bind(fd, bfdSockaddr(local, 49152+rand.IntN(16384))); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
		err = nil
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("start BFD with %s: bind socket: %w", p.Address, err)
	}
	return fd, nil
}

func (s *bfdSpeaker) run() {
	defer s.done.Done()
	runtime.LockOSThread() // and never unlocked: the thread ends with its priority
	if err := unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20); err != nil {
		s.log.Warn("BFD runs at ordinary priority", "error", err)
	}
	fds := []unix.PollFd{{Fd: int32(s.wakeup[0]), Events: unix.POLLIN}}
	for _, fd := range s.listen {
		if fd >= 0 {
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
	}
	for {
		now := time.Now()
		wake := now.Add(bfdSlow)
		for _, p := range s.peers {
			if packet, send := p.session.tick(now, rand.Float64()); send {
				p.send(packet)
			}
			s.observe(p)
			if w := p.session.wake(); w.Before(wake) {
				wake = w
			}
		}
		timeout := unix.NsecToTimespec(int64(max(0, time.Until(wake))))
		if _, err := unix.Ppoll(fds, &timeout, nil); err != nil && !errors.Is(err, unix.EINTR) {
			s.log.Error("BFD stopped", "error", err)
			return
		}
		if fds[0].Revents != 0 {
			for _, p := range s.peers {
				p.session.set(bfdAdminDown, bfdAdminDowned, time.Now())
				p.send(p.session.packet(false))
			}
			return
		}
		for _, f := range fds[1:] {
			if f.Revents != 0 {
				s.drain(int(f.Fd))
			}
		}
	}
}

// drain takes all packets that wait on a socket.
func (s *bfdSpeaker) drain(fd int) {
	b, control := make([]byte, 128), make([]byte, 64)
	for {
		n, cn, _, from, err := unix.Recvmsg(fd, b, control, 0)
		if err != nil {
			return
		}
		packet, ok := parseBFD(b[:n])
		if !ok || bfdTTLOf(control[:cn]) != bfdTTL {
			continue
		}
		var source netip.Addr
		switch a := from.(type) {
		case *unix.SockaddrInet4:
			source = netip.AddrFrom4(a.Addr)
		case *unix.SockaddrInet6:
			source = netip.AddrFrom16(a.Addr)
		}
		for _, p := range s.peers {
			if p.address == source {
				if answer, send := p.session.receive(packet, time.Now()); send {
					p.send(answer)
				}
				s.observe(p)
			}
		}
	}
}

func bfdTTLOf(control []byte) int {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return -1
	}
	for _, m := range messages {
		ttl := m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_TTL ||
			m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_HOPLIMIT
		if ttl && len(m.Data) >= 4 {
			return int(binary.NativeEndian.Uint32(m.Data))
		}
	}
	return -1
}

// send loses a packet rather than wait; the peer counts on several.
func (p *bfdPeer) send(packet bfdPacket) {
	_ = unix.Sendto(p.socket, packet.marshal(), unix.MSG_DONTWAIT, bfdSockaddr(p.address, bfdPort))
}

// observe tells the rest of the process what has become of a session. A peer
// that itself says it is down closes the BGP session itself.
func (s *bfdSpeaker) observe(p *bfdPeer) {
	up := p.session.state == bfdUp
	if p.up.Swap(up) && !up && p.session.diag == bfdTimeExpired {
		go s.down(p.address)
	}
}

func (s *bfdSpeaker) isUp(peer netip.Addr) bool {
	for _, p := range s.peers {
		if p.address == peer.WithZone("") {
			return p.up.Load()
		}
	}
	return false
}

// stop tells the peers that BFD ends, and ends it.
func (s *bfdSpeaker) stop() {
	if s.wakeup[1] < 0 {
		return
	}
	_ = unix.Close(s.wakeup[1])
	s.wakeup[1] = -1
	s.done.Wait()
	s.close()
}

func (s *bfdSpeaker) close() {
	for _, p := range s.peers { // which isUp may still read
		_ = unix.Close(p.socket)
	}
	for _, fd := range []int{s.listen[0], s.listen[1], s.wakeup[0], s.wakeup[1]} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	s.listen, s.wakeup = [2]int{-1, -1}, [2]int{-1, -1}
}
