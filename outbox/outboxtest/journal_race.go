package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageRaceTests hold order and completeness among many putters and claimers.
var messageRaceTests = []journalTest{
	{"OneHotGroupKeepsItsOrder", func(f *journalFixture) { runMessageRace(f, 1) }},
	{"RacingGroupsKeepTheirOrder", func(f *journalFixture) { runMessageRace(f, 12) }},
	{"PutRacingASettlementIsNotStranded", putRacingASettlementIsNotStranded},
}

// A messageRace is six putters and three claimers at work on the same groups,
// and what they saw.
type messageRace struct {
	*journalFixture
	groups  int
	putting atomic.Int64 // putters at work

	mu        sync.Mutex
	committed map[string]outbox.Version // by key
	last      map[string]outbox.Version // sent, by group
	out       map[string]outbox.Token   // the run that is out, by group
	left      map[string]int            // its messages
	sent      map[string]int            // by key
}

func runMessageRace(f *journalFixture, groups int) {
	r := &messageRace{
		journalFixture: f, groups: groups, committed: map[string]outbox.Version{}, last: map[string]outbox.Version{},
		out: map[string]outbox.Token{}, left: map[string]int{}, sent: map[string]int{},
	}
	var wg sync.WaitGroup
	for i := range 6 {
		r.putting.Add(1)
		wg.Go(func() {
			defer r.putting.Add(-1)
			r.putter(i, rand.New(rand.NewPCG(uint64(i), 1)))
		})
	}
	for i := range 3 {
		wg.Go(func() { r.claimer(rand.New(rand.NewPCG(uint64(i), 2))) })
	}
	wg.Wait()
	if f.Failed() {
		return
	}
	for key, v := range r.committed {
		if r.sent[key] != 1 {
			f.Fatalf("message %s (number %d) was sent %d times, want once", key, v, r.sent[key])
		}
	}
	f.equal("messages sent that were not committed", len(r.sent)-len(r.committed), 0)
	f.equal("messages committed: some", len(r.committed) > 0, true)
}

// putter puts one to three messages a transaction, and rolls back one in
// eight. What a busy database refuses it tries again.
func (r *messageRace) putter(id int, random *rand.Rand) {
	for round := range 25 {
		rows := []outbox.PutRow{}
		for i := range 1 + random.IntN(3) {
			group := fmt.Sprint("g", random.IntN(r.groups+1))
			if group == fmt.Sprint("g", r.groups) {
				group = ""
			}
			rows = append(rows, message(fmt.Sprintf("%d-%d-%d", id, round, i), group))
		}
		commit := random.IntN(8) > 0
		for !r.transact(rows, commit) {
			if r.ctx.Err() != nil || r.Failed() {
				return
			}
		}
	}
}

// transact puts messages and commits or rolls back. It returns whether it did.
func (r *messageRace) transact(rows []outbox.PutRow, commit bool) bool {
	if r.db == nil {
		return r.transactAlone(rows)
	}
	tx, err := r.db.BeginTx(context.WithoutCancel(r.ctx), nil)
	if err != nil {
		return r.busy("begin", err)
	}
	defer tx.Rollback()
	as, err := r.store.PutRows(r.ctx, outbox.SQL(tx), r.channel, rows, 0)
	if err != nil {
		return r.busy("PutRows", err)
	}
	if !commit {
		return true
	}
	r.mu.Lock() // before the commit: as soon as that is done, a claimer may send them
	for i, a := range as {
		r.committed[rows[i].Key] = a.Row.Version
	}
	r.mu.Unlock()
	if err := tx.Commit(); err != nil {
		return r.busy("commit", err)
	}
	return true
}

// transactAlone puts messages in a transaction of the store's own.
func (r *messageRace) transactAlone(rows []outbox.PutRow) bool {
	r.mu.Lock() // before the call, likewise; their numbers are not known yet
	for _, row := range rows {
		r.committed[row.Key] = 0
	}
	r.mu.Unlock()
	if _, err := r.store.PutRows(r.ctx, nil, r.channel, rows, 0); err != nil {
		return r.busy("PutRows", err)
	}
	return true
}

// busy returns false, to try again, until the time is up.
func (r *messageRace) busy(what string, err error) bool {
	if r.ctx.Err() != nil {
		r.Errorf("%s, tried again for %v: %v", what, patience, err)
	}
	return false
}

