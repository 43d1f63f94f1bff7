//! The tour: real requests to the real service, told as they happen. Every step verifies what it shows, and the first
//! expectation that does not hold ends the tour.

mod carriers;
mod events;
mod guide;
mod steps;
mod stream;

use std::time::Duration;

use tokio::time::Instant;

use super::api;
use super::brokers::{BrokerError, Brokers};
use super::issuer::Issuer;
use super::receiver::Receiver;
use super::service::{Service, ServiceError, Settings};
use super::terminal::Terminal;
use guide::Guide;

/// Why the tour ended early.
#[derive(Debug, thiserror::Error)]
pub enum TourError {
    /// Something is not as it must be.
    #[error("expected: {0}")]
    Unmet(String),
    /// An answer has another status than it must have.
    #[error("{request} answered {status} instead of {wanted}: {body}")]
    Status {
        /// Method and path.
        request: String,
        /// The status.
        status: u16,
        /// What it must be.
        wanted: u16,
        /// The body.
        body: String,
    },
    /// Something did not happen in time.
    #[error("waited {} s in vain: {what}", .longest.as_secs())]
    Late {
        /// What was waited for.
        what: String,
        /// For how long.
        longest: Duration,
    },
    /// No whole answer came.
    #[error("no answer: {0}")]
    NoAnswer(#[from] reqwest::Error),
    /// Work was not placed where it belongs.
    #[error(
        "waited {} s for work to be placed {} {carrier}; GET /api/v1/placement says: {said}. Remedy: {remedy}",
        .longest.as_secs(), if *.on { "on" } else { "elsewhere than on" }
    )]
    Unplaced {
        /// The carrier.
        carrier: &'static str,
        /// Whether it was to be there, or anywhere else.
        on: bool,
        /// For how long it was waited.
        longest: Duration,
        /// What placement said last.
        said: String,
        /// What to do.
        remedy: String,
    },
    /// A broker of ours cannot be killed or started.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The service did not come back.
    #[error(transparent)]
    Service(#[from] ServiceError),
    /// The service could not be killed.
    #[error("the service cannot be killed: {0}")]
    Kill(#[source] std::io::Error),
}

/// What the tour runs against.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stage<'a> {
    /// Where it is told.
    pub(super) terminal: Terminal,
    /// The HTTP client.
    pub(super) http: &'a reqwest::Client,
    /// The identity issuer.
    pub(super) issuer: &'a Issuer,
    /// The receiver of all deliveries.
    pub(super) receiver: &'a Receiver,
    /// How to start the service again.
    pub(super) settings: &'a Settings,
}

/// Plays the tour against a running service, which is another process at its end.
///
/// # Errors
///
/// The first expectation that did not hold.
pub(super) async fn play(stage: Stage<'_>, service: &mut Service, brokers: &mut Brokers) -> Result<(), TourError> {
    let started = Instant::now();
    let mut guide = Guide::new(stage, service);
    steps::tokens(&mut guide).await?;
    steps::subscribe(&mut guide).await?;
    steps::publish(&mut guide).await?;
    steps::signed(&mut guide).await?;
    steps::retried(&mut guide).await?;
    steps::dead_and_replayed(&mut guide).await?;
    steps::killed(&mut guide).await?;
    carriers::moved(&mut guide, brokers).await?;
    steps::pulled(&mut guide).await?;
    stream::streamed(&mut guide).await?;
    steps::summary(&mut guide, started).await
}
