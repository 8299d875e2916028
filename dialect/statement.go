package dialect

import (
	"context"
	"database/sql"
	"fmt"
)

// Statement is one query with its arguments. On SQLite the text may hold
// several statements that share the arguments; the last one answers.
type Statement struct {
	Text string
	Args []any
}

// Querier runs one query: *sql.DB, *sql.Conn and *sql.Tx do.
type Querier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// Stage is what [Dialect.Stage] writes: four slices of one length. Keys are
// distinct and sorted. Answered with one text, for [Dialect.Versions].
type Stage struct {
	Channel    string
	Keys       []string
	Payloads   [][]byte // none nil
	Headers    []string // JSON, or empty
	Tombstones []bool
	Delay      int64 // microseconds to round due up to; 0: none
}

// Claim is what [Dialect.Claim] asks for.
type Claim struct {
	Channel string
	Limit   int
	Lease   int64 // microseconds
	From    int64 // lower bound of due
}

// Settle is what [Dialect.Settle] ends: slices of one length; Outcomes, Delays
// and Errors are nil where all outcomes are OutcomeDone.
type Settle struct {
	Channel  string
	Places   []Place
	Keys     []string
	Versions []int64
	Tokens   []int64
	Outcomes []int16
	Delays   []int64 // microseconds
	Errors   []string
	Again    []bool // nil: none
}

// Extend is what [Dialect.Extend] lets run on: slices of one length.
type Extend struct {
	Channel string
	Places  []Place
	Keys    []string
	Tokens  []int64
	Lease   int64 // microseconds from now
}

// Outcomes and results, numbered as package outbox does.
const (
	OutcomeDone    = 1
	OutcomeRetry   = 2
	OutcomeRelease = 3

	ResultDone       = 1
	ResultSuperseded = 2
	ResultStale      = 3
	ResultBusy       = 4
	ResultNotFound   = 5 // of Discard
)

// Look is what [Dialect.Look] asks about: slices of one length. Answered, in
// their order, with (wait, paused, outage), in microseconds from now.
type Look struct {
	Systems []int16
	Names   []string
	Froms   []int64 // lower bounds of due
	// FromGroups are the lower bounds of the due times of groups; channels of entries have none.
	FromGroups []int64
}

// Outage is what [Dialect.Outage] records: pauses grow from Base to Cap,
// microseconds, doubling. Answered with no row.
type Outage struct {
	System    int16
	Name      string
	Down      bool
	Reason    string
	Base, Cap int64
}

// rowColumns are the columns of a row after its [Place], in the order in which they are scanned.
const rowColumns = `key, version, token, attempt, payload, headers, tombstone, staged_at, due, lease_until, last_error`

// now is what a statement takes for the time: microseconds since the Unix
// epoch, or nil for the database's clock.
type now = any

// engine is what the file named for a database provides. Texts are not yet
// rendered. See the methods of Dialect of the same names.
type engine interface {
	journal
	name() string
	hostClock() bool // the database has no clock of its own that serves
	stage(Stage, now) Statement
	prepared() []string
	versions(answer string, n int) ([]int64, error)
	pending(channel, key string) Statement
	list(channel, after string, limit int) Statement
	look(Look, now) Statement
	outage(Outage, now) Statement
	pause(name string, length int64, reason string, at now) Statement
	stats(limit int, at now) Statement
	fence(now) Statement
	discard(ctx context.Context, db *sql.DB, d Dialect, channel, key string, version int64) (int16, error)
	claim(ctx context.Context, db *sql.DB, d Dialect, c Claim, at now, attempt func() func(Scanner) error) error
	settle(ctx context.Context, db *sql.DB, d Dialect, s Settle, at now) ([]int16, error)
	extend(ctx context.Context, db *sql.DB, d Dialect, e Extend, at now) ([]int16, error)
	read(ctx context.Context, db *sql.DB, run func(Querier) error) error
	write(ctx context.Context, db *sql.DB, run func(Querier) error) error
	callerContext(ctx context.Context) context.Context
	classify(err error) Fault
	check(ctx context.Context, db *sql.DB, d Dialect) ([]Finding, error)
}

func (d Dialect) rendered(st Statement) Statement {
	st.Text = d.Render(st.Text)
	return st
}

// HostClock reports whether times come from the host: the caller then gives
// the time of each statement.
func (d Dialect) HostClock() bool { return d.engine.hostClock() }

// StageLimit is how many rows one [Dialect.Stage] takes.
func (d Dialect) StageLimit() int {
	if d.engine.hostClock() {
		return 1_000
	}
	return 10_000
}

// Stage replaces pending values inside a caller's transaction.
func (d Dialect) Stage(s Stage, at any) Statement { return d.rendered(d.engine.stage(s, at)) }

// Prepared are the texts of the statements that pay to be prepared.
func (d Dialect) Prepared() []string {
	var texts []string
	for _, text := range d.engine.prepared() {
		texts = append(texts, d.Render(text))
	}
	return texts
}

// Versions reads the answer of [Dialect.Stage]: n versions in the order of the keys.
func (d Dialect) Versions(answer string, n int) ([]int64, error) {
	versions, err := d.engine.versions(answer, n)
	if err == nil && len(versions) != n {
		err = fmt.Errorf("the database answered with %d versions for %d keys", len(versions), n)
	}
	return versions, err
}

