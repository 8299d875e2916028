package dialect

import (
	"database/sql"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
)

// TestOldSnapshotsAreFound: what keeps dead rows, a snapshot, a write or a
// prepared transaction, is named with what to do about it.
func TestOldSnapshotsAreFound(t *testing.T) {
	c := pgtest.Start(t, pgtest.Options{Settings: []string{"max_prepared_transactions=2"}})
	db, err := sql.Open("pgx", c.DSN())
	require.NoError(t, err)
	defer db.Close()
	found := func(bound time.Duration) (texts []string) {
		var fs findings
		require.NoError(t, pgSnapshots(t.Context(), db, bound, &fs))
		for _, f := range fs {
			require.False(t, f.Fault)
			texts = append(texts, f.Text)
		}
		return texts
	}
	require.Empty(t, found(0))

	reader, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	require.NoError(t, err)
	var pid string
	require.NoError(t, reader.QueryRow(`SELECT pg_backend_pid()::text`).Scan(&pid))
	require.Empty(t, found(time.Hour))
	texts := found(0)
	require.Len(t, texts, 1)
	require.Contains(t, texts[0], "(pid "+pid+", ")
	require.Contains(t, texts[0], "idle in transaction")
	require.Contains(t, texts[0], "pg_terminate_backend("+pid+")")
	require.NoError(t, reader.Rollback())
	require.Empty(t, found(0))

	_, err = db.Exec(`CREATE TABLE x (a int)`)
	require.NoError(t, err)
	writer, err := db.Begin()
	require.NoError(t, err)
	_, err = writer.Exec(`INSERT INTO x VALUES (1)`)
	require.NoError(t, err)
	require.Len(t, found(0), 1)
	_, err = writer.Exec(`PREPARE TRANSACTION 'it''s mine'`)
	require.NoError(t, err)
	_ = writer.Rollback()
	texts = found(0)
	require.Len(t, texts, 1)
	require.Contains(t, texts[0], `the prepared transaction 'it''s mine' has been open for`)
	_, err = db.Exec(`ROLLBACK PREPARED 'it''s mine'`)
	require.NoError(t, err)
	require.Empty(t, found(0))
}
