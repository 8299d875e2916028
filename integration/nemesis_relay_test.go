//go:build unix

package integration

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// The channels of an ordeal.
const (
	stateChannel  = "state"   // latest
	windowChannel = "windows" // latest, with a BatchDelay
	resendChannel = "resend"  // messages, at least once; a group passes over what is dead
	parkChannel   = "park"    // messages, at most once; a group is blocked by what is unknown
	batchChannel  = "batches" // messages in batches, at least once, deleted when they are sent
)

var errRefused = errors.New("refused")

// A carrier takes what is sent to the destination and returns an answer for each.
type carrier func(ctx context.Context, vs []visit) ([]answer, error)

func windowOptions() outbox.LatestOptions[string] {
	return outbox.LatestOptions[string]{Channel: windowChannel, BatchDelay: 40 * time.Millisecond}
}

func parkOptions() outbox.SendOptions {
	return outbox.SendOptions{
		OnUnknown: outbox.Park, Workers: 4, BatchSize: 10, Lease: ordealLease, AttemptTimeout: ordealLease / 2, Backoff: constant(20 * time.Millisecond),
	}
}

func resendOptions() outbox.SendOptions {
	o := parkOptions()
	o.OnUnknown, o.Order, o.MaxAttempts = outbox.Resend, outbox.Skip, outbox.NoLimit
	return o
}

// attachments are those of every relay of an ordeal.
func attachments(store *sqlstore.Store, t testing.TB, carry carrier) []outbox.Attachment {
	windows, err := outbox.NewLatest(store, windowOptions())
	require.NoError(t, err)
	batches := resendOptions()
	batches.Order, batches.Retention = outbox.Block, outbox.DeleteOnSent
	o := outbox.PublishOptions{BatchSize: 4, Lease: ordealLease, AttemptTimeout: ordealLease / 2, Backoff: constant(20 * time.Millisecond)}
	return []outbox.Attachment{
		latestOn(t, store, stateChannel).Publisher(carry.publisher(stateChannel), o),
		windows.Publisher(carry.publisher(windowChannel), o),
		journalOn(t, store, resendChannel).Sender(carry.sender(), resendOptions()),
		journalOn(t, store, parkChannel).Sender(carry.sender(), parkOptions()),
		journalOn(t, store, batchChannel).BatchSender(carry.batches, batches),
	}
}

func (carry carrier) publisher(channel string) outbox.PublishFunc[string] {
	return func(ctx context.Context, batch []*outbox.Entry[string]) error {
		vs := make([]visit, len(batch))
		for i, e := range batch {
			vs[i] = visit{Channel: channel, Key: e.Key, Number: int64(e.Version), Attempt: e.Attempt, Value: e.Value, Deleted: e.Deleted}
		}
		answers, err := carry(ctx, vs)
		if err != nil {
			return err
		}
		for i, a := range answers {
			if err := a.err(); err != nil && !a.whole() {
				batch[i].Fail(err)
			}
		}
		return endOf(answers)
	}
}

func (carry carrier) sender() outbox.SendFunc {
	return func(ctx context.Context, r *outbox.Record) (string, error) {
		answers, err := carry(ctx, []visit{visitOf(r)})
		if err != nil {
			return "", err
		}
		if err := endOf(answers); err != nil {
			return "", err
		}
		return "ref of " + r.Key, answers[0].err()
	}
}

func (carry carrier) batches(ctx context.Context, batch []*outbox.Delivery) error {
	vs := make([]visit, len(batch))
	for i, d := range batch {
		vs[i] = visitOf(&d.Record)
	}
	answers, err := carry(ctx, vs)
	if err != nil {
		return err
	}
	for i, a := range answers {
		switch err := a.err(); {
		case a.whole(), a == held:
		case err != nil:
			batch[i].Fail(err)
		default:
			batch[i].Sent("ref of " + batch[i].Key)
		}
	}
	return endOf(answers)
}

func visitOf(r *outbox.Record) visit {
	return visit{
		Channel: r.Channel, Key: r.Key, Group: r.Group, Number: r.Seq, Token: r.Lease.Token, Attempt: r.Attempt, Ambiguous: r.Ambiguous,
	}
}

// relayEnv holds the orders of a process that is a relay of an ordeal.
const relayEnv = "OUTBOX_TEST_ORDEAL"

type relayOrder struct {
	Name, Dialect, Driver, DSN string
	URL                        string // of the destination
	Stepped                    bool   // it has a clock of its own
}

// TestConvergenceRelay is a relay of an ordeal where it is told to be one, else
// nothing. Its standard input tells it what befalls it, and ends it.
func TestConvergenceRelay(t *testing.T) {
	text := os.Getenv(relayEnv)
	if text == "" {
		return
	}
	var o relayOrder
	require.NoError(t, json.Unmarshal([]byte(text), &o))
	before := runtime.NumGoroutine()
	err := o.relay(t)
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	if n := runtime.NumGoroutine() - before; n > 0 {
		announce("leaked %d", n)
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
	}
	announce("ended %v", err)
}

func (o relayOrder) relay(t testing.TB) error {
	var clock stepped
	var pages atomic.Int64
	d, so := dialect.Postgres(), sqlstore.Options{}
	if o.Dialect == "sqlite" {
		d = dialect.SQLite()
	}
	if o.Stepped {
		so.Clock = clock.now
	}
	db := openFilling(t, o.Driver, o.DSN, &pages)
	defer db.Close()
	store, err := sqlstore.New(db, d, so)
	require.NoError(t, err)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 50}}
	defer client.CloseIdleConnections()
	relay, err := outbox.NewRelay(outbox.RelayOptions{
		PollInterval: 50 * time.Millisecond, ShutdownTimeout: time.Second, Logger: slog.New(slog.NewTextHandler(announcer{}, nil)),
	}, attachments(store, t, carrierTo(client, o))...)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	told := make(chan struct{})
	go func() {
		defer close(told)
		defer stop()
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			var n int64
			switch what, _, _ := strings.Cut(lines.Text(), " "); what {
			case "clock":
				_, _ = fmt.Sscanf(lines.Text(), "clock %d", &n)
				clock.set(time.Duration(n))
			case "full":
				_, _ = fmt.Sscanf(lines.Text(), "full %d", &n)
				fill(db, &pages, n)
			}
		}
	}()
	announce("ready")
	err = relay.Run(ctx)
	<-told
	return err
}

