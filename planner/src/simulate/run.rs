//! The loop: step by step through virtual time, small steps where something happens and large ones where nothing does.

use std::sync::Arc;
use std::time::Duration;

use super::broker::{Broker, Sent};
use super::dice::Dice;
use super::report::{CarrierReport, ClassReport, CostPoint, Happened, Lane, Move, Report, Segment, Unavailable};
use super::scenario::Scenario;
use super::world::{Conditions, happen, rate};
use crate::FLOOR;
use crate::class::Class;
use crate::decision::Decision;
use crate::market::{Carrier, Market};
use crate::memory::{Ask, Decided, Key, Memory, PolicyKey};
use crate::rate_card::RateCards;
use crate::usage::Usage;

/// How long after something happened the steps stay small.
const CLOSE_LOOK: Duration = Duration::from_secs(90);
/// Signals of one subscription that come within this time of another's sending are sent as one, as the service does it.
const WINDOW: Duration = Duration::from_millis(2);
/// Offers are made anew this often.
const STEP_MIN: Duration = Duration::from_secs(1);
const STEP_MAX: Duration = Duration::from_secs(60);
/// Parts of a run at whose ends the cost is noted.
const COST_POINTS: u32 = 240;
/// Most moves and segments that an answer lists; they are counted beyond it.
const LISTED_MAX: usize = 10_000;

/// Runs a scenario. The same scenario gives the same report.
pub fn run(scenario: &Scenario) -> Report {
    let mut runner = Runner::new(scenario);
    let mut now = Duration::ZERO;
    while now < scenario.duration.0 {
        runner.turn(now);
        let step = runner.step(now);
        runner.advance(now, step);
        now += step;
    }
    runner.report()
}

/// A stream of events on its way through the run.
struct Stream {
    policy: PolicyKey,
    conditions: Conditions,
    /// The carrier that its key's backlog is on.
    backlog: Option<String>,
    /// The part of an event that the last step left over.
    rest: f64,
    lane: Lane,
    delay_ms: f64,
}

struct Runner<'a> {
    scenario: &'a Scenario,
    dice: Dice,
    brokers: Vec<Broker>,
    streams: Vec<Stream>,
    /// Moments at which something begins or ends.
    turns: Vec<Duration>,
    next_turn: usize,
    close_look_until: Duration,
    cards: Arc<RateCards>,
    usage: Usage,
    market: Market,
    memory: Memory,
    carriers: Vec<CarrierReport>,
    classes: Vec<ClassReport>,
    moves: Vec<Move>,
    moves_total: u64,
    recorded: u64,
    cost_usd: f64,
    cost: Vec<CostPoint>,
}

