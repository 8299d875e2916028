package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
)

func (a *app) migrateCommand() *cli.Command {
	return &cli.Command{
		Name:  "migrate",
		Usage: "install, upgrade, remove or print the outbox's tables",
		Commands: []*cli.Command{
			{
				Name:   "up",
				Usage:  "install the tables, or bring them up to this release; may be run at any time, by many at once",
				Action: a.migrateUp,
			},
			{
				Name:  "down",
				Usage: "remove the tables; refuses while anything waits to be published or sent",
				Description: "Stop the relays and whatever stages first. On a terminal it asks before it removes anything.\n" +
					"A later installation goes on with greater versions, so that sinks keep working.",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "drop-undelivered", Usage: "remove what waits to be published or sent too: it is lost; needs --yes where nobody can be asked"},
					yesFlag(),
				},
				Action: a.migrateDown,
			},
			{
				Name:   "status",
				Usage:  "tell which migrations have been applied",
				Flags:  []cli.Flag{jsonFlag()},
				Action: a.migrateStatus,
			},
			a.migrateSQLCommand(),
		},
	}
}

func (a *app) migrateUp(ctx context.Context, c *cli.Command) error {
	return a.withTables(ctx, c, toInstall, func(ctx context.Context, s *session) error {
		before, err := migrations.Status(ctx, s.db, s.d)
		if err != nil {
			return err
		}
		if err := migrations.Up(ctx, s.db, s.d); err != nil {
			return err
		}
		pending := 0
		for _, step := range before {
			if !step.Applied {
				pending++
				fmt.Fprintf(a.stdout, "applied %s\n", step.Name)
			}
		}
		if pending == 0 {
			fmt.Fprintln(a.stdout, "nothing to do")
		}
		fmt.Fprintf(a.stdout, "the outbox is installed in %s (%s)\n", s.label, where(s.d))
		return nil
	})
}

func (a *app) migrateDown(ctx context.Context, c *cli.Command) error {
	drop := c.Bool("drop-undelivered")
	return a.withTables(ctx, c, toRemove, func(ctx context.Context, s *session) error {
		steps, err := migrations.Status(ctx, s.db, s.d)
		if err != nil {
			return err
		}
		installed := false
		for _, step := range steps {
			installed = installed || step.Applied
		}
		if !installed {
			fmt.Fprintf(a.stdout, "nothing to do: no outbox is installed in %s (%s)\n", s.label, where(s.d))
			return nil
		}
		what := fmt.Sprintf("remove the outbox's tables from %s (%s)", s.label, where(s.d))
		if drop {
			what += ", with all that waits to be published or sent"
		}
		if drop || a.asks { // a script has said what it wants, unless something is lost by it
			if err := a.confirmed(c, what); err != nil {
				return err
			}
		}
		err = migrations.Down(ctx, s.db, s.d, drop)
		var undelivered *migrations.UndeliveredError
		if errors.As(err, &undelivered) {
			return fmt.Errorf("%w; outbox stats counts them, --drop-undelivered removes them", err)
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(a.stdout, "the outbox's tables are removed from %s (%s)\n", s.label, where(s.d))
		return nil
	})
}

// agrees asks a person.
func (a *app) agrees(question string) bool {
	fmt.Fprintf(a.stderr, "%s [y/N] ", question)
	answer, err := bufio.NewReader(a.stdin).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return false
	}
	answer = strings.ToLower(strings.TrimSpace(answer))
	return answer == "y" || answer == "yes"
}

// jsonStep is a migration in JSON.
type jsonStep struct {
	Version   int64      `json:"version"`
	Name      string     `json:"name"` // empty: of a newer release
	Applied   bool       `json:"applied"`
	AppliedAt *time.Time `json:"applied_at"` // null: not applied, or by another tool
}

func (a *app) migrateStatus(ctx context.Context, c *cli.Command) error {
	return a.withTables(ctx, c, toOperate, func(ctx context.Context, s *session) error {
		steps, err := migrations.Status(ctx, s.db, s.d)
		if err != nil {
			return err
		}
		if c.Bool("json") {
			return writeJSON(a.stdout, asJSONSteps(steps))
		}
		rows := make([][]string, len(steps))
		for i, step := range steps {
			name, state := step.Name, "pending: run outbox migrate up"
			if name == "" {
				name = "(of a newer release)"
			}
			if step.Applied {
				state = "applied by another tool"
			}
			if !step.AppliedAt.IsZero() {
				state = "applied " + step.AppliedAt.Format(time.RFC3339)
			}
			rows[i] = []string{fmt.Sprint(step.Version), name, state}
		}
		fmt.Fprintf(a.stdout, "%s (%s)\n", s.label, where(s.d))
		return writeTable(a.stdout, []string{"VERSION", "MIGRATION", "STATE"}, rows)
	})
}

func asJSONSteps(steps []migrations.Step) any {
	list := make([]jsonStep, len(steps))
	for i, step := range steps {
		list[i] = jsonStep{Version: step.Version, Name: step.Name, Applied: step.Applied}
		if !step.AppliedAt.IsZero() {
			list[i].AppliedAt = &step.AppliedAt
		}
	}
	return struct {
		Needed int        `json:"needed"` // the schema version that this release needs
		Steps  []jsonStep `json:"steps"`
	}{dialect.SchemaVersion, list}
}
