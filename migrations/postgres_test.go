package migrations

import (
	"context"
	"crypto/rand"
	"database/sql"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
)

// with returns a place reached with server settings.
func (p place) with(settings ...string) place {
	var options []string
	for _, s := range settings {
		options = append(options, "-c "+s)
	}
	return p.param("options", strings.Join(options, " "))
}

func (p place) param(name, value string) place {
	p.dsn += "&" + name + "=" + strings.ReplaceAll(url.QueryEscape(value), "+", "%20")
	return p
}

// role creates a role and returns the place as it reaches it.
func role(t testing.TB, p place, db *sql.DB) (name string, as place) {
	t.Helper()
	name = "outbox_test_" + strings.ToLower(rand.Text()[:12])
	_, err := db.Exec(`CREATE ROLE ` + name)
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, text := range []string{`DROP OWNED BY `, `DROP ROLE `} {
			_, err := db.Exec(text + name)
			require.NoError(t, err)
		}
	})
	return name, p.with("role=" + name)
}

func TestUpToDateSchemaNeedsNoRightToCreate(t *testing.T) { // S47
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	for _, schema := range []string{"public", "box"} {
		p.d = dialect.Postgres().In(schema, "o_")
		owner := p.open(t)
		require.NoError(t, Up(t.Context(), owner, p.d))
		name, as := role(t, p, owner)
		for _, text := range []string{
			`GRANT USAGE ON SCHEMA {schema} TO `, `GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO `,
		} {
			_, err := owner.Exec(p.d.Render(text) + name)
			require.NoError(t, err)
		}
		service := as.open(t)
		require.NoError(t, Up(t.Context(), service, p.d))
		installed(t, p, service)

		err := Down(t.Context(), service, p.d, false)
		require.ErrorContains(t, err, "the role lacks a right")
		require.NoError(t, Up(t.Context(), service, p.d))
	}
}

func TestMissingRightIsNamed(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	owner := p.open(t)
	_, err := owner.Exec(`REVOKE CREATE ON SCHEMA public FROM PUBLIC`)
	require.NoError(t, err)
	_, as := role(t, p, owner)
	service := as.open(t)
	err = Up(t.Context(), service, p.d)
	require.ErrorContains(t, err, "migrate outbox up: the role lacks a right: migrate as the owner of the schema, or grant SELECT on the two tables to who only looks: "+
		`create table "public"."outbox_migrations": `)
	require.ErrorContains(t, Up(t.Context(), service, p.d.In("box", "")), `create schema "box": `)
	require.Empty(t, objects(t, p, owner))
}

func TestOddSchemasAreCreatedAndDropped(t *testing.T) { // S53
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	db := p.open(t)
	for _, schema := range []string{
		"my-schema", "User", "select", "1schema", "o'brien", `a"b`, "a.b", "a$$b", "a b", "a;b", "%d", "ünï", strings.Repeat("s", 63),
	} {
		q := p
		q.d = p.d.In(schema, schema[:min(len(schema), 40)])
		require.NoError(t, Up(t.Context(), db, q.d), schema)
		require.NoError(t, Up(t.Context(), db, q.d), schema)
		require.Contains(t, objects(t, p, db), "schema "+schema)
		installed(t, q, db)
		stage(t, q, db)
		require.Error(t, Down(t.Context(), db, q.d, false), schema)
		require.NoError(t, Down(t.Context(), db, q.d, true), schema)
		require.Empty(t, objects(t, p, db), schema)
	}
}

