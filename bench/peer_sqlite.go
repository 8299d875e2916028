package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/mikestefanello/backlite"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riversqlite"
	"github.com/riverqueue/river/rivermigrate"
	"maragu.dev/goqite"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Config implements backlite.Task: finished tasks are not kept.
func (message) Config() backlite.QueueConfig {
	return backlite.QueueConfig{Name: "bench", MaxAttempts: 5, Backoff: time.Second, Timeout: 10 * time.Second}
}

// A file is an application on SQLite that has every peer's tables.
type file struct {
	dir  string
	one  *sql.DB // a pool of one connection, which River wants and suits goqite and backlite best
	db   *sql.DB // a pool of a few, for this library and bare SQL
	own  *box
	list []*peer
}

const (
	sqliteApp = `CREATE TABLE app (id INTEGER PRIMARY KEY, note TEXT NOT NULL, amount INTEGER NOT NULL)`
	// The columns and indexes of this library's table.
	sqliteRaw = `CREATE TABLE raw (id INTEGER PRIMARY KEY, version INTEGER NOT NULL, due INTEGER NOT NULL, lease_until INTEGER NOT NULL DEFAULT 0,
		token INTEGER NOT NULL DEFAULT 0, staged_at INTEGER NOT NULL, attempt INTEGER NOT NULL DEFAULT 0, tombstone INTEGER NOT NULL DEFAULT 0,
		channel TEXT NOT NULL, key TEXT NOT NULL, headers TEXT NOT NULL DEFAULT '', last_error TEXT NOT NULL DEFAULT '', payload BLOB NOT NULL,
		UNIQUE (channel, key))`
	sqliteRawDue    = `CREATE INDEX raw_due ON raw (channel, due, id)`
	sqliteRawInsert = `INSERT INTO raw (version, due, staged_at, channel, key, payload) VALUES ($1, $1, $1, 'bench', $2, $3)`
	sqliteRawClaim  = `UPDATE raw SET lease_until = $1 + 60000000, token = $2, attempt = attempt + 1
		WHERE id IN (SELECT id FROM raw WHERE channel = 'bench' AND due <= $1 AND lease_until < $1 ORDER BY due, id LIMIT $3) RETURNING id, payload`
	sqliteRawAck = `DELETE FROM raw WHERE id IN (SELECT value FROM json_each($1)) AND token = $2`
)

