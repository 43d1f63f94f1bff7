//! The wall around webhooks of developer apps, in a network where public and private addresses are this machine's.

use std::{fs, net::SocketAddr, process::Command, time::Duration, time::Instant};

use openvibe_events::{
    domain::ids::SubscriptionId,
    egress::{Guard, Refused, Unresolved},
};

use crate::support::{
    authority::{Authority, HttpsReceiver},
    database::Database,
    dns::{NameServer, Says, parsed},
    envelopes::{envelope, unique_segment},
    netns::{self, PRIVATE, PUBLIC, PUBLIC_TOO, PUBLIC_V6},
    network::Network,
    service::Service,
    wait::{SOON, eventually},
};

const NOT_PUBLIC: &str = "endpoint's host must have public addresses only";

/// A service that delivers, and a delivery as its row tells it.
struct World {
    database: Database,
    service: Service,
    dns: NameServer,
    authority: Authority,
    /// Where the environment says that a proxy is.
    proxy: HttpsReceiver,
    _network: Network,
}

#[derive(Debug, PartialEq, sqlx::FromRow)]
struct Row {
    status: String,
    attempt: i32,
    last_status: Option<i32>,
    last_error: Option<String>,
}

impl World {
    async fn start() -> Self {
        let (database, network) = tokio::join!(Database::create(), Network::start());
        let dns = NameServer::start("127.0.0.1:0").await;
        let authority = Authority::new();
        let proxy = authority.receiver(at(PRIVATE, 0), &[PRIVATE]);
        let (servers, proxy_url) = (dns.address().to_string(), proxy.url(None));
        let env = [
            ("EVENTS_DNS_SERVERS", servers.as_str()),
            ("SSL_CERT_FILE", authority.file()),
            ("EVENTS_BACKOFF_MS", "50"),
            ("EVENTS_DELIVERY_TIMEOUT_MS", "3000"),
            ("HTTPS_PROXY", &proxy_url),
            ("https_proxy", &proxy_url),
            ("ALL_PROXY", &proxy_url),
        ];
        let service = Service::start(&database, &network, &env).await;
        Self {
            database,
            service,
            dns,
            authority,
            proxy,
            _network: network,
        }
    }

    /// An https receiver on this address, and one on each of the others at the same port, which nothing may reach.
    fn receiver(&self, address: &str, name: &str, traps: &[&str]) -> (HttpsReceiver, Vec<HttpsReceiver>) {
        let receiver = self.authority.receiver(at(address, 0), &[name, address]);
        let traps = traps.iter().map(|trap| {
            self.authority
                .receiver(at(trap, receiver.port()), &[name, address, trap])
        });
        let traps = traps.collect();
        (receiver, traps)
    }

    /// An app's subscription, as the store holds it.
    async fn subscribe(&self, endpoint: &str) -> String {
        let id = SubscriptionId::generate().as_str().to_owned();
        let sql = "INSERT INTO subscriptions (id, consumer, topic_pattern, endpoint, secret, created_at, updated_at, project_id)
                   VALUES ($1, 'app:app_01K7CCD4EF5GH6JK7MN8PQ9RST', $2, $3, 'whsec_for_tests_of_webhooks_only_00001', now_ms(),
                           now_ms(), 'prj_01K7BBC3DE4FG5HJ6KM7NP8QRS')";
        let inserted = sqlx::query(sql)
            .bind(&id)
            .bind(format!("app.p01k7bbc3de4fg5hj6km7np8qrs.{}", unique_segment()))
            .bind(endpoint);
        inserted
            .execute(self.database.pool())
            .await
            .expect("a subscription of an app");
        id
    }

    /// Has an event delivered to it; answers its position.
    async fn deliver(&self, subscription: &str) -> i64 {
        let event = envelope("live");
        self.service.client().publish(&event).await.expect(201);
        let sql = "INSERT INTO deliveries (event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, head)
                   SELECT id, $2, seq, 1, now_ms(), now_ms(), now_ms(), true FROM events WHERE id = $1 RETURNING seq";
        let inserted = sqlx::query_scalar(sql).bind(event.id()).bind(subscription);
        inserted.fetch_one(self.database.pool()).await.expect("a delivery")
    }

    async fn row(&self, subscription: &str, seq: i64) -> Row {
        let sql =
            "SELECT status, attempt, last_status, last_error FROM deliveries WHERE subscription_id = $1 AND seq = $2";
        let found = sqlx::query_as(sql).bind(subscription).bind(seq);
        found.fetch_one(self.database.pool()).await.expect("the delivery")
    }

