package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
)

// Messages. Each call is one statement; what has to look again under a fresh
// snapshot, or must not depend on the planner, is a function of the migrations.

const (
	pgMessage = `m.ctid::text, m.key, m.seq, m.token, m.attempt, m.payload, m.headers, m.created_at, m.due, m.lease_until,
		m.last_error, m.grp, m.outcome, m.completed_at, m.ref, m.code, m.lapses`
	pgMessageOf = `x.place::text, x.key, x.seq, x.token, x.attempt, x.payload, x.headers, x.created_at, x.due, x.lease_until,
		x.last_error, x.grp, x.outcome, x.completed_at, x.ref, x.code, x.lapses`
)

// ignored is where a column goes that is not wanted.
type ignored struct{}

func (ignored) Scan(any) error { return nil }

// after follows destinations with n that ignore.
func after(dest []any, n int) []any {
	for range n {
		dest = append(dest, ignored{})
	}
	return dest
}

// behind scans a row from its column n on.
type behind struct {
	row Scanner
	n   int
}

func (b behind) Scan(dest ...any) error {
	return b.row.Scan(append(after(make([]any, 0, b.n+len(dest)), b.n), dest...)...)
}

func (postgres) claimMessages(ctx context.Context, run Runner, d Dialect, c ClaimMessages, at now, scan func(Scanner) error) error {
	reached := new(int64)
	if c.Reached != nil {
		reached = c.Reached
	}
	claimed := &pgClaimedMessage{reached: reached}
	return run(ctx, d.rendered(Statement{`
		SELECT x.key, x.grp, x.payload, x.numbers, x.words
		FROM {t:claim_messages_1}($1::text, $2::integer, $3::bigint, $4::bigint, $5::bigint, $6::boolean, $7::boolean, $8::bigint) AS x`,
		[]any{c.Channel, c.Limit, c.Lease, c.From, c.FromGroup, c.Full, c.SkipEnded, at},
	}), func(row Scanner) error { claimed.row = row; return scan(claimed) })
}

func (postgres) beginMessage(ctx context.Context, run Runner, d Dialect, channel, key string, lease int64, at now, scan func(Scanner) error) (result int16, err error) {
	err = run(ctx, d.rendered(Statement{
		`SELECT x.result, ` + pgMessageOf + ` FROM {t:begin_message_1}($1::text, $2::text, $3::bigint, $4::bigint) AS x`,
		[]any{channel, key, lease, at},
	}), func(row Scanner) error {
		if err := row.Scan(after([]any{&result}, MessageColumnCount)...); err != nil || result != ResultDone {
			return err
		}
		return scan(behind{row, 1})
	})
	return result, err
}

func (postgres) settleMessages(ctx context.Context, run Runner, d Dialect, s SettleMessages, at now) ([]int16, error) {
	return pgMarked(ctx, run, len(s.Keys), d.rendered(Statement{`
		SELECT ord, result FROM {t:settle_messages_1}($1::text, $2::text[]::tid[], $3::text[], $4::text[], $5::bigint[],
			$6::smallint[], $7::bigint[], $8::text[], $9::text[], $10::text[], $11::smallint[], $12::boolean[], $13::boolean, $14::bigint)`,
		[]any{
			s.Channel, tids(s.Places), s.Keys, s.Groups, s.Tokens, s.Outcomes, s.Delays, s.Errors, s.Refs, s.Codes, s.Doubts, s.Again, s.Keep, at,
		},
	}))
}

func (postgres) extendMessages(ctx context.Context, run Runner, d Dialect, e ExtendMessages, at now) ([]int16, error) {
	return pgMarked(ctx, run, len(e.Keys), d.rendered(Statement{
		`SELECT ord, result FROM {t:extend_messages_1}($1::text, $2::text[], $3::bigint[], $4::bigint, $5::bigint)`,
		[]any{e.Channel, e.Keys, e.Tokens, e.Lease, at},
	}))
}

// pgMarked is marked for a Runner.
func pgMarked(ctx context.Context, run Runner, n int, st Statement) ([]int16, error) {
	results := slices.Repeat([]int16{ResultDone}, n)
	return results, run(ctx, st, func(row Scanner) error {
		var ord int
		var result int16
		err := row.Scan(&ord, &result)
		if err == nil {
			results[ord-1] = result
		}
		return err
	})
}

// pgStates are the states of messages as conditions on what is stored.
var pgStates = map[int16]string{
	1: `m.outcome = 0 AND m.lease_until <= 0 AND m.attempt = 0`,
	2: `m.outcome = 0 AND m.lease_until <= 0 AND m.attempt > 0`,
	3: `m.outcome = 0 AND m.lease_until > 0`,
	4: `m.outcome = 1`,
	5: `m.outcome = 4 AND m.outcome > 1 AND m.seq > 0`, // what follows the first is an index's
	6: `m.outcome = 5 AND m.outcome > 1 AND m.seq > 0`,
}

