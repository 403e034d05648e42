package lab

import (
	"fmt"
	"html"
	"slices"
	"strings"
)

// plot remembers a chart of a load for --plot.
func (r *runner) plot(load, what, title string) error {
	report, ok := r.loads[load]
	if !ok {
		return fmt.Errorf("load %s has not ended", load)
	}
	p := Plot{Title: title}
	switch what {
	case "servers":
		for _, name := range sortedKeys(report.Servers) {
			p.Labels = append(p.Labels, name)
			p.Values = append(p.Values, float64(report.Servers[name]))
		}
	case "gaps":
		for i, g := range report.Gaps {
			p.Labels = append(p.Labels, fmt.Sprint(i+1))
			p.Values = append(p.Values, g)
		}
	default:
		return fmt.Errorf("%q is neither servers nor gaps", what)
	}
	r.result.Plots = append(r.result.Plots, p)
	return nil
}

// SVG draws bar charts one below the other.
func SVG(plots []Plot) string {
	const width, height, left, bottom, top = 800, 260, 60, 60, 30
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n",
		width, max(1, len(plots))*height)
	b.WriteString(`<rect width="100%" height="100%" fill="white"/>` + "\n")
	for i, p := range plots {
		y := i * height
		fmt.Fprintf(&b, `<text x="%d" y="%d" font-size="14">%s</text>`+"\n", left, y+18, html.EscapeString(p.Title))
		if len(p.Values) == 0 {
			continue
		}
		highest := max(slices.Max(p.Values), 1e-9)
		room := float64(height - bottom - top)
		step := float64(width-left-20) / float64(len(p.Values))
		for j, v := range p.Values {
			h := room * v / highest
			x := float64(left) + float64(j)*step
			base := float64(y + height - bottom)
			fmt.Fprintf(&b, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="#3465a4"><title>%s: %g</title></rect>`+"\n",
				x, base-h, step*0.8, h, html.EscapeString(p.Labels[j]), v)
			if len(p.Values) <= 40 {
				fmt.Fprintf(&b, `<text transform="translate(%.1f,%.1f) rotate(45)">%s</text>`+"\n",
					x+step*0.2, base+12, html.EscapeString(p.Labels[j]))
			}
		}
		for _, f := range []float64{0, 0.5, 1} {
			line := float64(y+height-bottom) - room*f
			fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#bbb"/><text x="4" y="%.1f">%.4g</text>`+"\n",
				left, width-20, line, line, line+4, highest*f)
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}
