//! The loop that decides when to look for work and claims it. Claims, and with them every rule about who may run, are
//! the store's.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use planner::Class;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backoff::Backoff;
use crate::domain::ids::SubscriptionId;
use crate::domain::retry::{RetryPolicy, Schedule};
use crate::store::{
    Candidate, Claim, Claimed, Counted, Outcome, Pass, SKIPPED_ERROR, Settlement, SharedStore, StoreError, answered,
};
use crate::telemetry::{ClaimMeters, InVain};

use super::DeliverySettings;
use super::agenda::{Agenda, Turn};
use super::breaker::Heard;
use super::frontier::{Found, Frontiers};
use super::life::Life;
use super::outcome::{Ended, judge};
use super::sender::Sender;
use super::settler::{self, Finished};
use super::shares::{Shares, Slot};
use super::unheard::Doubts;
use super::vitals::Vitals;
use super::wake::{Cause, Recorded, Told, Wake};

/// How much longer a lease is than the longest attempt.
const LEASE_MARGIN: Duration = Duration::from_secs(30);
/// Results recorded in one transaction.
const RESULTS_MAX: usize = 256;
/// How soon a subscription that another process was claiming for is tried again.
const SKIPPED_AGAIN_AFTER: Duration = Duration::from_millis(5);
/// How often everything is searched from the beginning.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);
/// How often frontiers are moved.
const FRONTIER_INTERVAL: Duration = Duration::from_secs(1);
/// Between two polls that were asked for by word that anything may have work: whoever says so over and over, which anybody
/// on a broker can, must not keep the store busy.
const EVERYTHING_PAUSE: Duration = Duration::from_millis(50);
/// Subscriptions asked about in one statement of a poll.
const POLL_CHUNK: usize = 500;
/// Subscriptions that one claim considers: enough of them that the most urgent of many win, few enough that locking
/// them costs little.
const CANDIDATES: std::ops::RangeInclusive<usize> = 64..=500;
/// How soon a subscription whose deliveries nothing here could sign is looked at again, so that the record says why they
/// wait. The deliveries themselves are due all the time: another process may have the key.
const UNSIGNED_AGAIN_AFTER: Duration = Duration::from_secs(30);
/// How long one that has the key is given to deliver them, before the first look.
const UNSIGNED_FIRST_AFTER: Duration = Duration::from_secs(5);
/// How long a stop waits for what was claimed unheard to be given back.
const LAST_LOOK: Duration = Duration::from_secs(1);
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// What a dispatcher works with.
pub(super) struct Dispatcher {
    pub(super) store: SharedStore,
    pub(super) settings: Arc<DeliverySettings>,
    pub(super) sender: Arc<Sender>,
    pub(super) shares: Arc<Shares>,
    pub(super) wake: Wake,
    pub(super) vitals: Vitals,
    pub(super) life: Arc<Life>,
    /// Where attempts say how they ended.
    pub(super) finished: mpsc::Sender<Finished>,
    /// Where results go that cannot be recorded now.
    pub(super) kept: mpsc::Sender<Finished>,
    pub(super) attempts: TaskTracker,
    /// Ends attempts that are still running.
    pub(super) interrupt: CancellationToken,
    /// No claim and no attempt begins after it.
    pub(super) stop: CancellationToken,
}

/// What one dispatcher remembers between its looks; all of it may be forgotten.
struct Memory {
    agenda: Agenda,
    frontiers: Frontiers,
    /// Enabled subscriptions, as of `version`.
    known: HashMap<SubscriptionId, Known>,
    version: i64,
    /// Subscriptions whose deliveries nothing here can sign.
    unsigned: HashMap<SubscriptionId, Unsigned>,
    /// What a poll has not asked about yet.
    unpolled: VecDeque<SubscriptionId>,
    poll_at: Instant,
    /// No poll is asked for before it.
    asked_poll_from: Instant,
    sweep_at: Instant,
    frontiers_at: Instant,
    /// No look before it: the store failed.
    pause_until: Instant,
    backoff: Backoff,
    /// When the wait began that the turn comes from, where it was for nothing but work: what was told since then has
    /// waited for nothing here.
    idle_since: Option<Instant>,
    meters: ClaimMeters,
}

