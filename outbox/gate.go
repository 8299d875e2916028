package outbox

import "context"

// maxStatements is how many statements a relay runs at a time, however many
// channels it serves; one more is kept for extending leases, which must not
// queue behind work.
const maxStatements = 4

// A gate keeps a relay to its share of the connection pool.
type gate struct {
	work   chan struct{}
	extend chan struct{}
}

func newGate() gate {
	return gate{work: make(chan struct{}, maxStatements), extend: make(chan struct{}, 1)}
}

// enter waits for a place and returns how to leave it.
func (g gate) enter(ctx context.Context) (leave func(), err error) {
	select {
	case g.work <- struct{}{}:
		return g.leaveWork, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// enterExtend takes the place kept for extending, or any other.
func (g gate) enterExtend(ctx context.Context) (leave func(), err error) {
	select {
	case g.extend <- struct{}{}:
		return g.leaveExtend, nil
	case g.work <- struct{}{}:
		return g.leaveWork, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (g gate) leaveWork()   { <-g.work }
func (g gate) leaveExtend() { <-g.extend }
