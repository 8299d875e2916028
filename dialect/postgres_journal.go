package dialect

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Messages. Each call is one statement; what has to look again under a fresh
// snapshot, or must not depend on the planner, is a function of the migrations.

const (
	pgMessage = `m.ctid::text, m.key, m.seq, m.token, m.attempt, m.payload, m.headers, m.created_at, m.due, m.lease_until,
		m.last_error, m.grp, m.outcome, m.completed_at, m.ref, m.code, m.lapses > 0`
	pgMessageOf = `x.place::text, x.key, x.seq, x.token, x.attempt, x.payload, x.headers, x.created_at, x.due, x.lease_until,
		x.last_error, x.grp, x.outcome, x.completed_at, x.ref, x.code, x.ambiguous`
)

// Putting. What is not begun, and one of a group or any number without, is
// written by a plain insert, which costs half of what a function would. A group
// is locked first; counting what that returns makes the number be drawn later.
// Only where the insert leaves messages unwritten, because they exist or did a
// moment ago, put_1 looks at these under snapshots of its own: in the same
// statement, save for one message without a group, where merely preparing for
// that cost a tenth of the Put, and nothing has been written that a second
// statement could find half done.
const (
	pgPutOne = `
		INSERT INTO {t:messages} AS m (seq, channel, key, headers, payload, due, created_at)
		VALUES (nextval({s:seq}::regclass), $1::text, $2::text, $4::text, $3::bytea, `
	pgPutOneDone = `)
		ON CONFLICT (channel, key) DO NOTHING
		RETURNING m.created_at || ';0;' || m.seq`
	pgPutPlain = pgPutOne + pgStatementNow + ` + $5::bigint, ` + pgStatementNow + pgPutOneDone
	pgPutAt    = pgPutOne + `$6::bigint + $5::bigint, $6::bigint` + pgPutOneDone

	pgPutExisting = `
		SELECT x FROM {t:put_1}($1::text, ARRAY[$2::text], NULL, ARRAY[$3::bytea], ARRAY[$4::text], ARRAY[$5::bigint], 0, NULL, NULL, $6::bigint) AS x`

	pgPutNew = `
			INSERT INTO {t:messages} AS m (seq, channel, key, grp, due, created_at, headers, payload)
			SELECT nextval({s:seq}::regclass), $1::text, i.key, i.grp, n.now + i.delay, n.now, i.headers, i.payload
			FROM (SELECT coalesce($6::bigint, ` + pgNow + `) AS now OFFSET 0) AS n
			CROSS JOIN `
	pgPutDone = ` AS i (key, payload, headers, delay, grp)
			ON CONFLICT (channel, key) DO NOTHING
			RETURNING m.key, m.seq, m.created_at`
	pgPutInGroup = `
		WITH locked AS (
			INSERT INTO {t:groups} AS g (channel, grp, due)
			VALUES ($1::text, $7::text, coalesce($6::bigint, ` + pgNow + `) + $5::bigint)
			ON CONFLICT (channel, grp) DO UPDATE SET due = excluded.due WHERE g.due = 9223372036854775806
			RETURNING g.xmax = 0 AS fresh
		), put AS (` + pgPutNew + `(SELECT count(*) FROM locked) AS l
			CROSS JOIN (SELECT $2::text, $3::bytea, $4::text, $5::bigint, $7::text)` + pgPutDone + `
		)
		SELECT p.created_at || ';0;' || p.seq FROM put AS p
		UNION ALL
		SELECT x FROM {t:put_1}($1::text, ARRAY[$2::text], ARRAY[$7::text], ARRAY[$3::bytea], ARRAY[$4::text], ARRAY[$5::bigint],
			0, ARRAY[NULL::bigint], (SELECT l.fresh FROM locked AS l), $6::bigint) AS x
		WHERE NOT EXISTS (SELECT FROM put)`

	// The keys come sorted, and nothing promises that RETURNING keeps an order.
	// $4 and $5 are NULL where no message has headers or a delay, as most have:
	// each array that is unnested costs a few percent.
	pgPutMany = `
		WITH put AS (` + pgPutNew + `(SELECT i.*, '' FROM unnest($2::text[], $3::bytea[], $4::text[], $5::bigint[]) AS i)` + pgPutDone + pgPutManyDone
	pgPutManyPlain = `
		WITH put AS (` + pgPutNew + `(SELECT i.*, '', 0::bigint, '' FROM unnest($2::text[], $3::bytea[]) AS i)` + pgPutDone + pgPutManyDone
	pgPutManyDone = `
		), made AS (
			SELECT count(*) AS n, min(p.created_at) AS now, string_agg(p.seq::text, ',' ORDER BY p.key) AS seqs FROM put AS p
		)
		SELECT made.now || ';0;' || made.seqs FROM made WHERE made.n = cardinality($2::text[])
		UNION ALL
		SELECT x FROM made CROSS JOIN LATERAL {t:put_1}($1::text, $2::text[], NULL, $3::bytea[],
			coalesce($4::text[], array_fill(''::text, ARRAY[cardinality($2::text[])])),
			coalesce($5::bigint[], array_fill(0::bigint, ARRAY[cardinality($2::text[])])), 0,
			ARRAY(
				SELECT p.seq FROM unnest($2::text[]) WITH ORDINALITY AS i (key, ord) LEFT JOIN put AS p ON p.key = i.key ORDER BY i.ord
			), NULL, coalesce(made.now, $6::bigint)) AS x
		WHERE made.n < cardinality($2::text[])`

	pgPutOrdered = `
		SELECT x FROM {t:put_1}($1::text, $2::text[], $7::text[], $3::bytea[], $4::text[], $5::bigint[], $8::bigint, NULL, NULL, $6::bigint) AS x`
)

