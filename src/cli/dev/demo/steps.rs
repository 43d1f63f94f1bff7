//! The steps of the tour, in order.

use std::collections::HashSet;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use reqwest::Method;
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::super::receiver::{Act, Arrival};
use super::super::service::Service;
use super::TourError;
use super::events::{Draft, invoice_paid, post_created, stream_started, vod_failed, vod_ready};
use super::guide::{Guide, Hook, brief, short};

/// Waits between the attempts of the failing receiver, in milliseconds.
const BACKOFF_MS: [u64; 2] = [500, 1500];

/// Posts published before the service is killed.
const POSTS: usize = 8;

/// Events of one page.
const PAGE: usize = 5;

/// Pages read at most; the tour publishes far fewer events.
const PAGES_MAX: usize = 100;

/// 1. Tokens from the issuer.
pub(super) async fn tokens(guide: &mut Guide<'_>) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    terminal.step(1, "Every caller has a token of its own");
    let url = format!("{}/oauth/token", guide.stage.issuer.url());
    for client in ["media", "live", "billing", "community", &guide.consumer.clone()] {
        let form = format!("grant_type=client_credentials&client_id={client}&audience=openvibe.events");
        let request = guide
            .stage
            .http
            .post(&url)
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded");
        let answer = request.body(form).send().await?;
        let status = answer.status().as_u16();
        let body: Value = serde_json::from_slice(&answer.bytes().await?).unwrap_or_default();
        let token = body["access_token"].as_str().unwrap_or_default();
        let claims = token
            .split('.')
            .nth(1)
            .and_then(|part| URL_SAFE_NO_PAD.decode(part).ok());
        let claims: Value = claims
            .and_then(|claims| serde_json::from_slice(&claims).ok())
            .unwrap_or_default();
        terminal.call("POST", "/oauth/token", status, brief(&claims, &["sub", "aud"]));
        if status != 200 || claims["sub"] != format!("svc:{client}") {
            return Err(TourError::Unmet(format!("a token for svc:{client}, got {body}")));
        }
        guide.tokens.insert(client.to_owned(), token.to_owned());
    }
    guide.expect(
        true,
        "the issuer signs for any client; the service checks signature, issuer, audience and capability",
    )?;
    guide
        .quiet("nobody", (Method::GET, "/api/v1/events"), None, 401)
        .await?;
    guide.expect(true, "without a token: 401")?;
    let head = guide
        .quiet(&guide.consumer, (Method::GET, "/api/v1/events?limit=1"), None, 200)
        .await?;
    guide.start = head["latest_cursor"].as_str().unwrap_or_default().to_owned();
    guide.expect(
        !guide.start.is_empty(),
        &format!("the log ends at cursor {}", guide.start),
    )
}

/// 2. A subscription and its secret.
pub(super) async fn subscribe(guide: &mut Guide<'_>) -> Result<(), TourError> {
    guide
        .stage
        .terminal
        .step(2, "A consumer subscribes and gets a signing secret");
    hook(guide, "vods", "media.vod.*", None).await?;
    let made = guide.hook("vods").clone();
    guide.expect(made.secret.starts_with("whsec_"), "the secret is shown once")?;
    let path = format!("/api/v1/subscriptions/{}", made.id);
    let again = guide
        .call(&guide.consumer, (Method::GET, &path), None, 200, |body| {
            brief(body, &["topic_pattern", "enabled"])
        })
        .await?;
    guide.expect(
        again.get("secret").is_none() && again["id"] == made.id,
        "and never again",
    )
}

/// 3. Publishing, alone and as a batch, and again.
pub(super) async fn publish(guide: &mut Guide<'_>) -> Result<(), TourError> {
    guide
        .stage
        .terminal
        .step(3, "A producer publishes, and repeats itself without harm");
    let single = [vod_ready("vod-101", 42)];
    let batch = [vod_ready("vod-102", 7), vod_failed("vod-103"), vod_ready("vod-104", 95)];
    let stored = [
        guide.publish("vods", &single).await?,
        guide.publish("vods", &batch).await?,
    ]
    .concat();
    let is_new = |result: &Value| result["duplicate"] == false && result["cursor"].is_string();
    guide.expect(
        stored.len() == 4 && stored.iter().all(is_new),
        "4 events are stored, each with its cursor",
    )?;
    let again = [guide.send(&single, 200).await?, guide.send(&batch, 200).await?].concat();
    let is_same = |(old, new): (&Value, &Value)| new["duplicate"] == true && new["cursor"] == old["cursor"];
    guide.expect(
        again.len() == 4 && stored.iter().zip(&again).all(is_same),
        "the same again answers duplicate: true with the same cursors",
    )
}

