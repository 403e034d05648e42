#!/usr/bin/env bash
# Regenerates everything in a copy of the tree and fails if a committed file differs.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' f; do
	if [ -e "$f" ]; then printf '%s\0' "$f"; fi
done | tar --null -T - -cf - | tar -xf - -C "$copy"
mkdir -p "$copy/bin"
mkdir -p bin/tools
ln -s "$PWD/bin/tools" "$copy/bin/tools"
make --no-print-directory -C "$copy" generate >"$copy.log" 2>&1 || { cat "$copy.log" >&2; rm -f "$copy.log"; exit 1; }
rm -f "$copy.log"
stale=0
while IFS= read -r -d '' f; do
	if ! cmp -s "$f" "$copy/$f"; then
		echo "stale: $f (run: make generate)" >&2
		stale=1
	fi
done < <(cd "$copy" && find . \( -name '*.pb.go' -o -name '*.connect.go' -o -name '*_bpfel*.go' -o -name '*_bpfel*.o' \) -not -path './bin/*' -print0)
exit $stale
