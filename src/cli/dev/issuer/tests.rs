//! Tests of the development issuer over HTTP, its tokens judged by the service's own verifier.

use std::os::unix::fs::MetadataExt;

use crate::identity::{Keys, Principal, Sandbox, Verifier};
use crate::tls::{Authorities, Trust};

use super::*;

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
    Issuer::start(listener, &directory.join("issuer.key")).expect("it starts")
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
    let refused = Issuer::start(listener, &home.join("issuer.key")).expect_err("no key");
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
