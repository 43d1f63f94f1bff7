//! Hostile bodies to every writing route: each is refused with its documented code in time, costs at most its own
//! connection and changes nothing. What a payload may carry comes back as it was sent, on every way out.

use std::{
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use openvibe_events::http::api::ROUTES;
use serde_json::json;

use crate::{
    api_refusals::STATE,
    api_world::{Site, consumer, operator, packed_run, text},
    support::{
        contracts::assert_valid,
        database::Database,
        envelopes::{envelope, unique_type},
        network::{Network, TokenSpec},
        receiver::{Call, Receiver},
        service::start_many,
        wait::{SOON, eventually},
        wire::{PROMPT, Reply, Wire},
    },
};

/// What stands in a template for the text and the number under attack.
const TEXT: &str = "@text";
const NUMBER: &str = "@number";

/// The largest body that any route reads.
const MOST: usize = 2 * 1024 * 1024;

/// Little that unpacks to too much. Made once, because making it takes a while.
static BOMB: LazyLock<Vec<u8>> = LazyLock::new(|| packed_run(b' ', 2 * MOST));

type Verdict = (u16, &'static str);

const BAD_JSON: Verdict = (400, "events.bad_json");
const BAD_REQUEST: Verdict = (400, "events.bad_request");
const NOT_FOUND: Verdict = (404, "events.not_found");
const TOO_LARGE: Verdict = (413, "events.batch_too_large");
const MEDIA_TYPE: Verdict = (415, "events.unsupported_media_type");
const ENVELOPE: Verdict = (422, "events.invalid_envelope");
const UNPROCESSABLE: Verdict = (422, "events.bad_request");
const TOPIC: Verdict = (422, "events.bad_topic");

/// A writing route and a request that it accepts.
struct Target {
    method: &'static str,
    path: String,
    token: String,
    /// A body, with [`TEXT`] and [`NUMBER`] where the route reads a text and a number.
    template: &'static str,
    good: [String; 2],
    accepted: u16,
    /// What hostile members are answered with; none where the route reads no member.
    members: Option<Members>,
}

struct Members {
    nul: Verdict,
    surrogate: Verdict,
    wrong_type: Verdict,
    repeated: Verdict,
    infinite: Verdict,
    twenty_digits: Verdict,
}

impl Members {
    fn all(verdict: Verdict) -> Self {
        Self {
            nul: verdict,
            surrogate: verdict,
            wrong_type: verdict,
            repeated: verdict,
            infinite: verdict,
            twenty_digits: verdict,
        }
    }
}

/// The rows that the requests are about.
struct Rows {
    consumer: String,
    subscription: String,
    event_type: String,
    event: String,
}

const IGNORED: &str = r#"{"note":"ignored"}"#;

/// The request for a route of the table. A route that is missing here fails the tests.
fn target(method: &'static str, path: &str, rows: &Rows) -> Target {
    let own = || TokenSpec::service(&rows.consumer).sign();
    let target = |token, template, good: [String; 2], accepted, members| Target {
        method,
        path: path
            .replace("/carriers/{id}", "/carriers/pg-v1")
            .replace("{id}", &rows.subscription)
            .replace("{pattern}", &rows.event_type),
        token,
        template,
        good,
        accepted,
        members,
    };
    let string = |text: &str| format!("{text:?}");
    let nothing = || [String::new(), String::new()];
    match (method, path) {
        ("POST", "/api/v1/events") => target(
            TokenSpec::service("live").sign(),
            r#"{"event_id":"evt_01K7AAB2CD3EF4GH5JK6MN7PQR","event_type":"live.hostile.body","version":@number,
               "source":"live","actor":{"type":"service","id":"live"},"timestamp":"2026-10-21T08:15:30Z",
               "subject":{"type":"thing","id":@text},"payload":{}}"#,
            [string("1"), "1".to_owned()],
            201,
            Some(Members::all(ENVELOPE)),
        ),
        ("POST", "/api/v1/subscriptions") => target(
            own(),
            r#"{"topic_pattern":@text,"endpoint":"http://127.0.0.1:9/hostile","max_inflight":@number}"#,
            [string("live.*"), "2".to_owned()],
            201,
            Some(Members {
                repeated: UNPROCESSABLE,
                infinite: UNPROCESSABLE,
                twenty_digits: UNPROCESSABLE,
                ..Members::all(TOPIC)
            }),
        ),
        ("POST", "/api/v1/subscriptions/{id}/rotate-secret") => target(
            own(),
            r#"{"secret":@text,"overlap_s":@number}"#,
            [string(&"s".repeat(32)), "60".to_owned()],
            200,
            Some(Members::all(UNPROCESSABLE)),
        ),
        ("PATCH", "/api/v1/subscriptions/{id}") => target(
            own(),
            r#"{"retry_policy":{"max_attempts":@text},"max_inflight":@number}"#,
            ["3".to_owned(), "3".to_owned()],
            200,
            Some(Members::all(UNPROCESSABLE)),
        ),
        ("POST", "/api/v1/subscriptions/{id}/enable" | "/api/v1/subscriptions/{id}/disable") => {
            target(own(), IGNORED, nothing(), 200, None)
        }
        ("PUT", "/api/v1/checkpoints") => target(
            own(),
            r#"{"topic":@text,"cursor":@number}"#,
            [string("live.*"), string("c1.0.MA")],
            200,
            Some(Members {
                surrogate: BAD_JSON,
                infinite: BAD_JSON,
                ..Members::all(BAD_REQUEST)
            }),
        ),
        ("POST", "/api/v1/deliveries/replay") => target(
            operator(),
            r#"{"subscription_id":@text,"from_seq":@number}"#,
            [string(&rows.subscription), "1".to_owned()],
            200,
            Some(Members {
                nul: NOT_FOUND,
                wrong_type: NOT_FOUND,
                surrogate: BAD_JSON,
                infinite: BAD_JSON,
                ..Members::all(BAD_REQUEST)
            }),
        ),
        ("POST", "/api/v1/deliveries/skip") => target(
            operator(),
            r#"{"event_ids":[@number],"subscription_id":@text}"#,
            [string(&rows.subscription), string(&rows.event)],
            200,
            Some(Members {
                nul: NOT_FOUND,
                wrong_type: NOT_FOUND,
                surrogate: BAD_JSON,
                infinite: BAD_JSON,
                ..Members::all(BAD_REQUEST)
            }),
        ),
        ("PUT", "/api/v1/delivery-policies/{pattern}") => target(
            operator(),
            r#"{"class":@text,"durability":"none","delivery_semantics":"at_least_once","batching":{"max_messages":@number}}"#,
            [string("bulk"), "5".to_owned()],
            200,
            Some(Members::all(BAD_REQUEST)),
        ),
        ("DELETE", "/api/v1/delivery-policies/{pattern}") => target(operator(), IGNORED, nothing(), 204, None),
        // A truth value has no room for a number beside it.
        ("PUT", "/api/v1/carriers/{id}") => target(
            operator(),
            r#"{"disabled":@text@number}"#,
            ["false".to_owned(), String::new()],
            200,
            Some(Members {
                surrogate: BAD_JSON,
                infinite: BAD_JSON,
                twenty_digits: BAD_JSON,
                repeated: BAD_JSON,
                ..Members::all(BAD_REQUEST)
            }),
        ),
        _ => panic!("{method} {path} writes: say here what hostile bodies to it are answered with"),
    }
}

/// Every route that writes, whatever is added.
fn targets(rows: &Rows) -> Vec<Target> {
    ROUTES
        .iter()
        .filter(|route| route.method != "GET")
        .map(|route| target(route.method, route.path, rows))
        .collect()
}

/// What becomes of the connection of a refused request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Connection {
    /// The body is small and its end is known, so the next request can follow.
    Stays,
    /// The body is large, or where it ends is not known.
    MayEnd,
}

