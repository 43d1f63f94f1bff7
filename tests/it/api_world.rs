//! What the tests of the HTTP surface share: a running service, and short words for asking and judging.
//!
//! Starting a service takes longer than most of these tests, so those that do not mind neighbours use one world of two
//! processes together. They tell their rows apart by fresh event types and consumers.

use std::sync::{Arc, OnceLock, Weak};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use openvibe_events::http::api::ROUTES;
use reqwest::{Method, header::CONTENT_TYPE};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool, postgres::PgPoolOptions};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    runtime::Runtime,
    sync::Mutex,
};

use crate::support::{
    client::{Client, Response, assert_problem},
    contracts::assert_valid,
    database::Database,
    network::{ADMIN_CAP, Network, TokenSpec},
    service::{Service, start_many},
    wait::{SOON, within},
};

/// Subscriptions a consumer may hold in the shared world.
pub(crate) const SUBSCRIPTIONS_MAX: usize = 12;

/// What stands in for path parameters in the table of routes.
const PARAMETERS: [&str; 4] = ["{id}", "{pattern}", "{event_id}", "{subscription_id}"];

/// Services on a database. They send nothing, so that delivery rows stay as a test put them.
#[derive(Debug)]
struct World {
    services: Vec<Service>,
    _network: Network,
    database: Database,
}

impl World {
    async fn start(processes: usize, env: &[(&str, &str)]) -> Self {
        let (database, network) = tokio::join!(Database::create(), Network::start());
        let all: Vec<_> = [("EVENTS_WORKER", "off")]
            .into_iter()
            .chain(env.iter().copied())
            .collect();
        let services = start_many(&database, &network, processes, &all).await;
        Self {
            services,
            _network: network,
            database,
        }
    }
}

/// A world as one test sees it: its own clients and connections.
#[derive(Debug)]
pub(crate) struct Site {
    world: Arc<World>,
    clients: Vec<Client>,
    /// For looking at and preparing rows.
    pub(crate) pool: PgPool,
}

impl Site {
    /// The world that tests share. It ends with the last test that holds it.
    pub(crate) async fn shared() -> Self {
        static RUNTIME: OnceLock<Runtime> = OnceLock::new();
        static WORLD: Mutex<Weak<World>> = Mutex::const_new(Weak::new());
        let mut slot = WORLD.lock().await;
        if let Some(world) = slot.upgrade() {
            return Self::of(world);
        }
        // Its tasks must outlive the runtime of the test that happens to come first.
        let runtime = RUNTIME.get_or_init(|| Runtime::new().expect("a runtime for the shared world"));
        let started = tokio::task::spawn_blocking(|| {
            let limit = SUBSCRIPTIONS_MAX.to_string();
            runtime.block_on(World::start(2, &[("EVENTS_MAX_SUBSCRIPTIONS", limit.as_str())]))
        });
        let world = Arc::new(started.await.expect("the shared world starts"));
        *slot = Arc::downgrade(&world);
        Self::of(world)
    }

    /// A world of the test's own, for what a neighbour would disturb.
    pub(crate) async fn own(processes: usize, env: &[(&str, &str)]) -> Self {
        Self::of(Arc::new(World::start(processes, env).await))
    }

    fn of(world: Arc<World>) -> Self {
        let clients = world
            .services
            .iter()
            .map(|service| Client::new(service.base()))
            .collect();
        let pool = PgPoolOptions::new()
            .max_connections(4)
            .connect_lazy(world.database.url());
        Self {
            world,
            clients,
            pool: pool.expect("a database URL made from a good server URL"),
        }
    }

    /// A client of the first process.
    pub(crate) fn one(&self) -> &Client {
        &self.clients[0]
    }

    /// A client of the second process.
    pub(crate) fn two(&self) -> &Client {
        &self.clients[1]
    }

    /// The first process.
    pub(crate) fn service(&self) -> &Service {
        &self.world.services[0]
    }

    /// One number out of the database.
    pub(crate) async fn number(&self, sql: &str, about: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(about)
            .fetch_one(&self.pool)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// Runs statements.
    pub(crate) async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&self.pool)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    /// How often an event id stands in the log and among the receipts.
    pub(crate) async fn traces_of(&self, event_id: &str) -> i64 {
        let sql = "SELECT (SELECT count(*) FROM events WHERE id = $1) \
                   + (SELECT count(*) FROM idempotency_receipts WHERE event_id = $1)";
        self.number(sql, event_id).await
    }

    /// How many deliveries a subscription has.
    pub(crate) async fn deliveries_of(&self, subscription_id: &str) -> i64 {
        self.number(
            "SELECT count(*) FROM deliveries WHERE subscription_id = $1",
            subscription_id,
        )
        .await
    }

