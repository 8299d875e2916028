package sink

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// Sink writes versioned rows to one table and never lets an older version
// replace a newer one. It is safe for concurrent use, and any number of sinks,
// in any number of processes, may write to one table.
type Sink struct {
	db      *sql.DB
	options Options
	table   string // quoted, with schema
	text    statements
}

// statements are what a database needs said its own way.
type statements interface {
	// create makes the table, if it does not exist, in any number of processes at once.
	create(ctx context.Context, db *sql.DB) error
	// limits bounds the rows of one upsert, and the bytes of their keys and payloads.
	limits() (rows, bytes int)
	// upsert returns the guarded statement for rows, which are arranged.
	upsert(rows []numbered) (query string, args []any)
	get(key string) (query string, args []any)
	// purge deletes up to purgeChunk tombstones older than age.
	purge(age time.Duration) (query string, args []any)
	// inTx returns the context for a statement in the caller's transaction.
	inTx(ctx context.Context) (context.Context, error)
}

// purgeChunk bounds the rows that one statement of Purge deletes.
const purgeChunk = 1000

// New returns a sink for the table that o names, in the database db. It checks
// its arguments (ErrInvalid) and does no I/O; see [Sink.Check].
func New(db *sql.DB, d dialect.Dialect, o Options) (*Sink, error) {
	if db == nil {
		return nil, fmt.Errorf("sink: %w: the *sql.DB is nil", ErrInvalid)
	}
	if err := d.Validate(); err != nil {
		return nil, fmt.Errorf("sink: %w: %w", ErrInvalid, err)
	}
	o = o.withDefaults(d)
	if err := o.validate(d); err != nil {
		return nil, fmt.Errorf("sink: %w", err)
	}
	s := &Sink{db: db, options: o, table: d.Ident(o.Schema) + "." + d.Ident(o.Table)}
	if d.Name() == "sqlite" {
		s.text = newSQLite(d, o, s.table)
	} else {
		s.text = newPostgres(d, o, s.table)
	}
	return s, nil
}

// Create makes the table, and a partial index that Purge looks for tombstones
// in, if there is no such table. One that exists is left as it is: Check tells
// whether it serves. Any number of processes may call it at once.
func (s *Sink) Create(ctx context.Context) error {
	if err := s.text.create(ctx, s.db); err != nil {
		return fmt.Errorf("sink: create %s: %w", s.table, explain(err))
	}
	return nil
}

// Check runs the upsert without a row, so that a table that is missing or does
// not fit (ErrTable), a missing grant or a read-only server is known at start
// and not by the first entry.
func (s *Sink) Check(ctx context.Context) error {
	query, args := s.text.upsert(nil)
	if _, err := s.db.ExecContext(ctx, query, args...); err != nil {
		return fmt.Errorf("sink: check %s: %w", s.table, explain(err))
	}
	return nil
}

// Result counts what became of rows.
type Result struct {
	Applied int // written
	// Stale rows were not needed: the table, or another row of the call, has
	// the same version or a newer one. That is success, and no news.
	Stale int
}

// Apply writes each row whose version is greater than what the table has of
// its key; Deleted ones as tombstones. Order and repetition do not matter: a
// key given twice keeps its highest version, a version given again changes
// nothing.
//
// One statement writes up to 10,000 rows (SQLite: 1,000) or 16 MiB; a larger
// call is several. Every statement is its own transaction, so after an error,
// or a context cancelled, some rows may have been written: call Apply again,
// with the same rows or newer ones.
//
// Where values of single rows are refused (a CHECK constraint, JSON that does
// not fit its column) the others are written nevertheless, by halving the
// batch, and the error is a [*RowsError]. An error that wraps ErrTable needs
// someone to change the table. Any other is the driver's, and worth another
// try.
func (s *Sink) Apply(ctx context.Context, rows []Row) (Result, error) {
	arranged, refused := s.arrange(rows)
	result := Result{Stale: len(rows) - len(refused) - len(arranged)}
	for _, chunk := range s.chunks(arranged) {
		bad, err := s.applyChunk(ctx, chunk, &result)
		refused = append(refused, bad...)
		if err != nil {
			return result, fmt.Errorf("sink: apply to %s: %w", s.table, explain(err))
		}
	}
	return result, s.refuse(refused)
}

