package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
)

// A story is what the demo prints as it goes: lines with the time since it
// began and, on a terminal, a progress bar below them. It is safe for
// concurrent use.
type story struct {
	mu    sync.Mutex
	w     io.Writer
	start time.Time
	total int
	shown time.Time                // when progress was last written as a line
	bar   *progressbar.ProgressBar // nil: not on a terminal, or not yet, or not any more
	live  bool                     // the bar may be shown
	fail  context.CancelCauseFunc  // called when nothing can be written any more
}

func newStory(w io.Writer, terminal bool) *story {
	return &story{w: w, live: terminal, start: time.Now()}
}

// onBroken has fail called when a line cannot be written.
func (s *story) onBroken(fail context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = fail
}

// begin starts the clock and the bar.
func (s *story) begin(total int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start, s.total = time.Now(), total
	s.shown = s.start
	if s.live {
		s.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(s.w),
			progressbar.OptionSetWidth(30),
			progressbar.OptionSetDescription("transactions"),
			progressbar.OptionShowCount(),
			progressbar.OptionSetPredictTime(false),
			progressbar.OptionSetElapsedTime(false),
			progressbar.OptionUseANSICodes(true),
		)
	}
}

// end takes the bar away.
func (s *story) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bar != nil {
		_ = s.bar.Clear()
		s.bar = nil
	}
	s.live = false
}

// text writes lines as they are.
func (s *story) text(lines ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.line(strings.Join(lines, "\n"))
}

// fact writes something that holds for the whole story.
func (s *story) fact(subject, format string, args ...any) {
	s.text(fmt.Sprintf("%8s  ", subject) + fmt.Sprintf(format, args...))
}

// say writes what somebody does now.
func (s *story) say(who, format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.line(fmt.Sprintf("%5.1fs  %-6s ", time.Since(s.start).Seconds(), who) + fmt.Sprintf(format, args...))
}

func (s *story) line(text string) {
	if s.bar != nil {
		_ = s.bar.Clear()
	}
	if _, err := fmt.Fprintln(s.w, text); err != nil && s.fail != nil {
		s.fail(err)
	}
	if s.bar != nil {
		_ = s.bar.RenderBlank()
	}
}

// progress moves the bar, or writes a line every other second.
func (s *story) progress(done, waiting int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bar != nil {
		s.bar.Describe(fmt.Sprintf("%4d in the outbox; transactions", waiting))
		_ = s.bar.Set(done)
		return
	}
	if time.Since(s.shown) < 2*time.Second {
		return
	}
	s.shown = time.Now()
	s.line(fmt.Sprintf("%5.1fs  %-6s %s of %s transactions; %s in the outbox",
		time.Since(s.start).Seconds(), "so far", number(done), number(s.total), entries(waiting)))
}