/// A subscription whose deliveries nothing here can sign.
struct Unsigned {
    /// It is left alone until then.
    until: Instant,
    /// The log says so.
    told: bool,
}

/// What a subscription shares with others.
struct Known {
    consumer: Arc<str>,
    endpoint: Arc<str>,
    /// Its deliveries can be signed here.
    has_key: bool,
}

impl Memory {
    fn new(now: Instant) -> Self {
        Self {
            agenda: Agenda::default(),
            frontiers: Frontiers::default(),
            known: HashMap::new(),
            version: -1,
            unsigned: HashMap::new(),
            unpolled: VecDeque::new(),
            poll_at: now,
            asked_poll_from: now,
            sweep_at: now + SWEEP_INTERVAL,
            frontiers_at: now,
            pause_until: now,
            backoff: Backoff::new(BACKOFF_FIRST, BACKOFF_MAX),
            idle_since: None,
            meters: ClaimMeters::default(),
        }
    }

    /// Has every subscription looked at anew.
    fn look_everywhere(&mut self, now: Instant) {
        self.agenda.open_all();
        self.poll_at = now;
    }

    /// Leaves subscriptions to others that have the keys of their secrets, and looks anew at those whose secrets may have been
    /// changed.
    fn note_keys(&mut self, now: Instant) {
        let missing = |id: &SubscriptionId| self.known.get(id).is_some_and(|known| !known.has_key);
        self.unsigned.retain(|id, _| missing(id));
        for (id, _) in self.known.iter().filter(|(_, known)| !known.has_key) {
            if !self.unsigned.contains_key(id) {
                let until = now + UNSIGNED_FIRST_AFTER;
                self.unsigned.insert(id.clone(), Unsigned { until, told: false });
                self.agenda.want_at(until, id.clone());
            }
        }
    }

    /// Starts the search for due work over, from the beginning of every queue.
    fn sweep(&mut self, now: Instant) {
        self.frontiers.sweep();
        self.sweep_at = now + SWEEP_INTERVAL;
        self.look_everywhere(now);
    }

    /// Takes in what was recorded.
    fn learn(&mut self, recorded: impl IntoIterator<Item = Recorded>) {
        for recorded in recorded {
            self.frontiers.widen(&recorded.subscription_id);
            self.agenda.set_open(&recorded.subscription_id);
            if let Some(due_at) = recorded.due_at {
                self.agenda.want_at(due_at, recorded.subscription_id.clone());
            }
            self.agenda.want(recorded.subscription_id, Told::now(Cause::Next));
        }
    }

    fn failed(&mut self, what: &str, error: &StoreError) {
        if self.backoff.is_fresh() {
            tracing::warn!(error = %error, cause = ?error, "{what} failed and is tried again: {error}");
        }
        self.pause_until = Instant::now() + self.backoff.failed();
    }
}

impl Dispatcher {
    /// Looks for work, starts attempts and records their results until the stop or the end of this owner's life. Results
    /// that come later are left in the channel. `doubts` outlive this owner.
    pub(super) async fn run(&self, results: &mut mpsc::Receiver<Finished>, doubts: &mut Doubts) {
        let mut memory = Memory::new(Instant::now());
        let mut finished = Vec::new();
        while !self.stop.is_cancelled() && !self.life.lost.is_cancelled() {
            self.listen(&mut memory);
            self.vitals.tick((self.settings.clock)());
            if !finished.is_empty() {
                // Attempts that end together are recorded together.
                tokio::task::yield_now().await;
            }
            while finished.len() < RESULTS_MAX
                && let Ok(one) = results.try_recv()
            {
                finished.push(one);
            }
            let now = Instant::now();
            if now < memory.pause_until {
                self.keep(&mut finished).await;
            } else {
                if self.shares.room() > 0 {
                    self.poll(&mut memory, now).await;
                }
                self.move_frontiers(&mut memory, now).await;
                self.give_back_unheard(&mut memory, doubts).await;
                if self.take_turn(&mut memory, &mut finished, doubts).await || !memory.unpolled.is_empty() {
                    continue;
                }
            }
            let next = self.next_look(&memory);
            let next = doubts
                .next_look()
                .map_or(next, |look| look.max(memory.pause_until).min(next));
            let idle_since = Instant::now();
            memory.idle_since = (idle_since >= memory.pause_until && self.shares.room() > 0).then_some(idle_since);
            tokio::select! {
                _count = results.recv_many(&mut finished, RESULTS_MAX) => {}
                () = self.wake.rung() => {}
                () = sleep_until(next) => {}
                () = self.stop.cancelled() => {}
                () = self.life.lost.cancelled() => {}
            }
        }
        self.keep(&mut finished).await;
        doubts.look_now(Instant::now());
        let _ = timeout(LAST_LOOK, self.give_back_unheard(&mut memory, doubts)).await;
    }

