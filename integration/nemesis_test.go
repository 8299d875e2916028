//go:build unix

package integration

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestConvergence lets applications write and relays publish while a nemesis
// breaks what it can: processes, connections, clocks, the database. Then all is
// healed, and what was committed must be what the destinations have; see
// nemesis_check_test.go for what is compared.
//
// OUTBOX_STRESS_SECONDS is how long the nemesis is at work on each database.
// OUTBOX_SEED repeats its steps and the writers' of an earlier run, as far as
// the machine lets it: what meets what is a matter of time.
func TestConvergence(t *testing.T) {
	t.Parallel()
	seed, err := strconv.ParseUint(cmp.Or(os.Getenv("OUTBOX_SEED"), fmt.Sprint(rand.Uint64())), 10, 64)
	require.NoError(t, err, "OUTBOX_SEED")
	seconds, err := strconv.Atoi(cmp.Or(os.Getenv("OUTBOX_STRESS_SECONDS"), "6"))
	require.NoError(t, err, "OUTBOX_STRESS_SECONDS")
	t.Logf("OUTBOX_SEED=%d OUTBOX_STRESS_SECONDS=%d", seed, seconds)
	before := slog.Default() // Deliver logs there what it meets, which is a lot
	slog.SetDefault(slog.New(slog.DiscardHandler))
	t.Cleanup(func() { slog.SetDefault(before) })
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		dsn := dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db"))
		dsn = strings.Replace(dsn, "synchronous(FULL)", "synchronous(OFF)", 1) // no power is cut
		newOrdeal(t, newSite(t, dialect.SQLite(), "sqlite", dsn), nil, seed).run(time.Duration(seconds) * time.Second)
	})
	if testing.Short() {
		return
	}
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		cluster := pgtest.Start(t, pgtest.Options{})
		s := newSite(t, dialect.Postgres(), "pgx", cluster.DSN())
		newOrdeal(t, s, cluster, seed).run(time.Duration(seconds) * time.Second)
	})
}

const (
	ordealRelays   = 3
	ordealWriters  = 5
	ordealLease    = time.Second
	ordealStep     = 2500 * time.Millisecond // the most that a clock is put forward or back
	ordealPatience = 90 * time.Second        // for all to drain: a lease, a full pass, a clock, pauses of a relay, and a slow machine
)

// An ordeal is one run on one database.
type ordeal struct {
	t       *testing.T
	s       *site           // the application, beside the database
	far     *site           // the application behind a proxy; the same on SQLite
	cluster *pgtest.Cluster // nil on SQLite
	proxy   *proxy          // likewise
	end     *endpoint
	seed    uint64
	began   time.Time
	fleet   []*process
	clock   stepped      // of the application
	pages   atomic.Int64 // see filling
	book    accounts

	mu     sync.Mutex
	steps  []string // of the nemesis
	taken  map[string]int
	faults []string // what must not be
	guilty map[item]bool
}

// item names a key of a channel.
type item struct{ channel, key string }

