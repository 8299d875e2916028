package main

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// faultsOfMails does to journal and mailer what must be found.
func faultsOfMails(t *testing.T, d *demo, judge func(*testing.T) string) {
	keys := slices.Sorted(maps.Keys(d.shop.ledger.mails))
	key, mails := keys[0], d.shop.mails
	r, err := mails.Get(t.Context(), key)
	require.NoError(t, err)
	var m mail
	require.NoError(t, json.Unmarshal(r.Payload, &m))

	_, err = mails.Discard(t.Context(), outbox.Filter{Key: key})
	require.NoError(t, err)
	require.Contains(t, judge(t), "mail "+key+": lost, the journal does not have it")
	put(t, mails, outbox.Message{Key: key, Group: m.Order, Payload: r.Payload})
	require.Contains(t, judge(t), "mail "+key+": left in the journal, pending")
	ended(t, mails, key, nil)
	require.Contains(t, judge(t), "mail "+key+`: the journal has it as sent, reference "ref-`+key+`"`)
	put(t, mails, outbox.Message{Key: "order-x/1"})
	require.Contains(t, judge(t), "mail order-x/1: in the journal, although the shop never put it")
	_, err = mails.Discard(t.Context(), outbox.Filter{Key: "order-x/1"})
	require.NoError(t, err)

	ref := d.mailer.log.refs[key]
	delete(d.mailer.log.refs, key)
	require.Contains(t, judge(t), "mail "+key+": never sent")
	d.mailer.log.refs[key] = ref
	d.mailer.decide("order-x/1", mail{Order: "order-x", Revision: 1})
	require.Contains(t, judge(t), "mail order-x/1: sent, although its transaction was rolled back")
	delete(d.mailer.log.refs, "order-x/1")

	require.NotContains(t, judge(t), "sent twice")
	d.mailer.log.enter(key, m)
	require.Contains(t, judge(t), "mail "+key+": sent twice")
	d.mailer.log.enter("order-x/3", mail{Order: "order-x", Revision: 3})
	require.Contains(t, judge(t), "mail order-x/3: out of order, it came after revision 1")
}
