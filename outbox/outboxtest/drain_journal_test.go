package outboxtest_test

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// mailbox is a channel of messages and a send function.
type mailbox struct {
	journal *outbox.Journal
	relay   *outbox.Relay
	db      *sql.DB
	clock   *outboxtest.Clock
}

func newMailbox(t *testing.T, f outbox.SendFunc, o outbox.SendOptions) mailbox {
	t.Helper()
	c := outboxtest.NewClock(time.Time{})
	open, _ := openJournal(false, c)
	store, db := open(t)
	j, err := outbox.NewJournal(store, outbox.JournalOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: slog.New(slog.DiscardHandler)}, j.Sender(f, o))
	if err != nil {
		t.Fatal(err)
	}
	return mailbox{j, r, db, c}
}

func (m mailbox) add(t *testing.T, group string, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if _, err := m.journal.Add(t.Context(), outbox.Message{Key: key, Group: group, Payload: []byte("payload of " + key)}); err != nil {
			t.Fatal(err)
		}
	}
}

func accepted(context.Context, *outbox.Record) (string, error) { return "ref", nil }

func TestRequirePutReturnsTheMessage(t *testing.T) {
	m := newMailbox(t, accepted, outbox.SendOptions{})
	tx, err := m.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	put, err := m.journal.Put(t.Context(), tx, outbox.Message{Key: "k", Group: "g", Payload: []byte("v")})
	if err != nil {
		t.Fatal(err)
	}
	for _, in := range []*sql.Tx{tx, nil} {
		r := outboxtest.RequirePut(t, m.journal, in, "k")
		if r.Key != "k" || r.Group != "g" || string(r.Payload) != "v" || r.Seq != put.Seq || r.State != outbox.StatePending {
			t.Errorf("the message is %+v", r)
		}
		if in != nil {
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestRequirePutFailsWithAReason(t *testing.T) {
	m := newMailbox(t, accepted, outbox.SendOptions{})
	m.add(t, "", "a", "b")
	got := failure(t, func(t testing.TB) { outboxtest.RequirePut(t, m.journal, nil, "k") })
	if !strings.Contains(got, `no message of key "k" is put and committed`) || !strings.Contains(got, `"a", "b"`) {
		t.Errorf("without a transaction, the failure is %q", got)
	}
	tx, err := m.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	got = failure(t, func(t testing.TB) { outboxtest.RequirePut(t, m.journal, tx, "k") })
	if !strings.Contains(got, `no message of key "k" is put as this transaction sees it`) {
		t.Errorf("in a transaction, the failure is %q", got)
	}
	tx.Rollback()
	got = failure(t, func(t testing.TB) { outboxtest.RequirePut(t, m.journal, tx, "k") })
	if !strings.Contains(got, outbox.ErrTx.Error()) {
		t.Errorf("in a finished transaction, the failure is %q", got)
	}
}

func TestDrainSendsMessagesOverBackoffsAndOutages(t *testing.T) {
	var mu sync.Mutex
	calls := map[string]int{}
	m := newMailbox(t, func(_ context.Context, r *outbox.Record) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		switch calls[r.Key]++; {
		case r.Key == "fails" && calls[r.Key] <= 3:
			return "", errors.New("404")
		case r.Key == "down" && calls[r.Key] <= 2:
			return "", outbox.Unavailable(errors.New("503"))
		}
		return "ref", nil
	}, outbox.SendOptions{})
	m.add(t, "", "a", "fails", "b")
	m.add(t, "g", "down", "c", "d")
	if got := outboxtest.Drain(t, m.relay, m.clock); got.Published != 6 || got.Retried != 3 {
		t.Errorf("Drain returned %+v, want 6 sent and 3 retried", got)
	}
}

func TestDrainEndsWhereMessagesAreDead(t *testing.T) {
	m := newMailbox(t, func(_ context.Context, r *outbox.Record) (string, error) {
		switch r.Key {
		case "dead":
			return "", outbox.Permanent(errors.New("410"))
		case "unknown":
			return "", outbox.Unknown(errors.New("timeout"))
		}
		return "ref", nil
	}, outbox.SendOptions{OnUnknown: outbox.Park})
	m.add(t, "", "a", "unknown")
	m.add(t, "g", "b", "dead", "behind")
	if got := outboxtest.Drain(t, m.relay, m.clock); got.Published != 2 || got.Dead != 1 || got.Unknown != 1 {
		t.Errorf("Drain returned %+v, want 2 sent, 1 dead and 1 unknown", got)
	}
	if r := outboxtest.RequirePut(t, m.journal, nil, "behind"); r.State != outbox.StatePending || r.Attempt != 0 {
		t.Errorf("the message behind the dead one is %+v", r)
	}
}
