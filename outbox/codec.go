package outbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// A Codec turns values into payloads and back. It must be safe for concurrent
// use. Encode may add headers (a content type, a schema's name) and Decode is
// given them again; h is never nil in Encode and may be nil in Decode. The
// texts of its errors are logged and stored: they must not contain the value.
// Neither method is called for a tombstone.
type Codec[T any] interface {
	Encode(h Header, v T) ([]byte, error)
	Decode(h Header, payload []byte) (T, error)
}

// jsonCodec is the default. It decodes into T itself, never into any, so that
// large integers survive, and leaves <, > and & as they are.
type jsonCodec[T any] struct{}

func (jsonCodec[T]) Encode(_ Header, v T) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, &codecError{"encode JSON: " + jsonFault(err), err}
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

func (jsonCodec[T]) Decode(_ Header, payload []byte) (T, error) {
	var v T
	if err := json.Unmarshal(payload, &v); err != nil {
		return v, &codecError{"decode JSON: " + jsonFault(err), err}
	}
	return v, nil
}

// codecError has a text without any part of the value; the cause, whose text
// may have some, stays reachable with errors.As.
type codecError struct {
	text  string
	cause error
}

func (e *codecError) Error() string { return e.text }
func (e *codecError) Unwrap() error { return e.cause }

// jsonFault says what is wrong without quoting the value, as the texts of
// encoding/json and of UnmarshalJSON methods do.
func jsonFault(err error) string {
	var (
		syntax      *json.SyntaxError
		misfit      *json.UnmarshalTypeError
		unsupported *json.UnsupportedTypeError
		marshaler   *json.MarshalerError
	)
	switch {
	case errors.As(err, &syntax):
		return fmt.Sprintf("malformed at byte %d", syntax.Offset)
	case errors.As(err, &misfit):
		kind, _, _ := strings.Cut(misfit.Value, " ")
		return fmt.Sprintf("%s does not fit %s at %q (byte %d)", kind, misfit.Type, misfit.Field, misfit.Offset)
	case errors.As(err, &unsupported):
		return fmt.Sprintf("type %s is not supported", unsupported.Type)
	case errors.As(err, &marshaler):
		return fmt.Sprintf("marshaling %s failed with %T", marshaler.Type, marshaler.Err)
	}
	return fmt.Sprintf("%T", err)
}
