//! Tests of the development issuer over HTTP, its tokens judged by the service's own verifier.

use std::os::unix::fs::MetadataExt;

use crate::identity::{Jws, Keys, Principal, Sandbox, Sessions, TicketError, Tickets, Verifier};
use crate::tls::{Authorities, Trust};

use super::*;

/// Where the service is that tickets are for.
const SERVICE: &str = "http://127.0.0.1:4300";
const PERSON: &str = "usr_01K7DDE5FG6HJ7KM8NP9QR0STV";

fn unix_s() -> i64 {
    clock::now().0 / 1000
}

struct Answer {
    status: u16,
    cache: String,
    body: Value,
}

async fn send(request: reqwest::RequestBuilder) -> Answer {
    let answer = request.send().await.expect("an answer");
    Answer {
        status: answer.status().as_u16(),
        cache: answer
            .headers()
            .get("cache-control")
            .map_or("", |v| v.to_str().expect("text"))
            .to_owned(),
        body: serde_json::from_slice(&answer.bytes().await.expect("a body")).expect("JSON"),
    }
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().expect("a client")
}

async fn start(directory: &Path) -> Issuer {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    Issuer::start(listener, &directory.join("issuer.key"), SERVICE).expect("it starts")
}

fn scratch() -> PathBuf {
    let path = std::env::temp_dir().join(format!("ov-dev-issuer-{}", ulid::Ulid::generate()));
    fs::create_dir(&path).expect("a directory");
    path
}

async fn ask(issuer: &Issuer, form: &str) -> Answer {
    let request = client()
        .post(format!("{}/oauth/token", issuer.url()))
        .header("content-type", "application/x-www-form-urlencoded")
        .body(form.to_owned());
    send(request).await
}

async fn verifier(issuer: &Issuer) -> Verifier {
    let url = format!("{}/api/.well-known/jwks", issuer.url());
    Verifier {
        keys: Keys::fetching(url.parse().expect("a URL"), Trust::load(&Authorities::default())),
        issuer: issuer.url().to_owned(),
        audience: AUDIENCE.to_owned(),
    }
}