/// A hostile request and what it must be answered with.
struct Shot {
    what: &'static str,
    bytes: Vec<u8>,
    /// Whether the client ends its half after the bytes.
    cut: bool,
    verdict: Verdict,
    connection: Connection,
}

impl Target {
    fn body(&self, text: &str, number: &str) -> String {
        self.template.replace(TEXT, text).replace(NUMBER, number)
    }

    fn good(&self) -> String {
        self.body(&self.good[0], &self.good[1])
    }

    fn head(&self, path: &str, content_type: &str, more: &str) -> String {
        let (method, token) = (self.method, &self.token);
        format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: {content_type}\r\n{more}\r\n"
        )
    }

    fn whole_as(&self, content_type: &str, more: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
        let body = body.as_ref();
        let more = format!("{more}Content-Length: {}\r\n", body.len());
        [self.head(&self.path, content_type, &more).as_bytes(), body].concat()
    }

    fn whole(&self, body: impl AsRef<[u8]>) -> Vec<u8> {
        self.whole_as("application/json", "", body)
    }

    fn chunked(&self, body: impl AsRef<[u8]>, end: &str) -> Vec<u8> {
        let mut bytes = self
            .head(&self.path, "application/json", "Transfer-Encoding: chunked\r\n")
            .into_bytes();
        for chunk in body.as_ref().chunks(64 * 1024) {
            bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
            bytes.extend(chunk);
            bytes.extend(b"\r\n");
        }
        bytes.extend(end.bytes());
        bytes
    }

    /// Everything hostile that can be sent to this route at once.
    fn shots(&self) -> Vec<Shot> {
        let mut shots = Vec::new();
        let mut add = |what, bytes, verdict, connection| {
            shots.push(Shot {
                what,
                bytes,
                cut: false,
                verdict,
                connection,
            });
        };
        let good = self.good();
        let with = |text: &str| {
            let mut body = good.clone().into_bytes();
            body.splice(1..1, [b"\"x\":\"", text.as_bytes(), b"\","].concat());
            body
        };
        let stays = [
            ("a raw NUL", with("\0"), BAD_JSON),
            ("a body of NUL", vec![0; 16], BAD_JSON),
            ("an escape of nothing", with("\\q"), BAD_JSON),
            ("half an escape", with("\\u12"), BAD_JSON),
            (
                "10,000 levels",
                format!("{{\"x\":{}{}}}", "[".repeat(10_000), "]".repeat(10_000)).into_bytes(),
                BAD_JSON,
            ),
            ("10,000 open levels", "[".repeat(10_000).into_bytes(), BAD_JSON),
            ("a string", b"\"text\"".to_vec(), BAD_JSON),
            ("a number", b"1e400".to_vec(), BAD_JSON),
            ("null", b"null".to_vec(), BAD_JSON),
            ("a number that is none", b"{\"x\":NaN}".to_vec(), BAD_JSON),
            ("two documents", format!("{good}{good}").into_bytes(), BAD_JSON),
            (
                "a body cut in the middle",
                good.as_bytes()[..good.len() - 1].to_vec(),
                BAD_JSON,
            ),
        ];
        for (what, body, verdict) in stays {
            add(what, self.whole(body), verdict, Connection::Stays);
        }
        let mut latin = with("?");
        let at = latin.iter().position(|&byte| byte == b'?').expect("a mark");
        latin[at] = 0xe9;
        add("invalid UTF-8", self.whole(latin), BAD_JSON, Connection::Stays);
        let surrogate = [b"{\"x\":\"".as_slice(), &[0xed, 0xa0, 0x80], b"\"}"].concat();
        add(
            "a surrogate in UTF-8",
            self.whole(surrogate),
            BAD_JSON,
            Connection::Stays,
        );
        let wide: Vec<u8> = good.encode_utf16().flat_map(u16::to_le_bytes).collect();
        add("UTF-16", self.whole(wide), BAD_JSON, Connection::Stays);

        for (what, content_type) in [
            ("a bad charset", "application/json; charset=latin1"),
            ("another charset", "application/json;charset=\"utf-16\""),
            ("a form", "application/x-www-form-urlencoded"),
            ("no known type", "json"),
        ] {
            add(
                what,
                self.whole_as(content_type, "", &good),
                MEDIA_TYPE,
                Connection::Stays,
            );
        }
        add(
            "a bad percent-encoding in a form",
            self.whole_as("application/x-www-form-urlencoded", "", "a=%zz"),
            MEDIA_TYPE,
            Connection::Stays,
        );
        let json = "application/json";
        add(
            "two codings",
            self.whole_as(json, "Content-Encoding: gzip, gzip\r\n", &good),
            MEDIA_TYPE,
            Connection::Stays,
        );
        add(
            "a damaged gzip",
            self.whole_as(json, "Content-Encoding: gzip\r\n", &good),
            BAD_JSON,
            Connection::Stays,
        );
        add(
            "a gzip bomb",
            self.whole_as(json, "Content-Encoding: gzip\r\n", &*BOMB),
            TOO_LARGE,
            Connection::MayEnd,
        );
        let padded = format!("{good}{}", " ".repeat(MOST + 1 - good.len()));
        add(
            "2 MiB + 1, declared",
            self.whole(&padded),
            TOO_LARGE,
            Connection::MayEnd,
        );
        add(
            "2 MiB + 1, in chunks",
            self.chunked(&padded, "0\r\n\r\n"),
            TOO_LARGE,
            Connection::MayEnd,
        );
        add(
            "chunks without sizes",
            self.chunked("", "zz\r\n{}\r\n"),
            BAD_JSON,
            Connection::MayEnd,
        );
        let endless = format!("{}\r\n", "f".repeat(40));
        add(
            "a chunk of endless size",
            self.chunked("", &endless),
            BAD_JSON,
            Connection::MayEnd,
        );

        for (what, end) in [
            ("a bad percent-encoding", "%zz"),
            ("half a percent-encoding", "%"),
            ("a path of no UTF-8", "%ff"),
        ] {
            // The route reads its parameter, where it has one, before it can tell; nothing else has this path.
            let path = match self.path.rsplit_once('/') {
                Some((start, last)) if ["enable", "disable", "rotate-secret"].contains(&last) => {
                    format!("{start}{end}/{last}")
                }
                _ => format!("{}{end}", self.path),
            };
            let head = self.head(
                &path,
                "application/json",
                &format!("Content-Length: {}\r\n", good.len()),
            );
            add(
                what,
                [head.as_bytes(), good.as_bytes()].concat(),
                NOT_FOUND,
                Connection::Stays,
            );
        }

        if let Some(members) = &self.members {
            let [text, number] = &self.good;
            let quoted = text.trim_matches('"');
            let repeated = good.replacen('{', &format!("{{{},", first_member(&good)), 1);
            for (what, body, verdict) in [
                (
                    "an escaped NUL",
                    self.body(&format!("\"{quoted}\\u0000\""), number),
                    members.nul,
                ),
                (
                    "a lone surrogate",
                    self.body(&format!("\"{quoted}\\ud800\""), number),
                    members.surrogate,
                ),
                ("an object for a text", self.body("{}", number), members.wrong_type),
                ("a list for a text", self.body("[]", number), members.wrong_type),
                ("a repeated key", repeated, members.repeated),
                ("1e400", self.body(text, "1e400"), members.infinite),
                ("-1e400", self.body(text, "-1e400"), members.infinite),
                (
                    "20 digits",
                    self.body(text, "12345678901234567890"),
                    members.twenty_digits,
                ),
                (
                    "-20 digits",
                    self.body(text, "-12345678901234567890"),
                    members.twenty_digits,
                ),
            ] {
                add(what, self.whole(body), verdict, Connection::Stays);
            }
        }
        let cut = |what, bytes| Shot {
            what,
            bytes,
            cut: true,
            verdict: BAD_JSON,
            connection: Connection::MayEnd,
        };
        let half = good.len() / 2;
        let mut short = self.whole(&good);
        short.truncate(short.len() - half);
        shots.push(cut("an aborted body", short));
        shots.push(cut("an aborted body in chunks", self.chunked(&good[..half], "")));
        shots.push(cut("a body that never starts", {
            let mut bare = self.whole(&good);
            bare.truncate(bare.len() - good.len());
            bare
        }));
        shots
    }

    /// Sends the shot on a connection of its own; what is wrong with the outcome, if anything.
    async fn fire(&self, site: &Site, shot: &Shot) -> Result<(), String> {
        let mut wire = Wire::to(site.service()).await;
        let reply = if shot.cut {
            wire.send(&shot.bytes).await;
            wire.end_sending().await;
            wire.answer(PROMPT).await
        } else {
            wire.ask(&shot.bytes).await
        };
        let reply = reply.ok_or("no answer")?;
        judged(&reply, shot.verdict)?;
        if reply.is_last() {
            if shot.connection == Connection::Stays {
                return Err("the connection is closed".to_owned());
            }
            wire.closed().await;
        } else if !shot.cut {
            let next = wire.ask("GET /api/health HTTP/1.1\r\nHost: x\r\n\r\n").await;
            if next.as_ref().is_none_or(|next| next.status != 200) {
                return Err(format!("the next request is answered {next:?}"));
            }
        }
        Ok(())
    }
}

