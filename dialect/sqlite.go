package dialect

import (
	"context"
	"database/sql"
	"net/url"
	"strings"
)

// sqlite speaks SQLite through modernc.org/sqlite. There is one writer, so a
// counter row issues versions and tokens, and a relay's write is a transaction
// begun with BEGIN IMMEDIATE on a connection held for it. Times come from the
// host and are bound as integers, never as time.Time, which the driver would
// store as text with its monotonic part.
type sqlite struct{}

func (sqlite) name() string    { return "sqlite" }
func (sqlite) hostClock() bool { return true }

// SQLiteDSN returns a data source name for the driver "sqlite" that has what
// an outbox needs on every connection: WAL, so that readers and the writer do
// not wait for each other; a busy_timeout of 5 s, so that writers wait for each
// other rather than fail; _txlock=immediate, so that a transaction that reads
// first can still write; and synchronous=FULL, so that a commit survives a
// power cut. The path is a file's; an in-memory database has no place here,
// since each connection of a pool would see its own.
func SQLiteDSN(path string) string {
	if strings.HasPrefix(path, "//") { // or the first folder would be a host
		path = "/" + strings.TrimLeft(path, "/")
	}
	return "file:" + (&url.URL{Path: path}).EscapedPath() +
		"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
}

func (sqlite) pending(channel, key string) Statement {
	return Statement{
		`SELECT id, ` + rowColumns + ` FROM {t:entries} WHERE channel = ?1 AND key = ?2`,
		[]any{channel, key},
	}
}

func (sqlite) list(channel, after string, limit int) Statement {
	return Statement{`
		SELECT id, key, version, token, attempt, x'', headers, tombstone, staged_at, due, lease_until, last_error
		FROM {t:entries} WHERE channel = ?1 AND key > ?2 ORDER BY key LIMIT ?3`,
		[]any{channel, after, limit},
	}
}

func (sqlite) discard(ctx context.Context, db *sql.DB, d Dialect, channel, key string, version int64) (int16, error) {
	var held int64
	gone := d.rendered(Statement{`DELETE FROM {t:entries} WHERE channel = ?1 AND key = ?2 AND version = ?3`, []any{channel, key, version}})
	read := d.rendered(Statement{`SELECT version FROM {t:entries} WHERE channel = ?1 AND key = ?2`, []any{channel, key}})
	err := immediate(ctx, db, func(ctx context.Context, q Querier) error {
		if err := each(ctx, q, read, func(rows *sql.Rows) error { return rows.Scan(&held) }); err != nil {
			return err
		}
		return each(ctx, q, gone, none)
	})
	switch held {
	case version:
		return ResultDone, err
	case 0:
		return ResultNotFound, err
	}
	return ResultStale, err
}

// updateEntries changes entries by their ids, those of a query: by an upsert,
// for the reason told at updateMessages.
func updateEntries(ids string) string {
	return `
		INSERT INTO {t:entries} (id, version, due, staged_at, tombstone, channel, key, payload)
		SELECT id, 0, 0, 0, 0, '', id, x'' FROM (` + ids + `) WHERE true
		ON CONFLICT (id) DO UPDATE SET `
}

