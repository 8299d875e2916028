package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPurgeBeforeTheEpochDeletesNothing is field case S62: a time that a program
// keeps as 0, or takes for none, must not read as "whenever it ended".
func TestPurgeBeforeTheEpochDeletesNothing(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		everyState(t, dsn, "mails")
		for _, before := range []string{"1970-01-01", "1970-01-01T01:00:00+01:00", "1969-12-31", "0000-01-01"} {
			out := ok(t, "purge", "--channel", "mails", "--dsn", dsn, "--state", "sent,dead,unknown", "--before", before, "--yes")
			require.Contains(t, out, "purged: 0 messages", before)
		}
		for _, before := range []string{"0001-01-01", "0001-01-01T00:00:00Z"} {
			r := call(t, "purge", "--channel", "mails", "--dsn", dsn, "--state", "sent,dead,unknown", "--before", before, "--yes")
			require.Equal(t, exitUsage, r.code, "%s: %s%s", before, r.stdout, r.stderr)
			require.Contains(t, r.stderr, "--before is")
		}
		var l messageList
		okJSON(t, &l, "list", "--channel", "mails", "--dsn", dsn)
		require.ElementsMatch(t, strings.Fields("pending failed sent dead unknown sending blocked"), strings.Fields(l.keys()))
	})
}
