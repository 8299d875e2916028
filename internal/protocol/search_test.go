package protocol

import (
	"strings"
	"testing"
)

// step is what may happen next, and the state after it. A fault says which
// guarantee the step itself broke.
type step[S any] struct {
	name  string
	next  S
	fault string
}

// search tries all interleavings breadth first, so that the trace of the first
// fault is a shortest one. It returns an empty trace if there is none. An end
// is a state after which nothing can happen.
func search[S comparable](start S, steps func(S) []step[S], broken func(s S, end bool) string) (states int, trace string) {
	type origin struct {
		from S
		name string
	}
	seen := map[S]origin{start: {}}
	queue := []S{start}
	for ; len(queue) > 0; queue = queue[1:] {
		at := queue[0]
		for _, st := range steps(at) {
			_, known := seen[st.next]
			if known && st.fault == "" {
				continue
			}
			fault := st.fault
			if fault == "" {
				fault = broken(st.next, len(steps(st.next)) == 0)
			}
			if fault != "" {
				lines := []string{st.name, "FAULT: " + fault}
				for s := at; s != start; s = seen[s].from {
					lines = append([]string{seen[s].name}, lines...)
				}
				return len(seen), strings.Join(lines, "\n")
			}
			seen[st.next] = origin{at, st.name}
			queue = append(queue, st.next)
		}
	}
	return len(seen), ""
}

// requireTrace fails unless there is a fault exactly where one is expected.
func requireTrace(t *testing.T, want string, states int, trace string) {
	t.Helper()
	t.Logf("%d states\n%s", states, trace)
	if want == "" && trace != "" || !strings.Contains(trace, want) {
		t.Fatalf("want a fault with %q, have:\n%s", want, trace)
	}
}
