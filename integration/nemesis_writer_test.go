//go:build unix

package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A deal is one transaction of a writer, which puts its id beside what it does
// into the table app.
type deal struct {
	id      string
	ops     []op
	outcome string
	err     error // why it was not committed, or may not be
	written bool  // found in the table, at the end
}

// An op is what a deal leaves behind, if it is written.
type op struct {
	item
	at     string
	verb   string
	group  string
	number int64
	value  string
}

const (
	committed  = "committed"
	rolledBack = "rolled back"
	unheard    = "unknown" // the answer to its COMMIT was lost
)

var errChanged = errors.New("changed its mind")

// accounts keep all deals.
type accounts struct {
	mu    sync.Mutex
	deals []*deal
}

func (a *accounts) add(d *deal) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.deals = append(a.deals, d)
}

func (a *accounts) all() []*deal {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.deals[:len(a.deals):len(a.deals)]
}

func (a *accounts) totals() (commits, rest int) {
	for _, d := range a.all() {
		if d.outcome == committed {
			commits++
		} else {
			rest++
		}
	}
	return commits, rest
}

func (a *accounts) history(it item) (lines []string) {
	for _, d := range a.all() {
		for _, o := range d.ops {
			if o.item == it {
				lines = append(lines, fmt.Sprintf("%s  %s by %s: number %d, group %q, %s %v", o.at, o.verb, d.id, o.number, o.group, d.outcome, d.err))
			}
		}
	}
	return lines
}

// A writer is one of an application's goroutines.
type writer struct {
	od    *ordeal
	s     *site
	name  string
	r     *rand.Rand
	n     int
	mine  []item // messages without a group that it has put
	state *outbox.Latest[string]
	wide  *outbox.Latest[string]
}

func (od *ordeal) newWriter(name string, s *site) *writer {
	wide, err := outbox.NewLatest(s.store, windowOptions())
	if err != nil {
		od.t.Fatal(err)
	}
	return &writer{od: od, s: s, name: name, r: od.random(name), state: latestOn(od.t, s.store, stateChannel), wide: wide}
}

// write starts the writers; stop ends them.
func (od *ordeal) write() (stop func()) {
	var enough atomic.Bool
	var wg sync.WaitGroup
	for i := range ordealWriters {
		s := od.s
		if i%2 == 1 {
			s = od.far
		}
		w := od.newWriter(fmt.Sprint("writer", i), s)
		wg.Go(func() {
			for !enough.Load() {
				w.deal(0)
				time.Sleep(time.Duration(w.r.Int64N(int64(20 * time.Millisecond))))
			}
		})
	}
	return func() {
		enough.Store(true)
		wg.Wait()
	}
}