/// The first member of an object, as text: none of the templates starts with a nested one.
fn first_member(object: &str) -> &str {
    object[1..].split(',').next().expect("a member")
}

fn judged(reply: &Reply, (status, code): Verdict) -> Result<(), String> {
    if (reply.status, reply.body["code"].as_str()) != (status, Some(code)) {
        return Err(format!("wanted {status} {code}, got {reply:?}"));
    }
    assert_valid("errors.problem@1", &reply.body);
    Ok(())
}

/// A world with a row of everything that could be changed.
async fn filled() -> (Site, Rows) {
    let site = Site::own(1, &[]).await;
    let mut rows = Rows {
        consumer: consumer(),
        subscription: String::new(),
        event_type: unique_type("live"),
        event: String::new(),
    };
    let held = site.subscribe(&rows.consumer, &rows.event_type, "held").await;
    rows.subscription = text(&held, "id").to_owned();
    let event = envelope("live").event_type(&rows.event_type);
    site.one().publish(&event).await.expect(201);
    rows.event = event.id().to_owned();
    let own = TokenSpec::service(&rows.consumer).sign();
    let checkpoint = json!({ "topic": "chat.*", "cursor": "c1.0.MA" });
    site.one()
        .put("/api/v1/checkpoints", Some(&own), &checkpoint)
        .await
        .expect(200);
    let policy = json!({ "class": "bulk", "durability": "none", "delivery_semantics": "at_least_once" });
    let path = format!("/api/v1/delivery-policies/{}", rows.event_type);
    site.one().put(&path, Some(&operator()), &policy).await.expect(200);
    (site, rows)
}

