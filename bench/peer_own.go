package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

const channel = "bench"

// plain is a codec for values that are payloads already, as the peers take them.
type plain struct{}

func (plain) Encode(_ outbox.Header, v []byte) ([]byte, error) { return v, nil }
func (plain) Decode(_ outbox.Header, p []byte) ([]byte, error) { return p, nil }

// A box is one outbox of this library in a database.
type box struct {
	dialect dialect.Dialect
	db      *sql.DB
	store   *sqlstore.Store
	latest  *outbox.Latest[[]byte]
	journal *outbox.Journal
}

func installBox(ctx context.Context, db *sql.DB, d dialect.Dialect) error {
	return migrations.Up(ctx, db, d)
}

func openBox(db *sql.DB, d dialect.Dialect) (*box, error) {
	b := &box{dialect: d, db: db}
	var err error
	if b.store, err = sqlstore.New(db, d, sqlstore.Options{}); err != nil {
		return nil, err
	}
	if b.latest, err = outbox.NewLatest(b.store, outbox.LatestOptions[[]byte]{Channel: channel, Codec: plain{}}); err != nil {
		return nil, err
	}
	b.journal, err = outbox.NewJournal(b.store, outbox.JournalOptions{Channel: channel + "-messages"})
	return b, err
}

// another opens the same outbox over another pool, as another process would.
func (b *box) another(dsn string, c *counter) (*box, error) {
	db, err := openStd(dsn, 10, c)
	if err != nil {
		return nil, err
	}
	return openBox(db, b.dialect)
}

// items are n values from number seq.
func items(seq int64, n int) []outbox.Item[[]byte] {
	is := make([]outbox.Item[[]byte], n)
	for i := range is {
		is[i] = outbox.Item[[]byte]{Key: keyOf(seq + int64(i)), Value: payload(seq + int64(i))}
	}
	return is
}

// messages are n messages from number seq, in so many groups; 0: none.
func messages(seq int64, n, groups int) []outbox.Message {
	ms := make([]outbox.Message, n)
	for i := range ms {
		ms[i] = outbox.Message{Key: keyOf(seq + int64(i)), Payload: payload(seq + int64(i))}
		if groups > 0 {
			ms[i].Group = fmt.Sprint("group-", (seq+int64(i))%int64(groups))
		}
	}
	return ms
}

// stageMany fills with values from number seq, 10,000 to a transaction.
func (b *box) stageMany(ctx context.Context, seq int64, n int) error {
	return b.inChunks(ctx, n, func(tx *sql.Tx, from, size int) error {
		_, err := b.latest.StageMany(ctx, tx, items(seq+int64(from), size))
		return err
	})
}

// putMany fills with messages from number seq, 10,000 to a transaction.
func (b *box) putMany(ctx context.Context, seq int64, n, groups int, delay time.Duration) error {
	return b.inChunks(ctx, n, func(tx *sql.Tx, from, size int) error {
		ms := messages(seq+int64(from), size, groups)
		for i := range ms {
			ms[i].Delay = delay
		}
		_, err := b.journal.PutMany(ctx, tx, ms)
		return err
	})
}

func (b *box) inChunks(ctx context.Context, n int, f func(tx *sql.Tx, from, size int) error) error {
	for from := 0; from < n; from += 10_000 {
		tx, err := b.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := f(tx, from, min(10_000, n-from)); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		if err := tx.Commit(); err != nil {
			return err
		}
	}
	return nil
}

// publish runs one relay for the values; batch 0 is 1,000.
func (b *box) publish(ctx context.Context, o relayOptions, h handler) (func() error, error) {
	p := outbox.PublishOptions{BatchSize: o.batch}
	if o.batch == 0 && !o.lazy {
		p.BatchSize = 1000
	}
	return b.run(ctx, o, b.latest.Publisher(func(_ context.Context, batch []*outbox.Entry[[]byte]) error {
		for _, e := range batch {
			h(-1, e.Value)
		}
		return nil
	}, p))
}

// send runs one relay for the messages; batch 0 is 1,000.
func (b *box) send(ctx context.Context, o relayOptions, h handler) (func() error, error) {
	p := outbox.SendOptions{BatchSize: o.batch, Retention: outbox.DeleteOnSent}
	if o.batch == 0 && !o.lazy {
		p.BatchSize = 1000
	}
	return b.run(ctx, o, b.journal.BatchSender(func(_ context.Context, batch []*outbox.Delivery) error {
		for _, d := range batch {
			h(-1, d.Payload)
		}
		return nil
	}, p))
}

// sendEach is send with one call for each message, and the default batches.
func (b *box) sendEach(ctx context.Context, o relayOptions, retention time.Duration, h handler) (func() error, error) {
	return b.run(ctx, o, b.journal.Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		h(-1, r.Payload)
		return "", nil
	}, outbox.SendOptions{BatchSize: o.batch, Retention: retention}))
}

