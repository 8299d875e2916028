package main

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

func (a *app) versionCommand() *cli.Command {
	return &cli.Command{
		Name:   "version",
		Usage:  "print the version of this program and of the schema it needs",
		Flags:  []cli.Flag{jsonFlag()},
		Action: a.version,
	}
}

// build is what the Go toolchain has noted in the program.
type build struct {
	Version  string `json:"version"` // "(devel)" outside a released module
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified"` // from a working tree with uncommitted changes
	Go       string `json:"go"`
	Platform string `json:"platform"`
	Schema   int    `json:"schema"`
}

func thisBuild() build {
	b := build{Version: "(unknown)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH, Schema: dialect.SchemaVersion}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	b.Version = info.Main.Version
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func (a *app) version(_ context.Context, c *cli.Command) error {
	b := thisBuild()
	if c.Bool("json") {
		return writeJSON(a.stdout, b)
	}
	fmt.Fprintf(a.stdout, "outbox %s", b.Version)
	if b.Revision != "" {
		fmt.Fprintf(a.stdout, ", revision %.12s", b.Revision)
	}
	if b.Modified {
		fmt.Fprint(a.stdout, " with changes")
	}
	fmt.Fprintf(a.stdout, ", schema %d, %s, %s\n", b.Schema, b.Go, b.Platform)
	return nil
}