#[tokio::test]
async fn any_client_gets_a_token_that_the_service_accepts() {
    let home = scratch();
    let issuer = start(&home).await;
    let keys = send(client().get(format!("{}/api/.well-known/jwks", issuer.url()))).await;
    assert_eq!((keys.status, keys.cache.as_str()), (200, "no-store"));
    assert!(
        keys.body["public_key"]
            .as_str()
            .is_some_and(|pem| pem.starts_with("-----BEGIN PUBLIC KEY-----\n"))
    );
    assert!(
        Keys::pinned(keys.body["public_key"].as_str().expect("a PEM")).is_ok(),
        "the PEM alone is enough"
    );

    let answer = ask(
        &issuer,
        "grant_type=client_credentials&client_id=media-hub&client_secret=any",
    )
    .await;
    assert_eq!((answer.status, answer.cache.as_str()), (200, "no-store"));
    assert_eq!(answer.body["token_type"], "Bearer");
    assert_eq!(answer.body["expires_in"], 300);
    assert_eq!(answer.body["scope"], CAPABILITIES.join(" "));
    let token = answer.body["access_token"].as_str().expect("a token");
    let header = URL_SAFE_NO_PAD
        .decode(token.split('.').next().expect("a header"))
        .expect("base64");
    assert_eq!(header, br#"{"alg":"RS256","typ":"JWT"}"#, "no kid");
    let verifier = verifier(&issuer).await;
    let claims = verifier
        .verify(token, Sandbox::Refused, unix_s())
        .await
        .expect("accepted");
    assert_eq!(
        claims.principal,
        Principal::Service {
            slug: "media-hub".to_owned()
        }
    );
    assert_eq!(claims.capabilities, CAPABILITIES);
    assert!(
        verifier.verify(token, Sandbox::Refused, unix_s() + 400).await.is_err(),
        "it expires"
    );

    let long = issuer.long_token("media");
    assert!(
        verifier
            .verify(&long, Sandbox::Refused, unix_s() + 43_000)
            .await
            .is_ok(),
        "for pasted lines"
    );
    fs::remove_dir_all(home).expect("clean up");
}

#[tokio::test]
async fn tokens_hold_after_a_restart_because_the_key_is_kept_in_private() {
    let home = scratch();
    let first = start(&home).await;
    let before = first.signer.key_set().expect("keys");
    assert_eq!(
        fs::metadata(home.join("issuer.key")).expect("kept").mode() & 0o777,
        0o600
    );
    drop(first);
    let second = start(&home).await;
    assert_eq!(second.signer.key_set().expect("keys"), before);
    drop(second);

    fs::write(home.join("issuer.key"), b"not a key").expect("damaged");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let refused = Issuer::start(listener, &home.join("issuer.key"), SERVICE).expect_err("no key");
    assert!(refused.to_string().contains("delete it"), "{refused}");
    fs::remove_dir_all(home).expect("clean up");
}

#[tokio::test]
async fn every_bad_request_is_refused_by_its_name() {
    let home = scratch();
    let issuer = start(&home).await;
    let base = "grant_type=client_credentials&client_id=media";
    for (form, status, error) in [
        ("", 400, "unsupported_grant_type"),
        ("grant_type=password&client_id=media", 400, "unsupported_grant_type"),
        ("grant_type=client_credentials", 401, "invalid_client"),
        ("grant_type=client_credentials&client_id=Media", 401, "invalid_client"),
        (
            "grant_type=client_credentials&client_id=app_01K7AAB2CD3EF4GH5JK6MN7PQR",
            401,
            "invalid_client",
        ),
        (&format!("{base}&audience=a%20b"), 400, "invalid_target"),
        (&format!("{base}&scope=everything"), 400, "invalid_scope"),
        (&format!("{base}&scope=events..read"), 400, "invalid_scope"),
        (&format!("{base}&scope=%20"), 400, "invalid_scope"),
        (&format!("{base}&lifetime_s=0"), 400, "invalid_request"),
        (&format!("{base}&lifetime_s=43201"), 400, "invalid_request"),
        (&format!("{base}&lifetime_s=long"), 400, "invalid_request"),
    ] {
        let answer = ask(&issuer, form).await;
        assert_eq!(
            (answer.status, &answer.body["error"]),
            (status, &json!(error)),
            "{form}"
        );
        assert!(answer.body["error_description"].is_string(), "{form}");
    }
    let json = client()
        .post(format!("{}/oauth/token", issuer.url()))
        .header("content-type", "application/json");
    assert_eq!(send(json.body("{}")).await.body["error"], "invalid_request");

    let narrow = ask(
        &issuer,
        &format!("{base}&scope=events.event.read+media.*&audience=openvibe.media&lifetime_s=60"),
    )
    .await;
    assert_eq!(narrow.body["scope"], "events.event.read media.*");
    assert_eq!(narrow.body["expires_in"], 60);
    let token = narrow.body["access_token"].as_str().expect("a token");
    let refused = verifier(&issuer).await.verify(token, Sandbox::Refused, unix_s()).await;
    assert!(
        refused.is_err(),
        "a token for another audience is none for this service"
    );
    fs::remove_dir_all(home).expect("clean up");
}

async fn session(issuer: &Issuer, form: &str) -> Answer {
    send(
        client()
            .post(format!("{}/person/token", issuer.url()))
            .body(form.to_owned()),
    )
    .await
}

fn token_of(answer: &Answer) -> &str {
    answer.body["access_token"].as_str().expect("a token")
}

fn ticket_request(issuer: &Issuer) -> reqwest::RequestBuilder {
    client().post(format!("{}/api/v1/realtime/ticket", issuer.url()))
}

fn keys(issuer: &Issuer) -> Keys {
    Keys::pinned(&issuer.signer.pem().expect("a PEM")).expect("a key")
}

#[tokio::test]
async fn anybody_gets_a_session_that_the_service_accepts() {
    let home = scratch();
    let issuer = start(&home).await;
    let sessions = Sessions {
        keys: keys(&issuer),
        issuer: issuer.url().to_owned(),
        audiences: None,
    };
    let named = session(&issuer, &format!("subject={PERSON}&lifetime_s=60")).await;
    assert_eq!((named.status, named.cache.as_str()), (200, "no-store"));
    assert_eq!(
        (
            &named.body["subject"],
            &named.body["expires_in"],
            &named.body["token_type"]
        ),
        (&json!(PERSON), &json!(60), &json!("Bearer"))
    );
    let person = sessions.person(token_of(&named), unix_s()).await;
    assert_eq!(
        person.expect("a key").expect("a session").subject.as_deref(),
        Some(PERSON)
    );
    let [one, other] = [session(&issuer, "").await, session(&issuer, "").await];
    assert_ne!(one.body["subject"], other.body["subject"], "somebody new each time");
    let person = sessions.person(token_of(&one), unix_s() + 43_000).await;
    let subject = person.expect("a key").expect("for a day's work").subject;
    assert_eq!(one.body["subject"], json!(subject.expect("a person")));
    for bad in [
        "subject=57",
        "subject=svc:live",
        "subject=usr_x",
        "lifetime_s=0",
        "lifetime_s=x",
    ] {
        let refused = session(&issuer, bad).await;
        assert_eq!(
            (refused.status, &refused.body["error"]),
            (400, &json!("invalid_request")),
            "{bad}"
        );
    }
    fs::remove_dir_all(home).expect("clean up");
}

#[tokio::test]
async fn a_session_gets_a_new_ticket_each_time_by_bearer_or_by_cookie() {
    let home = scratch();
    let issuer = start(&home).await;
    let tickets = Tickets {
        keys: keys(&issuer),
        issuer: issuer.url().to_owned(),
        audience: AUDIENCE.to_owned(),
    };
    let made = session(&issuer, &format!("subject={PERSON}")).await;
    let token = token_of(&made);
    let mut ids = Vec::new();
    for request in [
        ticket_request(&issuer).bearer_auth(token),
        ticket_request(&issuer).header("cookie", format!("theme=dark; ov_token={token}")),
    ] {
        let answer = send(request).await;
        assert_eq!((answer.status, answer.cache.as_str()), (200, "no-store"));
        let body = &answer.body;
        assert_eq!(
            (
                &body["subject"],
                &body["expires_in"],
                &body["stream_url"],
                &body["topics"]
            ),
            (
                &json!(PERSON),
                &json!(120),
                &json!("http://127.0.0.1:4300/realtime/stream"),
                &json!(["network.notification.*"])
            )
        );
        let text = body["ticket"].as_str().expect("a ticket");
        let ticket = tickets.read(text, unix_s()).await.expect("it holds");
        assert_eq!(ticket.subject, PERSON);
        let ends = crate::domain::time::Millis(ticket.expires_at_s * 1000).to_iso();
        assert_eq!(body["expires_at"], ends);
        let late = tickets.read(text, unix_s() + 121).await;
        assert_eq!(late, Err(TicketError::Expired));
        ids.push(ticket.id);
    }
    assert_ne!(ids[0], ids[1], "each opens a stream of its own");
    fs::remove_dir_all(home).expect("clean up");
}

#[tokio::test]
async fn whoever_has_no_session_of_a_person_is_told_why_there_is_no_ticket() {
    let home = scratch();
    let issuer = start(&home).await;
    let guest = session(&issuer, "subject=gst_01K7DDE5FG6HJ7KM8NP9QR0STV").await;
    let old = session(&issuer, "subject=none").await;
    assert!(
        !Jws::parse(token_of(&old))
            .expect("a token")
            .claims()
            .contains_key("subject_id"),
        "as old sessions are"
    );
    let service = issuer.long_token("media");
    for (token, status, code) in [
        (None, 401, "token.missing"),
        (Some("nonsense"), 401, "token.invalid"),
        (Some(service.as_str()), 401, "token.invalid"),
        (Some(token_of(&guest)), 403, "realtime.guest"),
        (Some(token_of(&old)), 503, "realtime.no_subject"),
    ] {
        let request = ticket_request(&issuer);
        let answer = send(match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        })
        .await;
        assert_eq!((answer.status, answer.cache.as_str()), (status, "no-store"), "{code}");
        let members = answer.body.as_object().expect("an object");
        assert_eq!((members.len(), &answer.body["code"]), (2, &json!(code)));
        assert!(answer.body["error"].is_string(), "{code}");
    }
    fs::remove_dir_all(home).expect("clean up");
}

