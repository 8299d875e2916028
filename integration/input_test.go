package integration

import (
	"context"
	"database/sql"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// refusals are calls that are refused before anything is written.
var refusals = func() []refusal {
	var list []refusal
	add := func(name string, items ...outbox.Item[string]) {
		list = append(list, refusal{name, func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error {
			_, err := l.StageMany(ctx, tx, items)
			return err
		}})
	}
	good := outbox.Item[string]{Key: "good", Value: "good"}
	for name, key := range map[string]string{
		"empty":                 "",
		"of 513 bytes":          strings.Repeat("k", 513),
		"of a megabyte":         strings.Repeat("k", 1<<20),
		"with 0xff":             "a\xffb",
		"cut in a character":    "a\xe2\x82",
		"with a lone surrogate": "a\xed\xa0\x80",
		"with a NUL":            "a\x00b",
	} {
		add("key "+name, outbox.Item[string]{Key: key, Value: "v"})
		add("key "+name+", among good ones", good, outbox.Item[string]{Key: key, Value: "v"}, good)
		list = append(list, refusal{"delete key " + name, func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error {
			_, err := l.StageDelete(ctx, tx, key)
			return err
		}}, refusal{"read key " + name, func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error {
			_, err := l.Pending(ctx, outbox.SQL(tx), key)
			return err
		}})
	}
	for name, h := range map[string]outbox.Header{
		"without a name":         {"": "v"},
		"with a NUL in its name": {"a\x00": "v"},
		"with a NUL":             {"a": "\x00"},
		"with 0xff in its name":  {"\xff": "v"},
		"with 0xff":              {"a": "\xff"},
		"of ours":                {"outbox-trace": "v"},
		"over 8 KiB":             {"a": strings.Repeat("v", 8<<10)},
	} {
		add("header "+name, outbox.Item[string]{Key: "k", Header: h})
		add("header "+name+", of a tombstone", good, outbox.Item[string]{Key: "k", Header: h, Deleted: true})
	}
	add("payload over a megabyte", outbox.Item[string]{Key: "k", Value: strings.Repeat("v", 1<<20)})
	add("payload over a megabyte, among good ones", good, outbox.Item[string]{Key: "k", Value: strings.Repeat("v", 1<<20)})
	return list
}()

type refusal struct {
	name string
	call func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error
}

// TestG10BadInputIsRefusedBeforeAnythingIsWritten: each refusal is an
// ErrInvalid, alone in its transaction, and with the same text on both databases.
func TestG10BadInputIsRefusedBeforeAnythingIsWritten(t *testing.T) {
	texts := map[string]string{}
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		tx := s.begin()
		for _, r := range refusals {
			err := r.call(t.Context(), l, tx)
			require.ErrorIs(t, err, outbox.ErrInvalid, r.name)
			require.Less(t, len(err.Error()), 2000, r.name)
			if text, ok := texts[r.name]; ok {
				require.Equal(t, text, err.Error())
			}
			texts[r.name] = err.Error()
		}
		require.NoError(t, tx.Commit())
		require.True(t, s.empty())
	})
}

func TestG10LimitsThemselvesAreAllowed(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest(strings.Repeat("c", 128))
		for _, it := range []outbox.Item[string]{
			{Key: strings.Repeat("k", 512)},
			{Key: "with a value", Value: strings.Repeat("v", 1<<20-2)}, // and two quotes
			{Key: "with headers", Header: outbox.Header{"a": strings.Repeat("v", 8<<10-1)}},
			{Key: "\u00e9\u4e16\U0001f600'\"\\%_;--\x01\x7f\n\t"},
			{Key: " "}, {Key: "NULL"}, {Key: "$1"}, {Key: "?1"}, {Key: "e\u0301"}, {Key: "\u00e9"},
			{Key: "outbox-"}, {Key: "empty value of a header", Header: outbox.Header{"a": ""}},
		} {
			tx := s.begin()
			_, err := l.StageMany(t.Context(), tx, []outbox.Item[string]{it})
			require.NoError(t, err, it.Key)
			require.NoError(t, tx.Commit())
			e, err := l.Pending(t.Context(), nil, it.Key)
			require.NoError(t, err, it.Key)
			require.Equal(t, it.Key, e.Key)
			require.Equal(t, it.Value, e.Value)
			require.Equal(t, it.Header, e.Header)
		}
		require.Equal(t, 12, s.once(l, outbox.PublishOptions{}, newMirror().publish).Published)
	})
}