func newOrdeal(t *testing.T, s *site, cluster *pgtest.Cluster, seed uint64) *ordeal {
	od := &ordeal{t: t, s: s, far: s, cluster: cluster, seed: seed, began: time.Now(), taken: map[string]int{}, guilty: map[item]bool{}}
	od.end = newEndpoint(od)
	for _, table := range []string{
		// What was staged last, in the order of the commits: its writer holds the key.
		`CREATE TABLE truth (channel text, key text, version bigint NOT NULL, value text NOT NULL, backwards bigint NOT NULL, PRIMARY KEY (channel, key))`,
		// Messages, each with its rank in its group, and how many each group has.
		`CREATE TABLE posted (channel text, key text, grp text NOT NULL, rank bigint NOT NULL, seq bigint NOT NULL, puts bigint NOT NULL, PRIMARY KEY (channel, key))`,
		`CREATE TABLE ranks (channel text, grp text, rank bigint NOT NULL, PRIMARY KEY (channel, grp))`,
		// Leases that lapsed: a message's attempt is then given back.
		`CREATE TABLE lapses (seq bigint NOT NULL)`,
		`CREATE TABLE ballast (b bytea NOT NULL)`,
	} {
		if !s.postgres() {
			table = strings.Replace(table, "bytea", "blob", 1)
		}
		s.exec(table)
	}
	// Now and then a version is drawn, and its writer stalls before it holds the key.
	const stall = `CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN IF random() < 0.05 THEN PERFORM pg_sleep(random() * 0.4); END IF; RETURN new; END'`
	const lapsed = ` WHEN (old.lease_until > 0 AND new.lease_until > 0 AND new.token <> old.token)`
	if s.postgres() {
		s.exec(stall)
		s.exec(s.dialect.Render(`CREATE TRIGGER stall BEFORE INSERT ON {t:entries} FOR EACH ROW EXECUTE FUNCTION stall()`))
		s.exec(`CREATE FUNCTION lapse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO lapses VALUES (new.seq); RETURN NULL; END'`)
		s.exec(s.dialect.Render(`CREATE TRIGGER lapse AFTER UPDATE ON {t:messages} FOR EACH ROW` + lapsed + ` EXECUTE FUNCTION lapse()`))
		od.proxy = s.proxy()
		od.far = s.through(od.proxy)
		od.far.store = od.far.newStore(sqlstore.Options{Clock: od.clock.now})
		return od
	}
	s.exec(s.dialect.Render(`CREATE TRIGGER lapse AFTER UPDATE ON {i:messages}` + lapsed + ` BEGIN INSERT INTO lapses VALUES (new.seq); END`))
	s.db = openFilling(t, s.driver, s.dsn, &od.pages)
	var err error
	s.store, err = sqlstore.New(s.db, s.dialect, sqlstore.Options{Clock: od.clock.now})
	require.NoError(t, err)
	return od
}

// run lets writers, relays and the nemesis work, heals, drains, and compares.
func (od *ordeal) run(length time.Duration) {
	defer od.report()
	for i := range ordealRelays {
		od.fleet = append(od.fleet, od.start(i))
	}
	for _, p := range od.fleet {
		p.await("ready")
	}
	stopWriting := od.write()
	od.harass(length)
	stopWriting()
	od.note("healed")
	od.end.calm.Store(true)
	if od.proxy != nil {
		od.proxy.cutNext("", "")
	}
	fill(od.s.db, &od.pages, 0) // and no connection is left that a crash has cut

	healed := time.Now()
	od.settleDown("the relays to drain", true, func() bool { return od.waiting(true) == 0 })
	od.t.Logf("drained %s after all was healed", time.Since(healed).Round(time.Millisecond))
	if od.t.Failed() {
		return
	}
	od.checkAttempts()
	od.checkSettlers()
	for _, p := range od.fleet {
		p.retire(true)
	}
	od.checkNothingHeld()

	// Nobody sends any more, so what did not arrive was not sent.
	stop := od.s.run(new(logbook).options(), attachments(od.s.store, od.t, od.end.answer)...)
	od.settleDown("the rest to go out", false, func() bool { return od.waiting(false) == 0 })
	require.NoError(od.t, stop())
	od.checkNothingHeld()
	od.check()
}

// waiting counts what is still to be sent; but, where asked, not what waits for
// a person.
func (od *ordeal) waiting(blockedApart bool) int {
	n := od.s.count(`SELECT count(*) FROM {t:entries}`)
	if !blockedApart {
		return n + od.s.count(`SELECT count(*) FROM {t:messages} WHERE outcome <> 1`)
	}
	return n + od.s.count(`SELECT count(*) FROM {t:messages} WHERE outcome = 4`) + od.s.count(`
		SELECT count(*) FROM {t:messages} AS m WHERE outcome = 0 AND NOT EXISTS (
			SELECT 1 FROM {t:messages} AS u
			WHERE u.channel = m.channel AND u.grp = m.grp AND u.grp <> '' AND u.outcome = 5 AND u.seq < m.seq)`)
}

// settleDown does a person's work until a condition holds.
func (od *ordeal) settleDown(what string, running bool, done func() bool) {
	for deadline := time.Now().Add(ordealPatience); !done(); time.Sleep(50 * time.Millisecond) {
		if err := od.decide(running); err != nil {
			od.fail(item{}, "a person's verb: %v", err)
		}
		if time.Now().After(deadline) {
			od.stuck(what)
			od.t.FailNow()
		}
	}
}

