package outboxtest_test

import (
	"context"
	"database/sql"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

var errTest = errors.New("test")

func newFaulty(t *testing.T) (*outboxtest.Faulty, *sql.DB) {
	store, db := open(false, nil)(t)
	return outboxtest.NewFaulty(store), db
}

// steps runs every step of a store once and returns those that failed.
func steps(t *testing.T, f *outboxtest.Faulty, db *sql.DB) map[outboxtest.Step]error {
	t.Helper()
	ctx, ch := t.Context(), outbox.Channel{System: outbox.SystemLatest, Name: "c"}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	errs := map[outboxtest.Step]error{}
	note := func(s outboxtest.Step, err error) {
		if err != nil {
			errs[s] = err
		}
	}
	note(outboxtest.StepCheck, f.Check(ctx))
	_, err = f.StageRows(ctx, outbox.SQL(tx), "c", []outbox.StageRow{{Key: "k"}}, 0)
	note(outboxtest.StepStage, err)
	_, err = f.PendingRow(ctx, outbox.SQL(tx), "c", "k")
	note(outboxtest.StepPending, err)
	_, err = f.ListRows(ctx, "c", "", 1)
	note(outboxtest.StepList, err)
	_, err = f.ClaimRows(ctx, outbox.Claim{Channel: "c", Limit: 1, Lease: time.Minute})
	note(outboxtest.StepClaim, err)
	_, err = f.Extend(ctx, ch, nil, time.Minute)
	note(outboxtest.StepExtend, err)
	_, err = f.Settle(ctx, ch, nil)
	note(outboxtest.StepSettle, err)
	_, err = f.Look(ctx, []outbox.Channel{ch})
	note(outboxtest.StepLook, err)
	note(outboxtest.StepOutage, f.Outage(ctx, ch, false, ""))
	_, err = f.Stats(ctx)
	note(outboxtest.StepStats, err)
	if err = f.DiscardRow(ctx, "c", "k", 1); !errors.Is(err, outbox.ErrNotFound) {
		note(outboxtest.StepDiscard, err)
	}
	journalSteps(ctx, f, outbox.SQL(tx), note)
	return errs
}

// journalSteps runs every step of a journal's store once.
func journalSteps(ctx context.Context, f *outboxtest.Faulty, tx outbox.Tx, note func(outboxtest.Step, error)) {
	_, err := f.PutRows(ctx, tx, "c", []outbox.PutRow{{Key: "k"}}, 0)
	note(outboxtest.StepPut, err)
	_, err = f.ClaimMessages(ctx, nil, outbox.Claim{Channel: "c", Limit: 1, Lease: time.Minute})
	note(outboxtest.StepClaimMessages, err)
	if _, err = f.BeginMessage(ctx, tx, "c", "k", time.Minute); !errors.Is(err, outbox.ErrNotFound) {
		note(outboxtest.StepBegin, err)
	}
	_, err = f.SettleMessages(ctx, tx, "c", nil)
	note(outboxtest.StepSettleMessages, err)
	_, err = f.ExtendMessages(ctx, tx, "c", nil, time.Minute)
	note(outboxtest.StepExtendMessages, err)
	_, err = f.ListMessages(ctx, tx, "c", outbox.MessageList{Limit: 1})
	note(outboxtest.StepListMessages, err)
	_, err = f.AmendMessages(ctx, nil, "c", outbox.Amendment{Action: outbox.ActionRetry, Limit: 1})
	note(outboxtest.StepAmend, err)
	_, err = f.PurgeMessages(ctx, "c", outbox.Purge{Limit: 1})
	note(outboxtest.StepPurge, err)
}

func TestFaultyHoldsTheContract(t *testing.T) {
	outboxtest.TestLatest(t, func(t *testing.T) (outbox.LatestStore, *sql.DB) { return newFaulty(t) })
}

func TestFaultyHoldsTheContractOfTheJournal(t *testing.T) {
	outboxtest.TestJournal(t, func(t *testing.T) (outbox.JournalStore, *sql.DB) { return newFaulty(t) })
}

// latestOnly and journalOnly are stores of one system.
type latestOnly struct{ outbox.LatestStore }
type journalOnly struct{ outbox.JournalStore }

func TestFaultyStoreOfOneSystemRefusesTheOther(t *testing.T) {
	store, _ := open(false, nil)(t)
	_, err := outboxtest.NewFaulty(latestOnly{store}).ListMessages(t.Context(), nil, "c", outbox.MessageList{Limit: 1})
	if !errors.Is(err, outbox.ErrInvalid) {
		t.Errorf("a step of the journal's: the error is %v", err)
	}
	_, err = outboxtest.NewFaulty(journalOnly{store.(*memory)}).ListRows(t.Context(), "c", "", 1)
	if !errors.Is(err, outbox.ErrInvalid) {
		t.Errorf("a step of the latest values': the error is %v", err)
	}
}

func TestEveryStepCanFail(t *testing.T) {
	all := []outboxtest.Step{
		outboxtest.StepCheck, outboxtest.StepLook, outboxtest.StepSettle, outboxtest.StepExtend, outboxtest.StepOutage,
		outboxtest.StepStats, outboxtest.StepStage, outboxtest.StepPending, outboxtest.StepList, outboxtest.StepClaim,
		outboxtest.StepPut, outboxtest.StepClaimMessages, outboxtest.StepBegin, outboxtest.StepSettleMessages,
		outboxtest.StepExtendMessages, outboxtest.StepListMessages, outboxtest.StepAmend, outboxtest.StepPurge,
	}
	type both interface {
		outbox.LatestStore
		outbox.JournalStore
	}
	if n := reflect.TypeFor[both]().NumMethod(); n != len(all)+2 { // and DiscardRow, and Hints
		t.Fatalf("a store has %d methods: is there a step for each?", n)
	}
	for _, step := range all {
		for _, when := range []outboxtest.When{outboxtest.Before, outboxtest.After} {
			f, db := newFaulty(t)
			f.Inject(outboxtest.Fault{Step: step, When: when, Err: errTest})
			if got, want := steps(t, f, db), map[outboxtest.Step]error{step: errTest}; step != outboxtest.StepStage && !reflect.DeepEqual(got, want) {
				t.Errorf("%s, when %d: failures are %v, want %v", step, when, got, want)
			} else if !errors.Is(got[step], errTest) {
				t.Errorf("%s, when %d: the error is %v", step, when, got[step])
			}
			if f.Calls(step) != 1 || f.Calls(outboxtest.AnyStep) != len(all)+1 {
				t.Errorf("%s: calls counted are %d, of all steps %d", step, f.Calls(step), f.Calls(outboxtest.AnyStep))
			}
		}
	}
}

// stageAndDiscard stages and commits a key and discards it through f.
func stageAndDiscard(t *testing.T, f *outboxtest.Faulty, db *sql.DB) (discarded error) {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	vs, err := f.StageRows(t.Context(), outbox.SQL(tx), "c", []outbox.StageRow{{Key: "k"}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	return f.DiscardRow(t.Context(), "c", "k", vs[0])
}

func TestFaultBeforeHasNoEffectAndAfterHasOne(t *testing.T) {
	for _, c := range []struct {
		when outboxtest.When
		want error
	}{{0, nil}, {outboxtest.Before, nil}, {outboxtest.After, outbox.ErrNotFound}} {
		f, db := newFaulty(t)
		f.Inject(outboxtest.Fault{Step: outboxtest.StepDiscard, When: c.when})
		if err := stageAndDiscard(t, f, db); !errors.Is(err, outboxtest.ErrFault) {
			t.Errorf("when %d: the error is %v, want the fault", c.when, err)
		}
		if _, err := f.PendingRow(t.Context(), nil, "c", "k"); !errors.Is(err, c.want) {
			t.Errorf("when %d: reading the row afterwards gives %v, want %v", c.when, err, c.want)
		}
	}
}

// checks calls Check n times and returns which calls failed.
func checks(t *testing.T, f *outboxtest.Faulty, n int) (failed []int) {
	for i := range n {
		if f.Check(t.Context()) != nil {
			failed = append(failed, i)
		}
	}
	return failed
}

func TestFaultsCountCalls(t *testing.T) {
	for name, c := range map[string]struct {
		faults []outboxtest.Fault
		want   []int
	}{
		"none":     {nil, nil},
		"first":    {[]outboxtest.Fault{{}}, []int{0}},
		"third":    {[]outboxtest.Fault{{Skip: 2}}, []int{2}},
		"a run":    {[]outboxtest.Fault{{Step: outboxtest.StepCheck, Skip: 1, Times: 3}}, []int{1, 2, 3}},
		"all":      {[]outboxtest.Fault{{Times: -1}}, []int{0, 1, 2, 3, 4, 5}},
		"another":  {[]outboxtest.Fault{{Step: outboxtest.StepLook, Times: -1}}, nil},
		"together": {[]outboxtest.Fault{{Skip: 1}, {Skip: 1}, {Skip: 4}}, []int{1, 2, 4}},
	} {
		f, _ := newFaulty(t)
		f.Inject(c.faults...)
		if got := checks(t, f, 6); !slices.Equal(got, c.want) {
			t.Errorf("%s: failed calls are %v, want %v", name, got, c.want)
		}
		f.Heal()
		if got := checks(t, f, 3); got != nil {
			t.Errorf("%s: after Heal, failed calls are %v", name, got)
		}
	}
}

func TestRandomFaultsFollowTheirSeed(t *testing.T) {
	run := func(seed uint64) []int {
		f, _ := newFaulty(t)
		f.Random(seed, 0.3, nil)
		return checks(t, f, 1000)
	}
	first, again, other := run(1), run(1), run(2)
	if !slices.Equal(first, again) {
		t.Errorf("the same seed gave other faults")
	}
	if slices.Equal(first, other) {
		t.Errorf("another seed gave the same faults")
	}
	if n := len(first); n < 250 || n > 350 {
		t.Errorf("of 1000 calls %d failed, want about 300", n)
	}
	f, _ := newFaulty(t)
	if f.Random(1, 1, errTest); len(checks(t, f, 100)) != 100 {
		t.Errorf("with a probability of 1 some calls worked")
	}
}

func TestRandomFaultsComeOnBothSides(t *testing.T) {
	f, db := newFaulty(t)
	before, after := 0, 0
	for i := range uint64(200) {
		f.Heal()
		f.Inject(outboxtest.Fault{Step: outboxtest.StepDiscard, Times: -1})
		if err := stageAndDiscard(t, f, db); !errors.Is(err, outboxtest.ErrFault) {
			t.Fatal(err)
		}
		r, err := f.PendingRow(t.Context(), nil, "c", "k")
		if err != nil {
			t.Fatal(err)
		}
		f.Heal()
		f.Random(i, 1, errTest)
		err = f.DiscardRow(t.Context(), "c", "k", r.Version)
		if f.Heal(); !errors.Is(err, errTest) {
			t.Fatalf("with a probability of 1 the error is %v", err)
		}
		if _, err = f.PendingRow(t.Context(), nil, "c", "k"); err == nil {
			before++
		} else {
			after++
		}
	}
	if before < 70 || after < 70 {
		t.Errorf("of 200 faults %d came before the effect and %d after, want about half each", before, after)
	}
}

func TestHookSeesBothSidesOfAStep(t *testing.T) {
	f, _ := newFaulty(t)
	type call struct {
		step outboxtest.Step
		when outboxtest.When
	}
	var seen []call
	f.Intercept(func(_ context.Context, step outboxtest.Step, when outboxtest.When) error {
		if seen = append(seen, call{step, when}); len(seen) == 4 {
			return errTest
		}
		return nil
	})
	if err := f.Check(t.Context()); err != nil {
		t.Errorf("the first call failed: %v", err)
	}
	if _, err := f.Stats(t.Context()); !errors.Is(err, errTest) {
		t.Errorf("the second call's error is %v, want the hook's", err)
	}
	want := []call{
		{outboxtest.StepCheck, outboxtest.Before}, {outboxtest.StepCheck, outboxtest.After},
		{outboxtest.StepStats, outboxtest.Before}, {outboxtest.StepStats, outboxtest.After},
	}
	if !slices.Equal(seen, want) {
		t.Errorf("the hook saw %v, want %v", seen, want)
	}
}