// TestG10KeysOfAnyContentFitTheIndex is field case S70: random bytes do not
// compress.
func TestG10KeysOfAnyContentFitTheIndex(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		random := func(n int) string {
			var b strings.Builder
			for b.Len() < n-3 {
				b.WriteRune(rune(0x10000 + rand.N(0xffff)))
			}
			return b.String() + strings.Repeat("x", n-b.Len())
		}
		for _, n := range []int{12, 64, 255, 511, 512} {
			l := s.latest(random(128))
			var items []outbox.Item[string]
			for range 30 {
				items = append(items, outbox.Item[string]{Key: random(n)})
			}
			tx := s.begin()
			_, err := l.StageMany(t.Context(), tx, items)
			require.NoError(t, err)
			require.NoError(t, tx.Commit())
			require.Equal(t, 30, s.once(l, outbox.PublishOptions{}, newMirror().publish).Published)
		}
	})
}

func TestG10BadOptionsAreRefused(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for name, o := range map[string]outbox.LatestOptions[string]{
			"long channel":        {Channel: strings.Repeat("c", 129)},
			"channel with NUL":    {Channel: "a\x00"},
			"channel with 0xff":   {Channel: "\xff"},
			"negative BatchDelay": {BatchDelay: -1},
			"least BatchDelay":    {BatchDelay: math.MinInt64},
			"BatchDelay of years": {BatchDelay: 366 * 24 * time.Hour},
			"longest BatchDelay":  {BatchDelay: math.MaxInt64},
			"negative MaxPayload": {MaxPayload: -1},
		} {
			_, err := outbox.NewLatest(s.store, o)
			require.ErrorIs(t, err, outbox.ErrInvalid, name)
		}
		_, err := outbox.NewLatest(nil, outbox.LatestOptions[string]{})
		require.ErrorIs(t, err, outbox.ErrInvalid)

		l := s.latest("orders")
		for name, o := range map[string]outbox.PublishOptions{
			"negative BatchSize":      {BatchSize: -1},
			"huge BatchSize":          {BatchSize: math.MaxInt},
			"negative InFlight":       {InFlight: -1},
			"huge InFlight":           {InFlight: 65},
			"negative AttemptTimeout": {AttemptTimeout: -1},
			"tiny AttemptTimeout":     {AttemptTimeout: 1},
			"endless AttemptTimeout":  {AttemptTimeout: math.MaxInt64},
			"negative Lease":          {Lease: -1},
			"Lease of a nanosecond":   {Lease: 1},
			"endless Lease":           {Lease: math.MaxInt64},
		} {
			_, err := outbox.NewRelay(outbox.RelayOptions{}, l.Publisher(failing, o))
			require.ErrorIs(t, err, outbox.ErrInvalid, name)
		}
		for name, o := range map[string]outbox.RelayOptions{
			"negative PollInterval":    {PollInterval: -1},
			"PollInterval of 1 ns":     {PollInterval: 1},
			"endless PollInterval":     {PollInterval: math.MaxInt64},
			"negative ShutdownTimeout": {ShutdownTimeout: -1},
		} {
			_, err := outbox.NewRelay(o, l.Publisher(failing, outbox.PublishOptions{}))
			require.ErrorIs(t, err, outbox.ErrInvalid, name)
		}
		for _, d := range []time.Duration{-1, math.MinInt64, math.MaxInt64} {
			require.ErrorIs(t, s.store.Pause(t.Context(), "orders", d, ""), outbox.ErrInvalid)
		}
		for _, channel := range []string{"", "a\x00", "\xff", strings.Repeat("c", 129)} {
			require.ErrorIs(t, s.store.Pause(t.Context(), channel, time.Hour, ""), outbox.ErrInvalid, channel)
		}
		require.ErrorIs(t, l.Discard(t.Context(), "k", -1), outbox.ErrInvalid)
		for _, limit := range []int{-1, 10_001, math.MaxInt} {
			_, err = l.List(t.Context(), "", limit)
			require.ErrorIs(t, err, outbox.ErrInvalid)
		}
		_, err = sqlstore.New(nil, s.dialect, sqlstore.Options{})
		require.ErrorIs(t, err, outbox.ErrInvalid)
		for _, d := range []dialect.Dialect{{}, s.dialect.In("\xff", ""), s.dialect.In(strings.Repeat("s", 64), ""), s.dialect.In("", "a\x00")} {
			_, err = sqlstore.New(s.db, d, sqlstore.Options{})
			require.ErrorIs(t, err, outbox.ErrInvalid)
		}
	})
}

