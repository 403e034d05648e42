package object

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
)

var update = flag.Bool("update", false, "write the expected texts in testdata")

// base is what stands before each file of testdata is applied.
func base(t testing.TB) *Set {
	t.Helper()
	s := NewSet()
	objects, wrong := load(t, "testdata/base.yaml")
	wrong = append(wrong, s.Check(objects, nil)...)
	if len(wrong) > 0 {
		t.Fatal(text(wrong))
	}
	s.Apply(objects, nil)
	return s
}

func load(t testing.TB, file string) ([]Object, []*quartetv1.FieldViolation) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	docs, err := Read(b)
	if err != nil {
		return nil, []*quartetv1.FieldViolation{{Message: err.Error()}}
	}
	return Decode(docs)
}

func text(violations []*quartetv1.FieldViolation) string {
	var b strings.Builder
	for _, v := range violations {
		fmt.Fprintln(&b, Format(v))
	}
	return b.String()
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got:\n%s\nwant, from %s:\n%s", got, file, want)
	}
}

func files(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("no files %s: %v", pattern, err)
	}
	return found
}

// Each bad file stands beside the whole text that operators get to see.
func TestBad(t *testing.T) {
	for _, file := range files(t, "testdata/bad/*.yaml") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			s := base(t)
			objects, wrong := load(t, file)
			if len(wrong) == 0 {
				wrong = s.Check(objects, nil)
			}
			if len(wrong) == 0 {
				t.Error("accepted")
			}
			golden(t, strings.TrimSuffix(file, ".yaml")+".error", text(wrong))
		})
	}
}

// Each good file stands beside its objects with defaults filled in, which read
// back as the same objects.
func TestGood(t *testing.T) {
	for _, pattern := range []string{"testdata/good/*.yaml", "testdata/good/*.json"} {
		for _, file := range files(t, pattern) {
			t.Run(filepath.Base(file), func(t *testing.T) {
				s := base(t)
				objects, wrong := load(t, file)
				wrong = append(wrong, s.Check(objects, nil)...)
				if len(wrong) > 0 {
					t.Fatal(text(wrong))
				}
				s.Apply(objects, nil)
				var got strings.Builder
				var docs []*structpb.Struct
				for _, o := range objects {
					fmt.Fprintf(&got, "%s\n%s\n", o, compact(t, o))
					if o.Vip != nil {
						for _, w := range Warnings(o.Vip) {
							fmt.Fprintf(&got, "warning: %s\n", w)
						}
					}
					doc, err := o.Struct()
					if err != nil {
						t.Fatal(err)
					}
					docs = append(docs, doc)
				}
				golden(t, strings.TrimSuffix(file, filepath.Ext(file))+".objects", got.String())
				again, wrong := Decode(docs)
				if len(wrong) > 0 || len(again) != len(objects) {
					t.Fatalf("%d objects read back as %d:\n%s", len(objects), len(again), text(wrong))
				}
				for i := range again {
					if !Equal(again[i], objects[i]) {
						t.Errorf("%s changed by reading it back:\n%s", again[i], compact(t, again[i]))
					}
				}
			})
		}
	}
}

// compact is JSON without the blanks that protojson varies on purpose.
func compact(t *testing.T, o Object) string {
	t.Helper()
	b, err := marshal.Marshal(o.Message())
	if err != nil {
		t.Fatal(err)
	}
	return strings.NewReplacer(", ", ",", `": `, `":`).Replace(string(b))
}

// Every field of the schema has what its type needs, so that a field added to
// it can't be forgotten here.
func TestRulesCoverSchema(t *testing.T) {
	used := map[protoreflect.FullName]bool{}
	var walk func(protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		for i := range m.Fields().Len() {
			fd := m.Fields().Get(i)
			used[fd.FullName()] = true
			r, hasRule := rules[fd.FullName()]
			switch fd.Kind() {
			case protoreflect.StringKind:
				if !hasRule || r.text == nil || r.valid == "" {
					t.Errorf("%s has no rule for its text", fd.FullName())
				}
			case protoreflect.Uint32Kind:
				if r.max == 0 || r.noun == "" {
					t.Errorf("%s has no range", fd.FullName())
				}
			case protoreflect.BoolKind:
			case protoreflect.MessageKind:
				if fd.Message().FullName() == "google.protobuf.Duration" {
					if r.longest == 0 {
						t.Errorf("%s has no range", fd.FullName())
					}
				} else {
					walk(fd.Message())
				}
			default:
				t.Errorf("%s: no conversion for %s", fd.FullName(), fd.Kind())
			}
			if _, ok := counts[fd.FullName()]; fd.IsList() != ok {
				t.Errorf("%s: list %v, count limit %v", fd.FullName(), fd.IsList(), ok)
			}
			if fd.IsMap() {
				t.Errorf("%s: no conversion for maps", fd.FullName())
			}
		}
	}
	walk((&quartetv1.Vip{}).ProtoReflect().Descriptor())
	walk((&quartetv1.VipPool{}).ProtoReflect().Descriptor())
	for name := range rules {
		if !used[name] {
			t.Errorf("rule for %s, which the schema has not", name)
		}
	}
	for name := range required {
		if !used[name] {
			t.Errorf("%s is required but not in the schema", name)
		}
	}
}

