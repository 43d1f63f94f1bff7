//! The JSON answer that every resource gives.

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::problem::ApiError;

/// A JSON answer with the content type of this wire.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(CONTENT_TYPE, "application/json; charset=utf-8")], bytes).into_response(),
        Err(error) => ApiError::internal(error).into_response(),
    }
}
