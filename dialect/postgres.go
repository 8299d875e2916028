package dialect

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"time"
)

// postgres speaks PostgreSQL. What must not depend on the planner's
// statistics, or must be one round trip, is a function of the migrations; its
// name ends in a number that grows when it changes, so that old and new
// replicas run side by side. Every parameter has a cast, so that each of pgx's
// query modes sends it rightly, and nothing is kept in the session.
type postgres struct{}

func (postgres) name() string    { return "postgres" }
func (postgres) hostClock() bool { return false }

// The database's clock, where the caller gives none.
const (
	pgNow = `(date_part('epoch', clock_timestamp()) * 1000000)::bigint`
	// pgStatementNow is the same each time that one statement asks.
	pgStatementNow = `(date_part('epoch', statement_timestamp()) * 1000000)::bigint`
)

// Staging. A version must grow in commit order for its key. In DO UPDATE it is
// drawn under the row's lock and does. In the plain insert it is drawn before
// the row is in the unique index: while we stalled, another stager may have
// drawn a later one, committed, been published and deleted. But nothing is
// published unless it was claimed, under a new token, nor discarded without
// drawing one. So the last token given out is read before the version is drawn,
// and again, row by row, after the insert, when nobody else can have the key:
// where it has moved (or is NULL) the row draws again. It travels in the row's
// token, which means nothing before the first lease. The second reading is a
// function called in RETURNING; a sub-select there would be evaluated once for
// all rows and miss races. OFFSET 0 keeps the first from being moved.
const (
	pgToken  = `pg_sequence_last_value({s:token_seq}::regclass)`
	pgInsert = `
		INSERT INTO {t:entries} AS e (version, token, channel, key, payload, headers, tombstone, due, staged_at)
		SELECT nextval({s:seq}::regclass), s.token, $1::text, `
	pgFrom   = `, s.now FROM (SELECT coalesce(` + pgToken + `, 0) AS token, `
	pgDue    = `CASE WHEN $6::bigint > 0 THEN (s.now + $6::bigint - 1) / $6::bigint * $6::bigint ELSE s.now END`
	pgUpsert = `
		ON CONFLICT (channel, key) DO UPDATE SET
			version = nextval({s:seq}::regclass), payload = excluded.payload, headers = excluded.headers,
			tombstone = excluded.tombstone, staged_at = excluded.staged_at,
			due = CASE WHEN e.attempt = 0 THEN least(e.due, excluded.due) ELSE excluded.due END,
			attempt = 0, last_error = ''
		RETURNING `
	pgVersion = `CASE WHEN e.xmax = 0 AND ` + pgToken + ` IS DISTINCT FROM e.token
			THEN {t:redraw_1}(e.ctid) ELSE e.version END`

	// One row without a window to round to nor a clock to obey is the most of
	// what is staged, and each expression costs.
	pgOne        = pgInsert + `$2::text, $3::bytea, $4::text, $5::boolean, `
	pgOneAnswer  = ` AS now OFFSET 0) AS s` + pgUpsert + `(` + pgVersion + `)::text`
	pgStagePlain = pgOne + `s.now` + pgFrom + pgStatementNow + pgOneAnswer
	pgStageOne   = pgOne + pgDue + pgFrom + `coalesce($7::bigint, ` + pgStatementNow + `)` + pgOneAnswer

	// The keys come sorted, and nothing promises that RETURNING keeps an order.
	pgStage = `WITH staged AS (` + pgInsert + `s.key, s.payload, s.headers, s.tombstone, ` + pgDue + pgFrom + `n.now, i.*
			FROM (SELECT coalesce($7::bigint, ` + pgNow + `) AS now OFFSET 0) AS n
			CROSS JOIN unnest($2::text[], $3::bytea[], $4::text[], $5::boolean[]) AS i (key, payload, headers, tombstone) OFFSET 0) AS s` +
		pgUpsert + `e.key, ` + pgVersion + ` AS version)
		SELECT string_agg(s.version::text, ',' ORDER BY s.key) FROM staged AS s`
)

func (postgres) stage(s Stage, at now) Statement {
	if len(s.Keys) == 1 {
		args := []any{s.Channel, s.Keys[0], s.Payloads[0], s.Headers[0], s.Tombstones[0], s.Delay, at}
		if s.Delay == 0 && at == nil {
			return Statement{pgStagePlain, args[:5]}
		}
		return Statement{pgStageOne, args}
	}
	return Statement{pgStage, []any{s.Channel, s.Keys, s.Payloads, s.Headers, s.Tombstones, s.Delay, at}}
}

