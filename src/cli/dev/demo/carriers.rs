//! The chapter of the tour on carriers: placement leaves a broker that dies, and comes back to it.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use super::super::brokers::{Broker, Brokers, Kind};
use super::TourError;
use super::events::{Draft, comment_created, payout_settled};
use super::guide::{Guide, brief};
use super::steps::{all_taken, hook};

/// The longest wait for placement to move: a breaker tries again after pauses that grow.
const MOVE_MAX: Duration = Duration::from_secs(45);

/// The longest wait for a carrier that nothing has happened to yet.
const FIRST_MAX: Duration = Duration::from_secs(15);

/// Wait between two looks at placement for the first seconds, and from then on; callers are limited to 120 a minute.
const LOOK_EVERY: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(1)];

/// How long looks come fast.
const EAGER: Duration = Duration::from_secs(5);

/// What is told of one broker.
struct Story {
    /// The name of its subscription in the tour.
    hook: &'static str,
    event_type: &'static str,
    /// The policy that it is told under, whatever others the database holds.
    policy: Value,
    /// The carrier that rings through it.
    carrier: &'static str,
    draft: fn(&str) -> Draft,
}

impl Story {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Valkey => Self {
                hook: "comments",
                event_type: "community.comment.created",
                policy: json!({ "class": "domain", "durability": "required", "delivery_semantics": "at_least_once" }),
                carrier: "valkey-v1",
                draft: comment_created,
            },
            Kind::Nats => Self {
                hook: "payouts",
                event_type: "billing.payout.settled",
                policy: json!({ "class": "domain", "durability": "required", "delivery_semantics": "at_least_once",
                    "ordering": { "scope": "stream", "key": "subject" } }),
                carrier: "nats-js-v1",
                draft: payout_settled,
            },
        }
    }
}

/// 8. A broker dies and comes back, or what is needed to see that.
pub(super) async fn moved(guide: &mut Guide<'_>, brokers: &mut Brokers) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    terminal.step(8, "A broker dies: its carrier is left, and used again");
    if brokers.0.is_empty() {
        terminal.line(
            "   left out, since no broker is here: start this with scripts/dev.sh, put valkey-server or nats-server on \
             PATH, or set VALKEY_URL or NATS_URL",
        );
    }
    for broker in &mut brokers.0 {
        let story = Story::of(broker.kind);
        let told = tell(guide, broker, &story).await;
        if told.is_err() && !broker.is_ours() {
            // Switches are kept in the database, and the next tour needs this carrier. What failed first is what is told.
            switch(guide, &story, false).await.ok();
        }
        told?;
    }
    Ok(())
}

async fn tell(guide: &mut Guide<'_>, broker: &mut Broker, story: &Story) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    terminal.seen(broker.told());
    let policy_path = format!("/api/v1/delivery-policies/{}", story.event_type);
    guide
        .call(
            &guide.consumer,
            (Method::PUT, &policy_path),
            Some(&story.policy),
            200,
            |row| brief(row, &["pattern", "carrier_class"]),
        )
        .await?;
    hook(guide, story.hook, story.event_type, None).await?;
    let ours = broker.is_ours();
    if is_off(guide, story).await? {
        terminal.seen("it was switched off by an operator; the tour needs it");
        switch(guide, story, false).await?;
    }
    let carrier = story.carrier;
    placed(guide, broker, story, true, FIRST_MAX).await?;
    guide.expect(true, &format!("{carrier} is chosen, and every reason is told"))?;
    let mut ids = vec![rung(guide, story, "1", Some(carrier)).await?];

    let broken = Instant::now();
    if ours {
        let pid = broker.pid().unwrap_or_default();
        terminal.seen(format_args!("kill -9 {pid}: {} is gone", broker.kind.title()));
        broker.kill().await?;
    } else {
        let title = broker.kind.title();
        terminal.seen(format_args!(
            "this {title} is yours, and nobody kills it: an operator switches its carrier off"
        ));
        switch(guide, story, true).await?;
    }
    ids.push(rung(guide, story, "2", None).await?);
    guide.expect(true, "a publisher notices nothing: 201 in that very moment")?;
    let left = placed(guide, broker, story, false, MOVE_MAX).await?;
    let instead = left["selected"].as_str().unwrap_or_default().to_owned();
    guide.expect(
        true,
        &format!("{} ms later work goes to {instead}", broken.elapsed().as_millis()),
    )?;
    ids.push(rung(guide, story, "3", Some(&instead)).await?);

    let mended = Instant::now();
    if ours {
        broker.restart().await?;
        let pid = broker.pid().unwrap_or_default();
        terminal.seen(format_args!("{} runs again, as process {pid}", broker.kind.title()));
    } else {
        switch(guide, story, false).await?;
    }
    placed(guide, broker, story, true, MOVE_MAX).await?;
    guide.expect(
        true,
        &format!("{} ms later {carrier} is used again", mended.elapsed().as_millis()),
    )?;
    ids.push(rung(guide, story, "4", Some(carrier)).await?);
    let arrived = guide
        .arrivals(story.hook, "for the deliveries", |arrivals| all_taken(arrivals, &ids))
        .await?;
    let genuine = arrived
        .iter()
        .all(|arrival| guide.genuine(story.hook, arrival, &arrival.body));
    guide.expect(genuine, &format!("all {} events arrived", ids.len()))?;
    guide
        .quiet(&guide.consumer, (Method::DELETE, &policy_path), None, 204)
        .await?;
    Ok(())
}

