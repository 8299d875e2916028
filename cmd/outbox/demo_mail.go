package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	mailsChannel = "mails"
	busyPart     = 0.02                   // of mails: refused for now
	busyFor      = 100 * time.Millisecond // when to come again
	diesWithin   = 10 * time.Second
)

// A mail tells a customer of a change of an order. Its message's key is order
// and revision, its group the order: mails of one order arrive in order.
type mail struct {
	Order    string `json:"order"`
	Revision int64  `json:"revision"`
	Text     string `json:"text"`
}

func (m mail) key() string { return fmt.Sprintf("%s/%d", m.Order, m.Revision) }

// message makes what the shop puts into its journal.
func (m mail) message() (outbox.Message, error) {
	payload, err := json.Marshal(m)
	return outbox.Message{Key: m.key(), Group: m.Order, Payload: payload}, err
}

// A mailer is a provider that sends mails, and that can be asked whether it
// has taken one. It takes every mail that it is given, also one that it has
// taken before: not to send twice is the relay's affair.
type mailer struct {
	story  *story
	url    string
	server *http.Server

	mu       sync.Mutex
	rng      *mrand.Rand
	bouncing string // an order whose customer has no mailbox
	cut      bool   // hang up on the next mail, once taken
	log      mailLog
}

// mailLog is what came, as the mailer saw it.
type mailLog struct {
	refs     map[string]string // what it calls each mail, by the message's key
	newest   map[string]int64  // revision by order
	busy     string            // the first mail that was refused for now
	cut      string            // the mail whose caller got no answer
	refused  int               // for now: 429
	bounced  int               // for good: 422
	asked    int               // whether it has taken a mail
	doubled  int
	problems []string
}

func openMailer(st *story, seed uint64, bouncing string) (*mailer, error) {
	m := &mailer{
		story: st, rng: mrand.New(mrand.NewPCG(seed, 1<<33)), bouncing: bouncing,
		log: mailLog{refs: map[string]string{}, newest: map[string]int64{}},
	}
	var err error
	m.url, m.server, err = serve(map[string]http.HandlerFunc{"POST": m.take, "GET": m.ask})
	return m, err
}

// serve serves methods on loopback, under a path that only those know who were
// told.
func serve(methods map[string]http.HandlerFunc) (url string, _ *http.Server, err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("listen on loopback: %w", err)
	}
	path := "/" + rand.Text()
	mux := http.NewServeMux()
	for method, handle := range methods {
		mux.HandleFunc(method+" "+path, handle)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go server.Serve(listener) // until it is closed
	return "http://" + listener.Addr().String() + path, server, nil
}

// taken returns how many different mails it has taken.
func (m *mailer) taken() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.log.refs)
}

// take is called with a mail that is to be sent.
func (m *mailer) take(w http.ResponseWriter, r *http.Request) {
	key := r.URL.Query().Get("id")
	var mail mail
	if err := json.NewDecoder(r.Body).Decode(&mail); err != nil || mail.key() != key {
		http.Error(w, "the body is not a mail of this id", http.StatusBadRequest)
		return
	}
	status, ref, hangUp := m.decide(key, mail)
	if hangUp {
		panic(http.ErrAbortHandler)
	}
	if status != http.StatusOK {
		http.Error(w, http.StatusText(status), status)
		return
	}
	answerRef(w, ref)
}

func answerRef(w http.ResponseWriter, ref string) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(mailRef{ref}) // an answer that does not arrive is the relay's affair
}

// mailRef is the mailer's answer.
type mailRef struct {
	Ref string `json:"ref"`
}

