package outboxtest

// Names returns the names of the subtests that apply.
func (s LatestSuite) Names() []string {
	names := []string{}
	for _, test := range s.tests() {
		names = append(names, test.name)
	}
	return names
}

// Names returns the names of the subtests that apply.
func (s JournalSuite) Names() []string {
	names := []string{}
	for _, test := range s.tests() {
		names = append(names, test.name)
	}
	return names
}