func (postgres) prepared() []string { return nil } // pgx keeps its own

// versions: one text with all of them is a third cheaper to send and read than a row each.
func (postgres) versions(answer string, n int) ([]int64, error) {
	versions := make([]int64, 0, n)
	for v := range strings.SplitSeq(answer, ",") {
		version, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return nil, err
		}
		versions = append(versions, version)
	}
	return versions, nil
}

func (postgres) pending(channel, key string) Statement {
	return Statement{
		`SELECT ctid::text, ` + rowColumns + ` FROM {t:entries} AS e WHERE e.channel = $1::text AND e.key = $2::text`,
		[]any{channel, key},
	}
}

func (postgres) list(channel, after string, limit int) Statement {
	return Statement{`
		SELECT ctid::text, key, version, token, attempt, ''::bytea, headers, tombstone, staged_at, due, lease_until, last_error
		FROM {t:entries} WHERE channel = $1::text AND key > $2::text ORDER BY channel, key LIMIT $3::integer`,
		[]any{channel, after, limit},
	}
}

// discard tells a locked row from one that has moved on by reading it again.
// It draws a token so that staging notices; see there.
func (p postgres) discard(ctx context.Context, db *sql.DB, d Dialect, channel, key string, version int64) (result int16, err error) {
	st := d.rendered(Statement{`
		WITH gone AS (
			DELETE FROM {t:entries} WHERE ctid = ANY (ARRAY(
				SELECT ctid FROM {t:entries}
				WHERE channel = $1::text AND key = $2::text AND version = $3::bigint
				FOR UPDATE SKIP LOCKED
			)) RETURNING nextval({s:token_seq}::regclass)
		)
		SELECT CASE
			WHEN EXISTS (SELECT FROM gone) THEN 1
			WHEN e.version IS NULL THEN 5
			WHEN e.version = $3::bigint THEN 4
			ELSE 3
		END
		FROM (SELECT) AS one LEFT JOIN {t:entries} AS e ON e.channel = $1::text AND e.key = $2::text`,
		[]any{channel, key, version},
	})
	err = d.Write(ctx, db, st, Once(func(rows *sql.Rows) error { return rows.Scan(&result) }))
	return result, err
}

func (postgres) claim(ctx context.Context, db *sql.DB, d Dialect, c Claim, at now, attempt func() func(Scanner) error) error {
	return d.Write(ctx, db, d.rendered(Statement{
		`SELECT key, payload, numbers, words FROM {t:claim_1}($1::text, $2::integer, $3::bigint, $4::bigint, $5::bigint)`,
		[]any{c.Channel, c.Limit, c.Lease, c.From, at},
	}), func() Scan {
		scan := attempt()
		claimed := &pgClaimed{}
		return func(rows *sql.Rows) error { claimed.row = rows; return scan(claimed) }
	})
}

func (postgres) settle(ctx context.Context, db *sql.DB, d Dialect, s Settle, at now) ([]int16, error) {
	results, attempt := marked(len(s.Keys))
	return results, d.Write(ctx, db, d.rendered(Statement{`
		SELECT ord, result FROM {t:settle_1}($1::text, $2::text[]::tid[], $3::text[], $4::bigint[], $5::bigint[],
			$6::smallint[], $7::bigint[], $8::text[], $9::boolean[], $10::bigint)`,
		[]any{s.Channel, tids(s.Places), s.Keys, s.Versions, s.Tokens, s.Outcomes, s.Delays, s.Errors, s.Again, at},
	}), attempt)
}

func (postgres) extend(ctx context.Context, db *sql.DB, d Dialect, e Extend, at now) ([]int16, error) {
	results, attempt := marked(len(e.Keys))
	return results, d.Write(ctx, db, d.rendered(Statement{
		`SELECT ord, result FROM {t:extend_1}($1::text, $2::text[], $3::bigint[], $4::bigint, $5::bigint)`,
		[]any{e.Channel, e.Keys, e.Tokens, e.Lease, at},
	}), attempt)
}

