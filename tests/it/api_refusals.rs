//! Every refusal of the API in one table: the status, the code, a whole problem document that names what to change,
//! and nothing stored.

use std::collections::BTreeSet;

use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE};
use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, endpoint, method_of, operator, refused, send, text},
    support::{
        envelopes::{Envelope, batch, envelope, envelopes, id},
        network::TokenSpec,
    },
};

/// The codes that these routes answer with; the table must hold each of them.
const CODES: [(u16, &str); 24] = [
    (400, "events.bad_json"),
    (400, "events.bad_request"),
    (400, "events.bad_topic"),
    (401, "token.expired"),
    (401, "token.malformed"),
    (401, "token.missing"),
    (403, "capability.denied"),
    (403, "events.source_mismatch"),
    (403, "events.type_not_allowed"),
    (403, "events.unknown_source"),
    (404, "events.not_found"),
    (409, "events.id_conflict"),
    (409, "events.loop_detected"),
    (409, "events.subscription_exists"),
    (409, "events.subscription_limit"),
    (413, "events.batch_too_large"),
    (413, "events.payload_too_large"),
    (415, "events.unsupported_media_type"),
    (422, "events.bad_request"),
    (422, "events.bad_topic"),
    (422, "events.endpoint_not_allowed"),
    (422, "events.invalid_envelope"),
    (501, "events.not_built"),
    (401, "token.wrong_audience"),
];

const EVENTS: &str = "/api/v1/events";
const CHECKPOINTS: &str = "/api/v1/checkpoints";
const SUBSCRIPTIONS: &str = "/api/v1/subscriptions";
const DELIVERIES: &str = "/api/v1/deliveries";
const REPLAY: &str = "/api/v1/deliveries/replay";

/// A request that must be refused.
struct Case {
    method: &'static str,
    path: String,
    token: Option<String>,
    headers: Vec<(&'static str, String)>,
    body: String,
    status: u16,
    code: &'static str,
    /// What the refusal must name, in its detail or as the path of an error.
    names: &'static str,
}

/// The table under construction, with the tokens and rows its cases use.
struct Table {
    cases: Vec<Case>,
    consumer: String,
    full: String,
    subscription: String,
    foreign: String,
    known: Envelope,
}

impl Table {
    fn add(&mut self, method: &'static str, path: impl Into<String>, token: Option<String>, body: impl ToString) {
        self.cases.push(Case {
            method,
            path: path.into(),
            token,
            headers: vec![(CONTENT_TYPE.as_str(), "application/json".to_owned())],
            body: body.to_string(),
            status: 0,
            code: "",
            names: "",
        });
    }

    fn refused(&mut self, status: u16, code: &'static str, names: &'static str) {
        let last = self.cases.last_mut().expect("a case to judge");
        (last.status, last.code, last.names) = (status, code, names);
    }

    fn with(&mut self, name: &'static str, value: &str) -> &mut Self {
        let last = self.cases.last_mut().expect("a case to change");
        last.headers.retain(|(given, _)| *given != name);
        if !value.is_empty() {
            last.headers.push((name, value.to_owned()));
        }
        self
    }

    fn publish(&mut self, body: impl ToString) -> &mut Self {
        self.add("POST", EVENTS, Some(TokenSpec::service("live").sign()), body);
        self
    }

    fn subscribe(&mut self, change: impl FnOnce(&mut Value)) -> &mut Self {
        let mut body = json!({ "topic_pattern": "live.*", "endpoint": endpoint("new") });
        change(&mut body);
        let token = TokenSpec::service(&self.consumer).sign();
        self.add("POST", SUBSCRIPTIONS, Some(token), body);
        self
    }

    fn read(&mut self, target: &str) -> &mut Self {
        self.add("GET", target, Some(TokenSpec::service(&self.consumer).sign()), "");
        self.with("content-type", "")
    }

    fn checkpoint(&mut self, body: impl ToString) -> &mut Self {
        self.add(
            "PUT",
            CHECKPOINTS,
            Some(TokenSpec::service(&self.consumer).sign()),
            body,
        );
        self
    }

    fn list(&mut self, query: &str) -> &mut Self {
        self.add("GET", format!("{DELIVERIES}?{query}"), Some(operator()), "");
        self.with("content-type", "")
    }

    fn replay(&mut self, body: impl ToString) -> &mut Self {
        self.add("POST", REPLAY, Some(operator()), body);
        self
    }

    fn skip(&mut self, body: impl ToString) -> &mut Self {
        self.add("POST", format!("{DELIVERIES}/skip"), Some(operator()), body);
        self
    }

    fn update(&mut self, body: impl ToString) -> &mut Self {
        let path = format!("{SUBSCRIPTIONS}/{}", self.subscription);
        self.add("PATCH", path, Some(TokenSpec::service(&self.consumer).sign()), body);
        self
    }

