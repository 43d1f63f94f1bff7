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
    document: Option<Url>,
    fetches: Mutex<Fetches>,
    tasks: TaskTracker,
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
    pub fn fetching(url: Url) -> Self {
        Self::new(None, Some(url))
    }

    fn new(current: Option<KeySet>, document: Option<Url>) -> Self {
        let current = ArcSwapOption::from(current.map(Arc::new));
        Self { inner: Arc::new(Inner { current, document, fetches: Mutex::default(), tasks: TaskTracker::new() }) }
    }

    /// Whether at least one key is in force.
    #[must_use]
    pub fn loaded(&self) -> bool {
        self.inner.current.load().is_some()
    }

    /// Loads the keys and keeps them fresh until `stop`: every 30 s until the first load, every 15 min from then on.
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
        if unknown { Ok(self.newer_than(current, Hint::UnknownKid).await) } else { Ok(current) }
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
            let allowed = fetches.is_running() || !fetches.backing_off();
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
            let outcome = match &inner.document {
                Some(url) => fetch(url).await,
                None => Err(FetchError::NoKey),
            };
            inner.settle(outcome);
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
                    let kept = if self.current.load().is_some() { "the last good ones stay in force" } else { "none is in force" };
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

async fn fetch(url: &Url) -> Result<KeySet, FetchError> {
    let mut builder = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .timeout(FETCH_TIMEOUT);
    if url.scheme() == "http" {
        // A plain address needs no authorities, and must work on a machine that has none installed.
        builder = builder.tls_certs_only([]);
    }
    // A client of its own each time: the next fetch is a quarter of an hour away, and no kept connection lives that long.
    let request = builder.build()?.get(url.clone()).header("accept", "application/json");
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
