//! What only PostgreSQL can do to its carrier.

use carriers::{Class, Heard};
use sqlx::{Connection, PgConnection};

use super::support::process::unique;
use super::support::wait::{SOON, eventually};
use super::support::world::{Backing, World};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_fits_into_a_notification_means_everything() {
    let world = World::of("pg-v1").await;
    let (one, two) = world.pair().await;
    two.heard.lock().clear();
    let many: Vec<_> = (0..1000).map(|_| unique(Class::Queue)).collect();
    one.send(Class::Queue, &many).await.expect("taken");
    eventually("it looks at everything", SOON, async || {
        *two.heard.lock() == [Heard::Everything]
    })
    .await;
    assert!(
        !one.heard.lock().iter().any(|heard| matches!(heard, Heard::Signals(_))),
        "a process hears itself"
    );
    one.reaches_any(&[&two], Class::Queue).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strange_notifications_say_nothing_and_what_is_behind_them_arrives() {
    let world = World::of("pg-v1").await;
    let (one, two) = world.pair().await;
    let Backing::Database(database) = &world.backing else {
        panic!("a database")
    };
    let mut anybody = PgConnection::connect(database.url().as_str())
        .await
        .expect("the server answers");
    for payload in [
        "",
        "nonsense",
        r#"{"from":"x","ids":[1,{}]}"#,
        &"x".repeat(7999),
        &"[".repeat(7999),
    ] {
        let notify = sqlx::query("SELECT pg_notify('openvibe_events', $1)").bind(payload);
        notify.execute(&mut anybody).await.expect("notified");
    }
    let real = unique(Class::Topic);
    one.send(Class::Topic, std::slice::from_ref(&real))
        .await
        .expect("taken");
    eventually("the real one arrives", SOON, async || two.signals() == [real.clone()]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_the_server_ends_are_made_again() {
    let world = World::of("pg-v1").await;
    let (one, two) = world.pair().await;
    one.reaches_any(&[&two], Class::Queue).await;
    let Backing::Database(database) = &world.backing else {
        panic!("a database")
    };
    let mut admin = PgConnection::connect(database.url().as_str())
        .await
        .expect("the server answers");
    two.heard.lock().clear();
    let ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                 WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let ended: i64 = sqlx::query_scalar(ended).fetch_one(&mut admin).await.expect("ended");
    assert!(ended >= 3, "two that listen and one that calls, not {ended}");
    // The call finds its connection dead and makes another, within the one call.
    one.send(Class::Queue, &[unique(Class::Queue)]).await.expect("taken");
    eventually("it looks at everything", SOON, async || {
        two.heard.lock().contains(&Heard::Everything)
    })
    .await;
    one.reaches_any(&[&two], Class::Queue).await;
}
