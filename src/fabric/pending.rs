//! Signals that wait to be sent: bounded, and one for each subscription, however many of its deliveries are new.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use carriers::Signal;
use parking_lot::Mutex;
use planner::Class;
use tokio::sync::Notify;

/// Signals that wait at most; the poll finds what the others would have said.
const WAITING_MAX: usize = 8192;

/// What one signal is about: a subscription that has work, or the log that has grown, whatever its newest event is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Target(Class, Option<String>);

impl Target {
    fn of(class: Class, signal: &Signal) -> Self {
        Self(class, signal.subscription_id.clone())
    }
}

/// What waits for one carrier.
#[derive(Debug, Default)]
pub(super) struct Pending {
    waiting: Mutex<Waiting>,
    rung: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    signals: HashMap<Target, Signal>,
    order: VecDeque<Target>,
}

impl Pending {
    /// Adds signals; answers how many found no room. The newest event stands for all before it.
    pub(super) fn push(&self, class: Class, signals: impl IntoIterator<Item = Signal>) -> u64 {
        let mut dropped = 0;
        {
            let waiting = &mut *self.waiting.lock();
            for signal in signals {
                let full = waiting.signals.len() >= WAITING_MAX;
                match waiting.signals.entry(Target::of(class, &signal)) {
                    Entry::Occupied(mut same) => *same.get_mut() = signal,
                    Entry::Vacant(_) if full => dropped += 1,
                    Entry::Vacant(free) => {
                        waiting.order.push_back(free.key().clone());
                        free.insert(signal);
                    }
                }
            }
        }
        self.rung.notify_one();
        dropped
    }

    /// Up to `most` of those that wait longest, by class.
    pub(super) fn take(&self, most: usize) -> Vec<(Class, Vec<Signal>)> {
        let waiting = &mut *self.waiting.lock();
        let mut taken: Vec<(Class, Vec<Signal>)> = Vec::new();
        for _ in 0..most {
            let Some(target) = waiting.order.pop_front() else { break };
            let Some(signal) = waiting.signals.remove(&target) else {
                continue;
            };
            match taken.iter_mut().find(|(class, _)| *class == target.0) {
                Some((_, signals)) => signals.push(signal),
                None => taken.push((target.0, vec![signal])),
            }
        }
        taken
    }

    /// How many wait.
    pub(super) fn depth(&self) -> usize {
        self.waiting.lock().signals.len()
    }

    /// Waits until something is added; at once if it was before.
    pub(super) async fn rung(&self) {
        self.rung.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(event_id: &str, subscription_id: &str) -> Signal {
        Signal {
            event_id: event_id.to_owned(),
            subscription_id: Some(subscription_id.to_owned()),
        }
    }

    #[test]
    fn a_hundred_deliveries_of_one_subscription_are_one_signal() {
        let pending = Pending::default();
        for n in 0..100 {
            assert_eq!(pending.push(Class::Queue, [delivery(&format!("evt_{n}"), "sub_1")]), 0);
        }
        assert_eq!(pending.depth(), 1);
        assert_eq!(pending.take(10), [(Class::Queue, vec![delivery("evt_99", "sub_1")])]);
        assert_eq!(pending.take(10), [], "taken once");
    }

    #[test]
    fn classes_are_told_apart_and_keep_their_order() {
        let pending = Pending::default();
        let news = Signal {
            event_id: "evt_9".to_owned(),
            subscription_id: None,
        };
        pending.push(Class::Queue, [delivery("evt_1", "sub_1"), delivery("evt_1", "sub_2")]);
        pending.push(Class::Topic, [news.clone()]);
        pending.push(Class::Stream, [delivery("evt_2", "sub_1")]);
        assert_eq!(
            pending.take(3),
            [
                (
                    Class::Queue,
                    vec![delivery("evt_1", "sub_1"), delivery("evt_1", "sub_2")]
                ),
                (Class::Topic, vec![news]),
            ]
        );
        assert_eq!(pending.take(3), [(Class::Stream, vec![delivery("evt_2", "sub_1")])]);
    }

    #[test]
    fn what_finds_no_room_is_counted_and_what_waits_stays() {
        let pending = Pending::default();
        let flood = (0..WAITING_MAX + 5).map(|n| delivery("evt_1", &format!("sub_{n}")));
        assert_eq!(pending.push(Class::Queue, flood), 5);
        assert_eq!(
            pending.push(Class::Queue, [delivery("evt_2", "sub_0")]),
            0,
            "it has its place"
        );
        assert_eq!(pending.depth(), WAITING_MAX);
    }
}
