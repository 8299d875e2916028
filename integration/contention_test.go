package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// named opens a store whose sessions bear a name.
func (s *site) named(name string) *sqlstore.Store {
	s.t.Helper()
	u, err := url.Parse(s.dsn)
	require.NoError(s.t, err)
	q := u.Query()
	q.Set("application_name", name)
	u.RawQuery = q.Encode()
	other := *s
	other.dsn = u.String()
	return other.newStore(sqlstore.Options{})
}

// TestG9NoRelayStatementWaitsForARow: a stager holds one row of the batch, and
// everything returns at once, with that row busy and the others done.
func TestG9NoRelayStatementWaitsForARow(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		ch := latestChannel("orders")
		for _, outcome := range outcomes {
			s.stageMany(l, "k", 5)
			held := s.claim("orders", 5, time.Minute)
			stager := s.begin()
			_, err := l.Stage(t.Context(), stager, held[2].Key, "held")
			require.NoError(t, err)
			want := allOf(outbox.ResultDone, 5)
			want[2] = outbox.ResultBusy
			patience := time.AfterFunc(10*time.Second, func() { _ = stager.Rollback() }) // whoever waits learns it
			defer patience.Stop()

			atOnce := func(what string, f func()) {
				t.Helper()
				began := time.Now()
				f()
				require.Less(t, time.Since(began), 2*time.Second, what)
			}
			atOnce("claim", func() { require.Empty(t, s.claim("orders", 5, time.Minute)) })
			atOnce("extend", func() {
				extended, err := s.store.Extend(t.Context(), ch, held, time.Minute)
				require.NoError(t, err)
				require.Equal(t, want, extended)
			})
			atOnce("look", func() { _, err := s.store.Look(t.Context(), []outbox.Channel{ch}); require.NoError(t, err) })
			atOnce("stats", func() { _, err := s.store.Stats(t.Context()); require.NoError(t, err) })
			atOnce("pending", func() { _, err := l.Pending(t.Context(), nil, held[2].Key); require.NoError(t, err) })
			atOnce("discard", func() {
				require.ErrorIs(t, l.Discard(t.Context(), held[2].Key, held[2].Version), outbox.ErrBusy)
			})
			atOnce("settle", func() { require.Equal(t, want, s.settle("orders", outcome, time.Hour, held...)) })
			require.NoError(t, stager.Commit())
			require.Equal(t, []outbox.Result{outbox.ResultSuperseded}, s.settle("orders", outcome, time.Hour, held[2]))
			again := s.claim("orders", 5, time.Minute)
			require.Len(t, again, 1)
			require.Equal(t, held[2].Key, again[0].Key)
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

// TestG9HotKeyHoldsNobodyElseBack is field case S23: stagers of one key, in slow
// transactions, queue up behind each other; the relay never stands among them,
// and the other keys go out.
func TestG9HotKeyHoldsNobodyElseBack(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		m := newMirror()
		relayed := latestOn(t, s.named("relay under test"), "orders")
		s.run(outbox.RelayOptions{PollInterval: 20 * time.Millisecond, Logger: quiet}, relayed.Publisher(m.publish, outbox.PublishOptions{}))
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var stagers sync.WaitGroup
		for range 20 {
			stagers.Go(func() {
				for ctx.Err() == nil {
					err := s.store.Transact(context.Background(), nil, func(tx *sql.Tx) error {
						_, err := l.Stage(context.Background(), tx, "hot", "value")
						time.Sleep(50 * time.Millisecond)
						return err
					})
					if err != nil {
						t.Errorf("stage: %v", err)
						return
					}
				}
			})
		}
		for i := range 40 {
			s.stage(l, fmt.Sprint("cool", i), "value")
			require.Zero(t, s.count(`SELECT count(*) FROM pg_stat_activity
				WHERE application_name = 'relay under test' AND wait_event_type = 'Lock' AND wait_event IN ('transactionid', 'tuple')`))
			time.Sleep(20 * time.Millisecond)
		}
		eventually(t, "the other keys to be published", func() bool { return m.value("cool39") != "" && m.value("cool0") != "" })
		stop()
		stagers.Wait()
		eventually(t, "everything to be published", s.empty)
		require.Empty(t, m.regressions())
	})
}

