package integration

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestG2VersionsOfAHotKeyGrowInCommitOrder: with one key, 16 writers and relays
// that delete it at once, a version drawn before the row is held regresses
// within a second.
func TestG2VersionsOfAHotKeyGrowInCommitOrder(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		levels := map[string][]sql.IsolationLevel{"default": {sql.LevelDefault}}
		if s.postgres() {
			levels["repeatable read"] = []sql.IsolationLevel{sql.LevelRepeatableRead}
			levels["mixed"] = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
		}
		if s.postgres() {
			stalling(s, s.dialect, 10*time.Millisecond)
		}
		for name, mix := range levels {
			t.Run(name, func(t *testing.T) {
				c := contest{s: s, store: s.store, writers: 16, keys: 1, levels: mix, pause: 40 * time.Millisecond}
				book, m := c.run(t, after(1500*time.Millisecond))
				t.Logf("%d commits, %d publications", book.commits(), m.published)
				book.inCommitOrder(t)
				require.Empty(t, m.regressions())
				require.Empty(t, m.differs(book))
				require.Greater(t, m.published, 1)
			})
		}
	})
}

// TestG2BulkAndSingleStagesKeepCommitOrder: the same for StageMany, on keys that
// overlap with those of others.
func TestG2BulkAndSingleStagesKeepCommitOrder(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		if s.postgres() {
			stalling(s, s.dialect, 2*time.Millisecond)
		}
		c := contest{s: s, store: s.store, writers: 12, keys: 8, bulk: true,
			levels: []sql.IsolationLevel{sql.LevelDefault}, pause: 40 * time.Millisecond}
		book, m := c.run(t, after(2*time.Second))
		t.Logf("%d commits, %d publications", book.commits(), m.published)
		book.inCommitOrder(t)
		require.Empty(t, m.regressions())
		require.Empty(t, m.differs(book))
	})
}

// TestG2RegressionsAppearWithoutTheSecondDraw shows that the tests above would
// notice: the same contest over a stage function that does not draw again.
func TestG2RegressionsAppearWithoutTheSecondDraw(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		broken := dialect.Postgres().In("", "broken_")
		install(t, s.db, broken)
		withoutSecondDraw(t, s.db, broken)
		stalling(s, broken, 10*time.Millisecond)
		store, err := sqlstore.New(s.open(), broken, sqlstore.Options{})
		require.NoError(t, err)
		c := contest{s: s, store: store, writers: 16, keys: 1, levels: []sql.IsolationLevel{sql.LevelDefault}, pause: 40 * time.Millisecond}
		_, m := c.run(t, func(_ *ledger, m *mirror) bool { return len(m.regressions()) > 0 })
		require.NotEmpty(t, m.regressions(), "the contest is too tame to show a regression")
	})
}

// TestG2VersionsOutliveRows: neither acknowledging nor deleting, nor what
// operators do to a database, lets versions start again.
func TestG2VersionsOutliveRows(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		last := outbox.Version(0)
		grows := func(why string) {
			t.Helper()
			v := s.stage(s.latest("orders"), "k", why)
			require.Greater(t, v, last, why)
			last = v
		}
		grows("first")
		grows("replaced")
		drained(t, s.store, "orders", func(outbox.Row) {})
		require.True(t, s.empty())
		grows("acknowledged")
		require.NoError(t, s.store.DiscardRow(t.Context(), "orders", "k", last))
		grows("discarded")
		s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		grows("deleted by hand")
		s.exec(`VACUUM`)
		grows("vacuumed")
		if s.postgres() {
			s.exec(s.dialect.Render(`VACUUM FULL {t:entries}`))
			s.exec(s.dialect.Render(`TRUNCATE {t:entries}`))
		} else {
			s.exec(`PRAGMA wal_checkpoint(TRUNCATE)`)
		}
		grows("truncated")
		s.db.Close()
		s.db, s.store = s.open(), s.newStore(sqlstore.Options{})
		grows("opened again")
		past := time.Now().Add(-time.Hour)
		s.store = s.newStore(sqlstore.Options{Clock: func() time.Time { return past }})
		grows("clock an hour back")
		grows("clock standing still")
		require.Less(t, last, outbox.Version(1<<53))
		near := outbox.Version(time.Now().UnixMicro())
		require.InDelta(t, float64(near), float64(last), float64(time.Hour/time.Microsecond), "versions start at the clock")
	})
}