    /// Leaves results to whoever tries until they are recorded.
    async fn keep(&self, finished: &mut Vec<Finished>) {
        for one in finished.drain(..) {
            // The receiver lives as long as any owner; if it does not, the lease ends by itself.
            let _ = self.kept.send(one).await;
        }
    }

    /// Takes in what was asked for and what has changed.
    fn listen(&self, memory: &mut Memory) {
        let now = Instant::now();
        let woken = self.wake.take();
        let view = self.store.view();
        if view.version != memory.version {
            memory.version = view.version;
            memory.known = view
                .subscribers()
                .iter()
                .map(|subscriber| {
                    let known = Known {
                        consumer: Arc::clone(&subscriber.consumer),
                        endpoint: Arc::clone(&subscriber.endpoint),
                        has_key: self.store.has_key_of(subscriber),
                    };
                    (subscriber.id.clone(), known)
                })
                .collect();
            let endpoints: HashSet<&str> = memory.known.values().map(|known| &*known.endpoint).collect();
            self.shares
                .endpoints(|all| all.keep(|endpoint| endpoints.contains(endpoint)));
            memory.note_keys(now);
            // No change of a subscription makes an older row runnable, so the frontiers stay: changes may come often, and
            // a search from the beginning is long while somebody holds a snapshot.
            memory.frontiers.keep(|id| memory.known.contains_key(id));
            memory.look_everywhere(now);
        }
        if now >= memory.sweep_at {
            memory.sweep(now);
        }
        if woken.everything {
            memory.poll_at = memory.poll_at.min(memory.asked_poll_from.max(now));
        }
        for (id, told) in woken.subscriptions {
            memory.agenda.want(id, told);
        }
        memory.learn(woken.recorded);
        memory.agenda.ring_times(now);
    }

    fn next_look(&self, memory: &Memory) -> Instant {
        let now = Instant::now();
        if now < memory.pause_until {
            return memory.pause_until;
        }
        if self.shares.room() == 0 {
            // Only a freed slot helps, and it rings; the interval keeps the tick fresh.
            return now + self.settings.poll_interval;
        }
        memory
            .agenda
            .next_time()
            .map_or(memory.poll_at, |time| time.min(memory.poll_at))
    }

    /// Asks the store, one bounded question at a time, which subscriptions have due work.
    async fn poll(&self, memory: &mut Memory, now: Instant) {
        if now >= memory.poll_at && memory.unpolled.is_empty() {
            memory.poll_at = now + self.settings.poll_interval;
            memory.asked_poll_from = now + EVERYTHING_PAUSE;
            memory.unpolled = memory.known.keys().cloned().collect();
        }
        let mut candidates = Vec::new();
        while candidates.len() < POLL_CHUNK {
            let Some(id) = memory.unpolled.pop_front() else { break };
            let busy = memory.agenda.is_full(&id) && self.shares.runs(&id);
            if !busy && !memory.agenda.is_waiting(&id) {
                candidates.push(Candidate {
                    frontier: memory.frontiers.start(&id),
                    claims_from: 0,
                    id,
                    room: 0,
                    consumer_room: 0,
                });
            }
        }
        if candidates.is_empty() {
            return;
        }
        let Some(asked) = self.while_alive(self.store.due(&candidates)).await else {
            return;
        };
        match asked {
            Ok(due) => {
                memory.backoff.succeeded();
                for id in due {
                    memory.frontiers.widen(&id);
                    memory.agenda.want(id, Told::now(Cause::Poll));
                }
            }
            Err(error) => {
                memory.unpolled.clear();
                memory.poll_at = now;
                memory.failed("looking for due deliveries", &error);
            }
        }
    }

