package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// What relays and people look at on Postgres.

func (postgres) look(l Look, at now) Statement {
	return Statement{
		`SELECT wait, paused, outage FROM {t:look_2}($1::smallint[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint)`,
		[]any{l.Systems, l.Names, l.Froms, l.FromGroups, at},
	}
}

// stats is a function too: a plan made by statistics could be compiled, which
// takes a hundred times as long as running it.
func (postgres) stats(limit int, at now) Statement {
	return Statement{`
		SELECT system, name, due, scheduled, leased, blocked, dead, unknown, age, attempt, last_error, paused, outage, reason
		FROM {t:stats_1}($1::integer, $2::bigint) ORDER BY system, name`,
		[]any{limit, at},
	}
}

// pgSnapshots finds who has kept dead rows from being removed for longer than
// bound, as far as the role may know: of other roles' sessions only members of
// pg_read_all_stats are told.
func pgSnapshots(ctx context.Context, db *sql.DB, bound time.Duration, fs *findings) error {
	rows, err := db.QueryContext(ctx, `
		SELECT holder, remedy FROM (
			SELECT format('a transaction of role %s (pid %s, application %L, %s) has been open for %s',
					a.usename, a.pid, a.application_name, a.state, date_trunc('second', clock_timestamp() - a.xact_start)),
				format('end it, or set idle_in_transaction_session_timeout; SELECT pg_terminate_backend(%s) ends it now', a.pid), a.xact_start
			FROM pg_stat_activity AS a
			WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
			UNION ALL
			SELECT format('the prepared transaction %L has been open for %s', p.gid, date_trunc('second', clock_timestamp() - p.prepared)),
				format('COMMIT PREPARED %L, or ROLLBACK PREPARED', p.gid), p.prepared
			FROM pg_prepared_xacts AS p WHERE p.database = current_database()
		) AS s (holder, remedy, since)
		WHERE s.since <= clock_timestamp() - $1::bigint * interval '1 microsecond' ORDER BY s.since LIMIT 3`, bound.Microseconds())
	if err != nil {
		return fmt.Errorf("look for old snapshots: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var holder, remedy string
		if err := rows.Scan(&holder, &remedy); err != nil {
			return fmt.Errorf("look for old snapshots: %w", err)
		}
		fs.warn(true, "%s: dead rows stay meanwhile, and a key that is staged again and again slows down; %s", holder, remedy)
	}
	return rows.Err()
}

// pgDuties are what a role may be there for, with the privileges that each
// needs; of those with a bar between them one is enough.
var pgDuties = []struct {
	name  string
	needs map[string]string
}{
	{"stage", map[string]string{
		"entries": "SELECT,INSERT,UPDATE", "seq": "USAGE", "token_seq": "SELECT|USAGE", "redraw_1": "EXECUTE",
	}},
	{"relay", map[string]string{
		"entries": "SELECT,UPDATE,DELETE", "channels": "SELECT,INSERT,UPDATE", "token_seq": "USAGE",
		"claim_1": "EXECUTE", "settle_1": "EXECUTE", "extend_1": "EXECUTE", "look_1": "EXECUTE", "look_2": "EXECUTE",
	}},
	{"put messages", map[string]string{
		"messages": "SELECT,INSERT", "groups": "SELECT,INSERT,UPDATE,DELETE", "seq": "USAGE", "token_seq": "USAGE", "put_1": "EXECUTE",
	}},
	{"send messages", map[string]string{
		"messages": "SELECT,UPDATE,DELETE", "groups": "SELECT,UPDATE,DELETE", "channels": "SELECT,INSERT,UPDATE",
		"token_seq": "USAGE", "claim_messages_1": "EXECUTE", "runs_1": "EXECUTE", "regroup_1": "EXECUTE", "ended_1": "EXECUTE", "let_go_1": "EXECUTE",
		"begin_message_1": "EXECUTE", "settle_messages_1": "EXECUTE", "extend_messages_1": "EXECUTE", "purge_1": "EXECUTE",
		"amend_1": "EXECUTE", "look_2": "EXECUTE",
	}},
}

// pgGrants finds what the role lacks. A role may be there for one duty only;
// one that can do none of them is a fault.
func pgGrants(ctx context.Context, db *sql.DB, d Dialect, fs *findings) error {
	var can, lacks []string
	for _, duty := range pgDuties {
		lack, err := pgLacks(ctx, db, d, duty.needs)
		switch {
		case err != nil:
			return err
		case lack == "":
			can = append(can, duty.name)
		default:
			lacks = append(lacks, "to "+duty.name+": "+lack)
		}
	}
	text := strings.Join(lacks, "; ")
	fs.fault(len(can) == 0, "the role can neither stage nor relay, nor put or send messages; grant it, %s", text)
	fs.warn(len(can) > 0 && len(lacks) > 0, "the role can only %s; it lacks, %s", strings.Join(can, " and "), text)
	return nil
}

// pgLacks names the privileges, by object, that the role does not have.
func pgLacks(ctx context.Context, db *sql.DB, d Dialect, needed map[string]string) (string, error) {
	var lacks []string
	for _, name := range slices.Sorted(maps.Keys(needed)) {
		kind, object := "table", `$1::text`
		switch {
		case needed[name] == "EXECUTE":
			kind = "function"
			object = `(SELECT p.oid FROM pg_proc AS p WHERE p.proname = $1::text AND p.pronamespace = ` + quoteText(d.Ident(d.schema)) + `::regnamespace)`
		case strings.HasSuffix(name, "seq"):
			kind = "sequence"
		}
		argument := d.Render(`{t:` + name + `}`)
		if kind == "function" {
			argument = d.prefix + name
		}
		for privilege := range strings.SplitSeq(needed[name], ",") {
			var granted sql.NullBool
			row := db.QueryRowContext(ctx, `SELECT has_`+kind+`_privilege(`+object+`, $2::text)`, argument, strings.ReplaceAll(privilege, "|", ", "))
			if err := row.Scan(&granted); err != nil {
				return "", fmt.Errorf("check grants on %s: %w", d.Render(`{t:`+name+`}`), err)
			}
			if !granted.Bool {
				lacks = append(lacks, strings.ReplaceAll(privilege, "|", " or ")+" on "+kind+" "+d.Render(`{t:`+name+`}`))
			}
		}
	}
	return strings.Join(lacks, ", "), nil
}
