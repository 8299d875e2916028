package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// summary is what came of the demo.
type summary struct {
	Seed         uint64      `json:"seed"`
	Database     string      `json:"database"`
	Transactions int         `json:"transactions"`
	Committed    int         `json:"committed"` // each staged one state
	RolledBack   int         `json:"rolled_back"`
	Tombstones   int         `json:"tombstones"` // among those committed
	Published    int         `json:"published"`  // states that reached the index
	Superseded   int         `json:"superseded"` // replaced by a newer one while they waited, never sent
	Duplicates   int         `json:"duplicates"` // sent again, and recognised
	Outdated     int         `json:"outdated"`   // came after a newer one, and were refused
	Refused      int         `json:"refused"`    // by the index at random, and tried again
	Failed       int         `json:"failed_requests"`
	Repeated     int         `json:"repeated_requests"`
	Kills        int         `json:"relay_kills"`
	DelayMedian  float64     `json:"delay_median_seconds"` // from commit to index
	DelayMost    float64     `json:"delay_most_seconds"`
	Waiting      int         `json:"waiting"` // entries left in the outbox
	Live         int         `json:"orders_equal"`
	Gone         int         `json:"orders_gone"` // cancelled, with a tombstone in the index
	Mails        mailSummary `json:"mails"`
	Problems     []string    `json:"problems"`
	Converged    bool        `json:"converged"`
}

func (d *demo) summarise(waiting int) *summary {
	d.shop.mu.Lock()
	defer d.shop.mu.Unlock()
	d.index.mu.Lock()
	defer d.index.mu.Unlock()
	l, x := &d.shop.ledger, &d.index.log
	sum := &summary{
		Seed: d.o.seed, Database: d.site.d.Name(), Transactions: d.shop.done,
		Committed: len(l.commits), RolledBack: l.rolledBack, Tombstones: l.tombstones,
		Published: len(x.arrived), Superseded: len(l.commits) - len(x.arrived),
		Duplicates: x.duplicates, Outdated: x.outdated, Refused: x.refused,
		Failed: x.failed, Repeated: x.repeated, Kills: d.relays.kills, Waiting: waiting,
	}
	sum.Problems = append(append([]string{}, l.problems...), x.problems...)
	var delays []float64
	for v, at := range x.arrived {
		committed, ok := l.commits[v]
		if !ok {
			sum.problem("version %d reached the index, although its transaction was rolled back", v)
			continue
		}
		delays = append(delays, max(0, at.Sub(committed).Seconds()))
	}
	slices.Sort(delays)
	if n := len(delays); n > 0 {
		sum.DelayMedian, sum.DelayMost = delays[n/2], delays[n-1]
	}
	if waiting > 0 {
		sum.problem("%s left in the outbox", entries(waiting))
	}
	return sum
}

func (s *summary) problem(format string, args ...any) {
	s.Problems = append(s.Problems, fmt.Sprintf(format, args...))
}

// A kept row is what the index has of an order.
type kept struct {
	version outbox.Version
	deleted bool
	value   []byte
}

// compare reads both tables, the shop's being right, and tells of every order
// for which the index is not.
func (d *demo) compare(ctx context.Context, sum *summary) error {
	orders, err := d.site.readOrders(ctx)
	if err != nil {
		return err
	}
	index, err := d.site.readIndex(ctx)
	if err != nil {
		return err
	}
	for id, want := range orders {
		if have, ok := index[id]; sum.equal(id, want, have, ok) {
			sum.Live++
		}
	}
	for id, version := range d.shop.ledger.newest {
		have, ok := index[id]
		if ok && have.version != version {
			sum.problem("%s: the index has version %d, the shop staged %d last", id, have.version, version)
		}
		if _, live := orders[id]; live {
			continue
		}
		if ok && have.deleted {
			sum.Gone++
		} else {
			sum.problem("%s: cancelled in the shop, and the index was never told", id)
		}
	}
	for id := range index {
		if _, staged := d.shop.ledger.newest[id]; !staged {
			sum.problem("%s: in the index, although the shop never had it", id)
		}
	}
	return nil
}

