//! Deliveries: one dispatcher owns every send of a process. Anything else only wakes it.
//!
//! What runs is decided in the store, by claims; this room decides when to look, sends, and records what came of it.

mod agenda;
mod breaker;
mod dispatcher;
mod frontier;
mod life;
mod outcome;
mod sender;
mod settler;
mod shares;
mod unheard;
mod vitals;
mod wake;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::domain::endpoint::HostRules;
use crate::domain::retry::Schedule;
use crate::domain::time::Millis;
use crate::egress::Guard;
use crate::store::SharedStore;
use crate::tls::Trust;

pub use vitals::Vitals;
pub use wake::{Wake, Waker};

/// How deliveries are made.
#[derive(Debug, Clone)]
pub struct DeliverySettings {
    /// Deliveries in flight at most in this process, 1 or more.
    pub max_inflight: usize,
    /// Deliveries in flight at most for a subscription that says nothing, 1 or more.
    pub inflight_default: i32,
    /// Attempts and waits of subscriptions that say nothing, and the jitter of all.
    pub retry: Schedule,
    /// From the start of an attempt to the end of the answer's headers.
    pub timeout: Duration,
    /// How often the store is searched for what nothing announced.
    pub poll_interval: Duration,
    /// Where may be sent to for services; asked again at each attempt.
    pub hosts: HostRules,
    /// Where may be sent to for developer apps; asked again at each attempt.
    pub guard: Guard,
    /// Whom an https receiver may prove itself by.
    pub trust: Trust,
    /// The `User-Agent` header.
    pub user_agent: String,
    /// The wall clock, for signatures and what is shown to people.
    pub clock: fn() -> Millis,
}

/// The part of a process that delivers.
pub struct Delivery {
    /// Tells it to look.
    pub wake: Wake,
    /// What it is doing.
    pub vitals: Vitals,
    /// Ends, within ten seconds of the stop, once every claim is handed back or recorded.
    pub task: JoinHandle<()>,
}

/// Delivery could not be started.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client for deliveries cannot be built")]
pub struct StartError(#[source] reqwest::Error);

/// Starts the worker of this process. Fails when no HTTP client can be built.
pub fn start(store: SharedStore, settings: DeliverySettings, stop: CancellationToken) -> Result<Delivery, StartError> {
    let sender = sender::Sender::new(&settings).map_err(StartError)?;
    let wake = Wake::new();
    let shares = shares::Shares::new(settings.max_inflight, wake.clone());
    let vitals = Vitals::enabled(Arc::clone(&shares));
    let worker = worker::Worker {
        store,
        settings: Arc::new(settings),
        sender: Arc::new(sender),
        shares,
        wake: wake.clone(),
        vitals: vitals.clone(),
    };
    let task = tokio::spawn(worker.run(stop));
    Ok(Delivery { wake, vitals, task })
}

/// For a process without a worker: only watches the version of the store, so that what others change is known here
/// within a second.
pub fn watch(store: SharedStore, stop: CancellationToken) -> Delivery {
    Delivery {
        wake: Wake::nobody(),
        vitals: Vitals::disabled(),
        task: tokio::spawn(worker::watch_version(store, stop)),
    }
}
