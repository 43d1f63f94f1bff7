//! What stands around each carrier: its queue, deadlines, breaker, latency, probes and metrics. A carrier's author writes
//! none of it, and nothing of it ever waits in front of a publisher.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use carriers::{Arrival, Arrivals, Backoff, Descriptor, DynCarrier, Inbound, Probed, Signal, SignalError};
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use planner::health::{Breaker, BreakerState, Change, LatencyWindow, PAUSE_MAX, PAUSE_MIN, Permit};
use planner::{Class, FLOOR, Health, Offer, Text, latency_op};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::delivery::Waker;
use crate::telemetry;

use super::pending::Pending;

/// Signals of one round trip.
const BATCH_MAX: usize = 1000;
/// Between the beginnings of two round trips, so that signals gather: one goes out at once, a flood as a few.
const WINDOW: Duration = Duration::from_millis(2);
/// A carrier that was not used for so long is asked for an answer.
const IDLE: Duration = Duration::from_secs(1);
/// How long a broker beside the service may take for one call; one that is slower is as good as gone.
const DEADLINE: Duration = Duration::from_millis(250);
/// The same of a carrier that is elsewhere.
const DEADLINE_FAR: Duration = Duration::from_secs(3);
/// The same of the floor, whose call may have to open a line to the database first.
const DEADLINE_FLOOR: Duration = Duration::from_secs(1);
/// A carrier that ran for so long was in order: when it ends, it is run again soon.
const IN_ORDER: Duration = Duration::from_secs(60);
/// A carrier that leaves a call unanswered for so long is not chosen until it answers one: its deadline may be longer than
/// operators are left without a reason.
const SILENT_AFTER: Duration = Duration::from_secs(1);
/// How long signals are still sent after the stop.
const LAST_SIGNALS_MAX: Duration = Duration::from_secs(1);
/// How often what was heard and not taken is counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
/// Things heard that wait to be looked at.
const ARRIVALS_MAX: usize = 256;

/// Why a carrier is not used, though it could be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Switches {
    /// The environment leaves it out.
    pub(super) by_configuration: bool,
    /// An operator switched it off.
    pub(super) by_operator: bool,
}

impl Switches {
    fn reason(self) -> Option<&'static str> {
        match self {
            Self {
                by_configuration: true, ..
            } => Some("disabled by configuration"),
            Self { by_operator: true, .. } => Some("disabled by an operator"),
            _ => None,
        }
    }
}

/// One carrier and what is known of it.
pub(super) struct Guard {
    pub(super) descriptor: &'static Descriptor,
    carrier: Arc<dyn DynCarrier>,
    switches: watch::Sender<Switches>,
    pending: Pending,
    state: Mutex<State>,
    /// Of all carriers.
    claim_times: Arc<ClaimTimes>,
    /// The zero of the times that breaker and latency are told.
    zero: Instant,
    /// It has something to ask when it is idle.
    answers_probes: AtomicBool,
}

/// What the last signals say, which no probe can outweigh: a broker may answer every question and take no signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Doubt {
    /// The last one was taken, or none was sent yet.
    None,
    /// They got no answer; an answer to anything else shows that there is one again.
    Unanswered,
    /// They got none, then a probe closed the breaker, and none has been taken since.
    Vouched,
    /// They are refused, or get no answer though probes do: only one that is taken shows otherwise.
    Untaken,
}

/// What was asked of the far side.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Signals(Class),
    Probe,
}

/// Why a call failed.
struct Fault {
    cause: String,
    /// The far side answered that it will not.
    refused: bool,
}

impl Fault {
    fn no_answer() -> Self {
        Self {
            cause: "no answer in time".to_owned(),
            refused: false,
        }
    }

    fn defect() -> Self {
        Self {
            cause: "it failed by a defect".to_owned(),
            refused: false,
        }
    }
}

impl From<SignalError> for Fault {
    fn from(error: SignalError) -> Self {
        Self {
            cause: error.to_string(),
            refused: !matches!(error, SignalError::NotConnected | SignalError::Lost(_)),
        }
    }
}