    /// Has a plain read look where claims have found nothing any more, and moves the frontiers up to what it sees.
    async fn move_frontiers(&self, memory: &mut Memory, now: Instant) {
        if now < memory.frontiers_at {
            return;
        }
        memory.frontiers_at = now + FRONTIER_INTERVAL;
        let stretches = memory.frontiers.take_unread(POLL_CHUNK);
        if stretches.is_empty() {
            return;
        }
        match self.while_alive(self.store.overlooked(&stretches)).await {
            Some(Ok(firsts)) => {
                for (stretch, first_ms) in stretches.iter().zip(firsts) {
                    memory.frontiers.read(stretch, first_ms);
                }
            }
            Some(Err(error)) => memory.failed("looking for overlooked deliveries", &error),
            None => {}
        }
    }

    /// Gives back, unsent and uncounted, what the store holds for an owner whose answer was lost. It stands between two
    /// claims of this process, so nothing that it does not know of is about to be answered.
    async fn give_back_unheard(&self, memory: &mut Memory, doubts: &mut Doubts) {
        let now = Instant::now();
        for doubt in doubts.due(now) {
            let given_back = async {
                let unheard = self.store.unheard(&doubt.owner, &doubt.known.all()).await?;
                if !unheard.is_empty() {
                    self.store.settle_briefly(&doubt.owner, &unheard).await?;
                }
                Ok(unheard)
            };
            match self.while_alive(given_back).await {
                Some(Ok(unheard)) => {
                    doubts.looked(&doubt.owner, now);
                    if !unheard.is_empty() {
                        let count = unheard.len();
                        tracing::info!("{count} claims whose answer was lost are given back unsent");
                    }
                    memory.learn(unheard.into_iter().map(|one| Recorded {
                        subscription_id: one.subscription_id,
                        due_at: None,
                    }));
                }
                Some(Err(error)) => {
                    tracing::debug!(error = %error, "what was claimed unheard is looked for again: {error}")
                }
                None => return,
            }
        }
    }

    /// Records what has ended and claims for those that wait, together. Answers whether there was anything to do, so that
    /// another turn may follow at once.
    async fn take_turn(&self, memory: &mut Memory, finished: &mut Vec<Finished>, doubts: &mut Doubts) -> bool {
        let mut finished = std::mem::take(finished);
        for one in &mut finished {
            one.slot.vacate();
            memory.agenda.set_open(&one.settlement.subscription_id);
            memory
                .agenda
                .want(one.settlement.subscription_id.clone(), Told::now(Cause::Next));
        }
        let room = self.shares.room();
        let (candidates, told) = self.candidates(memory, room);
        if candidates.is_empty() && finished.is_empty() {
            return false;
        }
        let lease = self.settings.timeout + LEASE_MARGIN;
        let claim = Claim {
            owner: self.life.owner(),
            lease_ms: i64::try_from(lease.as_millis()).unwrap_or(i64::MAX),
            room: as_i64(room),
            inflight_default: self.settings.inflight_default,
        };
        let settlements: Vec<Settlement> = finished.iter().map(|finished| finished.settlement.clone()).collect();
        let asked = self.store.settle_and_claim(&settlements, &claim, &candidates);
        let Some(asked) = self.while_alive(asked).await else {
            doubts.raise(self.life.owner(), &self.life.known, Instant::now());
            self.keep(&mut finished).await;
            return false;
        };
        match asked {
            Ok(Some((lost, pass))) => {
                memory.backoff.succeeded();
                let recorded = settler::recorded(finished, &lost);
                self.note(memory, &candidates, &told, &pass, room);
                memory.idle_since = None;
                // Their subscriptions were candidates of this turn, or wait for the next one.
                for retried in recorded {
                    if let Some(due_at) = retried.due_at {
                        memory.agenda.want_at(due_at, retried.subscription_id);
                    }
                }
                Self::leave_unsigned(memory, &pass);
                let version = pass.version;
                self.start(pass, Instant::now() + lease);
                if version != memory.version
                    && let Some(Err(error)) = self.while_alive(self.store.refresh_view(version)).await
                {
                    memory.failed("reading the subscriptions", &error);
                }
                true
            }
            undone => {
                memory.idle_since = None;
                for (candidate, told) in candidates.into_iter().zip(told) {
                    memory.agenda.want(candidate.id, told);
                }
                self.keep(&mut finished).await;
                match undone {
                    Err(error) if !error.is_lock_wait() => {
                        // Whether it was committed, or will be, is unknown.
                        doubts.raise(self.life.owner(), &self.life.known, Instant::now());
                        memory.frontiers.forget_claims();
                        memory.failed("claiming and recording deliveries", &error);
                        false
                    }
                    // Somebody holds a row of one result; the claims need not wait for it.
                    _ => true,
                }
            }
        }
    }

