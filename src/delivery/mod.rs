//! The worker of a process. (Replaced when the room lands.)
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::domain::endpoint::HostRules;
use crate::domain::ids::SubscriptionId;
use crate::domain::retry::Schedule;
use crate::domain::time::Millis;
use crate::store::SharedStore;

#[allow(missing_docs)]
pub struct DeliverySettings {
    pub max_inflight: usize,
    pub retry: Schedule,
    pub timeout: Duration,
    pub poll_interval: Duration,
    pub hosts: HostRules,
    pub user_agent: String,
    pub clock: fn() -> Millis,
}
#[allow(missing_docs)]
pub struct Delivery {
    pub wake: Wake,
    pub vitals: Vitals,
    pub task: JoinHandle<()>,
}
#[allow(missing_docs)]
#[derive(Clone)]
pub struct Wake;
#[allow(missing_docs)]
impl Wake {
    pub fn subscriptions(&self, _ids: impl IntoIterator<Item = SubscriptionId>) {}
}
#[allow(missing_docs)]
#[derive(Clone)]
pub struct Vitals;
#[allow(missing_docs)]
pub struct WorkerState {
    pub enabled: bool,
    pub running: bool,
    pub inflight: usize,
    pub busy_subscriptions: usize,
    pub last_tick_at: Option<Millis>,
}
#[allow(missing_docs)]
impl Vitals {
    pub fn read(&self) -> WorkerState {
        WorkerState {
            enabled: false,
            running: false,
            inflight: 0,
            busy_subscriptions: 0,
            last_tick_at: None,
        }
    }
}
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
#[error("x")]
pub struct StartError(#[source] reqwest::Error);
#[allow(missing_docs)]
pub fn start(store: SharedStore, _settings: DeliverySettings, stop: CancellationToken) -> Result<Delivery, StartError> {
    Ok(watch(store, stop))
}
#[allow(missing_docs)]
pub fn watch(_store: SharedStore, stop: CancellationToken) -> Delivery {
    Delivery {
        wake: Wake,
        vitals: Vitals,
        task: tokio::spawn(async move { stop.cancelled().await }),
    }
}
