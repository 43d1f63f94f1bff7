//! The harness proved against itself: what a helper claims to do is seen from outside, without the service.

use std::{
    future::pending,
    panic::AssertUnwindSafe,
    time::{Duration, Instant},
};

use futures_util::{FutureExt, future::join_all};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header, jwk::JwkSet};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::support::{
    client::{Client, assert_problem, json as json_body, trace_of},
    database::{Database, migrations_hash},
    envelopes::{batch, envelope, envelopes, event_id, unique_type},
    ledger::{Ledger, position_of},
    network::{AUDIENCE, FIRST_KEY, ISSUER, KeyMode, Network, TokenSpec, public_pem},
    proxy::{COMMIT, Proxy},
    receiver::{Answer, Receiver},
    wait::{SOON, eventually, refused, stays, within},
};

const A_MOMENT: Duration = Duration::from_millis(150);

/// The message of a panic that `future` must end in.
async fn failure(future: impl Future<Output = ()>) -> String {
    let panic = refused("a failing helper", AssertUnwindSafe(future).catch_unwind().await);
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .expect("a panic with a text")
}

mod waiting {
    use super::*;

    #[tokio::test]
    async fn eventually_yields_the_value_and_names_what_it_saw_when_it_gives_up() {
        let mut looks = 0;
        let value = eventually("the third look", SOON, async || {
            looks += 1;
            (looks == 3).then_some("found")
        });
        assert_eq!(value.await, "found");

        let never = eventually("the tide", A_MOMENT, async || Err::<(), _>("still low"));
        let message = failure(never).await;
        assert!(
            message.contains("the tide") && message.contains("still low"),
            "{message}"
        );
        assert!(message.contains("harness_self.rs"), "the caller is named: {message}");
    }

    #[tokio::test]
    async fn eventually_gives_up_on_a_look_that_hangs() {
        let started = Instant::now();
        failure(eventually("a stuck look", A_MOMENT, async || pending::<bool>().await)).await;
        assert!(started.elapsed() < SOON);
    }

    #[tokio::test]
    async fn stays_notices_a_condition_that_breaks_in_the_middle() {
        let mut looks = 0;
        let broken = stays("quiet", SOON, async || {
            looks += 1;
            looks < 4
        });
        assert!(failure(broken).await.contains("quiet"));
        stays("nothing", A_MOMENT, async || true).await;
    }
}

mod databases {
    use super::*;

    #[tokio::test]
    async fn clones_are_isolated_and_dropped_with_their_value() {
        let (one, two) = tokio::join!(Database::create(), Database::create());
        for (database, word) in [(&one, "one"), (&two, "two")] {
            sqlx::query("CREATE TABLE own (word text)")
                .execute(database.pool())
                .await
                .expect("a table of its own");
            sqlx::query("INSERT INTO own VALUES ($1)")
                .bind(word)
                .execute(database.pool())
                .await
                .expect("a row");
        }
        let word: String = sqlx::query_scalar("SELECT word FROM own")
            .fetch_one(one.pool())
            .await
            .expect("its own row");
        assert_eq!(word, "one");

        let url = one.url().to_owned();
        let name = url.rsplit('/').next().expect("a name").to_owned();
        drop(one);
        let listed: Option<String> = sqlx::query_scalar("SELECT datname::text FROM pg_database WHERE datname = $1")
            .bind(&name)
            .fetch_optional(two.pool())
            .await
            .expect("the server's databases");
        assert_eq!(listed, None, "a pool that is still open does not keep the database");
        refused("a dropped database", PgConnection::connect(&url).await);
    }

    #[tokio::test]
    async fn an_empty_database_has_no_table_and_many_can_be_made_at_once() {
        let made = join_all((0..6).map(async |_| Database::empty().await)).await;
        for database in &made {
            let tables: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
                .fetch_one(database.pool())
                .await
                .expect("its tables");
            assert_eq!(tables, 0);
        }
    }

    #[test]
    fn the_template_is_named_by_names_and_contents_of_the_migrations() {
        let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(event_id());
        let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).expect("a scratch file");
        std::fs::create_dir_all(&directory).expect("a scratch folder");
        write("0001.sql", "a");
        let first = migrations_hash(&directory);
        assert_eq!(migrations_hash(&directory), first, "the same files, the same name");
        write("0002.sql", "");
        let second = migrations_hash(&directory);
        write("0001.sql", "b");
        let third = migrations_hash(&directory);
        std::fs::remove_dir_all(&directory).expect("the scratch folder goes");
        assert!(first != second && second != third && first != third);
    }
}