async fn state(site: &Site) -> String {
    sqlx::query_scalar(STATE)
        .fetch_one(&site.pool)
        .await
        .expect("the state")
}

#[tokio::test]
async fn every_writing_route_refuses_every_hostile_body_and_goes_on() {
    let (site, rows) = filled().await;
    let before = state(&site).await;
    let targets = targets(&rows);
    let faults = join_all(targets.iter().map(async |target| {
        let mut faults = Vec::new();
        for shot in target.shots() {
            if let Err(fault) = target.fire(&site, &shot).await {
                faults.push(format!("{} {} with {}: {fault}", target.method, target.path, shot.what));
            }
        }
        // One that hangs up in the middle waits for no answer.
        let mut bytes = target.whole(target.good());
        bytes.truncate(bytes.len() - 1);
        Wire::to(site.service()).await.send(&bytes).await;
        faults
    }));
    let faults = faults.await.concat();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    assert_eq!(state(&site).await, before, "a refused request changed nothing");

    // It was the hostile part that was refused.
    for target in &targets {
        let mut wire = Wire::to(site.service()).await;
        let reply = wire.ask(target.whole(target.good())).await.expect("an answer");
        assert_eq!(
            reply.status, target.accepted,
            "{} {}: {reply:?}",
            target.method, target.path
        );
    }
    assert_ne!(state(&site).await, before, "what was accepted is seen");
}

