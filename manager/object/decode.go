package object

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

// MaxViolations is how many violations one answer carries; the last one then
// says how many more there are.
const MaxViolations = 100

// Decode reads documents into objects with their defaults filled in. An object
// that has a violation is not among the objects; callers that want all or
// nothing take the objects only if there are no violations. A violation's
// object is "Vip/web", or "document 2" (counted from 1) where that is unknown.
func Decode(docs []*structpb.Struct) ([]Object, []*quartetv1.FieldViolation) {
	var objects []Object
	var all []*quartetv1.FieldViolation
	more := 0
	seen := map[Ref]int{}
	for i, doc := range docs {
		r := &report{object: fmt.Sprintf("document %d", i+1)}
		o := decodeOne(doc, r)
		if len(r.violations) == 0 {
			if first, twice := seen[o.Ref()]; twice {
				r.add("name", fmt.Sprintf("document %d and document %d both are %s", first, i+1, o), "each object once")
			} else {
				seen[o.Ref()] = i + 1
				objects = append(objects, o)
			}
		}
		all = append(all, r.violations...)
		more += r.more
	}
	return objects, limit(all, more)
}

// RefOf is the kind and name of the object that a document describes, if they
// are well-formed. Violations name the object by it.
func RefOf(doc *structpb.Struct) (Ref, bool) {
	ref := Ref{doc.GetFields()["kind"].GetStringValue(), doc.GetFields()["name"].GetStringValue()}
	if isFigure6(doc) {
		name, ok := figure6Name(doc)
		return Ref{KindVip, name}, ok
	}
	return ref, slices.Contains(Kinds, ref.Kind) && label.MatchString(ref.Name)
}

// limit cuts violations down to MaxViolations; more are known of beside them.
func limit(all []*quartetv1.FieldViolation, more int) []*quartetv1.FieldViolation {
	if len(all)+more <= MaxViolations {
		return all
	}
	shown := min(len(all), MaxViolations-1)
	return append(all[:shown:shown], &quartetv1.FieldViolation{
		Message: fmt.Sprintf("and %d violations more", len(all)-shown+more),
	})
}

func decodeOne(doc *structpb.Struct, r *report) Object {
	if isFigure6(doc) {
		doc = fromFigure6(doc, r)
		r.path = figure6Path
	} else if ref, ok := RefOf(doc); ok {
		r.object = ref.String()
	}
	var o Object
	switch kind, ok := doc.GetFields()["kind"].GetKind().(*structpb.Value_StringValue); {
	case doc.GetFields()["kind"] == nil:
		r.add("kind", "is missing", oneOf(Kinds))
		return o
	case !ok:
		r.add("kind", wrongType(doc.GetFields()["kind"], "a string"), oneOf(Kinds))
		return o
	case kind.StringValue == KindVip:
		o.Vip = &quartetv1.Vip{}
	case kind.StringValue == KindVipPool:
		o.Pool = &quartetv1.VipPool{}
	default:
		r.add("kind", quote(kind.StringValue)+" is not a kind"+suggest(kind.StringValue, Kinds), oneOf(Kinds))
		return o
	}
	r.message("", doc, o.Message().ProtoReflect())
	Default(o)
	if o.Pool != nil {
		checkPool(o.Pool, r)
	} else {
		checkVip(o.Vip, r)
	}
	return o
}

// report gathers the violations of one object.
type report struct {
	object     string
	violations []*quartetv1.FieldViolation // at most MaxViolations, which ok searches
	more       int                         // how many were not kept
	// path rewrites a path of our schema to one of the document's.
	path func(string) string
}

func (r *report) add(path, message, valid string) {
	if len(r.violations) == MaxViolations {
		r.more++
		return
	}
	if r.path != nil {
		path = r.path(path)
	}
	r.violations = append(r.violations, &quartetv1.FieldViolation{Object: r.object, Path: path, Message: message, Valid: valid})
}

// ok says whether nothing was reported at path, below it or above it, so that
// one mistake is not told twice.
func (r *report) ok(path string) bool {
	if r.path != nil {
		path = r.path(path)
	}
	for _, v := range r.violations {
		if within(v.Path, path) || within(path, v.Path) {
			return false
		}
	}
	return true
}

