package main

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageList is the output of list --json.
type messageList struct {
	Channel  string        `json:"channel"`
	Messages []jsonMessage `json:"messages"`
	After    string        `json:"after"`
}

func (l messageList) keys() string {
	var keys []string
	for _, m := range l.Messages {
		keys = append(keys, m.Key)
	}
	return strings.Join(keys, " ")
}

func openMails(t testing.TB, dsn, channel string) *outbox.Journal {
	t.Helper()
	store := outbox.JournalStore(nil)
	if isFileStore(dsn) {
		store = openReleased(t, dsn)
	} else {
		store = open(t, dsn).store
	}
	j, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: channel})
	require.NoError(t, err)
	return j
}

// put commits messages.
func put(t testing.TB, j *outbox.Journal, ms ...outbox.Message) {
	t.Helper()
	for _, m := range ms {
		r, err := j.Add(t.Context(), m)
		require.NoError(t, err)
		require.True(t, r.Created)
	}
}

// ended begins and settles the message of a key.
func ended(t testing.TB, j *outbox.Journal, key string, how error) {
	t.Helper()
	r, err := j.Begin(t.Context(), key, time.Hour)
	require.NoError(t, err)
	if how == nil {
		require.NoError(t, j.MarkSent(t.Context(), r.Lease, "ref-"+key))
		return
	}
	require.NoError(t, j.MarkFailed(t.Context(), r.Lease, how))
}

// everyState makes a journal in which there is a message in each state, named
// after it.
func everyState(t testing.TB, dsn, channel string) *outbox.Journal {
	t.Helper()
	install(t, dsn)
	j := openMails(t, dsn, channel)
	put(t, j,
		outbox.Message{Key: "pending", Payload: []byte("hello\nworld"), Header: outbox.Header{"tenant": "t1"}},
		outbox.Message{Key: "failed", Payload: []byte{0xff, 0}, Delay: time.Hour},
		outbox.Message{Key: "sending"},
		outbox.Message{Key: "sent"},
		outbox.Message{Key: "dead", Group: "g"},
		outbox.Message{Key: "unknown"},
		outbox.Message{Key: "blocked", Group: "g"},
	)
	ended(t, j, "failed", outbox.WithCode("smtp-451", outbox.RetryAfter(time.Hour, errors.New("gre\x1b[2Jy\nlisted"))))
	_, err := j.Begin(t.Context(), "sending", time.Hour)
	require.NoError(t, err)
	ended(t, j, "sent", nil)
	ended(t, j, "dead", outbox.WithCode("smtp-550", outbox.Permanent(errors.New("no mailbox"))))
	ended(t, j, "unknown", outbox.Unknown(errors.New("connection reset")))
	return j
}

func TestListShowsEveryState(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		everyState(t, dsn, "mails")
		args := []string{"list", "--channel", "mails", "--dsn", dsn}
		text := ok(t, args...)
		lines := strings.Split(text, "\n")
		const at = `\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`
		require.Len(t, lines, 9)
		for i, want := range []string{
			`^KEY +GROUP +STATE +ATTEMPTS +CREATED +WHEN +CODE +REFERENCE OR LAST ERROR$`,
			`^pending +- +pending +0 +` + at + ` +due ` + at + ` +- +-$`,
			`^failed +- +failed +1 +` + at + ` +due ` + at + ` +smtp-451 +.*gre \[2Jy listed$`,
			`^sending +- +sending +1 +` + at + ` +leased until ` + at + ` +- +-$`,
			`^sent +- +sent +1 +` + at + ` +ended ` + at + ` +- +ref-sent$`,
			`^dead +g +dead +1 +` + at + ` +ended ` + at + ` +smtp-550 +.*no mailbox$`,
			`^unknown +- +unknown +1 +` + at + ` +ended ` + at + ` +- +.*connection reset$`,
			`^blocked +g +pending +0 +` + at + ` +due ` + at + ` +- +-$`,
			`^$`,
		} {
			require.Regexp(t, want, lines[i])
		}
		require.NotContains(t, text, "hello")
		require.NotContains(t, text, "\x1b")

		var l messageList
		okJSON(t, &l, args...)
		require.Equal(t, "mails", l.Channel)
		require.Equal(t, "pending failed sending sent dead unknown blocked", l.keys())
		require.Empty(t, l.After)
		for _, m := range l.Messages {
			require.Nil(t, m.PayloadText)
			require.Nil(t, m.PayloadBase64)
			require.Equal(t, m.State == "sending", m.LeasedUntil != nil)
			require.Equal(t, m.State == "sent" || m.State == "dead" || m.State == "unknown", m.CompletedAt != nil)
			require.Equal(t, m.CompletedAt == nil, m.Due != nil)
			require.Positive(t, m.Number)
		}
		okJSON(t, &l, append(args, "--payload", "--state", "pending,failed")...)
		require.Equal(t, "pending failed blocked", l.keys())
		require.Equal(t, "hello\nworld", *l.Messages[0].PayloadText)
		require.Equal(t, "/wA=", *l.Messages[1].PayloadBase64)
		require.Empty(t, *l.Messages[2].PayloadText)
		require.Contains(t, ok(t, append(args, "--payload")...), "hello world\n")

		okJSON(t, &l, append(args, "--group", "g", "--state", "dead", "--state", "unknown")...)
		require.Equal(t, "dead", l.keys())
		okJSON(t, &l, append(args, "--code", "smtp-451")...)
		require.Equal(t, "failed", l.keys())

		require.Equal(t, `no messages of channel "default", state sent; other channels, to be given by --channel: "mails"`+"\n",
			ok(t, "list", "--state", "sent", "--dsn", dsn))
		require.Equal(t, "{\n  \"channel\": \"default\",\n  \"messages\": [],\n  \"after\": \"\"\n}\n", ok(t, "list", "--json", "--dsn", dsn))
	})
}

