package migrations

import (
	"context"
	"database/sql"

	"github.com/pressly/goose/v3/database"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// sqlite: runs exclude each other with the database's one write lock, taken
// before anything is read, whatever the DSN says of transactions. Where
// another writer has it for longer than busy_timeout, the run is tried again.
//
// A context that ends makes the driver interrupt the statement, and SQLite may
// answer that by rolling the transaction back: goose makes no further step
// after an error, so nothing is written outside of it.
type sqlite struct{ d dialect.Dialect }

func (sqlite) begin(ctx context.Context, conn *sql.Conn) error {
	_, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE")
	return err
}

func (s sqlite) exists(ctx context.Context, q database.DBTxConn, table string) (bool, error) {
	var found bool
	err := q.QueryRowContext(ctx, s.d.Render(`
		SELECT EXISTS (SELECT 1 FROM {schema}.sqlite_master WHERE type = 'table' AND name = ?1 COLLATE NOCASE)`),
		s.d.Prefix()+table).Scan(&found)
	return found, err
}

// createSchema: a schema is a file that the application has attached.
func (sqlite) createSchema(context.Context, *sql.Conn) error { return nil }

// createVersions: the columns that goose knows, but of a version only one row.
func (sqlite) createVersions() string {
	return `CREATE TABLE {t:migrations} (
		id         INTEGER PRIMARY KEY,
		version_id INTEGER NOT NULL UNIQUE,
		is_applied INTEGER NOT NULL,
		tstamp     TIMESTAMP NOT NULL DEFAULT (datetime('now'))
	)`
}

// listVersions has no column of type TIMESTAMP, of which drivers make various things.
func (sqlite) listVersions() string {
	return `SELECT version_id, CAST(strftime('%s', tstamp) AS INTEGER) * 1000000 FROM {t:migrations}`
}

// lockTable: the transaction has the whole database.
func (sqlite) lockTable(context.Context, *sql.Conn, string) error { return nil }

func (sqlite) dropSchema(context.Context, *sql.Conn) error { return nil }
