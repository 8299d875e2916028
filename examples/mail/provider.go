package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
)

// A provider stands for a provider of mail. It takes a mail as often as it is
// given it, and loses the answer about Ben's.
type provider struct {
	*httptest.Server
	mu    sync.Mutex
	mails map[string]int // how often each went out
}

func newProvider() *provider {
	p := &provider{mails: map[string]int{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /mails/{id}", p.take)
	mux.HandleFunc("GET /mails/{id}", p.tell)
	p.Server = httptest.NewServer(mux)
	return p
}

// sent returns how many mails went out, counted as often as they did.
func (p *provider) sent() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, times := range p.mails {
		n += times
	}
	return n
}

func (p *provider) take(w http.ResponseWriter, r *http.Request) {
	var m Mail
	if err := json.NewDecoder(r.Body).Decode(&m); err != nil || !strings.Contains(m.To, "@") {
		http.Error(w, "no such address", http.StatusUnprocessableEntity)
		return
	}
	id := r.PathValue("id")
	p.mu.Lock()
	p.mails[id]++
	p.mu.Unlock()
	if strings.HasPrefix(m.To, "ben@") {
		panic(http.ErrAbortHandler) // hangs up
	}
	w.Header().Set("Location", "provider/"+id)
	w.WriteHeader(http.StatusAccepted)
}

func (p *provider) tell(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mails[id] == 0 {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Location", "provider/"+id)
}
