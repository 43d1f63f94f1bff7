//! The record. Every SQL statement of the service is in this room, next to the function that runs it; callers get
//! domain types and choose their own answers.
//!
//! The rules that keep concurrent publishes, claims and settles apart are in `docs/architecture.md`, "The store's
//! protocol". Every statement that several processes may run at once says which of them it follows.

mod archive;
mod archived;
mod at_once;
mod carriers;
mod checkpoints;
mod claims;
mod counts;
mod deliveries;
mod error;
mod events;
mod indexes;
mod migrate;
mod placements;
mod policies;
mod prune;
mod publish;
mod replay;
mod run;
mod seal;
mod settle;
mod skip;
mod stream;
mod subscriptions;
mod view;
mod waiting;
mod workers;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions};
use sqlx::{Connection, Postgres, Transaction};

use crate::domain::seal::Sealer;

pub use crate::domain::deliveries::DeliveryCounts;
pub use archive::{ArchiveSession, HotTier, MonthRows, Offer, ReplayMonth, TierStatus};
pub use carriers::Used;
pub use checkpoints::Checkpoint;
pub use claims::{Candidate, Claim, Claimed, Counted, Pass, Released, Stretch};
pub use deliveries::{DeliveryFilter, DeliveryPage, DeliveryRow};
pub use error::StoreError;
pub use events::{Page, PageRequest, Positions, PulledEvent, StoredEvent};
pub use indexes::{IndexBuild, IndexBuilds, IndexState, LATER_INDEXES, LaterIndex};
pub use migrate::{migrate, schema_generation};
pub use placements::{DeliveryPlacement, NewPlacement, PLACED_BY_MAX, StoredPlacement};
pub use policies::StoredPolicy;
pub use prune::{Aged, Moved, ReceiptsPass, Removed};
pub use publish::{Group, Held, KnownEvent, LoopKey, LoopState, NewDelivery, NewEvent, Stored, receipt_owner};
pub use replay::{Placements, Placer, Replay, ReplaySelection, Replayed};
pub use seal::{Erased, Resealed, Secrets};
pub use settle::{Outcome, Settlement};
pub use skip::{SKIPPED_ERROR, Skip};
pub use stream::{HISTORY_ROWS_MAX, Heading, Headings, History, HistoryRequest, StartBounds, valid_after};
pub use subscriptions::{NewSubscription, Rotation, Subscription, SubscriptionChange, Switch};
pub use view::{Subscriber, View};
pub use workers::Heartbeat;

use at_once::Lanes;
use run::Run;

/// Connections for publishing, delivering and every other change. Each holds one server process of PostgreSQL.
const WRITE_CONNECTIONS_MAX: u32 = 10;
/// Connections for what callers read, apart from the others, so that no crowd of readers stops an event.
const READ_CONNECTIONS_MAX: u32 = 6;
/// How long a connection that is given back may take to answer, before it is thrown away.
const RELEASE_MAX: Duration = Duration::from_secs(2);
/// How long the last connections may take to end.
const CLOSE_MAX: Duration = Duration::from_secs(1);
/// How long a request waits for a connection before it is told "not now".
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(3);

/// How long one statement may take.
const STATEMENT_TIMEOUT: &str = "5s";
/// How long a connection may rest before it is asked whether it still lives.
const RESTED: Duration = Duration::from_secs(1);

/// Opens a transaction that can stop nobody for long: a statement that waits or runs too long fails, and a process that
/// freezes in the middle loses its locks, whether the server waits for its next statement (two seconds) or for it to
/// take an answer (four). Its commit waits for the disk, whatever the session was left with.
const BEGIN: &str = "BEGIN; SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '5s'; \
                     SET LOCAL idle_in_transaction_session_timeout = '2s'; SET LOCAL tcp_user_timeout = '4s'; \
                     SET LOCAL synchronous_commit = on";
/// As [`BEGIN`], for work whose loss repeats it: its commit does not wait for the disk.
const BEGIN_RELAXED: &str = "BEGIN; SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '5s'; \
                             SET LOCAL idle_in_transaction_session_timeout = '2s'; SET LOCAL tcp_user_timeout = '4s'; \
                             SET LOCAL synchronous_commit = off";
/// As [`BEGIN`], for a group that is looked at closely: its statements are planned as those of a group that is one statement.
const BEGIN_GROUP: &str = "BEGIN; SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '5s'; \
                           SET LOCAL idle_in_transaction_session_timeout = '2s'; SET LOCAL tcp_user_timeout = '4s'; \
                           SET LOCAL synchronous_commit = on; SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL jit = off; \
                           SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; \
                           SET LOCAL enable_mergejoin = off";
