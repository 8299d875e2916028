package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// traffic is an application that writes without pause, whatever happens.
type traffic struct {
	s    *site
	stop atomic.Bool
	wg   sync.WaitGroup

	mu      sync.Mutex
	answers map[string]error // of the transaction of each key; nil: it took effect
	commits int              // acknowledged
	unknown int              // whose answer was lost
	hot     []outbox.Version // of a key that the first writer stages every time, as acknowledged
}

func (s *site) traffic(writers int) *traffic {
	tr := &traffic{s: s, answers: map[string]error{}}
	l := s.latest("")
	for w := range writers {
		tr.wg.Go(func() {
			for n := 0; !tr.stop.Load(); n++ {
				tr.write(l, fmt.Sprintf("%d-%d", w, n), w == 0)
			}
		})
	}
	s.t.Cleanup(tr.end)
	return tr
}

func (tr *traffic) write(l *outbox.Latest[string], key string, hot bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var version outbox.Version
	err := tr.s.store.Transact(ctx, nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO app (id, note) VALUES ($1, 'x')`, key)
		if err == nil {
			_, err = l.Stage(ctx, tx, key, "x")
		}
		if err == nil && hot {
			version, err = l.Stage(ctx, tx, "hot", key)
		}
		return err
	})
	tr.mu.Lock()
	tr.answers[key] = err
	switch {
	case errors.Is(err, outbox.ErrCommit):
		tr.unknown++
	case err == nil:
		tr.commits++
		if hot {
			tr.hot = append(tr.hot, version)
		}
	}
	tr.mu.Unlock()
	if err != nil {
		time.Sleep(10 * time.Millisecond) // the server is away
	}
}

func (tr *traffic) end() {
	tr.stop.Store(true)
	tr.wg.Wait()
}

// acknowledged counts the commits so far.
func (tr *traffic) acknowledged() int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.commits
}

// check compares the commits' answers with what is in the database and with
// what was published: all three must tell of the same transactions.
func (tr *traffic) check(w *witness) {
	t := tr.s.t
	t.Helper()
	tr.end()
	tr.s.db = tr.s.open() // the old pool's connections were cut
	eventually(t, "all to be published and settled", tr.s.empty)
	newest := w.newest()
	written := map[string]bool{}
	rows, err := tr.s.db.Query(`SELECT id FROM app`)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var id string
		require.NoError(t, rows.Scan(&id))
		written[id] = true
		require.Contains(t, newest, id, "committed, so published")
	}
	require.NoError(t, rows.Err())
	require.Len(t, newest, len(written)+1, "nothing was published that did not commit")
	for key, answer := range tr.answers {
		if !errors.Is(answer, outbox.ErrCommit) {
			require.Equal(t, answer == nil, written[key], "the answer %v of %s", answer, key)
		}
	}
	for i := 1; i < len(tr.hot); i++ {
		require.Greater(t, tr.hot[i], tr.hot[i-1], "versions grow in the order of commits")
	}
	require.GreaterOrEqual(t, newest["hot"], tr.hot[len(tr.hot)-1])
	t.Logf("%d commits, %d more with an unknown outcome, %d published", tr.commits, tr.unknown, w.len())
}

// A server that dies as by a power cut, again and again, under writers and a
// relay: the relay heals by itself and every commit goes out.
func TestG7DatabaseKilledUnderLoadLosesNothing(t *testing.T) {
	if testing.Short() {
		return
	}
	const lease = 2 * time.Second
	cluster := pgtest.Start(t, pgtest.Options{Durable: true})
	s := newSite(t, dialect.Postgres(), "pgx", cluster.DSN())
	var w witness
	book := new(logbook)
	stop := s.run(book.options(), s.latest("").Publisher(w.publish, outbox.PublishOptions{Lease: lease}))
	tr := s.traffic(4)
	for range 3 {
		before := tr.acknowledged()
		eventually(t, "traffic, and the relay at work", func() bool { return tr.acknowledged() > before+50 && w.len() > 0 })
		require.NoError(t, cluster.Kill())
		require.NoError(t, cluster.Start())
	}
	before, published := tr.acknowledged(), w.len()
	eventually(t, "all to work again", func() bool { return tr.acknowledged() > before+50 && w.len() > published+50 })
	tr.check(&w)
	eventually(t, "the relay to say that all is well", func() bool { return book.count(outbox.EventRecover) > 0 })
	require.NoError(t, stop())
	require.Empty(t, book.grep("level=ERROR"))
}

// Every connection is cut by the server, many times.
func TestG7ConnectionsTerminatedUnderLoadLoseNothing(t *testing.T) {
	if testing.Short() {
		return
	}
	s := onPostgres(t)
	var w witness
	stop := s.run(new(logbook).options(), s.latest("").Publisher(w.publish, outbox.PublishOptions{Lease: 2 * time.Second}))
	tr := s.traffic(4)
	admin := s.open()
	for range 20 {
		before := tr.acknowledged()
		eventually(t, "traffic", func() bool { return tr.acknowledged() > before+5 })
		_, err := admin.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		require.NoError(t, err)
	}
	tr.check(&w)
	require.NoError(t, stop())
}

// While the database is away the relay asks seldom, says so seldom, and goes
// on by itself when it is back.
func TestG7DatabaseAwayIsAskedSeldom(t *testing.T) {
	if testing.Short() {
		return
	}
	const away = 2500 * time.Millisecond
	cluster := pgtest.Start(t, pgtest.Options{})
	s := newSite(t, dialect.Postgres(), "pgx", cluster.DSN())
	l := s.latest("")
	var w witness
	book := new(logbook)
	stop := s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}))
	s.stage(l, "before", "x")
	eventually(t, "the first value", func() bool { return w.len() == 1 })

	require.NoError(t, cluster.Stop(pgtest.Fast))
	time.Sleep(away)
	failed, lines := book.count(outbox.EventTrouble), len(book.noise())
	require.NoError(t, cluster.Start())
	back := time.Now()
	s.db = s.open()
	s.stage(l, "after", "x")
	eventually(t, "the relay to go on", func() bool { return w.len() == 2 })
	require.Less(t, time.Since(back), 10*time.Second+slack, "within the longest pause")

	require.NotZero(t, failed)
	require.Less(t, failed, 20, "pauses grow from 100 ms to 10 s, for looks and for claims")
	require.NotZero(t, lines)
	require.LessOrEqual(t, lines, 8)
	eventually(t, "the log to say so", func() bool { return len(book.grep("store call works again")) > 0 })
	require.NoError(t, stop())
}

// A database that comes back without the tables, as one restored from the
// wrong backup does, is waited for like any other.
func TestG7TablesThatVanishAreWaitedFor(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		var w witness
		book := new(logbook)
		stop := s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}))
		first := s.stage(l, "k", "one")
		eventually(t, "the first value", func() bool { return w.len() == 1 })
		require.NoError(t, migrations.Down(t.Context(), s.db, s.dialect, true))
		time.Sleep(1500 * time.Millisecond)
		require.NotZero(t, book.count(outbox.EventTrouble))
		require.Less(t, book.count(outbox.EventTrouble), 20)
		require.NotEmpty(t, book.grep("run the migrations"), "the log says what is wrong")

		require.NoError(t, migrations.Up(t.Context(), s.db, s.dialect))
		second := s.stage(l, "k", "two")
		eventually(t, "the relay to go on", func() bool { return w.len() == 2 })
		require.Greater(t, second, first, "a reinstall never goes back")
		require.NoError(t, stop())
	})
}

// A server that takes no writes for a while, as one that is being failed over.
func TestG7ReadOnlyDatabaseIsWaitedFor(t *testing.T) {
	if testing.Short() {
		return
	}
	s := onPostgres(t)
	l := s.latest("")
	admin := s.open()
	readOnly := func(on string) {
		_, err := admin.Exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = ` + on + `', current_database()); END $$`)
		require.NoError(t, err)
		_, err = admin.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		require.NoError(t, err)
	}
	var w witness
	book := new(logbook)
	stop := s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}))
	s.stage(l, "before", "x")
	eventually(t, "the first value", func() bool { return w.len() == 1 })

	readOnly("on")
	fresh, err := sqlstore.New(s.open(), s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	require.ErrorContains(t, fresh.Check(t.Context()), "read-only")
	tx, err := s.open().BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = l.Stage(t.Context(), tx, "k", "y")
	require.ErrorContains(t, err, "connect to the primary")
	require.NoError(t, tx.Rollback())

	readOnly("off")
	s.db = s.open()
	s.stage(l, "after", "x")
	eventually(t, "the relay to go on", func() bool { return len(w.of("after")) == 1 && s.empty() })
	require.NoError(t, stop())
}