    /// The delivery once it has ended.
    async fn ended(&self, subscription: &str, seq: i64) -> Row {
        eventually("the delivery ends", SOON, async || {
            let row = self.row(subscription, seq).await;
            if matches!(row.status.as_str(), "delivered" | "dead") {
                Ok(row)
            } else {
                Err(format!("{row:?}"))
            }
        })
        .await
    }

    /// What becomes of one event for an endpoint.
    async fn outcome(&self, endpoint: &str) -> Row {
        let subscription = self.subscribe(endpoint).await;
        let seq = self.deliver(&subscription).await;
        self.ended(&subscription, seq).await
    }
}

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().expect(address), port)
}

fn dead(attempt: i32, error: &str) -> Row {
    Row {
        status: "dead".to_owned(),
        attempt,
        last_status: None,
        last_error: Some(error.to_owned()),
    }
}

#[tokio::test]
async fn what_is_sent_to_apps_goes_to_public_addresses_that_were_checked() {
    let name = "egress::what_is_sent_to_apps_goes_to_public_addresses_that_were_checked";
    if !netns::inside(name).await {
        return;
    }
    let world = World::start().await;
    public_endpoints_are_reached(&world).await;
    a_name_that_turns_private_is_dead_at_once(&world).await;
    what_is_dialled_is_what_was_checked(&world).await;
    one_private_address_among_several_refuses_all(&world).await;
    endpoints_inside_are_dead_at_once(&world).await;
    a_name_that_is_not_known_now_is_tried_again(&world).await;
    an_answer_cannot_send_it_elsewhere(&world).await;
    assert_eq!(world.proxy.connections(), 0, "no proxy of the environment is used");
}

async fn public_endpoints_are_reached(world: &World) {
    let name = "hooks.example.com";
    let (receiver, traps) = world.receiver(PUBLIC, name, &[PRIVATE, "127.0.0.1"]);
    world.dns.say_addresses(name, &[PUBLIC]);
    let subscription = world.subscribe(&receiver.url(Some(name))).await;
    for count in 1..=3 {
        let seq = world.deliver(&subscription).await;
        let row = world.ended(&subscription, seq).await;
        assert_eq!(
            (row.status.as_str(), row.last_status),
            ("delivered", Some(200)),
            "{row:?}"
        );
        assert_eq!(receiver.connections(), count, "each has a connection of its own");
    }
    assert!(
        world.dns.asked(name) >= 3,
        "each is looked up anew, though answers hold for minutes"
    );
    let literal = world.outcome(&receiver.url(None)).await;
    assert_eq!(literal.status, "delivered", "{literal:?}");
    let (six, _) = world.receiver(PUBLIC_V6, name, &[]);
    let literal = world.outcome(&six.url(None)).await;
    assert_eq!(literal.status, "delivered", "{literal:?}");
    assert!(traps.iter().all(|trap| trap.connections() == 0));
}

async fn a_name_that_turns_private_is_dead_at_once(world: &World) {
    let name = "turning.example.com";
    let (receiver, traps) = world.receiver(PUBLIC, name, &[PRIVATE]);
    world.dns.say(name, Says::Turns(parsed(&[PUBLIC, PRIVATE])));
    receiver.answer_next("500 Broken\r\n");
    let row = world.outcome(&receiver.url(Some(name))).await;
    assert_eq!(row, dead(2, NOT_PUBLIC));
    assert_eq!((receiver.requests(), traps[0].connections()), (1, 0));
    let log = world.service.log();
    assert!(!log.contains(PRIVATE), "no address that a name led to is told:\n{log}");
}

async fn what_is_dialled_is_what_was_checked(world: &World) {
    let name = "flipping.example.com";
    let (receiver, traps) = world.receiver(PUBLIC, name, &["127.0.0.1", PRIVATE]);
    world
        .dns
        .say(name, Says::Turns(parsed(&[PUBLIC, "127.0.0.1", PUBLIC, PRIVATE])));
    let subscription = world.subscribe(&receiver.url(Some(name))).await;
    let (mut delivered, mut refused) = (0, 0);
    for _ in 0..12 {
        let seq = world.deliver(&subscription).await;
        match world.ended(&subscription, seq).await {
            row if row.status == "delivered" => delivered += 1,
            row => {
                assert_eq!(row, dead(row.attempt, NOT_PUBLIC));
                refused += 1;
            }
        }
    }
    assert!(
        delivered >= 3 && refused >= 3,
        "{delivered} delivered, {refused} refused"
    );
    assert_eq!(receiver.requests(), delivered);
    for trap in traps {
        assert_eq!(trap.connections(), 0, "{}", trap.url(None));
    }
}

