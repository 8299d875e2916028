package outboxtest_test

import (
	"sync"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

func TestClockMovesOnlyWhenTold(t *testing.T) {
	start := time.Date(2031, 2, 3, 4, 5, 6, 7_000_999, time.FixedZone("", 3600))
	c := outboxtest.NewClock(start)
	want := time.Date(2031, 2, 3, 3, 5, 6, 7_000_000, time.UTC)
	if got := c.Now(); got != want {
		t.Errorf("Now is %v, want %v", got, want)
	}
	if got := c.Advance(time.Minute + time.Nanosecond); got != want.Add(time.Minute) || got != c.Now() {
		t.Errorf("after a minute, Now is %v", got)
	}
	if got := c.Advance(-time.Hour); got != want.Add(-59*time.Minute) {
		t.Errorf("set back by an hour, Now is %v", got)
	}
	if outboxtest.NewClock(time.Time{}).Now().UnixMicro() <= 0 {
		t.Errorf("the default start is not after 1970")
	}
}

func TestClockIsSafeForConcurrentUse(t *testing.T) {
	c := outboxtest.NewClock(time.Time{})
	start := c.Now()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				c.Advance(time.Second)
				_ = c.Now()
			}
		})
	}
	wg.Wait()
	if got := c.Now().Sub(start); got != 800*time.Second {
		t.Errorf("the clock moved by %v, want %v", got, 800*time.Second)
	}
}

func TestExampleOfDrainRuns(t *testing.T) { testRenaming(t) }
