// Follows live streams with the browser's own EventSource, as a page of the network would.

const issuer = document.body.dataset.issuer;
const follow = document.forms.follow.elements;
const publish = document.forms.publish.elements;
const [state, position, seen, published] = ["state", "position", "seen", "published"].map((id) => document.getElementById(id));
const SEEN_MAX = 200;
const WAIT_MAX_S = 30;

/** What each gap asks of whoever keeps a copy of what the events tell. */
const ADVICE = {
  epoch: "the position belongs to another history: load everything anew",
  cursor_ahead: "the position lies ahead of the log: load everything anew",
  retention: "these events are no longer kept: load everything anew",
  public_window: "public events older than the window are not sent again: look at their source",
  replay_limit: "more than one stream replays: read the rest from its source",
};

let source; // the open stream
let cursor = ""; // of the last event seen; the stream resumes after it
let session; // of the person who follows
let failures = 0;
let timer;
let turn = 0; // counts what was begun, so that what comes late of an earlier turn is dropped

function say(is, text) {
  state.dataset.is = is;
  state.value = text;
}

function show(kind, title, detail) {
  const item = document.createElement("li");
  item.className = kind;
  const more = document.createElement("details");
  const summary = document.createElement("summary");
  const text = document.createElement("pre");
  summary.textContent = `${new Date().toLocaleTimeString()} · details`;
  text.textContent = JSON.stringify(detail, null, 2);
  more.append(summary, text);
  item.append(title, more);
  seen.prepend(item);
  while (seen.children.length > SEEN_MAX) seen.lastChild.remove();
}

function reached(id) {
  cursor = id;
  position.textContent = cursor && `after ${cursor}`;
}

function close() {
  turn += 1;
  clearTimeout(timer);
  source?.close();
}

async function asked(url, request) {
  const answer = await fetch(url, { method: "POST", ...request });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error_description ?? body.detail ?? body.error ?? answer.status);
  return body;
}

/** A person's next ticket. Each opens one stream. */
async function ticket() {
  const subject = follow.person.value.trim();
  if (!session || session.subject !== subject) {
    session = await asked(`${issuer}/person/token`, { body: new URLSearchParams({ subject }) });
    follow.person.value = session.subject;
  }
  const headers = { authorization: `Bearer ${session.access_token}` };
  try {
    return (await asked(`${issuer}/api/v1/realtime/ticket`, { headers })).ticket;
  } catch (error) {
    session = undefined;
    throw error;
  }
}

async function open() {
  close();
  const mine = turn;
  const isPerson = follow.who.value === "person";
  const url = new URL("/realtime/stream", location.href);
  url.searchParams.set("topics", follow.topics.value.replace(/\s/g, ""));
  if (cursor) url.searchParams.set("last_event_id", cursor);
  say("opening", "opening");
  try {
    if (isPerson) url.searchParams.set("ticket", await ticket());
  } catch (error) {
    if (mine === turn) later(`no ticket: ${error.message}`);
    return;
  }
  if (mine !== turn) return;
  source = new EventSource(url);
  source.onopen = () => {
    failures = 0;
    say("open", `open as ${isPerson ? follow.person.value : "nobody in particular"}`);
  };
  source.onmessage = ({ data, lastEventId }) => {
    const { event } = JSON.parse(data);
    reached(lastEventId);
    show("event", `${event.event_type} · ${event.event_id}`, event);
  };
  source.addEventListener("gap", ({ data }) => {
    const gap = JSON.parse(data);
    show("gap", `gap ${gap.from_seq} to ${gap.to_seq}: ${ADVICE[gap.reason] ?? gap.reason}`, gap);
  });
  source.onerror = () => {
    // The browser comes back by itself, except after a refusal; and a ticket does not open a second stream.
    if (!isPerson && source.readyState === EventSource.CONNECTING) say("lost", "lost; the browser comes back by itself");
    else later("lost or refused");
  };
}

/** Opens again after a while: longer each time, and never everybody at once. */
function later(why) {
  close();
  const wait = Math.min(WAIT_MAX_S, 2 ** failures) * (0.5 + Math.random() / 2);
  failures += 1;
  say("lost", `${why}; again in ${wait.toFixed(1)} s`);
  timer = setTimeout(open, wait * 1000);
}

function newId() {
  const digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
  let time = Date.now();
  let id = "";
  for (let i = 0; i < 10; i += 1) {
    id = digits[time % 32] + id;
    time = Math.floor(time / 32);
  }
  for (const byte of crypto.getRandomValues(new Uint8Array(16))) id += digits[byte % 32];
  return `evt_${id}`;
}

async function send() {
  const type = publish.type.value.trim();
  const service = type.split(".")[0];
  const isTheirs = publish.visibility.value === "subject";
  const event = {
    event_id: newId(),
    event_type: type,
    version: 1,
    source: service,
    actor: { type: "service", id: service },
    timestamp: new Date().toISOString(),
    subject: isTheirs ? { type: "user", id: follow.person.value.trim() } : { type: "example", id: "live-view" },
    visibility: publish.visibility.value,
    payload: { text: "published by the live view" },
  };
  const grant = new URLSearchParams({ grant_type: "client_credentials", client_id: service });
  const { access_token: token } = await asked(`${issuer}/oauth/token`, { body: grant });
  const headers = { authorization: `Bearer ${token}`, "content-type": "application/json" };
  const receipt = await asked("/api/v1/events", { headers, body: JSON.stringify(event) });
  return `stored at ${receipt.cursor}`;
}

document.forms.follow.addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  failures = 0;
  open();
});
document.getElementById("cut").addEventListener("click", () => {
  close();
  say("closed", "cut; Follow resumes after the last event");
});
document.getElementById("forget").addEventListener("click", () => {
  close();
  reached("");
  seen.replaceChildren();
  say("closed", "closed");
});
document.forms.publish.addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  published.value = "…";
  published.value = await send().catch((error) => `not published: ${error.message}`);
});
