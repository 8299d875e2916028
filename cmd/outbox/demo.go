package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"
)

func (a *app) demoCommand() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "see an outbox at work: failing sinks, killed processes, lost answers, and all of it right in the end",
		Description: "A shop changes its orders; in the same transactions it stages their states for a search index, and puts mails to\n" +
			"their customers. A relay, in a process of its own, publishes and sends them. On the way the relay is killed, the index is\n" +
			"down, the network repeats itself, and mails are refused or go unanswered. At the end all is compared, row by row: exit\n" +
			"code 1 if anything was lost, went back, was sent twice, or is left.\n" +
			"\n" +
			"It uses SQLite in a temporary folder, or the database that --dsn names (OUTBOX_DSN does not count here): on Postgres a\n" +
			"schema of its own, on SQLite a new file. It never works on what exists already, and removes what it has made.",
		Flags: []cli.Flag{
			&durationFlag{Name: "duration", Value: 8 * time.Second, Usage: "about how long it takes: a `duration` from 1s to 1h"},
			&cli.IntFlag{Name: "orders", Value: 200, Usage: "`number` of orders, 1 to 100000; each is changed about six times"},
			&cli.Uint64Flag{Name: "seed", DefaultText: "random", Usage: "`number` from which the shop's transactions follow"},
			&cli.BoolFlag{Name: "keep", Usage: "do not remove the databases at the end"},
			&cli.BoolFlag{Name: "json", Usage: "print the summary as JSON, and the story to stderr"},
		},
		Action: a.demo,
	}
}

// demoOptions are those of the command line.
type demoOptions struct {
	dsn, schema, prefix string
	duration            time.Duration
	orders              int
	seed                uint64
	keep, json          bool
}

func readDemoOptions(c *cli.Command) (demoOptions, error) {
	o := demoOptions{
		dsn: c.String("dsn"), schema: c.String("schema"), prefix: c.String("prefix"),
		duration: c.Duration("duration"), orders: c.Int("orders"), seed: c.Uint64("seed"),
		keep: c.Bool("keep"), json: c.Bool("json"),
	}
	if !c.IsSet("seed") {
		o.seed = rand.Uint64N(1_000_000)
	}
	switch {
	case o.duration < time.Second || o.duration > time.Hour:
		return o, usagef("%s--duration is %s, not 1s to 1h", said(c), o.duration)
	case o.orders < 1 || o.orders > 100_000:
		return o, usagef("%s--orders is %d, not 1 to 100000", said(c), o.orders)
	}
	return o, nil
}

func (a *app) demo(ctx context.Context, c *cli.Command) (err error) {
	o, err := readDemoOptions(c)
	if err != nil {
		return err
	}
	out := a.stdout
	if o.json {
		out = a.stderr
	}
	s, err := openSite(ctx, o)
	if err != nil {
		return err
	}
	signal.Ignore(syscall.SIGPIPE) // what has been made is removed also if nobody reads the story any more
	st := newStory(out, a.terminal && !o.json)
	defer func() {
		st.end()
		if closed := s.close(o.keep, st); closed != nil {
			fmt.Fprintf(a.stderr, "outbox: %s\n", redact(closed.Error()))
			err = cmp.Or(err, errTold)
		}
	}()
	d := &demo{o: o, site: s, story: st, beforeCompare: a.beforeCompare}
	sum, err := d.run(ctx)
	if err != nil {
		if ctx.Err() != nil {
			st.say("demo", "interrupted: nothing is compared")
		}
		return err
	}
	st.end()
	sum.print(out)
	if o.json {
		err = writeJSON(a.stdout, sum)
	}
	if err == nil && !sum.Converged {
		err = errTold
	}
	return err
}

// demo is one demonstration.
type demo struct {
	o             demoOptions
	site          *site
	story         *story
	beforeCompare func(context.Context, *site) error

	shop    *shop
	index   *index
	mailer  *mailer
	relays  *relays
	retried int // mails, by hand
}

// run tells the story and returns what came of it. An error means that it
// could not be told to its end.
func (d *demo) run(ctx context.Context) (_ *summary, err error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	d.story.onBroken(fail)
	if err := d.open(fail); err != nil {
		return nil, err
	}
	defer d.index.close()
	defer d.mailer.server.Close()
	defer d.relays.close()
	d.introduce()
	if err := d.relays.start(); err != nil {
		return nil, err
	}
	d.story.begin(d.shop.total)
	var working sync.WaitGroup
	ticking, quiet := context.WithCancel(ctx)
	defer func() {
		fail(nil)
		quiet()
		working.Wait()
	}()
	working.Go(func() { d.tick(ticking) })
	for _, c := range d.shop.clerks {
		working.Go(func() {
			if err := c.work(ctx); err != nil {
				fail(err)
			}
		})
	}
	if err := d.play(ctx); err != nil {
		return nil, stopped(ctx, err)
	}
	if err := d.drain(ctx); err != nil {
		return nil, stopped(ctx, err)
	}
	quiet()
	working.Wait()
	return d.finish(ctx)
}

// stopped prefers the reason why a context ended.
func stopped(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		return cause
	}
	return err
}

func (d *demo) open(fail context.CancelCauseFunc) (err error) {
	if d.shop, err = newShop(d.site, d.o); err != nil {
		return err
	}
	if d.index, err = openIndex(d.site, d.o.seed); err != nil {
		return err
	}
	if d.mailer, err = openMailer(d.story, d.o.seed, orderID(0)); err != nil {
		d.index.close()
		return err
	}
	d.relays = &relays{
		spec: relaySpec{
			DSN: d.site.dsn, Schema: d.site.d.Schema(), Prefix: d.site.d.Prefix(),
			Index: d.index.url, Mailer: d.mailer.url, Lease: demoLease,
		},
		story: d.story, fail: fail,
	}
	return nil
}

func (d *demo) introduce() {
	d.story.text("An outbox makes \"commit to the database\" and \"tell someone else\" one act. Here a shop keeps orders in a",
		"database. A search index must end up with the newest state of each, and its customer must get a mail about",
		"every change, once, whatever goes wrong between.", "")
	d.story.fact("shop", "%s: orders, and the outbox beside them", d.site.shopLabel)
	d.story.fact("index", "%s: behind HTTP; it keeps the highest version of each order", d.site.indexLabel)
	d.story.fact("mail", "a provider behind HTTP; it can be asked whether it has taken a mail")
	d.story.fact("relay", "a process of its own, that takes from the outbox and calls index and mail provider")
	d.story.fact("seed", "%d (the same orders again: --seed %d --orders %d)", d.o.seed, d.o.seed, d.o.orders)
	d.story.text("")
}

// tick shows how far things are.
func (d *demo) tick(ctx context.Context) {
	t := time.NewTicker(250 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if waiting, err := d.site.waiting(ctx); err == nil {
			d.story.progress(d.shop.ended(), waiting+d.unsent())
		}
	}
}
