//! Signing secrets at rest: sealed when stored, sealed anew under a newer key, opened by a claim.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use openvibe_events::{
    domain::{app::Holder, ids::SubscriptionId, seal::Sealer},
    store::{self, Addresses, Store},
};

use crate::{
    api_world::Site,
    store_fixture::{Fixture, claim, events_of, put},
    support::{
        contracts::assert_valid,
        network::Network,
        service::Service,
        wait::{SOON, eventually},
    },
};

const OLD: [u8; 32] = [1; 32];
const NEW: [u8; 32] = [2; 32];

/// A process with these keys, newest first.
async fn with_keys(fixture: &Fixture, keys: &[&[u8; 32]]) -> Store {
    let addresses = Addresses::parse(fixture.url(), fixture.url()).expect("the URL of a test database");
    let store = Store::connect(addresses).await.expect("a store");
    store.sealing_with(Sealer::new(keys.iter().copied()))
}

/// What a claim of this process would sign with; the error as it is put on record.
async fn opened(fixture: &Fixture, store: &Store, id: &SubscriptionId) -> Result<Vec<String>, String> {
    put(store, Some(id), &events_of("live.stream.started", 1), None)
        .await
        .expect("an event");
    let pass = claim(store, "w", &[id]).await;
    fixture.sql("DELETE FROM deliveries").await;
    let secrets = pass.claimed.into_iter().next().expect("a claim").secrets;
    secrets.map_err(|error| error.to_string()).map(|secrets| {
        let all = std::iter::once(secrets.current).chain(secrets.previous);
        all.map(|secret| secret.expose().to_owned()).collect()
    })
}

async fn stored(fixture: &Fixture, id: &SubscriptionId) -> (String, Option<String>) {
    sqlx::query_as("SELECT secret, previous_secret FROM subscriptions WHERE id = $1")
        .bind(id.as_str())
        .fetch_one(fixture.pool())
        .await
        .expect("the subscription")
}

#[tokio::test]
async fn secrets_are_sealed_when_stored_and_again_under_a_newer_key() {
    let fixture = Fixture::new().await;
    let plain = fixture.subscription(1).await;
    let old = with_keys(&fixture, &[&OLD]).await;
    assert_eq!(
        opened(&fixture, &old, &plain).await,
        Ok(vec!["whsec_test".to_owned()]),
        "from before the key"
    );

    // Both secrets of a rotation, whichever of them was there before the key.
    old.rotate_secret(&Holder::service("chat"), &plain, "whsec_later", 60_000)
        .await
        .expect("a rotation");
    let (secret, previous) = stored(&fixture, &plain).await;
    assert!(secret.starts_with("sealed:1:") && previous.as_deref() == Some("whsec_test"));
    let both = Ok(vec!["whsec_later".to_owned(), "whsec_test".to_owned()]);
    assert_eq!(opened(&fixture, &old, &plain).await, both);
    let done = old.reseal("").await.expect("a batch");
    assert_eq!((done.sealed, done.unopened, done.next), (1, vec![], None));
    assert!(
        stored(&fixture, &plain)
            .await
            .1
            .expect("a former secret")
            .starts_with("sealed:1:")
    );
    assert_eq!(opened(&fixture, &old, &plain).await, both);
    assert_eq!(
        old.reseal("").await.expect("a batch").sealed,
        0,
        "nothing is sealed twice"
    );

    let newer = with_keys(&fixture, &[&NEW, &OLD]).await;
    assert_eq!(opened(&fixture, &newer, &plain).await, both, "while its key is listed");
    assert_eq!(newer.reseal("").await.expect("a batch").sealed, 1);
    let newest = with_keys(&fixture, &[&NEW]).await;
    assert_eq!(opened(&fixture, &newest, &plain).await, both);
    let error = opened(&fixture, &old, &plain).await.expect_err("its key is gone");
    assert!(
        error.contains("EVENTS_SECRET_KEY") && !error.contains("whsec"),
        "{error}"
    );

    // What no key opens stays, is named, and holds up no other.
    let other = fixture.subscription(1).await;
    let done = old.reseal("").await.expect("a batch");
    assert_eq!((done.sealed, done.unopened), (1, vec![plain.clone()]));
    assert!(stored(&fixture, &other).await.0.starts_with("sealed:1:"));
    assert_eq!(opened(&fixture, &newest, &plain).await, both);

    // A row that was given the secret of another one signs nothing.
    fixture
        .sql("UPDATE subscriptions s SET secret = o.secret FROM subscriptions o WHERE o.id <> s.id")
        .await;
    let error = opened(&fixture, &newest, &other).await.expect_err("sealed for another");
    assert!(error.contains("another subscription"), "{error}");
}

