package scenario

import (
	"strings"
	"testing"
	"time"
)

const good = `# Two clients
#   client1 -> vm1-1

param connections 100000 200
say hello,  world = 1
apply
  kind: Vip
  name: web

  addresses: [203.0.113.10]
connect first from client1 to 203.0.113.10:80 count={connections} parallel=2
expect first.errors == 0
wait 10s until hops(core1,203.0.113.0/24) >= 2 + before - 1
report lost = first.lost
# a comment further down is not the head
bfd 5ms
`

func TestParse(t *testing.T) {
	s, err := Parse("dir/two.txt", good)
	if err != nil {
		t.Fatal(err)
	}
	if s.Name != "two" || s.About != "Two clients\n  client1 -> vm1-1" || len(s.Params) != 1 || len(s.Steps) != 7 {
		t.Fatalf("%+v", s)
	}
	if got := s.Steps[0].Args[0]; got != "hello,  world = 1" {
		t.Errorf("say %q", got)
	}
	if got := s.Steps[1].Body; got != "kind: Vip\nname: web\n\naddresses: [203.0.113.10]\n" {
		t.Errorf("apply %q", got)
	}
	if c := s.Steps[2]; c.Line != 11 || c.Options["count"] != "{connections}" || c.Options["parallel"] != "2" || len(c.Args) != 5 {
		t.Errorf("connect %+v", c)
	}
	w := s.Steps[4]
	if w.Limit != 10*time.Second || w.Condition.String() != "hops(core1,203.0.113.0/24) >= 2 + before - 1" {
		t.Errorf("wait %+v", w)
	}
	if r := s.Steps[5]; r.Args[0] != "lost" || r.Value.String() != "first.lost" {
		t.Errorf("report %+v", r)
	}
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", "x.txt:1: a scenario begins with a comment"},
		{"# a\n", "x.txt:1: there are no steps"},
		{"# a\n\nfly away\n", "x.txt:3: \"fly\" is no step; one of: apply, bfd,"},
		{"# a\nkill\n", "x.txt:2: usage: kill NODE"},
		{"# a\nkill mux1 mux2\n", "x.txt:2: usage: kill NODE"},
		{"# a\napply\n", "x.txt:2: what to apply is missing"},
		{"# a\nsay hi\n  there\n", "x.txt:3: an indented line belongs to"},
		{"# a\nconnect a from b at c\n", "x.txt:2: \"from\" and \"to\" are wanted"},
		{"# a\nconnect a from b to c speed=1\n", "x.txt:2: connect has no option \"speed\"; one of: mode, count"},
		{"# a\nexpect a = 1\n", "x.txt:2: a comparison is wanted"},
		{"# a\nexpect a b == 1\n", "x.txt:2: a value is wanted"},
		{"# a\nexpect a * b == 1\n", "x.txt:2: \"*\" is neither + nor -"},
		{"# a\nexpect luck(a) == 1\n", "x.txt:2: \"luck\" is no observation; one of: buckets"},
		{"# a\nexpect hops(a) == 1\n", "x.txt:2: hops takes 2 arguments, not 1"},
		{"# a\nexpect hops(a == 1\n", "closing parenthesis"},
		{"# a\nwait soon until a == 1\n", "\"soon\" is not a limit"},
		{"# a\nwait 1s for a == 1\n", "\"until\" is wanted"},
		{"# a\npause -1s\n", "\"-1s\" is not a duration"},
		{"# a\npaper x y\n", "\"y\" is not a number"},
		{"# a\nreport x 1 2\n", "\"=\" is wanted"},
		{"# a\nspread x = 1 and 2\n", "\"to\" between two values"},
		{"# a\nspread x = 1 2 to\n", "x.txt:2: a value is wanted"},
		{"# a\nparam X 1 2\n", "\"X\" is not a parameter's name"},
		{"# a\nping c a maybe\n", "\"maybe\" is neither"},
	} {
		_, err := Parse("x.txt", c.text)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: error %v, want %q", c.text, err, c.want)
		}
	}
	_, err := Parse("x.txt", "# a\nfly\nkill\n")
	if err == nil || !strings.Contains(err.Error(), "x.txt:2:") || !strings.Contains(err.Error(), "x.txt:3:") {
		t.Errorf("both mistakes are wanted: %v", err)
	}
}

func TestUsageHasEveryVerb(t *testing.T) {
	for name, v := range verbs {
		if !strings.HasPrefix(v.usage, name) || !strings.Contains(Usage(), v.usage) {
			t.Errorf("%s: usage %q", name, v.usage)
		}
	}
}