// claim leases due rows where the channel is not paused; after an outage one,
// for the caller whose token the probe then carries. It looks before it takes
// the write lock: most looks find nothing.
func (sqlite) claim(ctx context.Context, db *sql.DB, d Dialect, c Claim, at now, attempt func() func(Scanner) error) error {
	found := false
	peek := d.rendered(Statement{
		`SELECT 1 FROM {t:entries} INDEXED BY {i:entries_due_idx} WHERE channel = ?1 AND due <= ?2 AND lease_until <= ?2 LIMIT 1`, []any{c.Channel, at},
	})
	if err := each(ctx, db, peek, func(*sql.Rows) error { found = true; return nil }); err != nil || !found {
		return err
	}
	claim := d.rendered(Statement{`
		UPDATE {t:seq} SET token = max(token + 1, ?4);
		UPDATE {t:channels} SET probe_until = ?4 + ?3, probe_token = (SELECT token FROM {t:seq})
		WHERE system = 1 AND name = ?1 AND outage_level > 0 AND max(paused_until, outage_until, probe_until) <= ?4;
		` + updateEntries(`
			SELECT id FROM {t:entries} INDEXED BY {i:entries_due_idx} WHERE channel = ?1 AND due <= ?4 AND lease_until <= ?4
			ORDER BY due, id LIMIT coalesce((
				SELECT CASE WHEN max(paused_until, outage_until) > ?4 THEN 0 WHEN outage_level = 0 THEN ?2
					ELSE probe_token = (SELECT token FROM {t:seq}) END
				FROM {t:channels} WHERE system = 1 AND name = ?1
			), ?2)`) + `
			lease_until = ?4 + ?3, token = (SELECT token FROM {t:seq}), attempt = min(attempt, 2147483646) + 1
		RETURNING id, ` + rowColumns + `,
			EXISTS (SELECT 1 FROM {t:channels} WHERE system = 1 AND name = ?1 AND outage_level > 0)`,
		[]any{c.Channel, c.Limit, c.Lease, at},
	})
	return immediate(ctx, db, func(ctx context.Context, q Querier) error {
		scan := attempt()
		return each(ctx, q, claim, func(rows *sql.Rows) error { return scan(rows) })
	})
}

// settle deletes what was published and looks closer only at what is left.
func (sqlite) settle(ctx context.Context, db *sql.DB, d Dialect, s Settle, at now) ([]int16, error) {
	results := make([]int16, len(s.Places))
	err := immediate(ctx, db, func(ctx context.Context, q Querier) error {
		if err := sqlitePublished(ctx, q, d, s, results); err != nil {
			return err
		}
		left := make([]int, 0)
		for i, r := range results {
			if r == 0 {
				left = append(left, i)
			}
		}
		if len(left) == 0 {
			return nil
		}
		return sqliteLeft(ctx, q, d, s, at, left, results)
	})
	return results, err
}

