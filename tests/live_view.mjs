// The live view of `openvibe-events dev` on a document, a network and a clock that stand in for a browser's. scripts/docs.sh runs it.
import assert from "node:assert";
import { webcrypto } from "node:crypto";

const element = (more = {}) => ({
  dataset: {},
  children: [],
  on: {},
  addEventListener(name, then) {
    this.on[name] = then;
  },
  prepend(child) {
    this.children.unshift(child);
  },
  append(...children) {
    this.children.push(...children);
  },
  replaceChildren() {
    this.children = [];
  },
  ...more,
});
const byId = Object.fromEntries(["state", "position", "seen", "published", "cut", "forget"].map((id) => [id, element()]));
const field = (value) => ({ value });
const follow = element({ elements: { topics: field("live.*"), who: field("nobody"), person: field("") } });
const publish = element({ elements: { type: field("live.stream.started"), visibility: field("public") } });
const opened = [];
const timers = [];
const asked = [];
let refused = false;
Object.assign(globalThis, {
  document: {
    body: { dataset: { issuer: "http://issuer.example" } },
    forms: { follow, publish },
    getElementById: (id) => byId[id],
    createElement: () => element(),
  },
  location: { href: "http://events.example/dev/live" },
  setTimeout: (then, wait) => timers.push({ then, wait }),
  clearTimeout: () => {},
  fetch: async (url, { headers, body }) => {
    asked.push({ url, headers, body });
    const answers = {
      "http://issuer.example/person/token": { access_token: "session", subject: "usr_1" },
      "http://issuer.example/api/v1/realtime/ticket": { ticket: `t${asked.length}` },
      "http://issuer.example/oauth/token": { access_token: "service" },
      "/api/v1/events": { cursor: "c1.0.OQ" },
    };
    return { ok: !refused, status: 503, json: async () => (refused ? { code: "x", error: "no tickets" } : answers[url]) };
  },
  EventSource: class {
    static CONNECTING = 0;
    static CLOSED = 2;
    readyState = 0;
    constructor(url) {
      this.query = url.searchParams;
      opened.push(this);
    }
    addEventListener(name, then) {
      this[`on${name}`] = then;
    }
    close() {
      this.readyState = 2;
    }
  },
});
globalThis.crypto ??= webcrypto;
Math.random = () => 1;
const settled = () => new Promise(setImmediate);
const submit = async (form) => {
  form.on.submit({ preventDefault() {} });
  await settled();
};
const event = (id, cursor) => ({ data: JSON.stringify({ event: { event_id: id, event_type: "live.a.b" } }), lastEventId: cursor });
const seen = () => byId.seen.children.map((item) => [item.className, item.children[0]]);
await import("../src/cli/dev/page/live.js");

// Nobody in particular: the browser comes back by itself, unless it was refused.
await submit(follow);
assert.strictEqual(opened[0].query.toString(), "topics=live.*");
opened[0].onopen();
assert.deepStrictEqual([byId.state.dataset.is, byId.state.value], ["open", "open as nobody in particular"]);
opened[0].onmessage(event("evt_1", "c1.0.MQ"));
opened[0].ongap({ data: '{"reason":"retention","from_seq":2,"to_seq":5,"latest_seq":9}' });
assert.deepStrictEqual(seen(), [
  ["gap", "gap 2 to 5: these events are no longer kept: load everything anew"],
  ["event", "live.a.b · evt_1"],
]);
assert.strictEqual(byId.position.textContent, "after c1.0.MQ");
opened[0].onerror();
assert.deepStrictEqual([byId.state.dataset.is, timers.length], ["lost", 0]);
opened[0].readyState = EventSource.CLOSED;
opened[0].onerror();
await timers[0].then();
assert.strictEqual(opened[1].query.toString(), "topics=live.*&last_event_id=c1.0.MQ");
opened[1].onopen();
opened[1].readyState = EventSource.CLOSED;
opened[1].onerror();
assert.strictEqual(timers[1].wait, 1000, "it had opened, so it waits as at first");
timers.length = 0;

// A person: a new ticket for every stream.
follow.elements.who.value = "person";
await submit(follow);
await settled();
assert.strictEqual(follow.elements.person.value, "usr_1");
assert.strictEqual(asked[1].headers.authorization, "Bearer session");
assert.strictEqual(opened[2].query.toString(), "topics=live.*&last_event_id=c1.0.MQ&ticket=t2");
opened[2].onopen();
opened[2].onmessage(event("evt_2", "c1.0.Mg"));
opened[2].onerror();
assert.strictEqual(opened[2].readyState, EventSource.CLOSED, "the browser does not come back with a used ticket");
refused = true;
await timers[0].then();
assert.deepStrictEqual([opened.length, timers[1].wait], [3, 2000], "no ticket, no stream, a longer wait");
assert.strictEqual(byId.state.value, "no ticket: no tickets; again in 2.0 s");
refused = false;
await timers[1].then();
assert.strictEqual(asked.at(-2).url, "http://issuer.example/person/token", "a session that got no ticket is asked for anew");
assert.strictEqual(opened[3].query.get("ticket"), `t${asked.length}`);
assert.strictEqual(opened[3].query.get("last_event_id"), "c1.0.Mg");

// Cut keeps the position, forget does not; a ticket that comes after a cut opens nothing.
byId.cut.on.click();
assert.deepStrictEqual([opened[3].readyState, byId.position.textContent], [EventSource.CLOSED, "after c1.0.Mg"]);
follow.on.submit({ preventDefault() {} });
byId.cut.on.click();
await settled();
assert.strictEqual(opened.length, 4);
byId.forget.on.click();
assert.deepStrictEqual([byId.position.textContent, seen()], ["", []]);

// What is published is what the form said when it was sent.
publish.elements.visibility.value = "subject";
publish.on.submit({ preventDefault() {} });
publish.elements.visibility.value = "public";
await settled();
const sent = JSON.parse(asked.at(-1).body);
assert.deepStrictEqual([sent.visibility, sent.subject, sent.source], ["subject", { type: "user", id: "usr_1" }, "live"]);
assert.match(sent.event_id, /^evt_[0-7][0-9A-HJKMNP-TV-Z]{25}$/);
assert.strictEqual(byId.published.value, "stored at c1.0.OQ");
console.log("The live view comes back with a new ticket, where it was");
