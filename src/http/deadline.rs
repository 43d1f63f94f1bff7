//! Bounds the time of every answer: whatever a handler waits for, its caller learns in time that it got nothing.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::Response;
use axum::http::header::EXPECT;
use axum::middleware::Next;
use axum::response::IntoResponse;
use futures_util::StreamExt;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::body::BODY_DEADLINE;
use crate::problem::ApiError;

/// Time for an answer once the body of the request has been read. A stream only has to begin in it.
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);
/// Bytes of a body that are read after its request was refused, and the time for them: such a body mostly came with its
/// head.
const REST_BYTES_MAX: u64 = 64 * 1024;
const REST_DEADLINE: Duration = Duration::from_millis(100);

/// The layer, for `axum::middleware::from_fn`: 503 `events.unavailable` after the deadline. The work is dropped, so what
/// it had not committed is undone.
pub(super) async fn answered_in_time(request: Request, next: Next) -> Response<Body> {
    let (done, mut is_done) = oneshot::channel();
    // Whoever waits to be asked for the body does not send it after a refusal.
    let is_asked_for = request.headers().contains_key(EXPECT);
    let request = request.map(|body| {
        if body.is_end_stream() {
            return body;
        }
        Body::new(Watched { body, done: Some(done) })
    });
    let mut unread = None;
    let late = async {
        // An error says that there was no body. A body that nobody reads is not waited for.
        if let Ok(Ok(rest)) = timeout(BODY_DEADLINE, &mut is_done).await {
            unread = rest;
        }
        sleep(ANSWER_DEADLINE).await;
    };
    let response = tokio::select! {
        biased;
        response = next.run(request) => response,
        () = late => {
            ApiError::unavailable(format!("the handler did not answer in {ANSWER_DEADLINE:?}")).into_response()
        }
    };
    if let Some(rest) = unread.or_else(|| is_done.try_recv().ok().flatten())
        && !is_asked_for
    {
        take_away(rest).await;
    }
    response
}

/// Reads what a refusal left of a small body, so that the connection can go on. A large or slow one ends it.
async fn take_away(rest: Body) {
    if rest.size_hint().upper().is_some_and(|bytes| bytes <= REST_BYTES_MAX) {
        let mut rest = rest.into_data_stream();
        let reading = async { while let Some(Ok(_)) = rest.next().await {} };
        // The answer goes out all the same, and says that it is the last one.
        let _ = timeout(REST_DEADLINE, reading).await;
    }
}