// Pending reads the row of a key: its [Place], then key, version, token,
// attempt, payload, headers, tombstone, staged_at, due, lease_until, last_error.
func (d Dialect) Pending(channel, key string) Statement {
	return d.rendered(d.engine.pending(channel, key))
}

// List reads rows in the order of their keys, with empty payloads, as Pending does.
func (d Dialect) List(channel, after string, limit int) Statement {
	return d.rendered(d.engine.list(channel, after, limit))
}

// Discard deletes the row of a key if it has this version: ResultDone,
// ResultStale where it has another, ResultNotFound, or ResultBusy.
func (d Dialect) Discard(ctx context.Context, db *sql.DB, channel, key string, version int64) (int16, error) {
	return d.engine.discard(ctx, db, d, channel, key, version)
}

// Claim leases due rows and scans them as Pending does, and whether the row is a
// probe, in no order; see Read for attempt.
func (d Dialect) Claim(ctx context.Context, db *sql.DB, c Claim, at any, attempt func() func(Scanner) error) error {
	return d.engine.claim(ctx, db, d, c, at, attempt)
}

// Settle ends leases and returns a result for each.
func (d Dialect) Settle(ctx context.Context, db *sql.DB, s Settle, at any) ([]int16, error) {
	return d.engine.settle(ctx, db, d, s, at)
}

// Extend lets leases run on and returns a result for each.
func (d Dialect) Extend(ctx context.Context, db *sql.DB, e Extend, at any) ([]int16, error) {
	return d.engine.extend(ctx, db, d, e, at)
}

// Look tells when to claim next.
func (d Dialect) Look(l Look, at any) Statement { return d.rendered(d.engine.look(l, at)) }

// Outage records that a channel's destination is down, or up again.
func (d Dialect) Outage(o Outage, at any) Statement { return d.rendered(d.engine.outage(o, at)) }

// Pause pauses the channels of a name for a length in microseconds; 0 resumes
// them and ends what is recorded of an outage.
func (d Dialect) Pause(name string, length int64, reason string, at any) Statement {
	return d.rendered(d.engine.pause(name, length, reason, at))
}

// Stats counts rows, to at most limit each: (system, name, due, scheduled,
// leased, blocked groups, dead, unknown, oldest due age, highest attempt, its
// error, paused, outage, reason). Of entries none is blocked, dead or unknown.
func (d Dialect) Stats(limit int, at any) Statement { return d.rendered(d.engine.stats(limit, at)) }

// Fence raises versions and tokens to the clock and answers with both.
func (d Dialect) Fence(at any) Statement { return d.rendered(d.engine.fence(at)) }

// Scan reads one row of an answer.
type Scan = func(*sql.Rows) error

// Each runs a statement in whatever q is and scans its answer.
func Each(ctx context.Context, q Querier, st Statement, scan Scan) error {
	return each(ctx, q, st, scan)
}

// Read runs a statement that changes nothing. It may run it twice, where the
// server's default isolation makes it fail after its answer has come: attempt
// forgets what the scan of the one before has read, and returns a new one.
func (d Dialect) Read(ctx context.Context, db *sql.DB, st Statement, attempt func() Scan) error {
	return d.engine.read(ctx, db, func(q Querier) error { return each(ctx, q, st, attempt()) })
}

// Write runs a statement that changes something, in a transaction of its own,
// and perhaps twice, as Read does.
func (d Dialect) Write(ctx context.Context, db *sql.DB, st Statement, attempt func() Scan) error {
	return d.engine.write(ctx, db, func(q Querier) error { return each(ctx, q, st, attempt()) })
}

// Once is the attempt of a scan that overwrites what it has read before.
func Once(scan Scan) func() Scan { return func() Scan { return scan } }

// CallerContext is the context for a statement inside a caller's transaction.
func (d Dialect) CallerContext(ctx context.Context) context.Context {
	return d.engine.callerContext(ctx)
}

// Check finds what is wrong with the database's settings and the role's
// grants. The outbox's tables must exist.
func (d Dialect) Check(ctx context.Context, db *sql.DB) ([]Finding, error) {
	return d.engine.check(ctx, db, d)
}

// Finding is something that [Dialect.Check] found, with what to do about it.
type Finding struct {
	Fault bool // the outbox does not work, or does not keep its promises, with it
	Text  string
}

type findings []Finding

func (fs *findings) fault(when bool, format string, args ...any) {
	if when {
		*fs = append(*fs, Finding{true, fmt.Sprintf(format, args...)})
	}
}

func (fs *findings) warn(when bool, format string, args ...any) {
	if when {
		*fs = append(*fs, Finding{false, fmt.Sprintf(format, args...)})
	}
}

// Installed reads the schema's version, and the oldest library schema version
// that works with it.
func (d Dialect) Installed() Statement {
	return Statement{d.Render(`SELECT version, compatible FROM {t:meta}`), nil}
}

// each runs a query and calls scan for every row of its answer.
func each(ctx context.Context, q Querier, st Statement, scan func(*sql.Rows) error) error {
	rows, err := q.QueryContext(ctx, st.Text, st.Args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// marked returns results that are done but for those that an answer of
// (ordinal from 1, result) marks.
func marked(n int) ([]int16, func() Scan) {
	results := make([]int16, n)
	scan := func(rows *sql.Rows) error {
		var ord int
		var result int16
		if err := rows.Scan(&ord, &result); err != nil {
			return err
		}
		results[ord-1] = result
		return nil
	}
	return results, func() Scan {
		for i := range results {
			results[i] = ResultDone
		}
		return scan
	}
}
