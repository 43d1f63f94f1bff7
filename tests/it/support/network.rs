//! OpenVibe.Network as the service sees it: an issuer with real RSA keys, its key set served over real HTTP.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::{
    encoding::AsDer,
    rand::SystemRandom,
    rsa::{KeyPair, KeySize},
    signature::{KeyPair as _, RSA_PKCS1_SHA256},
};
use base64::{Engine, engine::general_purpose::STANDARD, engine::general_purpose::URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

use super::{envelopes::id, http1, logs, wait};

/// The issuer every token names, wherever the key set is served.
pub(crate) const ISSUER: &str = "https://openvibe.network";

/// The audience of this service.
pub(crate) const AUDIENCE: &str = "openvibe.events";

/// The key Network signs with unless a token says otherwise, and the only one it publishes at first.
pub(crate) const FIRST_KEY: &str = "k1";

/// The capabilities of an ordinary first-party service.
pub(crate) const SERVICE_CAPS: [&str; 3] = [
    "events.event.publish",
    "events.event.read",
    "events.subscription.manage",
];

/// The capability of an operator.
pub(crate) const ADMIN_CAP: &str = "events.delivery.admin";

/// The capabilities of an ordinary developer app.
pub(crate) const APP_CAPS: [&str; 3] = ["events.app.publish", "events.app.read", "events.app.subscribe"];

/// How the key set is answered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum KeyMode {
    /// The published keys as JWKs.
    Ok,
    /// 503 at once.
    Down,
    /// The published keys, this much later.
    Slow(Duration),
    /// The first published key as a bare `public_key` PEM, without `keys`.
    Legacy,
    /// 200 with a body that is not JSON.
    Garbled,
}

/// A running issuer. Its server ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Network {
    url: String,
    state: Arc<State>,
    _server: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct State {
    mode: Mutex<KeyMode>,
    published: Mutex<Vec<String>>,
    hits: watch::Sender<u64>,
}

impl Network {
    /// Starts an issuer on a free loopback port, publishing `FIRST_KEY`.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let url = format!("http://{}", listener.local_addr().expect("a bound port"));
        let state = Arc::new(State {
            mode: Mutex::new(KeyMode::Ok),
            published: Mutex::new(vec![FIRST_KEY.to_owned()]),
            hits: watch::Sender::new(0),
        });
        let server = AbortOnDropHandle::new(tokio::spawn(serve(listener, state.clone())));
        Self {
            url,
            state,
            _server: server,
        }
    }

    /// The base URL for `OV_NETWORK_INTERNAL_URL`.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Changes how the key set is answered from the next request on.
    pub(crate) fn answer_keys(&self, mode: KeyMode) {
        *self.state.mode.lock() = mode;
    }

    /// Replaces the published keys. A name not seen before makes a new key.
    pub(crate) fn publish_keys(&self, kids: &[&str]) {
        *self.state.published.lock() = kids.iter().map(|kid| (*kid).to_owned()).collect();
    }

    /// How often the key set was asked for, in any mode.
    pub(crate) fn key_hits(&self) -> u64 {
        *self.state.hits.borrow()
    }

    /// Waits until the key set was asked for `count` times in all.
    pub(crate) async fn wait_key_hits(&self, count: u64, deadline: Duration) {
        let mut hits = self.state.hits.subscribe();
        let enough = hits.wait_for(|hits| *hits >= count);
        let waited = wait::within(&format!("{count} requests for the key set"), deadline, enough).await;
        drop(waited.expect("the issuer outlives the wait"));
    }

    /// Signs a token.
    pub(crate) fn token(&self, spec: &TokenSpec) -> String {
        spec.sign()
    }

    /// A token of the service `slug` with the given capabilities.
    pub(crate) fn service_token(&self, slug: &str, caps: &[&str]) -> String {
        TokenSpec::service(slug).caps(caps).sign()
    }

    /// A token of an operator.
    pub(crate) fn operator_token(&self) -> String {
        self.service_token("ops", &[ADMIN_CAP])
    }
}

/// A token to be signed. Each kind starts valid for 300 s; every claim and header can be replaced or left out.
#[derive(Debug, Clone)]
pub(crate) struct TokenSpec {
    header: Map<String, Value>,
    claims: Map<String, Value>,
    key: String,
}

impl TokenSpec {
    /// A service's token as Network signs it: `SERVICE_CAPS`, no `kid`.
    pub(crate) fn service(slug: &str) -> Self {
        Self::principal(json!({ "sub": format!("svc:{slug}"), "actor_type": "service", "cap": SERVICE_CAPS, "ns": [] }))
    }

    /// An app's token: `APP_CAPS`, in the environment `env` (`sandbox` or `production`).
    pub(crate) fn app(app_id: &str, project_id: &str, env: &str) -> Self {
        Self::principal(json!({
            "sub": format!("app:{app_id}"),
            "actor_type": "app",
            "cap": APP_CAPS,
            "ns": [project_id],
            "project_id": project_id,
            "env": env,
        }))
    }

    /// A token of any other principal, such as `node:nod_…`.
    pub(crate) fn other(actor_type: &str, sub: &str, caps: &[&str]) -> Self {
        Self::principal(json!({ "sub": sub, "actor_type": actor_type, "cap": caps, "ns": [] }))
    }

    /// A person's session token.
    pub(crate) fn person(subject_id: &str) -> Self {
        Self::principal(json!({
            "sub": "57",
            "id": 57,
            "subject_id": subject_id,
            "username": "viewer",
            "role": "user",
            "aud": ["openvibe.live", "openvibe.network"],
        }))
        .without("jti")
    }