// within says whether path is above or a part of it.
func within(path, above string) bool {
	rest, ok := strings.CutPrefix(path, above)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// message reads fields by the schema: in its order, then what it does not know.
// Both spellings of protobuf JSON are accepted, any_port and anyPort.
func (r *report) message(path string, from *structpb.Struct, to protoreflect.Message) {
	fields := to.Descriptor().Fields()
	known := 0
	for i := range fields.Len() {
		fd := fields.Get(i)
		at := join(path, string(fd.Name()))
		value, n := lookup(from, fd)
		known += n
		switch {
		case n == 0:
			if required[fd.FullName()] {
				r.add(at, "is missing", wants(fd))
			}
		case n == 2:
			r.add(at, "is there twice", "the field once")
		case fd.IsList():
			r.list(at, value, fd, to)
		default:
			if v, ok := r.value(at, value, fd, to); ok {
				to.Set(fd, v)
			}
		}
	}
	if known < len(from.GetFields()) {
		r.unknown(path, from, fields)
	}
}

// lookup finds a field by either of its names, and says how many it has.
func lookup(from *structpb.Struct, fd protoreflect.FieldDescriptor) (value *structpb.Value, n int) {
	value, ok := from.GetFields()[string(fd.Name())]
	if ok {
		n++
	}
	if fd.JSONName() != string(fd.Name()) {
		if v, ok := from.GetFields()[fd.JSONName()]; ok {
			value = v
			n++
		}
	}
	return value, n
}

func (r *report) unknown(path string, from *structpb.Struct, fields protoreflect.FieldDescriptors) {
	var names, unknown []string
	for i := range fields.Len() {
		names = append(names, string(fields.Get(i).Name()))
	}
	for key := range from.GetFields() {
		if fields.ByName(protoreflect.Name(key)) == nil && fields.ByJSONName(key) == nil {
			unknown = append(unknown, key)
		}
	}
	slices.Sort(unknown)
	for _, key := range unknown {
		r.add(join(path, fieldName(key)), "unknown field"+suggest(key, names), oneOf(names))
	}
}

func (r *report) list(at string, from *structpb.Value, fd protoreflect.FieldDescriptor, to protoreflect.Message) {
	l, ok := from.GetKind().(*structpb.Value_ListValue)
	if !ok {
		r.add(at, wrongType(from, "a list"), wants(fd))
		return
	}
	values := l.ListValue.GetValues()
	if m := counts[fd.FullName()]; len(values) < m.min || len(values) > m.max {
		r.add(at, fmt.Sprintf("has %d entries", len(values)), fmt.Sprintf("%d..%d", m.min, m.max))
		return
	}
	list := to.Mutable(fd).List()
	for i, v := range values {
		element, ok := r.value(at+"["+strconv.Itoa(i)+"]", v, fd, to)
		if !ok { // keeps its place, so that indices stay true
			element = list.NewElement()
		}
		list.Append(element)
	}
}

// value converts one value, of a field or of a list's element, and applies the
// field's rule to it.
func (r *report) value(at string, from *structpb.Value, fd protoreflect.FieldDescriptor, to protoreflect.Message) (protoreflect.Value, bool) {
	rule := rules[fd.FullName()]
	switch fd.Kind() {
	case protoreflect.StringKind:
		s, ok := from.GetKind().(*structpb.Value_StringValue)
		if !ok {
			r.add(at, wrongType(from, "a string"), wantsOne(fd))
			return protoreflect.Value{}, false
		}
		text := s.StringValue
		if rule.text != nil {
			canonical, err := rule.text(text)
			if err != "" {
				r.add(at, err, rule.valid)
				return protoreflect.Value{}, false
			}
			text = canonical
		}
		return protoreflect.ValueOfString(text), true

	case protoreflect.Uint32Kind:
		n, ok := from.GetKind().(*structpb.Value_NumberValue)
		if !ok {
			r.add(at, wrongType(from, "a number"), wantsOne(fd))
			return protoreflect.Value{}, false
		}
		if f := n.NumberValue; f != math.Trunc(f) || !(f >= float64(rule.min) && f <= float64(rule.max)) {
			r.add(at, number(f)+" is not "+rule.noun, wantsOne(fd))
			return protoreflect.Value{}, false
		}
		return protoreflect.ValueOfUint32(uint32(n.NumberValue)), true

	case protoreflect.BoolKind:
		b, ok := from.GetKind().(*structpb.Value_BoolValue)
		if !ok {
			r.add(at, wrongType(from, "a boolean"), "true or false")
			return protoreflect.Value{}, false
		}
		return protoreflect.ValueOfBool(b.BoolValue), true

	case protoreflect.MessageKind:
		if fd.Message().FullName() == (*durationpb.Duration)(nil).ProtoReflect().Descriptor().FullName() {
			return r.duration(at, from, rule)
		}
		s, ok := from.GetKind().(*structpb.Value_StructValue)
		if !ok {
			r.add(at, wrongType(from, "a mapping"), wantsOne(fd))
			return protoreflect.Value{}, false
		}
		var m protoreflect.Value
		if fd.IsList() {
			m = to.Mutable(fd).List().NewElement()
		} else {
			m = to.NewField(fd)
		}
		r.message(at, s.StructValue, m.Message())
		return m, true
	}
	panic("no conversion for " + string(fd.FullName())) // a test walks the whole schema
}

func (r *report) duration(at string, from *structpb.Value, rule rule) (protoreflect.Value, bool) {
	s, ok := from.GetKind().(*structpb.Value_StringValue)
	if !ok {
		r.add(at, wrongType(from, "a duration"), rule.valid)
		return protoreflect.Value{}, false
	}
	d, err := time.ParseDuration(s.StringValue)
	if err != nil {
		r.add(at, quote(s.StringValue)+" is not a duration", rule.valid)
		return protoreflect.Value{}, false
	}
	if d < rule.shortest || d > rule.longest {
		r.add(at, s.StringValue+" is out of range", rule.valid)
		return protoreflect.Value{}, false
	}
	return protoreflect.ValueOfMessage(durationpb.New(d).ProtoReflect()), true
}

// wants describes what a field takes.
func wants(fd protoreflect.FieldDescriptor) string {
	if fd.IsList() {
		return "a list, each " + wantsOne(fd)
	}
	return wantsOne(fd)
}

// wantsOne describes a value, of a field or of a list's element, by its rule or
// else by its type.
func wantsOne(fd protoreflect.FieldDescriptor) string {
	rule := rules[fd.FullName()]
	switch {
	case rule.valid != "":
		return rule.valid
	case fd.Kind() == protoreflect.Uint32Kind:
		return fmt.Sprintf("%d..%d", rule.min, rule.max)
	case fd.Kind() == protoreflect.MessageKind && fd.Message().Fields().Len() == 0:
		return "{}"
	case fd.Kind() == protoreflect.MessageKind:
		var names []string
		for i := range fd.Message().Fields().Len() {
			names = append(names, string(fd.Message().Fields().Get(i).Name()))
		}
		return "a mapping of " + strings.Join(names, ", ")
	}
	return "a " + fd.Kind().String()
}

func wrongType(v *structpb.Value, want string) string {
	switch k := v.GetKind().(type) {
	case *structpb.Value_StringValue:
		return quote(k.StringValue) + " is a string, not " + want
	case *structpb.Value_NumberValue:
		if want == "a string" {
			return number(k.NumberValue) + " is a number, not a string (quote it)"
		}
		return number(k.NumberValue) + " is a number, not " + want
	case *structpb.Value_BoolValue:
		if want == "a string" {
			return fmt.Sprintf("%t is a boolean, not a string (quote it)", k.BoolValue)
		}
		return fmt.Sprintf("%t is a boolean, not %s", k.BoolValue, want)
	case *structpb.Value_ListValue:
		return "is a list, not " + want
	case *structpb.Value_StructValue:
		return "is a mapping, not " + want
	}
	return "is empty, not " + want + " (or leave the field out)"
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// fieldName shows an unknown key in a path; a strange one is quoted.
func fieldName(key string) string {
	if len(key) > 0 && len(key) <= 64 && strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == "" {
		return key
	}
	return quote(key)
}

// quote bounds what a message repeats of the input.
func quote(s string) string {
	if len(s) > 100 {
		s = strings.ToValidUTF8(s[:100], "") + "…"
	}
	return strconv.Quote(s)
}

func number(f float64) string {
	if math.Abs(f) < 1e15 {
		return strconv.FormatFloat(f, 'f', -1, 64)
	}
	return strconv.FormatFloat(f, 'g', -1, 64)
}

func oneOf(names []string) string {
	switch len(names) {
	case 0:
		return "{}"
	case 1:
		return names[0]
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}

// suggest names the candidate that was likely meant, if one is near.
func suggest(got string, candidates []string) string {
	if len(got) > 64 {
		return ""
	}
	best, near := "", 3
	for _, c := range candidates {
		if d := distance(strings.ToLower(got), strings.ToLower(c)); d < near && d < len(c) {
			best, near = c, d
		}
	}
	if best == "" {
		return ""
	}
	return ", did you mean " + best + "?"
}

// distance is Levenshtein's.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(a); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			diagonal, row[j] = row[j], min(diagonal+cost, row[j]+1, row[j-1]+1)
		}
	}
	return row[len(b)]
}

// Struct is the object as a document that Decode reads back.
func (o Object) Struct() (*structpb.Struct, error) {
	b, err := marshal.Marshal(o.Message())
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", o, err)
	}
	s := &structpb.Struct{}
	if err := s.UnmarshalJSON(b); err != nil {
		return nil, fmt.Errorf("encode %s: %w", o, err)
	}
	return s, nil
}

// Equal says whether two objects are the same, defaults filled in.
func Equal(a, b Object) bool {
	a, b = a.Clone(), b.Clone()
	Default(a)
	Default(b)
	return a.Ref() == b.Ref() && proto.Equal(a.Message(), b.Message())
}

// Clone is a deep copy.
func (o Object) Clone() Object {
	if o.Pool != nil {
		return Object{Pool: proto.Clone(o.Pool).(*quartetv1.VipPool)}
	}
	return Object{Vip: proto.Clone(o.Vip).(*quartetv1.Vip)}
}