func TestListGoesOnWhereItWasCutOff(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		install(t, dsn)
		j := openMails(t, dsn, outbox.DefaultChannel)
		for i := range 5 {
			put(t, j, outbox.Message{Key: fmt.Sprintf("m%d", i)})
		}
		var l messageList
		okJSON(t, &l, "list", "--limit", "2", "--dsn", dsn)
		require.Equal(t, "m0 m1", l.keys())
		r := call(t, "list", "--limit", "2", "--after", l.After, "--dsn", dsn)
		require.Equal(t, exitOK, r.code)
		require.Regexp(t, `(?m)^m2 `, r.stdout)
		require.Regexp(t, `(?m)^m3 `, r.stdout)
		require.NotContains(t, r.stdout, "m4")
		require.Regexp(t, `^outbox: note: there may be more: --after \S+ goes on here, --all lists everything\n$`, r.stderr)
		okJSON(t, &l, "list", "--all", "--dsn", dsn)
		require.Equal(t, "m0 m1 m2 m3 m4", l.keys())
		require.Empty(t, l.After)
	})
}

// Pages share one table, and one JSON document.
func TestListPrintsPagesAsOne(t *testing.T) {
	page := func(keys ...string) (rs []outbox.Record) {
		for _, key := range keys {
			rs = append(rs, outbox.Record{Key: key, State: outbox.StatePending, CreatedAt: time.Unix(1, 0), Due: time.Unix(1, 0)})
		}
		return rs
	}
	var text, doc strings.Builder
	for _, l := range []lister{&tableList{app: &app{stdout: &text}}, &jsonList{w: &doc, channel: "a<b"}} {
		require.NoError(t, l.page(page("long-key", "b")))
		require.NoError(t, l.page(page("c")))
		require.NoError(t, l.end(t.Context(), ""))
	}
	lines := strings.Split(text.String(), "\n")
	require.Len(t, lines, 5)
	require.Equal(t, 1, strings.Count(text.String(), "KEY"))
	require.Equal(t, strings.Index(lines[1], "pending"), strings.Index(lines[3], "pending"))
	require.True(t, strings.HasPrefix(doc.String(), "{\n  \"channel\": \"a<b\",\n  \"messages\": [\n    {\n      \"channel\": "), doc.String())
	require.True(t, strings.HasSuffix(doc.String(), "\n    }\n  ],\n  \"after\": \"\"\n}\n"), doc.String())
	require.Equal(t, 3, strings.Count(doc.String(), `"key"`))
}

