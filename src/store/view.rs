//! What publishing and claiming depend on, held in memory and replaced whole when its version moves.
//!
//! The version stands in the counter row. Whoever changes a subscription or the epoch takes that row first, so the
//! statement that takes a position also tells whether this copy is current.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use sqlx::PgConnection;

use crate::domain::app::{self, Env, Project, Scope, Withdrawn};
use crate::domain::envelope::Visibility;
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
    /// Whose events an app receives, besides public ones; `None` for a service.
    project: Option<Project>,
    /// The key that its signing secret is sealed with.
    sealed_by: Option<Arc<str>>,
}

impl fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} for {}", self.id, self.consumer, self.pattern.as_str())
    }
}

/// Every enabled subscription at one version of the store, and what else publishing depends on.
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
    /// What the network withdrew, by the principal of the app.
    withdrawn: HashMap<Box<str>, Withdrawn>,
    subscribers: Vec<Subscriber>,
    ids: HashSet<SubscriptionId>,
    /// Positions in `subscribers` by the literal first segment of the pattern; the empty text for a leading `*`.
    by_first_segment: HashMap<Box<str>, Vec<usize>>,
    /// The apps' subscriptions to events of their own projects, likewise.
    by_project: HashMap<Project, Vec<usize>>,
}

impl View {
    fn new(
        version: i64,
        epoch: i64,
        policies: Policies,
        switched_off: BTreeSet<String>,
        withdrawn: HashMap<Box<str>, Withdrawn>,
        subscribers: Vec<Subscriber>,
    ) -> Self {
        let mut by_first_segment: HashMap<Box<str>, Vec<usize>> = HashMap::new();
        let mut by_project: HashMap<Project, Vec<usize>> = HashMap::new();
        for (index, subscriber) in subscribers.iter().enumerate() {
            if let Some(project) = &subscriber.project
                && app::is_of_apps(&subscriber.pattern)
            {
                by_project.entry(project.clone()).or_default().push(index);
                continue;
            }
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
            withdrawn,
            ids: subscribers.iter().map(|subscriber| subscriber.id.clone()).collect(),
            subscribers,
            by_first_segment,
            by_project,
        }
    }

    /// What the network withdrew from an app, by its principal.
    pub fn withdrawn(&self, consumer: &str) -> Withdrawn {
        self.withdrawn.get(consumer).copied().unwrap_or_default()
    }

    /// The enabled subscriptions, oldest first.
    pub fn subscribers(&self) -> &[Subscriber] {
        &self.subscribers
    }

    /// Whether this is an enabled subscription.
    pub fn knows(&self, id: &SubscriptionId) -> bool {
        self.ids.contains(id)
    }

