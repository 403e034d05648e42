package flowhash

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"gonum.org/v1/gonum/stat/distuv"

	"github.com/quartet-lb/quartet/lb"
)

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -type hash_call -target bpfel vectors vectors.bpf.c -- -O2 -g -Wall -Werror -mcpu=v3 -I../bpf

var update = flag.Bool("update", false, "write testdata/vectors.txt")

const vectorFile = "testdata/vectors.txt"

type vector struct {
	seed Seed
	flow lb.Flow
	hash uint64
}

func (v vector) String() string {
	return fmt.Sprintf("%x %s %s %d %d %d %016x", v.seed, v.flow.Src, v.flow.Dst,
		v.flow.SrcPort, v.flow.DstPort, uint8(v.flow.Protocol), v.hash)
}

// sipHash is SipHash-c-d over any message, written from the paper's section 2
// without regard to speed: the slow twin.
func sipHash(c, d int, key [16]byte, message []byte) uint64 {
	rotl := func(x uint64, n int) uint64 { return x<<n | x>>(64-n) }
	var v [4]uint64
	for i, text := range []string{"somepseu", "dorandom", "lygenera", "tedbytes"} {
		v[i] = binary.BigEndian.Uint64([]byte(text)) ^
			binary.LittleEndian.Uint64(key[i%2*8:])
	}
	rounds := func(n int) {
		for range n {
			v[0] += v[1]
			v[1] = rotl(v[1], 13)
			v[1] ^= v[0]
			v[0] = rotl(v[0], 32)
			v[2] += v[3]
			v[3] = rotl(v[3], 16)
			v[3] ^= v[2]
			v[0] += v[3]
			v[3] = rotl(v[3], 21)
			v[3] ^= v[0]
			v[2] += v[1]
			v[1] = rotl(v[1], 17)
			v[1] ^= v[2]
			v[2] = rotl(v[2], 32)
		}
	}
	padded := append([]byte(nil), message...)
	for len(padded)%8 != 7 {
		padded = append(padded, 0)
	}
	padded = append(padded, byte(len(message)))
	for ; len(padded) > 0; padded = padded[8:] {
		var m uint64
		for i := range 8 {
			m |= uint64(padded[i]) << (8 * i)
		}
		v[3] ^= m
		rounds(c)
		v[0] ^= m
	}
	v[2] ^= 0xff
	rounds(d)
	return v[0] ^ v[1] ^ v[2] ^ v[3]
}

func slowHash(seed Seed, f lb.Flow) uint64 {
	message := append(f.Src.AsSlice(), f.Dst.AsSlice()...)
	message = append(message, byte(f.SrcPort>>8), byte(f.SrcPort),
		byte(f.DstPort>>8), byte(f.DstPort), byte(f.Protocol))
	return sipHash(1, 3, seed, message)
}

// The answer printed in the SipHash paper's appendix A; the rounds of
// SipHash-1-3 are the same, only fewer.
func TestSlowTwinGivesThePapersAnswer(t *testing.T) {
	var key [16]byte
	message := make([]byte, 15)
	for i := range key {
		key[i] = byte(i)
	}
	for i := range message {
		message[i] = byte(i)
	}
	if got, want := sipHash(2, 4, key, message), uint64(0xa129ca6149be45e5); got != want {
		t.Errorf("SipHash-2-4 of 00..0e is %016x, the paper says %016x", got, want)
	}
}

