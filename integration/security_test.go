package integration

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

var (
	pageBlock = regexp.MustCompile("(?s)```sql\n(.*?)```")
	pageGrant = regexp.MustCompile(`^GRANT (.+) ON (SEQUENCE |SCHEMA )?(.+) TO (\w+);$`)
)

// pageGrants reads the grants of a role out of docs/security.md, each cut into
// those of one privilege on one thing.
func pageGrants(t *testing.T, role string) (grants []string) {
	t.Helper()
	page, err := os.ReadFile("../docs/security.md")
	require.NoError(t, err)
	for _, block := range pageBlock.FindAllStringSubmatch(string(page), -1) {
		for line := range strings.Lines(block[1]) {
			m := pageGrant.FindStringSubmatch(strings.TrimSpace(line))
			require.NotNil(t, m, "%q", line)
			if m[4] != role {
				continue
			}
			for privilege := range strings.SplitSeq(m[1], ", ") {
				for name := range strings.SplitSeq(m[3], ", ") {
					grants = append(grants, fmt.Sprintf("GRANT %s ON %s%s TO {role}", privilege, m[2], name))
				}
			}
		}
	}
	require.NotEmpty(t, grants, role)
	return grants
}

// stagerWork makes every call that an application makes in its transactions.
func stagerWork(ctx context.Context, s *site) error {
	if err := s.store.Check(ctx); err != nil {
		return err
	}
	l := s.latest("")
	err := s.store.Transact(ctx, nil, func(tx *sql.Tx) error {
		for _, key := range []string{"k", "k", "gone"} {
			if _, err := l.Stage(ctx, tx, key, "x"); err != nil {
				return err
			}
		}
		if _, err := l.StageMany(ctx, tx, []outbox.Item[string]{{Key: "a"}, {Key: "b"}}); err != nil {
			return err
		}
		if _, err := l.StageDelete(ctx, tx, "gone"); err != nil {
			return err
		}
		if _, err := l.Pending(ctx, outbox.SQL(tx), "k"); err != nil {
			return err
		}
		_, err := tx.Exec(s.dialect.Render(`SELECT {t:redraw_1}(ctid) FROM {t:entries} WHERE key = 'k'`)) // what a race makes Stage do
		return err
	})
	if err != nil {
		return err
	}
	return s.putterWork(ctx)
}

// publisherWork makes every call that a relay makes, of both systems.
func publisherWork(ctx context.Context, s *site) error {
	if err := s.store.Check(ctx); err != nil {
		return err
	}
	channels := []outbox.Channel{latestChannel("default"), messageChannel("mail")}
	if _, err := s.store.Look(ctx, channels); err != nil {
		return err
	}
	claim := outbox.Claim{Channel: "default", Limit: 10, Lease: time.Minute, Full: true}
	rows, err := s.store.ClaimRows(ctx, claim)
	if err != nil {
		return err
	}
	claim.Channel = "mail"
	messages, err := s.store.ClaimMessages(ctx, nil, claim)
	if err != nil {
		return err
	}
	if len(rows.Rows) == 0 || len(messages.Rows) == 0 {
		return fmt.Errorf("%d rows and %d messages claimed", len(rows.Rows), len(messages.Rows))
	}
	for i, claimed := range [][]outbox.Row{rows.Rows, messages.Rows} {
		if _, err := s.store.Extend(ctx, channels[i], claimed, time.Minute); err != nil {
			return err
		}
		for n, r := range claimed {
			end := outbox.Settlement{Row: r, Outcome: outbox.Outcome(1 + n%3), Keep: n < 6}
			if _, err := s.store.Settle(ctx, channels[i], []outbox.Settlement{end}); err != nil {
				return err
			}
		}
		for _, down := range []bool{true, false} {
			if err := s.store.Outage(ctx, channels[i], down, "x"); err != nil {
				return err
			}
		}
	}
	if _, err := s.store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Limit: 10}); err != nil {
		return err
	}
	_, err = s.store.Stats(ctx)
	return err
}

// operatorWork makes every call that the command makes for an operator.
func operatorWork(ctx context.Context, s *site, version outbox.Version) error {
	if err := s.store.Pause(ctx, "default", time.Hour, "x"); err != nil {
		return err
	}
	if err := s.store.Pause(ctx, "default", 0, ""); err != nil {
		return err
	}
	if _, err := s.store.Findings(ctx); err != nil {
		return err
	}
	if _, err := s.store.Stats(ctx); err != nil {
		return err
	}
	if _, err := s.latest("").List(ctx, "", 10); err != nil {
		return err
	}
	if err := s.latest("").Discard(ctx, "k", version); err != nil {
		return err
	}
	for _, a := range []outbox.Action{outbox.ActionSent, outbox.ActionRetry, outbox.ActionDiscard} {
		if _, err := s.store.AmendMessages(ctx, nil, "mail", outbox.Amendment{Action: a, Limit: 2}); err != nil {
			return err
		}
	}
	if _, err := s.store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Limit: 10}); err != nil {
		return err
	}
	_, _, err := s.store.Fence(ctx)
	return err
}

