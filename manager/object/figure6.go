package object

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/types/known/structpb"
)

// isFigure6 recognises Ananta's VIP configuration (section 3.2.1, Figure 6):
//
//	{"VIP": "1.2.3.4",
//	 "Endpoint": [{"protocol": "tcp", "port": "80",
//	               "DIP": [{"Host": "1.1.1.0", "IP": "1.1.1.1", "port": "8080"}]}],
//	 "SNAT": [{"IP": "1.1.1.1"}, {"IP": "2.2.2.2"}]}
func isFigure6(doc *structpb.Struct) bool {
	return doc.GetFields()["VIP"] != nil && doc.GetFields()["kind"] == nil
}

// figure6Names are the figure's fields and ours, by the mapping they are in.
var figure6Names = map[string]map[string]string{
	"":         {"VIP": "addresses", "Endpoint": "endpoints", "SNAT": "snat"},
	"Endpoint": {"protocol": "protocol", "port": "port", "DIP": "backends"},
	"DIP":      {"Host": "host", "IP": "dip", "port": "port"},
	"SNAT":     {"IP": "IP"},
}

// fromFigure6 renames the figure's fields to ours; what they may hold is then
// checked as in any Vip. Its ports are strings or numbers, its lists may be a
// single mapping, and the VIP gets the name vip-1-2-3-4.
func fromFigure6(doc *structpb.Struct, r *report) *structpb.Struct {
	name, ok := figure6Name(doc)
	if ok {
		r.object = Ref{KindVip, name}.String()
	} else {
		name = "unnamed" // valid, so that only the address is reported
	}
	out := renamed("", "", doc, r)
	vip := out.Fields["addresses"]
	out.Fields["kind"] = structpb.NewStringValue(KindVip)
	out.Fields["name"] = structpb.NewStringValue(name)
	out.Fields["addresses"] = structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{vip}})
	if snat := out.Fields["snat"].GetListValue(); snat != nil {
		for i, v := range snat.GetValues() {
			if s := v.GetStructValue(); s != nil {
				if s.Fields["IP"] == nil {
					r.add(fmt.Sprintf("SNAT[%d].IP", i), "is missing", addressRule.valid)
				}
				snat.Values[i] = s.Fields["IP"]
			}
		}
		snat.Values = slices.DeleteFunc(snat.Values, func(v *structpb.Value) bool { return v == nil })
	}
	return out
}

func figure6Name(doc *structpb.Struct) (string, bool) {
	a, err := netip.ParseAddr(doc.GetFields()["VIP"].GetStringValue())
	if err != nil {
		return "", false
	}
	return "vip-" + strings.NewReplacer(".", "-", ":", "-").Replace(a.WithZone("").StringExpanded()), true
}

func renamed(in, path string, from *structpb.Struct, r *report) *structpb.Struct {
	names := figure6Names[in]
	to := &structpb.Struct{Fields: map[string]*structpb.Value{}}
	known := make([]string, 0, len(names))
	for name := range names {
		known = append(known, name)
	}
	slices.Sort(known)
	keys := make([]string, 0, len(from.GetFields()))
	for key := range from.GetFields() {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		value, at := from.Fields[key], join(path, fieldName(key))
		ours, ok := names[key]
		if !ok {
			r.add(at, "unknown field"+suggest(key, known), oneOf(known)+" (or a document with kind: Vip, which can say more)")
			continue
		}
		switch key {
		case "Endpoint", "DIP", "SNAT":
			to.Fields[ours] = structpb.NewListValue(renamedList(key, at, value, r))
		case "port":
			if n, err := strconv.ParseUint(value.GetStringValue(), 10, 32); err == nil {
				value = structpb.NewNumberValue(float64(n))
			}
			to.Fields[ours] = value
		default:
			to.Fields[ours] = value
		}
	}
	return to
}

func renamedList(key, path string, from *structpb.Value, r *report) *structpb.ListValue {
	values := []*structpb.Value{from}
	if l, ok := from.GetKind().(*structpb.Value_ListValue); ok {
		values = l.ListValue.GetValues()
	}
	to := &structpb.ListValue{}
	for i, v := range values {
		if s, ok := v.GetKind().(*structpb.Value_StructValue); ok {
			v = structpb.NewStructValue(renamed(key, fmt.Sprintf("%s[%d]", path, i), s.StructValue, r))
		}
		to.Values = append(to.Values, v)
	}
	return to
}

var figure6Paths = []struct {
	ours *regexp.Regexp
	his  string
}{
	{regexp.MustCompile(`^addresses(\[\d+\])?$`), "VIP"},
	{regexp.MustCompile(`^snat(\[\d+\])$`), "SNAT$1.IP"},
	{regexp.MustCompile(`^snat$`), "SNAT"},
	{regexp.MustCompile(`^endpoints\b`), "Endpoint"},
	{regexp.MustCompile(`\.backends\b`), ".DIP"},
	{regexp.MustCompile(`(\.DIP\[\d+\])\.host$`), "$1.Host"},
	{regexp.MustCompile(`(\.DIP\[\d+\])\.dip$`), "$1.IP"},
}

// figure6Path is a path of ours in the figure's words.
func figure6Path(path string) string {
	for _, p := range figure6Paths {
		path = p.ours.ReplaceAllString(path, p.his)
	}
	return path
}
