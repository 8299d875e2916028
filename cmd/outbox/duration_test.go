package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDurationsMayBeInDays(t *testing.T) {
	const day = 24 * time.Hour
	for text, want := range map[string]time.Duration{
		"90s": 90 * time.Second, "36h": 36 * time.Hour, "1d": day, "1d12h": 36 * time.Hour, "1.5d": 36 * time.Hour,
		"30d": 30 * day, "-2d": -2 * day, "0d": 0, "1d30m10s": day + 30*time.Minute + 10*time.Second,
	} {
		got, err := parseDuration(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"", "d", "1", "1d1", "1d1d", "1h1d", "1d-1h", "soon", "1 d", "1e3d", "99999999d", "infd"} {
		_, err := parseDuration(text)
		require.EqualError(t, err, "not a duration such as 90s, 36h or 1d12h", text)
	}
}
