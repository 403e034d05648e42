package datapath

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -type exit -type event -type tunnel_key -type rule_key -type rule -type target -type dip_key -type dip -type flow_key -type flow -type fragment_key -type fragment -type meter_key -type meter agent agent.bpf.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../../bpf -I../../bpf/libbpf -idirafter /usr/include/x86_64-linux-gnu
