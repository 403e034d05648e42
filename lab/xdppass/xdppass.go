// Package xdppass has the two BPF programs that make virtual links behave like
// cables: one lets an XDP mux send through a link, the other keeps the sender's
// packet hash from the routers.
package xdppass

import (
	"fmt"

	"github.com/cilium/ebpf"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel pass pass.bpf.c -- -O2 -g -Wall -Werror -I../../bpf/libbpf -idirafter /usr/include/x86_64-linux-gnu

// Programs are loaded and to be attached by their FDs.
type Programs struct {
	// Pass is an XDP program for the far end of an XDP mux's link.
	Pass *ebpf.Program
	// ForgetHash is a tc program for where servers and clients send.
	ForgetHash *ebpf.Program
}

// Close lets go of the programs; what they are attached to keeps them.
func (p Programs) Close() {
	p.Pass.Close()
	p.ForgetHash.Close()
}

// Load loads the programs.
func Load() (Programs, error) {
	var objects passObjects
	if err := loadPassObjects(&objects, nil); err != nil {
		return Programs{}, fmt.Errorf("load BPF programs of virtual links: %w", err)
	}
	return Programs{objects.Pass, objects.ForgetHash}, nil
}
