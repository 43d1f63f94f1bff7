//! What answers when no handler does: an unknown route, a wrong method, a panic.

use std::any::Any;

use axum::http::{Method, Uri};
use axum::response::{IntoResponse, Response};

use crate::problem::ApiError;

/// 404 `events.not_found`. A wrong method is answered the same way: there is no 405 on this wire.
pub async fn not_found(method: Method, uri: Uri) -> ApiError {
    ApiError::NotFound(format!("no route answers {method} {}", shortened(uri.path())).into())
}

/// 500 `events.internal` for a handler that panicked; the message goes to the log only.
pub fn panicked(panic: Box<dyn Any + Send + 'static>) -> Response {
    let message = panic
        .downcast_ref::<&'static str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    ApiError::internal(format!("a handler panicked: {message}")).into_response()
}

/// Enough of a path to recognise it by.
fn shortened(path: &str) -> String {
    match path.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &path[..end]),
        None => path.to_owned(),
    }
}
