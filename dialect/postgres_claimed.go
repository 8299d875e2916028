package dialect

import (
	"fmt"
	"strconv"
	"strings"
)

// Claimed rows come in few columns, because each column of a row costs both
// sides about as much as a short text does: what most rows have as numbers with
// spaces between them, and what is seldom there as a JSON array of texts, or
// NULL.

// pgClaimed scans a row of claim_1 as a place, rowColumns and whether it is a
// probe. One serves for all rows of a claim, so that the lists are not
// allocated for each.
type pgClaimed struct {
	row Scanner
	pgPacked
	columns [4]any
	values  [9]any
	texts   [2]any
}

func (c *pgClaimed) Scan(to ...any) error {
	c.pgPacked = pgPacked{}
	c.columns = [4]any{to[1], to[5], &c.numbers, &c.words}
	if err := c.row.Scan(c.columns[:]...); err != nil {
		return err
	}
	c.values = [9]any{to[0], to[2], to[4], to[7], to[8], to[9], to[3], to[10], to[12]} // place to probe, as claim_1 has them
	c.texts = [2]any{to[6], to[11]}                                                    // headers, last_error
	return c.into(c.values[:], c.texts[:])
}

// pgClaimedMessage scans a row of claim_messages_1 as MessageColumns and
// whether it is a probe. It is open, so it has neither an outcome nor an end.
type pgClaimedMessage struct {
	row     Scanner
	reached *int64
	pgPacked
	columns [5]any
	values  [10]any
	texts   [4]any
}

func (c *pgClaimedMessage) Scan(to ...any) error {
	c.pgPacked = pgPacked{}
	c.columns = [5]any{to[1], to[11], to[5], &c.numbers, &c.words}
	if err := c.row.Scan(c.columns[:]...); err != nil {
		return err
	}
	c.values = [10]any{to[0], to[2], to[4], to[7], to[8], to[16], to[3], to[9], to[17], c.reached} // place to reached, as claim_messages_1 has them
	c.texts = [4]any{to[6], to[10], to[14], to[15]}                                                // headers, last_error, ref, code
	return c.into(c.values[:], c.texts[:])
}

type pgPacked struct {
	numbers string
	words   *string
}

// into parses the numbers into pointers to a [Place], a bool or an integer, and
// the words, if there are any, into pointers to texts.
func (p *pgPacked) into(numbers, words []any) error {
	rest := p.numbers
	for _, to := range numbers {
		var text string
		text, rest, _ = strings.Cut(rest, " ")
		if place, ok := to.(*Place); ok {
			if err := place.parse(text); err != nil {
				return err
			}
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return fmt.Errorf("read the numbers of a claimed row: %w", err)
		}
		switch to := to.(type) {
		case *int64:
			*to = n
		case *int:
			*to = int(n)
		case *bool:
			*to = n != 0
		default:
			return fmt.Errorf("read the numbers of a claimed row: into a %T", to)
		}
	}
	if p.words == nil {
		return nil
	}
	return jsonRow(*p.words).Scan(words...)
}