    /// The subscriptions that an event is delivered to, as places in [`View::subscribers`]. `project` is whose it is, where an
    /// app published it.
    ///
    /// A first-party event goes to services by their patterns, and to apps where it is public. An app's event goes to apps of
    /// its own project and environment and, from production, to services that ask for the namespace of apps.
    pub fn matching(
        &self,
        event_type: &str,
        visibility: Visibility,
        project: Option<&Project>,
    ) -> impl Iterator<Item = usize> {
        let own = project.and_then(|project| self.by_project.get(project));
        let first = match project {
            Some(project) if project.env == Env::Sandbox => None,
            _ => self.by_first_segment.get(first_segment(event_type)),
        };
        let any = match project {
            Some(_) => None,
            None => self.by_first_segment.get(""),
        };
        let is_public = visibility == Visibility::Public;
        let is_of_app = project.is_some();
        let shared = first.into_iter().chain(any).flatten().copied().filter(move |&index| {
            // Apps among these ask for first-party events.
            self.subscribers[index].project.is_none() || (is_public && !is_of_app)
        });
        let own = own.into_iter().flatten().copied();
        own.chain(shared)
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

    /// Reads the view on a connection and shows it to everybody. Under the counter row nothing of it can change meanwhile;
    /// without it, policies may be newer than the version says, and the next comparison reads them again. A caller that decides
    /// by what was read uses what this returns: a slower reader may put an older view in its place at any time.
    pub(super) async fn reload_view_on(&self, connection: &mut PgConnection) -> Result<Arc<View>, StoreError> {
        let read = Arc::new(self.read_view_on(connection).await?);
        self.show_view(Arc::clone(&read));
        Ok(read)
    }

    /// Puts a view in force here. Two readers may finish in either order; whoever compares next finds the older one and reads
    /// again.
    pub(super) fn show_view(&self, view: Arc<View>) {
        self.view.store(view);
    }

    /// What was withdrawn from an app until now, by its principal.
    pub async fn withdrawn(&self, consumer: &str) -> Result<Withdrawn, StoreError> {
        let mut reader = self.reader().await?;
        self.withdrawn_on(&mut reader, consumer).await
    }

    pub(super) async fn withdrawn_on(
        &self,
        connection: &mut PgConnection,
        consumer: &str,
    ) -> Result<Withdrawn, StoreError> {
        let rows = sqlx::query!(
            "SELECT scope, revoked_at FROM app_revocations WHERE consumer = $1",
            consumer
        )
        .fetch_all(self.run(connection))
        .await?;
        let mut withdrawn = Withdrawn::default();
        for row in rows {
            add(&mut withdrawn, &row.scope, row.revoked_at);
        }
        Ok(withdrawn)
    }

    /// Reads the view on a connection, which may have changed it in a transaction that is not committed yet.
    pub(super) async fn read_view_on(&self, connection: &mut PgConnection) -> Result<View, StoreError> {
        let rows = sqlx::query!(
            r#"
            SELECT c.version AS "version!", e.value AS "epoch!", s.id AS "id?", s.consumer AS "consumer?",
                   s.topic_pattern AS "topic_pattern?", s.endpoint AS "endpoint?", s.project_id, s.env AS "env?",
                   left(s.secret, 32) AS sealed
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
        let mut withdrawn: HashMap<Box<str>, Withdrawn> = HashMap::new();
        for row in sqlx::query!("SELECT consumer, scope, revoked_at FROM app_revocations")
            .fetch_all(self.run(connection))
            .await?
        {
            add(
                withdrawn.entry(row.consumer.into()).or_default(),
                &row.scope,
                row.revoked_at,
            );
        }
        let first = rows.first().ok_or(StoreError::Corrupt { what: "store version" })?;
        let (version, epoch) = (first.version, first.epoch);
        let subscribers = rows
            .into_iter()
            .filter_map(|row| {
                let project = row.project_id.map(|id| (id, row.env));
                Some((row.id?, row.consumer?, row.topic_pattern?, row.endpoint?, project, row.sealed))
            })
            .filter_map(|(id, consumer, pattern, endpoint, project, sealed)| {
                let project = match project {
                    None => Some(None),
                    Some((id, env)) => env.as_deref().and_then(Env::named).map(|env| Some(Project { id: id.into(), env })),
                };
                let parsed = SubscriptionId::parse(&id).zip(TopicPattern::parse(&pattern)).zip(project);
                if parsed.is_none() {
                    tracing::warn!(subscription_id = %id, "subscription {id} has an unreadable id, pattern or env and is left out");
                }
                let ((id, pattern), project) = parsed?;
                let sealed_by = sealed.as_deref().and_then(sealed_by).map(Arc::from);
                Some(Subscriber { id, consumer: consumer.into(), endpoint: endpoint.into(), pattern, project, sealed_by })
            })
            .collect();
        Ok(View::new(
            version,
            epoch,
            policies,
            switched_off,
            withdrawn,
            subscribers,
        ))
    }
}

fn add(withdrawn: &mut Withdrawn, scope: &str, at: i64) {
    if scope == Scope::App.as_str() {
        withdrawn.app_at = Some(at);
    } else if scope == Scope::Subscribe.as_str() {
        withdrawn.subscribe_at = Some(at);
    }
}
