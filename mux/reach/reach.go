// Package reach tells which tunnels of a mux lead nowhere, whatever the host
// agents say of their DIPs: it probes each tunnel as a client's packet would
// travel it, and raises an alert where no answer comes (Ananta section 3.4.3).
//
// A probe is an ICMP or ICMPv6 echo request from the mux to the tunnel's end,
// within the tunnel. The host agent's packet path answers it, outside the
// tunnel, so that neither the DIP nor its firewall has a say. A tunnel is
// unreachable after three probes in a row without an answer, and reachable with
// one answer. Routers spread a tunnel over their ways by its outer header: of
// several ways, an IPIP tunnel's probes see the mux's one, and GUE's see all,
// so that one broken way among them may go unseen.
package reach

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quartet-lb/quartet/encap"
	"github.com/quartet-lb/quartet/lb"
)

// Config says where probes come from.
type Config struct {
	// Source4 and Source6 are the mux's tunnel sources, where it has one.
	Source4, Source6 netip.Addr
	// Rate is how many probes are sent in a second at most; default 100. A tunnel
	// is probed once a second at most.
	Rate float64
	Log  *slog.Logger
}

// Prober probes tunnels. Its methods may be called concurrently.
type Prober struct {
	config   Config
	families []family
	// secret is in each probe, so that nobody who does not see probes can answer.
	secret uint64

	mu      sync.Mutex
	machine *machine // guarded by mu
}

// family is one address family's sockets.
type family struct {
	source        netip.Addr
	send, receive net.PacketConn
}

// tickEvery is a compromise between bursts and wake-ups.
const tickEvery = 100 * time.Millisecond

// Open opens the sockets; that needs CAP_NET_RAW.
func Open(c Config) (*Prober, error) {
	if c.Rate == 0 {
		c.Rate = 100
	}
	p := &Prober{config: c, machine: newMachine(c.Rate)}
	var secret [8]byte
	rand.Read(secret[:]) // never fails
	p.secret = binary.BigEndian.Uint64(secret[:])
	for _, source := range []netip.Addr{c.Source4, c.Source6} {
		if !source.IsValid() {
			continue
		}
		f := family{source: source}
		err := f.open()
		p.families = append(p.families, f)
		if err != nil {
			p.Close()
			if errors.Is(err, unix.EPERM) {
				err = fmt.Errorf("%w: CAP_NET_RAW is needed", err)
			}
			return nil, fmt.Errorf("open sockets to probe tunnels from %s: %w", source, err)
		}
	}
	return p, nil
}

func (f *family) open() error {
	raw, icmp := "ip4:255", "ip4:icmp" // protocol 255: outer headers are ours
	if f.source.Is6() {
		raw, icmp = "ip6:255", "ip6:ipv6-icmp"
	}
	filter := func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			// A set bit keeps a type out.
			if f.source.Is4() {
				failed = unix.SetsockoptInt(int(fd), unix.SOL_RAW, unix.ICMP_FILTER, ^(1 << echoReply4))
				return
			}
			only := unix.ICMPv6Filter{}
			for i := range only.Data {
				only.Data[i] = ^uint32(0)
			}
			only.Data[echoReply6/32] &^= 1 << (echoReply6 % 32)
			failed = unix.SetsockoptICMPv6Filter(int(fd), unix.SOL_ICMPV6, unix.ICMPV6_FILTER, &only)
		})
		return errors.Join(err, failed)
	}
	var err error
	if f.receive, err = (&net.ListenConfig{Control: filter}).ListenPacket(context.Background(), icmp, f.source.String()); err != nil {
		return err
	}
	f.send, err = net.ListenPacket(raw, f.source.String())
	return err
}

// Close closes the sockets; more than once does no harm.
func (p *Prober) Close() {
	for _, f := range p.families {
		for _, c := range []net.PacketConn{f.send, f.receive} {
			if c != nil {
				_ = c.Close() // nothing is unsent
			}
		}
	}
}

// Update adds and removes users of tunnels: a tunnel is probed from its first
// user's addition until its last one's removal.
func (p *Prober) Update(add, remove []lb.Tunnel) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// A tunnel that stays keeps what is known of it.
	for _, t := range add {
		p.machine.use(t, 1)
	}
	for _, t := range remove {
		p.machine.use(t, -1)
	}
}

// Unreachable lists the tunnels that have lost their last three probes.
func (p *Prober) Unreachable() []lb.Tunnel {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.machine.unreachable()
}

