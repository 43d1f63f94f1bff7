//! The carrier fabric: joins the planner and the carriers to the store. It says which carrier wakes a delivery and why,
//! signals what was committed, and hands what carriers hear to the dispatcher.
//!
//! Nothing here decides an outcome. A signal says "look there", and losing every one of them costs the wait for a poll.

mod explain;
mod guard;
mod pending;
mod placing;
mod strangers;
mod usage;

use std::collections::{BTreeSet, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use carriers::{Arrival, Env, Heard, REGISTRY, Signal};
use parking_lot::Mutex;
use planner::health::floor_latency_ms;
use planner::{Carrier, Class, FLOOR, Intent, Market, PolicyClass, RateCards};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cards;
use crate::delivery::{Wake, Waker};
use crate::domain::ids::{EventId, SubscriptionId};
use crate::domain::time::Millis;
use crate::realtime::Bell;
use crate::store::SharedStore;
use crate::telemetry;

use guard::{ClaimTimes, Guard, Switches};
use placing::Places;
use strangers::Strangers;
use usage::Counts;

pub use explain::{CarrierState, Explained};
pub use placing::{Choice, Placed};

/// How often health, latency and switches are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// What carries word to live streams: any policy's events come to all processes alike.
const NEWS: Intent = Intent {
    class: Class::Topic,
    policy_class: PolicyClass::RealtimeEphemeral,
    ..Intent::DEFAULT
};
/// What a signal names in place of an event, where a subscription has work of any kind.
const ANY_EVENT: &str = "-";

/// How the fabric is set up.
pub struct FabricSettings<'a> {
    /// Carriers that may be used.
    pub enabled: BTreeSet<String>,
    /// Carriers that must not be.
    pub disabled: BTreeSet<String>,
    /// The file of rate cards, instead of our own.
    pub rate_cards: Option<PathBuf>,
    /// The interval of the poll, which bounds how late the floor is.
    pub poll_interval: Duration,
    /// What carriers are opened with.
    pub env: Env<'a>,
    /// The wall clock.
    pub clock: fn() -> Millis,
}

/// Why the fabric cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A carrier's variables.
    #[error("{0}")]
    Carrier(String),
    /// The rate cards.
    #[error("{0}")]
    Cards(String),
}

/// The carriers of this process and what is decided with them.
pub struct Fabric {
    guards: Vec<Arc<Guard>>,
    market: ArcSwap<Market>,
    places: Mutex<Places>,
    cards: ArcSwap<RateCards>,
    counts: Counts,
    strangers: Strangers,
    /// Where the cards come from.
    rate_cards: Option<PathBuf>,
    store: SharedStore,
    clock: fn() -> Millis,
}

/// A committed delivery that somebody may be waiting to hear of.
#[derive(Debug, Clone)]
pub struct Rung<'a> {
    /// The event.
    pub event_id: &'a EventId,
    /// Who receives it.
    pub subscription_id: &'a SubscriptionId,
    /// How it was placed.
    pub choice: &'a Choice,
    /// The carrier its key's backlog is on, where that is another one.
    pub pinned: Option<&'a str>,
}

impl Fabric {
    /// Opens the carriers that are configured; none of them connects before [`Fabric::run`].
    ///
    /// # Errors
    /// [`StartError`] where a variable or the rate cards are wrong.
    pub fn open(settings: &FabricSettings<'_>, store: SharedStore) -> Result<Self, StartError> {
        let mut guards = Vec::new();
        let claim_times = ClaimTimes::new();
        for descriptor in REGISTRY {
            let Some(carrier) = (descriptor.open)(&settings.env).map_err(StartError::Carrier)? else {
                continue;
            };
            let off = !settings.enabled.contains(descriptor.id) || settings.disabled.contains(descriptor.id);
            let switches = Switches {
                by_configuration: off,
                by_operator: false,
            };
            let default_ms = match descriptor.id {
                FLOOR => floor_latency_ms(settings.poll_interval.as_secs_f64() * 1000.0),
                _ => descriptor.default_latency_ms,
            };
            let claim_times = Arc::clone(&claim_times);
            guards.push(Arc::new(Guard::new(
                descriptor,
                carrier,
                switches,
                default_ms,
                claim_times,
            )));
        }
        let now = (settings.clock)();
        let cards = Arc::new(read_cards(settings.rate_cards.as_ref(), now).map_err(StartError::Cards)?);
        let counts = Counts::new(now);
        let market = Market::new(carriers_of(&guards), Arc::clone(&cards), counts.states(now), now.0).usage_unread();
        warn_of_unpriced(&guards, &cards);
        Ok(Self {
            guards,
            market: ArcSwap::from_pointee(market),
            places: Mutex::default(),
            cards: ArcSwap::new(cards),
            counts,
            strangers: Strangers::default(),
            rate_cards: settings.rate_cards.clone(),
            store,
            clock: settings.clock,
        })
    }