// TestG10ExtremesOfDurationsDoNotOverflow is field case S62: what is allowed
// works, and nothing becomes old at its birth.
func TestG10ExtremesOfDurationsDoNotOverflow(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		year := 365 * 24 * time.Hour
		delayed, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: "delayed", BatchDelay: year})
		require.NoError(t, err)
		before := time.Now().Add(-time.Minute)
		s.stage(delayed, "k", "value")
		info, ok := entry(t, delayed, "k")
		require.True(t, ok)
		require.True(t, info.Due.After(before) && info.Due.Before(before.Add(year+time.Hour)), "%s", info.Due)
		require.Zero(t, info.Due.UnixMicro()%year.Microseconds())
		require.True(t, info.StagedAt.After(before))

		l := s.latest("orders")
		for delay, most := range map[time.Duration]time.Duration{
			math.MinInt64: 5 * time.Minute, // by the backoff
			-1:            5 * time.Minute,
			1:             time.Second,
			math.MaxInt64: year + time.Minute,
		} {
			s.stage(l, "k", "value")
			began := time.Now().Add(-time.Second)
			pass := s.once(l, outbox.PublishOptions{}, func(_ context.Context, batch []*outbox.Entry[string]) error {
				batch[0].Retry(delay)
				return nil
			})
			require.Equal(t, 1, pass.Retried)
			info, ok := entry(t, l, "k")
			require.True(t, ok)
			require.True(t, info.Due.After(began) && info.Due.Before(began.Add(most+time.Minute)), "Retry(%d) is due %s", delay, info.Due)
		}
		require.NoError(t, s.store.Pause(t.Context(), "orders", 100*year, "for ever"))
		stats, err := s.store.Stats(t.Context())
		require.NoError(t, err)
		require.InDelta(t, 100*year, stats[len(stats)-1].Paused, float64(time.Hour))
		require.NoError(t, s.store.Pause(t.Context(), "orders", 0, ""))
	})
}

// TestG10UnusableTransactionsAreErrTx: nil, ended, aborted, and of the other
// kind of database.
func TestG10UnusableTransactionsAreErrTx(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		ended := map[string]*sql.Tx{"nil": nil}
		ended["committed"] = s.begin()
		require.NoError(t, ended["committed"].Commit())
		ended["rolled back"] = s.begin()
		require.NoError(t, ended["rolled back"].Rollback())
		if s.postgres() {
			ended["aborted"] = s.begin()
			_, err := ended["aborted"].Exec(`SELECT 1/0`)
			require.Error(t, err)
		}
		for name, tx := range ended {
			for call, err := range everyStagingCall(t.Context(), l, tx) {
				if name == "nil" && call == "Pending" {
					require.ErrorIs(t, err, outbox.ErrNotFound) // nil reads what is committed
					continue
				}
				require.ErrorIs(t, err, outbox.ErrTx, "%s, %s", call, name)
			}
		}
		require.True(t, s.empty())
	})
}

func everyStagingCall(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) map[string]error {
	calls := map[string]error{}
	_, calls["Stage"] = l.Stage(ctx, tx, "k", "value")
	_, calls["StageDelete"] = l.StageDelete(ctx, tx, "k")
	_, calls["StageMany"] = l.StageMany(ctx, tx, []outbox.Item[string]{{Key: "k"}, {Key: "l"}})
	_, calls["StageIn"] = l.StageIn(ctx, outbox.SQL(tx), outbox.Item[string]{Key: "k"})
	_, calls["Pending"] = l.Pending(ctx, outbox.SQL(tx), "k")
	return calls
}

// TestG10TransactionOfAnotherKindOfDatabaseIsErrTx, and nothing is written.
func TestG10TransactionOfAnotherKindOfDatabaseIsErrTx(t *testing.T) {
	if testing.Short() {
		return
	}
	postgres, lite := onPostgres(t), onSQLite(t)
	for name, pair := range map[string][2]*site{"store of Postgres": {postgres, lite}, "store of SQLite": {lite, postgres}} {
		t.Run(name, func(t *testing.T) {
			l, other := pair[0].latest("orders"), pair[1]
			stage := map[string]func(tx *sql.Tx) error{
				"Stage": func(tx *sql.Tx) error { _, err := l.Stage(t.Context(), tx, "k", "value"); return err },
				"StageMany": func(tx *sql.Tx) error {
					_, err := l.StageMany(t.Context(), tx, []outbox.Item[string]{{Key: "k"}, {Key: "l"}})
					return err
				},
				"Pending": func(tx *sql.Tx) error { _, err := l.Pending(t.Context(), outbox.SQL(tx), "k"); return err },
			}
			for call, f := range stage {
				tx := other.begin()
				require.ErrorIs(t, f(tx), outbox.ErrTx, call)
				if !other.postgres() {
					_, err := tx.Exec(`INSERT INTO app VALUES ($1, 'after')`, name+call)
					require.NoError(t, err)
				}
				_ = tx.Rollback() // the other database may have aborted it
			}
			require.True(t, other.empty())
		})
	}
}
