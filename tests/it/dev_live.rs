//! What `openvibe-events dev` gives whoever works with live streams: people, tickets, and pages that no other service has.

use std::process::Stdio;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::api_world::{Site, refused};
use crate::dev::Data;
use crate::support::client::{Client, Response};
use crate::support::contracts::assert_valid;
use crate::support::envelopes::{envelope, id};
use crate::support::process::signal;
use crate::support::wait::{SOON, within};

const PAGES: [(&str, &str); 4] = [
    ("/", "text/html; charset=utf-8"),
    ("/dev/live", "text/html; charset=utf-8"),
    ("/dev/live.js", "text/javascript; charset=utf-8"),
    ("/dev/style.css", "text/css; charset=utf-8"),
];

/// `dev`, running: its issuer and its service.
struct Dev {
    issuer: Client,
    service: Client,
    base: String,
    child: Child,
    _data: Data,
}

impl Dev {
    async fn start() -> Self {
        let data = Data::new();
        let mut child = data.dev(&[]).stderr(Stdio::null()).spawn().expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut address = async |name: &str| loop {
            let line = lines.next_line().await.expect("its output").expect("more of it");
            if let Some(rest) = line.strip_prefix(name) {
                return rest.split_whitespace().next().expect("an address").to_owned();
            }
        };
        let both = async { (address("issuer ").await, address("service ").await) };
        let (issuer, base) = within("dev runs", SOON * 4, both).await;
        // What it goes on to say is not read, and must not block it.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self {
            issuer: Client::new(&issuer),
            service: Client::new(&base),
            base,
            child,
            _data: data,
        }
    }

    async fn stop(mut self) {
        signal("TERM", self.child.id().expect("it runs"));
        let ended = within("dev ends", SOON, self.child.wait()).await;
        assert!(ended.expect("a status").success());
    }

    /// A form as the issuer takes it.
    async fn asked(&self, path: &str, form: &str) -> Value {
        let request = self.issuer.request(Method::POST, path, None).body(form.to_owned());
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        self.issuer.send(request).await.expect(200)
    }

    async fn session(&self, person: &str) -> String {
        let made = self.asked("/person/token", &format!("subject={person}")).await;
        made["access_token"].as_str().expect("a token").to_owned()
    }

    async fn ticket(&self, session: &str) -> Value {
        let request = self
            .issuer
            .request(Method::POST, "/api/v1/realtime/ticket", Some(session));
        self.issuer.send(request).await.expect(200)
    }
}

/// The data of the first message of `event` on a stream.
async fn first(stream: &mut reqwest::Response, event: Option<&str>) -> Value {
    let wanted = event.map(|event| format!("event: {event}"));
    let mut text = String::new();
    let reading = async {
        loop {
            while let Some((frame, rest)) = text.split_once("\n\n") {
                let data = frame.lines().find_map(|line| line.strip_prefix("data: "));
                let kind = frame.lines().find(|line| line.starts_with("event: "));
                if let Some(data) = data.filter(|_| kind == wanted.as_deref()) {
                    return serde_json::from_str(data).expect("JSON");
                }
                text = rest.to_owned();
            }
            let chunk = stream.chunk().await.expect("the stream goes on").expect("more of it");
            text.push_str(std::str::from_utf8(&chunk).expect("UTF-8"));
        }
    };
    within("a message arrives", SOON, reading).await
}

fn policy(answer: &Response) -> &str {
    answer.header("content-security-policy")
}

