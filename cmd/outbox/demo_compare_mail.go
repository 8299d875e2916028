package main

import (
	"context"
	"fmt"
	"io"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// mailSummary is what came of the mails.
type mailSummary struct {
	Put      int `json:"put"`
	Sent     int `json:"sent"`    // each once, says the mailer
	Doubled  int `json:"doubled"` // says the mailer
	Refused  int `json:"refused_for_now"`
	Bounced  int `json:"refused_for_good"`
	Retried  int `json:"retried_by_hand"`
	Asked    int `json:"asked_about"` // the mailer, by the relay, after a kill or a lost answer
	Left     int `json:"left"`        // in the journal, not sent
	Journals int `json:"recorded_as_sent"`
}

func (m mailSummary) print(w io.Writer, line func(subject string, n int, comment string)) {
	fmt.Fprintln(w, "\nevery mail, through the journal")
	line("mails put", m.Put, "")
	line("mails sent", m.Sent, "each order's in their order, says the mailer")
	line("mails sent twice", m.Doubled, "")
	line("refused for now", m.Refused, "429; tried again")
	line("refused for good", m.Bounced, "422; dead, until somebody retries them")
	line("retried by hand", m.Retried, "")
	line("asked about", m.Asked, "by the relay, since it or its predecessor got no answer; not sent blindly again")
	line("mails left in the journal", m.Left, "not sent")
}

func (d *demo) summariseMails(sum *summary) {
	d.shop.mu.Lock()
	defer d.shop.mu.Unlock()
	d.mailer.mu.Lock()
	defer d.mailer.mu.Unlock()
	l := &d.mailer.log
	sum.Mails = mailSummary{
		Put: len(d.shop.ledger.mails), Sent: len(l.refs), Doubled: l.doubled,
		Refused: l.refused, Bounced: l.bounced, Retried: d.retried, Asked: l.asked,
	}
	sum.Problems = append(sum.Problems, l.problems...)
	for key := range l.refs {
		if !d.shop.ledger.mails[key] {
			sum.problem("mail %s: sent, although its transaction was rolled back", key)
		}
	}
	for key := range d.shop.ledger.mails {
		if l.refs[key] == "" {
			sum.problem("mail %s: never sent", key)
		}
	}
}

// compareMails reads the whole journal: every mail that was committed must be
// there as sent, under the name that the mailer gave it, and nothing else.
func (d *demo) compareMails(ctx context.Context, sum *summary) error {
	found := map[string]bool{}
	f := outbox.Filter{All: true, Limit: listPage}
	for {
		page, after, err := d.shop.mails.List(ctx, f)
		if err != nil {
			return err
		}
		for _, r := range page {
			found[r.Key] = true
			d.compareMail(r, sum)
		}
		if after == "" {
			break
		}
		f.After = after
	}
	for key := range d.shop.ledger.mails {
		if !found[key] {
			sum.problem("mail %s: lost, the journal does not have it", key)
		}
	}
	return nil
}

func (d *demo) compareMail(r outbox.Record, sum *summary) {
	ref := d.mailer.log.refs[r.Key]
	switch {
	case !d.shop.ledger.mails[r.Key]:
		sum.problem("mail %s: in the journal, although the shop never put it", r.Key)
	case r.State != outbox.StateSent:
		sum.Mails.Left++
		sum.problem("mail %s: left in the journal, %s", r.Key, r.State)
	case r.Ref != ref:
		sum.problem("mail %s: the journal has it as sent, reference %q, the mailer has %q", r.Key, r.Ref, ref)
	default:
		sum.Mails.Journals++
	}
}