/// 4. Deliveries as the receiver sees them.
pub(super) async fn signed(guide: &mut Guide<'_>) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    terminal.step(4, "Each event arrives as a signed webhook");
    let ids: Vec<String> = guide.ledger.iter().map(|event| event.id.clone()).collect();
    let arrived = guide
        .arrivals("vods", "for the deliveries", |arrivals| all_taken(arrivals, &ids))
        .await?;
    if let Some(first) = arrived.first() {
        tell(guide, first);
    }
    for arrival in &arrived {
        terminal.seen(format_args!(
            "POST {}  {}  attempt {}",
            arrival.path,
            brief(&arrival.json()["event"], &["event_type", "event_id"]),
            arrival.attempt()
        ));
    }
    let whole = |arrival: &Arrival| arrival.json()["event"]["event_id"] == arrival.event_id() && arrival.attempt() == 1;
    guide.expect(
        arrived.len() == ids.len() && arrived.iter().all(whole),
        "each of the 4 events arrived once, at the first attempt; the repeats made no delivery",
    )?;
    let genuine = arrived
        .iter()
        .all(|arrival| guide.genuine("vods", arrival, &arrival.body));
    guide.expect(genuine, "every signature verifies with the secret of the subscription")?;
    let forged = arrived.iter().any(|arrival| {
        let mut body = arrival.body.to_vec();
        body.push(b' ');
        guide.genuine("vods", arrival, &body)
    });
    guide.expect(!forged, "and none does when one byte is added to the body")
}

/// 5. A receiver that fails and recovers.
pub(super) async fn retried(guide: &mut Guide<'_>) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    terminal.step(5, "The receiver fails twice and recovers");
    let policy = json!({ "max_attempts": 5, "backoff_ms": BACKOFF_MS });
    hook(guide, "streams", "live.stream.*", Some(policy)).await?;
    let path = guide.hook("streams").path.clone();
    guide
        .stage
        .receiver
        .script(&path, &[Act::Answer(503), Act::Answer(503)], Act::Answer(204));
    let event = stream_started("stream-7");
    guide.publish("streams", std::slice::from_ref(&event)).await?;
    let waits =
        |row: &Value| row["status"] == "failed" && row["last_status"] == 503 && row["next_attempt_at"].is_string();
    guide
        .delivery("streams", &event.id, "for the first failure to be written down", waits)
        .await?;
    guide.expect(true, "the failure and the time of the next attempt are on record")?;
    let ids = [event.id.clone()];
    guide
        .arrivals("streams", "for the receiver to recover", |arrivals| {
            all_taken(arrivals, &ids)
        })
        .await?;
    let attempts = attempts_of(&guide.stage.receiver.at(&path), &event.id);
    let mut before: Option<&Arrival> = None;
    for attempt in &attempts {
        let waited = before.map_or(Duration::ZERO, |before| attempt.at - before.at);
        terminal.seen(format_args!(
            "attempt {}  after {:>4} ms  answered {}",
            attempt.attempt(),
            waited.as_millis(),
            answered(attempt)
        ));
        before = Some(attempt);
    }
    let numbers: Vec<u32> = attempts.iter().map(Arrival::attempt).collect();
    guide.expect(numbers == [1, 2, 3], "three attempts, numbered 1, 2 and 3")?;
    let on_time = attempts
        .windows(2)
        .zip(BACKOFF_MS)
        .all(|(pair, wait_ms)| pair[1].at - pair[0].at >= Duration::from_millis(wait_ms));
    guide.expect(on_time, "no retry came before its time")?;
    let done = |row: &Value| row["status"] == "delivered" && row["attempt"] == 3;
    guide
        .delivery("streams", &event.id, "for the success to be written down", done)
        .await?;
    guide.expect(true, "delivered")
}

