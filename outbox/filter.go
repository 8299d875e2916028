package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Filter selects messages; zero fields do not narrow. To Retry or Discard all
// of them, say All.
type Filter struct {
	Key     string
	Group   string
	States  []State
	Code    string // of the last error
	All     bool
	After   string // List: the cursor that the page before returned; "" starts at the beginning
	Limit   int    // List: 0 is 100, at most 10,000; Retry, Discard: 0 is no limit
	Payload bool   // List: with payloads
	DryRun  bool   // Retry, Discard: only count
}

func (f *Filter) check() error {
	if f.Key != "" {
		if err := checkKey(f.Key); err != nil {
			return err
		}
	}
	if f.Group != "" {
		if err := checkGroup(f.Group); err != nil {
			return err
		}
	}
	if f.Code != "" {
		if err := validText("code", f.Code, maxCodeBytes); err != nil {
			return err
		}
	}
	for _, s := range f.States {
		if !s.valid() {
			return invalid("%d is no state of a message", s)
		}
	}
	if f.Limit < 0 {
		return invalid("Limit is %d", f.Limit)
	}
	return nil
}

func (f *Filter) messages() MessageFilter {
	return MessageFilter{Key: f.Key, Group: f.Group, States: f.States, Code: f.Code}
}

// Get returns a message, with its payload. ErrNotFound where there is none.
func (v Verbs) Get(ctx context.Context, key string) (Record, error) {
	if err := firstError(v.usable(), checkKey(key)); err != nil {
		return Record{}, v.errorf("read", key, err)
	}
	row, err := v.read(ctx, key, true)
	switch {
	case errors.Is(err, ErrNotFound):
		return Record{}, v.errorf("read", key, ErrNotFound)
	case err != nil:
		return Record{}, fromStore(err)
	}
	return recordOf(v.j.o.Channel, row, false), nil
}

// read returns the row of a message, or exactly ErrNotFound, or an error of
// the store.
func (v Verbs) read(ctx context.Context, key string, payload bool) (Row, error) {
	l := MessageList{MessageFilter: MessageFilter{Key: key}, Limit: 1, Payloads: payload}
	rows, err := v.j.store.ListMessages(ctx, v.tx, v.j.o.Channel, l)
	switch {
	case err != nil:
		return Row{}, err
	case len(rows) == 0:
		return Row{}, ErrNotFound
	}
	return rows[0], nil
}

// List returns the messages that f selects, all of them where it is empty, a
// page at a time, oldest first, and the cursor of the next page: "" where this
// is the last. Payloads are left out unless f asks for them.
func (v Verbs) List(ctx context.Context, f Filter) (rs []Record, after string, err error) {
	setDefault(&f.Limit, defaultListLimit)
	from, err := parseCursor(f.After)
	err = firstError(v.usable(), f.check(), checkCount("Limit", f.Limit, maxListLimit), err)
	if err != nil {
		return nil, "", fmt.Errorf("outbox: list channel %q: %w", v.j.o.Channel, err)
	}
	l := MessageList{MessageFilter: f.messages(), After: from, Limit: f.Limit, Payloads: f.Payload}
	rows, err := v.j.store.ListMessages(ctx, v.tx, v.j.o.Channel, l)
	if err != nil {
		return nil, "", fromStore(err)
	}
	if len(rows) == f.Limit {
		after = cursor(rows[len(rows)-1].Version)
	}
	return recordsOf(v.j.o.Channel, rows, false), after, nil
}

const cursorBase = 36

func cursor(v Version) string { return strconv.FormatInt(int64(v), cursorBase) }

func parseCursor(text string) (Version, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, cursorBase, 64)
	if err != nil || n <= 0 {
		return 0, invalid("After is no cursor that List returned")
	}
	return Version(n), nil
}

// Retry makes the failed, dead and unknown messages that f selects pending,
// due now, their attempts counted anew, and returns how many. Others are
// passed over, and so are those that a transaction holds; only a Filter that names a key says
// why nothing was changed: ErrState, ErrNotFound or ErrBusy. An empty Filter
// needs All, else it is ErrInvalid. Alone it works in batches, each a transaction: after
// an error, those counted are changed.
func (v Verbs) Retry(ctx context.Context, f Filter) (int64, error) {
	return v.amend(ctx, "retry", ActionRetry, f)
}

