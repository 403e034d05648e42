package bench

import (
	"fmt"
	"io"
	"math"
	"strings"
)

// Plot draws ns per packet against the number of flows as SVG: hash, table,
// and the band between Katran's lowest and highest figures. Both axes are logarithmic.
func (r *Report) Plot(out io.Writer) error {
	const (
		left, right, top, bottom = 70.0, 690.0, 30.0, 390.0
		minNs, maxNs             = 10.0, 1000.0
	)
	sizes := []struct {
		name  string
		label string
		flows float64
	}{{"flows_1", "1", 1}, {"flows_1k", "1 K", 1 << 10}, {"flows_16k", "16 K", 1 << 14},
		{"flows_128k", "128 K", 1 << 17}, {"flows_1m", "1 M", 1 << 20}}
	x := func(flows float64) float64 { return left + (right-left)*math.Log2(flows)/20 }
	y := func(ns float64) float64 {
		return bottom - (bottom-top)*math.Log(max(minNs, min(maxNs, ns))/minNs)/math.Log(maxNs/minNs)
	}
	var s strings.Builder
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 450" font-family="sans-serif" font-size="13">
<title>What a packet costs the mux</title>
<rect width="760" height="450" fill="white"/>
`)
	for _, ns := range []float64{10, 20, 50, 100, 200, 500, 1000} {
		fmt.Fprintf(&s, `<path d="M%.1f %.1fH%.1f" stroke="#ddd"/><text x="%.1f" y="%.1f" text-anchor="end">%.0f</text>`+"\n",
			left, y(ns), right, left-8, y(ns)+4, ns)
	}
	var low, high []string
	for _, size := range sizes {
		fmt.Fprintf(&s, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`+"\n", x(size.flows), bottom+20, size.label)
		band := katran[size.name]
		low = append(low, fmt.Sprintf("%.1f,%.1f", x(size.flows), y(band.Min)))
		high = append([]string{fmt.Sprintf("%.1f,%.1f", x(size.flows), y(band.Max))}, high...)
	}
	fmt.Fprintf(&s, `<polygon points="%s %s" fill="#f4c095"/><text x="%.1f" y="%.1f" fill="#b35c00">Katran</text>`+"\n",
		strings.Join(low, " "), strings.Join(high, " "), right+6, y(580))
	for _, line := range []struct{ name, colour string }{{"table", "#1f6feb"}, {"hash", "#1a7f37"}} {
		var points []string
		var lastX, lastY float64
		for _, size := range sizes {
			if ns, measured := r.Figures[line.name+"_"+size.name+"_ns"]; measured {
				lastX, lastY = x(size.flows), y(ns)
				points = append(points, fmt.Sprintf("%.1f,%.1f", lastX, lastY))
			}
		}
		fmt.Fprintf(&s, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/><text x="%.1f" y="%.1f" fill="%s">%s</text>`+"\n",
			strings.Join(points, " "), line.colour, lastX+6, lastY+4, line.colour, line.name)
	}
	fmt.Fprintf(&s, `<text x="%.1f" y="%.1f" text-anchor="middle">flows</text>`+"\n", (left+right)/2, bottom+45)
	fmt.Fprintf(&s, `<text x="%.1f" y="18">ns per packet, net of the stub</text>`+"\n</svg>\n", left-50)
	_, err := io.WriteString(out, s.String())
	return err
}
