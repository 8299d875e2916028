package integration

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestG1KeyPutByManyIsPutOnce: many transactions, of every isolation level,
// alone and in bulk in random order, commit and roll back at random. Of each
// key, exactly one that committed was told that it had created it.
func TestG1KeyPutByManyIsPutOnce(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const writers, keys, rounds = 6, 8, 25
		j := s.journal("mail")
		var mu sync.Mutex
		created := map[string]int{}
		var wg sync.WaitGroup
		for w := range writers {
			level := sql.LevelDefault
			if s.postgres() {
				level = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}[w%4]
			}
			wg.Go(func() {
				for round := range rounds {
					ms := make([]outbox.Message, 0, keys)
					for _, k := range rand.Perm(keys) {
						m := outbox.Message{Key: fmt.Sprintf("%d.%d", round, k)}
						if k%2 == 0 {
							m.Group = fmt.Sprint("g", k%4)
						}
						ms = append(ms, m)
					}
					ms = ms[:1+rand.N(keys)]
					rs, err := s.putAt(level, j, ms, rand.N(3) > 0)
					if err != nil && !s.store.Retryable(err) {
						t.Errorf("put: %v", err)
						return
					}
					mu.Lock()
					for _, r := range rs {
						if r.Created {
							created[r.Key]++
						}
					}
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		want := map[string]int{}
		for _, r := range s.records(j) {
			want[r.Key] = 1
		}
		require.Equal(t, want, created)
		require.Greater(t, len(want), keys*rounds/2)
	})
}

// putAt puts in a transaction of its own and returns the answers if it commits.
func (s *site) putAt(level sql.IsolationLevel, j *outbox.Journal, ms []outbox.Message, commit bool) ([]outbox.PutResult, error) {
	tx, err := s.db.BeginTx(context.Background(), &sql.TxOptions{Isolation: level})
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	rs, err := j.PutMany(context.Background(), tx, ms)
	if err != nil || !commit {
		return nil, err
	}
	time.Sleep(upTo(2 * time.Millisecond))
	return rs, tx.Commit()
}

// TestG1PutOfAKeyThatVanishes: a message may be discarded between the insert
// that finds it and the look at it. Then it is put, or found, after all: each
// Put has an answer, and each answer names a message.
func TestG1PutOfAKeyThatVanishes(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const writers, puts = 4, 150
		for _, group := range []string{"", "g"} {
			j := s.journal("mail " + group)
			var mu sync.Mutex
			created := map[int64]int{}
			var discarded atomic.Int64
			round := func() error {
				r, err := j.Add(context.Background(), outbox.Message{Key: "k", Group: group, Payload: []byte("text")})
				if err != nil {
					return err
				}
				if r.Seq == 0 || r.Key != "k" || string(r.Payload) != "text" {
					return fmt.Errorf("put answered %+v", r)
				}
				mu.Lock()
				if created[r.Seq] += 0; r.Created {
					created[r.Seq]++
				}
				mu.Unlock()
				n, err := j.Discard(context.Background(), outbox.Filter{All: true})
				discarded.Add(n)
				return err
			}
			var wg sync.WaitGroup
			for range writers {
				wg.Go(func() {
					for range puts {
						if err := round(); err != nil && !s.store.Retryable(err) {
							t.Errorf("put or discard: %v", err)
							return
						}
					}
				})
			}
			wg.Wait()
			for seq, n := range created {
				require.Equal(t, 1, n, "message %d was created by %d", seq, n)
			}
			require.Equal(t, len(created), int(discarded.Load())+len(s.records(j)))
			require.Greater(t, len(created), 5)
		}
	})
}

// TestG1CancelledPutLeavesNoStrayRows: as for stages, the driver of SQLite must
// not be let roll back behind the caller's back.
func TestG1CancelledPutLeavesNoStrayRows(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		rounds := 2000 / raceFactor
		if s.postgres() {
			rounds = 120 // each cancelled statement costs a connection
		}
		j := s.journal("mail")
		want := map[string]bool{}
		within := 0
		for i := range rounds {
			if cancelledPut(s, j, i, want) {
				within++
			}
		}
		got := map[string]bool{}
		for _, id := range s.table(`SELECT 'app ' || id FROM app UNION ALL SELECT 'message ' || key FROM {t:messages}`) {
			got[id] = true
		}
		require.Equal(t, want, got)
		require.Greater(t, within, rounds/50, "hardly a context ended during its statement: that shows nothing")
	})
}

