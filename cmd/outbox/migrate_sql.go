package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
)

func (a *app) migrateSQLCommand() *cli.Command {
	return &cli.Command{
		Name:  "sql",
		Usage: "print the migrations as SQL, for another tool; no database is opened",
		Description: "Names are filled in from --schema and --prefix. The schema itself is taken to exist.\n" +
			"With --dir, plain files are named as golang-migrate, dbmate and others expect them (NNNN_name.up.sql, NNNN_name.down.sql),\n" +
			"and with --goose as goose does (NNNN_name.sql).",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "dialect", Usage: "`name`: postgres or sqlite; defaults to that of the DSN"},
			&cli.BoolFlag{Name: "down", Usage: "print what removes the tables"},
			&cli.BoolFlag{Name: "goose", Usage: "keep goose's annotations, with both directions in one file"},
			&cli.StringFlag{Name: "dir", Usage: "write files into this `directory` instead, which is made if need be; no file is overwritten"},
		},
		Action: a.migrateSQL,
	}
}

func (a *app) migrateSQL(_ context.Context, c *cli.Command) error {
	d, err := a.dialect(c)
	if err != nil {
		return err
	}
	if c.Bool("down") && (c.Bool("goose") || c.IsSet("dir")) {
		return usagef("%s--down goes neither with --goose nor with --dir, which give both directions", said(c))
	}
	files, err := migrations.Files(d)
	if err != nil {
		return err
	}
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return err
	}
	if dir := c.String("dir"); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("write migrations: %w", err)
		}
	}
	if c.Bool("down") { // the last step first
		slices.Reverse(names)
	}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		if err := a.writeMigration(c, name, string(text)); err != nil {
			return err
		}
	}
	return nil
}

// dialect takes --dialect where there is no DSN.
func (a *app) dialect(c *cli.Command) (dialect.Dialect, error) {
	var t target
	switch name := c.String("dialect"); name {
	case "":
		t, err := a.target(c)
		if err == nil {
			err = t.needTables(c)
		}
		if err != nil {
			return t.d, fmt.Errorf("%w; or give --dialect", err)
		}
		return t.d, nil
	case "postgres":
		t.d = dialect.Postgres()
	case "sqlite":
		t.d = dialect.SQLite()
	default:
		return t.d, usagef("--dialect is %q, not postgres or sqlite", name)
	}
	t, err := t.in(c.String("schema"), c.String("prefix"))
	return t.d, err
}

func (a *app) writeMigration(c *cli.Command, name, text string) error {
	up, down := split(text)
	dir := c.String("dir")
	switch {
	case dir != "" && c.Bool("goose"):
		return a.createFile(dir, name, text)
	case dir != "":
		stem := strings.TrimSuffix(name, ".sql")
		if err := a.createFile(dir, stem+".up.sql", up); err != nil {
			return err
		}
		return a.createFile(dir, stem+".down.sql", down)
	case c.Bool("goose"):
		fmt.Fprintf(a.stdout, "-- %s\n%s", name, text)
	case c.Bool("down"):
		fmt.Fprintf(a.stdout, "-- %s, down\n\n%s", name, down)
	default:
		fmt.Fprintf(a.stdout, "-- %s, up\n\n%s", name, up)
	}
	return nil
}

func (a *app) createFile(dir, name, text string) error {
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return fmt.Errorf("write migration: %w", err)
	}
	_, err = f.WriteString(text)
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return fmt.Errorf("write migration: %w", err)
	}
	fmt.Fprintf(a.stdout, "wrote %s\n", path)
	return nil
}

// split parts a migration for goose into its directions, without annotations.
func split(text string) (up, down string) {
	into := &up
	for line := range strings.Lines(text) {
		switch annotation := strings.TrimSpace(line); {
		case annotation == "-- +goose Down":
			into = &down
		case strings.HasPrefix(annotation, "-- +goose"):
		case strings.TrimSpace(line) == "" && (*into == "" || strings.HasSuffix(*into, "\n\n")): // one empty line will do
		default:
			*into += line
		}
	}
	return up, down
}
