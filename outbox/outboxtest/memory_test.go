package outboxtest_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// memory is a LatestStore in memory, as plain as the contract allows. It keeps
// its rows in a database of its own (memorydb_test.go), so that it has real
// *sql.Tx to stage in. defect names one deliberate mistake: see defects_test.go.
type memory struct {
	db     *memoryDB
	now    func() time.Time
	defect string

	mu    sync.Mutex
	asked int // for hints, so far
	hints map[int]func(outbox.Hint)
}

func newMemory(db *memoryDB, now func() time.Time, defect string) *memory {
	if now == nil {
		now = time.Now
	}
	m := &memory{db: db, defect: defect, hints: map[int]func(outbox.Hint){}}
	m.now = func() time.Time { return now().Round(0).UTC().Truncate(time.Microsecond) }
	return m
}

// is returns whether the store has this defect.
func (m *memory) is(defect string) bool { return m.defect == defect }

// has returns whether the store has one of these defects.
func (m *memory) has(defects ...string) bool { return slices.Contains(defects, m.defect) }

func (m *memory) Check(context.Context) error {
	if m.is("check fails") {
		return outbox.ErrSchema
	}
	return nil
}

func (m *memory) StageRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.StageRow, delay time.Duration) ([]outbox.Version, error) {
	if tx == nil && m.is("nil transaction is another error") {
		return nil, sql.ErrTxDone
	}
	if tx == nil {
		return nil, outbox.ErrTx
	}
	early := outbox.Version(0)
	if m.is("version drawn before the lock") {
		early = m.db.drawEarly(m.now())
	}
	if m.is("cancelled context is ignored") {
		ctx = context.WithoutCancel(ctx)
	}
	var answer any
	err := m.query(ctx, tx, &answer, "stage", func(t *memoryTx) (any, error) {
		return m.stage(ctx, t, channel, rows, delay, early)
	})
	if err != nil {
		return nil, err
	}
	vs := answer.([]outbox.Version)
	if m.is("versions in another order") {
		slices.Reverse(vs)
	}
	m.hint(outbox.Hint{Channel: outbox.Channel{System: outbox.SystemLatest, Name: channel}, Version: vs[0]})
	return vs, nil
}

// query runs f inside the transaction tx.
func (m *memory) query(ctx context.Context, tx outbox.Tx, answer *any, name string, f func(*memoryTx) (any, error)) error {
	rows, err := tx.Query(ctx, name, f)
	if errors.Is(err, sql.ErrTxDone) && !m.is("finished transaction is another error") {
		return fmt.Errorf("%w: %w", outbox.ErrTx, err)
	}
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(answer); err != nil {
			return err
		}
	}
	return rows.Err()
}

func (m *memory) hint(h outbox.Hint) {
	switch m.defect {
	case "no hints":
		return
	case "hint of another version":
		h.Version++
	}
	m.mu.Lock()
	fs := slices.Collect(maps.Values(m.hints))
	m.mu.Unlock()
	for _, f := range fs {
		f(h)
	}
}

func (m *memory) Hints(f func(outbox.Hint)) (stop func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked++
	id := m.asked
	m.hints[id] = f
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !m.is("stop does not stop hints") {
			delete(m.hints, id)
		}
	}
}

// stage replaces values in t, as the database sees it.
func (m *memory) stage(ctx context.Context, t *memoryTx, channel string, rows []outbox.StageRow, delay time.Duration, early outbox.Version) (any, error) {
	vs := []outbox.Version{}
	for _, s := range rows {
		id := m.id(channel, s.Key)
		if m.is("stagers do not wait") {
			delete(t.db.locks, id)
		}
		if err := t.lock(ctx, id); err != nil {
			return nil, err
		}
		old, there := t.row(id)
		r := m.replacement(old, there, s, delay)
		if r.Version = t.db.draw(r.StagedAt); early != 0 {
			r.Version = early
		}
		switch {
		case m.is("versions restart after a delete") && !there:
			r.Version = 1
		case m.is("versions are counted by key"):
			r.Version = old.Version + 1
		case m.is("versions are the clock"):
			r.Version = outbox.Version(r.StagedAt.UnixMicro())
		}
		t.set(id, r)
		if m.is("staged outside the transaction") {
			t.db.rows[id] = t.wrote[id]
		}
		vs = append(vs, r.Version)
	}
	return vs, nil
}

