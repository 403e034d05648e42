package object

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/lb"
)

var marshal = protojson.MarshalOptions{UseProtoNames: true}

// rule is what one field's value must be, beyond its type.
type rule struct {
	valid             string                                 // what would be valid, for people
	text              func(string) (canonical, wrong string) // strings
	noun              string                                 // numbers: "70000 is not <noun>"
	min, max          uint32                                 // numbers
	shortest, longest time.Duration                          // durations
}

var label = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

var (
	labelRule = rule{valid: "1..63 lower-case letters, digits and hyphens, a letter or digit at both ends (RFC 1123)", text: func(s string) (string, string) {
		if !label.MatchString(s) {
			return "", quote(s) + " is not a label"
		}
		return s, ""
	}}
	addressRule = rule{valid: "a unicast IPv4 or IPv6 address", text: parseAddress}
	v6Rule      = rule{valid: "a unicast IPv6 address", text: func(s string) (string, string) {
		c, wrong := parseAddress(s)
		if wrong == "" && !strings.Contains(c, ":") {
			return "", s + " is not IPv6"
		}
		return c, wrong
	}}
	prefixRule = rule{valid: "an IPv4 prefix /8../32 or an IPv6 prefix /16../128, such as 203.0.113.0/24", text: parsePrefix}
	portRule   = rule{noun: "a port", min: 1, max: 65535}
	countRule  = rule{noun: "a count", min: 1, max: 100}
)

// enum takes one of the values, in lower or upper case.
func enum(noun string, values ...string) rule {
	return rule{valid: oneOf(values), text: func(s string) (string, string) {
		for _, v := range values {
			if s == v || s == strings.ToLower(v) || s == strings.ToUpper(v) {
				return v, ""
			}
		}
		return "", quote(s) + " is not " + noun
	}}
}

// pattern takes what re matches.
func pattern(noun, valid, re string) rule {
	compiled := regexp.MustCompile(re)
	return rule{valid: valid, text: func(s string) (string, string) {
		if !compiled.MatchString(s) {
			return "", quote(s) + " is not " + noun
		}
		return s, ""
	}}
}

// rules has a rule for every string, number and duration of the schema; a test
// checks that none is forgotten.
var rules = map[protoreflect.FullName]rule{
	"quartet.v1.Vip.kind":      enum("this kind", KindVip),
	"quartet.v1.Vip.name":      labelRule,
	"quartet.v1.Vip.tenant":    labelRule,
	"quartet.v1.Vip.addresses": addressRule,
	"quartet.v1.Vip.snat":      addressRule,

	"quartet.v1.Endpoint.name":          labelRule,
	"quartet.v1.Endpoint.protocol":      enum("a protocol", lb.TCP.String(), lb.UDP.String()),
	"quartet.v1.Endpoint.port":          portRule,
	"quartet.v1.Endpoint.consistency":   enum("a consistency", lb.ConsistencyHash.String(), lb.ConsistencyTable.String()),
	"quartet.v1.Endpoint.encapsulation": enum("an encapsulation that muxes send", lb.EncapIPIP.String(), lb.EncapGUE.String()),

	"quartet.v1.Backend.dip":    addressRule,
	"quartet.v1.Backend.dip6":   v6Rule,
	"quartet.v1.Backend.host":   addressRule,
	"quartet.v1.Backend.port":   portRule,
	"quartet.v1.Backend.weight": {noun: "a weight", min: 0, max: 65535},
	"quartet.v1.Backend.tunnel": addressRule,

	"quartet.v1.Health.interval": {valid: "100ms..1h", shortest: 100 * time.Millisecond, longest: time.Hour},
	"quartet.v1.Health.timeout":  {valid: "1ms..interval", shortest: time.Millisecond, longest: time.Hour},
	"quartet.v1.Health.rise":     countRule,
	"quartet.v1.Health.fall":     countRule,
	"quartet.v1.Health.port":     portRule,

	"quartet.v1.HttpCheck.path": pattern("a path", `a path that starts with "/", without blanks or "#", up to 1001 characters`, `^/[\x21\x22\x24-\x7e]{0,1000}$`),
	"quartet.v1.HttpCheck.host": pattern("a Host header", "a DNS name or an address, with or without a port",
		`^([A-Za-z0-9]([-A-Za-z0-9_.]{0,252}[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?$`),
	"quartet.v1.HttpCheck.statuses": {noun: "an HTTP status", min: 100, max: 599},
	"quartet.v1.GrpcCheck.service":  pattern("a service name", "up to 253 printable ASCII characters without blanks", `^[\x21-\x7e]{0,253}$`),
	"quartet.v1.CommandCheck.argv": {valid: "up to 4096 bytes without NUL", text: func(s string) (string, string) {
		if len(s) > 4096 || strings.ContainsRune(s, 0) {
			return "", quote(s) + " is not an argument"
		}
		return s, ""
	}},

	"quartet.v1.VipPool.kind":     enum("this kind", KindVipPool),
	"quartet.v1.VipPool.name":     labelRule,
	"quartet.v1.VipPool.prefixes": prefixRule,
	"quartet.v1.VipPool.announce": enum("a way to announce", "aggregate", "host"),
}

