package dialect

import "context"

// sqliteHeld are leases of one token, since a set of keys and one token name
// rows exactly: a token is a batch's.
type sqliteHeld struct {
	keys     []string
	ordinals map[string]int
}

// sqliteByToken sorts leases by their tokens, those that want says.
func sqliteByToken(keys []string, tokens []int64, want func(i int) bool) map[int64]*sqliteHeld {
	held := make(map[int64]*sqliteHeld, 1)
	for i, key := range keys {
		if !want(i) {
			continue
		}
		h := held[tokens[i]]
		if h == nil {
			h = &sqliteHeld{ordinals: make(map[string]int, len(keys))}
			held[tokens[i]] = h
		}
		h.keys = append(h.keys, key)
		h.ordinals[key] = i
	}
	return held
}

// sqliteSettling is one settlement of messages. What ends the lease of a
// grouped message adds its group and the token.
type sqliteSettling struct {
	SettleMessages
	run     Runner
	d       Dialect
	now     int64
	results []int16
	groups  map[sqliteRun]bool
}

type sqliteRun struct {
	group string
	token int64
}

// settleMessages ends what was sent, then the rest, and looks closer only at
// what is left. Then it lets groups go.
func (sqlite) settleMessages(ctx context.Context, run Runner, d Dialect, s SettleMessages, at now) ([]int16, error) {
	x := &sqliteSettling{s, run, d, at.(int64), make([]int16, len(s.Keys)), map[sqliteRun]bool{}}
	if err := x.sent(ctx); err != nil {
		return nil, err
	}
	if err := x.others(ctx); err != nil {
		return nil, err
	}
	if err := x.left(ctx); err != nil {
		return nil, err
	}
	return x.results, x.release(ctx)
}

func (x *sqliteSettling) outcome(i int) int16 {
	if x.Outcomes == nil {
		return OutcomeDone
	}
	return x.Outcomes[i]
}

func (x *sqliteSettling) doubt(i int) int16 {
	if x.Doubts == nil {
		return 0
	}
	return x.Doubts[i]
}

// plain reports whether a message was sent and nothing of it is to be noted.
func (x *sqliteSettling) plain(i int) bool {
	return x.outcome(i) == OutcomeDone && (!x.Keep || x.Refs == nil || x.Refs[i] == "")
}

// sent deletes messages that were sent, or keeps them.
func (x *sqliteSettling) sent(ctx context.Context) error {
	text := deleteMessages(`
		SELECT leases.seq, leases.key, (SELECT m.grp FROM {t:messages} AS m WHERE m.seq = leases.seq)
		FROM (SELECT value AS key, ` + held(`value`) + ` AS seq FROM json_each(?2) LIMIT -1) AS leases -- the limit has each looked up once
		WHERE leases.seq IS NOT NULL`)
	if x.Keep {
		text = updateHeld(``) + `outcome = 1, completed_at = ?4, lease_until = -1, lapses = 0`
	}
	text = x.d.Render(text + ` RETURNING key, grp`)
	for token, h := range sqliteByToken(x.Keys, x.Tokens, x.plain) {
		err := x.run(ctx, Statement{text, []any{x.Channel, toJSON(h.keys), token, x.now}}, x.done(token, h))
		if err != nil {
			return err
		}
	}
	return nil
}

// done scans the key and the group of a message whose lease ended.
func (x *sqliteSettling) done(token int64, h *sqliteHeld) func(Scanner) error {
	return func(row Scanner) error {
		var key, group string
		err := row.Scan(&key, &group)
		x.results[h.ordinals[key]] = ResultDone
		if group != "" {
			x.groups[sqliteRun{group, token}] = true
		}
		return err
	}
}

// others notes what became of messages: retried, released, dead, unknown, or
// sent and kept with a reference.
func (x *sqliteSettling) others(ctx context.Context) error {
	text := x.d.Render(updateHeld(`, outcome, due, last_error, ref, code, lapses`) + `
			outcome      = iif(excluded.outcome IN (2, 3), 0, excluded.outcome),
			due          = iif(excluded.outcome IN (2, 3), ?4 + excluded.due, m.due),
			completed_at = iif(excluded.outcome IN (2, 3), 0, ?4),
			lease_until  = -excluded.outcome,
			lapses       = iif(excluded.outcome NOT IN (2, 3), 0, iif(excluded.lapses > 0, excluded.lapses & 1, min(m.lapses, 1))),
			attempt      = max(0, m.attempt - (excluded.outcome = 3)),
			ref          = iif(excluded.outcome = 1, excluded.ref, m.ref),
			last_error   = iif(excluded.last_error = '', m.last_error, excluded.last_error),
			code         = iif(excluded.last_error = '' AND excluded.code = '', m.code, excluded.code)
		RETURNING key, grp`)
	held := sqliteByToken(x.Keys, x.Tokens, func(i int) bool { return !x.plain(i) })
	for token, h := range held {
		rows := make([][7]any, len(h.keys))
		for n, key := range h.keys {
			i := h.ordinals[key]
			rows[n] = [7]any{key, x.outcome(i), x.Delays[i], x.Errors[i], x.Refs[i], x.Codes[i], x.doubt(i)}
		}
		if err := x.run(ctx, Statement{text, []any{x.Channel, toJSON(rows), token, x.now}}, x.done(token, h)); err != nil {
			return err
		}
	}
	return nil
}