// carrierTo carries to a destination in another process.
func carrierTo(client *http.Client, o relayOrder) carrier {
	return func(ctx context.Context, vs []visit) (answers []answer, err error) {
		for i := range vs {
			vs[i].Relay = o.Name
		}
		body, err := json.Marshal(vs)
		if err != nil {
			return nil, err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.URL, bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		res, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		defer res.Body.Close()
		return answers, json.NewDecoder(res.Body).Decode(&answers)
	}
}

// announcer announces the lines of a log.
type announcer struct{}

func (announcer) Write(line []byte) (int, error) {
	announce("log %s", bytes.TrimSpace(line))
	return len(line), nil
}

// process is a relay as the ordeal sees it.
type process struct {
	*worker
	od    *ordeal
	index int
	name  string
	stdin io.WriteCloser
}

// start starts relay number index: the even ones on Postgres go by the
// database's clock, and the last one lives behind the proxy.
func (od *ordeal) start(index int) *process {
	o := relayOrder{Name: fmt.Sprint("relay", index), Dialect: od.s.dialect.Name(), Driver: od.s.driver, DSN: od.s.dsn, URL: od.end.url}
	o.Stepped = index%2 == 1 || !od.s.postgres()
	if od.proxy != nil {
		if index == ordealRelays-1 {
			o.DSN = od.proxy.dsn
		}
		o.DSN = withParameter(od.t, o.DSN, "application_name", o.Name)
	}
	text, err := json.Marshal(o)
	require.NoError(od.t, err)
	cmd := exec.Command(os.Args[0], "-test.run=^TestConvergenceRelay$", "-test.count=1")
	cmd.Env = append(os.Environ(), relayEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	// A group of its own: should this process die, the system continues and ends a stopped one.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p := &process{worker: &worker{t: od.t, cmd: cmd, done: make(chan struct{})}, od: od, index: index, name: o.Name}
	p.stdin, err = cmd.StdinPipe()
	require.NoError(od.t, err)
	p.worker.stdin = p.stdin
	stdout, err := cmd.StdoutPipe()
	require.NoError(od.t, err)
	require.NoError(od.t, cmd.Start())
	go p.read(stdout)
	od.t.Cleanup(p.kill)
	return p
}

// tell tells it what befalls it; one that has been killed hears nothing.
func (p *process) tell(format string, args ...any) { _, _ = fmt.Fprintf(p.stdin, format+"\n", args...) }

// last returns the last lines that it wrote.
func (p *process) last(n int) []string {
	lines := p.said("")
	return lines[max(0, len(lines)-n):]
}

// alive complains of a process that ended although nobody ended it.
func (p *process) alive() {
	select {
	case <-p.done:
		p.od.fail(item{}, "%s ended by itself: %v", p.name, p.last(3))
	default:
	}
}

// retire stops it as a deployment does. It must end, without a goroutine left,
// and, in calm times, without a complaint.
func (p *process) retire(calm bool) {
	p.alive()
	_ = p.stdin.Close()
	select {
	case <-p.done:
	case <-time.After(ordealPatience):
		p.od.fail(item{}, "%s does not stop: %v", p.name, p.last(3))
	}
	p.kill()
	ended := p.said("ended")
	switch {
	case len(ended) != 1 || len(p.said("leaked")) > 0:
		p.od.fail(item{}, "%s stopped so: %v", p.name, p.last(3))
	case calm && ended[0] != "ended <nil>":
		p.od.fail(item{}, "%s stopped in calm times: %s", p.name, ended[0])
	}
}

// stepped is a clock that is put forward and back.
type stepped struct{ off atomic.Int64 }

func (c *stepped) now() time.Time      { return time.Now().Add(time.Duration(c.off.Load())) }
func (c *stepped) set(d time.Duration) { c.off.Store(int64(d)) }

// filling opens connections to a SQLite file that may not grow beyond so many
// pages, as on a full disk; no fewer than it has. 0: it may.
type filling struct {
	driver driver.Driver
	dsn    string
	pages  *atomic.Int64
}

func (f filling) Driver() driver.Driver { return f.driver }

func (f filling) Connect(context.Context) (driver.Conn, error) {
	dsn := f.dsn
	if n := f.pages.Load(); n > 0 {
		dsn += fmt.Sprintf("&_pragma=max_page_count(%d)", n)
	}
	return f.driver.Open(dsn)
}

// openFilling is sql.Open, for a SQLite file with connections that fill sees.
func openFilling(t testing.TB, name, dsn string, pages *atomic.Int64) *sql.DB {
	db, err := sql.Open(name, dsn)
	require.NoError(t, err)
	if name == "sqlite" {
		f := filling{db.Driver(), dsn, pages}
		require.NoError(t, db.Close())
		db = sql.OpenDB(f)
	}
	db.SetMaxIdleConns(20)
	t.Cleanup(func() { db.Close() })
	return db
}

// fill limits the file, or frees it again: from now on, for new connections.
func fill(db *sql.DB, pages *atomic.Int64, n int64) {
	pages.Store(n)
	db.SetMaxIdleConns(0)
	db.SetMaxIdleConns(20)
}
