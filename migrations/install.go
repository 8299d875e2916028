package migrations

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// lockWait is how long a caller waits for another one, and for a connection.
const lockWait = time.Minute

// undelivered lists the rows that Down does not drop unasked.
var undelivered = []struct{ table, where string }{
	{"entries", "true"},          // what has been published is deleted
	{"messages", "outcome <> 1"}, // dead and unknown ones too wait for somebody
}

// install is the outbox of one dialect value in one database.
type install struct {
	db    *sql.DB
	d     dialect.Dialect
	e     engine
	files fs.FS
	wait  time.Duration // lockWait, but in tests
}

// engine is what differs between the databases; see the file named for each.
type engine interface {
	// exists tells whether the outbox has a table.
	exists(ctx context.Context, q database.DBTxConn, table string) (bool, error)
	// begin starts a transaction on conn that excludes all other migrations of
	// this outbox. After an error conn may be in a transaction or not.
	begin(ctx context.Context, conn *sql.Conn) error
	// createSchema creates the schema where it is missing.
	createSchema(ctx context.Context, conn *sql.Conn) error
	// createVersions is the text that creates the version table.
	createVersions() string
	// listVersions is the text of a query for (version, microseconds since the Unix epoch).
	listVersions() string
	// lockTable keeps all others out of a table until the transaction ends.
	lockTable(ctx context.Context, conn *sql.Conn, table string) error
	// dropSchema drops the schema if nothing is left in it and it may be dropped.
	dropSchema(ctx context.Context, conn *sql.Conn) error
}

func open(db *sql.DB, d dialect.Dialect) (*install, error) {
	if db == nil {
		return nil, errors.New("db is nil")
	}
	if err := d.Validate(); err != nil {
		return nil, err
	}
	files, err := render(d)
	if err != nil {
		return nil, err
	}
	in := &install{db: db, d: d, files: files, wait: lockWait}
	switch d.Name() {
	case "postgres":
		in.e = postgres{d, lockWait}
	case "sqlite":
		in.e = sqlite{d}
	default:
		return nil, fmt.Errorf("there are no migrations for %s", d.Name())
	}
	return in, nil
}

// state is what a database says of the outbox in it.
type state struct {
	version    int                 // of the schema; 0: none is installed
	compatible int                 // the oldest library schema version that works with it
	applied    map[int64]time.Time // by this package; nil: it has no version table
}

// look reads the state on a connection that it does not wait for for ever: the
// caller may hold the only one.
func (in *install) look(ctx context.Context) (state, error) {
	patience, cancel := context.WithTimeout(ctx, in.wait)
	defer cancel()
	conn, err := in.db.Conn(patience)
	if err != nil {
		if n := in.db.Stats().MaxOpenConnections; n > 0 && patience.Err() != nil && ctx.Err() == nil {
			err = fmt.Errorf("no connection became free in %s; SetMaxOpenConns allows %d: %w", in.wait, n, err)
		}
		return state{}, err
	}
	defer conn.Close()
	return in.read(ctx, conn)
}

func (in *install) read(ctx context.Context, q database.DBTxConn) (state, error) {
	applied, err := in.versions(ctx, q)
	if err != nil {
		return state{}, err
	}
	// Second, so that a first Up that commits meanwhile does not look like a
	// schema without a version table.
	s := state{applied: applied}
	_, err = in.table(ctx, q, "meta", func() error {
		return q.QueryRowContext(ctx, in.d.Installed().Text).Scan(&s.version, &s.compatible)
	})
	return s, err
}

// versions reads the version table; nil means that there is none.
func (in *install) versions(ctx context.Context, q database.DBTxConn) (map[int64]time.Time, error) {
	applied := make(map[int64]time.Time)
	found, err := in.table(ctx, q, "migrations", func() error {
		st := dialect.Statement{Text: in.d.Render(in.e.listVersions())}
		return dialect.Each(ctx, q, st, func(rows *sql.Rows) error {
			var version, at int64
			err := rows.Scan(&version, &at)
			applied[version] = time.UnixMicro(at).UTC()
			return err
		})
	})
	if err != nil || !found {
		return nil, err
	}
	return applied, nil
}

// table reads a table of the outbox, if there is one; another caller may drop
// it between the look and the read.
func (in *install) table(ctx context.Context, q database.DBTxConn, name string, read func() error) (bool, error) {
	found, err := in.e.exists(ctx, q, name)
	if err != nil {
		return false, fmt.Errorf("read the database's catalog: %w", err)
	}
	if !found {
		return false, nil
	}
	if err = read(); err == nil {
		return true, nil
	}
	if found, again := in.e.exists(ctx, q, name); again == nil && !found {
		return false, nil
	}
	return true, fmt.Errorf("read table %s: %w", in.d.Render(`{t:`+name+`}`), err)
}

// newer refuses a schema that this library cannot work with.
func (in *install) newer(s state) error {
	return fmt.Errorf("%w: %s is at version %d and needs a library of version %d; this one is of version %d: upgrade it",
		ErrSchema, in.d.Render(`{t:meta}`), s.version, s.compatible, dialect.SchemaVersion)
}