// The grants of docs/security.md are enough, and none of them is too much: a
// role that lacks any one of them cannot do its work.
func TestGrantsOfThePageAreEnoughAndNoMore(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		clear := func() {
			s.wipe()
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}; DELETE FROM {t:channels}`))
		}
		fill := func() outbox.Version {
			clear()
			s.stageMany(s.latest(""), "k", 3)
			j := s.journal("mail")
			s.put(j, append(letters("k", 6, 2), letters("plain", 9, 0)...)...)
			return s.stage(s.latest(""), "k", "x")
		}
		t.Run("stager", func(t *testing.T) {
			requireMinimal(t, s, "stager", pageGrants(t, "stager"), func(as *site) error {
				clear()
				return stagerWork(t.Context(), as)
			})
		})
		t.Run("relay", func(t *testing.T) {
			requireMinimal(t, s, "relay", pageGrants(t, "relay"), func(as *site) error {
				fill()
				return publisherWork(t.Context(), as)
			})
		})
		t.Run("operator", func(t *testing.T) {
			requireMinimal(t, s, "operator", pageGrants(t, "operator"), func(as *site) error {
				return operatorWork(t.Context(), as, fill())
			})
		})
		t.Run("starter", func(t *testing.T) {
			requireMinimal(t, s, "starter", pageGrants(t, "starter"), func(as *site) error {
				return migrations.Up(t.Context(), as.db, as.dialect)
			})
		})
	})
}

// What the page says that a role cannot do, the server refuses: all of it is
// refused for want of a grant.
func TestRolesOfThePageCanDoNothingElse(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		s.stage(s.latest(""), "k", "x")
		s.put(s.journal("mail"), outbox.Message{Key: "k"})
		everybody := []string{
			`SELECT * FROM app`, `INSERT INTO app VALUES ('x', 'y')`, `DROP TABLE {t:entries}`, `ALTER TABLE {t:entries} ADD x int`,
			`TRUNCATE {t:entries}`, `CREATE TABLE {schema}.mine (x int)`, `UPDATE {t:meta} SET version = 9`, `DELETE FROM {t:channels}`,
			`CREATE TRIGGER x BEFORE INSERT ON {t:entries} EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
			`CREATE OR REPLACE FUNCTION {t:redraw_1}(tid) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint'`,
		}
		stageOne := `INSERT INTO {t:entries} (channel, key) VALUES ('default', 'new')`
		putOne := `INSERT INTO {t:messages} (channel, key) VALUES ('mail', 'new')`
		fence := `SELECT setval({s:seq}, 1)`
		for role, own := range map[string][]string{
			"stager": {
				`DELETE FROM {t:entries}`, `DELETE FROM {t:messages}`, `UPDATE {t:messages} SET attempt = 1`, `SELECT * FROM {t:channels}`,
				`INSERT INTO {t:channels} (system, name) VALUES (1, 'x')`, fence,
			},
			"relay":    {stageOne, putOne, fence, `SELECT nextval({s:seq})`},
			"operator": {stageOne, putOne, `INSERT INTO {t:groups} (channel) VALUES ('mail')`},
			"starter":  {`SELECT * FROM {t:entries}`, `SELECT * FROM {t:messages}`, stageOne, putOne, fence},
		} {
			t.Run(role, func(t *testing.T) {
				as := s.as(t, role, pageGrants(t, role))
				s.exec(`REVOKE CREATE ON SCHEMA public FROM PUBLIC`) // as it is since Postgres 15
				for _, statement := range append(own, everybody...) {
					_, err := as.db.Exec(s.dialect.Render(statement))
					require.Error(t, err, statement)
					var state interface{ SQLState() string }
					require.ErrorAs(t, err, &state, statement)
					require.Equal(t, "42501", state.SQLState(), "%s: %v", statement, err)
				}
			})
		}
	})
}