mod issuer {
    use super::*;

    async fn key_set(network: &Network) -> crate::support::client::Response {
        Client::new(network.url()).get("/api/.well-known/jwks", None).await
    }

    fn validation() -> Validation {
        let mut validation = Validation::new(Algorithm::RS256);
        validation.set_issuer(&[ISSUER]);
        validation.set_audience(&[AUDIENCE]);
        validation
    }

    #[tokio::test]
    async fn tokens_verify_with_the_key_the_set_publishes_and_no_other() {
        let network = Network::start().await;
        let keys: JwkSet = serde_json::from_str(&key_set(&network).await.text).expect("a key set");
        let key = DecodingKey::from_jwk(keys.find(FIRST_KEY).expect("the first key")).expect("an RSA key");

        let token = network.token(&TokenSpec::service("live").claim("ns", json!(["a"])));
        let claims = decode::<Value>(&token, &key, &validation())
            .expect("a good token")
            .claims;
        assert_eq!((&claims["sub"], &claims["ns"]), (&json!("svc:live"), &json!(["a"])));
        assert_eq!(
            decode_header(&token).expect("a header").kid,
            None,
            "tokens of the issuer name no key"
        );

        let other = network.token(&TokenSpec::service("live").signed_by("k2"));
        refused("another key's signature", decode::<Value>(&other, &key, &validation()));
        let old = network.token(&TokenSpec::service("live").shifted(-4000));
        refused("an expired token", decode::<Value>(&old, &key, &validation()));
        let foreign = network.token(&TokenSpec::service("live").claim("aud", json!(["elsewhere"])));
        refused("another audience", decode::<Value>(&foreign, &key, &validation()));
        refused(
            "no expiry",
            decode::<Value>(&TokenSpec::service("live").without("exp").sign(), &key, &validation()),
        );
        let named = TokenSpec::service("live").header("kid", FIRST_KEY).sign();
        assert_eq!(decode_header(&named).expect("a header").kid.as_deref(), Some(FIRST_KEY));
    }

    #[tokio::test]
    async fn the_key_set_can_be_down_slow_legacy_garbled_and_rotated() {
        let network = Network::start().await;
        network.answer_keys(KeyMode::Down);
        assert_eq!(key_set(&network).await.status, 503);

        network.answer_keys(KeyMode::Slow(A_MOMENT));
        let started = Instant::now();
        assert_eq!(key_set(&network).await.status, 200);
        assert!(started.elapsed() >= A_MOMENT);

        network.answer_keys(KeyMode::Legacy);
        let legacy = key_set(&network).await.body;
        assert_eq!(legacy.get("keys"), None);
        assert_eq!(legacy["public_key"], public_pem(FIRST_KEY));
        let key = DecodingKey::from_rsa_pem(public_pem(FIRST_KEY).as_bytes()).expect("a PEM key");
        decode::<Value>(&TokenSpec::service("live").sign(), &key, &validation()).expect("the PEM is the first key");

        network.answer_keys(KeyMode::Garbled);
        assert_eq!(key_set(&network).await.body, Value::Null);

        network.answer_keys(KeyMode::Ok);
        network.publish_keys(&["k2", FIRST_KEY]);
        let rotated = key_set(&network).await.body;
        assert_eq!(
            (&rotated["keys"][0]["kid"], &rotated["keys"][1]["kid"]),
            (&json!("k2"), &json!(FIRST_KEY))
        );
        assert_eq!(network.key_hits(), 5);
        network.wait_key_hits(5, SOON).await;
    }
}

mod webhook_receiver {
    use super::*;

    async fn call(receiver: &Receiver, path: &str) -> Result<(u16, usize), reqwest::Error> {
        let client = Client::new(&receiver.url(""));
        let request = json_body(
            client.request(reqwest::Method::POST, path, None),
            &json!({ "path": path }),
        );
        client
            .try_send(request)
            .await
            .map(|answer| (answer.status, answer.text.len()))
    }

