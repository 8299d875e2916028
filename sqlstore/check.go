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
	return s.failed(ctx, s.prepare(ctx), "prepare to stage")
}

// Finding is something about the database that a person should know.
type Finding = dialect.Finding

// Findings returns everything that is wrong with the settings, the grants or
// the server, faults and warnings, each with its remedy. A schema that is
// missing, outdated, newer or foreign is an outbox.ErrSchema.
func (s *Store) Findings(ctx context.Context) ([]Finding, error) {
	if err := s.checkSchema(ctx); err != nil {
		return nil, fmt.Errorf("check %s: %w", s.d.Name(), err)
	}
	fs, err := s.d.Check(ctx, s.db)
	if err != nil {
		return nil, s.failed(ctx, err, "check %s", s.d.Name())
	}
	return fs, nil
}

// checkSchema compares what is installed with what this release needs.
func (s *Store) checkSchema(ctx context.Context) error {
	version, compatible := 0, 0
	err := s.d.Read(ctx, s.db, s.d.Installed(), func(rows *sql.Rows) error { return rows.Scan(&version, &compatible) })
	where := fmt.Sprintf("in schema %q with prefix %q", s.d.Schema(), s.d.Prefix())
	switch {
	case err != nil && s.d.Classify(err) == dialect.FaultSchema:
		return fmt.Errorf("%w %s is missing, or its tables are another program's: run the migrations: %w", outbox.ErrSchema, where, err)
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
