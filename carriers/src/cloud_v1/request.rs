//! One request to the queue: signed as it is sent, not redirected, its answer bounded.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{PayloadChecksumKind, SignableBody, SignableRequest, SigningSettings, sign};
use aws_sigv4::sign::v4;
use aws_smithy_runtime_api::client::identity::Identity;
use reqwest::header::{CONTENT_TYPE, DATE};
use reqwest::{Client, Method, Request, Response, redirect};
use url::{Url, form_urlencoded};

use super::answers::refusal;
use crate::{Env, SignalError};

const FORM: &str = "application/x-www-form-urlencoded";

/// The version of the queue's interface.
const VERSION: &str = "2012-11-05";

const CONNECT: Duration = Duration::from_secs(3);

/// Where the queue is, and what its requests are signed with.
pub(super) struct Endpoint {
    client: Client,
    url: Url,
    region: String,
    identity: Option<Identity>,
    clock: fn() -> SystemTime,
    /// How many were made that nobody has counted yet.
    pub(super) requests: AtomicU64,
}

impl Endpoint {
    /// Reads `CLOUD_QUEUE_URL` and its companions.
    pub(super) fn read(env: &Env<'_>) -> Result<Option<Self>, String> {
        let Some(mut url) = env.address("CLOUD_QUEUE_URL", &["http", "https"])? else {
            return Ok(None);
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(
                "CLOUD_QUEUE_URL must hold no user: keys belong in CLOUD_QUEUE_ACCESS_KEY and _SECRET_KEY".into(),
            );
        }
        if let Some(prefix) = env.get("CLOUD_QUEUE_PREFIX") {
            let path = format!(
                "{}/{}",
                url.path().trim_end_matches('/'),
                prefix.trim_start_matches('/')
            );
            url.set_path(&path);
        }
        let identity = match (env.get("CLOUD_QUEUE_ACCESS_KEY"), env.get("CLOUD_QUEUE_SECRET_KEY")) {
            (Some(access), Some(secret)) => Some(Credentials::new(access, secret, None, None, "configuration").into()),
            (None, None) => None,
            _ => return Err("CLOUD_QUEUE_ACCESS_KEY and CLOUD_QUEUE_SECRET_KEY must both be set, or neither".into()),
        };
        let client = Client::builder()
            .http1_only()
            .tls_backend_preconfigured(env.tls.clone())
            .redirect(redirect::Policy::none())
            .connect_timeout(CONNECT)
            .pool_max_idle_per_host(8)
            .no_proxy()
            .build();
        Ok(Some(Self {
            client: client.map_err(|error| format!("no client for CLOUD_QUEUE_URL: {error}"))?,
            url,
            region: env.get_or("CLOUD_QUEUE_REGION", super::REGION),
            identity,
            clock: env.clock,
            requests: AtomicU64::new(0),
        }))
    }

    /// Asks for `action` and returns the answer, of at most so many bytes.
    pub(super) async fn ask(
        &self,
        action: &str,
        parameters: &[(String, String)],
        bytes_max: usize,
    ) -> Result<String, SignalError> {
        let now = (self.clock)();
        let request = self.request(form(action, parameters), now)?;
        self.requests.fetch_add(1, Relaxed);
        let response = self.client.execute(request).await.map_err(lost)?;
        let status = response.status();
        let written = response
            .headers()
            .get(DATE)
            .and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        let document = document(response, bytes_max).await?;
        match status.is_success() {
            true => Ok(document),
            false => Err(refusal(status.as_u16(), &document, written, now)),
        }
    }

    fn request(&self, form: String, now: SystemTime) -> Result<Request, SignalError> {
        let unsigned = |error: &dyn std::error::Error| SignalError::Refused(format!("it cannot be signed: {error}"));
        let mut request = Request::new(Method::POST, self.url.clone());
        request
            .headers_mut()
            .insert(CONTENT_TYPE, FORM.parse().expect("a header's value"));
        if let Some(identity) = &self.identity {
            let mut settings = SigningSettings::default();
            settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
            let parameters = v4::SigningParams::builder()
                .identity(identity)
                .region(&self.region)
                .name("sqs")
                .time(now)
                .settings(settings)
                .build()
                .map_err(|error| unsigned(&error))?
                .into();
            let headers = std::iter::once((CONTENT_TYPE.as_str(), FORM));
            let body = SignableBody::Bytes(form.as_bytes());
            let signable =
                SignableRequest::new("POST", self.url.as_str(), headers, body).map_err(|error| unsigned(&error))?;
            let (instructions, _) = sign(signable, &parameters)
                .map_err(|error| unsigned(&error))?
                .into_parts();
            for (name, value) in instructions.headers() {
                let name = name
                    .parse::<reqwest::header::HeaderName>()
                    .map_err(|error| unsigned(&error))?;
                request
                    .headers_mut()
                    .insert(name, value.parse().map_err(|error| unsigned(&error))?);
            }
        }
        *request.body_mut() = Some(form.into());
        Ok(request)
    }
}

fn form(action: &str, parameters: &[(String, String)]) -> String {
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.append_pair("Action", action)
        .append_pair("Version", VERSION)
        .extend_pairs(parameters)
        .finish()
}

/// The body, as text; what is no text in it is no part of what is looked for.
async fn document(mut response: Response, bytes_max: usize) -> Result<String, SignalError> {
    let mut body = Vec::new();
    while let Some(part) = response.chunk().await.map_err(lost)? {
        if body.len() + part.len() > bytes_max {
            return Err(SignalError::Refused(format!(
                "its answer is longer than {bytes_max} bytes"
            )));
        }
        body.extend_from_slice(&part);
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

fn lost(error: reqwest::Error) -> SignalError {
    // The address may hold what is nobody's business.
    SignalError::Lost(error.without_url().to_string())
}