// claimer claims and settles until the putters are done and nothing is left.
func (r *messageRace) claimer(random *rand.Rand) {
	for r.ctx.Err() == nil && !r.Failed() {
		over := r.putting.Load() == 0
		c := outbox.Claim{Channel: r.channel, Limit: 7, Lease: long, Full: true}
		claimed, err := r.store.ClaimMessages(r.ctx, nil, c)
		if err != nil {
			r.busy("ClaimMessages", err)
			continue
		}
		if len(claimed.Rows) == 0 && over && r.idle() {
			return
		}
		r.take(claimed.Rows)
		if random.IntN(2) == 0 { // sending takes its time, in which others put
			time.Sleep(time.Duration(random.Int64N(int64(short / 25))))
		}
		r.settleRuns(claimed.Rows, random)
	}
}

// idle returns whether everything committed was sent, or is out with another.
func (r *messageRace) idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sent) == len(r.committed)
}

// take notes that runs are out: no other of their groups may be.
func (r *messageRace) take(rows []outbox.Row) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, row := range rows {
		if row.Group == "" {
			continue
		}
		if r.left[row.Group] > 0 && r.out[row.Group] != row.Token {
			r.Errorf("two runs of group %s are out: %d and %d", row.Group, r.out[row.Group], row.Token)
		}
		r.out[row.Group] = row.Token
		r.left[row.Group]++
	}
}

// settleRuns sends each run up to a random failure, as a relay does: what is
// behind that in its group is given back.
func (r *messageRace) settleRuns(rows []outbox.Row, random *rand.Rand) {
	ss, failed := []outbox.Settlement{}, map[string]bool{}
	r.mu.Lock()
	for _, row := range rows {
		if row.Group == "" {
			ss = append(ss, done(row))
			r.sent[row.Key]++
			continue
		}
		r.left[row.Group]-- // before the call: as soon as that takes effect, another run may be out
		switch {
		case failed[row.Group]:
			ss = append(ss, release(row, 0))
		case random.IntN(6) == 0:
			failed[row.Group] = true
			ss = append(ss, retry(row, time.Millisecond, "x"))
		default:
			if row.Version <= r.last[row.Group] {
				r.Errorf("message %s of group %s (number %d) came after number %d", row.Key, row.Group, row.Version, r.last[row.Group])
			}
			r.last[row.Group] = row.Version
			r.sent[row.Key]++
			ss = append(ss, done(row))
		}
	}
	r.mu.Unlock()
	if failed := r.untilSettled(r.ctx, ss); failed != nil {
		r.Errorf("%v", failed)
	}
	if r.clock != nil {
		r.clock.Advance(time.Millisecond)
	}
}

// untilSettled settles, what is busy again and again.
func (f *journalFixture) untilSettled(ctx context.Context, ss []outbox.Settlement) error {
	for len(ss) > 0 {
		if ctx.Err() != nil {
			return fmt.Errorf("settle, tried again until the time was up: %w", ctx.Err())
		}
		results, err := f.store.Settle(ctx, f.ch(), ss)
		if err != nil {
			for i := range ss {
				ss[i].Again = true
			}
			continue
		}
		rest := []outbox.Settlement{}
		for i, result := range results {
			switch result {
			case outbox.ResultBusy:
				rest = append(rest, again(ss[i]))
			case outbox.ResultStale:
				return errors.New("the lease of " + ss[i].Row.Key + " was lost within the hour")
			}
		}
		ss = rest
	}
	return nil
}

// A message put while the last of its group is being settled goes out next,
// and does not wait for the lease of a run that has ended.
func putRacingASettlementIsNotStranded(f *journalFixture) {
	for round := range 40 {
		group := fmt.Sprint("g", round)
		f.put(group+" 1", group)
		r := f.claimOne(long)
		var wg sync.WaitGroup
		start := make(chan struct{})
		var settled error
		wg.Go(func() {
			<-start
			ss := []outbox.Settlement{done(r)}
			settled = f.untilSettled(f.ctx, ss)
		})
		race := &messageRace{journalFixture: f, committed: map[string]outbox.Version{}}
		wg.Go(func() {
			<-start
			for !race.transact([]outbox.PutRow{message(group+" 2", group)}, true) && f.ctx.Err() == nil {
			}
		})
		close(start)
		wg.Wait()
		f.ok("settle", settled)
		if f.clock != nil {
			f.clock.Advance(time.Microsecond)
		}
		next := f.claimThese(fmt.Sprintf("after race %d", round), group+" 2")
		f.finish(next...)
	}
}