func within(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// deal makes one transaction, holds it open for a while, and delivers what it
// has begun.
func (w *writer) deal(hold time.Duration) {
	w.n++
	d := &deal{id: fmt.Sprintf("%s.%d", w.name, w.n)}
	ctx, cancel := within(5*time.Second + hold)
	defer cancel()
	if w.r.IntN(20) == 0 { // wherever the transaction is
		time.AfterFunc(time.Duration(w.r.Int64N(int64(15*time.Millisecond))), cancel)
	}
	var begun *outbox.Record
	d.err = w.s.store.Transact(ctx, nil, func(tx *sql.Tx) (err error) {
		if _, err := tx.ExecContext(ctx, `INSERT INTO app (id, note) VALUES ($1, 'x')`, d.id); err != nil {
			return err
		}
		if w.r.IntN(4) == 0 {
			if err := w.undone(ctx, tx, d.id); err != nil {
				return err
			}
		}
		if w.r.IntN(15) == 0 {
			if err := w.careless(ctx, tx, d); err != nil {
				return err
			}
		}
		for range 1 + w.r.IntN(3) {
			if err := w.act(ctx, tx, d, &begun); err != nil {
				return err
			}
		}
		pause(ctx, hold)
		if w.r.IntN(7) == 0 {
			return errChanged
		}
		return nil
	})
	switch {
	case d.err == nil:
		d.outcome = committed
	case errors.Is(d.err, outbox.ErrCommit):
		d.outcome = unheard
	default:
		d.outcome = rolledBack
		time.Sleep(5 * time.Millisecond) // the database may be away
	}
	w.od.book.add(d)
	if d.err == nil && begun != nil && w.r.IntN(3) > 0 {
		w.deliver(*begun)
	}
}

// deliver sends what was begun. What an error leaves open, a relay settles.
func (w *writer) deliver(r outbox.Record) {
	ctx, cancel := within(5 * time.Second)
	defer cancel()
	o := resendOptions()
	if r.Channel == parkChannel {
		o = parkOptions()
	}
	carry := carrier(func(ctx context.Context, vs []visit) ([]answer, error) {
		vs[0].Relay = w.name
		return w.od.end.answer(ctx, vs)
	})
	_, _ = journalOn(w.od.t, w.s.store, r.Channel).Deliver(ctx, r, carry.sender(), o)
}

// careless stages something large with a context that ends meanwhile, and goes
// on whatever the answer was.
func (w *writer) careless(ctx context.Context, tx *sql.Tx, d *deal) error {
	ended, end := context.WithCancel(ctx)
	defer end()
	time.AfterFunc(time.Duration(w.r.Int64N(int64(500*time.Microsecond))), end)
	key, value := w.key(), d.id+strings.Repeat(".", 100_000)
	v, err := w.state.Stage(ended, tx, key, value)
	if err != nil {
		return nil
	}
	return w.staged(ctx, tx, d, op{item: item{stateChannel, key}, verb: "stage", number: int64(v), value: value})
}

// undone stages and puts in a savepoint that is rolled back.
func (w *writer) undone(ctx context.Context, tx *sql.Tx, id string) error {
	if _, err := tx.ExecContext(ctx, `SAVEPOINT s`); err != nil {
		return err
	}
	if _, err := w.state.Stage(ctx, tx, w.key(), "undone"); err != nil {
		return err
	}
	m := outbox.Message{Key: id + "-undone", Group: []string{"", w.group()}[w.r.IntN(2)]}
	if _, err := journalOn(w.od.t, w.s.store, resendChannel).Put(ctx, tx, m); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `ROLLBACK TO SAVEPOINT s`)
	return err
}

// key names one of a few keys, all writers' the same, and others after a while,
// so that many have a last state.
func (w *writer) key() string { return fmt.Sprintf("k%d.%d", w.od.epoch(), w.r.IntN(4)) }

func (w *writer) group() string { return fmt.Sprintf("g%d.%d", w.od.epoch(), w.r.IntN(3)) }

// epoch counts the times at which writers go on to other keys and groups.
func (od *ordeal) epoch() int { return int(time.Since(od.began) / time.Second) }

// act does one thing in a transaction.
func (w *writer) act(ctx context.Context, tx *sql.Tx, d *deal, begun **outbox.Record) error {
	channel := []string{resendChannel, parkChannel, batchChannel}[w.r.IntN(3)]
	key := fmt.Sprintf("%s-%d", d.id, len(d.ops))
	switch w.r.IntN(10) {
	case 0, 1, 2:
		return w.stage(ctx, tx, d, w.state, stateChannel, w.key())
	case 3:
		return w.stage(ctx, tx, d, w.state, stateChannel, w.key(), w.key(), w.key())
	case 4:
		return w.stage(ctx, tx, d, w.wide, windowChannel, w.key(), w.key())
	case 5:
		return w.erase(ctx, tx, d)
	case 6:
		return w.put(ctx, tx, d, channel, outbox.Message{Key: key})
	case 7:
		return w.again(ctx, tx, d)
	case 8:
		ms := make([]outbox.Message, 1+w.r.IntN(5))
		for i := range ms {
			ms[i] = outbox.Message{Key: fmt.Sprintf("%s.%d", key, i), Group: w.group()}
		}
		return w.put(ctx, tx, d, channel, ms...)
	}
	if channel == batchChannel || *begun != nil {
		channel, key = resendChannel, key+"'"
	}
	m := outbox.Message{Key: key, Group: []string{"", w.group()}[w.r.IntN(2)]}
	return w.begin(ctx, tx, d, channel, m, begun)
}

// stage stages keys, the same value for each, and notes it in the table truth
// while the keys are held.
func (w *writer) stage(ctx context.Context, tx *sql.Tx, d *deal, l *outbox.Latest[string], channel string, keys ...string) error {
	value := fmt.Sprintf("%s-%d", d.id, len(d.ops))
	items := make([]outbox.Item[string], len(keys))
	for i, key := range keys {
		items[i] = outbox.Item[string]{Key: key, Value: value}
	}
	versions, err := l.StageMany(ctx, tx, items)
	if err != nil {
		return err
	}
	for i, key := range keys {
		if err := w.staged(ctx, tx, d, op{item: item{channel, key}, verb: "stage", number: int64(versions[i]), value: value}); err != nil {
			return err
		}
	}
	return nil
}

