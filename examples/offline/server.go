package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
)

// A server takes readings, each id's once, or is out of reach.
type server struct {
	*httptest.Server
	mu    sync.Mutex
	down  bool
	taken []string
	known map[string]bool
	all   chan struct{} // closed once there are as many as wanted
}

func newServer(wanted int) *server {
	s := &server{down: true, known: map[string]bool{}, all: make(chan struct{})}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.down {
			http.Error(w, "down", http.StatusServiceUnavailable)
			return
		}
		if id := r.URL.Path[1:]; !s.known[id] {
			s.known[id] = true
			s.taken = append(s.taken, id)
			fmt.Println("server has taken", id)
			if len(s.taken) == wanted {
				close(s.all)
			}
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	return s
}

func (s *server) up() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = false
}
