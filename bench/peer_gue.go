package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/vgarvardt/gue/v5"
	"github.com/vgarvardt/gue/v5/adapter/pgxv5"
	gueslog "github.com/vgarvardt/gue/v5/adapter/slog"
)

const gueQueue = "bench"

// gues is gue. Its workers take one job each and hold its row locked while
// they work.
func (s *site) gues() ([]*peer, error) {
	c, err := gue.NewClient(pgxv5.NewConnPool(s.pgx))
	if err != nil {
		return nil, err
	}
	job := func(seq int64) *gue.Job { return &gue.Job{Queue: gueQueue, Type: "bench", Args: payload(seq)} }
	return []*peer{{
		name: "gue", kind: rival, settings: "pgx; relay: by run_at, 16 workers, polling every 10 ms",
		lacks:  "a unique key, a lease: a transaction and a connection for each job that is being handled",
		tables: []string{"gue_jobs"}, waiting: `SELECT count(*) FROM gue_jobs`, share: 10,
		stage: func(ctx context.Context, seq int64) error {
			return s.transactPgx(ctx, seq, func(tx pgx.Tx) error { return c.EnqueueTx(ctx, job(seq), pgxv5.NewTx(tx)) })
		},
		bulk: func(ctx context.Context, seq int64, n int) error {
			return s.transactPgx(ctx, seq, func(tx pgx.Tx) error {
				jobs := make([]*gue.Job, n)
				for i := range jobs {
					jobs[i] = job(seq + int64(i))
				}
				return c.EnqueueBatchTx(ctx, jobs, pgxv5.NewTx(tx))
			})
		},
		fill: s.fillSQL(`INSERT INTO gue_jobs (job_id, queue, priority, run_at, job_type, args, created_at, updated_at)
			SELECT '01J' || lpad(upper(to_hex(g)), 23, '0'), '` + gueQueue + `', 0, now() - interval '10 s', 'bench', convert_to(` + payloadSQL + `, 'UTF8'), now(), now()
			FROM generate_series(1, $1::integer) AS g`),
		relay: s.gueRelay,
	}}, nil
}

func (s *site) gueRelay(ctx context.Context, o relayOptions, h handler) (func() error, error) {
	const workers = 16
	var a alarm
	pool, err := openPgx(ctx, s.dsn, workers*o.relays+4, o.count)
	if err != nil {
		return nil, err
	}
	log := gueslog.New(a.logger())
	c, err := gue.NewClient(pgxv5.NewConnPool(pool), gue.WithClientLogger(log))
	if err != nil {
		return nil, err
	}
	options := []gue.WorkerPoolOption{gue.WithPoolQueue(gueQueue), gue.WithPoolLogger(log)}
	if !o.lazy {
		options = append(options, gue.WithPoolPollInterval(10*time.Millisecond), gue.WithPoolPollStrategy(gue.RunAtPollStrategy))
	}
	work := gue.WorkMap{"bench": func(_ context.Context, j *gue.Job) error { h(-1, j.Args); return nil }}
	n := workers * o.relays
	if o.lazy {
		n = o.relays
	}
	w, err := gue.NewWorkerPool(c, work, n, options...)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		err := w.Run(ctx)
		a.fail(err)
		done <- err
	}()
	return func() error {
		return a.stop(func() error {
			cancel()
			<-done // ends with the context's error
			pool.Close()
			return nil
		})
	}, nil
}