struct State {
    breaker: Breaker,
    /// By class: a broker may take the signals of one and refuse those of another.
    doubts: [Doubt; 3],
    /// Signals that failed in a row, by class, since the breaker turned.
    failed_signals: [u32; 3],
    /// From a signal to the far side's word for it, by class.
    signals: [LatencyWindow; 3],
    /// From what was heard to the claim that it led to, by class.
    claims: [LatencyWindow; 3],
    /// When it last sent or was probed.
    used_at: Duration,
    /// Since when a call waits for its answer.
    calling_since: Option<Duration>,
    /// The last call waited for its answer for too long.
    silent: bool,
    /// Signals sent that are not counted in the store yet.
    uncounted: u64,
}

/// From what any carrier heard to the claim that it led to: what a carrier that led to none has to be taken to need, or
/// it would look better than one that is used.
pub(super) struct ClaimTimes {
    zero: Instant,
    window: Mutex<LatencyWindow>,
}

impl ClaimTimes {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            zero: Instant::now(),
            window: Mutex::new(LatencyWindow::new(0.0)),
        })
    }

    fn record(&self, sample: Duration) {
        self.window.lock().record(sample, self.zero.elapsed());
    }

    fn offered_ms(&self) -> f64 {
        self.window.lock().offered_ms(self.zero.elapsed())
    }
}

impl State {
    /// Whether a signal of this class, or a probe, may close an open breaker.
    fn is_proof(&self, lane: Option<usize>) -> bool {
        let is_untaken = |doubt: Doubt| doubt == Doubt::Untaken;
        lane.is_some_and(|lane| is_untaken(self.doubts[lane])) || !self.doubts.into_iter().any(is_untaken)
    }

    fn failures_standing(&self) -> u32 {
        self.failed_signals.into_iter().max().unwrap_or(0)
    }

    fn waits_for_long(&self, now: Duration) -> bool {
        self.calling_since
            .is_some_and(|since| now.saturating_sub(since) >= SILENT_AFTER)
    }
}

/// How a carrier stands, for operators.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Snapshot {
    pub(super) health: Health,
    pub(super) breaker: BreakerState,
    /// Until an open breaker lets a trial through.
    pub(super) trial_in: Option<Duration>,
    /// What is offered for each class it serves, in milliseconds.
    pub(super) latency_ms: Vec<(Class, f64)>,
    pub(super) waiting: usize,
}

impl Guard {
    pub(super) fn new(
        descriptor: &'static Descriptor,
        carrier: Arc<dyn DynCarrier>,
        switches: Switches,
        default_latency_ms: f64,
        claim_times: Arc<ClaimTimes>,
    ) -> Self {
        // Where the floor cannot ring, only polls are left; it is tried again all the time.
        let pause_max = if descriptor.id == FLOOR { PAUSE_MIN } else { PAUSE_MAX };
        Self {
            descriptor,
            carrier,
            switches: watch::Sender::new(switches),
            pending: Pending::default(),
            state: Mutex::new(State {
                breaker: Breaker::pausing(pause_max),
                doubts: [Doubt::None; 3],
                failed_signals: [0; 3],
                signals: std::array::from_fn(|_| LatencyWindow::new(default_latency_ms)),
                claims: std::array::from_fn(|_| LatencyWindow::new(0.0)),
                used_at: Duration::ZERO,
                calling_since: None,
                silent: false,
                uncounted: 0,
            }),
            claim_times,
            zero: Instant::now(),
            answers_probes: AtomicBool::new(true),
        }
    }

