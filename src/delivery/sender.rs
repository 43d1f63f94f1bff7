//! Sends one attempt: the exact bytes that were signed, one deadline, no redirect, no second try.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::domain::endpoint::HostRules;
use crate::domain::seal::SigningSecret;
use crate::domain::signature::header_v2;
use crate::domain::time::Millis;
use crate::domain::trace::Traceparent;
use crate::egress::{self, AppEndpoint, Refused};
use crate::store::{Claimed, Secrets, StoredEvent};

use super::DeliverySettings;
use super::outcome::{Ended, retry_after};

/// Bytes of an answer that are read, so that its connection can be used again.
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// How long the rest of an answer may take after its headers; a slower one costs its connection.
const ANSWER_REST: Duration = Duration::from_millis(250);
/// Idle connections to one host; as many as one consumer's deliveries can use at a time.
const IDLE_PER_HOST_MAX: usize = 128;
/// Shorter than the five seconds after which common servers close an idle connection, so that no attempt is lost on one
/// that is just closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Characters of a network error that are kept.
const ERROR_CHARS_MAX: usize = 200;

/// The HTTP clients for deliveries: one for those of services, one for those of developer apps.
pub(super) struct Sender {
    client: reqwest::Client,
    apps: egress::Client,
    hosts: HostRules,
    user_agent: HeaderValue,
    timeout: Duration,
    clock: fn() -> Millis,
}

impl Sender {
    pub(super) fn new(settings: &DeliverySettings) -> Result<Self, reqwest::Error> {
        let client = settings
            .trust
            .client_builder()
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .tcp_nodelay(true)
            .pool_max_idle_per_host(IDLE_PER_HOST_MAX)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .referer(false)
            .build()?;
        Ok(Self {
            client,
            apps: settings.guard.client(&settings.trust)?,
            hosts: settings.hosts.clone(),
            user_agent: header_value(&settings.user_agent),
            timeout: settings.timeout,
            clock: settings.clock,
        })
    }

    /// Makes one attempt. It ends early, without a result, when `interrupt` is cancelled before the answer came.
    pub(super) async fn send(
        &self,
        claimed: &Claimed,
        secrets: &Secrets,
        event: &StoredEvent,
        interrupt: &CancellationToken,
    ) -> Ended {
        let request = match self.request(claimed) {
            Ok(request) => request,
            Err(refused) => return Ended::Refused(refused),
        };
        let deadline = Instant::now() + self.timeout;
        let body = body(event);
        let unix_s = (self.clock)().0.div_euclid(1000);
        let request = request
            .headers(self.headers(claimed, secrets, event, unix_s, &body))
            .body(body);
        let answer = tokio::select! {
            biased;
            answer = timeout_at(deadline, request.send()) => answer,
            () = interrupt.cancelled() => return Ended::Interrupted,
        };
        let response = match answer {
            Err(_elapsed) => return Ended::Failed("timeout".to_owned()),
            Ok(Err(error)) => return failed(error),
            Ok(Ok(response)) => response,
        };
        let status = response.status().as_u16();
        let retry_after = response
            .headers()
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok())
            .and_then(|value| retry_after(value, (self.clock)()));
        // An app's connection is used once: its answer ends with its head.
        if !claimed.of_app {
            let rest_until = deadline.min(Instant::now() + ANSWER_REST);
            tokio::select! {
                () = finish(response, rest_until) => {}
                () = interrupt.cancelled() => {}
            }
        }
        Ended::Answered { status, retry_after }
    }

    /// A request to where the delivery goes, or why nothing may be sent there.
    fn request(&self, claimed: &Claimed) -> Result<reqwest::RequestBuilder, String> {
        if claimed.of_app {
            let endpoint = AppEndpoint::parse(&claimed.endpoint).map_err(|refused| refused.to_string())?;
            Ok(self.apps.post(endpoint))
        } else {
            let url = self.hosts.check(&claimed.endpoint).map_err(|fault| fault.to_string())?;
            Ok(self.client.post(url))
        }
    }

    fn headers(
        &self,
        claimed: &Claimed,
        secrets: &Secrets,
        event: &StoredEvent,
        unix_s: i64,
        body: &[u8],
    ) -> HeaderMap {
        let secrets: Vec<&str> = std::iter::once(&secrets.current)
            .chain(&secrets.previous)
            .map(SigningSecret::expose)
            .collect();
        let trace = Traceparent::of_trace(&event.envelope.trace_id).to_string();
        let mut headers = HeaderMap::with_capacity(12);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, self.user_agent.clone());
        for (name, value) in [
            ("x-openvibe-event-id", event.envelope.event_id.as_str()),
            ("x-openvibe-event-type", &event.envelope.event_type),
            ("x-openvibe-subscription-id", claimed.subscription_id.as_str()),
            ("x-openvibe-delivery-attempt", &claimed.attempt.to_string()),
            ("x-openvibe-hops", &event.hops.to_string()),
            ("x-openvibe-timestamp", &unix_s.to_string()),
            ("x-openvibe-signature-v2", &header_v2(unix_s, &secrets, body)),
            ("traceparent", &trace),
        ] {
            headers.insert(HeaderName::from_static(name), header_value(value));
        }
        headers
    }
}

/// `{"event":<envelope>}`, the bytes that are signed and sent.
fn body(event: &StoredEvent) -> Bytes {
    let mut json = String::with_capacity(event.envelope.payload.len() + 1024);
    json.push_str(r#"{"event":"#);
    event.envelope.write_json(&mut json);
    json.push('}');
    Bytes::from(json)
}

/// A stored value as a header. What no header may hold is left out, so that no value can stop its own delivery.
fn header_value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or_else(|_| {
        let printable: String = text.chars().filter(|c| matches!(c, ' '..='~')).collect();
        HeaderValue::from_str(&printable).expect("printable ASCII is a header value")
    })
}

/// Reads what is left of an answer, within bounds. Giving up closes the connection.
async fn finish(mut response: reqwest::Response, until: Instant) {
    let mut left = ANSWER_BYTES_MAX;
    if response
        .content_length()
        .is_some_and(|length| length > ANSWER_BYTES_MAX as u64)
    {
        return;
    }
    while let Ok(Ok(Some(chunk))) = timeout_at(until, response.chunk()).await {
        match left.checked_sub(chunk.len()) {
            Some(rest) => left = rest,
            None => return,
        }
    }
}

/// What became of an attempt without an answer. A host that leads inside stays refused; one whose addresses are not known
/// now may be known later.
fn failed(error: reqwest::Error) -> Ended {
    match Refused::of(&error) {
        Some(refused) if refused.is_final() => Ended::Refused(refused.to_string()),
        Some(refused) => Ended::Failed(refused.to_string()),
        None => Ended::Failed(describe(error)),
    }
}

/// A network failure in a few words: the innermost cause, which names no URL.
fn describe(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut cause: &dyn std::error::Error = &error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string().chars().take(ERROR_CHARS_MAX).collect()
}
