package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// StageRows implements outbox.LatestStore.
func (s *Store) StageRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.StageRow, batchDelay time.Duration) ([]outbox.Version, error) {
	if tx == nil {
		return nil, fmt.Errorf("stage in channel %q: %w: it is nil", channel, outbox.ErrTx)
	}
	versions := make([]outbox.Version, 0, len(rows))
	for part := range slices.Chunk(rows, s.d.StageLimit()) {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("stage in channel %q: %w", channel, err)
		}
		var err error
		if versions, err = s.stage(ctx, tx, channel, part, batchDelay, versions); err != nil {
			if len(rows) == 1 {
				return nil, s.inTx(ctx, tx, err, "stage key %q in channel %q", rows[0].Key, channel)
			}
			return nil, s.inTx(ctx, tx, err, "stage %d keys in channel %q", len(rows), channel)
		}
	}
	if len(versions) > 0 {
		s.hinter.Tell(outbox.Hint{
			Channel: outbox.Channel{System: outbox.SystemLatest, Name: channel},
			Version: versions[len(versions)-1],
			Wait:    s.untilDue(batchDelay),
		})
	}
	return versions, nil
}

// untilDue is how long a row staged now waits for its window's end, by the
// host's clock: a hint needs no better, and relays ask the store besides.
func (s *Store) untilDue(batchDelay time.Duration) time.Duration {
	if batchDelay <= 0 {
		return 0
	}
	now := time.Now()
	if s.clock != nil {
		now = s.clock()
	}
	past := time.Duration(now.UnixMicro()%micros(batchDelay)) * time.Microsecond
	if past == 0 {
		return 0
	}
	return batchDelay - past
}

// stage writes up to StageLimit rows and appends their versions.
func (s *Store) stage(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.StageRow, delay time.Duration, versions []outbox.Version) ([]outbox.Version, error) {
	n := len(rows)
	st := dialect.Stage{
		Channel: channel, Delay: micros(delay),
		Keys: make([]string, n), Payloads: make([][]byte, n), Headers: make([]string, n), Tombstones: make([]bool, n),
	}
	for i, r := range rows {
		st.Keys[i], st.Payloads[i], st.Tombstones[i] = r.Key, r.Payload, r.Deleted
		if r.Payload == nil {
			st.Payloads[i] = []byte{}
		}
		if len(r.Header) > 0 {
			text, err := json.Marshal(r.Header)
			if err != nil {
				return nil, err
			}
			st.Headers[i] = string(text)
		}
	}
	var answer string
	q := s.d.Stage(st, s.now())
	scan := func(rows outbox.Rows) error { return rows.Scan(&answer) }
	if err := s.eachIn(s.d.CallerContext(ctx), tx, q, scan); err != nil {
		return nil, err
	}
	drawn, err := s.d.Versions(answer, n)
	for _, v := range drawn {
		versions = append(versions, outbox.Version(v))
	}
	return versions, err
}

// PendingRow implements outbox.LatestStore.
func (s *Store) PendingRow(ctx context.Context, tx outbox.Tx, channel, key string) (row outbox.Row, err error) {
	found := false
	st := s.d.Pending(channel, key)
	scan := func(rows outbox.Rows) error {
		found = true
		return newRowScan().scan(rows, &row)
	}
	if tx == nil {
		err = s.d.Read(ctx, s.db, st, dialect.Once(func(rows *sql.Rows) error { return scan(rows) }))
		err = s.failed(ctx, err, "read key %q of channel %q", key, channel)
	} else if err = s.eachIn(s.d.CallerContext(ctx), tx, st, scan); err != nil {
		err = s.inTx(ctx, tx, err, "read key %q of channel %q", key, channel)
	}
	if err == nil && !found {
		err = fmt.Errorf("read key %q of channel %q: %w", key, channel, outbox.ErrNotFound)
	}
	return row, err
}

// ListRows implements outbox.LatestStore.
func (s *Store) ListRows(ctx context.Context, channel, after string, limit int) ([]outbox.Row, error) {
	var list []outbox.Row
	read := newRowScan()
	scan := func(rows *sql.Rows) error {
		list = append(list, outbox.Row{})
		return read.scan(rows, &list[len(list)-1])
	}
	err := s.d.Read(ctx, s.db, s.d.List(channel, after, limit), func() dialect.Scan { list = nil; return scan })
	return list, s.failed(ctx, err, "list channel %q", channel)
}

// DiscardRow implements outbox.LatestStore.
func (s *Store) DiscardRow(ctx context.Context, channel, key string, v outbox.Version) error {
	result, err := s.d.Discard(ctx, s.db, channel, key, int64(v))
	if err != nil {
		return s.failed(ctx, err, "discard key %q of channel %q", key, channel)
	}
	var refused error
	switch result {
	case dialect.ResultStale:
		refused = outbox.ErrLeaseLost
	case dialect.ResultNotFound:
		refused = outbox.ErrNotFound
	case dialect.ResultBusy:
		refused = outbox.ErrBusy
	default:
		return nil
	}
	return fmt.Errorf("discard version %d of key %q of channel %q: %w", v, key, channel, refused)
}

// ClaimRows implements outbox.LatestStore.
func (s *Store) ClaimRows(ctx context.Context, c outbox.Claim) (outbox.Claimed, error) {
	cursor := s.cursors.of(outbox.Channel{System: outbox.SystemLatest, Name: c.Channel})
	from, full := cursor.from(c.Full)
	claim := dialect.Claim{Channel: c.Channel, Limit: c.Limit, Lease: micros(c.Lease), From: from.due}
	var claimed outbox.Claimed
	start := time.Now()
	rows := newRowScan(&claimed.Probe)
	scan := func(row dialect.Scanner) error {
		claimed.Rows = another(claimed.Rows, c.Limit)
		return rows.scan(row, &claimed.Rows[len(claimed.Rows)-1])
	}
	err := s.d.Claim(ctx, s.db, claim, s.now(), func() func(dialect.Scanner) error { claimed = outbox.Claimed{}; return scan })
	if err != nil {
		return outbox.Claimed{}, s.failed(ctx, err, "claim from channel %q", c.Channel)
	}
	slices.SortFunc(claimed.Rows, func(a, b outbox.Row) int {
		return cmp.Or(a.Due.Compare(b.Due), cmp.Compare(a.Version, b.Version))
	})
	if n := len(claimed.Rows); n > 0 {
		cursor.claimed(claimed.Rows[n-1].Due.UnixMicro())
	}
	if full {
		cursor.passed(time.Since(start))
	}
	return claimed, nil
}