    /// A realtime ticket.
    pub(crate) fn ticket(subject_id: &str) -> Self {
        let random = ulid::Ulid::generate().to_bytes();
        let jti = format!("rtk_{}", hex::encode(&random[4..]));
        Self::principal(json!({
            "iss": format!("{ISSUER}/realtime"),
            "sub": subject_id,
            "typ": "realtime",
            "purpose": "realtime",
            "exp": unix_now() + 120,
            "jti": jti,
        }))
    }

    /// Replaces the capabilities.
    pub(crate) fn caps(self, caps: &[&str]) -> Self {
        self.claim("cap", json!(caps))
    }

    /// Replaces or adds a claim.
    pub(crate) fn claim(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.claims.insert(name.to_owned(), value.into());
        self
    }

    /// Leaves a claim out.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.claims.remove(name);
        self
    }

    /// Moves `iat` and `exp` by so many seconds.
    pub(crate) fn shifted(mut self, seconds: i64) -> Self {
        for name in ["iat", "exp"] {
            let moved = self.claims[name].as_i64().expect("a time in whole seconds") + seconds;
            self.claims.insert(name.to_owned(), moved.into());
        }
        self
    }

    /// Replaces or adds a member of the token's header, such as `kid` or `alg`.
    pub(crate) fn header(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.header.insert(name.to_owned(), value.into());
        self
    }

    /// Signs with another key, published or not.
    pub(crate) fn signed_by(mut self, key: &str) -> Self {
        self.key = key.to_owned();
        self
    }

    /// The compact token: RS256 whatever the header says.
    pub(crate) fn sign(&self) -> String {
        let part = |members: &Map<String, Value>| {
            URL_SAFE_NO_PAD.encode(serde_json::to_vec(members).expect("JSON members serialise"))
        };
        let signed = format!("{}.{}", part(&self.header), part(&self.claims));
        let key = key_pair(&self.key);
        let mut signature = vec![0; key.public_modulus_len()];
        key.sign(
            &RSA_PKCS1_SHA256,
            &SystemRandom::new(),
            signed.as_bytes(),
            &mut signature,
        )
        .expect("a fresh 2048-bit key signs");
        let token = format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature));
        logs::token(&token);
        token
    }

    fn principal(claims: Value) -> Self {
        let now = unix_now();
        let mut all = json!({
            "iss": ISSUER,
            "aud": [AUDIENCE],
            "iat": now,
            "exp": now + 300,
            "jti": id("tok"),
        });
        let all = all.as_object_mut().expect("an object");
        all.extend(claims.as_object().expect("claims are an object").clone());
        let header = json!({ "alg": "RS256", "typ": "JWT" });
        Self {
            header: header.as_object().expect("an object").clone(),
            claims: all.clone(),
            key: FIRST_KEY.to_owned(),
        }
    }
}

/// The public half of a key as PEM, for `OV_NETWORK_PUBLIC_KEY`.
pub(crate) fn public_pem(kid: &str) -> String {
    let der = key_pair(kid)
        .public_key()
        .as_der()
        .expect("a public key has a DER form");
    let text = STANDARD.encode(der.as_ref());
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .map(|line| str::from_utf8(line).expect("base64 is ASCII"))
        .collect();
    format!(
        "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
        lines.join("\n")
    )
}

/// The public half of a key as the key set lists it.
pub(crate) fn jwk(kid: &str) -> Value {
    let key = key_pair(kid);
    let public = key.public_key();
    json!({
        "kty": "RSA",
        "use": "sig",
        "alg": "RS256",
        "kid": kid,
        "n": URL_SAFE_NO_PAD.encode(public.modulus().big_endian_without_leading_zero()),
        "e": URL_SAFE_NO_PAD.encode(public.exponent().big_endian_without_leading_zero()),
    })
}

/// The key of that name, made on first use and the same for the whole run: making one takes a while.
fn key_pair(kid: &str) -> Arc<KeyPair> {
    static KEYS: OnceLock<Mutex<BTreeMap<String, Arc<KeyPair>>>> = OnceLock::new();
    let mut keys = KEYS.get_or_init(Mutex::default).lock();
    let made = keys.entry(kid.to_owned());
    made.or_insert_with(|| Arc::new(KeyPair::generate(KeySize::Rsa2048).expect("the system has randomness")))
        .clone()
}

/// Seconds since the Unix epoch.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("the clock is past 1970")
        .as_secs()
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(converse(stream, state.clone()));
        while connections.try_join_next().is_some() {}
    }
}

async fn converse(stream: TcpStream, state: Arc<State>) {
    let mut stream = BufReader::new(stream);
    while let Ok(Some(request)) = http1::read_request(&mut stream).await {
        let (status, body) = match (request.method.as_str(), request.path()) {
            ("GET", "/api/.well-known/jwks") => key_set(&state).await,
            _ => (404, "{}".to_owned()),
        };
        let answer = format!(
            "HTTP/1.1 {status} Answer\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn key_set(state: &State) -> (u16, String) {
    state.hits.send_modify(|hits| *hits += 1);
    let mode = *state.mode.lock();
    if let KeyMode::Slow(delay) = mode {
        tokio::time::sleep(delay).await;
    }
    let published = state.published.lock().clone();
    let keys: Vec<Value> = published.iter().map(|kid| jwk(kid)).collect();
    let pem = published.first().map(|kid| public_pem(kid));
    match mode {
        KeyMode::Ok | KeyMode::Slow(_) => (
            200,
            json!({ "public_key": pem, "algorithm": "RS256", "keys": keys }).to_string(),
        ),
        KeyMode::Legacy => (200, json!({ "public_key": pem, "algorithm": "RS256" }).to_string()),
        KeyMode::Down => (503, r#"{"error":"down"}"#.to_owned()),
        KeyMode::Garbled => (200, "<html>".to_owned()),
    }
}