#[tokio::test]
async fn a_developer_follows_a_stream_as_a_person_with_nothing_set_up() {
    let dev = Dev::start().await;
    let person = id("usr");
    let session = dev.session(&person).await;
    let ticket = dev.ticket(&session).await;
    assert_valid("network.realtime-ticket-result@1", &ticket);
    assert_eq!(ticket["stream_url"], format!("{}/realtime/stream", dev.base));
    let http = reqwest::Client::builder().no_proxy().build().expect("a client");
    let open = async |query: String| {
        let url = format!(
            "{}?topics=media.*&{query}",
            ticket["stream_url"].as_str().expect("a URL")
        );
        http.get(url).send().await.expect("an answer")
    };
    let with_ticket = format!("ticket={}", ticket["ticket"].as_str().expect("a ticket"));
    let mut stream = open(with_ticket.clone()).await;
    assert_eq!(stream.status().as_u16(), 200);
    assert_eq!(
        open(with_ticket).await.status().as_u16(),
        401,
        "a ticket opens one stream"
    );

    let form = "grant_type=client_credentials&client_id=media";
    let token = dev.asked("/oauth/token", form).await;
    let event = envelope("media").subject("user", &person).visibility("subject");
    let token = token["access_token"].as_str();
    dev.service
        .post("/api/v1/events", token, event.json())
        .await
        .expect(201);
    let message = first(&mut stream, None).await;
    assert_valid("events.stream-event@1", &message);
    assert_eq!(message["event"]["event_id"], event.id());

    let next = dev.ticket(&session).await;
    let next = next["ticket"].as_str().expect("a ticket").to_owned();
    let mut stream = open(format!("ticket={next}&last_event_id=c1.9.MQ")).await;
    let gap = first(&mut stream, Some("gap")).await;
    assert_valid("events.stream-gap@1", &gap);
    assert_eq!(gap["reason"], "epoch");
    drop(stream);
    dev.stop().await;
}

#[tokio::test]
async fn the_pages_of_dev_load_nothing_from_elsewhere_and_the_service_answers_beside_them() {
    let dev = Dev::start().await;
    let issuer = dev.issuer.get("/", None).await.text;
    let issuer = issuer
        .split_once("POST ")
        .and_then(|(_, rest)| rest.split_once("/oauth"));
    let issuer = issuer.expect("its address").0;
    for (path, content_type) in PAGES {
        let answer = dev.service.get(path, None).await;
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (200, content_type),
            "{path}"
        );
        assert!(policy(&answer).starts_with("default-src 'self'; "), "{path}");
        assert!(
            policy(&answer).contains(&format!("connect-src 'self' {issuer};")),
            "{path}"
        );
        assert_eq!(answer.header("x-content-type-options"), "nosniff");
        assert!(answer.header("x-openvibe-request-id").starts_with("req_"));
    }
    let home = dev.service.get("/", None).await.text;
    assert!(home.contains("Development only") && home.contains("href=\"/dev/live\"") && home.contains(issuer));
    let live = dev.service.get("/dev/live", None).await.text;
    assert!(live.contains(&format!("data-issuer=\"{issuer}\"")) && live.contains(&dev.base));
    assert!(!live.contains("{issuer}") && !live.contains("{service}"));

    dev.service.get("/api/ready", None).await.expect(200);
    refused(&dev.service.get("/dev/none", None).await, 404, "events.not_found");
    let written = dev.service.post("/", None, &json!({})).await;
    refused(&written, 404, "events.not_found");
    refused(&dev.service.get("/api/v1/events", None).await, 401, "token.missing");
    let metrics = dev.service.get("/metrics", None).await.text;
    assert!(
        metrics.contains("route=\"/api/v1/events\""),
        "routes keep their names behind the pages"
    );
    dev.stop().await;
}

#[tokio::test]
async fn a_service_that_dev_did_not_start_has_no_pages_for_developers() {
    let site = Site::shared().await;
    for (path, _) in PAGES {
        refused(&site.one().get(path, None).await, 404, "events.not_found");
    }
    for name in ["EVENTS_ENV", "NODE_ENV"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_openvibe-events"));
        command
            .arg("dev-service")
            .env_remove("NODE_ENV")
            .env(name, "production");
        let output = command.stdin(Stdio::null()).output().await.expect("it runs");
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("never runs in production"), "{said}");
    }
}
