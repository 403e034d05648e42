// Package xdppass is the XDP program that a virtual link's far end needs so
// that an XDP mux can send through the link: it passes every frame.
package xdppass

import (
	"fmt"

	"github.com/cilium/ebpf"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel pass pass.bpf.c -- -O2 -g -Wall -Werror -I../../bpf/libbpf -idirafter /usr/include/x86_64-linux-gnu

// Load loads the program. The caller attaches it by its FD and closes it.
func Load() (*ebpf.Program, error) {
	var objects passObjects
	if err := loadPassObjects(&objects, nil); err != nil {
		return nil, fmt.Errorf("load XDP pass program: %w", err)
	}
	return objects.Pass, nil
}
