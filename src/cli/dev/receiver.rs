//! A webhook receiver whose answers are scripted, and which remembers what arrived.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::server::serve;

/// Requests remembered; the oldest are forgotten first.
const REMEMBERED_MAX: usize = 1000;

/// What the receiver does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    /// Answers with this status at once.
    Answer(u16),
    /// Answers nothing until the script of the path changes; then 204.
    Hold,
}

/// A request that arrived.
#[derive(Debug, Clone)]
pub(super) struct Arrival {
    /// Counts every request since the start, from 1.
    pub(super) number: u64,
    /// Where it went.
    pub(super) path: String,
    /// Its headers.
    pub(super) headers: HeaderMap,
    /// Its exact body.
    pub(super) body: Bytes,
    /// When its last byte was there.
    pub(super) at: Instant,
    /// What was done with it.
    pub(super) act: Act,
}

impl Arrival {
    /// The value of a header; empty when there is none or it is not text.
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// The id in its header `X-OpenVibe-Event-Id`.
    pub(super) fn event_id(&self) -> &str {
        self.header("x-openvibe-event-id")
    }

    /// Which attempt it says it is; 0 when it does not.
    pub(super) fn attempt(&self) -> u32 {
        self.header("x-openvibe-delivery-attempt").parse().unwrap_or(0)
    }

    /// Its body as JSON; null when it is none.
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Whether it was answered as taken.
    pub(super) fn taken(&self) -> bool {
        matches!(self.act, Act::Answer(status) if (200..300).contains(&status))
    }
}

/// A running receiver; it ends when it is dropped.
#[derive(Debug)]
pub(super) struct Receiver {
    address: SocketAddr,
    shared: Arc<Shared>,
    _serving: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<Memory>,
    /// Counts arrivals, so that whoever waits looks again.
    arrived: watch::Sender<u64>,
    /// Counts changes of the script, so that requests held look again.
    scripted: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Memory {
    count: u64,
    arrivals: VecDeque<Arrival>,
    scripts: HashMap<String, Script>,
}

/// The acts of one path: these in turn, then always the last.
#[derive(Debug, Clone)]
struct Script {
    first: VecDeque<Act>,
    then: Act,
    version: u64,
}

impl Receiver {
    /// Serves on `listener`. Paths without a script answer 204.
    ///
    /// # Errors
    ///
    /// The listener has no address.
    pub(super) fn start(listener: TcpListener) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            arrived: watch::Sender::new(0),
            scripted: watch::Sender::new(0),
        });
        let routes = Router::new().fallback(receive).with_state(Arc::clone(&shared));
        Ok(Self {
            address,
            shared,
            _serving: serve(listener, routes),
        })
    }

    /// The URL of a path.
    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// From now on `path` acts as `first` says, one request each, and then always as `then`. Requests held there are
    /// answered.
    pub(super) fn script(&self, path: &str, first: &[Act], then: Act) {
        {
            let mut memory = self.shared.state.lock();
            let version = memory.scripts.get(path).map_or(1, |script| script.version + 1);
            let script = Script {
                first: first.iter().copied().collect(),
                then,
                version,
            };
            memory.scripts.insert(path.to_owned(), script);
        }
        self.shared.scripted.send_modify(|version| *version += 1);
    }

    /// What arrived at `path`, oldest first.
    pub(super) fn at(&self, path: &str) -> Vec<Arrival> {
        let memory = self.shared.state.lock();
        memory
            .arrivals
            .iter()
            .filter(|arrival| arrival.path == path)
            .cloned()
            .collect()
    }

    /// What arrived after the request `number`, oldest first.
    pub(super) fn since(&self, number: u64) -> Vec<Arrival> {
        let memory = self.shared.state.lock();
        memory
            .arrivals
            .iter()
            .filter(|arrival| arrival.number > number)
            .cloned()
            .collect()
    }

    /// Waits until `found` finds something in what arrived at `path`.
    pub(super) async fn wait<T>(&self, path: &str, mut found: impl FnMut(&[Arrival]) -> Option<T>) -> T {
        let mut arrived = self.shared.arrived.subscribe();
        loop {
            arrived.borrow_and_update();
            if let Some(found) = found(&self.at(path)) {
                return found;
            }
            changed(&mut arrived).await;
        }
    }

    /// Waits until something arrives after the request `number`.
    pub(super) async fn next(&self, number: u64) -> Vec<Arrival> {
        let mut arrived = self.shared.arrived.subscribe();
        loop {
            arrived.borrow_and_update();
            let new = self.since(number);
            if !new.is_empty() {
                return new;
            }
            changed(&mut arrived).await;
        }
    }
}

async fn changed(counter: &mut watch::Receiver<u64>) {
    counter.changed().await.expect("whoever waits holds the sender");
}

async fn receive(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> StatusCode {
    let path = uri.path().to_owned();
    if method != Method::POST {
        return StatusCode::METHOD_NOT_ALLOWED;
    }
    let mut scripted = shared.scripted.subscribe();
    let (act, version) = {
        let mut memory = shared.state.lock();
        let (act, version) = match memory.scripts.get_mut(&path) {
            Some(script) => (script.first.pop_front().unwrap_or(script.then), script.version),
            None => (Act::Answer(204), 0),
        };
        memory.count += 1;
        let number = memory.count;
        memory.arrivals.push_back(Arrival {
            number,
            path: path.clone(),
            headers,
            body,
            at: Instant::now(),
            act,
        });
        if memory.arrivals.len() > REMEMBERED_MAX {
            memory.arrivals.pop_front();
        }
        (act, version)
    };
    shared.arrived.send_modify(|count| *count += 1);
    let status = match act {
        Act::Answer(status) => status,
        Act::Hold => {
            let is_over = || {
                shared
                    .state
                    .lock()
                    .scripts
                    .get(&path)
                    .is_none_or(|script| script.version != version)
            };
            while !is_over() {
                changed(&mut scripted).await;
            }
            204
        }
    };
    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_path_follows_its_script_and_every_request_is_remembered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let receiver = Receiver::start(listener).expect("it starts");
        receiver.script("/a", &[Act::Answer(503), Act::Hold], Act::Answer(500));
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        let post = |path: &str, body: &'static str| {
            let request = client
                .post(receiver.url(path))
                .header("X-OpenVibe-Event-Id", "evt_1")
                .header("X-OpenVibe-Delivery-Attempt", "2")
                .body(body);
            async move { request.send().await.expect("an answer").status().as_u16() }
        };
        assert_eq!(post("/a", "{\"n\":1}").await, 503);
        let held = tokio::spawn(post("/a", "{}"));
        receiver
            .wait("/a", |arrivals| (arrivals.len() == 2).then_some(()))
            .await;
        assert!(!held.is_finished(), "it is held");
        assert_eq!(post("/a", "{}").await, 500);
        assert_eq!(post("/b", "{}").await, 204, "no script");
        receiver.script("/a", &[], Act::Answer(200));
        assert_eq!(
            held.await.expect("no panic"),
            204,
            "a change of the script ends the wait"
        );
        assert_eq!(post("/a", "{}").await, 200);

        let first = &receiver.at("/a")[0];
        assert_eq!(
            (first.event_id(), first.attempt(), first.json()["n"].as_i64()),
            ("evt_1", 2, Some(1))
        );
        assert_eq!((first.taken(), receiver.at("/b")[0].taken()), (false, true));
        assert_eq!(receiver.next(3).await[0].path, "/b");
        let get = client.get(receiver.url("/a")).send().await.expect("an answer");
        assert_eq!(get.status().as_u16(), 405, "a look with a browser is no arrival");
    }
}