    #[tokio::test]
    async fn answers_follow_the_script_and_every_call_is_kept_as_sent() {
        let receiver = Receiver::start().await;
        let limited = Answer::status(429).header("Retry-After", "7").body_of(3000);
        receiver.script("/a", [limited, 500.into(), Answer::close(), 204.into()]);
        assert_eq!(call(&receiver, "/a").await.expect("the first answer"), (429, 3000));
        assert_eq!(call(&receiver, "/b").await.expect("a path without a script").0, 204);
        assert_eq!(call(&receiver, "/a").await.expect("the second answer").0, 500);
        refused("a closed connection", call(&receiver, "/a").await);
        for _ in 0..2 {
            assert_eq!(call(&receiver, "/a").await.expect("the last answer repeats").0, 204);
        }

        let calls = receiver.calls();
        assert_eq!(
            calls.iter().map(|call| call.path()).collect::<Vec<_>>(),
            ["/a", "/b", "/a", "/a", "/a", "/a"]
        );
        assert_eq!(receiver.calls_to("/a").last().expect("a call").number, 5);
        let first = &calls[0];
        assert_eq!((first.method.as_str(), first.json()), ("POST", json!({ "path": "/a" })));
        assert_eq!(first.header("content-type"), Some("application/json"));
        assert!(calls.is_sorted_by_key(|call| call.arrived));

        receiver.script("/a", [503]);
        assert_eq!(
            call(&receiver, "/a")
                .await
                .expect("a new script begins at its beginning")
                .0,
            503
        );
    }

    #[tokio::test]
    async fn a_hanging_answer_waits_for_its_release_and_counts_as_active_until_then() {
        let receiver = Receiver::start().await;
        receiver.answer_with("/slow", |_| Answer::hang(200));
        let one = call(&receiver, "/slow");
        let two = call(&receiver, "/slow");
        let other = call(&receiver, "/quick");
        let scene = async {
            receiver.wait_calls_to("/slow", 2, SOON).await;
            assert_eq!(receiver.active("/slow"), 2);
            stays("nothing is answered", A_MOMENT, async || receiver.active("/slow") == 2).await;
            receiver.release();
        };
        let (one, two, other, ()) = tokio::join!(one, two, other, scene);
        assert_eq!(
            (
                one.expect("released").0,
                two.expect("released").0,
                other.expect("answered").0
            ),
            (200, 200, 204)
        );
        assert_eq!(
            (
                receiver.peak("/slow"),
                receiver.peak("/quick"),
                receiver.active("/slow")
            ),
            (2, 1, 0)
        );
        assert!((2..=3).contains(&receiver.peak_total()));
    }

    #[tokio::test]
    async fn one_call_after_another_is_never_counted_as_two_at_once() {
        let receiver = Receiver::start().await;
        for _ in 0..200 {
            call(&receiver, "/one").await.expect("an answer");
        }
        assert_eq!((receiver.peak("/one"), receiver.abandoned("/one")), (1, 0));
    }

    #[tokio::test]
    async fn a_sender_that_gives_up_is_noticed() {
        let receiver = Receiver::start().await;
        receiver.script(
            "/late",
            [
                Answer::status(200).after(SOON),
                Answer::hang(200),
                Answer::trickle_head(200),
            ],
        );
        for count in 1..=3 {
            let given_up = tokio::time::timeout(A_MOMENT, call(&receiver, "/late")).await;
            refused(
                "an answer in time",
                given_up.map(|answer| answer.map_err(|error| error.to_string())),
            );
            receiver
                .wait_until("the sender is gone", SOON, |receiver| {
                    receiver.abandoned("/late") == count
                })
                .await;
            assert_eq!(receiver.active("/late"), 0);
        }
    }

    #[tokio::test]
    async fn a_crash_ends_calls_and_connections_and_what_was_recorded_stays() {
        let receiver = Receiver::start().await;
        call(&receiver, "/a").await.expect("an answer");
        receiver.script("/a", [Answer::hang(204)]);
        let crash = async {
            receiver.wait_calls_to("/a", 2, SOON).await;
            receiver.crash();
        };
        let (cut, ()) = tokio::join!(call(&receiver, "/a"), crash);
        refused("a call that was cut", cut);
        refused("a receiver that is gone", call(&receiver, "/a").await);
        receiver.start_again().await;
        receiver.script("/a", [204]);
        assert_eq!(call(&receiver, "/a").await.expect("an answer").0, 204);
        assert_eq!(receiver.calls_to("/a").len(), 3);
    }

