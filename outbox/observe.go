package outbox

import (
	"runtime/debug"
	"time"
)

// EventKind names a step of a relay.
type EventKind string

const (
	EventLook     EventKind = "look"     // asked the store when to claim; Rows: channels asked about
	EventClaim    EventKind = "claim"    // claimed Rows entries, none included
	EventPublish  EventKind = "publish"  // the publish or send function was called with Rows entries or messages; Err: why the call failed (entries that it failed itself are in EventRetry)
	EventSettle   EventKind = "settle"   // Rows entries were acknowledged, or messages sent
	EventRetry    EventKind = "retry"    // Rows entries are to be tried again, the first in Delay
	EventRelease  EventKind = "release"  // Rows entries were given back, their attempt not counted
	EventUnread   EventKind = "unread"   // Rows entries cannot be decoded
	EventDead     EventKind = "dead"     // Rows messages have ended: refused for good, or out of attempts
	EventUnknown  EventKind = "unknown"  // Rows messages have ended: nobody knows whether they were sent
	EventProbe    EventKind = "probe"    // the Probe was asked about a message; Err: why it gave no answer
	EventPurge    EventKind = "purge"    // Rows sent messages were deleted, their Retention being over
	EventLost     EventKind = "lost"     // the leases of Rows entries were lost
	EventBusy     EventKind = "busy"     // Rows entries are locked by a transaction; their settlement is tried again
	EventLeft     EventKind = "left"     // Rows entries were not settled: they will be published again
	EventHung     EventKind = "hung"     // a publish function ignores its cancelled context
	EventReturned EventKind = "returned" // and has returned at last
	EventOutage   EventKind = "outage"   // the destination is down: the channel pauses in all relays
	EventResume   EventKind = "resume"   // the destination answers again
	EventSlow     EventKind = "slow"     // batches keep failing: this relay pauses the channel for Delay
	EventTrouble  EventKind = "trouble"  // a call to the store failed
	EventRecover  EventKind = "recover"  // calls to the store work again
	EventStop     EventKind = "stop"     // Run has ended; Rows: left behind
)

// Event is one step of a relay, for metrics. It never holds a payload.
type Event struct {
	Kind     EventKind
	Channel  Channel // zero where the step concerns no single one
	Rows     int
	Duration time.Duration // of EventLook, EventClaim, EventPublish, EventSettle, EventProbe and EventPurge
	Delay    time.Duration // see the kinds
	Err      error
}

// observe tells the user's function. It may be called by many goroutines.
func (r *Relay) observe(e Event) {
	if r.o.Observe == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil {
			r.observePanic.Do(func() {
				r.log.Error("outbox: Observe panicked; further panics of it are not logged", "panic", v, "stack", string(debug.Stack()))
			})
		}
	}()
	r.o.Observe(e)
}