#[tokio::test]
async fn a_page_of_this_machine_may_ask_for_tickets_and_a_foreign_one_may_not() {
    let home = scratch();
    let issuer = start(&home).await;
    let preflight = |origin: &'static str| {
        let request = client()
            .request(
                reqwest::Method::OPTIONS,
                format!("{}/api/v1/realtime/ticket", issuer.url()),
            )
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization");
        async move { request.send().await.expect("an answer") }
    };
    let text = |answer: &reqwest::Response, name: &str| {
        let value = answer.headers().get(name);
        value.map_or_else(String::new, |value| value.to_str().expect("text").to_owned())
    };
    let ours = preflight("http://127.0.0.1:4300").await;
    assert_eq!(ours.status().as_u16(), 204);
    assert_eq!(text(&ours, "access-control-allow-origin"), "http://127.0.0.1:4300");
    assert_eq!(text(&ours, "access-control-allow-credentials"), "true");
    assert_eq!(
        text(&ours, "access-control-allow-headers"),
        "Authorization, Content-Type"
    );
    assert!(text(&ours, "access-control-allow-methods").contains("POST"));
    let refused = ticket_request(&issuer).header("origin", "http://localhost:5173").send();
    let refused = refused.await.expect("an answer");
    assert_eq!(refused.status().as_u16(), 401);
    assert_eq!(
        text(&refused, "access-control-allow-origin"),
        "http://localhost:5173",
        "a page may read why"
    );
    let foreign = preflight("https://evil.example").await;
    assert_eq!(text(&foreign, "access-control-allow-origin"), "");
    assert_eq!(text(&foreign, "vary"), "Origin");
    fs::remove_dir_all(home).expect("clean up");
}
