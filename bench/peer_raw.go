package main

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// rawTables: raw has the columns and indexes of this library's table, raw_seq
// its versions; queue is what one would make by hand.
var rawTables = []string{
	`CREATE TABLE raw (LIKE {t:messages} INCLUDING ALL) WITH (fillfactor = 50)`,
	`CREATE SEQUENCE raw_seq`,
	`CREATE TABLE queue (id bigserial PRIMARY KEY, due bigint NOT NULL, lease_until bigint NOT NULL DEFAULT 0,
		token bigint NOT NULL DEFAULT 0, attempt integer NOT NULL DEFAULT 0, channel text COLLATE "C" NOT NULL,
		key text COLLATE "C" NOT NULL, payload bytea NOT NULL, UNIQUE (channel, key)) WITH (fillfactor = 50)`,
	`CREATE INDEX queue_due ON queue (channel, due, id)`,
}

func installRaw(ctx context.Context, db *sql.DB) error {
	for _, text := range rawTables {
		if _, err := db.ExecContext(ctx, dialect.Postgres().Render(text)); err != nil {
			return err
		}
	}
	return nil
}

const (
	rawInsert = `INSERT INTO raw (seq, due, created_at, channel, key, payload) VALUES (nextval('raw_seq'), $1, $1, 'bench', $2, $3)`
	rawUnnest = `INSERT INTO raw (seq, due, created_at, channel, key, payload)
		SELECT nextval('raw_seq'), $1::bigint, $1::bigint, 'bench', u.k, u.p FROM unnest($2::text[], $3::bytea[]) AS u (k, p)`

	queueDue   = `SELECT id FROM queue WHERE channel = 'bench' AND due <= $2 AND lease_until < $2 ORDER BY due, id LIMIT $1 FOR UPDATE SKIP LOCKED`
	queueClaim = `UPDATE queue SET lease_until = $2 + 60000000, token = $3, attempt = attempt + 1
		WHERE id = ANY (ARRAY(` + queueDue + `)) RETURNING id, payload`
	queueAck  = `DELETE FROM queue WHERE id = ANY ($1::bigint[]) AND token = $2`
	queueTake = `DELETE FROM queue WHERE id = ANY (ARRAY(` + queueDue + `)) RETURNING id, payload`
	queueFill = `INSERT INTO queue (due, channel, key, payload)
		SELECT g, 'bench', 'key-' || g, convert_to(` + payloadSQL + `, 'UTF8') FROM generate_series(1, $1::integer) AS g`
	queueStage = `INSERT INTO queue (due, channel, key, payload) VALUES ($1, 'bench', $2, $3)`
)

// Names of the limits that ratios refer to.
const (
	base     = "no outbox"
	rawClaim = "claim, then delete"
	rawTake  = "DELETE … RETURNING"
)

