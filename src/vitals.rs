//! What readiness and metrics look at, joined from the rooms that know it.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::json;

use crate::delivery;
use crate::domain::deliveries::{Waiting, WorkerState};
use crate::http::health::{ReadyCheck, StoredVitals, Verdict, Vitals};
use crate::identity::Keys;
use crate::problem::Cause;
use crate::realtime::Realtime;
use crate::store::{IndexBuilds, IndexState, SharedStore};

/// The figures of this process and its database.
pub(crate) struct AppVitals {
    pub(crate) store: SharedStore,
    pub(crate) worker: delivery::Vitals,
    pub(crate) realtime: Realtime,
}

impl Vitals for AppVitals {
    fn stored(&self) -> BoxFuture<'static, Result<StoredVitals, Cause>> {
        let store = Arc::clone(&self.store);
        async move {
            let latest_seq = store.positions().await?.head;
            let deliveries = store.delivery_counts().await?;
            Ok(StoredVitals { latest_seq, deliveries })
        }
        .boxed()
    }

    fn waiting(&self) -> BoxFuture<'static, Result<Waiting, Cause>> {
        let store = Arc::clone(&self.store);
        async move { Ok(store.waiting().await?) }.boxed()
    }

    fn worker(&self) -> WorkerState {
        self.worker.read()
    }

    fn realtime_connections(&self) -> u64 {
        self.realtime.connections() as u64
    }
}

/// The checks of readiness, in the order in which they are listed. `delivery_worker` is listed only where one runs,
/// `signing_secrets` where one runs that cannot open all of them, and `indexes` where this release brings some that are
/// built after the start.
pub(crate) fn checks(
    store: &SharedStore,
    keys: &Keys,
    worker: &delivery::Vitals,
    dlq_degraded_at: u64,
    indexes: &IndexBuilds,
) -> Vec<ReadyCheck> {
    let mut checks = vec![
        ReadyCheck::new("db", true, {
            let store = Arc::clone(store);
            move || {
                let store = Arc::clone(&store);
                async move {
                    match store.ping().await {
                        Ok(()) => Verdict::Ok(None),
                        Err(error) => Verdict::failed(error),
                    }
                }
            }
        }),
        ReadyCheck::new("network_jwks", true, {
            let keys = keys.clone();
            move || {
                let loaded = keys.loaded();
                async move {
                    if loaded {
                        Verdict::Ok(None)
                    } else {
                        Verdict::failed("no signing key has loaded yet")
                    }
                }
            }
        }),
    ];
    if worker.read().enabled {
        let worker = worker.clone();
        checks.push(ReadyCheck::new("delivery_worker", true, move || {
            let running = worker.read().running;
            async move {
                if running {
                    Verdict::Ok(None)
                } else {
                    Verdict::failed("the worker is not running")
                }
            }
        }));
    }
    if worker.read().enabled {
        let store = Arc::clone(store);
        checks.push(ReadyCheck::new("signing_secrets", false, move || {
            let view = store.view();
            let all = view.subscribers();
            let closed = all.iter().filter(|one| !store.has_key_of(one)).count();
            async move {
                match closed {
                    0 => Verdict::Unlisted,
                    _ => Verdict::Failed {
                        error: format!(
                            "EVENTS_SECRET_KEY lacks the keys of the signing secrets of {closed} subscriptions: this \
                             process leaves their deliveries to others"
                        ),
                        detail: Some(json!({ "subscriptions": closed })),
                    },
                }
            }
        }));
    }
    checks.push(ReadyCheck::new("dlq", false, {
        let store = Arc::clone(store);
        move || {
            let store = Arc::clone(&store);
            async move {
                let depth = match store.delivery_counts().await {
                    Ok(counts) => counts.dead,
                    Err(error) => return Verdict::failed(error),
                };
                let detail = json!({ "depth": depth, "threshold": dlq_degraded_at });
                if u64::try_from(depth).is_ok_and(|depth| depth > dlq_degraded_at) {
                    let error = format!("{depth} deliveries are dead");
                    Verdict::Failed {
                        error,
                        detail: Some(detail),
                    }
                } else {
                    Verdict::Ok(Some(detail))
                }
            }
        }
    }));
    if !indexes.read().missing.is_empty() {
        let indexes = indexes.clone();
        checks.push(ReadyCheck::new("indexes", false, move || {
            let state = indexes.read();
            async move { index_verdict(state) }
        }));
    }
    checks
}

/// An index that is still to be built costs speed and nothing else; one that cannot be built is worth a look.
fn index_verdict(state: IndexState) -> Verdict {
    let detail = json!({ "missing": state.missing });
    match state.error {
        Some((name, error)) => Verdict::Failed {
            error: format!("{name}: {error}"),
            detail: Some(detail),
        },
        None => Verdict::Ok(Some(detail)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_that_is_missing_is_no_failure_until_it_cannot_be_built() {
        let mut state = IndexState {
            missing: vec!["deliveries_later"],
            error: None,
        };
        let detail = || Some(json!({ "missing": ["deliveries_later"] }));
        assert_eq!(index_verdict(state.clone()), Verdict::Ok(detail()));
        state.error = Some(("deliveries_later", "no space".to_owned()));
        let failed = Verdict::Failed {
            error: "deliveries_later: no space".to_owned(),
            detail: detail(),
        };
        assert_eq!(index_verdict(state), failed);
    }
}