    pub(super) fn id(&self) -> &'static str {
        self.descriptor.id
    }

    fn is_floor(&self) -> bool {
        self.id() == FLOOR
    }

    fn deadline(&self) -> Duration {
        if self.is_floor() {
            DEADLINE_FLOOR
        } else if self.descriptor.region == "cell" {
            DEADLINE
        } else {
            DEADLINE_FAR
        }
    }

    pub(super) fn serves(&self, class: Class) -> bool {
        self.descriptor.classes.contains(&class)
    }

    pub(super) fn switches(&self) -> Switches {
        *self.switches.borrow()
    }

    /// An operator switches it off or on; it is known who, where this process was asked.
    pub(super) fn switch(&self, off: bool, by: Option<&str>) {
        let switched = self
            .switches
            .send_if_modified(|switches| std::mem::replace(&mut switches.by_operator, off) != off);
        if switched {
            let (id, how, by) = (self.id(), if off { "off" } else { "on" }, by.unwrap_or("an operator"));
            tracing::info!(carrier = id, by, "{id} was switched {how} by {by}");
        }
    }

    /// Leaves signals to be sent; they are sent soon or never, and nobody waits for it.
    pub(super) fn push(&self, class: Class, signals: impl IntoIterator<Item = Signal>) {
        if self.switches().by_configuration {
            // Nobody sends them. Not even the floor, which others leave theirs to.
            let dropped = signals.into_iter().count() as u64;
            telemetry::carrier_dropped(self.id(), telemetry::Dropped::NotUsable, dropped);
            return;
        }
        let dropped = self.pending.push(class, signals);
        if dropped > 0 {
            telemetry::carrier_dropped(self.id(), telemetry::Dropped::QueueFull, dropped);
        }
    }

    /// Sends one of these signals where only a signal can show that it works again; another carrier has them as well.
    pub(super) fn try_out(&self, class: Class, signals: impl IntoIterator<Item = Signal>) {
        let now = self.now();
        let due = {
            let state = self.state.lock();
            let lane = self.lane(class);
            let is_asked = self.answers_probes.load(Ordering::Relaxed) && state.is_proof(None);
            let is_proof = !is_asked && state.is_proof(Some(lane));
            let waits = match state.breaker.state(now) {
                BreakerState::Closed => state.silent,
                BreakerState::Open { .. } => false,
                BreakerState::HalfOpen => true,
            };
            is_proof && waits && state.calling_since.is_none()
        };
        if due && self.serves(class) && self.is_reachable() && self.pending.depth() == 0 {
            self.push(class, signals.into_iter().take(1));
        }
    }

    fn is_reachable(&self) -> bool {
        self.switches().reason().is_none() && self.carrier.health().is_usable()
    }

    /// Whether it may be chosen. Reading it changes nothing.
    pub(super) fn health(&self) -> Health {
        if let Some(reason) = self.switches().reason() {
            return Health::Disabled(Text::Borrowed(reason));
        }
        let now = self.now();
        let (closed, silent) = {
            let state = self.state.lock();
            (state.breaker.is_closed(), state.silent || state.waits_for_long(now))
        };
        let health = match self.carrier.health() {
            carriers::Health::Down(reason) => Health::Down(reason.to_string().into()),
            _ if !closed => Health::breaker_open(self.id()),
            _ if silent => Health::Down(format!("not connected ({})", self.id()).into()),
            carriers::Health::Degraded(reason) => Health::Degraded(reason.to_string().into()),
            carriers::Health::Up => Health::Up,
        };
        match health {
            // Its poll delivers, whatever becomes of its bell.
            Health::Down(reason) if self.is_floor() => Health::Degraded(reason),
            health => health,
        }
    }

    /// What it offers now.
    pub(super) fn offer(&self) -> Offer {
        let now = self.now();
        let state = self.state.lock();
        let descriptor = self.descriptor;
        Offer {
            region: Text::Borrowed(descriptor.region),
            capabilities: descriptor.capabilities.iter().copied().map(Text::Borrowed).collect(),
            latency_ms: descriptor
                .classes
                .iter()
                .map(|class| (Text::Borrowed(latency_op(*class)), self.offered_ms(&state, *class, now)))
                .collect(),
            ..Offer::of(descriptor.id, descriptor.provider, descriptor.rate_card)
        }
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let health = self.health();
        let now = self.now();
        let state = self.state.lock();
        let breaker = state.breaker.state(now);
        let trial_in = match breaker {
            BreakerState::Open { trial_at } => Some(trial_at.saturating_sub(now)),
            BreakerState::Closed | BreakerState::HalfOpen => None,
        };
        let classes = self.descriptor.classes.iter();
        Snapshot {
            health,
            breaker,
            trial_in,
            latency_ms: classes
                .map(|class| (*class, self.offered_ms(&state, *class, now)))
                .collect(),
            waiting: self.pending.depth(),
        }
    }

    /// Operations since the last call: signals sent, or what the carrier counts itself.
    pub(super) fn take_uncounted(&self) -> u64 {
        let own = self
            .carrier
            .operations()
            .map_or(0, |own| own.swap(0, Ordering::Relaxed));
        std::mem::take(&mut self.state.lock().uncounted) + own
    }

    /// Counts signals that were sent; also those that could not be recorded before.
    pub(super) fn count(&self, operations: u64) {
        self.state.lock().uncounted += operations;
    }

    /// From a signal to the claim that it leads to. Its two parts are in two processes, so each is measured by one clock:
    /// the way to the far side and back, which stands for the way to it and on to the other process, and what follows there.
    /// The floor promises the wait for its poll: its doorbell is no more than a courtesy.
    fn offered_ms(&self, state: &State, class: Class, now: Duration) -> f64 {
        let (signals, claims) = (&state.signals[class as usize], &state.claims[class as usize]);
        if self.is_floor() {
            return signals.offered_ms(Duration::MAX);
        }
        let claim_ms = match claims.samples(now) {
            0 => self.claim_times.offered_ms(),
            _ => claims.offered_ms(now),
        };
        signals.offered_ms(now) + claim_ms
    }

    fn now(&self) -> Duration {
        self.zero.elapsed()
    }

    /// Sends what waits until the stop, and what is left then, for a bounded time.
    pub(super) async fn send(&self, floor: Option<Arc<Guard>>, stop: CancellationToken) {
        let sending = async {
            let mut next = Instant::now();
            loop {
                let stopped = stop.run_until_cancelled(self.pending.rung()).await.is_none();
                self.send_waiting(floor.as_deref(), &mut next).await;
                if stopped {
                    return;
                }
            }
        };
        tokio::select! {
            () = sending => {}
            () = async { stop.cancelled().await; sleep(LAST_SIGNALS_MAX).await } => {}
        }
    }

    async fn send_waiting(&self, floor: Option<&Guard>, next: &mut Instant) {
        loop {
            sleep_until(*next).await;
            *next = Instant::now() + WINDOW;
            let batch = self.pending.take(BATCH_MAX);
            if batch.is_empty() {
                return;
            }
            for (class, signals) in batch {
                if !self.send_batch(class, &signals).await
                    && let Some(floor) = floor
                {
                    // Late, but sooner than the poll.
                    floor.push(class, signals);
                }
            }
        }
    }

    /// Answers whether the far side took them.
    async fn send_batch(&self, class: Class, signals: &[Signal]) -> bool {
        // Asked for only where a call is made: a trial without one would lengthen the next pause.
        let lane = Some(self.lane(class));
        let Some(permit) = self.is_reachable().then(|| self.permit(lane)).flatten() else {
            telemetry::carrier_dropped(self.id(), telemetry::Dropped::NotUsable, signals.len() as u64);
            return false;
        };
        let started = Instant::now();
        self.state.lock().calling_since = Some(self.now());
        let sent = self.called(self.carrier.signal(class, signals)).await;
        let took = started.elapsed();
        let outcome = sent.map(|()| took);
        let taken = outcome.is_ok();
        telemetry::carrier_signals(self.id(), class, taken, signals.len() as u64, took);
        if taken && self.carrier.operations().is_none() {
            self.count(signals.len() as u64);
        }
        self.ended(permit, Asked::Signals(class), outcome);
        taken
    }

    /// What a call came to in time. One that fails by a defect ends no more than itself.
    async fn called<T>(&self, call: impl Future<Output = Result<T, SignalError>>) -> Result<T, Fault> {
        match timeout(self.deadline(), AssertUnwindSafe(call).catch_unwind()).await {
            Ok(Ok(answer)) => answer.map_err(Fault::from),
            Ok(Err(_panic)) => Err(Fault::defect()),
            Err(_elapsed) => Err(Fault::no_answer()),
        }
    }

    /// Where doubts about a class are kept: all classes of the floor are one statement.
    fn lane(&self, class: Class) -> usize {
        if self.is_floor() { 0 } else { class as usize }
    }

    fn permit(&self, lane: Option<usize>) -> Option<Permit> {
        let now = self.now();
        let mut state = self.state.lock();
        if !state.breaker.is_closed() && !state.is_proof(lane) {
            return None;
        }
        state.breaker.permit(now)
    }

    /// Takes in how a call ended: after how long, or why not.
    fn ended(&self, permit: Permit, asked: Asked, outcome: Result<Duration, Fault>) {
        let now = self.now();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.used_at = now;
        match asked {
            Asked::Signals(_) => {
                state.silent = outcome.is_err() && state.waits_for_long(now);
                state.calling_since = None;
            }
            Asked::Probe => state.silent &= outcome.is_err(),
        }
        let change = match (asked, &outcome) {
            (Asked::Signals(class), Ok(sample)) => {
                state.signals[class as usize].record(*sample, now);
                let lane = self.lane(class);
                (state.doubts[lane], state.failed_signals[lane]) = (Doubt::None, 0);
                state.breaker.eased(permit, state.failures_standing())
            }
            (Asked::Probe, Ok(sample)) => {
                for class in self.descriptor.classes {
                    state.signals[*class as usize].record(*sample, now);
                }
                let change = state.breaker.eased(permit, state.failures_standing());
                if change.is_some() {
                    for doubt in state.doubts.iter_mut().filter(|doubt| **doubt == Doubt::Unanswered) {
                        *doubt = Doubt::Vouched;
                    }
                }
                change
            }
            (Asked::Signals(class), Err(fault)) => {
                let lane = self.lane(class);
                state.failed_signals[lane] += 1;
                state.doubts[lane] = match state.doubts[lane] {
                    Doubt::None | Doubt::Unanswered if !fault.refused => Doubt::Unanswered,
                    _ => Doubt::Untaken,
                };
                state.breaker.failed(permit, now, rand::random())
            }
            (Asked::Probe, Err(_)) => state.breaker.failed(permit, now, rand::random()),
        };
        if change.is_some() {
            state.failed_signals = [0; 3];
        }
        drop(guard);
        match change {
            Some(Change::Opened { pause }) => {
                let cause = outcome.err().map(|fault| fault.cause).unwrap_or_default();
                tracing::warn!(
                    carrier = self.id(),
                    "the breaker of {} opened for {pause:?}: {cause}",
                    self.id()
                );
            }
            Some(Change::Closed) => tracing::info!(carrier = self.id(), "the breaker of {} closed", self.id()),
            None => {}
        }
    }

    /// Asks an idle carrier for an answer, so that its latency is known and one that was lost can come back.
    pub(super) async fn probe(&self, stop: CancellationToken) {
        let mut ticks = tokio::time::interval(IDLE / 2);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            if !self.is_to_be_probed() || !self.is_reachable() {
                continue;
            }
            let Some(permit) = self.permit(None) else { continue };
            let started = Instant::now();
            let outcome = match self.called(self.carrier.probe()).await {
                Ok(Probed::Answered) => Ok(started.elapsed()),
                Ok(Probed::Nothing) => {
                    // There is nothing to ask, so a breaker's trial must be a signal.
                    self.answers_probes.store(false, Ordering::Relaxed);
                    return;
                }
                Err(fault) => Err(fault),
            };
            self.ended(permit, Asked::Probe, outcome);
        }
    }

    fn is_to_be_probed(&self) -> bool {
        let now = self.now();
        let state = self.state.lock();
        if now.saturating_sub(state.used_at) < IDLE {
            return false;
        }
        match state.breaker.is_closed() {
            // What the floor offers is no matter of samples.
            true => !self.is_floor(),
            false => state.is_proof(None),
        }
    }

    /// Keeps the carrier running while it is switched on, and hands what it hears to `heard`.
    pub(super) async fn run(&self, heard: impl Fn(&Arrival), stop: CancellationToken) {
        let mut switches = self.switches.subscribe();
        let mut backoff = Backoff::default();
        while !stop.is_cancelled() {
            if switches.borrow_and_update().reason().is_some() {
                let _ = stop.run_until_cancelled(switches.changed()).await;
                continue;
            }
            let (ended, began) = (stop.child_token(), Instant::now());
            let (inbound, arrivals) = carriers::channel(ARRIVALS_MAX);
            let running = self.run_once(inbound, ended.clone());
            let listening = self.listen(arrivals, &heard);
            let switched = async {
                // Whatever it changed to is looked at above.
                let _ = switches.changed().await;
                ended.cancel();
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = async { tokio::join!(running, listening); } => {}
                () = switched => {}
            }
            if !stop.is_cancelled() && !ended.is_cancelled() {
                tracing::warn!(carrier = self.id(), "{} ended and is run again", self.id());
                if began.elapsed() >= IN_ORDER {
                    backoff.reset();
                }
                let _ = stop.run_until_cancelled(tokio::time::sleep(backoff.wait())).await;
            }
        }
    }

    async fn run_once(&self, inbound: Inbound, stop: CancellationToken) {
        let run = AssertUnwindSafe(self.carrier.run(inbound, stop)).catch_unwind().await;
        if run.is_err() {
            tracing::error!(carrier = self.id(), "{} failed by a defect", self.id());
        }
    }

    async fn listen(&self, mut arrivals: Arrivals, heard: &impl Fn(&Arrival)) {
        let mut counted = (0, 0);
        loop {
            // What is not taken may come without anything that is.
            let next = timeout(COUNT_INTERVAL, arrivals.next()).await;
            if let Ok(Some(arrival)) = &next {
                heard(arrival);
            }
            let counts = (arrivals.dropped(), arrivals.ignored());
            telemetry::carrier_dropped(self.id(), telemetry::Dropped::Flooded, counts.0 - counted.0);
            telemetry::carrier_dropped(self.id(), telemetry::Dropped::Strange, counts.1 - counted.1);
            counted = counts;
            if let Ok(None) = next {
                return;
            }
        }
    }
}

