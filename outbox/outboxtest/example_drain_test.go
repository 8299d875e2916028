package outboxtest_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// A program's test stages through its own code, reads what was staged, and
// publishes it over a failure of the sink, without waiting for the backoff.
func ExampleDrain() {
	_ = testRenaming // called by go test
}

func testRenaming(t *testing.T) {
	c := outboxtest.NewClock(time.Now())
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(t.TempDir(), "test.db")))
	require.NoError(t, err)
	defer db.Close()
	require.NoError(t, migrations.Up(t.Context(), db, dialect.SQLite()))
	store, err := sqlstore.New(db, dialect.SQLite(), sqlstore.Options{Clock: c.Now})
	require.NoError(t, err)
	names, err := outbox.NewLatest(store, outbox.LatestOptions[string]{Channel: "names"})
	require.NoError(t, err)

	sink := map[string]string{}
	publish := func(_ context.Context, batch []*outbox.Entry[string]) error {
		for _, e := range batch {
			if e.Attempt == 1 {
				e.Retry(time.Minute)
				continue
			}
			sink[e.Key] = e.Value
		}
		return nil
	}
	relay, err := outbox.NewRelay(outbox.RelayOptions{}, names.Publisher(publish, outbox.PublishOptions{}))
	require.NoError(t, err)

	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = names.Stage(t.Context(), tx, "42", "new name") // the code under test
	require.NoError(t, err)
	require.Equal(t, "new name", outboxtest.RequireStaged(t, names, tx, "42").Value)
	require.NoError(t, tx.Commit())

	outboxtest.Drain(t, relay, c)
	require.Equal(t, map[string]string{"42": "new name"}, sink)
}
