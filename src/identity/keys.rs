//! The signing keys in force: pinned, or fetched and kept fresh from the network's key document.
//!
//! A fetch that fails never costs a loaded key; one that succeeds replaces the whole set, so a withdrawn key stops working.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use url::Url;

use super::{Jws, KeySet};
use crate::tls::Trust;

const BOOT_RETRY: Duration = Duration::from_secs(30);
const REFRESH: Duration = Duration::from_secs(15 * 60);
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
const REFETCH_SPACING: Duration = Duration::from_secs(30);
const DOCUMENT_BYTES_MAX: usize = 1024 * 1024;

/// Why a pinned key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("not an RSA public key of 2048 to 8192 bits in PEM")]
pub struct KeyError;

/// No signing key has loaded yet, so no token can be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("signing key not loaded yet")]
pub struct Unavailable;

/// A handle on the keys in force; clones share them.
#[derive(Debug, Clone)]
pub struct Keys {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    current: ArcSwapOption<KeySet>,
    /// Where to fetch from; `None` when the key is pinned.
    document: Option<Document>,
    fetches: Mutex<Fetches>,
    tasks: TaskTracker,
}

#[derive(Debug)]
struct Document {
    url: Url,
    trust: Trust,
}

#[derive(Debug, Default)]
struct Fetches {
    /// Cancelled when the fetch has ended, however it ended.
    running: Option<CancellationToken>,
    failures: u32,
    retry_at: Option<Instant>,
    /// When a token last caused a refetch. Each reason has its own spacing: tokens that name no key must not be able to
    /// delay the one that names a new key.
    unknown_kid_at: Option<Instant>,
    unmatched_at: Option<Instant>,
}

/// What about a token suggests that the keys in force are out of date.
#[derive(Debug, Clone, Copy)]
enum Hint {
    /// It names a key that is not among them.
    UnknownKid,
    /// It chose none of them by name, and none made its signature.
    Unmatched,
}

#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error(transparent)]
    Http(reqwest::Error),
    #[error("the answer was {0}")]
    Status(reqwest::StatusCode),
    #[error("the document is longer than {DOCUMENT_BYTES_MAX} bytes")]
    TooLong,
    #[error("the document is not JSON")]
    NotJson,
    #[error("the document holds no usable key")]
    NoKey,
}

impl From<reqwest::Error> for FetchError {
    fn from(error: reqwest::Error) -> Self {
        // The address may carry a password.
        Self::Http(error.without_url())
    }
}

impl Keys {
    /// One key that is never fetched; `\n` written as two characters is read as a line end.
    ///
    /// # Errors
    /// [`KeyError`] when `pem` is not an RSA public key of a usable size.
    pub fn pinned(pem: &str) -> Result<Self, KeyError> {
        let set = KeySet::from_pem(&pem.replace("\\n", "\n")).ok_or(KeyError)?;
        Ok(Self::new(Some(set), None))
    }

    /// Keys read from the document at `url`: on first use, and by [`Keys::run`] from then on.
    #[must_use]
    pub fn fetching(url: Url, trust: Trust) -> Self {
        Self::new(None, Some(Document { url, trust }))
    }

    fn new(current: Option<KeySet>, document: Option<Document>) -> Self {
        let current = ArcSwapOption::from(current.map(Arc::new));
        Self {
            inner: Arc::new(Inner {
                current,
                document,
                fetches: Mutex::default(),
                tasks: TaskTracker::new(),
            }),
        }
    }

    /// Whether at least one key is in force.
    #[must_use]
    pub fn loaded(&self) -> bool {
        self.inner.current.load().is_some()
    }

