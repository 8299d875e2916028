package outbox

import (
	"context"
	"time"
)

const (
	purgeEvery = time.Minute
	purgeBatch = 1000
)

// purge deletes messages of a Journal channel that were sent longer ago than
// its Retention, now and then, as long as the run lasts. Batches are small and
// pauses between them as long as they took, so that traffic has precedence;
// rows that others hold are passed over.
func (c *channel) purge(n *run) {
	wait := jitter(purgeEvery)
	for {
		sleep(n.ctx, wait)
		if n.stopping() {
			return
		}
		began := time.Now()
		deleted, err := c.purgeOnce(n)
		switch {
		case n.stopping():
			return
		case err != nil:
			c.r.troubled(opPurge, c.name, err)
			wait = jitter(purgeEvery)
			continue
		}
		c.r.healthy(opPurge)
		if deleted > 0 {
			c.r.observe(Event{Kind: EventPurge, Channel: c.name, Rows: deleted, Duration: time.Since(began)})
		}
		wait = jitter(purgeEvery)
		if deleted == purgeBatch {
			wait = max(time.Since(began), time.Millisecond)
		}
	}
}

func (c *channel) purgeOnce(n *run) (deleted int, err error) {
	s := c.crew.sending
	p := Purge{States: []State{StateSent}, Age: s.o.Retention, Limit: purgeBatch}
	err = n.ask(n.reads, readTimeout, func(ctx context.Context) (err error) {
		deleted, err = s.journal.store.PurgeMessages(ctx, c.name.Name, p)
		return err
	})
	return deleted, err
}
