//! A client of live streams that comes back as a browser does, keeps what it was given, and is judged by the log.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use reqwest::RequestBuilder;
use sqlx::{AssertSqlSafe, PgPool};
use tokio_util::task::AbortOnDropHandle;

use super::{
    dice::Dice,
    ledger::position_of,
    sse::{Frame, Part, Sse, after},
    wait::{SOON, eventually, pause},
};

/// What was given, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    /// An event, by position and id.
    Event(i64, String),
    /// Positions that were left out, and why.
    Gap(i64, i64, String),
}

/// Everything a follower saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Events and gaps.
    pub(crate) entries: Vec<Entry>,
    /// Streams that were opened.
    pub(crate) opened: usize,
    /// What came instead of the last stream that was not given.
    pub(crate) refused: String,
    /// The cursor of the last event.
    pub(crate) last: Option<String>,
}

/// A running follower. It ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Follower {
    seen: Arc<Mutex<Seen>>,
    _task: AbortOnDropHandle<()>,
}

impl Follower {
    /// Follows from `last` on with what `request` asks for each time, the number of the stream being its argument. It
    /// hangs up by itself after some events, `0` to `patience` of them; never where `patience` is 0.
    pub(crate) async fn start(
        request: impl Fn(usize) -> RequestBuilder + Send + Sync + 'static,
        last: Option<String>,
        (patience, seed): (usize, u64),
    ) -> Self {
        let seen = Arc::new(Mutex::new(Seen {
            last,
            ..Seen::default()
        }));
        let follow = follow(request, Arc::clone(&seen), patience, Dice::of(seed));
        let task = AbortOnDropHandle::new(tokio::spawn(follow));
        let follower = Self { seen, _task: task };
        eventually("a stream opens", SOON, async || follower.seen.lock().opened > 0).await;
        follower
    }

    /// What it saw so far.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.seen.lock())
    }

    /// Waits until everything was given that the log holds for it after a position and that no gap names; fails where
    /// anything came twice, out of order, or that is not its own. `own` is the condition on rows of `events`.
    pub(crate) async fn assert_whole(&self, pool: &PgPool, after: i64, own: &str, deadline: Duration) {
        let log = Log::of(pool, after, own).await;
        eventually("everything is given", deadline, async || {
            let (missing, refused) = self.look(|seen| (log.missing(&seen.entries), seen.refused.clone()));
            match missing.is_empty() {
                true => Ok(()),
                false => Err(format!("{} are missing: {missing:?}; {refused}", missing.len())),
            }
        })
        .await;
        self.look(|seen| log.assert_in_order(&seen.entries));
    }
}

/// The part of the log that somebody may see.
#[derive(Debug)]
pub(crate) struct Log(BTreeMap<i64, String>);

impl Log {
    /// What is stored after a position. `own` is the condition on rows of `events`.
    pub(crate) async fn of(pool: &PgPool, after: i64, own: &str) -> Self {
        let sql = format!("SELECT seq, id FROM events WHERE seq > {after} AND ({own}) ORDER BY seq");
        let stored: Vec<(i64, String)> = sqlx::query_as(AssertSqlSafe(sql))
            .fetch_all(pool)
            .await
            .expect("the log");
        assert!(!stored.is_empty(), "nothing is stored where {own}");
        Self(stored.into_iter().collect())
    }

    /// Positions that were neither given nor named as left out.
    pub(crate) fn missing(&self, entries: &[Entry]) -> Vec<i64> {
        let mut left: BTreeSet<i64> = self.0.keys().copied().collect();
        for entry in entries {
            match entry {
                Entry::Event(position, _) => drop(left.remove(position)),
                Entry::Gap(from, to, _) => left.retain(|position| !(from..=to).contains(&position)),
            }
        }
        left.into_iter().collect()
    }

    /// Fails unless what was given is what is stored, each at most once, in the order of positions.
    pub(crate) fn assert_in_order(&self, entries: &[Entry]) {
        let mut last = 0;
        for entry in entries {
            let Entry::Event(position, id) = entry else { continue };
            assert!(last < *position, "{position} came after {last}");
            last = *position;
            assert_eq!(
                self.0.get(position),
                Some(id),
                "what came at {position} is not what may be seen there"
            );
        }
    }
}

async fn follow(request: impl Fn(usize) -> RequestBuilder, seen: Arc<Mutex<Seen>>, patience: usize, mut dice: Dice) {
    for n in 0.. {
        let last = seen.lock().last.clone();
        let opened = Sse::try_open(after(request(n), last.as_deref())).await;
        let Ok(Ok(mut stream)) = opened else {
            // Whoever waits for what it sees gives up in time.
            seen.lock().refused = format!("{opened:?}");
            pause().await;
            continue;
        };
        seen.lock().opened += 1;
        let mut left = match patience {
            0 => usize::MAX,
            most => 1 + dice.below(most),
        };
        while left > 0
            && let Part::Frame(frame) = stream.next().await
        {
            if note(&seen, frame) {
                left -= 1;
            }
        }
    }
}

/// Keeps a frame; whether it was an event.
fn note(seen: &Mutex<Seen>, frame: Frame) -> bool {
    let mut seen = seen.lock();
    match frame {
        Frame::Event(cursor, envelope) => {
            let position = position_of(&cursor).expect("an id is a cursor");
            let id = envelope["event_id"].as_str().expect("an id").to_owned();
            seen.entries.push(Entry::Event(position, id));
            seen.last = Some(cursor);
            true
        }
        Frame::Gap(gap) => {
            let number = |name: &str| gap[name].as_i64().expect("a position");
            let reason = gap["reason"].as_str().unwrap_or_default().to_owned();
            seen.entries
                .push(Entry::Gap(number("from_seq"), number("to_seq"), reason));
            false
        }
        Frame::Heartbeat => false,
    }
}

/// The number of gaps among entries.
pub(crate) fn gaps(seen: &Seen) -> usize {
    let is_gap = |entry: &&Entry| matches!(entry, Entry::Gap(..));
    seen.entries.iter().filter(is_gap).count()
}