// pgFiltered is the condition of a filter, without After and Limit. It names
// only what narrows, so that a plan made once serves all that look alike.
func pgFiltered(f MessageFilter) (string, []any) {
	where, args := []string{`m.channel = $1::text`}, []any{f.Channel}
	equals := func(column, value string) {
		if value != "" {
			args = append(args, value)
			where = append(where, fmt.Sprintf(`m.%s = $%d::text`, column, len(args)))
		}
	}
	equals("key", f.Key)
	equals("grp", f.Group)
	equals("code", f.Code)
	var states []string
	for _, state := range slices.Compact(slices.Sorted(slices.Values(f.States))) {
		states = append(states, `(`+pgStates[state]+`)`)
	}
	if len(states) > 0 {
		where = append(where, `(`+strings.Join(states, ` OR `)+`)`)
	}
	return strings.Join(where, ` AND `), args
}

func (postgres) listMessages(ctx context.Context, run Runner, d Dialect, f MessageFilter, payloads bool, _ now, scan func(Scanner) error) error {
	where, args := pgFiltered(f)
	columns, n := pgMessage, len(args)
	if !payloads {
		columns = strings.Replace(columns, `m.payload`, `''::bytea`, 1)
	}
	return run(ctx, d.rendered(Statement{
		`SELECT ` + columns + ` FROM {t:messages} AS m WHERE ` + where +
			fmt.Sprintf(` AND m.seq > $%d::bigint ORDER BY m.seq LIMIT $%d::integer`, n+1, n+2),
		append(args, f.After, f.Limit),
	}), scan)
}

// pgAmendable are the states that an action finds messages in.
var pgAmendable = map[int16][]int16{1: {2, 5, 6}, 2: {1, 2, 3, 4, 5, 6}, 3: {6}, 4: {6}, 5: {6}}

func (postgres) amendMessages(ctx context.Context, run Runner, d Dialect, a Amend, at now) (count, last int64, err error) {
	f := a.MessageFilter
	f.States = slices.DeleteFunc(slices.Clone(pgAmendable[a.Action]), func(state int16) bool {
		return len(a.States) > 0 && !slices.Contains(a.States, state)
	})
	if len(f.States) == 0 {
		return 0, 0, nil
	}
	where, args := pgFiltered(f)
	n := len(args)
	args = append(args, f.After, f.Limit, a.Action, a.Ref, a.DryRun, at)
	err = run(ctx, d.rendered(Statement{
		`WITH found AS (
			SELECT m.seq, m.key, m.grp FROM {t:messages} AS m WHERE ` + where +
			fmt.Sprintf(` AND m.seq > $%d::bigint ORDER BY m.seq LIMIT $%d::integer
		), a AS (
			SELECT count(*) AS n, max(f.seq) AS last, array_agg(f.key ORDER BY f.seq) AS keys, array_agg(f.grp) AS groups FROM found AS f
		)
		SELECT CASE WHEN a.n = 0 OR $%[5]d::boolean THEN a.n
				ELSE {t:amend_1}($1::text, a.keys, a.groups, $%[3]d::smallint, $%[4]d::text, $%[6]d::bigint) END,
			CASE WHEN a.n = $%[2]d::integer THEN a.last ELSE 0 END
		FROM a`, n+1, n+2, n+3, n+4, n+5, n+6),
		args,
	}), func(row Scanner) error { return row.Scan(&count, &last) })
	return count, last, err
}

func (postgres) purgeMessages(ctx context.Context, run Runner, d Dialect, p PurgeMessages, at now) (n int64, err error) {
	text := `SELECT {t:purge_1}($1::text, $2::smallint[], $3::bigint, $4::bigint, $5::integer, $6::bigint)`
	if p.DryRun {
		text = `
			SELECT count(*) FROM (
				SELECT FROM unnest($2::smallint[]) AS o (outcome)
				CROSS JOIN LATERAL (
					SELECT FROM {t:messages} AS m
					WHERE m.channel = $1::text AND m.outcome = o.outcome AND m.outcome <> 0
						AND m.completed_at > 0 AND m.completed_at < coalesce(nullif($3::bigint, 0), coalesce($6::bigint, ` + pgNow + `) - $4::bigint)
					LIMIT $5::integer
				) AS m LIMIT $5::integer
			) AS x`
	}
	err = run(ctx, d.rendered(Statement{text, []any{p.Channel, p.Outcomes, p.Before, p.Age, p.Limit, at}}),
		func(row Scanner) error { return row.Scan(&n) })
	return n, err
}

// own: one statement is one transaction.
func (p postgres) own(ctx context.Context, db *sql.DB, f func(Runner) error) error {
	return p.write(ctx, db, func(q Querier) error {
		return f(func(ctx context.Context, st Statement, scan func(Scanner) error) error {
			return each(ctx, q, st, func(rows *sql.Rows) error { return scan(rows) })
		})
	})
}
