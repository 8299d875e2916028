package filestore

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func newCancel(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithCancel(t.Context())
}

// golden is the file of version 1. It must load for ever: add files for new
// versions, and change none.
func golden(t testing.TB) string {
	content, err := os.ReadFile("testdata/version1.json")
	if t != nil {
		require.NoError(t, err)
	}
	return string(content)
}

func at(micros int64) time.Time { return time.UnixMicro(1767225600000000 + micros).UTC() }

func TestGoldenFileLoads(t *testing.T) {
	st, err := parse([]byte(golden(t)))
	require.NoError(t, err)
	require.Equal(t, outbox.Version(1767225600000100), st.number)
	require.Equal(t, outbox.Token(1767225600000200), st.token)
	require.Equal(t, map[string]channel{
		"mail":    {pausedUntil: at(3_600_000_000), reason: "maintenance"},
		"default": {outages: 2, downUntil: at(2_000_000), probeUntil: at(3_000_000), cause: "503 <unavailable>"},
	}, st.channels)
	var got []message
	for _, sl := range st.slots {
		m := *sl.m
		m.changing, m.fixed = nil, nil
		got = append(got, m)
	}
	const base = 1767225600000000
	require.Equal(t, []message{
		{channel: "default", row: outbox.Row{Key: "pending", Version: base + 1, State: outbox.StatePending, StagedAt: at(1), Due: at(60_000_000), Payload: []byte("hello, 世界 <&> \"quoted\"\n")}},
		{channel: "default", row: outbox.Row{Key: "bytes", Group: "g", Version: base + 2, State: outbox.StatePending, StagedAt: at(2), Due: at(2), Payload: []byte{0xff, 0x00, 0xfe}, Header: outbox.Header{"tenant": "t", "trace": "1"}}},
		{channel: "default", ended: outbox.OutcomeRetry, row: outbox.Row{Key: "failed", Version: base + 3, Token: base + 10, Attempt: 2, State: outbox.StateFailed, StagedAt: at(3), Due: at(5_000_000), Payload: []byte{}, LastError: "503", Code: "E503"}},
		{channel: "default", lapses: 1, row: outbox.Row{Key: "sending", Group: "h", Version: base + 4, Token: base + 200, Attempt: 1, State: outbox.StateSending, StagedAt: at(4), Due: at(4), LeaseUntil: at(15_000_000), Payload: []byte(`{"a":1}`)}},
		{channel: "mail", ended: outbox.OutcomeDone, row: outbox.Row{Key: "sent", Version: base + 5, Token: base + 11, Attempt: 1, State: outbox.StateSent, StagedAt: at(5), Due: at(5), CompletedAt: at(500), Ref: "msg-1", Payload: []byte("a")}},
		{channel: "mail", ended: outbox.OutcomeDead, row: outbox.Row{Key: "dead", Version: base + 6, Token: base + 12, Attempt: 10, State: outbox.StateDead, StagedAt: at(6), Due: at(6), CompletedAt: at(600), LastError: "410", Code: "E410", Payload: []byte("b")}},
		{channel: "mail", ended: outbox.OutcomeUnknown, row: outbox.Row{Key: "unknown", Version: base + 7, Token: base + 13, Attempt: 1, State: outbox.StateUnknown, StagedAt: at(7), Due: at(7), CompletedAt: at(700), LastError: "timeout", Payload: []byte("c")}},
		{channel: "mail", row: outbox.Row{Key: "resolved", Version: base + 8, Token: base + 14, Attempt: 1, State: outbox.StateSent, StagedAt: at(8), Due: at(8), CompletedAt: at(800), Payload: []byte("d")}},
	}, got)
	require.Equal(t, golden(t), string(st.appendTo(nil)), "this version writes what it read")
}

// Cut anywhere, a file is refused.
func TestFileCutAnywhereIsRefused(t *testing.T) {
	content := []byte(golden(t))
	for n := range len(content) - 1 { // the last byte is a line feed
		_, err := parse(content[:n])
		require.ErrorIs(t, err, outbox.ErrSchema, "the first %d bytes", n)
	}
	zeroed := bytes.Clone(content)
	clear(zeroed[len(zeroed)/2:])
	_, err := parse(zeroed)
	require.ErrorIs(t, err, outbox.ErrSchema)
}

