package integration

import (
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// as another server of the same data sees it.
func (s *site) at(dsn string) *site {
	other := *s
	other.dsn = dsn
	other.db = other.open()
	other.store = other.newStore(sqlstore.Options{})
	return &other
}

// A read-only replica that was given by mistake says so to everybody, and
// harms nothing. Once it has become the primary, all go on by themselves.
func TestG10ReplicaGivenByMistake(t *testing.T) {
	if testing.Short() {
		return
	}
	cluster := pgtest.Start(t, pgtest.Options{})
	primary := newSite(t, dialect.Postgres(), "pgx", cluster.DSN())
	primary.stage(primary.latest("states"), "k", "x")
	primary.put(primary.journal("mail"), outbox.Message{Key: "k"}, outbox.Message{Key: "grouped", Group: "g"})
	standby := cluster.Standby(t)
	replica := primary.at(standby.DSN())
	l, j := replica.latest("states"), replica.journal("mail")

	require.ErrorContains(t, replica.store.Check(t.Context()), "read-only replica: connect to the primary")
	for name, write := range map[string]func(tx *sql.Tx) error{
		"stage":   func(tx *sql.Tx) error { _, err := l.Stage(t.Context(), tx, "k", "y"); return err },
		"put":     func(tx *sql.Tx) error { _, err := j.Put(t.Context(), tx, outbox.Message{Key: "k2"}); return err },
		"add":     func(*sql.Tx) error { _, err := j.Add(t.Context(), outbox.Message{Key: "k2"}); return err },
		"claim":   func(*sql.Tx) error { _, err := j.ClaimDue(t.Context(), 10, time.Minute); return err },
		"discard": func(*sql.Tx) error { _, err := j.Discard(t.Context(), outbox.Filter{Key: "k"}); return err },
		"pause":   func(*sql.Tx) error { return replica.store.Pause(t.Context(), "mail", time.Hour, "x") },
		"fence":   func(*sql.Tx) error { _, _, err := replica.store.Fence(t.Context()); return err },
	} {
		tx := replica.begin()
		require.ErrorContains(t, write(tx), "connect to the primary", name)
		require.NoError(t, tx.Rollback())
	}
	require.NoError(t, migrations.Up(t.Context(), replica.db, replica.dialect), "nothing is to be done")
	_, err := replica.store.Stats(t.Context())
	require.NoError(t, err, "what only reads works")
	_, err = j.Get(t.Context(), "grouped")
	require.NoError(t, err)

	var w witness
	var r receiver
	book := new(logbook)
	stop := replica.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}), j.Sender(r.send, outbox.SendOptions{}))
	time.Sleep(1500 * time.Millisecond)
	require.Zero(t, w.len()+r.len())
	require.NotEmpty(t, book.grep("connect to the primary"))
	require.Less(t, book.count(outbox.EventTrouble), 40, "pauses grow, for looks and for the claims of two channels")

	require.NoError(t, cluster.Stop(pgtest.Fast))
	_, err = replica.db.Exec(`SELECT pg_promote()`)
	require.NoError(t, err)
	eventually(t, "the new primary's relay to publish and send", func() bool { return w.len() == 1 && r.len() == 2 })
	require.NoError(t, replica.store.Check(t.Context()))
	require.NoError(t, stop())
}
