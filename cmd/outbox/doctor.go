package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/filestore"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// What doctor calls suspicious.
const (
	lateAfter    = time.Minute // of an entry that is due and that no relay takes
	manyAttempts = 10
)

func (a *app) doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "examine connection, schema, grants, settings and channels; exit code 1 if there is a fault",
		Description: "Run it as the role, and on SQLite with the DSN, that the application uses: grants and settings are judged as they are for you.\n" +
			"A fault keeps the outbox from working or from keeping its promises. A warning does not change the exit code.",
		Flags:  []cli.Flag{jsonFlag()},
		Action: a.doctor,
	}
}

// A check is one line of what doctor has found.
type check struct {
	Subject string `json:"subject"`
	Result  string `json:"result"` // ok, note, warning or fault
	Text    string `json:"text"`
}

// A diagnosis is what doctor finds.
type diagnosis struct {
	Database string  `json:"database"`
	Schema   string  `json:"schema"` // empty, like the prefix: a file store
	Prefix   string  `json:"prefix"`
	OK       bool    `json:"ok"` // there is no fault
	Checks   []check `json:"checks"`

	name string // of the database, for people
}

func (d *diagnosis) add(subject, result, format string, args ...any) {
	d.Checks = append(d.Checks, check{subject, result, fmt.Sprintf(format, args...)})
	d.OK = d.OK && result != "fault"
}

func (a *app) doctor(ctx context.Context, c *cli.Command) error {
	t, err := a.target(c)
	if err != nil {
		return err
	}
	ctx, cancel := limited(ctx, c, false)
	defer cancel()
	d := &diagnosis{Database: t.label, OK: true, name: t.name()}
	if t.fileStore == "" {
		d.Schema, d.Prefix = t.d.Schema(), t.d.Prefix()
		d.examine(ctx, t)
	} else {
		d.examineFile(ctx, t)
	}
	if c.Bool("json") {
		err = writeJSON(a.stdout, d)
	} else {
		err = d.print(a.stdout)
	}
	if err == nil && !d.OK {
		err = errTold
	}
	return err
}

func (d *diagnosis) print(w io.Writer) error {
	fmt.Fprintln(w, d.name)
	n := map[string]int{}
	for _, c := range d.Checks {
		n[c.Result]++
		fmt.Fprintf(w, "%-8s %-11s %s\n", c.Result, c.Subject, c.Text)
	}
	_, err := fmt.Fprintf(w, "faults: %d, warnings: %d\n", n["fault"], n["warning"])
	return err
}

// examine goes on as long as what it has found lets it.
func (d *diagnosis) examine(ctx context.Context, t target) {
	s, err := t.connect(ctx, toExamine)
	if err != nil {
		d.add("connection", "fault", "%s", lines(timedOut(ctx, err)))
		return
	}
	defer s.close()
	d.server(ctx, s)
	findings, err := s.store.Findings(ctx)
	switch {
	case errors.Is(err, outbox.ErrSchema):
		d.add("schema", "fault", "%s; to install or upgrade it: outbox migrate up", lines(err))
		return
	case err != nil:
		d.add("schema", "fault", "%s", lines(timedOut(ctx, err)))
		return
	}
	d.schema(ctx, s)
	d.settings(s, findings)
	d.channels(ctx, s)
}

// examineFile examines a file store.
func (d *diagnosis) examineFile(ctx context.Context, t target) {
	s, err := t.connect(ctx, toExamine)
	if errors.Is(err, filestore.ErrLocked) { // as it should be, while its program runs
		d.add("file", "note", "its program is running, so it cannot be examined: %s", lines(err))
		return
	}
	if err != nil {
		d.add("file", "fault", "%s", lines(err))
		return
	}
	defer s.close()
	if err := s.messages.Check(ctx); err != nil {
		d.add("file", "fault", "%s", lines(timedOut(ctx, err)))
		return
	}
	d.add("file", "ok", "it can be read and is whole, it and its directory are private, and no program is using it")
	d.channels(ctx, s)
}

// lines makes one line of an error's text.
func lines(err error) string { return redact(strings.Join(strings.Fields(err.Error()), " ")) }

