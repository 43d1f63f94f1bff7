//! Reads the JSON body of a request: counted, timed, decompressed and checked. Called only after authentication.
//!
//! A body that does not arrive whole, or not in time, is a client's mistake and answered like one: 400
//! `events.bad_json`. The connection is closed after it, because the rest of the body may still be on its way.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Request, Response};
use futures_util::{StreamExt, stream};
use tokio::sync::Semaphore;
use tower::{Service, service_fn};
use tower_http::decompression::RequestDecompression;

use super::arriving::{Budget, Share};
use crate::domain::json::{self, Members};
use crate::problem::{ApiError, Detail};

/// Time for the whole body, from the first read.
pub(super) const BODY_DEADLINE: Duration = Duration::from_secs(30);

/// What the bodies that are arriving may hold in all, however many connections there are.
static ARRIVING: Arriving = Arriving {
    large: Semaphore::const_new(96 * 1024),
    small: Budget::new(32 * 1024 * 1024),
};
/// Bytes of a body that are not counted: an ordinary event is smaller, and ten thousand of them fit beside all else.
const UNCOUNTED: usize = 2 * 1024;
/// Bytes of a body that is small.
const SMALL: usize = 16 * 1024;

/// What arriving bodies may hold. Large ones leave small ones alone.
struct Arriving {
    /// Each body's bytes behind the first [`SMALL`], in KiB. What does not fit is refused: most of it is still to come.
    large: Semaphore,
    /// Its bytes before that, without the first [`UNCOUNTED`]. The slowest of them make room.
    small: Budget,
}

/// Characters of a caller's member name that a refusal repeats.
const NAME_CHARS_SHOWN: usize = 64;

/// The text of a JSON object or array, as it was sent. An empty body is `{}`.
///
/// Refusals: 415 for a content type, charset or encoding that is not accepted, 413 over `limit` bytes (the route's own,
/// counted as they arrive and as they unpack), 503 while too much else is arriving, 400 `events.bad_json` for everything else that is wrong with it.
pub async fn read_json(request: Request<Body>, limit: usize) -> Result<String, ApiError> {
    let (parts, body) = request.into_parts();
    let read = async {
        let declared = body.size_hint().lower();
        let Some(body) = non_empty(body).await? else {
            return Ok("{}".to_owned());
        };
        accepted_type(&parts.headers)?;
        let encoding = accepted_encoding(&parts.headers)?;
        if declared > u64::try_from(limit).unwrap_or(u64::MAX) {
            return Err(ApiError::BodyTooLarge { limit });
        }
        // The head may be large, and the body may take its time.
        drop(parts);
        let bytes = unpacked(body, encoding, limit, &ARRIVING).await?;
        json::check_document(&bytes).map_err(|fault| ApiError::BadJson(fault.to_string().into()))?;
        Ok(String::from_utf8(bytes).expect("a checked document is UTF-8"))
    };
    tokio::time::timeout(BODY_DEADLINE, read).await.unwrap_or_else(|_| {
        Err(ApiError::BadJson(
            format!("the body did not arrive within {} s", BODY_DEADLINE.as_secs()).into(),
        ))
    })
}

/// Like [`read_json`], for a route that reads members by their names: one that is named twice is refused, because readers
/// disagree on which of the two counts. `refusal` is what the route answers to a wrong member.
pub(super) async fn read_members(
    request: Request<Body>,
    limit: usize,
    refusal: fn(Detail) -> ApiError,
) -> Result<String, ApiError> {
    let text = read_json(request, limit).await?;
    match Members::parse(&text).as_ref().and_then(Members::repeated) {
        Some(name) => {
            let name: String = name.chars().take(NAME_CHARS_SHOWN).collect();
            Err(refusal(format!("{name:?} appears more than once in the body").into()))
        }
        None => Ok(text),
    }
}