    #[tokio::test]
    async fn a_trickled_body_shows_its_status_at_once_and_ends_when_released() {
        let receiver = Receiver::start().await;
        receiver.script("/trickle", [Answer::trickle_body(200)]);
        let request = Client::new(&receiver.url("")).request(reqwest::Method::POST, "/trickle", None);
        let answer = within("the head", SOON, request.send()).await.expect("a head");
        assert_eq!(answer.status(), 200);
        receiver.release();
        refused("a body cut short", within("the end", SOON, answer.bytes()).await);
    }

    #[tokio::test]
    async fn waiting_for_calls_that_do_not_come_says_how_many_did() {
        let receiver = Receiver::start().await;
        call(&receiver, "/a").await.expect("an answer");
        let message = failure(receiver.wait_calls(2, A_MOMENT).map(|_| ())).await;
        assert!(message.contains("1 of 2 calls"), "{message}");
    }

    #[tokio::test]
    async fn chunked_bodies_are_read_whole() {
        let receiver = Receiver::start().await;
        let address = receiver.url("").replace("http://", "");
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        let request = "POST /c?x=1 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;note\r\nde\r\n0\r\n\r\n";
        stream.write_all(request.as_bytes()).await.expect("a request sent");
        let calls = receiver.wait_calls_to("/c", 1, SOON).await;
        assert_eq!(
            (&calls[0].body[..], calls[0].target.as_str()),
            (&b"abcde"[..], "/c?x=1")
        );
    }

    /// The fixed value was computed with `openssl dgst -sha256 -hmac whsec_harness`, from another implementation.
    #[tokio::test]
    async fn signatures_are_judged_over_the_time_and_the_raw_body() {
        let receiver = Receiver::start().await;
        let secret = "whsec_harness";
        let now = crate::support::network::unix_now();
        let key = aws_lc_rs::hmac::Key::new(aws_lc_rs::hmac::HMAC_SHA256, secret.as_bytes());
        let body = r#"{"a":1}"#;
        let tag = |time: u64| hex::encode(aws_lc_rs::hmac::sign(&key, format!("{time}.{body}").as_bytes()));
        assert_eq!(
            tag(1_700_000_000),
            "9ed5138fe90efd46544e934e048aa03e5cf445e0e391e84686e2a13d49871c3b"
        );

        let good = format!("t={now},v2={}", tag(now));
        let old = now - 1000;
        let sent = [
            (now, good.clone(), Ok(1)),
            (now, format!("{good},v2={}", "0".repeat(64)), Ok(1)),
            (now, format!("t={now},v2={}", tag(now + 1)), Ok(0)),
            (now + 1, good.clone(), Err("X-OpenVibe-Timestamp is not")),
            (old, format!("t={old},v2={}", tag(old)), Err("signed at")),
            (now, format!("v2={},t={now}", tag(now)), Err("no time first")),
            (now, format!("t={now}"), Err("no v2 value")),
            (
                now,
                format!("t={now},v2={}", tag(now).to_uppercase()),
                Err("not 64 lower-case hex digits"),
            ),
            (now, format!("{good},v1=00"), Err("not a v2 value")),
        ];
        let client = Client::new(&receiver.url(""));
        for (count, (stamp, signature, expected)) in sent.into_iter().enumerate() {
            let request = client.request(reqwest::Method::POST, "/s", None).body(body);
            let request = request.header("X-OpenVibe-Timestamp", stamp.to_string());
            client.send(request.header("X-OpenVibe-Signature-V2", &signature)).await;
            let judged = receiver.calls()[count].signatures_by(secret);
            match expected {
                Ok(matching) => assert_eq!(judged, Ok(matching), "{signature}"),
                Err(reason) => assert!(refused(&signature, judged).starts_with(reason), "{signature}"),
            }
        }
    }
}

mod database_proxy {
    use super::*;

    async fn connect(proxy: &Proxy, database: &Database) -> Result<PgConnection, sqlx::Error> {
        let url = database.url_through(proxy.address());
        within("a connection or its refusal", SOON, PgConnection::connect(&url)).await
    }

    #[tokio::test]
    async fn a_cut_ends_connections_and_refuses_new_ones_until_restored() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        connection.ping().await.expect("an answer through the proxy");

        proxy.cut();
        refused("a cut line", within("the cut", SOON, connection.ping()).await);
        refused("a cut line", connect(&proxy, &database).await);
        assert_eq!(proxy.accepted(), 1);