// elsewhere refuses to change what another tool installed: it would not know.
func (in *install) elsewhere(s state) error {
	return fmt.Errorf("%w: version %d was not installed by this package, since there is no table %s: "+
		"use the tool that did, with the files of migrations.Files", ErrSchema, s.version, in.d.Render(`{t:migrations}`))
}

func (in *install) up(ctx context.Context) error {
	s, err := in.look(ctx)
	switch {
	case err != nil:
		return err
	case s.compatible > dialect.SchemaVersion:
		return in.newer(s)
	case s.version >= dialect.SchemaVersion:
		return nil
	case s.version > 0 && s.applied == nil:
		return in.elsewhere(s)
	}
	return in.run(ctx, &transaction{install: in, begun: in.prepare}, func(ctx context.Context, p *goose.Provider) error {
		_, err := p.Up(ctx)
		return err
	})
}

// prepare makes what the steps of Up need, in their transaction.
func (in *install) prepare(ctx context.Context, conn *sql.Conn) error {
	if err := in.e.createSchema(ctx, conn); err != nil {
		return fmt.Errorf("create schema %s: %w", in.d.Ident(in.d.Schema()), err)
	}
	found, err := in.e.exists(ctx, conn, "migrations")
	if err != nil || found {
		return err
	}
	for _, text := range []string{
		in.e.createVersions(),
		`INSERT INTO {t:migrations} (version_id, is_applied) VALUES (0, true)`, // goose's own tools miss it otherwise
	} {
		if _, err := conn.ExecContext(ctx, in.d.Render(text)); err != nil {
			return fmt.Errorf("create table %s: %w", in.d.Render(`{t:migrations}`), err)
		}
	}
	return nil
}

func (in *install) down(ctx context.Context, dropUndelivered bool) error {
	s, err := in.look(ctx)
	if err != nil || s.version == 0 && s.applied == nil {
		return err
	}
	t := &transaction{install: in, finish: in.clear}
	t.begun = func(ctx context.Context, conn *sql.Conn) error {
		// Again, now that nobody else migrates.
		s, err := in.read(ctx, conn)
		switch {
		case err != nil:
			return err
		case s.version > dialect.SchemaVersion:
			return in.newer(s)
		case s.version > 0 && s.applied == nil:
			return in.elsewhere(s)
		case dropUndelivered:
			return nil
		}
		return in.refuseUndelivered(ctx, conn)
	}
	return in.run(ctx, t, func(ctx context.Context, p *goose.Provider) error {
		_, err := p.DownTo(ctx, 0)
		return err
	})
}

// refuseUndelivered keeps stagers out until the transaction ends, then looks.
func (in *install) refuseUndelivered(ctx context.Context, conn *sql.Conn) error {
	for _, u := range undelivered {
		found, err := in.e.exists(ctx, conn, u.table)
		if err != nil {
			return err
		}
		if !found {
			continue // an older schema, or another caller removed it meanwhile
		}
		table := in.d.Render(`{t:` + u.table + `}`)
		if err := in.e.lockTable(ctx, conn, table); err != nil {
			return fmt.Errorf("lock table %s: %w", table, err)
		}
		var n int64
		if err := conn.QueryRowContext(ctx, `SELECT count(*) FROM `+table+` WHERE `+u.where).Scan(&n); err != nil {
			return fmt.Errorf("count undelivered rows of table %s: %w", table, err)
		}
		if n > 0 {
			return &UndeliveredError{Table: table, Rows: n}
		}
	}
	return nil
}

// clear removes what the steps of Down leave.
func (in *install) clear(ctx context.Context, conn *sql.Conn) error {
	if _, err := conn.ExecContext(ctx, in.d.Render(`DROP TABLE {t:migrations}`)); err != nil {
		return fmt.Errorf("drop table %s: %w", in.d.Render(`{t:migrations}`), err)
	}
	if err := in.e.dropSchema(ctx, conn); err != nil {
		return fmt.Errorf("drop schema %s: %w", in.d.Ident(in.d.Schema()), err)
	}
	return nil
}

func (in *install) steps(ctx context.Context) ([]Step, error) {
	s, err := in.look(ctx)
	if err != nil {
		return nil, in.explain(err)
	}
	sources, err := in.sources()
	if err != nil {
		return nil, err
	}
	unknown := maps.Clone(s.applied)
	delete(unknown, 0)
	var steps []Step
	for _, source := range sources {
		at, here := s.applied[source.Version]
		steps = append(steps, Step{
			Version: source.Version, Name: path.Base(source.Path),
			Applied: here || source.Version <= int64(s.version), AppliedAt: at,
		})
		delete(unknown, source.Version)
	}
	for version, at := range unknown {
		steps = append(steps, Step{Version: version, Applied: true, AppliedAt: at})
	}
	slices.SortFunc(steps, func(a, b Step) int { return cmp.Compare(a.Version, b.Version) })
	return steps, nil
}

func (in *install) sources() ([]*goose.Source, error) {
	p, err := (&transaction{install: in}).provider()
	if err != nil {
		return nil, err
	}
	return p.ListSources(), nil
}