impl<'a> Runner<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let start_ms = scenario.start_ms;
        let mut brokers: Vec<Broker> = scenario.carriers.iter().map(Broker::new).collect();
        let mut turns: Vec<Duration> = scenario
            .happenings
            .iter()
            .flat_map(|one| [Some(one.at.0), one.until.map(|until| until.0)])
            .flatten()
            .chain([Duration::ZERO])
            .collect();
        turns.sort_unstable();
        turns.dedup();
        let cards = Arc::new(scenario.cards.clone());
        let mut usage = Usage::new(start_ms);
        for setup in &scenario.carriers {
            if let Some(card) = cards.get(&setup.rate_card) {
                let before = usage.used(&card.provider, &card.metric, start_ms);
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "counted in whole units"
                )]
                usage.set(&card.provider, &card.metric, before as u64 + setup.used, start_ms);
            }
        }
        let offered: Vec<Carrier> = brokers
            .iter_mut()
            .map(|broker| broker.offered(Duration::ZERO))
            .collect();
        let market = Market::new(offered, Arc::clone(&cards), Arc::new(usage.states(start_ms)), start_ms);
        let classes = Class::ALL
            .into_iter()
            .filter(|class| scenario.traffic.iter().any(|traffic| traffic.intent.class == *class))
            .map(ClassReport::new)
            .collect();
        let stream = |traffic: &super::scenario::Traffic| Stream {
            policy: PolicyKey::new(Some(&traffic.name), 1),
            conditions: Conditions::default(),
            backlog: None,
            rest: 0.0,
            lane: Lane::new(traffic),
            delay_ms: 0.0,
        };
        Self {
            dice: Dice::new(scenario.seed),
            carriers: scenario
                .carriers
                .iter()
                .map(|setup| CarrierReport::new(&setup.id))
                .collect(),
            streams: scenario.traffic.iter().map(stream).collect(),
            scenario,
            brokers,
            turns,
            next_turn: 0,
            close_look_until: CLOSE_LOOK,
            cards,
            usage,
            market,
            memory: Memory::new(),
            classes,
            moves: Vec::new(),
            moves_total: 0,
            recorded: 0,
            cost_usd: 0.0,
            cost: vec![CostPoint {
                at_ms: start_ms,
                cost_usd: 0.0,
            }],
        }
    }

    fn at_ms(&self, now: Duration) -> i64 {
        self.scenario.start_ms + i64::try_from(now.as_millis()).expect("a run is bounded")
    }

    /// How far nothing happens that a decision could depend on.
    fn step(&self, now: Duration) -> Duration {
        let longest = if now < self.close_look_until {
            STEP_MIN
        } else {
            STEP_MAX
        };
        let end = self.scenario.duration.0;
        let turn = self.turns.iter().copied().find(|turn| *turn > now).unwrap_or(end);
        let trial = self
            .brokers
            .iter()
            .filter_map(|broker| broker.trial_at(now))
            .min()
            .unwrap_or(end);
        let until = (now + longest)
            .min(end)
            .min(turn)
            .min(trial.max(now + Duration::from_millis(1)));
        until - now
    }

    fn advance(&mut self, now: Duration, step: Duration) {
        let now_ms = self.at_ms(now);
        let mut turned = false;
        for broker in &mut self.brokers {
            turned |= broker.watch(now, step, &mut self.dice);
        }
        let offered: Vec<Carrier> = self.brokers.iter_mut().map(|broker| broker.offered(now)).collect();
        for (broker, report) in self.brokers.iter().zip(&mut self.carriers) {
            report.note(broker.trouble(), now_ms);
        }
        let states = Arc::new(self.usage.states(now_ms));
        if let Some(next) = self.market.next(offered, Arc::clone(&self.cards), states, now_ms) {
            self.market = next;
        }
        for class in &mut self.classes {
            class.begin();
        }
        for index in 0..self.streams.len() {
            turned |= self.carry(index, now, step);
        }
        for class in &mut self.classes {
            class.end(step);
        }
        self.brokers.iter_mut().for_each(Broker::settle);
        if turned {
            self.close_look_until = now + step + CLOSE_LOOK;
        }
        let ends = now + step;
        let parts = u32::try_from(self.cost.len()).unwrap_or(u32::MAX);
        if ends >= self.scenario.duration.0 / COST_POINTS * parts || ends == self.scenario.duration.0 {
            self.cost.push(CostPoint {
                at_ms: self.at_ms(ends),
                cost_usd: self.cost_usd,
            });
        }
    }

    /// Something begins or ends at this moment, or nothing does.
    fn turn(&mut self, now: Duration) {
        if self.turns.get(self.next_turn).is_none_or(|turn| *turn > now) {
            return;
        }
        self.next_turn += 1;
        let mut conditions: Vec<Conditions> = self.streams.iter().map(|stream| stream.conditions).collect();
        let cards = happen(self.scenario, now, &mut self.brokers, &mut conditions);
        for (stream, conditions) in self.streams.iter_mut().zip(conditions) {
            stream.conditions = conditions;
        }
        if cards != *self.cards {
            self.cards = Arc::new(cards);
        }
        self.close_look_until = now + CLOSE_LOOK;
    }

    /// One step of one stream: where it goes, and what becomes of its signals.
    fn carry(&mut self, index: usize, now: Duration, step: Duration) -> bool {
        let (now_ms, middle_ms) = (self.at_ms(now), self.at_ms(now + step / 2));
        let traffic = &self.scenario.traffic[index];
        let decision = self.decide(index, now_ms);
        let stream = &mut self.streams[index];
        stream.backlog = match (stream.conditions.backlog, stream.backlog.take()) {
            (true, held) => Some(held.unwrap_or_else(|| decision.carrier.to_string())),
            (false, _) => None,
        };
        stream.lane.note(&decision, now_ms, LISTED_MAX);

        let wanted = rate(traffic, stream.conditions, middle_ms) * step.as_secs_f64() + stream.rest;
        stream.rest = wanted.fract();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "bounded by rate and step"
        )]
        let signals = wanted as u64;
        let class = self
            .classes
            .iter_mut()
            .find(|own| own.class == decision.class)
            .expect("made of the traffic");
        let Some(route) = self.brokers.iter().position(|broker| broker.id == decision.route) else {
            return false;
        };
        let broker = &mut self.brokers[route];
        let (sent, turned) = if signals == 0 {
            (if broker.answers() { Sent::Woke } else { Sent::Lost }, false)
        } else {
            broker.send(decision.class, signals, now, step, &mut self.dice)
        };
        class.doubt(decision.is_fallback(), sent == Sent::Lost);
        #[expect(clippy::cast_precision_loss, reason = "a run has far fewer than 2^53 events")]
        let count = signals as f64;
        let delay_ms = match sent {
            Sent::Woke => {
                self.carriers[route].woken += signals;
                self.charge(route, gathered(count, step), now_ms);
                self.brokers[route].mean_ms()
            }
            Sent::Lost => self.scenario.poll_ms / 2.0,
        };
        let stream = &mut self.streams[index];
        stream.lane.events += signals;
        stream.delay_ms += count * delay_ms;
        if sent == Sent::Lost {
            stream.lane.left_to_poll += signals;
        }
        turned
    }

    fn decide(&mut self, index: usize, now_ms: i64) -> Arc<Decision> {
        let traffic = &self.scenario.traffic[index];
        let stream = &self.streams[index];
        // What is put on record is the decision of the policy, whatever is decided for a key of it.
        let of_policy = Ask {
            policy: &stream.policy,
            intent: &traffic.intent,
            key: None,
        };
        if traffic.key.is_some()
            && let Decided::Proposed(proposal) = self.memory.decide(of_policy, &self.market, now_ms)
        {
            self.recorded += u64::from(proposal.record().is_some());
            proposal.committed(&mut self.memory);
        }
        let key = traffic.key.as_deref().map(|name| Key {
            name,
            backlog: stream.backlog.as_deref(),
        });
        let ask = Ask { key, ..of_policy };
        let decision = match self.memory.decide(ask, &self.market, now_ms) {
            Decided::Remembered(decision) => Arc::clone(decision),
            Decided::Proposed(proposal) => {
                let decision = Arc::clone(proposal.decision());
                self.recorded += u64::from(traffic.key.is_none() && proposal.record().is_some());
                proposal.committed(&mut self.memory);
                decision
            }
        };
        let from = stream.lane.segments.last().map(|segment| segment.carrier.as_str());
        if from != Some(&*decision.carrier) {
            self.moves_total += u64::from(from.is_some());
            if self.moves.len() < LISTED_MAX {
                self.moves.push(Move {
                    at_ms: now_ms,
                    traffic: traffic.name.clone(),
                    class: decision.class,
                    from: from.map(str::to_owned),
                    to: decision.carrier.to_string(),
                    reasons: decision.placement.reasons.iter().map(ToString::to_string).collect(),
                });
            }
        }
        decision
    }

    /// What the units that a carrier took really cost: those beyond the allowance of the month.
    fn charge(&mut self, route: usize, count: f64, now_ms: i64) {
        let broker = &self.brokers[route];
        let Some(card) = self.cards.get(&broker.rate_card) else {
            return;
        };
        let provider = if card.provider.is_empty() {
            broker.provider()
        } else {
            &card.provider
        };
        let before = self.usage.used(provider, &card.metric, now_ms);
        let price = |used| card.price(used, card.free_allowance);
        let cost_usd = price(before + count) - price(before);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole, and bounded by the events"
        )]
        self.usage.add(provider, &card.metric, count as u64, now_ms);
        self.carriers[route].cost_usd += cost_usd;
        self.cost_usd += cost_usd;
    }

    fn report(mut self) -> Report {
        let end_ms = self.at_ms(self.scenario.duration.0);
        let happened = self.scenario.happenings.iter().map(|one| {
            let (to, what) = one.what.told();
            let until_ms = one.until.map_or(end_ms, |until| self.at_ms(until.0).min(end_ms));
            Happened {
                from_ms: self.at_ms(one.at.0),
                until_ms,
                to: to.to_owned(),
                what,
            }
        });
        let happened = happened.collect();
        for carrier in &mut self.carriers {
            carrier.note(None, end_ms);
        }
        let mut lanes = Vec::new();
        for mut stream in self.streams {
            stream.lane.end(end_ms);
            #[expect(clippy::cast_precision_loss, reason = "a run has far fewer than 2^53 events")]
            let events = stream.lane.events as f64;
            stream.lane.mean_wake_ms = if events == 0.0 { 0.0 } else { stream.delay_ms / events };
            let class = self
                .classes
                .iter_mut()
                .find(|own| own.class == stream.lane.class)
                .expect("made of the traffic");
            class.events += stream.lane.events;
            class.left_to_poll += stream.lane.left_to_poll;
            lanes.push(stream.lane);
        }
        lanes.sort_by_key(|lane| lane.class);
        Report {
            title: self.scenario.title.clone(),
            description: self.scenario.description.clone(),
            start_ms: self.scenario.start_ms,
            end_ms,
            floor: FLOOR,
            classes: self.classes,
            lanes,
            carriers: self.carriers,
            happened,
            moves: self.moves,
            moves_total: self.moves_total,
            recorded: self.recorded,
            cost_usd: self.cost_usd,
            cost: self.cost,
        }
    }
}