// Discard deletes the messages that f selects, in any state, and returns how
// many. Whoever is sending one of them gets ErrLeaseLost; its key may be put
// again. Errors are those of [Verbs.Retry].
func (v Verbs) Discard(ctx context.Context, f Filter) (int64, error) {
	return v.amend(ctx, "discard", ActionDiscard, f)
}

// amendBatch is how many messages one statement changes.
const amendBatch = 1000

func (v Verbs) amend(ctx context.Context, verb string, action Action, f Filter) (total int64, err error) {
	err = firstError(v.usable(), f.check())
	switch {
	case err != nil:
	case f.After != "":
		err = invalid("After is for List")
	case !f.All && f.Key == "" && f.Group == "" && len(f.States) == 0 && f.Code == "":
		err = invalid("the Filter is empty: say All for every message")
	}
	if err != nil {
		return 0, fmt.Errorf("outbox: %s in channel %q: %w", verb, v.j.o.Channel, err)
	}
	a := Amendment{Action: action, MessageFilter: f.messages(), DryRun: f.DryRun}
	for {
		if a.Limit = amendBatch; f.Limit > 0 {
			a.Limit = int(min(amendBatch, int64(f.Limit)-total))
		}
		done, err := v.j.store.AmendMessages(ctx, v.tx, v.j.o.Channel, a)
		total += int64(done.Count)
		switch {
		case err != nil:
			return total, fromStore(err)
		case done.Last == 0 || f.Limit > 0 && total >= int64(f.Limit):
			if total == 0 && f.Key != "" {
				return 0, v.whyNot(ctx, verb, a)
			}
			return total, nil
		case done.Last <= a.After:
			return total, fmt.Errorf("outbox: %s in channel %q: store does not get ahead", verb, v.j.o.Channel)
		}
		a.After = done.Last
	}
}

// whyNot says why an amendment of one message has changed nothing.
func (v Verbs) whyNot(ctx context.Context, verb string, a Amendment) error {
	row, err := v.read(ctx, a.Key, false)
	switch {
	case errors.Is(err, ErrNotFound):
		return v.errorf(verb, a.Key, ErrNotFound)
	case err != nil:
		return fromStore(err)
	case !a.Action.allowed(row.State) || len(a.States) > 0 && !slices.Contains(a.States, row.State):
		return v.errorf(verb, a.Key, fmt.Errorf("%w: it is %s", ErrState, row.State))
	case a.Group != "" && a.Group != row.Group:
		return v.errorf(verb, a.Key, fmt.Errorf("%w: it is of another group", ErrState))
	case a.Code != "" && a.Code != row.Code:
		return v.errorf(verb, a.Key, fmt.Errorf("%w: its last error has another code", ErrState))
	}
	return v.errorf(verb, a.Key, ErrBusy)
}

// allowed reports whether a message in state s may be amended so.
func (a Action) allowed(s State) bool {
	switch a {
	case ActionRetry:
		return s == StateFailed || s == StateDead || s == StateUnknown
	case ActionDiscard:
		return true
	}
	return s == StateUnknown
}

// ended are the states that Purge deletes.
var ended = []State{StateSent, StateDead, StateUnknown}

// Purge deletes the sent, dead and unknown messages that ended before a time,
// by the store's clock, and returns how many. Their keys may be put again. It
// works in small batches, each a transaction of its own, and passes over what
// a transaction holds, so it is ErrTx inside one. The zero time is ErrInvalid.
func (v Verbs) Purge(ctx context.Context, before time.Time) (total int64, err error) {
	switch {
	case v.inside:
		err = fmt.Errorf("%w: purging needs transactions of its own", ErrTx)
	case before.IsZero():
		err = invalid("the time is zero")
	}
	if err != nil {
		return 0, fmt.Errorf("outbox: purge channel %q: %w", v.j.o.Channel, err)
	}
	for {
		n, err := v.j.store.PurgeMessages(ctx, v.j.o.Channel, Purge{States: ended, Before: before, Limit: amendBatch})
		if err != nil {
			return total, fromStore(err)
		}
		if total += int64(n); n < amendBatch {
			return total, nil
		}
	}
}
