package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
)

// A receiver stands for somebody else's service. It acts on an Idempotency-Key
// once, and is not well at first.
type receiver struct {
	*httptest.Server
	mu       sync.Mutex
	calls    int
	attempts map[string]int  // by key
	done     map[string]bool // by key
}

func newReceiver() *receiver {
	r := &receiver{attempts: map[string]int{}, done: map[string]bool{}}
	r.Server = httptest.NewServer(http.HandlerFunc(r.take))
	return r
}

func (r *receiver) acted() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.done)
}

func (r *receiver) take(w http.ResponseWriter, request *http.Request) {
	var event struct{ Order string }
	bad := json.NewDecoder(request.Body).Decode(&event)
	key := request.Header.Get("Idempotency-Key")
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls++
	if r.calls == 1 {
		http.Error(w, "still starting", http.StatusServiceUnavailable)
		return
	}
	r.attempts[key]++
	switch first := r.attempts[key] == 1; {
	case bad != nil, event.Order == "malformed":
		http.Error(w, "no such event", http.StatusBadRequest)
		return
	case event.Order == "throttled" && first:
		w.Header().Set("Retry-After", "1")
		http.Error(w, "not so fast", http.StatusTooManyRequests)
		return
	case event.Order == "answer-lost" && first:
		r.done[key] = true
		panic(http.ErrAbortHandler) // hangs up
	}
	r.done[key] = true // nothing new where it was
	w.WriteHeader(http.StatusNoContent)
}