// left tells a settlement that took effect before from one that came too late.
func (x *sqliteSettling) left(ctx context.Context) error {
	ordinals := make(map[string][]int)
	keys := make([]string, 0)
	for i, r := range x.results {
		if r == 0 {
			keys = append(keys, x.Keys[i])
			ordinals[x.Keys[i]] = append(ordinals[x.Keys[i]], i)
			if x.results[i] = ResultStale; x.Again != nil && x.Again[i] {
				x.results[i] = ResultDone // unless it is found
			}
		}
	}
	if len(keys) == 0 {
		return nil
	}
	st := x.d.rendered(Statement{
		`SELECT key, token, lease_until FROM {t:messages} WHERE channel = ?1 AND key IN (SELECT value FROM json_each(?2))`,
		[]any{x.Channel, toJSON(keys)},
	})
	return x.run(ctx, st, func(row Scanner) error {
		var key string
		var token, until int64
		err := row.Scan(&key, &token, &until)
		for _, i := range ordinals[key] {
			if x.results[i] = ResultStale; token == x.Tokens[i] && until == -int64(x.outcome(i)) {
				x.results[i] = ResultDone // before
			}
		}
		return err
	})
}

// open are the open messages of group g.
const open = `FROM ` + grouped + ` = 0`

// outside: no message of group g is out under its lease any more.
const outside = `NOT EXISTS (SELECT 1 ` + open + ` AND m.seq <= g.run_end AND m.token = g.token AND m.lease_until > 0)`

// release lets the groups go of whose runs nothing is out any more. They are
// due when their first open message is; at once where a message has ended dead
// or unknown, for the next claim to see what that means.
func (x *sqliteSettling) release(ctx context.Context) error {
	if len(x.groups) == 0 {
		return nil
	}
	runs := make([]groupRun, 0, len(x.groups))
	for r := range x.groups {
		runs = append(runs, groupRun{r.group, r.token})
	}
	return x.run(ctx, x.d.rendered(Statement{updateGroups(2) + `
			lease_until = 0,
			gone = (SELECT 1 ` + open + ` LIMIT 1) IS NULL,
			due = iif(` + anyEnded + ` AND EXISTS (SELECT 1 FROM ` + grouped + ` IN (4, 5)), ?3,
				coalesce((SELECT m.due ` + open + ` ORDER BY m.seq LIMIT 1), 0))
		WHERE token = excluded.run_end AND ` + outside,
		[]any{x.Channel, toJSON(runs), x.now},
	}), unread)
}

// sqliteWake makes groups due whose messages somebody has changed, gives them
// their row where they have open messages and takes it where they have not.
func sqliteWake(ctx context.Context, run Runner, d Dialect, channel string, groups map[string]bool, at now) error {
	if len(groups) == 0 {
		return nil
	}
	names := make([]groupRun, 0, len(groups))
	for name := range groups {
		names = append(names, groupRun{name, 0})
	}
	return run(ctx, d.rendered(Statement{updateGroups(2) + `
			due = ?3, gone = (SELECT 1 ` + open + ` LIMIT 1) IS NULL, lease_until = iif(` + outside + `, 0, lease_until);
		INSERT INTO {t:groups} (channel, grp, due)
		SELECT ?1, g.grp, ?3 FROM (SELECT value ->> 0 AS grp FROM json_each(?2)) AS g WHERE (SELECT 1 ` + open + ` LIMIT 1) IS NOT NULL
		ON CONFLICT (channel, grp) DO NOTHING`,
		[]any{channel, toJSON(names), at},
	}), unread)
}

// extendMessages: what is left of a run whose group another relay has taken
// since cannot be extended, or two runs of the group would be out.
func (sqlite) extendMessages(ctx context.Context, run Runner, d Dialect, e ExtendMessages, at now) ([]int16, error) {
	results := make([]int16, len(e.Keys))
	for i := range results {
		results[i] = ResultStale
	}
	for token, h := range sqliteByToken(e.Keys, e.Tokens, func(int) bool { return true }) {
		var groups []groupRun
		err := run(ctx, d.rendered(Statement{updateHeld(``) + ` lease_until = ?4 + ?5
			WHERE grp = '' OR (SELECT token FROM {t:groups} AS g WHERE g.channel = ?1 AND g.grp = m.grp) = ?3
			RETURNING key, grp`,
			[]any{e.Channel, toJSON(h.keys), token, at, e.Lease},
		}), func(row Scanner) error {
			var key, group string
			err := row.Scan(&key, &group)
			results[h.ordinals[key]] = ResultDone
			if group != "" {
				groups = append(groups, groupRun{group, 0})
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		if len(groups) == 0 {
			continue
		}
		err = run(ctx, d.rendered(Statement{
			updateGroups(2) + ` lease_until = max(lease_until, ?3 + ?4)`, []any{e.Channel, toJSON(groups), at, e.Lease},
		}), unread)
		if err != nil {
			return nil, err
		}
	}
	return results, nil
}
