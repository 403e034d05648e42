package mux

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/flowhash"
	"github.com/quartet-lb/quartet/lb"
	"github.com/quartet-lb/quartet/mux/datapath"
)

// The manager's messages become the packet path's types here and nowhere else.
// What the datapath checks itself (families, indices, sizes) is left to it.

func convertTables(t *quartetv1.MuxTables) (datapath.Tables, error) {
	var out datapath.Tables
	if len(t.FlowSeed) != len(out.Seed) {
		return out, fmt.Errorf("flow_seed: %d bytes; %d are wanted", len(t.FlowSeed), len(flowhash.Seed{}))
	}
	copy(out.Seed[:], t.FlowSeed)
	var err error
	if out.VIPs, err = convertVIPs(t.Vips); err != nil {
		return out, err
	}
	out.Endpoints, err = convertEndpoints(t.Endpoints)
	return out, err
}

func convertDelta(d *quartetv1.MuxDelta) (datapath.Delta, error) {
	var out datapath.Delta
	var err error
	if out.PutVIPs, err = convertVIPs(d.PutVips); err != nil {
		return out, err
	}
	if out.PutEndpoints, err = convertEndpoints(d.PutEndpoints); err != nil {
		return out, err
	}
	for i, b := range d.DeleteVips {
		addr, err := convertAddr(b)
		if err != nil {
			return out, fmt.Errorf("delete_vips[%d]: %w", i, err)
		}
		out.DeleteVIPs = append(out.DeleteVIPs, addr)
	}
	for i, k := range d.DeleteEndpoints {
		key, err := convertKey(k)
		if err != nil {
			return out, fmt.Errorf("delete_endpoints[%d]: %w", i, err)
		}
		out.DeleteEndpoints = append(out.DeleteEndpoints, key)
	}
	return out, nil
}

func convertVIPs(in []*quartetv1.VipAddress) ([]datapath.VIP, error) {
	out := make([]datapath.VIP, len(in))
	for i, v := range in {
		addr, err := convertAddr(v.Address)
		if err != nil {
			return nil, fmt.Errorf("vips[%d].address: %w", i, err)
		}
		out[i] = datapath.VIP{Addr: addr, Name: v.Vip, Tenant: v.Tenant}
	}
	return out, nil
}

func convertEndpoints(in []*quartetv1.MuxEndpoint) ([]datapath.Endpoint, error) {
	out := make([]datapath.Endpoint, len(in))
	for i, e := range in {
		key, err := convertKey(e.Key)
		if err != nil {
			return nil, fmt.Errorf("endpoints[%d].key: %w", i, err)
		}
		o := datapath.Endpoint{
			Endpoint: key, VIPName: e.Vip, Name: e.Name, Tenant: e.Tenant, Generation: e.Generation,
			DIPs: make([]lb.DIP, len(e.Dips)),
		}
		if e.Table {
			o.Consistency = lb.ConsistencyTable
		}
		encap := lb.EncapIPIP
		if e.Gue {
			encap = lb.EncapGUE
		}
		for j, d := range e.Dips {
			if o.DIPs[j], err = convertDIP(d, encap); err != nil {
				return nil, fmt.Errorf("endpoints[%d] (%s).dips[%d].%w", i, key, j, err)
			}
		}
		if len(e.Buckets)%2 != 0 {
			return nil, fmt.Errorf("endpoints[%d] (%s).buckets: %d bytes; two a bucket are wanted", i, key, len(e.Buckets))
		}
		o.Buckets = make([]uint16, len(e.Buckets)/2)
		for j := range o.Buckets {
			o.Buckets[j] = binary.LittleEndian.Uint16(e.Buckets[2*j:])
		}
		out[i] = o
	}
	return out, nil
}

// tunnels lists the tunnels of endpoints that have been converted, or are nil,
// once for each DIP.
func tunnels(endpoints []*quartetv1.MuxEndpoint) []lb.Tunnel {
	var out []lb.Tunnel
	for _, e := range endpoints {
		encap := lb.EncapIPIP
		if e.GetGue() {
			encap = lb.EncapGUE
		}
		for _, d := range e.GetDips() {
			dst, _ := netip.AddrFromSlice(d.Tunnel)
			out = append(out, lb.Tunnel{Dst: dst, Encap: encap})
		}
	}
	return out
}

func convertDIP(d *quartetv1.Dip, encap lb.Encapsulation) (lb.DIP, error) {
	addr, err := convertAddr(d.Address)
	if err != nil {
		return lb.DIP{}, fmt.Errorf("address: %w", err)
	}
	if d.Port > 65535 {
		return lb.DIP{}, fmt.Errorf("port: %d; 0 to 65535", d.Port)
	}
	tunnel, err := convertAddr(d.Tunnel)
	if err != nil {
		return lb.DIP{}, fmt.Errorf("tunnel: %w", err)
	}
	return lb.DIP{Addr: addr, Port: uint16(d.Port), Tunnel: lb.Tunnel{Dst: tunnel, Encap: encap}}, nil
}

func convertKey(k *quartetv1.EndpointKey) (lb.Endpoint, error) {
	addr, err := convertAddr(k.GetVip())
	if err != nil {
		return lb.Endpoint{}, fmt.Errorf("vip: %w", err)
	}
	if p := k.GetProtocol(); p != uint32(lb.TCP) && p != uint32(lb.UDP) {
		return lb.Endpoint{}, fmt.Errorf("protocol: %d; 6 (TCP) or 17 (UDP)", p)
	}
	if k.GetPort() > 65535 {
		return lb.Endpoint{}, fmt.Errorf("port: %d; 0 to 65535", k.GetPort())
	}
	return lb.Endpoint{VIP: addr, Protocol: lb.Protocol(k.GetProtocol()), Port: uint16(k.GetPort())}, nil
}

func convertAddr(b []byte) (netip.Addr, error) {
	addr, ok := netip.AddrFromSlice(b)
	if !ok {
		return netip.Addr{}, fmt.Errorf("%d bytes; 4 or 16 are wanted", len(b))
	}
	return addr, nil
}

func convertAnnounce(in []string) ([]netip.Prefix, error) {
	out := make([]netip.Prefix, len(in))
	seen := make(map[netip.Prefix]bool, len(in))
	for i, text := range in {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() {
			return nil, fmt.Errorf("announce[%d]: %q is not a prefix with its host bits zero", i, text)
		}
		if seen[p] {
			return nil, fmt.Errorf("announce[%d]: %s is there twice", i, p)
		}
		seen[p] = true
		out[i] = p
	}
	return out, nil
}