async fn one_private_address_among_several_refuses_all(world: &World) {
    for (name, addresses) in [
        ("mixed.example.com", [PUBLIC, PUBLIC_TOO, PRIVATE]),
        ("mixed6.example.com", [PUBLIC, PUBLIC_TOO, "fd00::1"]),
        ("embedded.example.com", [PUBLIC, PUBLIC_V6, "64:ff9b::10.20.30.40"]),
        ("metadata.example.com", [PUBLIC, PUBLIC_TOO, "169.254.169.254"]),
    ] {
        let (receiver, traps) = world.receiver(PUBLIC, name, &[PUBLIC_TOO, PRIVATE]);
        world.dns.say_addresses(name, &addresses);
        assert_eq!(
            world.outcome(&receiver.url(Some(name))).await,
            dead(1, NOT_PUBLIC),
            "{name}"
        );
        let reached = receiver.connections() + traps.iter().map(HttpsReceiver::connections).sum::<usize>();
        assert_eq!(reached, 0, "{name}");
    }
}

async fn endpoints_inside_are_dead_at_once(world: &World) {
    let (_, traps) = world.receiver(PUBLIC, "live.openvibe.network", &[PRIVATE, "127.0.0.1"]);
    let port = traps[0].port();
    // What services may be sent to is no host for apps.
    world.dns.say_addresses("live.openvibe.network", &[PRIVATE]);
    for (host, error) in [
        ("live.openvibe.network", NOT_PUBLIC),
        (PRIVATE, NOT_PUBLIC),
        ("127.0.0.1", NOT_PUBLIC),
        ("0x7f.1", NOT_PUBLIC),
        ("[::1]", NOT_PUBLIC),
        ("[::ffff:127.0.0.1]", NOT_PUBLIC),
        (
            "localhost",
            "endpoint's host must be a full name of the public internet, not one label, localhost, *.local, *.internal",
        ),
        ("127.0.0.1.", "endpoint's host must not end in a dot"),
    ] {
        let row = world.outcome(&format!("https://{host}:{port}/hook")).await;
        assert_eq!(row, dead(1, error), "{host}");
    }
    let plain = world.outcome(&format!("http://{PUBLIC}:{port}/hook")).await;
    assert_eq!(plain, dead(1, "endpoint must begin with https://"));
    assert!(traps.iter().all(|trap| trap.connections() == 0));
}

async fn a_name_that_is_not_known_now_is_tried_again(world: &World) {
    for (name, says, error) in [
        ("unknown.example.com", Says::NoSuchName, "there is no such host"),
        ("empty.example.com", Says::Addresses(Vec::new()), "it has no address"),
        ("failing.example.com", Says::Failure, "the lookup failed"),
        ("silent.example.com", Says::Nothing, "timeout"),
    ] {
        let (receiver, _) = world.receiver(PUBLIC, name, &[]);
        world.dns.say(name, says);
        let subscription = world.subscribe(&receiver.url(Some(name))).await;
        let seq = world.deliver(&subscription).await;
        eventually("an attempt fails and is not the last one", SOON, async || {
            let row = world.row(&subscription, seq).await;
            let told = row.last_error.as_deref().unwrap_or_default();
            let waits = row.status == "failed" && told.ends_with(error);
            if waits { Ok(()) } else { Err(format!("{name}: {row:?}")) }
        })
        .await;
        world.dns.say_addresses(name, &[PUBLIC]);
        assert_eq!(world.ended(&subscription, seq).await.status, "delivered", "{name}");
    }
}

async fn an_answer_cannot_send_it_elsewhere(world: &World) {
    let name = "moving.example.com";
    let (receiver, traps) = world.receiver(PUBLIC, name, &[PRIVATE]);
    world.dns.say_addresses(name, &[PUBLIC]);
    for status in ["301 Moved", "302 Found", "307 Moved", "308 Moved"] {
        receiver.answer_next(&format!("{status}\r\nlocation: {}\r\n", traps[0].url(None)));
        let before = receiver.requests();
        let row = world
            .outcome(&format!("{}/{}", receiver.url(Some(name)), &status[..3]))
            .await;
        assert_eq!(
            (row.status.as_str(), row.attempt),
            ("delivered", 2),
            "{status}: {row:?}"
        );
        assert_eq!(receiver.requests(), before + 2, "{status} is an attempt that failed");
    }
    assert_eq!(traps[0].connections(), 0);
}

