//! A webhook endpoint over real HTTP: it records every call and answers as the test scripts it.

use std::{
    collections::HashMap,
    net::SocketAddr,
    ops::Deref,
    panic::Location,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use aws_lc_rs::hmac;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    http1::{self, Request},
    wait::{SOON, eventually},
};

/// The pause between two bytes of a trickled answer.
const TRICKLE_PAUSE: Duration = Duration::from_millis(20);

/// How far the signed time may lie from the arrival, in seconds: the tolerance consumers are told to use.
const TOLERANCE_S: u64 = 300;

/// What one call is answered. Starts from a status, by `Answer::status` or `204.into()`.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    delay: Duration,
    body_bytes: usize,
    manner: Manner,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Manner {
    Whole,
    Close,
    Hang,
    TrickleHead,
    TrickleBody,
}

impl Answer {
    /// A whole answer with an empty body.
    pub(crate) fn status(status: u16) -> Self {
        Self {
            status,
            headers: Vec::new(),
            delay: Duration::ZERO,
            body_bytes: 0,
            manner: Manner::Whole,
        }
    }

    /// The connection is closed without a byte of answer.
    pub(crate) fn close() -> Self {
        Self {
            manner: Manner::Close,
            ..Self::status(204)
        }
    }

    /// Nothing until `Receiver::release`; then `status`, if the sender still listens.
    pub(crate) fn hang(status: u16) -> Self {
        Self {
            manner: Manner::Hang,
            ..Self::status(status)
        }
    }

    /// A status line, then header lines one by one without an end, until released.
    pub(crate) fn trickle_head(status: u16) -> Self {
        Self {
            manner: Manner::TrickleHead,
            ..Self::status(status)
        }
    }

    /// A whole head, then a long body byte by byte, until released; `body_of` announces another length.
    pub(crate) fn trickle_body(status: u16) -> Self {
        Self {
            manner: Manner::TrickleBody,
            ..Self::status(status)
        }
    }

    /// Adds a header.
    pub(crate) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Waits this long before answering.
    pub(crate) fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Gives the answer a body of so many bytes.
    pub(crate) fn body_of(mut self, bytes: usize) -> Self {
        self.body_bytes = bytes;
        self
    }

    /// The head on the wire, up to and including the empty line.
    fn head(&self, body_bytes: usize) -> String {
        let mut head = format!("HTTP/1.1 {} Answer\r\n", self.status);
        if self.status != 204 && self.status != 304 {
            head += &format!("Content-Length: {body_bytes}\r\n");
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head + "\r\n"
    }
}

impl From<u16> for Answer {
    fn from(status: u16) -> Self {
        Self::status(status)
    }
}

/// One recorded call. Derefs to the request as it stood on the wire.
#[derive(Debug)]
pub(crate) struct Call {
    /// 1 for the first call of its path.
    pub(crate) number: usize,
    /// When the last byte of the request was read, on the monotonic clock.
    pub(crate) arrived: Instant,
    /// The same moment on the wall clock.
    pub(crate) arrived_at: SystemTime,
    request: Request,
}

impl Deref for Call {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.request
    }
}

