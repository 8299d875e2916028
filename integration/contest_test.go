package integration

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// A contest is many writers of few keys against relays that publish and delete
// them at once.
type contest struct {
	s       *site
	store   *sqlstore.Store
	writers int
	keys    int
	bulk    bool                 // some writers stage all keys at once
	levels  []sql.IsolationLevel // of the writers, in turn
	pause   time.Duration        // between a writer's transactions, at most
}

// run lets the writers write until enough, and returns what was committed and
// what arrived.
func (c contest) run(t *testing.T, enough func(*ledger, *mirror) bool) (*ledger, *mirror) {
	l := latestOn(t, c.store, "hot")
	book, m := newLedger(), newMirror()
	ctx, stop := context.WithCancel(context.Background())
	var writers, relays sync.WaitGroup
	for i := range c.writers {
		writers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if err := c.write(l, book, i, n); err != nil && !c.store.Retryable(err) {
					t.Errorf("writer %d: %v", i, err)
					return
				}
				time.Sleep(upTo(c.pause)) // a key that is always held is never published
			}
		})
	}
	relaying, halt := context.WithCancel(context.Background())
	for range 2 {
		relays.Go(func() {
			consume(relaying, t, c.store, "hot", func(r outbox.Row) { m.take(r.Key, r.Version, string(r.Payload)) })
		})
	}
	deadline := time.Now().Add(60 * time.Second)
	for !enough(book, m) && time.Now().Before(deadline) && !t.Failed() {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	writers.Wait()
	halt()
	relays.Wait()
	drained(t, c.store, "hot", func(r outbox.Row) { m.take(r.Key, r.Version, string(r.Payload)) })
	return book, m
}

// write stages in one transaction, in one of the ways that callers do.
func (c contest) write(l *outbox.Latest[string], book *ledger, writer, n int) error {
	level := c.levels[writer%len(c.levels)]
	tx, err := c.s.db.BeginTx(context.Background(), &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var keys []string
	if c.bulk && writer%3 == 0 {
		for _, k := range rand.Perm(c.keys)[:1+rand.N(c.keys)] {
			keys = append(keys, fmt.Sprint("key", k))
		}
	} else {
		keys = []string{fmt.Sprint("key", rand.N(c.keys))}
	}
	value := fmt.Sprint(writer, ".", n)
	if n%4 == 1 {
		if err := undone(tx, l, keys[0]); err != nil {
			return err
		}
	}
	items := make([]outbox.Item[string], len(keys))
	for i, key := range keys {
		items[i] = outbox.Item[string]{Key: key, Value: value}
	}
	versions, err := l.StageMany(context.Background(), tx, items)
	if err != nil {
		return err
	}
	turn := book.turn() // while the keys are ours
	if n%5 == 2 {
		return nil // rolled back
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	for i, key := range keys {
		book.committed(key, commit{turn, versions[i], `"` + value + `"`})
	}
	return nil
}

// undone stages inside a savepoint that is rolled back.
func undone(tx *sql.Tx, l *outbox.Latest[string], key string) error {
	if _, err := tx.Exec(`SAVEPOINT s`); err != nil {
		return err
	}
	if _, err := l.Stage(context.Background(), tx, key, "undone"); err != nil {
		return err
	}
	_, err := tx.Exec(`ROLLBACK TO SAVEPOINT s`)
	return err
}

// inCommitOrder tells where a key's versions do not grow in the order in which
// they were committed.
func (l *ledger) inCommitOrder(t *testing.T) {
	t.Helper()
	seen := map[outbox.Version]string{}
	for key, commits := range l.all {
		byTurn := map[int64]commit{}
		turns := make([]int64, 0, len(commits))
		for _, c := range commits {
			require.NotContains(t, seen, c.version, "given out twice, to %s and to %s", seen[c.version], key)
			seen[c.version] = key
			byTurn[c.turn] = c
			turns = append(turns, c.turn)
		}
		last := commit{}
		for _, turn := range sorted(turns) {
			require.Greater(t, byTurn[turn].version, last.version, "of key %s, %s committed after %s", key, byTurn[turn].value, last.value)
			last = byTurn[turn]
		}
	}
}

func after(d time.Duration) func(*ledger, *mirror) bool {
	end := time.Now().Add(d)
	return func(*ledger, *mirror) bool { return time.Now().After(end) }
}

// stalling lets every insert stall for a moment when its version is drawn and
// its key not held yet, as a busy server does by chance.
func stalling(s *site, d dialect.Dialect, most time.Duration) {
	s.exec(d.Render(fmt.Sprintf(`CREATE FUNCTION {t:stall}() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN PERFORM pg_sleep(random() * %f); RETURN new; END'`, most.Seconds())))
	s.exec(d.Render(`CREATE TRIGGER stall BEFORE INSERT ON {t:entries} FOR EACH ROW EXECUTE FUNCTION {t:stall}()`))
}

// withoutSecondDraw lets a version that has moved stay.
func withoutSecondDraw(t *testing.T, db *sql.DB, d dialect.Dialect) {
	_, err := db.Exec(d.Render(`CREATE OR REPLACE FUNCTION {t:redraw_1}(p_place tid) RETURNS bigint
		LANGUAGE sql AS 'SELECT version FROM {t:entries} WHERE ctid = p_place'`))
	require.NoError(t, err)
}
