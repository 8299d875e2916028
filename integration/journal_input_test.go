package integration

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// unfit are texts that no key or group may be.
var unfit = map[string]string{
	"of 513 bytes":          strings.Repeat("k", 513),
	"of a megabyte":         strings.Repeat("k", 1<<20),
	"with 0xff":             "a\xffb",
	"cut in a character":    "a\xe2\x82",
	"with a lone surrogate": "a\xed\xa0\x80",
	"with a NUL":            "a\x00b",
}

// misuse is a call that is refused before anything is written.
type misuse struct {
	name string
	call func(ctx context.Context, j *outbox.Journal, v outbox.Verbs, tx *sql.Tx) error
}

func badMessages() map[string]outbox.Message {
	bad := map[string]outbox.Message{
		"empty key":         {},
		"payload too large": {Key: "k", Payload: make([]byte, 1<<20+1)},
		"negative delay":    {Key: "k", Delay: -1},
		"least delay":       {Key: "k", Delay: math.MinInt64},
		"endless delay":     {Key: "k", Delay: math.MaxInt64},
		"header of ours":    {Key: "k", Header: outbox.Header{"outbox-trace": "v"}},
		"header unnamed":    {Key: "k", Header: outbox.Header{"": "v"}},
		"header with NUL":   {Key: "k", Header: outbox.Header{"a": "\x00"}},
		"header over 8 KiB": {Key: "k", Header: outbox.Header{"a": strings.Repeat("v", 8<<10)}},
	}
	for name, text := range unfit {
		bad["key "+name] = outbox.Message{Key: text}
		bad["group "+name] = outbox.Message{Key: "k", Group: text}
	}
	return bad
}

func misuses() (list []misuse) {
	type verbs = outbox.Verbs
	add := func(name string, call func(ctx context.Context, j *outbox.Journal, v verbs, tx *sql.Tx) error) {
		list = append(list, misuse{name, call})
	}
	good := outbox.Message{Key: "good", Group: "good"}
	for name, m := range badMessages() {
		add("put, "+name, func(ctx context.Context, j *outbox.Journal, _ verbs, tx *sql.Tx) error {
			_, err := j.Put(ctx, tx, m)
			return err
		})
		add("put among good ones, "+name, func(ctx context.Context, j *outbox.Journal, _ verbs, tx *sql.Tx) error {
			_, err := j.PutIn(ctx, outbox.SQL(tx), good, m, good)
			return err
		})
		add("put begun, "+name, func(ctx context.Context, j *outbox.Journal, _ verbs, tx *sql.Tx) error {
			_, err := j.PutBegun(ctx, tx, m, time.Minute)
			return err
		})
	}
	for _, lease := range []time.Duration{math.MinInt64, -1, 0, 1, 99 * time.Millisecond, time.Hour + 1, math.MaxInt64} {
		add(fmt.Sprint("lease of ", lease), func(ctx context.Context, j *outbox.Journal, _ verbs, tx *sql.Tx) error {
			_, err := j.PutBegun(ctx, tx, outbox.Message{Key: "k"}, lease)
			return err
		})
		add(fmt.Sprint("begin for ", lease), func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			_, err := v.Begin(ctx, "there", lease)
			return err
		})
		add(fmt.Sprint("claim for ", lease), func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			_, err := v.ClaimDue(ctx, 1, lease)
			return err
		})
		add(fmt.Sprint("extend by ", lease), func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			_, err := v.Extend(ctx, outbox.Lease{Channel: "mail", Key: "there", Token: 1}, lease)
			return err
		})
	}
	for _, limit := range []int{math.MinInt, -1, 0, 10_001, math.MaxInt} {
		add(fmt.Sprint("claim ", limit), func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			_, err := v.ClaimDue(ctx, limit, time.Minute)
			return err
		})
	}
	for name, l := range map[string]outbox.Lease{
		"none": {}, "without a token": {Channel: "mail", Key: "there"}, "negative": {Channel: "mail", Key: "there", Token: -1},
		"of another channel": {Channel: "post", Key: "there", Token: 1}, "of an unfit key": {Channel: "mail", Key: "a\x00", Token: 1},
	} {
		add("extend, lease "+name, func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			_, err := v.Extend(ctx, l, time.Minute)
			return err
		})
		add("mark sent, lease "+name, func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error { return v.MarkSent(ctx, l, "") })
		add("mark failed, lease "+name, func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			return v.MarkFailed(ctx, l, errDown)
		})
		add("resolve, lease "+name, func(ctx context.Context, _ *outbox.Journal, v verbs, _ *sql.Tx) error {
			return v.ResolveAmbiguous(ctx, l, outbox.StateUnknown)
		})
	}
	return append(list, badVerbs()...)
}

