package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// quick makes a demo short.
var quick = []string{"demo", "--duration", "2s", "--orders", "30", "--seed", "7"}

// requireSummary reads the JSON summary of a demo and checks what must hold in
// every demo that was told to its end.
func requireSummary(t testing.TB, r result) summary {
	t.Helper()
	var sum summary
	require.NoError(t, json.Unmarshal([]byte(r.stdout), &sum), r.stdout+r.stderr)
	require.Equal(t, 180, sum.Transactions)
	require.Equal(t, sum.Transactions, sum.Committed+sum.RolledBack)
	require.Equal(t, sum.Committed, sum.Published+sum.Superseded)
	require.Equal(t, 2, sum.Kills)
	require.Positive(t, sum.RolledBack)
	require.Positive(t, sum.Tombstones)
	require.Positive(t, sum.Superseded)
	m := sum.Mails
	require.Equal(t, sum.Committed, m.Put)
	require.Equal(t, mailSummary{Put: m.Put, Sent: m.Put, Journals: m.Put, Retried: 1, Refused: m.Refused, Bounced: m.Bounced, Asked: m.Asked}, m)
	require.Positive(t, m.Refused)
	require.Positive(t, m.Bounced)
	require.Positive(t, m.Asked)
	return sum
}

func TestDemoConverges(t *testing.T) {
	test := func(t *testing.T, more ...string) {
		r := call(t, append(append(quick, "--json"), more...)...)
		require.Equal(t, exitOK, r.code, r.stdout+r.stderr)
		sum := requireSummary(t, r)
		require.True(t, sum.Converged)
		require.Empty(t, sum.Problems)
		require.Zero(t, sum.Waiting)
		require.Equal(t, 30, sum.Live+sum.Gone)
		require.Contains(t, r.stderr, "Converged: ")
		require.Contains(t, r.stderr, "--seed 7 --orders 30")
		require.Equal(t, 2, strings.Count(r.stderr, "(SIGKILL)"))
	}
	t.Run("sqlite", func(t *testing.T) {
		t.Setenv("TMPDIR", t.TempDir())
		test(t)
		requireEmpty(t, os.Getenv("TMPDIR"))
	})
	t.Run("sqlite file", func(t *testing.T) {
		dir := t.TempDir()
		test(t, "--dsn", filepath.Join(dir, "shop.db"))
		requireEmpty(t, dir)
	})
	if testing.Short() {
		return
	}
	t.Run("postgres", func(t *testing.T) {
		dsn := pgtest.DSN(t)
		test(t, "--dsn", dsn)
		require.Empty(t, demoSchemas(t, dsn))
	})
}

func requireEmpty(t testing.TB, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func demoSchemas(t testing.TB, dsn string) (names string) {
	t.Helper()
	row := open(t, dsn).db.QueryRow(`SELECT coalesce(string_agg(nspname, ' '), '') FROM pg_namespace WHERE nspname LIKE 'outbox\_demo\_%'`)
	require.NoError(t, row.Scan(&names))
	return names
}

// The comparison at the end is no formality: whatever was done to the index
// before it is found.
func TestDemoFailsIfTheIndexIsNotRight(t *testing.T) {
	test := func(t *testing.T, more ...string) {
		a := app{beforeCompare: func(ctx context.Context, s *site) error {
			table := s.d.Ident(s.d.Schema()) + ".search_index"
			_, err := s.indexDB.ExecContext(ctx, `UPDATE `+table+` SET value = $1
				WHERE key = (SELECT min(key) FROM `+table+` WHERE deleted_at IS NULL)`, []byte(`{"status":"paid","cents":1,"revision":0}`))
			return err
		}}
		r := a.call(t, append(append(quick, "--json"), more...)...)
		require.Equal(t, exitFailed, r.code, r.stdout+r.stderr)
		sum := requireSummary(t, r)
		require.False(t, sum.Converged)
		require.Len(t, sum.Problems, 1)
		require.Regexp(t, `^order-\d+: the shop has revision \d+ \(.*\), the index 0 \(paid, 1 cents\)$`, sum.Problems[0])
		require.Contains(t, r.stderr, "NOT converged, problems: 1.")
		require.NotContains(t, r.stderr, "\nConverged")
	}
	t.Run("sqlite", func(t *testing.T) { test(t) })
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) { test(t, "--dsn", pgtest.DSN(t)) })
	}
}

