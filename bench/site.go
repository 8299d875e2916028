package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// app is what every transaction writes besides its message.
const (
	appTable  = `CREATE TABLE app (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text NOT NULL, amount integer NOT NULL)`
	appInsert = `INSERT INTO app (note, amount) VALUES ($1, $2)`
	appNote   = "order placed"
)

// A site is an application on Postgres that has every peer's tables. Its pools
// are large enough for 16 writers.
type site struct {
	dsn  string
	std  *sql.DB
	pgx  *pgxpool.Pool
	own  *box // this library's, with its default names
	list []*peer
}

// connections of each pool of a site.
const connections = 20

// install makes the tables of the application and of every peer.
func install(ctx context.Context, dsn string) error {
	db, err := openStd(dsn, 2, nil)
	if err != nil {
		return err
	}
	defer db.Close()
	pool, err := openPgx(ctx, dsn, 2, nil)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := db.ExecContext(ctx, appTable); err != nil {
		return err
	}
	for _, of := range []struct {
		name    string
		install func() error
	}{
		{"this library", func() error { return installBox(ctx, db, dialect.Postgres()) }},
		{"bare SQL", func() error { return installRaw(ctx, db) }}, // like those of this library
		{"river", func() error { return installRiver(ctx, pool) }},
		{"watermill", func() error { return installWatermill(ctx, db) }},
		{"gue", func() error { return installFile(ctx, db, "github.com/vgarvardt/gue/v5", "migrations/schema.sql") }},
		{"goqite", func() error { return installFile(ctx, db, "maragu.dev/goqite", "schema_postgres.sql") }},
	} {
		if err := of.install(); err != nil {
			return fmt.Errorf("install the tables of %s: %w", of.name, err)
		}
	}
	return nil
}

// installFile runs a schema that a module ships only as a file. It needs the
// go command, in this module's directory.
func installFile(ctx context.Context, db *sql.DB, module, name string) error {
	text, err := moduleFile(ctx, module, name)
	if err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, text)
	return err
}

func moduleFile(ctx context.Context, module, name string) (string, error) {
	dir, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("find the module %s (run this in the directory bench): %w", module, err)
	}
	text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), name))
	return string(text), err
}

// openSite opens what install made. c counts the statements of its pools, and
// may be nil.
func openSite(ctx context.Context, dsn string, c *counter) (*site, error) {
	s := &site{dsn: dsn}
	var err error
	if s.std, err = openStd(dsn, connections, c); err != nil {
		return nil, err
	}
	if s.pgx, err = openPgx(ctx, dsn, connections, c); err != nil {
		return nil, err
	}
	if s.own, err = openBox(s.std, dialect.Postgres()); err != nil {
		return nil, err
	}
	if err := s.own.store.Check(ctx); err != nil {
		return nil, err
	}
	for _, f := range []func() ([]*peer, error){s.limits, s.boxes, s.rivers, s.watermills, s.gues, s.goqites} {
		ps, err := f()
		if err != nil {
			return nil, err
		}
		s.list = append(s.list, ps...)
	}
	return s, nil
}

func (s *site) close() error {
	s.pgx.Close()
	return s.std.Close()
}

// peer returns a peer by its name; nil for one that there is not.
func (s *site) peer(name string) *peer {
	for _, p := range s.list {
		if p.name == name {
			return p
		}
	}
	return nil
}

// peers returns those that can do something, in the order of the list.
func (s *site) peers(can func(*peer) bool) []*peer {
	var ps []*peer
	for _, p := range s.list {
		if can(p) {
			ps = append(ps, p)
		}
	}
	return ps
}

// transact is a transaction of the application's over database/sql; f may be nil.
func (s *site) transact(ctx context.Context, seq int64, f func(tx *sql.Tx) error) error {
	tx, err := s.std.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, appInsert, appNote, int(seq&1023)); err != nil {
		return err
	}
	if f != nil {
		if err := f(tx); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// transactPgx is the same over pgx's own pool.
func (s *site) transactPgx(ctx context.Context, seq int64, f func(tx pgx.Tx) error) error {
	tx, err := s.pgx.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	if _, err := tx.Exec(ctx, appInsert, appNote, int(seq&1023)); err != nil {
		return err
	}
	if f != nil {
		if err := f(tx); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}

// clear empties the tables of a peer, and app.
func (s *site) clear(ctx context.Context, p *peer) error {
	statements := []string{`TRUNCATE ` + strings.Join(append([]string{"app"}, p.tables...), ", ")}
	if p.after != "" {
		statements = append(statements, p.after)
	}
	return s.exec(ctx, statements...)
}

// settle brings the tables of a peer into the state that autovacuum would, and
// writes what is dirty to disk, so that no variant pays for another's.
func (s *site) settle(ctx context.Context, p *peer) error {
	return s.exec(ctx, `VACUUM (ANALYZE) `+strings.Join(p.tables, ", "), `CHECKPOINT`)
}

// prepare leaves n messages of a peer waiting and nothing else.
func (s *site) prepare(ctx context.Context, p *peer, n int) error {
	return errors.Join(s.clear(ctx, p), p.fill(ctx, n), s.settle(ctx, p))
}

func (s *site) exec(ctx context.Context, statements ...string) error {
	for _, text := range statements {
		if _, err := s.std.ExecContext(ctx, text); err != nil {
			return fmt.Errorf("%s: %w", text, err)
		}
	}
	return nil
}

// fillSQL is a fill by one statement whose $1 is the number of messages.
func (s *site) fillSQL(text string) func(context.Context, int) error {
	return func(ctx context.Context, n int) error {
		_, err := s.std.ExecContext(ctx, text, n)
		return err
	}
}