// The migrator of the page can install, upgrade and remove the outbox where it
// is no superuser and owns nothing else.
func TestMigratorOfThePageInstallsAndRemoves(t *testing.T) {
	if testing.Short() {
		return
	}
	owner := bare(t, dialect.Postgres())
	as := owner.as(t, "migrator", pageGrants(t, "migrator"))
	require.NoError(t, migrations.Up(t.Context(), as.db, as.dialect))
	require.NoError(t, migrations.Up(t.Context(), as.db, as.dialect))
	as.stage(as.latest(""), "k", "x")
	require.Error(t, migrations.Down(t.Context(), as.db, as.dialect, false), "a value waits")
	require.NoError(t, migrations.Down(t.Context(), as.db, as.dialect, true))
	_, err := as.db.Exec(`SELECT * FROM app`)
	require.Error(t, err)
}

// Doctor tells of each role of the page what it is there for.
func TestDoctorKnowsTheRolesOfThePage(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		for role, can := range map[string]string{"stager": "stage and put messages", "relay": "relay and send messages"} {
			findings, err := s.as(t, role, pageGrants(t, role)).store.Findings(t.Context())
			require.NoError(t, err)
			require.Contains(t, fmt.Sprint(findings), "the role can only "+can+"; it lacks, ")
		}
	})
}

// What was put is in no error, no log line, no event and no statistics, whatever
// goes wrong: also where the database itself quotes the row that it refuses.
func TestPayloadsAndHeadersAreToldToNobody(t *testing.T) {
	const canary = "c4n4ry"
	onBoth(t, func(t *testing.T, s *site) {
		payload, header := []byte(`{"it":"`+canary+`"}`), outbox.Header{"it": canary}
		var said []string
		hear := func(what string, err error) {
			t.Helper()
			require.Error(t, err, what)
			said = append(said, fmt.Sprintf("%s: %+v", what, err))
		}
		ctx, book := t.Context(), new(logbook)
		o := outbox.LatestOptions[string]{Channel: "states", Headers: func(_ context.Context, h outbox.Header) { h["it"] = canary }}
		l, err := outbox.NewLatest[string](s.store, o)
		require.NoError(t, err)
		j := s.journal("mail")

		// Refused before anything is written.
		tx := s.begin()
		_, err = l.Stage(ctx, tx, "", canary)
		hear("stage without a key", err)
		_, err = l.Stage(ctx, tx, "big", canary+strings.Repeat("x", 1<<20))
		hear("stage too much", err)
		for what, m := range map[string]outbox.Message{
			"key":     {Key: "\xff", Payload: payload, Header: header},
			"group":   {Key: "k", Group: "\x00", Payload: payload, Header: header},
			"header":  {Key: "k", Payload: payload, Header: outbox.Header{"it": canary + "\x00"}},
			"size":    {Key: "k", Payload: []byte(canary + strings.Repeat("x", 1<<20)), Header: header},
			"headers": {Key: "k", Payload: payload, Header: outbox.Header{"it": canary + strings.Repeat("x", 10_000)}},
		} {
			_, err = j.Put(ctx, tx, m)
			hear("put a bad "+what, err)
		}
		require.NoError(t, tx.Rollback())

		// Refused by the database.
		first := s.put(j, outbox.Message{Key: "k", Payload: payload, Header: header}, outbox.Message{Key: "broken", Payload: payload, Header: header})
		require.NoError(t, s.store.Transact(ctx, nil, func(tx *sql.Tx) error { _, err := l.Stage(ctx, tx, "k", canary); return err }))
		_, err = s.db.Exec(s.dialect.Render(`UPDATE {t:messages} SET headers = '{"it":"` + canary + `",' WHERE key = 'broken'`))
		require.NoError(t, err)
		for _, change := range refuseChanges(s) {
			s.exec(change)
		}
		for what, call := range map[string]func(tx *sql.Tx) error{
			"stage": func(tx *sql.Tx) error { _, err := l.Stage(ctx, tx, "k", canary); return err },
			"many": func(tx *sql.Tx) error {
				_, err := l.StageMany(ctx, tx, []outbox.Item[string]{{Key: "a", Value: canary}})
				return err
			},
			"put": func(tx *sql.Tx) error {
				_, err := j.Put(ctx, tx, outbox.Message{Key: "n", Payload: payload, Header: header})
				return err
			},
		} {
			tx := s.begin()
			hear(what, call(tx))
			require.NoError(t, tx.Rollback())
		}
		_, err = j.Add(ctx, outbox.Message{Key: "n", Group: "g", Payload: payload, Header: header})
		hear("add", err)
		_, err = j.ClaimDue(ctx, 10, time.Minute)
		hear("claim", err)
		_, err = j.Begin(ctx, "k", time.Minute)
		hear("begin", err)

		// Published and sent, and it fails.
		stop := s.run(book.options(),
			l.Publisher(func(context.Context, []*outbox.Entry[string]) error { panic("boom") }, outbox.PublishOptions{Backoff: constant(20 * time.Millisecond)}),
			j.Sender(func(_ context.Context, m *outbox.Record) (string, error) { return "", errDown }, outbox.SendOptions{Backoff: constant(20 * time.Millisecond)}))
		eventually(t, "claims to be refused", func() bool { return book.count(outbox.EventTrouble) > 2 })
		for _, change := range allowChanges(s) {
			s.exec(change)
		}
		eventually(t, "attempts to fail", func() bool {
			return book.count(outbox.EventPublish) > 2 && s.count(`SELECT count(*) FROM {t:messages} WHERE attempt > 1 OR outcome = 4`) == 2
		})
		require.NoError(t, stop())
		require.Equal(t, first[0].Record.Key, "k")

		stats, err := s.store.Stats(ctx)
		require.NoError(t, err)
		findings, err := s.store.Findings(ctx)
		require.NoError(t, err)
		rs, _, err := j.List(ctx, outbox.Filter{All: true})
		require.NoError(t, err)
		for _, r := range rs {
			r.Header = nil // the record's own: `outbox list` shows none
			said = append(said, fmt.Sprintf("%+v", r))
		}
		book.mu.Lock()
		said = append(said, fmt.Sprintf("%+v %+v %+v", stats, findings, book.events))
		said = append(said, book.lines...)
		book.mu.Unlock()
		for _, text := range said {
			require.NotContains(t, text, canary)
		}
	})
}

