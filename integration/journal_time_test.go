package integration

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

func TestSmokePut(t *testing.T) {
	s := onPostgres(t)
	ctx := t.Context()
	db := s.open()
	db.SetMaxOpenConns(1)
	store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	var pid int
	require.NoError(t, db.QueryRow("select pg_backend_pid()").Scan(&pid))
	read := func(p string) time.Duration {
		b, err := os.ReadFile(p)
		require.NoError(t, err)
		var ns int64
		fmt.Sscan(string(b), &ns)
		return time.Duration(ns)
	}
	cpu := func() time.Duration { return read(fmt.Sprintf("/proc/%d/schedstat", pid)) }
	raw := s.dialect.Render(`INSERT INTO {t:messages} AS m (seq, channel, key, due, created_at, headers, payload)
			SELECT nextval({s:seq}::regclass), $1::text, $2::text, n.now + $5::bigint, n.now, $4::text, $3::bytea
			FROM (SELECT coalesce($6::bigint, (date_part('epoch', clock_timestamp()) * 1000000)::bigint) AS now OFFSET 0) AS n
			ON CONFLICT (channel, key) DO NOTHING
			RETURNING m.created_at::text || ';0;' || m.seq`)
	ins := `WITH put AS (INSERT INTO {t:messages} AS m (seq, channel, key, due, created_at, headers, payload)
			SELECT nextval({s:seq}::regclass), $1::text, $2::text, n.now + $5::bigint, n.now, $4::text, $3::bytea
			FROM (SELECT coalesce($6::bigint, (date_part('epoch', clock_timestamp()) * 1000000)::bigint) AS now OFFSET 0) AS n
			ON CONFLICT (channel, key) DO NOTHING
			RETURNING m.created_at, m.seq) `
	nulls := `NULL::text, NULL::text, NULL::bigint, NULL::bigint, NULL::integer, NULL::bytea, NULL::text, NULL::bigint, NULL::bigint, NULL::bigint,
		NULL::text, NULL::text, NULL::smallint, NULL::bigint, NULL::text, NULL::text, NULL::boolean`
	of := `x.place::text, x.key, x.seq, x.token, x.attempt, x.payload, x.headers, x.created_at, x.due, x.lease_until,
		x.last_error, x.grp, x.outcome, x.completed_at, x.ref, x.code, x.ambiguous`
	fn := `{t:put_1}($1::text, ARRAY[$2::text], NULL, ARRAY[$3::bytea], ARRAY[$4::text], ARRAY[$5::bigint],
			0, ARRAY[NULL::bigint], $6::bigint) AS x`
	variants := map[string]string{
		"cte": ins + `SELECT p.created_at || ';0;' || p.seq FROM put AS p`,
		"nulls": ins + `SELECT p.created_at || ';0;' || p.seq, ` + nulls + ` FROM put AS p`,
		"union": ins + `SELECT p.created_at || ';0;' || p.seq FROM put AS p UNION ALL SELECT x.answer FROM ` + fn + ` WHERE NOT EXISTS (SELECT FROM put)`,
		"all": ins + `SELECT p.created_at || ';0;' || p.seq, ` + nulls + ` FROM put AS p UNION ALL SELECT x.answer, ` + of + ` FROM ` + fn + ` WHERE NOT EXISTS (SELECT FROM put)`,
	}
	const n = 300
	best := map[string]time.Duration{}
	for round := range 60 {
		for _, name := range []string{"raw", "cte", "put", "grouped"} {
			s.exec(s.dialect.Render(`TRUNCATE {t:messages}, {t:groups}`))
			start, wall := cpu(), time.Now()
			for i := range n {
				key := fmt.Sprintf("%s %d %d", name, round, i)
				tx, err := db.BeginTx(ctx, nil)
				require.NoError(t, err)
				switch name {
				case "raw":
					var a string
					require.NoError(t, tx.QueryRowContext(ctx, raw, "c", key, []byte("some payload"), "", int64(0), nil).Scan(&a))
				case "cte", "nulls", "union", "all":
					rows, err := tx.QueryContext(ctx, s.dialect.Render(variants[name]), "c", key, []byte("some payload"), "", int64(0), nil)
					require.NoError(t, err)
					for rows.Next() {
					}
					require.NoError(t, rows.Close())
				case "put":
					_, err := store.PutRows(ctx, outbox.SQL(tx), "c", []outbox.PutRow{{Key: key, Payload: []byte("some payload")}}, 0)
					require.NoError(t, err)
				case "grouped":
					_, err := store.PutRows(ctx, outbox.SQL(tx), "c", []outbox.PutRow{{Key: key, Group: fmt.Sprint(i % 100), Payload: []byte("some payload")}}, 0)
					require.NoError(t, err)
				}
				require.NoError(t, tx.Commit())
			}
			if d := (cpu() - start) / n; round > 0 && (best[name] == 0 || d < best[name]) {
				best[name] = d
			}
			_ = wall
		}
	}
	fmt.Println("wall", best)
}
