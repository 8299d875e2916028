package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	clerkCount      = 4
	changesPerOrder = 6
	ordersChannel   = "orders"

	workPart     = 0.9  // of the demo's duration; the rest is for what then waits
	declinedPart = 0.08 // of transactions: rolled back
	cancelPart   = 0.12 // of changes: the order is deleted
)

// order is what the shop tells the index of an order. Revision counts its
// committed changes.
type order struct {
	Status   string `json:"status"`
	Cents    int64  `json:"cents"`
	Revision int64  `json:"revision"`
}

// A shop is the program that uses an outbox.
type shop struct {
	site   *site
	orders *outbox.Latest[order]
	mails  *outbox.Journal
	clerks []*clerk
	total  int // transactions

	mu     sync.Mutex
	moved  chan struct{} // closed when a transaction has ended
	done   int
	ledger ledger
}

// A ledger is what the shop knows to be committed.
type ledger struct {
	commits    map[outbox.Version]time.Time // when each staged version was committed
	newest     map[string]outbox.Version    // by order
	mails      map[string]bool              // keys
	rolledBack int
	tombstones int
	problems   []string
}

func newShop(s *site, o demoOptions) (*shop, error) {
	orders, mails, err := openChannels(s.session)
	if err != nil {
		return nil, err
	}
	sh := &shop{
		site: s, orders: orders, mails: mails, moved: make(chan struct{}),
		ledger: ledger{commits: map[outbox.Version]time.Time{}, newest: map[string]outbox.Version{}, mails: map[string]bool{}},
	}
	n := min(clerkCount, o.orders)
	for i := range n {
		c := &clerk{shop: sh, rng: rand.New(rand.NewPCG(o.seed, uint64(i))), at: map[string]order{}}
		for id := i; id < o.orders; id += n {
			c.ids = append(c.ids, orderID(id))
		}
		c.changes = changesPerOrder * len(c.ids)
		c.every = time.Duration(workPart*float64(o.duration)) / time.Duration(c.changes)
		sh.clerks = append(sh.clerks, c)
		sh.total += c.changes
	}
	return sh, nil
}

// openChannels opens the two channels of the demo: the newest state of each
// order, and every mail.
func openChannels(s *session) (*outbox.Latest[order], *outbox.Journal, error) {
	orders, err := outbox.NewLatest(s.store, outbox.LatestOptions[order]{Channel: ordersChannel})
	if err != nil {
		return nil, nil, err
	}
	mails, err := outbox.NewJournal(s.store, outbox.JournalOptions{Channel: mailsChannel})
	return orders, mails, err
}

func orderID(i int) string { return fmt.Sprintf("order-%05d", i+1) }

// mailsPut returns how many mails have been committed.
func (s *shop) mailsPut() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ledger.mails)
}

// ended returns how many transactions have been committed or rolled back.
func (s *shop) ended() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done
}

