package main

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// statistics is the output of stats --json.
type statistics struct {
	CountsStopAt int         `json:"counts_stop_at"`
	Channels     []jsonStats `json:"channels"`
}

func TestStatsShowsEveryChannel(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		require.Equal(t, "nothing waits, no message is dead or unknown, and no channel is paused\n", ok(t, "stats", "--dsn", dsn))
		require.Equal(t, "{\n  \"counts_stop_at\": 10000,\n  \"channels\": []\n}\n", ok(t, "stats", "--json", "--dsn", dsn))

		s := open(t, dsn)
		stage(t, s, "later", 24*time.Hour, "a")
		stage(t, s, "orders", 0, "a", "b", "c")
		claimed, err := s.store.ClaimRows(t.Context(), outbox.Claim{Channel: "orders", Limit: 2, Lease: time.Hour})
		require.NoError(t, err)
		require.Len(t, claimed.Rows, 2)
		_, err = s.store.Settle(t.Context(), outbox.Channel{System: outbox.SystemLatest, Name: "orders"},
			[]outbox.Settlement{{Row: claimed.Rows[0], Outcome: outbox.OutcomeRetry, Delay: time.Hour, Error: "no\x1b[2J luck\n"}})
		require.NoError(t, err)
		down := outbox.Channel{System: outbox.SystemLatest, Name: "down"}
		require.NoError(t, s.store.Outage(t.Context(), down, true, "503"))

		var got statistics
		okJSON(t, &got, "stats", "--dsn", dsn)
		require.Equal(t, outbox.StatsCap, got.CountsStopAt)
		require.Len(t, got.Channels, 3)
		require.Equal(t, "down", got.Channels[0].Channel)
		require.True(t, got.Channels[0].DestinationDown)
		require.Equal(t, "503", got.Channels[0].Reason)
		require.Equal(t, "later", got.Channels[1].Channel)
		require.Equal(t, 1, got.Channels[1].Scheduled)
		orders := got.Channels[2]
		require.Positive(t, orders.OldestDueSeconds)
		orders.OldestDueSeconds = 0
		require.Equal(t, jsonStats{
			System: "latest", Channel: "orders", Due: 1, Scheduled: 1, InFlight: 1,
			Attempts: 1, LastError: "no\x1b[2J luck\n",
		}, orders)

		text := ok(t, "stats", "--dsn", dsn)
		lines := strings.Split(text, "\n")
		require.Regexp(t, `^CHANNEL +KIND +DUE +SCHEDULED +IN FLIGHT +OLDEST DUE +BLOCKED +DEAD +UNKNOWN +ATTEMPTS +STATE +LAST ERROR$`, lines[0])
		require.Regexp(t, `^down +latest +0 +0 +0 +- +- +- +- +0 +destination down, next try in [01]\.\ds: 503$|^down .*destination down, to be tried: 503$`, lines[1])
		require.Regexp(t, `^later +latest +0 +1 +0 +- +- +- +- +0 +open$`, lines[2])
		require.Regexp(t, `^orders +latest +1 +1 +1 +\d+\.\ds +- +- +- +1 +open +no \[2J luck$`, lines[3])
	})
}

func TestStatsIsShownAgainUntilInterrupted(t *testing.T) {
	db := filepath.Join(t.TempDir(), "app.db")
	ok(t, "migrate", "up", "--dsn", db)
	ctx, cancel := context.WithCancel(t.Context())
	var stderr bytes.Buffer
	shown := &stopAfter{text: "nothing waits", times: 3, stop: cancel}
	a := app{stdout: shown, stderr: &stderr, terminal: true, env: func(string) string { return db }}
	require.Equal(t, exitInterrupted, a.run(ctx, []string{"outbox", "stats", "--watch", "100ms"}))
	require.Equal(t, 3, strings.Count(shown.String(), "\x1b[H\x1b[2J"))
}

// stopAfter calls stop when a text has been written some times.
type stopAfter struct {
	bytes.Buffer
	text  string
	times int
	stop  func()
}

func (s *stopAfter) Write(p []byte) (int, error) {
	n, err := s.Buffer.Write(p)
	if strings.Count(s.String(), s.text) == s.times {
		s.stop()
	}
	return n, err
}

