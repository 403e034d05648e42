package bench

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel driver driver.bpf.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf/libbpf -idirafter /usr/include/x86_64-linux-gnu
