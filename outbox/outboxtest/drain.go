package outboxtest

import (
	"cmp"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// RequireStaged returns the entry that is pending for key as tx sees it, or as
// committed where tx is nil. It fails the test where none is.
func RequireStaged[T any](t testing.TB, l *outbox.Latest[T], tx *sql.Tx, key string) outbox.Entry[T] {
	t.Helper()
	e, err := l.Pending(t.Context(), outbox.SQL(tx), key)
	switch {
	case err == nil:
		return e
	case !errors.Is(err, outbox.ErrNotFound):
		t.Fatalf("the entry of key %q: %v", key, err)
	case tx != nil:
		t.Fatalf("nothing is staged for key %q as this transaction sees it: was it staged in another transaction, or under another key? (%v)", key, err)
	default:
		t.Fatalf("nothing is staged and committed for key %q: is its transaction open still, or rolled back, or the entry published already? %s (%v)",
			key, waiting(t, l), err)
	}
	return e
}

// waiting tells which keys of a channel are staged.
func waiting[T any](t testing.TB, l *outbox.Latest[T]) string {
	const most = 10
	infos, err := l.List(t.Context(), "", most+1)
	if err != nil {
		return "What is staged cannot be listed: " + err.Error()
	}
	names := []string{}
	for _, info := range infos[:min(len(infos), most)] {
		names = append(names, fmt.Sprintf("%q", info.Key))
	}
	if len(infos) > most {
		names = append(names, "…")
	}
	return "Staged are: " + cmp.Or(strings.Join(names, ", "), "none")
}

// RequirePut returns the message of key as tx sees it, with its payload, or as
// committed where tx is nil. It fails the test where there is none.
func RequirePut(t testing.TB, j *outbox.Journal, tx *sql.Tx, key string) outbox.Record {
	t.Helper()
	verbs := j.Verbs
	if tx != nil {
		verbs = j.In(outbox.SQL(tx))
	}
	r, err := verbs.Get(t.Context(), key)
	switch {
	case err == nil:
		return r
	case !errors.Is(err, outbox.ErrNotFound):
		t.Fatalf("the message of key %q: %v", key, err)
	case tx != nil:
		t.Fatalf("no message of key %q is put as this transaction sees it: was it put in another transaction, or under another key? (%v)", key, err)
	default:
		t.Fatalf("no message of key %q is put and committed: is its transaction open still, or rolled back, or the message sent and deleted already? %s (%v)",
			key, waitingMessages(t, j), err)
	}
	return r
}

// waitingMessages tells which messages a channel holds.
func waitingMessages(t testing.TB, j *outbox.Journal) string {
	const most = 10
	rs, after, err := j.List(t.Context(), outbox.Filter{Limit: most, All: true})
	if err != nil {
		return "What is put cannot be listed: " + err.Error()
	}
	names := []string{}
	for _, r := range rs {
		names = append(names, fmt.Sprintf("%q", r.Key))
	}
	if after != "" {
		names = append(names, "…")
	}
	return "Put are: " + cmp.Or(strings.Join(names, ", "), "none")
}

// Bounds of Drain. No test that ends takes as many.
const (
	drainPasses    = 2000
	drainFruitless = 50 // passes in a row that tried entries and published none
	drainStep      = time.Second
	drainLongStep  = 30 * 24 * time.Hour // the longest delays are a year
)

// Drain publishes and sends all that the relay's channels hold, and returns the
// sum of what it did. Where something is left that is due later, it moves the
// clock on. Messages that end as dead or unknown, and those that wait behind
// them in their group, are left: see the sum. c is the store's clock; with a nil c time is not moved, so that every
// entry must be published at once. Drain fails the test where entries are
// never published, as when the publish function always fails, where it never
// ends, as when the function always stages anew, and where the store fails.
func Drain(t testing.TB, r *outbox.Relay, c *Clock) outbox.Pass {
	t.Helper()
	var total outbox.Pass
	step, fruitless := drainStep, 0
	for range drainPasses {
		pass, err := r.RunOnce(t.Context())
		if total = sum(total, pass); err != nil {
			t.Fatalf("drain: %v", err)
		}
		switch {
		case pass.Published+pass.Dead+pass.Unknown > 0:
			fruitless = 0
			continue
		case pass.Claimed > 0:
			fruitless++
			step = max(step/4, drainStep)
		default: // steps grow until something comes due, however far away that is
			step = min(2*step, drainLongStep)
		}
		left := remains(t, r)
		switch {
		case left == "":
			return total
		case c == nil:
			t.Fatalf("drain: without a clock to move, entries are left: %s", left)
		case fruitless == drainFruitless:
			t.Fatalf("drain: the last %d passes published nothing of what they tried: %s", fruitless, left)
		}
		c.Advance(step)
	}
	t.Fatalf("drain: no end after %d passes: %s", drainPasses, remains(t, r))
	return total
}

// remains tells what the relay's channels still hold; "" where nothing.
func remains(t testing.TB, r *outbox.Relay) string {
	t.Helper()
	stats, err := r.Stats(t.Context())
	if err != nil {
		t.Fatalf("drain: %v", err)
	}
	texts := []string{}
	for _, s := range stats {
		if !s.Attached || s.Due+s.Scheduled+s.InFlight == 0 {
			continue
		}
		text := fmt.Sprintf("channel %q: %d due, %d due later, %d leased", s.Channel.Name, s.Due, s.Scheduled, s.InFlight)
		if s.LastError != "" {
			text += fmt.Sprintf("; after attempt %d: %s", s.Attempt, s.LastError)
		}
		if s.Outage || s.Paused > 0 {
			text += fmt.Sprintf("; paused for %v: %s", s.Paused, s.Reason)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "; ")
}

func sum(a, b outbox.Pass) outbox.Pass {
	return outbox.Pass{
		Claimed:   a.Claimed + b.Claimed,
		Published: a.Published + b.Published,
		Retried:   a.Retried + b.Retried,
		Released:  a.Released + b.Released,
		Dead:      a.Dead + b.Dead,
		Unknown:   a.Unknown + b.Unknown,
		LeaseLost: a.LeaseLost + b.LeaseLost,
		Left:      a.Left + b.Left,
	}
}
