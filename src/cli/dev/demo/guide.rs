//! What the steps of the tour share: calls that are told and checked, the ledger of what was published, and waiting.

use std::collections::HashMap;
use std::time::Duration;

use reqwest::Method;
use serde_json::Value;

use crate::clock;
use crate::domain::signature::verify_v2;

use super::super::receiver::Arrival;
use super::super::service::Service;
use super::events::Draft;
use super::{Stage, TourError, api};

/// The longest wait of the tour: a killed process's work moves on within 5 s, and each retry within 2 s.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Wait between two looks at the list of deliveries; callers are limited to 120 a minute.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How old a signature may be, in seconds.
const SIGNATURE_AGE_S: i64 = 300;

/// Longest part of a value that a line shows, in characters.
const SHOWN_MAX: usize = 100;

/// A subscription of the tour.
#[derive(Debug, Clone)]
pub(super) struct Hook {
    /// Its id.
    pub(super) id: String,
    /// What it signs with.
    pub(super) secret: String,
    /// Where it delivers to, at the receiver.
    pub(super) path: String,
}

/// An event that was published, and who must get it.
#[derive(Debug, Clone)]
pub(super) struct Published {
    /// Its id.
    pub(super) id: String,
    /// The path of its subscription.
    pub(super) path: String,
}

/// The tour's state.
#[derive(Debug)]
pub(super) struct Guide<'a> {
    /// What it runs against.
    pub(super) stage: Stage<'a>,
    /// The running service.
    pub(super) service: &'a mut Service,
    /// The consumer of this run: a name of its own, so that no earlier run is in the way.
    pub(super) consumer: String,
    /// Tokens by client id.
    pub(super) tokens: HashMap<String, String>,
    /// Subscriptions by what they are for.
    pub(super) hooks: HashMap<&'static str, Hook>,
    /// Every event published and answered, in that order.
    pub(super) ledger: Vec<Published>,
    /// Where the log ended before the tour.
    pub(super) start: String,
    /// Deliveries that were replayed.
    pub(super) replayed: u64,
}

impl<'a> Guide<'a> {
    pub(super) fn new(stage: Stage<'a>, service: &'a mut Service) -> Self {
        Self {
            stage,
            service,
            consumer: format!("tour-{}", hex::encode(rand::random::<[u8; 4]>())),
            tokens: HashMap::new(),
            hooks: HashMap::new(),
            ledger: Vec::new(),
            start: String::new(),
            replayed: 0,
        }
    }

    /// Holds or ends the tour.
    pub(super) fn expect(&self, holds: bool, what: &str) -> Result<(), TourError> {
        if holds {
            self.stage.terminal.good(what);
            Ok(())
        } else {
            Err(TourError::Unmet(what.to_owned()))
        }
    }

    /// Sends a request as `client`, checks the status and answers the body, telling nothing.
    pub(super) async fn quiet(
        &self,
        client: &str,
        (method, path): (Method, &str),
        body: Option<&Value>,
        wanted: u16,
    ) -> Result<Value, TourError> {
        let url = format!("{}{path}", self.service.base());
        let token = self.tokens.get(client).map_or("", String::as_str);
        let answer = api::send(self.stage.http, method.clone(), &url, token, body).await?;
        if answer.status == wanted {
            return Ok(answer.body);
        }
        Err(TourError::Status {
            request: format!("{method} {path}"),
            status: answer.status,
            wanted,
            body: answer.body.to_string(),
        })
    }

    /// As `quiet`, and tells the call with the part of the body that `part` picks.
    pub(super) async fn call(
        &self,
        client: &str,
        (method, path): (Method, &str),
        body: Option<&Value>,
        wanted: u16,
        part: impl FnOnce(&Value) -> String,
    ) -> Result<Value, TourError> {
        let answer = self.quiet(client, (method.clone(), path), body, wanted).await?;
        self.stage
            .terminal
            .call(method.as_str(), &short(path), wanted, part(&answer));
        Ok(answer)
    }

    /// Publishes, writes it into the ledger for the subscription `hook`, and answers the results in order.
    pub(super) async fn publish(&mut self, hook: &'static str, drafts: &[Draft]) -> Result<Vec<Value>, TourError> {
        let results = self.send(drafts, 201).await?;
        let path = self.hook(hook).path.clone();
        self.ledger.extend(drafts.iter().map(|draft| Published {
            id: draft.id.clone(),
            path: path.clone(),
        }));
        Ok(results)
    }

