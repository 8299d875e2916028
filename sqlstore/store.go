// Package sqlstore keeps an outbox in Postgres or SQLite through database/sql.
//
// A [Store] is an [outbox.LatestStore]: give it to [outbox.NewLatest], on the
// side that stages and on the side that relays. The tables come from package
// migrations, given the same dialect. The package imports no driver: open the
// *sql.DB with pgx/v5/stdlib or modernc.org/sqlite.
//
// Staging runs in the caller's transaction, one statement and one round trip.
// A relay's calls run each in a transaction of their own and need one
// connection at a time, so that a pool of one is enough, though slow.
package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Options of a Store; the zero value works.
type Options struct {
	// Clock judges what is due and whose lease has lapsed. Defaults to the
	// database's clock on Postgres, whatever the hosts' clocks say, and to the
	// host's on SQLite. For tests.
	Clock func() time.Time
}

// Store keeps an outbox in one schema of one database. It is safe for
// concurrent use. Two stores with different schemas or prefixes never meet;
// two with the same share one outbox, though only the hints of a store's own
// Stage calls reach the relays on it.
type Store struct {
	db       *sql.DB
	d        dialect.Dialect
	clock    func() time.Time // nil: the database's
	cursors  cursors
	hinter   outbox.Hinter
	prepared atomic.Pointer[map[string]*sql.Stmt] // by their texts; nil before Check
}

var _ outbox.LatestStore = (*Store)(nil)

// New returns a store on db. It does no I/O: [Store.Check] tells whether the
// database is as it should be. Errors are outbox.ErrInvalid.
func New(db *sql.DB, d dialect.Dialect, o Options) (*Store, error) {
	if db == nil {
		return nil, fmt.Errorf("open store: %w: db is nil", outbox.ErrInvalid)
	}
	if err := d.Validate(); err != nil {
		return nil, fmt.Errorf("open store: %w: %w", outbox.ErrInvalid, err)
	}
	s := &Store{db: db, d: d, clock: o.Clock}
	if s.clock == nil && d.HostClock() {
		s.clock = time.Now
	}
	return s, nil
}

// now is what statements take for the time: nil is the database's clock.
func (s *Store) now() any {
	if s.clock == nil {
		return nil
	}
	return s.clock().UnixMicro()
}

// Transact runs f once in a transaction, commits it, and wakes the relays of
// this process, so that what f staged goes out at once. Where f fails or
// panics the transaction is rolled back. It never runs f again: see
// [Store.Retryable]. An outbox.ErrCommit means that the answer to the COMMIT
// was lost: it may have taken effect.
func (s *Store) Transact(ctx context.Context, o *sql.TxOptions, f func(tx *sql.Tx) error) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	defer conn.Close()
	tx, err := conn.BeginTx(ctx, o)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	defer tx.Rollback() // nothing, once committed
	if err := f(tx); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("commit transaction: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return s.commitError(ctx, conn, err)
	}
	s.Wake()
	return nil
}

// commitError tells a COMMIT that was refused from one whose answer was lost:
// after a refusal the connection still works.
func (s *Store) commitError(ctx context.Context, conn *sql.Conn, err error) error {
	if s.d.Classify(err) == dialect.FaultOther && !errors.Is(err, sql.ErrTxDone) {
		ping, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if conn.PingContext(ping) != nil {
			return fmt.Errorf("commit transaction: %w: %w", outbox.ErrCommit, err)
		}
	}
	return fmt.Errorf("commit transaction: %w", cancelled(ctx, err))
}

// Retryable reports whether err means that the transaction did nothing and may
// work if it is run again as a whole: a serialization failure or deadlock on
// Postgres (40001, 40P01), a database locked by another writer on SQLite.
func (s *Store) Retryable(err error) bool {
	fault := s.d.Classify(err)
	return err != nil && !errors.Is(err, outbox.ErrCommit) && (fault == dialect.FaultRetry || fault == dialect.FaultBusy)
}

// Wake makes the relays on this store look at once. Call it after a commit.
func (s *Store) Wake() { s.hinter.Tell(outbox.Hint{}) }

// Hints implements outbox.RelayStore.
func (s *Store) Hints(f func(outbox.Hint)) (stop func()) { return s.hinter.Listen(f) }

// Pause pauses a channel in every relay of the fleet for d, under a reason
// that shows in the stats: publications in flight end, none begins. A d of 0
// resumes it at once, also from an outage. Refuses a negative d, one of over a
// hundred years, and a bad name or reason, by outbox.ErrInvalid.
func (s *Store) Pause(ctx context.Context, channel string, d time.Duration, reason string) error {
	if err := outbox.ValidChannel(channel); err != nil {
		return fmt.Errorf("pause channel: %w", err)
	}
	if d < 0 || d > 100*365*24*time.Hour {
		return fmt.Errorf("pause channel %q: %w: duration %s is not within 0 and 100 years", channel, outbox.ErrInvalid, d)
	}
	st := s.d.Pause(channel, micros(d), outbox.ErrorText(reason), s.now())
	if err := s.d.Write(ctx, s.db, st, dialect.Once(nothing)); err != nil {
		return s.failed(ctx, err, "pause channel %q", channel)
	}
	if d == 0 {
		s.Wake()
	}
	return nil
}

// Fence raises the versions and tokens to be given out above all that were
// given out before, by the clock of the database (of the host on SQLite). Run
// it once after a restore from a backup, a lossy failover or, where commits
// are not flushed, a crash, before anything is staged. It needs UPDATE on the
// sequences.
func (s *Store) Fence(ctx context.Context) (outbox.Version, outbox.Token, error) {
	var version, token int64
	err := s.d.Write(ctx, s.db, s.d.Fence(s.now()), dialect.Once(func(rows *sql.Rows) error {
		return rows.Scan(&version, &token)
	}))
	if err != nil && s.d.Classify(err) == dialect.FaultGrant {
		return 0, 0, fmt.Errorf("fence: the role lacks UPDATE on the sequences: grant it, or fence as their owner: %w", err)
	}
	if err != nil {
		return 0, 0, s.failed(ctx, err, "fence")
	}
	return outbox.Version(version), outbox.Token(token), nil
}

func nothing(*sql.Rows) error { return nil }

// micros rounds up, so that a wait is never cut to nothing.
func micros(d time.Duration) int64 {
	n := int64(d / time.Microsecond)
	if d%time.Microsecond > 0 {
		n++
	}
	return n
}
