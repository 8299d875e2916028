package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Check implements outbox.RelayStore: nil, or all that is wrong and the remedy
// for each. What only weakens a promise is left to [Store.Findings]. Call it
// when a program starts: on SQLite, staging is then also twice as fast.
func (s *Store) Check(ctx context.Context) error {
	fs, err := s.Findings(ctx)
	if err != nil {
		return err
	}
	var faults []error
	for _, f := range fs {
		if f.Fault {
			faults = append(faults, errors.New(f.Text))
		}
	}
	if len(faults) > 0 {
		return fmt.Errorf("check %s: %w", s.d.Name(), errors.Join(faults...))
	}
	return s.failed(ctx, s.prepare(ctx), "prepare statements")
}

// Finding is something about the database that a person should know.
type Finding = dialect.Finding

// Findings returns everything that is wrong with the settings, the grants or
// the server, faults and warnings, each with its remedy. A schema that is
// missing, outdated, newer or foreign is an outbox.ErrSchema.
func (s *Store) Findings(ctx context.Context) ([]Finding, error) {
	if err := s.checkSchema(ctx, s.reader(ctx)); err != nil {
		return nil, fmt.Errorf("check %s: %w", s.d.Name(), err)
	}
	fs, err := s.d.Check(ctx, s.db)
	if err != nil {
		return nil, s.failed(ctx, err, "check %s", s.d.Name())
	}
	return fs, nil
}

// A reader runs a query of a schema that may not be there.
type reader func(st dialect.Statement, scan func(outbox.Rows) error) error

func (s *Store) reader(ctx context.Context) reader {
	return func(st dialect.Statement, scan func(outbox.Rows) error) error {
		return s.d.Read(ctx, s.db, st, dialect.Once(func(rows *sql.Rows) error { return scan(rows) }))
	}
}

func (s *Store) readerIn(ctx context.Context, tx outbox.Tx) reader {
	return func(st dialect.Statement, scan func(outbox.Rows) error) error {
		return s.eachIn(s.d.CallerContext(ctx), tx, st, scan)
	}
}

func (s *Store) where() string {
	return fmt.Sprintf("in schema %s with prefix %s", s.d.Ident(s.d.Schema()), s.d.Ident(s.d.Prefix()))
}

func (s *Store) schemaMissing(err error) error {
	return fmt.Errorf("%w %s is missing, or is not this library's: run the migrations: %w", outbox.ErrSchema, s.where(), err)
}

func (s *Store) otherKind(err error) error {
	return fmt.Errorf("the database is not %s: the dialect and the driver do not match: %w", s.d.Name(), err)
}

// checkSchema compares what is installed with what this release needs.
func (s *Store) checkSchema(ctx context.Context, read reader) error {
	version, compatible := 0, 0
	unread := false // the columns are there and hold something else
	err := read(s.d.Installed(), func(rows outbox.Rows) error {
		err := rows.Scan(&version, &compatible)
		unread = err != nil && ctx.Err() == nil
		return err
	})
	where := s.where()
	switch {
	case unread, err != nil && s.d.Classify(err) == dialect.FaultSchema:
		return s.schemaMissing(err)
	case err != nil && s.d.Classify(err) == dialect.FaultOtherKind:
		return s.otherKind(err)
	case err != nil && s.d.Classify(err) == dialect.FaultGrant:
		return fmt.Errorf("read the schema's version %s: the role lacks USAGE on the schema or SELECT on the outbox's tables: %w", where, err)
	case err != nil:
		return cancelled(ctx, err)
	case version == 0:
		return fmt.Errorf("%w %s has no version: run the migrations", outbox.ErrSchema, where)
	case version < dialect.SchemaVersion:
		return fmt.Errorf("%w %s has version %d and this release needs %d: run the migrations", outbox.ErrSchema, where, version, dialect.SchemaVersion)
	case compatible > dialect.SchemaVersion:
		return fmt.Errorf("%w %s has version %d, which works with releases of schema version %d and later; this one has %d: upgrade the library",
			outbox.ErrSchema, where, version, compatible, dialect.SchemaVersion)
	}
	return nil
}
