package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"maragu.dev/goqite"
)

const goqiteLacks = "a unique key, a token: acknowledges by bare id; one message a claim"

// goqites is goqite on Postgres. A Receive of its own is SERIALIZABLE, so that
// a second receiver makes both slower.
func (s *site) goqites() ([]*peer, error) {
	q := newGoqite(s.std, goqite.SQLFlavorPostgreSQL)
	return []*peer{{
		name: "goqite", kind: rival, settings: "database/sql; relay: one receiver, polling every 10 ms",
		lacks:  goqiteLacks,
		tables: []string{"goqite"}, waiting: `SELECT count(*) FROM goqite`, share: 40,
		stage: func(ctx context.Context, seq int64) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error { return q.SendTx(ctx, tx, goqite.Message{Body: payload(seq)}) })
		},
		bulk: func(ctx context.Context, seq int64, n int) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error {
				for i := range n {
					if err := q.SendTx(ctx, tx, goqite.Message{Body: payload(seq + int64(i))}); err != nil {
						return err
					}
				}
				return nil
			})
		},
		fill: s.fillSQL(`INSERT INTO goqite (queue, body, timeout, priority, created)
			SELECT 'bench', convert_to(` + payloadSQL + `, 'UTF8'), now() - interval '1 s', 0, now() + g * interval '1 us' - interval '10 s'
			FROM generate_series(1, $1::integer) AS g`),
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			db, err := openStd(s.dsn, o.relays+1, o.count)
			if err != nil {
				return nil, err
			}
			stop := goqiteRelay(ctx, db, goqite.SQLFlavorPostgreSQL, o, h)
			return func() error { return errors.Join(stop(), db.Close()) }, nil
		},
	}}, nil
}

func newGoqite(db *sql.DB, f goqite.SQLFlavor) *goqite.Queue {
	return goqite.New(goqite.NewOpts{DB: db, Name: "bench", SQLFlavor: f, Timeout: time.Minute})
}

// goqiteRelay receives and deletes. A serialization failure is what its
// isolation level brings, and is tried again at once.
func goqiteRelay(ctx context.Context, db *sql.DB, f goqite.SQLFlavor, o relayOptions, h handler) (stop func() error) {
	q := newGoqite(db, f)
	pause := 10 * time.Millisecond
	if o.lazy {
		pause = 100 * time.Millisecond
	}
	return loops(o.relays, pause, func(int) (int, error) {
		m, err := q.Receive(ctx)
		switch {
		case serialization(err):
			return 1, nil
		case err != nil || m == nil:
			return 0, err
		}
		h(-1, m.Body)
		for err = q.Delete(ctx, m.ID); serialization(err); {
			err = q.Delete(ctx, m.ID)
		}
		return 1, err
	})
}

func serialization(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && e.Code == "40001"
}
