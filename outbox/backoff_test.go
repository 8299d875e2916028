package outbox

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var oddAttempts = []int{math.MinInt, -1, 0, 1, 2, 9, 10, 35, 62, 63, 64, 310, math.MaxInt32, math.MaxInt}

func TestBackoffStaysWithinItsCapAtAnyAttempt(t *testing.T) {
	for _, base := range []time.Duration{1, time.Millisecond, time.Second, time.Hour, math.MaxInt64} {
		for _, limit := range []time.Duration{1, 2, time.Second, backoffCap, math.MaxInt64} {
			before := time.Duration(0)
			for _, attempt := range oddAttempts {
				d := exponential(base, limit, attempt)
				require.Positive(t, d)
				require.LessOrEqual(t, d, limit)
				require.GreaterOrEqual(t, d, before, "monotone before the jitter")
				before = d
				for range 20 {
					j := jitter(d)
					require.Positive(t, j)
					require.LessOrEqual(t, j, d, "the cap holds after the jitter")
					require.GreaterOrEqual(t, j, d/2)
				}
			}
		}
	}
}

func TestDefaultBackoffStartsAtASecondAndEndsAtFiveMinutes(t *testing.T) {
	for range 100 {
		first, last := defaultBackoff(1), defaultBackoff(math.MaxInt)
		require.True(t, first > 500*time.Millisecond-1 && first <= time.Second, first)
		require.True(t, last >= backoffCap/2 && last <= backoffCap, last)
	}
}

func TestUserBackoffIsBounded(t *testing.T) {
	for name, c := range map[string]struct {
		f         func(int) time.Duration
		low, high time.Duration
	}{
		"zero":     {func(int) time.Duration { return 0 }, minUserBackoff, minUserBackoff},
		"negative": {func(int) time.Duration { return math.MinInt64 }, minUserBackoff, minUserBackoff},
		"huge":     {func(int) time.Duration { return math.MaxInt64 }, maxUserBackoff, maxUserBackoff},
		"panics":   {func(int) time.Duration { panic("no") }, 1, backoffCap},
		"none":     {nil, 1, backoffCap},
		"an hour":  {func(int) time.Duration { return time.Hour }, time.Hour, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			for _, attempt := range oddAttempts {
				d := bounded(c.f)(attempt)
				require.True(t, d >= c.low && d <= c.high, "%s at attempt %d", d, attempt)
			}
		})
	}
}

func TestUserBackoffIsGivenAnAttemptOfAtLeastOne(t *testing.T) {
	bounded(func(attempt int) time.Duration {
		require.Equal(t, 1, attempt)
		return time.Second
	})(-5)
}
