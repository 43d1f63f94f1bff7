//! Bounds the time of every answer: whatever a handler waits for, its caller learns in time that it got nothing.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::Response;
use axum::middleware::Next;
use axum::response::IntoResponse;
use hyper::body::{Frame, SizeHint};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use super::body::BODY_DEADLINE;
use crate::problem::ApiError;

/// Time for an answer once the body of the request has been read. A stream only has to begin in it.
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);

/// The layer, for `axum::middleware::from_fn`: 503 `events.unavailable` after the deadline. The work is dropped, so what
/// it had not committed is undone.
pub(super) async fn answered_in_time(request: Request, next: Next) -> Response<Body> {
    let (read, has_been_read) = oneshot::channel();
    let request = request.map(|body| {
        if body.is_end_stream() {
            return body;
        }
        Body::new(Watched { body, read: Some(read) })
    });
    let late = async {
        // An error says that the sender is gone, and so is the body. A body that nobody reads is not waited for.
        let _ = timeout(BODY_DEADLINE, has_been_read).await;
        sleep(ANSWER_DEADLINE).await;
    };
    tokio::select! {
        biased;
        response = next.run(request) => response,
        () = late => {
            ApiError::unavailable(format!("the handler did not answer in {ANSWER_DEADLINE:?}")).into_response()
        }
    }
}

/// A body that tells when it has been read, or dropped.
struct Watched {
    body: Body,
    read: Option<oneshot::Sender<()>>,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if !matches!(frame, Some(Ok(_))) {
            drop(self.read.take());
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
}