/// As [`BEGIN`], for rows of large tables that are found by index: a table that is about to be emptied, or has just been
/// filled, is not what PostgreSQL believes of it.
const BEGIN_PRUNE: &str = "BEGIN; SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '5s'; \
                           SET LOCAL idle_in_transaction_session_timeout = '2s'; SET LOCAL tcp_user_timeout = '4s'; \
                           SET LOCAL synchronous_commit = on; SET LOCAL jit = off; SET LOCAL enable_seqscan = off; \
                           SET LOCAL enable_bitmapscan = off";
const BEGIN_READ: &str = "BEGIN READ ONLY; SET LOCAL statement_timeout = '5s'; \
                          SET LOCAL idle_in_transaction_session_timeout = '5s'";

/// How long callers wait for one answer of the store, longer than its statements and locks may take.
pub const ANSWER_MAX: Duration = Duration::from_secs(8);

/// Waits for an answer within [`ANSWER_MAX`]. The database bounds its own statements; this bounds a network that swallows
/// answers. What was asked may have happened all the same.
pub async fn answered<T>(asked: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    let in_time = tokio::time::timeout(ANSWER_MAX, asked).await;
    in_time.unwrap_or_else(|_elapsed| {
        let silent = std::io::Error::from(std::io::ErrorKind::TimedOut);
        Err(StoreError::Unavailable(silent.into()))
    })
}

/// Ends the transaction that a connection may still be in when it is given back. One whose opening was given up after it
/// was asked for is in it, and neither the driver nor the transaction's owner knows: behind a pooler it would hold the
/// server connection, and here hand its settings on to whoever comes next. As a round trip it is also the proof of life.
async fn leave_transaction(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    // Asked to begin one with nothing, the driver only looks at what the server says about where the connection is.
    match connection.begin_with("").await {
        Err(sqlx::Error::BeginFailed) => Ok(()),
        Ok(left_open) => left_open.rollback().await,
        Err(error) => Err(error),
    }
}

/// Where a process finds its database.
#[derive(Clone)]
pub struct Addresses {
    /// Serves everything; may lead through a transaction pooler.
    pub pooled: PgConnectOptions,
    /// For what needs a session of its own: heartbeats and migrations.
    pub direct: PgConnectOptions,
    /// Whether `pooled` and `direct` differ, so that a pooler must be assumed.
    pub behind_pooler: bool,
}

impl Addresses {
    /// Reads the two URLs; a fault names neither user nor password.
    pub fn parse(pooled: &str, direct: &str) -> Result<Self, StoreError> {
        let options = |url: &str| {
            url.parse::<PgConnectOptions>()
                .map(|options| options.application_name("openvibe-events"))
                .map_err(StoreError::Database)
        };
        let behind_pooler = pooled != direct;
        let mut serving = options(pooled)?;
        if behind_pooler {
            // PgBouncer closes connections that begin with this setting, and no number is read as text here.
            serving = serving.extra_float_digits(None);
        } else {
            // A pooler hands connections on and refuses such settings; there each read opens with them (`BEGIN_READ`).
            serving = serving.options([
                ("statement_timeout", STATEMENT_TIMEOUT),
                // A plan that is kept was made for the tables as they were. Made while they were empty, it reads them
                // from end to end when they have grown; to plan each time costs a fraction of a millisecond.
                ("plan_cache_mode", "force_custom_plan"),
                // No statement runs long enough to be worth a compiler.
                ("jit", "off"),
            ]);
        }
        Ok(Self {
            pooled: serving,
            direct: options(direct)?,
            behind_pooler,
        })
    }
}

/// The record: one PostgreSQL database, shared with any number of identical processes.
pub struct Store {
    writes: PgPool,
    reads: PgPool,
    direct: PgConnectOptions,
    lanes: Lanes,
    /// Statements are named and kept, unless a pooler could hand a later one to another server connection.
    named: bool,
    view: ArcSwap<View>,
    /// Seals and opens signing secrets.
    sealer: Sealer,
    /// This process in `delivery_counts`; a name, not an identity that anything depends on.
    counts_owner: String,
}

