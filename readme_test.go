package sqloutbox_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadmeCompiles: each paragraph of the README's Go stands, but for its
// indentation and comments, in a program or test of this repository.
func TestReadmeCompiles(t *testing.T) {
	var compiled strings.Builder
	require.NoError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(name, "examples") && strings.HasSuffix(name, ".go") {
			var text []byte
			text, err = os.ReadFile(name)
			compiled.WriteString(normal(string(text)))
		}
		return err
	}))
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		for statement := range strings.SplitSeq(normal(block[1]), "\n") {
			if !strings.Contains(compiled.String(), statement+"\n") {
				t.Errorf("README.md has Go that no example compiles:\n%s", statement)
			}
		}
	}
}

// normal drops comments, indentation and blank lines.
func normal(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), " // ")
		if line != "" && !strings.HasPrefix(line, "//") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n") + "\n"
}