// TestG9BulkStagesDoNotDeadlock is field case S24: the same keys in random
// order, with relays settling them meanwhile.
func TestG9BulkStagesDoNotDeadlock(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		const keys = 100
		rounds := 500 / raceFactor
		l := s.latest("orders")
		m := newMirror()
		ctx, stop := context.WithCancel(t.Context())
		var stagers, others sync.WaitGroup
		for range 2 {
			stagers.Go(func() {
				for range rounds {
					items := make([]outbox.Item[string], keys)
					for i, k := range rand.Perm(keys) {
						items[i] = outbox.Item[string]{Key: fmt.Sprint("k", k), Value: "value"}
					}
					err := s.store.Transact(context.Background(), nil, func(tx *sql.Tx) error {
						_, err := l.StageMany(context.Background(), tx, items)
						return err
					})
					if err != nil {
						t.Errorf("stage: %v", err)
						return
					}
				}
			})
		}
		others.Go(func() {
			for ctx.Err() == nil {
				_, err := consumeOnce(s.store, "orders", func(r outbox.Row) { m.take(r.Key, r.Version, "value") })
				if err != nil && !errors.Is(err, outbox.ErrLeaseLost) { // to the operator
					t.Errorf("consume: %v", err)
					return
				}
			}
		})
		others.Go(func() { // an operator who discards
			for ctx.Err() == nil {
				info, err := l.List(context.Background(), "", 1)
				if err == nil && len(info) > 0 {
					_ = l.Discard(context.Background(), info[0].Key, info[0].Version)
				}
			}
		})
		stagers.Wait()
		stop()
		others.Wait()
		drained(t, s.store, "orders", func(r outbox.Row) { m.take(r.Key, r.Version, "value") })
		require.Empty(t, m.regressions())
		require.Zero(t, s.count(`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`))
	})
}

// TestG9NothingIsOpenWhileUserCodePublishes: no transaction, no lock, and on
// SQLite no reader that keeps the WAL from being checkpointed.
func TestG9NothingIsOpenWhileUserCodePublishes(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		db := s.open()
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		s.stageMany(l, "k", 20)
		calls := 0
		s.once(latestOn(t, store, "orders"), outbox.PublishOptions{}, func(ctx context.Context, batch []*outbox.Entry[string]) error {
			calls++
			require.Zero(t, db.Stats().InUse)
			if s.postgres() {
				require.Zero(t, s.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
					AND pid <> pg_backend_pid() AND (state LIKE 'idle in transaction%' OR backend_xmin IS NOT NULL)`))
				require.Zero(t, s.count(`SELECT count(*) FROM pg_locks WHERE pid <> pg_backend_pid() AND locktype <> 'virtualxid'
					AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
				return nil
			}
			conn, err := s.db.Conn(ctx)
			require.NoError(t, err)
			defer conn.Close()
			_, err = conn.ExecContext(ctx, `PRAGMA busy_timeout = 0`)
			require.NoError(t, err)
			require.Equal(t, []string{"[0 0 0]"}, tableOf(t, conn, `PRAGMA wal_checkpoint(TRUNCATE)`), "busy, or pages left")
			_, err = conn.ExecContext(ctx, `BEGIN EXCLUSIVE`)
			require.NoError(t, err)
			_, err = conn.ExecContext(ctx, `ROLLBACK; PRAGMA busy_timeout = 5000`)
			return err
		})
		require.Equal(t, 1, calls)
		require.True(t, s.empty())
	})
}

// TestG9CallerHoldsKeysForLongerThanTheLease, and then wants another key of the
// same batch: no deadlock, and the rest of the batch goes out once.
func TestG9CallerHoldsKeysForLongerThanTheLease(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		const lease = 200 * time.Millisecond
		for round := range 4 {
			channel := fmt.Sprint("round ", round)
			l := s.latest(channel)
			s.stageMany(l, "k", 10)
			var mu sync.Mutex
			times := map[string]int{} // by key and version
			begun, held := make(chan struct{}), make(chan struct{})
			var once sync.Once
			publish := func(_ context.Context, batch []*outbox.Entry[string]) error {
				mu.Lock()
				for _, e := range batch {
					times[fmt.Sprint(e.Key, " ", e.Version)]++
				}
				mu.Unlock()
				once.Do(func() {
					close(begun)
					<-held
				})
				return nil
			}
			var stops []func() error
			for range 2 {
				other := latestOn(t, s.newStore(sqlstore.Options{}), channel)
				stops = append(stops, s.run(outbox.RelayOptions{PollInterval: 20 * time.Millisecond, Logger: quiet},
					other.Publisher(publish, outbox.PublishOptions{Lease: lease})))
			}
			<-begun
			tx := s.begin()
			stage := func(key string) {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				_, err := l.Stage(ctx, tx, key, "new")
				require.NoError(t, err)
			}
			stage("k0000003")
			close(held)
			time.Sleep(upTo(5 * time.Millisecond))
			stage("k0000007")
			stage("k0000001")
			time.Sleep(3 * lease)
			require.NoError(t, tx.Commit())
			eventually(t, "everything to be published", s.empty)
			for _, stop := range stops {
				require.NoError(t, stop())
			}
			require.Len(t, times, 13)
			for version, n := range times {
				require.Equal(t, 1, n, "%s was published %d times", version, n)
			}
		}
	})
}

