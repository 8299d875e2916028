package outboxtest

import (
	"context"
	"database/sql"
	"errors"
	"reflect"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	short = 50 * time.Millisecond // a lease or delay that the suite waits for
	long  = time.Hour             // one that ends after the suite
	// A BatchDelay whose next multiple is decades away, whenever the suite runs.
	century = 100 * 365 * 24 * time.Hour
	// Nothing in the suite takes this long, so who waits longer waits for ever.
	patience = 3 * time.Minute
	// Calls that may not wait for a lock get this long.
	atOnce = 3 * time.Second
)

// leased, as the LeaseUntil of a wanted row, stands for any time.
var leased = time.Unix(1, 0)

// A base is what subtests of both systems work with: a store, and a channel
// that is the subtest's own.
type base struct {
	*testing.T
	ctx     context.Context
	relay   outbox.RelayStore
	system  outbox.System
	db      *sql.DB
	clock   *Clock
	channel string
}

func newBase(t *testing.T, store outbox.RelayStore, system outbox.System, db *sql.DB, c *Clock) base {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return base{T: t, ctx: ctx, relay: store, system: system, db: db, clock: c, channel: newChannel()}
}

// A fixture is one subtest of a [LatestSuite].
type fixture struct {
	base
	store outbox.LatestStore
}

func newFixture(t *testing.T, store outbox.LatestStore, db *sql.DB, c *Clock) *fixture {
	return &fixture{base: newBase(t, store, outbox.SystemLatest, db, c), store: store}
}

// on returns the fixture with another channel.
func (f *fixture) on(channel string) *fixture {
	other := *f
	other.channel = channel
	return &other
}

func (f *base) ch() outbox.Channel {
	return outbox.Channel{System: f.system, Name: f.channel}
}

// pass lets d go by on the store's clock.
func (f *base) pass(d time.Duration) {
	if f.clock != nil {
		f.clock.Advance(d)
		return
	}
	time.Sleep(d + time.Millisecond)
}

