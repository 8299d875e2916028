package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// A table prints rows in columns under its headings. Columns keep the width of
// the widest cell so far.
type table struct {
	w        io.Writer
	headings []string // nil: printed
	widths   []int
}

func newTable(w io.Writer, headings []string) *table {
	return &table{w: w, headings: headings, widths: make([]int, len(headings))}
}

func (t *table) print(rows [][]string) error {
	if t.headings != nil {
		rows, t.headings = append([][]string{t.headings}, rows...), nil
	}
	for _, row := range rows {
		for i := range row {
			row[i] = oneLine(row[i])
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	var text strings.Builder
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			fmt.Fprintf(&line, "%-*s", t.widths[i]+3, cell)
		}
		text.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(t.w, text.String())
	return err
}

// writeTable prints rows under their headings, in columns.
func writeTable(w io.Writer, headings []string, rows [][]string) error {
	return newTable(w, headings).print(rows)
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// maxCell bounds a cell, in characters.
const maxCell = 100

// oneLine makes a text from elsewhere fit for a cell of a table.
func oneLine(s string) string {
	s = visible(s)
	if runes := []rune(s); len(runes) > maxCell {
		s = string(runes[:maxCell-1]) + "…"
	}
	return s
}

// visible makes a text from elsewhere fit for a terminal: one line, and no
// control characters, which could be commands to it.
func visible(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	return strings.Join(strings.Fields(s), " ")
}

// age writes a duration as people say it: the two greatest units, or tenths of
// a second.
func age(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/day, d%day/time.Hour)
}

// number writes 12345 as 12,345.
func number(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// entries writes 1 entry, 2 entries.
func entries(n int) string {
	if n == 1 {
		return "1 entry"
	}
	return number(n) + " entries"
}
