package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
)

// A gateway stands for one that sends text messages, each id's once.
type gateway struct {
	*httptest.Server
	mu   sync.Mutex
	sent map[string]string
}

func newGateway() *gateway {
	g := &gateway{sent: map[string]string{}}
	g.Server = httptest.NewServer(http.HandlerFunc(g.take))
	return g
}

func (g *gateway) take(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, "the text broke off", http.StatusBadRequest)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, known := g.sent[r.URL.Path]; !known {
		g.sent[r.URL.Path] = string(text)
	}
	w.WriteHeader(http.StatusNoContent)
}
