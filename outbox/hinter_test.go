package outbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHinterTellsWhoeverListens(t *testing.T) {
	var h Hinter
	h.Tell(Hint{}) // nobody
	var first, second []Hint
	stop := h.Listen(func(x Hint) { first = append(first, x) })
	h.Listen(func(x Hint) { second = append(second, x) })
	h.Tell(Hint{Version: 1})
	stop()
	stop()
	h.Tell(Hint{Version: 2})
	require.Equal(t, []Hint{{Version: 1}}, first)
	require.Equal(t, []Hint{{Version: 1}, {Version: 2}}, second)
}

// A relay that is told of too much looks in vain; one told too late sends late.
func TestHinterTellsWhatAPutHasForRelays(t *testing.T) {
	row := func(created bool, v Version, token Token) PutAnswer {
		return PutAnswer{Created: created, Row: Row{Version: v, Token: token}}
	}
	rows := []PutRow{{Delay: time.Hour}, {Delay: time.Minute}, {Delay: time.Second}, {}}
	for name, test := range map[string]struct {
		answers []PutAnswer
		want    []Hint
	}{
		"the first that is due": {
			[]PutAnswer{row(true, 1, 0), row(true, 2, 0), row(true, 3, 0), row(true, 4, 0)},
			[]Hint{{Channel: Channel{SystemJournal, "c"}, Version: 4}},
		},
		"of what is new and nobody's": {
			[]PutAnswer{row(true, 1, 0), row(true, 2, 0), row(true, 3, 9), row(false, 4, 0)},
			[]Hint{{Channel: Channel{SystemJournal, "c"}, Version: 2, Wait: time.Minute}},
		},
		"nothing": {[]PutAnswer{row(false, 1, 0), row(true, 2, 9), row(false, 3, 9), row(true, 4, 9)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var h Hinter
			var told []Hint
			h.Listen(func(x Hint) { told = append(told, x) })
			h.TellPut("c", rows, test.answers)
			require.Equal(t, test.want, told)
		})
	}
}
