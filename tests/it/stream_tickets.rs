//! A ticket opens one stream: in whatever process, whenever the second use comes, and only where a stream was opened.

use futures_util::future::join_all;

use crate::support::{
    client::{Response, assert_problem},
    database::Database,
    envelopes::id,
    network::{Network, TokenSpec},
    service::{Service, start_many},
    sse::{Sse, ask},
    wait::{SOON, eventually},
};

const TOPICS: &str = "topics=live.*";

fn ticket() -> String {
    TokenSpec::ticket(&id("usr")).sign()
}

async fn open(service: &Service, query: &str) -> Result<Sse, Response> {
    Sse::open(ask(service.client(), query, None)).await
}

async fn used(service: &Service, ticket: &str) -> Result<Sse, Response> {
    open(service, &format!("{TOPICS}&ticket={ticket}")).await
}

#[track_caller]
fn assert_refused(answer: Result<Sse, Response>, status: u16, code: &str) -> Response {
    let refusal = answer.expect_err("a refusal");
    assert_problem(&refusal, status, code);
    refusal
}

#[tokio::test(flavor = "multi_thread")]
async fn one_use_is_all_in_any_process_and_after_a_restart() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[]).await;
    let ticket = ticket();
    let stream = used(&services[0], &ticket).await.expect("a stream");
    assert_eq!(stream.viewer, "user");
    for service in &services {
        assert_refused(used(service, &ticket).await, 401, "ticket.used");
    }
    drop(stream);
    for service in &services {
        service.kill().await;
    }
    let service = Service::start(&database, &network, &[]).await;
    assert_refused(used(&service, &ticket).await, 401, "ticket.used");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_those_who_race_for_a_ticket_over_two_processes_one_wins() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let services = start_many(&database, &network, 2, &[]).await;
    for _ in 0..5 {
        let ticket = ticket();
        let answers = join_all((0..16).map(|n| used(&services[n % 2], &ticket))).await;
        let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
        assert_eq!(won.len(), 1);
        for answer in lost {
            assert_refused(answer, 401, "ticket.used");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_leaves_the_ticket_good_and_takes_no_place() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[("REALTIME_MAX_CONNECTIONS", "1")]).await;
    let (first, second) = (ticket(), ticket());
    let stream = used(&service, &first).await.expect("a stream");
    let full = assert_refused(used(&service, &second).await, 503, "realtime.over_capacity");
    assert_eq!(full.header("retry-after"), "10");
    drop(stream);
    eventually("the place is free", SOON, async || {
        // A use that is refused for want of a place changes nothing, however often it comes.
        match used(&service, &second).await {
            Ok(_) => Ok(()),
            Err(refusal) => Err(assert_problem(&refusal, 503, "realtime.over_capacity").to_string()),
        }
    })
    .await;

    // One that is refused as used gives its place back.
    for ticket in [&first, &second] {
        eventually("it is used", SOON, async || match used(&service, ticket).await {
            Err(refusal) if refusal.status == 401 => Ok(assert_problem(&refusal, 401, "ticket.used")),
            other => Err(format!("{other:?}")),
        })
        .await;
    }
    let third = ticket();
    for (query, code) in [
        (format!("ticket={third}"), "realtime.bad_request"),
        (format!("topics=A&ticket={third}"), "realtime.bad_topic"),
        (format!("{TOPICS}&{TOPICS}&ticket={third}"), "realtime.bad_request"),
        (
            format!("{TOPICS}&last_event_id=x&last_event_id=y&ticket={third}"),
            "realtime.bad_request",
        ),
    ] {
        assert_refused(open(&service, &query).await, 400, code);
    }
    let twice = format!("{TOPICS}&ticket={third}&ticket={third}");
    assert_refused(open(&service, &twice).await, 401, "ticket.invalid");
    let head = service.client().request(
        reqwest::Method::HEAD,
        &format!("/realtime/stream?{TOPICS}&ticket={third}"),
        None,
    );
    assert_eq!(service.client().send(head).await.status, 404);
    used(&service, &third).await.expect("a stream");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_cannot_begin_costs_no_ticket() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[]).await;
    let ticket = ticket();
    let mut lock = database.pool().begin().await.expect("a transaction");
    // Where a stream begins cannot be told without it.
    sqlx::query("LOCK TABLE store_floor IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *lock)
        .await
        .expect("a lock");
    assert_refused(used(&service, &ticket).await, 503, "events.unavailable");
    lock.rollback().await.expect("the lock is let go");
    used(&service, &ticket).await.expect("a stream");
}
