package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// The field cases in which it is what surrounds the journal that breaks it:
// settings of a session, names, poolers, pools. [site.round] is the same for
// Latest.

// mailRound takes messages through every call of the journal: of the putter, of
// a sender by hand, of relays, of an operator, inside and outside transactions.
func (s *site) mailRound(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // a call that waits for itself ends
	defer cancel()
	require.NoError(t, s.store.Check(ctx))
	j := s.journal("mail round")
	odd := "o'brien \"\\ \u00e9\u4e16\U0001F600\n$1 ?1"

	// Every verb in one transaction that goes, and in one that stays. What they
	// would do to these two messages, they do not: Discard of all takes its own.
	for _, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
		tx := s.begin()
		everyVerb(t, j, tx, "verbs ")
		require.NoError(t, end(tx))
	}
	require.Empty(t, s.records(j))

	ms := append(letters("plain", 60, 0), letters("grouped", 60, 7)...)
	ms = append(ms, outbox.Message{Key: odd, Group: odd, Payload: []byte(odd), Header: outbox.Header{"odd": odd}})
	for _, res := range s.put(j, ms...) {
		require.True(t, res.Created, res.Key)
	}
	one := outbox.Message{Key: "alone", Payload: []byte("x")}
	require.True(t, s.put(j, one)[0].Created)
	again := s.put(j, one, ms[0])
	require.False(t, again[0].Created || again[0].Differs || again[1].Created || again[1].Differs)
	added, err := j.Add(ctx, outbox.Message{Key: "added", Group: "g"})
	require.NoError(t, err)
	require.True(t, added.Created)
	own, err := j.Deliver(ctx, s.putBegun(j, outbox.Message{Key: "delivered"}, time.Minute),
		func(context.Context, *outbox.Record) (string, error) { return "by hand", nil }, outbox.SendOptions{})
	require.NoError(t, err)
	require.Equal(t, outbox.StateSent, own.State)

	var r receiver
	var failed sync.Once
	book := new(logbook)
	stop := s.run(book.options(), j.Sender(func(ctx context.Context, m *outbox.Record) (_ string, err error) {
		if m.Key == odd && (string(m.Payload) != odd || m.Header["odd"] != odd || m.Group != odd) {
			err = outbox.Permanent(errors.New("it was changed on the way"))
		}
		failed.Do(func() { err = outbox.RetryAfter(time.Millisecond, errDown) })
		if err == nil {
			r.took(m)
		}
		return "", err
	}, outbox.SendOptions{}))
	eventually(t, "the messages to be sent", func() bool { return s.unfinished() == 0 })
	require.NoError(t, stop())
	require.Empty(t, book.of(outbox.EventTrouble), "%q", book.noise())
	require.Equal(t, each(1, append(keysOf(ms), "alone", "added")...), r.times())
	require.Len(t, all(outbox.StateSent, r.keys()...), len(s.states(j))-1)
	byGroup := map[string]int64{}
	for _, m := range r.all() {
		require.True(t, m.group == "" || m.seq > byGroup[m.group], "%q", m.key)
		byGroup[m.group] = m.seq
	}

	stats, err := s.store.Stats(ctx)
	require.NoError(t, err)
	for _, c := range stats {
		require.False(t, c.Channel == messageChannel("mail round") && c.Due > 0)
	}
	n, err := j.Purge(ctx, time.Now().Add(time.Hour))
	require.NoError(t, err)
	require.EqualValues(t, len(ms)+3, n)
	require.Empty(t, s.records(j))
}

// TestFieldJournalUnderAnySessionSettings is field cases S46 (a cache of plans
// that must not be custom), S51, S52, S57 and S60 for the journal.
func TestFieldJournalUnderAnySessionSettings(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, setting := range [][2]string{
		{"TimeZone", "Asia/Tokyo"},
		{"search_path", ""},
		{"search_path", "decoy"},
		{"default_transaction_isolation", "repeatable read"},
		{"default_transaction_isolation", "serializable"},
		{"plan_cache_mode", "force_generic_plan"},
		{"lock_timeout", "1ms"},
		{"standard_conforming_strings", "off"},
		{"array_nulls", "off"},
		{"default_query_exec_mode", "cache_describe"},
		{"default_query_exec_mode", "describe_exec"},
	} {
		t.Run(setting[0]+" "+setting[1], func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			_, err := pgtest.OpenDSN(t, dsn).Exec(`CREATE SCHEMA decoy; CREATE TABLE decoy.outbox_messages (x int); CREATE TABLE decoy.outbox_groups (x int)`)
			require.NoError(t, err)
			s := &site{t: t, dialect: dialect.Postgres(), driver: "pgx", dsn: withParameter(t, dsn, setting[0], setting[1])}
			s.db = s.open()
			install(t, s.db, s.dialect)
			s.store = s.newStore(sqlstore.Options{})
			s.mailRound(t)
		})
	}
}

// TestFieldJournalBehindAPooler is field cases S54 and S55 for the journal: what
// it needs of a session is nothing.
func TestFieldJournalBehindAPooler(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, mode := range pooled {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s, direct := behindPooler(t, mode, 4)
			s.mailRound(t)
			requireUnchanged(t, s, direct)
		})
	}
}

// TestFieldJournalWithOddNames is field case S53 for the journal.
func TestFieldJournalWithOddNames(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for i, name := range []string{"my-schema", "select", "o'brien", `a"b`, "a.b", "a$$b", "{t:messages}"} {
			schema, prefix := "", name
			if s.postgres() {
				schema, prefix = name, oddNames[i]
			}
			s.in(t, schema, prefix).mailRound(t)
		}
		require.Empty(t, s.messages(), "written into another outbox")
	})
}

// TestFieldJournalWithAPoolOfOneConnection is field cases S49, S79 and S80 for
// the journal: nothing asks for a second connection while it has one, also
// where the send function uses the same pool.
func TestFieldJournalWithAPoolOfOneConnection(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		one := *s
		one.db = s.open()
		one.db.SetMaxOpenConns(1)
		var err error
		one.store, err = sqlstore.New(one.db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		require.NoError(t, migrations.Up(ctx, one.db, s.dialect))
		one.mailRound(t)

		const workers = 8
		j := one.journal("mail")
		ms := append(letters("plain", 60, 0), letters("grouped", 60, 9)...)
		one.put(j, ms...)
		book := new(logbook)
		stop := one.run(book.options(), j.Sender(func(ctx context.Context, m *outbox.Record) (string, error) {
			_, err := one.db.ExecContext(ctx, `INSERT INTO app (id, note) VALUES ($1, 'sent')`, m.Key)
			return "", err
		}, outbox.SendOptions{Workers: workers}))
		for n := range 10 {
			one.put(j, outbox.Message{Key: fmt.Sprint("later", n), Group: "later"})
			_, _, err := j.List(ctx, outbox.Filter{Limit: 5})
			require.NoError(t, err)
			_, err = j.Retry(ctx, outbox.Filter{All: true})
			require.NoError(t, err)
			_, err = one.store.Stats(ctx)
			require.NoError(t, err)
		}
		eventually(t, "the messages to be sent", func() bool { return one.unfinished() == 0 })
		require.NoError(t, stop())
		require.Equal(t, len(ms)+10, one.count(`SELECT count(*) FROM app WHERE note = 'sent'`))
		require.Empty(t, book.noise())
	})
}
