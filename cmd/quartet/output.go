package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

type message = proto.Message

// output is the -o flag.
type output struct {
	value string
	valid []string
}

func (o *output) add(cmd *cobra.Command, valid ...string) {
	o.valid = valid
	cmd.Flags().VarP(o, "output", "o", "output `format`: "+strings.Join(valid, ", "))
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(valid, cobra.ShellCompDirectiveNoFileComp))
}

func (o *output) String() string { return o.value }
func (o *output) Type() string   { return "format" }
func (o *output) Set(s string) error {
	if !slices.Contains(o.valid, s) {
		return fmt.Errorf("%q is not a format: %s", s, strings.Join(o.valid, ", "))
	}
	o.value = s
	return nil
}

// set says whether a machine is to read the output.
func (o *output) set() bool { return o.value == "json" || o.value == "yaml" }

// print writes one message.
func (o *output) print(w io.Writer, m message) error {
	b, err := raw(m)
	if err != nil {
		return err
	}
	return o.printJSON(w, b)
}

// printAll writes messages as a list in JSON, as documents in YAML.
func (o *output) printAll(w io.Writer, messages []message) error {
	list, err := rawList(messages)
	if err != nil {
		return err
	}
	if o.value == "json" {
		return o.printJSON(w, list)
	}
	for i, b := range list {
		if i > 0 {
			fmt.Fprintln(w, "---")
		}
		if err := o.printJSON(w, b); err != nil {
			return err
		}
	}
	return nil
}

// printJSON writes what encodes to JSON in the chosen format.
func (o *output) printJSON(w io.Writer, v any) error {
	if o.value == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(v)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode output: %w", err)
	}
	// JSON is YAML: parsed as nodes it keeps the order of fields.
	var node yaml.Node
	if err := yaml.Unmarshal(b, &node); err != nil {
		return fmt.Errorf("encode output: %w", err)
	}
	block(&node)
	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	if err := e.Encode(&node); err != nil {
		return fmt.Errorf("encode output: %w", err)
	}
	return e.Close()
}

// block lays nodes out in lines, but lists of scalars in one.
func block(n *yaml.Node) {
	n.Style = 0
	oneLine := n.Kind == yaml.SequenceNode || n.Kind == yaml.MappingNode && len(n.Content) == 0
	for _, c := range n.Content {
		block(c)
		oneLine = oneLine && c.Kind == yaml.ScalarNode
	}
	if oneLine {
		n.Style = yaml.FlowStyle
	}
}

// raw is a message as JSON with the schema's field names in its order.
func raw(m message) (json.RawMessage, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode output: %w", err)
	}
	return b, nil
}

func rawList[M message](messages []M) ([]json.RawMessage, error) {
	list := []json.RawMessage{} // encodes as [], not null
	for _, m := range messages {
		b, err := raw(m)
		if err != nil {
			return nil, err
		}
		list = append(list, b)
	}
	return list, nil
}

// table aligns columns; a header row comes first.
type table struct {
	rows [][]string
}

func (t *table) add(cells ...string) {
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	t.rows = append(t.rows, cells)
}

func (t *table) print(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	for _, r := range t.rows {
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}
