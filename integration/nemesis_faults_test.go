//go:build unix

package integration

import (
	"errors"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A lane is one sort of what the nemesis does. Lanes run side by side, so that
// faults meet; each step heals what it broke before the next one.
type lane struct {
	od    *ordeal
	r     *rand.Rand
	admin *site // for SQLite a pool that is never full; straight to the server for Postgres
	w     *writer
}

// harass runs all lanes for a while and returns when all is healed.
func (od *ordeal) harass(length time.Duration) {
	lanes := map[string]func(*lane){"processes": (*lane).process, "clocks": (*lane).step, "holders": (*lane).hold, "people": (*lane).operate}
	if od.s.postgres() {
		lanes["servers"], lanes["networks"] = (*lane).server, (*lane).network
	} else {
		lanes["files"] = (*lane).file
	}
	end := time.Now().Add(length)
	var wg sync.WaitGroup
	for name, next := range lanes {
		admin := *od.s
		admin.db = admin.open()
		l := &lane{od: od, r: od.random(name), admin: &admin, w: od.newWriter(name, od.s)}
		wg.Go(func() {
			for {
				l.sleep(100*time.Millisecond, time.Second) // in which work gets done
				if time.Now().After(end) {
					return
				}
				next(l)
			}
		})
	}
	wg.Wait()
}

func (l *lane) between(least, most time.Duration) time.Duration {
	return (least + time.Duration(l.r.Int64N(int64(most-least)))).Truncate(time.Millisecond)
}

func (l *lane) sleep(least, most time.Duration) { time.Sleep(l.between(least, most)) }

// process kills, suspends and deploys relays.
func (l *lane) process() {
	i := l.r.IntN(ordealRelays)
	p := l.od.fleet[i]
	switch l.r.IntN(5) {
	case 0, 1:
		p.alive()
		l.od.note("kill %s", p.name)
		p.kill()
	case 2:
		l.od.note("deploy %s", p.name)
		p.retire(false)
	default:
		d := l.between(ordealLease/4, 5*ordealLease/2)
		l.od.note("suspend %s for %s", p.name, d)
		_ = p.cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(d)
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
		l.od.note("continue %s", p.name)
		p.alive()
		return
	}
	l.sleep(0, ordealLease/2)
	p = l.od.start(i)
	l.od.mu.Lock()
	l.od.fleet[i] = p
	l.od.mu.Unlock()
	l.od.note("start %s", p.name)
}

// member returns a relay, for lanes other than that of processes.
func (l *lane) member() *process {
	l.od.mu.Lock()
	defer l.od.mu.Unlock()
	return l.od.fleet[l.r.IntN(ordealRelays)]
}

// step puts the clock of a relay, or of the application, forward or back.
func (l *lane) step() {
	off, d := l.between(-ordealStep, ordealStep), l.between(50*time.Millisecond, 3*ordealLease/2)
	if l.r.IntN(4) == 0 {
		l.od.note("clock of the application by %s for %s", off, d)
		l.od.clock.set(off)
		time.Sleep(d)
		l.od.clock.set(0)
		return
	}
	p := l.member()
	l.od.note("clock of %s by %s for %s", p.name, off, d)
	p.tell("clock %d", off)
	time.Sleep(d)
	p.tell("clock 0")
}

// hold holds a transaction open.
func (l *lane) hold() {
	most := ordealLease
	if !l.od.s.postgres() {
		most = ordealLease / 3 // there it keeps all others from writing
	}
	d := l.between(most/10, 3*most/2)
	l.od.note("hold a transaction for %s", d)
	l.w.deal(d)
}

// operate does what people and deployments do.
func (l *lane) operate() {
	channel := []string{stateChannel, windowChannel, resendChannel, parkChannel, batchChannel}[l.r.IntN(5)]
	ctx, cancel := within(5 * time.Second)
	defer cancel()
	switch l.r.IntN(6) {
	case 0, 1:
		l.od.note("purge and migrate")
		var wg sync.WaitGroup
		wg.Go(func() { _ = migrations.Up(ctx, l.admin.db, l.admin.dialect) })
		for _, channel := range []string{resendChannel, parkChannel, batchChannel} {
			wg.Go(func() {
				_, _ = l.od.s.store.PurgeMessages(ctx, channel, outbox.Purge{States: []outbox.State{outbox.StateSent}, Age: ordealLease, Limit: 100})
			})
		}
		wg.Wait()
	case 2:
		d := l.between(50*time.Millisecond, ordealLease)
		l.od.note("pause channel %s for %s", channel, d)
		_ = l.od.s.store.Pause(ctx, channel, d, "the nemesis")
	case 3:
		l.od.note("resume channel %s", channel)
		_ = l.od.s.store.Pause(ctx, channel, 0, "")
	case 4:
		d := l.between(50*time.Millisecond, ordealLease/2)
		l.od.note("down for %s: the destination of %s", d, channel)
		l.od.end.goDown(channel, d)
	default:
		l.od.note("decide over dead and unknown messages")
		_ = l.od.decide(true) // the database may be away
	}
}

// server kills the Postgres, or connections to it.
func (l *lane) server() {
	const backends = `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()`
	switch l.r.IntN(5) {
	case 0:
		d := l.between(0, ordealLease/2)
		l.od.note("restart postgres, away for %s", d)
		err := l.od.cluster.Stop(pgtest.Immediate)
		time.Sleep(d)
		if err = errors.Join(err, l.od.cluster.Start()); err != nil {
			l.od.fail(item{}, "restart: %v", err)
		}
	case 1:
		l.od.note("crash postgres")
		if err := errors.Join(l.od.cluster.Kill(), l.od.cluster.Start()); err != nil {
			l.od.fail(item{}, "crash: %v", err)
		}
	case 2:
		l.od.note("terminate all backends")
		_, _ = l.admin.db.Exec(backends)
	default:
		for range 1 + l.r.IntN(3) {
			l.od.note("terminate a backend")
			_, _ = l.admin.db.Exec(backends+` AND pid = (SELECT pid FROM pg_stat_activity WHERE datname = current_database()
				AND backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY md5($1::text || pid) LIMIT 1)`, l.r.Int64())
			l.sleep(0, 50*time.Millisecond)
		}
	}
}

// network cuts and delays connections through the proxy.
func (l *lane) network() {
	statements := []string{"look_", "claim_1", "claim_messages_", "extend_", "settle_1", "settle_messages_", "outbox_entries", "put_", "commit", "INSERT INTO app"}
	switch l.r.IntN(4) {
	case 0:
		d := l.between(ordealLease/10, 2*ordealLease)
		l.od.note("delay everything through the proxy by %s", d)
		l.od.proxy.darken()
		time.Sleep(d)
		l.od.proxy.light()
	case 1:
		l.od.note("drop all connections through the proxy")
		l.od.proxy.drop()
	default:
		text, how := statements[l.r.IntN(len(statements))], cuts[l.r.IntN(len(cuts))]
		l.od.note("cut the next statement with %s %s", text, how)
		l.od.proxy.cutNext(text, how)
	}
}

// drop closes all connections.
func (p *proxy) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}

