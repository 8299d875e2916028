package main

import (
	"bytes"
	"encoding/xml"
	"io"
	"math"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// tiny is enough for every suite to run, and says nothing about speed.
var tiny = sizes{rounds: 1, few: 1, write: 20 * time.Millisecond, drain: 1000, relays: []int{1, 2}, batches: []int{100, 1000}, latency: 200 * time.Millisecond, backlog: 2000, ended: 200,
	chunk: 200, chunks: 2, steady: 1000, steadyFor: 300 * time.Millisecond, hot: 20, sqlite: 200, cost: 40, idle: 100 * time.Millisecond}

// TestEverySuiteRuns: what is only run when somebody measures would rot.
func TestEverySuiteRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a Postgres; run without -short")
	}
	var out bytes.Buffer
	r, err := run(t.Context(), tiny, suites, &out)
	require.NoError(t, err, out.String())
	require.NotContains(t, out.String(), "NaN")

	said := map[string]int{}
	for _, line := range regexp.MustCompile(`(?m)^RATIO (\S+) [0-9.]+ [0-9.]+ (ok|short)$`).FindAllStringSubmatch(out.String(), -1) {
		said[line[1]]++
	}
	want := map[string]int{}
	for name := range targets {
		want[name] = 1
	}
	require.Equal(t, want, said)

	var md, svg bytes.Buffer
	r.markdown(&md)
	for _, t2 := range r.tables {
		require.NotEmpty(t, t2.rows, t2.title)
		for _, row := range t2.rows {
			require.Len(t, row, len(t2.head), "%s: %q", t2.title, row)
		}
		require.Contains(t, md.String(), t2.title)
	}
	r.svg(&svg)
	require.Contains(t, svg.String(), ownLatest)
	for d := xml.NewDecoder(&svg); ; {
		_, err := d.Token()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
	}
}

func TestUnknownSuitesAreNamed(t *testing.T) {
	err := command(t.Context(), []string{"stages"}, io.Discard)
	require.ErrorContains(t, err, `no suite "stages": the suites are stage, bulk,`)
}

func TestIntervalOfTheMedian(t *testing.T) {
	for _, c := range []struct {
		x                  []float64
		lo, hi, confidence float64
	}{
		{[]float64{5}, 5, 5, 0},
		{[]float64{3, 1, 2}, 1, 3, 0.75},
		{[]float64{1, 2, 3, 4, 5, 6, 7}, 2, 6, 0.875}, // 1 - 2·(1+7)/2⁷
		{[]float64{1, 2, 3, 4, 5, 6}, 1, 6, 0.96875},  // without its ends only 0.78
	} {
		lo, hi, confidence := interval(c.x)
		require.Equal(t, c.lo, lo, c.x)
		require.Equal(t, c.hi, hi, c.x)
		require.InDelta(t, c.confidence, confidence, 1e-9, c.x)
	}
	lo, _, _ := interval(nil)
	require.True(t, math.IsNaN(lo))
}

func TestRatiosAreOfPairedRounds(t *testing.T) {
	s := samples{nil, map[string][]float64{"a": {10, 40, 90}, "b": {10, 20, 30}}}
	r := newRatio("stage_vs_base", s, "a", "b")
	require.Equal(t, 2.0, r.value)
	require.Equal(t, []float64{1, 3}, []float64{r.lo, r.hi})
	require.Equal(t, targets["stage_vs_base"], r.target)
}

func TestVerdicts(t *testing.T) {
	at := func(lo, value, hi float64) ratio { return ratio{value: value, lo: lo, hi: hi, target: 1} }
	require.Equal(t, "ok", at(0.8, 0.9, 1).verdict())
	require.Equal(t, "ok", at(2, 3, 4).verdict())
	require.Equal(t, "short", at(0.8, 0.9, 0.99).verdict())
	lower := at(1.01, 1.5, 2)
	lower.lowerIsBetter = true
	require.Equal(t, "short", lower.verdict())
	lower.lo = 1
	require.Equal(t, "ok", lower.verdict())

	a, b := at(0, 1, 2), at(0, 3, 4)
	require.Equal(t, a, worse(a, b))
	a.lowerIsBetter, b.lowerIsBetter = true, true
	require.Equal(t, b, worse(a, b))
}

func TestNumbersAreReadable(t *testing.T) {
	for x, text := range map[float64]string{0: "0.00", 9.994: "9.99", 12.34: "12.3", 123.4: "123", 1234567: "1,234,567", math.NaN(): "–"} {
		require.Equal(t, text, digits(x))
	}
	require.Equal(t, "-123", count(-123))
	require.True(t, strings.HasPrefix(ratioText(math.NaN()), "–"))
}
