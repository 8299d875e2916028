package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// restored requires of a copy of the site's data, older than the site, that it
// works as the original did once it has been fenced.
func (s *site) restored(t *testing.T, last outbox.Version) {
	t.Helper()
	require.NoError(t, s.store.Check(t.Context()))
	_, _, err := s.store.Fence(t.Context())
	require.NoError(t, err)
	l, j := s.latest("states"), s.journal("mail")
	require.Greater(t, s.stage(l, "restored", "x"), last, "above what was staged since the copy was made")
	s.put(j, outbox.Message{Key: "restored", Group: "g"})
	var w witness
	var r receiver
	book := new(logbook)
	stop := s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}), j.Sender(r.send, outbox.SendOptions{Order: outbox.Skip}))
	eventually(t, "all of the copy to go out", func() bool { return s.empty() && s.unfinished() == 0 })
	require.NoError(t, stop())
	require.Contains(t, r.keys(), "restored")
	require.Empty(t, book.of(outbox.EventTrouble), "%q", book.noise())
}

// What pg_dump and pg_restore bring to a new cluster is the whole outbox: its
// rows in every state, its functions with their settings, its sequences.
func TestDumpIsRestoredIntoANewCluster(t *testing.T) {
	if testing.Short() {
		return
	}
	cluster := pgtest.Start(t, pgtest.Options{})
	for _, names := range [][2]string{{"", ""}, {"my-schema", `a"b`}} {
		s := newSite(t, dialect.Postgres(), "pgx", cluster.DSN())
		if names[0] != "" {
			s = s.in(t, names[0], names[1])
		}
		l, j := s.latest("states"), s.journal("mail")
		s.stageMany(l, "k", 20)
		_, err := s.store.ClaimRows(t.Context(), outbox.Claim{Channel: "states", Limit: 5, Lease: time.Second, Full: true})
		require.NoError(t, err)
		s.put(j, append(letters("plain", 10, 0), letters("grouped", 10, 3)...)...)
		s.sendOnce(j, func(_ context.Context, m *outbox.Record) (string, error) {
			return "", map[byte]error{'0': nil, '1': outbox.Permanent(errDown), '2': outbox.Unknown(errDown)}[m.Key[len(m.Key)-1]]
		}, outbox.SendOptions{OnUnknown: outbox.Park, BatchSize: 5})
		before := append(s.entries(), s.messages()...)

		dump := cluster.Command("pg_dump", "--format=custom", "--file=dump", "--dbname="+s.dsn) // where cluster has its files
		out, err := dump.CombinedOutput()
		require.NoError(t, err, "%s", out)
		last := s.stage(l, "since", "x")
		other := pgtest.Start(t, pgtest.Options{})
		restore := cluster.Command("pg_restore", "--exit-on-error", "--dbname="+other.DSN(), "dump")
		out, err = restore.CombinedOutput()
		require.NoError(t, err, "%s", out)

		copied := s.at(other.DSN())
		require.Equal(t, before, append(copied.entries(), copied.messages()...))
		copied.restored(t, last)
		_, err = s.db.Exec(`DROP TABLE app`)
		require.NoError(t, err)
	}
}

// A SQLite file is copied while it is in use with VACUUM INTO: the copy has
// whole transactions, and what they told the outbox with what they did.
func TestSQLiteFileIsCopiedWhileInUse(t *testing.T) {
	s := onSQLite(t)
	l, j := s.latest("states"), s.journal("mail")
	var last atomic.Int64
	var writers sync.WaitGroup
	done := make(chan struct{})
	for n := range 3 {
		writers.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				default:
				}
				key := fmt.Sprint(n, " ", i)
				err := s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
					_, err := tx.Exec(`INSERT INTO app (id, note) VALUES ($1, 'x')`, key)
					v, stageErr := l.Stage(t.Context(), tx, key, "x")
					_, putErr := j.Put(t.Context(), tx, outbox.Message{Key: key, Group: fmt.Sprint(n)})
					last.Store(max(last.Load(), int64(v)))
					return errors.Join(err, stageErr, putErr)
				})
				if err != nil {
					t.Errorf("transaction %s: %v", key, err)
					return
				}
			}
		})
	}
	var copies []string
	for n := range 4 {
		time.Sleep(50 * time.Millisecond)
		copies = append(copies, filepath.Join(t.TempDir(), fmt.Sprint("copy ", n, ".db")))
		s.exec(`VACUUM INTO '` + copies[n] + `'`)
	}
	close(done)
	writers.Wait()
	rows := 0
	for _, file := range copies {
		c := s.at(dialect.SQLiteDSN(file))
		require.Equal(t, 0, c.count(`SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'`))
		for _, table := range []string{"entries", "messages"} {
			require.Zero(t, c.count(`SELECT (SELECT count(*) FROM app WHERE id NOT IN (SELECT key FROM {t:`+table+`}))
				+ (SELECT count(*) FROM {t:`+table+`} WHERE key NOT IN (SELECT id FROM app))`))
		}
		n := c.count(`SELECT count(*) FROM app`)
		require.Greater(t, n, rows, "it was in use")
		rows = n
		c.restored(t, outbox.Version(last.Load()))
	}
}
