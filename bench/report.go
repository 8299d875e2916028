package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"
	"unicode/utf8"
)

// A report gathers what the suites found, in the order in which they ran, and
// prints each table as it comes.
type report struct {
	out    io.Writer
	about  []string // the machine and the programs, a line each
	tables []*table
	ratios []ratio
}

// A table is text, ready to print. The first column is of names.
type table struct {
	title string
	notes []string
	head  []string
	rows  [][]string
	bars  []bar // what the plot shows of it; none: nothing
}

type bar struct {
	name  string
	value float64
	kind  kind
}

// A ratio has a target.
type ratio struct {
	name                   string
	value, lo, hi          float64
	confidence             float64
	rounds                 int
	target                 float64
	lowerIsBetter          bool
	numerator, denominator string
}

// targets are the floors, from 0 up; latencies are better when they are lower.
var targets = map[string]float64{
	"stage_vs_base": 0.68, "stage_vs_best_peer": 0.95, "put_vs_best_peer": 0.90, "put_vs_keyed_peer": 2.5,
	"bulk_vs_best_peer": 0.75, "bulk_vs_keyed_peer": 3, "drain_vs_best_peer": 1.20, "drain_vs_river": 6,
	"drain_vs_raw": 0.80, "latency_p99_vs_best_peer": 1.00, "growth_1m": 0.85, "held_xmin": 0.80,
	"sqlite_drain_vs_best_peer": 5, "sqlite_stage_vs_base": 0.65,
}

// newRatio is the ratio of two variants over their paired rounds.
func newRatio(name string, s samples, numerator, denominator string) ratio {
	r := ratio{name: name, target: targets[name], numerator: numerator, denominator: denominator}
	paired := ratios(s.of[numerator], s.of[denominator])
	r.rounds, r.value = len(paired), median(paired)
	r.lo, r.hi, r.confidence = interval(paired)
	return r
}

// ok reports whether the target lies within the interval, or is passed by it.
func (r ratio) ok() bool {
	if r.lowerIsBetter {
		return r.lo <= r.target
	}
	return r.hi >= r.target
}

func (r ratio) verdict() string {
	if r.ok() {
		return "ok"
	}
	return "short"
}

// worse returns the one of a and b that is farther from the target.
func worse(a, b ratio) ratio {
	if (b.value < a.value) != a.lowerIsBetter {
		return b
	}
	return a
}

func (p *report) add(t *table) {
	p.tables = append(p.tables, t)
	t.print(p.out)
}

func (p *report) ratio(r ratio) { p.ratios = append(p.ratios, r) }

// verdicts is the table of the ratios, with the interval of each.
func (p *report) verdicts() *table {
	t := &table{
		title: "Ratios with a target",
		notes: []string{
			fmt.Sprintf("The median over the paired rounds, and the interval that the true median lies in with the confidence beside it (sign test; at least %.0f %% wherever the rounds allow it).", 100*wanted),
			"ok: the target lies within the interval, or the interval beyond it.",
		},
		head: []string{"ratio", "of", "to", "median", "interval", "confidence", "rounds", "target", ""},
	}
	for _, r := range p.ratios {
		target := "≥ " + ratioText(r.target)
		if r.lowerIsBetter {
			target = "≤ " + ratioText(r.target)
		}
		t.rows = append(t.rows, []string{r.name, r.numerator, r.denominator, ratioText(r.value), span(r.lo, r.hi),
			fmt.Sprintf("%.0f %%", 100*r.confidence), fmt.Sprint(r.rounds), target, r.verdict()})
	}
	return t
}

// lines writes the ratios for programs to read.
func (p *report) lines(w io.Writer) {
	for _, r := range p.ratios {
		fmt.Fprintf(w, "RATIO %s %.3f %g %s\n", r.name, r.value, r.target, r.verdict())
	}
}

// print aligns a table for a terminal.
func (t *table) print(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n", t.title)
	for _, n := range t.notes {
		fmt.Fprintf(w, "  %s\n", n)
	}
	all := append([][]string{t.head}, t.rows...)
	width := make([]int, len(t.head))
	for _, row := range all {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range all {
		var line strings.Builder
		for i, cell := range row {
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				line.WriteString("  " + cell + pad)
			} else {
				line.WriteString("  " + pad + cell)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// markdown writes the whole report as a page.
func (p *report) markdown(w io.Writer) {
	fmt.Fprint(w, "# Figures\n\nWritten by `make bench`; [performance.md](performance.md) says what they mean.\n\n")
	for _, line := range p.about {
		fmt.Fprintf(w, "- %s\n", line)
	}
	if len(p.ratios) > 0 {
		p.verdicts().markdown(w)
	}
	for _, t := range p.tables {
		t.markdown(w)
	}
}

func (t *table) markdown(w io.Writer) {
	fmt.Fprintf(w, "\n### %s\n\n", t.title)
	if len(t.notes) > 0 {
		fmt.Fprintf(w, "%s\n\n", strings.Join(t.notes, " "))
	}
	fmt.Fprintf(w, "| %s |\n", strings.Join(t.head, " | "))
	fmt.Fprintf(w, "|---|%s\n", strings.Repeat("---:|", len(t.head)-1))
	for _, row := range t.rows {
		fmt.Fprintf(w, "| %s |\n", strings.Join(row, " | "))
	}
}

// count writes a number with its thousands apart: 12,345.
func count(x float64) string {
	if math.IsNaN(x) {
		return "–"
	}
	s := fmt.Sprintf("%.0f", x)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// digits writes a number with about three digits.
func digits(x float64) string {
	switch {
	case math.IsNaN(x):
		return "–"
	case math.Abs(x) >= 100:
		return count(x)
	case math.Abs(x) >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

func ratioText(x float64) string {
	if math.IsNaN(x) {
		return "–"
	}
	return fmt.Sprintf("%.2f", x)
}

func span(lo, hi float64) string { return ratioText(lo) + "–" + ratioText(hi) }

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
