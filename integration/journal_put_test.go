package integration

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// stepTx calls a function before each statement of a transaction.
type stepTx struct {
	outbox.Tx
	statements int
	before     func(statement int)
}

func (tx *stepTx) Query(ctx context.Context, query string, args ...any) (outbox.Rows, error) {
	tx.statements++
	tx.before(tx.statements)
	return tx.Tx.Query(ctx, query, args...)
}

// On Postgres a Put that finds its key taken looks at the message in a second
// statement. In between that may be sent and deleted: then the Put is of a new
// message. Or it may be discarded and put again by somebody else, otherwise.
func TestPutOfWhatGoesBetweenItsStatements(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		for _, again := range []bool{false, true} {
			s.wipe()
			_, err := j.Add(t.Context(), outbox.Message{Key: "k", Payload: []byte("old")})
			require.NoError(t, err)
			tx, err := s.db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			defer tx.Rollback()
			step := &stepTx{Tx: outbox.SQL(tx), before: func(statement int) {
				if statement != 2 {
					return
				}
				_, err := j.Discard(t.Context(), outbox.Filter{Key: "k"})
				require.NoError(t, err)
				if again {
					_, err = j.Add(t.Context(), outbox.Message{Key: "k", Payload: []byte("other")})
					require.NoError(t, err)
				}
			}}
			put, err := j.PutIn(t.Context(), step, outbox.Message{Key: "k", Payload: []byte("new")})
			require.NoError(t, err)
			require.Equal(t, 2, step.statements)
			require.NoError(t, tx.Commit())
			require.Equal(t, !again, put[0].Created)
			require.Equal(t, again, put[0].Differs)
			want := map[bool]string{false: "new", true: "other"}[again]
			require.Equal(t, want, string(put[0].Record.Payload))
			r, err := j.Get(t.Context(), "k")
			require.NoError(t, err)
			require.Equal(t, want, string(r.Payload))
			require.Equal(t, r.Seq, put[0].Record.Seq)
		}
	})
}
