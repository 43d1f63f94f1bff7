//! OpenVibe Events: a durable event bus on PostgreSQL.
//!
//! What the database holds is true; whatever else happens only says that it may be worth looking there. The rooms and the
//! arrows between them are described in `docs/architecture.md`. This file is the composition root: the only one that knows every part. It builds them in
//! order and stops them in reverse.

pub mod archive;
mod backoff;
mod cards;
pub mod cli;
mod clock;
pub mod config;
pub mod delivery;
pub mod domain;
pub mod egress;
pub mod fabric;
pub mod http;
pub mod identity;
mod maintenance;
mod manifest;
pub mod problem;
pub mod publish;
pub mod realtime;
pub mod store;
pub mod telemetry;
pub mod tls;
mod vitals;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::FutureExt as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use config::{Config, Database, Retention, SecretKey};
use delivery::{Delivery, DeliverySettings};
use domain::seal::Sealer;
use fabric::{Fabric, FabricSettings};
use http::api::{Api, Ring};
use http::cors::Origins;
use http::health::{Readiness, SERVICE};
use http::room::Rooms;
use http::server::CONNECTIONS_MAX;
use http::stream::Streams;
use identity::limits::{Allowance, Limits};
use identity::{Keys, Sessions, Tickets, Verifier};
use publish::{Bells, Publisher, Rules};
use realtime::Realtime;
use store::{Addresses, IndexBuilds, LATER_INDEXES, SharedStore, Store};
use vitals::AppVitals;

/// Who tokens must be meant for.
const AUDIENCE: &str = "openvibe.events";
/// How deliveries name their sender; receivers may match on it.
const USER_AGENT: &str = "OpenVibe.Events/0.1";

