package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// soon is a context that is cancelled at a random moment: before, within or
// after a statement, which takes SQLite some hundred microseconds and Postgres
// a millisecond or two.
func (s *site) soon() (context.Context, context.CancelFunc) {
	unit := 200 * time.Microsecond
	if s.postgres() {
		unit = 2 * time.Millisecond
	}
	d := upTo(unit)
	switch rand.N(4) {
	case 0:
		d = upTo(10 * unit)
	case 1:
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(d, cancel)
		return ctx, cancel
	}
	return context.WithTimeout(context.Background(), d)
}

func isCancellation(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// TestG1CancelledStageLeavesNoStrayRows: a driver that rolls back behind the
// caller's back would let what the caller writes next commit by itself.
func TestG1CancelledStageLeavesNoStrayRows(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		rounds := 6400 / raceFactor
		if s.postgres() {
			rounds = 250 // each cancelled statement costs a connection
		}
		prepared, err := sqlstore.New(s.db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		require.NoError(t, prepared.Check(t.Context())) // which prepares, on SQLite
		ls := []*outbox.Latest[string]{s.latest("orders"), latestOn(t, prepared, "orders")}
		want := map[string]bool{} // the rows that were committed
		var within, staged int
		for i := range rounds {
			cut, err := cancelledRound(s, ls[i/2%2], i, want)
			if err != nil {
				require.True(t, isCancellation(err), "%v", err)
			} else {
				staged++
			}
			if cut {
				within++
			}
		}
		got := map[string]bool{}
		for _, id := range s.table(`SELECT 'app ' || id FROM app UNION ALL SELECT 'entry ' || key FROM {t:entries}`) {
			got[id] = true
		}
		require.Equal(t, want, got)
		require.Greater(t, within, rounds/50, "hardly a context ended during its statement: that shows nothing")
		require.Greater(t, staged, rounds/20)
	})
}

// cancelledRound stages under a context that ends at any time, writes on
// regardless, and commits or rolls back. It tells whether the context ended
// during the call, and what the call returned.
func cancelledRound(s *site, l *outbox.Latest[string], i int, want map[string]bool) (within bool, stageErr error) {
	tx, err := s.db.BeginTx(context.Background(), nil)
	require.NoError(s.t, err)
	defer tx.Rollback()
	var wrote []string
	insert := func(id string) {
		_, err := tx.Exec(`INSERT INTO app VALUES ($1, 'note')`, id)
		if !s.postgres() {
			require.NoError(s.t, err, "the transaction was lost")
		}
		if err == nil {
			wrote = append(wrote, "[app "+id+"]")
		}
	}
	insert(fmt.Sprint(i, " before"))
	ctx, cancel := s.soon()
	defer cancel()
	items := []outbox.Item[string]{{Key: fmt.Sprint(i, " a")}, {Key: fmt.Sprint(i, " b")}, {Key: fmt.Sprint(i, " c")}}
	items = items[:1+i%2*2]
	early := ctx.Err() != nil
	_, stageErr = l.StageMany(ctx, tx, items)
	within = !early && ctx.Err() != nil
	<-ctx.Done() // whatever the driver does about it, it does now
	insert(fmt.Sprint(i, " after"))

	staged := stageErr == nil
	if e, err := l.Pending(context.Background(), outbox.SQL(tx), items[0].Key); err == nil && !staged {
		// The answer was cut off, not the statement. Its error says so, and
		// what it did is still the transaction's.
		require.True(s.t, s.postgres())
		require.NotZero(s.t, e.Version)
		staged = true
	}
	if i%3 > 0 {
		return within, stageErr // rolled back
	}
	if err := tx.Commit(); err != nil {
		require.True(s.t, s.postgres(), "SQLite could not commit: %v", err)
		return within, stageErr
	}
	for _, row := range wrote {
		want[row] = true
	}
	for _, it := range items {
		if staged {
			want["[entry "+it.Key+"]"] = true
		}
	}
	return within, stageErr
}