// TestG2VersionsAreUniqueInTheDatabase: over keys, channels, single and bulk
// stages, tombstones and prepared statements.
func TestG2VersionsAreUniqueInTheDatabase(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		prepared, err := sqlstore.New(s.db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		require.NoError(t, prepared.Check(t.Context()))
		stores := []*sqlstore.Store{s.store, prepared}
		var mu sync.Mutex
		seen := map[outbox.Version]bool{}
		var wg sync.WaitGroup
		for i := range 6 {
			wg.Go(func() {
				l := latestOn(t, stores[i%2], fmt.Sprint("channel", i%3))
				last := outbox.Version(0)
				for n := range 25 {
					versions := stageSomehow(t, s, l, i, n)
					mu.Lock()
					for _, v := range versions {
						if seen[v] || v <= 0 {
							t.Errorf("version %d was given out twice", v)
						}
						seen[v] = true
					}
					mu.Unlock()
					if versions[0] <= last {
						t.Errorf("version %d was staged after %d", versions[0], last)
					}
					last = versions[len(versions)-1]
				}
			})
		}
		wg.Wait()
		require.Equal(t, 6*(13+12*20), len(seen))
	})
}

func stageSomehow(t *testing.T, s *site, l *outbox.Latest[string], i, n int) []outbox.Version {
	tx, err := s.db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Error(err)
		return []outbox.Version{0}
	}
	defer tx.Rollback()
	var versions []outbox.Version
	switch n % 4 {
	case 0, 2:
		var v outbox.Version
		if v, err = l.Stage(context.Background(), tx, fmt.Sprint("of ", i), "value"); n%4 == 2 {
			v, err = l.StageDelete(context.Background(), tx, fmt.Sprint("of ", i))
		}
		versions = append(versions, v)
	default:
		items := make([]outbox.Item[string], 20)
		for k := range items {
			items[k].Key = fmt.Sprintf("of %d, %02d", i, k)
		}
		versions, err = l.StageMany(context.Background(), tx, items)
	}
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		t.Error(err)
		return []outbox.Version{0}
	}
	return versions
}

// TestG2FenceRaisesWhatARestoreSetBack: after it, nothing is given out again.
func TestG2FenceRaisesWhatARestoreSetBack(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		lost := s.stage(l, "k", "lost in the restore")
		lostToken := s.claim("orders", 1, time.Millisecond)[0].Token
		hour := time.Hour.Microseconds()
		if s.postgres() {
			s.exec(s.dialect.Render(fmt.Sprintf(`SELECT setval({s:seq}::regclass, %d), setval({s:token_seq}::regclass, %d)`, int64(lost)-hour, int64(lostToken)-hour)))
		} else {
			s.exec(s.dialect.Render(`UPDATE {t:seq} SET version = version - $1, token = token - $1`), hour)
		}
		version, token, err := s.store.Fence(t.Context())
		require.NoError(t, err)
		require.Greater(t, version, lost)
		require.Greater(t, token, lostToken)
		v := s.stage(l, "k", "after the fence")
		require.Greater(t, v, version)
		require.Greater(t, s.claimSoon("orders", 1).Token, token)

		for range 3 { // again, at once
			again, tokenAgain, err := s.store.Fence(t.Context())
			require.NoError(t, err)
			require.Greater(t, again, v)
			require.Greater(t, tokenAgain, token)
			v, token = s.stage(l, "k", "fenced again"), tokenAgain
			require.Greater(t, v, again)
		}
	})
}

// claimSoon claims a row as soon as its lease has lapsed.
func (s *site) claimSoon(channel string, limit int) (row outbox.Row) {
	s.t.Helper()
	eventually(s.t, "a row to claim", func() bool {
		rows := s.claim(channel, limit, time.Minute)
		if len(rows) > 0 {
			row = rows[0]
		}
		return len(rows) > 0
	})
	return row
}

// TestG2ReinstallNeverGoesBack: sinks outlive the tables.
func TestG2ReinstallNeverGoesBack(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		version, token := outbox.Version(0), outbox.Token(0)
		for range 3 {
			v := s.stage(l, "k", "value")
			claimed := s.claim("orders", 1, time.Minute)[0].Token
			require.Greater(t, v, version)
			require.Greater(t, claimed, token)
			version, token = v, claimed
			uninstall(t, s.db, s.dialect)
			install(t, s.db, s.dialect)
		}
	})
}

