package outbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// looksOf plays a hint that is never seen and returns the ages of its looks,
// each of which takes no time.
func looksOf(life time.Duration) (ages []time.Duration) {
	h := newHints(life)
	start := time.Unix(1000, 0)
	h.add(1, start, start)
	now := start
	for {
		at, ok := h.next()
		if !ok {
			return ages
		}
		now = later(now, at)
		ages = append(ages, now.Sub(start))
		h.look(now)
	}
}

func TestHintThatIsNeverSeenCostsAtMostTwentyLooks(t *testing.T) {
	for _, life := range []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second, 7 * time.Second, time.Minute, time.Hour} {
		ages := looksOf(life)
		require.LessOrEqual(t, len(ages), maxLooks, "poll interval %s: %s", life, ages)
		require.Equal(t, []time.Duration{0, 0, 0, firstLook}, ages[:4])
		require.Greater(t, ages[len(ages)-1], life/3, "the looks reach as far as the poll: %s", ages)
		for _, age := range ages {
			require.LessOrEqual(t, age, life)
		}
	}
}

func TestHintsOfAChannelShareTheirLooks(t *testing.T) {
	h := newHints(time.Second)
	start := time.Unix(1000, 0)
	for i := range 100 {
		at := start.Add(time.Duration(i))
		h.add(Version(i+1), at, at)
	}
	looks := 0
	for now := start; ; looks++ {
		at, ok := h.next()
		if !ok {
			break
		}
		now = later(now, at)
		h.look(now)
	}
	require.LessOrEqual(t, looks, maxLooks+1)
}

func TestHintsThatComeCloseTogetherAreNotLookedForEarly(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	require.Equal(t, now, h.add(1, now, now))
	require.Equal(t, now.Add(earlyGap-1+firstLook), h.add(2, now.Add(earlyGap-1), now.Add(earlyGap-1)))
	now = now.Add(time.Second)
	require.Equal(t, now, h.add(3, now, now))
}

func TestHintIsDroppedByItsOwnVersionOnly(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	h.add(5, now, now)
	h.add(6, now, now)
	h.seen([]Row{{Version: 7}, {Version: 4}})
	require.Len(t, h.list, 2)
	h.seen([]Row{{Version: 6}})
	require.Equal(t, []hint{{5, now, earlyLooks}}, h.list)
}

func TestHintsAreBounded(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	for i := range 10 * maxHints {
		h.add(Version(i), now, now)
	}
	require.Len(t, h.list, maxHints)
	require.Equal(t, Version(10*maxHints-1), h.list[maxHints-1].version, "the newest are kept")
}

func TestHintOfALaterDueTimeWaitsForIt(t *testing.T) {
	h := newHints(time.Second)
	now := time.Unix(1000, 0)
	h.look(now)
	h.add(1, now, now.Add(5*time.Second))
	at, ok := h.next()
	require.True(t, ok)
	require.Equal(t, now.Add(5*time.Second+firstLook), at)
	h.look(now.Add(time.Second)) // for another reason
	require.Len(t, h.list, 1)
}
