//! Values that need more care than a plain string: secrets that cannot be printed by accident, and parsers for the rest.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use url::Url;

use crate::domain::time::{Millis, parse_rfc3339};
use crate::telemetry::LogFormat;
use crate::tls::Authorities;

/// A text that `Debug` never shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The secret itself, for the one call that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// A key of 32 bytes that `Debug` never shows.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// The key itself, for the one call that needs it.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret key)")
    }
}

/// Whether the process serves real traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Environment {
    /// A database is mandatory, development helpers are impossible.
    Production,
    /// Everything else, tests included.
    Development,
}

/// Why a value is refused: what is allowed, and which part of the value is not.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Completes the sentence "NAME must …".
    pub(super) allowed: String,
    /// The offending part; `None` means the whole value.
    pub(super) given: Option<String>,
}

pub(super) fn must(allowed: impl Into<String>) -> Refusal {
    Refusal {
        allowed: allowed.into(),
        given: None,
    }
}

/// A PEM file, read at once: a wrong path is a mistake of the configuration and not of the first delivery.
pub(super) fn authorities(text: &str) -> Result<Authorities, Refusal> {
    Authorities::read(Path::new(text))
        .map_err(|error| must(format!("name a PEM file of at least one certificate ({error})")))
}

/// Addresses of name servers, each with the usual port where it names none.
pub(super) fn name_servers(text: &str) -> Result<Vec<SocketAddr>, Refusal> {
    const DNS: u16 = 53;
    list_of(text, |entry| {
        let alone = entry.parse::<IpAddr>().map(|address| SocketAddr::new(address, DNS));
        alone
            .or_else(|_| entry.parse())
            .map_err(|_| must("list IP addresses, each with :port or without"))
    })
}

/// Digits only: "30d" or "1e3" is a mistake, not 30 or 1.
pub(super) fn whole(text: &str, least: u64, most: u64) -> Result<u64, Refusal> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u64>() {
        Ok(number) if digits && (least..=most).contains(&number) => Ok(number),
        _ => Err(must(format!("be a whole number from {least} to {most}"))),
    }
}

/// Up to a tenth.
pub(super) fn jitter(text: &str) -> Result<f64, Refusal> {
    f64::from_str(text)
        .ok()
        .filter(|share| (0.0..=0.1).contains(share))
        .ok_or_else(|| must("be a number from 0 to 0.1"))
}

pub(super) fn log_filter(text: &str) -> Result<String, Refusal> {
    // A misspelt level would be read as the name of a module, and nothing else would be logged.
    let has_level = text
        .split(',')
        .filter_map(|part| part.rsplit('=').next())
        .any(|word| word.trim().parse::<tracing_subscriber::filter::LevelFilter>().is_ok());
    match tracing_subscriber::EnvFilter::try_new(text) {
        Ok(_) if has_level => Ok(text.to_owned()),
        _ => Err(must(
            "be error, warn, info, debug, trace, or a filter such as info,sqlx=warn",
        )),
    }
}

pub(super) fn log_format(text: &str) -> Result<LogFormat, Refusal> {
    match text {
        "human" => Ok(LogFormat::Human),
        "json" => Ok(LogFormat::Json),
        _ => Err(must("be human or json")),
    }
}

/// `on` or `off`; the words that used to mean `on` stay accepted, words that only look like `off` do not.
pub(super) fn switch(text: &str) -> Result<bool, Refusal> {
    match text {
        "on" | "true" | "1" => Ok(true),
        "off" => Ok(false),
        _ => Err(must("be on or off")),
    }
}

pub(super) fn truth(text: &str) -> Result<bool, Refusal> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(must("be true or false")),
    }
}

/// Comma separated, trimmed, empty items dropped; never an empty list.
pub(super) fn list(text: &str) -> Result<Vec<String>, Refusal> {
    let items: Vec<String> = text
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
        .map(str::to_owned)
        .collect();
    if items.is_empty() {
        Err(must("name at least one value"))
    } else {
        Ok(items)
    }
}

pub(super) fn list_of<T>(text: &str, item: impl Fn(&str) -> Result<T, Refusal>) -> Result<Vec<T>, Refusal> {
    list(text)?
        .iter()
        .map(|given| {
            item(given).map_err(|refusal| Refusal {
                given: Some(refusal.given.unwrap_or_else(|| given.clone())),
                ..refusal
            })
        })
        .collect()
}

