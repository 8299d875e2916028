package main

import (
	"fmt"
	"html"
	"io"
)

// Sizes of the plot, in its own units.
const (
	plotWidth = 860
	plotNames = 250 // the width of the column of names
	plotBar   = 18
	plotGap   = 6
	plotTitle = 34
)

var plotColours = map[kind]string{own: "#2b6cb0", rival: "#a0aec0", keyed: "#718096", limit: "#e2e8f0"}

// svg draws a bar chart of each table that has bars, one below the other, each
// to a scale of its own that starts at zero.
func (p *report) svg(w io.Writer) {
	height := 40
	for _, t := range p.tables {
		if len(t.bars) > 0 {
			height += plotTitle + len(t.bars)*(plotBar+plotGap) + plotGap
		}
	}
	fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="13">`+"\n", plotWidth, height)
	fmt.Fprintf(w, `<rect width="%d" height="%d" fill="white"/>`+"\n", plotWidth, height)
	y := 8
	for _, t := range p.tables {
		if len(t.bars) > 0 {
			y = t.draw(w, y)
		}
	}
	x := 8
	for _, k := range []kind{own, rival, keyed, limit} {
		fmt.Fprintf(w, `<rect x="%d" y="%d" width="12" height="12" fill="%s" stroke="#718096"/><text x="%d" y="%d">%s</text>`+"\n",
			x, y+8, plotColours[k], x+18, y+19, k)
		x += 200
	}
	fmt.Fprintln(w, `</svg>`)
}

func (t *table) draw(w io.Writer, y int) int {
	fmt.Fprintf(w, `<text x="8" y="%d" font-weight="bold">%s</text>`+"\n", y+20, html.EscapeString(t.title))
	y += plotTitle
	top := 0.0
	for _, b := range t.bars {
		top = max(top, b.value)
	}
	for _, b := range t.bars {
		width := 0.0
		if top > 0 {
			width = b.value / top * (plotWidth - plotNames - 90)
		}
		fmt.Fprintf(w, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", plotNames-8, y+14, html.EscapeString(b.name))
		fmt.Fprintf(w, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s" stroke="#718096"/>`+"\n", plotNames, y, width, plotBar, plotColours[b.kind])
		fmt.Fprintf(w, `<text x="%.1f" y="%d">%s</text>`+"\n", plotNames+width+6, y+14, digits(b.value))
		y += plotBar + plotGap
	}
	return y + plotGap
}