// What is refused says why, and is left untouched.
func TestFilesThatAreRefused(t *testing.T) {
	good := golden(t)
	edit := func(from, to string) string {
		require.Contains(t, good, from)
		return strings.Replace(good, from, to, 1)
	}
	for name, c := range map[string]struct{ content, says string }{
		"empty":                {"", "it is empty"},
		"torn":                 {good[:300], "cut short"},
		"two in one":           {good + good, "not JSON"},
		"not UTF-8":            {edit("hello", "\xff\xfe"), "not JSON"},
		"foreign":              {`{"users":[]}`, "not an outbox"},
		"foreign array":        {`[1,2]`, "not an outbox"},
		"newer":                {edit(`"version":1`, `"version":2,"new":true`), "version is 2, this library reads up to 1"},
		"no version":           {edit(`"version":1,`, ``), "version is 0"},
		"unknown field":        {edit(`"attempt":10`, `"tries":10`), "changed by hand"},
		"unknown state":        {edit(`"state":"dead"`, `"state":"gone"`), "number 1767225600000006"},
		"unknown outcome":      {edit(`"ended":"dead"`, `"ended":"gone"`), "number 1767225600000006"},
		"lease of none":        {edit(`"state":"sending"`, `"state":"failed"`), "number 1767225600000004"},
		"ended, and not":       {edit(`"state":"dead"`, `"state":"pending"`), "number 1767225600000006"},
		"key twice":            {edit(`"key":"unknown"`, `"key":"dead"`), `key "dead" of channel "mail" is there twice`},
		"number twice":         {edit(`"number":1767225600000007`, `"number":1767225600000006`), "is there twice"},
		"number of the future": {edit(`"number":1767225600000100`, `"number":5`), "never given out"},
		"token of the future":  {edit(`"token":1767225600000200,`+"\n", `"token":5,`+"\n"), "never given out"},
		"number as text":       {edit(`"number":1767225600000006`, `"number":"6"`), "changed by hand"},
	} {
		t.Run(name, func(t *testing.T) {
			path := newPath(t)
			s := openTest(t, path, Options{}, direct)
			require.NoError(t, os.WriteFile(path, []byte(c.content), 0o600))
			err := s.Check(t.Context())
			require.ErrorIs(t, err, outbox.ErrSchema)
			require.ErrorContains(t, err, path)
			require.ErrorContains(t, err, c.says)
			require.NotContains(t, err.Error(), "世界", "no payload is shown")
			_, err = journalOn(t, s).Add(t.Context(), outbox.Message{Key: "new"})
			require.ErrorIs(t, err, outbox.ErrSchema)
			after, readErr := os.ReadFile(path)
			require.NoError(t, readErr)
			require.Equal(t, c.content, string(after), "left untouched")
			require.NoError(t, os.WriteFile(path, []byte(good), 0o600))
			require.NoError(t, s.Check(t.Context()), "once a good one is in its place")
		})
	}
}

// A file that a tool has formatted anew is still read.
func TestFormattingDoesNotMatter(t *testing.T) {
	st, err := parse([]byte(strings.NewReplacer("\n", "", `,"`, ` , "`).Replace(golden(t))))
	require.NoError(t, err)
	require.Equal(t, golden(t), string(st.appendTo(nil)))
}

func TestCountersSurviveWhatTheyNumbered(t *testing.T) {
	now := at(0)
	o := Options{Clock: func() time.Time { return now }}
	path := newPath(t)
	s := openTest(t, path, o, direct)
	j := journalOn(t, s)
	first, err := j.Add(t.Context(), outbox.Message{Key: "k"})
	require.NoError(t, err)
	require.Equal(t, now.UnixMicro(), first.Seq)
	begun, err := j.Begin(t.Context(), "k", time.Second)
	require.NoError(t, err)
	_, err = j.Discard(t.Context(), outbox.Filter{Key: "k"})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	now = now.Add(-time.Hour)
	again, err := j.Add(t.Context(), outbox.Message{Key: "k"})
	require.NoError(t, err)
	require.Greater(t, again.Seq, first.Seq)
	next, err := j.Begin(t.Context(), "k", time.Second)
	require.NoError(t, err)
	require.Greater(t, next.Lease.Token, begun.Lease.Token)
}

// FuzzLoad: what is read is refused with a reason, or written again as what it
// was read as.
func FuzzLoad(f *testing.F) {
	good := golden(f)
	for _, seed := range []string{
		good, good[:len(good)/2], "", "{}", "[]", "null", `{"format":"sqloutbox journal","version":1}`,
		`{"format":"sqloutbox journal","version":1,"number":1,"token":1,"channels":null,"messages":[]}`,
		strings.Replace(good, "hello", `\ud800`, 1), strings.Replace(good, `"key"`, `"KEY"`, 1),
		strings.Replace(good, "1767225660000000", "9223372036854775807", 1),
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		st, err := parse(content)
		if err != nil {
			require.ErrorIs(t, err, outbox.ErrSchema)
			return
		}
		once := st.appendTo(nil)
		again, err := parse(once)
		require.NoError(t, err)
		require.Equal(t, string(once), string(again.appendTo(nil)))
		require.Equal(t, st.bytes, again.bytes)
	})
}
