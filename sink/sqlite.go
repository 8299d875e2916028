package sink

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// sqliteUpsert writes a row only where its version is greater than the one the
// table has. SQLite has one writer at a time, so nothing can come between the
// comparison and the write. Parameters have no numbers, since the driver would
// look each one up among all of them; the clock is the first. The WHERE keeps the parser from reading ON CONFLICT as the ON of a join.
const sqliteUpsert = `
WITH clock (now) AS (SELECT ?), given (key, version, deleted, payload) AS (VALUES {rows})
INSERT INTO {table} AS have ({key}, {version}, {deleted_at}{, names})
SELECT given.key, given.version, CASE WHEN given.deleted THEN clock.now END{, values}
FROM clock CROSS JOIN given WHERE given.key IS NOT NULL
ON CONFLICT ({key}) DO UPDATE
SET {version} = excluded.{version}, {deleted_at} = excluded.{deleted_at}{, sets}
WHERE coalesce(have.{version}, 0) < excluded.{version}`

const sqliteGet = `
SELECT coalesce({version}, 0), {deleted_at} IS NOT NULL, {value}, {value} IS NULL
FROM {table} WHERE {key} = ?1`

const sqlitePurge = `
DELETE FROM {table} WHERE {key} IN (
	SELECT {key} FROM {table} WHERE {deleted_at} < ?1 ORDER BY {deleted_at} LIMIT ?2)`

const sqliteCreate = `
CREATE TABLE IF NOT EXISTS {table} (
	{key} {key type} NOT NULL PRIMARY KEY,
	{version} INTEGER NOT NULL,
	{deleted_at} INTEGER{definitions}
);
CREATE INDEX IF NOT EXISTS {index} ON {unqualified} ({deleted_at}) WHERE {deleted_at} IS NOT NULL`

// sqliteParams are those of one row.
const sqliteParams = 4

type sqlite struct {
	typed                           bool
	before, after                   string // of the upsert, around its rows
	getText, purgeText, createTexts string
}

func newSQLite(d dialect.Dialect, o Options, table string) *sqlite {
	q := &sqlite{typed: len(o.Columns) > 0}
	var targets []target
	for _, c := range o.Columns {
		path := strings.ReplaceAll(`$."`+c.Field+`"`, `'`, `''`)
		targets = append(targets, target{d.Ident(c.Name), "given.payload ->> '" + path + "'"})
	}
	if !q.typed {
		targets = append(targets, target{d.Ident(o.Value), "given.payload"})
	}
	if o.UpdatedAt != NoColumn {
		targets = append(targets, target{d.Ident(o.UpdatedAt), "clock.now"})
	}
	f := func(text string) string {
		return fill(text, d, o, table, targets,
			"{index}", d.Ident(o.Schema)+"."+d.Ident(o.Table+"_"+o.DeletedAt), "{unqualified}", d.Ident(o.Table),
			"{definitions}", definitions(d, o, "BLOB", "INTEGER"))
	}
	before, after, _ := strings.Cut(sqliteUpsert, "{rows}")
	q.before, q.after = f(before), f(after)
	q.getText, q.purgeText, q.createTexts = f(sqliteGet), f(sqlitePurge), f(sqliteCreate)
	return q
}

// limits: SQLite takes 32,766 parameters in a statement, but the time per row
// grows from some 2,000 rows on.
func (q *sqlite) limits() (rows, bytes int) { return 1_000, 16 << 20 }

// upsert returns the statement for as many rows as there are; for none one that
// writes nothing, since VALUES needs a row.
func (q *sqlite) upsert(rows []numbered) (string, []any) {
	var text strings.Builder
	text.Grow(len(q.before) + len(q.after) + 14*len(rows))
	args := make([]any, 1, 1+sqliteParams*len(rows))
	args[0] = time.Now().UnixMicro()
	text.WriteString(q.before)
	for i, r := range rows {
		if i > 0 {
			text.WriteString(", ")
		}
		text.WriteString("(?, ?, ?, ?)")
		args = append(args, r.Key, r.Version, r.Deleted, q.payload(r))
	}
	if len(rows) == 0 {
		text.WriteString("(NULL, NULL, NULL, NULL)")
	}
	text.WriteString(q.after)
	return text.String(), args
}

// payload returns a BLOB, or the text that SQLite's JSON functions read.
func (q *sqlite) payload(r numbered) any {
	switch {
	case r.Payload == nil:
		return nil
	case q.typed:
		return string(r.Payload)
	}
	return r.Payload
}

func (q *sqlite) get(key string) (string, []any) { return q.getText, []any{key} }

func (q *sqlite) purge(age time.Duration) (string, []any) {
	return q.purgeText, []any{time.Now().Add(-age).UnixMicro(), purgeChunk}
}

// inTx: a context that ends inside a statement makes the driver interrupt it,
// which rolls the whole transaction back; the caller's later statements would
// then commit one by one.
func (q *sqlite) inTx(ctx context.Context) (context.Context, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("nothing was written: %w", err)
	}
	return context.WithoutCancel(ctx), nil
}

func (q *sqlite) create(ctx context.Context, db *sql.DB) error {
	_, err := db.ExecContext(ctx, q.createTexts)
	return err
}