func (postgres) outage(o Outage, at now) Statement {
	if !o.Down {
		return Statement{`
			UPDATE {t:channels} SET outage_until = 0, outage_level = 0, outage_reason = '', probe_until = 0
			WHERE system = $1::smallint AND name = $2::text AND outage_level > 0`,
			[]any{o.System, o.Name},
		}
	}
	return Statement{`
		INSERT INTO {t:channels} AS c (system, name, outage_level, outage_until, outage_reason)
		SELECT $1::smallint, $2::text, 1, n.now + $4::bigint, $3::text
		FROM (SELECT coalesce($6::bigint, ` + pgNow + `) AS now) AS n
		ON CONFLICT (system, name) DO UPDATE SET
			outage_until = excluded.outage_until - $4::bigint
				+ least($5::bigint, $4::bigint * (1::bigint << least(c.outage_level, 20))),
			outage_level = c.outage_level + 1, outage_reason = excluded.outage_reason, probe_until = 0
		WHERE c.outage_until <= excluded.outage_until - $4::bigint`,
		[]any{o.System, o.Name, o.Reason, o.Base, o.Cap, at},
	}
}

func (postgres) pause(name string, length int64, reason string, at now) Statement {
	if length == 0 {
		return Statement{`
			UPDATE {t:channels} SET paused_until = 0, reason = '',
				outage_until = 0, outage_level = 0, outage_reason = '', probe_until = 0
			WHERE name = $1::text`,
			[]any{name},
		}
	}
	return Statement{`
		INSERT INTO {t:channels} (system, name, paused_until, reason)
		SELECT s.system, $1::text, coalesce($4::bigint, ` + pgNow + `) + $2::bigint, $3::text
		FROM (VALUES (1::smallint), (2::smallint)) AS s (system)
		ON CONFLICT (system, name) DO UPDATE SET paused_until = excluded.paused_until, reason = excluded.reason`,
		[]any{name, length, reason, at},
	}
}

func (postgres) fence(now) Statement {
	return Statement{`SELECT version, token FROM {t:fence_1}()`, nil}
}

func (p postgres) read(ctx context.Context, db *sql.DB, run func(Querier) error) error {
	return p.write(ctx, db, run)
}

// write: one statement is one transaction.
func (postgres) write(ctx context.Context, db *sql.DB, run func(Querier) error) error {
	err := run(db)
	if state, ok := sqlState(err); !ok || state != "40001" && state != "40P01" {
		return err
	}
	// The server's default isolation is above READ COMMITTED: say it aloud.
	tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := run(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// callerContext: pgx closes the connection of a cancelled statement, so
// nothing of the caller's can follow it unseen.
func (postgres) callerContext(ctx context.Context) context.Context { return ctx }

func (postgres) classify(err error) Fault {
	state, ok := sqlState(err)
	if !ok {
		if _, other := resultCode(err); other {
			return FaultOtherKind
		}
		return FaultOther
	}
	switch state {
	case "40001", "40P01":
		return FaultRetry
	case "42P01", "42883", "3F000", "42703", "42P10":
		return FaultSchema
	case "25P02":
		return FaultAborted
	case "42501":
		return FaultGrant
	case "25006":
		return FaultReadOnly
	}
	// Classes 08 and 57P0x: the server is going away and may not have said all.
	if strings.HasPrefix(state, "08") || strings.HasPrefix(state, "57P") {
		return FaultOther
	}
	return FaultAnswered
}

func (postgres) check(ctx context.Context, db *sql.DB, d Dialect) ([]Finding, error) {
	var version int
	var recovering, readOnly bool
	var isolation, commit, fsync string
	err := db.QueryRowContext(ctx, `
		SELECT current_setting('server_version_num')::integer, pg_is_in_recovery(), current_setting('transaction_read_only') = 'on',
			current_setting('default_transaction_isolation'), current_setting('synchronous_commit'), current_setting('fsync')`,
	).Scan(&version, &recovering, &readOnly, &isolation, &commit, &fsync)
	if err != nil {
		return nil, err
	}
	var fs findings
	fs.fault(version < 120000, "postgres %d is too old: 12 or later is needed", version/10000)
	fs.fault(recovering, "the server is a read-only replica: connect to the primary")
	fs.fault(readOnly && !recovering, "transactions are read-only: set default_transaction_read_only to off for the database and the role")
	fs.warn(isolation != "read committed", "default_transaction_isolation is %q: relays will repeat statements that fail with 40001; "+
		"set it to 'read committed' for their role", isolation)
	fs.warn(commit == "off", "synchronous_commit is off: what was committed in the last moments before a crash is lost, "+
		"and its versions may be given out again: run `outbox fence` after a crash")
	fs.warn(fsync == "off", "fsync is off: a crash of the machine can corrupt the whole database")
	if err := pgSnapshots(ctx, db, 10*time.Minute, &fs); err != nil {
		return nil, err
	}
	err = pgGrants(ctx, db, d, &fs)
	return fs, err
}
