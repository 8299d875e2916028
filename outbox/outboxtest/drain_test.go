package outboxtest_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// recorder is a test that may fail.
type recorder struct {
	testing.TB
	failure string
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failure = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// failure returns with what text f fails a test.
func failure(t *testing.T, f func(testing.TB)) string {
	r := &recorder{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		f(r)
	}()
	<-done
	return r.failure
}

// outlet is a channel of strings and a publish function.
type outlet struct {
	latest *outbox.Latest[string]
	relay  *outbox.Relay
	db     *sql.DB
	clock  *outboxtest.Clock
}

func newOutlet(t *testing.T, o outbox.LatestOptions[string], f outbox.PublishFunc[string]) outlet {
	t.Helper()
	c := outboxtest.NewClock(time.Time{})
	store, db := open(false, c)(t)
	l, err := outbox.NewLatest(store, o)
	if err != nil {
		t.Fatal(err)
	}
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: slog.New(slog.DiscardHandler)}, l.Publisher(f, outbox.PublishOptions{}))
	if err != nil {
		t.Fatal(err)
	}
	return outlet{l, r, db, c}
}

// stage stages a value for each key.
func (o outlet) stage(t *testing.T, keys ...string) {
	t.Helper()
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	for _, key := range keys {
		if _, err := o.latest.Stage(t.Context(), tx, key, "value of "+key); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
}

func published(context.Context, []*outbox.Entry[string]) error { return nil }

func TestRequireStagedReturnsTheEntry(t *testing.T) {
	o := newOutlet(t, outbox.LatestOptions[string]{}, published)
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	v, err := o.latest.Stage(t.Context(), tx, "k", "v")
	if err != nil {
		t.Fatal(err)
	}
	e := outboxtest.RequireStaged(t, o.latest, tx, "k")
	if e.Key != "k" || e.Value != "v" || e.Version != v {
		t.Errorf("the entry is %+v", e)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if e := outboxtest.RequireStaged(t, o.latest, nil, "k"); e.Version != v {
		t.Errorf("the committed entry is %+v", e)
	}
}

func TestRequireStagedFailsWithAReason(t *testing.T) {
	o := newOutlet(t, outbox.LatestOptions[string]{}, published)
	o.stage(t, "a", "b")
	got := failure(t, func(t testing.TB) { outboxtest.RequireStaged(t, o.latest, nil, "k") })
	if !strings.Contains(got, `nothing is staged and committed for key "k"`) || !strings.Contains(got, `"a", "b"`) {
		t.Errorf("without a transaction, the failure is %q", got)
	}
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	got = failure(t, func(t testing.TB) { outboxtest.RequireStaged(t, o.latest, tx, "k") })
	if !strings.Contains(got, `nothing is staged for key "k" as this transaction sees it`) {
		t.Errorf("in a transaction, the failure is %q", got)
	}
	tx.Rollback()
	got = failure(t, func(t testing.TB) { outboxtest.RequireStaged(t, o.latest, tx, "k") })
	if !strings.Contains(got, outbox.ErrTx.Error()) {
		t.Errorf("in a finished transaction, the failure is %q", got)
	}
}

func TestDrainPublishesWhatIsDue(t *testing.T) {
	o := newOutlet(t, outbox.LatestOptions[string]{}, published)
	before := o.clock.Now()
	if got := outboxtest.Drain(t, o.relay, o.clock); got != (outbox.Pass{}) {
		t.Errorf("with nothing staged, Drain returned %+v", got)
	}
	o.stage(t, "a", "b", "c")
	if got, want := outboxtest.Drain(t, o.relay, nil), (outbox.Pass{Claimed: 3, Published: 3}); got != want {
		t.Errorf("Drain returned %+v, want %+v", got, want)
	}
	if !o.clock.Now().Equal(before) {
		t.Errorf("Drain moved the clock for nothing")
	}
}

func TestDrainMovesTheClockOverDelays(t *testing.T) {
	fails := map[string]int{"a": 3, "b": 12}
	calls := map[string]int{}
	o := newOutlet(t, outbox.LatestOptions[string]{BatchDelay: 200 * 24 * time.Hour}, func(_ context.Context, batch []*outbox.Entry[string]) error {
		for _, e := range batch {
			if calls[e.Key]++; calls[e.Key] <= fails[e.Key] {
				e.Retry(0)
			}
		}
		return nil
	})
	o.stage(t, "a", "b", "c")
	got := outboxtest.Drain(t, o.relay, o.clock)
	if want := (outbox.Pass{Claimed: 18, Published: 3, Retried: 15}); got != want {
		t.Errorf("Drain returned %+v, want %+v", got, want)
	}
	if want := map[string]int{"a": 4, "b": 13, "c": 1}; !reflect.DeepEqual(calls, want) {
		t.Errorf("calls are %v, want %v", calls, want)
	}
}

func TestDrainMovesTheClockOverOutages(t *testing.T) {
	calls := 0
	o := newOutlet(t, outbox.LatestOptions[string]{}, func(context.Context, []*outbox.Entry[string]) error {
		if calls++; calls <= 5 {
			return outbox.Unavailable(errors.New("503"))
		}
		return nil
	})
	o.stage(t, "a", "b", "c")
	if got := outboxtest.Drain(t, o.relay, o.clock); got.Published != 3 {
		t.Errorf("Drain returned %+v, want 3 published", got)
	}
}

func TestDrainFailsWhereNothingGetsThrough(t *testing.T) {
	o := newOutlet(t, outbox.LatestOptions[string]{}, func(context.Context, []*outbox.Entry[string]) error {
		return errors.New("no such table")
	})
	o.stage(t, "a", "b")
	got := failure(t, func(t testing.TB) { outboxtest.Drain(t, o.relay, nil) })
	if !strings.Contains(got, "without a clock") || !strings.Contains(got, "2 due later") || !strings.Contains(got, "no such table") {
		t.Errorf("without a clock, the failure is %q", got)
	}
	got = failure(t, func(t testing.TB) { outboxtest.Drain(t, o.relay, o.clock) })
	if !strings.Contains(got, "50 passes published nothing") || !strings.Contains(got, "no such table") {
		t.Errorf("with a clock, the failure is %q", got)
	}
}

func TestDrainFailsWhereWorkNeverEnds(t *testing.T) {
	var o outlet
	o = newOutlet(t, outbox.LatestOptions[string]{BatchDelay: time.Hour}, func(ctx context.Context, batch []*outbox.Entry[string]) error {
		o.stage(t, batch[0].Key)
		return nil
	})
	o.stage(t, "k")
	got := failure(t, func(t testing.TB) { outboxtest.Drain(t, o.relay, o.clock) })
	if !strings.Contains(got, "no end after 2000 passes: channel") {
		t.Errorf("the failure is %q", got)
	}
}