// sqlitePublished deletes the rows whose outcome is done and marks them. A
// version is one row's, so a set of them serves; a token is a batch's, so each
// has a statement of its own.
func sqlitePublished(ctx context.Context, q Querier, d Dialect, s Settle, results []int16) error {
	ordinals := make(map[Place]int, len(s.Places))
	type batch struct {
		ids      []Place
		versions []int64
	}
	batches := make(map[int64]*batch, 1)
	for i, id := range s.Places {
		if s.Outcomes != nil && s.Outcomes[i] != OutcomeDone {
			continue
		}
		ordinals[id] = i
		b := batches[s.Tokens[i]]
		if b == nil {
			b = new(batch)
			batches[s.Tokens[i]] = b
		}
		b.ids, b.versions = append(b.ids, id), append(b.versions, s.Versions[i])
	}
	for token, b := range batches {
		st := d.rendered(Statement{`
			INSERT INTO {t:entries_gone} (id)
			SELECT i.value FROM json_each(?1) AS i WHERE (SELECT e.lease_until FROM {t:entries} AS e
				WHERE e.id = i.value AND e.token = ?3 AND e.version IN (SELECT value FROM json_each(?2))) > 0
			RETURNING id`,
			[]any{toJSON(b.ids), toJSON(b.versions), token},
		})
		err := each(ctx, q, st, func(rows *sql.Rows) error {
			var id Place
			err := rows.Scan(&id)
			results[ordinals[id]] = ResultDone
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// sqliteLeft keeps, frees or refuses the rows that were not deleted, one by
// one: they are few.
func sqliteLeft(ctx context.Context, q Querier, d Dialect, s Settle, at now, left []int, results []int16) error {
	for _, i := range left {
		var version, token, until int64
		found := false
		read := d.rendered(Statement{`SELECT version, token, lease_until FROM {t:entries} WHERE id = ?1`, []any{int64(s.Places[i])}})
		err := each(ctx, q, read, func(rows *sql.Rows) error {
			found = true
			return rows.Scan(&version, &token, &until)
		})
		if err != nil {
			return err
		}
		outcome := int16(OutcomeDone)
		if s.Outcomes != nil {
			outcome = s.Outcomes[i]
		}
		results[i] = ResultDone
		var end Statement
		switch {
		case !found && s.Again != nil && s.Again[i]:
		case !found || token != s.Tokens[i]:
			results[i] = ResultStale
		case until <= 0: // ours, and settled before
			if until != -int64(outcome) {
				results[i] = ResultStale
			}
		case version != s.Versions[i]:
			results[i] = ResultSuperseded
			end = Statement{`UPDATE {t:entries} SET lease_until = -?2 WHERE id = ?1`, []any{int64(s.Places[i]), outcome}}
		default:
			end = Statement{`
				UPDATE {t:entries} SET lease_until = -?4, due = ?2 + ?3, attempt = attempt - (?4 = 3),
					last_error = CASE WHEN ?5 = '' THEN last_error ELSE ?5 END
				WHERE id = ?1`,
				[]any{int64(s.Places[i]), at, s.Delays[i], outcome, s.Errors[i]},
			}
		}
		if end.Text == "" {
			continue
		}
		if err := each(ctx, q, d.rendered(end), none); err != nil {
			return err
		}
	}
	return nil
}

func (sqlite) extend(ctx context.Context, db *sql.DB, d Dialect, e Extend, at now) ([]int16, error) {
	results := make([]int16, len(e.Places))
	ordinals := make(map[Place]int, len(e.Places))
	held := make([][2]int64, len(e.Places))
	for i, id := range e.Places {
		results[i] = ResultStale
		ordinals[id] = i
		held[i] = [2]int64{int64(id), e.Tokens[i]}
	}
	st := d.rendered(Statement{
		updateEntries(`
			SELECT s.value ->> 0 AS id FROM json_each(?1) AS s
			WHERE (SELECT e.lease_until FROM {t:entries} AS e WHERE e.id = s.value ->> 0 AND e.token = s.value ->> 1) > 0`) + `
			lease_until = ?2 + ?3 RETURNING id`,
		[]any{toJSON(held), at, e.Lease},
	})
	return results, immediate(ctx, db, func(ctx context.Context, q Querier) error {
		return each(ctx, q, st, func(rows *sql.Rows) error {
			var id Place
			err := rows.Scan(&id)
			results[ordinals[id]] = ResultDone
			return err
		})
	})
}

func (sqlite) outage(o Outage, at now) Statement {
	if !o.Down {
		return Statement{`
			UPDATE {t:channels} SET outage_until = 0, outage_level = 0, outage_reason = '', probe_until = 0
			WHERE system = ?1 AND name = ?2 AND outage_level > 0`,
			[]any{o.System, o.Name},
		}
	}
	return Statement{`
		INSERT INTO {t:channels} (system, name, outage_level, outage_until, outage_reason)
		VALUES (?1, ?2, 1, ?6 + ?4, ?3)
		ON CONFLICT (system, name) DO UPDATE SET
			outage_until = ?6 + min(?5, ?4 * (1 << min(outage_level, 20))),
			outage_level = outage_level + 1, outage_reason = excluded.outage_reason, probe_until = 0
		WHERE outage_until <= ?6`,
		[]any{o.System, o.Name, o.Reason, o.Base, o.Cap, at},
	}
}

func (sqlite) pause(name string, length int64, reason string, at now) Statement {
	if length == 0 {
		return Statement{`
			UPDATE {t:channels} SET paused_until = 0, reason = '',
				outage_until = 0, outage_level = 0, outage_reason = '', probe_until = 0
			WHERE name = ?1`,
			[]any{name},
		}
	}
	return Statement{`
		INSERT INTO {t:channels} (system, name, paused_until, reason)
		SELECT s.column1, ?1, ?4 + ?2, ?3 FROM (VALUES (1), (2)) AS s WHERE true
		ON CONFLICT (system, name) DO UPDATE SET paused_until = excluded.paused_until, reason = excluded.reason`,
		[]any{name, length, reason, at},
	}
}

func (sqlite) fence(at now) Statement {
	return Statement{`
		UPDATE {t:seq} SET version = max(version + 1, ?1), token = max(token + 1, ?1) RETURNING version, token`,
		[]any{at},
	}
}
