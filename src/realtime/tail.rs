//! Follows the log in the order of its positions, which is the order of the commits, and hands out what it finds. Wake-ups
//! of any kind only say that it may be worth looking.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::backoff::Backoff;
use crate::store::{StoreError, answered};

use super::hub::Hub;

/// How often the log is looked at whatever rings.
const FLOOR: Duration = Duration::from_secs(1);
/// Rows that are read at once with what they say: mostly little is new, and somebody wants it.
const WHOLE_ROWS: i64 = 8;
/// Rows of one page where more is new.
const PAGE_ROWS: i64 = 1_000;
/// Events that are loaded at a time.
const LOADED: usize = 64;
/// The waits after a read that failed.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// After a look that found nothing, a ring waits for so long: whoever may ring a broker cannot keep the database busy.
const REST: Duration = Duration::from_millis(2);

/// Follows the log.
pub(super) struct Tail {
    hub: Arc<Hub>,
    /// Events that are wanted and not loaded yet. Nothing further is read before they are handed out.
    wanted: VecDeque<i64>,
}

impl Tail {
    pub(super) fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            wanted: VecDeque::new(),
        }
    }

    /// Follows for ever.
    pub(super) async fn follow(mut self) {
        let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
        let mut looked_at = Instant::now();
        loop {
            // Rings that nobody needs put off no look: who comes first after a busy time finds little to catch up with.
            let rung = timeout_at(looked_at + FLOOR, self.hub.bell.rung()).await.is_ok();
            if rung && self.hub.is_empty() {
                continue;
            }
            looked_at = Instant::now();
            match self.look().await {
                Ok(true) => backoff.succeeded(),
                Ok(false) => {
                    backoff.succeeded();
                    tokio::time::sleep(REST).await;
                }
                Err(error) => {
                    let wait = backoff.failed();
                    tracing::warn!("live streams cannot read the log, trying again in {wait:?}: {error}");
                    tokio::time::sleep(wait).await;
                    self.hub.bell.ring();
                }
            }
        }
    }

    /// Reads to the end of the log; answers whether there was anything.
    async fn look(&mut self) -> Result<bool, StoreError> {
        let hub = Arc::clone(&self.hub);
        if hub.is_empty() {
            self.wanted.clear();
            hub.skip_to(answered(hub.store.positions()).await?);
            return Ok(false);
        }
        let mut found = false;
        loop {
            self.load().await?;
            let after = hub.position();
            let tail = answered(hub.store.tail(after, WHOLE_ROWS)).await?;
            if !hub.goes_on(after, tail.positions) {
                return Ok(false);
            }
            hub.pass(&tail.events, tail.examined);
            found |= tail.examined > after;
            if tail.examined >= tail.positions.head {
                return Ok(found);
            }
            let page = answered(hub.store.headings(tail.examined, PAGE_ROWS)).await?;
            if !hub.goes_on(tail.examined, page.positions) {
                return Ok(false);
            }
            self.wanted.extend(hub.take(&page.events, page.examined));
            self.load().await?;
            if page.examined >= page.positions.head {
                return Ok(found);
            }
        }
    }

    /// Loads what is wanted and hands it out. After a failure the rest is still wanted.
    async fn load(&mut self) -> Result<(), StoreError> {
        let hub = &self.hub;
        while !self.wanted.is_empty() {
            let some: Vec<i64> = self.wanted.iter().take(LOADED).copied().collect();
            let events = answered(hub.store.events_of(&some)).await?;
            let mut came = events.iter().map(|event| event.position);
            let missing = some.iter().find(|position| came.next() != Some(**position));
            // Nothing is sent from behind a gap that nobody was told of.
            if let Some(missing) = missing
                && !hub.goes_on(missing - 1, answered(hub.store.positions()).await?)
            {
                self.wanted.clear();
                return Ok(());
            }
            for event in &events {
                hub.hand_out(event);
            }
            self.wanted.drain(..some.len());
        }
        Ok(())
    }
}
