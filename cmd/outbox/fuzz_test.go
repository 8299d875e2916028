package main

import (
	"encoding/base64"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// FuzzDSN: a DSN names a target, or is a usage error; nothing in it is ever
// taken for another parameter, and no label or error holds its password.
func FuzzDSN(f *testing.F) {
	for _, seed := range []string{
		"", "app.db", "postgres://u:p@h/d", "postgres://u:a@b@h/d", "host=h password='x", "file:a?mode=ro&_pragma=x(1)", "file:%zz",
		"file://host/x", "sqlite:a.json", "x.json", "x.json?y", ":memory:", "mysql://u:p@h/d", "app.db?_pragma=x", "\x00", "//a//b", "postgres://%", "host=0\xc2 pAssword0",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		if strings.Contains(strings.ToLower(dsn), "service") || strings.Contains(strings.ToLower(dsn), "file=") || strings.Contains(dsn, "sslrootcert") {
			t.Skip("names files of this machine")
		}
		got, err := parseDSN(dsn)
		if err != nil {
			var usage *usageError
			require.True(t, errors.As(err, &usage), "%v", err)
			return
		}
		require.NotEmpty(t, got.label)
		if got.postgres != nil || got.fileStore != "" {
			return
		}
		path, query, _ := strings.Cut(got.sqliteDSN(toOperate), "?")
		unescaped, err := url.PathUnescape(strings.TrimPrefix(path, "file:"))
		require.NoError(t, err)
		require.Equal(t, got.path, unescaped)
		_, err = url.ParseQuery(query)
		require.NoError(t, err)
	})
}

// FuzzDSNPassword: a password stands in no label and no error, however wrongly
// the DSN around it is written.
func FuzzDSNPassword(f *testing.F) {
	const canary = "c4n4ryp4ss"
	for _, seed := range [][2]string{
		{"postgres://u:", "@h/d"}, {"postgres://u:", "@h:x/d"}, {"postgres://u:", "/x@h/d"}, {"postgres://u:", "@h/d?sslmode=odd"},
		{"host=h password=", ""}, {"host=h password='", ""}, {"postgres://h/d?password=", ""}, {"POSTGRES://u:a@", "@h/d"}, {"host=h \xc2password=", ""},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		lower := strings.ToLower(before)
		inURL := strings.HasPrefix(lower, "postgres://") && strings.Count(before, ":") == 2 && strings.HasSuffix(before, ":") && strings.Contains(after, "@")
		inWords := strings.HasPrefix(before, "host=h ") && strings.HasSuffix(before, "password=")
		if !inURL && !inWords || strings.ContainsAny(before[min(11, len(before)):], "/?#") {
			return // not where a password stands
		}
		if strings.Contains(strings.ToLower(after), "service") || strings.Contains(strings.ToLower(after), "file") || strings.Contains(after, "cert") {
			return // names files of this machine
		}
		got, err := parseDSN(before + canary + after)
		if err != nil {
			require.NotContains(t, textOf(err), canary)
			return
		}
		if got.postgres != nil && got.postgres.Host != "" && !strings.Contains(got.postgres.Host, canary) {
			require.NotContains(t, got.label, canary)
		}
	})
}

// FuzzDuration: a duration is one that Go writes as what is read again.
func FuzzDuration(f *testing.F) {
	for _, seed := range []string{"90s", "1d", "1.5d12h", "-1d", "d", "999999999999d", "1d1d", "1e3d", "", "+1d-2h", "NaNd"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parseDuration(text)
		if err != nil {
			require.NotContains(t, err.Error(), "\n")
			return
		}
		again, err := parseDuration(d.String())
		require.NoError(t, err)
		require.Equal(t, d, again)
	})
}

// FuzzTime: a time is one that the command writes as what is read again.
func FuzzTime(f *testing.F) {
	for _, seed := range []string{"2026-01-02", "2026-01-02T15:04:05Z", "2026-01-02T15:04:05.999+14:00", "0001-01-01", "9999-12-31T23:59:60Z", ""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		at, err := parseTime(text)
		if err != nil {
			return
		}
		require.False(t, at.IsZero())
		require.Equal(t, time.UTC, at.Location())
		if at.Year() < 1 || at.Year() > 9999 {
			return // in UTC it is of a year that RFC 3339 cannot write
		}
		again, err := parseTime(at.Format(time.RFC3339Nano))
		require.NoError(t, err)
		require.True(t, at.Equal(again))
	})
}

// FuzzTerminal: no text from a database is a command to the terminal that
// shows it.
func FuzzTerminal(f *testing.F) {
	for _, seed := range []string{"plain", "\x1b[2J", "a\r\nb", "\u202e", "\xff", "\u0085", "tab\there"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		one := oneLine(text)
		require.LessOrEqual(t, utf8.RuneCountInString(one), maxCell)
		shown, encoding := readable([]byte(text))
		if encoding != "" {
			back, err := base64.StdEncoding.DecodeString(shown)
			require.NoError(t, err)
			require.Equal(t, text, string(back))
		}
		for _, r := range one + visible(text) + strings.NewReplacer("\n", "", "\t", "").Replace(shown) {
			require.True(t, unicode.IsPrint(r), "%q", r)
		}
	})
}
