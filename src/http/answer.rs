//! The JSON answer that every resource gives.

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::problem::ApiError;

use super::room::Room;

/// A JSON answer, 200, that gives its room back with its last byte.
pub(super) fn json_in(room: Room, body: &impl Serialize) -> Response {
    match serde_json::to_string(body) {
        Ok(text) => json_text(room.keep(text)),
        Err(error) => ApiError::internal(error).into_response(),
    }
}

/// The answer whose JSON is already written.
pub(super) fn json_text(body: Bytes) -> Response {
    ([(CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
}

/// A JSON answer with the content type of this wire.
pub(super) fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(CONTENT_TYPE, "application/json; charset=utf-8")], bytes).into_response(),
        Err(error) => ApiError::internal(error).into_response(),
    }
}