/// Publishes one event, and shows where its delivery was placed: on `carrier`, where that is known.
async fn rung(guide: &mut Guide<'_>, story: &Story, id: &str, carrier: Option<&str>) -> Result<String, TourError> {
    let draft = (story.draft)(id);
    guide.publish(story.hook, std::slice::from_ref(&draft)).await?;
    if let Some(carrier) = carrier {
        let path = format!(
            "/api/v1/placement/deliveries/{}/{}",
            draft.id,
            guide.hook(story.hook).id
        );
        let row = guide.quiet(&guide.consumer, (Method::GET, &path), None, 200).await?;
        let shown = format!("/api/v1/placement/deliveries/{}/…", draft.id);
        let part = brief(&row, &["carrier", "carrier_class"]);
        guide.stage.terminal.call("GET", &shown, 200, part);
        let why = said(&row["decision"]["result"], story.carrier);
        guide.expect(
            row["carrier"] == carrier,
            &format!("its delivery is on {carrier}: {why}"),
        )?;
    }
    Ok(draft.id)
}

/// Awaits that work is placed on the story's carrier, or that it is not, and shows the candidates.
async fn placed(
    guide: &Guide<'_>,
    broker: &Broker,
    story: &Story,
    on: bool,
    longest: Duration,
) -> Result<Value, TourError> {
    let terminal = guide.stage.terminal;
    let path = format!("/api/v1/placement?event_type={}", story.event_type);
    let (mut last, started) = (Value::Null, Instant::now());
    let looking = async {
        loop {
            let mut answer = guide.quiet(&guide.consumer, (Method::GET, &path), None, 200).await?;
            last = answer["placement"].take();
            if (last["selected"] == story.carrier) == on {
                return Ok::<_, TourError>(());
            }
            tokio::time::sleep(LOOK_EVERY[usize::from(started.elapsed() > EAGER)]).await;
        }
    };
    match terminal.waiting("for placement to move", longest, looking).await {
        Some(done) => done?,
        None => {
            return Err(TourError::Unplaced {
                carrier: story.carrier,
                on,
                longest,
                said: said(&last, story.carrier),
                remedy: broker.remedy(),
            });
        }
    }
    terminal.call("GET", &path, 200, brief(&last, &["selected"]));
    for line in table(&last) {
        terminal.seen(line);
    }
    Ok(last)
}

async fn is_off(guide: &Guide<'_>, story: &Story) -> Result<bool, TourError> {
    let list = guide
        .quiet(&guide.consumer, (Method::GET, "/api/v1/carriers"), None, 200)
        .await?;
    let carriers = list["carriers"].as_array().map_or(&[][..], Vec::as_slice);
    let own = carriers.iter().find(|carrier| carrier["id"] == story.carrier);
    Ok(own.is_some_and(|carrier| carrier["disabled"]["by_operator"] == true))
}

async fn switch(guide: &Guide<'_>, story: &Story, disabled: bool) -> Result<(), TourError> {
    let path = format!("/api/v1/carriers/{}", story.carrier);
    let body = json!({ "disabled": disabled });
    let shown = |carrier: &Value| brief(carrier, &["id", "state", "reason"]);
    guide
        .call(&guide.consumer, (Method::PUT, &path), Some(&body), 200, shown)
        .await?;
    Ok(())
}

/// Why the carrier was left out, or else the reasons of the choice.
fn said(placement: &Value, carrier: &str) -> String {
    let candidates = placement["candidates"].as_array().map_or(&[][..], Vec::as_slice);
    let own = candidates.iter().find(|candidate| candidate["id"] == carrier);
    match own.and_then(|candidate| candidate["excluded_because"].as_str()) {
        Some(reason) => reason.to_owned(),
        None => words(&placement["reasons"]),
    }
}

fn words(list: &Value) -> String {
    let words: Vec<&str> = list
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    words.join("; ")
}

/// The candidates as lines of columns, and the reasons of the choice.
fn table(placement: &Value) -> Vec<String> {
    let candidates = placement["candidates"].as_array().map_or(&[][..], Vec::as_slice);
    let line = |candidate: &Value| {
        let id = candidate["id"].as_str().unwrap_or_default();
        if let Some(reason) = candidate["excluded_because"].as_str() {
            return format!("{id:<11} left out: {reason}");
        }
        let mark = if placement["selected"] == id {
            "◄ selected"
        } else {
            ""
        };
        let columns = format!(
            "{id:<11} {:>7} ms  ${}  score {}  {mark}",
            rounded(&candidate["estimated_latency_ms"]),
            candidate["estimated_cost_usd"],
            candidate["score"],
        );
        columns.trim_end().to_owned()
    };
    let mut lines: Vec<String> = candidates.iter().map(line).collect();
    lines.push(format!("because: {}", words(&placement["reasons"])));
    lines
}

fn rounded(value: &Value) -> String {
    value
        .as_f64()
        .map_or_else(|| "?".to_owned(), |value| format!("{value:.1}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_shown_with_what_decides_and_with_why_one_is_left_out() {
        let placement = json!({ "selected": "pg-v1", "reasons": ["objective balanced"], "candidates": [
            { "id": "pg-v1", "eligible": true, "estimated_cost_usd": 0, "estimated_latency_ms": 250, "score": 0.5 },
            { "id": "valkey-v1", "eligible": false, "excluded_because": "not connected (valkey-v1)" },
        ] });
        assert_eq!(
            table(&placement),
            [
                "pg-v1         250.0 ms  $0  score 0.5  ◄ selected",
                "valkey-v1   left out: not connected (valkey-v1)",
                "because: objective balanced"
            ]
        );
        assert_eq!(said(&placement, "valkey-v1"), "not connected (valkey-v1)");
        assert_eq!(said(&placement, "pg-v1"), "objective balanced");
    }
}
