package dialect

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"strconv"
	"strings"
)

func (sqlite) read(_ context.Context, db *sql.DB, run func(Querier) error) error { return run(db) }

func (sqlite) write(ctx context.Context, db *sql.DB, run func(Querier) error) error {
	return immediate(ctx, db, func(_ context.Context, q Querier) error { return run(q) })
}

// immediate runs f in a transaction begun with BEGIN IMMEDIATE on a connection
// held for it, whatever the DSN says of transactions. The context counts until
// the write lock is there; then the few statements run to their end, since the
// driver interrupts a statement whose context ends, and SQLite answers that by
// rolling the transaction back.
func immediate(ctx context.Context, db *sql.DB, f func(ctx context.Context, q Querier) error) error {
	conn, err := beginImmediate(ctx, db)
	if err != nil {
		return err
	}
	return endImmediate(conn, f(context.WithoutCancel(ctx), conn))
}

func beginImmediate(ctx context.Context, db *sql.DB) (*sql.Conn, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		// A BEGIN that was interrupted may have begun.
		leave(conn)
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// endImmediate commits, or rolls back where err is not nil.
func endImmediate(conn *sql.Conn, err error) error {
	defer conn.Close()
	if err == nil {
		_, err = conn.ExecContext(context.Background(), "COMMIT")
	}
	if err != nil {
		leave(conn)
	}
	return err
}

// own is immediate, but begins only with the first statement that is not
// ahead: a claim that finds nothing, and a list, need not wait for a writer.
func (sqlite) own(ctx context.Context, db *sql.DB, f func(Runner) error) error {
	var conn *sql.Conn
	err := f(func(c context.Context, st Statement, scan func(Scanner) error) (err error) {
		read := func(rows *sql.Rows) error { return scan(rows) }
		if conn == nil && c.Value(aheadKey{}) != nil {
			return each(ctx, db, st, read)
		}
		if conn == nil {
			if conn, err = beginImmediate(ctx, db); err != nil {
				return err
			}
		}
		return each(context.WithoutCancel(ctx), conn, st, read)
	})
	if conn == nil {
		return err
	}
	return endImmediate(conn, err)
}

type aheadKey struct{}

// ahead marks a statement that reads, and on whose answer no later one relies.
func ahead(ctx context.Context) context.Context { return context.WithValue(ctx, aheadKey{}, true) }

// leave ends whatever transaction a connection is in. A connection that will
// not be left clean is closed rather than given back to the pool.
func leave(conn *sql.Conn) {
	ctx := context.Background()
	if _, err := conn.ExecContext(ctx, "ROLLBACK"); err == nil {
		return
	}
	// No transaction was open, or it cannot be ended: only a BEGIN tells.
	_, err := conn.ExecContext(ctx, "BEGIN")
	if err == nil {
		_, err = conn.ExecContext(ctx, "ROLLBACK")
	}
	if err != nil {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	}
}

// none is the scan of a statement whose answer does not matter.
func none(*sql.Rows) error { return nil }

// toJSON passes many values in one parameter. Only numbers and checked strings go in.
func toJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // not of these types
	}
	return string(b)
}

// callerContext: the driver interrupts a statement whose context ends, SQLite
// answers that by rolling the whole transaction back, and database/sql does
// not notice: what the caller writes next would be committed on its own. So a
// statement of a caller's transaction runs to its end, bounded by busy_timeout.
func (sqlite) callerContext(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// Primary result codes, https://www.sqlite.org/rescode.html.
const (
	sqliteError    = 1
	sqlitePerm     = 3
	sqliteBusy     = 5
	sqliteLocked   = 6
	sqliteReadOnly = 8
)

func (sqlite) classify(err error) Fault {
	code, ok := resultCode(err)
	if !ok {
		if _, other := sqlState(err); other {
			return FaultOtherKind
		}
		return FaultOther
	}
	switch code & 0xff {
	case sqliteBusy, sqliteLocked:
		return FaultBusy
	case sqliteError:
		return FaultSchema // or a syntax error of ours: the caller asks the schema
	case sqlitePerm:
		return FaultGrant
	case sqliteReadOnly:
		return FaultReadOnly
	}
	return FaultAnswered
}

func (sqlite) check(ctx context.Context, db *sql.DB, d Dialect) ([]Finding, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	var version, file, journal string
	var timeout, synchronous int
	for _, q := range []struct {
		text string
		dest any
	}{
		{`SELECT sqlite_version()`, &version},
		{`SELECT coalesce(max(file), '') FROM pragma_database_list WHERE name = ` + quoteText(d.schema), &file},
		{`PRAGMA ` + d.Ident(d.schema) + `.journal_mode`, &journal},
		{`PRAGMA busy_timeout`, &timeout},
		{`PRAGMA ` + d.Ident(d.schema) + `.synchronous`, &synchronous},
	} {
		if err := conn.QueryRowContext(ctx, q.text).Scan(q.dest); err != nil {
			return nil, err
		}
	}
	var fs findings
	fs.fault(file == "" && db.Stats().MaxOpenConnections != 1, "the database is in memory: it ends with its last connection, "+
		"and each connection of the pool may have one of its own; use a file, or SetMaxOpenConns(1)")
	fs.fault(timeout == 0 && file != "", "busy_timeout is 0, so writers fail instead of waiting for each other: "+
		"open the database with dialect.SQLiteDSN, or add _pragma=busy_timeout(5000) to the DSN")
	fs.warn(file != "" && journal != "wal", "journal_mode is %s: readers and the writer block each other; "+
		"open the database with dialect.SQLiteDSN, or add _pragma=journal_mode(WAL) to the DSN", journal)
	fs.warn(synchronous < 2, "synchronous is below FULL: a power cut may undo the last commits, and their versions "+
		"may be given out again; add _pragma=synchronous(FULL) to the DSN")
	deferred, err := sqliteDeferred(ctx, db, conn)
	fs.warn(deferred, "transactions are deferred: one that reads before it stages fails with SQLITE_BUSY at once when another connection "+
		"has written; open the database with dialect.SQLiteDSN, or add _txlock=immediate to the DSN")
	return fs, err
}

// sqliteDeferred reports whether BeginTx leaves the write lock to others. It
// cannot tell with a pool of one connection, nor while somebody else writes.
func sqliteDeferred(ctx context.Context, db *sql.DB, conn *sql.Conn) (bool, error) {
	if db.Stats().MaxOpenConnections == 1 {
		return false, nil
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		if (sqlite{}).classify(err) == FaultBusy {
			return false, nil // it waited for the lock: immediate
		}
		return false, err
	}
	defer tx.Rollback()
	var timeout int
	if err := conn.QueryRowContext(ctx, `PRAGMA busy_timeout`).Scan(&timeout); err != nil {
		return false, err
	}
	if _, err := conn.ExecContext(ctx, `PRAGMA busy_timeout = 0`); err != nil {
		return false, err
	}
	_, taken := conn.ExecContext(ctx, `BEGIN IMMEDIATE`)
	leave(conn)
	_, err = conn.ExecContext(context.WithoutCancel(ctx), `PRAGMA busy_timeout = `+strconv.Itoa(timeout))
	return taken == nil, err
}

func quoteText(s string) string { return `'` + strings.ReplaceAll(s, `'`, `''`) + `'` }
