// Package object reads the documents that operators write (Vips and VipPools)
// and says everything that is wrong with them.
//
// Read parses YAML and JSON text, Decode makes typed objects with their
// defaults filled in, and a Set checks what only all objects together show.
// Nothing here does I/O. A violation's text is the one operators see.
package object

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// Kinds of objects.
const (
	KindVip     = "Vip"
	KindVipPool = "VipPool"
)

// Kinds are all kinds.
var Kinds = []string{KindVip, KindVipPool}

// Defaults that Default fills in.
const (
	DefaultTenant   = "default"
	DefaultInterval = 2 * time.Second
	DefaultTimeout  = time.Second
	DefaultRise     = 2
	DefaultFall     = 3
)

// Object is one document. Exactly one field is set.
type Object struct {
	Vip  *quartetv1.Vip
	Pool *quartetv1.VipPool
}

// Ref names an object.
type Ref struct{ Kind, Name string }

// String is "Vip/web".
func (r Ref) String() string { return r.Kind + "/" + r.Name }

// Ref is the object's kind and name.
func (o Object) Ref() Ref {
	if o.Pool != nil {
		return Ref{KindVipPool, o.Pool.GetName()}
	}
	return Ref{KindVip, o.Vip.GetName()}
}

// String is "Vip/web".
func (o Object) String() string { return o.Ref().String() }

// Message is the object's protobuf message.
func (o Object) Message() proto.Message {
	if o.Pool != nil {
		return o.Pool
	}
	return o.Vip
}

// Format is the violation in one line:
// "Vip/web: endpoints[0].port: 70000 is not a port: 1..65535".
func Format(v *quartetv1.FieldViolation) string {
	var parts []string
	for _, p := range []string{v.GetObject(), v.GetPath(), v.GetMessage(), v.GetValid()} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	return strings.Join(parts, ": ")
}

// Default fills in every default of the schema except a backend's tunnel: an
// empty tunnel means the DIP of the packet's family. It changes o in place and
// does nothing to an object that has them already.
func Default(o Object) {
	if o.Pool != nil {
		setString(&o.Pool.Announce, "aggregate")
		return
	}
	setString(&o.Vip.Tenant, DefaultTenant)
	for _, e := range o.Vip.GetEndpoints() {
		if e.AnyPort {
			setString(&e.Name, strings.ToLower(e.Protocol)+"-any")
		} else {
			setString(&e.Name, fmt.Sprintf("%s-%d", strings.ToLower(e.Protocol), e.Port))
		}
		setString(&e.Consistency, "hash")
		setString(&e.Encapsulation, "ipip")
		for _, b := range e.Backends {
			setString(&b.Host, b.Dip)
			setUint(&b.Port, e.Port)
			if b.Weight == nil {
				b.Weight = proto.Uint32(1)
			}
		}
		if h := e.Health; h != nil {
			defaultHealth(h)
		}
	}
}

func defaultHealth(h *quartetv1.Health) {
	if h.Interval == nil {
		h.Interval = durationpb.New(DefaultInterval)
	}
	if h.Timeout == nil {
		h.Timeout = durationpb.New(min(DefaultTimeout, h.Interval.AsDuration()))
	}
	setUint(&h.Rise, DefaultRise)
	setUint(&h.Fall, DefaultFall)
	for _, c := range []*quartetv1.HttpCheck{h.Http, h.Https} {
		if c != nil {
			setString(&c.Path, "/")
		}
	}
}

func setString(s *string, value string) {
	if *s == "" {
		*s = value
	}
}

func setUint(n *uint32, value uint32) {
	if *n == 0 {
		*n = value
	}
}

// Warnings are what is allowed in a Vip with its defaults but likely not meant.
func Warnings(v *quartetv1.Vip) []string {
	var out []string
	for _, text := range v.GetAddresses() {
		a, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		for _, e := range v.GetEndpoints() {
			if !anyBackend(e, func(b *quartetv1.Backend) bool { return BackendDIP(b, a.Is6()).IsValid() }) {
				out = append(out, fmt.Sprintf("endpoint %s: no backend has an %s DIP, so %s answers nothing there", e.GetName(), familyName(a.Is6()), a))
			}
		}
	}
	return out
}

// BackendDIP is the DIP that serves packets of the family, or the zero Addr.
func BackendDIP(b *quartetv1.Backend, is6 bool) netip.Addr {
	for _, s := range []string{b.GetDip(), b.GetDip6()} {
		if a, err := netip.ParseAddr(s); err == nil && a.Is6() == is6 {
			return a
		}
	}
	return netip.Addr{}
}

// BackendTunnel is the outer destination for packets of the family: tunnel, or
// the family's DIP.
func BackendTunnel(b *quartetv1.Backend, is6 bool) netip.Addr {
	if a, err := netip.ParseAddr(b.GetTunnel()); err == nil {
		return a
	}
	return BackendDIP(b, is6)
}

func anyBackend(e *quartetv1.Endpoint, f func(*quartetv1.Backend) bool) bool {
	for _, b := range e.GetBackends() {
		if f(b) {
			return true
		}
	}
	return false
}

func familyName(is6 bool) string {
	if is6 {
		return "IPv6"
	}
	return "IPv4"
}