#[tokio::test]
async fn an_endpoint_is_judged_by_all_addresses_that_its_host_has() {
    let name = "egress::an_endpoint_is_judged_by_all_addresses_that_its_host_has";
    if !netns::inside(name).await {
        return;
    }
    let dns = NameServer::start("127.0.0.1:0").await;
    let guard = Guard::new(&[dns.address()]);
    let judged = async |host: &str| guard.check_endpoint(&format!("https://{host}:8443/Hook")).await;

    for (host, addresses) in [
        ("four.example.com", &[PUBLIC, PUBLIC_TOO][..]),
        ("six.example.com", &[PUBLIC_V6]),
        ("both.example.com", &[PUBLIC, PUBLIC_V6]),
    ] {
        dns.say_addresses(host, addresses);
        let endpoint = judged(host).await.expect(host);
        assert_eq!(endpoint.as_str(), format!("https://{host}:8443/Hook"));
    }
    for (host, addresses) in [
        ("private.example.com", &[PRIVATE][..]),
        ("mixed.example.com", &[PUBLIC, "10.0.0.1"]),
        ("first.example.com", &["192.168.0.1", PUBLIC]),
        ("six-inside.example.com", &[PUBLIC, "fc00::1"]),
        ("mapped.example.com", &["::ffff:127.0.0.1"]),
        ("six-to-four.example.com", &["2002:a00:1::1"]),
        ("zero.example.com", &["0.0.0.0"]),
    ] {
        dns.say_addresses(host, addresses);
        assert_eq!(judged(host).await, Err(Refused::NotPublic), "{host}");
    }
    // More than are dialled, the last of them inside.
    let many: Vec<String> = (1..=30).map(|last| format!("93.184.216.{last}")).collect();
    let mut many: Vec<&str> = many.iter().map(String::as_str).collect();
    dns.say_addresses("many.example.com", &many);
    assert!(judged("many.example.com").await.is_ok());
    many.push(PRIVATE);
    dns.say_addresses("many.example.com", &many);
    assert_eq!(judged("many.example.com").await, Err(Refused::NotPublic));

    for (host, says, unresolved) in [
        ("unknown.example.com", Says::NoSuchName, Unresolved::NoSuchHost),
        ("empty.example.com", Says::Addresses(Vec::new()), Unresolved::NoAddress),
        ("failing.example.com", Says::Failure, Unresolved::Failed),
        ("silent.example.com", Says::Nothing, Unresolved::TimedOut),
    ] {
        dns.say(host, says);
        let asked = Instant::now();
        assert_eq!(judged(host).await, Err(Refused::Unresolved(unresolved)), "{host}");
        assert!(
            asked.elapsed() < Duration::from_secs(8),
            "{host}: {:?}",
            asked.elapsed()
        );
    }

    dns.say_addresses("changing.example.com", &[PUBLIC]);
    assert!(judged("changing.example.com").await.is_ok());
    dns.say_addresses("changing.example.com", &[PRIVATE]);
    assert_eq!(
        judged("changing.example.com").await,
        Err(Refused::NotPublic),
        "an answer is not kept"
    );

    let before = dns.asked("localhost");
    assert_eq!(judged("localhost").await, Err(Refused::LocalName));
    assert_eq!(
        dns.asked("localhost"),
        before,
        "names of an inside are not even asked for"
    );
}

#[tokio::test]
async fn the_systems_name_servers_are_followed_and_its_search_list_is_not() {
    let name = "egress::the_systems_name_servers_are_followed_and_its_search_list_is_not";
    if !netns::inside(name).await {
        return;
    }
    let (first, second) = tokio::join!(NameServer::start("127.0.0.1:53"), NameServer::start("127.0.0.2:53"));
    let file = std::env::temp_dir().join(format!("ov-it-resolv-{}", ulid::Ulid::generate()));
    let resolve_at = |server: &str| {
        let text = format!("search inside.example\nnameserver {server}\noptions ndots:5 timeout:1 attempts:1\n");
        fs::write(&file, text).expect("a file in the temporary directory");
    };
    resolve_at("127.0.0.1");
    let mounted = Command::new("mount")
        .arg("--bind")
        .arg(&file)
        .arg("/etc/resolv.conf")
        .status();
    assert!(mounted.expect("the program `mount`").success());

    let guard = Guard::new(&[]);
    let judged = async |host: &str| guard.check_endpoint(&format!("https://{host}/")).await.map(|_| ());
    first.say_addresses("hooks.example.com", &[PUBLIC]);
    first.say_addresses("gone.example.com.inside.example", &[PUBLIC]);
    second.say_addresses("hooks.example.com", &[PRIVATE]);
    assert_eq!(judged("hooks.example.com").await, Ok(()));
    assert_eq!(
        judged("gone.example.com").await,
        Err(Refused::Unresolved(Unresolved::NoSuchHost))
    );
    assert_eq!(first.asked("gone.example.com.inside.example"), 0);

    resolve_at("127.0.0.2");
    assert_eq!(
        judged("hooks.example.com").await,
        Err(Refused::NotPublic),
        "the file is read again"
    );
    resolve_at("no.address");
    assert_eq!(
        judged("hooks.example.com").await,
        Err(Refused::Unresolved(Unresolved::Failed))
    );
    fs::remove_file(&file).ok();
}