// TestG1CancelledRelayCallsLeaveThePoolClean is field case S74: no connection
// stays in a transaction, and a plain write still works.
func TestG1CancelledRelayCallsLeaveThePoolClean(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		loops := 10_000 / raceFactor
		if s.postgres() {
			loops = 300
		}
		const connections = 4
		db := s.open()
		db.SetMaxOpenConns(connections)
		db.SetMaxIdleConns(connections)
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		s.stageMany(s.latest("orders"), "k", 20)

		var wg sync.WaitGroup
		var mu sync.Mutex
		var cancelled, worked int
		for range 2 {
			wg.Go(func() {
				for range loops / 2 {
					if db.PingContext(t.Context()) != nil { // replaces a connection that was lost
						t.Error("the database is out of reach")
					}
					ctx, cancel := s.soon()
					err := someRelayCall(ctx, store)
					cancel()
					mu.Lock()
					if err != nil {
						cancelled++
					} else {
						worked++
					}
					mu.Unlock()
					if err != nil && !isCancellation(err) {
						t.Errorf("a cancelled call does not say so: %v", err)
						return
					}
				}
			})
		}
		wg.Wait()
		require.Greater(t, cancelled, loops/20)
		require.Greater(t, worked, loops/20)
		requireClean(t, s, db, connections)
		require.Equal(t, 20, s.count(`SELECT count(*) FROM {t:entries}`))
	})
}

// someRelayCall makes one call of a relay, whose rows stay.
func someRelayCall(ctx context.Context, store *sqlstore.Store) error {
	ch := latestChannel("orders")
	row := outbox.Row{ID: 1, Version: 1, Token: 1}
	switch rand.N(8) {
	case 0:
		_, err := store.Settle(ctx, ch, []outbox.Settlement{{Row: row, Outcome: outbox.OutcomeRetry}})
		return err
	case 1:
		_, err := store.Extend(ctx, ch, []outbox.Row{row}, time.Second)
		return err
	case 2:
		_, err := store.Look(ctx, []outbox.Channel{ch, latestChannel("other")})
		return err
	case 3:
		if err := store.DiscardRow(ctx, "orders", "missing", 1); !errors.Is(err, outbox.ErrNotFound) {
			return err
		}
		return nil
	case 4:
		return store.Outage(ctx, latestChannel("down"), rand.N(2) == 0, "test")
	}
	claimed, err := store.ClaimRows(ctx, outbox.Claim{Channel: "orders", Limit: 3, Lease: time.Millisecond, Full: true})
	if err != nil || len(claimed.Rows) == 0 {
		return err
	}
	ss := make([]outbox.Settlement, len(claimed.Rows))
	for i, r := range claimed.Rows {
		ss[i] = outbox.Settlement{Row: r, Outcome: outbox.OutcomeRetry}
	}
	_, err = store.Settle(ctx, ch, ss)
	return err
}

// requireClean takes every connection of a pool and makes sure that none is in
// a transaction, and that each can write.
func requireClean(t *testing.T, s *site, db *sql.DB, connections int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var conns []*sql.Conn
	for range connections {
		conn, err := db.Conn(ctx)
		require.NoError(t, err)
		defer conn.Close()
		conns = append(conns, conn)
	}
	for i, conn := range conns {
		if s.postgres() {
			require.Equal(t, []string{"[<nil>]"}, tableOf(t, conn, `SELECT pg_current_xact_id_if_assigned()::text`))
		} else {
			_, err := conn.ExecContext(ctx, `BEGIN IMMEDIATE`) // refused inside a transaction
			require.NoError(t, err)
			_, err = conn.ExecContext(ctx, `ROLLBACK`)
			require.NoError(t, err)
		}
		began := time.Now()
		_, err := conn.ExecContext(ctx, `INSERT INTO app VALUES ($1, 'plain write')`, fmt.Sprint("connection ", i))
		require.NoError(t, err)
		require.Less(t, time.Since(began), 3*time.Second)
	}
	if s.postgres() {
		require.Zero(t, s.count(`SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()`))
	}
	require.Equal(t, connections, s.count(`SELECT count(*) FROM app`))
}
