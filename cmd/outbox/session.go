package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// session is the database of one command, connected.
type session struct {
	target
	db    *sql.DB
	store *sqlstore.Store
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
	return t.in(c.String("schema"), c.String("prefix"))
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
	defer s.db.Close()
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
	return &session{target: t, db: db, store: store}, nil
}

// where tells which outbox of the database is meant.
func where(d dialect.Dialect) string {
	return fmt.Sprintf("schema %q, prefix %q", d.Schema(), d.Prefix())
}