/// The body again, or `None` when it has no bytes. One that declares a length is believed, so that a client waiting for
/// `100 Continue` is refused without being asked to send.
async fn non_empty(body: Body) -> Result<Option<Body>, ApiError> {
    if body.is_end_stream() {
        return Ok(None);
    }
    if body.size_hint().lower() > 0 {
        return Ok(Some(body));
    }
    let mut rest = body.into_data_stream();
    while let Some(chunk) = rest.next().await {
        let chunk = chunk.map_err(|_| cut_short())?;
        if !chunk.is_empty() {
            return Ok(Some(Body::from_stream(
                stream::once(std::future::ready(Ok(chunk))).chain(rest),
            )));
        }
    }
    Ok(None)
}

/// Collects at most `limit` bytes of what `encoding` unpacks to, reading at most `limit` bytes of the body itself.
async fn unpacked(body: Body, encoding: HeaderValue, limit: usize, arriving: &Arriving) -> Result<Vec<u8>, ApiError> {
    let over = Arc::new(AtomicBool::new(false));
    let counted = {
        let over = over.clone();
        let mut left = limit;
        body.into_data_stream().map(move |chunk| {
            let chunk = chunk?;
            left = left.checked_sub(chunk.len()).ok_or_else(|| {
                over.store(true, Ordering::Relaxed);
                axum::Error::new("over the limit")
            })?;
            Ok::<Bytes, axum::Error>(chunk)
        })
    };
    let mut request = Request::new(Body::from_stream(counted));
    request.headers_mut().insert(CONTENT_ENCODING, encoding);

    let echo = service_fn(|request: Request<_>| async { Ok::<_, ApiError>(Response::new(request.into_body())) });
    let response = RequestDecompression::new(echo)
        .gzip(true)
        .deflate(true)
        .call(request)
        .await?;
    let mut unpacked = Body::new(response.into_body()).into_data_stream();
    let mut bytes = Vec::new();
    let mut counted = arriving.large.try_acquire_many(0).expect("nothing is always there");
    let mut share: Option<Share<'_>> = None;
    loop {
        let told = poll_fn(|cx| share.as_ref().map_or(Poll::Pending, |share| share.poll_told(cx)));
        let chunk = tokio::select! {
            biased;
            () = told => return Err(ApiError::unavailable("too many bodies are arriving at once")),
            chunk = unpacked.next() => chunk,
        };
        let Some(chunk) = chunk else { break };
        let chunk = chunk.map_err(|_| {
            if over.load(Ordering::Relaxed) {
                over_limit(limit)
            } else {
                cut_short()
            }
        })?;
        if bytes.len() + chunk.len() > limit {
            return Err(over_limit(limit));
        }
        bytes.extend_from_slice(&chunk);
        if let Some(small @ 1..) = bytes.capacity().min(SMALL).checked_sub(UNCOUNTED) {
            share.get_or_insert_with(|| arriving.small.share()).hold(small);
        }
        let all = bytes.len().saturating_sub(SMALL).div_ceil(1024);
        let more = u32::try_from(all - counted.num_permits()).expect("at most the limit");
        let more = arriving.large.try_acquire_many(more);
        counted.merge(more.map_err(|_| ApiError::unavailable("too many large bodies are arriving at once"))?);
    }
    Ok(bytes)
}

fn over_limit(limit: usize) -> ApiError {
    ApiError::BodyTooLarge { limit }
}

fn cut_short() -> ApiError {
    ApiError::BadJson("the body ended before it was whole, or its encoding is damaged".into())
}