// told is a demo whose shop and index have done their work, without a relay's
// process.
func told(t *testing.T) *demo {
	t.Helper()
	o := demoOptions{prefix: "outbox_", duration: time.Second, orders: 12, seed: 3}
	s, err := openSite(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.clear()) })
	d := &demo{o: o, site: s, story: newStory(&bytes.Buffer{}, false)}
	require.NoError(t, d.open(func(error) {}))
	t.Cleanup(d.index.close)
	t.Cleanup(func() { d.mailer.server.Close() })
	d.mailer.open()
	spec := relaySpec{Index: d.index.url, Mailer: d.mailer.url}
	relay, err := outbox.NewRelay(outbox.RelayOptions{Logger: slog.New(slog.DiscardHandler)}, d.shop.orders.Publisher(spec.publish, outbox.PublishOptions{
		Backoff: func(int) time.Duration { return time.Millisecond },
	}), d.shop.mails.Sender(spec.send, outbox.SendOptions{OnUnknown: outbox.Park, Probe: spec.ask}))
	require.NoError(t, err)
	for _, c := range d.shop.clerks {
		c.every = 0
		require.NoError(t, c.work(t.Context()))
		_, err = relay.Flush(t.Context())
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		_, err := relay.Flush(t.Context())
		require.NoError(t, err)
		done, err := d.drained(t.Context())
		require.NoError(t, err)
		return done
	}, 10*time.Second, 5*time.Millisecond)
	return d
}

func TestDemoFindsEveryKindOfFault(t *testing.T) {
	d := told(t)
	judge := func(t *testing.T) string {
		t.Helper()
		sum, err := d.finish(t.Context())
		require.NoError(t, err)
		require.Equal(t, sum.Converged, len(sum.Problems) == 0)
		return strings.Join(sum.Problems, "\n")
	}
	require.Empty(t, judge(t))
	var live, gone string
	orders, err := d.site.readOrders(t.Context())
	require.NoError(t, err)
	for id := range d.shop.ledger.newest {
		if _, ok := orders[id]; ok {
			live = id
		} else {
			gone = id
		}
	}
	require.NotEmpty(t, live)
	require.NotEmpty(t, gone)

	for _, c := range []struct {
		name, query, says string
	}{
		{"lost", `DELETE FROM search_index WHERE key = 'LIVE'`, "LIVE: lost"},
		{"deleted", `UPDATE search_index SET deleted_at = 1, value = NULL WHERE key = 'LIVE'`, "LIVE: deleted in the index"},
		{"garbled", `UPDATE search_index SET value = x'00' WHERE key = 'LIVE'`, "LIVE: the index has no order"},
		{"of an old version", `UPDATE search_index SET version = version - 1 WHERE key = 'LIVE'`, "LIVE: the index has version"},
		{"resurrected", `UPDATE search_index SET deleted_at = NULL, value = x'7b7d' WHERE key = 'GONE'`, "GONE: cancelled in the shop"},
		{"tombstone lost", `DELETE FROM search_index WHERE key = 'GONE'`, "GONE: cancelled in the shop"},
		{"invented", `INSERT INTO search_index (key, version, value, updated_at) VALUES ('order-x', 1, x'7b7d', 1)`, "order-x: in the index"},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := strings.NewReplacer("LIVE", live, "GONE", gone)
			exec := func(query string) {
				_, err := d.site.indexDB.Exec(name.Replace(query))
				require.NoError(t, err)
			}
			exec(`CREATE TABLE saved AS SELECT * FROM search_index`)
			exec(c.query)
			require.Contains(t, judge(t), name.Replace(c.says))
			exec(`DELETE FROM search_index; INSERT INTO search_index SELECT * FROM saved; DROP TABLE saved`)
			require.Empty(t, judge(t))
		})
	}
	t.Run("mails", func(t *testing.T) { faultsOfMails(t, d, judge) })
	t.Run("left", func(t *testing.T) {
		require.NoError(t, d.shop.make(t.Context(), change{id: "order-y", to: order{Status: "placed", Revision: 1}}))
		problems := judge(t)
		require.Contains(t, problems, "1 entry left in the outbox")
		require.Contains(t, problems, "order-y: lost")
	})
	t.Run("rolled back and yet published", func(t *testing.T) {
		require.NoError(t, d.index.write(t.Context(), []posting{{Key: "order-z", Version: 1 << 52}}))
		require.Contains(t, judge(t), "version 4503599627370496 reached the index, although its transaction was rolled back")
	})
	t.Run("went back", func(t *testing.T) {
		require.NoError(t, d.index.write(t.Context(), []posting{{Key: "order-z", Version: 1<<52 + 1, Order: order{Revision: -1}}}))
		require.Contains(t, judge(t), "order-z went back from revision 0 to -1 although the version rose")
	})
	t.Run("version not after its predecessor", func(t *testing.T) {
		d.shop.note(live, 1, false)
		require.Contains(t, judge(t), live+": version 1 was given out after ")
	})
}