func badVerbs() (list []misuse) {
	add := func(name string, call func(ctx context.Context, v outbox.Verbs) error) {
		list = append(list, misuse{name, func(ctx context.Context, _ *outbox.Journal, v outbox.Verbs, _ *sql.Tx) error { return call(ctx, v) }})
	}
	lease := outbox.Lease{Channel: "mail", Key: "there", Token: 1}
	for name, text := range unfit {
		add("get key "+name, func(ctx context.Context, v outbox.Verbs) error { _, err := v.Get(ctx, text); return err })
		add("begin key "+name, func(ctx context.Context, v outbox.Verbs) error { _, err := v.Begin(ctx, text, time.Minute); return err })
		add("resolve key "+name, func(ctx context.Context, v outbox.Verbs) error {
			return v.ResolveUnknown(ctx, text, outbox.VerdictSent, "")
		})
		for field, f := range map[string]outbox.Filter{"key": {Key: text}, "group": {Group: text}, "code": {Code: text}} {
			add("retry "+field+" "+name, func(ctx context.Context, v outbox.Verbs) error { _, err := v.Retry(ctx, f); return err })
			add("discard "+field+" "+name, func(ctx context.Context, v outbox.Verbs) error { _, err := v.Discard(ctx, f); return err })
			add("list "+field+" "+name, func(ctx context.Context, v outbox.Verbs) error { _, _, err := v.List(ctx, f); return err })
		}
	}
	for name, ref := range map[string]string{"over 1,024 bytes": strings.Repeat("r", 1025), "with a NUL": "\x00", "with 0xff": "\xff"} {
		add("ref "+name, func(ctx context.Context, v outbox.Verbs) error { return v.MarkSent(ctx, lease, ref) })
		add("resolve, ref "+name, func(ctx context.Context, v outbox.Verbs) error {
			return v.ResolveUnknown(ctx, "there", outbox.VerdictSent, ref)
		})
	}
	add("mark failed, nil", func(ctx context.Context, v outbox.Verbs) error { return v.MarkFailed(ctx, lease, nil) })
	for _, state := range []outbox.State{0, outbox.StateFailed, outbox.StateSending, outbox.StateSent, outbox.StateDead, 99} {
		add(fmt.Sprint("resolve to ", state), func(ctx context.Context, v outbox.Verbs) error { return v.ResolveAmbiguous(ctx, lease, state) })
	}
	for _, verdict := range []outbox.Verdict{outbox.VerdictUnknown, 99} {
		add(fmt.Sprint("resolve as ", verdict), func(ctx context.Context, v outbox.Verbs) error {
			return v.ResolveUnknown(ctx, "there", verdict, "")
		})
	}
	add("resolve as dead with a ref", func(ctx context.Context, v outbox.Verbs) error {
		return v.ResolveUnknown(ctx, "there", outbox.VerdictDead, "ref")
	})
	for name, f := range map[string]outbox.Filter{
		"empty": {}, "with a limit only": {Limit: 1}, "dry": {DryRun: true}, "with a cursor": {All: true, After: "1"},
		"with a bad state": {States: []outbox.State{7}}, "with no state": {States: []outbox.State{0}}, "with a negative limit": {All: true, Limit: -1},
	} {
		add("retry, filter "+name, func(ctx context.Context, v outbox.Verbs) error { _, err := v.Retry(ctx, f); return err })
		add("discard, filter "+name, func(ctx context.Context, v outbox.Verbs) error { _, err := v.Discard(ctx, f); return err })
	}
	for name, f := range map[string]outbox.Filter{
		"over its limit": {Limit: 10_001}, "with a negative limit": {Limit: -1}, "with a bad state": {States: []outbox.State{7}},
		"with a bad cursor": {After: "\x00"}, "with a negative cursor": {After: "-1"}, "with a huge cursor": {After: strings.Repeat("z", 99)},
	} {
		add("list "+name, func(ctx context.Context, v outbox.Verbs) error { _, _, err := v.List(ctx, f); return err })
	}
	return list
}

