//! What was published and what arrived: losses, repeats, and the order of each key.

use std::collections::HashMap;

/// What is known of a published event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Sent, and not answered with a 2xx: it may be stored or not.
    Unsure,
    /// Answered with a 2xx: every subscription must get it.
    Stored,
}

/// What came to one subscription.
#[derive(Debug, Default)]
struct Arrivals {
    /// By number, how often, up to 255.
    seen: Vec<u8>,
    /// By key, the highest number so far.
    newest: HashMap<u32, u64>,
}

/// The account of one run.
#[derive(Debug)]
pub(crate) struct Ledger {
    events: Vec<(Fate, u32)>,
    stored: u64,
    subscriptions: Vec<Arrivals>,
    order: Order,
    arrived: u64,
    owed: u64,
    repeats: u64,
    order_faults: u64,
    strangers: u64,
}

/// Whether the order of keys is promised, and so checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Within each key, by number.
    PerKey,
    /// Not promised.
    Free,
}

/// What became of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Balance {
    /// Deliveries owed for events that were answered with a 2xx.
    pub(crate) owed: u64,
    /// First arrivals, those of unsure events included.
    pub(crate) arrived: u64,
    /// Owed and not arrived.
    pub(crate) missing: u64,
    /// Arrivals of what had arrived before.
    pub(crate) repeats: u64,
    /// First arrivals behind a later event of their key.
    pub(crate) order_faults: u64,
    /// Arrivals that nobody sent.
    pub(crate) strangers: u64,
}

impl Ledger {
    /// Nothing sent yet, to so many subscriptions.
    pub(crate) fn new(subscriptions: usize, order: Order) -> Self {
        Self {
            events: Vec::new(),
            stored: 0,
            subscriptions: (0..subscriptions).map(|_| Arrivals::default()).collect(),
            order,
            arrived: 0,
            owed: 0,
            repeats: 0,
            order_faults: 0,
            strangers: 0,
        }
    }

    /// Notes events before they are sent and answers the number of the first.
    pub(crate) fn sending(&mut self, count: usize, key: u32) -> u64 {
        let first = self.events.len() as u64;
        self.events.extend(std::iter::repeat_n((Fate::Unsure, key), count));
        first
    }

    /// They were answered with a 2xx.
    pub(crate) fn stored(&mut self, first: u64, count: usize) {
        for number in first..first + count as u64 {
            let index = index(number);
            self.events[index].0 = Fate::Stored;
            self.stored += 1;
            let early = self.subscriptions.iter().filter(|arrivals| arrivals.has(index)).count();
            self.owed += (self.subscriptions.len() - early) as u64;
        }
    }

    /// One of them arrived. Whether it did for the first time.
    pub(crate) fn arrived(&mut self, subscription: usize, number: u64) -> bool {
        let index = index(number);
        let Some(&(fate, key)) = self.events.get(index) else {
            self.strangers += 1;
            return false;
        };
        let Some(arrivals) = self.subscriptions.get_mut(subscription) else {
            self.strangers += 1;
            return false;
        };
        if arrivals.seen.len() <= index {
            arrivals.seen.resize(index + 1, 0);
        }
        let before = arrivals.seen[index];
        arrivals.seen[index] = before.saturating_add(1);
        if before > 0 {
            self.repeats += 1;
            return false;
        }
        self.arrived += 1;
        if fate == Fate::Stored {
            self.owed -= 1;
        }
        if self.order == Order::PerKey {
            let newest = arrivals.newest.entry(key).or_insert(number);
            if number < *newest {
                self.order_faults += 1;
            }
            *newest = number.max(*newest);
        }
        true
    }

    /// Deliveries still owed; each event's is counted once it was answered.
    pub(crate) fn waiting(&self) -> u64 {
        self.owed
    }

    /// First arrivals so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrived
    }

    /// Events answered with a 2xx so far.
    pub(crate) fn stored_events(&self) -> u64 {
        self.stored
    }

    /// The account as it stands.
    pub(crate) fn balance(&self) -> Balance {
        Balance {
            owed: self.stored * self.subscriptions.len() as u64,
            arrived: self.arrived,
            missing: self.owed,
            repeats: self.repeats,
            order_faults: self.order_faults,
            strangers: self.strangers,
        }
    }
}

impl Arrivals {
    fn has(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|&times| times > 0)
    }
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_event_is_owed_to_every_subscription_until_it_arrives() {
        let mut ledger = Ledger::new(2, Order::Free);
        let first = ledger.sending(3, 0);
        assert_eq!(ledger.waiting(), 0, "nothing is owed before the answer");
        ledger.stored(first, 2);
        assert_eq!(ledger.waiting(), 4);
        assert!(ledger.arrived(0, 0) && ledger.arrived(1, 0) && ledger.arrived(1, 1));
        assert_eq!(ledger.balance().missing, 1, "event 1 has not come to subscription 0");
        assert!(ledger.arrived(0, 2), "an unsure event may come");
        assert_eq!(ledger.balance().missing, 1, "and makes up for nothing");
    }

    #[test]
    fn an_arrival_before_the_answer_is_not_owed_again() {
        let mut ledger = Ledger::new(1, Order::Free);
        let first = ledger.sending(1, 0);
        assert!(ledger.arrived(0, first));
        ledger.stored(first, 1);
        assert_eq!(ledger.waiting(), 0);
        assert_eq!(ledger.balance().owed, 1);
    }

    #[test]
    fn repeats_and_strangers_are_no_arrivals() {
        let mut ledger = Ledger::new(1, Order::PerKey);
        ledger.sending(2, 0);
        assert!(ledger.arrived(0, 1));
        assert!(!ledger.arrived(0, 1), "again");
        assert!(!ledger.arrived(0, 2), "never sent");
        assert!(!ledger.arrived(1, 0), "no such subscription");
        let balance = ledger.balance();
        assert_eq!((balance.arrived, balance.repeats, balance.strangers), (1, 1, 2));
        assert_eq!(balance.order_faults, 0, "a repeat is not out of order");
    }

    #[test]
    fn order_is_judged_within_a_key_and_a_subscription() {
        let mut ledger = Ledger::new(2, Order::PerKey);
        let (a, b) = (ledger.sending(2, 1), ledger.sending(1, 2));
        for (subscription, number) in [(0, b), (0, a), (0, a + 1), (1, a + 1)] {
            ledger.arrived(subscription, number);
        }
        assert_eq!(ledger.balance().order_faults, 0);
        ledger.arrived(1, a);
        assert_eq!(ledger.balance().order_faults, 1);
        let mut free = Ledger::new(1, Order::Free);
        free.sending(2, 1);
        free.arrived(0, 1);
        free.arrived(0, 0);
        assert_eq!(free.balance().order_faults, 0, "nothing was promised");
    }
}