// begin begins a transaction that the subtest's end rolls back.
func (f *base) begin() *sql.Tx {
	f.Helper()
	// Not f.ctx: at its end database/sql would roll back in the background,
	// in the way of the next subtest.
	tx, err := f.db.BeginTx(context.WithoutCancel(f.ctx), nil)
	f.ok("begin", err)
	f.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

func (f *base) commit(tx *sql.Tx) {
	f.Helper()
	f.ok("commit", tx.Commit())
}

func (f *base) rollback(tx *sql.Tx) {
	f.Helper()
	f.ok("roll back", tx.Rollback())
}

func (f *base) exec(tx *sql.Tx, text string) {
	f.Helper()
	_, err := tx.ExecContext(f.ctx, text)
	f.ok(text, err)
}

// value is a row to stage.
func value(key, payload string) outbox.StageRow {
	return outbox.StageRow{Key: key, Payload: []byte(payload)}
}

// stageIn stages rows in tx.
func (f *fixture) stageIn(tx *sql.Tx, delay time.Duration, rows ...outbox.StageRow) []outbox.Version {
	f.Helper()
	vs, err := f.store.StageRows(f.ctx, outbox.SQL(tx), f.channel, rows, delay)
	f.ok("StageRows", err)
	if len(vs) != len(rows) {
		f.Fatalf("StageRows returned %d versions for %d rows", len(vs), len(rows))
	}
	return vs
}

// stage stages rows in a transaction of their own and commits it.
func (f *fixture) stage(delay time.Duration, rows ...outbox.StageRow) []outbox.Version {
	f.Helper()
	tx := f.begin()
	vs := f.stageIn(tx, delay, rows...)
	f.commit(tx)
	return vs
}

// put stages one value, due at once, and commits. What is put next is due later.
func (f *fixture) put(key, payload string) outbox.Version {
	f.Helper()
	v := f.stage(0, value(key, payload))[0]
	if f.clock != nil {
		f.clock.Advance(time.Microsecond)
	}
	return v
}

// ask claims up to limit rows for lease.
func (f *fixture) ask(limit int, lease time.Duration) outbox.Claimed {
	f.Helper()
	c, err := f.store.ClaimRows(f.ctx, outbox.Claim{Channel: f.channel, Limit: limit, Lease: lease, Full: true})
	f.ok("ClaimRows", err)
	if len(c.Rows) > limit {
		f.Fatalf("ClaimRows returned %d rows, over the limit of %d", len(c.Rows), limit)
	}
	return c
}

// claim claims all due rows for longer than the suite runs.
func (f *fixture) claim() []outbox.Row {
	f.Helper()
	return f.ask(1000, long).Rows
}

// claimOne claims the one row that is due.
func (f *fixture) claimOne(lease time.Duration) outbox.Row {
	f.Helper()
	rows := f.ask(1000, lease).Rows
	if len(rows) != 1 {
		f.Fatalf("ClaimRows returned %s, want one row", keys(rows))
	}
	return rows[0]
}

// claimAfter claims when d has gone by, and waits for the first row to come
// where the store's clock moves by itself.
func (f *fixture) claimAfter(d, lease time.Duration) []outbox.Row {
	f.Helper()
	f.pass(d)
	for {
		if rows := f.ask(1000, lease).Rows; len(rows) > 0 || f.clock != nil {
			return rows
		}
		time.Sleep(short / 10)
	}
}

// claimNone claims and finds nothing.
func (f *fixture) claimNone(why string) {
	f.Helper()
	if c := f.ask(1000, long); len(c.Rows) > 0 || c.Probe {
		f.Fatalf("ClaimRows returned %s (probe %t), want nothing: %s", keys(c.Rows), c.Probe, why)
	}
}

func done(r outbox.Row) outbox.Settlement {
	return outbox.Settlement{Row: r, Outcome: outbox.OutcomeDone}
}

func retry(r outbox.Row, delay time.Duration, text string) outbox.Settlement {
	return outbox.Settlement{Row: r, Outcome: outbox.OutcomeRetry, Delay: delay, Error: text}
}

func release(r outbox.Row, delay time.Duration) outbox.Settlement {
	return outbox.Settlement{Row: r, Outcome: outbox.OutcomeRelease, Delay: delay}
}

// again says that a settlement may have been made before.
func again(s outbox.Settlement) outbox.Settlement {
	s.Again = true
	return s
}

// settle settles one row and checks the result.
func (f *base) settle(what string, s outbox.Settlement, want outbox.Result) {
	f.Helper()
	f.settleAll(what, []outbox.Settlement{s}, want)
}

// settleAll settles rows in one call and checks the results.
func (f *base) settleAll(what string, ss []outbox.Settlement, want ...outbox.Result) {
	f.Helper()
	got, err := f.relay.Settle(f.ctx, f.ch(), ss)
	f.ok("Settle", err)
	f.equal(what+": Settle", named(got), named(want))
}

// extend extends leases in one call and checks the results.
func (f *base) extend(what string, rows []outbox.Row, d time.Duration, want ...outbox.Result) {
	f.Helper()
	got, err := f.relay.Extend(f.ctx, f.ch(), rows, d)
	f.ok("Extend", err)
	f.equal(what+": Extend", named(got), named(want))
}

// row returns the committed row of a key.
func (f *fixture) row(key string) outbox.Row {
	f.Helper()
	r, err := f.store.PendingRow(f.ctx, nil, f.channel, key)
	f.ok("PendingRow", err)
	return r
}

// gone checks that a key has no committed row.
func (f *fixture) gone(key, why string) {
	f.Helper()
	_, err := f.store.PendingRow(f.ctx, nil, f.channel, key)
	f.fails("PendingRow of a key without a row ("+why+")", err, outbox.ErrNotFound)
}

// unclaimed returns the row that staging s as version v makes of it.
func unclaimed(s outbox.StageRow, v outbox.Version) outbox.Row {
	r := outbox.Row{Key: s.Key, Version: v, Payload: s.Payload, Header: s.Header, Deleted: s.Deleted}
	if r.Payload == nil {
		r.Payload = []byte{} // a payload is empty, never nil
	}
	if len(r.Header) == 0 {
		r.Header = nil
	}
	return r
}

// sameRow compares whole rows. What the store alone knows is taken from got
// where want leaves it out: ID, StagedAt and Due; and LeaseUntil, if leased.
func (f *fixture) sameRow(what string, got, want outbox.Row) {
	f.Helper()
	if got.ID == 0 {
		f.Fatalf("%s: the row has no ID", what)
	}
	want.ID = got.ID
	want.StagedAt = f.stamp(what+": StagedAt", got.StagedAt, want.StagedAt)
	want.Due = f.stamp(what+": Due", got.Due, want.Due)
	if want.LeaseUntil.Equal(leased) {
		want.LeaseUntil = f.stamp(what+": LeaseUntil", got.LeaseUntil, time.Time{})
	}
	f.equal(what, got, want)
}

// stamp checks a time's form and returns want, or got where want is zero.
func (f *base) stamp(what string, got, want time.Time) time.Time {
	f.Helper()
	if got.IsZero() || got.Location() != time.UTC || got != got.Truncate(time.Microsecond) {
		f.Fatalf("%s is %v, want a time in UTC and whole microseconds", what, got)
	}
	if want.IsZero() {
		return got
	}
	return want
}

func (f *base) ok(what string, err error) {
	f.Helper()
	if err != nil {
		f.Fatalf("%s: %v", what, err)
	}
}

func (f *base) fails(what string, err, want error) {
	f.Helper()
	if !errors.Is(err, want) {
		f.Fatalf("%s: the error is %v, want %v", what, err, want)
	}
}

func (f *base) equal(what string, got, want any) {
	f.Helper()
	if !reflect.DeepEqual(got, want) {
		f.Fatalf("%s:\n got %s\nwant %s", what, clip(got), clip(want))
	}
}

func (f *base) increases(what string, old, new outbox.Version) {
	f.Helper()
	if new <= old {
		f.Fatalf("%s: version %d does not exceed its predecessor %d", what, new, old)
	}
}