func TestShowTellsAllOfAMessage(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		j := everyState(t, dsn, "mails")
		show := func(more ...string) string {
			return ok(t, append([]string{"show", "--dsn", dsn, "--channel", "mails"}, more...)...)
		}
		text := show("pending")
		for _, want := range []string{
			"key          pending\nchannel      mails\nnumber       ", "\nstate        pending (waits to be sent)\nattempts     0\ncreated      2",
			"\ndue          2", "\nheader       tenant: t1\npayload      11 bytes; --payload shows it\n",
		} {
			require.Contains(t, text, want)
		}
		require.NotContains(t, text, "hello")
		require.NotContains(t, text, "group")
		require.True(t, strings.HasSuffix(show("pending", "--payload"), "\npayload      11 bytes:\nhello\nworld\n"))
		require.True(t, strings.HasSuffix(show("failed", "--payload"), "\npayload      2 bytes, in base64:\n/wA=\n"))
		require.Regexp(t, `\ncode         smtp-451\nlast error   .*gre \[2Jy listed\n`, show("failed"))
		require.Contains(t, show("sending"), "\nleased until 2")
		require.Regexp(t, `\nended        2.*\nreference    ref-sent\n`, show("sent"))
		require.Contains(t, show("dead"), "\ngroup        g\n")
		require.Contains(t, show("dead"), "outbox retry sends it again")
		require.Contains(t, show("unknown"), "perhaps sent; find out, then outbox resolve")

		var m jsonMessage
		okJSON(t, &m, "show", "failed", "--payload", "--dsn", dsn, "--channel", "mails")
		require.Equal(t, "failed", m.State)
		require.Contains(t, m.LastError, "gre\x1b[2Jy\nlisted")
		require.Equal(t, "/wA=", *m.PayloadBase64)
		m = jsonMessage{}
		okJSON(t, &m, "show", "pending", "--dsn", dsn, "--channel", "mails")
		require.Nil(t, m.PayloadText)
		require.Equal(t, outbox.Header{"tenant": "t1"}, m.Header)

		r := call(t, "show", "pending", "--dsn", dsn)
		require.Equal(t, exitFailed, r.code)
		require.Regexp(t, `^outbox: read key "pending" of channel "default": not found: it was never put, or is gone since, .*; `+
			`other channels, to be given by --channel: "mails"\n$`, r.stderr)

		_, err := j.Add(t.Context(), outbox.Message{Key: "doubtful"})
		require.NoError(t, err)
		_, err = j.Begin(t.Context(), "doubtful", 100*time.Millisecond)
		require.NoError(t, err)
		time.Sleep(150 * time.Millisecond)
		rs, err := j.ClaimDue(t.Context(), 100, time.Hour)
		require.NoError(t, err)
		for _, r := range rs {
			require.NoError(t, j.MarkFailed(t.Context(), r.Lease, outbox.Defer(time.Hour)))
		}
		require.Contains(t, show("doubtful"), "\nambiguous    perhaps sent: nobody knows how an earlier attempt ended\n")
	})
}

func TestStatsAndDoctorTellOfWhatWaitsForAPerson(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		j := everyState(t, dsn, "mails")
		_, err := j.ClaimDue(t.Context(), 100, time.Hour) // a relay comes by, and finds the group blocked
		require.NoError(t, err)
		var got statistics
		okJSON(t, &got, "stats", "--dsn", dsn)
		require.Len(t, got.Channels, 1)
		st := got.Channels[0]
		require.Equal(t, []any{"journal", "mails", 1, 1, 1}, []any{st.System, st.Channel, st.Blocked, st.Dead, st.Unknown})
		require.Regexp(t, `(?m)^CHANNEL +KIND +DUE +SCHEDULED +IN FLIGHT +OLDEST DUE +BLOCKED +DEAD +UNKNOWN +ATTEMPTS +STATE +LAST ERROR$`, ok(t, "stats", "--dsn", dsn))
		require.Regexp(t, `(?m)^mails +journal +\d+ +\d+ +\d+ +\S+ +1 +1 +1 +`, ok(t, "stats", "--dsn", dsn))
		warnings := diagnose(t, exitOK, "--dsn", dsn).texts("warning")
		require.Contains(t, warnings, `channels: "mails": dead messages, which nothing sends any more: 1; to see them: outbox list --channel "mails" --state dead; then outbox retry or discard`)
		require.Contains(t, warnings, `channels: "mails": messages of which nobody knows whether they were sent: 1; to see them: outbox list --channel "mails" --state unknown; then outbox resolve`)
		require.Contains(t, warnings, `channels: "mails": ordered groups that wait behind a dead or unknown message: 1`)
	})
}