    /// Starts every carrier by itself, and what watches over them, until the stop. Signals are sent until `stop_sending`,
    /// and what waits then is sent within a second; it must come after the last commit.
    pub fn run(
        self: &Arc<Self>,
        wake: &Wake,
        streams: &Bell,
        tasks: &TaskTracker,
        stop: &CancellationToken,
        stop_sending: &CancellationToken,
    ) {
        let floor = self.guard(FLOOR);
        // The floor takes what the others could not send, so it ends after them.
        let (others, stop_floor) = (TaskTracker::new(), CancellationToken::new());
        for guard in &self.guards {
            if guard.switches().by_configuration {
                continue;
            }
            let (guard, stop) = (Arc::clone(guard), stop.clone());
            let heard = {
                let (fabric, wake, streams) = (Arc::clone(self), wake.clone(), streams.clone());
                let waker: Arc<dyn Waker> = Arc::<Guard>::clone(&guard);
                move |arrival: &Arrival| {
                    streams.ring();
                    fabric.hear(&wake, &waker, arrival);
                }
            };
            let under = floor.filter(|_| guard.id() != FLOOR).cloned();
            tasks.spawn({
                let (guard, stop) = (Arc::clone(&guard), stop.clone());
                async move { guard.run(heard, stop).await }
            });
            let (senders, stop_sending) = match under {
                None => (tasks, &stop_floor),
                Some(_) => (&others, stop_sending),
            };
            senders.spawn({
                let (guard, stop) = (Arc::clone(&guard), stop_sending.clone());
                async move { guard.send(under, stop).await }
            });
            tasks.spawn(async move { guard.probe(stop).await });
        }
        tasks.spawn({
            let stop_sending = stop_sending.clone();
            async move {
                stop_sending.cancelled().await;
                others.close();
                others.wait().await;
                stop_floor.cancel();
            }
        });
        let (fabric, wake, ended) = (Arc::clone(self), wake.clone(), stop.clone());
        tasks.spawn(async move { fabric.meet_strangers(&wake, ended).await });
        let (fabric, ended) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move { fabric.look(ended).await });
        let (fabric, ended) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move { fabric.count(ended).await });
        let (fabric, ended) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move { fabric.keep_recorded(ended).await });
    }

    /// Says what was committed to the carriers it was placed on. It waits for nothing.
    pub fn ring(&self, rung: &[Rung<'_>]) {
        let signal = |rung: &Rung<'_>| Signal {
            event_id: rung.event_id.to_string(),
            subscription_id: Some(rung.subscription_id.to_string()),
        };
        let mut seen: HashSet<(Class, &str)> = HashSet::new();
        for first in rung {
            let decision = &first.choice.decision;
            let carrier = first.pinned.unwrap_or(&decision.carrier);
            let route = first
                .pinned
                .map_or(decision.route.as_ref(), |pinned| decision.route_of(pinned));
            if !seen.insert((first.choice.class, carrier)) {
                continue;
            }
            let same = |other: &&Rung<'_>| {
                other.choice.class == first.choice.class
                    && other.pinned.unwrap_or(&other.choice.decision.carrier) == carrier
            };
            let signals = || rung.iter().filter(same).map(signal);
            // A backlog may be on what is no carrier of this release.
            let known = self.guard(carrier).map_or("other", |guard| guard.id());
            telemetry::placed(first.choice.class, known, rung.iter().filter(same).count() as u64);
            let Some(guard) = self.route(first.choice.class, route, &decision.route) else {
                continue;
            };
            self.send(guard, first.choice.class, carrier, signals);
        }
    }

    /// Leaves signals to one carrier, and one of them to each that only a signal can show to work again. One without a
    /// price is never chosen, so it is left alone unless it is `named`.
    fn send<S: Iterator<Item = Signal>>(&self, guard: &Guard, class: Class, named: &str, signals: impl Fn() -> S) {
        guard.push(class, signals());
        let cards = self.cards.load();
        let usable = |other: &&Arc<Guard>| other.id() == named || cards.get(other.descriptor.rate_card).is_some();
        let others = self.guards.iter().filter(|other| other.id() != guard.id());
        for other in others.filter(usable) {
            other.try_out(class, signals());
        }
    }

    /// Says to live streams elsewhere that the log has grown, up to this event or beyond. It waits for nothing.
    pub fn news(&self, newest: &EventId) {
        let now = (self.clock)();
        let decision = planner::decide(&NEWS, &self.market.load(), None, now.0);
        let news = || Signal {
            event_id: newest.to_string(),
            subscription_id: None,
        };
        if let Some(guard) = self.guard(&decision.route) {
            self.send(guard, NEWS.class, guard.id(), || std::iter::once_with(news));
        }
    }

    /// Says that subscriptions have work of any kind: replayed, enabled again, or more at a time.
    pub fn work(&self, subscriptions: &[SubscriptionId]) {
        let market = self.market.load();
        let now = (self.clock)();
        let decision = planner::decide(&planner::Intent::DEFAULT, &market, None, now.0);
        let signal = |id: &SubscriptionId| Signal {
            event_id: ANY_EVENT.to_owned(),
            subscription_id: Some(id.to_string()),
        };
        if let Some(guard) = self.guard(&decision.route) {
            self.send(guard, Class::Queue, guard.id(), || subscriptions.iter().map(signal));
        }
    }

    /// Reads the rate cards again. A bad file changes nothing; the text says what is wrong with it.
    ///
    /// # Errors
    /// What is wrong, for the log.
    pub fn reload_cards(&self) -> Result<(), String> {
        let cards = read_cards(self.rate_cards.as_ref(), (self.clock)())?;
        warn_of_unpriced(&self.guards, &cards);
        self.cards.store(Arc::new(cards));
        self.renew_market();
        Ok(())
    }

    fn guard(&self, id: &str) -> Option<&Arc<Guard>> {
        self.guards.iter().find(|guard| guard.id() == id)
    }

    /// The carrier itself while it can be used, else the one that stands in for it.
    fn route(&self, class: Class, carrier: &str, stand_in: &str) -> Option<&Arc<Guard>> {
        let usable = |guard: &&Arc<Guard>| {
            guard.serves(class) && !matches!(guard.health(), planner::Health::Down(_) | planner::Health::Disabled(_))
        };
        [carrier, stand_in, FLOOR]
            .into_iter()
            .find_map(|id| self.guard(id).filter(usable))
    }

    /// Keeps the market, the switches and the gauges up to date.
    async fn look(&self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            self.follow_switches();
            for guard in &self.guards {
                let snapshot = guard.snapshot();
                telemetry::carrier_state(
                    guard.id(),
                    &snapshot.health,
                    snapshot.breaker,
                    snapshot.waiting,
                    &snapshot.latency_ms,
                );
            }
            self.renew_market();
        }
    }

    /// Takes over what operators switched.
    pub fn follow_switches(&self) {
        let view = self.store.view();
        for guard in &self.guards {
            guard.switch(view.switched_off.contains(guard.id()), None);
        }
    }

    /// An operator has switched a carrier, which is on record by now. The others follow by themselves.
    pub fn switched(&self, carrier: &str, off: bool, by: &str) {
        if let Some(guard) = self.guard(carrier) {
            guard.switch(off, Some(by));
        }
    }

    /// What a carrier heard becomes a look; what names no subscription of ours becomes one once it turns out to be new.
    fn hear(&self, wake: &Wake, waker: &Arc<dyn Waker>, arrival: &Arrival) {
        match &arrival.heard {
            Heard::Everything => wake.everything(),
            Heard::Signals(signals) => {
                let view = self.store.view();
                let (known, strange): (Vec<_>, Vec<_>) = signals
                    .iter()
                    .filter_map(|signal| SubscriptionId::parse(signal.subscription_id.as_deref()?))
                    .partition(|id| view.knows(id));
                wake.heard(waker, arrival.at, known);
                if wake.is_heard() {
                    self.strangers.push(waker, arrival.at, strange);
                }
            }
        }
    }

    fn renew_market(&self) {
        let now = (self.clock)();
        // Whoever else renews it at the same time makes the epoch before or after this one, never the same.
        self.market.rcu(|market| {
            let carriers = carriers_of(&self.guards);
            let next = market.next(carriers, self.cards.load_full(), self.counts.states(now), now.0);
            next.map_or_else(|| Arc::clone(market), Arc::new)
        });
    }
}

fn carriers_of(guards: &[Arc<Guard>]) -> Vec<Carrier> {
    let carrier = |guard: &Arc<Guard>| Carrier {
        classes: guard.descriptor.classes.to_vec(),
        offer: guard.offer(),
        health: guard.health(),
    };
    guards.iter().map(carrier).collect()
}

/// Says which carriers are in use here and can never be chosen: one letter wrong in the id of a card is enough.
fn warn_of_unpriced(guards: &[Arc<Guard>], cards: &RateCards) {
    for guard in guards {
        let card = guard.descriptor.rate_card;
        if !guard.switches().by_configuration && cards.get(card).is_none() {
            let id = guard.id();
            tracing::warn!(
                carrier = id,
                "there is no rate card {card}, so {id} is never chosen: add the card to the file of EVENTS_RATE_CARDS, \
                 or leave {id} out of EVENTS_CARRIERS"
            );
        }
    }
}

fn read_cards(file: Option<&PathBuf>, now: Millis) -> Result<RateCards, String> {
    let name = file.map(|file| file.display().to_string()).unwrap_or_default();
    cards::read(file.map(|file| (file.as_path(), name.as_str())), now).map_err(|mistakes| mistakes.join("; "))
}