#[tokio::test]
async fn what_comes_too_slowly_is_ended_in_time() {
    let (site, rows) = filled().await;
    let before = state(&site).await;
    let targets = targets(&rows);
    let bodies = join_all(targets.iter().map(async |target| {
        let mut wire = Wire::to(site.service()).await;
        let mut start = target.whole(format!("{}{}", target.good(), " ".repeat(1000)));
        start.truncate(start.len() - 1000);
        wire.send(&start).await;
        let since = Instant::now();
        // Every byte that comes is progress, and none makes the time longer.
        let reply = wire.drip(b' ', Duration::from_secs(45)).await.expect("an answer");
        let took = since.elapsed();
        judged(&reply, BAD_JSON).unwrap_or_else(|fault| panic!("{} {}: {fault}", target.method, target.path));
        assert!(
            took > Duration::from_secs(25) && reply.is_last(),
            "{} {} after {took:?}: {reply:?}",
            target.method,
            target.path
        );
    }));
    let heads = join_all(
        ["", "GET /api/health HTTP/1.1\r\nHost: x\r\nX-Long: "].map(async |start| {
            let mut wire = Wire::to(site.service()).await;
            wire.send(start).await;
            let since = Instant::now();
            let reply = wire.drip(b'a', Duration::from_secs(30)).await;
            assert!(reply.is_none(), "there is nothing to answer: {reply:?}");
            assert!(
                since.elapsed() > Duration::from_secs(10),
                "{start:?} after {:?}",
                since.elapsed()
            );
        }),
    );
    tokio::join!(bodies, heads);
    assert_eq!(state(&site).await, before, "nothing of it was stored");
}