    /// Loads the keys and keeps them fresh until `stop`: every 30 s until the first load, every 15 min from then on.
    ///
    /// It returns once a fetch that was under way has ended, within 5 s.
    pub async fn run(&self, stop: CancellationToken) {
        if self.inner.document.is_some() {
            stop.run_until_cancelled(self.keep_fresh()).await;
        }
        stop.cancelled().await;
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    async fn keep_fresh(&self) {
        loop {
            let ended = {
                let mut fetches = self.inner.fetches.lock();
                // Until the first load the backoff does not hold this task back.
                let due = !self.loaded() || !fetches.backing_off();
                due.then(|| self.join_or_start(&mut fetches))
            };
            if let Some(ended) = ended {
                ended.cancelled().await;
            }
            tokio::time::sleep(if self.loaded() { REFRESH } else { BOOT_RETRY }).await;
        }
    }

    /// The keys to judge a token by; an unknown `kid` first asks for a newer document, at most once in 30 s.
    ///
    /// # Errors
    /// [`Unavailable`] when none is in force and none could be fetched now.
    pub async fn keys_for(&self, kid: Option<&str>) -> Result<Arc<KeySet>, Unavailable> {
        let Some(current) = self.inner.current.load_full() else {
            return self.first_load().await;
        };
        let unknown = kid.is_some_and(|kid| current.may_miss(kid));
        if unknown {
            Ok(self.newer_than(current, Hint::UnknownKid).await)
        } else {
            Ok(current)
        }
    }

    /// Whether a key in force made this token's signature.
    ///
    /// # Errors
    /// [`Unavailable`] when there is no key to judge by.
    pub async fn verify(&self, token: &Jws<'_>) -> Result<bool, Unavailable> {
        let keys = self.keys_for(token.kid()).await?;
        if keys.verifies(token) {
            return Ok(true);
        }
        if token.kid().is_some() {
            return Ok(false);
        }
        // The network signs without naming the key, so failing every key is the only sign of a rotation.
        let newer = self.newer_than(Arc::clone(&keys), Hint::Unmatched).await;
        Ok(!Arc::ptr_eq(&newer, &keys) && newer.verifies(token))
    }

    async fn first_load(&self) -> Result<Arc<KeySet>, Unavailable> {
        let ended = {
            let mut fetches = self.inner.fetches.lock();
            // A fetch may have ended since the caller looked.
            let allowed = !self.loaded() && (fetches.is_running() || !fetches.backing_off());
            allowed.then(|| self.join_or_start(&mut fetches))
        };
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
        self.inner.current.load_full().ok_or(Unavailable)
    }

    /// The set in force after a refetch, where one is running or allowed now; otherwise `current`.
    async fn newer_than(&self, current: Arc<KeySet>, hint: Hint) -> Arc<KeySet> {
        if self.inner.document.is_none() {
            return current;
        }
        let ended = {
            let mut fetches = self.inner.fetches.lock();
            let allowed = fetches.is_running() || (!fetches.backing_off() && fetches.take_turn(hint));
            allowed.then(|| self.join_or_start(&mut fetches))
        };
        if let Some(ended) = ended {
            ended.cancelled().await;
        }
        self.inner.current.load_full().unwrap_or(current)
    }

    /// The end of the running fetch, which is started here if there is none.
    fn join_or_start(&self, fetches: &mut Fetches) -> CancellationToken {
        if let Some(running) = fetches.running.as_ref().filter(|running| !running.is_cancelled()) {
            return running.clone();
        }
        let ended = CancellationToken::new();
        fetches.running = Some(ended.clone());
        let guard = ended.clone().drop_guard();
        let inner = Arc::clone(&self.inner);
        // A task of its own: a caller that goes away must not take the others' fetch with it.
        self.inner.tasks.spawn(async move {
            let _ended = guard;
            if let Some(document) = &inner.document {
                inner.settle(document.fetch().await);
            }
        });
        ended
    }
}

impl Inner {
    fn settle(&self, outcome: Result<KeySet, FetchError>) {
        let mut fetches = self.fetches.lock();
        match outcome {
            Ok(set) => {
                let first = self.current.swap(Some(Arc::new(set))).is_none();
                if first {
                    tracing::info!("the network's signing keys have loaded");
                } else if fetches.failures > 0 {
                    tracing::info!("the network's signing keys can be fetched again");
                }
                (fetches.failures, fetches.retry_at) = (0, None);
            }
            Err(error) => {
                if fetches.failures == 0 {
                    let kept = if self.current.load().is_some() {
                        "the last good ones stay in force"
                    } else {
                        "none is in force"
                    };
                    let cause: &dyn std::error::Error = &error;
                    tracing::warn!(error = cause, "the network's signing keys cannot be fetched, {kept}");
                }
                fetches.retry_at = Some(Instant::now() + backoff(fetches.failures));
                fetches.failures = fetches.failures.saturating_add(1);
            }
        }
    }
}

impl Fetches {
    fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.is_cancelled())
    }

    fn backing_off(&self) -> bool {
        self.retry_at.is_some_and(|at| Instant::now() < at)
    }

    /// Whether a refetch for this reason may start now; saying yes uses the turn up.
    fn take_turn(&mut self, hint: Hint) -> bool {
        let last = match hint {
            Hint::UnknownKid => &mut self.unknown_kid_at,
            Hint::Unmatched => &mut self.unmatched_at,
        };
        let due = last.is_none_or(|at| at.elapsed() >= REFETCH_SPACING);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

/// The wait after a failure that followed `earlier` others: 1, 2, 4 … 128 s, then 300 s.
fn backoff(earlier: u32) -> Duration {
    Duration::from_secs(if earlier < 8 { 1 << earlier } else { 300 })
}

impl Document {
    async fn fetch(&self) -> Result<KeySet, FetchError> {
        // A client of its own each time: the next fetch is a quarter of an hour away, and no kept connection lives that long.
        let client = self
            .trust
            .client_builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(FETCH_TIMEOUT)
            .build()?;
        let request = client.get(self.url.clone()).header("accept", "application/json");
        let mut response = request.send().await?;
        if !response.status().is_success() {
            return Err(FetchError::Status(response.status()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > DOCUMENT_BYTES_MAX {
                return Err(FetchError::TooLong);
            }
            body.extend_from_slice(&chunk);
        }
        let document = serde_json::from_slice(&body).map_err(|_| FetchError::NotJson)?;
        KeySet::from_document(&document).ok_or(FetchError::NoKey)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use futures_util::future::join_all;
    use serde_json::json;

    use super::*;
    use crate::identity::testing::{self, KeyServer, key};

    /// Lets `seconds` pass at once. The clock stands still only inside, so that no timer outruns the sockets.
    async fn pass(seconds: u64) {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(seconds)).await;
        tokio::time::resume();
    }

    async fn holds(keys: &Keys, token: &str) -> Result<bool, Unavailable> {
        keys.verify(&Jws::parse(token).expect("well-formed")).await
    }

    async fn loaded(kids: &[&str]) -> (KeyServer, Keys) {
        let server = KeyServer::start().await;
        server.publish(kids);
        let keys = Keys::fetching(server.url.clone(), testing::trust());
        keys.keys_for(None).await.expect("loads on first use");
        assert_eq!(server.hits(), 1);
        (server, keys)
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let met = async {
            while !condition() {
                tokio::task::yield_now().await;
            }
        };
        assert!(
            tokio::time::timeout(Duration::from_secs(5), met).await.is_ok(),
            "{what}"
        );
    }

    #[tokio::test]
    async fn a_pinned_key_is_read_with_its_line_ends_escaped_and_never_fetched() {
        let token = key("k1").token_naming("some-name", &json!({}));
        for pem in [
            key("k1").pem(),
            key("k1").pem().replace('\n', "\\n"),
            key("k1").pkcs1_pem(),
        ] {
            let keys = Keys::pinned(&pem).expect("usable");
            assert!(keys.loaded());
            assert_eq!(holds(&keys, &token).await, Ok(true));
            assert_eq!(holds(&keys, &key("rogue").token(&json!({}))).await, Ok(false));
        }
        for pem in [
            "",
            "not a key",
            "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        ] {
            assert!(Keys::pinned(pem).is_err(), "{pem:?}");
        }
    }

    #[tokio::test]
    async fn fifty_tokens_with_a_new_key_cost_one_fetch_and_hold_nobody_up() {
        let (server, keys) = loaded(&["k1"]).await;
        server.publish(&["k2", "k1"]);
        server.hold();
        let token = key("k2").token_naming("k2", &json!({}));
        let callers: Vec<_> = (0..50)
            .map(|_| {
                let (keys, token) = (keys.clone(), token.clone());
                tokio::spawn(async move { holds(&keys, &token).await })
            })
            .collect();
        server.until_hit(2).await;
        for valid in [key("k1").token(&json!({})), key("k1").token_naming("k1", &json!({}))] {
            assert_eq!(
                holds(&keys, &valid).now_or_never(),
                Some(Ok(true)),
                "a valid token waits for nothing"
            );
        }
        server.release();
        for caller in join_all(callers).await {
            assert_eq!(caller.expect("no panic"), Ok(true));
        }
        assert_eq!(server.hits(), 2, "one fetch for all of them");
    }

    #[tokio::test]
    async fn fifty_callers_before_the_first_load_share_one_fetch() {
        let server = KeyServer::start().await;
        server.publish(&["k1"]);
        let keys = Keys::fetching(server.url.clone(), testing::trust());
        let answers = join_all((0..50).map(|_| keys.keys_for(None))).await;
        assert!(answers.iter().all(Result::is_ok));
        assert_eq!(server.hits(), 1);
    }

    #[tokio::test]
    async fn made_up_names_cost_one_fetch_in_half_a_minute() {
        let (server, keys) = loaded(&["k1"]).await;
        for number in 0..20 {
            let token = key("rogue").token_naming(&format!("made-up-{number}"), &json!({}));
            assert_eq!(holds(&keys, &token).await, Ok(false));
        }
        assert_eq!(server.hits(), 2);
        pass(29).await;
        keys.keys_for(Some("made-up")).await.expect("loaded");
        assert_eq!(server.hits(), 2, "too soon");
        pass(2).await;
        keys.keys_for(Some("made-up")).await.expect("loaded");
        assert_eq!(server.hits(), 3);
    }

    #[tokio::test]
    async fn keys_without_names_are_no_reason_to_refetch_for_a_name() {
        let (server, keys) = loaded(&["k1"]).await;
        pass(30).await;
        server.answer("200 OK", "", &json!({"public_key": key("k1").pem()}).to_string());
        keys.keys_for(Some("k9")).await.expect("loaded");
        assert_eq!(server.hits(), 2);
        pass(30).await;
        assert_eq!(holds(&keys, &key("k1").token_naming("k1", &json!({}))).await, Ok(true));
        assert_eq!(server.hits(), 2);
    }

    #[tokio::test]
    async fn a_rotation_is_noticed_by_tokens_that_name_no_key() {
        let (server, keys) = loaded(&["k1"]).await;
        server.publish(&["k2"]);
        assert_eq!(holds(&keys, &key("k2").token(&json!({}))).await, Ok(true));
        assert_eq!(server.hits(), 2);
        for _ in 0..20 {
            assert_eq!(holds(&keys, &key("rogue").token(&json!({}))).await, Ok(false));
        }
        assert_eq!(server.hits(), 2, "a flood of forgeries costs nothing more");
    }

    #[tokio::test]
    async fn forgeries_without_a_name_do_not_delay_a_token_that_names_a_new_key() {
        let (server, keys) = loaded(&["k1"]).await;
        assert_eq!(holds(&keys, &key("rogue").token(&json!({}))).await, Ok(false));
        server.publish(&["k1", "k2"]);
        assert_eq!(holds(&keys, &key("k2").token_naming("k2", &json!({}))).await, Ok(true));
    }

    #[tokio::test]
    async fn whatever_goes_wrong_the_last_good_keys_stay_in_force() {
        let (server, keys) = loaded(&["k1"]).await;
        let usable = json!({"keys": [key("rogue").jwk()]}).to_string();
        let elsewhere = format!("location: {}\r\n", server.url);
        let too_long = format!("{usable}{}", " ".repeat(DOCUMENT_BYTES_MAX));
        let answers = [
            ("503 Service Unavailable", "", usable.as_str()),
            ("302 Found", elsewhere.as_str(), usable.as_str()),
            ("200 OK", "", "not json"),
            ("200 OK", "", "{}"),
            ("200 OK", "", r#"{"keys": [{"kty": "EC"}], "public_key": "HS256"}"#),
            ("200 OK", "", too_long.as_str()),
            ("200 OK", "content-length: 1\r\n", usable.as_str()),
        ];
        for (number, (status, header, body)) in answers.into_iter().enumerate() {
            pass(301).await;
            server.answer(status, header, body);
            let forged = key("rogue").token_naming("rogue", &json!({}));
            assert_eq!(holds(&keys, &forged).await, Ok(false), "answer {number}");
            assert_eq!(server.hits(), number + 2, "answer {number} was asked for once");
            assert_eq!(
                holds(&keys, &key("k1").token(&json!({}))).await,
                Ok(true),
                "after answer {number}"
            );
            assert!(keys.loaded());
        }
        pass(301).await;
        server.publish(&["k2"]);
        assert_eq!(
            holds(&keys, &key("k2").token_naming("k2", &json!({}))).await,
            Ok(true),
            "and it recovers"
        );
    }

    #[tokio::test]
    async fn a_withdrawn_key_stops_working_at_the_next_refresh() {
        let server = KeyServer::start().await;
        server.publish(&["k1", "k2"]);
        let keys = Keys::fetching(server.url.clone(), testing::trust());
        let stop = CancellationToken::new();
        let running = tokio::spawn({
            let (keys, stop) = (keys.clone(), stop.clone());
            async move { keys.run(stop).await }
        });
        until("the first load", || keys.loaded()).await;
        let withdrawn = key("k1").token_naming("k1", &json!({}));
        assert_eq!(holds(&keys, &withdrawn).await, Ok(true));

        server.publish(&["k2"]);
        // The refresh timer starts only after the task has seen the first load.
        tokio::task::yield_now().await;
        pass(REFRESH.as_secs()).await;
        server.until_hit(2).await;
        until("the new set", || !keys.inner.fetches.lock().is_running()).await;
        assert_eq!(holds(&keys, &key("k2").token(&json!({}))).await, Ok(true));
        assert_eq!(holds(&keys, &withdrawn).await, Ok(false));
        stop.cancel();
        running.await.expect("stops");
    }

    #[tokio::test]
    async fn without_a_key_callers_fail_at_once_until_the_backoff_is_over() {
        let server = KeyServer::start().await;
        server.answer("503 Service Unavailable", "", "");
        let keys = Keys::fetching(server.url.clone(), testing::trust());
        assert_eq!(keys.keys_for(None).await.err(), Some(Unavailable));
        for _ in 0..20 {
            assert_eq!(
                keys.keys_for(Some("k1")).now_or_never().map(|keys| keys.err()),
                Some(Some(Unavailable))
            );
        }
        assert_eq!(server.hits(), 1, "the backoff shields the network");
        assert!(!keys.loaded());
        pass(1).await;
        assert!(keys.keys_for(None).await.is_err());
        assert_eq!(server.hits(), 2);
        pass(1).await;
        assert!(
            keys.keys_for(None).now_or_never().expect("at once").is_err(),
            "the second wait is longer"
        );
        pass(1).await;
        server.publish(&["k1"]);
        assert!(keys.keys_for(None).await.is_ok());
        assert!(keys.loaded());
    }

    #[test]
    fn failures_are_spaced_wider_and_wider() {
        let waits: Vec<_> = (0..10).map(|earlier| backoff(earlier).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 300, 300]);
        assert_eq!(backoff(u32::MAX).as_secs(), 300);
    }

    #[tokio::test]
    async fn the_first_load_is_retried_every_half_minute_whatever_the_backoff() {
        let server = KeyServer::start().await;
        server.answer("503 Service Unavailable", "", "");
        let keys = Keys::fetching(server.url.clone(), testing::trust());
        // Nine failures first: the backoff is at its longest.
        for _ in 0..9 {
            assert!(keys.keys_for(None).await.is_err());
            pass(300).await;
        }
        assert!(keys.keys_for(None).await.is_err());
        let stop = CancellationToken::new();
        let running = tokio::spawn({
            let (keys, stop) = (keys.clone(), stop.clone());
            async move { keys.run(stop).await }
        });
        server.until_hit(11).await;
        until("the failure", || !keys.inner.fetches.lock().is_running()).await;
        tokio::task::yield_now().await;
        server.publish(&["k1"]);
        pass(BOOT_RETRY.as_secs()).await;
        server.until_hit(12).await;
        until("the load", || keys.loaded()).await;
        stop.cancel();
        running.await.expect("stops");
    }

    #[tokio::test]
    async fn a_silent_server_holds_a_caller_for_five_seconds_at_most() {
        let server = KeyServer::start().await;
        server.hold();
        let keys = Keys::fetching(server.url.clone(), testing::trust());
        let caller = tokio::spawn({
            let keys = keys.clone();
            async move { keys.keys_for(None).await.err() }
        });
        server.until_hit(1).await;
        assert!(!caller.is_finished());
        pass(FETCH_TIMEOUT.as_secs()).await;
        let answer = tokio::time::timeout(Duration::from_secs(5), caller)
            .await
            .expect("the caller is let go");
        assert_eq!(answer.expect("no panic"), Some(Unavailable));
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_takes_no_fetch_with_it() {
        let (server, keys) = loaded(&["k1"]).await;
        server.publish(&["k2"]);
        server.hold();
        let gone = tokio::spawn({
            let keys = keys.clone();
            async move { keys.keys_for(Some("k2")).await.is_ok() }
        });
        server.until_hit(2).await;
        gone.abort();
        assert!(gone.await.is_err(), "gone");
        server.release();
        assert_eq!(
            holds(&keys, &key("k2").token_naming("k2", &json!({}))).await,
            Ok(true),
            "joined, not lost"
        );
        assert_eq!(server.hits(), 2);
    }

    #[tokio::test]
    async fn a_pinned_run_ends_when_told() {
        let stop = CancellationToken::new();
        let keys = Keys::pinned(&key("k1").pem()).expect("usable");
        assert_eq!(keys.run(stop.clone()).now_or_never(), None, "it runs until stopped");
        stop.cancel();
        keys.run(stop).await;
    }
}