// TestG10JournalRefusesBadInputBeforeAnythingIsWritten: each refusal is an
// ErrInvalid, with the same text on both databases, alone and inside a
// transaction that stays usable; and shows no payload.
func TestG10JournalRefusesBadInputBeforeAnythingIsWritten(t *testing.T) {
	texts := map[string]string{}
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		s.put(j, outbox.Message{Key: "there"})
		_, err := j.Begin(t.Context(), "there", time.Minute)
		require.NoError(t, err)
		before := s.messages()
		tx := s.begin()
		for _, m := range misuses() {
			err := m.call(t.Context(), j, j.In(outbox.SQL(tx)), tx)
			require.ErrorIs(t, err, outbox.ErrInvalid, m.name)
			require.Less(t, len(err.Error()), 2000, m.name)
			require.True(t, strings.HasPrefix(err.Error(), "outbox: "), "%s: %v", m.name, err)
			if text, ok := texts[m.name]; ok {
				require.Equal(t, text, err.Error())
			}
			texts[m.name] = err.Error()
		}
		_, err = tx.Exec(`INSERT INTO app VALUES ('after', 'usable')`)
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		for _, m := range misuses() {
			if !strings.HasPrefix(m.name, "put") && !strings.HasPrefix(m.name, "lease") {
				require.ErrorIs(t, m.call(t.Context(), j, j.Verbs, nil), outbox.ErrInvalid, m.name)
			}
		}
		require.Equal(t, before, s.messages())
	})
}

func TestG10MessagesAtTheLimitsAreAllowed(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal(strings.Repeat("c", 128))
		ms := []outbox.Message{
			{Key: strings.Repeat("k", 512), Group: strings.Repeat("g", 512)},
			{Key: "payload", Payload: make([]byte, 1<<20)},
			{Key: "headers", Header: outbox.Header{"a": strings.Repeat("v", 8<<10-1)}},
			{Key: "\u00e9\u4e16\U0001f600'\"\\%_;--\x01\x7f\n\t", Group: "\u00e9\u4e16\U0001f600'\"\\%_;--\x01\x7f\n\t"},
			{Key: " ", Group: " "}, {Key: "NULL", Group: "NULL"}, {Key: "$1"}, {Key: "?1"}, {Key: "e\u0301", Group: "e\u0301"}, {Key: "\u00e9", Group: "\u00e9"},
			{Key: "outbox-"}, {Key: "a,b;c", Group: "a,b;c"}, {Key: `["x"]`, Group: `{"x"}`},
		}
		late := outbox.Message{Key: "in ten years", Delay: 10 * 365 * 24 * time.Hour}
		s.put(j, append(ms, late)...)
		var r receiver
		for range 2 {
			s.sendOnce(j, r.send, outbox.SendOptions{})
		}
		require.Equal(t, each(1, keysOf(ms)...), r.times())
		for _, m := range ms {
			got := s.get(j, m.Key)
			require.Equal(t, m.Group, got.Group)
			require.Equal(t, string(m.Payload), string(got.Payload))
			if m.Group != "" {
				rs, _, err := j.List(t.Context(), outbox.Filter{Group: m.Group})
				require.NoError(t, err)
				require.Len(t, rs, 1)
			}
		}
		require.InDelta(t, float64(late.Delay), float64(time.Until(s.get(j, late.Key).Due)), float64(time.Minute))
	})
}

