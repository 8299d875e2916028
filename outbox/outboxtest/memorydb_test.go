package outboxtest_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

type rowID struct{ channel, key string }

// memoryRow is a row with what a store knows beside the contract.
type memoryRow struct {
	outbox.Row
	claimed bool           // the present version was, once
	outcome outbox.Outcome // with which its token was settled; 0: it was not
}

// memoryDB is a database of rows with row locks, READ COMMITTED transactions
// and savepoints, or with one writer at a time. database/sql reaches it
// through its driver; statements are Go functions.
type memoryDB struct {
	oneWriter bool

	mu       sync.Mutex
	freed    *sync.Cond // a transaction has ended
	rows     map[rowID]memoryRow
	messages map[messageID]*memoryMessage
	groups   map[groupID]*memoryGroup
	locks    map[any]*memoryTx // by rowID, messageID and groupID
	writer   *memoryTx
	ids      int64
	version  outbox.Version
	token    outbox.Token
	channels map[outbox.Channel]*memoryChannel
}

func newMemoryDB(oneWriter bool) *memoryDB {
	db := &memoryDB{
		oneWriter: oneWriter, rows: map[rowID]memoryRow{}, messages: map[messageID]*memoryMessage{}, groups: map[groupID]*memoryGroup{},
		locks: map[any]*memoryTx{}, channels: map[outbox.Channel]*memoryChannel{},
	}
	db.freed = sync.NewCond(&db.mu)
	return db
}

// open returns the database as database/sql knows it.
func (db *memoryDB) open() *sql.DB { return sql.OpenDB(memoryConnector{db}) }

// view reads what is committed.
func (db *memoryDB) view(f func() error) error {
	db.mu.Lock()
	defer db.mu.Unlock()
	return f()
}

// write runs f in a transaction of its own that never waits for rows.
func (db *memoryDB) write(ctx context.Context, f func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	if err := db.await(ctx, func() bool { return db.writer == nil }); err != nil {
		return err
	}
	return f()
}

// writeAlone runs f when no transaction holds a row.
func (db *memoryDB) writeAlone(ctx context.Context, f func() error) error {
	return db.write(ctx, func() error {
		if err := db.await(ctx, func() bool { return len(db.locks) == 0 }); err != nil {
			return err
		}
		return f()
	})
}

// await waits, with mu held, until ready returns true.
func (db *memoryDB) await(ctx context.Context, ready func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		db.mu.Lock()
		defer db.mu.Unlock()
		db.freed.Broadcast()
	})
	defer stop()
	for !ready() {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		db.freed.Wait()
	}
	return nil
}

// draw returns the next version, with mu held.
func (db *memoryDB) draw(now time.Time) outbox.Version {
	db.version = max(db.version+1, outbox.Version(now.UnixMicro()))
	return db.version
}

func (db *memoryDB) drawEarly(now time.Time) outbox.Version {
	db.mu.Lock()
	v := db.draw(now)
	db.mu.Unlock()
	time.Sleep(time.Millisecond) // a stager that stalls here
	return v
}

// locked returns whether a transaction holds a row.
func (db *memoryDB) locked(id any) bool { return db.locks[id] != nil }

// memoryTx is a transaction: what it wrote, and that at each savepoint.
type memoryTx struct {
	db         *memoryDB
	wrote      map[rowID]memoryRow
	savepoints []map[rowID]memoryRow
	journal    journalWrites
	before     []journalWrites // at each savepoint
	spoilt     bool            // it cannot be committed
}

func newMemoryTx(db *memoryDB) *memoryTx {
	return &memoryTx{db: db, wrote: map[rowID]memoryRow{}, journal: newJournalWrites()}
}

// lock waits until no other transaction holds the row.
func (t *memoryTx) lock(ctx context.Context, id any) error {
	if err := t.db.await(ctx, func() bool { return t.db.locks[id] == nil || t.db.locks[id] == t }); err != nil {
		return err
	}
	t.db.locks[id] = t
	return nil
}