// TestRelayWorksAtHigherDefaultIsolation is field case S57: a server whose
// default is not READ COMMITTED raises 40001 in the relay's statements.
func TestRelayWorksAtHigherDefaultIsolation(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		for _, level := range []string{"repeatable read", "serializable"} {
			t.Run(level, func(t *testing.T) {
				s.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''` + level + `''', current_database()); END $$`)
				s.db = s.open()
				channel := level
				l := s.latest(channel)
				var mu sync.Mutex
				versions := map[outbox.Version]int{}
				publish := func(_ context.Context, batch []*outbox.Entry[string]) error {
					keys := map[string]bool{}
					mu.Lock()
					defer mu.Unlock()
					for _, e := range batch {
						versions[e.Version]++
						if keys[e.Key] {
							t.Errorf("key %s is twice in one batch", e.Key)
						}
						keys[e.Key] = true
					}
					return nil
				}
				book := new(logbook)
				for range 3 {
					other := latestOn(t, s.newStore(sqlstore.Options{}), channel)
					s.run(book.options(), other.Publisher(publish, outbox.PublishOptions{BatchSize: 5}))
				}
				store := s.newStore(sqlstore.Options{})
				require.Equal(t, level, tableOf(t, s.db, `SHOW default_transaction_isolation`)[0][1:len(level)+1])
				newest := newLedger()
				var stagers sync.WaitGroup
				for i := range 4 {
					stagers.Go(func() {
						c := contest{s: s, store: store, keys: 20, bulk: true, levels: []sql.IsolationLevel{sql.LevelDefault}}
						for n := range 40 {
							if err := c.write(l, newest, i, n); err != nil && !store.Retryable(err) {
								t.Errorf("stager: %v", err)
							}
						}
					})
				}
				stagers.Wait()
				eventually(t, "everything to be published", s.empty)
				mu.Lock()
				defer mu.Unlock()
				for version, n := range versions {
					require.Equal(t, 1, n, "version %d was published %d times", version, n)
				}
				newest.inCommitOrder(t)
				for key, c := range newest.last {
					require.Contains(t, versions, c.version, key)
				}
				require.Empty(t, book.of(outbox.EventTrouble))
				require.Empty(t, book.of(outbox.EventLost))
			})
		}
	})
}

// TestRelayRepeatsWhatFailedAtItsCommit: at SERIALIZABLE a commit may fail after
// all rows of the answer have come. What the second run answers counts alone.
func TestRelayRepeatsWhatFailedAtItsCommit(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		s.exec(`CREATE SEQUENCE commits`)
		s.exec(`CREATE FUNCTION hiccup() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF nextval('commits') = 1 THEN
					RAISE EXCEPTION 'could not serialize access' USING ERRCODE = '40001';
				END IF;
				RETURN NULL;
			END $$`)
		s.exec(s.dialect.Render(`CREATE CONSTRAINT TRIGGER hiccup AFTER UPDATE OR DELETE ON {t:entries}
			DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION hiccup()`))
		hiccup := func() { s.exec(`SELECT setval('commits', 1, false)`) }
		s.stageMany(s.latest("orders"), "k", 6)

		hiccup()
		held := s.claim("orders", 10, time.Minute)
		require.Len(t, held, 6, "rows of the claim that failed are among them")
		hiccup()
		extended, err := s.store.Extend(t.Context(), latestChannel("orders"), held, time.Minute)
		require.NoError(t, err)
		require.Equal(t, allOf(outbox.ResultDone, 6), extended)
		hiccup()
		stager := s.begin()
		_, err = s.latest("orders").Stage(t.Context(), stager, held[0].Key, "held")
		require.NoError(t, err)
		want := allOf(outbox.ResultDone, 6)
		want[0] = outbox.ResultBusy
		require.Equal(t, want, s.settle("orders", outbox.OutcomeDone, 0, held...))
		require.Equal(t, 1, s.count(`SELECT count(*) FROM {t:entries}`))
	})
}
