package integration

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func TestG1MessageCommitsWithTheBusinessRow(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		tx := s.begin()
		_, err := tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
		require.NoError(t, err)
		rs, err := j.PutMany(t.Context(), tx, []outbox.Message{{Key: "a", Payload: []byte("text")}, {Key: "b", Group: "g"}})
		require.NoError(t, err)
		require.True(t, rs[0].Created && rs[1].Created)

		_, err = j.Get(t.Context(), "a")
		require.ErrorIs(t, err, outbox.ErrNotFound, "seen before the commit")
		inside, err := j.In(outbox.SQL(tx)).Get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, rs[0].Record, inside)
		var r receiver
		require.Zero(t, s.sendOnce(j, r.send, outbox.SendOptions{}), "claimed before the commit")

		require.NoError(t, tx.Commit())
		require.Equal(t, 1, s.count(`SELECT count(*) FROM app`))
		require.Equal(t, outbox.Pass{Claimed: 2, Published: 2}, s.sendOnce(j, r.send, outbox.SendOptions{}))
		require.Equal(t, all(outbox.StateSent, "a", "b"), s.states(j))
		require.Equal(t, "ref of b", s.get(j, "b").Ref)
	})
}

func TestG1RollbackLeavesTheJournalAsItWas(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		s.put(j, outbox.Message{Key: "first", Group: "busy"}, outbox.Message{Key: "leased", Group: "out"}, outbox.Message{Key: "plain"})
		s.take("mail", 1, time.Minute)
		before := s.messages()

		tx := s.begin()
		_, err := tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
		require.NoError(t, err)
		for _, m := range []outbox.Message{
			{Key: "new"}, {Key: "plain", Payload: []byte("another")}, {Key: "second", Group: "busy"}, {Key: "third", Group: "out"},
			{Key: "alone", Group: "born here"}, {Key: "later", Group: "born here", Delay: time.Hour},
		} {
			_, err := j.Put(t.Context(), tx, m)
			require.NoError(t, err)
		}
		_, err = j.PutBegun(t.Context(), tx, outbox.Message{Key: "begun", Group: "begun"}, time.Minute)
		require.NoError(t, err)
		require.NoError(t, tx.Rollback())
		require.Equal(t, before, s.messages())
		require.Zero(t, s.count(`SELECT count(*) FROM app`))

		s.put(j, outbox.Message{Key: "alone", Group: "born here"}) // nothing of the group is left behind
		var r receiver
		s.sendOnce(j, r.send, outbox.SendOptions{})
		require.Contains(t, r.keys(), "alone")
	})
}

func TestG1SavepointTakesBackWhatWasPutSince(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		tx := s.begin()
		put := func(key, group string) outbox.PutResult {
			t.Helper()
			res, err := j.Put(t.Context(), tx, outbox.Message{Key: key, Group: group, Payload: []byte(group)})
			require.NoError(t, err)
			return res
		}
		do := func(text string) {
			_, err := tx.Exec(text)
			require.NoError(t, err)
		}
		put("kept", "")
		do(`SAVEPOINT one`)
		put("undone", "")
		put("undone in a group", "g")
		require.False(t, put("kept", "").Created)
		do(`ROLLBACK TO SAVEPOINT one`)
		require.True(t, put("undone", "").Created, "its key is free again")
		put("first", "g")
		do(`SAVEPOINT two`)
		put("second", "g")
		do(`RELEASE SAVEPOINT two`)
		require.NoError(t, tx.Commit())
		var r receiver
		s.sendOnce(j, r.send, outbox.SendOptions{Workers: 1})
		require.Equal(t, each(1, "kept", "undone", "first", "second"), r.times())
		require.Subset(t, r.keys(), []string{"first", "second"})
		require.Zero(t, s.count(`SELECT count(*) FROM {t:groups}`))
	})
}

// TestG1DuplicateKeyIsAnAnswer, whatever became of the message, and changes
// neither the message nor the transaction.
func TestG1DuplicateKeyIsAnAnswer(t *testing.T) {
	type stage struct {
		outcome outbox.Outcome // 0: none
		state   outbox.State
	}
	stages := []stage{
		{0, outbox.StateSending}, {outbox.OutcomeDone, outbox.StateSent}, {outbox.OutcomeRetry, outbox.StateFailed},
		{outbox.OutcomeRelease, outbox.StatePending}, {outbox.OutcomeDead, outbox.StateDead}, {outbox.OutcomeUnknown, outbox.StateUnknown},
	}
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		for _, stage := range stages {
			for _, grouped := range []bool{false, true} {
				m := outbox.Message{Key: fmt.Sprintf("%s, grouped: %t", stage.state, grouped), Payload: []byte("text"), Header: outbox.Header{"a": "b"}}
				if grouped {
					m.Group = m.Key
				}
				s.put(j, m)
				row, err := s.store.BeginMessage(t.Context(), nil, "mail", m.Key, time.Minute)
				require.NoError(t, err)
				if stage.outcome != 0 {
					require.Equal(t, allOf(outbox.ResultDone, 1), s.finish("mail", stage.outcome, time.Hour, row))
				}
				before := s.table(`SELECT * FROM {t:messages} ORDER BY key`)
				want := s.get(j, m.Key)
				require.Equal(t, stage.state, want.State)
				tx := s.begin()
				for _, differs := range []bool{false, true} {
					if differs {
						m.Payload = []byte("another text")
					}
					res, err := j.Put(t.Context(), tx, m)
					require.NoError(t, err, m.Key)
					require.Equal(t, outbox.PutResult{Record: want, Differs: differs}, res, m.Key)
					res, err = j.PutBegun(t.Context(), tx, m, time.Minute)
					require.NoError(t, err, m.Key)
					require.Equal(t, outbox.PutResult{Record: want, Differs: differs}, res, "no lease for who must not send")
				}
				_, err = tx.Exec(`INSERT INTO app VALUES ($1, 'goes on')`, m.Key)
				require.NoError(t, err)
				require.NoError(t, tx.Commit())
				require.Equal(t, before, s.table(`SELECT * FROM {t:messages} ORDER BY key`), m.Key)
			}
		}
		require.Equal(t, 2*len(stages), s.count(`SELECT count(*) FROM app`))
	})
}

