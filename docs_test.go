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

// TestPagesNameWhatExists: the tests that the pages under docs name, those of
// the contract included, and the files that they and the README link to.
func TestPagesNameWhatExists(t *testing.T) {
	tests := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(|^\t\{"([A-Z]\w+)", \w`)
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllStringSubmatch(string(source), -1) {
			tests[m[1]+m[2]] = true
		}
		return err
	}))
	pages, err := filepath.Glob("docs/*.md")
	require.NoError(t, err)
	require.NotEmpty(t, pages)
	named := 0
	for _, page := range append(pages, "README.md", "CHANGELOG.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllStringSubmatch(string(text), -1) {
			require.True(t, tests[m[1]], "%s names %s, which is no test", page, m[1])
			named++
		}
		for _, list := range regexp.MustCompile("contract ((?:`[A-Z]\\w+`(?:, )?)+)").FindAllStringSubmatch(string(text), -1) {
			for _, m := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(list[1], -1) {
				require.True(t, tests[m[1]], "%s names %s, which is no test of the contract", page, m[1])
				named++
			}
		}
		for _, m := range regexp.MustCompile(`\]\(([^)#]+)[^)]*\)`).FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(m[1], "://") {
				_, err := os.Stat(filepath.Join(filepath.Dir(page), m[1]))
				require.NoError(t, err, page)
			}
		}
	}
	require.Greater(t, named, 150)
}