    /// Makes a subscription of `consumer` and yields the answer.
    pub(crate) async fn subscribe(&self, consumer: &str, pattern: &str, path: &str) -> Value {
        let body = json!({ "topic_pattern": pattern, "endpoint": endpoint(path) });
        let token = self.one().service_token(consumer);
        let answer = self.one().post("/api/v1/subscriptions", Some(&token), &body).await;
        let view = answer.expect(201);
        assert_valid("events.subscription-result@1", &view);
        view
    }
}

/// An address that subscriptions may name; nothing listens there.
pub(crate) fn endpoint(path: &str) -> String {
    format!("http://127.0.0.1:9/{path}")
}

/// The name of a service that no other test uses. It may read and subscribe; it owns no event types.
pub(crate) fn consumer() -> String {
    format!("c{}", ulid::Ulid::generate().to_string().to_lowercase())
}

/// The cursor of a position, as the contract spells it.
pub(crate) fn cursor(epoch: i64, position: i64) -> String {
    format!("c1.{epoch}.{}", URL_SAFE_NO_PAD.encode(position.to_string()))
}

/// An operator's token.
pub(crate) fn operator() -> String {
    TokenSpec::service("ops").caps(&[ADMIN_CAP]).sign()
}

/// A member that is text.
#[track_caller]
pub(crate) fn text<'a>(value: &'a Value, member: &str) -> &'a str {
    value[member]
        .as_str()
        .unwrap_or_else(|| panic!("{member} is text in {value}"))
}

/// Judges a refusal by its contract and yields its document.
#[track_caller]
pub(crate) fn refused(response: &Response, status: u16, code: &str) -> Value {
    let document = assert_problem(response, status, code);
    assert_valid("errors.problem@1", &document);
    document
}

/// Sends a body as it is, as JSON.
pub(crate) async fn send(client: &Client, method: &str, path: &str, token: Option<&str>, body: String) -> Response {
    let request = client.request(method_of(method), path, token);
    client
        .send(request.header(CONTENT_TYPE, "application/json").body(body))
        .await
}

/// A method by its name.
pub(crate) fn method_of(name: &str) -> Method {
    name.parse().expect("a method's name")
}

/// Every route of the API with `id` in place of its parameter, whatever that is called.
pub(crate) fn routes(id: &str) -> Vec<(&'static str, String)> {
    ROUTES
        .iter()
        .map(|route| {
            let path = PARAMETERS
                .iter()
                .fold(route.path.to_owned(), |path, parameter| path.replace(parameter, id));
            (route.method, path)
        })
        .collect()
}

/// Writes bytes to the service and reads until it closes the connection.
pub(crate) async fn raw(service: &Service, bytes: &[u8]) -> String {
    let address = service.base().trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.expect("a connection");
    stream.write_all(bytes).await.expect("the request is sent");
    let mut answer = Vec::new();
    within("the connection is closed", SOON, stream.read_to_end(&mut answer))
        .await
        .expect("the answer is read");
    String::from_utf8(answer).expect("an answer in UTF-8")
}

/// `length` times the same ASCII byte in gzip: one literal, then copies of 258 (and once of 3) from one byte back.
pub(crate) fn packed_run(byte: u8, length: usize) -> Vec<u8> {
    assert!(byte < 144 && length > 4);
    let mut bits = vec![true, true, false]; // the last block, with the fixed codes
    let mut code = |value: u32, count: u32| bits.extend((0..count).rev().map(|at| value >> at & 1 == 1));
    code(u32::from(byte) + 0x30, 8);
    let mut left = length - 1;
    while left >= 258 + 3 || left == 258 {
        code(0b1100_0101, 8);
        code(0, 5);
        left -= 258;
    }
    while left > 0 {
        code(u32::from(byte) + 0x30, 8);
        left -= 1;
    }
    code(0, 7);
    let deflated = bits.chunks(8).map(|byte| {
        byte.iter()
            .enumerate()
            .fold(0_u8, |value, (at, &bit)| value | u8::from(bit) << at)
    });
    gzip(deflated.collect(), &vec![byte; length])
}

/// Text in gzip, not made any shorter.
pub(crate) fn packed(text: &str) -> Vec<u8> {
    let mut stored = Vec::new();
    let chunks: Vec<&[u8]> = text.as_bytes().chunks(65_535).collect();
    for (at, chunk) in chunks.iter().enumerate() {
        let length = u16::try_from(chunk.len()).expect("a chunk of at most 65535 bytes");
        stored.push(u8::from(at + 1 == chunks.len()));
        stored.extend(length.to_le_bytes());
        stored.extend((!length).to_le_bytes());
        stored.extend(*chunk);
    }
    gzip(stored, text.as_bytes())
}

fn gzip(deflated: Vec<u8>, original: &[u8]) -> Vec<u8> {
    let checksum = !original.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    });
    let mut out = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];
    out.extend(deflated);
    out.extend(checksum.to_le_bytes());
    out.extend(u32::try_from(original.len()).expect("a small body").to_le_bytes());
    out
}