/// 6. A dead letter and its replay.
pub(super) async fn dead_and_replayed(guide: &mut Guide<'_>) -> Result<(), TourError> {
    guide
        .stage
        .terminal
        .step(6, "A receiver that keeps failing: a dead letter, and its replay");
    let policy = json!({ "max_attempts": 2, "backoff_ms": [300] });
    hook(guide, "invoices", "billing.invoice.*", Some(policy)).await?;
    let made = guide.hook("invoices").clone();
    guide.stage.receiver.script(&made.path, &[], Act::Answer(500));
    let event = invoice_paid("inv-2001");
    guide.publish("invoices", std::slice::from_ref(&event)).await?;
    let is_dead = |row: &Value| row["status"] == "dead" && row["attempt"] == 2 && row["last_status"] == 500;
    guide
        .delivery("invoices", &event.id, "for the last attempt to fail", is_dead)
        .await?;
    let path = format!("/api/v1/deliveries?status=dead&subscription_id={}", made.id);
    let letters = guide
        .call(&guide.consumer, (Method::GET, &path), None, 200, |body| {
            format!("{} dead letter", body["deliveries"].as_array().map_or(0, Vec::len))
        })
        .await?;
    let listed = letters["deliveries"].as_array().map_or(&[][..], Vec::as_slice);
    guide.expect(
        matches!(listed, [letter] if letter["event_id"] == event.id),
        "after two attempts the delivery is dead, and listed as such",
    )?;
    guide.stage.receiver.script(&made.path, &[], Act::Answer(204));
    let replay = json!({ "subscription_id": made.id, "event_ids": [event.id] });
    let answer = guide
        .call(
            &guide.consumer,
            (Method::POST, "/api/v1/deliveries/replay"),
            Some(&replay),
            200,
            |body| brief(body, &["queued"]),
        )
        .await?;
    guide.expect(
        answer["queued"] == 1,
        "the receiver is well again, and an operator replays the letter",
    )?;
    guide.replayed += 1;
    let ids = [event.id.clone()];
    guide
        .arrivals("invoices", "for the replay to arrive", |arrivals| {
            all_taken(arrivals, &ids)
        })
        .await?;
    let numbers: Vec<u32> = attempts_of(&guide.stage.receiver.at(&made.path), &event.id)
        .iter()
        .map(Arrival::attempt)
        .collect();
    guide.expect(numbers == [1, 2, 1], "it arrives, counted from 1 again")?;
    let done = |row: &Value| row["status"] == "delivered";
    guide
        .delivery("invoices", &event.id, "for the success to be written down", done)
        .await?;
    guide.expect(true, "no dead letter is left")
}