func TestSchemaStaysWhereItIsNotOursToDrop(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	db := p.open(t)
	p.d = p.d.In("box", "")
	for what, text := range map[string]string{
		"a table":    `CREATE TABLE box.x ()`,
		"a function": `CREATE FUNCTION box.f() RETURNS int LANGUAGE sql AS 'SELECT 1'`,
		"a type":     `CREATE TYPE box.t AS ENUM ()`,
	} {
		require.NoError(t, Up(t.Context(), db, p.d))
		_, err := db.Exec(text)
		require.NoError(t, err)
		require.NoError(t, Down(t.Context(), db, p.d, false), what)
		require.Contains(t, objects(t, p, db), "schema box", what)
		_, err = db.Exec(`DROP SCHEMA box CASCADE`)
		require.NoError(t, err)
	}

	name, as := role(t, p, db)
	_, err := db.Exec(`CREATE SCHEMA box; GRANT ALL ON SCHEMA box TO ` + name)
	require.NoError(t, err)
	service := as.open(t)
	require.NoError(t, Up(t.Context(), service, p.d))
	require.NoError(t, Down(t.Context(), service, p.d, false))
	require.Equal(t, []string{"schema box"}, objects(t, p, db), "made by somebody else")
}

func TestOutboxesCanCreateOneSchemaAtOnce(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		db := p.open(t)
		wg.Go(func() { errs[i] = Up(t.Context(), db, p.d.In("box", string(rune('a'+i)))) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

func TestSettingsOfTheSessionDoNotMatter(t *testing.T) { // S51, S52
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	owner := p.open(t)
	_, err := owner.Exec(`CREATE SCHEMA app; CREATE TABLE app.outbox_meta (mine int); CREATE TABLE app.outbox_migrations (mine int)`)
	require.NoError(t, err)
	_, err = owner.Exec(`CREATE FUNCTION app.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE ''not this one''; END'`)
	require.NoError(t, err)
	before := objects(t, p, owner)
	for _, as := range []place{
		p.with("search_path="),
		p.with("search_path=app,pg_catalog"),
		p.with("search_path=app,public"),
		p.with("default_transaction_isolation=serializable"),
		p.with("default_transaction_read_only=on"),
		p.with("default_transaction_deferrable=on", "default_transaction_isolation=repeatable\\ read"),
		p.with("timezone=Asia/Kolkata", "datestyle=SQL\\,DMY", "intervalstyle=iso_8601"),
		p.with("standard_conforming_strings=off", "backslash_quote=off"),
		p.param("default_query_exec_mode", "exec"),
		p.param("default_query_exec_mode", "simple_protocol"),
		p.param("default_query_exec_mode", "describe_exec"),
	} {
		db := as.open(t)
		require.NoError(t, Up(t.Context(), db, p.d), as.dsn)
		installed(t, p, owner)
		installed(t, p, db)
		for _, other := range []place{p, p.with("search_path=app,public"), p.with("search_path=")} {
			require.NoError(t, Up(t.Context(), other.open(t), p.d), as.dsn)
		}
		require.NoError(t, Down(t.Context(), db, p.d, false), as.dsn)
		require.Equal(t, before, objects(t, p, owner), as.dsn)
	}
}

func TestStatementTimeoutDoesNotCutAStep(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t).with("statement_timeout=1s")
	require.NoError(t, withStep(t, p, p.open(t), `SELECT pg_sleep(1.5)`).up(t.Context()))
}

func TestConnectionsComeBackAsTheyWere(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t).with("search_path=app", "statement_timeout=7s", "lock_timeout=7s")
	db := p.open(t)
	db.SetMaxOpenConns(1)
	for _, f := range []func() error{
		func() error { return Up(t.Context(), db, p.d) },
		func() error { return Down(t.Context(), db, p.d, false) },
	} {
		require.NoError(t, f())
		var path, statement, lock string
		var locks int
		require.NoError(t, db.QueryRow(`SELECT current_setting('search_path'), current_setting('statement_timeout'),
			current_setting('lock_timeout'), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory')`).Scan(&path, &statement, &lock, &locks))
		require.Equal(t, []string{"app", "7s", "7s"}, []string{path, statement, lock})
		require.Zero(t, locks)
	}
}

// A session lock would stay behind on a pooled connection, and every later
// start would wait for it (S48).
func TestTransactionPoolerMayStandBetween(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, mode := range []string{"exec", "simple_protocol"} {
		p := onPostgres(t)
		direct := p.open(t)
		p.dsn = pgtest.Pooler(t, p.dsn, 3)
		p = p.param("default_query_exec_mode", mode)
		for range 2 {
			var wg sync.WaitGroup
			errs := make([]error, 5)
			for i := range errs {
				db := p.open(t)
				wg.Go(func() { errs[i] = Up(t.Context(), db, p.d) })
			}
			wg.Wait()
			for _, err := range errs {
				require.NoError(t, err)
			}
		}
		installed(t, p, p.open(t))
		require.NoError(t, Down(t.Context(), p.open(t), p.d, false))
		var locks int
		require.NoError(t, direct.QueryRow(`SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`).Scan(&locks))
		require.Zero(t, locks)
		require.Empty(t, objects(t, p, direct))
	}
}

func TestWaitForAnotherCallerIsBounded(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	holder := p.open(t)
	conn, err := holder.Conn(t.Context())
	require.NoError(t, err)
	defer conn.Close()
	e := postgres{p.d, time.Minute}
	require.NoError(t, e.begin(t.Context(), conn))

	db := p.open(t)
	in, err := open(db, p.d)
	require.NoError(t, err)
	in.e = postgres{p.d, 100 * time.Millisecond}
	err = in.patiently(t.Context(), in.up)
	require.ErrorContains(t, err, "another process has been migrating this outbox for 100ms")

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, Up(ctx, db, p.d), context.DeadlineExceeded)
	require.NoError(t, Up(t.Context(), db, p.d.In("", "other_")), "another outbox is not in the way")

	_, err = conn.ExecContext(t.Context(), `ROLLBACK`)
	require.NoError(t, err)
	require.NoError(t, Up(t.Context(), db, p.d))
}