// TestG10UnusableTransactionsOfAPutterAreErrTx: nil, ended, aborted, and of the
// other kind of database.
func TestG10UnusableTransactionsOfAPutterAreErrTx(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		s.put(j, outbox.Message{Key: "there"})
		before := s.messages()
		txs := map[string]*sql.Tx{"nil": nil}
		for _, how := range []string{"committed", "rolled back"} {
			txs[how] = s.begin()
			if how == "committed" {
				require.NoError(t, txs[how].Commit())
			} else {
				require.NoError(t, txs[how].Rollback())
			}
		}
		if s.postgres() {
			txs["aborted"] = s.begin()
			_, err := txs["aborted"].Exec(`SELECT 1/0`)
			require.Error(t, err)
		}
		for name, tx := range txs {
			for call, err := range everyJournalCall(t.Context(), j, tx) {
				require.ErrorIs(t, err, outbox.ErrTx, "%s, %s", call, name)
			}
		}
		require.Equal(t, before, s.messages())
		tx := s.begin()
		_, err := j.In(outbox.SQL(tx)).Purge(t.Context(), time.Now())
		require.ErrorIs(t, err, outbox.ErrTx, "it needs transactions of its own")
	})
}

func everyJournalCall(ctx context.Context, j *outbox.Journal, tx *sql.Tx) map[string]error {
	calls := map[string]error{}
	v, lease := j.In(outbox.SQL(tx)), outbox.Lease{Channel: "mail", Key: "there", Token: 1}
	_, calls["Put"] = j.Put(ctx, tx, outbox.Message{Key: "k"})
	_, calls["Put in a group"] = j.Put(ctx, tx, outbox.Message{Key: "k", Group: "g"})
	_, calls["PutMany"] = j.PutMany(ctx, tx, letters("k", 3, 0))
	_, calls["PutBegun"] = j.PutBegun(ctx, tx, outbox.Message{Key: "k"}, time.Minute)
	_, calls["PutIn"] = j.PutIn(ctx, outbox.SQL(tx), outbox.Message{Key: "k"})
	_, calls["Begin"] = v.Begin(ctx, "there", time.Minute)
	_, calls["ClaimDue"] = v.ClaimDue(ctx, 1, time.Minute)
	_, calls["Extend"] = v.Extend(ctx, lease, time.Minute)
	calls["MarkSent"] = v.MarkSent(ctx, lease, "")
	calls["MarkFailed"] = v.MarkFailed(ctx, lease, errDown)
	calls["ResolveAmbiguous"] = v.ResolveAmbiguous(ctx, lease, outbox.StateUnknown)
	calls["ResolveUnknown"] = v.ResolveUnknown(ctx, "there", outbox.VerdictSent, "")
	_, calls["Get"] = v.Get(ctx, "there")
	_, _, calls["List"] = v.List(ctx, outbox.Filter{})
	_, calls["Retry"] = v.Retry(ctx, outbox.Filter{All: true})
	_, calls["Discard"] = v.Discard(ctx, outbox.Filter{All: true})
	_, calls["Purge"] = v.Purge(ctx, time.Now())
	return calls
}

// TestG10TransactionOfAnotherKindOfDatabaseTakesNoMessage.
func TestG10TransactionOfAnotherKindOfDatabaseTakesNoMessage(t *testing.T) {
	if testing.Short() {
		return
	}
	postgres, lite := onPostgres(t), onSQLite(t)
	for _, pair := range [][2]*site{{postgres, lite}, {lite, postgres}} {
		j, other := pair[0].journal("mail"), pair[1]
		for _, ms := range [][]outbox.Message{letters("k", 1, 0), letters("k", 3, 0), letters("k", 3, 1)} {
			tx := other.begin()
			_, err := j.PutMany(t.Context(), tx, ms)
			require.ErrorIs(t, err, outbox.ErrTx)
			_ = tx.Rollback()
		}
		require.Empty(t, other.messages())
	}
}