impl Call {
    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a delivery's body is JSON")
    }

    /// The `X-OpenVibe-Event-Id` header; empty when there is none.
    pub(crate) fn event_id(&self) -> &str {
        self.header("x-openvibe-event-id").unwrap_or_default()
    }

    /// The `X-OpenVibe-Delivery-Attempt` header as a number; 0 when there is none.
    pub(crate) fn attempt(&self) -> u32 {
        self.header("x-openvibe-delivery-attempt")
            .and_then(|value| value.parse().ok())
            .unwrap_or(0)
    }

    /// How many of the signatures were made with `secret`, or what is wrong with the signature headers.
    ///
    /// Written from the consumer's side of the contract: one `t`, then one or more `v2`; the same time in
    /// `X-OpenVibe-Timestamp`, close to the arrival; HMAC-SHA256 over the time, a dot and the raw body.
    pub(crate) fn signatures_by(&self, secret: &str) -> Result<usize, String> {
        let header = self
            .header("x-openvibe-signature-v2")
            .ok_or("no single X-OpenVibe-Signature-V2")?;
        let mut parts = header.split(',');
        let stamp = parts
            .next()
            .and_then(|part| part.strip_prefix("t="))
            .ok_or(format!("no time first: {header}"))?;
        if self.header("x-openvibe-timestamp") != Some(stamp) {
            return Err(format!("X-OpenVibe-Timestamp is not {stamp}"));
        }
        let time: u64 = stamp.parse().map_err(|error| format!("time {stamp:?}: {error}"))?;
        let arrived = self
            .arrived_at
            .duration_since(UNIX_EPOCH)
            .map_err(|error| error.to_string())?
            .as_secs();
        if time.abs_diff(arrived) > TOLERANCE_S {
            return Err(format!("signed at {time}, arrived at {arrived}"));
        }
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        let signed = [stamp.as_bytes(), b".", &self.body].concat();
        let (mut all, mut matching) = (0, 0);
        for part in parts {
            let value = part.strip_prefix("v2=").ok_or(format!("not a v2 value: {part}"))?;
            if value.len() != 64 || value.to_lowercase() != value {
                return Err(format!("not 64 lower-case hex digits: {value}"));
            }
            let tag = hex::decode(value).map_err(|error| format!("{value}: {error}"))?;
            all += 1;
            matching += usize::from(hmac::verify(&key, &signed, &tag).is_ok());
        }
        if all == 0 {
            Err(format!("no v2 value: {header}"))
        } else {
            Ok(matching)
        }
    }

    /// Fails unless exactly one signature was made with `secret`.
    #[track_caller]
    pub(crate) fn assert_signed(&self, secret: &str) {
        assert_eq!(
            self.signatures_by(secret),
            Ok(1),
            "the signature of {} by the given secret",
            self.event_id()
        );
    }
}

type Script = Arc<dyn Fn(&Call) -> Answer + Send + Sync>;

/// A running receiver. Its server ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Receiver {
    address: SocketAddr,
    state: Arc<State>,
    server: Mutex<Option<AbortOnDropHandle<()>>>,
}

#[derive(Default)]
struct State {
    log: Mutex<Log>,
    changed: Notify,
    released: watch::Sender<u64>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("calls", &self.log.lock().calls.len())
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Log {
    calls: Vec<Arc<Call>>,
    paths: HashMap<String, PathLog>,
    scripts: HashMap<String, Script>,
    active: usize,
    peak: usize,
}

#[derive(Default)]
struct PathLog {
    calls: usize,
    active: usize,
    peak: usize,
    abandoned: usize,
}

impl Receiver {
    /// Starts a receiver on a free loopback port. A path without a script answers 204.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let address = listener.local_addr().expect("a bound port");
        let state = Arc::new(State::default());
        let server = AbortOnDropHandle::new(tokio::spawn(serve(listener, state.clone())));
        Self {
            address,
            state,
            server: Mutex::new(Some(server)),
        }
    }

    /// Ends as a killed process does: every connection is closed, answered or not, and new ones are refused. What was
    /// recorded stays recorded, as what a consumer has committed does.
    pub(crate) fn crash(&self) {
        self.server.lock().take();
    }

    /// Listens again where it did before [`Receiver::crash`].
    pub(crate) async fn start_again(&self) {
        let listener = eventually("the port of the receiver is free", SOON, async || {
            TcpListener::bind(self.address).await
        });
        let server = tokio::spawn(serve(listener.await, self.state.clone()));
        *self.server.lock() = Some(AbortOnDropHandle::new(server));
    }

    /// The endpoint URL of a path, which starts with a slash.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Answers the calls of a path one after the other; the last answer repeats. Counting begins anew.
    pub(crate) fn script<A: Into<Answer>>(&self, path: &str, answers: impl IntoIterator<Item = A>) {
        let answers: Vec<Answer> = answers.into_iter().map(Into::into).collect();
        assert!(!answers.is_empty(), "a script has at least one answer");
        let before = self.state.log.lock().paths.get(path).map_or(0, |log| log.calls);
        self.answer_with(path, move |call| {
            let position = (call.number - before - 1).min(answers.len() - 1);
            answers[position].clone()
        });
    }

    /// Answers every call of a path by a function of the call.
    pub(crate) fn answer_with(&self, path: &str, script: impl Fn(&Call) -> Answer + Send + Sync + 'static) {
        self.state.log.lock().scripts.insert(path.to_owned(), Arc::new(script));
    }

