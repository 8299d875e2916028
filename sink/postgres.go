package sink

import (
	"context"
	"database/sql"
	"fmt"
	"hash/fnv"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// postgresUpsert writes a row only where its version is greater than the one
// the table has. ON CONFLICT DO UPDATE locks the row and evaluates the WHERE on
// its newest committed state, also where that was committed after the statement
// began, so the guard holds at READ COMMITTED between any number of writers.
// Rows are taken, and so locked, in the order of the arrays. Every parameter
// has a cast, so that the arrays pass in every mode of pgx.
const postgresUpsert = `
INSERT INTO {table} AS have ({key}, {version}, {deleted_at}{, names})
SELECT given.key::{key type}, given.version, CASE WHEN given.deleted THEN clock_timestamp() END{, values}
FROM unnest($1::text[], $2::bigint[], $3::boolean[], $4::{payload type}[])
	AS given (key, version, deleted, payload){record}
ON CONFLICT ({key}) DO UPDATE
SET {version} = excluded.{version}, {deleted_at} = excluded.{deleted_at}{, sets}
WHERE coalesce(have.{version}, 0) < excluded.{version}`

const postgresGet = `
SELECT coalesce({version}, 0), {deleted_at} IS NOT NULL, {value}, {value} IS NULL
FROM {table} WHERE {key} = $1::text::{key type}`

// postgresPurge never waits for a row while it holds others: it cannot be part
// of a deadlock. What it locks it has seen in its newest state.
const postgresPurge = `
DELETE FROM {table} WHERE {key} = ANY (ARRAY(
	SELECT {key} FROM {table}
	WHERE {deleted_at} < statement_timestamp() - $1::bigint * interval '1 microsecond'
	ORDER BY {deleted_at} LIMIT $2::bigint
	FOR UPDATE SKIP LOCKED))`

// The key is compared byte by byte: an index under a libc's collation breaks
// silently when the libc is upgraded.
const postgresCreate = `
CREATE TABLE {table} (
	{key} {key type}{collate} PRIMARY KEY,
	{version} bigint NOT NULL,
	{deleted_at} timestamptz{definitions}
)`

const postgresIndex = `CREATE INDEX ON {table} ({deleted_at}) WHERE {deleted_at} IS NOT NULL`

type postgres struct {
	schema, name                   string
	typed                          bool
	upsertText, getText, purgeText string
	createText, indexText          string
}

func newPostgres(d dialect.Dialect, o Options, table string) *postgres {
	p := &postgres{schema: o.Schema, name: o.Table, typed: len(o.Columns) > 0}
	var targets []target
	payloadType, record, collate := "bytea", "", ""
	if p.typed {
		payloadType = "text"
		var members []string
		for _, c := range o.Columns {
			members = append(members, d.Ident(c.Field)+" "+c.Type)
			targets = append(targets, target{d.Ident(c.Name), "record." + d.Ident(c.Field)})
		}
		record = "\nLEFT JOIN LATERAL json_to_record(given.payload::json)\n\tAS record (" +
			strings.Join(members, ", ") + ") ON true"
	} else {
		targets = append(targets, target{d.Ident(o.Value), "given.payload"})
	}
	if o.UpdatedAt != NoColumn {
		targets = append(targets, target{d.Ident(o.UpdatedAt), "clock_timestamp()"})
	}
	if o.Key.Type == "text" {
		collate = ` COLLATE "C"`
	}
	f := func(text string) string {
		return fill(text, d, o, table, targets, "{payload type}", payloadType, "{record}", record,
			"{collate}", collate, "{definitions}", definitions(d, o, "bytea", "timestamptz"))
	}
	p.upsertText, p.getText, p.purgeText = f(postgresUpsert), f(postgresGet), f(postgresPurge)
	p.createText, p.indexText = f(postgresCreate), f(postgresIndex)
	return p
}

func (p *postgres) limits() (rows, bytes int) { return 10_000, 16 << 20 }

func (p *postgres) upsert(rows []numbered) (string, []any) {
	keys := make([]string, len(rows))
	versions := make([]int64, len(rows))
	deleted := make([]bool, len(rows))
	payloads := make([][]byte, len(rows))
	for i, r := range rows {
		keys[i], versions[i], deleted[i], payloads[i] = r.Key, r.Version, r.Deleted, r.Payload
	}
	if !p.typed {
		return p.upsertText, []any{keys, versions, deleted, payloads}
	}
	documents := make([]*string, len(rows))
	for i, b := range payloads {
		if b != nil {
			text := string(b)
			documents[i] = &text
		}
	}
	return p.upsertText, []any{keys, versions, deleted, documents}
}

func (p *postgres) get(key string) (string, []any) { return p.getText, []any{key} }

func (p *postgres) purge(age time.Duration) (string, []any) {
	return p.purgeText, []any{age.Microseconds(), int64(purgeChunk)}
}

// inTx: a cancelled statement fails, and Postgres itself refuses whatever the
// transaction tries afterwards.
func (p *postgres) inTx(ctx context.Context) (context.Context, error) { return ctx, nil }

// create looks first, so that a role without rights to create passes where the
// table exists. CREATE TABLE IF NOT EXISTS fails when two run at once; the lock
// lets the second one see the table of the first.
func (p *postgres) create(ctx context.Context, db *sql.DB) error {
	if exists, err := p.exists(ctx, db); err != nil || exists {
		return err
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, `SELECT pg_advisory_xact_lock($1::bigint)`, p.lockID()); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if exists, err := p.exists(ctx, tx); err != nil || exists {
		return err
	}
	for _, text := range []string{p.createText, p.indexText} {
		if _, err := tx.ExecContext(ctx, text); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// postgresExists reads the catalogue as data: to_regclass may answer from a
// cache that has not heard of the table another session has just committed.
const postgresExists = `
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1::text AND c.relname = $2::text)`

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func (p *postgres) exists(ctx context.Context, on queryer) (exists bool, err error) {
	err = on.QueryRowContext(ctx, postgresExists, p.schema, p.name).Scan(&exists)
	return exists, err
}

// lockID gives every table an advisory lock of its own.
func (p *postgres) lockID() int64 {
	h := fnv.New64a()
	h.Write([]byte("sqloutbox sink " + p.schema + "." + p.name))
	return int64(h.Sum64())
}