func (m *mailer) decide(key string, mail mail) (status int, ref string, hangUp bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := &m.log
	switch {
	case mail.Order == m.bouncing:
		l.bounced++
		return http.StatusUnprocessableEntity, "", false
	case l.busy == "":
		l.busy = key
		m.story.say("mail", "too busy for mail %s (429): a failure that is known, so it is tried again", key)
		fallthrough
	case m.rng.Float64() < busyPart:
		l.refused++
		return http.StatusTooManyRequests, "", false
	}
	ref = l.enter(key, mail)
	if key == l.busy {
		m.story.say("mail", "took mail %s this time", key)
	}
	if m.cut {
		m.cut, l.cut = false, key
		m.story.say("mail", "took mail %s and hung up before it had answered: the relay cannot know", key)
		return 0, "", true
	}
	return http.StatusOK, ref, false
}

// enter notes a mail, and what is wrong with it.
func (l *mailLog) enter(key string, mail mail) (ref string) {
	if _, before := l.refs[key]; before {
		l.doubled++
		l.problems = append(l.problems, fmt.Sprintf("mail %s: sent twice", key))
		return l.refs[key]
	}
	if newest := l.newest[mail.Order]; mail.Revision != newest+1 {
		l.problems = append(l.problems, fmt.Sprintf("mail %s: out of order, it came after revision %d", key, newest))
	}
	l.newest[mail.Order] = max(l.newest[mail.Order], mail.Revision)
	l.refs[key] = fmt.Sprintf("mail-%d", len(l.refs)+1)
	return l.refs[key]
}

// ask is called to find out whether a mail has been taken.
func (m *mailer) ask(w http.ResponseWriter, r *http.Request) {
	key := r.URL.Query().Get("id")
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log.asked++
	ref, known := m.log.refs[key]
	if key == m.log.cut {
		m.log.cut = ""
		m.story.say("mail", "asked by the relay about mail %s: it was taken, so it is not sent again", key)
	}
	if !known {
		http.Error(w, "no such mail", http.StatusNotFound)
		return
	}
	answerRef(w, ref)
}

// bounced is the mail to the customer without a mailbox.
func (d *demo) bounced() string { return mail{Order: orderID(0), Revision: 1}.key() }

// mailDies waits until the mail to the customer without a mailbox is dead.
func (d *demo) mailDies(ctx context.Context) error {
	for deadline := time.Now().Add(diesWithin); ; {
		dead, err := d.isDead(ctx)
		switch {
		case err != nil:
			return err
		case dead:
			d.story.say("mail", "no mailbox for mail %s (422): it is dead, and what follows it about that order waits", d.bounced())
			return nil
		case time.Now().After(deadline):
			d.story.say("demo", "mail %s is not dead after %s", d.bounced(), diesWithin)
			return nil
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

func (d *demo) isDead(ctx context.Context) (bool, error) {
	r, err := d.shop.mails.Get(ctx, d.bounced())
	if errors.Is(err, outbox.ErrNotFound) {
		return false, nil
	}
	return r.State == outbox.StateDead, err
}

// mailRetried mends what kept the dead mail from being sent, and retries it by
// hand. Where the mail is not dead yet, or the database is busy, it does
// nothing: it is called again.
func (d *demo) mailRetried(ctx context.Context) error {
	dead, err := d.isDead(ctx)
	if err != nil || !dead || d.retried > 0 {
		return err
	}
	d.mailer.open()
	n, err := d.shop.mails.Retry(ctx, outbox.Filter{Key: d.bounced()})
	switch {
	case d.site.store.Retryable(err):
		return nil
	case err != nil:
		return fmt.Errorf("retry mail %s by hand: %w", d.bounced(), err)
	}
	d.retried += int(n)
	d.story.say("person", "has the mailbox opened and retries mail %s by hand: it goes out, and what waited behind it", d.bounced())
	return nil
}

// open makes a mailbox for the customer who has none.
func (m *mailer) open() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bouncing = ""
}

// mailUnanswered has the mailer hang up on the next mail.
func (d *demo) mailUnanswered(context.Context) error {
	d.mailer.mu.Lock()
	defer d.mailer.mu.Unlock()
	d.mailer.cut = true
	return nil
}
