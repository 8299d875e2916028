package outbox

import "sync"

// A Hinter is the part of a store that [RelayStore].Hints asks for: it knows
// who listens, and tells them. The zero value is ready; it is safe for
// concurrent use.
type Hinter struct {
	mu        sync.Mutex
	listeners map[int]func(Hint) // by the order in which they came
	next      int
}

// Listen calls f for each hint, from now until stop is called; f must not
// block.
func (h *Hinter) Listen(f func(Hint)) (stop func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.listeners == nil {
		h.listeners = make(map[int]func(Hint))
	}
	n := h.next
	h.next++
	h.listeners[n] = f
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.listeners, n)
	}
}

// Tell passes a hint on to all who listen.
func (h *Hinter) Tell(x Hint) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.listeners {
		f(x)
	}
}

// TellPut tells what [JournalStore].PutRows has put, and when the first of it
// is due; nothing where all existed. What was begun is its holder's to send.
func (h *Hinter) TellPut(channel string, rows []PutRow, answers []PutAnswer) {
	x := Hint{Channel: Channel{System: SystemJournal, Name: channel}, Wait: -1}
	for i, a := range answers {
		if a.Created && a.Row.Token == 0 && (x.Wait < 0 || rows[i].Delay < x.Wait) {
			x.Version, x.Wait = a.Row.Version, rows[i].Delay
		}
	}
	if x.Wait >= 0 {
		h.Tell(x)
	}
}
