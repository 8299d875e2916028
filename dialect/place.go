package dialect

import (
	"fmt"
	"strconv"
)

// Place is where a database last saw a row, for a quick way back to it: on
// SQLite its rowid, on Postgres its ctid, block<<16 | offset. A row that has
// moved since is found by its key. 0 is no place.
type Place int64

// Scan implements sql.Scanner: an integer, or a ctid as text, "(block,offset)".
func (p *Place) Scan(src any) error {
	switch v := src.(type) {
	case int64:
		*p = Place(v)
		return nil
	case string:
		return p.parse(v)
	case []byte:
		return p.parse(string(v))
	}
	return fmt.Errorf("read the place of a row: it is a %T", src)
}

func (p *Place) parse(text string) error {
	var block, offset int64
	n, at := &block, 0
	for i := range len(text) {
		switch c := text[i]; {
		case c >= '0' && c <= '9':
			*n = *n*10 + int64(c-'0')
		case c == ',':
			n, at = &offset, i
		}
	}
	if at == 0 {
		return fmt.Errorf("read the place of a row: %q is no ctid", text)
	}
	*p = Place(block<<16 | offset)
	return nil
}

// tids are places as Postgres reads them.
func tids(places []Place) []string {
	texts := make([]string, len(places))
	buf := make([]byte, 0, 24)
	for i, p := range places {
		buf = append(buf[:0], '(')
		buf = strconv.AppendInt(buf, int64(p)>>16, 10)
		buf = append(buf, ',')
		buf = strconv.AppendInt(buf, int64(p)&0xffff, 10)
		texts[i] = string(append(buf, ')'))
	}
	return texts
}
