package integration

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/binary"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
)

// counts counts what a pool asks of its database: on Postgres the round trips,
// told from the protocol's messages; on SQLite the calls of the driver.
type counts struct {
	mu   sync.Mutex
	n    int
	last []string
}

func (c *counts) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	c.last = append(c.last, what)
}

// during returns how many there were while f ran.
func (c *counts) during(f func()) int {
	c.mu.Lock()
	c.n, c.last = 0, nil
	c.mu.Unlock()
	f()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// counted opens a pool on the site's database that counts.
func (s *site) counted(t testing.TB) (*sql.DB, *counts) {
	t.Helper()
	c := new(counts)
	var db *sql.DB
	if s.postgres() {
		config, err := pgx.ParseConfig(s.dsn)
		require.NoError(t, err)
		dial := config.DialFunc
		config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dial(ctx, network, address)
			return &countedWire{Conn: conn, counts: c, startup: true}, err
		}
		db = stdlib.OpenDB(*config)
	} else {
		db = sql.OpenDB(countedConnector{s.db.Driver(), s.dsn, c})
	}
	t.Cleanup(func() { db.Close() })
	return db, c
}

// countedWire reads along what a client sends to Postgres.
type countedWire struct {
	net.Conn
	counts  *counts
	startup bool // the first message has no type
	rest    []byte
}

func (w *countedWire) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		head := 1
		if w.startup {
			head = 0
		}
		if len(w.rest) < head+4 {
			break
		}
		size := head + int(binary.BigEndian.Uint32(w.rest[head:]))
		if len(w.rest) < size {
			break
		}
		if kind := w.rest[0]; !w.startup && (kind == 'Q' || kind == 'S') { // Query, Sync: an answer is waited for
			w.counts.add(string(kind))
		}
		w.startup, w.rest = false, w.rest[size:]
	}
	return w.Conn.Write(b)
}

type countedConnector struct {
	driver driver.Driver
	dsn    string
	counts *counts
}

func (c countedConnector) Driver() driver.Driver { return c.driver }

func (c countedConnector) Connect(context.Context) (driver.Conn, error) {
	conn, err := c.driver.Open(c.dsn)
	if err != nil {
		return nil, err
	}
	return &countedConn{conn.(sqliteConn), c.counts}, nil
}

// sqliteConn is what modernc's connections can do.
type sqliteConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

type countedConn struct {
	sqliteConn
	counts *counts
}

func (c *countedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.counts.add(query)
	return c.sqliteConn.QueryContext(ctx, query, args)
}

func (c *countedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.counts.add(query)
	return c.sqliteConn.ExecContext(ctx, query, args)
}

func (c *countedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	st, err := c.sqliteConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	return &countedStmt{st.(sqliteStmt), query, c.counts}, nil
}

type sqliteStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type countedStmt struct {
	sqliteStmt
	query  string
	counts *counts
}

func (s *countedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.counts.add(s.query)
	return s.sqliteStmt.QueryContext(ctx, args)
}

func (s *countedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.counts.add(s.query)
	return s.sqliteStmt.ExecContext(ctx, args)
}
