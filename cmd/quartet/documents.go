package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/structpb"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/manager/object"
)

// document is one object and where it was read.
type document struct {
	file   string
	number int // in its file, from 1
	ref    object.Ref
	doc    *structpb.Struct
}

// readDocuments reads files, directories (their *.yaml, *.yml and *.json, and
// those of directories within) and, for "-", standard input.
func (c *cli) readDocuments(names []string) ([]document, error) {
	var all []document
	seen := map[object.Ref]string{} // file by object
	for _, name := range names {
		files := []string{name}
		if name != "-" {
			var err error
			if files, err = expand(name); err != nil {
				return nil, err
			}
		}
		for _, file := range files {
			text, err := c.readFile(file)
			if err != nil {
				return nil, err
			}
			if file == "-" {
				file = "standard input"
			}
			docs, err := object.Read(text)
			if err != nil {
				return nil, invalid("%s: %s", file, err)
			}
			for i, doc := range docs {
				d := document{file: file, number: i + 1, doc: doc}
				if ref, ok := object.RefOf(doc); ok {
					d.ref = ref
					if first, twice := seen[ref]; twice {
						return nil, invalid("%s: %s is in %s already: each object once", file, ref, first)
					}
					seen[ref] = file
				}
				all = append(all, d)
			}
		}
	}
	if len(all) == 0 {
		return nil, invalid("no object in %s", strings.Join(names, ", "))
	}
	return all, nil
}

func (c *cli) readFile(name string) ([]byte, error) {
	var text []byte
	var err error
	if name == "-" {
		text, err = io.ReadAll(c.in)
	} else {
		text, err = os.ReadFile(name)
	}
	if err != nil {
		return nil, invalid("%s", err)
	}
	return text, nil
}

func expand(name string) ([]string, error) {
	st, err := os.Stat(name)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, invalid("%s: there is no such file or directory", name)
		}
		return nil, invalid("%s", err)
	}
	if !st.IsDir() {
		return []string{name}, nil
	}
	var files []string
	err = filepath.WalkDir(name, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(path)) {
			files = append(files, path)
		}
		return err
	})
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s: no .yaml, .yml or .json file in it", name)
	}
	if err != nil {
		return nil, invalid("%s", err)
	}
	return files, nil // in lexical order
}

// report prints violations, each with the file it comes from, and returns the
// error that ends the command.
func (c *cli) report(docs []document, violations []*quartetv1.FieldViolation) error {
	for _, v := range violations {
		file := ""
		var number int
		_, err := fmt.Sscanf(v.GetObject(), "document %d", &number)
		if err == nil && number >= 1 && number <= len(docs) {
			d := docs[number-1]
			file = d.file
			v.Object = fmt.Sprintf("document %d", d.number)
		} else {
			for _, d := range docs {
				if d.ref.String() == v.GetObject() {
					file = d.file
				}
			}
		}
		if file != "" {
			file += ": "
		}
		fmt.Fprintf(c.err, "%s%s\n", file, object.Format(v))
	}
	return &exitError{exitInvalid, "nothing was changed"}
}