func (postgres) put(ctx context.Context, run Runner, d Dialect, p PutMessages, at now, existing func(i int, row Scanner) error) ([]PutMessage, error) {
	order, st := pgPut(p, at)
	answers := make([]PutMessage, len(p.Keys))
	var last string
	read := func(row Scanner) error {
		if err := row.Scan(&last); err != nil || !strings.HasPrefix(last, "[") {
			return err
		}
		var ord int
		var differs bool
		var columns json.RawMessage
		if err := (jsonRow(last)).Scan(&ord, &differs, &columns); err != nil {
			return err
		}
		i := order(ord - 1)
		answers[i].Differs = differs
		return existing(i, jsonRow(columns))
	}
	err := run(ctx, d.rendered(st), read)
	if err == nil && last == "" { // one, and its key exists
		err = run(ctx, d.rendered(Statement{pgPutExisting, []any{p.Channel, p.Keys[0], p.Payloads[0], p.Headers[0], p.Delays[0], at}}), read)
	}
	if err != nil {
		return nil, err
	}
	return answers, pgCreated(answers, p, order, last)
}

// jsonRow is a row as a JSON array.
type jsonRow []byte

func (r jsonRow) Scan(dest ...any) error { return json.Unmarshal(r, &dest) }

// pgPut chooses the statement; order tells the index of the message that is
// the nth in the statement.
func pgPut(p PutMessages, at now) (order func(n int) int, st Statement) {
	same := func(n int) int { return n }
	grouped := slices.ContainsFunc(p.Groups, func(g string) bool { return g != "" })
	switch {
	case len(p.Keys) == 1 && p.Begin == 0:
		args := []any{p.Channel, p.Keys[0], p.Payloads[0], p.Headers[0], p.Delays[0], at, p.Groups[0]}
		switch {
		case grouped:
			return same, Statement{pgPutInGroup, args}
		case at != nil:
			return same, Statement{pgPutAt, args[:6]}
		}
		return same, Statement{pgPutPlain, args[:5]}
	case grouped || p.Begin > 0:
		groups := p.Groups
		if !grouped {
			groups = nil
		}
		return same, Statement{pgPutOrdered, []any{p.Channel, p.Keys, p.Payloads, p.Headers, p.Delays, at, groups, p.Begin}}
	case slices.IsSorted(p.Keys):
		return same, pgPutSorted(p.Channel, p.Keys, p.Payloads, p.Headers, p.Delays, at)
	}
	places := make([]int, len(p.Keys))
	for i := range places {
		places[i] = i
	}
	slices.SortFunc(places, func(a, b int) int { return strings.Compare(p.Keys[a], p.Keys[b]) })
	return func(n int) int { return places[n] }, pgPutSorted(p.Channel,
		picked(p.Keys, places), picked(p.Payloads, places), picked(p.Headers, places), picked(p.Delays, places), at)
}

