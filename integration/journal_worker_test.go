package integration

import (
	"context"
	"database/sql"
	"log/slog"
	"math/rand/v2"
	"os"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// An errand tells a worker what to do with a journal.
type errand struct {
	Policy      policy
	Workers     int
	MaxAttempts int
	Wander      time.Duration // each send takes up to so long
	Deliver     string        // put this key already begun, commit and deliver it, rather than run a relay
}

// policy is what a test does about messages of unknown fate.
type policy string

const (
	resend policy = "resend"
	park   policy = "park"
	probe  policy = "probe"
)

var policies = []policy{resend, park, probe}

const afterCommit step = "after commit"

// options are those of a sender under a policy.
func (p policy) options(b inbox) outbox.SendOptions {
	o := outbox.SendOptions{Lease: time.Second}
	switch p {
	case park:
		o.OnUnknown = outbox.Park
	case probe:
		o.Probe = b.probe
	}
	return o
}

// inbox is a receiver that outlives any process: it keeps what it was sent, and
// asked, in a table.
type inbox struct{ db *sql.DB }

func (s *site) inbox() inbox {
	s.exec(`CREATE TABLE inbox (key text NOT NULL, asked boolean NOT NULL)`)
	return inbox{s.db}
}

func (b inbox) send(_ context.Context, m *outbox.Record) (string, error) {
	_, err := b.db.Exec(`INSERT INTO inbox VALUES ($1, false)`, m.Key)
	return "ref of " + m.Key, err
}

func (b inbox) probe(_ context.Context, m *outbox.Record) (outbox.Verdict, string, error) {
	if _, err := b.db.Exec(`INSERT INTO inbox VALUES ($1, true)`, m.Key); err != nil {
		return outbox.VerdictUnknown, "", err
	}
	var n int
	err := b.db.QueryRow(`SELECT count(*) FROM inbox WHERE key = $1 AND NOT asked`, m.Key).Scan(&n)
	if n > 0 {
		return outbox.VerdictSent, "ref of " + m.Key, err
	}
	return outbox.VerdictNotSent, "", err
}

// times tells how often each key was sent, or asked about.
func (s *site) times(asked bool) map[string]int {
	s.t.Helper()
	rows, err := s.db.Query(`SELECT key, count(*) FROM inbox WHERE asked = $1 GROUP BY key`, asked)
	require.NoError(s.t, err)
	defer rows.Close()
	times := map[string]int{}
	for rows.Next() {
		var key string
		var n int
		require.NoError(s.t, rows.Scan(&key, &n))
		times[key] = n
	}
	require.NoError(s.t, rows.Err())
	return times
}

// halting is a store that stands still where its order says so.
type halting struct {
	*sqlstore.Store
	o order
}

func (h halting) ClaimMessages(ctx context.Context, tx outbox.Tx, c outbox.Claim) (outbox.Claimed, error) {
	h.o.reached(beforeClaim)
	claimed, err := h.Store.ClaimMessages(ctx, tx, c)
	if len(claimed.Rows) > 0 {
		h.o.reached(afterClaim)
	}
	return claimed, err
}

func (h halting) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) ([]outbox.Result, error) {
	h.o.reached(beforeSettle)
	results, err := h.Store.Settle(ctx, ch, ss)
	h.o.reached(afterSettle)
	return results, err
}

// run does an errand.
func (o order) run(ctx context.Context, db *sql.DB, store *sqlstore.Store) error {
	j, err := outbox.NewJournal(halting{store, o}, outbox.JournalOptions{Channel: o.Channel})
	if err != nil {
		return err
	}
	b := inbox{db}
	send := func(ctx context.Context, m *outbox.Record) (string, error) {
		if m.Key == o.DieOn {
			announce("dies %d", m.Attempt)
			os.Exit(killedExit)
		}
		if o.Errand.Wander > 0 {
			time.Sleep(rand.N(o.Errand.Wander))
		}
		ref, err := b.send(ctx, m)
		announce("sent %s", m.Key)
		o.reached(inPublish)
		return ref, err
	}
	so := o.Errand.Policy.options(b)
	if o.Errand.Wander > 0 { // what is parked must not keep the rest of its group
		so.Order = outbox.Skip
	}
	so.Lease, so.Workers, so.BatchSize, so.MaxAttempts = o.Lease, o.Errand.Workers, o.BatchSize, o.Errand.MaxAttempts
	if key := o.Errand.Deliver; key != "" {
		return o.deliver(ctx, store, j, key, send, so)
	}
	relay, err := outbox.NewRelay(outbox.RelayOptions{
		PollInterval: 50 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), Observe: o.observe,
	}, j.Sender(send, so))
	if err != nil {
		return err
	}
	announce("ready")
	return relay.Run(ctx)
}

// deliver puts a message already begun and sends it after the commit.
func (o order) deliver(ctx context.Context, store *sqlstore.Store, j *outbox.Journal, key string, send outbox.SendFunc, so outbox.SendOptions) error {
	var res outbox.PutResult
	err := store.Transact(ctx, nil, func(tx *sql.Tx) (err error) {
		res, err = j.PutBegun(ctx, tx, outbox.Message{Key: key}, o.Lease)
		return err
	})
	if err != nil {
		return err
	}
	o.reached(afterCommit)
	_, err = j.Deliver(ctx, res.Record, send, so)
	return err
}