#[tokio::test]
async fn many_secrets_are_sealed_in_batches() {
    let fixture = Fixture::new().await;
    fixture
        .sql(
            "INSERT INTO subscriptions (id, consumer, topic_pattern, endpoint, secret, created_at, updated_at) \
             SELECT 'sub_' || lpad(n::text, 26, '0'), 'chat', '*', 'http://127.0.0.1/' || n, 'whsec_test', 1, 1 \
             FROM generate_series(1, 250) n",
        )
        .await;
    let store = with_keys(&fixture, &[&NEW]).await;
    let (mut after, mut batches) = (String::new(), Vec::new());
    loop {
        let done = store.reseal(&after).await.expect("a batch");
        batches.push(done.sealed);
        match done.next {
            Some(next) => after = next,
            None => break,
        }
    }
    assert_eq!(batches, [100, 100, 50]);
    let untouched = "SELECT count(*) FROM subscriptions WHERE secret NOT LIKE 'sealed:1:%' OR updated_at <> 1";
    assert_eq!(fixture.number(untouched).await, 0);
}

#[tokio::test]
async fn a_former_secret_is_erased_when_it_no_longer_signs_and_not_before() {
    let fixture = Fixture::new().await;
    let (ending, lasting) = (fixture.subscription(1).await, fixture.subscription(1).await);
    let store = with_keys(&fixture, &[&NEW]).await;
    for id in [&ending, &lasting] {
        let rotated = store
            .rotate_secret(&Holder::service("chat"), id, "whsec_later", 60_000)
            .await;
        rotated.expect("a rotation").expect("a subscription");
    }
    let nothing = store::Erased { erased: 0, more: false };
    assert_eq!(store.erase_former_secrets().await.expect("a look"), nothing);
    fixture
        .sql(&format!(
            "UPDATE subscriptions SET previous_secret_until = now_ms() - 1, updated_at = 1 WHERE id = '{ending}'"
        ))
        .await;
    let version = "SELECT version FROM store_counter";
    let untouched = fixture.number(version).await;
    let (secret, _) = stored(&fixture, &ending).await;
    let erased = store.erase_former_secrets().await.expect("a batch");
    assert_eq!((erased.erased, erased.more), (1, false));
    assert_eq!(stored(&fixture, &ending).await, (secret, None));
    assert!(stored(&fixture, &lasting).await.1.is_some(), "this one still signs");
    let dated = "SELECT count(*) FROM subscriptions WHERE updated_at = 1 AND previous_secret_until IS NULL";
    assert_eq!(fixture.number(dated).await, 1, "to its consumer nothing has changed");
    let after = fixture.number(version).await;
    assert!(after > untouched, "claims read the subscription anew");
    assert_eq!(store.erase_former_secrets().await.expect("a look"), nothing);
    assert_eq!(
        fixture.number(version).await,
        after,
        "a look that finds nothing disturbs nobody"
    );

    let both = Ok(vec!["whsec_later".to_owned(), "whsec_test".to_owned()]);
    assert_eq!(opened(&fixture, &store, &lasting).await, both);
    assert_eq!(
        opened(&fixture, &store, &ending).await,
        Ok(vec!["whsec_later".to_owned()])
    );
}

#[tokio::test]
async fn a_former_secret_that_is_not_yet_erased_signs_nothing_once_its_overlap_has_ended() {
    let fixture = Fixture::new().await;
    let (ended, lasting) = (fixture.subscription(1).await, fixture.subscription(1).await);
    for id in [&ended, &lasting] {
        let rotated = fixture
            .store
            .rotate_secret(&Holder::service("chat"), id, "whsec_later", 60_000)
            .await;
        rotated.expect("a rotation").expect("a subscription");
    }
    fixture
        .sql(&format!(
            "UPDATE subscriptions SET previous_secret_until = now_ms() WHERE id = '{ended}'"
        ))
        .await;
    let only_the_new = Ok(vec!["whsec_later".to_owned()]);
    assert_eq!(opened(&fixture, &fixture.store, &ended).await, only_the_new);
    assert_eq!(
        stored(&fixture, &ended).await.1.as_deref(),
        Some("whsec_test"),
        "nobody has erased it"
    );
    let both = Ok(vec!["whsec_later".to_owned(), "whsec_test".to_owned()]);
    assert_eq!(opened(&fixture, &fixture.store, &lasting).await, both);
}