func (b *box) run(ctx context.Context, o relayOptions, as ...outbox.Attachment) (func() error, error) {
	var a alarm
	options := outbox.RelayOptions{Logger: a.logger(), PollInterval: o.poll}
	if o.claims != nil {
		options.Observe = func(e outbox.Event) {
			if e.Kind == outbox.EventClaim {
				o.claims(e.Rows, e.Duration)
			}
		}
	}
	r, err := outbox.NewRelay(options, as...)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		err := r.Run(ctx)
		a.fail(err)
		done <- err
	}()
	return func() error {
		return a.stop(func() error { cancel(); return <-done })
	}, nil
}

// relay opens a process of its own for each of o.relays, and one relay in it.
// A prompt one runs in the process that stages.
func (s *site) relay(b *box, o relayOptions, start func(*box) (func() error, error)) (func() error, error) {
	if o.prompt {
		return start(b)
	}
	var stops []func() error
	stop := func() error {
		var err error
		for _, f := range stops {
			err = errors.Join(err, f())
		}
		return err
	}
	for range o.relays {
		other, err := b.another(s.dsn, o.count)
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		end, err := start(other)
		if err != nil {
			return nil, errors.Join(err, other.db.Close(), stop())
		}
		stops = append(stops, func() error { return errors.Join(end(), other.db.Close()) })
	}
	return stop, nil
}

func (s *site) boxes() ([]*peer, error) { return s.boxPeers(s.own), nil }

// Names of this library's variants.
const (
	ownLatest  = "outbox Latest"
	ownJournal = "outbox Journal"
	ownEach    = "outbox Journal, one by one"
	ownKept    = "outbox Journal, one by one, kept for 24 h"
)

// boxPeers are this library's two systems on one outbox.
func (s *site) boxPeers(b *box) []*peer {
	transact := func(ctx context.Context, seq int64, f func(tx *sql.Tx) error) error {
		return b.store.Transact(ctx, nil, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, appInsert, appNote, int(seq&1023)); err != nil {
				return err
			}
			return f(tx)
		})
	}
	stage := func(ctx context.Context, seq int64) func(tx *sql.Tx) error {
		return func(tx *sql.Tx) error {
			_, err := b.latest.Stage(ctx, tx, keyOf(seq), payload(seq))
			return err
		}
	}
	put := func(ctx context.Context, seq int64) func(tx *sql.Tx) error {
		return func(tx *sql.Tx) error {
			_, err := b.journal.Put(ctx, tx, outbox.Message{Key: keyOf(seq), Payload: payload(seq)})
			return err
		}
	}
	latest := &peer{
		name: ownLatest, kind: own, settings: "relay: BatchSize 1000",
		tables:  []string{b.dialect.Render(`{t:entries}`)},
		waiting: b.dialect.Render(`SELECT count(*) FROM {t:entries}`),
		stage: func(ctx context.Context, seq int64) error {
			return s.transact(ctx, seq, stage(ctx, seq))
		},
		announce: func(ctx context.Context, seq int64) error {
			return transact(ctx, seq, stage(ctx, seq))
		},
		bulk: func(ctx context.Context, seq int64, n int) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error {
				_, err := b.latest.StageMany(ctx, tx, items(seq, n))
				return err
			})
		},
		fill: func(ctx context.Context, n int) error { return b.stageMany(ctx, 1, n) },
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			return s.relay(b, o, func(b *box) (func() error, error) { return b.publish(ctx, o, h) })
		},
	}
	journal := &peer{
		name: ownJournal, kind: own, settings: "relay: BatchSender, BatchSize 1000, DeleteOnSent",
		tables:  []string{b.dialect.Render(`{t:messages}`), b.dialect.Render(`{t:groups}`)},
		waiting: b.dialect.Render(`SELECT count(*) FROM {t:messages}`),
		stage: func(ctx context.Context, seq int64) error {
			return s.transact(ctx, seq, put(ctx, seq))
		},
		announce: func(ctx context.Context, seq int64) error {
			return transact(ctx, seq, put(ctx, seq))
		},
		bulk: func(ctx context.Context, seq int64, n int) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error {
				_, err := b.journal.PutMany(ctx, tx, messages(seq, n, 0))
				return err
			})
		},
		fill: func(ctx context.Context, n int) error { return b.putMany(ctx, 1, n, 0, 0) },
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			return s.relay(b, o, func(b *box) (func() error, error) { return b.send(ctx, o, h) })
		},
	}
	each := func(name, settings, waiting string, retention time.Duration) *peer {
		return &peer{
			name: name, kind: own, settings: settings, tables: journal.tables, waiting: waiting, fill: journal.fill,
			relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
				return s.relay(b, o, func(b *box) (func() error, error) { return b.sendEach(ctx, o, retention, h) })
			},
		}
	}
	return []*peer{
		latest, journal,
		each(ownEach, "relay: Sender, DeleteOnSent", journal.waiting, outbox.DeleteOnSent),
		each(ownKept, "relay: Sender, as it comes", journal.waiting+` WHERE outcome = 0`, 0),
	}
}