/// 7. The service dies in the middle of a delivery.
pub(super) async fn killed(guide: &mut Guide<'_>) -> Result<(), TourError> {
    let (terminal, receiver) = (guide.stage.terminal, guide.stage.receiver);
    terminal.step(7, "kill -9 in the middle of a delivery loses nothing");
    hook(guide, "posts", "community.post.*", None).await?;
    let path = guide.hook("posts").path.clone();
    receiver.script(&path, &[Act::Hold], Act::Answer(204));
    let posts: Vec<Draft> = (1..=POSTS).map(|n| post_created(&format!("post-{n}"))).collect();
    guide.publish("posts", &posts).await?;
    let first = guide
        .arrivals("posts", "for the first delivery", |arrivals| arrivals.first().cloned())
        .await?;
    terminal.seen(format_args!(
        "the receiver holds {} and does not answer",
        first.event_id()
    ));

    let late_post = post_created("post-late");
    let killed_at = kill(guide, &late_post).await?;

    receiver.script(&path, &[], Act::Answer(204));

    let starting = Service::start(guide.stage.settings, guide.stage.http);
    *guide.service = terminal.progress("for the service to start again", starting).await?;
    terminal.seen(format_args!("process {} has taken its place", guide.service.pid()));
    let results = guide.publish("posts", std::slice::from_ref(&late_post)).await?;
    guide.expect(
        results[0]["duplicate"] == false,
        "the publish that failed had stored nothing; it is stored now",
    )?;
    let results = guide.send(&posts, 200).await?;
    guide.expect(
        results.len() == POSTS && results.iter().all(|result| result["duplicate"] == true),
        "every publish answered before the kill is still there",
    )?;
    let mut ids: Vec<String> = posts.iter().map(|post| post.id.clone()).collect();
    ids.push(late_post.id);
    let held = first.event_id().to_owned();
    let arrived = guide
        .arrivals("posts", "for the work of the dead process to move on", |arrivals| {
            let again = attempts_of(arrivals, &held).len() > 1;
            if again { all_taken(arrivals, &ids) } else { None }
        })
        .await?;
    let attempts = attempts_of(&receiver.at(&path), &held);
    let numbers: Vec<u32> = attempts.iter().map(Arrival::attempt).collect();
    let second = attempts.get(1).map_or(Duration::ZERO, |second| second.at - killed_at);
    terminal.seen(format_args!(
        "{held} came again {:.1} s after the kill",
        second.as_secs_f64()
    ));
    guide.expect(
        numbers == [1, 2],
        "the delivery that was cut short arrives again, as attempt 2",
    )?;
    let genuine = attempts
        .iter()
        .chain(&arrived)
        .all(|arrival| guide.genuine("posts", arrival, &arrival.body));
    guide.expect(genuine, "signed both times")?;
    guide.expect(arrived.len() == ids.len(), &format!("all {} events arrived", ids.len()))?;
    let done = |row: &Value| row["status"] == "delivered" && row["attempt"] == 2;
    guide
        .delivery("posts", &held, "for the success to be written down", done)
        .await?;
    guide.expect(true, "and the record says so")
}

/// 9. Everything again, by cursor.
pub(super) async fn pulled(guide: &mut Guide<'_>) -> Result<(), TourError> {
    guide.stage.terminal.step(9, "The same events, pulled by cursor");
    let mut after = guide.start.clone();
    let mut pulled = Vec::new();
    for _ in 0..PAGES_MAX {
        let path = format!("/api/v1/events?limit={PAGE}&after={after}");
        let page = guide
            .call(&guide.consumer, (Method::GET, &path), None, 200, |body| {
                let count = body["events"].as_array().map_or(0, Vec::len);
                format!("{count} events  {}", brief(body, &["next_cursor"]))
            })
            .await?;
        if !page["gap"].is_null() {
            return Err(TourError::Unmet(format!("a page without a gap, got {page}")));
        }
        after = page["next_cursor"].as_str().unwrap_or_default().to_owned();
        let events = page["events"].as_array().cloned().unwrap_or_default();
        if events.is_empty() {
            break;
        }
        pulled.extend(
            events
                .iter()
                .filter_map(|item| item["event"]["event_id"].as_str().map(str::to_owned)),
        );
    }
    let published: Vec<String> = guide.ledger.iter().map(|event| event.id.clone()).collect();
    guide.expect(
        pulled == published,
        &format!("all {} events, each once, in the order of publishing", published.len()),
    )?;
    let checkpoint = json!({ "topic": "*", "cursor": after });
    let shown = |body: &Value| brief(body, &["consumer", "topic", "cursor"]);
    guide
        .call(
            &guide.consumer,
            (Method::PUT, "/api/v1/checkpoints"),
            Some(&checkpoint),
            200,
            shown,
        )
        .await?;
    let path = "/api/v1/checkpoints?topic=*";
    let stored = guide
        .call(&guide.consumer, (Method::GET, path), None, 200, shown)
        .await?;
    guide.expect(stored["cursor"] == after, "the checkpoint reads back as it was stored")
}

