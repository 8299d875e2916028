package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

// A site is where the demo takes place: the shop's database, which holds its
// orders and the outbox, and the index's. All of it is new.
type site struct {
	*session         // the shop's
	dsn       string // of the same
	indexDB   *sql.DB
	sink      *sink.Sink // the index's table
	shopLabel string
	dir       string // of files
	undo      []func() error

	indexLabel string
	left       string // how to look at it afterwards, and to remove it
}

// openSite makes all that the demo needs. It fails where something is there
// already: it might be somebody's.
func openSite(ctx context.Context, o demoOptions) (_ *site, err error) {
	s := new(site)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.clear())
		}
	}()
	if s.dsn = o.dsn; s.dsn == "" {
		if err = s.makeDir(); err != nil {
			return nil, err
		}
		s.dsn = filepath.Join(s.dir, "shop.db")
	}
	t, err := parseDSN(s.dsn)
	if err != nil {
		return nil, err
	}
	switch {
	case t.fileStore != "":
		err = usagef("demo: %s is a file store: the demo is of Postgres and SQLite; for file stores see examples/offline", t.fileStore)
	case t.postgres != nil:
		err = s.onPostgres(ctx, t, o)
	default:
		err = s.onSQLite(ctx, t, o)
	}
	if err != nil {
		return nil, err
	}
	return s, s.install(ctx)
}

func (s *site) makeDir() (err error) {
	if s.dir, err = os.MkdirTemp("", "outbox-demo-"); err != nil {
		return err
	}
	s.undo = append(s.undo, func() error { return os.RemoveAll(s.dir) })
	return nil
}

func (s *site) onPostgres(ctx context.Context, t target, o demoOptions) error {
	schema := o.schema
	if schema == "" {
		schema = "outbox_demo_" + strings.ToLower(rand.Text()[:8])
	}
	t, err := t.in(schema, o.prefix)
	if err != nil {
		return err
	}
	if s.session, err = t.connect(ctx, toInstall); err != nil {
		return err
	}
	s.undo = append(s.undo, s.db.Close)
	if _, err := s.db.ExecContext(ctx, "CREATE SCHEMA "+t.d.Ident(schema)); err != nil {
		return fmt.Errorf("create schema %q for the demo, which works in a new one only: %w", schema, err)
	}
	s.undo = append(s.undo, func() error { return s.dropSchema(context.WithoutCancel(ctx)) })
	s.indexDB = s.db
	s.shopLabel = fmt.Sprintf("%s, schema %s", t.label, schema)
	s.indexLabel = "a table of the same schema, as if it were another database"
	s.left = fmt.Sprintf("schema %s; to look: outbox stats --schema %s; to remove it: DROP SCHEMA %s CASCADE", schema, schema, t.d.Ident(schema))
	return nil
}

// dropSchema tries again where it deadlocks with what a killed relay had asked
// of the server, which is still at it.
func (s *site) dropSchema(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		_, err := s.db.ExecContext(ctx, "DROP SCHEMA "+s.d.Ident(s.d.Schema())+" CASCADE")
		if !s.store.Retryable(err) || pause(ctx, 100*time.Millisecond) != nil {
			return err
		}
	}
}

func (s *site) onSQLite(ctx context.Context, t target, o demoOptions) error {
	t, err := t.in(o.schema, o.prefix)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(t.path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create a file for the demo, which works in a new one only: %w", err)
	}
	f.Close()
	s.undo = append(s.undo, func() error {
		for _, suffix := range []string{"", "-wal", "-shm"} {
			if err := os.Remove(t.path + suffix); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
		return nil
	})
	if s.session, err = t.connect(ctx, toInstall); err != nil {
		return err
	}
	s.undo = append(s.undo, s.db.Close)
	if s.dir == "" {
		if err := s.makeDir(); err != nil {
			return err
		}
	}
	other, err := parseDSN(filepath.Join(s.dir, "index.db"))
	if err != nil {
		return err
	}
	if s.indexDB, err = other.open(toInstall); err != nil {
		return err
	}
	s.undo = append(s.undo, s.indexDB.Close)
	s.shopLabel, s.indexLabel = t.label, other.label
	s.left = fmt.Sprintf("%s and %s; to look: outbox stats --dsn %s", t.path, s.dir, t.path)
	return nil
}

func (s *site) install(ctx context.Context) error {
	s.db.SetMaxOpenConns(8)
	if err := migrations.Up(ctx, s.db, s.d); err != nil {
		return err
	}
	_, err := s.db.ExecContext(ctx, `CREATE TABLE `+s.orders()+` (
		id text PRIMARY KEY, status text NOT NULL, cents bigint NOT NULL, revision bigint NOT NULL)`)
	if err != nil {
		return fmt.Errorf("create the shop's table: %w", err)
	}
	if err := s.store.Check(ctx); err != nil {
		return err
	}
	if s.sink, err = sink.New(s.indexDB, s.d, sink.Options{Table: "search_index"}); err != nil {
		return err
	}
	return s.sink.Create(ctx)
}

// orders is the shop's table.
func (s *site) orders() string { return s.d.Ident(s.d.Schema()) + ".orders" }

// waiting returns how many entries wait to be published; mails are not counted.
func (s *site) waiting(ctx context.Context) (int, error) {
	stats, err := s.store.Stats(ctx)
	n := 0
	for _, st := range stats {
		if st.Channel.System == outbox.SystemLatest {
			n += st.Due + st.Scheduled + st.InFlight
		}
	}
	return n, err
}

// close removes what openSite has made, unless it is to be kept.
func (s *site) close(keep bool, st *story) error {
	if keep {
		st.text("", "kept: "+s.left)
		s.db.Close()
		s.indexDB.Close()
		return nil
	}
	if err := s.clear(); err != nil {
		return fmt.Errorf("remove what the demo has made (%s): %w", s.left, err)
	}
	return nil
}

func (s *site) clear() error {
	var errs []error
	for i := len(s.undo) - 1; i >= 0; i-- {
		errs = append(errs, s.undo[i]())
	}
	s.undo = nil
	return errors.Join(errs...)
}