func TestWaitForAStagerIsBounded(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	db := p.open(t)
	require.NoError(t, Up(t.Context(), db, p.d))
	tx, err := db.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(p.d.Render(`LOCK TABLE {t:entries} IN ROW EXCLUSIVE MODE`))
	require.NoError(t, err)
	in, err := open(db, p.d)
	require.NoError(t, err)
	in.e = postgres{p.d, 100 * time.Millisecond}
	err = in.down(t.Context(), false)
	require.ErrorContains(t, err, `lock table "public"."outbox_entries": `)
	installed(t, p, db)
}

func TestKilledServerHasAllOrNothing(t *testing.T) {
	if testing.Short() {
		return
	}
	c := pgtest.Start(t, pgtest.Options{Durable: true})
	p := place{dialect.Postgres().In("box", "o_"), "pgx", c.DSN()}
	db := p.open(t)
	failed := make(chan error)
	go func() { failed <- withStep(t, p, db, `SELECT pg_sleep(600)`).up(t.Context()) }()
	watch := p.open(t)
	require.Eventually(t, func() bool {
		var sleeping bool
		err := watch.QueryRow(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')`).Scan(&sleeping)
		return err == nil && sleeping
	}, 30*time.Second, 10*time.Millisecond)
	require.NoError(t, c.Kill())
	require.Error(t, <-failed)
	require.NoError(t, c.Start())
	require.Empty(t, objects(t, p, p.open(t)))
	require.NoError(t, Up(t.Context(), db, p.d))
	installed(t, p, db)
}

func TestReplicaIsNamed(t *testing.T) {
	if testing.Short() {
		return
	}
	p := onPostgres(t)
	db := p.open(t)
	tx, err := db.BeginTx(t.Context(), &sql.TxOptions{ReadOnly: true})
	require.NoError(t, err)
	defer tx.Rollback()
	_, err = tx.Exec(`CREATE TABLE x ()`) // as a replica answers
	in, openErr := open(db, p.d)
	require.NoError(t, openErr)
	require.ErrorContains(t, in.explain(err), "connect to the primary")
}