        proxy.restore();
        connect(&proxy, &database)
            .await
            .expect("a line again")
            .ping()
            .await
            .expect("an answer again");
    }

    #[tokio::test]
    async fn a_stall_holds_bytes_and_lets_them_go_on() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        proxy.stall();
        let create = async {
            sqlx::raw_sql("CREATE TABLE late ()")
                .execute(&mut connection)
                .await
                .expect("held, not lost");
        };
        let scene = async {
            stays("no statement arrives", A_MOMENT, async || {
                !table_exists(&database, "late").await
            })
            .await;
            proxy.restore();
        };
        within("the stalled statement", SOON, async { tokio::join!(create, scene) }).await;
        assert!(table_exists(&database, "late").await);
    }

    #[tokio::test]
    async fn held_answers_leave_a_commit_that_nobody_heard_of() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        proxy.hold_answers();
        let create = sqlx::raw_sql("CREATE TABLE unheard ()").execute(&mut connection);
        let scene = async {
            eventually("the statement runs", SOON, async || {
                table_exists(&database, "unheard").await
            })
            .await;
            proxy.cut();
        };
        let (created, ()) = within("the cut", SOON, async { tokio::join!(create, scene) }).await;
        refused("an answer that was held and cut", created);
    }

    #[tokio::test]
    async fn a_delay_is_paid_in_each_direction() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        proxy.delay(A_MOMENT);
        let started = Instant::now();
        connection.ping().await.expect("a late answer");
        assert!(started.elapsed() >= 2 * A_MOMENT);
    }

    #[tokio::test]
    async fn a_dripping_line_carries_everything() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        proxy.drip();
        let mut connection = connect(&proxy, &database).await.expect("a slow line");
        let long = "x".repeat(2_000);
        let echoed: String = sqlx::query_scalar("SELECT $1")
            .bind(&long)
            .fetch_one(&mut connection)
            .await
            .expect("an echo");
        assert_eq!(echoed, long);
    }

    #[tokio::test]
    async fn a_commit_can_happen_without_its_answer_and_nothing_else_is_cut() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        proxy.cut_at(COMMIT);
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        let mut transaction = connection.begin().await.expect("a transaction");
        sqlx::raw_sql("CREATE TABLE unheard ()")
            .execute(&mut *transaction)
            .await
            .expect("a statement");
        refused("a commit without an answer", transaction.commit().await);
        assert_eq!(proxy.left_unanswered(), 1);
        assert!(table_exists(&database, "unheard").await);
    }

    #[tokio::test]
    async fn a_line_that_is_cut_at_a_piece_loses_that_piece_or_its_answer() {
        let database = Database::empty().await;
        let proxy = Proxy::start(&database.server()).await;
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        proxy.cut_after_asking(1);
        sqlx::raw_sql("CREATE TABLE first ()")
            .execute(&mut connection)
            .await
            .expect("the first piece passes");
        refused(
            "the second piece",
            sqlx::raw_sql("CREATE TABLE second ()").execute(&mut connection).await,
        );
        assert!(table_exists(&database, "first").await && !table_exists(&database, "second").await);

        proxy.restore();
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        proxy.cut_after_answers(0);
        refused(
            "an answer that is lost",
            sqlx::raw_sql("CREATE TABLE third ()").execute(&mut connection).await,
        );
        eventually("what was asked happens", SOON, async || {
            table_exists(&database, "third").await
        })
        .await;
        proxy.restore();
        let mut connection = connect(&proxy, &database).await.expect("an open line");
        proxy.drop_connections();
        refused(
            "a dropped connection",
            within("the drop", SOON, connection.ping()).await,
        );
        connect(&proxy, &database).await.expect("new ones are served");
    }

    async fn table_exists(database: &Database, table: &str) -> bool {
        sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
            .bind(table)
            .fetch_one(database.pool())
            .await
            .expect("a look past the proxy")
    }
}

mod private_server {
    use super::*;
    use crate::support::cluster::Cluster;

    async fn count(database: &Database) -> i64 {
        let counted = async || {
            sqlx::query_scalar("SELECT count(*) FROM kept")
                .fetch_one(database.pool())
                .await
        };
        eventually("the server answers", SOON, counted).await
    }