/// Why the service could not start or ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The database.
    #[error("the database cannot be used")]
    Store(#[from] store::StoreError),
    /// The HTTP client of deliveries.
    #[error("deliveries cannot be started")]
    Delivery(#[from] delivery::StartError),
    /// The carriers and their prices.
    #[error("the carriers cannot be used")]
    Fabric(#[from] fabric::StartError),
    /// The pinned key.
    #[error("OV_NETWORK_PUBLIC_KEY holds no RSA public key in PEM")]
    PinnedKey(#[source] identity::KeyError),
    /// The address of the issuer.
    #[error("OV_NETWORK_INTERNAL_URL is not a URL")]
    IssuerUrl(#[source] url::ParseError),
    /// What operators signal the process with.
    #[error("SIGHUP cannot be listened for")]
    Signals(#[source] std::io::Error),
    /// The listening socket.
    #[error("cannot listen on {address}; HOST and PORT choose another address")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The accept loop.
    #[error("the HTTP server ended")]
    Serve(#[source] std::io::Error),
}

/// A started service.
pub struct App {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    store: SharedStore,
    readiness: Arc<Readiness>,
    indexes: IndexBuilds,
    retention: Retention,
    sandbox_retention: Duration,
    connections_max: usize,
    delivery: Delivery,
    publisher: JoinHandle<()>,
    /// Ends the publisher, after the last request has been answered.
    stop_publisher: CancellationToken,
    /// Ends deliveries and what runs beside them.
    stop_background: CancellationToken,
    /// Ends the sending of signals, after the last commit.
    stop_sending: CancellationToken,
    /// The tasks that are not a room's own.
    tasks: TaskTracker,
}

impl App {
    /// Migrates, connects, starts every part and binds the address. Nothing is served before [`App::serve`].
    pub async fn start(config: &Config, database: &Database) -> Result<Self, AppError> {
        // Before anything that takes time: until somebody listens, the signal ends the process.
        let hangups = signal(SignalKind::hangup()).map_err(AppError::Signals)?;
        // Before any part takes a meter from it.
        let metrics = telemetry::Metrics::install();
        let addresses = Addresses::parse(database.url.expose(), database.direct_url.expose())?;
        store::migrate(&addresses).await?;
        let sealer = Sealer::new(config.delivery.secret_keys.iter().map(SecretKey::expose));
        let store: SharedStore = Arc::new(Store::connect(addresses).await?.sealing_with(sealer));
        if let Some(warning) = config.delivery.secrets_warning() {
            tracing::warn!("{warning}");
        }

        let stop_background = CancellationToken::new();
        let trust = tls::Trust::load(&config.authorities);
        let fabric = Arc::new(open_fabric(config, database, &trust, &store)?);
        let keys = keys(config, &trust)?;
        let tasks = TaskTracker::new();
        tasks.spawn({
            let (keys, stop) = (keys.clone(), stop_background.clone());
            async move { keys.run(stop).await }
        });

        let guard = egress::Guard::new(&config.delivery.dns_servers);
        let delivery = if config.delivery.worker {
            delivery::start(
                Arc::clone(&store),
                delivery_settings(config, trust, guard.clone()),
                stop_background.clone(),
            )?
        } else {
            delivery::watch(Arc::clone(&store), stop_background.clone())
        };
        let wake = delivery.wake.clone();
        let realtime = Realtime::start(
            Arc::clone(&store),
            stream_settings(&config.realtime),
            &tasks,
            &stop_background,
        )
        .await?;
        let stop_sending = CancellationToken::new();
        fabric.run(&wake, &realtime.bell(), &tasks, &stop_background, &stop_sending);
        tasks.spawn(reload_on_hangup(hangups, Arc::clone(&fabric), stop_background.clone()));
        let ring: Ring = {
            let (wake, fabric) = (wake.clone(), Arc::clone(&fabric));
            Arc::new(move |subscriptions| {
                wake.subscriptions(subscriptions.iter().cloned());
                fabric.work(subscriptions);
            })
        };

        let stop_publisher = CancellationToken::new();
        let bounds = publish::Bounds {
            max_hops: i32::try_from(config.publish.max_hops).unwrap_or(i32::MAX),
            quotas: manifest::quotas(config),
        };
        let (publisher, publishing) = Publisher::start(
            Arc::clone(&store),
            bounds,
            Arc::clone(&fabric),
            Bells {
                deliveries: wake,
                streams: realtime.bell(),
            },
            stop_publisher.clone(),
        );

        let vitals = Arc::new(AppVitals {
            store: Arc::clone(&store),
            worker: delivery.vitals.clone(),
            realtime: realtime.clone(),
        });
        let indexes = IndexBuilds::of(&LATER_INDEXES);
        let checks = vitals::checks(
            &store,
            &keys,
            &delivery.vitals,
            config.delivery.dlq_degraded_at,
            &indexes,
        );
        let release = manifest::release(config, clock::now());
        telemetry::release(SERVICE, &release.name);
        tasks.spawn({
            let (metrics, stop) = (metrics.clone(), stop_background.clone());
            async move { metrics.keep(stop).await }
        });
        let readiness = Arc::new(Readiness::new(
            release.name.as_str(),
            checks,
            vitals.clone(),
            clock::now,
        ));

        let limits = config.limits.enabled.then(|| {
            Limits::new(Allowance {
                minute: config.limits.per_minute,
                hour: config.limits.per_hour,
            })
        });
        let documents =
            http::release::routes(&release).merge(http::limits::routes(&manifest::limits(config), limits.as_ref()));
        let verifier = Verifier {
            keys,
            issuer: config.identity.issuer.clone(),
            audience: AUDIENCE.to_owned(),
        };
        let streams = streams(config, &verifier, &store, realtime);
        let api = Arc::new(Api {
            verifier,
            store: Arc::clone(&store),
            limits,
            publisher,
            rules: Rules {
                sources: config.publish.sources.clone(),
                max_payload_bytes: config.publish.max_payload_bytes,
            },
            endpoint_hosts: config.delivery.endpoint_hosts.clone(),
            guard,
            rooms: Rooms::default(),
            subscriptions_max: i64::from(config.delivery.max_subscriptions),
            apps: config.apps.enabled,
            quotas: bounds.quotas,
            wake: ring,
            fabric,
        });
        let router = http::layers(
            http::api::routes(api)
                .merge(streams)
                .merge(http::health::routes(env!("CARGO_PKG_VERSION"), Arc::clone(&readiness)))
                .merge(http::metrics::routes(metrics, vitals))
                .merge(documents),
        );

        let address = config.http.listen;
        let bind = |source| AppError::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        Ok(Self {
            listener,
            address,
            router,
            store,
            readiness,
            indexes,
            retention: config.retention.clone(),
            sandbox_retention: config.apps.sandbox_retention,
            connections_max: CONNECTIONS_MAX + config.realtime.max_connections,
            delivery,
            publisher: publishing,
            stop_publisher,
            stop_background,
            stop_sending,
            tasks,
        })
    }

    /// Answers `pages` first; whatever they have no route for is the service's.
    #[must_use]
    pub fn behind(mut self, pages: Router) -> Self {
        self.router = http::layers(pages).fallback_service(self.router);
        self
    }

    /// Where the service listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is cancelled, then stops in reverse: requests in flight and running attempts finish within
    /// their deadlines, side by side; then what was accepted is stored; then the database is let go.
    pub async fn serve(self, stop: CancellationToken) -> Result<(), AppError> {
        let stop_background = self.stop_background;
        for task in [
            maintenance::keep_sealed(Arc::clone(&self.store)).boxed(),
            maintenance::erase_former_secrets(Arc::clone(&self.store)).boxed(),
            maintenance::forget_tickets(Arc::clone(&self.store)).boxed(),
            maintenance::forget_placements(Arc::clone(&self.store), self.retention.clone()).boxed(),
            maintenance::prune(Arc::clone(&self.store), self.retention, self.sandbox_retention).boxed(),
            maintenance::build_indexes(Arc::clone(&self.store), self.readiness, self.indexes).boxed(),
        ] {
            let stop = stop_background.clone();
            self.tasks.spawn(async move { stop.run_until_cancelled(task).await });
        }
        self.tasks.spawn({
            let stop = stop.clone();
            async move {
                stop.cancelled().await;
                stop_background.cancel();
            }
        });
        let served = http::server::serve(self.listener, self.router, self.connections_max, stop.clone())
            .await
            .map_err(AppError::Serve);
        // The accept loop may have ended by itself; the rest must stop all the same.
        stop.cancel();
        self.stop_publisher.cancel();
        for task in [self.publisher, self.delivery.task] {
            if task.await.is_err() {
                tracing::error!("a background task panicked");
            }
        }
        self.stop_sending.cancel();
        self.tasks.close();
        self.tasks.wait().await;
        self.store.close().await;
        served
    }
}

/// Reads the rate cards again at each SIGHUP; a bad file changes nothing.
async fn reload_on_hangup(mut hangups: Signal, fabric: Arc<Fabric>, stop: CancellationToken) {
    while stop.run_until_cancelled(hangups.recv()).await.is_some() {
        match fabric.reload_cards() {
            Ok(()) => tracing::info!("the rate cards were read again"),
            Err(mistake) => tracing::error!("the rate cards stay as they were: {mistake}"),
        }
    }
}

fn open_fabric(
    config: &Config,
    database: &Database,
    trust: &tls::Trust,
    store: &SharedStore,
) -> Result<Fabric, fabric::StartError> {
    let variables = |name: &str| match name {
        "DATABASE_URL" => Some(database.url.expose().to_owned()),
        "DATABASE_DIRECT_URL" => Some(database.direct_url.expose().to_owned()),
        name => config.carrier_variable(name),
    };
    let instance = hex::encode(rand::random::<[u8; 8]>());
    let settings = FabricSettings {
        enabled: config.carriers.enabled.clone(),
        disabled: config.carriers.disabled.clone(),
        rate_cards: config.carriers.rate_cards.clone(),
        poll_interval: config.delivery.poll_interval,
        env: carriers::Env {
            variables: &variables,
            instance: &instance,
            consumes: config.delivery.worker,
            tls: trust.client_config(),
            clock: clock::system,
        },
        clock: clock::now,
    };
    Fabric::open(&settings, Arc::clone(store))
}

/// The routes of live streams.
fn streams(config: &Config, verifier: &Verifier, store: &SharedStore, realtime: Realtime) -> Router {
    let identity = &config.identity;
    let streams = Streams {
        realtime,
        store: Arc::clone(store),
        verifier: verifier.clone(),
        sessions: Sessions {
            keys: verifier.keys.clone(),
            issuer: identity.issuer.clone(),
            audiences: identity.user_audiences.clone(),
        },
        tickets: Tickets {
            keys: verifier.keys.clone(),
            issuer: identity.issuer.clone(),
            audience: AUDIENCE.to_owned(),
        },
        topics_max: config.realtime.max_topics,
        allow_anonymous: config.realtime.allow_anonymous,
    };
    let origins = Origins {
        hosts: config.realtime.origin_hosts.clone(),
        exact: config.realtime.cors_origins.clone(),
    };
    http::stream::routes(Arc::new(streams), origins)
}

fn stream_settings(realtime: &config::Realtime) -> realtime::Settings {
    realtime::Settings {
        max_connections: realtime.max_connections,
        heartbeat: realtime.heartbeat,
        replay_max: realtime.replay_max,
        public_replay: realtime.public_replay,
        clock: clock::now,
    }
}

fn keys(config: &Config, trust: &tls::Trust) -> Result<Keys, AppError> {
    match &config.identity.public_key_pem {
        Some(pem) => Keys::pinned(pem).map_err(AppError::PinnedKey),
        None => {
            let url = format!("{}/api/.well-known/jwks", config.identity.network_internal_url);
            Ok(Keys::fetching(url.parse().map_err(AppError::IssuerUrl)?, trust.clone()))
        }
    }
}

fn delivery_settings(config: &Config, trust: tls::Trust, guard: egress::Guard) -> DeliverySettings {
    let delivery = &config.delivery;
    DeliverySettings {
        max_inflight: usize::from(delivery.max_inflight),
        poll_interval: delivery.poll_interval,
        timeout: delivery.timeout,
        inflight_default: i32::from(delivery.default_max_inflight),
        retry: domain::retry::Schedule {
            max_attempts: delivery.max_attempts,
            backoff_ms: delivery
                .backoff
                .iter()
                .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX))
                .collect(),
            jitter: delivery.backoff_jitter,
        },
        hosts: delivery.endpoint_hosts.clone(),
        guard,
        trust,
        user_agent: USER_AGENT.to_owned(),
        clock: clock::now,
    }
}
