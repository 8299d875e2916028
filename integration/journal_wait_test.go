package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestG9NothingASenderRunsWaitsForARowLock: in its sessions a wait of more than
// a moment is an error, while putters and people hold messages and groups.
func TestG9NothingASenderRunsWaitsForARowLock(t *testing.T) {
	t.Parallel()
	onlyPostgres(t, func(t *testing.T, s *site) {
		impatient := *s
		impatient.dsn = withParameter(t, s.dsn, "lock_timeout", "1")
		store := impatient.newStore(sqlstore.Options{})
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for w := range 4 {
			wg.Go(func() {
				for i := 0; ctx.Err() == nil; i++ {
					s.putAndLinger(t, fmt.Sprint(w, " ", i))
				}
			})
		}
		wg.Go(func() {
			for ctx.Err() == nil {
				s.amendAndLinger(t)
			}
		})
		claimed := 0
		var mu sync.Mutex
		for range 2 {
			wg.Go(func() {
				for ctx.Err() == nil {
					n := dispatch(t, store)
					mu.Lock()
					claimed += n
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		require.Positive(t, claimed)
		for done := false; !done; { // nothing is stranded
			rows := s.take("mail", 1000, time.Hour)
			done = len(rows) == 0 && s.count(`SELECT count(*) FROM {t:messages} WHERE outcome = 0 AND lease_until <= 0 AND due <= $1`, time.Now().UnixMicro()) == 0
			s.finish("mail", outbox.OutcomeDone, 0, rows...)
			_, err := s.store.AmendMessages(t.Context(), nil, "mail", outbox.Amendment{Action: outbox.ActionRetry, Limit: 10_000})
			require.NoError(t, err)
		}
	})
}

// putAndLinger holds what it put for a while, and then commits it or not.
func (s *site) putAndLinger(t *testing.T, name string) {
	tx, err := s.db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Error(err)
		return
	}
	defer tx.Rollback()
	rows := make([]outbox.PutRow, 1+rand.IntN(3))
	for i := range rows {
		rows[i] = outbox.PutRow{Key: fmt.Sprint(name, " ", i), Group: []string{"", "a", "b", "c"}[rand.IntN(4)]}
	}
	if _, err := s.store.PutRows(context.Background(), outbox.SQL(tx), "mail", rows, 0); err != nil {
		t.Error(err)
	}
	time.Sleep(time.Duration(rand.IntN(8)) * time.Millisecond)
	if rand.IntN(4) > 0 {
		if err := tx.Commit(); err != nil {
			t.Error(err)
		}
	}
}

// amendAndLinger does so with what a person changes, or only looks at and locks.
func (s *site) amendAndLinger(t *testing.T) {
	tx, err := s.db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Error(err)
		return
	}
	defer tx.Rollback()
	a := outbox.Amendment{Action: outbox.ActionRetry, Limit: 20}
	if rand.IntN(5) == 0 {
		a.Action, a.Limit = outbox.ActionDiscard, 1
	}
	if _, err := s.store.AmendMessages(context.Background(), outbox.SQL(tx), "mail", a); err != nil {
		t.Error(err)
	}
	if _, err := tx.Exec(s.dialect.Render(`SELECT FROM {t:messages} ORDER BY seq LIMIT 3 FOR UPDATE SKIP LOCKED`)); err != nil {
		t.Error(err)
	}
	time.Sleep(time.Duration(rand.IntN(5)) * time.Millisecond)
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
}

// dispatch makes every call of a sender.
func dispatch(t *testing.T, store *sqlstore.Store) int {
	ctx, ch := context.Background(), messageChannel("mail")
	check := func(what string, err error) {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := store.Look(ctx, []outbox.Channel{ch})
	check("look", err)
	c, err := store.ClaimMessages(ctx, nil, outbox.Claim{Channel: "mail", Limit: 1 + rand.IntN(20), Lease: time.Minute, Full: true})
	check("claim", err)
	_, err = store.Extend(ctx, ch, c.Rows, time.Minute)
	check("extend", err)
	ss := make([]outbox.Settlement, len(c.Rows))
	for i, r := range c.Rows {
		ss[i] = outbox.Settlement{Row: r, Outcome: outbox.Outcome(1 + rand.IntN(8)%5), Keep: rand.IntN(2) == 0, Error: "why"}
	}
	for tries := 0; len(ss) > 0; tries++ {
		results, err := store.Settle(ctx, ch, ss)
		check("settle", err)
		var busy []outbox.Settlement
		for i, r := range results {
			if r == outbox.ResultBusy {
				ss[i].Again = true
				busy = append(busy, ss[i])
			}
		}
		ss = busy
		time.Sleep(time.Duration(min(len(busy), 1)*tries) * time.Millisecond)
	}
	_, err = store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent, outbox.StateDead}, Limit: 10})
	check("purge", err)
	_, err = store.BeginMessage(ctx, nil, "mail", "0 1 0", time.Minute)
	_ = err // any refusal will do
	return len(c.Rows)
}