// openFile makes a database in a directory of its own; synchronous is FULL or
// NORMAL.
func openFile(ctx context.Context, synchronous string) (_ *file, err error) {
	f := &file{}
	if f.dir, err = os.MkdirTemp("", "outbox-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	dsn := dialect.SQLiteDSN(filepath.Join(f.dir, "app.db"))
	dsn = strings.Replace(dsn, "synchronous(FULL)", "synchronous("+synchronous+")", 1)
	if f.one, err = sql.Open("sqlite", dsn); err != nil {
		return nil, err
	}
	f.one.SetMaxOpenConns(1)
	if f.db, err = sql.Open("sqlite", dsn); err != nil {
		return nil, err
	}
	f.db.SetMaxOpenConns(8)
	f.db.SetMaxIdleConns(8)
	var level int
	if err := f.db.QueryRowContext(ctx, `PRAGMA synchronous`).Scan(&level); err != nil {
		return nil, err
	}
	if want := map[string]int{"FULL": 2, "NORMAL": 1}[synchronous]; level != want {
		return nil, fmt.Errorf("open a SQLite file with synchronous %s: it is %d", synchronous, level)
	}
	schema, err := moduleFile(ctx, "maragu.dev/goqite", "schema_sqlite.sql")
	if err != nil {
		return nil, err
	}
	for _, text := range []string{sqliteApp, sqliteRaw, sqliteRawDue, schema} {
		if _, err := f.one.ExecContext(ctx, text); err != nil {
			return nil, err
		}
	}
	if err := installBox(ctx, f.db, dialect.SQLite()); err != nil {
		return nil, err
	}
	if f.own, err = openBox(f.db, dialect.SQLite()); err != nil {
		return nil, err
	}
	if err := f.own.store.Check(ctx); err != nil {
		return nil, err
	}
	f.list = append(f.list, f.limits()...)
	f.list = append(f.list, f.boxes()...)
	for _, make := range []func(context.Context) (*peer, error){f.river, f.goqite, f.backlite} {
		p, err := make(ctx)
		if err != nil {
			return nil, err
		}
		f.list = append(f.list, p)
	}
	return f, nil
}

func (f *file) close() error {
	var err error
	for _, db := range []*sql.DB{f.one, f.db} {
		if db != nil {
			err = errors.Join(err, db.Close())
		}
	}
	return errors.Join(err, os.RemoveAll(f.dir))
}

// clear empties every peer's tables: deletes, since SQLite has no TRUNCATE,
// and empties the WAL.
func (f *file) clear(ctx context.Context, p *peer) error {
	for _, table := range append([]string{"app"}, p.tables...) {
		if _, err := f.db.ExecContext(ctx, `DELETE FROM `+table); err != nil {
			return err
		}
	}
	return f.checkpoint(ctx)
}

func (f *file) checkpoint(ctx context.Context) error {
	_, err := f.db.ExecContext(ctx, `PRAGMA wal_checkpoint(TRUNCATE)`)
	return err
}

func transactIn(ctx context.Context, db *sql.DB, seq int64, f func(tx *sql.Tx) error) error {
	return (&site{std: db}).transact(ctx, seq, f)
}

// filling is a fill by one transaction with a call for each message.
func filling(db *sql.DB, f func(ctx context.Context, tx *sql.Tx, seq int64) error) func(context.Context, int) error {
	return func(ctx context.Context, n int) error {
		return transactIn(ctx, db, 0, func(tx *sql.Tx) error {
			for i := range n {
				if err := f(ctx, tx, int64(i+1)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func (f *file) limits() []*peer {
	insert := func(ctx context.Context, tx *sql.Tx, seq int64) error {
		_, err := tx.ExecContext(ctx, sqliteRawInsert, time.Now().UnixMicro(), keyOf(seq), payload(seq))
		return err
	}
	return []*peer{
		{
			name: base, kind: limit, lacks: "the message",
			stage: func(ctx context.Context, seq int64) error { return transactIn(ctx, f.db, seq, nil) },
		},
		{
			name: "bare insert", kind: limit, settings: "this library's columns and indexes", tables: []string{"raw"},
			stage: func(ctx context.Context, seq int64) error {
				return transactIn(ctx, f.db, seq, func(tx *sql.Tx) error { return insert(ctx, tx, seq) })
			},
		},
		{
			name: rawClaim, kind: limit, settings: "batch 1,000", tables: []string{"raw"}, waiting: `SELECT count(*) FROM raw`,
			fill: filling(f.db, insert),
			relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
				token := int64(0)
				return loops(1, 10*time.Millisecond, func(int) (int, error) {
					token++
					rows, err := rawRows(f.db.QueryContext(ctx, sqliteRawClaim, time.Now().UnixMicro(), token, 1000))
					if err != nil || len(rows) == 0 {
						return 0, err
					}
					ids := make([]string, len(rows))
					for i, r := range rows {
						ids[i] = fmt.Sprint(r.id)
						h(-1, r.payload)
					}
					_, err = f.db.ExecContext(ctx, sqliteRawAck, "["+strings.Join(ids, ",")+"]", token)
					return len(rows), err
				}), nil
			},
		},
	}
}

func (f *file) boxes() []*peer {
	return []*peer{
		{
			name: ownLatest, kind: own, settings: "relay: BatchSize 1000",
			tables: []string{f.own.dialect.Render(`{t:entries}`)}, waiting: f.own.dialect.Render(`SELECT count(*) FROM {t:entries}`),
			stage: func(ctx context.Context, seq int64) error {
				return transactIn(ctx, f.db, seq, func(tx *sql.Tx) error {
					_, err := f.own.latest.Stage(ctx, tx, keyOf(seq), payload(seq))
					return err
				})
			},
			fill: func(ctx context.Context, n int) error { return f.own.stageMany(ctx, 1, n) },
			relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
				return f.own.publish(ctx, o, h)
			},
		},
		{
			name: ownJournal, kind: own, settings: "relay: BatchSender, BatchSize 1000, DeleteOnSent",
			tables:  []string{f.own.dialect.Render(`{t:messages}`), f.own.dialect.Render(`{t:groups}`)},
			waiting: f.own.dialect.Render(`SELECT count(*) FROM {t:messages}`),
			stage: func(ctx context.Context, seq int64) error {
				return transactIn(ctx, f.db, seq, func(tx *sql.Tx) error {
					_, err := f.own.journal.Put(ctx, tx, outbox.Message{Key: keyOf(seq), Payload: payload(seq)})
					return err
				})
			},
			fill: func(ctx context.Context, n int) error { return f.own.putMany(ctx, 1, n, 0, 0) },
			relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
				return f.own.send(ctx, o, h)
			},
		},
	}
}

func (f *file) river(ctx context.Context) (*peer, error) {
	m, err := rivermigrate.New(riversqlite.New(f.one), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	if _, err := m.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return nil, err
	}
	c, err := river.NewClient(riversqlite.New(f.one), &river.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	return &peer{
		name: riverPgx, kind: rival, settings: "riversqlite; " + riverSettings, lacks: riverLacks,
		tables: []string{"river_job"}, waiting: riverWaiting, share: 10,
		stage: func(ctx context.Context, seq int64) error {
			return transactIn(ctx, f.one, seq, func(tx *sql.Tx) error {
				_, err := c.InsertTx(ctx, tx, newMessage(seq), nil)
				return err
			})
		},
		fill: func(ctx context.Context, n int) error {
			return transactIn(ctx, f.one, 0, func(tx *sql.Tx) error {
				_, err := c.InsertManyFastTx(ctx, tx, riverJobs(1, n, nil))
				return err
			})
		},
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			return riverRelay(ctx, o, riversqlite.New(f.one), h)
		},
	}, nil
}

func (f *file) goqite(context.Context) (*peer, error) {
	q := newGoqite(f.one, goqite.SQLFlavorSQLite)
	send := func(ctx context.Context, tx *sql.Tx, seq int64) error {
		return q.SendTx(ctx, tx, goqite.Message{Body: payload(seq)})
	}
	return &peer{
		name: "goqite", kind: rival, settings: "relay: one receiver", lacks: goqiteLacks,
		tables: []string{"goqite"}, waiting: `SELECT count(*) FROM goqite`, share: 10,
		stage: func(ctx context.Context, seq int64) error {
			return transactIn(ctx, f.one, seq, func(tx *sql.Tx) error { return send(ctx, tx, seq) })
		},
		fill: filling(f.one, send),
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			return goqiteRelay(ctx, f.one, goqite.SQLFlavorSQLite, o, h), nil
		},
	}, nil
}

// backliteLog keeps what backlite logs as errors.
type backliteLog struct{ a *alarm }

func (backliteLog) Info(string, ...any) {}
func (l backliteLog) Error(message string, params ...any) {
	l.a.fail(errors.New(message + " " + fmt.Sprint(params...)))
}

func (f *file) backlite(context.Context) (*peer, error) {
	config := backlite.ClientConfig{DB: f.one, ReleaseAfter: time.Hour, NumWorkers: 1}
	c, err := backlite.NewClient(config)
	if err != nil {
		return nil, err
	}
	if err := c.Install(); err != nil {
		return nil, err
	}
	c.Register(backlite.NewQueue(func(context.Context, message) error { return nil }))
	add := func(ctx context.Context, tx *sql.Tx, ms ...backlite.Task) error {
		_, err := c.Add(ms...).Ctx(ctx).Tx(tx).Save()
		return err
	}
	return &peer{
		name: "backlite", kind: rival, settings: "relay: 1,000 workers",
		lacks:  "a unique key, a token: acknowledges by bare id",
		tables: []string{"backlite_tasks", "backlite_tasks_completed"}, waiting: `SELECT count(*) FROM backlite_tasks`, share: 5,
		stage: func(ctx context.Context, seq int64) error {
			return transactIn(ctx, f.one, seq, func(tx *sql.Tx) error { return add(ctx, tx, newMessage(seq)) })
		},
		fill: filling(f.one, func(ctx context.Context, tx *sql.Tx, seq int64) error { return add(ctx, tx, newMessage(seq)) }),
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			var a alarm
			config := backlite.ClientConfig{DB: f.one, ReleaseAfter: time.Hour, NumWorkers: 1000, Logger: backliteLog{&a}}
			c, err := backlite.NewClient(config)
			if err != nil {
				return nil, err
			}
			c.Register(backlite.NewQueue(func(_ context.Context, m message) error { h(m.Seq, nil); return nil }))
			ctx, cancel := context.WithCancel(ctx)
			c.Start(ctx)
			return func() error {
				return a.stop(func() error {
					defer cancel()
					// It may report that its workers are done while its fetcher still reads.
					ctx, end := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
					defer end()
					if !c.Stop(ctx) {
						return errors.New("stop backlite: it still runs after five seconds")
					}
					return nil
				})
			}, nil
		},
	}, nil
}
