//! Keys, tokens and a scripted key server for the tests of this room.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair, KeySize};
use aws_lc_rs::signature::{KeyPair as _, RSA_PKCS1_SHA256};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::watch;
use url::Url;

use super::{Keys, Verifier};
use crate::tls::{Authorities, Trust};

/// The moment at which the tokens of these tests are judged.
pub(super) const NOW_S: i64 = 1_761_033_930;
pub(super) const ISSUER: &str = "https://openvibe.network";
pub(super) const ULID: &str = "01K7CCD4EF5GH6JK7MN8PQ9RST";

/// What any process trusts.
pub(super) fn trust() -> Trust {
    static TRUST: OnceLock<Trust> = OnceLock::new();
    TRUST.get_or_init(|| Trust::load(&Authorities::default())).clone()
}

/// A signing key and the name it is published under.
pub(super) struct TestKey {
    kid: &'static str,
    pair: KeyPair,
}

/// The key called `kid`: `k1`, `k2` or `rogue`, made once.
pub(super) fn key(kid: &str) -> &'static TestKey {
    static KEYS: OnceLock<BTreeMap<&'static str, TestKey>> = OnceLock::new();
    let make = |kid| {
        (
            kid,
            TestKey {
                kid,
                pair: KeyPair::generate(KeySize::Rsa2048).expect("a key"),
            },
        )
    };
    &KEYS.get_or_init(|| ["k1", "k2", "rogue"].map(make).into())[kid]
}

impl TestKey {
    pub(super) fn jwk(&self) -> Value {
        let public = self.pair.public_key();
        let number = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        json!({"kty": "RSA", "use": "sig", "alg": "RS256", "kid": self.kid,
            "n": number(public.modulus().big_endian_without_leading_zero()),
            "e": number(public.exponent().big_endian_without_leading_zero())})
    }

    pub(super) fn pem(&self) -> String {
        let der: PublicKeyX509Der<'_> = self.pair.public_key().as_der().expect("a public key");
        pem("PUBLIC KEY", der.as_ref())
    }

    pub(super) fn pkcs1_pem(&self) -> String {
        pem("RSA PUBLIC KEY", self.pair.public_key().as_ref())
    }

    /// A token as the network makes them: no `kid`.
    pub(super) fn token(&self, claims: &Value) -> String {
        self.sign(&json!({"alg": "RS256", "typ": "JWT"}), claims)
    }

    pub(super) fn token_naming(&self, kid: &str, claims: &Value) -> String {
        self.sign(&json!({"alg": "RS256", "typ": "JWT", "kid": kid}), claims)
    }

    pub(super) fn sign(&self, header: &Value, claims: &Value) -> String {
        self.sign_raw(&header.to_string(), &claims.to_string())
    }

    pub(super) fn sign_raw(&self, header: &str, claims: &str) -> String {
        let signed = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
        let mut signature = vec![0; self.pair.public_modulus_len()];
        self.pair
            .sign(
                &RSA_PKCS1_SHA256,
                &SystemRandom::new(),
                signed.as_bytes(),
                &mut signature,
            )
            .expect("a signature");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

fn pem(tag: &str, der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN {tag}-----\n{}\n-----END {tag}-----\n", lines.join("\n"))
}

/// Believes the key `k1`.
pub(super) fn verifier() -> Verifier {
    let keys = Keys::pinned(&key("k1").pem()).expect("a usable key");
    Verifier {
        keys,
        issuer: ISSUER.to_owned(),
        audience: "openvibe.events".to_owned(),
    }
}

pub(super) fn service_claims() -> Value {
    json!({"iss": ISSUER, "sub": "svc:media", "actor_type": "service", "aud": ["openvibe.events"],
        "cap": ["events.event.publish"], "iat": NOW_S - 30, "exp": NOW_S + 270, "jti": "jti-00000001"})
}

pub(super) fn app_claims() -> Value {
    let project = format!("prj_{ULID}");
    json!({"iss": ISSUER, "sub": format!("app:app_{ULID}"), "actor_type": "app", "aud": ["openvibe.events"],
        "cap": ["events.app.*"], "iat": NOW_S - 30, "exp": NOW_S + 270, "jti": "jti-00000002", "env": "sandbox",
        "ns": [project, format!("app.{project}.*")], "project_id": project, "on_behalf_of": format!("usr_{ULID}")})
}

/// `claims` with the members of `over` in place; `null` takes one away.
pub(super) fn with(mut claims: Value, over: Value) -> Value {
    let (Value::Object(members), Value::Object(over)) = (&mut claims, over) else {
        panic!("two objects")
    };
    for (name, value) in over {
        if value.is_null() {
            members.remove(&name);
        } else {
            members.insert(name, value);
        }
    }
    claims
}

/// The network's key document on a local port, answering as the test says and only while the gate is open.
pub(super) struct KeyServer {
    pub(super) url: Url,
    answer: Arc<Mutex<String>>,
    hits: watch::Receiver<usize>,
    gate: watch::Sender<bool>,
}

impl KeyServer {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let url = format!("http://{address}/api/.well-known/jwks").parse().expect("a URL");
        let answer = Arc::new(Mutex::new(String::new()));
        let (hit, hits) = watch::channel(0);
        let (gate, opened) = watch::channel(true);
        let script = Arc::clone(&answer);
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let (script, hit, mut opened) = (Arc::clone(&script), hit.clone(), opened.clone());
                tokio::spawn(async move {
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        if socket.read_buf(&mut request).await.unwrap_or(0) == 0 {
                            return;
                        }
                    }
                    hit.send_modify(|hits| *hits += 1);
                    if opened.wait_for(|open| *open).await.is_ok() {
                        let answer = script.lock().clone();
                        socket.write_all(answer.as_bytes()).await.ok();
                    }
                });
            }
        });
        Self {
            url,
            answer,
            hits,
            gate,
        }
    }

    pub(super) fn publish(&self, kids: &[&str]) {
        let keys: Vec<_> = kids.iter().map(|kid| key(kid).jwk()).collect();
        self.answer("200 OK", "", &json!({"keys": keys}).to_string());
    }

    pub(super) fn answer(&self, status: &str, header: &str, body: &str) {
        let length = body.len();
        *self.answer.lock() =
            format!("HTTP/1.1 {status}\r\n{header}content-length: {length}\r\nconnection: close\r\n\r\n{body}");
    }

    pub(super) fn hold(&self) {
        self.gate.send_replace(false);
    }

    pub(super) fn release(&self) {
        self.gate.send_replace(true);
    }

    pub(super) fn hits(&self) -> usize {
        *self.hits.borrow()
    }

    /// Waits for the request of that number, five seconds at most.
    pub(super) async fn until_hit(&self, number: usize) {
        let mut hits = self.hits.clone();
        let reached = tokio::time::timeout(std::time::Duration::from_secs(5), hits.wait_for(|hits| *hits >= number));
        assert!(reached.await.is_ok(), "request {number} never came");
    }
}
