//! Bookkeeping for tests with faults: what the service said yes to, and whether each receiver got all it is owed by the end.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use parking_lot::Mutex;
use reqwest::Method;
use serde_json::Value;
use sqlx::PgPool;

use super::{
    client::{Client, Response},
    envelopes::Envelope,
    receiver::{Call, Receiver},
};

/// How many events a walk reads a page.
const WALK_PAGE: usize = 1_000;

/// Which events a receiver's path is owed.
type Owed = Box<dyn Fn(&Value) -> bool + Send + Sync>;

/// What has been acknowledged and who must get it. Safe to share between publishers.
#[derive(Default)]
pub(crate) struct Ledger {
    routes: Vec<(String, Owed)>,
    entries: Mutex<BTreeMap<String, Entry>>,
}

#[derive(Debug)]
struct Entry {
    paths: Vec<String>,
    cursors: BTreeSet<String>,
}

impl Ledger {
    /// Owes `path` of the receiver every acknowledged envelope that `owed` says yes to.
    pub(crate) fn route(mut self, path: &str, owed: impl Fn(&Value) -> bool + Send + Sync + 'static) -> Self {
        self.routes.push((path.to_owned(), Box::new(owed)));
        self
    }

    /// Owes `path` every event of exactly this type.
    pub(crate) fn route_type(self, path: &str, event_type: &str) -> Self {
        let event_type = event_type.to_owned();
        self.route(path, move |envelope| envelope["event_type"] == event_type)
    }

    /// Notes what an answer acknowledged of the envelopes it was given for, in their order.
    ///
    /// A refusal owes nothing, and neither does an answer that was lost: it may have been stored or not.
    #[track_caller]
    pub(crate) fn note<'a>(&self, published: impl IntoIterator<Item = &'a Envelope>, answer: &Response) {
        if !(200..300).contains(&answer.status) {
            return;
        }
        let published: Vec<&Envelope> = published.into_iter().collect();
        let results = answer.body["results"].as_array();
        let results = results.map_or(std::slice::from_ref(&answer.body), Vec::as_slice);
        assert_eq!(
            results.len(),
            published.len(),
            "one result for each envelope: {}",
            answer.text
        );
        let mut entries = self.entries.lock();
        for (envelope, result) in published.into_iter().zip(results) {
            assert_eq!(
                result["event_id"],
                envelope.id(),
                "results in the order of the request: {}",
                answer.text
            );
            let routes = self.routes.iter().filter(|(_, owed)| owed(envelope.json()));
            let paths = routes.map(|(path, _)| path.clone()).collect();
            let new = Entry {
                paths,
                cursors: BTreeSet::new(),
            };
            let entry = entries.entry(envelope.id().to_owned()).or_insert(new);
            entry.cursors.extend(result["cursor"].as_str().map(ToOwned::to_owned));
        }
    }

    /// How many events were acknowledged.
    pub(crate) fn len(&self) -> usize {
        self.entries.lock().len()
    }

    /// What the receiver has not been given yet, as `event id -> path`.
    pub(crate) fn open(&self, receiver: &Receiver) -> Vec<String> {
        let calls = receiver.calls();
        let got: BTreeSet<(&str, &str)> = calls.iter().map(|call| (call.event_id(), call.path())).collect();
        let entries = self.entries.lock();
        let owed = entries
            .iter()
            .flat_map(|(id, entry)| entry.paths.iter().map(move |path| (id, path)));
        owed.filter(|(id, path)| !got.contains(&(id.as_str(), path.as_str())))
            .map(|(id, path)| format!("{id} -> {path}"))
            .collect()
    }

    /// Waits until every obligation has arrived at least once; fails with the first that have not.
    pub(crate) async fn settle(&self, receiver: &Receiver, deadline: Duration) {
        let started = std::time::Instant::now();
        loop {
            let calls = receiver.calls().len();
            let open = self.open(receiver);
            if open.is_empty() {
                return;
            }
            let left = deadline.saturating_sub(started.elapsed());
            if tokio::time::timeout(left, receiver.more_calls_than(calls))
                .await
                .is_err()
            {
                let first = open[..open.len().min(10)].join("\n");
                panic!(
                    "{} of {} obligations not met within {deadline:?}:\n{first}",
                    open.len(),
                    self.len()
                );
            }
        }
    }

    /// Fails unless every acknowledged event is stored exactly once, under a position of its own, and that position is
    /// the only one its answers ever named.
    pub(crate) async fn assert_stored_once(&self, pool: &PgPool) {
        let ids: Vec<String> = self.entries.lock().keys().cloned().collect();
        let rows: Vec<(String, i64)> = sqlx::query_as("SELECT id, seq FROM events WHERE id = ANY($1)")
            .bind(&ids)
            .fetch_all(pool)
            .await
            .expect("the stored events");
        let positions: BTreeSet<i64> = rows.iter().map(|(_, seq)| *seq).collect();
        assert_eq!(positions.len(), rows.len(), "no two events share a position");
        let mut stored: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        for (id, seq) in &rows {
            stored.entry(id).or_default().push(*seq);
        }
        let entries = self.entries.lock();
        for (id, entry) in entries.iter() {
            let seqs = stored.get(id.as_str()).map_or(&[][..], Vec::as_slice);
            let [seq] = seqs else {
                panic!("{id} was acknowledged and is stored {} times", seqs.len())
            };
            for cursor in &entry.cursors {
                assert_eq!(
                    position_of(cursor),
                    Some(*seq),
                    "{id} is stored at {seq}, and an answer said {cursor}"
                );
            }
        }
    }
}