#[tokio::test]
async fn many_former_secrets_are_erased_in_batches_by_any_number_of_processes() {
    let fixture = Fixture::new().await;
    fixture
        .sql(
            "INSERT INTO subscriptions (id, consumer, topic_pattern, endpoint, secret, previous_secret, \
             previous_secret_until, created_at, updated_at) \
             SELECT 'sub_' || lpad(n::text, 26, '0'), 'chat', '*', 'http://127.0.0.1/' || n, 'whsec_test', 'whsec_old', 1, 1, 1 \
             FROM generate_series(1, 250) n",
        )
        .await;
    let alone = fixture.store.erase_former_secrets().await.expect("a batch");
    assert_eq!((alone.erased, alone.more), (100, true));
    let (one, two) = (fixture.another().await, fixture.another().await);
    let all = async |store: &Store| {
        let mut sum = 0;
        loop {
            let done = store.erase_former_secrets().await.expect("a batch");
            sum += done.erased;
            if !done.more {
                break sum;
            }
        }
    };
    let (first, second) = tokio::join!(all(&one), all(&two));
    assert_eq!(first + second, 150, "each is erased once");
    let left = "SELECT count(*) FROM subscriptions WHERE previous_secret IS NOT NULL";
    assert_eq!(fixture.number(left).await, 0);
}

#[tokio::test]
async fn a_running_process_erases_what_a_rotation_left_behind() {
    let (fixture, network) = tokio::join!(Fixture::new(), Network::start());
    let id = fixture.subscription(1).await;
    let service = Service::start(fixture.database(), &network, &[]).await;
    let path = format!("/api/v1/subscriptions/{id}/rotate-secret");
    let token = service.client().service_token("chat");
    let body = serde_json::json!({ "overlap_s": 1 });
    service.client().post(&path, Some(&token), &body).await.expect(200);
    assert!(stored(&fixture, &id).await.1.is_some(), "it signs for a second");
    eventually("it is erased", SOON, async || stored(&fixture, &id).await.1.is_none()).await;
}

#[tokio::test]
async fn a_started_process_seals_what_was_stored_before_it_had_a_key_and_shows_neither() {
    let (fixture, network) = tokio::join!(Fixture::new(), Network::start());
    let id = fixture.subscription(1).await;
    let key = STANDARD.encode(NEW);
    let service = Service::start(fixture.database(), &network, &[("EVENTS_SECRET_KEY", &key)]).await;
    eventually("the secret is sealed", SOON, async || {
        let (secret, _) = stored(&fixture, &id).await;
        secret.starts_with("sealed:1:").then_some(()).ok_or(secret)
    })
    .await;
    let log = service.log();
    assert!(log.contains("sealed with the newest key"), "{log}");
    assert!(!log.contains("whsec_test") && !log.contains(&key), "{log}");
    assert!(!log.contains("EVENTS_SECRET_KEY is not set"), "{log}");
}

#[tokio::test]
async fn a_process_that_lacks_the_key_of_a_secret_is_degraded_and_ready() {
    let (fixture, network) = tokio::join!(Fixture::new(), Network::start());
    let key = STANDARD.encode(NEW);
    let with = Service::start(fixture.database(), &network, &[("EVENTS_SECRET_KEY", &key)]).await;
    let without = Service::start(fixture.database(), &network, &[]).await;
    let look = async |service: &Service| service.client().get("/api/ready", None).await.expect(200);
    assert!(
        look(&without).await["checks"].get("signing_secrets").is_none(),
        "no secret is sealed yet"
    );
    fixture.subscription(1).await;
    fixture
        .sql("UPDATE subscriptions SET secret = 'sealed:1:0badcafe:'")
        .await;
    for service in [&without, &with] {
        eventually("it misses the key", SOON, async || {
            let report = look(service).await;
            let amiss = report["degraded"] == serde_json::json!(["signing_secrets"]);
            amiss.then_some(()).ok_or(report.to_string())
        })
        .await;
        let report = look(service).await;
        assert_valid("service.ready@1", &report);
        assert_eq!(report["checks"]["signing_secrets"]["detail"]["subscriptions"], 1);
    }
}

#[tokio::test]
async fn a_process_without_a_key_says_so_at_its_start() {
    let site = Site::shared().await;
    assert!(site.service().log().contains("EVENTS_SECRET_KEY is not set"));
}