// ApplyIn is Apply inside the caller's transaction, with which it commits or
// rolls back. Rows that break a rule of [Row] are told in a [*RowsError] before
// anything is written. Any error of the database is returned as it came, and on
// Postgres the transaction is then lost: a RowsError for refused values only
// Apply can give.
//
// Postgres locks the rows of a call in the order of their keys until the
// transaction ends. Two transactions that make several calls each may still
// deadlock (40P01); at REPEATABLE READ and above a row changed meanwhile is a
// serialization failure (40001). Both are for the caller to try again.
//
// On SQLite the context is looked at once and then no more, since a statement
// interrupted in the middle rolls the whole transaction back without
// database/sql knowing it; a statement waits for the one writer at most
// busy_timeout.
func (s *Sink) ApplyIn(ctx context.Context, tx *sql.Tx, rows []Row) (Result, error) {
	if tx == nil {
		return Result{}, fmt.Errorf("sink: apply to %s: %w: the *sql.Tx is nil", s.table, ErrInvalid)
	}
	ctx, err := s.text.inTx(ctx)
	if err != nil {
		return Result{}, fmt.Errorf("sink: apply to %s: %w", s.table, err)
	}
	arranged, refused := s.arrange(rows)
	if len(refused) > 0 {
		return Result{}, s.refuse(refused)
	}
	result := Result{Stale: len(rows) - len(arranged)}
	for _, chunk := range s.chunks(arranged) {
		if err := s.write(ctx, tx, chunk, &result); err != nil {
			return result, fmt.Errorf("sink: apply to %s: %w", s.table, explain(err))
		}
	}
	return result, nil
}

func (s *Sink) chunks(rows []numbered) [][]numbered {
	maxRows, maxBytes := s.text.limits()
	return chunks(rows, maxRows, maxBytes)
}

// applyChunk writes rows in one statement. If some row's values are refused it
// halves them until those rows are alone.
func (s *Sink) applyChunk(ctx context.Context, rows []numbered, result *Result) ([]RowError, error) {
	err := s.write(ctx, s.db, rows, result)
	switch {
	case err == nil:
		return nil, nil
	case !refusesRow(err):
		return nil, err
	case len(rows) == 1:
		return []RowError{{Index: rows[0].index, Key: rows[0].Key, Err: err}}, nil
	}
	half := len(rows) / 2
	left, err := s.applyChunk(ctx, rows[:half], result)
	if err != nil {
		return left, err
	}
	right, err := s.applyChunk(ctx, rows[half:], result)
	return append(left, right...), err
}

// execer is a *sql.DB or a *sql.Tx.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// write runs one guarded statement. A row is counted as changed by the database
// only where the guard let it through.
func (s *Sink) write(ctx context.Context, on execer, rows []numbered, result *Result) error {
	query, args := s.text.upsert(rows)
	done, err := on.ExecContext(ctx, query, args...)
	if err != nil {
		return err
	}
	changed, err := done.RowsAffected()
	if err != nil {
		return err
	}
	result.Applied += int(changed)
	result.Stale += len(rows) - int(changed)
	return nil
}

func (s *Sink) refuse(rows []RowError) error {
	if len(rows) == 0 {
		return nil
	}
	slices.SortFunc(rows, func(a, b RowError) int { return a.Index - b.Index })
	return &RowsError{Table: s.table, Rows: rows}
}

// Get returns what the table has of a key, a tombstone included, or an error
// that wraps ErrNotFound. With Options.Columns the Payload is nil: select the
// columns yourself.
func (s *Sink) Get(ctx context.Context, key string) (Row, error) {
	row := Row{Key: key}
	query, args := s.text.get(key)
	var isNull bool // modernc reads an empty BLOB as nil
	err := s.db.QueryRowContext(ctx, query, args...).Scan(&row.Version, &row.Deleted, &row.Payload, &isNull)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return Row{}, fmt.Errorf("sink: get key %q from %s: %w", key, s.table, ErrNotFound)
	case err != nil:
		return Row{}, fmt.Errorf("sink: get key %q from %s: %w", key, s.table, explain(err))
	case !isNull && row.Payload == nil:
		row.Payload = []byte{}
	}
	return row, nil
}

// Purge deletes the tombstones that are older than age, and returns how many.
//
// A tombstone is what keeps a late write of an older version from bringing its
// key back to life, so age must be longer than the latest such a write can
// come: the attempt timeout of the outbox, plus whatever can hold a publication
// up on its way (a process or a machine that was paused, a retrying proxy, a
// queue in between). 24 hours is ample for a relay that writes to this database
// itself; behind a broker take its retention. Zero and less are ErrInvalid.
//
// It deletes 1,000 at a time, skips what a transaction holds, and may run
// beside anything else. With a table of your own, give it an index on the
// DeletedAt column WHERE that is not null.
func (s *Sink) Purge(ctx context.Context, age time.Duration) (int, error) {
	if age <= 0 {
		return 0, fmt.Errorf("sink: purge %s: %w: the age %s is not positive", s.table, ErrInvalid, age)
	}
	purged := 0
	for {
		query, args := s.text.purge(age)
		done, err := s.db.ExecContext(ctx, query, args...)
		if err != nil {
			return purged, fmt.Errorf("sink: purge %s: %w", s.table, explain(err))
		}
		n, err := done.RowsAffected()
		if err != nil {
			return purged, fmt.Errorf("sink: purge %s: %w", s.table, err)
		}
		purged += int(n)
		if n < purgeChunk {
			return purged, nil
		}
	}
}
