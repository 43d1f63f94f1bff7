//! A client of the service, as any consumer would write one.

use std::time::Duration;

use reqwest::Method;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE};
use reqwest::redirect::Policy;
use serde_json::Value;

/// How long any answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(15);

/// An answer, read to its end.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    /// Its status.
    pub(super) status: u16,
    /// Its body as JSON; null when it is none.
    pub(super) body: Value,
}

/// The HTTP client of the development commands: loopback only, no proxy, no redirect.
///
/// # Errors
///
/// The machine's TLS set-up is of no use.
pub(super) fn http() -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder()
        // Everything here is plain http, and must work on a machine that has no authorities installed.
        .tls_certs_only([])
        .no_proxy()
        .redirect(Policy::none())
        .timeout(ANSWER_MAX)
        .build()
}

/// One request and its answer.
///
/// # Errors
///
/// No whole answer came.
pub(super) async fn send(
    http: &reqwest::Client,
    method: Method,
    url: &str,
    token: &str,
    body: Option<&Value>,
) -> Result<Answer, reqwest::Error> {
    let mut request = http
        .request(method, url)
        .header(AUTHORIZATION, format!("Bearer {token}"));
    if let Some(body) = body {
        request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
    }
    let answer = request.send().await?;
    let status = answer.status().as_u16();
    let body = serde_json::from_slice(&answer.bytes().await?).unwrap_or_default();
    Ok(Answer { status, body })
}