// stuck tells what is left.
func (od *ordeal) stuck(what string) {
	od.fail(item{}, "waited %s for %s", ordealPatience, what)
	for table, which := range map[string]string{"entries": "version > 0", "messages": "outcome <> 1"} {
		var it item
		from := od.s.dialect.Render(` FROM {t:` + table + `} WHERE ` + which)
		od.each(od.s.db, `SELECT channel, key`+from+` LIMIT 5`, []any{&it.channel, &it.key}, func() { od.fail(it, "left behind") })
		od.t.Logf("%s:\n%s", table, strings.Join(od.s.table(`SELECT *`+from+` LIMIT 10`), "\n"))
	}
	for _, table := range []string{"groups", "channels"} {
		od.t.Logf("%s:\n%s", table, strings.Join(od.s.table(`SELECT * FROM {t:`+table+`} LIMIT 10`), "\n"))
	}
	for _, p := range od.fleet {
		od.t.Logf("%s said last:\n%s", p.name, strings.Join(p.last(5), "\n"))
	}
}

// random is a source of chance for one actor: what others do does not change it.
func (od *ordeal) random(actor string) *rand.Rand { return rand.New(rand.NewPCG(od.seed, hash(actor))) }

// note records a step of the nemesis.
func (od *ordeal) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	kind, _, _ := strings.Cut(text, " ")
	od.mu.Lock()
	defer od.mu.Unlock()
	od.taken[kind]++
	od.steps = append(od.steps, fmt.Sprintf("%9.3f  %s", time.Since(od.began).Seconds(), text))
}

// fail records what must not be, about one key or none.
func (od *ordeal) fail(it item, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if it != (item{}) {
		text = fmt.Sprintf("%s %q: %s", it.channel, it.key, text)
	}
	od.mu.Lock()
	defer od.mu.Unlock()
	if len(od.guilty) < 3 && it != (item{}) {
		od.guilty[it] = true
	}
	if od.faults = append(od.faults, text); len(od.faults) <= 20 {
		od.t.Error(text)
	}
}

// report tells what was done, and of a failure what led to it.
func (od *ordeal) report() {
	commits, rest := od.book.totals()
	od.t.Logf("%d transactions committed, %d not or perhaps; %d sends; steps %v", commits, rest, od.end.count(), od.taken)
	if !od.t.Failed() {
		return
	}
	od.mu.Lock()
	defer od.mu.Unlock()
	od.t.Logf("%d faults; OUTBOX_SEED=%d; the nemesis' steps, in seconds:\n%s", len(od.faults), od.seed, strings.Join(od.steps, "\n"))
	for _, it := range slices.SortedFunc(maps.Keys(od.guilty), func(a, b item) int { return strings.Compare(a.key, b.key) }) {
		history := append(od.book.history(it), od.end.history(it)...)
		slices.Sort(history) // they begin with the time
		if n := len(history); n > 60 {
			history = history[n-60:]
		}
		od.t.Logf("history of %s %q:\n%s", it.channel, it.key, strings.Join(history, "\n"))
	}
}

// at is a moment in a history.
func (od *ordeal) at() string { return fmt.Sprintf("%9.3f", time.Since(od.began).Seconds()) }

// decide is what people do meanwhile: dead messages are retried, unknown ones
// that arrived are sent. Those that did not may still be under way while any
// process runs that has ever sent.
func (od *ordeal) decide(running bool) error {
	ctx, cancel := within(5 * time.Second)
	defer cancel()
	for _, channel := range []string{resendChannel, parkChannel, batchChannel} {
		j := journalOn(od.t, od.s.store, channel)
		if _, err := j.Retry(ctx, outbox.Filter{States: []outbox.State{outbox.StateDead}}); err != nil {
			return err
		}
		unknown, _, err := j.List(ctx, outbox.Filter{States: []outbox.State{outbox.StateUnknown}, Limit: 100})
		if err != nil {
			return err
		}
		for _, r := range unknown {
			if channel != parkChannel {
				od.fail(item{channel, r.Key}, "unknown, though it may be sent again")
			}
			verdict := outbox.VerdictSent
			if !od.end.has(item{channel, r.Key}) {
				if running {
					continue
				}
				verdict = outbox.VerdictNotSent
			}
			if err := j.ResolveUnknown(ctx, r.Key, verdict, ""); err != nil && !decided(err) {
				return err
			}
		}
	}
	return nil
}