func pool(name string, prefixes ...string) Object {
	o := Object{Pool: &quartetv1.VipPool{Kind: KindVipPool, Name: name, Prefixes: prefixes}}
	Default(o)
	return o
}

func vip(name string, addresses ...string) Object {
	o := Object{Vip: &quartetv1.Vip{Kind: KindVip, Name: name, Addresses: addresses}}
	Default(o)
	return o
}

func served(o Object, dips ...string) Object {
	e := &quartetv1.Endpoint{Protocol: "TCP", Port: 80}
	for _, d := range dips {
		e.Backends = append(e.Backends, &quartetv1.Backend{Dip: d})
	}
	o.Vip.Endpoints = append(o.Vip.Endpoints, e)
	Default(o)
	return o
}

// A transcript of changes to one set: what is refused, and that a refusal
// leaves nothing behind.
func TestSetChanges(t *testing.T) {
	s := NewSet()
	for _, step := range []struct {
		put    []Object
		remove []Ref
		want   string // "" applies the change
	}{
		{put: []Object{vip("web", "192.0.2.1")},
			want: "Vip/web: addresses[0]: 192.0.2.1 is outside every VipPool: an address in a VipPool, and there is none: apply one first or with it\n"},
		{put: []Object{vip("web", "192.0.2.1"), pool("a", "192.0.2.0/25", "198.51.100.0/24")}},
		{put: []Object{pool("b", "192.0.2.64/26")},
			want: "VipPool/b: prefixes[0]: 192.0.2.64/26 overlaps 192.0.2.0/25 of VipPool/a: prefixes that no other pool has\n"},
		{put: []Object{pool("b", "192.0.0.0/16")},
			want: "VipPool/b: prefixes[0]: 192.0.0.0/16 overlaps 192.0.2.0/25 of VipPool/a: prefixes that no other pool has\n"},
		{put: []Object{pool("b", "192.0.2.128/25")}},
		{remove: []Ref{{KindVipPool, "a"}},
			want: "VipPool/a: Vip/web has 192.0.2.1 in it: prefixes that hold every Vip's addresses, or delete those Vips first or with it\n"},
		{put: []Object{pool("a", "198.51.100.0/24")},
			want: "VipPool/a: prefixes: Vip/web has 192.0.2.1 in it: prefixes that hold every Vip's addresses, or delete those Vips first or with it\n"},
		// The address moves from pool to pool without leaving both.
		{put: []Object{pool("a", "198.51.100.0/24"), pool("b", "192.0.2.0/24")}},
		{put: []Object{vip("shop", "192.0.2.1")},
			want: "Vip/shop: addresses[0]: 192.0.2.1 belongs to Vip/web: an address of no other Vip; one Vip has all endpoints of an address\n"},
		{put: []Object{vip("shop", "192.0.2.2"), vip("blog", "192.0.2.2")},
			want: "Vip/blog: addresses[0]: 192.0.2.2 belongs to Vip/shop: an address of no other Vip; one Vip has all endpoints of an address\n"},
		// The address moves from Vip to Vip in one request.
		{put: []Object{vip("web", "192.0.2.3"), vip("shop", "192.0.2.1")}},
		{put: []Object{served(vip("web", "192.0.2.3"), "192.0.2.1")},
			want: "Vip/web: endpoints[0].backends[0].dip: 192.0.2.1 is an address of Vip/shop: a server's own address\n"},
		{put: []Object{served(vip("web", "192.0.2.3"), "192.0.2.77")}},
		{put: []Object{vip("blog", "192.0.2.77")},
			want: "Vip/blog: addresses[0]: 192.0.2.77 is a DIP of another Vip: an address that is no DIP and no tunnel\n"},
		{put: []Object{vip("blog", "192.0.2.77"), served(vip("web", "192.0.2.3"), "192.0.2.78")}},
		{remove: []Ref{{KindVip, "blog"}, {KindVip, "nobody"}, {"Mux", "mux1"}},
			want: "Vip/nobody: there is no such object: a name that 'quartet get' shows\nMux/mux1: there is no such object: a name that 'quartet get' shows\n"},
		{put: []Object{vip("blog", "192.0.2.77")}, remove: []Ref{{KindVip, "blog"}},
			want: "Vip/blog: is changed twice in one request: each object once\n"},
		{remove: []Ref{{KindVipPool, "b"}, {KindVip, "web"}, {KindVip, "shop"}},
			want: "VipPool/b: Vip/blog has 192.0.2.77 in it: prefixes that hold every Vip's addresses, or delete those Vips first or with it\n"},
		{remove: []Ref{{KindVipPool, "b"}, {KindVip, "web"}, {KindVip, "shop"}, {KindVip, "blog"}}},
	} {
		if got := text(s.Check(step.put, step.remove)); got != step.want {
			t.Fatalf("put %v remove %v:\ngot  %swant %s", step.put, step.remove, got, step.want)
		}
		if step.want == "" {
			s.Apply(step.put, step.remove)
		}
	}
	if len(s.owner)+len(s.dips)+len(s.snat)+len(s.vips) != 0 || len(s.prefixes) != 1 {
		t.Errorf("left behind: %+v", s)
	}
}

