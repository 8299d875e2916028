package main

import (
	"fmt"
	"io"
	"time"

	"github.com/schollz/progressbar/v3"
)

// A progress shows how far long work is: by a bar on a terminal, else by a
// line on stderr every other second.
type progress struct {
	done  string // "purged"
	total int    // -1: not known
	lines io.Writer
	shown time.Time
	bar   *progressbar.ProgressBar // nil: not on a terminal
}

func (a *app) newProgress(done string, total int, json bool) *progress {
	p := &progress{done: done, total: total, lines: a.stderr, shown: time.Now()}
	if a.terminal && !json {
		p.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(a.stdout),
			progressbar.OptionSetWidth(30),
			progressbar.OptionSetDescription(done),
			progressbar.OptionShowCount(),
			progressbar.OptionSetPredictTime(false),
			progressbar.OptionSetElapsedTime(false),
			progressbar.OptionUseANSICodes(true),
		)
	}
	return p
}

// set tells that n messages are done.
func (p *progress) set(n int) {
	switch {
	case p.bar != nil:
		if p.total >= 0 && n > p.total { // more have come since they were counted
			p.total = n
			p.bar.ChangeMax(n)
		}
		_ = p.bar.Set(n)
	case time.Since(p.shown) >= 2*time.Second:
		p.shown = time.Now()
		fmt.Fprintf(p.lines, "outbox: %s so far: %s\n", p.done, messages(n))
	}
}

// end takes the bar away. What was done before an error stays done.
func (p *progress) end(n int, err error) {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
	if err != nil && n > 0 {
		fmt.Fprintf(p.lines, "outbox: note: %s before this: %s\n", p.done, messages(n))
	}
}
