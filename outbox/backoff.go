package outbox

import (
	"math/rand/v2"
	"time"
)

const (
	backoffBase = time.Second
	backoffCap  = 5 * time.Minute

	minUserBackoff = time.Millisecond
	maxUserBackoff = 24 * time.Hour
	maxDelay       = 365 * 24 * time.Hour // of Retry, RetryAfter and Defer
)

// backoffFunc tells how long to wait after the attempt-th failure.
type backoffFunc func(attempt int) time.Duration

// defaultBackoff doubles from one second, is jittered down by up to a half,
// and never exceeds the cap: the jitter comes last and only shortens.
func defaultBackoff(attempt int) time.Duration {
	return jitter(exponential(backoffBase, backoffCap, attempt))
}

// slowestBackoff is for what trying again will hardly help.
func slowestBackoff() time.Duration { return jitter(backoffCap) }

// exponential is base doubled attempt-1 times, at most limit. It doubles step
// by step, so that no attempt number overflows.
func exponential(base, limit time.Duration, attempt int) time.Duration {
	d := base
	for n := 1; n < attempt && d < limit; n++ {
		if d > limit/2 {
			return limit
		}
		d *= 2
	}
	return min(d, limit)
}

// jitter returns a random duration in (d/2, d]; d is at least 1 ns.
func jitter(d time.Duration) time.Duration {
	return d - rand.N(max(d/2, 1))
}

// bounded makes a user's Backoff safe: its result is bounded, and a panic of
// its own is answered by the default.
func bounded(user func(int) time.Duration) backoffFunc {
	if user == nil {
		return defaultBackoff
	}
	return func(attempt int) (d time.Duration) {
		defer func() {
			if recover() != nil {
				d = defaultBackoff(attempt)
			}
		}()
		return min(max(user(max(attempt, 1)), minUserBackoff), maxUserBackoff)
	}
}
