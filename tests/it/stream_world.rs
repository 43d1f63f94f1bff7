//! Two processes behind steady addresses, and eight publishers that write through both of them, come what may.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use serde_json::json;

use crate::support::{
    client::Client,
    database::Database,
    dice::Dice,
    envelopes::{Envelope, batch, envelope, id},
    network::{Network, TokenSpec},
    service::{Service, free_port},
    sse::ask,
    wait::eventually,
};

const PUBLISHERS: usize = 8;
pub(crate) const TYPES: [&str; 3] = ["live.whole.a", "live.whole.b", "live.whole.c.d"];
pub(crate) const TOPICS: &str = "topics=live.whole.*";
/// How long what was published may take to arrive after the last process came back.
pub(crate) const ARRIVES: Duration = Duration::from_secs(30);

/// What is published.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kinds {
    /// Events of every visibility.
    All,
    /// What anybody may see.
    Public,
}

/// Two processes on one database, each of which keeps its address when it is replaced.
pub(crate) struct Pair {
    pub(crate) database: Database,
    network: Network,
    ports: [String; 2],
    env: Vec<(&'static str, &'static str)>,
    pub(crate) clients: [Client; 2],
    services: Mutex<Vec<Option<Service>>>,
    person: String,
    kinds: Kinds,
    published: AtomicUsize,
}

impl Pair {
    pub(crate) async fn start(kinds: Kinds, env: &[(&'static str, &'static str)]) -> Arc<Self> {
        let (database, network) = tokio::join!(Database::create(), Network::start());
        let ports = [free_port().to_string(), free_port().to_string()];
        let pair = Arc::new(Self {
            database,
            network,
            clients: ports
                .each_ref()
                .map(|port| Client::new(&format!("http://127.0.0.1:{port}"))),
            ports,
            env: env.to_vec(),
            services: Mutex::new(vec![None, None]),
            person: id("usr"),
            kinds,
            published: AtomicUsize::new(0),
        });
        tokio::join!(pair.run(0), pair.run(1));
        pair
    }

    pub(crate) async fn run(&self, n: usize) {
        let mut env = vec![("PORT", self.ports[n].as_str()), ("EVENTS_WORKER", "off")];
        env.extend(&self.env);
        let service = Service::start(&self.database, &self.network, &env).await;
        self.services.lock()[n] = Some(service);
    }

    pub(crate) fn take(&self, n: usize) -> Service {
        self.services.lock()[n].take().expect("it runs")
    }

    /// `host:port` of each.
    pub(crate) fn addresses(&self) -> [String; 2] {
        self.ports.each_ref().map(|port| format!("127.0.0.1:{port}"))
    }

    /// Publishes so many events: to both processes, in batches of any size, each publisher one in a pace. What gets no
    /// answer is sent again, to the other process.
    pub(crate) async fn publish(&self, events: usize, pace: Duration) {
        let each = events / PUBLISHERS;
        join_all((0..PUBLISHERS).map(|publisher| self.publish_some(publisher, each, pace))).await;
    }

    async fn publish_some(&self, publisher: usize, count: usize, pace: Duration) {
        let mut dice = Dice::of(publisher as u64 + 1);
        let mut left = count;
        let mut turn = publisher;
        let mut tick = tokio::time::interval(pace.max(Duration::from_millis(1)));
        while left > 0 {
            tick.tick().await;
            let some: Vec<_> = (0..left.min(1 + dice.below(6)))
                .map(|_| self.event(&mut dice))
                .collect();
            eventually("a publish is acknowledged", ARRIVES, async || {
                turn += 1;
                let answer = self.clients[turn % 2].try_publish_as("live", &batch(&some)).await;
                let answer = answer.map_err(|error| format!("{error:?}"))?;
                match answer.status {
                    200 | 201 => Ok(()),
                    _ => Err(answer.text),
                }
            })
            .await;
            left -= some.len();
            self.published.fetch_add(some.len(), Relaxed);
        }
    }

    fn event(&self, dice: &mut Dice) -> Envelope {
        let event = envelope("live").event_type(TYPES[dice.below(3)]);
        if self.kinds == Kinds::Public {
            return event.visibility("public");
        }
        match dice.below(4) {
            0 => event.visibility("internal"),
            1 => event.visibility("subject").subject("user", &self.person),
            2 => event
                .visibility("public")
                .payload(json!({ "text": "x".repeat(dice.below(4000)) })),
            _ => event.visibility("public"),
        }
    }

    /// Waits until so many were published.
    pub(crate) async fn progress(&self, count: usize) {
        eventually("publishing goes on", ARRIVES, async || {
            let published = self.published.load(Relaxed);
            (published >= count).then_some(()).ok_or(published)
        })
        .await;
    }

    /// What asks for a stream of a viewer, from one process after the other.
    pub(crate) fn asking(
        self: &Arc<Self>,
        token: Option<String>,
    ) -> impl Fn(usize) -> reqwest::RequestBuilder + Send + Sync + 'static {
        let clients = self.clients.clone();
        move |n| ask(&clients[n % 2], TOPICS, token.as_deref())
    }

    pub(crate) fn service_token(&self) -> String {
        TokenSpec::service("reader").sign()
    }

    pub(crate) fn person_token(&self) -> String {
        TokenSpec::person(&self.person).sign()
    }

    /// What a viewer may see, as rows.
    pub(crate) fn own(&self) -> String {
        let person = &self.person;
        format!("visibility = 'public' OR (visibility = 'subject' AND subject_id = '{person}')")
    }
}
