package main

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	wmessage "github.com/ThreeDotsLabs/watermill/message"
)

const (
	queueTopic   = "queue"   // of the queue schema
	offsetsTopic = "offsets" // of the default schema
)

func installWatermill(ctx context.Context, db *sql.DB) error {
	queue, err1 := wsql.PostgreSQLQueueSchema{}.SchemaInitializingQueries(wsql.SchemaInitializingQueriesParams{Topic: queueTopic})
	offsets, err2 := wsql.DefaultPostgreSQLSchema{}.SchemaInitializingQueries(wsql.SchemaInitializingQueriesParams{Topic: offsetsTopic})
	acks, err3 := wsql.DefaultPostgreSQLOffsetsAdapter{}.SchemaInitializingQueries(wsql.OffsetsSchemaInitializingQueriesParams{Topic: offsetsTopic})
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	for _, q := range append(append(queue, offsets...), acks...) {
		if _, err := db.ExecContext(ctx, q.Query, q.Args...); err != nil {
			return err
		}
	}
	return nil
}

// watermills are watermill-sql with its queue and its default schema.
func (s *site) watermills() ([]*peer, error) {
	publish := func(schema wsql.SchemaAdapter, topic string) func(ctx context.Context, seq int64, n int) error {
		return func(ctx context.Context, seq int64, n int) error {
			return s.transact(ctx, seq, func(tx *sql.Tx) error {
				p, err := wsql.NewPublisher(wsql.TxFromStdSQL(tx), wsql.PublisherConfig{SchemaAdapter: schema}, watermill.NopLogger{})
				if err != nil {
					return err
				}
				ms := make([]*wmessage.Message, n)
				for i := range ms {
					ms[i] = wmessage.NewMessage(watermill.NewUUID(), payload(seq+int64(i)))
					ms[i].SetContext(ctx)
				}
				return p.Publish(topic, ms...)
			})
		}
	}
	queue := publish(wsql.PostgreSQLQueueSchema{}, queueTopic)
	offsets := publish(wsql.DefaultPostgreSQLSchema{}, offsetsTopic)
	one := func(f func(context.Context, int64, int) error) func(context.Context, int64) error {
		return func(ctx context.Context, seq int64) error { return f(ctx, seq, 1) }
	}
	return []*peer{
		{
			name: "watermill-sql, queue", kind: rival, settings: "database/sql; relay: DeleteOnAck, batch 1,000",
			lacks:  "a unique key, a lease: it holds a transaction and locks while it publishes, one failure holds up its batch",
			tables: []string{`"watermill_` + queueTopic + `"`}, waiting: `SELECT count(*) FROM "watermill_` + queueTopic + `"`,
			stage: one(queue), bulk: queue,
			fill: s.fillSQL(`INSERT INTO "watermill_` + queueTopic + `" (uuid, payload, metadata)
				SELECT gen_random_uuid()::text, ` + payloadSQL + `::json, '{}' FROM generate_series(1, $1::integer) AS g`),
			relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
				return s.watermillRelay(ctx, o, queueTopic, h)
			},
		},
		{
			name: "watermill-sql, default", kind: rival, settings: "database/sql; relay: batch 1,000",
			lacks:  "a unique key, a lease: one reader at a time, it holds a transaction while it publishes; it deletes nothing",
			tables: []string{`"watermill_` + offsetsTopic + `"`, `"watermill_offsets_` + offsetsTopic + `"`},
			waiting: `SELECT count(*) FROM "watermill_` + offsetsTopic + `" WHERE "offset" >
				(SELECT coalesce(max(offset_acked), 0) FROM "watermill_offsets_` + offsetsTopic + `")`,
			stage: one(offsets), bulk: offsets, share: 2,
			fill: s.fillSQL(`INSERT INTO "watermill_` + offsetsTopic + `" (uuid, payload, metadata, transaction_id)
				SELECT gen_random_uuid()::text, ` + payloadSQL + `::json, '{}', pg_current_xact_id() FROM generate_series(1, $1::integer) AS g`),
			relay: func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
				return s.watermillRelay(ctx, o, offsetsTopic, h)
			},
		},
	}, nil
}

func (s *site) watermillRelay(ctx context.Context, o relayOptions, topic string, h handler) (func() error, error) {
	batch := o.batch
	if batch == 0 {
		batch = 1000
	}
	config := wsql.SubscriberConfig{
		SchemaAdapter:  wsql.DefaultPostgreSQLSchema{SubscribeBatchSize: batch},
		OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
		PollInterval:   10 * time.Millisecond,
	}
	if topic == queueTopic {
		config.SchemaAdapter = wsql.PostgreSQLQueueSchema{SubscribeBatchSize: batch}
		config.OffsetsAdapter = wsql.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true}
	}
	if o.lazy {
		config.PollInterval = 0
	}
	db, err := openStd(s.dsn, 4*o.relays, o.count)
	if err != nil {
		return nil, err
	}
	var a alarm
	var wg sync.WaitGroup
	var subscribers []*wsql.Subscriber
	ctx, cancel := context.WithCancel(ctx)
	stop := func() error {
		return a.stop(func() error {
			cancel()
			var err error
			for _, s := range subscribers {
				err = errors.Join(err, s.Close())
			}
			wg.Wait()
			return errors.Join(err, db.Close())
		})
	}
	for range o.relays {
		sub, err := wsql.NewSubscriber(wsql.BeginnerFromStdSQL(db), config, watermill.NewSlogLogger(a.logger()))
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		subscribers = append(subscribers, sub)
		messages, err := sub.Subscribe(ctx, topic)
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		wg.Go(func() {
			for m := range messages {
				h(-1, m.Payload)
				m.Ack()
			}
		})
	}
	return stop, nil
}