// Run probes until ctx ends, and closes the sockets.
func (p *Prober) Run(ctx context.Context) {
	var listening sync.WaitGroup
	for _, f := range p.families {
		listening.Go(func() { p.listen(f) })
	}
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			p.Close()
			listening.Wait()
			return
		case now := <-tick.C:
			p.mu.Lock()
			probes, changes := p.machine.tick(now), p.machine.changed()
			p.mu.Unlock()
			for _, x := range probes {
				// What can't be sent is not answered.
				if err := p.send(x); err != nil {
					p.config.Log.Debug("probe not sent", "tunnel", x.tunnel, "error", err)
				}
			}
			p.tell(changes)
		}
	}
}

// tell logs a few of the changes by name.
func (p *Prober) tell(changes []change) {
	const few = 10
	for i, c := range changes {
		if i == few {
			p.config.Log.Warn("tunnels changed", "more", len(changes)-few)
			return
		}
		if c.down {
			p.config.Log.Warn("tunnel unreachable: no host agent answers through it", "tunnel", c.tunnel)
		} else {
			p.config.Log.Info("tunnel reachable again", "tunnel", c.tunnel)
		}
	}
}

func (p *Prober) send(x probe) error {
	for _, f := range p.families {
		if f.source.Is4() != x.tunnel.Dst.Is4() {
			continue
		}
		// Each probe has an entropy of its own, for GUE's ways.
		hash := x.id * 0x9e3779b97f4a7c15
		packet, err := encap.Encapsulate(x.tunnel, f.source, hash, p.echo(f.source, x))
		if err != nil {
			return err
		}
		_, err = f.send.WriteTo(packet, &net.IPAddr{IP: x.tunnel.Dst.AsSlice()})
		return err
	}
	return fmt.Errorf("the mux has no address of the family of %s", x.tunnel.Dst)
}

func (p *Prober) listen(f family) {
	buffer := make([]byte, 256)
	for {
		n, from, err := f.receive.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier probe
		}
		address, ok := from.(*net.IPAddr)
		id, ours := p.parse(buffer[:n])
		if !ok || !ours {
			continue
		}
		source, _ := netip.AddrFromSlice(address.IP)
		p.mu.Lock()
		p.machine.answer(id, source.Unmap())
		p.mu.Unlock()
	}
}

const (
	echo4, echoReply4 = 8, 0
	echo6, echoReply6 = 128, 129
	icmpHeader        = 8
	echoSize          = icmpHeader + 16 // secret, probe's id
)

// echo is the inner packet of a probe.
func (p *Prober) echo(source netip.Addr, x probe) []byte {
	icmp := []byte{echo4, 0, 0, 0}
	if source.Is6() {
		icmp[0] = echo6
	}
	icmp = binary.BigEndian.AppendUint32(icmp, uint32(x.id)) // identifier and sequence number
	icmp = binary.BigEndian.AppendUint64(icmp, p.secret)
	icmp = binary.BigEndian.AppendUint64(icmp, x.id)
	const ttl = 64
	if source.Is4() {
		binary.BigEndian.PutUint16(icmp[2:], checksum(icmp))
		ip := []byte{0x45, 0, 0, 20 + echoSize, 0, 0, 0x40, 0, ttl, byte(lb.ICMP), 0, 0} // do not fragment
		ip = append(append(ip, source.AsSlice()...), x.tunnel.Dst.AsSlice()...)
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
		return append(ip, icmp...)
	}
	addresses := append(source.AsSlice(), x.tunnel.Dst.AsSlice()...)
	binary.BigEndian.PutUint16(icmp[2:], checksum(addresses, []byte{0, echoSize, 0, byte(lb.ICMPv6)}, icmp))
	ip := append([]byte{0x60, 0, 0, 0, 0, echoSize, byte(lb.ICMPv6), ttl}, addresses...)
	return append(ip, icmp...)
}

// parse is the id of the probe that an ICMP message answers. The kernel has
// checked what ICMPv6's checksum covers; for ICMP it is in the data's secret.
func (p *Prober) parse(icmp []byte) (id uint64, ours bool) {
	if len(icmp) != echoSize || icmp[0] != echoReply4 && icmp[0] != echoReply6 || icmp[1] != 0 ||
		binary.BigEndian.Uint64(icmp[icmpHeader:]) != p.secret {
		return 0, false
	}
	return binary.BigEndian.Uint64(icmp[icmpHeader+8:]), true
}

// checksum is the Internet checksum (RFC 1071) of parts of even length.
func checksum(parts ...[]byte) uint16 {
	sum := uint32(0)
	for _, b := range parts {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