    /// Publishes one alone or several as a batch, all of one source.
    pub(super) async fn send(&self, drafts: &[Draft], wanted: u16) -> Result<Vec<Value>, TourError> {
        let request = (Method::POST, "/api/v1/events");
        if let [one] = drafts {
            let body = self
                .call(one.source, request, Some(&one.envelope), wanted, |body| {
                    brief(body, &["event_id", "duplicate", "cursor"])
                })
                .await?;
            return Ok(vec![body]);
        }
        let source = drafts.first().map_or("", |draft| draft.source);
        let envelopes: Vec<&Value> = drafts.iter().map(|draft| &draft.envelope).collect();
        let body = self
            .call(
                source,
                request,
                Some(&serde_json::json!({ "events": envelopes })),
                wanted,
                |body| {
                    let results = body["results"].as_array().map_or(&[][..], Vec::as_slice);
                    let repeated = results.iter().filter(|result| result["duplicate"] == true).count();
                    format!("{} results, {repeated} duplicate", results.len())
                },
            )
            .await?;
        Ok(body["results"].as_array().cloned().unwrap_or_default())
    }

    /// A subscription made earlier.
    pub(super) fn hook(&self, name: &str) -> &Hook {
        self.hooks
            .get(name)
            .expect("a step uses only hooks made in an earlier step")
    }

    /// Awaits what `found` finds among the deliveries to `hook`.
    pub(super) async fn arrivals<T>(
        &self,
        hook: &str,
        what: &str,
        found: impl FnMut(&[Arrival]) -> Option<T>,
    ) -> Result<T, TourError> {
        let receiver = self.stage.receiver;
        let waiting = receiver.wait(&self.hook(hook).path, found);
        let outcome = self.stage.terminal.waiting(what, PATIENCE, waiting).await;
        outcome.ok_or_else(|| late(what))
    }

    /// Awaits that the list of deliveries shows this one as `holds` says; tells the row.
    pub(super) async fn delivery(
        &self,
        hook: &str,
        event_id: &str,
        what: &str,
        holds: impl Fn(&Value) -> bool,
    ) -> Result<Value, TourError> {
        let path = format!("/api/v1/deliveries?subscription_id={}", self.hook(hook).id);
        let looking = async {
            loop {
                let list = self.quiet(&self.consumer, (Method::GET, &path), None, 200).await?;
                let rows = list["deliveries"].as_array().map_or(&[][..], Vec::as_slice);
                if let Some(row) = rows.iter().find(|row| row["event_id"] == event_id && holds(row)) {
                    return Ok(row.clone());
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let outcome = self.stage.terminal.waiting(what, PATIENCE, looking).await;
        let row = outcome.unwrap_or_else(|| Err(late(what)))?;
        let shown = brief(&row, &["status", "attempt", "last_status", "next_attempt_at"]);
        self.stage.terminal.call("GET", &short(&path), 200, shown);
        Ok(row)
    }

    /// Whether a delivery is genuine, judged as a receiver must.
    pub(super) fn genuine(&self, hook: &str, arrival: &Arrival, body: &[u8]) -> bool {
        let stamp = Some(arrival.header("x-openvibe-timestamp"));
        let signature = arrival.header("x-openvibe-signature-v2");
        verify_v2(
            signature,
            stamp,
            body,
            &self.hook(hook).secret,
            clock::now().0 / 1000,
            SIGNATURE_AGE_S,
        )
    }
}

pub(super) fn late(what: &str) -> TourError {
    TourError::Late {
        what: what.to_owned(),
        longest: PATIENCE,
    }
}

/// The named members of a body, in that order, those that are null left out.
pub(super) fn brief(body: &Value, members: &[&str]) -> String {
    let shown: Vec<String> = members
        .iter()
        .filter(|name| !body[**name].is_null())
        .map(|name| match &body[*name] {
            Value::String(text) => format!("{name}={text}"),
            other => format!("{name}={other}"),
        })
        .collect();
    shown.join("  ")
}

/// The beginning of a text.
pub(super) fn short(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_shows_the_members_asked_for_and_no_more() {
        let body = json!({ "status": "failed", "attempt": 2, "last_error": null, "secret": "whsec_1" });
        assert_eq!(
            brief(&body, &["attempt", "status", "last_error"]),
            "attempt=2  status=failed"
        );
        assert_eq!(short("short"), "short");
        assert_eq!(short(&"é".repeat(SHOWN_MAX + 1)), format!("{}…", "é".repeat(SHOWN_MAX)));
    }
}