func (d *diagnosis) server(ctx context.Context, s *session) {
	query := `SELECT 'SQLite ' || sqlite_version()`
	if s.postgres != nil {
		query = `SELECT 'PostgreSQL ' || current_setting('server_version') || ', role "' || current_user || '"'`
	}
	var text string
	if err := s.db.QueryRowContext(ctx, query).Scan(&text); err != nil {
		d.add("connection", "fault", "%s", lines(err))
		return
	}
	d.add("connection", "ok", "%s", text)
}

func (d *diagnosis) schema(ctx context.Context, s *session) {
	steps, err := migrations.Status(ctx, s.db, s.d)
	if err != nil {
		// An application's role may not be allowed to read what migrations note.
		d.add("schema", "ok", "it serves this release (version %d); its history cannot be read: %s", dialect.SchemaVersion, lines(err))
		return
	}
	newest := int64(0)
	for _, step := range steps {
		if step.Applied {
			newest = max(newest, step.Version)
		} else {
			d.add("schema", "warning", "migration %s has not been applied: outbox migrate up", step.Name)
		}
	}
	d.add("schema", "ok", "version %d; this release needs %d", newest, dialect.SchemaVersion)
}

// settings tells of the server's, the connection's and the grants.
func (d *diagnosis) settings(s *session, findings []dialect.Finding) {
	subject, fine := "settings", "journal mode, synchronous, busy timeout and transaction lock are as they should be"
	switch {
	case s.postgres != nil:
		subject, fine = "server", "it takes writes, is new enough, keeps what is committed, and the role has the grants"
	case s.bare:
		fine = "the file's journal mode is as it should be"
	}
	for _, f := range findings {
		result := "warning"
		if f.Fault {
			result = "fault"
		}
		d.add(subject, result, "%s", f.Text)
	}
	if len(findings) == 0 {
		d.add(subject, "ok", "%s", fine)
	}
	if s.postgres == nil && s.bare {
		d.add(subject, "note", "busy timeout, transaction lock and synchronous belong to the application's DSN: give that as --dsn, file:..., to have them examined")
	}
}

func (d *diagnosis) channels(ctx context.Context, s *session) {
	stats, err := s.messages.Stats(ctx)
	if err != nil {
		if s.store != nil && s.d.Classify(err) == dialect.FaultGrant {
			d.add("channels", "note", "the role may not count what waits: %s", oneLine(err.Error()))
			return
		}
		d.add("channels", "fault", "%s", lines(timedOut(ctx, err)))
		return
	}
	before := len(d.Checks)
	for _, st := range stats {
		name := fmt.Sprintf("%q", st.Channel.Name)
		if st.Paused > 0 || st.Outage {
			hint := "; to have it go on at once: outbox resume " + name
			if strings.HasPrefix(st.Reason, filestore.MovePause) {
				hint = "" // a resumed channel could send what the file still holds
			}
			d.add("channels", "warning", "%s: %s%s", name, oneLine(state(st)), hint)
		} else if st.OldestDue > lateAfter && st.InFlight == 0 {
			d.add("channels", "warning", "%s: %s %s are due, the oldest for %s, and none is in flight: does a relay serve it, and under this name?",
				name, count(st.Due), rowsOf(st.Channel.System), age(st.OldestDue))
		}
		if st.Attempt >= manyAttempts {
			d.add("channels", "warning", "%s: one of its %s has been tried %d times: %s", name, rowsOf(st.Channel.System), st.Attempt, oneLine(st.LastError))
		}
		d.ended(st, name)
	}
	if len(d.Checks) == before {
		d.add("channels", "ok", "none is paused, no message is dead or unknown, and nothing has been due for longer than %s without being taken", lateAfter)
	}
}

// ended tells of messages that wait for a person.
func (d *diagnosis) ended(st outbox.ChannelStats, name string) {
	if st.Dead > 0 {
		d.add("channels", "warning", "%s: dead messages, which nothing sends any more: %s; to see them: outbox list --channel %s --state dead; then outbox retry or discard",
			name, count(st.Dead), name)
	}
	if st.Unknown > 0 {
		d.add("channels", "warning", "%s: messages of which nobody knows whether they were sent: %s; to see them: outbox list --channel %s --state unknown; then outbox resolve",
			name, count(st.Unknown), name)
	}
	if st.Blocked > 0 {
		d.add("channels", "warning", "%s: ordered groups that wait behind a dead or unknown message: %s", name, count(st.Blocked))
	}
}