pub(super) fn one_of(text: &str, allowed: &[&str]) -> Result<String, Refusal> {
    if allowed.contains(&text) {
        return Ok(text.to_owned());
    }
    Err(must(format!("name nothing but {}", allowed.join(", "))))
}

/// An http(s) address that paths are appended to: no credentials, query or fragment; trailing slashes dropped.
pub(super) fn http_base(text: &str) -> Result<String, Refusal> {
    let fits = Url::parse(text).is_ok_and(|url| {
        matches!(url.scheme(), "http" | "https")
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
    });
    if fits {
        return Ok(text.trim_end_matches('/').to_owned());
    }
    Err(must("be an http or https URL without credentials, query or fragment"))
}

/// An origin exactly as browsers send it: scheme, host and, where it is not the usual one, port.
pub(super) fn origin(text: &str) -> Result<String, Refusal> {
    let exact = Url::parse(text)
        .ok()
        .filter(|url| matches!(url.scheme(), "http" | "https"));
    match exact.map(|url| url.origin().ascii_serialization()) {
        Some(origin) if origin == text => Ok(origin),
        _ => Err(must(
            "list origins as browsers send them, such as http://localhost:3000",
        )),
    }
}

/// An address that may carry a password; of the value only the scheme is looked at.
pub(super) fn service_url(text: &str, schemes: &[&str]) -> Result<Secret, Refusal> {
    match Url::parse(text) {
        Ok(url) if schemes.contains(&url.scheme()) && url.has_host() => Ok(Secret::new(text)),
        _ => Err(must(format!(
            "be a URL that starts with {}://",
            schemes.join(":// or ")
        ))),
    }
}

pub(super) fn database_url(text: &str) -> Result<Secret, Refusal> {
    let postgres = |text: &str| Url::parse(text).is_ok_and(|url| matches!(url.scheme(), "postgres" | "postgresql"));
    if postgres(text) {
        return Ok(Secret::new(text));
    }
    // A socket directory in `?host=` leaves the host itself empty, which URL parsers refuse next to a user name.
    let named = text.replacen("@/", "@localhost/", 1);
    if postgres(&named) {
        return Ok(Secret::new(named));
    }
    Err(must("be postgres://user:password@host:port/database"))
}

/// A public key in PEM, with `\n` written out where the environment file cannot hold line ends.
pub(super) fn public_key(text: &str) -> Result<String, Refusal> {
    let pem = text.replace("\\n", "\n");
    if pem.contains("PRIVATE KEY-----") {
        return Err(must("hold a public key; it holds a private one"));
    }
    let framed = pem.contains("-----BEGIN ") && pem.contains("PUBLIC KEY-----") && pem.contains("-----END ");
    if framed {
        Ok(pem)
    } else {
        Err(must("be a public key in PEM"))
    }
}

/// Base64 keys of 32 bytes each, padded or not.
pub(super) fn secret_keys(text: &str) -> Result<Vec<SecretKey>, Refusal> {
    let lenient = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let base64 = GeneralPurpose::new(&base64::alphabet::STANDARD, lenient);
    let items = list(text)?;
    let count = items.len();
    items
        .iter()
        .enumerate()
        .map(|(at, item)| {
            let bytes = base64
                .decode(item)
                .ok()
                .and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
            bytes.map(SecretKey).ok_or_else(|| {
                must(format!(
                    "hold 32 bytes in base64 per key; key {} of {count} does not",
                    at + 1
                ))
            })
        })
        .collect()
}

pub(super) fn commit(text: &str) -> Result<String, Refusal> {
    let fits = (7..=40).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if fits {
        Ok(text.to_ascii_lowercase())
    } else {
        Err(must("be 7 to 40 hex digits"))
    }
}

/// A date and time with a zone.
pub(super) fn moment(text: &str) -> Result<Millis, Refusal> {
    parse_rfc3339(text).ok_or_else(|| must("be an RFC 3339 date and time with a zone, such as 2026-10-21T08:15:30Z"))
}

/// Any text; for values that only their user can judge.
pub(super) fn text(text: &str) -> Result<String, Refusal> {
    Ok(text.to_owned())
}
