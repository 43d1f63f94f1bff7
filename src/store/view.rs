//! What publishing and claiming depend on, held in memory and replaced whole when its version moves.
//!
//! The version stands in the counter row. Whoever changes a subscription or the epoch takes that row first, so the
//! statement that takes a position also tells whether this copy is current.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use sqlx::PgConnection;

use crate::domain::ids::SubscriptionId;
use crate::domain::policy::Policies;
use crate::domain::seal::sealed_by;
use crate::domain::topic::TopicPattern;

use super::{Store, StoreError};

/// One enabled subscription, as fan-out and the dispatcher need it.
#[derive(Clone)]
pub struct Subscriber {
    /// Its id.
    pub id: SubscriptionId,
    /// Who receives; shares of the delivery slots are counted by it.
    pub consumer: Arc<str>,
    /// Where to; what is known of an endpoint is kept by it. It may hold secrets.
    pub endpoint: Arc<str>,
    pattern: TopicPattern,
    /// It belongs to a developer app's project.
    of_app: bool,
    /// The key that its signing secret is sealed with.
    sealed_by: Option<Arc<str>>,
}

impl fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} for {}", self.id, self.consumer, self.pattern.as_str())
    }
}

/// Every enabled subscription at one version of the store.
#[derive(Debug, Default)]
pub struct View {
    /// The version this was read at; 0 before the first load.
    pub version: i64,
    /// The history that positions belong to now.
    pub epoch: i64,
    /// How event types are carried.
    pub policies: Policies,
    /// The carriers that operators switched off.
    pub switched_off: BTreeSet<String>,
    subscribers: Vec<Subscriber>,
    ids: HashSet<SubscriptionId>,
    /// Positions in `subscribers` by the literal first segment of the pattern; the empty text for a leading `*`.
    by_first_segment: HashMap<Box<str>, Vec<usize>>,
}

impl View {
    fn new(
        version: i64,
        epoch: i64,
        policies: Policies,
        switched_off: BTreeSet<String>,
        subscribers: Vec<Subscriber>,
    ) -> Self {
        let mut by_first_segment: HashMap<Box<str>, Vec<usize>> = HashMap::new();
        // What apps may receive is not decided by a pattern alone.
        let services = subscribers.iter().enumerate().filter(|(_, one)| !one.of_app);
        for (index, subscriber) in services {
            let first = match first_segment(subscriber.pattern.as_str()) {
                "*" => "",
                literal => literal,
            };
            by_first_segment.entry(first.into()).or_default().push(index);
        }
        Self {
            version,
            epoch,
            policies,
            switched_off,
            ids: subscribers.iter().map(|subscriber| subscriber.id.clone()).collect(),
            subscribers,
            by_first_segment,
        }
    }

    /// The enabled subscriptions, oldest first.
    pub fn subscribers(&self) -> &[Subscriber] {
        &self.subscribers
    }

    /// Whether this is an enabled subscription.
    pub fn knows(&self, id: &SubscriptionId) -> bool {
        self.ids.contains(id)
    }

    /// The subscriptions that an event of this type is delivered to, as places in [`View::subscribers`].
    pub fn matching(&self, event_type: &str) -> impl Iterator<Item = usize> {
        [first_segment(event_type), ""]
            .into_iter()
            .filter_map(|first| self.by_first_segment.get(first))
            .flatten()
            .copied()
            .filter(move |&index| self.subscribers[index].pattern.matches(event_type))
    }
}

fn first_segment(dotted: &str) -> &str {
    dotted.split('.').next().unwrap_or(dotted)
}

impl Store {
    /// The view in force here; it may be older than the database's until something compares their versions.
    pub fn view(&self) -> Arc<View> {
        self.view.load_full()
    }

    /// Whether this process has the key that the subscription's signing secret is sealed with.
    pub fn has_key_of(&self, subscriber: &Subscriber) -> bool {
        self.sealer.has_key(subscriber.sealed_by.as_deref())
    }

    /// Replaces the view if the database is at another version. That can be a lower one: a fail-over may have lost the
    /// newest changes.
    pub async fn refresh_view(&self, version: i64) -> Result<(), StoreError> {
        if self.view.load().version != version {
            self.reload_view().await?;
        }
        Ok(())
    }

    /// The version of the database now, for processes that nothing else tells it.
    pub async fn version(&self) -> Result<i64, StoreError> {
        let mut reader = self.own_reader().await?;
        Ok(
            sqlx::query_scalar!("SELECT version FROM store_counter WHERE name = 'events'")
                .fetch_one(self.run(&mut reader))
                .await?,
        )
    }

    pub(super) async fn reload_view(&self) -> Result<(), StoreError> {
        let mut reader = self.own_reader().await?;
        self.reload_view_on(&mut reader).await?;
        Ok(())
    }

    /// Reads the view on a connection. Under the counter row nothing of it can change meanwhile; without it, policies may
    /// be newer than the version says, and the next comparison reads them again. A caller that decides by what was read
    /// uses what this returns: a slower reader may put an older view in its place at any time.
    pub(super) async fn reload_view_on(&self, connection: &mut PgConnection) -> Result<Arc<View>, StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT c.version AS "version!", e.value AS "epoch!", s.id AS "id?", s.consumer AS "consumer?",
                   s.topic_pattern AS "topic_pattern?", s.endpoint AS "endpoint?",
                   left(s.secret, 32) AS sealed, s.project_id IS NOT NULL AS "of_app!"
            FROM store_counter c
            CROSS JOIN store_epoch e
            LEFT JOIN subscriptions s ON s.enabled = 1
            WHERE c.name = 'events' AND e.name = 'events'
            ORDER BY s.created_at, s.id
            "#
        )
        .fetch_all(self.run(connection))
        .await?;
        let policies = self.policy_rules(connection).await?;
        let switched_off = self.switched_off(connection).await?;
        let first = rows.first().ok_or(StoreError::Corrupt { what: "store version" })?;
        let (version, epoch) = (first.version, first.epoch);
        let subscribers = rows
            .into_iter()
            .filter_map(|row| Some((row.id?, row.consumer?, row.topic_pattern?, row.endpoint?, row.of_app, row.sealed)))
            .filter_map(|(id, consumer, pattern, endpoint, of_app, sealed)| {
                let parsed = SubscriptionId::parse(&id).zip(TopicPattern::parse(&pattern));
                if parsed.is_none() {
                    tracing::warn!(subscription_id = %id, "subscription {id} has an unreadable id or pattern and is left out");
                }
                let (id, pattern) = parsed?;
                let sealed_by = sealed.as_deref().and_then(sealed_by).map(Arc::from);
                Some(Subscriber { id, consumer: consumer.into(), endpoint: endpoint.into(), pattern, of_app, sealed_by })
            })
            .collect();
        let read = Arc::new(View::new(version, epoch, policies, switched_off, subscribers));
        // Two readers may finish in either order; whoever compares next finds the older one and reads again.
        self.view.store(Arc::clone(&read));
        Ok(read)
    }
}
