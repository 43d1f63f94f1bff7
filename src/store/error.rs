//! What the store can fail with. Database errors are told apart by SQLSTATE and constraint, never by their text.

use crate::domain::app::QuotaFault;
use crate::domain::ids::SubscriptionId;

/// A failure of the record; each variant is something a caller answers differently.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database cannot be reached or refuses work for now; trying again later can succeed.
    #[error("the database is not available")]
    Unavailable(#[source] sqlx::Error),
    /// The consumer already holds a subscription for this pattern and endpoint.
    #[error("subscription {0} exists for this pattern and endpoint")]
    SubscriptionExists(SubscriptionId),
    /// The consumer holds as many subscriptions as it may.
    #[error("the consumer already holds {0} subscriptions")]
    SubscriptionLimit(i64),
    /// A project has no room for it.
    #[error(transparent)]
    Quota(#[from] QuotaFault),
    /// The app was revoked after its token was issued.
    #[error("the app was revoked after its token was issued")]
    AppRevoked,
    /// The app's grant to subscribe was withdrawn after its token was issued.
    #[error("the grant to subscribe was withdrawn after the token was issued")]
    SubscribingWithdrawn,
    /// The database belongs to the service that this one replaces.
    #[error(
        "the database was made by the service before this one, and nothing in it was changed; `openvibe-events import` \
         moves such a database and is not part of this version yet"
    )]
    Foreign,
    /// The schema is older than this program.
    #[error("the database is not up to date; run `openvibe-events migrate`")]
    NotMigrated,
    /// The schema could not be brought up to date.
    #[error("the schema could not be migrated")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// A stored row is not what this program writes.
    #[error("a stored {what} cannot be read")]
    Corrupt {
        /// The kind of value.
        what: &'static str,
    },
    /// Anything else.
    #[error("the database refused a statement")]
    Database(#[source] sqlx::Error),
}

impl StoreError {
    /// Whether the database as a whole is away or refusing, so that no other statement would fare better. A statement
    /// that took too long or met a deadlock says nothing about the next one.
    pub fn is_outage(&self) -> bool {
        match self {
            Self::Unavailable(sqlx::Error::Database(error)) => !error
                .code()
                .is_some_and(|code| ["57014", "40001", "40P01"].contains(&code.as_ref())),
            Self::Unavailable(_) => true,
            _ => false,
        }
    }

    /// A change that met others at every try; a later one can succeed.
    pub(super) fn marks_keep_moving() -> Self {
        Self::Unavailable(sqlx::Error::Protocol("the marks of the keys keep moving".to_owned()))
    }

    /// Whether a row that somebody else holds was waited for in vain.
    pub fn is_lock_wait(&self) -> bool {
        matches!(self, Self::Unavailable(sqlx::Error::Database(error)) if error.code().as_deref() == Some("55P03"))
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        if is_transient(&error) {
            Self::Unavailable(error)
        } else {
            Self::Database(error)
        }
    }
}

/// Whether the same statement could succeed a moment later: connection trouble, time-outs, lack of resources, a
/// deadlock, or a server that is starting or stopping.
fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::BeginFailed
        | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(database) => database.code().is_some_and(|code| {
            // 08 connection, 40 rollback, 53 resources, 55P03 lock time-out, 57 operator intervention (57014 is the
            // statement time-out), 25P03 idle in transaction, 25006 read-only (a server that was demoted).
            ["08", "40", "53", "57"].iter().any(|class| code.starts_with(class))
                || ["55P03", "25P03", "25006", "26000"].contains(&code.as_ref())
        }),
        _ => false,
    }
}
