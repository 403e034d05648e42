#!/usr/bin/env bash
# Shows `go test -v` as one line a test, and everything of a test that fails.
# The status of the test itself is kept by pipefail in the caller.
set -euo pipefail
awk '
/^=== RUN/ { name = $3; text = ""; next }
/^=== (CONT|PAUSE|NAME)/ { next }
/^ *--- (PASS|FAIL|SKIP)/ { print; if ($2 == "FAIL:") printf "%s", text; text = ""; fflush(); next }
/^(PASS|FAIL|ok|panic|\?)/ { print text $0; text = ""; fflush(); failing = /^panic/; next }
{ if (failing) print; else text = text $0 "\n" }
END { printf "%s", text }'
