// Command bench measures this library against other ways of handing messages
// over in one run: other libraries, each at its own best sensible settings, and
// bare SQL, as the limit of what the database can do. docs/performance.md says
// what the figures mean.
//
//	go run . [-quick] [-md FILE] [-svg FILE] [SUITE...]
//
// It starts a Postgres of its own, with fsync on, and needs the server's
// programs on this machine and the go command. Each line "RATIO name value
// target ok|short" at its end is one target: ok means that the target lies
// within the interval of the median, which the table before it shows. It fails
// where a peer fails, or where a message was not handled.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := command(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

// command is the whole program.
func command(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	quickly := flags.Bool("quick", false, "smaller sizes and fewer rounds: under two minutes, and a first idea only")
	md := flags.String("md", "", "write the report to this file, as Markdown")
	svg := flags.String("svg", "", "write a plot to this file, as SVG")
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), "usage: bench [flags] [SUITE...]\n\nSuites, all where none is named:\n")
		for _, s := range suites {
			fmt.Fprintf(flags.Output(), "  %-10s %s\n", s.name, s.about)
		}
		fmt.Fprintln(flags.Output(), "\nFlags:")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	chosen, err := choose(flags.Args())
	if err != nil {
		return err
	}
	z := full
	if *quickly {
		z = quick
	}
	r, err := run(ctx, z, chosen, out)
	if err != nil {
		return err
	}
	return errors.Join(write(*md, r.markdown), write(*svg, r.svg))
}

func write(name string, f func(io.Writer)) error {
	if name == "" {
		return nil
	}
	file, err := os.Create(name)
	if err != nil {
		return err
	}
	f(file)
	return file.Close()
}

// A suite measures one thing.
type suite struct {
	name, about string
	run         func(*bench) error
}

var suites = []suite{
	{"stage", "a transaction with one message: 1, 4 and 16 writers", (*bench).stage},
	{"bulk", "1,000 messages in one transaction", (*bench).bulk},
	{"drain", "relays at full speed: 1, 2 and 4 of them, growing batches", (*bench).drain},
	{"latency", "from the commit to the handler, at 100 and 1,000 messages a second", (*bench).latency},
	{"growth", "draining beside a backlog, scheduled, dead and leased messages", (*bench).growth},
	{"held", "draining while a transaction is held open", (*bench).held},
	{"hot", "one key, staged and published again and again", (*bench).hot},
	{"groups", "messages with an order", (*bench).groups},
	{"sqlite", "staging and draining on SQLite", (*bench).sqlite},
	{"cost", "statements, WAL and CPU for each message", (*bench).cost},
	{"idle", "statements of a relay with nothing to do", (*bench).idle},
}

func choose(names []string) ([]suite, error) {
	if len(names) == 0 {
		return suites, nil
	}
	var chosen []suite
	for _, name := range names {
		i := slices.IndexFunc(suites, func(s suite) bool { return s.name == name })
		if i < 0 {
			var all []string
			for _, s := range suites {
				all = append(all, s.name)
			}
			return nil, fmt.Errorf("there is no suite %q: the suites are %s", name, strings.Join(all, ", "))
		}
		chosen = append(chosen, suites[i])
	}
	return chosen, nil
}

// run starts the server, runs suites and prints what they find.
func run(ctx context.Context, z sizes, chosen []suite, out io.Writer) (_ *report, err error) {
	began := time.Now()
	s, err := startServer()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	b := &bench{ctx: ctx, size: z, server: s, report: &report{out: out}}
	if err := install(ctx, s.dsn); err != nil {
		return nil, err
	}
	if b.site, err = openSite(ctx, s.dsn, nil); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.site.close()) }()
	if b.about, err = b.machine(); err != nil {
		return nil, err
	}
	for _, line := range b.about {
		fmt.Fprintln(out, line)
	}
	for _, suite := range chosen {
		start := time.Now()
		if err := suite.run(b); err != nil {
			return nil, fmt.Errorf("suite %s: %w", suite.name, err)
		}
		fmt.Fprintf(out, "  (%s took %s)\n", suite.name, time.Since(start).Round(100*time.Millisecond))
	}
	if len(b.ratios) > 0 {
		b.verdicts().print(out)
		fmt.Fprintln(out)
		b.lines(out)
	}
	fmt.Fprintf(out, "\n%s in all\n", time.Since(began).Round(time.Second))
	return b.report, nil
}
