package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// relaySpec is what a relay process reads from its first line of input: not
// from its arguments, which anybody on the machine can see.
type relaySpec struct {
	DSN    string        `json:"dsn"`
	Schema string        `json:"schema"`
	Prefix string        `json:"prefix"`
	Index  string        `json:"index"`  // URL
	Mailer string        `json:"mailer"` // URL
	Lease  time.Duration `json:"lease"`
}

// relayEvent is a line of a relay process's output.
type relayEvent struct {
	Kind  outbox.EventKind `json:"kind"`
	Rows  int              `json:"rows"`
	Delay time.Duration    `json:"delay"`
	Error string           `json:"error"`
}

// relayCommand is the demo's relay process. It ends when its input does, so
// that it never outlives the demo, however that ends.
func (a *app) relayCommand() *cli.Command {
	return &cli.Command{
		Name:   "demo-relay",
		Hidden: true,
		Action: func(ctx context.Context, _ *cli.Command) error {
			// Ctrl-C goes to all processes of a terminal: the demo ends this one.
			signal.Ignore(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
			return runRelay(context.WithoutCancel(ctx), a.stdin, a.stdout, a.stderr)
		},
	}
}

func runRelay(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) error {
	in := bufio.NewReader(stdin)
	line, err := in.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read what to relay: %w", err)
	}
	var spec relaySpec
	if err := json.Unmarshal(line, &spec); err != nil {
		return fmt.Errorf("read what to relay: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, in)
		stop()
	}()
	t, err := parseDSN(spec.DSN)
	if err != nil {
		return err
	}
	if t, err = t.in(spec.Schema, spec.Prefix); err != nil {
		return err
	}
	s, err := t.connect(ctx, toOperate)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	defer s.db.Close()
	return spec.relay(ctx, s, stdout, stderr)
}

// relay is all that an application needs to run a relay.
func (spec relaySpec) relay(ctx context.Context, s *session, stdout, stderr io.Writer) error {
	orders, mails, err := openChannels(s)
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(
		outbox.RelayOptions{
			PollInterval:    50 * time.Millisecond, // the shop is another process, so nothing hints
			ShutdownTimeout: 2 * time.Second,
			Logger:          slog.New(slog.NewTextHandler(stderr, nil)),
			Observe:         tell(stdout),
		},
		orders.Publisher(spec.publish, outbox.PublishOptions{
			Lease: spec.Lease, Backoff: demoBackoff,
		}),
		mails.Sender(spec.send, outbox.SendOptions{
			Lease: spec.Lease, Backoff: demoBackoff,
			OnUnknown: outbox.Park, Probe: spec.ask, // a mail is rather not sent than sent twice, and the mailer can be asked
		}),
	)
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func demoBackoff(attempt int) time.Duration {
	return min(time.Duration(attempt)*200*time.Millisecond, 2*time.Second)
}

// publish sends a batch to the index.
func (spec relaySpec) publish(ctx context.Context, batch []*outbox.Entry[order]) error {
	postings := make([]posting, len(batch))
	for i, e := range batch {
		postings[i] = posting{Key: e.Key, Version: e.Version, Deleted: e.Deleted, Order: e.Value}
	}
	body, err := json.Marshal(postings)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, spec.Index, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("call the index: %w", err)
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusServiceUnavailable:
		return outbox.Unavailable(errors.New("the index answers 503"))
	default:
		return fmt.Errorf("the index answers %d", response.StatusCode)
	}
	var answers []answer
	if err := json.NewDecoder(response.Body).Decode(&answers); err != nil {
		return fmt.Errorf("read the index's answer: %w", err)
	}
	if len(answers) != len(batch) {
		return fmt.Errorf("the index answers with %d results to %d entries", len(answers), len(batch))
	}
	for i, a := range answers {
		if !a.OK {
			batch[i].Fail(errors.New(a.Error))
		}
	}
	return nil
}

// tell returns an Observe that writes what the demo's story tells of.
func tell(w io.Writer) func(outbox.Event) {
	var mu sync.Mutex
	e := json.NewEncoder(w)
	return func(ev outbox.Event) {
		switch ev.Kind {
		case outbox.EventLook, outbox.EventClaim, outbox.EventPublish, outbox.EventSettle, outbox.EventRetry, outbox.EventRelease:
			return // many, and counted at the index
		}
		line := relayEvent{Kind: ev.Kind, Rows: ev.Rows, Delay: ev.Delay}
		if ev.Err != nil {
			line.Error = ev.Err.Error()
		}
		mu.Lock()
		defer mu.Unlock()
		_ = e.Encode(line) // nobody reads it any more: this process is to end
	}
}