// refuseChanges makes the database refuse whatever changes an entry or a
// message, as a constraint does that somebody added; Postgres then quotes the row.
func refuseChanges(s *site) []string {
	var statements []string
	for _, table := range []string{"entries", "messages"} {
		if s.postgres() {
			statements = append(statements, s.dialect.Render(`ALTER TABLE {t:`+table+`} ADD CONSTRAINT refused CHECK (false) NOT VALID`))
			continue
		}
		for _, change := range []string{"INSERT", "UPDATE"} {
			statements = append(statements, s.dialect.Render(`CREATE TRIGGER refused_`+table+change+` BEFORE `+change+` ON {i:`+table+`}
				BEGIN SELECT RAISE(ABORT, 'refused'); END`))
		}
	}
	return statements
}

func allowChanges(s *site) []string {
	var statements []string
	for _, table := range []string{"entries", "messages"} {
		if s.postgres() {
			statements = append(statements, s.dialect.Render(`ALTER TABLE {t:`+table+`} DROP CONSTRAINT refused`))
			continue
		}
		statements = append(statements, `DROP TRIGGER refused_`+table+`INSERT`, `DROP TRIGGER refused_`+table+`UPDATE`)
	}
	return statements
}

// A password is in no error and no log line, whatever keeps the database from
// being reached.
func TestPasswordsAreToldToNobody(t *testing.T) {
	if testing.Short() {
		return
	}
	const canary = "c4n4ry"
	for what, dsn := range map[string]string{
		"nobody listens":  "postgres://u:" + canary + "@127.0.0.1:1/d?sslmode=disable",
		"no such host":    "postgres://u:" + canary + "@host.invalid/d",
		"as keywords":     "host=127.0.0.1 port=1 user=u password=" + canary + " dbname=d",
		"no such role":    strings.Replace(pgtest.DSN(t), "postgres@", "nobody:"+canary+"@", 1),
		"no such base":    strings.Replace(withParameter(t, pgtest.DSN(t), "dbname", "missing"), "postgres@", "postgres:"+canary+"@", 1),
		"another's words": strings.Replace(withParameter(t, pgtest.DSN(t), "no_such_setting", "x"), "postgres@", "postgres:"+canary+"@", 1),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			require.Contains(t, dsn, canary)
			db, err := sql.Open("pgx", dsn)
			require.NoError(t, err)
			t.Cleanup(func() { _ = db.Close() })
			store, err := sqlstore.New(db, dialect.Postgres(), sqlstore.Options{})
			require.NoError(t, err)
			book := new(logbook)
			r, err := outbox.NewRelay(book.options(), journalOn(t, store, "mail").Sender(new(receiver).send, outbox.SendOptions{}))
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
			defer cancel()
			require.NoError(t, r.Run(ctx))
			require.NotEmpty(t, book.noise())
			said := append(book.noise(), fmt.Sprintf("%+v", book.events))
			for _, err := range []error{store.Check(t.Context()), migrations.Up(t.Context(), db, dialect.Postgres())} {
				require.Error(t, err)
				said = append(said, fmt.Sprintf("%+v", err))
			}
			for _, text := range said {
				require.NotContains(t, text, canary)
			}
		})
	}
}
