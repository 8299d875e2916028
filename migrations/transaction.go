package migrations

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
	"github.com/pressly/goose/v3/lock"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// transaction is one run of steps. goose brackets a run, on one connection,
// with its session locker, and this is the locker: locking begins a
// transaction that excludes all other runs, unlocking ends it. goose is told
// to begin none itself (WithIsolateDDL).
//
// A session lock, goose's own way, would not do. Behind a pooler in
// transaction mode the lock, the steps and the unlock run in different
// sessions; the lock stays in one that nobody can name, and every later start
// waits for it. For SQLite goose has no lock at all. And a step's effect and
// its row in the version table would be atomic, but not the run.
//
// It is goose's version table too, because goose's own would look for a name
// with a quote or a dot in it in vain, and creates the table before it locks.
type transaction struct {
	*install
	begun  func(context.Context, *sql.Conn) error // first thing inside; may be nil
	finish func(context.Context, *sql.Conn) error // last thing inside; may be nil
	last   int64                                  // the step whose record ends the run
	done   bool                                   // it was recorded: commit
	failed error                                  // why it did not begin
}

var (
	_ lock.SessionLocker     = (*transaction)(nil)
	_ database.StoreExtender = (*transaction)(nil)
)

func (t *transaction) provider() (*goose.Provider, error) {
	// The provider is never closed: that would close the caller's db.
	return goose.NewProvider(goose.DialectCustom, t.db, t.files,
		goose.WithStore(t),
		goose.WithSessionLocker(t),
		goose.WithIsolateDDL(true),
		goose.WithDisableGlobalRegistry(true),
		goose.WithLogger(goose.NopLogger()),
	)
}

// run lets goose make steps in t.
func (in *install) run(ctx context.Context, t *transaction, steps func(context.Context, *goose.Provider) error) error {
	p, err := t.provider()
	if err != nil {
		return err
	}
	sources := p.ListSources()
	t.last = sources[len(sources)-1].Version
	if t.finish != nil { // on the way down
		t.last = sources[0].Version
	}
	err = steps(ctx, p)
	var partial *goose.PartialError
	switch {
	case t.failed != nil:
		return t.failed
	case errors.As(err, &partial):
		return fmt.Errorf("run %s (%s): %w", path.Base(partial.Failed.Source.Path), partial.Failed.Direction, partial.Err)
	}
	return err
}

func (t *transaction) SessionLock(ctx context.Context, conn *sql.Conn) error {
	err := t.e.begin(ctx, conn)
	if err == nil && t.begun != nil {
		err = t.begun(ctx, conn)
	}
	if err != nil {
		leave(conn)
		t.failed = err
	}
	return err
}

func (t *transaction) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	if !t.done {
		leave(conn)
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, t.wait) // goose's has no end
	defer cancel()
	if t.finish != nil {
		if err := t.finish(ctx, conn); err != nil {
			leave(conn)
			return err
		}
	}
	if _, err := conn.ExecContext(ctx, "COMMIT"); err != nil {
		leave(conn)
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// leave rolls back. A connection that will not is closed, lest it be given
// back to the pool with our transaction open.
func leave(conn *sql.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := conn.ExecContext(ctx, "ROLLBACK"); err != nil {
		conn.Raw(func(any) error { return driver.ErrBadConn })
	}
}

// patiently runs f again while others are in its way, and says of an error
// what to do about it.
func (in *install) patiently(ctx context.Context, f func(context.Context) error) error {
	deadline := time.Now().Add(in.wait)
	for {
		err := f(ctx)
		if err == nil {
			return nil
		}
		fault := in.d.Classify(err)
		if fault != dialect.FaultBusy && fault != dialect.FaultRetry || time.Now().After(deadline) {
			return in.explain(err)
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// explain adds the remedy where there is one.
func (in *install) explain(err error) error {
	switch in.d.Classify(err) {
	case dialect.FaultGrant:
		return fmt.Errorf("the role lacks a right: migrate as the owner of the schema, or grant SELECT on the two tables to who only looks: %w", err)
	case dialect.FaultReadOnly:
		return fmt.Errorf("the database takes no writes: connect to the primary: %w", err)
	case dialect.FaultBusy:
		return fmt.Errorf("others have been writing for %s: %w", in.wait, err)
	}
	return err
}

// The version table.

func (t *transaction) Tablename() string { return t.d.Render(`{t:migrations}`) }

// TableExists tells goose, which asks outside the transaction too, not to
// create the table: prepare does, inside.
func (t *transaction) TableExists(context.Context, database.DBTxConn) (bool, error) { return true, nil }

func (t *transaction) CreateVersionTable(context.Context, database.DBTxConn) error {
	return errors.ErrUnsupported
}

func (t *transaction) Insert(ctx context.Context, q database.DBTxConn, r database.InsertRequest) error {
	return t.record(ctx, q, r.Version, `INSERT INTO {t:migrations} (version_id, is_applied) VALUES ({version}, true)`)
}

func (t *transaction) Delete(ctx context.Context, q database.DBTxConn, version int64) error {
	return t.record(ctx, q, version, `DELETE FROM {t:migrations} WHERE version_id = {version}`)
}

// record notes a step that was made. Numbers stand in the text, since a pooler
// may not know of the prepared statements that a driver makes for parameters.
func (t *transaction) record(ctx context.Context, q database.DBTxConn, version int64, text string) error {
	text = t.d.Render(strings.Replace(text, "{version}", strconv.FormatInt(version, 10), 1))
	if _, err := q.ExecContext(ctx, text); err != nil {
		return fmt.Errorf("write table %s: %w", t.Tablename(), err)
	}
	t.done = version == t.last
	return nil
}

func (t *transaction) GetMigration(ctx context.Context, q database.DBTxConn, version int64) (*database.GetMigrationResult, error) {
	applied, err := t.versions(ctx, q)
	if err != nil {
		return nil, err
	}
	at, ok := applied[version]
	if !ok {
		return nil, database.ErrVersionNotFound
	}
	return &database.GetMigrationResult{Timestamp: at, IsApplied: true}, nil
}

func (t *transaction) GetLatestVersion(ctx context.Context, q database.DBTxConn) (int64, error) {
	list, err := t.ListMigrations(ctx, q)
	if err != nil {
		return 0, err
	}
	return list[0].Version, nil
}

// ListMigrations returns the applied steps, the last one first, and version 0,
// which goose takes for the empty database.
func (t *transaction) ListMigrations(ctx context.Context, q database.DBTxConn) ([]*database.ListMigrationsResult, error) {
	applied, err := t.versions(ctx, q)
	if err != nil {
		return nil, err
	}
	versions := slices.Sorted(maps.Keys(applied))
	if len(versions) == 0 || versions[0] != 0 {
		versions = slices.Insert(versions, 0, 0)
	}
	slices.Reverse(versions)
	list := make([]*database.ListMigrationsResult, len(versions))
	for i, v := range versions {
		list[i] = &database.ListMigrationsResult{Version: v, IsApplied: true}
	}
	return list, nil
}