func cancelledPut(s *site, j *outbox.Journal, i int, want map[string]bool) (within bool) {
	tx, err := s.db.BeginTx(context.Background(), nil)
	require.NoError(s.t, err)
	defer tx.Rollback()
	ctx, cancel := s.soon()
	defer cancel()
	ms := letters(fmt.Sprint(i, " "), 1+i%2*2, i%3)
	early := ctx.Err() != nil
	_, putErr := j.PutMany(ctx, tx, ms)
	within = !early && ctx.Err() != nil
	<-ctx.Done()
	require.True(s.t, putErr == nil || isCancellation(putErr), "%v", putErr)
	_, err = tx.Exec(`INSERT INTO app VALUES ($1, 'after')`, fmt.Sprint(i))
	if !s.postgres() {
		require.NoError(s.t, err, "the transaction was lost")
	}
	wrote := err == nil
	_, err = j.In(outbox.SQL(tx)).Get(context.Background(), ms[0].Key)
	there := err == nil // also where the answer was cut off, not the statement
	if i%3 == 0 && tx.Commit() == nil {
		if wrote {
			want[fmt.Sprintf("[app %d]", i)] = true
		}
		for _, m := range ms {
			if there {
				want["[message "+m.Key+"]"] = true
			}
		}
	}
	return within
}

// TestG1SessionStaysAsThePutterSetIt, and no verb changes it either.
func TestG1SessionStaysAsThePutterSetIt(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		state := func(q queryer) (all []string) {
			for _, query := range sessionState[s.dialect.Name()] {
				all = append(all, tableOf(t, q, query)...)
			}
			return all
		}
		conn, err := s.db.Conn(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		state(conn) // SQLite opens its temporary schema at the first look
		idle := state(conn)
		tx, err := conn.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer tx.Rollback()
		_, err = tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
		require.NoError(t, err)
		if s.postgres() {
			_, err = tx.Exec(`SET LOCAL search_path TO pg_catalog; SET LOCAL enable_seqscan = off; SET LOCAL work_mem = '99kB'`)
			require.NoError(t, err)
		}
		inside := state(tx)
		for round := range 3 { // the third time, a function's plans are kept
			everyVerb(t, j, tx, fmt.Sprint(round))
		}
		require.Equal(t, inside, state(tx))
		require.NoError(t, tx.Commit())
		require.Equal(t, idle, state(conn))
	})
}

// everyVerb uses each verb once in a transaction.
func everyVerb(t *testing.T, j *outbox.Journal, tx *sql.Tx, prefix string) {
	t.Helper()
	ctx := t.Context()
	in := j.In(outbox.SQL(tx))
	put := func(key, group string) {
		t.Helper()
		_, err := j.PutMany(ctx, tx, []outbox.Message{{Key: prefix + key, Group: group}, {Key: prefix + key, Group: group}})
		require.NoError(t, err)
	}
	begun, err := j.PutBegun(ctx, tx, outbox.Message{Key: prefix + "begun"}, time.Minute)
	require.NoError(t, err)
	lease, err := in.Extend(ctx, begun.Lease, time.Minute)
	require.NoError(t, err)
	require.NoError(t, in.MarkSent(ctx, lease, "ref"))
	for n, mark := range []func(outbox.Lease) error{
		func(l outbox.Lease) error { return in.MarkFailed(ctx, l, errDown) },
		func(l outbox.Lease) error { return in.MarkFailed(ctx, l, outbox.Permanent(errDown)) },
		func(l outbox.Lease) error { return in.MarkFailed(ctx, l, outbox.Unknown(errDown)) },
		func(l outbox.Lease) error { return in.ResolveAmbiguous(ctx, l, outbox.StatePending) },
	} {
		key := fmt.Sprint("begun later ", n)
		put(key, prefix+key)
		r, err := in.Begin(ctx, prefix+key, time.Minute)
		require.NoError(t, err)
		require.NoError(t, mark(r.Lease))
	}
	require.NoError(t, in.ResolveUnknown(ctx, prefix+"begun later 2", outbox.VerdictSent, "ref"))
	put("due", prefix)
	rs, err := in.ClaimDue(ctx, 10, time.Minute)
	require.NoError(t, err)
	for _, r := range rs {
		require.NoError(t, in.MarkSent(ctx, r.Lease, ""))
	}
	_, _, err = in.List(ctx, outbox.Filter{})
	require.NoError(t, err)
	_, err = in.Retry(ctx, outbox.Filter{States: []outbox.State{outbox.StateDead}})
	require.NoError(t, err)
	_, err = in.Discard(ctx, outbox.Filter{All: true})
	require.NoError(t, err)
}
