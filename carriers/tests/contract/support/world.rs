//! Each registered carrier with a real broker behind a line that can be cut.

use std::time::Duration;

use carriers::{Class, Descriptor, Health, descriptor};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use url::Url;

use super::{
    broker::{Broker, PASSWORD, required},
    process::{Process, Variables, new_instance},
    proxy::Proxy,
    sqs::Queue,
};

/// A carrier, configured for a broker that this test alone uses.
pub(crate) struct World {
    pub(crate) descriptor: &'static Descriptor,
    pub(crate) variables: Variables,
    pub(crate) line: Proxy,
    pub(crate) backing: Backing,
}

/// What carries.
pub(crate) enum Backing {
    Database(Database),
    Nats(Broker),
    Valkey(Broker),
    Sqs(Queue),
}

/// A database that is dropped when it is over.
pub(crate) struct Database {
    server: String,
    name: String,
}

impl World {
    /// The world of the carrier of this id. A new carrier needs one here: the suite tells nobody that it passed unseen.
    pub(crate) async fn of(id: &str) -> Self {
        let descriptor = descriptor(id).unwrap_or_else(|| panic!("no carrier {id}"));
        let (backing, line, variables) = match id {
            "pg-v1" => {
                let database = Database::new().await;
                let mut url: Url = database.url();
                let line = Proxy::start(&format!("{}:{}", host(&url), url.port().unwrap_or(5432))).await;
                redirect(&mut url, &line);
                (
                    Backing::Database(database),
                    line,
                    vec![("DATABASE_DIRECT_URL", url.to_string())],
                )
            }
            "valkey-v1" => {
                let broker = Broker::valkey().await;
                let line = Proxy::start(&broker.address()).await;
                let url = format!("redis://events:{PASSWORD}@{}", line.address());
                (Backing::Valkey(broker), line, vec![("VALKEY_URL", url)])
            }
            "nats-v1" | "nats-js-v1" => {
                let broker = Broker::nats().await;
                let line = Proxy::start(&broker.address()).await;
                let url = format!("nats://events:{PASSWORD}@{}", line.address());
                (Backing::Nats(broker), line, vec![("NATS_URL", url)])
            }
            "cloud-v1" => {
                let queue = Queue::new(&new_instance()).await;
                let mut url = queue.url.clone();
                let line = Proxy::start(&format!("{}:{}", host(&url), url.port().unwrap_or(80))).await;
                redirect(&mut url, &line);
                let variables = vec![
                    ("CLOUD_QUEUE_URL", url.to_string()),
                    ("CLOUD_QUEUE_ACCESS_KEY", queue.access_key.clone()),
                    ("CLOUD_QUEUE_SECRET_KEY", queue.secret_key.clone()),
                    ("CLOUD_QUEUE_CONSUME", "on".to_owned()),
                ];
                (Backing::Sqs(queue), line, variables)
            }
            _ => panic!("{id} is registered and has no world in carriers/tests/support/world.rs: give it one"),
        };
        Self {
            descriptor,
            variables: variables.into_iter().collect(),
            line,
            backing,
        }
    }

    /// The ids of all registered carriers.
    pub(crate) fn ids() -> impl Iterator<Item = &'static str> {
        carriers::REGISTRY.iter().map(|descriptor| descriptor.id)
    }

    /// Two processes that reach each other.
    pub(crate) async fn pair(&self) -> (Process, Process) {
        let pair = (self.process(), self.process());
        self.connected(&pair.0).await;
        self.connected(&pair.1).await;
        pair
    }

    /// One more process.
    pub(crate) fn process(&self) -> Process {
        Process::start(self.descriptor, &self.variables)
    }

    /// Waits until the process can be reached by others.
    pub(crate) async fn connected(&self, process: &Process) {
        process.stands(Health::Up, Duration::from_secs(20)).await;
    }

    /// How the carrier stands while its broker cannot be reached.
    pub(crate) fn severed(&self) -> Health {
        match self.descriptor.id {
            // It delivers by the poll all the same.
            "pg-v1" => Health::Degraded("not listening (pg-v1)".into()),
            // It keeps no connection; its requests fail.
            "cloud-v1" => Health::Degraded("unverified (cloud-v1)".into()),
            id => Health::not_connected(id),
        }
    }

    /// A signal of one of these classes goes to one process of several.
    pub(crate) fn shares(&self, class: Class) -> bool {
        self.descriptor.id != "pg-v1" && class != Class::Topic
    }

    /// The broker, where the test has started it itself.
    pub(crate) fn broker(&self) -> Option<&Broker> {
        match &self.backing {
            Backing::Nats(broker) | Backing::Valkey(broker) => Some(broker),
            Backing::Database(_) | Backing::Sqs(_) => None,
        }
    }
}

fn host(url: &Url) -> &str {
    url.host_str().expect("a host")
}

fn redirect(url: &mut Url, line: &Proxy) {
    url.set_host(Some("127.0.0.1")).expect("a host");
    url.set_port(Some(line.address().port())).expect("a port");
}

impl Database {
    async fn new() -> Self {
        let database = Self {
            server: required("OV_TEST_PG_URL", "postgres"),
            name: new_instance().replace('-', "_"),
        };
        let mut admin = PgConnection::connect(&database.server)
            .await
            .expect("the server of OV_TEST_PG_URL answers");
        let create = format!("CREATE DATABASE {}", database.name);
        admin
            .execute(AssertSqlSafe(create))
            .await
            .expect("a database of its own");
        database
    }

    /// Its address.
    pub(crate) fn url(&self) -> Url {
        let mut url: Url = self.server.parse().expect("OV_TEST_PG_URL is an address");
        url.set_path(&self.name);
        url
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let (server, drop) = (
            self.server.clone(),
            format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name),
        );
        // In a thread of its own, since a drop cannot wait for a task of its own runtime.
        let dropped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let done = runtime.block_on(async {
                let mut admin = PgConnection::connect(&server).await?;
                admin.execute(AssertSqlSafe(drop)).await
            });
            done.map_err(std::io::Error::other)
        });
        if !matches!(dropped.join(), Ok(Ok(_))) {
            eprintln!("the database {} stays behind", self.name);
        }
    }
}