func randomFlow(r *rand.Rand, v6 bool) lb.Flow {
	addr := func() netip.Addr {
		var b [16]byte
		binary.NativeEndian.PutUint64(b[:8], r.Uint64())
		binary.NativeEndian.PutUint64(b[8:], r.Uint64())
		if v6 {
			return netip.AddrFrom16(b)
		}
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	protocols := []lb.Protocol{lb.TCP, lb.UDP, lb.ICMP, lb.ICMPv6}
	f := lb.Flow{Src: addr(), Dst: addr(), Protocol: protocols[r.IntN(4)]}
	if f.Protocol == lb.TCP || f.Protocol == lb.UDP {
		f.SrcPort, f.DstPort = uint16(r.Uint32()), uint16(r.Uint32())
	}
	return f
}

func randomSeed(r *rand.Rand) (s Seed) {
	for i := range s {
		s[i] = byte(r.Uint32())
	}
	return s
}

func makeVectors() []vector {
	var vs []vector
	ones := Seed{}
	for i := range ones {
		ones[i] = 0xff
	}
	flow := func(src, dst string, p lb.Protocol, sport, dport uint16) lb.Flow {
		return lb.Flow{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), Protocol: p, SrcPort: sport, DstPort: dport}
	}
	for _, seed := range []Seed{{}, ones, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}} {
		for _, f := range []lb.Flow{
			flow("0.0.0.0", "0.0.0.0", 0, 0, 0),
			flow("255.255.255.255", "255.255.255.255", 255, 65535, 65535),
			flow("198.51.100.7", "203.0.113.10", lb.TCP, 40000, 80),
			flow("203.0.113.10", "198.51.100.7", lb.TCP, 80, 40000),
			flow("198.51.100.7", "203.0.113.10", lb.UDP, 40000, 80),
			flow("198.51.100.7", "203.0.113.10", lb.ICMP, 0, 0),
			flow("::", "::", 0, 0, 0),
			flow("2001:db8:1::7", "2001:db8::10", lb.TCP, 40000, 80),
			flow("2001:db8:1::7", "2001:db8::10", lb.UDP, 40000, 80),
			flow("2001:db8:1::7", "2001:db8::10", lb.ICMPv6, 0, 0),
			flow("::ffff:198.51.100.7", "::ffff:203.0.113.10", lb.TCP, 40000, 80),
		} {
			vs = append(vs, vector{seed: seed, flow: f})
		}
	}
	r := rand.New(rand.NewPCG(1, 13))
	for i := range 64 {
		vs = append(vs, vector{seed: randomSeed(r), flow: randomFlow(r, i%2 == 1)})
	}
	for i := range vs {
		vs[i].hash = slowHash(vs[i].seed, vs[i].flow)
	}
	return vs
}

func readVectors(t *testing.T) []vector {
	t.Helper()
	file, err := os.Open(vectorFile)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var vs []vector
	for lines := bufio.NewScanner(file); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		var v vector
		var seed, src, dst string
		_, err := fmt.Sscanf(line, "%s %s %s %d %d %d %x", &seed, &src, &dst,
			&v.flow.SrcPort, &v.flow.DstPort, &v.flow.Protocol, &v.hash)
		if err != nil {
			t.Fatalf("%s: %q: %v", vectorFile, line, err)
		}
		if n, err := hex.Decode(v.seed[:], []byte(seed)); err != nil || n != len(v.seed) {
			t.Fatalf("%s: %q: seed is not 32 hexadecimal digits", vectorFile, line)
		}
		v.flow.Src, v.flow.Dst = netip.MustParseAddr(src), netip.MustParseAddr(dst)
		vs = append(vs, v)
	}
	if len(vs) < 90 {
		t.Fatalf("%s has only %d vectors", vectorFile, len(vs))
	}
	return vs
}