    /// Those that wait and may have a claim now, and what was said of each.
    fn candidates(&self, memory: &mut Memory, room: usize) -> (Vec<Candidate>, Vec<Told>) {
        if room == 0 {
            return (Vec::new(), Vec::new());
        }
        let (known, unsigned, now) = (&memory.known, &memory.unsigned, Instant::now());
        let most = (room * 4).clamp(*CANDIDATES.start(), *CANDIDATES.end());
        let mut choice = self.shares.endpoints(|all| all.choice());
        let chosen = memory.agenda.choose(most, |id, full| match known.get(id) {
            None => Turn::Drop,
            Some(_) if full && self.shares.runs(id) => Turn::Drop,
            Some(_) if unsigned.get(id).is_some_and(|unsigned| unsigned.until > now) => Turn::Drop,
            Some(known) if self.shares.consumer_room(&known.consumer) == 0 => Turn::Wait,
            Some(known) if !self.shares.endpoints(|all| choice.take(all, &known.endpoint)) => Turn::Wait,
            Some(_) => Turn::Take,
        });
        let frontiers = &mut memory.frontiers;
        chosen
            .into_iter()
            .filter_map(|(id, told)| {
                let known = known.get(&id)?;
                let own = self.shares.endpoints(|all| choice.room(all, &known.endpoint));
                let candidate = Candidate {
                    frontier: frontiers.begin(&id, now),
                    claims_from: frontiers.claims_from(&id),
                    room: own.map_or(i64::MAX, as_i64),
                    consumer_room: as_i64(self.shares.consumer_room(&known.consumer)),
                    id,
                };
                Some((candidate, told))
            })
            .unzip()
    }

