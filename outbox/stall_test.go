package outbox

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A process that stands still between two sends for longer than its lease (a
// SIGSTOP, a machine that was suspended) sends nothing that others may have.
func TestNothingIsSentOnceTheLeaseHasLapsed(t *testing.T) {
	for name, group := range map[string]string{"one by one": "", "in a run": "g"} {
		t.Run(name, func(t *testing.T) {
			for range 10 {
				synctest.Test(t, func(t *testing.T) {
					g := bareJournalRig(t)
					var taken []Record
					stall := func(e Event) {
						if e.Kind != EventPublish || taken != nil {
							return
						}
						time.Sleep(1500 * time.Millisecond)
						var err error
						taken, err = g.journal.ClaimDue(context.Background(), 100, time.Minute)
						require.NoError(t, err)
						require.NotEmpty(t, taken)
					}
					o := SendOptions{Workers: 1, Lease: time.Second, OnUnknown: Park}
					g.relay = g.newRelay(RelayOptions{Observe: stall}, g.journal.Sender(g.recorded(nil), o))
					g.putGroup(group, numbered("k", 5)...)
					_, err := g.relay.RunOnce(context.Background())
					require.NoError(t, err)
					require.Equal(t, []string{"k000"}, g.sent.keys(), "others have the rest")
				})
			}
		})
	}
}

// So it is with entries, between the claim and the publication.
func TestNothingIsPublishedOnceTheLeaseHasLapsed(t *testing.T) {
	for name, others := range map[string]int{"all taken": 5, "some taken": 2, "none taken": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var g *rig
				stalled := false
				stall := func(e Event) {
					if e.Kind != EventClaim || e.Rows == 0 || stalled {
						return
					}
					stalled = true
					time.Sleep(1500 * time.Millisecond)
					if others > 0 {
						_, err := g.store.ClaimRows(context.Background(), Claim{Channel: "c", Limit: others, Lease: time.Minute, Full: true})
						require.NoError(t, err)
					}
				}
				g = newRig(t, RelayOptions{Observe: stall}, PublishOptions{Lease: time.Second}, nil)
				g.stage(numbered("k", 5)...)
				pass, err := g.relay.RunOnce(context.Background())
				require.NoError(t, err)
				require.Empty(t, g.calls, "after most of the lease nothing is sure")
				require.Equal(t, Pass{Claimed: 5, Released: 5 - others, LeaseLost: others}, pass)
			})
		})
	}
}
