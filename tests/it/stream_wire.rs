//! Streams as bytes: behind other answers on the same connection, and for clients that know no chunks.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::{
    client::json as with_json, database::Database, envelopes::envelope, network::Network, service::Service,
};

const TYPE: &str = "live.wire.said";

async fn process() -> (Service, Network, Database) {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let service = Service::start(&database, &network, &[]).await;
    (service, network, database)
}

async fn publish(service: &Service) -> String {
    let event = envelope("live").event_type(TYPE).visibility("public");
    let client = service.client();
    let request = client.request(
        reqwest::Method::POST,
        "/api/v1/events",
        Some(&client.service_token("live")),
    );
    assert_eq!(client.send(with_json(request, event.json())).await.status, 201);
    event.json()["event_id"].as_str().expect("an id").to_owned()
}

/// Reads until the text holds `end`.
async fn read_to(socket: &mut TcpStream, text: &mut String, end: &str) {
    let reading = async {
        while !text.contains(end) {
            let mut part = [0; 4096];
            let count = socket.read(&mut part).await.expect("bytes");
            assert_ne!(count, 0, "the connection ended after {text:?}");
            text.push_str(std::str::from_utf8(&part[..count]).expect("text"));
        }
    };
    timeout(Duration::from_secs(20), reading).await.expect("in time");
}

async fn connect(service: &Service) -> TcpStream {
    let address = service.base().trim_start_matches("http://");
    TcpStream::connect(address).await.expect("a connection")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_comes_behind_the_answers_that_were_asked_for_before_it() {
    let (service, _network, _database) = process().await;
    let mut socket = connect(&service).await;
    let ask = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let stream = ask(&format!("/realtime/stream?topics={TYPE}"));
    let all = [ask("/limits.json").repeat(20), stream].concat();
    socket.write_all(all.as_bytes()).await.expect("it is sent");
    let mut text = String::new();
    read_to(&mut socket, &mut text, ": connected anonymous\n\n\r\n").await;
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 21);
    let head = text.rsplit("HTTP/1.1 200 OK").next().expect("the last answer");
    let (head, body) = head.split_once("\r\n\r\n").expect("a head");
    for line in [
        "content-type: text/event-stream; charset=utf-8",
        "transfer-encoding: chunked",
        "connection: keep-alive",
        "x-openvibe-request-id: ",
        "date: ",
    ] {
        assert!(head.contains(&format!("\r\n{line}")), "no {line} in {head}");
    }
    assert_eq!(body, "23\r\nretry: 3000\n: connected anonymous\n\n\r\n");
    let id = publish(&service).await;
    read_to(&mut socket, &mut text, "}}\n\n\r\n").await;
    let chunk = text
        .rsplit(": connected anonymous\n\n\r\n")
        .next()
        .expect("what follows");
    let (size, frame) = chunk.split_once("\r\n").expect("a size");
    let size = usize::from_str_radix(size, 16).expect("hexadecimal");
    assert_eq!(frame.len(), size + 2, "{chunk}");
    assert!(frame.starts_with("id: c1.0.") && frame.contains(&id), "{frame}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_knows_no_chunks_gets_the_frames_alone_until_the_connection_ends() {
    let (service, _network, _database) = process().await;
    let mut socket = connect(&service).await;
    let ask = format!("GET /realtime/stream?topics={TYPE} HTTP/1.0\r\nHost: x\r\n\r\n");
    socket.write_all(ask.as_bytes()).await.expect("it is sent");
    let mut text = String::new();
    read_to(&mut socket, &mut text, ": connected anonymous\n\n").await;
    assert!(
        !text.contains("chunked") && text.contains("\r\nconnection: close\r\n"),
        "{text}"
    );
    publish(&service).await;
    read_to(&mut socket, &mut text, "}}\n\n").await;
    let body = text.split_once("\r\n\r\n").expect("a head").1;
    assert!(
        body.starts_with("retry: 3000\n: connected anonymous\n\nid: c1.0."),
        "{body}"
    );
    assert_eq!(service.terminate().await.0.code, Some(0));
    let rest = timeout(Duration::from_secs(20), socket.read_to_string(&mut text)).await;
    assert_eq!(rest.expect("in time").expect("a clean end"), 0);
}