func (w *writer) erase(ctx context.Context, tx *sql.Tx, d *deal) error {
	key := w.key()
	v, err := w.state.StageDelete(ctx, tx, key)
	if err != nil {
		return err
	}
	return w.staged(ctx, tx, d, op{item: item{stateChannel, key}, verb: "delete", number: int64(v)})
}

func (w *writer) staged(ctx context.Context, tx *sql.Tx, d *deal, o op) error {
	o.at = w.od.at()
	for _, before := range d.ops {
		if before.item == o.item && before.number == o.number {
			return nil // a key given twice
		}
	}
	d.ops = append(d.ops, o)
	_, err := tx.ExecContext(ctx, `
		INSERT INTO truth (channel, key, version, value, backwards) VALUES ($1, $2, $3, $4, 0)
		ON CONFLICT (channel, key) DO UPDATE SET version = excluded.version, value = excluded.value,
			backwards = truth.backwards + CASE WHEN excluded.version <= truth.version THEN 1 ELSE 0 END`,
		o.channel, o.key, o.number, o.value)
	return err
}

func (w *writer) put(ctx context.Context, tx *sql.Tx, d *deal, channel string, ms ...outbox.Message) error {
	rs, err := journalOn(w.od.t, w.s.store, channel).PutMany(ctx, tx, ms)
	if err != nil {
		return err
	}
	for i, r := range rs {
		if err := w.posted(ctx, tx, d, "put", channel, ms[i], r); err != nil {
			return err
		}
	}
	if channel != batchChannel && ms[0].Group == "" {
		w.mine = append(w.mine, item{channel, ms[0].Key})
	}
	return nil
}

// again puts a message that was put, perhaps by a transaction that was rolled
// back; perhaps it was sent and purged since.
func (w *writer) again(ctx context.Context, tx *sql.Tx, d *deal) error {
	if len(w.mine) == 0 {
		return nil
	}
	it := w.mine[max(0, len(w.mine)-1-w.r.IntN(10))]
	return w.put(ctx, tx, d, it.channel, outbox.Message{Key: it.key})
}

// begin puts a message already begun, or, where its group forbids it, puts it.
func (w *writer) begin(ctx context.Context, tx *sql.Tx, d *deal, channel string, m outbox.Message, begun **outbox.Record) error {
	r, err := journalOn(w.od.t, w.s.store, channel).PutBegun(ctx, tx, m, ordealLease)
	if errors.Is(err, outbox.ErrBlocked) {
		return w.put(ctx, tx, d, channel, m)
	}
	if err != nil {
		return err
	}
	if *begun == nil && r.Created {
		*begun = &r.Record
	}
	return w.posted(ctx, tx, d, "put begun", channel, m, r)
}

// posted notes a message in the table posted while its group is held, with its
// rank there.
func (w *writer) posted(ctx context.Context, tx *sql.Tx, d *deal, verb, channel string, m outbox.Message, r outbox.PutResult) error {
	it := item{channel, m.Key}
	if !r.Created {
		var n int
		if err := tx.QueryRowContext(ctx, `SELECT count(*) FROM posted WHERE channel = $1 AND key = $2`, channel, m.Key).Scan(&n); err != nil {
			return err
		}
		if n == 0 {
			w.od.fail(it, "exists, says Put to %s, but nobody has put it", d.id)
		}
		return nil
	}
	rank := int64(0)
	if m.Group != "" {
		err := tx.QueryRowContext(ctx, `
			INSERT INTO ranks (channel, grp, rank) VALUES ($1, $2, 1)
			ON CONFLICT (channel, grp) DO UPDATE SET rank = ranks.rank + 1 RETURNING rank`, channel, m.Group).Scan(&rank)
		if err != nil {
			return err
		}
	}
	d.ops = append(d.ops, op{item: it, at: w.od.at(), verb: verb, group: m.Group, number: r.Seq})
	_, err := tx.ExecContext(ctx, `
		INSERT INTO posted (channel, key, grp, rank, seq, puts) VALUES ($1, $2, $3, $4, $5, 1)
		ON CONFLICT (channel, key) DO UPDATE SET puts = posted.puts + 1, seq = excluded.seq`, channel, m.Key, m.Group, rank, r.Seq)
	return err
}
