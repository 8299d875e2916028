// Command outbox installs an outbox's tables, shows how it is doing, and
// operates it: see outbox --help. With outbox demo it shows what an outbox is
// for, on a database of its own.
//
// Exit codes: 0 all went well; 1 something failed, or problems were found; 2
// the command line is wrong; 130 it was interrupted.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"golang.org/x/term"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130 // 128 + SIGINT, as shells say it
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	a := app{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: os.Getenv,
		terminal: term.IsTerminal(int(os.Stdout.Fd())),
		asks:     term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stderr.Fd())),
	}
	os.Exit(a.run(ctx, os.Args))
}

// app is one run of the program, with all that it takes from its surroundings.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	env            func(string) string
	terminal       bool // stdout is one: lines may be redrawn
	asks           bool // a person can be asked

	// beforeCompare, in tests, tampers with what the demo is about to compare.
	beforeCompare func(ctx context.Context, s *site) error
}

// run runs a command line, its first element being the program's name, and
// returns the exit code.
func (a app) run(ctx context.Context, args []string) int {
	c := a.command()
	err := c.Run(ctx, args)
	var usage *usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage), errors.Is(err, outbox.ErrInvalid):
		fmt.Fprintf(a.stderr, "outbox: %s\nSee %s.\n", textOf(err), helpFor(c, args[1:]))
		return exitUsage
	case ctx.Err() != nil:
		fmt.Fprintln(a.stderr, "outbox: interrupted")
		return exitInterrupted
	case errors.Is(err, errTold):
		return exitFailed
	}
	fmt.Fprintf(a.stderr, "outbox: %s\n", textOf(err))
	if errors.Is(err, outbox.ErrSchema) {
		fmt.Fprintln(a.stderr, "See outbox migrate status, and outbox migrate up.")
	}
	return exitFailed
}

// textOf is the text of an error, which its package may have named already.
func textOf(err error) string { return redact(strings.TrimPrefix(err.Error(), "outbox: ")) }

// errTold: what is wrong has been printed already.
var errTold = errors.New("problems were found")

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format, args...)}
}

var (
	urlPassword = regexp.MustCompile(`(://[^:@/\s]*):.*@`)
	keyPassword = regexp.MustCompile(`(?i)((?:ssl)?password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)`)
)

// redact takes passwords out of a text. Errors are written so that they hold
// none; this is for those of others, and for a DSN given in the wrong place.
func redact(text string) string {
	return keyPassword.ReplaceAllString(urlPassword.ReplaceAllString(text, "$1:xxxxx@"), "${1}xxxxx")
}
