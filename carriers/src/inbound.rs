//! Where carriers put what they hear, and where the fabric takes it from: bounded, and never waited for by a sender.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::Signal;

/// How many signals one arrival holds at most; more are split.
const ARRIVAL_SIGNALS_MAX: usize = 1000;

/// What was heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// These rows may be worth a look.
    Signals(Vec<Signal>),
    /// Anything may: there was too much to name, or something may have been missed.
    Everything,
}

/// One thing heard. Dropping it tells the carrier that it is handled.
#[derive(Debug)]
pub struct Arrival {
    /// What it says.
    pub heard: Heard,
    /// When it was heard.
    pub at: Instant,
    _handled: Option<oneshot::Sender<()>>,
}

/// A carrier's end. A signal is a hint, so what finds no room is dropped and counted, and a poll finds the row.
#[derive(Debug, Clone)]
pub struct Inbound {
    arrivals: mpsc::Sender<Arrival>,
    counts: Arc<Counts>,
}

/// The fabric's end.
#[derive(Debug)]
pub struct Arrivals {
    arrivals: mpsc::Receiver<Arrival>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    dropped: AtomicU64,
    ignored: AtomicU64,
}

/// A way in that holds so many arrivals, each of at most a thousand signals.
pub fn channel(capacity: usize) -> (Inbound, Arrivals) {
    let (sender, arrivals) = mpsc::channel(capacity);
    let counts = Arc::new(Counts::default());
    let inbound = Inbound {
        arrivals: sender,
        counts: Arc::clone(&counts),
    };
    (inbound, Arrivals { arrivals, counts })
}

impl Inbound {
    /// Hands a signal over, without an answer.
    pub fn offer(&self, signal: Signal) {
        self.offer_all(vec![signal]);
    }

    /// Hands signals over, without an answer.
    pub fn offer_all(&self, signals: Vec<Signal>) {
        for heard in self.arrivals_of(signals) {
            self.put(heard, None);
        }
    }

    /// Says that anything may be worth a look.
    pub fn offer_everything(&self) {
        self.put(Heard::Everything, None);
    }

    /// Hands signals over and returns when they have been handled, or dropped: they can be acknowledged now.
    pub async fn handled(&self, signals: Vec<Signal>) {
        let mut waiting = Vec::new();
        for heard in self.arrivals_of(signals) {
            let (sender, receiver) = oneshot::channel();
            self.put(heard, Some(sender));
            waiting.push(receiver);
        }
        for handled in waiting {
            // Either way it is over: the other end says so by letting go.
            let _ = handled.await;
        }
    }

    /// Counts something that was heard and is no signal.
    pub fn ignore(&self) {
        self.counts.ignored.fetch_add(1, Relaxed);
    }

    /// What is no signal is left out: ids come from outside.
    fn arrivals_of(&self, mut signals: Vec<Signal>) -> Vec<Heard> {
        let before = signals.len();
        signals.retain(Signal::is_plausible);
        self.counts.ignored.fetch_add((before - signals.len()) as u64, Relaxed);
        let mut arrivals = Vec::with_capacity(signals.len().div_ceil(ARRIVAL_SIGNALS_MAX));
        while signals.len() > ARRIVAL_SIGNALS_MAX {
            arrivals.push(Heard::Signals(signals.split_off(signals.len() - ARRIVAL_SIGNALS_MAX)));
        }
        if !signals.is_empty() {
            arrivals.push(Heard::Signals(signals));
        }
        arrivals
    }

    fn put(&self, heard: Heard, handled: Option<oneshot::Sender<()>>) {
        let signals = match &heard {
            Heard::Signals(signals) => signals.len(),
            Heard::Everything => 1,
        };
        let arrival = Arrival {
            heard,
            at: Instant::now(),
            _handled: handled,
        };
        if self.arrivals.try_send(arrival).is_err() {
            self.counts.dropped.fetch_add(signals as u64, Relaxed);
        }
    }
}

impl Arrivals {
    /// The next arrival; `None` when no carrier can hand over any more.
    pub async fn next(&mut self) -> Option<Arrival> {
        self.arrivals.recv().await
    }

    /// How many signals found no room.
    pub fn dropped(&self) -> u64 {
        self.counts.dropped.load(Relaxed)
    }

    /// How many things were heard that are no signals.
    pub fn ignored(&self) -> u64 {
        self.counts.ignored.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signal(event_id: impl Into<String>) -> Signal {
        Signal {
            event_id: event_id.into(),
            subscription_id: None,
        }
    }

    #[tokio::test]
    async fn what_finds_no_room_is_dropped_at_once_and_counted() {
        let (inbound, mut arrivals) = channel(1);
        inbound.offer(signal("evt_1"));
        inbound.offer(signal("evt_2"));
        inbound.handled(vec![signal("evt_3"), signal("evt_4")]).await;
        assert_eq!(arrivals.dropped(), 3);
        let first = arrivals.next().await.expect("an arrival");
        assert_eq!(first.heard, Heard::Signals(vec![signal("evt_1")]));
    }

    #[tokio::test]
    async fn handled_waits_until_the_arrival_is_let_go() {
        let (inbound, mut arrivals) = channel(4);
        let handled = tokio::spawn(async move { inbound.handled(vec![signal("evt_1")]).await });
        let arrival = arrivals.next().await.expect("an arrival");
        tokio::task::yield_now().await;
        assert!(!handled.is_finished(), "acknowledged before it was handled");
        drop(arrival);
        handled.await.expect("it returns");
    }

    #[tokio::test]
    async fn ids_that_cannot_be_ids_never_arrive() {
        let (inbound, mut arrivals) = channel(4);
        let long = "x".repeat(65);
        inbound.offer_all(vec![
            signal(""),
            signal(long.as_str()),
            signal("evt 1"),
            signal("evt\n"),
            signal("evt_1"),
        ]);
        inbound.offer(Signal {
            event_id: "evt_1".into(),
            subscription_id: Some(long),
        });
        let arrival = arrivals.next().await.expect("an arrival");
        assert_eq!(arrival.heard, Heard::Signals(vec![signal("evt_1")]));
        assert_eq!((arrivals.ignored(), arrivals.dropped()), (5, 0));
    }

    #[tokio::test]
    async fn a_flood_comes_in_parts_of_bounded_size_with_nothing_missing() {
        let (inbound, mut arrivals) = channel(8);
        inbound.offer_all((0..2500).map(|n| signal(format!("evt_{n}"))).collect());
        drop(inbound);
        let mut heard = 0;
        while let Some(arrival) = arrivals.next().await {
            let Heard::Signals(signals) = &arrival.heard else {
                panic!("these are signals")
            };
            assert!(signals.len() <= ARRIVAL_SIGNALS_MAX);
            heard += signals.len();
        }
        assert_eq!(heard, 2500);
    }
}
