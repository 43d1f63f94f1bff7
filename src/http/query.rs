//! Strict readers for query strings and path parameters: one value per name, exact integers, whole percent-encoding.

use std::ops::RangeInclusive;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::problem::ApiError;

/// The decoded parameters of a query string. Names that a route does not know are ignored.
#[derive(Debug, Clone, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Decodes `a=b&c=d`; 400 `events.bad_request` for a broken percent-encoding or bytes that are not UTF-8.
    pub fn parse(raw: &str) -> Result<Self, ApiError> {
        let pairs = raw.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = decoded(name).ok_or(ApiError::BadRequest(
                "the query has a parameter name that is not percent-encoded UTF-8".into(),
            ))?;
            let value = decoded(value).ok_or_else(|| {
                ApiError::BadRequest(format!("{name} must be percent-encoded UTF-8 in the query").into())
            })?;
            Ok((name, value))
        });
        pairs.collect::<Result<_, _>>().map(Self)
    }

    /// The value of a parameter, `None` when absent; 400 naming it when it is given more than once.
    pub fn one(&self, name: &str) -> Result<Option<&str>, ApiError> {
        let mut values = self.0.iter().filter(|(given, _)| given == name);
        let first = values.next().map(|(_, value)| value.as_str());
        match values.next() {
            Some(_) => Err(ApiError::BadRequest(format!("{name} must be given once").into())),
            None => Ok(first),
        }
    }

    /// Like [`Query::one`], where an empty value means absent.
    pub fn non_empty(&self, name: &str) -> Result<Option<&str>, ApiError> {
        Ok(self.one(name)?.filter(|value| !value.is_empty()))
    }

    /// Whether the parameter is present at all, with or without a value.
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(given, _)| given == name)
    }

    /// A decimal integer within `range`, `None` when absent; 400 naming the parameter and the range otherwise.
    /// Signs, spaces, fractions and exponents are refused.
    pub fn integer(&self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.one(name)? else { return Ok(None) };
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        match text.parse() {
            Ok(value) if digits && range.contains(&value) => Ok(Some(value)),
            _ => Err(ApiError::BadRequest(
                format!("{name} must be an integer from {} to {}", range.start(), range.end()).into(),
            )),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

/// The parameters of a path. One that cannot be decoded names nothing: 404 `events.not_found`.
#[derive(Debug, Clone)]
pub struct PathOf<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathOf<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let raw = parts.uri.path();
        let whole = decoded_bytes(raw, Plus::Literal).is_some();
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) if whole => Ok(Self(value)),
            _ => Err(ApiError::NotFound(
                "the path is not percent-encoded UTF-8, so it names nothing here".into(),
            )),
        }
    }
}

/// What `+` stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plus {
    Space,
    Literal,
}

/// The text behind a percent-encoding, in which `+` is a plus; `None` where it is none or not UTF-8.
pub(super) fn percent_decoded(text: &str) -> Option<String> {
    String::from_utf8(decoded_bytes(text, Plus::Literal)?).ok()
}

fn decoded(text: &str) -> Option<String> {
    String::from_utf8(decoded_bytes(text, Plus::Space)?).ok()
}

/// The bytes behind the percent-encoding; `None` when a `%` is not followed by two hex digits.
fn decoded_bytes(text: &str, plus: Plus) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let mut digit = || char::from(bytes.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).expect("two hex digits fit a byte")
            }
            b'+' if plus == Plus::Space => b' ',
            other => other,
        });
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detail<T: std::fmt::Debug>(result: Result<T, ApiError>) -> String {
        let error = result.expect_err("a refusal");
        assert_eq!(error.status_and_code().1, "events.bad_request");
        error.to_string()
    }

    #[test]
    fn a_value_is_decoded_once_and_exactly() {
        let query = Query::parse("topic=live.%2A%2Cchat.a+b&&after=%2525&empty=&bare").expect("well formed");
        assert_eq!(query.one("topic").unwrap(), Some("live.*,chat.a b"));
        assert_eq!(query.one("after").unwrap(), Some("%25"));
        assert_eq!(query.one("empty").unwrap(), Some(""));
        assert_eq!(query.non_empty("empty").unwrap(), None);
        assert!(query.has("bare") && !query.has("absent"));
    }

    #[test]
    fn a_repeated_name_is_refused_by_name() {
        let query = Query::parse("limit=1&li%6Dit=2").expect("well formed");
        assert_eq!(detail(query.one("limit")), "limit must be given once");
        assert_eq!(query.one("after").unwrap(), None);
    }

    #[test]
    fn broken_percent_encoding_and_foreign_bytes_are_refused() {
        for raw in ["after=%", "after=%4", "after=%zz", "after=%+1", "after=%ff"] {
            assert_eq!(
                detail(Query::parse(raw)),
                "after must be percent-encoded UTF-8 in the query",
                "{raw}"
            );
        }
        detail(Query::parse("%ff=1"));
    }

    #[test]
    fn an_integer_is_digits_within_its_range() {
        let limit = |text: &str| {
            Query::parse(&format!("limit={text}"))
                .expect("well formed")
                .integer("limit", 1..=1000)
        };
        assert_eq!(limit("1000").unwrap(), Some(1000));
        for wrong in [
            "0",
            "1001",
            "-1",
            "%2B1",
            "1.0",
            "1e2",
            "+5",
            "",
            "99999999999999999999",
            "٣",
        ] {
            assert_eq!(
                detail(limit(wrong)),
                "limit must be an integer from 1 to 1000",
                "{wrong:?}"
            );
        }
        assert_eq!(Query::default().integer("limit", 1..=2).unwrap(), None);
    }
}