// TestG10BadSendOptionsAreRefused when the relay is made, without any I/O.
func TestG10BadSendOptionsAreRefused(t *testing.T) {
	s := onSQLite(t)
	j := s.journal("mail")
	send := new(receiver).send
	for name, o := range map[string]outbox.SendOptions{
		"Workers": {Workers: -1}, "many Workers": {Workers: 1001}, "BatchSize": {BatchSize: -1}, "huge BatchSize": {BatchSize: 10_001},
		"MaxAttempts": {MaxAttempts: -2}, "AttemptTimeout": {AttemptTimeout: -1}, "endless AttemptTimeout": {AttemptTimeout: math.MaxInt64},
		"Lease": {Lease: 99 * time.Millisecond}, "endless Lease": {Lease: 2 * time.Hour}, "negative Lease": {Lease: -1},
		"Retention": {Retention: -2}, "short Retention": {Retention: 1}, "endless Retention": {Retention: math.MaxInt64},
		"OnUnknown": {OnUnknown: 2}, "Order": {Order: 2},
	} {
		_, err := outbox.NewRelay(outbox.RelayOptions{}, j.Sender(send, o))
		require.ErrorIs(t, err, outbox.ErrInvalid, name)
	}
	for name, as := range map[string][]outbox.Attachment{
		"nil function": {j.Sender(nil, outbox.SendOptions{})}, "nil batch function": {j.BatchSender(nil, outbox.SendOptions{})},
		"twice":                      {j.Sender(send, outbox.SendOptions{}), s.journal("mail").Sender(send, outbox.SendOptions{})},
		"as latest and as a journal": {j.Sender(send, outbox.SendOptions{}), s.latest("mail").Publisher(new(witness).publish, outbox.PublishOptions{})},
	} {
		_, err := outbox.NewRelay(outbox.RelayOptions{}, as...)
		require.ErrorIs(t, err, outbox.ErrInvalid, name)
	}
	for name, o := range map[string]outbox.JournalOptions{
		"channel of 129 bytes": {Channel: strings.Repeat("c", 129)}, "channel with a NUL": {Channel: "\x00"}, "channel with 0xff": {Channel: "\xff"},
		"negative MaxPayload": {MaxPayload: -1},
	} {
		_, err := outbox.NewJournal(s.store, o)
		require.ErrorIs(t, err, outbox.ErrInvalid, name)
	}
	_, err := outbox.NewJournal(nil, outbox.JournalOptions{})
	require.ErrorIs(t, err, outbox.ErrInvalid)
}

// TestG10BulkPutOfAnySizeIsStoredWhole: each answer belongs to its message,
// those of keys given twice and of keys that exist included.
func TestG10BulkPutOfAnySizeIsStoredWhole(t *testing.T) {
	t.Parallel()
	onBothUnsynced(t, func(t *testing.T, s *site) {
		j := s.journal("bulk")
		for _, n := range []int{0, 1, 999, 1_001, 10_001, 25_000 / raceFactor} {
			for _, groups := range []int{0, 7} {
				ms := letters("k", n, groups)
				for i := range ms {
					ms[i].Key = fmt.Sprint("k", (i*7919)%(n+1)) // in an order that is not the bytes'
					ms[i].Payload = []byte(ms[i].Key)
					if i%10 == 9 {
						ms[i].Key = ms[i-1].Key
						ms[i].Group = ms[i-1].Group
					}
				}
				if n > 1 {
					s.put(j, ms[1])
				}
				rs := s.put(j, ms...)
				require.Len(t, rs, n)
				seqs := map[string]int64{}
				seen := map[string]bool{}
				if n > 1 {
					seen[ms[1].Key] = true
				}
				for i, r := range rs {
					if ms[i].Key != r.Key || r.Created == seen[r.Key] || r.Seq == 0 {
						t.Fatalf("answer %d of %d: %+v for key %q", i, n, r, ms[i].Key)
					}
					if seq, again := seqs[r.Key]; again {
						require.Equal(t, seq, r.Seq)
						require.True(t, r.Differs, "another payload")
					}
					seqs[r.Key], seen[r.Key] = r.Seq, true
				}
				stored := s.records(j)
				require.Len(t, stored, len(seqs))
				for _, r := range stored {
					require.Equal(t, seqs[r.Key], r.Seq)
				}
				byGroup := map[string][]int64{}
				for i, r := range rs {
					if i > 1 && r.Created {
						byGroup[ms[i].Group] = append(byGroup[ms[i].Group], r.Seq)
					}
				}
				for group, list := range byGroup {
					require.True(t, group == "" || slices.IsSorted(list), "messages of a group are numbered as they are given")
				}
				s.wipe()
			}
		}
	})
}
