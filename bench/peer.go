package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// kind says what a variant is to the comparison.
type kind string

const (
	own   kind = "this library"
	rival kind = "peer"
	keyed kind = "peer with a unique key"
	limit kind = "limit: no outbox, bare SQL"
)

// A peer is one way to hand messages over: this library's, another's, or bare
// SQL. What it cannot do is nil.
type peer struct {
	name     string
	kind     kind
	settings string // those that differ from its defaults
	lacks    string // what it does not do that this library does

	// stage runs one whole transaction: an insert of the application's, and one
	// message, number seq.
	stage func(ctx context.Context, seq int64) error
	// announce is stage with whatever makes a relay look at once. nil: stage is.
	announce func(ctx context.Context, seq int64) error
	// bulk runs one transaction: an insert of the application's, and n messages
	// from number seq.
	bulk func(ctx context.Context, seq int64, n int) error
	// fill leaves n messages waiting, however it does.
	fill func(ctx context.Context, n int) error
	// relay hands waiting messages to h until stop.
	relay func(ctx context.Context, o relayOptions, h handler) (stop func() error, err error)
	// waiting is SQL that counts what has not been handled and acknowledged.
	waiting string
	// tables are what stage, bulk and fill write to, besides app.
	tables []string
	// after resets what TRUNCATE does not; may be empty.
	after string
	// share: of a drain it gets only one row in so many, since it would take
	// minutes otherwise. 0 is 1.
	share int
}

// relayOptions say how to relay.
type relayOptions struct {
	relays int                                // how many, in this process; at least 1
	batch  int                                // rows of one claim; 0: as many as are best
	prompt bool                               // for the least latency rather than the most rows a second
	lazy   bool                               // with the settings that the peer comes with
	poll   time.Duration                      // how often this library asks; 0: as it comes
	count  *counter                           // of its statements; may be nil
	claims func(rows int, took time.Duration) // told of each claim; may be nil, and few peers can
}

// handler is told of one message that a relay hands over: by its number, or by
// its payload where the peer knows only that; then seq is below 0.
type handler func(seq int64, payload []byte)

// message is the payload, about 200 bytes as JSON; to River and backlite it is
// the arguments of a job.
type message struct {
	Seq      int64  `json:"seq"`
	Order    string `json:"order"`
	Customer string `json:"customer"`
	Note     string `json:"note"`
}

func newMessage(seq int64) message {
	return message{seq, "order-01J9ZK4T7Q8YH2M5N6P7R8S9T0", "customer-5d41402abc4b2a76b9719d911017c592",
		"the quick brown fox jumps over the lazy dog, twice a day"}
}

func payload(seq int64) []byte {
	b, err := json.Marshal(newMessage(seq))
	if err != nil {
		panic(err) // integers and ASCII
	}
	return b
}

// payloadSQL is the same text for the value g of a generate_series.
const payloadSQL = `('{"seq":' || g || ',"order":"order-01J9ZK4T7Q8YH2M5N6P7R8S9T0","customer":"customer-5d41402abc4b2a76b9719d911017c592","note":"the quick brown fox jumps over the lazy dog, twice a day"}')`

// seqOf reads the number from a payload, in whichever form the database gives
// JSON back.
func seqOf(p []byte) (int64, error) {
	var m struct{ Seq *int64 }
	if err := json.Unmarshal(p, &m); err != nil {
		return 0, fmt.Errorf("read a payload back: %w", err)
	}
	if m.Seq == nil {
		return 0, errors.New("read a payload back: it has no seq")
	}
	return *m.Seq, nil
}

func keyOf(seq int64) string { return "key-" + strconv.FormatInt(seq, 10) }

// An alarm is a slog.Handler that keeps the first error a peer logs: what a
// peer only logs would else pass for a slow round.
type alarm struct {
	mu    sync.Mutex
	err   error
	muted atomic.Bool // it is being stopped: cancelled contexts are no errors
}

func (a *alarm) logger() *slog.Logger { return slog.New(a) }

func (a *alarm) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelError }

func (a *alarm) Handle(_ context.Context, r slog.Record) error {
	if a.muted.Load() {
		return nil
	}
	text := r.Message
	r.Attrs(func(at slog.Attr) bool {
		text += fmt.Sprintf(" %s=%v", at.Key, at.Value)
		return true
	})
	a.fail(errors.New(text))
	return nil
}

func (a *alarm) WithAttrs([]slog.Attr) slog.Handler { return a }
func (a *alarm) WithGroup(string) slog.Handler      { return a }

func (a *alarm) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err == nil && err != nil && !a.muted.Load() {
		a.err = err
	}
}

// stop mutes the alarm, stops the peer, and returns what either has to say.
func (a *alarm) stop(stop func() error) error {
	a.muted.Store(true)
	err := stop()
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.err, err)
}

// loops runs f in n goroutines, again and again until stop; an f that did
// nothing is run again after a pause.
func loops(n int, pause time.Duration, f func(i int) (rows int, err error)) (stop func() error) {
	var a alarm
	done := make(chan struct{})
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			timer := time.NewTimer(pause)
			defer timer.Stop()
			for {
				select {
				case <-done:
					return
				default:
				}
				rows, err := f(i)
				if err != nil {
					a.fail(err)
					return
				}
				if rows > 0 {
					continue
				}
				timer.Reset(pause)
				select {
				case <-done:
					return
				case <-timer.C:
				}
			}
		})
	}
	return func() error {
		return a.stop(func() error {
			close(done)
			wg.Wait()
			return nil
		})
	}
}