// reach waits until a part of all transactions has ended.
func (s *shop) reach(ctx context.Context, part float64) error {
	for {
		s.mu.Lock()
		done, moved := s.done, s.moved
		s.mu.Unlock()
		if done >= int(part*float64(s.total)) {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// note enters a transaction that has ended; version 0: rolled back.
func (s *shop) note(id string, v outbox.Version, deleted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done++
	close(s.moved)
	s.moved = make(chan struct{})
	l := &s.ledger
	if v == 0 {
		l.rolledBack++
		return
	}
	if before := l.newest[id]; v <= before {
		l.problems = append(l.problems, fmt.Sprintf("%s: version %d was given out after %d", id, v, before))
	}
	l.newest[id], l.commits[v] = v, time.Now()
	if deleted {
		l.tombstones++
	}
}

// A clerk changes orders of its own, so that all it does follows from the seed.
type clerk struct {
	shop    *shop
	rng     *rand.Rand
	ids     []string
	at      map[string]order // as committed; cancelled orders too
	changes int
	every   time.Duration
}

// change is one transaction to be.
type change struct {
	id       string
	was, to  order
	deletes  bool
	declined bool // rolled back when all has been written
}

// work makes the clerk's changes at an even pace.
func (c *clerk) work(ctx context.Context) error {
	start := time.Now()
	for i := range c.changes {
		if err := pause(ctx, time.Until(start.Add(time.Duration(i)*c.every))); err != nil {
			return err
		}
		if err := c.shop.make(ctx, c.next(i)); err != nil {
			return fmt.Errorf("change an order: %w", err)
		}
	}
	return nil
}

// next decides on the i-th change: every order once, then the first ones more
// often than others.
func (c *clerk) next(i int) change {
	first := i < len(c.ids)
	id := c.ids[i%len(c.ids)]
	if !first {
		r := c.rng.Float64()
		id = c.ids[int(r*r*float64(len(c.ids)))]
	}
	was := c.at[id]
	ch := change{id: id, was: was, to: order{Revision: was.Revision + 1}}
	ch.declined = !first && c.rng.Float64() < declinedPart
	switch {
	case was.Status == "" || was.Status == "cancelled":
		ch.to.Status, ch.to.Cents = "placed", 100+c.rng.Int64N(50_000)
	case c.rng.Float64() < cancelPart:
		ch.to.Status, ch.deletes = "cancelled", true
	default:
		ch.to.Status, ch.to.Cents = statuses[c.rng.IntN(len(statuses))], was.Cents+c.rng.Int64N(2_000)
	}
	if !ch.declined {
		c.at[id] = ch.to
	}
	return ch
}

var statuses = []string{"paid", "packed", "shipped", "delivered", "returned"}

var errDeclined = errors.New("payment declined")

// make runs one business transaction: the order's row, its state in the outbox
// and a mail about it are written together, or not at all.
func (s *shop) make(ctx context.Context, ch change) error {
	var v outbox.Version
	for {
		err := s.site.store.Transact(ctx, nil, func(tx *sql.Tx) (err error) {
			if err := s.write(ctx, tx, ch); err != nil {
				return err
			}
			if ch.deletes {
				v, err = s.orders.StageDelete(ctx, tx, ch.id)
			} else {
				v, err = s.orders.Stage(ctx, tx, ch.id, ch.to)
			}
			if err == nil {
				err = s.putMail(ctx, tx, ch)
			}
			if err == nil && ch.declined {
				err = errDeclined
			}
			return err
		})
		switch {
		case errors.Is(err, errDeclined):
			v = 0
		case s.site.store.Retryable(err) && ctx.Err() == nil:
			continue
		case err != nil:
			return err
		}
		if v != 0 {
			s.noteMail(ch.mail())
		}
		s.note(ch.id, v, ch.deletes)
		return nil
	}
}

// write changes the order's row in the shop's own table.
func (s *shop) write(ctx context.Context, tx *sql.Tx, ch change) error {
	table := s.site.orders()
	query, args := `UPDATE `+table+` SET status = $1, cents = $2, revision = $3 WHERE id = $4`,
		[]any{ch.to.Status, ch.to.Cents, ch.to.Revision, ch.id}
	switch {
	case ch.deletes:
		query, args = `DELETE FROM `+table+` WHERE id = $1`, []any{ch.id}
	case ch.to.Status == "placed":
		query = `INSERT INTO ` + table + ` (status, cents, revision, id) VALUES ($1, $2, $3, $4)`
	}
	_, err := tx.ExecContext(ctx, query, args...)
	return err
}

func (ch change) mail() mail {
	return mail{Order: ch.id, Revision: ch.to.Revision, Text: fmt.Sprintf("Your order %s is %s.", ch.id, ch.to.Status)}
}

// putMail puts the mail about a change into the journal.
func (s *shop) putMail(ctx context.Context, tx *sql.Tx, ch change) error {
	m, err := ch.mail().message()
	if err != nil {
		return err
	}
	put, err := s.mails.Put(ctx, tx, m)
	if err == nil && !put.Created {
		err = fmt.Errorf("mail %s was put before", m.Key)
	}
	return err
}

func (s *shop) noteMail(m mail) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledger.mails[m.key()] = true
}
