package outboxtest_test

import (
	"maps"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

type (
	messageID rowID
	groupID   rowID // of its channel and group
)

// memoryMessage is a message with what a store knows beside the contract. Those
// in a database are never changed, only replaced.
type memoryMessage struct {
	outbox.Row
	claimed bool           // leased and not settled since, though the lease may have lapsed
	ended   outbox.Outcome // with which the token was settled; 0: it was not
	lapses  int            // leases in a row that nobody settled
}

// memoryGroup is who holds a group.
type memoryGroup struct {
	until time.Time
	token outbox.Token
}

// journalWrites is what a transaction wrote; nil stands for a deleted row.
type journalWrites struct {
	messages map[messageID]*memoryMessage
	groups   map[groupID]*memoryGroup
}

func newJournalWrites() journalWrites {
	return journalWrites{map[messageID]*memoryMessage{}, map[groupID]*memoryGroup{}}
}

func (w journalWrites) clone() journalWrites {
	return journalWrites{maps.Clone(w.messages), maps.Clone(w.groups)}
}

func (w journalWrites) commit(db *memoryDB) {
	merge(db.messages, w.messages)
	merge(db.groups, w.groups)
}

// merge writes rows into a table.
func merge[K comparable, V any](table, rows map[K]*V) {
	for k, v := range rows {
		if table[k] = v; v == nil {
			delete(table, k)
		}
	}
}

// message returns a message as the transaction sees it, to be changed and set.
func (t *memoryTx) message(id messageID) (memoryMessage, bool) {
	r, wrote := t.journal.messages[id]
	if !wrote {
		r = t.db.messages[id]
	}
	if r == nil {
		return memoryMessage{}, false
	}
	return *r, true
}

func (t *memoryTx) group(id groupID) memoryGroup {
	g, wrote := t.journal.groups[id]
	if !wrote {
		g = t.db.groups[id]
	}
	if g == nil {
		return memoryGroup{}
	}
	return *g
}

// held returns whether another transaction holds a row.
func (t *memoryTx) held(id any) bool { return t.db.locks[id] != nil && t.db.locks[id] != t }

func (t *memoryTx) setMessage(id messageID, r memoryMessage) {
	t.db.locks[id] = t
	t.journal.messages[id] = &r
}

func (t *memoryTx) deleteMessage(id messageID) {
	t.db.locks[id] = t
	t.journal.messages[id] = nil
}

func (t *memoryTx) setGroup(id groupID, g memoryGroup) {
	t.db.locks[id] = t
	t.journal.groups[id] = &g
}

// of returns a channel's messages as the transaction sees them.
func (t *memoryTx) of(channel string) map[messageID]memoryMessage {
	all := map[messageID]memoryMessage{}
	for id, r := range t.db.messages {
		if id.channel == channel {
			all[id] = *r
		}
	}
	for id, r := range t.journal.messages {
		switch {
		case r == nil:
			delete(all, id)
		case id.channel == channel:
			all[id] = *r
		}
	}
	return all
}
