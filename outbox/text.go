package outbox

import (
	"strings"
	"unicode/utf8"
)

const (
	maxKeyBytes     = 512
	maxChannelBytes = 128
)

// ValidChannel returns an ErrInvalid where name cannot be a channel's: empty,
// over 128 bytes, invalid UTF-8 or with a NUL.
func ValidChannel(name string) error { return validText("channel", name, maxChannelBytes) }

// validText refuses what Postgres and SQLite could not both keep unchanged,
// and what would not fit an index.
func validText(what, s string, limit int) error {
	switch {
	case s == "":
		return invalid("%s is empty", what)
	case len(s) > limit:
		return invalid("%s is %d bytes long, over the limit of %d", what, len(s), limit)
	case !utf8.ValidString(s):
		return invalid("%s is not valid UTF-8", what)
	case strings.ContainsRune(s, 0):
		return invalid("%s contains a NUL", what)
	}
	return nil
}

// ErrorText makes a text storable: valid UTF-8, no NUL, at most MaxErrorText
// bytes.
func ErrorText(s string) string { return shortText(s, MaxErrorText) }

func shortText(s string, limit int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= limit {
		return s
	}
	cut := limit - len("…")
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
