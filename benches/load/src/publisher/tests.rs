//! Load against scripted servers.

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::ledger::Order;

const CREATED: &[u8] = b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}";

/// Answers every request; `answer` decides how, by the number of the request on its connection.
async fn server<F>(answer: fn(u32, TcpStream) -> F) -> SocketAddr
where
    F: Future<Output = Option<TcpStream>> + Send + 'static,
{
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = vec![0; 64 * 1024];
                let mut number = 0;
                while matches!(stream.read(&mut request).await, Ok(1..)) {
                    let Some(next) = answer(number, stream).await else {
                        return;
                    };
                    stream = next;
                    number += 1;
                }
            });
        }
    });
    address
}

fn load(address: SocketAddr, rate: Option<f64>) -> Load<'static> {
    Load {
        address,
        shapes: vec![Shape {
            host: "h",
            token: "t",
            event_type: "live.a.b",
            batch: 1,
            payload_bytes: 64,
        }],
        connections: 1,
        keys: 0,
        length: Duration::from_millis(400),
        events: None,
        rate,
    }
}

async fn run(load: &Load<'_>) -> Tally {
    let account = Arc::new(Account::new(0, Order::Free));
    load.run(&account).await.expect("a server")
}

async fn stalls_once(number: u32, mut stream: TcpStream) -> Option<TcpStream> {
    if number == 20 {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    stream.write_all(CREATED).await.ok()?;
    Some(stream)
}

/// 80 requests are due in 400 ms; those due within a stall of 200 ms are late by half of it on average, and are half of all.
#[tokio::test]
async fn an_open_loop_shows_a_stall_in_the_percentiles() {
    let tally = run(&load(server(stalls_once).await, Some(200.0))).await;
    assert_eq!(tally.events, 80, "all that were due were sent");
    assert_eq!(tally.latency.len(), 80);
    let late = tally.latency.quantile_ms(0.75);
    assert!(late > 50.0, "a quarter waited for more than 50 ms: {late}");
    assert!(tally.latency.quantile_ms(1.0) >= 195.0);
}

/// Why open loops are needed: the percentiles of a closed one hide a stall, since nothing is sent meanwhile.
#[tokio::test]
async fn a_closed_loop_counts_one_slow_request() {
    let mut load = load(server(stalls_once).await, None);
    (load.events, load.length) = (Some(80), Duration::from_secs(20));
    let tally = run(&load).await;
    assert_eq!(tally.events, 80);
    assert!(tally.latency.quantile_ms(0.9) < 50.0);
    assert!(tally.latency.quantile_ms(1.0) >= 195.0);
}

#[tokio::test]
async fn a_budget_ends_a_closed_loop_exactly() {
    let mut load = load(server(stalls_once).await, None);
    (load.shapes[0].batch, load.events, load.length) = (3, Some(20), Duration::from_secs(20));
    let tally = run(&load).await;
    assert_eq!(tally.events, 18, "six whole requests");
}

#[tokio::test]
async fn refusals_and_broken_exchanges_are_told_apart_from_stored_events() {
    async fn answer(number: u32, mut stream: TcpStream) -> Option<TcpStream> {
        let answers: [&[u8]; 3] = [
            CREATED,
            b"HTTP/1.1 503 Later\r\ncontent-length: 5\r\n\r\nlater",
            b"HTTP/1.1 201 Created\r\ncontent-length: 10\r\n\r\ncut",
        ];
        stream.write_all(answers[number as usize % 3]).await.ok()?;
        (number < 2).then_some(stream)
    }
    let mut load = load(server(answer).await, None);
    load.events = Some(6);
    let tally = run(&load).await;
    assert_eq!(tally.events, 2);
    assert_eq!(tally.statuses, BTreeMap::from([(201, 2), (503, 2)]));
    assert_eq!(tally.broken, 2);
    assert_eq!(tally.refusal.as_deref(), Some("later"));
}