func pgPutSorted(channel string, keys []string, payloads [][]byte, headers []string, delays []int64, at now) Statement {
	if slices.ContainsFunc(headers, func(h string) bool { return h != "" }) || slices.ContainsFunc(delays, func(d int64) bool { return d != 0 }) {
		return Statement{pgPutMany, []any{channel, keys, payloads, headers, delays, at}}
	}
	return Statement{pgPutManyPlain, []any{channel, keys, payloads, nil, nil, at}}
}

func picked[T any](from []T, places []int) []T {
	to := make([]T, len(places))
	for i, place := range places {
		to[i] = from[place]
	}
	return to
}

// pgCreated reads 'created_at;token;numbers': a number for each message, none
// for one that existed.
func pgCreated(answers []PutMessage, p PutMessages, order func(int) int, answer string) error {
	if answer == "!" {
		return ErrBlocked
	}
	parts := strings.Split(answer, ";")
	if len(parts) != 3 {
		return fmt.Errorf("the database's answer to a put is not understood")
	}
	created, err := strconv.ParseInt(parts[0], 10, 64)
	token, err2 := strconv.ParseInt(parts[1], 10, 64)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	n := 0
	for text := range strings.SplitSeq(parts[2], ",") {
		if n == len(answers) {
			return fmt.Errorf("the database answered with more than %d numbers for as many messages", n)
		}
		i := order(n)
		n++
		if text == "" {
			continue
		}
		a := PutMessage{Created: true, Token: token, CreatedAt: created, Due: created + p.Delays[i]}
		if a.Seq, err = strconv.ParseInt(text, 10, 64); err != nil {
			return err
		}
		if p.Begin > 0 {
			a.Due, a.LeaseUntil = created, created+p.Begin
		}
		answers[i] = a
	}
	if n != len(answers) {
		return fmt.Errorf("the database answered with %d numbers for %d messages", n, len(answers))
	}
	return nil
}

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

// before scans a row but for its last columns, which go elsewhere.
type before struct {
	row  Scanner
	last []any
}

func (b before) Scan(dest ...any) error { return b.row.Scan(append(dest, b.last...)...) }

func (postgres) claimMessages(ctx context.Context, run Runner, d Dialect, c ClaimMessages, at now, scan func(Scanner) error) error {
	reached := []any{ignored{}}
	if c.Reached != nil {
		reached[0] = c.Reached
	}
	return run(ctx, d.rendered(Statement{`
		SELECT ` + pgMessageOf + `, x.probe, x.reached
		FROM {t:claim_messages_1}($1::text, $2::integer, $3::bigint, $4::bigint, $5::bigint, $6::boolean, $7::boolean, $8::bigint) AS x`,
		[]any{c.Channel, c.Limit, c.Lease, c.From, c.FromGroup, c.Full, c.SkipEnded, at},
	}), func(row Scanner) error { return scan(before{row, reached}) })
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
			$6::smallint[], $7::bigint[], $8::text[], $9::text[], $10::text[], $11::boolean[], $12::boolean, $13::bigint)`,
		[]any{
			s.Channel, tids(s.Places), s.Keys, s.Groups, s.Tokens, s.Outcomes, s.Delays, s.Errors, s.Refs, s.Codes, s.Again, s.Keep, at,
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
