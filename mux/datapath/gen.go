package datapath

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -go-package datapath -type exit -type event -type chosen_by -type settings -type vip4_line -type vip6_line -type endpoint_line -type clock -type bucket_line -type dip -type dip_counters -type cpu_stats -type flow_line -type fragment_key -type fragment -type next_hop -type vlan_link -type wanted_neighbour -type trace mux mux.bpf.c -- -I../../bpf -I../../bpf/libbpf -I/usr/include/x86_64-linux-gnu -I/usr/include/aarch64-linux-gnu -mcpu=v3 -Wall -Werror -fno-strict-aliasing