// The same seed makes the same transactions.
func TestDemoSeedDecidesTheTransactions(t *testing.T) {
	plan := func(seed uint64) (all []change) {
		s, err := openSite(t.Context(), demoOptions{prefix: "outbox_"})
		require.NoError(t, err)
		defer func() { require.NoError(t, s.clear()) }()
		sh, err := newShop(s, demoOptions{orders: 30, seed: seed, duration: time.Second})
		require.NoError(t, err)
		for _, c := range sh.clerks {
			for i := range c.changes {
				all = append(all, c.next(i))
			}
		}
		return all
	}
	first := plan(1)
	require.Len(t, first, 180)
	require.Equal(t, first, plan(1))
	require.NotEqual(t, first, plan(2))
}

func TestDemoRefusesWhatExists(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	ok(t, "migrate", "up", "--dsn", path)
	stage(t, open(t, path), "orders", 0, "a")
	r := call(t, append(quick, "--dsn", path)...)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "works in a new one only")
	require.Regexp(t, `(?m)^orders +latest +1 `, ok(t, "stats", "--dsn", path))
	if testing.Short() {
		return
	}
	dsn := pgtest.DSN(t)
	ok(t, "migrate", "up", "--dsn", dsn)
	r = call(t, append(quick, "--dsn", dsn, "--schema", "public")...)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, `create schema "public" for the demo, which works in a new one only`)
	require.Contains(t, ok(t, "migrate", "status", "--dsn", dsn), "applied")
}

func TestDemoKeepsWhatItIsToldTo(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	out := ok(t, append(quick, "--keep")...)
	require.Contains(t, out, "kept: ")
	_, dsn, found := strings.Cut(strings.TrimSpace(out), "to look: outbox stats --dsn ")
	require.True(t, found)
	require.Regexp(t, `^CHANNEL .*\nmails +journal +0 +0 +0 +- +0 +0 +0 +0 +open\n$`, ok(t, "stats", "--dsn", dsn))
}

// Ctrl-C in the middle leaves nothing behind, no process either.
func TestDemoCanBeInterrupted(t *testing.T) {
	test := func(t *testing.T, more ...string) {
		dir := t.TempDir()
		t.Setenv("TMPDIR", dir)
		ctx, interrupt := context.WithCancel(t.Context())
		var stderr bytes.Buffer
		out := &stopAfter{text: "(SIGKILL)", times: 1, stop: interrupt}
		a := app{stdout: out, stderr: &stderr, env: func(string) string { return "" }}
		require.Equal(t, exitInterrupted, a.run(ctx, append(append([]string{"outbox"}, quick...), more...)))
		require.Contains(t, out.String(), "interrupted: nothing is compared")
		require.NotContains(t, out.String(), "onverged")
		require.Equal(t, "outbox: interrupted\n", stderr.String())
		requireEmpty(t, dir)
	}
	t.Run("sqlite", func(t *testing.T) { test(t) })
	if testing.Short() {
		return
	}
	t.Run("postgres", func(t *testing.T) {
		dsn := pgtest.DSN(t)
		test(t, "--dsn", dsn)
		require.Empty(t, demoSchemas(t, dsn))
	})
}