// equal compares what shop and index have of an order, value for value.
func (s *summary) equal(id string, want order, have kept, ok bool) bool {
	var got order
	switch {
	case !ok:
		s.problem("%s: lost, the index does not have it", id)
		return false
	case have.deleted:
		s.problem("%s: deleted in the index, the shop has it", id)
		return false
	case json.Unmarshal(have.value, &got) != nil:
		s.problem("%s: the index has no order", id)
		return false
	case got != want:
		s.problem("%s: the shop has revision %d (%s, %d cents), the index %d (%s, %d cents)",
			id, want.Revision, want.Status, want.Cents, got.Revision, got.Status, got.Cents)
		return false
	}
	return true
}

func (s *site) readOrders(ctx context.Context) (map[string]order, error) {
	rows, err := s.db.QueryContext(ctx, `SELECT id, status, cents, revision FROM `+s.orders())
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	orders := map[string]order{}
	for rows.Next() {
		var id string
		var o order
		if err := rows.Scan(&id, &o.Status, &o.Cents, &o.Revision); err != nil {
			return nil, err
		}
		orders[id] = o
	}
	return orders, rows.Err()
}

func (s *site) readIndex(ctx context.Context) (map[string]kept, error) {
	rows, err := s.indexDB.QueryContext(ctx,
		`SELECT key, version, deleted_at IS NOT NULL, value FROM `+s.d.Ident(s.d.Schema())+`.search_index`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	index := map[string]kept{}
	for rows.Next() {
		var id string
		var k kept
		if err := rows.Scan(&id, &k.version, &k.deleted, &k.value); err != nil {
			return nil, err
		}
		index[id] = k
	}
	return index, rows.Err()
}

// print writes the summary for people.
func (s *summary) print(w io.Writer) {
	line := func(subject string, n int, comment string) {
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("  %-26s %7s  %s", subject, number(n), comment), " "))
	}
	seconds := func(f float64) string {
		return time.Duration(f * float64(time.Second)).Round(time.Millisecond).String()
	}
	fmt.Fprintln(w)
	line("transactions committed", s.Committed, fmt.Sprintf("each staged one state and put one mail; %s say that an order is gone", number(s.Tombstones)))
	line("transactions rolled back", s.RolledBack, "their states were never published, their mails never sent")
	line("relay processes killed", s.Kills, "")
	fmt.Fprintln(w, "\nthe newest state of each order, in the index")
	line("states published", s.Published, fmt.Sprintf("%s after the commit in the median, %s at most", seconds(s.DelayMedian), seconds(s.DelayMost)))
	line("states superseded", s.Superseded, "a newer one came first, so never sent: right for state, wrong for events")
	line("duplicates", s.Duplicates, "sent again after a kill, or repeated by the network: no harm")
	line("outdated", s.Outdated, "came after a newer version, and the index refused them")
	line("refused one by one", s.Refused, "by the index, at random; tried again")
	line("requests failed", s.Failed, "while the index was down or broken; tried again")
	line("entries left in the outbox", s.Waiting, "")
	line("orders equal in both", s.Live, "")
	line("orders gone in both", s.Gone, "cancelled; the index keeps a tombstone of each")
	s.Mails.print(w, line)
	fmt.Fprintln(w)
	if s.Converged {
		fmt.Fprintln(w, "Converged: the index has the newest state of every order, and every mail was sent once, in order. Nothing else was.")
		return
	}
	const most = 20
	for _, p := range s.Problems[:min(len(s.Problems), most)] {
		fmt.Fprintln(w, "  "+p)
	}
	if more := len(s.Problems) - most; more > 0 {
		fmt.Fprintf(w, "  and %s more\n", number(more))
	}
	fmt.Fprintf(w, "NOT converged, problems: %s. Please report them with the seed %d.\n", number(len(s.Problems)), s.Seed)
}
