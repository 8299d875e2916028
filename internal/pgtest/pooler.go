package pgtest

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// Pooler puts a pooler in transaction mode before the database of dsn, a URL,
// and returns the DSN through it. It keeps a number of connections to the
// server and lends them for one transaction each, the longest unused first, so
// that with two or more no two transactions in a row of an otherwise idle
// pooler meet the same session. Like the poolers of the field it cleans
// nothing up between transactions; unlike the newer of them it knows nothing
// of prepared statements.
func Pooler(t testing.TB, dsn string, connections int) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal("parse the pooler's dsn: not a URL")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listen for the pooler: %v", err)
	}
	p := &pooler{dsn: dsn, idle: make(chan *pgconn.HijackedConn, connections)}
	t.Cleanup(func() {
		l.Close()
		p.end()
	})
	for range connections {
		conn, err := p.dial()
		if err != nil {
			t.Fatalf("connect the pooler: %v", err)
		}
		p.idle <- conn
		p.parameters = conn.ParameterStatuses
	}
	p.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(conn) })
		}
	})
	u.Host = l.Addr().String()
	return u.String()
}

type pooler struct {
	dsn  string
	idle chan *pgconn.HijackedConn
	wg   sync.WaitGroup

	parameters map[string]string // what a server tells at a connection's start

	mu      sync.Mutex
	ended   bool
	clients []net.Conn
}

func (p *pooler) dial() (*pgconn.HijackedConn, error) {
	conn, err := pgconn.Connect(context.Background(), p.dsn)
	if err != nil {
		return nil, err
	}
	return conn.Hijack()
}

// end closes all connections and waits for what serves them.
func (p *pooler) end() {
	p.mu.Lock()
	p.ended = true
	for _, c := range p.clients {
		c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
	close(p.idle)
	for conn := range p.idle {
		conn.Conn.Close()
	}
}

// serve answers one client until it goes.
func (p *pooler) serve(conn net.Conn) {
	defer conn.Close()
	p.mu.Lock()
	ended := p.ended
	p.clients = append(p.clients, conn)
	p.mu.Unlock()
	if ended || p.greet(conn) != nil {
		return
	}
	c := &client{p: p, conn: conn}
	for {
		m, err := readMessage(conn)
		if err != nil || m[0] == 'X' || c.forward(m) != nil {
			c.abandon()
			return
		}
	}
}

// greet goes through a connection's start; any password will do.
func (p *pooler) greet(conn net.Conn) error {
	b := pgproto3.NewBackend(conn, conn)
	for {
		m, err := b.ReceiveStartupMessage()
		if err != nil {
			return err
		}
		switch m.(type) {
		case *pgproto3.SSLRequest, *pgproto3.GSSEncRequest:
			if _, err := conn.Write([]byte{'N'}); err != nil {
				return err
			}
			continue
		case *pgproto3.StartupMessage:
		default:
			return errors.New("cancel requests are not passed on")
		}
		b.Send(&pgproto3.AuthenticationOk{})
		for name, value := range p.parameters {
			b.Send(&pgproto3.ParameterStatus{Name: name, Value: value})
		}
		b.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
		b.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
		return b.Flush()
	}
}

// client is one client and what it has been lent.
type client struct {
	p    *pooler
	conn net.Conn

	mu       sync.Mutex
	server   *pgconn.HijackedConn // nil: none is lent
	returned chan struct{}        // closed when it no longer is
	open     int                  // ReadyForQuery messages still to come
	unsynced bool                 // the last message asked for none
}

// forward passes on a message of the client's, with a connection of its own
// for each transaction.
func (c *client) forward(m []byte) error {
	c.mu.Lock()
	if c.server == nil {
		c.mu.Unlock()
		server := <-c.p.idle // not under mu: others may hold all for long
		c.mu.Lock()
		c.server, c.returned = server, make(chan struct{})
		go c.answer(server, c.returned)
	}
	switch m[0] {
	case 'Q', 'S', 'F': // Query, Sync, FunctionCall
		c.open++
		c.unsynced = false
	default:
		c.unsynced = true
	}
	server := c.server
	c.mu.Unlock()
	_, err := server.Conn.Write(m)
	return err
}

// answer passes on the server's answers until the transaction has ended.
func (c *client) answer(server *pgconn.HijackedConn, returned chan struct{}) {
	defer close(returned)
	for {
		m, err := readMessage(server.Conn)
		if err != nil {
			c.conn.Close()
			return
		}
		done := false
		if m[0] == 'Z' {
			c.mu.Lock()
			c.open--
			if done = m[5] == 'I' && c.open == 0 && !c.unsynced; done {
				c.server = nil
				c.p.idle <- server
			}
			c.mu.Unlock()
		}
		if _, err := c.conn.Write(m); err != nil {
			c.conn.Close()
		}
		if done {
			return
		}
	}
}

// abandon ends what a client that has gone was lent, and lends a new
// connection in its place.
func (c *client) abandon() {
	c.mu.Lock()
	server, returned := c.server, c.returned
	c.mu.Unlock()
	if server == nil {
		return
	}
	server.Conn.Close()
	<-returned
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil {
		return // its transaction ended just before
	}
	if conn, err := c.p.dial(); err == nil {
		c.p.idle <- conn
	}
}

// readMessage reads one message: a type byte, a length that counts itself, a body.
func readMessage(r io.Reader) ([]byte, error) {
	m := make([]byte, 5)
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint32(m[1:])
	if n < 4 || n > 1<<30 {
		return nil, errors.New("bad message length")
	}
	m = append(m, make([]byte, n-4)...)
	_, err := io.ReadFull(r, m[5:])
	return m, err
}