// counts bounds every list of the schema.
var counts = map[protoreflect.FullName]struct{ min, max int }{
	"quartet.v1.Vip.addresses":      {1, 16},
	"quartet.v1.Vip.endpoints":      {0, 1024},
	"quartet.v1.Vip.snat":           {0, 4096},
	"quartet.v1.Endpoint.backends":  {1, 4096},
	"quartet.v1.HttpCheck.statuses": {1, 100},
	"quartet.v1.CommandCheck.argv":  {1, 64},
	"quartet.v1.VipPool.prefixes":   {1, 1024},
}

// required fields have no default. An endpoint's port has a rule of its own.
var required = map[protoreflect.FullName]bool{
	"quartet.v1.Vip.name":          true,
	"quartet.v1.Vip.addresses":     true,
	"quartet.v1.Endpoint.protocol": true,
	"quartet.v1.Endpoint.backends": true,
	"quartet.v1.Backend.dip":       true,
	"quartet.v1.CommandCheck.argv": true,
	"quartet.v1.VipPool.name":      true,
	"quartet.v1.VipPool.prefixes":  true,
}

func parseAddress(s string) (canonical, wrong string) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil:
		return "", quote(s) + " is not an address"
	case a.Zone() != "":
		return "", quote(s) + " has a zone"
	case a.Is4In6():
		return "", fmt.Sprintf("%s is an IPv4-mapped IPv6 address: write %s", s, a.Unmap())
	case a.IsUnspecified():
		return "", s + " is the unspecified address"
	case a.IsMulticast():
		return "", s + " is a multicast address"
	case a.IsLoopback():
		return "", s + " is a loopback address"
	case a.IsLinkLocalUnicast():
		return "", s + " is a link-local address"
	case a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "", s + " is the broadcast address"
	case a.Is4() && a.As4()[0] == 0:
		return "", s + " is in 0.0.0.0/8, which no host has" // RFC 1122 section 3.2.1.3
	}
	return a.String(), ""
}

func parsePrefix(s string) (canonical, wrong string) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return "", quote(s) + " is not a prefix"
	}
	shortest := 8
	if p.Addr().Is6() {
		shortest = 16
	}
	switch {
	case p.Addr().Is4In6():
		return "", s + " is an IPv4-mapped IPv6 prefix"
	case p != p.Masked():
		return "", fmt.Sprintf("%s has host bits set: write %s", s, p.Masked())
	case p.Bits() < shortest:
		return "", s + " is too short"
	}
	for _, reserved := range reservedPrefixes {
		if p.Overlaps(reserved) {
			return "", fmt.Sprintf("%s is in %s, which has no unicast addresses for services", s, reserved)
		}
	}
	return p.String(), ""
}

