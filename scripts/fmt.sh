#!/usr/bin/env bash
# Formats every tracked Rust file, those included that `cargo fmt` does not see because a macro declares their module.
#
#   scripts/fmt.sh            format
#   scripts/fmt.sh --check    change nothing; fail where something would change
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib/common.sh
case ${1:-} in
  '') set -- ;;
  --check) set -- --check ;;
  -h | --help) usage; exit ;;
  *) usage >&2; exit 2 ;;
esac
need_rust
# A file deleted but not yet committed is still tracked.
git ls-files -z -- '*.rs' | while IFS= read -r -d '' file; do
  [ ! -f "$file" ] || printf '%s\0' "$file"
done | xargs -0 rustfmt --edition 2024 "$@"
