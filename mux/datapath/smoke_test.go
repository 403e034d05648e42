package datapath

import (
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/quartet-lb/quartet/lb"
)

func TestSmoke(t *testing.T) {
	n := newTestNet(t)
	d := openTest(t, testConfig(pinDir(t)))
	must(t, d.Replace(Tables{Seed: testSeed, VIPs: []VIP{{Addr: vip4, Name: "web"}},
		Endpoints: []Endpoint{evenly(vip4, lb.TCP, 80, lb.ConsistencyTable, 1024, ipip("10.1.0.1", 80), ipip("10.1.0.2", 80))}}))
	pkt := []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0,
		0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0, 198, 51, 100, 7, 203, 0, 113, 10,
		0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0}
	out := make([]byte, 256)
	o := ebpf.RunOptions{Data: pkt, DataOut: out, Context: xdpContext(len(pkt), n.index("up0"))}
	code, err := d.mux.Run(&o)
	must(t, err)
	e, err := d.Exits()
	must(t, err)
	t.Logf("%d %x %v", code, o.DataOut, e)
	tr, err := d.Trace(pkt, n.index("up0"))
	must(t, err)
	t.Logf("%+v", tr)
	c, err := d.Counters()
	must(t, err)
	t.Logf("%+v", c)
	if os.Getenv("PERF") == "" {
		return
	}
	pkt[16+14] = 1
	o = ebpf.RunOptions{Data: pkt, Repeat: 1000000, Context: xdpContext(len(pkt), n.index("up0"))}
	_, dur, err := d.mux.Benchmark(pkt, 1000000, nil)
	must(t, err)
	t.Logf("no vip %s", dur)
	_ = time.Now
}