func TestPauseAndResumeSayWhatTheyDid(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		s := open(t, dsn)
		stage(t, s, "orders", 0, "a")

		r := call(t, "pause", "orders", "--for", "1h", "--reason", "index is rebuilt", "--dsn", dsn)
		require.Equal(t, exitOK, r.code)
		require.Regexp(t, `^channel "orders" is paused for 1h0m0s, until 2\S+Z\nentries waiting in it: 1 due, 0 scheduled, 0 in flight\n$`, r.stdout)
		require.Empty(t, r.stderr)
		claimed, err := s.store.ClaimRows(t.Context(), outbox.Claim{Channel: "orders", Limit: 2, Lease: time.Hour})
		require.NoError(t, err)
		require.Empty(t, claimed.Rows)
		require.Regexp(t, `paused for another (1h00m|59m59s|59m58s): index is rebuilt`, ok(t, "stats", "--dsn", dsn))

		r = call(t, "pause", "order", "--for", "1h", "--dsn", dsn)
		require.Equal(t, exitOK, r.code)
		require.Contains(t, r.stderr, `note: nothing waits in channel "order" at the moment; if that is not its name, nothing is changed by this; known at the moment: "orders"`)

		require.Contains(t, ok(t, "resume", "orders", "--dsn", dsn), `channel "orders" is resumed; it was: paused for another 59m5`)
		require.Contains(t, ok(t, "resume", "orders", "--dsn", dsn), `channel "orders" was not paused`)
		claimed, err = s.store.ClaimRows(t.Context(), outbox.Claim{Channel: "orders", Limit: 2, Lease: time.Hour})
		require.NoError(t, err)
		require.Len(t, claimed.Rows, 1)
		r = call(t, "resume", "help", "--dsn", dsn)
		require.Equal(t, exitOK, r.code)
		require.Contains(t, r.stdout, `channel "help" was not paused`)
		require.Contains(t, r.stderr, "if that is not its name")
	})
}

func TestFenceRaisesTheVersions(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		before := time.Now().Add(-time.Minute).UnixMicro()
		var got struct{ Version, Token int64 }
		require.NoError(t, json.Unmarshal([]byte(ok(t, "fence", "--json", "--dsn", dsn)), &got))
		require.Greater(t, got.Version, before)
		require.Greater(t, got.Token, before)
		require.Contains(t, ok(t, "fence", "--dsn", dsn), "versions go on above ")
	})
}

// A pooler in transaction mode gives every statement to another session.
func TestEveryCommandWorksBehindAPooler(t *testing.T) {
	if testing.Short() {
		return
	}
	direct := pgtest.DSN(t)
	pooled := pgtest.Pooler(t, direct, 2)
	for _, line := range []string{
		"migrate up", "migrate status", "doctor", "stats", "list --all", "retry --all", "discard --all --yes", "purge --older-than 1d --yes", "pause orders --for 1h", "resume orders", "fence", "migrate down",
	} {
		ok(t, append(strings.Fields(line), "--dsn", pooled)...)
	}
}

func TestTablesAreReadable(t *testing.T) {
	require.Equal(t, "0.0s 59.9s 1m00s 59m59s 1h00m 23h59m 1d00h 400d01h", strings.Join([]string{
		age(0), age(59*time.Second + 900*time.Millisecond), age(time.Minute), age(time.Hour - time.Second),
		age(time.Hour), age(24*time.Hour - time.Second), age(24 * time.Hour), age(400*24*time.Hour + time.Hour),
	}, " "))
	require.Equal(t, "0 999 1,000 12,345 1,234,567 -1 -1,000", strings.Join([]string{
		number(0), number(999), number(1000), number(12345), number(1234567), number(-1), number(-1000),
	}, " "))
	require.Equal(t, "10,000+", count(outbox.StatsCap))
	require.Equal(t, strings.Repeat("é", maxCell-1)+"…", oneLine(strings.Repeat("é", maxCell+1)))
	require.Equal(t, "a b c", oneLine(" a\n\tb\x00\x1b c "))
}
