package main

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// diagnose runs doctor --json and returns what it found.
func diagnose(t testing.TB, code int, args ...string) diagnosis {
	t.Helper()
	r := call(t, append([]string{"doctor", "--json"}, args...)...)
	require.Equal(t, code, r.code, r.stdout+r.stderr)
	require.Empty(t, r.stderr)
	var d diagnosis
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &d))
	require.Equal(t, code == exitOK, d.OK)
	return d
}

// texts returns what a diagnosis says with a result.
func (d diagnosis) texts(result string) string {
	var list []string
	for _, c := range d.Checks {
		if c.Result == result {
			list = append(list, c.Subject+": "+c.Text)
		}
	}
	return strings.Join(list, "\n")
}

func TestDoctorFindsNothingWhereAllIsWell(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		d := diagnose(t, exitOK, "--dsn", dsn)
		require.Empty(t, d.texts("fault"))
		for _, subject := range []string{"connection: ", fmt.Sprintf("schema: version %d; this release needs %[1]d", dialect.SchemaVersion), "channels: none is paused"} {
			require.Contains(t, d.texts("ok"), subject)
		}
		out := ok(t, "doctor", "--dsn", dsn)
		require.Contains(t, out, "faults: 0, warnings: ")
		require.Contains(t, out, fmt.Sprintf("ok       schema      version %d; this release needs %[1]d\n", dialect.SchemaVersion))
	})
}

func TestDoctorTellsWhatKeepsItFromWorking(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		d := diagnose(t, exitFailed, "--dsn", dsn, "--prefix", "other_")
		require.Contains(t, d.texts("fault"), "schema: ")
		require.Contains(t, d.texts("fault"), "outbox migrate up")
		require.NotContains(t, d.texts("ok"), "schema")
		r := call(t, "doctor", "--dsn", dsn, "--prefix", "other_")
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stdout, "\nfault    schema      ")
		require.Contains(t, r.stdout, "faults: 1, warnings: 0")
	})
	d := diagnose(t, exitFailed, "--dsn", "postgres://someone@127.0.0.1:1/app?sslmode=disable")
	require.Contains(t, d.texts("fault"), "connection: connect to Postgres")
	d = diagnose(t, exitFailed, "--dsn", filepath.Join(t.TempDir(), "missing.db"))
	require.Contains(t, d.texts("fault"), "it does not exist")
}

// The application's own DSN is judged as it is, not as this program would open
// the file.
func TestDoctorJudgesTheApplicationsDSN(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	ok(t, "migrate", "up", "--dsn", path)
	d := diagnose(t, exitFailed, "--dsn", "file:"+path+"?_pragma=synchronous(NORMAL)")
	require.Contains(t, d.texts("fault"), "busy_timeout is 0")
	require.Contains(t, d.texts("warning"), "synchronous is below FULL")
	require.Contains(t, d.texts("warning"), "transactions are deferred")
	d = diagnose(t, exitOK, "--dsn", "file:"+path+"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=synchronous(FULL)")
	require.Empty(t, d.texts("warning"))
	require.Empty(t, d.texts("note"))
	d = diagnose(t, exitOK, "--dsn", path)
	require.Contains(t, d.texts("note"), "belong to the application's DSN")
}

func TestDoctorFindsMissingGrants(t *testing.T) {
	if testing.Short() {
		return
	}
	dsn := pgtest.DSN(t)
	ok(t, "migrate", "up", "--dsn", dsn, "--schema", "shop")
	s := open(t, dsn)
	role := "outbox_test_" + strings.ToLower(rand.Text()[:10])
	exec := func(query string) {
		t.Helper()
		_, err := s.db.Exec(strings.ReplaceAll(query, "THEM", role))
		require.NoError(t, err)
	}
	exec(`CREATE ROLE THEM LOGIN PASSWORD 'pw-of-a-test'`)
	t.Cleanup(func() { exec(`DROP OWNED BY THEM; DROP ROLE THEM`) })
	theirs := []string{"--schema", "shop", "--dsn", asRole(t, dsn, role, "pw-of-a-test")}

	d := diagnose(t, exitFailed, theirs...)
	require.Contains(t, d.texts("fault"), "lacks USAGE on the schema or SELECT")

	exec(`GRANT USAGE ON SCHEMA shop TO THEM;
		GRANT SELECT, INSERT, UPDATE ON shop.outbox_entries TO THEM;
		GRANT SELECT ON shop.outbox_channels, shop.outbox_meta TO THEM;
		GRANT USAGE ON SEQUENCE shop.outbox_seq TO THEM`)
	d = diagnose(t, exitFailed, theirs...)
	faults := d.texts("fault")
	for _, lacking := range []string{`DELETE on table "shop"."outbox_entries"`, `INSERT on table "shop"."outbox_channels"`, `SELECT or USAGE on sequence "shop"."outbox_token_seq"`} {
		require.Contains(t, faults, lacking)
	}
	require.NotContains(t, faults, `UPDATE on table "shop"."outbox_entries"`)
	require.NotContains(t, faults, "pw-of-a-test")

	exec(`GRANT DELETE ON shop.outbox_entries TO THEM;
		GRANT INSERT, UPDATE ON shop.outbox_channels TO THEM;
		GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA shop TO THEM`)
	d = diagnose(t, exitOK, theirs...)
	require.Contains(t, d.texts("ok"), "its history cannot be read")
	exec(`GRANT SELECT ON shop.outbox_messages, shop.outbox_groups TO THEM`)
	ok(t, append([]string{"stats"}, theirs...)...)
	ok(t, append([]string{"pause", "orders", "--for", "1m"}, theirs...)...)
}

func TestDoctorFindsChannelsInTrouble(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		s := open(t, dsn)
		old := time.Now().Add(-time.Hour)
		past, err := sqlstore.New(s.db, s.d, sqlstore.Options{Clock: func() time.Time { return old }})
		require.NoError(t, err)
		stage(t, &session{target: s.target, db: s.db, store: past}, "mispelt", 0, "a", "b")
		stage(t, s, "paused", 0, "a")
		ok(t, "pause", "paused", "--for", "1h", "--reason", "rebuild", "--dsn", dsn)
		stage(t, s, "failing", 0, "a")
		for range manyAttempts {
			claimed, err := s.store.ClaimRows(t.Context(), outbox.Claim{Channel: "failing", Limit: 1, Lease: time.Hour, Full: true})
			require.NoError(t, err)
			require.Len(t, claimed.Rows, 1)
			_, err = s.store.Settle(t.Context(), outbox.Channel{System: outbox.SystemLatest, Name: "failing"},
				[]outbox.Settlement{{Row: claimed.Rows[0], Outcome: outbox.OutcomeRetry, Error: "no luck"}})
			require.NoError(t, err)
		}
		warnings := diagnose(t, exitOK, "--dsn", dsn).texts("warning")
		require.Regexp(t, `channels: "mispelt": 2 entries are due, the oldest for 1h0\dm, and none is in flight: does a relay serve it`, warnings)
		require.Contains(t, warnings, `channels: "paused": paused for another `)
		require.Contains(t, warnings, `rebuild; to have it go on at once: outbox resume "paused"`)
		require.Contains(t, warnings, `channels: "failing": one of its entries has been tried 10 times: no luck`)
	})
}