impl Waker for Guard {
    fn id(&self) -> &'static str {
        self.descriptor.id
    }

    fn claimed(&self, class: Class, after: Duration) {
        let now = self.now();
        self.state.lock().claims[class as usize].record(after, now);
        self.claim_times.record(after);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carriers::{Carrier, SignalError};

    /// A carrier whose runs last as long as they are told, and then for ever.
    #[derive(Default)]
    struct Fake {
        signals: Mutex<Far>,
        probes: Mutex<Far>,
        /// Signals that it was given.
        given: Mutex<Vec<Signal>>,
        runs: Mutex<Vec<Duration>>,
        /// When each run began and ended.
        ran: Mutex<Vec<(Instant, Instant)>>,
    }

    /// What the far side does with a call.
    #[derive(Debug, Clone, Copy, Default, PartialEq)]
    enum Far {
        #[default]
        Answers,
        Refuses,
        Hangs,
        /// The carrier has a defect.
        Panics,
        /// It is no use asking.
        Absent,
    }

    impl Far {
        async fn answer(self) -> Result<(), SignalError> {
            match self {
                Self::Answers | Self::Absent => Ok(()),
                Self::Refuses => Err(SignalError::Refused("full".into())),
                Self::Hangs => std::future::pending().await,
                Self::Panics => panic!("a defect of a carrier"),
            }
        }
    }

    impl Carrier for Fake {
        fn health(&self) -> carriers::Health {
            carriers::Health::Up
        }

        async fn signal(&self, _class: Class, signals: &[Signal]) -> Result<(), SignalError> {
            self.given.lock().extend_from_slice(signals);
            let far = *self.signals.lock();
            far.answer().await
        }

        async fn probe(&self) -> Result<Probed, SignalError> {
            let far = *self.probes.lock();
            far.answer().await?;
            Ok(if far == Far::Absent {
                Probed::Nothing
            } else {
                Probed::Answered
            })
        }

        async fn run(&self, _inbound: Inbound, stop: CancellationToken) {
            let began = Instant::now();
            let next = self.runs.lock().pop();
            match next {
                Some(run) => tokio::time::sleep(run).await,
                None => stop.cancelled().await,
            }
            self.ran.lock().push((began, Instant::now()));
        }
    }

    fn guard(id: &str, carrier: Fake, default_ms: f64, times: &Arc<ClaimTimes>) -> (Guard, Arc<Fake>) {
        let (descriptor, carrier) = (carriers::descriptor(id).expect("a carrier"), Arc::new(carrier));
        let same: Arc<dyn DynCarrier> = Arc::<Fake>::clone(&carrier);
        let guard = Guard::new(descriptor, same, Switches::default(), default_ms, Arc::clone(times));
        (guard, carrier)
    }

    fn offered(guard: &Guard, class: Class) -> f64 {
        let offers = guard.snapshot().latency_ms;
        offers.iter().find(|(of, _)| *of == class).expect("it serves it").1
    }

    #[tokio::test(start_paused = true)]
    async fn a_carrier_offers_the_time_to_the_claim_and_one_that_led_to_none_that_of_the_others() {
        let times = ClaimTimes::new();
        let [valkey, nats, floor] = [("valkey-v1", 2.0), ("nats-v1", 1.0), ("pg-v1", 250.0)]
            .map(|(id, ms)| guard(id, Fake::default(), ms, &times).0);
        let near = |found: f64, expected: f64| (found - expected).abs() <= expected * 0.05;
        assert!(near(offered(&valkey, Class::Queue), 2.0), "nothing is known yet");
        for _ in 0..1000 {
            valkey.claimed(Class::Queue, Duration::from_millis(10));
        }
        assert!(
            near(offered(&valkey, Class::Queue), 12.0),
            "{}",
            offered(&valkey, Class::Queue)
        );
        assert!(near(offered(&valkey, Class::Topic), 12.0), "as its other class");
        assert!(
            near(offered(&nats, Class::Topic), 11.0),
            "it would have to claim as well"
        );
        for _ in 0..1000 {
            nats.claimed(Class::Topic, Duration::from_millis(30));
            floor.claimed(Class::Topic, Duration::from_millis(30));
        }
        assert!(near(offered(&nats, Class::Topic), 31.0));
        assert!(near(offered(&valkey, Class::Queue), 12.0), "its own is what counts");
        assert!(near(offered(&floor, Class::Topic), 250.0), "what it promises");
        tokio::time::advance(Duration::from_secs(40)).await;
        assert!(
            near(offered(&nats, Class::Topic), 1.0),
            "half a minute later it is forgotten"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_carrier_that_ran_for_long_is_run_again_soon_whatever_happened_before() {
        let (long, short) = (Duration::from_secs(3600), Duration::from_millis(1));
        let runs = Mutex::new(vec![long, short, short, short, short, short, short]);
        let fake = Fake {
            runs,
            ..Fake::default()
        };
        let (guard, fake) = guard("valkey-v1", fake, 2.0, &ClaimTimes::new());
        let (guard, stop) = (Arc::new(guard), CancellationToken::new());
        let (running, stopped) = (Arc::clone(&guard), stop.clone());
        let task = tokio::spawn(async move { running.run(|_| {}, stopped).await });
        while fake.ran.lock().len() < 7 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
        stop.cancel();
        task.await.expect("an end");
        let ran = fake.ran.lock().clone();
        let pause = |run: usize| ran[run].0 - ran[run - 1].1;
        assert!(
            pause(6) >= Duration::from_secs(4),
            "it ended again and again: {:?}",
            pause(6)
        );
        assert!(pause(7) < Duration::from_millis(301), "it was in order: {:?}", pause(7));
    }

    /// A guard that sends and probes, and its carrier.
    struct Running {
        guard: Arc<Guard>,
        fake: Arc<Fake>,
        stop: CancellationToken,
    }

    impl Drop for Running {
        fn drop(&mut self) {
            self.stop.cancel();
        }
    }

    impl Running {
        fn of(id: &str) -> Self {
            let (guard, fake) = guard(id, Fake::default(), 2.0, &ClaimTimes::new());
            let (guard, stop) = (Arc::new(guard), CancellationToken::new());
            for part in 0..2 {
                let (guard, stop) = (Arc::clone(&guard), stop.clone());
                tokio::spawn(async move {
                    match part {
                        0 => guard.send(None, stop).await,
                        _ => guard.probe(stop).await,
                    }
                });
            }
            Self { guard, fake, stop }
        }

        fn far(&self, signals: Far, probes: Far) {
            (*self.fake.signals.lock(), *self.fake.probes.lock()) = (signals, probes);
        }

        /// Pushes a signal, lets it be sent, and waits for as long.
        async fn push(&self, wait: Duration) {
            self.guard.push(Class::Queue, [signal()]);
            tokio::time::sleep(wait).await;
        }

        fn breaker(&self) -> &'static str {
            self.guard.snapshot().breaker.as_str()
        }

        /// Waits, second by second, until the breaker is closed again; answers for how many at most.
        async fn closes_within(&self, seconds: u32, each: impl Fn()) -> bool {
            for _ in 0..seconds {
                each();
                tokio::time::sleep(Duration::from_secs(1)).await;
                if self.breaker() == "closed" {
                    return true;
                }
            }
            false
        }
    }

    fn signal() -> Signal {
        Signal {
            event_id: "evt_1".into(),
            subscription_id: Some("sub_1".into()),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn answered_probes_do_not_outweigh_refused_signals_and_only_a_taken_one_closes_the_breaker() {
        let running = Running::of("valkey-v1");
        running.far(Far::Refuses, Far::Answers);
        // So rarely that it is probed between any two.
        for _ in 0..5 {
            assert_eq!(running.breaker(), "closed");
            running.push(Duration::from_millis(2100)).await;
        }
        assert_eq!(running.guard.health(), Health::breaker_open("valkey-v1"));
        let given = || running.fake.given.lock().len();
        let many = || running.guard.try_out(Class::Queue, (0..50).map(|_| signal()));
        assert!(!running.closes_within(100, many).await, "a probe closed it");
        assert!((5 + 4..5 + 9).contains(&given()), "one trial at a time: {}", given());
        running.far(Far::Answers, Far::Answers);
        assert!(!running.closes_within(70, || {}).await, "nothing was taken yet");
        assert!(running.closes_within(2, many).await);
        assert_eq!(running.guard.health(), Health::Up);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_closes_the_breaker_that_silence_opened_and_not_again_before_a_signal_is_taken() {
        let running = Running::of("valkey-v1");
        running.far(Far::Hangs, Far::Hangs);
        let open = async || {
            for _ in 0..5 {
                running.push(Duration::from_millis(300)).await;
            }
            assert_eq!(running.guard.health(), Health::breaker_open("valkey-v1"));
        };
        open().await;
        running.far(Far::Hangs, Far::Answers);
        assert!(running.closes_within(5, || {}).await, "nobody has to send anything");
        open().await;
        assert!(!running.closes_within(70, || {}).await, "it answers probes alone");
        running.far(Far::Answers, Far::Answers);
        let many = || running.guard.try_out(Class::Queue, [signal()]);
        assert!(running.closes_within(2, many).await);
        // It has shown that it takes signals, so the next time a probe is enough again.
        running.far(Far::Hangs, Far::Answers);
        open().await;
        assert!(running.closes_within(5, || {}).await);
    }

    #[tokio::test(start_paused = true)]
    async fn the_floor_can_always_be_chosen_and_rings_again_within_seconds() {
        let running = Running::of(FLOOR);
        running.far(Far::Hangs, Far::Hangs);
        for _ in 0..5 {
            running.push(Duration::from_millis(1100)).await;
        }
        assert_eq!(
            running.guard.health(),
            Health::Degraded("breaker open (pg-v1)".into()),
            "the poll delivers"
        );
        tokio::time::sleep(Duration::from_secs(300)).await;
        running.far(Far::Answers, Far::Answers);
        assert!(running.closes_within(4, || {}).await, "without any signal");
        assert_eq!(running.guard.health(), Health::Up);
        // Where it is asked in vain, the next signal is the trial.
        running.far(Far::Hangs, Far::Hangs);
        for _ in 0..5 {
            running.push(Duration::from_millis(1100)).await;
        }
        running.far(Far::Answers, Far::Hangs);
        for _ in 0..50 {
            running.push(Duration::from_millis(100)).await;
        }
        assert_eq!(running.guard.health(), Health::Up);
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_leaves_a_call_unanswered_is_not_chosen_until_it_answers_one_however_long_that_is() {
        let running = Running::of("cloud-v1");
        running.far(Far::Hangs, Far::Absent);
        running.push(Duration::from_millis(900)).await;
        assert_eq!(running.guard.health(), Health::Up);
        let silent = Health::Down("not connected (cloud-v1)".into());
        for wait in [200, 3_000, 600_000] {
            tokio::time::sleep(Duration::from_millis(wait)).await;
            assert_eq!(running.guard.health(), silent, "{wait}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_whose_calls_fail_by_a_defect_is_left_alone_and_comes_back_by_itself() {
        let running = Running::of("valkey-v1");
        running.far(Far::Panics, Far::Panics);
        for _ in 0..5 {
            running.push(Duration::from_millis(300)).await;
        }
        assert_eq!(running.guard.health(), Health::breaker_open("valkey-v1"));
        tokio::time::sleep(Duration::from_secs(300)).await;
        running.far(Far::Answers, Far::Answers);
        let many = || running.guard.try_out(Class::Queue, [signal()]);
        assert!(running.closes_within(70, many).await);
        running.push(Duration::from_millis(300)).await;
        assert_eq!(running.guard.snapshot().waiting, 0, "signals are sent again");
    }

    #[test]
    fn nothing_waits_for_one_that_the_environment_leaves_out() {
        let (guard, _fake) = guard(FLOOR, Fake::default(), 250.0, &ClaimTimes::new());
        guard.switches.send_modify(|switches| switches.by_configuration = true);
        guard.push(Class::Queue, [signal()]);
        assert_eq!(guard.snapshot().waiting, 0, "nobody sends it, ever");
    }
}