// TestG2SequencesPassTheEndOfInt32 is field case S25.
func TestG2SequencesPassTheEndOfInt32(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		const low = 1<<31 - 8
		if s.postgres() {
			s.exec(s.dialect.Render(fmt.Sprintf(`SELECT setval({s:seq}::regclass, %d), setval({s:token_seq}::regclass, %d)`, low, low)))
		} else {
			s.exec(s.dialect.Render(`UPDATE {t:seq} SET version = $1, token = $1`), low)
			start := time.UnixMicro(low)
			s.store = s.newStore(sqlstore.Options{Clock: func() time.Time { return start }})
		}
		l := s.latest("orders")
		m := newMirror()
		last := outbox.Version(0)
		for i := range 20 {
			v := s.stage(l, "k", fmt.Sprint(i))
			require.Greater(t, v, last)
			last = v
			rows := s.claim("orders", 5, time.Minute)
			require.Len(t, rows, 1)
			if i%2 == 0 {
				require.Equal(t, allOf(outbox.ResultDone, 1), s.settle("orders", outbox.OutcomeRetry, 0, rows...))
				rows = s.claim("orders", 5, time.Minute)
			}
			extended, err := s.store.Extend(t.Context(), latestChannel("orders"), rows, time.Hour)
			require.NoError(t, err)
			require.Equal(t, allOf(outbox.ResultDone, 1), extended)
			m.take(rows[0].Key, rows[0].Version, fmt.Sprint(i))
			require.Equal(t, allOf(outbox.ResultDone, 1), s.settle("orders", outbox.OutcomeDone, 0, rows...))
		}
		s.stageMany(l, "many", 20)
		require.Greater(t, last, outbox.Version(1<<31))
		require.Less(t, last, outbox.Version(1<<32))
		require.Empty(t, m.regressions())
	})
}

// TestG2NewLifeOfADeletedKeyIsNewer is field case S21: a destination that hears
// of an old deletion late is not fooled.
func TestG2NewLifeOfADeletedKeyIsNewer(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		var heard []*outbox.Entry[string]
		hear := func(_ context.Context, batch []*outbox.Entry[string]) error {
			heard = append(heard, batch...)
			return nil
		}
		for life := range 3 {
			s.stage(l, "k", fmt.Sprint("life ", life))
			s.once(l, outbox.PublishOptions{}, hear)
			tx := s.begin()
			_, err := l.StageDelete(t.Context(), tx, "k")
			require.NoError(t, err)
			require.NoError(t, tx.Commit())
			s.once(l, outbox.PublishOptions{}, hear)
			require.True(t, s.empty())
		}
		s.stage(l, "k", "last life")
		s.once(l, outbox.PublishOptions{}, hear)
		require.Len(t, heard, 7)
		for _, order := range [][]int{{0, 1, 2, 3, 4, 5, 6}, {6, 5, 4, 3, 2, 1, 0}, {1, 6, 0, 5, 2, 4, 3}} {
			m := newMirror()
			for _, i := range order {
				m.take("k", heard[i].Version, heard[i].Value)
			}
			require.Equal(t, "last life", m.value("k"))
		}
		require.True(t, heard[5].Deleted)
		require.False(t, heard[6].Deleted)
	})
}

// TestG2WhatCameBetweenMakesAStageDrawAgain: one that drew its version and then
// stalled, while another of its key was committed and went, ends above it,
// however the other went; where nothing went it keeps what it drew.
func TestG2WhatCameBetweenMakesAStageDrawAgain(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		s.exec(s.dialect.Render(`CREATE FUNCTION {t:gate}() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN IF convert_from(new.payload, ''UTF8'') LIKE ''%stalled%'' THEN PERFORM pg_advisory_xact_lock(42); END IF; RETURN new; END'`))
		s.exec(s.dialect.Render(`CREATE TRIGGER gate BEFORE INSERT ON {t:entries} FOR EACH ROW EXECUTE FUNCTION {t:gate}()`))
		l := s.latest("orders")
		for name, between := range map[string]func() outbox.Version{
			"published": func() outbox.Version {
				v := s.stage(l, "k", "quick")
				drained(t, s.store, "orders", func(outbox.Row) {})
				return v
			},
			"discarded": func() outbox.Version {
				v := s.stage(l, "k", "quick")
				require.NoError(t, l.Discard(t.Context(), "k", v))
				return v
			},
			"another key only": func() outbox.Version { return -s.stage(l, "other", "quick") },
		} {
			for kind, n := range map[string]int{"one": 1, "many": 3} {
				t.Run(name+", "+kind, func(t *testing.T) {
					gate := s.begin()
					_, err := gate.Exec(`SELECT pg_advisory_xact_lock(42)`)
					require.NoError(t, err)
					items := []outbox.Item[string]{{Key: "k", Value: "stalled"}, {Key: "m"}, {Key: "n"}}[:n]
					staged := make(chan []outbox.Version, 1)
					go func() {
						var vs []outbox.Version
						err := s.store.Transact(t.Context(), nil, func(tx *sql.Tx) (err error) {
							vs, err = l.StageMany(t.Context(), tx, items)
							return err
						})
						if err != nil {
							vs = nil
						}
						staged <- vs
					}()
					eventually(t, "the stage to stall", func() bool {
						return s.count(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted`) == 1
					})
					quick := between()
					require.NoError(t, gate.Rollback())
					vs := <-staged
					require.Len(t, vs, n)
					if quick < 0 {
						require.Less(t, vs[0], -quick, "drawn before, and nothing of the key went")
					} else {
						require.Greater(t, vs[0], quick)
					}
					drained(t, s.store, "orders", func(outbox.Row) {})
				})
			}
		}
	})
}