// The indexes of a set that changed many times are those of a set made at once
// (the slow twin), and both say the same about the next change.
func TestSetAgainstSlowTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	s := NewSet()
	accepted, refused := 0, 0
	for range 3000 {
		var put []Object
		var remove []Ref
		names := map[Ref]bool{}
		for range 1 + r.IntN(3) {
			o := vip(fmt.Sprintf("v%d", r.IntN(8)), fmt.Sprintf("192.0.2.%d", 1+r.IntN(12)))
			switch r.IntN(4) {
			case 0:
				o = pool(fmt.Sprintf("p%d", r.IntN(3)), fmt.Sprintf("192.0.2.%d/29", 8*r.IntN(3)))
			case 1:
				o.Vip.Snat = []string{fmt.Sprintf("10.0.0.%d", 1+r.IntN(3))}
			case 2:
				served(o, fmt.Sprintf("192.0.2.%d", 1+r.IntN(12)), "10.0.0.1")
			}
			if names[o.Ref()] {
				continue
			}
			names[o.Ref()] = true
			if there := s.vips[o.Ref().Name] != nil && o.Vip != nil || s.pools[o.Ref().Name] != nil && o.Pool != nil; there && r.IntN(3) == 0 {
				remove = append(remove, o.Ref())
			} else {
				put = append(put, o)
			}
		}
		got := s.Check(put, remove)
		gone := map[Ref]bool{}
		for _, ref := range remove {
			gone[ref] = true
		}
		whole := append([]Object(nil), put...)
		for _, p := range s.Pools() {
			if o := (Object{Pool: p}); !names[o.Ref()] && !gone[o.Ref()] {
				whole = append(whole, o)
			}
		}
		for _, v := range s.Vips() {
			if o := (Object{Vip: v}); !names[o.Ref()] && !gone[o.Ref()] {
				whole = append(whole, o)
			}
		}
		if want := Check(whole); (len(got) == 0) != (len(want) == 0) {
			t.Fatalf("put %v remove %v\nchange: %swhole: %s", put, remove, text(got), text(want))
		}
		if len(got) > 0 {
			refused++
			continue
		}
		accepted++
		s.Apply(put, remove)
		twin := NewSet()
		twin.Apply(whole, nil)
		if fmt.Sprint(s.owner, s.snat, s.dips, s.prefixes) != fmt.Sprint(twin.owner, twin.snat, twin.dips, twin.prefixes) {
			t.Fatalf("indexes differ after put %v remove %v:\n%v\n%v", put, remove, s, twin)
		}
	}
	if accepted < 300 || refused < 300 {
		t.Errorf("%d accepted, %d refused: too few of one", accepted, refused)
	}
}

func TestViolationsAreLimited(t *testing.T) {
	var docs []*structpb.Struct
	for range 3 * MaxViolations {
		docs = append(docs, &structpb.Struct{})
	}
	_, wrong := Decode(docs)
	if len(wrong) != MaxViolations || Format(wrong[MaxViolations-1]) != "and 201 violations more" {
		t.Errorf("%d violations, the last: %v", len(wrong), wrong[len(wrong)-1])
	}
	// One object with as many mistakes as fit is no more work than without.
	e := &quartetv1.Endpoint{Protocol: "TCP", Port: 80}
	for range 4096 {
		e.Backends = append(e.Backends, &quartetv1.Backend{Dip: "0.0.0.0"})
	}
	o := vip("web", "192.0.2.1")
	for range 16 {
		o.Vip.Endpoints = append(o.Vip.Endpoints, e)
	}
	doc, err := o.Struct()
	if err != nil {
		t.Fatal(err)
	}
	_, wrong = Decode([]*structpb.Struct{doc, {}})
	if len(wrong) != MaxViolations || !strings.HasSuffix(Format(wrong[MaxViolations-1]), "violations more") {
		t.Errorf("%d violations, the last: %v", len(wrong), wrong[len(wrong)-1])
	}
}

