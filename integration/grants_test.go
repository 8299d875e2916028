package integration

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// What the roles of an application need, and no more, where the functions may
// be called by anybody, as is Postgres's default.
var (
	stagerGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:meta} TO {role}`,
		`GRANT SELECT ON {t:entries} TO {role}`,
		`GRANT INSERT ON {t:entries} TO {role}`,
		`GRANT UPDATE ON {t:entries} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:seq} TO {role}`,
		`GRANT SELECT ON SEQUENCE {t:token_seq} TO {role}`,
	}
	relayGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:meta} TO {role}`,
		`GRANT SELECT ON {t:entries} TO {role}`,
		`GRANT UPDATE ON {t:entries} TO {role}`,
		`GRANT DELETE ON {t:entries} TO {role}`,
		`GRANT SELECT ON {t:channels} TO {role}`,
		`GRANT INSERT ON {t:channels} TO {role}`,
		`GRANT UPDATE ON {t:channels} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:token_seq} TO {role}`,
	}
	// Of who pauses, resumes, lists, discards, counts and fences.
	operatorGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:entries} TO {role}`,
		`GRANT UPDATE ON {t:entries} TO {role}`,
		`GRANT DELETE ON {t:entries} TO {role}`,
		`GRANT SELECT ON {t:channels} TO {role}`,
		`GRANT INSERT ON {t:channels} TO {role}`,
		`GRANT UPDATE ON {t:channels} TO {role}`,
		`GRANT UPDATE ON SEQUENCE {t:seq} TO {role}`,
		`GRANT UPDATE ON SEQUENCE {t:token_seq} TO {role}`,
	}
	// Of who calls migrations.Up at each start, where nothing is due.
	startGrants = []string{
		`GRANT SELECT ON {t:meta} TO {role}`,
		`GRANT SELECT ON {t:migrations} TO {role}`,
	}
)

// as returns the site as a new role sees it that has some grants.
func (s *site) as(t *testing.T, role string, grants []string) *site {
	t.Helper()
	var database string
	require.NoError(t, s.db.QueryRow(`SELECT current_database()`).Scan(&database))
	role = database + "_" + role
	s.exec(`CREATE ROLE ` + role)
	t.Cleanup(func() {
		s.exec(`DROP OWNED BY ` + role)
		s.exec(`DROP ROLE ` + role)
	})
	other := *s
	other.dsn = withParameter(t, s.dsn, "role", role)
	other.db = other.open()
	other.store = other.newStore(sqlstore.Options{})
	for _, g := range grants {
		s.exec(other.grant(g))
	}
	return &other
}

// grant fills in the names of a grant.
func (s *site) grant(text string) string {
	var role string
	require.NoError(s.t, s.db.QueryRow(`SELECT current_user`).Scan(&role))
	return s.dialect.Render(strings.ReplaceAll(text, "{role}", role))
}

// requireMinimal requires that work is done with all grants, and with none of
// them missing.
func requireMinimal(t *testing.T, s *site, role string, grants []string, work func(s *site) error) {
	t.Helper()
	as := s.as(t, role, grants)
	require.NoError(t, work(as))
	for _, g := range withoutSchema(grants) {
		grant := as.grant(g)
		revoke := strings.Replace(strings.Replace(grant, "GRANT", "REVOKE", 1), " TO ", " FROM ", 1)
		s.exec(revoke)
		require.Error(t, work(as), "without %s", g)
		s.exec(grant)
	}
	require.NoError(t, work(as))
}

// withoutSchema is grants but for that of the schema: "public" is everybody's.
func withoutSchema(grants []string) []string {
	return slices.DeleteFunc(slices.Clone(grants), func(g string) bool { return strings.Contains(g, "ON SCHEMA") })
}

func TestStagerNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		requireMinimal(t, s, "stager", stagerGrants, func(s *site) error {
			if err := s.store.Check(t.Context()); err != nil {
				return err
			}
			l := s.latest("")
			return s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
				for _, key := range []string{"k", "k", "gone"} {
					if _, err := l.Stage(t.Context(), tx, key, "x"); err != nil {
						return err
					}
				}
				if _, err := l.StageMany(t.Context(), tx, []outbox.Item[string]{{Key: "a"}, {Key: "b"}}); err != nil {
					return err
				}
				if _, err := l.StageDelete(t.Context(), tx, "gone"); err != nil {
					return err
				}
				if _, err := l.Pending(t.Context(), outbox.SQL(tx), "k"); err != nil {
					return err
				}
				_, err := tx.Exec(s.dialect.Render(`SELECT {t:redraw_1}(ctid) FROM {t:entries} WHERE key = 'k'`)) // what a race makes Stage do
				return err
			})
		})
	})
}

func TestStartNeedsNoRightToCreate(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		requireMinimal(t, s, "starter", startGrants, func(s *site) error { return migrations.Up(t.Context(), s.db, s.dialect) })
	})
}

func TestRelayNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		l := s.latest("")
		requireMinimal(t, s, "relay", relayGrants, func(as *site) error {
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
			s.exec(s.dialect.Render(`DELETE FROM {t:channels}`))
			s.stageMany(l, "k", 3)
			return as.relayWork(t.Context())
		})
	})
}

// relayWork makes every call that a relay makes.
func (s *site) relayWork(ctx context.Context) error {
	if err := s.store.Check(ctx); err != nil {
		return err
	}
	channel := latestChannel("default")
	if _, err := s.store.Look(ctx, []outbox.Channel{channel}); err != nil {
		return err
	}
	c, err := s.store.ClaimRows(ctx, outbox.Claim{Channel: "default", Limit: 10, Lease: time.Minute, Full: true})
	if err != nil {
		return err
	}
	if _, err := s.store.Extend(ctx, channel, c.Rows, time.Minute); err != nil {
		return err
	}
	for i, r := range c.Rows {
		if _, err := s.store.Settle(ctx, channel, []outbox.Settlement{{Row: r, Outcome: outbox.Outcome(1 + i%3)}}); err != nil {
			return err
		}
	}
	for _, down := range []bool{true, false, true} {
		if err := s.store.Outage(ctx, channel, down, "x"); err != nil {
			return err
		}
	}
	time.Sleep(1100 * time.Millisecond) // the first pause of an outage
	if c, err = s.store.ClaimRows(ctx, outbox.Claim{Channel: "default", Limit: 10, Lease: time.Minute, Full: true}); err == nil && !c.Probe {
		err = fmt.Errorf("%d rows claimed, and no probe", len(c.Rows))
	}
	if err == nil {
		_, err = s.store.Stats(ctx)
	}
	return err
}

func TestOperatorNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		l := s.latest("")
		requireMinimal(t, s, "operator", operatorGrants, func(as *site) error {
			v := s.stage(l, "k", "x")
			if err := as.store.Pause(t.Context(), "default", time.Hour, "x"); err != nil {
				return err
			}
			if _, err := as.store.Stats(t.Context()); err != nil {
				return err
			}
			if _, err := as.latest("").List(t.Context(), "", 10); err != nil {
				return err
			}
			if err := as.latest("").Discard(t.Context(), "k", v); err != nil {
				return err
			}
			if err := as.store.Pause(t.Context(), "default", 0, ""); err != nil {
				return err
			}
			_, _, err := as.store.Fence(t.Context())
			return err
		})
	})
}

// A grant that is missing is told with what it is for.
func TestG10MissingGrantIsTold(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		as := s.as(t, "stranger", nil)
		require.ErrorContains(t, as.store.Check(t.Context()), "lacks")
		tx := as.begin()
		_, err := as.latest("").Stage(t.Context(), tx, "k", "x")
		require.ErrorContains(t, err, "lacks a grant")
		require.NoError(t, tx.Rollback())
		book := new(logbook)
		stop := as.run(book.options(), as.latest("").Publisher(new(witness).publish, outbox.PublishOptions{}))
		eventually(t, "the relay to say so", func() bool { return len(book.grep("lacks")) > 0 })
		require.NoError(t, stop())
	})
}