/// A reader that follows a topic by its cursors, page by page, and keeps every id in the order read.
#[derive(Debug)]
pub(crate) struct Walk {
    path: String,
    after: String,
    ids: Vec<String>,
}

impl Walk {
    /// Starts before the first event of the log.
    pub(crate) fn over(topic: &str) -> Self {
        Self {
            path: format!("/api/v1/events?topic={topic}&limit={WALK_PAGE}"),
            after: String::new(),
            ids: Vec::new(),
        }
    }

    /// Reads one page through a process that may not answer, or may refuse; then nothing is passed. Answers how many
    /// events were on it.
    pub(crate) async fn step(&mut self, client: &Client) -> usize {
        let token = client.service_token("walker");
        let path = format!("{}{}", self.path, self.after);
        let answer = client.try_send(client.request(Method::GET, &path, Some(&token))).await;
        let Some(page) = answer.ok().filter(|answer| answer.status == 200) else {
            return 0;
        };
        assert_eq!(page.body.get("gap"), None, "no history is lost: {}", page.text);
        let events = page.body["events"].as_array().expect("a list of events");
        let ids = events
            .iter()
            .map(|one| one["event"]["event_id"].as_str().expect("an id").to_owned());
        self.ids.extend(ids);
        self.after = format!("&after={}", page.body["next_cursor"].as_str().expect("a cursor"));
        events.len()
    }

    /// Reads to the end of the log.
    pub(crate) async fn rest(&mut self, client: &Client) {
        while self.step(client).await > 0 {}
    }

    /// Fails unless the log was read whole: every stored event of the topic once, in the order of positions.
    pub(crate) async fn assert_whole(&self, pool: &PgPool) {
        let stored: Vec<String> = sqlx::query_scalar("SELECT id FROM events ORDER BY seq")
            .fetch_all(pool)
            .await
            .expect("the log");
        assert!(
            self.ids == stored,
            "{} events are stored, {} were read; the first difference is at {:?}",
            stored.len(),
            self.ids.len(),
            self.ids.iter().zip(&stored).position(|(read, kept)| read != kept)
        );
    }
}

/// Fails unless the first arrivals of each key at a path came in the order of their positions.
pub(crate) async fn assert_in_order(receiver: &Receiver, path: &str, pool: &PgPool, key: impl Fn(&Call) -> String) {
    let positions: BTreeMap<String, i64> = sqlx::query_as("SELECT id, seq FROM events")
        .fetch_all(pool)
        .await
        .expect("the positions")
        .into_iter()
        .collect();
    let mut seen = BTreeSet::new();
    let mut last: BTreeMap<String, i64> = BTreeMap::new();
    for call in receiver.calls_to(path) {
        if !seen.insert(call.event_id().to_owned()) {
            continue;
        }
        let position = positions[call.event_id()];
        let former = last.insert(key(&call), position);
        assert!(
            former < Some(position),
            "{} at {position} came first after {former:?} of its key {}",
            call.event_id(),
            key(&call)
        );
    }
}

/// The position a cursor names.
pub(crate) fn position_of(cursor: &str) -> Option<i64> {
    let mut parts = cursor.split('.');
    let (Some("c1"), Some(_epoch), Some(position), None) = (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return None;
    };
    String::from_utf8(URL_SAFE_NO_PAD.decode(position).ok()?)
        .ok()?
        .parse()
        .ok()
}

/// The cursor of a position.
pub(crate) fn cursor_of(epoch: i64, position: i64) -> String {
    format!("c1.{epoch}.{}", URL_SAFE_NO_PAD.encode(position.to_string()))
}