// reservedPrefixes hold no address that parseAddress accepts.
var reservedPrefixes = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("::/16"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

// checkPool checks what no single field shows.
func checkPool(p *quartetv1.VipPool, r *report) {
	for i, a := range p.GetPrefixes() {
		for j, b := range p.GetPrefixes()[:i] {
			pa, errA := netip.ParsePrefix(a)
			pb, errB := netip.ParsePrefix(b)
			if errA == nil && errB == nil && pa.Overlaps(pb) {
				r.add(fmt.Sprintf("prefixes[%d]", i), fmt.Sprintf("%s overlaps prefixes[%d], %s", a, j, b), "prefixes that do not overlap")
				break
			}
		}
	}
}

// checkVip checks what no single field shows, with defaults filled in. Fields
// that were wrong by themselves are zero here and skipped.
func checkVip(v *quartetv1.Vip, r *report) {
	has4, has6 := false, false
	once := map[string]int{}
	for i, a := range v.GetAddresses() {
		if a == "" {
			continue
		}
		unique(r, once, a, i, "addresses", "")
		if strings.Contains(a, ":") {
			has6 = true
		} else {
			has4 = true
		}
	}
	if !r.ok("addresses") {
		has4, has6 = true, true // not known: blame no DIP for its family
	}
	checkFamily := func(path, text string) {
		if is6 := strings.Contains(text, ":"); text != "" && (is6 && !has6 || !is6 && !has4) {
			r.add(path, fmt.Sprintf("%s is %s and the VIP has no %s address", text, familyName(is6), familyName(is6)), "a DIP of a family that addresses has")
		}
	}
	once = map[string]int{}
	for i, a := range v.GetSnat() {
		unique(r, once, a, i, "snat", "")
		checkFamily(fmt.Sprintf("snat[%d]", i), a)
	}

	names, keys := map[string]int{}, map[string]int{}
	for i, e := range v.GetEndpoints() {
		path := fmt.Sprintf("endpoints[%d]", i)
		switch {
		case e.GetAnyPort() && e.GetPort() != 0:
			r.add(path+".port", fmt.Sprintf("%d stands beside any_port", e.GetPort()), "either port or any_port")
		case !e.GetAnyPort() && e.GetPort() == 0 && r.ok(path+".port") && r.ok(path+".any_port"):
			r.add(path+".port", "is missing", "1..65535, or any_port: true")
		}
		if r.ok(path+".port") && r.ok(path+".protocol") && r.ok(path+".any_port") {
			key := fmt.Sprintf("%s port %d", e.GetProtocol(), e.GetPort())
			if e.GetAnyPort() {
				key = e.GetProtocol() + " any port"
			}
			if first, twice := keys[key]; twice {
				r.add(path+".port", fmt.Sprintf("endpoints[%d] is %s already", first, key), "one endpoint for each protocol and port")
			} else {
				keys[key] = i
				if r.ok(path + ".name") {
					unique(r, names, e.GetName(), i, "endpoints", ".name")
				}
			}
		}
		checkBackends(e, path, checkFamily, r)
		if h := e.GetHealth(); h != nil {
			checkHealth(h, e, path, r)
		}
	}
}

// unique reports the second of two equal values of a list.
func unique(r *report, once map[string]int, value string, i int, list, field string) {
	if value == "" {
		return
	}
	if first, twice := once[value]; twice {
		r.add(fmt.Sprintf("%s[%d]%s", list, i, field), fmt.Sprintf("%s is %s[%d]%s already", value, list, first, field), "each value once")
		return
	}
	once[value] = i
}

func checkBackends(e *quartetv1.Endpoint, path string, checkFamily func(path, text string), r *report) {
	dips := map[string]int{}
	tunnels := map[bool]map[netip.Addr]int{false: {}, true: {}}
	weights := uint64(0)
	for i, b := range e.GetBackends() {
		at := fmt.Sprintf("%s.backends[%d]", path, i)
		weights += uint64(b.GetWeight())
		for _, d := range []struct{ field, dip string }{{"dip", b.GetDip()}, {"dip6", b.GetDip6()}} {
			if d.dip == "" {
				continue
			}
			checkFamily(at+"."+d.field, d.dip)
			if first, twice := dips[d.dip]; twice {
				r.add(at+"."+d.field, fmt.Sprintf("%s is a DIP of backends[%d] already", d.dip, first), "each DIP once in an endpoint (a weight gives it a larger share)")
			} else {
				dips[d.dip] = i
			}
		}
		if b.GetDip6() != "" && strings.Contains(b.GetDip(), ":") {
			r.add(at+".dip6", "stands beside a dip that is IPv6 itself", "dip6 only beside an IPv4 dip")
		}
		for _, is6 := range []bool{false, true} {
			if b.GetTunnel() == "" || !BackendDIP(b, is6).IsValid() {
				continue
			}
			t := BackendTunnel(b, is6)
			if first, twice := tunnels[is6][t]; twice {
				r.add(at+".tunnel", fmt.Sprintf("%s is the tunnel of backends[%d] already, and its host could not tell their packets apart", t, first), "a tunnel address for each backend")
				break
			}
			tunnels[is6][t] = i
		}
	}
	// A tunnel may also be another backend's DIP, which tunnels to itself.
	for i, b := range e.GetBackends() {
		for is6, by := range tunnels {
			if b.GetTunnel() == "" && BackendDIP(b, is6).IsValid() {
				if j, taken := by[BackendDIP(b, is6)]; taken {
					r.add(fmt.Sprintf("%s.backends[%d].tunnel", path, j), fmt.Sprintf("%s is where backends[%d] is reached", BackendDIP(b, is6), i), "a tunnel address for each backend")
				}
			}
		}
	}
	if len(e.GetBackends()) > 0 && weights == 0 && r.ok(path+".backends") {
		r.add(path+".backends", "every weight is 0", "a weight of at least 1 for one backend")
	}
}

func checkHealth(h *quartetv1.Health, e *quartetv1.Endpoint, path string, r *report) {
	at := path + ".health"
	var set []string
	for _, c := range []struct {
		name string
		is   bool
	}{{"http", h.Http != nil}, {"https", h.Https != nil}, {"tcp", h.Tcp != nil}, {"grpc", h.Grpc != nil}, {"command", h.Command != nil}} {
		if c.is {
			set = append(set, c.name)
		}
	}
	const one = "exactly one of http, https, tcp, grpc and command"
	switch {
	case len(set) > 1:
		r.add(at, strings.Join(set, " and ")+" are set", one)
	case len(set) == 0 && r.ok(at):
		r.add(at, "has no check", one)
	}
	if i, t := h.GetInterval().AsDuration(), h.GetTimeout().AsDuration(); t > i && r.ok(at+".interval") && r.ok(at+".timeout") {
		r.add(at+".timeout", fmt.Sprintf("%s is longer than the interval, %s", t, i), "1ms..interval")
	}
	if h.GetHttp().GetVerify() {
		r.add(at+".http.verify", "there is no certificate to verify without TLS", "verify only under https")
	}
	if argv := h.GetCommand().GetArgv(); len(argv) > 0 && r.ok(at+".command.argv[0]") {
		if p := argv[0]; p == "" || p == "." || p == ".." || strings.Contains(p, "/") {
			r.add(at+".command.argv[0]", quote(p)+" is not the name of a program", "a file name without \"/\", found in the host agent's --check-commands directory")
		}
	}
	if h.GetPort() == 0 && h.Command == nil && e.GetAnyPort() && r.ok(at+".port") {
		for i, b := range e.GetBackends() {
			if b.GetPort() == 0 && r.ok(fmt.Sprintf("%s.backends[%d].port", path, i)) {
				r.add(at+".port", fmt.Sprintf("is missing, and with any_port backends[%d] has no port to check", i), "1..65535")
				break
			}
		}
	}
}
