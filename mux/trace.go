package mux

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/mux/datapath"
)

func formatASN(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

// Trace implements nodelink.Handler: the real program runs on the described
// packet as if it came in by the first interface.
func (m *mux) Trace(_ context.Context, p *quartetv1.TracePacket) (*quartetv1.TraceResponse, error) {
	name := m.config.Datapath.Interfaces[0]
	iface, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("trace packet: %s: %w", name, err)
	}
	frame, flow, err := buildFrame(p, iface.HardwareAddr)
	if err != nil {
		return nil, fmt.Errorf("trace packet: %w", err)
	}
	t, err := m.data.Trace(frame, iface.Index)
	if err != nil {
		return nil, err
	}
	r := &quartetv1.TraceResponse{
		Exit: t.Exit, Verdict: t.Verdict, Vip: t.VIP, Tenant: t.Tenant,
		Hash: t.Hash, Bucket: uint32(t.Bucket), Buckets: uint32(t.Buckets), ChosenBy: t.ChosenBy,
		Interface: t.Interface,
	}
	if t.Verdict == "tx" || t.Verdict == "redirect" {
		r.PacketOut = t.PacketOut
		r.NextHopMac = t.NextHopMAC.String()
	}
	if t.DIP != nil {
		r.Dip, r.DipPort = t.DIP.Addr.String(), uint32(t.DIP.Port)
		r.Tunnel, r.Encapsulation = t.DIP.Tunnel.Dst.String(), t.DIP.Tunnel.Encap.String()
	}
	if t.Endpoint != nil {
		r.Endpoint = t.Endpoint.Name
		m.mu.Lock()
		e := m.endpoints[t.Endpoint.Endpoint]
		m.mu.Unlock()
		r.PreviousDip, r.BucketGeneration = bucketHistory(e, t.Bucket)
	}
	r.Steps = steps(flow, p, name, len(frame)-14, t, r)
	return r, nil
}

// bucketHistory is what a bucket had before, "" for nothing, and since when it
// has what it has.
func bucketHistory(e *quartetv1.MuxEndpoint, bucket int) (previous string, generation uint64) {
	if b := e.GetBucketGenerations(); len(b) >= 8*(bucket+1) {
		generation = binary.LittleEndian.Uint64(b[8*bucket:])
	}
	if b := e.GetPrevious(); len(b) >= 2*(bucket+1) {
		if i := int(binary.LittleEndian.Uint16(b[2*bucket:])); i < len(e.GetDips()) {
			d, err := convertDIP(e.Dips[i], lb.EncapIPIP)
			if err == nil {
				previous = d.String()
			}
		}
	}
	return previous, generation
}

// steps tells a trace, one line a decision, in the program's order.
func steps(flow lb.Flow, p *quartetv1.TracePacket, in string, length int, t datapath.Trace, r *quartetv1.TraceResponse) []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	kind := ""
	if flow.Protocol == lb.TCP && p.Syn {
		kind = ", SYN"
	}
	if p.DontFragment {
		kind += ", don't fragment"
	}
	say("packet %s%s, %d bytes, in by %s", flow, kind, length, in)
	switch {
	case t.VIP != "":
		say("%s is an address of VIP %s of tenant %s", flow.Dst, t.VIP, t.Tenant)
	case t.Exit == "no_vip":
		say("%s is not a VIP", flow.Dst)
	}
	if e := t.Endpoint; e != nil {
		say("endpoint %s (%s): consistency %s, DIPs: %d, generation %d", e.Name, e.Endpoint, e.Consistency, len(e.DIPs), e.Generation)
	} else if t.Exit == "no_endpoint" {
		say("the VIP has no endpoint for %s port %d", flow.Protocol, flow.DstPort)
	}
	if t.Buckets > 0 && t.BucketDIP != nil {
		history := ""
		if r.BucketGeneration > 0 {
			history = fmt.Sprintf(" since generation %d", r.BucketGeneration)
		}
		if r.PreviousDip != "" {
			history += ", before that " + r.PreviousDip
		}
		say("flow hash %016x: bucket %d of %d has %s%s", t.Hash, t.Bucket, t.Buckets, t.BucketDIP, history)
	}
	switch t.ChosenBy {
	case "connection table":
		class := "untrusted"
		if t.Trusted {
			class = "trusted"
		}
		say("the connection table has the flow, %s, at %s", class, t.DIP)
	case "fragment table":
		say("the first fragment went to %s", t.DIP)
	case "quoted packet":
		say("the quoted packet's flow goes to %s", t.DIP)
	}
	if t.DIP != nil && (t.Verdict == "tx" || t.Verdict == "redirect") && (t.Exit == "tx" || t.Exit == "redirect") {
		say("%s of %d bytes, by %s to %s, path MTU %d", t.DIP.Tunnel, len(t.PacketOut)-14, t.Interface, t.NextHopMAC, t.MTU)
	}
	say("exit %s, verdict %s", t.Exit, t.Verdict)
	return out
}