/// 11. What it came to.
pub(super) async fn summary(guide: &mut Guide<'_>, started: Instant) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    // The tour's subscriptions must not take what is published after it.
    for made in guide.hooks.values() {
        let path = format!("/api/v1/subscriptions/{}/disable", made.id);
        guide
            .quiet(&guide.consumer, (Method::POST, &path), Some(&json!({})), 200)
            .await?;
    }
    terminal.step(11, "What it came to");
    let (mut delivered, mut retried) = (0_u64, 0_usize);
    let mut lost = Vec::new();
    for event in &guide.ledger {
        let attempts = attempts_of(&guide.stage.receiver.at(&event.path), &event.id);
        retried += attempts.iter().filter(|attempt| attempt.attempt() > 1).count();
        if attempts.iter().any(Arrival::taken) {
            delivered += 1;
        } else {
            lost.push(event.id.as_str());
        }
    }
    terminal.line(format_args!("   published  {}", guide.ledger.len()));
    terminal.line(format_args!("   delivered  {delivered}"));
    terminal.line(format_args!("   retried    {retried}"));
    terminal.line(format_args!("   replayed   {}", guide.replayed));
    terminal.line(format_args!("   lost       {}", lost.len()));
    terminal.line(format_args!("   time       {:.1} s", started.elapsed().as_secs_f64()));
    guide.expect(lost.is_empty(), "every published event has arrived")
}

/// Subscribes the tour's consumer, at a path of this run.
pub(super) async fn hook(
    guide: &mut Guide<'_>,
    name: &'static str,
    pattern: &str,
    retry_policy: Option<Value>,
) -> Result<(), TourError> {
    let path = format!("/{}/{name}", guide.consumer);
    let mut body = json!({ "topic_pattern": pattern, "endpoint": guide.stage.receiver.url(&path) });
    if let Some(policy) = retry_policy {
        body["retry_policy"] = policy;
    }
    let made = guide
        .call(
            &guide.consumer,
            (Method::POST, "/api/v1/subscriptions"),
            Some(&body),
            201,
            |body| {
                let secret = body["secret"].as_str().unwrap_or_default();
                let start: String = secret.chars().take(12).collect();
                format!("{}  secret={start}…", brief(body, &["id", "topic_pattern"]))
            },
        )
        .await?;
    let text = |member: &str| made[member].as_str().unwrap_or_default().to_owned();
    let hook = Hook {
        id: text("id"),
        secret: text("secret"),
        path,
    };
    guide.hooks.insert(name, hook);
    Ok(())
}

/// Kills the service as `kill -9` does, and tries to publish while it is away. Answers when it was killed.
async fn kill(guide: &mut Guide<'_>, post: &Draft) -> Result<Instant, TourError> {
    let url = format!("{}/api/v1/events", guide.service.base());
    guide
        .stage
        .terminal
        .seen(format_args!("kill -9 {}", guide.service.pid()));
    guide.service.kill().await.map_err(TourError::Kill)?;
    let killed_at = Instant::now();
    let token = guide.tokens.get(post.source).map_or("", String::as_str);
    let refused = super::api::send(guide.stage.http, Method::POST, &url, token, Some(&post.envelope)).await;
    guide.expect(
        refused.is_err(),
        "the service is gone: a publish gets no answer, and its producer keeps it for later",
    )?;
    Ok(killed_at)
}

/// One request as it came in, with what a receiver looks at.
fn tell(guide: &Guide<'_>, arrival: &Arrival) {
    let terminal = guide.stage.terminal;
    terminal.seen(format_args!("POST {}", arrival.path));
    for (name, value) in &arrival.headers {
        let name = name.as_str();
        if name.starts_with("x-openvibe-") || matches!(name, "content-type" | "user-agent" | "traceparent") {
            terminal.seen(format_args!("{name}: {}", short(value.to_str().unwrap_or("?"))));
        }
    }
    terminal.seen(short(&String::from_utf8_lossy(&arrival.body)));
}

fn answered(arrival: &Arrival) -> String {
    match arrival.act {
        Act::Answer(status) => status.to_string(),
        Act::Hold => "nothing".to_owned(),
    }
}

fn attempts_of(arrivals: &[Arrival], event_id: &str) -> Vec<Arrival> {
    arrivals
        .iter()
        .filter(|arrival| arrival.event_id() == event_id)
        .cloned()
        .collect()
}

/// The requests that were answered as taken, once each of `ids` is among them.
pub(super) fn all_taken(arrivals: &[Arrival], ids: &[String]) -> Option<Vec<Arrival>> {
    let taken: Vec<Arrival> = arrivals.iter().filter(|arrival| arrival.taken()).cloned().collect();
    let seen: HashSet<&str> = taken.iter().map(Arrival::event_id).collect();
    ids.iter().all(|id| seen.contains(id.as_str())).then_some(taken)
}