    #[tokio::test]
    async fn a_killed_server_keeps_what_was_committed_and_a_fail_over_loses_what_came_after() {
        let cluster = Cluster::start("").await;
        let database = Database::empty_on(&cluster.server()).await;
        let run = async |statement: &'static str| {
            eventually("a statement is run", SOON, async || {
                sqlx::raw_sql(statement).execute(database.pool()).await
            })
            .await;
        };
        run("CREATE TABLE kept (n integer); INSERT INTO kept VALUES (1)").await;
        cluster.kill();
        refused("a killed server", PgConnection::connect(database.url()).await);
        cluster.start_again().await;
        assert_eq!(count(&database).await, 1);
        assert!(
            cluster.log().contains("automatic recovery in progress"),
            "{}",
            cluster.log()
        );

        let timeline = "SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)";
        let before: String = sqlx::query_scalar(timeline)
            .fetch_one(database.pool())
            .await
            .expect("a timeline");
        cluster.set_aside().await;
        run("INSERT INTO kept VALUES (2)").await;
        assert_eq!(count(&database).await, 2);
        cluster.fail_over().await;
        assert_eq!(count(&database).await, 1);
        let after: String = sqlx::query_scalar(timeline)
            .fetch_one(database.pool())
            .await
            .expect("a timeline");
        assert!(after > before, "{before} then {after}");
    }
}

mod judgement {
    use super::*;

    /// A server of one route that answers with what it is given.
    async fn answer_of(headers: &[(&str, &str)], status: u16, body: &Value) -> crate::support::client::Response {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let client = Client::new(&format!("http://{}", listener.local_addr().expect("a bound port")));
        let body = body.to_string();
        let mut answer = format!("HTTP/1.1 {status} Answer\r\nContent-Length: {}\r\n", body.len());
        for (name, value) in headers {
            answer += &format!("{name}: {value}\r\n");
        }
        answer += &format!("\r\n{body}");
        let serve = async {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = [0; 4096];
            assert!(stream.read(&mut request).await.expect("a request") > 0);
            stream.write_all(answer.as_bytes()).await.expect("an answer sent");
            stream
        };
        tokio::join!(client.get("/", None), serve).0
    }

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn problem() -> (Vec<(&'static str, &'static str)>, Value) {
        let headers = vec![
            ("Content-Type", "application/problem+json"),
            ("X-OpenVibe-Request-Id", "req_0123456789abcdef01234567"),
            ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ];
        let document = json!({
            "type": "https://openvibe.network/problems/events.not_found",
            "title": "Not Found",
            "status": 404,
            "code": "events.not_found",
            "detail": "no such event",
            "request_id": "req_0123456789abcdef01234567",
            "trace_id": TRACE,
            "error": "no such event",
        });
        (headers, document)
    }

    #[tokio::test]
    async fn a_right_problem_passes_and_every_single_fault_is_found() {
        let (headers, document) = problem();
        let answer = answer_of(&headers, 404, &document).await;
        assert_eq!(assert_problem(&answer, 404, "events.not_found"), document);

        let faults = [
            ("type", json!("about:blank")),
            ("title", json!("not found")),
            ("status", json!(400)),
            ("code", json!("not_found")),
            ("detail", json!("")),
            ("request_id", json!("req_ffffffffffffffffffffffff")),
            ("trace_id", json!("4bf92f3577b34da6a3ce929d0e0e4737")),
            ("error", json!("another text")),
            ("errors", json!([])),
            ("errors", json!([{ "path": "payload", "message": "no pointer" }])),
        ];
        for (member, value) in faults {
            let mut broken = document.clone();
            broken[member] = value;
            let answer = answer_of(&headers, 404, &broken).await;
            failure(async { drop(assert_problem(&answer, 404, "events.not_found")) }).await;
        }
        for left_out in 0..headers.len() {
            let mut fewer = headers.clone();
            fewer.remove(left_out);
            let answer = answer_of(&fewer, 404, &document).await;
            failure(async { drop(assert_problem(&answer, 404, "events.not_found")) }).await;
        }
    }