#[tokio::test]
async fn what_a_payload_carries_comes_back_byte_for_byte_on_every_way_out() {
    let (database, network, receiver) = tokio::join!(Database::create(), Network::start(), Receiver::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let (one, two) = (services[0].client(), services[1].client());
    let deep = format!("{{\"deep\":{}{}}}", "[".repeat(126), "]".repeat(126));
    let payloads = [
        (
            r#"{"nul":"\u0000","name\u0000":1,"half":"\ud800","\udfff":"\uDBFF x"}"#,
            r#"{"nul":"\u0000","name\u0000":1,"half":"\ud800","\udfff":"\uDBFF x"}"#,
        ),
        (
            r#"{"twice":1,"twice":{"x":1,"x":2},"twice":"3"}"#,
            r#"{"twice":1,"twice":{"x":1,"x":2},"twice":"3"}"#,
        ),
        (
            r#"{"n":[1e400,-1E+400,12345678901234567890,1.0,1.10,-0,0.1e-7]}"#,
            r#"{"n":[1e400,-1E+400,12345678901234567890,1.0,1.10,-0,0.1e-7]}"#,
        ),
        (
            r#"{"z":1,"a":"\/\u0041\u00e9\n","__proto__":{},"é":"\ud83d\ude00😀"}"#,
            r#"{"z":1,"a":"\/\u0041\u00e9\n","__proto__":{},"é":"\ud83d\ude00😀"}"#,
        ),
        (
            "{ \"spaced\" :\t[ 1 ,\r\n 2 ] , \"kept\" : \" a  b \" }",
            r#"{"spaced":[1,2],"kept":" a  b "}"#,
        ),
        (deep.as_str(), deep.as_str()),
    ];
    let event_type = unique_type("live");
    let subscription = json!({ "topic_pattern": event_type, "endpoint": receiver.url("/hook"), "max_inflight": 8 });
    let token = one.service_token("chat");
    let created = one
        .post("/api/v1/subscriptions", Some(&token), &subscription)
        .await
        .expect(201);
    let secret = text(&created, "secret");

    let mut wanted = Vec::new();
    for (sent, carried) in payloads {
        let event = envelope("live").event_type(&event_type).payload(json!("HERE"));
        let body = event.json().to_string().replacen(r#""HERE""#, sent, 1);
        let publish = one.request(
            reqwest::Method::POST,
            "/api/v1/events",
            Some(&one.service_token("live")),
        );
        let publish = publish.header("content-type", "application/json").body(body);
        assert_eq!(one.send(publish).await.status, 201, "{sent}");
        wanted.push((event.id().to_owned(), format!(r#","payload":{carried}}}"#)));
    }

    let page = two
        .get(&format!("/api/v1/events?topic={event_type}"), Some(&token))
        .await;
    for (id, end) in &wanted {
        let by_id = two.get(&format!("/api/v1/events/{id}"), Some(&token)).await;
        assert!(
            by_id.text.ends_with(&format!("{end}}}")),
            "{end}\nby id: {}",
            by_id.text
        );
        assert!(page.text.contains(&by_id.text), "{end}\nin a page: {}", page.text);
    }
    let carried = |calls: &[Arc<Call>]| {
        for (id, end) in &wanted {
            let call = calls
                .iter()
                .find(|call| call.event_id() == id)
                .expect("a call of each event");
            let body = String::from_utf8(call.body.to_vec()).expect("UTF-8");
            assert!(body.ends_with(&format!("{end}}}")), "{end}\ndelivered: {body}");
            call.assert_signed(secret);
        }
    };
    let first = receiver.wait_calls_to("/hook", wanted.len(), SOON).await;
    carried(&first);
    let ids: Vec<&str> = wanted.iter().map(|(id, _)| id.as_str()).collect();
    let replay = json!({ "subscription_id": created["id"], "event_ids": ids });
    eventually(
        "every delivery is recorded, so that it can be replayed",
        SOON,
        async || {
            let replayed = two
                .post("/api/v1/deliveries/replay", Some(&operator()), &replay)
                .await
                .expect(200);
            receiver.calls_to("/hook").len() >= wanted.len() * 2 || replayed["queued"] == wanted.len()
        },
    )
    .await;
    let all = receiver.wait_calls_to("/hook", wanted.len() * 2, SOON).await;
    carried(&all[wanted.len()..]);
}
