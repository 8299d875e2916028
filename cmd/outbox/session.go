package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/filestore"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// session is the database or file store of one command, connected.
type session struct {
	target
	messages messageStore // of either
	db       *sql.DB      // nil: a file store
	store    *sqlstore.Store
	file     *filestore.Store // nil: a database
}

// messageStore is what people do to messages and channels, wherever they are.
type messageStore interface {
	outbox.JournalStore
	Pause(ctx context.Context, channel string, d time.Duration, reason string) error
}

func (s *session) close() {
	if s.file != nil {
		_ = s.file.Close() // what was changed is on the disk already
		return
	}
	_ = s.db.Close()
}

// target returns what --dsn, or else the environment, names.
func (a *app) target(c *cli.Command) (target, error) {
	dsn := c.String("dsn")
	if dsn == "" {
		dsn = a.env("OUTBOX_DSN")
	}
	t, err := parseDSN(dsn)
	if err != nil {
		return t, err
	}
	if t.fileStore != "" && (c.IsSet("schema") || c.IsSet("prefix")) {
		return t, usagef("%s--schema, --prefix: %s is a file store, which has no tables", said(c), t.fileStore)
	}
	return t.in(c.String("schema"), c.String("prefix"))
}

// withTables is with for what only a database has.
func (a *app) withTables(ctx context.Context, c *cli.Command, p purpose, f func(ctx context.Context, s *session) error) error {
	t, err := a.target(c)
	if err == nil {
		err = t.needTables(c)
	}
	if err != nil {
		return err
	}
	return a.with(ctx, c, p, f)
}

func (t target) needTables(c *cli.Command) error {
	if t.fileStore == "" {
		return nil
	}
	return usagef("%s%s is a file store, which has no schema: the program that uses it makes it; this is for Postgres and SQLite", said(c), t.fileStore)
}

// with connects to the database of a command, within its --timeout, and calls f.
func (a *app) with(ctx context.Context, c *cli.Command, p purpose, f func(ctx context.Context, s *session) error) error {
	ctx, cancel := limited(ctx, c, p == toInstall || p == toRemove || p == toAmend)
	defer cancel()
	t, err := a.target(c)
	if err != nil {
		return err
	}
	s, err := t.connect(ctx, p)
	if err != nil {
		return timedOut(ctx, err)
	}
	defer s.close()
	return timedOut(ctx, f(ctx, s))
}

// timedOut says that it was the --timeout, where it was.
func timedOut(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == context.DeadlineExceeded {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}

func (t target) connect(ctx context.Context, p purpose) (*session, error) {
	if t.fileStore != "" {
		return t.openFileStore()
	}
	db, err := t.open(p)
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(4)
	if err := db.PingContext(ctx); err != nil {
		db.Close()
		return nil, fmt.Errorf("connect to %s: %w", t.label, err)
	}
	store, err := sqlstore.New(db, t.d, sqlstore.Options{})
	if err != nil {
		db.Close()
		return nil, err
	}
	return &session{target: t, messages: store, db: db, store: store}, nil
}

// openFileStore opens a file store that exists: a misspelt path is an error,
// not a new file.
func (t target) openFileStore() (*session, error) {
	if _, err := os.Lstat(t.fileStore); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("open outbox file %q: it does not exist; a program makes it when it adds its first message", t.fileStore)
		}
		return nil, fmt.Errorf("open outbox file: %w", err)
	}
	// What is kept is kept: the limits are the program's affair.
	store, err := filestore.Open(t.fileStore, filestore.Options{})
	if err != nil {
		return nil, err
	}
	return &session{target: t, messages: store, file: store}, nil
}

// where tells which outbox of the database is meant.
func where(d dialect.Dialect) string {
	return fmt.Sprintf("schema %q, prefix %q", d.Schema(), d.Prefix())
}

// name is the label, with which outbox is meant.
func (t target) name() string {
	if t.fileStore != "" {
		return t.label
	}
	return fmt.Sprintf("%s (%s)", t.label, where(t.d))
}