func TestDefaultIsIdempotent(t *testing.T) {
	for _, file := range files(t, "testdata/good/*.yaml") {
		objects, _ := load(t, file)
		for _, o := range objects {
			again := o.Clone()
			Default(again)
			if !proto.Equal(again.Message(), o.Message()) {
				t.Errorf("%s of %s changed", o, file)
			}
		}
	}
}

// FuzzObject: no text makes Read, Decode or Check panic, what is accepted reads
// back as itself, and each violation says something.
func FuzzObject(f *testing.F) {
	for _, pattern := range []string{"testdata/bad/*.yaml", "testdata/good/*.yaml", "testdata/good/*.json"} {
		found, _ := filepath.Glob(pattern)
		for _, file := range found {
			b, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(b)
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		docs, err := Read(b)
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of several lines: %q", err)
			}
			return
		}
		objects, wrong := Decode(docs)
		for _, v := range wrong {
			if v.Message == "" || v.Object == "" && len(wrong) < MaxViolations || strings.Contains(Format(v), "\n") {
				t.Errorf("violation %v", v)
			}
		}
		s := NewSet()
		if len(s.Check(objects, nil)) == 0 {
			s.Apply(objects, nil)
		}
		for _, o := range objects {
			doc, err := o.Struct()
			if err != nil {
				t.Fatal(err)
			}
			again, wrong := Decode([]*structpb.Struct{doc})
			if len(wrong) > 0 || !Equal(o, again[0]) {
				t.Errorf("%s reads back as %v, %s", o, again, text(wrong))
			}
		}
	})
}

// What a protobuf can hold and no text can.
func TestOddStructs(t *testing.T) {
	odd := &structpb.Struct{Fields: map[string]*structpb.Value{
		"kind": structpb.NewStringValue("Vip"), "name": nil, "tenant": {},
		"addresses": structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{nil, {}}}),
		"endpoints": {Kind: &structpb.Value_ListValue{}},
		"snat":      {Kind: &structpb.Value_StructValue{}},
	}}
	objects, wrong := Decode([]*structpb.Struct{nil, {}, odd, {Fields: map[string]*structpb.Value{"VIP": {}, "SNAT": nil, "Endpoint": {}}}})
	if len(objects) != 0 || len(wrong) < 8 {
		t.Errorf("%v\n%s", objects, text(wrong))
	}
	both := &structpb.Struct{Fields: map[string]*structpb.Value{"protocol": structpb.NewStringValue("TCP"),
		"any_port": structpb.NewBoolValue(true), "anyPort": structpb.NewBoolValue(true)}}
	_, wrong = Decode([]*structpb.Struct{{Fields: map[string]*structpb.Value{"kind": structpb.NewStringValue("Vip"), "name": structpb.NewStringValue("a"),
		"endpoints": structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{structpb.NewStructValue(both)}})}}})
	if got := text(wrong); !strings.Contains(got, "Vip/a: endpoints[0].any_port: is there twice") {
		t.Error(got)
	}
}

func twentyThousand() []Object {
	objects := []Object{pool("all", "100.64.0.0/10")}
	for i := range 20000 {
		a := netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)})
		var dips []string
		for j := range 10 {
			dips = append(dips, fmt.Sprintf("10.%d.%d.%d", j, i>>8, i&255|1))
		}
		objects = append(objects, served(vip(fmt.Sprintf("vip%d", i), a.String()), dips...))
	}
	return objects
}

func BenchmarkCheckWhole(b *testing.B) {
	objects := twentyThousand()
	for b.Loop() {
		if wrong := Check(objects); len(wrong) > 0 {
			b.Fatal(text(wrong))
		}
	}
}

func BenchmarkCheckOneOf20000(b *testing.B) {
	objects := twentyThousand()
	s := NewSet()
	s.Apply(objects, nil)
	put := objects[77:78]
	for b.Loop() {
		if wrong := s.Check(put, nil); len(wrong) > 0 {
			b.Fatal(text(wrong))
		}
	}
}

func BenchmarkDecode20000(b *testing.B) {
	var docs []*structpb.Struct
	for _, o := range twentyThousand() {
		doc, err := o.Struct()
		if err != nil {
			b.Fatal(err)
		}
		docs = append(docs, doc)
	}
	for b.Loop() {
		if _, wrong := Decode(docs); len(wrong) > 0 {
			b.Fatal(text(wrong))
		}
	}
}

func BenchmarkRead20000(b *testing.B) {
	var all strings.Builder
	for _, o := range twentyThousand() {
		doc, err := o.Struct()
		if err != nil {
			b.Fatal(err)
		}
		json, err := doc.MarshalJSON()
		if err != nil {
			b.Fatal(err)
		}
		fmt.Fprintf(&all, "%s\n---\n", json)
	}
	for b.Loop() {
		if _, err := Read([]byte(all.String())); err != nil {
			b.Fatal(err)
		}
	}
}