/// How many signals so many events of one subscription make: after each sending it is quiet for the window, and what came
/// meanwhile is sent at its end; otherwise the next event is sent at once.
fn gathered(events: f64, step: Duration) -> f64 {
    let in_window = events * WINDOW.as_secs_f64() / step.as_secs_f64();
    (events / (in_window + (-in_window).exp())).round()
}

impl Lane {
    fn note(&mut self, decision: &Decision, now_ms: i64, listed_max: usize) {
        let fallback = decision.is_fallback();
        if let Some(last) = self.segments.last_mut() {
            last.until_ms = now_ms;
            let same = last.carrier == decision.carrier && last.route == decision.route && last.fallback == fallback;
            if same || self.segments.len() >= listed_max {
                return;
            }
        }
        let (carrier, route) = (decision.carrier.to_string(), decision.route.to_string());
        self.segments.push(Segment {
            from_ms: now_ms,
            until_ms: now_ms,
            carrier,
            route,
            fallback,
        });
    }

    fn end(&mut self, end_ms: i64) {
        if let Some(last) = self.segments.last_mut() {
            last.until_ms = end_ms;
        }
    }
}

impl CarrierReport {
    fn note(&mut self, trouble: Option<&str>, now_ms: i64) {
        let open = self.unavailable.last_mut().filter(|last| last.until_ms.is_none());
        match (open, trouble) {
            (Some(last), Some(reason)) if last.reason == reason => {}
            (open, trouble) => {
                if let Some(last) = open {
                    last.until_ms = Some(now_ms);
                }
                if let Some(reason) = trouble.filter(|_| self.unavailable.len() < LISTED_MAX) {
                    let reason = reason.to_owned();
                    self.unavailable.push(Unavailable {
                        from_ms: now_ms,
                        until_ms: None,
                        reason,
                    });
                }
            }
        }
    }
}