type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("nobody reads") }

func TestDemoEndsIfNobodyReads(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	var stderr bytes.Buffer
	a := app{stdout: failingWriter{}, stderr: &stderr, env: func(string) string { return "" }}
	require.Equal(t, exitFailed, a.run(t.Context(), append([]string{"outbox"}, quick...)))
	require.Contains(t, stderr.String(), "nobody reads")
	requireEmpty(t, dir)
}

// OUTBOX_DSN may name a production database: the demo does not care.
func TestDemoShowsProgressOnATerminal(t *testing.T) {
	production := filepath.Join(t.TempDir(), "app.db")
	r := app{terminal: true, env: func(string) string { return production }}.call(t, quick...)
	require.NoFileExists(t, production)
	require.Equal(t, exitOK, r.code, r.stdout+r.stderr)
	require.Contains(t, r.stdout, "in the outbox; transactions")
	require.Contains(t, r.stdout, "/180)")
	require.NotContains(t, r.stdout, "so far")
	require.True(t, strings.HasSuffix(r.stdout, "Converged: the index has the newest state of every order, and every mail was sent once, in order. Nothing else was.\n"))
}

// A relay process that ends by itself ends the demo, with its reason.
func TestDemoRelayProcessMustNotEndByItself(t *testing.T) {
	failed := make(chan error, 1)
	r := &relays{
		spec:  relaySpec{DSN: filepath.Join(t.TempDir(), "missing.db")},
		story: newStory(&bytes.Buffer{}, false),
		fail:  func(err error) { failed <- err },
	}
	require.NoError(t, r.start())
	defer r.close()
	require.ErrorContains(t, <-failed, "it does not exist")
}

// The relay's process ends when the demo's does, which closes its input: in the
// middle of a publication, and before it has begun.
func TestDemoRelayProcessEndsWithItsInput(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	ok(t, "migrate", "up", "--dsn", path)
	s := open(t, path)
	orders, err := outbox.NewLatest(s.store, outbox.LatestOptions[order]{Channel: ordersChannel})
	require.NoError(t, err)
	require.NoError(t, s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
		_, err := orders.StageDelete(t.Context(), tx, "a")
		return err
	}))
	called := make(chan struct{})
	var once sync.Once
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { once.Do(func() { close(called) }) }))
	defer server.Close()
	spec, err := json.Marshal(relaySpec{DSN: path, Prefix: "outbox_", Index: server.URL, Lease: time.Second})
	require.NoError(t, err)
	input, end := io.Pipe()
	var stdout, stderr bytes.Buffer
	ended := make(chan error)
	go func() { ended <- runRelay(t.Context(), input, &stdout, &stderr) }()
	_, err = end.Write(append(spec, '\n'))
	require.NoError(t, err)
	select {
	case <-called:
	case <-time.After(30 * time.Second):
		t.Fatal("the relay has not called the index")
	}
	require.NoError(t, end.Close())
	require.NoError(t, <-ended)

	require.NoError(t, runRelay(t.Context(), bytes.NewReader(append(spec, '\n')), &stdout, &stderr))
	require.ErrorContains(t, runRelay(t.Context(), strings.NewReader(""), &stdout, &stderr), "read what to relay")
}

func TestStoryMayBeToldByMany(t *testing.T) {
	var out bytes.Buffer
	st := newStory(&out, true)
	st.begin(10)
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			st.say("demo", "line %d", i)
			st.progress(i, i)
		})
	}
	all.Wait()
	st.end()
	st.text("last")
	require.Equal(t, 10, strings.Count(out.String(), "demo   line "))
	require.True(t, strings.HasSuffix(out.String(), "last\n"))
}
