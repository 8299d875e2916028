package integration

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// A cut is how a connection fails in the middle of a statement.
type cut string

const (
	cutRequest    cut = "before the request"
	cutMidRequest cut = "in the middle of the request"
	cutAnswer     cut = "before the answer"
	cutMidAnswer  cut = "in the middle of the answer"
	cutSilently   cut = "without a word before the answer" // it stays open, as behind a firewall that forgot it
)

var cuts = []cut{cutRequest, cutMidRequest, cutAnswer, cutMidAnswer, cutSilently}

// tookEffect reports whether the server has run the statement.
func (c cut) tookEffect() bool { return c != cutRequest && c != cutMidRequest }

// proxy stands between the tests and a Postgres and fails as it is told.
type proxy struct {
	target string
	dsn    string // through it

	mu    sync.Mutex
	text  string // the next statement that contains it
	how   cut    // is cut so; empty: none is
	cuts  int    // that were made
	dark  chan struct{}
	conns []net.Conn
}

// proxy starts a proxy before the site's server. Connections through it send
// the text of each statement each time, for the proxy to see.
func (s *site) proxy() *proxy {
	s.t.Helper()
	u, err := url.Parse(s.dsn)
	require.NoError(s.t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(s.t, err)
	p := &proxy{target: u.Host}
	u.Host = l.Addr().String()
	q := u.Query()
	q.Set("default_query_exec_mode", "exec")
	u.RawQuery = q.Encode()
	p.dsn = u.String()
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { p.serve(client) })
		}
	})
	s.t.Cleanup(func() {
		l.Close()
		p.light()
		p.mu.Lock()
		for _, c := range p.conns {
			c.Close()
		}
		p.mu.Unlock()
		serving.Wait()
	})
	return p
}

// through returns the site as it is seen through the proxy.
func (s *site) through(p *proxy) *site {
	other := *s
	other.dsn = p.dsn
	other.db = other.open()
	other.store = other.newStore(sqlstore.Options{})
	return &other
}

// cutNext cuts the next statement that contains a text.
func (p *proxy) cutNext(text string, how cut) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.text, p.how = text, how
}

// made returns how many cuts were made.
func (p *proxy) made() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cuts
}

// darken lets nothing through any more, without closing anything, until light.
func (p *proxy) darken() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dark = make(chan struct{})
}

func (p *proxy) light() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dark != nil {
		close(p.dark)
	}
	p.dark = nil
}

// pass waits while it is dark.
func (p *proxy) pass() {
	p.mu.Lock()
	dark := p.dark
	p.mu.Unlock()
	if dark != nil {
		<-dark
	}
}

// wanted returns how to cut a message of the client's.
func (p *proxy) wanted(m []byte) cut {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.how == "" || m[0] != 'Q' && m[0] != 'P' || !bytes.Contains(m, []byte(p.text)) {
		return ""
	}
	how := p.how
	p.how = ""
	p.cuts++
	return how
}

func (p *proxy) serve(client net.Conn) {
	defer client.Close()
	p.pass()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	p.mu.Lock()
	p.conns = append(p.conns, client, server)
	p.mu.Unlock()
	start, err := frame(client, 0)
	if err != nil {
		return
	}
	if _, err := server.Write(start); err != nil {
		return
	}
	answers := &answers{p: p, client: client, server: server}
	var answering sync.WaitGroup
	answering.Go(answers.run)
	p.requests(client, server, answers)
	server.Close()
	answering.Wait()
}

// requests passes on what the client sends.
func (p *proxy) requests(client, server net.Conn, a *answers) {
	for {
		m, err := frame(client, 1)
		if err != nil {
			return
		}
		p.pass()
		switch how := p.wanted(m); how {
		case "":
		case cutRequest:
			return
		case cutMidRequest:
			_, _ = server.Write(m[:len(m)/2])
			return
		default:
			a.cutNext(how)
		}
		if _, err := server.Write(m); err != nil {
			return
		}
	}
}

// answers passes on what the server sends.
type answers struct {
	p              *proxy
	client, server net.Conn
	mu             sync.Mutex
	how            cut // to be done with the next answer
}

func (a *answers) cutNext(how cut) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.how = how
}

func (a *answers) cut() cut {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.how
}

func (a *answers) run() {
	var kept []byte // of the answer that is to be cut
	for {
		m, err := frame(a.server, 1)
		if err != nil {
			a.client.Close()
			return
		}
		a.p.pass()
		how := a.cut()
		if how == "" {
			if _, err := a.client.Write(m); err != nil {
				return
			}
			continue
		}
		if kept = append(kept, m...); m[0] != 'Z' { // ReadyForQuery: all has taken effect
			continue
		}
		switch how {
		case cutMidAnswer:
			_, _ = a.client.Write(kept[:len(kept)/2])
		case cutSilently:
			_, _ = io.Copy(io.Discard, a.server)
		}
		a.client.Close()
		return
	}
}

// frame reads one message: a type of so many bytes, a length that counts
// itself, a body.
func frame(r io.Reader, kind int) ([]byte, error) {
	m := make([]byte, kind+4)
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint32(m[kind:]))
	m = append(m, make([]byte, n-4)...)
	_, err := io.ReadFull(r, m[kind+4:])
	return m, err
}
