package sqlstore

import (
	"context"
	"database/sql"
	"errors"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// prepare prepares what the dialect says is worth it: on SQLite it halves the
// cost of writing one row. It happens in Check, once.
func (s *Store) prepare(ctx context.Context) error {
	if s.prepared.Load() != nil {
		return nil
	}
	prepared := map[string]*sql.Stmt{}
	for _, text := range s.d.Prepared() {
		st, err := s.db.PrepareContext(ctx, text)
		if err != nil {
			return errors.Join(err, closeAll(prepared))
		}
		prepared[text] = st
	}
	if !s.prepared.CompareAndSwap(nil, &prepared) {
		return closeAll(prepared)
	}
	return nil
}

func closeAll(prepared map[string]*sql.Stmt) (err error) {
	for _, st := range prepared {
		err = errors.Join(err, st.Close())
	}
	return err
}

// eachIn runs a query of a caller's transaction, prepared where it is.
func (s *Store) eachIn(ctx context.Context, tx outbox.Tx, st dialect.Statement, scan func(outbox.Rows) error) error {
	if prepared := s.prepared.Load(); prepared != nil {
		t, std := tx.(interface{ Unwrap() *sql.Tx })
		if one := (*prepared)[st.Text]; one != nil && std {
			err := dialect.Each(ctx, preparedIn{t.Unwrap(), one}, st, func(rows *sql.Rows) error { return scan(rows) })
			// tx may be of another pool than the store's: database/sql then refuses before SQLite sees anything.
			if err == nil || s.d.Classify(err) != dialect.FaultOther || errors.Is(err, sql.ErrTxDone) {
				return err
			}
		}
	}
	rows, err := tx.Query(ctx, st.Text, st.Args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// preparedIn runs a prepared statement in a transaction.
type preparedIn struct {
	tx *sql.Tx
	st *sql.Stmt
}

func (p preparedIn) QueryContext(ctx context.Context, _ string, args ...any) (*sql.Rows, error) {
	return p.tx.StmtContext(ctx, p.st).QueryContext(ctx, args...)
}
