package integration

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// What the roles of an application with a journal need, and no more.
var (
	putterGrants = []string{
		`GRANT USAGE ON SCHEMA {schema} TO {role}`,
		`GRANT SELECT ON {t:meta} TO {role}`,
		`GRANT SELECT ON {t:messages} TO {role}`,
		`GRANT INSERT ON {t:messages} TO {role}`,
		`GRANT SELECT ON {t:groups} TO {role}`,
		`GRANT INSERT ON {t:groups} TO {role}`,
		`GRANT UPDATE ON {t:groups} TO {role}`,
		`GRANT DELETE ON {t:groups} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:seq} TO {role}`,
		`GRANT USAGE ON SEQUENCE {t:token_seq} TO {role}`,
	}
	// Of who sends, and of who lists, retries, discards and purges.
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
	}
)

func TestPutterNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		requireMinimal(t, s, "putter", putterGrants, func(as *site) error {
			s.wipe()
			if err := as.store.Check(t.Context()); err != nil {
				return err
			}
			return as.putterWork(t.Context())
		})
	})
}

func TestSenderNeedsFewGrants(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		requireMinimal(t, s, "sender", senderGrants, func(as *site) error {
			s.wipe()
			s.exec(s.dialect.Render(`DELETE FROM {t:channels}`))
			s.put(j, append(letters("k", 6, 2), letters("plain", 6, 0)...)...)
			return as.senderWork(t.Context())
		})
		require.Error(t, s.as(t, "stranger", nil).store.Check(t.Context()))
	})
}

// putterWork puts in every way: one and many, grouped and not, begun and not,
// new and existing.
func (s *site) putterWork(ctx context.Context) error {
	for _, begin := range []time.Duration{0, time.Minute} {
		for _, rows := range [][]outbox.PutRow{
			{{Key: "one"}}, {{Key: "one"}}, {{Key: "grouped", Group: "g"}}, {{Key: "grouped", Group: "other"}},
			{{Key: "many"}, {Key: "more"}}, {{Key: "both", Group: "h"}, {Key: "too"}},
		} {
			for i := range rows {
				rows[i].Key += begin.String()
				if rows[i].Group != "" {
					rows[i].Group += begin.String()
				}
			}
			if _, err := s.store.PutRows(ctx, nil, "mail", rows, begin); err != nil {
				return err
			}
		}
	}
	return nil
}

// senderWork makes every call that a sender and its operator make.
func (s *site) senderWork(ctx context.Context) error {
	if err := s.store.Check(ctx); err != nil {
		return err
	}
	ch := messageChannel("mail")
	if _, err := s.store.Look(ctx, []outbox.Channel{ch}); err != nil {
		return err
	}
	c, err := s.store.ClaimMessages(ctx, nil, outbox.Claim{Channel: "mail", Limit: 100, Lease: time.Minute, Full: true})
	if err != nil {
		return err
	}
	if _, err := s.store.Extend(ctx, ch, c.Rows, time.Minute); err != nil {
		return err
	}
	for i, r := range c.Rows {
		end := outbox.Settlement{Row: r, Outcome: outbox.Outcome(1 + i%5), Keep: i < 6}
		if _, err := s.store.Settle(ctx, ch, []outbox.Settlement{end}); err != nil {
			return err
		}
	}
	for _, action := range []outbox.Action{outbox.ActionSent, outbox.ActionRetry, outbox.ActionDiscard} {
		if _, err := s.store.AmendMessages(ctx, nil, "mail", outbox.Amendment{Action: action, Limit: 2}); err != nil {
			return err
		}
	}
	if _, err := s.store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Limit: 10}); err != nil {
		return err
	}
	if _, err := s.store.ListMessages(ctx, nil, "mail", outbox.MessageList{Limit: 10}); err != nil {
		return err
	}
	if err := s.store.Outage(ctx, ch, true, "x"); err != nil {
		return err
	}
	_, err = s.store.Stats(ctx)
	return err
}
