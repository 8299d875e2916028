package main

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverdatabasesql"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// Kind implements river.JobArgs.
func (message) Kind() string { return "bench" }

type riverWorker struct {
	river.WorkerDefaults[message]
	h handler
}

func (w *riverWorker) Work(_ context.Context, j *river.Job[message]) error {
	w.h(j.Args.Seq, nil)
	return nil
}

// quiet is for clients that only insert.
var quiet = slog.New(slog.DiscardHandler)

func installRiver(ctx context.Context, pool *pgxpool.Pool) error {
	m, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
	if err != nil {
		return err
	}
	_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

// Names of River's variants that ratios refer to.
const (
	riverPgx    = "River"
	riverUnique = "River, unique jobs, database/sql"
)

const (
	riverSettings = "relay: FetchCooldown 1 ms, 1,000 workers"
	riverLacks    = "a unique key; it keeps finished jobs"
	riverFill     = `INSERT INTO river_job (args, kind, max_attempts, queue, state, priority, scheduled_at)
		SELECT ` + payloadSQL + `::jsonb, 'bench', 25, 'default', 'available', 1, now() FROM generate_series(1, $1::integer) AS g`
	riverWaiting = `SELECT count(*) FROM river_job WHERE state <> 'completed'`
)

var unique = &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}

// rivers are River over pgx, over database/sql, and with unique jobs. Its
// inserters announce at most once in FetchCooldown, 100 ms as it comes; those
// for the latency are set to the least there is.
func (s *site) rivers() ([]*peer, error) {
	plain, err := river.NewClient(riverpgxv5.New(s.pgx), &river.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	prompt, err := river.NewClient(riverpgxv5.New(s.pgx), &river.Config{Logger: quiet, FetchCooldown: time.Millisecond})
	if err != nil {
		return nil, err
	}
	std, err := river.NewClient(riverdatabasesql.New(s.std), &river.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	tables := []string{"river_job"}
	insertPgx := func(c *river.Client[pgx.Tx]) func(context.Context, int64) error {
		return func(ctx context.Context, seq int64) error {
			return s.transactPgx(ctx, seq, func(tx pgx.Tx) error {
				_, err := c.InsertTx(ctx, tx, newMessage(seq), nil)
				return err
			})
		}
	}
	insertStd := func(o *river.InsertOpts) func(context.Context, int64) error {
		return func(ctx context.Context, seq int64) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error {
				_, err := std.InsertTx(ctx, tx, newMessage(seq), o)
				return err
			})
		}
	}
	return []*peer{
		{
			name: riverPgx, kind: rival, settings: "pgx, COPY in bulk; " + riverSettings, lacks: riverLacks,
			tables: tables, waiting: riverWaiting, fill: s.fillSQL(riverFill), share: 5,
			stage: insertPgx(plain), announce: insertPgx(prompt),
			bulk: func(ctx context.Context, seq int64, n int) error {
				return s.transactPgx(ctx, seq, func(tx pgx.Tx) error {
					_, err := plain.InsertManyFastTx(ctx, tx, riverJobs(seq, n, nil))
					return err
				})
			},
			relay: s.riverRelayPgx,
		},
		{
			name: "River, database/sql", kind: rival, settings: "riverdatabasesql; " + riverSettings, lacks: riverLacks + "; no LISTEN",
			tables: tables, waiting: riverWaiting, fill: s.fillSQL(riverFill), share: 5,
			stage: insertStd(nil),
			bulk: func(ctx context.Context, seq int64, n int) error {
				return s.transact(ctx, seq, func(tx *sql.Tx) error {
					_, err := std.InsertManyFastTx(ctx, tx, riverJobs(seq, n, nil))
					return err
				})
			},
			relay: s.riverRelayStd,
		},
		{
			name: riverUnique, kind: keyed, settings: "riverdatabasesql, UniqueOpts.ByArgs", lacks: "leases; it keeps finished jobs",
			tables: tables,
			stage:  insertStd(unique),
			bulk: func(ctx context.Context, seq int64, n int) error {
				return s.transact(ctx, seq, func(tx *sql.Tx) error {
					_, err := std.InsertManyTx(ctx, tx, riverJobs(seq, n, unique))
					return err
				})
			},
		},
	}, nil
}

func riverJobs(seq int64, n int, o *river.InsertOpts) []river.InsertManyParams {
	jobs := make([]river.InsertManyParams, n)
	for i := range jobs {
		jobs[i] = river.InsertManyParams{Args: newMessage(seq + int64(i)), InsertOpts: o}
	}
	return jobs
}

func riverConfig(o relayOptions, a *alarm, h handler) *river.Config {
	workers := river.NewWorkers()
	river.AddWorker(workers, &riverWorker{h: h})
	c := &river.Config{
		Logger: a.logger(), Workers: workers, FetchCooldown: time.Millisecond,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 1000}},
	}
	if o.prompt {
		c.FetchPollInterval = 10 * time.Millisecond // over database/sql it does not listen
	}
	if o.lazy {
		c.FetchCooldown, c.Queues = 0, map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}}
	}
	return c
}

func (s *site) riverRelayPgx(ctx context.Context, o relayOptions, h handler) (func() error, error) {
	pool, err := openPgx(ctx, s.dsn, 10+4*o.relays, o.count)
	if err != nil {
		return nil, err
	}
	stop, err := riverRelay(ctx, o, riverpgxv5.New(pool), h)
	return func() error { err := stop(); pool.Close(); return err }, err
}

func (s *site) riverRelayStd(ctx context.Context, o relayOptions, h handler) (func() error, error) {
	db, err := openStd(s.dsn, 10+4*o.relays, o.count)
	if err != nil {
		return nil, err
	}
	stop, err := riverRelay(ctx, o, riverdatabasesql.New(db), h)
	return func() error { return errors.Join(stop(), db.Close()) }, err
}

// riverRelay starts o.relays clients. stop is never nil.
func riverRelay[Tx any](ctx context.Context, o relayOptions, d riverdriver.Driver[Tx], h handler) (stop func() error, err error) {
	var a alarm
	var clients []*river.Client[Tx]
	stop = func() error {
		return a.stop(func() error {
			var err error
			for _, c := range clients {
				err = errors.Join(err, c.Stop(context.WithoutCancel(ctx)))
			}
			return err
		})
	}
	for range o.relays {
		c, err := river.NewClient(d, riverConfig(o, &a, h))
		if err == nil {
			err = c.Start(ctx)
		}
		if err != nil {
			return stop, err
		}
		clients = append(clients, c)
	}
	return stop, nil
}