func (t *memoryTx) row(id rowID) (memoryRow, bool) {
	if r, ok := t.wrote[id]; ok {
		return r, true
	}
	r, ok := t.db.rows[id]
	return r, ok
}

func (t *memoryTx) set(id rowID, r memoryRow) {
	if r.ID == 0 {
		t.db.ids++
		r.ID = t.db.ids
	}
	t.wrote[id] = r
}

// end commits, or rolls back, and lets go of the locks.
func (t *memoryTx) end(commit bool) error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	t.finish(commit && !t.spoilt)
	return nil
}

// finish is end with mu held.
func (t *memoryTx) finish(commit bool) {
	if commit {
		maps.Copy(t.db.rows, t.wrote)
		t.journal.commit(t.db)
	}
	maps.DeleteFunc(t.db.locks, func(_ any, holder *memoryTx) bool { return holder == t })
	if t.db.writer == t {
		t.db.writer = nil
	}
	t.db.freed.Broadcast()
}

func (t *memoryTx) Commit() error   { return t.end(true) }
func (t *memoryTx) Rollback() error { return t.end(false) }

type memoryConnector struct{ db *memoryDB }

func (c memoryConnector) Connect(context.Context) (driver.Conn, error) {
	return &memoryConn{db: c.db}, nil
}
func (c memoryConnector) Driver() driver.Driver { return nil }

type memoryConn struct {
	db *memoryDB
	tx *memoryTx
}

var errDriver = errors.New("not supported")

func (c *memoryConn) Prepare(string) (driver.Stmt, error)        { return nil, errDriver }
func (c *memoryConn) Begin() (driver.Tx, error)                  { return nil, errDriver }
func (c *memoryConn) Close() error                               { return nil }
func (c *memoryConn) CheckNamedValue(v *driver.NamedValue) error { return nil }

func (c *memoryConn) BeginTx(ctx context.Context, _ driver.TxOptions) (driver.Tx, error) {
	c.db.mu.Lock()
	defer c.db.mu.Unlock()
	if err := c.db.await(ctx, func() bool { return c.db.writer == nil }); err != nil {
		return nil, err
	}
	c.tx = newMemoryTx(c.db)
	if c.db.oneWriter {
		c.db.writer = c.tx
	}
	return c.tx, nil
}

// QueryContext runs a statement: its argument, a function on the transaction.
func (c *memoryConn) QueryContext(_ context.Context, _ string, args []driver.NamedValue) (driver.Rows, error) {
	c.db.mu.Lock()
	defer c.db.mu.Unlock()
	answer, err := args[0].Value.(func(*memoryTx) (any, error))(c.tx)
	if err != nil {
		return nil, err
	}
	return &memoryRows{answer: answer}, nil
}

func (c *memoryConn) ExecContext(_ context.Context, text string, _ []driver.NamedValue) (driver.Result, error) {
	c.db.mu.Lock()
	defer c.db.mu.Unlock()
	switch text {
	case "SAVEPOINT a":
		c.tx.savepoints = append(c.tx.savepoints, maps.Clone(c.tx.wrote))
		c.tx.before = append(c.tx.before, c.tx.journal.clone())
	case "ROLLBACK TO SAVEPOINT a":
		c.tx.wrote = maps.Clone(c.tx.savepoints[len(c.tx.savepoints)-1])
		c.tx.journal = c.tx.before[len(c.tx.before)-1].clone()
	default:
		return nil, fmt.Errorf("%w: %s", errDriver, text)
	}
	return driver.RowsAffected(0), nil
}

// memoryRows is an answer of one row and one column.
type memoryRows struct{ answer any }

func (r *memoryRows) Columns() []string { return []string{"answer"} }
func (r *memoryRows) Close() error      { return nil }

func (r *memoryRows) Next(dest []driver.Value) error {
	if r.answer == nil {
		return io.EOF
	}
	dest[0], r.answer = r.answer, nil
	return nil
}
