// Package migrations installs, upgrades and removes the outbox's tables.
//
//	err := migrations.Up(ctx, db, dialect.Postgres())
//
// Up may be called by every replica at every start. Where nothing is due it
// only reads, so the role needs no right to create anything. Where something
// is due, all of it happens in one transaction, inside which no two callers
// are at once: a crash, an error or a cancelled context leaves everything as
// it was. No session is locked and no setting outlives the transaction, so a
// pooler in transaction mode may stand before Postgres.
//
// The steps are plain SQL files for goose, and what has been applied stands in
// a version table of the outbox's own (by default outbox_migrations). A goose
// of the application's own is not touched: neither its version table nor its
// global settings and registry. An application that would rather apply the
// files itself takes them from [Files]; Up then finds nothing to do.
package migrations

import (
	"archive/zip"
	"bytes"
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

//go:embed postgres/*.sql sqlite/*.sql
var sources embed.FS

// ErrSchema: the tables in the database are newer than this library can work
// with, or another tool than this package looks after them. Nothing changed.
var ErrSchema = errors.New("outbox schema")

// UndeliveredError says why [Down] refused: a table holds rows that have not
// been delivered. Nothing changed.
type UndeliveredError struct {
	Table string // quoted, with its schema
	Rows  int64
}

func (e *UndeliveredError) Error() string {
	return fmt.Sprintf("table %s holds %d undelivered rows: deliver them first, or say that they are to be dropped", e.Table, e.Rows)
}

// Step is one migration.
type Step struct {
	Version   int64
	Name      string // of the file; empty for a step of a newer release, which this one does not know
	Applied   bool
	AppliedAt time.Time // UTC; zero: not applied, or by another tool
}

// Files returns the migrations of a dialect as plain files in goose's format,
// with the schema's and the prefix's names filled in. The schema itself is
// taken to exist. Versions are the numbers that the files' names start with;
// a later release adds files and changes none.
func Files(d dialect.Dialect) (fs.FS, error) {
	if err := d.Validate(); err != nil {
		return nil, fmt.Errorf("migrations: %w", err)
	}
	files, err := render(d)
	if err != nil {
		return nil, fmt.Errorf("migrations: render files: %w", err)
	}
	return files, nil
}

// render packs the rendered files into a zip archive in memory, which is the
// file system in memory that the standard library has outside its tests.
func render(d dialect.Dialect) (fs.FS, error) {
	names, err := fs.Glob(sources, d.Name()+"/*.sql")
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	w := zip.NewWriter(&archive)
	for _, name := range names {
		text, err := sources.ReadFile(name)
		if err != nil {
			return nil, err
		}
		f, err := w.Create(name[len(d.Name())+1:])
		if err != nil {
			return nil, err
		}
		if _, err := f.Write([]byte(d.Render(string(text)))); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return zip.NewReader(bytes.NewReader(archive.Bytes()), int64(archive.Len()))
}

// Up installs the outbox's tables, or brings them up to this release. On
// Postgres it creates the schema too, where that is missing. Tables that a
// newer release installed are left alone if they still serve this one, else
// the error wraps [ErrSchema], as it does where something is due and another
// tool installed the tables.
//
// Up waits a minute at most for another caller, and on Postgres ten seconds
// for each table that a transaction holds. It uses one connection at a time.
func Up(ctx context.Context, db *sql.DB, d dialect.Dialect) error {
	in, err := open(db, d)
	if err == nil {
		err = in.patiently(ctx, in.up)
	}
	if err != nil {
		return fmt.Errorf("migrate outbox up: %w", err)
	}
	return nil
}

// Down removes all that [Up] installed, whatever its version, and the schema
// too if nothing else is in it, it is the role's own and it is not "public".
// While rows are undelivered Down returns an [*UndeliveredError], unless
// dropUndelivered is true. Where nothing is installed it does nothing. It
// waits as Up does; stop the relays and the stagers first.
//
// A schema installed again later goes on with greater versions: these start at
// the clock.
func Down(ctx context.Context, db *sql.DB, d dialect.Dialect, dropUndelivered bool) error {
	in, err := open(db, d)
	if err == nil {
		err = in.patiently(ctx, func(ctx context.Context) error { return in.down(ctx, dropUndelivered) })
	}
	if err != nil {
		return fmt.Errorf("migrate outbox down: %w", err)
	}
	return nil
}

// Status tells which steps have been applied, in their order. It only reads
// and waits for nobody.
func Status(ctx context.Context, db *sql.DB, d dialect.Dialect) ([]Step, error) {
	in, err := open(db, d)
	if err != nil {
		return nil, fmt.Errorf("migrations status: %w", err)
	}
	steps, err := in.steps(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrations status: %w", err)
	}
	return steps, nil
}
