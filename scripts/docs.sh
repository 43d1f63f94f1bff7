#!/usr/bin/env bash
# Runs the code of the documentation that no Rust test can: the verifiers in Python and JavaScript, on the deliveries that docs/delivery.md gives.
#
#   scripts/docs.sh
#
# Needs python3 (3.9 or newer) and node (18 or newer).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/lib/common.sh
case ${1:-} in
  '') ;;
  -h | --help) usage; exit ;;
  *) usage >&2; exit 2 ;;
esac
for program in python3 node; do
  command -v "$program" >/dev/null 2>&1 ||
    die "$program is missing, and examples in its language cannot be run. Debian: apt-get install python3 nodejs; macOS: brew install python node"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# block FILE LANGUAGE WORD: prints the fenced block of that language that contains the word.
block() {
  awk -v fence="\`\`\`$2" -v word="$3" '
    $0 == fence { inside = 1; text = ""; next }
    inside && $0 == "```" { if (index(text, word)) { printf "%s", text; found = 1; exit } inside = 0 }
    inside { text = text $0 "\n" }
    END { exit !found }' "$1" || die "$1 has no block of $2 with '$3'"
}

block docs/delivery.md json genuine >"$work/deliveries.json"
block docs/delivery.md python 'def verify' >"$work/verify.py"
block docs/delivery.md js 'function verify' >"$work/verify.mjs"

cat >"$work/run.py" <<'PY'
import json, time
from verify import verify
deliveries = json.load(open("deliveries.json"))
for one in deliveries:
    time.time = lambda: one["now"]
    headers = {"X-OpenVibe-Signature-V2": one["signature"]}
    judged = verify(one["body"].encode(), headers, "0123456789abcdef0123456789abcdef")
    assert judged is one["genuine"], one
print(f"Python judges {len(deliveries)} deliveries as the page says")
PY
cat >"$work/run.mjs" <<'JS'
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { verify } from "./verify.mjs";
const deliveries = JSON.parse(readFileSync("deliveries.json", "utf8"));
for (const one of deliveries) {
  Date.now = () => one.now * 1000;
  const headers = { "x-openvibe-signature-v2": one.signature };
  const judged = verify(Buffer.from(one.body), headers, "0123456789abcdef0123456789abcdef");
  assert.strictEqual(judged, one.genuine, JSON.stringify(one));
}
assert.strictEqual(verify(Buffer.from("{}"), {}, "secret"), false);
console.log(`JavaScript judges ${deliveries.length} deliveries as the page says`);
JS
cd "$work"
judged=$(python3 run.py)
say "$judged"
judged=$(node run.mjs)
say "$judged"
