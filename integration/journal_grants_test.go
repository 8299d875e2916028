package integration

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// What the roles of an application need for messages, and no more.
var (
	putterGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:meta} TO {role}`,
		`GRANT SELECT ON {t:messages} TO {role}`,
		`GRANT INSERT ON {t:messages} TO {role}`,
		`GRANT SELECT ON {t:groups} TO {role}`,
		`GRANT INSERT ON {t:groups} TO {role}`,
		`GRANT UPDATE ON {t:groups} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:seq} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:token_seq} TO {role}`, // for PutBegun
	}
	senderGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:meta} TO {role}`,
		`GRANT SELECT ON {t:messages} TO {role}`,
		`GRANT UPDATE ON {t:messages} TO {role}`,
		`GRANT DELETE ON {t:messages} TO {role}`,
		`GRANT SELECT ON {t:groups} TO {role}`,
		`GRANT UPDATE ON {t:groups} TO {role}`,
		`GRANT DELETE ON {t:groups} TO {role}`,
		`GRANT SELECT ON {t:channels} TO {role}`,
		`GRANT INSERT ON {t:channels} TO {role}`,
		`GRANT UPDATE ON {t:channels} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:token_seq} TO {role}`,
		`GRANT SELECT ON {t:entries} TO {role}`, // for Stats
	}
	// Of who lists, retries, resolves, discards and purges messages.
	journalOperatorGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:messages} TO {role}`,
		`GRANT UPDATE ON {t:messages} TO {role}`,
		`GRANT DELETE ON {t:messages} TO {role}`,
		`GRANT SELECT ON {t:groups} TO {role}`,
		`GRANT UPDATE ON {t:groups} TO {role}`,
		`GRANT DELETE ON {t:groups} TO {role}`,
	}
)

func TestPutterNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		n := 0
		requireMinimal(t, s, "putter", putterGrants, func(as *site) error {
			if err := as.store.Check(t.Context()); err != nil {
				return err
			}
			j := as.journal("mail")
			n++
			return as.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
				for _, m := range []outbox.Message{{Key: fmt.Sprint("a", n)}, {Key: fmt.Sprint("a", n)}, {Key: fmt.Sprint("b", n), Group: "g"}, {Key: fmt.Sprint("c", n), Group: "g"}} {
					if _, err := j.Put(t.Context(), tx, m); err != nil {
						return err
					}
				}
				if _, err := j.PutMany(t.Context(), tx, letters(fmt.Sprint("many", n), 3, 0)); err != nil {
					return err
				}
				_, err := j.PutBegun(t.Context(), tx, outbox.Message{Key: fmt.Sprint("begun", n)}, time.Minute)
				if err == nil {
					_, err = j.In(outbox.SQL(tx)).Get(t.Context(), fmt.Sprint("begun", n))
				}
				return err
			})
		})
	})
}

func TestSenderNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		requireMinimal(t, s, "sender", senderGrants, func(as *site) error {
			s.wipe()
			s.exec(s.dialect.Render(`DELETE FROM {t:channels}`))
			s.put(j, append(letters("plain", 5, 0), letters("grouped", 10, 5)...)...)
			return as.senderWork(t.Context())
		})
	})
}

// senderWork makes every call that a relay of a journal makes.
func (s *site) senderWork(ctx context.Context) error {
	if err := s.store.Check(ctx); err != nil {
		return err
	}
	ch := messageChannel("mail")
	if _, err := s.store.Look(ctx, []outbox.Channel{ch}); err != nil {
		return err
	}
	claim := outbox.Claim{Channel: "mail", Limit: 100, Lease: time.Minute, Full: true}
	c, err := s.store.ClaimMessages(ctx, nil, claim)
	if err != nil {
		return err
	}
	if _, err := s.store.Extend(ctx, ch, c.Rows, time.Minute); err != nil {
		return err
	}
	for i, r := range c.Rows {
		x := outbox.Settlement{Row: r, Outcome: messageOutcomes[i%5], Keep: i%2 == 0}
		if _, err := s.store.Settle(ctx, ch, []outbox.Settlement{x}); err != nil {
			return err
		}
	}
	if _, err := s.store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Before: time.Now().Add(time.Hour), Limit: 10}); err != nil {
		return err
	}
	for _, down := range []bool{true, false, true} {
		if err := s.store.Outage(ctx, ch, down, "x"); err != nil {
			return err
		}
	}
	time.Sleep(1100 * time.Millisecond) // the first pause of an outage
	if c, err = s.store.ClaimMessages(ctx, nil, claim); err == nil && !c.Probe {
		err = fmt.Errorf("%d messages claimed, and no probe", len(c.Rows))
	}
	if err == nil {
		_, err = s.store.Stats(ctx)
	}
	return err
}

func TestJournalOperatorNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		requireMinimal(t, s, "clerk", journalOperatorGrants, func(as *site) error {
			s.wipe()
			s.put(j, append(letters("plain", 5, 0), letters("grouped", 10, 5)...)...)
			for i, r := range s.take("mail", 100, time.Minute) {
				s.finish("mail", messageOutcomes[i%5], 0, r)
			}
			ctx, clerk := t.Context(), as.journal("mail")
			rs, _, err := clerk.List(ctx, outbox.Filter{States: []outbox.State{outbox.StateUnknown}})
			if err == nil {
				err = clerk.ResolveUnknown(ctx, rs[0].Key, outbox.VerdictSent, "ref")
			}
			if err == nil {
				_, err = clerk.Retry(ctx, outbox.Filter{States: []outbox.State{outbox.StateDead}})
			}
			if err == nil {
				_, err = clerk.Purge(ctx, time.Now().Add(time.Hour))
			}
			if err == nil {
				_, err = clerk.Discard(ctx, outbox.Filter{All: true})
			}
			return err
		})
	})
}

// TestG10MissingGrantForMessagesIsTold, with what it is for.
func TestG10MissingGrantForMessagesIsTold(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		as := s.as(t, "stranger", nil)
		for _, m := range []outbox.Message{{Key: "k"}, {Key: "k", Group: "g"}} {
			tx := as.begin()
			_, err := as.journal("mail").Put(t.Context(), tx, m)
			require.ErrorContains(t, err, "lacks a grant")
			require.NoError(t, tx.Rollback())
		}
		_, err := as.journal("mail").Retry(t.Context(), outbox.Filter{All: true})
		require.ErrorContains(t, err, "lacks a grant")
		book := new(logbook)
		stop := as.run(book.options(), as.journal("mail").Sender(new(receiver).send, outbox.SendOptions{}))
		eventually(t, "the relay to say so", func() bool { return len(book.grep("lacks")) > 0 })
		require.NoError(t, stop())
	})
}
