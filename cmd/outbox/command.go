package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v3"
)

const description = `The database is named by --dsn, or by OUTBOX_DSN in the environment:

  postgres://user:password@host:5432/app     a URL, or keywords: "host=... dbname=app"
  /var/lib/app/app.db                        a SQLite file
  file:app.db?_pragma=busy_timeout(5000)     a SQLite DSN, as the application opens it
  /var/lib/agent/outbox.json                 a file store: any path, or file:///..., that ends in .json
                                             (a SQLite file of such a name is sqlite:PATH)

A file store is used by one process at a time: stop its program first. It knows list, show, retry, discard,
resolve, purge, stats, pause, resume and doctor, and import moves it into a database.

What libpq takes from the environment (PGPASSWORD, PGSSLMODE, ~/.pgpass ...) counts too.

Exit codes: 0 all went well; 1 something failed, or problems were found;
2 the command line is wrong; 130 interrupted.`

func (a *app) command() *cli.Command {
	root := &cli.Command{
		Name:        "outbox",
		Usage:       "install, watch and operate a transactional outbox in Postgres, SQLite or a file",
		Description: description,
		Flags:       rootFlags(),
		Commands: []*cli.Command{
			a.demoCommand(),
			a.migrateCommand(),
			a.statsCommand(),
			a.listCommand(),
			a.showCommand(),
			a.retryCommand(),
			a.discardCommand(),
			a.resolveCommand(),
			a.purgeCommand(),
			a.doctorCommand(),
			a.pauseCommand(),
			a.resumeCommand(),
			a.importCommand(),
			a.fenceCommand(),
			a.versionCommand(),
			a.relayCommand(),
		},
		EnableShellCompletion: true,
		Reader:                a.stdin,
		Writer:                a.stdout,
		ErrWriter:             a.stderr,
		ExitErrHandler:        func(context.Context, *cli.Command, error) {}, // run prints errors and exits
	}
	prepare(root)
	root.Action = func(ctx context.Context, c *cli.Command) error {
		if c.Bool("version") {
			return a.version(ctx, c)
		}
		return group(ctx, c)
	}
	return root
}

func rootFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "dsn", Usage: "the `database` or file store; defaults to $OUTBOX_DSN"},
		&cli.StringFlag{Name: "schema", Usage: "`schema` of the outbox's tables; defaults to public (SQLite: main)"},
		&cli.StringFlag{Name: "prefix", Usage: "`prefix` of the names of its tables", Value: "outbox_"},
		&durationFlag{Name: "timeout", Usage: "give up after this `duration`, 0: never; migrations, and work on many messages, take it only if given", Value: 30 * time.Second},
		&cli.BoolFlag{Name: "version", Local: true, Usage: "do as outbox version"},
	}
}

// prepare makes every command tell what is wrong with its arguments as a
// usageError.
func prepare(c *cli.Command) {
	c.OnUsageError = func(_ context.Context, c *cli.Command, err error, _ bool) error {
		return usagef("%s%w", said(c), err)
	}
	if c.Action == nil {
		c.Action = group
	} else {
		c.HideHelpCommand = true // "help" may be the name of a channel
		action, names := c.Action, strings.Fields(c.ArgsUsage)
		c.Action = func(ctx context.Context, c *cli.Command) error {
			if err := checkArgs(c, names); err != nil {
				return err
			}
			return action(ctx, c)
		}
	}
	for _, sub := range c.Commands {
		prepare(sub)
	}
}

// group is the action of a command that only holds others.
func group(_ context.Context, c *cli.Command) error {
	name := c.Args().First()
	if name == "" {
		if c.Root() == c {
			return cli.ShowRootCommandHelp(c)
		}
		return cli.ShowSubcommandHelp(c)
	}
	hint := ""
	// It always finds one; one that begins otherwise is no help.
	if near := cli.SuggestCommand(c.VisibleCommands(), name); near != "" && near[0] == name[0] {
		hint = fmt.Sprintf("; did you mean %q?", near)
	}
	return usagef("%sthere is no command %s%s", said(c), quote(name), hint)
}

// quote quotes an argument, unless it may hold a password.
func quote(arg string) string {
	if anyScheme.MatchString(arg) || keyword.MatchString(arg) {
		return "a DSN"
	}
	return fmt.Sprintf("%q", arg)
}

// said is what an error about a command line begins with: "migrate up: ".
func said(c *cli.Command) string {
	if c.Root() == c {
		return ""
	}
	return strings.TrimPrefix(c.FullName(), "outbox ") + ": "
}

// helpFor is the command that tells more about a command line.
func helpFor(c *cli.Command, args []string) string {
	for _, arg := range args {
		if sub := c.Command(arg); sub != nil {
			c = sub
		}
	}
	return c.FullName() + " --help"
}

// checkArgs compares the arguments of a command with the names of those that
// it takes: "CHANNEL" is needed, "[KEY]" is not.
func checkArgs(c *cli.Command, names []string) error {
	switch given := c.Args(); {
	case given.Len() < len(names) && !strings.HasPrefix(names[given.Len()], "["):
		return usagef("%s%s is missing", said(c), names[given.Len()])
	case given.Len() > len(names) && len(names) == 0:
		return usagef("%stakes no argument, but was given %s; a database is named by --dsn", said(c), quote(given.First()))
	case given.Len() > len(names):
		return usagef("%stakes only %s, but was also given %s", said(c), strings.Join(names, " "), quote(given.Get(len(names))))
	}
	return nil
}

// limited returns ctx with the --timeout of c. What is patient has none unless
// it was given: a migration may take its time.
func limited(ctx context.Context, c *cli.Command, patient bool) (context.Context, context.CancelFunc) {
	d := c.Duration("timeout")
	if d <= 0 || patient && !c.IsSet("timeout") {
		return context.WithCancel(ctx)
	}
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("gave up after %s (--timeout)", d))
}

func jsonFlag() cli.Flag {
	return &cli.BoolFlag{Name: "json", Usage: "print JSON"}
}