    /// Ends every hanging or trickling answer there is now.
    pub(crate) fn release(&self) {
        self.state.released.send_modify(|round| *round += 1);
    }

    /// Every call so far, in order of arrival.
    pub(crate) fn calls(&self) -> Vec<Arc<Call>> {
        self.state.log.lock().calls.clone()
    }

    /// The calls of one path so far, in order of arrival.
    pub(crate) fn calls_to(&self, path: &str) -> Vec<Arc<Call>> {
        self.state.log.lock().calls_to(path)
    }

    /// Waits for `count` calls in all and yields every call there is then.
    #[track_caller]
    pub(crate) fn wait_calls(&self, count: usize, deadline: Duration) -> impl Future<Output = Vec<Arc<Call>>> {
        self.wait_log("any path", count, deadline, |log| log.calls.clone())
    }

    /// Waits for `count` calls of one path and yields every call of it there is then.
    #[track_caller]
    pub(crate) fn wait_calls_to(
        &self,
        path: &str,
        count: usize,
        deadline: Duration,
    ) -> impl Future<Output = Vec<Arc<Call>>> {
        self.wait_log(path, count, deadline, move |log| log.calls_to(path))
    }

    /// The most calls of one path that were ever waiting for their answer at once.
    pub(crate) fn peak(&self, path: &str) -> usize {
        self.state.log.lock().paths.get(path).map_or(0, |log| log.peak)
    }

    /// The most calls, over all paths, that were ever waiting for their answer at once.
    pub(crate) fn peak_total(&self) -> usize {
        self.state.log.lock().peak
    }

    /// The calls of one path that are waiting for their answer now.
    pub(crate) fn active(&self, path: &str) -> usize {
        self.state.log.lock().paths.get(path).map_or(0, |log| log.active)
    }

    /// The calls of one path whose sender hung up before the answer was due.
    pub(crate) fn abandoned(&self, path: &str) -> usize {
        self.state.log.lock().paths.get(path).map_or(0, |log| log.abandoned)
    }

    /// Waits until `condition` holds for this receiver; it is looked at after every change.
    #[track_caller]
    pub(crate) fn wait_until(
        &self,
        what: &str,
        deadline: Duration,
        condition: impl Fn(&Self) -> bool,
    ) -> impl Future<Output = ()> {
        let caller = Location::caller();
        async move {
            let reached = self.until(|| condition(self).then_some(()));
            let ended = tokio::time::timeout(deadline, reached).await;
            ended.unwrap_or_else(|_| panic!("{caller}: {what}: not within {deadline:?}"));
        }
    }

    /// Waits, without a deadline of its own, until there are more than `count` calls in all.
    pub(crate) async fn more_calls_than(&self, count: usize) {
        self.until(|| (self.state.log.lock().calls.len() > count).then_some(()))
            .await;
    }

    #[track_caller]
    fn wait_log(
        &self,
        place: &str,
        count: usize,
        deadline: Duration,
        look: impl Fn(&Log) -> Vec<Arc<Call>>,
    ) -> impl Future<Output = Vec<Arc<Call>>> {
        let caller = Location::caller();
        async move {
            let look = || look(&self.state.log.lock());
            let enough = self.until(|| Some(look()).filter(|calls| calls.len() >= count));
            let ended = tokio::time::timeout(deadline, enough).await;
            ended.unwrap_or_else(|_| {
                panic!(
                    "{caller}: {} of {count} calls to {place} within {deadline:?}",
                    look().len()
                )
            })
        }
    }

    async fn until<T>(&self, look: impl Fn() -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.state.changed.notified());
            // Listening starts before the look, so that a change in between is not missed.
            changed.as_mut().enable();
            if let Some(value) = look() {
                return value;
            }
            changed.await;
        }
    }
}

impl Log {
    fn calls_to(&self, path: &str) -> Vec<Arc<Call>> {
        self.calls.iter().filter(|call| call.path() == path).cloned().collect()
    }
}

/// A call that waits for its answer; it counts as active until this is dropped.
struct Active<'a> {
    state: &'a State,
    path: String,
}