// buildFrame makes the described packet, from the Ethernet header on.
func buildFrame(p *quartetv1.TracePacket, mac net.HardwareAddr) ([]byte, lb.Flow, error) {
	var flow lb.Flow
	var err error
	if flow.Src, err = netip.ParseAddr(p.GetSource()); err != nil {
		return nil, flow, fmt.Errorf("source: %q is not an address", p.GetSource())
	}
	if flow.Dst, err = netip.ParseAddr(p.GetDestination()); err != nil {
		return nil, flow, fmt.Errorf("destination: %q is not an address", p.GetDestination())
	}
	flow.Src, flow.Dst = flow.Src.Unmap(), flow.Dst.Unmap()
	if flow.Src.Is4() != flow.Dst.Is4() {
		return nil, flow, errors.New("source and destination are not of one family")
	}
	if p.SourcePort > 65535 || p.DestinationPort > 65535 {
		return nil, flow, errors.New("source_port, destination_port: 0 to 65535 are wanted")
	}
	if len(mac) != 6 {
		mac = net.HardwareAddr{2, 0, 0, 0, 0, 2}
	}
	ethernet := &layers.Ethernet{SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, DstMAC: mac}
	var network gopacket.SerializableLayer
	var transport []gopacket.SerializableLayer
	var checksummed interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}
	switch p.Protocol {
	case "TCP", "tcp":
		flow.Protocol = lb.TCP
		tcp := &layers.TCP{SrcPort: layers.TCPPort(p.SourcePort), DstPort: layers.TCPPort(p.DestinationPort),
			SYN: p.Syn, ACK: !p.Syn, Window: 65535}
		transport, checksummed = []gopacket.SerializableLayer{tcp}, tcp
	case "UDP", "udp":
		flow.Protocol = lb.UDP
		udp := &layers.UDP{SrcPort: layers.UDPPort(p.SourcePort), DstPort: layers.UDPPort(p.DestinationPort)}
		transport, checksummed = []gopacket.SerializableLayer{udp}, udp
	case "ICMP", "icmp":
		flow.Protocol = lb.ICMP
		if flow.Dst.Is6() {
			flow.Protocol = lb.ICMPv6
			icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(layers.ICMPv6TypeEchoRequest, 0)}
			transport, checksummed = []gopacket.SerializableLayer{icmp, &layers.ICMPv6Echo{Identifier: 1, SeqNumber: 1}}, icmp
		} else {
			transport = []gopacket.SerializableLayer{&layers.ICMPv4{
				TypeCode: layers.CreateICMPv4TypeCode(layers.ICMPv4TypeEchoRequest, 0), Id: 1, Seq: 1}}
		}
	default:
		return nil, flow, fmt.Errorf("protocol: %q is not one of TCP, UDP, ICMP", p.Protocol)
	}
	if flow.Protocol == lb.TCP || flow.Protocol == lb.UDP {
		flow.SrcPort, flow.DstPort = uint16(p.SourcePort), uint16(p.DestinationPort)
	}
	header := 20
	if flow.Dst.Is4() {
		ip := &layers.IPv4{Version: 4, TTL: 64, Id: 1, Protocol: layers.IPProtocol(flow.Protocol),
			SrcIP: flow.Src.AsSlice(), DstIP: flow.Dst.AsSlice()}
		if p.DontFragment {
			ip.Flags = layers.IPv4DontFragment
		}
		ethernet.EthernetType, network = layers.EthernetTypeIPv4, ip
		if checksummed != nil {
			_ = checksummed.SetNetworkLayerForChecksum(ip)
		}
	} else {
		header = 40
		ip := &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: layers.IPProtocol(flow.Protocol),
			SrcIP: flow.Src.AsSlice(), DstIP: flow.Dst.AsSlice()}
		ethernet.EthernetType, network = layers.EthernetTypeIPv6, ip
		if checksummed != nil {
			_ = checksummed.SetNetworkLayerForChecksum(ip)
		}
	}
	least := header + map[lb.Protocol]int{lb.TCP: 20, lb.UDP: 8, lb.ICMP: 8, lb.ICMPv6: 8}[flow.Protocol]
	if p.Length == 0 {
		p.Length = uint32(least)
	}
	if int(p.Length) < least || p.Length > 9000 {
		return nil, flow, fmt.Errorf("length: %d; %d to 9000", p.Length, least)
	}
	buffer := gopacket.NewSerializeBuffer()
	all := append([]gopacket.SerializableLayer{ethernet, network}, transport...)
	all = append(all, gopacket.Payload(make([]byte, int(p.Length)-least)))
	if err := gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, all...); err != nil {
		return nil, flow, err
	}
	// gopacket pads short frames, which the wire need not.
	return buffer.Bytes()[:14+p.Length], flow, nil
}
