#!/usr/bin/env bash
# Runs the code of the documentation that no Rust test can: the verifiers in Python and JavaScript, on the deliveries that docs/delivery.md gives, and the
# client of docs/realtime.md. And the script of the live view that `openvibe-events dev` has.
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
block docs/realtime.md js 'function follow' >"$work/follow.mjs"

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
cat >"$work/live.mjs" <<'JS'
import assert from "node:assert";
import { follow } from "./follow.mjs";
const [opened, waits, seen] = [[], [], []];
let [loads, tickets] = [0, 0];
globalThis.EventSource = class {
  constructor(url) {
    this.url = new URL(url);
    opened.push(this);
  }
  addEventListener(name, then) {
    this[`on${name}`] = then;
  }
  close() {
    this.isClosed = true;
  }
};
globalThis.setTimeout = (then, wait) => waits.push({ then, wait });
globalThis.clearTimeout = () => {};
Math.random = () => 1;
const settled = () => new Promise(setImmediate);
const ticket = async () => {
  tickets += 1;
  if (tickets === 2) throw new Error("the network is away");
  return { ticket: `t${tickets}`, stream_url: "http://events.example/realtime/stream" };
};
const stop = follow({ topics: ["live.*", "a.b"], ticket, load: () => (loads += 1), onEvent: (event) => seen.push(event) });
await settled();
assert.strictEqual(opened[0].url.search, "?topics=live.*%2Ca.b&ticket=t1");
opened[0].onopen();
assert.strictEqual(loads, 1, "what came before the first event is in no stream");
opened[0].onmessage({ data: '{"event":{"event_id":"evt_1"}}', lastEventId: "c1.0.MQ" });
opened[0].ongap({ data: "{}" });
assert.deepStrictEqual([seen, loads], [[{ event_id: "evt_1" }], 2]);
opened[0].onerror();
assert.ok(opened[0].isClosed, "the browser does not come back with a ticket that is used up");
await waits[0].then();
assert.deepStrictEqual([opened.length, waits[0].wait, waits[1].wait], [1, 2000, 4000], "later each time");
await waits[1].then();
assert.strictEqual(opened[1].url.search, "?topics=live.*%2Ca.b&ticket=t3&last_event_id=c1.0.MQ");
opened[1].onopen();
assert.strictEqual(loads, 2, "the stream brings what was missed");
opened[1].onerror();
assert.strictEqual(waits[2].wait, 2000, "it had opened");
stop();
opened[1].onerror();
await waits[2].then();
assert.strictEqual(waits.length, 3, "it has stopped");
console.log("The client of docs/realtime.md comes back with a new ticket, where it was");
JS
cd "$work"
judged=$(python3 run.py)
say "$judged"
for script in run.mjs live.mjs "$root/tests/live_view.mjs"; do
  judged=$(node "$script")
  say "$judged"
done
