package outboxtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// raceTests hold the order of versions among many stagers and claimers.
var raceTests = []latestTest{
	{"OneHotKeyNeverRegresses", func(f *fixture) { runRace(f, 1) }},
	{"RacingStagersConverge", func(f *fixture) { runRace(f, 20) }},
}

// A race is eight stagers and two claimers at work on the same keys, and what
// they saw.
type race struct {
	*fixture
	keys    int
	staging atomic.Int64 // stagers at work

	mu        sync.Mutex
	committed map[string]map[outbox.Version]string // payloads
	last      map[string]outbox.Version            // claimed
	acked     map[string]bool                      // that version is
	claimed   []outbox.Row
}

func runRace(f *fixture, keys int) {
	r := &race{
		fixture: f, keys: keys,
		committed: map[string]map[outbox.Version]string{}, last: map[string]outbox.Version{}, acked: map[string]bool{},
	}
	var wg sync.WaitGroup
	for i := range 8 {
		r.staging.Add(1)
		wg.Go(func() {
			defer r.staging.Add(-1)
			r.stager(rand.New(rand.NewPCG(uint64(i), 1)))
		})
	}
	for i := range 2 {
		wg.Go(func() { r.claimer(rand.New(rand.NewPCG(uint64(i), 2))) })
	}
	wg.Wait()
	if !f.Failed() {
		r.judge()
	}
}

// stager stages one to three random keys a transaction, and rolls back one
// in eight. What a busy database refuses it tries again.
func (r *race) stager(random *rand.Rand) {
	for round := range 25 {
		distinct := map[string]bool{}
		for range min(r.keys, 1+random.IntN(3)) {
			distinct[fmt.Sprintf("%02d", random.IntN(r.keys))] = true
		}
		rows := []outbox.StageRow{}
		for key := range distinct {
			rows = append(rows, value(key, fmt.Sprintf("%s round %d %x", key, round, random.Uint64())))
		}
		slices.SortFunc(rows, func(a, b outbox.StageRow) int { return strings.Compare(a.Key, b.Key) })
		commit := random.IntN(8) > 0
		for !r.transact(rows, commit) {
			if r.ctx.Err() != nil || r.Failed() {
				return
			}
		}
	}
}

// transact stages rows and commits or rolls back. It returns whether it did.
func (r *race) transact(rows []outbox.StageRow, commit bool) bool {
	tx, err := r.db.BeginTx(context.WithoutCancel(r.ctx), nil)
	if err != nil {
		return r.busy("begin", err)
	}
	defer tx.Rollback()
	vs, err := r.store.StageRows(r.ctx, outbox.SQL(tx), r.channel, rows, 0)
	if err != nil {
		return r.busy("StageRows", err)
	}
	if !commit {
		return true
	}
	if err := tx.Commit(); err != nil {
		return r.busy("commit", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, row := range rows {
		if r.committed[row.Key] == nil {
			r.committed[row.Key] = map[outbox.Version]string{}
		}
		r.committed[row.Key][vs[i]] = string(row.Payload)
	}
	return true
}

// busy returns false, to try again, until the time is up.
func (r *race) busy(what string, err error) bool {
	if r.ctx.Err() != nil {
		r.Errorf("%s, tried again for %v: %v", what, patience, err)
	}
	return false
}

// claimer claims and settles until the stagers are done, and once more.
func (r *race) claimer(random *rand.Rand) {
	for finished := false; !finished && r.ctx.Err() == nil && !r.Failed(); {
		finished = r.staging.Load() == 0
		c := outbox.Claim{Channel: r.channel, Limit: 7, Lease: long, Full: true}
		claimed, err := r.store.ClaimRows(r.ctx, c)
		if err != nil {
			r.busy("ClaimRows", err)
			continue
		}
		r.record(claimed.Rows)
		if random.IntN(2) == 0 { // publishing takes its time, in which keys are staged again
			time.Sleep(time.Duration(random.Int64N(int64(short / 25))))
		}
		ss := []outbox.Settlement{}
		for _, row := range claimed.Rows {
			ss = append(ss, []outbox.Settlement{
				done(row), done(row), done(row), done(row), done(row), done(row), retry(row, 0, "x"), release(row, 0),
			}[random.IntN(8)])
		}
		r.settleBatch(ss)
	}
}

// record notes claims. Nobody else can have a row before its settlement, so
// the notes of a key are in the order of its claims.
func (r *race) record(rows []outbox.Row) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, row := range rows {
		last := r.last[row.Key]
		if row.Version < last || row.Version == last && r.acked[row.Key] {
			r.Errorf("key %s: version %d was claimed after version %d (acknowledged: %t)", row.Key, row.Version, last, r.acked[row.Key])
		}
		r.last[row.Key], r.acked[row.Key] = row.Version, false
		r.claimed = append(r.claimed, row)
	}
}

// settleBatch settles, the rows that are busy again and again.
func (r *race) settleBatch(ss []outbox.Settlement) {
	for len(ss) > 0 && r.ctx.Err() == nil && !r.Failed() {
		// Before the call: as soon as the row is free, another may note its claim.
		r.acknowledging(ss)
		results, err := r.store.Settle(r.ctx, r.ch(), ss)
		if err != nil {
			r.busy("Settle", err)
			for i := range ss {
				ss[i].Again = true
			}
			continue
		}
		rest := []outbox.Settlement{}
		for i, result := range results {
			switch result {
			case outbox.ResultBusy:
				rest = append(rest, ss[i])
			case outbox.ResultStale:
				r.Errorf("key %s: the lease of version %d was lost within the hour", ss[i].Row.Key, ss[i].Row.Version)
			}
		}
		ss = rest
	}
}

// acknowledging notes which rows are about to be acknowledged.
func (r *race) acknowledging(ss []outbox.Settlement) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range ss {
		if s.Outcome == outbox.OutcomeDone && r.last[s.Row.Key] == s.Row.Version {
			r.acked[s.Row.Key] = true
		}
	}
}

// judge compares what was claimed and what is left with what was committed.
func (r *race) judge() {
	for _, row := range r.claimed {
		if want, ok := r.committed[row.Key][row.Version]; !ok || want != string(row.Payload) {
			r.Fatalf("key %s: version %d was claimed as %q and committed (%t) as %q", row.Key, row.Version, row.Payload, ok, want)
		}
	}
	pending := map[string]outbox.Row{}
	for _, row := range r.list("", 1000) {
		pending[row.Key] = row
	}
	seen := map[outbox.Version]string{}
	for key, versions := range r.committed {
		newest := outbox.Version(0)
		for v := range versions {
			if other, ok := seen[v]; ok {
				r.Fatalf("version %d was given out twice: to keys %s and %s", v, other, key)
			}
			seen[v], newest = key, max(newest, v)
		}
		row, there := pending[key]
		if there && row.Version != newest || !there && (r.last[key] != newest || !r.acked[key]) {
			r.Fatalf("key %s: the newest version committed is %d; pending is %d, last claimed %d (acknowledged: %t)",
				key, newest, row.Version, r.last[key], r.acked[key])
		}
	}
	if len(seen) == 0 || len(r.claimed) == 0 {
		r.Fatalf("the race had %d commits and %d claims, want some of both", len(seen), len(r.claimed))
	}
}
