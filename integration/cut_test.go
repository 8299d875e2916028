package integration

import (
	"context"
	"database/sql"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A connection lost in any statement of a relay, before or after the statement
// took effect, loses nothing, repeats nothing that the truth forbids, and
// takes no lease away.
func TestG7ConnectionLostInAnyRelayStatement(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		var cases []*cutCase
		for _, statement := range []string{"look_2", "claim_1", "extend_1", "settle_1"} {
			for _, how := range cuts {
				cases = append(cases, s.startCut(statement, how))
			}
		}
		for _, c := range cases {
			t.Run(c.statement+" "+string(c.how), c.check)
		}
	})
}

// cutCase is a relay with a channel and a connection of its own.
type cutCase struct {
	statement string
	how       cut
	s         *site
	proxy     *proxy
	book      *logbook
	witness   witness
	cancelled atomic.Bool
	stop      func() error
}

const cutLease = 1500 * time.Millisecond

func (s *site) startCut(statement string, how cut) *cutCase {
	c := &cutCase{statement: statement, how: how, s: s, proxy: s.proxy(), book: new(logbook)}
	s.stage(s.latest(c.name()), "k", "x")
	c.proxy.cutNext(statement, how)
	far := s.through(c.proxy)
	o := c.book.options()
	o.PollInterval = 200 * time.Millisecond
	c.stop = far.run(o, far.latest(c.name()).Publisher(c.publish, outbox.PublishOptions{Lease: cutLease}))
	return c
}

func (c *cutCase) name() string { return c.statement + " " + string(c.how) }

// publish takes long enough for the leases to be extended, where that is tried.
func (c *cutCase) publish(ctx context.Context, batch []*outbox.Entry[string]) error {
	c.witness.saw(batch)
	if c.statement == "extend_1" {
		select {
		case <-ctx.Done():
			c.cancelled.Store(true)
		case <-time.After(2 * cutLease):
		}
	}
	return nil
}

func (c *cutCase) check(t *testing.T) {
	eventually(t, "the row to be settled", func() bool {
		return c.s.count(`SELECT count(*) FROM {t:entries} WHERE channel = $1`, c.name()) == 0
	})
	require.Equal(t, 1, c.proxy.made())
	require.Len(t, c.witness.all(), 1, "published once")
	attempt := 1
	if c.statement == "claim_1" && c.how.tookEffect() {
		attempt = 2 // the first claim was lost with its answer, and its lease had to lapse
	}
	require.Equal(t, attempt, c.witness.all()[0].attempt)
	require.False(t, c.cancelled.Load(), "the leases were held")
	eventually(t, "the relay to notice", func() bool { return c.book.count(outbox.EventRecover) > 0 })
	require.NoError(t, c.stop())
	require.Zero(t, c.book.count(outbox.EventLost), "%q", c.book.noise())
	require.Zero(t, c.book.count(outbox.EventLeft), "%q", c.book.noise())
}

// The same of the statements of an application's transaction: what Transact
// answers is true, and where it cannot know it says so.
func TestG1ConnectionLostInAnyStatementOfATransaction(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		p := s.proxy()
		far := s.through(p)
		l := far.latest("")
		for _, statement := range []string{"begin", "INSERT INTO app", "outbox_entries", "commit"} {
			for _, how := range cuts {
				t.Run(statement+" "+string(how), func(t *testing.T) {
					key := fmt.Sprintf("%s %s", statement, how)
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					p.cutNext(statement, how)
					made := p.made()
					err := far.store.Transact(ctx, nil, func(tx *sql.Tx) error {
						if _, err := tx.ExecContext(ctx, `INSERT INTO app (id, note) VALUES ($1, 'x')`, key); err != nil {
							return err
						}
						_, err := l.Stage(ctx, tx, key, "x")
						return err
					})
					require.Equal(t, made+1, p.made())
					require.Error(t, err)
					written := s.count(`SELECT count(*) FROM app WHERE id = $1`, key) == 1
					_, staged := entry(t, l, key)
					require.Equal(t, written, staged)
					if statement == "commit" {
						require.ErrorIs(t, err, outbox.ErrCommit)
						require.Equal(t, how.tookEffect(), written)
						return
					}
					require.NotErrorIs(t, err, outbox.ErrCommit)
					require.False(t, written)
				})
			}
		}
	})
}

// A relay whose database stays open but silent, as behind a dead link, cancels
// its publication before its lease can have ended, and another takes over.
func TestG5SilentDatabaseEndsThePublicationBeforeTheLease(t *testing.T) {
	const lease = 1500 * time.Millisecond
	onlyPostgres(t, func(t *testing.T, s *site) {
		p := s.proxy()
		far := s.through(p)
		s.stage(s.latest(""), "k", "x")
		var asked, cancelled time.Time
		ended := make(chan error, 1)
		o := new(logbook).options()
		claimed := make(chan struct{})
		began := time.Now()
		far.run(o, far.latest("").Publisher(func(ctx context.Context, _ []*outbox.Entry[string]) error {
			asked = time.Now()
			close(claimed)
			<-ctx.Done()
			cancelled = time.Now()
			ended <- context.Cause(ctx)
			return ctx.Err()
		}, outbox.PublishOptions{Lease: lease}))
		<-claimed
		p.darken()
		var other witness
		s.run(new(logbook).options(), s.latest("").Publisher(other.publish, outbox.PublishOptions{Lease: lease}))
		require.ErrorIs(t, <-ended, outbox.ErrLeaseLost)
		require.Less(t, cancelled.Sub(asked), lease, "from after the claim")
		eventually(t, "the other relay to publish", func() bool { return other.len() == 1 })
		require.True(t, other.all()[0].at.After(cancelled), "no two at a time")
		require.Less(t, time.Since(began), 2*lease+fullPass+slack)
		p.light()
	})
}