/// `application/json` or `application/*+json`, in UTF-8.
fn accepted_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let refused = || {
        ApiError::UnsupportedMediaType(
            "Content-Type must be application/json, in UTF-8, for a request with a body".into(),
        )
    };
    let mut values = headers.get_all(CONTENT_TYPE).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        return Err(refused());
    };
    let value = value.to_str().map_err(|_| refused())?.to_ascii_lowercase();
    let mut parts = value.split(';').map(str::trim);
    let essence = parts.next().unwrap_or_default();
    let suffix = essence.strip_prefix("application/").ok_or_else(refused)?;
    if suffix != "json" && suffix.strip_suffix("+json").is_none_or(str::is_empty) {
        return Err(refused());
    }
    let charsets = parts
        .filter_map(|part| part.split_once('='))
        .filter(|(name, _)| name.trim() == "charset");
    for (_, charset) in charsets {
        if !matches!(charset.trim().trim_matches('"'), "utf-8" | "utf8") {
            return Err(refused());
        }
    }
    Ok(())
}

/// `identity` (also when absent), `gzip` or `deflate`; one of them.
fn accepted_encoding(headers: &HeaderMap) -> Result<HeaderValue, ApiError> {
    let mut values = headers.get_all(CONTENT_ENCODING).iter();
    let name = match (values.next(), values.next()) {
        (None, _) => return Ok(HeaderValue::from_static("identity")),
        (Some(value), None) => value.to_str().unwrap_or_default().trim().to_ascii_lowercase(),
        (Some(_), Some(_)) => String::new(),
    };
    match name.as_str() {
        "identity" => Ok(HeaderValue::from_static("identity")),
        "gzip" => Ok(HeaderValue::from_static("gzip")),
        "deflate" => Ok(HeaderValue::from_static("deflate")),
        _ => Err(ApiError::UnsupportedMediaType(
            "Content-Encoding must be identity, gzip or deflate".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arriving(large_kib: usize, small: usize) -> Arriving {
        Arriving {
            large: Semaphore::new(large_kib),
            small: Budget::new(small),
        }
    }

    #[tokio::test]
    async fn large_bodies_arrive_within_a_budget_and_small_ones_whatever_is_left_of_it() {
        let arriving = arriving(32, 1 << 20);
        let read = async |size: usize| {
            let body = Body::from(vec![b' '; size]);
            unpacked(body, HeaderValue::from_static("identity"), 1 << 20, &arriving).await
        };
        assert_eq!(read(SMALL + 32 * 1024).await.unwrap().len(), 48 * 1024);
        let refused = read(SMALL + 32 * 1024 + 1).await.unwrap_err();
        assert_eq!(refused.status_and_code().1, "events.unavailable");
        assert_eq!(arriving.large.available_permits(), 32, "all is given back");
        let _others = arriving.large.try_acquire_many(32).unwrap();
        assert_eq!(read(SMALL).await.unwrap().len(), SMALL);
        assert!(read(SMALL + 1).await.is_err());
    }

    #[tokio::test]
    async fn of_small_bodies_that_stop_half_way_the_slowest_make_room() {
        let arriving = arriving(32, 3 * (SMALL - UNCOUNTED));
        let read = |size: usize| {
            let half = stream::once(std::future::ready(Ok::<_, axum::Error>(Bytes::from(vec![b' '; size]))));
            let body = Body::from_stream(half.chain(stream::pending()));
            Box::pin(unpacked(body, HeaderValue::from_static("identity"), 1 << 20, &arriving))
        };
        let mut slow: Vec<_> = (0..3).map(|_| read(SMALL)).collect();
        let mut tiny = read(UNCOUNTED);
        for one in slow.iter_mut().chain([&mut tiny]) {
            assert!(futures_util::poll!(one).is_pending(), "there is room");
        }
        let whole = unpacked(
            Body::from(vec![b' '; SMALL]),
            HeaderValue::from_static("identity"),
            1 << 20,
            &arriving,
        );
        assert_eq!(whole.await.unwrap().len(), SMALL);
        let Poll::Ready(Err(refused)) = futures_util::poll!(&mut slow[0]) else {
            panic!("the slowest goes on")
        };
        assert_eq!(refused.status_and_code().1, "events.unavailable");
        for one in slow[1..].iter_mut().chain([&mut tiny]) {
            assert!(futures_util::poll!(one).is_pending(), "the others go on");
        }
    }
}
