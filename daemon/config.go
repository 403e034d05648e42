package daemon

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// AddConfigFlag adds --config. The command calls ReadConfig before it uses its
// flags.
func AddConfigFlag(flags *pflag.FlagSet) {
	flags.String("config", "", "YAML `file` with these flags' names as keys; a flag on the command line wins")
}

// ReadConfig sets the flags that the file named by --config has and the
// command line has not. A key is a flag's name; its value a scalar, or a list
// where the flag may be repeated. A mapping stands for "key=value,key=value".
func ReadConfig(flags *pflag.FlagSet) error {
	path, err := flags.GetString("config")
	if err != nil || path == "" {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return fmt.Errorf("read configuration %s: %w", path, err)
	}
	if len(document.Content) == 0 {
		return nil
	}
	root := document.Content[0]
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("read configuration %s: line %d: a mapping of flag names to values is wanted", path, root.Line)
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		at := fmt.Sprintf("read configuration %s: line %d: %s", path, key.Line, key.Value)
		flag := flags.Lookup(key.Value)
		if flag == nil || key.Value == "config" || key.Value == "help" {
			return fmt.Errorf("%s: unknown field; valid: %s", at, strings.Join(flagNames(flags), ", "))
		}
		if seen[key.Value] {
			return fmt.Errorf("%s: given twice", at)
		}
		seen[key.Value] = true
		values := []*yaml.Node{value}
		if value.Kind == yaml.SequenceNode {
			if _, repeatable := flag.Value.(pflag.SliceValue); !repeatable {
				return fmt.Errorf("%s: one value is wanted, not a list", at)
			}
			values = value.Content
		}
		if flag.Changed {
			continue
		}
		for j, v := range values {
			text, err := flagValue(v)
			if err != nil {
				return fmt.Errorf("%s[%d]: %w", at, j, err)
			}
			if err := flag.Value.Set(text); err != nil {
				return fmt.Errorf("%s: %w", at, err)
			}
		}
		flag.Changed = true
	}
	return nil
}

func flagValue(v *yaml.Node) (string, error) {
	switch v.Kind {
	case yaml.ScalarNode:
		return v.Value, nil
	case yaml.MappingNode:
		var pairs []string
		for i := 0; i+1 < len(v.Content); i += 2 {
			if v.Content[i+1].Kind != yaml.ScalarNode || strings.Contains(v.Content[i+1].Value, ",") {
				return "", fmt.Errorf("%s: a scalar without a comma is wanted", v.Content[i].Value)
			}
			pairs = append(pairs, v.Content[i].Value+"="+v.Content[i+1].Value)
		}
		return strings.Join(pairs, ","), nil
	}
	return "", fmt.Errorf("a scalar or a mapping is wanted")
}

func flagNames(flags *pflag.FlagSet) []string {
	var names []string
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name != "config" && f.Name != "help" {
			names = append(names, f.Name)
		}
	})
	slices.Sort(names)
	return names
}