impl<'a> Active<'a> {
    /// Records a call; yields it with the answer it is to get.
    fn record(state: &'a State, request: Request) -> (Self, Answer) {
        let path = request.path().to_owned();
        let mut log = state.log.lock();
        log.active += 1;
        log.peak = log.peak.max(log.active);
        let of_path = log.paths.entry(path.clone()).or_default();
        of_path.calls += 1;
        of_path.active += 1;
        of_path.peak = of_path.peak.max(of_path.active);
        let number = of_path.calls;
        let call = Arc::new(Call {
            number,
            arrived: Instant::now(),
            arrived_at: SystemTime::now(),
            request,
        });
        log.calls.push(call.clone());
        let script = log.scripts.get(&path).cloned();
        drop(log);
        // The script runs outside the lock: it may ask the receiver about earlier calls.
        let answer = script.map_or_else(|| Answer::status(204), |script| script(&call));
        state.changed.notify_waiters();
        (Self { state, path }, answer)
    }

    fn abandon(self) {
        self.of_path(|log| log.abandoned += 1);
    }

    fn of_path(&self, change: impl FnOnce(&mut PathLog)) {
        change(
            self.state
                .log
                .lock()
                .paths
                .get_mut(&self.path)
                .expect("a recorded call has its path's log"),
        );
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.of_path(|log| log.active -= 1);
        self.state.log.lock().active -= 1;
        self.state.changed.notify_waiters();
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).ok();
        let state = state.clone();
        connections.spawn(async move {
            let mut stream = BufReader::new(stream);
            // A peer that hangs up in the middle is part of the tests, not an error.
            while let Ok(Some(request)) = http1::read_request(&mut stream).await {
                let released = state.released.subscribe();
                let (active, answer) = Active::record(&state, request);
                if !send(&mut stream, active, &answer, released).await {
                    return;
                }
            }
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Answers one call; true when the connection may carry another.
async fn send(
    stream: &mut BufReader<TcpStream>,
    active: Active<'_>,
    answer: &Answer,
    mut released: watch::Receiver<u64>,
) -> bool {
    let mut release = std::pin::pin!(released.changed());
    let due = async {
        tokio::time::sleep(answer.delay).await;
        if answer.manner == Manner::Hang {
            release.as_mut().await.ok();
        }
    };
    tokio::select! {
        () = due => {}
        () = hung_up(stream) => {
            active.abandon();
            return false;
        }
    }
    match answer.manner {
        Manner::Close => false,
        // The call stops counting just before its answer leaves: the sender may start the next one upon its first byte.
        Manner::Whole | Manner::Hang => {
            drop(active);
            let mut bytes = answer.head(answer.body_bytes).into_bytes();
            bytes.resize(bytes.len() + answer.body_bytes, b'x');
            stream.write_all(&bytes).await.is_ok()
        }
        Manner::TrickleHead => {
            let status_line = format!("HTTP/1.1 {} Answer\r\n", answer.status);
            let sent = trickle(stream, &status_line, b"X-More: 1\r\n", release.as_mut()).await;
            if !sent {
                active.abandon();
            }
            false
        }
        Manner::TrickleBody => {
            drop(active);
            let announced = if answer.body_bytes == 0 {
                1_000_000
            } else {
                answer.body_bytes
            };
            trickle(stream, &answer.head(announced), b"x", release.as_mut()).await;
            false
        }
    }
}

/// Sends `first`, then `more` again and again until released (true) or until the peer is gone (false).
async fn trickle(
    stream: &mut BufReader<TcpStream>,
    first: &str,
    more: &[u8],
    mut release: std::pin::Pin<&mut impl Future>,
) -> bool {
    let mut next = first.as_bytes();
    loop {
        if stream.write_all(next).await.is_err() {
            return false;
        }
        next = more;
        tokio::select! {
            _ = release.as_mut() => return true,
            () = hung_up(stream) => return false,
            () = tokio::time::sleep(TRICKLE_PAUSE) => {}
        }
    }
}

/// Ends when the peer has closed; bytes that arrive early are left for the next request.
async fn hung_up(stream: &mut BufReader<TcpStream>) {
    match stream.fill_buf().await {
        Ok(bytes) if !bytes.is_empty() => std::future::pending().await,
        _ => {}
    }
}
