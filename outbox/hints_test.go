package outbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// looksOf plays a hint that is never seen and returns the ages of its looks.
func looksOf(life time.Duration) (ages []time.Duration) {
	h := newHints(life)
	start := time.Unix(1000, 0)
	h.add(1, start)
	for {
		at, ok := h.next()
		if !ok {
			return ages
		}
		ages = append(ages, at.Sub(start))
		h.look(at)
	}
}

func TestHintThatIsNeverSeenCostsAtMostTwentyLooks(t *testing.T) {
	for _, life := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second, 7 * time.Second, time.Minute, time.Hour} {
		ages := looksOf(life)
		require.LessOrEqual(t, len(ages), maxLooks, "poll interval %s: %s", life, ages)
		require.Equal(t, firstLook, ages[0])
		require.Greater(t, ages[len(ages)-1], life/2, "the looks reach as far as the poll")
		for _, age := range ages {
			require.LessOrEqual(t, age, life)
		}
	}
}

func TestHintsOfAChannelShareTheirLooks(t *testing.T) {
	h := newHints(time.Second)
	start := time.Unix(1000, 0)
	for i := range 100 {
		h.add(Version(i+1), start.Add(time.Duration(i)))
	}
	looks := 0
	for at, ok := h.next(); ok; at, ok = h.next() {
		h.look(at)
		looks++
	}
	require.LessOrEqual(t, looks, maxLooks+1)
}

func TestHintIsDroppedByItsOwnVersionOnly(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	h.add(5, now)
	h.add(6, now)
	h.seen([]Row{{Version: 7}, {Version: 4}})
	require.Len(t, h.list, 2)
	h.seen([]Row{{Version: 6}})
	require.Equal(t, []hint{{5, now}}, h.list)
}

func TestHintsAreBounded(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	for i := range 10 * maxHints {
		h.add(Version(i), now.Add(time.Duration(i)))
	}
	require.Len(t, h.list, maxHints)
	require.Equal(t, Version(10*maxHints-1), h.list[maxHints-1].version, "the newest are kept")
}

func TestHintOfALaterDueTimeWaitsForIt(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	h.look(now)
	h.add(1, now.Add(5*time.Second))
	at, ok := h.next()
	require.True(t, ok)
	require.Equal(t, now.Add(5*time.Second+firstLook), at)
	h.look(now.Add(time.Second)) // for another reason
	require.Len(t, h.list, 1)
}