// replacement returns the row that staging s makes of old.
func (m *memory) replacement(old memoryRow, there bool, s outbox.StageRow, delay time.Duration) memoryRow {
	now := m.now()
	r := memoryRow{Row: outbox.Row{
		Key: s.Key, Payload: m.payload(s.Payload), Header: maps.Clone(s.Header), Deleted: s.Deleted, StagedAt: now, Due: m.round(now, delay),
	}}
	if len(r.Header) == 0 && !m.is("empty header is not nil") {
		r.Header = nil
	}
	if there {
		r.ID, r.Token, r.LeaseUntil, r.outcome = old.ID, old.Token, old.LeaseUntil, old.outcome
		if !old.claimed && old.Due.Before(r.Due) || m.is("tried row keeps its due time") {
			r.Due = old.Due
		}
	}
	switch m.defect {
	case "restage postpones":
		r.Due = m.round(now, delay)
	case "restage keeps attempts":
		r.Attempt, r.LastError = old.Attempt, old.LastError
	case "restage keeps the header":
		if there && r.Header == nil {
			r.Header = old.Header
		}
	case "restage ends the lease":
		r.LeaseUntil = time.Time{}
	case "restage ends the token":
		r.Token = 0
	case "restage never gets sooner":
		if there && !old.claimed {
			r.Due = old.Due
		}
	case "staged at first":
		if there {
			r.StagedAt = old.StagedAt
		}
	case "times are local":
		r.StagedAt = now.In(time.FixedZone("local", 3600))
	case "tombstone is a value":
		r.Deleted = false
	}
	return r
}

// round returns when a row staged now is due.
func (m *memory) round(now time.Time, delay time.Duration) time.Time {
	if delay == 0 {
		return now
	}
	step := delay.Microseconds()
	rest := now.UnixMicro() % step
	switch {
	case m.is("no rounding"):
		return now.Add(delay)
	case rest == 0 && !m.is("boundary is rounded up"):
		return now
	}
	return time.UnixMicro(now.UnixMicro() - rest + step).UTC()
}

func (m *memory) payload(b []byte) []byte {
	switch {
	case len(b) == 0 && m.is("empty payload is nil"):
		return nil
	case m.is("payload is text"):
		return []byte(string([]rune(string(b))))
	}
	return append([]byte{}, b...)
}

// id names a row, as the store compares keys.
func (m *memory) id(channel, key string) rowID {
	switch m.defect {
	case "keys are folded":
		key = foldKey(key)
	case "long keys are cut":
		key = key[:min(len(key), 255)]
	case "channels share keys":
		channel = "all"
	}
	return rowID{channel, key}
}

func (m *memory) PendingRow(ctx context.Context, tx outbox.Tx, channel, key string) (outbox.Row, error) {
	read := func(t *memoryTx) (any, error) {
		if r, ok := t.row(m.id(channel, key)); ok {
			return r.Row, nil
		}
		return nil, fmt.Errorf("read key %q: %w", key, outbox.ErrNotFound)
	}
	var answer any
	if tx != nil && !m.is("own stage is not seen") {
		if err := m.query(ctx, tx, &answer, "read", read); err != nil {
			return outbox.Row{}, err
		}
		return answer.(outbox.Row), nil
	}
	err := m.db.view(func() (err error) {
		answer, err = read(&memoryTx{db: m.db})
		return err
	})
	if err != nil {
		return outbox.Row{}, err
	}
	return answer.(outbox.Row), nil
}

func (m *memory) ListRows(_ context.Context, channel, after string, limit int) ([]outbox.Row, error) {
	rows := []outbox.Row{}
	err := m.db.view(func() error {
		for id, r := range m.db.rows {
			if id.channel == channel && (r.Key > after || r.Key == after && m.is("page repeats its first key")) {
				if !m.is("list has payloads") {
					r.Payload = nil
				}
				rows = append(rows, r.Row)
			}
		}
		return nil
	})
	slices.SortFunc(rows, func(a, b outbox.Row) int { return cmp.Compare(a.Key, b.Key) })
	return rows[:min(limit, len(rows))], err
}

func (m *memory) DiscardRow(ctx context.Context, channel, key string, v outbox.Version) error {
	id := m.id(channel, key)
	return m.db.write(ctx, func() error {
		r, there := m.db.rows[id]
		switch {
		case !there:
			return fmt.Errorf("discard key %q: %w", key, outbox.ErrNotFound)
		case m.db.locked(id) && !m.is("discard overrides locks"):
			return fmt.Errorf("discard key %q: %w", key, outbox.ErrBusy)
		case r.Version != v && !m.is("discard ignores the version"):
			return fmt.Errorf("discard key %q: %w", key, outbox.ErrLeaseLost)
		case m.is("discard spares leased rows") && m.leased(r):
			return fmt.Errorf("discard key %q: %w", key, outbox.ErrBusy)
		}
		delete(m.db.rows, id)
		if m.is("tokens restart after a discard") {
			m.db.token = 0
		}
		return nil
	})
}
