package object

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// Bounds of nesting, and of what a text's aliases may expand to.
const (
	maxDepth   = 64
	maxAliased = 1 << 20
)

// typographic quotes come with Figure 6 when it is copied from the paper's PDF.
var typographic = regexp.MustCompile(`^\s*\{\s*[“”"]VIP[“”"]\s*:`)

// Read parses a text of YAML documents, which JSON is as well. A document that
// is a list stands for its elements. The error names the line; a key that is
// there twice is one, because a Struct could not show it.
func Read(text []byte) ([]*structpb.Struct, error) {
	if typographic.Match(text) {
		text = []byte(strings.NewReplacer("“", `"`, "”", `"`).Replace(string(text)))
	}
	var docs []*structpb.Struct
	r := reader{}
	for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var node yaml.Node
		if err := decodeYAML(d, &node); errors.Is(err, io.EOF) {
			return docs, nil
		} else if err != nil {
			return nil, errors.New(strings.ReplaceAll(strings.TrimPrefix(err.Error(), "yaml: "), "\n", " "))
		}
		value, err := r.value(&node, 0)
		if err != nil {
			return nil, err
		}
		switch k := value.GetKind().(type) {
		case *structpb.Value_NullValue: // nothing, or comments, between two "---"
		case *structpb.Value_StructValue:
			docs = append(docs, k.StructValue)
		case *structpb.Value_ListValue:
			for i, v := range k.ListValue.GetValues() {
				s := v.GetStructValue()
				if s == nil {
					return nil, fmt.Errorf("line %d: element %d of the list is not an object", node.Line, i)
				}
				docs = append(docs, s)
			}
		default: // not quoted: it may be a key given by mistake
			return nil, fmt.Errorf("line %d: the document is not an object: fields and their values, such as kind: Vip", node.Line)
		}
	}
}

// decodeYAML makes the library's panics on malformed text errors.
func decodeYAML(d *yaml.Decoder, node *yaml.Node) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("malformed document: %v", p)
		}
	}()
	return d.Decode(node)
}

type reader struct {
	within  int // aliases around the value being read
	aliased int // values read within an alias
}

func (r *reader) value(n *yaml.Node, depth int) (*structpb.Value, error) {
	if r.within > 0 {
		if r.aliased++; r.aliased > maxAliased {
			return nil, fmt.Errorf("line %d: aliases expand to more than %d values: split the file or write some out", n.Line, maxAliased)
		}
	}
	if depth > maxDepth {
		return nil, fmt.Errorf("line %d: nested deeper than %d", n.Line, maxDepth)
	}
	switch n.Kind {
	case yaml.DocumentNode:
		if len(n.Content) == 0 {
			return structpb.NewNullValue(), nil
		}
		return r.value(n.Content[0], depth)
	case yaml.AliasNode:
		r.within++
		defer func() { r.within-- }()
		return r.value(n.Alias, depth+1)
	case yaml.SequenceNode:
		list := &structpb.ListValue{}
		for _, c := range n.Content {
			v, err := r.value(c, depth+1)
			if err != nil {
				return nil, err
			}
			list.Values = append(list.Values, v)
		}
		return structpb.NewListValue(list), nil
	case yaml.MappingNode:
		fields := make(map[string]*structpb.Value, len(n.Content)/2)
		lines := make(map[string]int, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			key := n.Content[i]
			switch {
			case key.Kind != yaml.ScalarNode:
				return nil, fmt.Errorf("line %d: a key is not a word", key.Line)
			case key.ShortTag() == "!!merge":
				return nil, fmt.Errorf("line %d: merge keys (<<) are not read: write the fields, or use an alias for the whole value", key.Line)
			}
			if first, twice := lines[key.Value]; twice {
				return nil, fmt.Errorf("line %d: %s is there already, in line %d", key.Line, fieldName(key.Value), first)
			}
			lines[key.Value] = key.Line
			v, err := r.value(n.Content[i+1], depth+1)
			if err != nil {
				return nil, err
			}
			fields[key.Value] = v
		}
		return structpb.NewStructValue(&structpb.Struct{Fields: fields}), nil
	}
	return scalar(n)
}

func scalar(n *yaml.Node) (*structpb.Value, error) {
	switch n.ShortTag() {
	case "!!null":
		return structpb.NewNullValue(), nil
	case "!!bool":
		var b bool
		err := n.Decode(&b)
		return structpb.NewBoolValue(b), err
	case "!!int", "!!float":
		var f float64
		if err := n.Decode(&f); err != nil || f != f || f-f != 0 { // NaN and infinities are no JSON
			return nil, fmt.Errorf("line %d: %s is not a number that can be used", n.Line, quote(n.Value))
		}
		return structpb.NewNumberValue(f), nil
	}
	if strings.ToValidUTF8(n.Value, "") != n.Value {
		return nil, fmt.Errorf("line %d: %s is not UTF-8", n.Line, quote(n.Value))
	}
	return structpb.NewStringValue(n.Value), nil
}