impl Store {
    /// Connects, and loads the view that publishing depends on. The schema must be migrated.
    pub async fn connect(addresses: Addresses) -> Result<Self, StoreError> {
        let pool = |connections| {
            PgPoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(ACQUIRE_TIMEOUT)
                // A ping before each use would be a round trip more; one that rested may have lost its server meanwhile.
                .test_before_acquire(false)
                .before_acquire(|connection, meta| {
                    Box::pin(async move {
                        if meta.idle_for > RESTED {
                            connection.ping().await?;
                        }
                        Ok(true)
                    })
                })
                // Work that was given up may leave a connection waiting for an answer that never comes.
                .after_release(|connection, _| {
                    Box::pin(async move {
                        match tokio::time::timeout(RELEASE_MAX, leave_transaction(connection)).await {
                            Ok(left) => left.map(|()| true),
                            Err(_elapsed) => Err(sqlx::Error::PoolTimedOut),
                        }
                    })
                })
                .connect_lazy_with(addresses.pooled.clone())
        };
        let store = Self {
            lanes: Lanes::new(addresses.pooled.clone()),
            writes: pool(WRITE_CONNECTIONS_MAX),
            reads: pool(READ_CONNECTIONS_MAX),
            direct: addresses.direct,
            named: !addresses.behind_pooler,
            view: ArcSwap::from_pointee(View::default()),
            sealer: Sealer::default(),
            counts_owner: hex::encode(rand::random::<[u8; 8]>()),
        };
        store.reload_view().await?;
        Ok(store)
    }

    /// The same store with keys for signing secrets; without any they are stored as they are given.
    pub fn sealing_with(self, sealer: Sealer) -> Self {
        Self { sealer, ..self }
    }

    /// A round trip to the database.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let mut reader = self.reader().await?;
        sqlx::query!(r#"SELECT 1 AS "one!""#)
            .fetch_one(self.run(&mut reader))
            .await?;
        Ok(())
    }

    /// Ends every connection; work in flight on them fails.
    pub async fn close(&self) {
        let closing = async { tokio::join!(self.writes.close(), self.reads.close(), self.lanes.close()) };
        // A server that no longer answers is left to the end of the process.
        let _ = tokio::time::timeout(CLOSE_MAX, closing).await;
    }

    async fn begin(&self) -> Result<Transaction<'static, Postgres>, StoreError> {
        Ok(self.writes.begin_with(BEGIN).await?)
    }

    async fn begin_prune(&self) -> Result<Transaction<'static, Postgres>, StoreError> {
        Ok(self.writes.begin_with(BEGIN_PRUNE).await?)
    }

    async fn begin_group(&self) -> Result<Transaction<'static, Postgres>, StoreError> {
        Ok(self.writes.begin_with(BEGIN_GROUP).await?)
    }

    async fn begin_relaxed(&self) -> Result<Transaction<'static, Postgres>, StoreError> {
        Ok(self.writes.begin_with(BEGIN_RELAXED).await?)
    }

    /// A connection for what a caller reads.
    async fn reader(&self) -> Result<Reader, StoreError> {
        self.reader_of(&self.reads).await
    }

    /// A connection for what the service itself reads to go on.
    async fn own_reader(&self) -> Result<Reader, StoreError> {
        self.reader_of(&self.writes).await
    }

    /// Behind a pooler each read stands in a transaction, so that its unnamed statement is prepared and run on one
    /// server connection.
    async fn reader_of(&self, pool: &PgPool) -> Result<Reader, StoreError> {
        if self.named {
            Ok(Reader::Plain(pool.acquire().await?))
        } else {
            Ok(Reader::Transaction(pool.begin_with(BEGIN_READ).await?))
        }
    }

    /// Runs statements on a connection: named and kept where the connection is ours alone, unnamed behind a pooler.
    fn run<'c>(&self, connection: &'c mut PgConnection) -> Run<'c> {
        Run {
            connection,
            named: self.named,
        }
    }

    /// A connection of its own, past any pooler.
    async fn direct(&self) -> Result<PgConnection, StoreError> {
        let connecting = PgConnection::connect_with(&self.direct);
        match tokio::time::timeout(ACQUIRE_TIMEOUT, connecting).await {
            Ok(connected) => Ok(connected?),
            Err(_elapsed) => Err(StoreError::Unavailable(sqlx::Error::PoolTimedOut)),
        }
    }
}

enum Reader {
    Plain(sqlx::pool::PoolConnection<Postgres>),
    Transaction(Transaction<'static, Postgres>),
}

impl Deref for Reader {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Plain(connection) => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

impl DerefMut for Reader {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Plain(connection) => connection,
            Self::Transaction(transaction) => transaction,
        }
    }
}

/// Shared ownership is how every room holds the store.
pub type SharedStore = Arc<Store>;