func TestVectors(t *testing.T) {
	var text strings.Builder
	text.WriteString("# seed, source, destination, source port, destination port, protocol, hash.\n" +
		"# Written by the slow twin: go test ./flowhash -run TestVectors -update\n")
	for _, v := range makeVectors() {
		fmt.Fprintln(&text, v)
	}
	if *update {
		if err := os.WriteFile(vectorFile, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(vectorFile)
	if err != nil {
		t.Fatal(err)
	}
	if string(file) != text.String() {
		t.Errorf("%s is not what the slow twin writes", vectorFile)
	}
	for _, v := range readVectors(t) {
		if got := Hash(v.seed, v.flow); got != v.hash {
			t.Errorf("%s: Hash gives %016x", v, got)
		}
	}
}

func TestVectorsInBPF(t *testing.T) {
	var objects vectorsObjects
	if err := loadVectorsObjects(&objects, nil); err != nil {
		t.Fatalf("load the vectors program (needs root): %+v", err)
	}
	defer objects.Close()
	words := func(a netip.Addr) (w [4]uint32) {
		for i, b := 0, a.AsSlice(); len(b) > 0; i, b = i+1, b[4:] {
			w[i] = binary.LittleEndian.Uint32(b)
		}
		return w
	}
	swap := func(p uint16) uint16 { return p<<8 | p>>8 }
	for _, v := range readVectors(t) {
		call := vectorsHashCall{
			Saddr: words(v.flow.Src), Daddr: words(v.flow.Dst),
			Sport: swap(v.flow.SrcPort), Dport: swap(v.flow.DstPort),
			Proto: uint8(v.flow.Protocol),
		}
		call.Seed.K0 = binary.LittleEndian.Uint64(v.seed[:8])
		call.Seed.K1 = binary.LittleEndian.Uint64(v.seed[8:])
		if v.flow.Src.Is6() {
			call.V6 = 1
		}
		var out vectorsHashCall
		if _, err := objects.Hash.Run(&ebpf.RunOptions{Context: &call, ContextOut: &out}); err != nil {
			t.Fatal(err)
		}
		if out.Hash != v.hash {
			t.Errorf("%s: bpf/flowhash.h gives %016x", v, out.Hash)
		}
	}
}

func TestHashIsItsSlowTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 13))
	for i := range 20000 {
		seed, f := randomSeed(r), randomFlow(r, i%2 == 1)
		if got, want := Hash(seed, f), slowHash(seed, f); got != want {
			t.Fatalf("Hash(%x, %s) is %016x, the slow twin says %016x", seed, f, got, want)
		}
	}
}

// Neighbouring clients and ports, as they occur, must spread over buckets and
// over connection table lines as random flows would.
func TestBitsAreUniform(t *testing.T) {
	seed := randomSeed(rand.New(rand.NewPCG(3, 13)))
	const cells, flows = 1024, 1 << 18
	for _, shift := range []int{0, 10, 22, 32, 42, 54} {
		for _, family := range []string{"198.51.0.0", "2001:db8::"} {
			counts := make([]int, cells)
			base := netip.MustParseAddr(family)
			dst := netip.MustParseAddr("203.0.113.10")
			if base.Is6() {
				dst = netip.MustParseAddr("2001:db8::10")
			}
			src := base
			for i := range flows {
				if i%256 == 0 {
					src = src.Next()
				}
				f := lb.Flow{Src: src, Dst: dst, Protocol: lb.TCP, SrcPort: uint16(32768 + i%256), DstPort: 80}
				counts[Hash(seed, f)>>shift%cells]++
			}
			var chi float64
			for _, n := range counts {
				d := float64(n) - flows/cells
				chi += d * d / (flows / cells)
			}
			p := distuv.ChiSquared{K: cells - 1}.Survival(chi)
			if p < 0.001 || p > 0.999 {
				t.Errorf("bits %d..%d of flows from %s: chi-squared %.1f with %d degrees of freedom, p = %.5f",
					shift, shift+9, family, chi, cells-1, p)
			}
		}
	}
}

func TestHashDoesNotAllocate(t *testing.T) {
	f := randomFlow(rand.New(rand.NewPCG(4, 13)), true)
	if n := testing.AllocsPerRun(100, func() { Hash(Seed{}, f) }); n != 0 {
		t.Errorf("Hash allocates %v times", n)
	}
}

func BenchmarkHash(b *testing.B) {
	for _, v6 := range []bool{false, true} {
		f := randomFlow(rand.New(rand.NewPCG(5, 13)), v6)
		b.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				f.SrcPort = uint16(i)
				Hash(Seed{}, f)
			}
		})
	}
}