// TestG1KeyPutByTwoTransactionsAtOnce: the second waits for the first, and then
// is told what it would be told had it come later. Above READ COMMITTED it
// cannot see that, and gets the database's 40001.
func TestG1KeyPutByTwoTransactionsAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		levels := []sql.IsolationLevel{sql.LevelDefault}
		if s.postgres() {
			levels = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
		}
		j := s.journal("mail")
		for _, level := range levels {
			for _, group := range []string{"", "g"} {
				for _, commits := range []bool{true, false} {
					name := fmt.Sprintf("%s, group %q, the first commits: %t", level, group, commits)
					m := outbox.Message{Key: name, Group: group, Payload: []byte("of the second")}
					first := s.begin()
					won, err := j.Put(t.Context(), first, outbox.Message{Key: name, Group: group, Payload: []byte("of the first")})
					require.NoError(t, err)
					answer := make(chan error, 1)
					var second outbox.PutResult
					go func() {
						tx, err := s.db.BeginTx(context.Background(), &sql.TxOptions{Isolation: level})
						if err == nil {
							defer tx.Rollback()
							if second, err = j.Put(context.Background(), tx, m); err == nil {
								err = tx.Commit()
							}
						}
						answer <- err
					}()
					if s.postgres() {
						s.awaitBlocked()
					} else {
						time.Sleep(20 * time.Millisecond) // it waits for the one writer
					}
					if commits {
						require.NoError(t, first.Commit())
					} else {
						require.NoError(t, first.Rollback())
					}
					err = <-answer
					switch {
					case commits && s.postgres() && level != sql.LevelReadCommitted:
						requireSerializationFailure(t, s, err, name)
					case commits:
						require.NoError(t, err, name)
						require.False(t, second.Created, name)
						require.True(t, second.Differs, name)
						require.Equal(t, won.Seq, second.Seq, name)
						require.Equal(t, "of the first", string(second.Payload), name)
					default:
						require.NoError(t, err, name)
						require.True(t, second.Created, name)
						require.Equal(t, "of the second", string(s.get(j, name).Payload), name)
					}
				}
			}
		}
	})
}

// awaitBlocked waits until a session of this database waits for another's row.
func (s *site) awaitBlocked() {
	s.t.Helper()
	eventually(s.t, "a session to wait for another", func() bool {
		return s.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
	})
}

func requireSerializationFailure(t *testing.T, s *site, err error, name string) {
	t.Helper()
	var pg *pgconn.PgError
	require.ErrorAs(t, err, &pg, name)
	require.Equal(t, "40001", pg.Code, name)
	require.True(t, s.store.Retryable(err), name)
}

// TestG1InvisibleDuplicatePassesThrough: committed after the snapshot was taken.
func TestG1InvisibleDuplicatePassesThrough(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			for _, group := range []string{"", "g"} {
				tx, err := s.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
				require.NoError(t, err)
				_, err = tx.Exec(`SELECT count(*) FROM app`) // takes the snapshot
				require.NoError(t, err)
				m := outbox.Message{Key: fmt.Sprint(level, group), Group: group}
				s.put(j, m)
				_, err = j.Put(t.Context(), tx, m)
				requireSerializationFailure(t, s, err, m.Key)
				_, err = j.Put(t.Context(), tx, outbox.Message{Key: "in an aborted transaction"})
				require.ErrorIs(t, err, outbox.ErrTx)
				require.NoError(t, tx.Rollback())
			}
		}
	})
}

// TestG1TimeoutsOfThePutterAreRespected: lock_timeout and statement_timeout are
// the caller's, and their errors come through.
func TestG1TimeoutsOfThePutterAreRespected(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		holder := s.begin()
		_, err := j.Put(t.Context(), holder, outbox.Message{Key: "k", Group: "g"})
		require.NoError(t, err)
		for setting, state := range map[string]string{"lock_timeout": "55P03", "statement_timeout": "57014"} {
			for _, m := range []outbox.Message{{Key: "k"}, {Key: "another of the group", Group: "g"}} {
				tx := s.begin()
				_, err := tx.Exec(`SET LOCAL ` + setting + ` = '50ms'`)
				require.NoError(t, err)
				_, err = j.Put(t.Context(), tx, m)
				var pg *pgconn.PgError
				require.ErrorAs(t, err, &pg)
				require.Equal(t, state, pg.Code)
				require.ErrorContains(t, err, m.Key)
				require.NoError(t, tx.Rollback())
			}
		}
	})
}