/// A body that tells when it has been read, and comes back when it is dropped before.
struct Watched {
    body: Body,
    done: Option<oneshot::Sender<Option<Body>>>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            // Nobody waits for it where the request is gone as well.
            let _ = done.send(Some(std::mem::take(&mut self.body)));
        }
    }
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_)))
            && let Some(done) = self.done.take()
        {
            let _ = done.send(None);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use axum::Router;
    use axum::routing::post;
    use futures_util::{StreamExt, stream};
    use http_body_util::BodyExt;
    use tokio::time::Instant;
    use tower::ServiceExt;

    use super::*;
    use crate::http::{body, layers};

    async fn asked(router: Router, request: Request) -> Response<Body> {
        let answer = timeout(Duration::from_secs(600), router.oneshot(request)).await;
        answer.expect("an answer in bounded time").unwrap()
    }

    /// The answer of a handler that never gives one after it read its body, and the time until then.
    async fn never(body: Body) -> (Response<Body>, Duration) {
        struct Dropped(Arc<AtomicBool>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let dropped = Arc::new(AtomicBool::new(false));
        let held = dropped.clone();
        let router = layers(Router::new().route(
            "/never",
            post(|request: Request| async move {
                let _work = Dropped(held);
                body::read_json(request, 64).await?;
                std::future::pending::<Result<(), ApiError>>().await
            }),
        ));
        let since = Instant::now();
        let request = Request::post("/never").header("content-type", "application/json");
        let response = asked(router, request.body(body).unwrap()).await;
        assert!(dropped.load(Ordering::SeqCst), "its work is dropped");
        (response, since.elapsed())
    }

    /// `{}` in two parts, the second one after `wait`.
    fn slow(wait: Duration) -> Body {
        let parts = stream::iter(["{", "}"]).then(move |part| async move {
            if part == "}" {
                sleep(wait).await;
            }
            Ok::<_, axum::Error>(part)
        });
        Body::from_stream(parts)
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_that_never_answers_is_answered_for() {
        let (response, took) = never(Body::empty()).await;
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "2");
        assert!(response.headers().contains_key("x-openvibe-request-id"));
        assert_eq!(took.as_secs(), 20);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let document: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(document["code"], "events.unavailable");
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_for_an_answer_starts_when_the_body_has_been_read() {
        let (response, took) = never(slow(Duration::from_secs(25))).await;
        assert_eq!((response.status().as_u16(), took.as_secs()), (503, 45));
        let (response, took) = never(Body::from("{}")).await;
        assert_eq!((response.status().as_u16(), took.as_secs()), (503, 20));
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_that_does_not_read_its_body_is_bounded_as_well() {
        let router = layers(Router::new().route("/never", post(|_unread: Request| std::future::pending::<()>())));
        let since = Instant::now();
        let request = Request::post("/never").body(Body::from("{}")).unwrap();
        assert_eq!(asked(router, request).await.status(), 503);
        assert!(since.elapsed() <= BODY_DEADLINE + ANSWER_DEADLINE + Duration::from_millis(10));
    }

    /// Whether a body was read to its end though its handler refused it unread.
    async fn is_taken_away(expects: bool, parts: Vec<(&'static str, Duration)>, length: Option<u64>) -> bool {
        struct Sized(Body, Option<u64>);
        impl HttpBody for Sized {
            type Data = Bytes;
            type Error = axum::Error;

            fn poll_frame(
                mut self: Pin<&mut Self>,
                cx: &mut Context<'_>,
            ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
                Pin::new(&mut self.0).poll_frame(cx)
            }

            fn size_hint(&self) -> SizeHint {
                self.1.map_or_else(SizeHint::default, SizeHint::with_exact)
            }
        }
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let parts = stream::iter(parts).then(|(part, wait)| async move {
            sleep(wait).await;
            Ok::<_, axum::Error>(part)
        });
        let end = stream::once(async move {
            end.store(true, Ordering::SeqCst);
            Ok("")
        });
        let router = layers(Router::new().route("/refuse", post(|| async { ApiError::BadRequest("no".into()) })));
        let mut request = Request::post("/refuse");
        if expects {
            request = request.header(EXPECT, "100-continue");
        }
        let body = Body::new(Sized(Body::from_stream(parts.chain(end)), length));
        assert_eq!(asked(router, request.body(body).unwrap()).await.status(), 400);
        ended.load(Ordering::SeqCst)
    }

    #[tokio::test(start_paused = true)]
    async fn the_small_rest_of_a_refused_body_is_read_and_no_other() {
        let (at_once, later) = (Duration::from_millis(1), Duration::from_secs(1));
        assert!(is_taken_away(false, vec![("{", at_once), ("}", at_once)], Some(2)).await);
        assert!(
            !is_taken_away(true, vec![("{", at_once), ("}", at_once)], Some(2)).await,
            "it was not asked for"
        );
        assert!(
            !is_taken_away(false, vec![("{", at_once), ("}", later)], Some(2)).await,
            "it is slow"
        );
        assert!(
            !is_taken_away(false, vec![("{}", at_once)], Some(REST_BYTES_MAX + 1)).await,
            "it is large"
        );
        assert!(
            !is_taken_away(false, vec![("{}", at_once)], None).await,
            "it has no known end"
        );
    }
}
