#!/usr/bin/env bash
# Runs every fuzz target of this module: scripts/fuzz.sh TIME [BUILD FLAG...]
#
# It finds the targets itself, so that a new one cannot be forgotten. TIME is
# for each: a duration, or a number of inputs such as 100x. A duration may end in
# the middle of an input, which go test then calls a failure, "context deadline
# exceeded". Without build flags inputs are guided by coverage, for which all
# packages are compiled anew, SQLite among them. With those of the tests
# (scripts/fuzz.sh 100x -race) nothing is compiled that they have not compiled,
# and inputs are random changes of the seeds: right for a short look.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:?usage: scripts/fuzz.sh TIME [BUILD FLAG...]}
shift
[ $# -gt 0 ] || set -- -fuzz .
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
n=0
for package in $(grep -rlE --include='*_test.go' '^func Fuzz' . | xargs -n 1 dirname | sort -u); do
	go test -c "$@" -o "$dir/fuzz.test" "$package"
	for target in $(grep -hoE '^func Fuzz[A-Za-z0-9_]*' "$package"/*_test.go | cut -d ' ' -f 2); do
		echo "fuzz $package $target" >&2
		# Where it finds something, the input goes to testdata/fuzz, which ordinary tests then run.
		(cd "$package" && "$dir/fuzz.test" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$time" \
			-test.fuzzcachedir "$(go env GOCACHE)/fuzz/sqloutbox" -test.timeout 60m >"$dir/out" 2>&1) || { cat "$dir/out"; exit 1; }
		n=$((n + 1))
	done
done
[ "$n" -gt 0 ] || { echo "there is no fuzz target" >&2; exit 1; }
echo "$n fuzz targets ran for $time each" >&2