// limits are how far bare SQL goes.
func (s *site) limits() ([]*peer, error) {
	raw := []string{"raw"}
	queue := &peer{
		name: rawClaim, kind: limit, settings: "batch 1,000, two batches in flight, database/sql",
		lacks:  "versions, extended leases, attempts' limit, channels' pauses, backoff",
		tables: []string{"queue"}, waiting: `SELECT count(*) FROM queue`,
		fill: s.fillSQL(queueFill),
		stage: func(ctx context.Context, seq int64) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, queueStage, time.Now().UnixMicro(), keyOf(seq), payload(seq))
				return err
			})
		},
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			return s.rawRelay(ctx, o, h, true)
		},
	}
	take := &peer{
		name: rawTake, kind: limit, settings: "batch 1,000, two batches in flight, database/sql",
		lacks:  "a lease: a crash loses what it has taken",
		tables: queue.tables, waiting: queue.waiting, fill: queue.fill,
		relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
			return s.rawRelay(ctx, o, h, false)
		},
	}
	return []*peer{
		{
			name: base, kind: limit, settings: "database/sql", lacks: "the message",
			stage: func(ctx context.Context, seq int64) error { return s.transact(ctx, seq, nil) },
		},
		{
			name: "no outbox, pgx", kind: limit, settings: "pgx", lacks: "the message",
			stage: func(ctx context.Context, seq int64) error { return s.transactPgx(ctx, seq, nil) },
		},
		{
			name: "bare insert", kind: limit, tables: raw, settings: "Exec; this library's columns and indexes; database/sql",
			lacks: "an answer",
			stage: func(ctx context.Context, seq int64) error {
				return s.transact(ctx, seq, func(tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, rawInsert, time.Now().UnixMicro(), keyOf(seq), payload(seq))
					return err
				})
			},
			bulk: func(ctx context.Context, seq int64, n int) error {
				keys, payloads := make([]string, n), make([][]byte, n)
				for i := range keys {
					keys[i], payloads[i] = keyOf(seq+int64(i)), payload(seq+int64(i))
				}
				return s.transact(ctx, seq, func(tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, rawUnnest, time.Now().UnixMicro(), keys, payloads)
					return err
				})
			},
		},
		{
			name: "bare insert RETURNING", kind: limit, tables: raw, settings: "Query; the same table; database/sql",
			stage: func(ctx context.Context, seq int64) error {
				return s.transact(ctx, seq, func(tx *sql.Tx) error {
					var n int64
					return tx.QueryRowContext(ctx, rawInsert+` RETURNING seq`, time.Now().UnixMicro(), keyOf(seq), payload(seq)).Scan(&n)
				})
			},
		},
		{
			name: "bare insert, one batch", kind: limit, tables: raw, settings: "BEGIN, both inserts and COMMIT in one round trip; pgx",
			stage: func(ctx context.Context, seq int64) error {
				var b pgx.Batch
				b.Queue(`BEGIN`)
				b.Queue(appInsert, appNote, int(seq&1023))
				b.Queue(rawInsert, time.Now().UnixMicro(), keyOf(seq), payload(seq))
				b.Queue(`COMMIT`)
				return s.pgx.SendBatch(ctx, &b).Close()
			},
		},
		queue, take,
	}, nil
}

// rawRelay takes rows of queue, two batches in flight for each relay: claimed
// and then deleted, or deleted at once. Claims of a relay come one at a time,
// as this library's do.
func (s *site) rawRelay(ctx context.Context, o relayOptions, h handler, claim bool) (func() error, error) {
	batch := o.batch
	if batch == 0 {
		batch = 1000
	}
	const pause, inFlight = 10 * time.Millisecond, 2
	db, err := openStd(s.dsn, inFlight*o.relays, o.count)
	if err != nil {
		return nil, err
	}
	claims := make([]sync.Mutex, o.relays)
	var token int64
	var tokens sync.Mutex
	stop := loops(inFlight*o.relays, pause, func(i int) (int, error) {
		tokens.Lock()
		token++
		mine := token
		tokens.Unlock()
		now := time.Now().UnixMicro()
		turn := &claims[i%o.relays]
		turn.Lock()
		start := time.Now()
		var rows []rawRow
		var err error
		if claim {
			rows, err = rawRows(db.QueryContext(ctx, queueClaim, batch, now, mine))
		} else {
			rows, err = rawRows(db.QueryContext(ctx, queueTake, batch, now))
		}
		took := time.Since(start)
		turn.Unlock()
		if err != nil || len(rows) == 0 {
			return 0, err
		}
		if o.claims != nil {
			o.claims(len(rows), took)
		}
		ids := make([]int64, len(rows))
		for i, r := range rows {
			ids[i] = r.id
			h(-1, r.payload)
		}
		if claim {
			_, err = db.ExecContext(ctx, queueAck, ids, mine)
		}
		return len(rows), err
	})
	return func() error { return errors.Join(stop(), db.Close()) }, nil
}

type rawRow struct {
	id      int64
	payload []byte
}

func rawRows(rows *sql.Rows, err error) ([]rawRow, error) {
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var rs []rawRow
	for rows.Next() {
		var r rawRow
		if err := rows.Scan(&r.id, &r.payload); err != nil {
			return nil, err
		}
		rs = append(rs, r)
	}
	return rs, rows.Err()
}
