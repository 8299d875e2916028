package sqlstore

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Pauses of a channel whose destination is down.
const (
	outageBase = time.Second
	outageCap  = 5 * time.Minute
)

// Look implements outbox.RelayStore.
func (s *Store) Look(ctx context.Context, channels []outbox.Channel) ([]outbox.Look, error) {
	n := len(channels)
	if n == 0 {
		return nil, nil
	}
	ask := dialect.Look{Systems: make([]int16, n), Names: make([]string, n), Froms: make([]int64, n), FromGroups: make([]int64, n)}
	full := make([]bool, n)
	for i, ch := range channels {
		ask.Systems[i], ask.Names[i] = int16(ch.System), ch.Name
		var from bounds
		from, full[i] = s.cursors.of(ch).from(false)
		ask.Froms[i], ask.FromGroups[i] = from.due, from.group
	}
	looks := make([]outbox.Look, 0, n)
	start := time.Now()
	scan := func(rows *sql.Rows) error {
		var wait, paused int64
		var l outbox.Look
		if err := rows.Scan(&wait, &paused, &l.Outage); err != nil {
			return err
		}
		l.Wait = time.Duration(wait) * time.Microsecond
		l.Paused = time.Duration(paused) * time.Microsecond
		looks = append(looks, l)
		return nil
	}
	err := s.d.Read(ctx, s.db, s.d.Look(ask, s.now()), func() dialect.Scan { looks = looks[:0]; return scan })
	if err != nil {
		return nil, s.failed(ctx, err, "look at %d channels", n)
	}
	cost := time.Since(start) / time.Duration(n)
	for i, ch := range channels {
		switch {
		case !full[i]:
		case looks[i].Wait == 0: // the claim that follows must look as far
			s.cursors.of(ch).reset()
		default:
			s.cursors.of(ch).passed(cost)
		}
	}
	return looks, nil
}

// Settle implements outbox.RelayStore.
func (s *Store) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) ([]outbox.Result, error) {
	if ch.System == outbox.SystemJournal {
		return s.settleMessages(ctx, nil, ch.Name, ss)
	}
	n := len(ss)
	if n == 0 {
		return nil, nil
	}
	end := dialect.Settle{
		Channel: ch.Name, Places: make([]dialect.Place, n), Keys: make([]string, n),
		Versions: make([]int64, n), Tokens: make([]int64, n),
	}
	for i, x := range ss {
		end.Places[i], end.Keys[i] = dialect.Place(x.Row.ID), x.Row.Key
		end.Versions[i], end.Tokens[i] = int64(x.Row.Version), int64(x.Row.Token)
		if x.Again && end.Again == nil {
			end.Again = make([]bool, n)
		}
		if x.Outcome != outbox.OutcomeDone && end.Outcomes == nil {
			end.Outcomes, end.Delays, end.Errors = make([]int16, n), make([]int64, n), make([]string, n)
		}
	}
	if end.Outcomes != nil {
		for i, x := range ss {
			end.Outcomes[i], end.Delays[i], end.Errors[i] = int16(x.Outcome), micros(x.Delay), outbox.ErrorText(x.Error)
		}
	}
	for i, x := range ss {
		if x.Again {
			end.Again[i] = true
		}
	}
	results, err := s.d.Settle(ctx, s.db, end, s.now())
	if err != nil {
		return nil, s.failed(ctx, err, "settle %d rows of channel %q", n, ch.Name)
	}
	return asResults(results), nil
}

// Extend implements outbox.RelayStore.
func (s *Store) Extend(ctx context.Context, ch outbox.Channel, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	if ch.System == outbox.SystemJournal {
		return s.extendMessages(ctx, nil, ch.Name, rows, d)
	}
	n := len(rows)
	if n == 0 {
		return nil, nil
	}
	ask := dialect.Extend{
		Channel: ch.Name, Places: make([]dialect.Place, n), Keys: make([]string, n), Tokens: make([]int64, n), Lease: micros(d),
	}
	for i, r := range rows {
		ask.Places[i], ask.Keys[i], ask.Tokens[i] = dialect.Place(r.ID), r.Key, int64(r.Token)
	}
	results, err := s.d.Extend(ctx, s.db, ask, s.now())
	if err != nil {
		return nil, s.failed(ctx, err, "extend the leases of %d rows of channel %q", n, ch.Name)
	}
	return asResults(results), nil
}

func asResults(in []int16) []outbox.Result {
	out := make([]outbox.Result, len(in))
	for i, r := range in {
		out[i] = outbox.Result(r)
	}
	return out
}

// Outage implements outbox.RelayStore.
func (s *Store) Outage(ctx context.Context, ch outbox.Channel, down bool, reason string) error {
	st := s.d.Outage(dialect.Outage{
		System: int16(ch.System), Name: ch.Name, Down: down, Reason: outbox.ErrorText(reason),
		Base: micros(outageBase), Cap: micros(outageCap),
	}, s.now())
	if err := s.d.Write(ctx, s.db, st, dialect.Once(nothing)); err != nil {
		return s.failed(ctx, err, "record the outage of channel %q", ch.Name)
	}
	return nil
}

// Stats implements outbox.RelayStore.
func (s *Store) Stats(ctx context.Context) ([]outbox.ChannelStats, error) {
	var list []outbox.ChannelStats
	scan := func(rows *sql.Rows) error {
		var c outbox.ChannelStats
		var age, paused int64
		err := rows.Scan(&c.Channel.System, &c.Channel.Name, &c.Due, &c.Scheduled, &c.InFlight,
			&c.Blocked, &c.Dead, &c.Unknown, &age, &c.Attempt, &c.LastError, &paused, &c.Outage, &c.Reason)
		if err != nil {
			return fmt.Errorf("scan: %w", err)
		}
		c.OldestDue = time.Duration(age) * time.Microsecond
		c.Paused = time.Duration(paused) * time.Microsecond
		list = append(list, c)
		return nil
	}
	err := s.d.Read(ctx, s.db, s.d.Stats(outbox.StatsCap, s.now()), func() dialect.Scan { list = nil; return scan })
	return list, s.failed(ctx, err, "count what is waiting")
}