    fn rotate(&mut self, body: impl ToString) -> &mut Self {
        let path = format!("{SUBSCRIPTIONS}/{}/rotate-secret", self.subscription);
        self.add("POST", path, Some(TokenSpec::service(&self.consumer).sign()), body);
        self
    }
}

/// Tokens and bodies as such.
fn requests(table: &mut Table) {
    for (token, code, names) in [
        (None, "token.missing", "Authorization"),
        (Some("a.b".to_owned()), "token.malformed", "token"),
        (
            Some(TokenSpec::service("live").shifted(-400).sign()),
            "token.expired",
            "expired",
        ),
        (
            Some(TokenSpec::service("live").claim("aud", json!(["x.y"])).sign()),
            "token.wrong_audience",
            "aud",
        ),
    ] {
        table.add("POST", EVENTS, token, envelope("live").json());
        table.refused(401, code, names);
    }
    table.add(
        "POST",
        EVENTS,
        Some(TokenSpec::service("live").caps(&[]).sign()),
        envelope("live").json(),
    );
    table.refused(403, "capability.denied", "events.event.publish");

    for text in [
        "{",
        "{\"a\":1}}",
        "nonsense",
        "3",
        "\"text\"",
        "null",
        "true",
        "{\"a\":01}",
        "{'a':1}",
        "\u{feff}{}",
    ] {
        table.publish(text).refused(400, "events.bad_json", "");
        table.subscribe(|_| {});
        table.cases.last_mut().expect("just added").body = text.to_owned();
        table.refused(400, "events.bad_json", "");
        table.checkpoint(text).refused(400, "events.bad_json", "");
        table.replay(text).refused(400, "events.bad_json", "");
        table.rotate(text).refused(400, "events.bad_json", "");
        table.skip(text).refused(400, "events.bad_json", "");
        table.update(text).refused(400, "events.bad_json", "");
    }
    let deep = format!("{{\"payload\":{}{}}}", "[".repeat(200), "]".repeat(200));
    table.publish(deep).refused(400, "events.bad_json", "128");
    for content_type in [
        "",
        "text/plain",
        "application/xml",
        "application/json; charset=latin1",
        "multipart/form-data",
    ] {
        table
            .publish(envelope("live").json())
            .with("content-type", content_type);
        table.refused(415, "events.unsupported_media_type", "Content-Type");
    }
    table.publish(envelope("live").json()).with("content-encoding", "br");
    table.refused(415, "events.unsupported_media_type", "Content-Encoding");
    table.publish(envelope("live").json()).with("content-encoding", "gzip");
    table.refused(400, "events.bad_json", "encoding");
    let padded = format!("{}{}", envelope("live").json(), " ".repeat(2 * 1024 * 1024));
    table.publish(padded).refused(413, "events.batch_too_large", "2097152");
}

fn publishes(table: &mut Table) {
    table.publish("").refused(422, "events.invalid_envelope", "event_id");
    table.publish("{}").refused(422, "events.invalid_envelope", "/payload");
    table
        .publish(json!([envelope("live").json()]))
        .refused(422, "events.invalid_envelope", "/");
    table
        .publish(json!({ "events": [] }))
        .refused(400, "events.bad_request", "events");
    table
        .publish(batch(&envelopes("live", 101)))
        .refused(413, "events.batch_too_large", "100");
    table
        .publish(json!({ "events": {} }))
        .refused(422, "events.invalid_envelope", "/events");
    for item in [json!(1), json!(null), json!("text"), json!([])] {
        let body = json!({ "events": [envelope("live").json(), item] });
        table.publish(body).refused(422, "events.invalid_envelope", "/");
    }
    let required = [
        "event_id",
        "event_type",
        "version",
        "source",
        "actor",
        "timestamp",
        "subject",
        "payload",
    ];
    for member in required {
        let path = leaked(format!("/{member}"));
        table
            .publish(envelope("live").without(member).json())
            .refused(422, "events.invalid_envelope", path);
    }
    let all = required
        .into_iter()
        .chain(["trace_id", "on_behalf_of", "priority", "visibility"]);
    for member in all {
        let path = leaked(format!("/{member}"));
        let bad = envelope("live").set(member, Value::Null);
        table.publish(bad.json()).refused(422, "events.invalid_envelope", path);
    }
    let user = id("usr");
    for (member, value, path) in [
        ("event_id", json!("evt_short"), "/event_id"),
        ("event_id", json!("evt_01K7AAB2CD3EF4GH5JK6MN7PQI"), "/event_id"),
        ("event_id", json!("evt_01k7aab2cd3ef4gh5jk6mn7pqr"), "/event_id"),
        ("event_id", json!(7), "/event_id"),
        ("event_type", json!("live.started"), "/event_type"),
        ("event_type", json!("Live.stream.started"), "/event_type"),
        ("event_type", json!("live.stream-x.started"), "/event_type"),
        ("event_type", json!("live.stream.started\n"), "/event_type"),
        (
            "event_type",
            json!(format!("live.a.{}", "b".repeat(1024))),
            "/event_type",
        ),
        ("version", json!(0), "/version"),
        ("version", json!(-1), "/version"),
        ("version", json!(1.5), "/version"),
        ("version", json!("1"), "/version"),
        ("version", json!(1e300), "/version"),
        ("source", json!("L"), "/source"),
        ("actor", json!({ "type": "user", "id": "42" }), "/actor/id"),
        ("actor", json!({ "type": "robot", "id": "live" }), "/actor/type"),
        ("actor", json!({ "type": "service" }), "/actor/id"),
        (
            "actor",
            json!({ "type": "service", "id": "live", "name": "x" }),
            "/actor/name",
        ),
        ("actor", json!("service:live"), "/actor"),
        (
            "on_behalf_of",
            json!({ "type": "project", "id": user }),
            "/on_behalf_of/type",
        ),
        ("timestamp", json!("2026-10-21T08:15:30"), "/timestamp"),
        ("timestamp", json!("2026-02-30T08:15:30Z"), "/timestamp"),
        ("timestamp", json!("yesterday"), "/timestamp"),
        ("timestamp", json!(1_790_000_000), "/timestamp"),
        ("subject", json!({ "type": "a" }), "/subject/id"),
        ("subject", json!({ "type": "a", "id": 5 }), "/subject/id"),
        (
            "subject",
            json!({ "type": "a", "id": "b", "revision": -1 }),
            "/subject/revision",
        ),
        (
            "subject",
            json!({ "type": "a", "id": "b", "revision": 0.5 }),
            "/subject/revision",
        ),
        ("subject", json!({ "type": "a", "id": "b", "more": 1 }), "/subject/more"),
        ("subject", json!({ "type": "a", "id": "x".repeat(1025) }), "/subject/id"),
        (
            "subject",
            json!({ "type": "é".repeat(513), "id": "b" }),
            "/subject/type",
        ),
        ("subject", json!({ "type": "a", "id": "nul\u{0}" }), "/subject/id"),
        ("payload", json!([]), "/payload"),
        ("payload", json!("text"), "/payload"),
        ("trace_id", json!("4BF92F3577B34DA6A3CE929D0E0E4736"), "/trace_id"),
        ("trace_id", json!("4bf9"), "/trace_id"),
        ("priority", json!("normal"), "/priority"),
        ("visibility", json!("private"), "/visibility"),
        ("seq", json!(9), "/seq"),
        ("env", json!("production"), "/env"),
        ("project_id", json!("prj_x"), "/project_id"),
    ] {
        let bad = envelope("live").set(member, value);
        table.publish(bad.json()).refused(422, "events.invalid_envelope", path);
        let second = batch(&[envelope("live"), bad]);
        table.publish(second).refused(422, "events.invalid_envelope", path);
    }
    let good = envelope("live").json().to_string();
    let repeated = good.replacen("\"version\":1", "\"version\":1,\"version\":2", 1);
    table
        .publish(repeated)
        .refused(422, "events.invalid_envelope", "/version");
    let surrogate = good.replacen("\"id\":\"1\"", "\"id\":\"\\ud800\"", 1);
    table
        .publish(surrogate)
        .refused(422, "events.invalid_envelope", "/subject/id");
    let twice = format!("{{\"events\":[{good}],\"events\":[{}]}}", envelope("live").json());
    table.publish(twice).refused(422, "events.invalid_envelope", "/events");
    let same = envelope("live");
    table
        .publish(batch(&[same.clone(), envelope("live"), same]))
        .refused(422, "events.invalid_envelope", "/event_id");

    let heavy = envelope("live").payload(json!({ "text": "x".repeat(65_536) }));
    table
        .publish(heavy.json())
        .refused(413, "events.payload_too_large", "65536");
    let redaction = envelope("live").payload(json!({ "redacts": { "event_ids": [id("evt")] } }));
    table
        .publish(redaction.json())
        .refused(501, "events.not_built", "redacts");
    table
        .publish(batch(&[envelope("live"), redaction]))
        .refused(501, "events.not_built", "redacts");
    table
        .publish(envelope("chat").json())
        .refused(403, "events.source_mismatch", "source");
    let foreign = envelope("live").event_type("chat.message.created");
    table
        .publish(foreign.json())
        .refused(403, "events.type_not_allowed", "live.");
    let near = envelope("live").event_type("livex.message.created");
    table
        .publish(near.json())
        .refused(403, "events.type_not_allowed", "event_type");
    for unknown in ["ops", "events"] {
        let token = TokenSpec::service(unknown).sign();
        table.add("POST", EVENTS, Some(token), envelope(unknown).json());
        table.refused(403, "events.unknown_source", "source");
    }
    let taken = table.known.clone().event_type("live.other.type");
    table
        .publish(taken.json())
        .refused(409, "events.id_conflict", "event_id");
    table
        .publish(batch(&[envelope("live"), taken]))
        .refused(409, "events.id_conflict", "event_id");
    let deep = envelope("live").set("trace_id", LOOPED_TRACE);
    table.publish(deep.json()).refused(409, "events.loop_detected", "trace");
    table
        .publish(batch(&[envelope("live"), deep]))
        .refused(409, "events.loop_detected", "trace");
}

/// A trace that has made all its hops.
const LOOPED_TRACE: &str = "10000000000000000000000000000001";

fn reads(table: &mut Table) {
    for topic in [
        "A.b",
        "live..x",
        "*.*",
        "live.*.*.x",
        ".live",
        "live.",
        "live-x.*",
        "a,,b",
        ",",
        "%00",
        "%20",
    ] {
        table
            .read(&format!("{EVENTS}?topic={topic}"))
            .refused(400, "events.bad_topic", "topic");
        table
            .read(&format!("{CHECKPOINTS}?topic={topic}"))
            .refused(400, "events.bad_topic", "topic");
    }
    let many = vec!["live.a"; 21].join(",");
    table
        .read(&format!("{EVENTS}?topic={many}"))
        .refused(400, "events.bad_topic", "20");
    table
        .read(&format!("{EVENTS}?topic={}", "a".repeat(201)))
        .refused(400, "events.bad_topic", "200");
    table.read(CHECKPOINTS).refused(400, "events.bad_topic", "topic");
    table
        .read(&format!("{CHECKPOINTS}?topic=live.*,chat.*"))
        .refused(400, "events.bad_topic", "topic");
    for limit in [
        "0",
        "1001",
        "-1",
        "1.0",
        "1e2",
        "ten",
        "",
        "%201",
        "99999999999999999999",
    ] {
        table
            .read(&format!("{EVENTS}?limit={limit}"))
            .refused(400, "events.bad_request", "limit");
    }
    for after in [
        "5",
        "c1",
        "c1.0",
        "c1.0.",
        "c2.0.NDI",
        "c1.0.NDI=",
        "c1.00.NDI",
        "c1.0.ND",
        "c1.-1.NDI",
        "c1.0.LTE",
    ] {
        table
            .read(&format!("{EVENTS}?after={after}"))
            .refused(400, "events.bad_request", "after");
    }
    table
        .read(&format!("{EVENTS}?after=c1.0.{}", "A".repeat(300)))
        .refused(400, "events.bad_request", "after");
    for query in ["after_seq=0", "after_seq=", "after_seq=x", "after=c1.0.MA&after_seq=0"] {
        table
            .read(&format!("{EVENTS}?{query}"))
            .refused(400, "events.bad_request", "after_seq");
    }
    table
        .read(&format!("{EVENTS}?limit=1&limit=2"))
        .refused(400, "events.bad_request", "limit");
    table
        .read(&format!("{EVENTS}?after=%zz"))
        .refused(400, "events.bad_request", "after");
    table
        .read(&format!("{EVENTS}?topic=%ff"))
        .refused(400, "events.bad_request", "topic");
    for unknown in [
        id("evt"),
        "evt_x".to_owned(),
        "%00".to_owned(),
        "%ff".to_owned(),
        "%".to_owned(),
    ] {
        table
            .read(&format!("{EVENTS}/{unknown}"))
            .refused(404, "events.not_found", "");
    }

    for (body, names) in [
        (json!({}), "topic"),
        (json!({ "topic": "Live", "cursor": "c1.0.MA" }), "topic"),
        (json!({ "topic": ["live.*"], "cursor": "c1.0.MA" }), "topic"),
        (json!({ "topic": "live.*,chat.*", "cursor": "c1.0.MA" }), "topic"),
        (json!({ "topic": "live.*" }), "cursor"),
        (json!({ "topic": "live.*", "cursor": 88 }), "cursor"),
        (json!({ "topic": "live.*", "cursor": null }), "cursor"),
        (json!({ "topic": "live.*", "cursor": "88" }), "cursor"),
        (
            json!({ "topic": "live.*", "cursor": "c1.0.MA", "carrier": 1 }),
            "carrier",
        ),
        (
            json!({ "topic": "live.*", "cursor": "c1.0.MA", "carrier": "" }),
            "carrier",
        ),
        (
            json!({ "topic": "live.*", "cursor": "c1.0.MA", "carrier": "x".repeat(65) }),
            "carrier",
        ),
        (
            json!({ "topic": "live.*", "cursor": "c1.0.MA", "carrier": "a\u{0}" }),
            "carrier",
        ),
        (json!([]), "topic"),
    ] {
        table.checkpoint(body).refused(400, "events.bad_request", names);
    }
    table.checkpoint("").refused(400, "events.bad_request", "topic");
}

fn subscriptions(table: &mut Table) {
    for pattern in ["", "Live.*", "*.*", "live..x", "live-x", " live.*"] {
        table.subscribe(|body| body["topic_pattern"] = pattern.into()).refused(
            422,
            "events.bad_topic",
            "topic_pattern",
        );
    }
    table
        .subscribe(|body| body["topic_pattern"] = 5.into())
        .refused(422, "events.bad_topic", "topic_pattern");
    table.subscribe(|body| body["topic_pattern"] = "a".repeat(201).into());
    table.refused(422, "events.bad_topic", "200");
    table.subscribe(|body| *body = json!({ "endpoint": endpoint("new") }));
    table.refused(422, "events.bad_topic", "topic_pattern");
    table
        .subscribe(|body| *body = json!({}))
        .refused(422, "events.bad_topic", "topic_pattern");
    table
        .subscribe(|body| *body = json!([]))
        .refused(422, "events.bad_topic", "topic_pattern");
    let bad_alias = json!({ "topic": "*.*", "endpoint": endpoint("new") });
    table
        .subscribe(|body| *body = bad_alias)
        .refused(422, "events.bad_topic", "topic");

    let long = format!("http://127.0.0.1/{}", "a".repeat(2048));
    for address in [
        "",
        "nonsense",
        "/path",
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "http://example.com/x",
        "http://10.0.0.1/x",
        "http://127.0.0.2/x",
        "http://[::1]/x",
        "http://user@127.0.0.1/x",
        "http://a:b@127.0.0.1/x",
        "http://openvibe.live./x",
        "http://openvibe.live.example.com/x",
        "http://xopenvibe.live/x",
        "http://169.254.169.254/latest",
        "http://127.0.0.1:99999/x",
        "http://",
        long.as_str(),
    ] {
        table.subscribe(|body| body["endpoint"] = address.into());
        table.refused(422, "events.endpoint_not_allowed", "endpoint");
    }
    table
        .subscribe(|body| body["endpoint"] = "http://localhost:4000/x".into())
        .refused(422, "events.endpoint_not_allowed", "EVENTS_ENDPOINT_HOSTS");
    for wrong in [Value::Null, json!(5), json!(["http://127.0.0.1/x"])] {
        table
            .subscribe(|body| body["endpoint"] = wrong)
            .refused(422, "events.endpoint_not_allowed", "endpoint");
    }
    let secrets = || {
        let long = "x".repeat(257);
        let nul = format!("{}\u{0}", "x".repeat(40));
        let sealed = format!("sealed:1:{}", "x".repeat(40));
        [
            json!("x".repeat(31)),
            json!(long),
            json!(""),
            json!(5),
            Value::Null,
            json!(nul),
            json!(sealed),
            json!({}),
        ]
    };
    for secret in secrets() {
        table
            .subscribe(|body| body["secret"] = secret.clone())
            .refused(422, "events.bad_request", "secret");
        table
            .rotate(json!({ "secret": secret }))
            .refused(422, "events.bad_request", "secret");
    }
    for (policy, names) in [
        (json!(5), "retry_policy"),
        (json!("fast"), "retry_policy"),
        (json!([]), "retry_policy"),
        (json!({ "jitter": true }), "retry_policy"),
        (json!({ "max_attempts": 0 }), "max_attempts"),
        (json!({ "max_attempts": 21 }), "max_attempts"),
        (json!({ "max_attempts": 1.5 }), "max_attempts"),
        (json!({ "max_attempts": null }), "max_attempts"),
        (json!({ "backoff_ms": [] }), "backoff_ms"),
        (json!({ "backoff_ms": vec![1; 21] }), "backoff_ms"),
        (json!({ "backoff_ms": [-1] }), "backoff_ms"),
        (json!({ "backoff_ms": [86_400_001] }), "backoff_ms"),
        (json!({ "backoff_ms": ["1"] }), "backoff_ms"),
        (json!({ "backoff_ms": 1000 }), "backoff_ms"),
    ] {
        table
            .subscribe(|body| body["retry_policy"] = policy.clone())
            .refused(422, "events.bad_request", names);
        table
            .update(json!({ "retry_policy": policy }))
            .refused(422, "events.bad_request", names);
    }
    for inflight in [json!(0), json!(65), json!(-1), json!(1.5), json!("4"), json!([1])] {
        table.subscribe(|body| body["max_inflight"] = inflight.clone()).refused(
            422,
            "events.bad_request",
            "max_inflight",
        );
        table
            .update(json!({ "max_inflight": inflight }))
            .refused(422, "events.bad_request", "max_inflight");
    }
    for body in [
        json!({ "endpoint": endpoint("other") }),
        json!({ "topic_pattern": "live.*" }),
        json!({ "enabled": false }),
        json!({ "secret": "x".repeat(40), "max_inflight": 2 }),
        json!({ "max_inflight": 2, "maxInflight": 2 }),
    ] {
        table
            .update(body)
            .refused(422, "events.bad_request", "only max_inflight and retry_policy");
    }
    table
        .update(r#"{"max_inflight":2,"max_inflight":3}"#)
        .refused(422, "events.bad_request", "more than once");
    table.update("[]").refused(422, "events.bad_request", "object");
    for overlap in [
        json!(-1),
        json!(604_801),
        json!("soon"),
        json!({}),
        json!("1e9"),
        json!("NaN"),
    ] {
        table
            .rotate(json!({ "overlap_s": overlap }))
            .refused(422, "events.bad_request", "overlap_s");
    }
    table.subscribe(|body| body["endpoint"] = endpoint("held").into());
    table.refused(409, "events.subscription_exists", "topic_pattern");
    // The same address in another spelling.
    table.subscribe(|body| body["endpoint"] = "HTTP://127.0.0.1:9/./held".into());
    table.refused(409, "events.subscription_exists", "endpoint");
    let full = TokenSpec::service(&table.full).sign();
    let one_more = json!({ "topic_pattern": "live.*", "endpoint": endpoint("more") });
    table.add("POST", SUBSCRIPTIONS, Some(full), one_more);
    table.refused(409, "events.subscription_limit", "2");

    let unknown = [
        table.foreign.clone(),
        id("sub"),
        "x".to_owned(),
        "%00".to_owned(),
        "%ff".to_owned(),
    ];
    for id in &unknown {
        table
            .read(&format!("{SUBSCRIPTIONS}/{id}"))
            .refused(404, "events.not_found", "");
        let token = TokenSpec::service(&table.consumer).sign();
        table.add("PATCH", format!("{SUBSCRIPTIONS}/{id}"), Some(token), json!({ "x": 5 }));
        table.refused(404, "events.not_found", "");
        for action in ["enable", "disable", "rotate-secret"] {
            let token = TokenSpec::service(&table.consumer).sign();
            table.add(
                "POST",
                format!("{SUBSCRIPTIONS}/{id}/{action}"),
                Some(token),
                json!({ "secret": 5 }),
            );
            table.refused(404, "events.not_found", "");
        }
    }
}

fn deliveries(table: &mut Table) {
    for (query, names) in [
        ("status=done", "status"),
        ("status=PENDING", "status"),
        ("status=pending&status=dead", "status"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("after_seq=-1", "after_seq"),
        ("after_seq=x", "after_seq"),
        ("after_seq=9007199254740992", "after_seq"),
        ("after=x", "after"),
        ("after=NDI", "after"),
        ("after=MS5zdWJfeA", "after"),
        ("after=c1.0.NDI", "after"),
        ("after=MS5zdWJfMDFLN0FBQjJDRDNFRjRHSDVKSzZNTjdQUVI&after_seq=1", "after"),
        ("subscription_id=a&subscription_id=b", "subscription_id"),
        ("subscription_id=%ff", "subscription_id"),
    ] {
        table.list(query).refused(400, "events.bad_request", names);
    }
    let body = json!({ "disabled": true });
    table.add("PUT", "/api/v1/carriers/kafka-v1", Some(operator()), body);
    table.refused(404, "events.not_found", "there are pg-v1");
    for body in [
        json!({}),
        json!({ "subscription_id": id("sub") }),
        json!({ "subscription_id": 5, "from_seq": 0 }),
    ] {
        table
            .replay(body.clone())
            .refused(404, "events.not_found", "subscription");
        table.skip(body).refused(404, "events.not_found", "subscription");
    }
    table
        .replay(json!({ "subscription_id": id("sub"), "from_seq": -1 }))
        .refused(404, "events.not_found", "");
    table.replay("").refused(404, "events.not_found", "");
    let id = table.subscription.clone();
    for (body, names) in [
        (json!({ "subscription_id": id }), "event_ids"),
        (
            json!({ "subscription_id": id, "from_seq": 0, "event_ids": [] }),
            "exactly one",
        ),
        (
            json!({ "subscription_id": id, "from_seq": 0, "cursor": "c1.0.MA" }),
            "exactly one",
        ),
        (json!({ "subscription_id": id, "cursor": "c1.0.ND=" }), "cursor"),
        (json!({ "subscription_id": id, "cursor": 5 }), "cursor"),
        (json!({ "subscription_id": id, "cursor": "c1.7.MA" }), "cursor"),
        (json!({ "subscription_id": id, "from_seq": -1 }), "from_seq"),
        (json!({ "subscription_id": id, "from_seq": 1.5 }), "from_seq"),
        (json!({ "subscription_id": id, "from_seq": "1" }), "from_seq"),
        (json!({ "subscription_id": id, "from_seq": null }), "from_seq"),
        (
            json!({ "subscription_id": id, "from_seq": 9_007_199_254_740_992_u64 }),
            "from_seq",
        ),
        (json!({ "subscription_id": id, "event_ids": "evt_x" }), "event_ids"),
        (json!({ "subscription_id": id, "event_ids": [1] }), "event_ids"),
        (json!({ "subscription_id": id, "event_ids": {} }), "event_ids"),
        (
            json!({ "subscription_id": id, "event_ids": vec!["evt_x"; 1001] }),
            "1000",
        ),
        (json!({ "subscription_id": id, "since": 5 }), "since"),
        (json!({ "subscription_id": id, "since": "yesterday" }), "since"),
        (json!({ "subscription_id": id, "since": "2026-10-21" }), "since"),
        (
            json!({ "subscription_id": id, "since": "2026-10-21T08:15:30" }),
            "since",
        ),
        (
            json!({ "subscription_id": id, "since": "2026-10-21T08:15:30Z", "from_seq": 0 }),
            "exactly one",
        ),
        (
            json!({ "subscription_id": id, "from_seq": 0, "details": "yes" }),
            "details",
        ),
    ] {
        table.replay(body).refused(400, "events.bad_request", names);
    }
    for (body, names) in [
        (json!({ "subscription_id": id }), "event_ids"),
        (json!({ "subscription_id": id, "event_ids": null }), "event_ids"),
        (json!({ "subscription_id": id, "event_ids": "evt_x" }), "event_ids"),
        (json!({ "subscription_id": id, "event_ids": [1] }), "event_ids"),
        (
            json!({ "subscription_id": id, "event_ids": vec!["evt_x"; 1001] }),
            "1000",
        ),
    ] {
        table.skip(body).refused(400, "events.bad_request", names);
    }
}

fn elsewhere(table: &mut Table) {
    for (method, path) in [
        ("GET", "/api/v1/nothing"),
        ("GET", "/api/v1/events/a/b"),
        ("DELETE", "/api/v1/events"),
        ("PATCH", "/api/v1/subscriptions"),
        ("PUT", "/api/v1/subscriptions/x/enable"),
        ("GET", "/api/v1/deliveries/replay"),
        ("POST", "/api/health"),
        ("GET", "/api/v1/events/"),
    ] {
        table.add(method, path, Some(operator()), "{}");
        table.refused(404, "events.not_found", "");
    }
}

fn leaked(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// Everything a refused request could have changed.
pub(crate) const STATE: &str = "SELECT concat_ws('/', \
    (SELECT count(*) FROM events), (SELECT count(*) FROM idempotency_receipts), \
    (SELECT string_agg(s::text, ';' ORDER BY id) FROM subscriptions s), \
    (SELECT string_agg(d::text, ';' ORDER BY seq, subscription_id) FROM deliveries d), \
    (SELECT string_agg(c::text, ';' ORDER BY consumer) FROM consumer_checkpoints c), \
    (SELECT string_agg(p::text, ';' ORDER BY pattern) FROM delivery_policies p))";

#[tokio::test]
async fn every_refusal_names_what_to_change_and_stores_nothing() {
    let site = Site::own(1, &[("EVENTS_MAX_SUBSCRIPTIONS", "2")]).await;
    let mut table = Table {
        cases: Vec::new(),
        consumer: consumer(),
        full: consumer(),
        subscription: String::new(),
        foreign: String::new(),
        known: envelope("live"),
    };
    let held = site.subscribe(&table.consumer, "live.*", "held").await;
    table.subscription = text(&held, "id").to_owned();
    let foreign = site.subscribe(&table.full, "live.*", "foreign").await;
    table.foreign = text(&foreign, "id").to_owned();
    site.subscribe(&table.full, "chat.*", "foreign").await;
    site.one().publish(&table.known).await.expect(201);
    let looped = envelope("live").set("trace_id", LOOPED_TRACE);
    site.one().publish(&looped).await.expect(201);
    site.run(&format!(
        "UPDATE events SET hops = 8, source = 'chat' WHERE trace_id = '{LOOPED_TRACE}'"
    ))
    .await;

    requests(&mut table);
    publishes(&mut table);
    reads(&mut table);
    subscriptions(&mut table);
    deliveries(&mut table);
    elsewhere(&mut table);

    let state = async || -> String {
        sqlx::query_scalar(STATE)
            .fetch_one(&site.pool)
            .await
            .expect("the state")
    };
    let before = state().await;
    let mut faults = Vec::new();
    let mut seen = BTreeSet::new();
    for case in &table.cases {
        let mut request = site
            .one()
            .request(method_of(case.method), &case.path, case.token.as_deref());
        for (name, value) in &case.headers {
            request = request.header(*name, value);
        }
        if !case.body.is_empty() || case.method != "GET" {
            request = request.body(case.body.clone());
        }
        let answer = site.one().send(request).await;
        let shown: String = case.body.chars().take(160).collect();
        let asked = format!(
            "{} {} {shown}",
            case.method,
            case.path.chars().take(120).collect::<String>()
        );
        if (answer.status, answer.body["code"].as_str()) != (case.status, Some(case.code)) {
            faults.push(format!(
                "{asked}\n    wanted {} {}\n    got {} {}",
                case.status, case.code, answer.status, answer.text
            ));
            continue;
        }
        let document = refused(&answer, case.status, case.code);
        seen.insert((case.status, case.code));
        let paths = document["errors"].as_array().into_iter().flatten();
        let named = text(&document, "detail").contains(case.names)
            || paths.map(|error| text(error, "path")).any(|path| path == case.names);
        if !named {
            faults.push(format!("{asked}\n    does not name {}: {}", case.names, answer.text));
        }
    }
    assert!(
        faults.is_empty(),
        "{} of {} cases:\n{}",
        faults.len(),
        table.cases.len(),
        faults.join("\n")
    );
    assert_eq!(state().await, before, "a refused request changed nothing");
    let missing: Vec<_> = CODES.iter().filter(|code| !seen.contains(code)).collect();
    assert!(missing.is_empty(), "no case for {missing:?}");
}

#[tokio::test]
async fn the_refusal_of_a_batch_names_the_first_item_at_fault_by_its_index() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    let mut events = envelopes("live", 100);
    events[57] = envelope("live").set("version", 0).set("priority", "normal");
    events[99] = envelope("chat");
    let answer = site.one().post(EVENTS, Some(&token), &batch(&events)).await;
    let document = refused(&answer, 422, "events.invalid_envelope");
    assert_eq!(document["index"], 57);
    let paths: Vec<&str> = document["errors"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|error| text(error, "path"))
        .collect();
    assert_eq!(paths, ["/version", "/priority"], "every fault of the item: {document}");

    events[57] = envelope("live");
    let answer = site.one().post(EVENTS, Some(&token), &batch(&events)).await;
    assert_eq!(refused(&answer, 403, "events.source_mismatch")["index"], 99);
    let single = site.one().post(EVENTS, Some(&token), events[99].json()).await;
    assert!(single.body.get("index").is_none(), "{}", single.text);
    for event in &events {
        assert_eq!(
            site.traces_of(event.id()).await,
            0,
            "nothing of a refused batch is stored"
        );
    }
}

#[tokio::test]
async fn checks_run_in_the_order_of_the_contract_and_the_first_failure_answers() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    let heavy = json!({ "text": "x".repeat(70_000), "redacts": {} });
    let mut event = envelope("chat")
        .event_type("games.some.thing")
        .payload(heavy)
        .set("version", 0);
    let publish = async |event: &Envelope| site.one().post(EVENTS, Some(&token), event.json()).await;
    refused(&publish(&event).await, 422, "events.invalid_envelope");
    event = event.set("version", 1);
    refused(&publish(&event).await, 413, "events.payload_too_large");
    event = event.payload(json!({ "redacts": {} }));
    refused(&publish(&event).await, 501, "events.not_built");
    event = event.payload(json!({}));
    refused(&publish(&event).await, 403, "events.source_mismatch");
    event = event.set("source", "live");
    refused(&publish(&event).await, 403, "events.type_not_allowed");

    let reader = site.one().service_token(&consumer());
    for (query, code) in [
        ("topic=*.*&limit=0&after_seq=1&after=x", "events.bad_topic"),
        ("topic=live.*&limit=0&after_seq=1&after=x", "events.bad_request limit"),
        (
            "topic=live.*&limit=1&after_seq=1&after=x",
            "events.bad_request after_seq",
        ),
        ("topic=live.*&limit=1&after=x", "events.bad_request after"),
    ] {
        let answer = site.one().get(&format!("{EVENTS}?{query}"), Some(&reader)).await;
        let (code, names) = code.split_once(' ').unwrap_or((code, "topic"));
        let document = refused(&answer, 400, code);
        assert!(text(&document, "detail").starts_with(names), "{query}: {document}");
    }

    let wrong = json!({ "topic_pattern": "*.*", "endpoint": "x", "secret": 1, "retry_policy": 1 });
    let mut body = wrong;
    for (repair, status, code) in [
        (("topic_pattern", json!("live.*")), 422, "events.bad_topic"),
        (
            ("endpoint", json!(endpoint("order"))),
            422,
            "events.endpoint_not_allowed",
        ),
        (("secret", json!("x".repeat(32))), 422, "events.bad_request"),
        (("retry_policy", json!({})), 422, "events.bad_request"),
    ] {
        let answer = site.one().post(SUBSCRIPTIONS, Some(&reader), &body).await;
        let document = refused(&answer, status, code);
        assert!(text(&document, "detail").contains(repair.0), "{document}");
        body[repair.0] = repair.1;
    }
    site.one().post(SUBSCRIPTIONS, Some(&reader), &body).await.expect(201);
}

#[tokio::test]
async fn every_route_reads_as_much_as_it_needs() {
    let site = Site::shared().await;
    let own = site.one().service_token(&consumer());
    let operator = operator();
    let sub = id("sub");
    let small = 64 * 1024;
    for (method, path, token, limit) in [
        (
            "POST",
            EVENTS.to_owned(),
            &site.one().service_token("live"),
            2 * 1024 * 1024,
        ),
        ("PUT", CHECKPOINTS.to_owned(), &own, small),
        ("POST", SUBSCRIPTIONS.to_owned(), &own, small),
        ("POST", format!("{SUBSCRIPTIONS}/{sub}/rotate-secret"), &own, small),
        ("POST", format!("{SUBSCRIPTIONS}/{sub}/enable"), &own, small),
        ("POST", format!("{SUBSCRIPTIONS}/{sub}/disable"), &own, small),
        ("POST", REPLAY.to_owned(), &operator, 256 * 1024),
    ] {
        let padded = |bytes: usize| format!("{{{}}}", " ".repeat(bytes - 2));
        let over = send(site.one(), method, &path, Some(token), padded(limit + 1)).await;
        let document = refused(&over, 413, "events.batch_too_large");
        assert_eq!(document["limit"], limit, "{path}");
        assert!(text(&document, "detail").contains(&limit.to_string()), "{document}");
        let fits = send(site.one(), method, &path, Some(token), padded(limit)).await;
        assert!([400, 404, 422].contains(&fits.status), "{path}: {}", fits.text);
    }
    let ids = vec![format!("evt_{}", "0".repeat(26)); 1000];
    let body = json!({ "subscription_id": sub, "event_ids": ids }).to_string();
    let most = send(site.one(), "POST", REPLAY, Some(&operator), body).await;
    refused(&most, 404, "events.not_found");
}

#[tokio::test]
async fn a_packed_body_is_refused_when_it_unpacks_to_more_than_the_limit() {
    let site = Site::shared().await;
    let token = site.one().service_token("live");
    let request = site.one().request(method_of("POST"), EVENTS, Some(&token));
    let request = request
        .header(CONTENT_TYPE, "application/json")
        .header(CONTENT_ENCODING, "gzip");
    let answer = site
        .one()
        .send(request.body(crate::api_world::packed_run(b' ', 3 * 1024 * 1024)))
        .await;
    refused(&answer, 413, "events.batch_too_large");
}