// file troubles a SQLite file.
func (l *lane) file() {
	switch l.r.IntN(3) {
	case 0:
		d := l.between(ordealLease/5, ordealLease)
		l.od.note("fill the disk for %s", d)
		l.fillUp()
		time.Sleep(d)
		l.full(0)
		_, _ = l.admin.db.Exec(`DELETE FROM ballast`)
	case 1:
		d := l.between(ordealLease/10, ordealLease)
		l.od.note("lock the file for %s", d)
		tx, err := l.admin.db.Begin() // immediate, by its DSN
		time.Sleep(d)
		if err == nil {
			_ = tx.Rollback()
		}
	default:
		l.od.note("checkpoint")
		_, _ = l.admin.db.Exec(`PRAGMA wal_checkpoint(TRUNCATE)`)
	}
}

// fillUp takes the free pages of the file and lets nobody have others.
func (l *lane) fillUp() {
	var free int64
	if err := l.admin.db.QueryRow(`PRAGMA freelist_count`).Scan(&free); err == nil {
		_, _ = l.admin.db.Exec(`INSERT INTO ballast SELECT zeroblob($1)`, free*4096)
	}
	l.full(1)
}

func (l *lane) full(pages int64) {
	fill(l.od.s.db, &l.od.pages, pages)
	l.od.mu.Lock()
	fleet := append([]*process(nil), l.od.fleet...)
	l.od.mu.Unlock()
	for _, p := range fleet {
		p.tell("full %d", pages)
	}
}

// decided reports whether a verb of people was refused because somebody or
// something else was quicker.
func decided(err error) bool {
	return errors.Is(err, outbox.ErrState) || errors.Is(err, outbox.ErrNotFound) || errors.Is(err, outbox.ErrBusy)
}