    /// Waits for the store, which may never answer, within a deadline and for as long as this owner lives. A stop waits
    /// as well: what a claim has taken must be handed back.
    async fn while_alive<T>(
        &self,
        asked: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<Result<T, StoreError>> {
        tokio::select! {
            biased;
            answer = answered(asked) => Some(answer),
            () = self.life.lost.cancelled() => None,
        }
    }

    /// Leaves subscriptions alone for a while whose secrets no key opens: each look at a long queue would be for nothing.
    fn leave_unsigned(memory: &mut Memory, pass: &Pass) {
        for claimed in &pass.claimed {
            if let Err(unopened) = &claimed.secrets {
                let (id, until) = (&claimed.subscription_id, Instant::now() + UNSIGNED_AGAIN_AFTER);
                let former = memory.unsigned.insert(id.clone(), Unsigned { until, told: true });
                if former.is_none_or(|former| !former.told) {
                    tracing::error!(subscription_id = %id, "nothing is sent to {id} from here: {unopened}");
                }
                memory.agenda.want_at(until, id.clone());
            }
        }
    }

    /// Remembers what a claim says about each of its candidates.
    fn note(&self, memory: &mut Memory, candidates: &[Candidate], told: &[Told], pass: &Pass, room: usize) {
        let now = Instant::now();
        let counted: HashMap<&SubscriptionId, &Counted> = pass.counted.iter().map(|one| (&one.id, one)).collect();
        let mut taken: HashMap<&SubscriptionId, Vec<&Claimed>> = HashMap::new();
        let mut taken_by: HashMap<&str, i64> = HashMap::new();
        for claimed in &pass.claimed {
            taken.entry(&claimed.subscription_id).or_default().push(claimed);
            *taken_by.entry(&claimed.consumer).or_default() += 1;
            if claimed.attempt == 1 {
                // A retry, which had to wait, says nothing of how it was found.
                let waited_ms = u64::try_from(pass.now_ms - claimed.due_at.0).unwrap_or(0);
                let carrier = claimed.carrier.as_deref();
                memory
                    .meters
                    .waited(carrier, claimed.class, Duration::from_millis(waited_ms));
            }
        }
        for (candidate, told) in candidates.iter().zip(told) {
            let id = &candidate.id;
            let path = told.cause.path();
            let Some(&&Counted { free, claims_from, .. }) = counted.get(id) else {
                let why = if pass.skipped { InVain::Locked } else { InVain::Gone };
                memory.meters.in_vain(path, why);
                if pass.skipped {
                    memory.agenda.want_at(now + SKIPPED_AGAIN_AFTER, id.clone());
                }
                continue;
            };
            memory.frontiers.counted(id, claims_from);
            let rows = taken.get(id).map_or(&[][..], Vec::as_slice);
            let last = rows.last().map_or(Found::Unknown, |last| Found::UpTo {
                priority: usize::try_from(last.priority).unwrap_or(0),
                due_ms: last.due_at.0,
            });
            let consumer_taken = memory
                .known
                .get(id)
                .and_then(|known| taken_by.get(&*known.consumer))
                .copied()
                .unwrap_or(0);
            // Held to less than its own cap, it waits for what holds it.
            let held = as_i64(rows.len()) >= candidate.room;
            let cut = held || pass.claimed.len() >= room || consumer_taken >= candidate.consumer_room;
            if !rows.is_empty() {
                let after = now.duration_since(told.at);
                memory.meters.won(path, rows.len(), after);
                if memory.idle_since.is_some_and(|since| told.at >= since) {
                    tell(told, rows, after);
                }
            } else if free <= 0 {
                memory.meters.in_vain(path, InVain::Cap);
            } else if cut {
                memory.meters.in_vain(path, InVain::NoSlot);
            } else {
                memory.meters.in_vain(path, InVain::Nothing);
            }
            let found = if as_i64(rows.len()) >= free && !held {
                if !rows.is_empty() || self.shares.runs(id) {
                    memory.agenda.set_full(id.clone());
                }
                last
            } else if cut {
                memory.agenda.want(id.clone(), Told::now(Cause::Next));
                last
            } else {
                Found::AllOfIt
            };
            memory.frontiers.note(id, found, pass.now_ms, now);
        }
    }

    /// Starts an attempt for each claim.
    fn start(&self, pass: Pass, lease_ends_at: Instant) {
        for claimed in pass.claimed {
            self.life.known.add(claimed.claim_id);
            let attempt = Attempt {
                slot: self
                    .shares
                    .take(&claimed.consumer, &claimed.subscription_id, &claimed.endpoint),
                waited_ms: claimed
                    .event
                    .as_ref()
                    .map_or(0, |event| pass.now_ms - event.received_at.0),
                claimed,
                lease_ends_at,
                settings: Arc::clone(&self.settings),
                sender: Arc::clone(&self.sender),
                life: Arc::clone(&self.life),
                results: self.finished.clone(),
                interrupt: self.interrupt.clone(),
                stop: self.stop.clone(),
            };
            self.attempts.spawn(attempt.run());
        }
    }
}

/// One claim on its way to a result.
struct Attempt {
    claimed: Claimed,
    slot: Slot,
    lease_ends_at: Instant,
    /// From the receipt of the event to the claim, by the database clock.
    waited_ms: i64,
    settings: Arc<DeliverySettings>,
    sender: Arc<Sender>,
    life: Arc<Life>,
    results: mpsc::Sender<Finished>,
    interrupt: CancellationToken,
    stop: CancellationToken,
}

impl Attempt {
    async fn run(self) {
        let started = Instant::now();
        let schedule = self.schedule();
        let attempt = u32::try_from(self.claimed.attempt).unwrap_or(u32::MAX);
        let outcome = if self.stop.is_cancelled() || !self.life.holds(started) {
            Outcome::Unsent
        } else if self.claimed.skipped {
            Outcome::GivenUp {
                error: SKIPPED_ERROR.to_owned(),
            }
        } else if self.claimed.at_most_once && attempt > 1 {
            // The first attempt may have been received, though its result is lost.
            Outcome::GivenUp {
                error: "no result of the only attempt: its process died, or held the claim for too long".to_owned(),
            }
        } else if attempt > schedule.max_attempts.saturating_add(1) {
            // Attempts without a result may have been received, so they count; one more than allowed has been made
            // since, and a delivery that ends its process each time must end as well.
            Outcome::GivenUp {
                error: "the attempts are used up; the last ones were cut short".to_owned(),
            }
        } else if let Err(unopened) = &self.claimed.secrets {
            Outcome::Held {
                error: unopened.to_string(),
                wait_ms: 0,
            }
        } else if let (Some(event), Ok(secrets)) = (&self.claimed.event, &self.claimed.secrets) {
            let sending = self.sender.send(&self.claimed, secrets, event, &self.interrupt);
            let sending = AssertUnwindSafe(sending).catch_unwind();
            let ended = tokio::select! {
                biased;
                ended = sending => ended,
                // Another process may run it by now; what came of it here does not count.
                () = self.life.lost.cancelled() => return,
            };
            // The panic itself is logged by the hook; the delivery must not wait for its lease.
            let ended = ended.unwrap_or_else(|_panic| Ended::Failed("internal error".to_owned()));
            if let Some(heard) = Heard::of(&ended) {
                self.slot.heard(heard);
            }
            once(
                self.claimed.at_most_once,
                judge(ended, attempt, &schedule, rand::random()),
            )
        } else {
            Outcome::GivenUp {
                error: "the event is gone, or cannot be read by this version".to_owned(),
            }
        };
        let waited = Duration::from_millis(u64::try_from(self.waited_ms).unwrap_or(0));
        let finished = Finished {
            owner: Arc::clone(self.life.owner()),
            known: Arc::clone(&self.life.known),
            latency: waited + started.elapsed(),
            priority: self.claimed.priority,
            lease_ends_at: self.lease_ends_at,
            settlement: Settlement {
                subscription_id: self.claimed.subscription_id,
                position: self.claimed.position,
                claim_id: self.claimed.claim_id,
                outcome,
            },
            slot: self.slot,
        };
        // The receiver lives as long as any attempt; if it does not, the lease ends by itself.
        let _ = self.results.send(finished).await;
    }

    /// The waits and attempts in force for this delivery.
    fn schedule(&self) -> Schedule {
        let policy = self.claimed.retry_policy.as_deref().and_then(|stored| {
            RetryPolicy::parse(stored).unwrap_or_else(|fault| {
                tracing::warn!(
                    subscription_id = %self.claimed.subscription_id,
                    "the stored retry policy of {} is ignored: {fault}", self.claimed.subscription_id
                );
                None
            })
        });
        Schedule::of(policy.as_ref(), &self.settings.retry)
    }
}

/// Tells what brought the word that it led to these claims.
fn tell(told: &Told, claimed: &[&Claimed], after: Duration) {
    if let Cause::Heard(waker) = &told.cause {
        for class in Class::ALL {
            if claimed.iter().any(|one| one.class == Some(class)) {
                waker.claimed(class, after);
            }
        }
    }
}

/// What may leave once only is never tried again once it may have left.
fn once(at_most_once: bool, outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Retry { status, error, .. } if at_most_once => Outcome::Dead { status, error },
        Outcome::Held { error, .. } if at_most_once => Outcome::Dead { status: None, error },
        outcome => outcome,
    }
}

fn as_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
