//! Publish load over keep-alive connections, one task each: closed loop, or open loop by a schedule.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::account::Account;
use crate::fault::Fault;
use crate::pace::Schedule;
use crate::percentiles::Latency;
use crate::requests::{Shape, Template};
use crate::sheet::Sheet;
use crate::wire::Connection;

/// The longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// The wait after a failed exchange, so that a server that is down is not hammered.
const PAUSE: Duration = Duration::from_millis(50);

/// Publish load.
#[derive(Debug, Clone)]
pub(crate) struct Load<'a> {
    /// Where to.
    pub(crate) address: SocketAddr,
    /// What requests look like; the connections take these by turns.
    pub(crate) shapes: Vec<Shape<'a>>,
    /// Connections, each with one request at a time.
    pub(crate) connections: usize,
    /// How many keys there are in all, at least one a connection: each key has one connection, so its order is known.
    pub(crate) keys: usize,
    /// How long.
    pub(crate) length: Duration,
    /// Ends earlier after so many events.
    pub(crate) events: Option<u64>,
    /// Requests a second; without, each connection sends as soon as it may.
    pub(crate) rate: Option<f64>,
}

/// What became of it.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Events answered with a 2xx.
    pub(crate) events: u64,
    /// Answers by status.
    pub(crate) statuses: BTreeMap<u16, u64>,
    /// Exchanges without an answer.
    pub(crate) broken: u64,
    /// Of each request, from when it was due (open loop) or sent (closed loop) to its answer.
    pub(crate) latency: Latency,
    /// From the start to the last answer.
    pub(crate) elapsed: Duration,
    /// An answer that was no 2xx, as an example.
    pub(crate) refusal: Option<String>,
}

/// When a connection may send.
#[derive(Debug, Clone)]
enum Pace {
    Closed,
    Open {
        schedule: Schedule,
        permits: Arc<Semaphore>,
        next: Arc<AtomicU64>,
        count: u64,
    },
}

impl Load<'_> {
    /// Runs it to its end.
    pub(crate) async fn run(&self, account: &Arc<Account>) -> Result<Tally, Fault> {
        let mut connections = Vec::with_capacity(self.connections);
        for _ in 0..self.connections {
            let mut connection = Connection::new(self.address);
            connection.open().await.map_err(|source| Fault::Wire {
                request: format!("connecting to {}", self.address),
                source,
            })?;
            connections.push(connection);
        }
        let start = Instant::now();
        let pace = match self.rate {
            None => Pace::Closed,
            Some(rate) => {
                let schedule = Schedule::new(start, rate);
                let count = schedule.count(self.length);
                Pace::Open {
                    schedule,
                    permits: schedule.ring(count),
                    next: Arc::default(),
                    count,
                }
            }
        };
        let left = Arc::new(AtomicU64::new(self.events.unwrap_or(u64::MAX)));
        let templates: Vec<_> = self.shapes.iter().map(Template::new).collect();
        let keys_each = u32::try_from(self.keys / self.connections).unwrap_or(u32::MAX).max(1);
        let mut tasks = JoinSet::new();
        for ((index, connection), template) in (0_u32..).zip(connections).zip(templates.iter().cycle()) {
            tasks.spawn(
                Worker {
                    connection,
                    template: template.clone(),
                    batch: template.events(),
                    keys: index * keys_each..(index + 1) * keys_each,
                    end: start + self.length,
                    left: Arc::clone(&left),
                    account: Arc::clone(account),
                    tally: Tally::new(),
                }
                .run(pace.clone()),
            );
        }
        let mut tally = Tally::new();
        for one in tasks.join_all().await {
            tally.merge(one);
        }
        tally.elapsed = start.elapsed();
        Ok(tally)
    }
}

struct Worker {
    connection: Connection,
    template: Template,
    batch: usize,
    keys: std::ops::Range<u32>,
    end: Instant,
    left: Arc<AtomicU64>,
    account: Arc<Account>,
    tally: Tally,
}

impl Worker {
    async fn run(mut self, pace: Pace) -> Tally {
        let mut key = self.keys.start;
        loop {
            let due = match &pace {
                Pace::Closed => {
                    let now = Instant::now();
                    if now >= self.end || !self.take() {
                        break;
                    }
                    now
                }
                Pace::Open {
                    schedule,
                    permits,
                    next,
                    count,
                } => {
                    // Taking the number first: whoever holds none left would wait for a permit that never comes.
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= *count {
                        break;
                    }
                    permits.acquire().await.expect("never closed").forget();
                    schedule.due(number)
                }
            };
            self.send(key, due).await;
            key += 1;
            if key == self.keys.end {
                key = self.keys.start;
            }
        }
        self.tally
    }

    /// Takes a request's events from the budget.
    fn take(&self) -> bool {
        let batch = self.batch as u64;
        let taken = self
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(batch));
        taken.is_ok()
    }

    async fn send(&mut self, key: u32, due: Instant) {
        let first = self.account.sending(self.batch, key, due);
        let request = self.template.fill(first, key);
        let answered = match timeout(ANSWER_MAX, self.connection.exchange(request)).await {
            Ok(Ok((status, body))) => {
                self.tally.latency.record(due.elapsed());
                *self.tally.statuses.entry(status).or_default() += 1;
                if !(200..300).contains(&status) && self.tally.refusal.is_none() {
                    self.tally.refusal = Some(String::from_utf8_lossy(body).into_owned());
                }
                Some(status)
            }
            Ok(Err(_)) => None,
            Err(_) => {
                // The answer may still come, and must not be taken for that of the next request.
                self.connection.close();
                None
            }
        };
        match answered {
            Some(200..300) => {
                self.account.stored(first, self.batch);
                self.tally.events += self.batch as u64;
            }
            Some(_) => {}
            None => {
                self.tally.latency.record(due.elapsed());
                self.tally.broken += 1;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

impl Tally {
    fn new() -> Self {
        Self {
            events: 0,
            statuses: BTreeMap::new(),
            broken: 0,
            latency: Latency::new(),
            elapsed: Duration::ZERO,
            refusal: None,
        }
    }

    fn merge(&mut self, other: Self) {
        self.events += other.events;
        self.broken += other.broken;
        self.latency.merge(&other.latency);
        for (status, count) in other.statuses {
            *self.statuses.entry(status).or_default() += count;
        }
        self.refusal = self.refusal.take().or(other.refusal);
    }

    /// Writes it down.
    pub(crate) fn write(&self, sheet: &mut Sheet) {
        let requests: u64 = self.statuses.values().sum();
        sheet.number("elapsed_s", self.elapsed.as_secs_f64());
        sheet.count("published", self.events);
        sheet.number("published_per_s", per_s(self.events, self.elapsed));
        sheet.number("requests_per_s", per_s(requests, self.elapsed));
        sheet.latency("publish", &self.latency);
        let refused = self.statuses.iter().filter(|(status, _)| !(200..300).contains(*status));
        for (status, count) in refused.clone() {
            sheet.count(&format!("answered_{status}"), *count);
        }
        sheet.must_be_zero("not_2xx", refused.map(|(_, count)| count).sum());
        if let Some(refusal) = &self.refusal {
            sheet.fault(format!("refused with {refusal}"));
        }
        sheet.must_be_zero("broken_exchanges", self.broken);
    }
}

/// So many in that time, a second.
pub(crate) fn per_s(count: u64, time: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let count = count as f64;
    count / time.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests;