    #[test]
    fn a_traceparent_is_read_strictly() {
        assert_eq!(
            trace_of("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
            Some(TRACE)
        );
        for bad in [
            "",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert_eq!(trace_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn made_envelopes_are_fresh_and_typed_in_the_namespace_of_their_source() {
        assert_ne!(envelope("live").id(), envelope("live").id());
        assert!(unique_type("media-hub").starts_with("mediahub."));
        let many = envelopes("live", 3);
        assert_eq!(many[0].type_name(), many[2].type_name());
        assert_eq!(batch(&many)["events"][2]["payload"]["n"], 2);
        assert_eq!(
            envelope("live")
                .without("version")
                .set("extra", 1)
                .json()
                .get("version"),
            None
        );
        let ulid = event_id();
        let ulid = ulid.strip_prefix("evt_").expect("the prefix");
        assert!(ulid.len() == 26 && ulid.chars().all(|c| "0123456789ABCDEFGHJKMNPQRSTVWXYZ".contains(c)));
    }
}

mod obligations {
    use super::*;
    use crate::support::{client::Response, envelopes::Envelope};

    fn answer(status: u16, body: Value) -> Response {
        Response {
            status,
            headers: reqwest::header::HeaderMap::new(),
            text: body.to_string(),
            body,
        }
    }

    fn stored(envelope: &Envelope, cursor: &str) -> Value {
        json!({ "event_id": envelope.id(), "duplicate": false, "cursor": cursor })
    }

    async fn deliver(receiver: &Receiver, path: &str, envelope: &Envelope) {
        let client = Client::new(&receiver.url(""));
        let request = client.request(reqwest::Method::POST, path, None);
        client.send(request.header("X-OpenVibe-Event-Id", envelope.id())).await;
    }

    #[tokio::test]
    async fn what_was_acknowledged_must_arrive_on_every_path_that_is_owed_it() {
        let receiver = Receiver::start().await;
        let all = envelopes("live", 2);
        let other = envelope("live");
        let ledger = Ledger::default()
            .route_type("/one", all[0].type_name())
            .route("/all", |_| true);
        let results = json!({ "results": [stored(&all[0], "c1.0.MQ"), stored(&all[1], "c1.0.Mg")] });
        ledger.note(&all, &answer(201, results));
        ledger.note([&other], &answer(201, stored(&other, "c1.0.Mw")));
        ledger.note(
            &[envelope("live")],
            &answer(503, json!({ "code": "events.unavailable" })),
        );
        assert_eq!((ledger.len(), ledger.open(&receiver).len()), (3, 5));

        for event in &all {
            deliver(&receiver, "/one", event).await;
            deliver(&receiver, "/all", event).await;
        }
        let message = failure(ledger.settle(&receiver, A_MOMENT)).await;
        assert!(message.contains(&format!("{} -> /all", other.id())), "{message}");
        tokio::join!(ledger.settle(&receiver, SOON), deliver(&receiver, "/all", &other));
    }

    #[tokio::test]
    async fn the_store_must_hold_each_acknowledged_event_once_where_its_answers_said() {
        let database = Database::empty().await;
        let pool = database.pool();
        sqlx::raw_sql("CREATE TABLE events (id text, seq bigint)")
            .execute(pool)
            .await
            .expect("a stand-in table");
        let insert = async |envelope: &Envelope, seq: i64| {
            let row = sqlx::query("INSERT INTO events VALUES ($1, $2)")
                .bind(envelope.id())
                .bind(seq);
            row.execute(pool).await.expect("a row");
        };
        let one = envelope("live");
        let ledger = Ledger::default();
        ledger.note([&one], &answer(201, stored(&one, "c1.0.NDI")));
        assert!(
            failure(ledger.assert_stored_once(pool))
                .await
                .contains("stored 0 times")
        );

        insert(&one, 42).await;
        ledger.assert_stored_once(pool).await;
        ledger.note([&one], &answer(200, stored(&one, "c1.0.NDM")));
        assert!(failure(ledger.assert_stored_once(pool)).await.contains("stored at 42"));
        insert(&one, 43).await;
        assert!(
            failure(ledger.assert_stored_once(pool))
                .await
                .contains("stored 2 times")
        );

        let pair = envelopes("live", 2);
        let shared = Ledger::default();
        for event in &pair {
            insert(event, 7).await;
            shared.note([event], &answer(201, stored(event, "c1.0.Nw")));
        }
        assert!(
            failure(shared.assert_stored_once(pool))
                .await
                .contains("share a position")
        );
    }

    #[test]
    fn a_cursor_names_one_position() {
        assert_eq!(position_of("c1.0.NDI"), Some(42));
        assert_eq!(
            (position_of("c1.0"), position_of("c2.0.NDI"), position_of("c1.0.!!")),
            (None, None, None)
        );
    }
}
