package pgtest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// Where packagers put the server's programs; Debian keeps them off the PATH.
var binaryDirs = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/usr/local/pgsql/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// findBinaries returns the directory with the newest initdb and postgres.
func findBinaries() (string, error) {
	var dirs []string
	if p, err := exec.LookPath("postgres"); err == nil {
		if real, err := filepath.EvalSymlinks(p); err == nil { // where all programs are, not only those with a link
			dirs = append(dirs, filepath.Dir(real))
		}
		dirs = append(dirs, filepath.Dir(p))
	}
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range binaryDirs {
		found, _ := filepath.Glob(pattern) // fails for a bad pattern only
		dirs = append(dirs, found...)
	}
	var best string
	var newest int
	for _, dir := range dirs {
		if v := majorVersion(dir); v > newest {
			best, newest = dir, v
		}
	}
	if best == "" {
		return "", errors.New("there is no initdb and postgres on the PATH or where packages put them")
	}
	return best, nil
}

var versionNumber = regexp.MustCompile(`\) (\d+)`)

// majorVersion returns the major version of the server in dir, 0 where there
// is none that starts.
func majorVersion(dir string) int {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return 0
	}
	out, err := exec.Command(filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return 0
	}
	m := versionNumber.FindSubmatch(out) // postgres (PostgreSQL) 17.5 (Debian 17.5-1)
	if m == nil {
		return 0
	}
	v, _ := strconv.Atoi(string(m[1]))
	return v
}
