//go:build !unix

package pgtest

import (
	"errors"
	"os"
	"os/exec"
)

// Servers are started on Unix only; elsewhere tests use the one of [Env].
var errUnsupported = errors.New("servers are not started on this system: set " + Env)

var (
	stopSignals map[Mode]os.Signal
	killSignal  = os.Kill
)

// Kill is for Unix only.
func (*Cluster) Kill() error { return errUnsupported }

type owner struct{}

func findOwner() (owner, error) { return owner{}, errUnsupported }
func (owner) give(string) error { return errUnsupported }
func (owner) run(*exec.Cmd)     {}

type guard struct{}

func startGuard(string) (*guard, error) { return nil, errUnsupported }
func (*guard) dismiss(bool) error       { return nil }
