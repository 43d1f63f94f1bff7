//! Bounds the memory of what is read from the log, from before it is read until its caller has taken the last byte.
//!
//! A caller that reads its answer slowly, or not at all, keeps it in memory. So whole pages share a budget; while that is
//! used up pages are short, which costs their callers more requests and nobody an answer. Only when short ones have
//! used up theirs as well does a request wait, until the deadline of its answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// What a permit stands for, in bytes.
const UNIT: usize = 1024;
/// Stored bytes after which a whole page ends, and how many such pages there may be.
const WHOLE: (usize, usize) = (4 * 1024 * 1024, 16);
/// Stored bytes after which a short page ends, and how many such pages there may be.
const SHORT: (usize, usize) = (64 * 1024, 256);
/// Time in which callers that read take their pages: who comes meanwhile waits for a whole one.
const PATIENCE: Duration = Duration::from_millis(500);
/// A page goes on to the end of the event that crosses its line. Units kept for that where the line is near.
const LAST_EVENT: usize = 64;

/// The budgets, shared by all requests of a process.
#[derive(Debug, Clone)]
pub struct Rooms {
    whole: Arc<Semaphore>,
    short: Arc<Semaphore>,
}

/// Memory that one answer may take.
#[derive(Debug)]
pub(super) struct Room {
    permit: OwnedSemaphorePermit,
    /// Stored bytes after which the answer should end.
    pub(super) bytes: i64,
}

impl Default for Rooms {
    fn default() -> Self {
        Self {
            whole: Arc::new(Semaphore::new(WHOLE.1 * units(WHOLE.0))),
            short: Arc::new(Semaphore::new(SHORT.1 * (units(SHORT.0) + LAST_EVENT))),
        }
    }
}

impl Rooms {
    /// Room for a page: a whole one, or a short one where none of those comes free soon.
    pub(super) async fn page(&self) -> Room {
        let whole = self.whole.clone().acquire_many_owned(count(units(WHOLE.0)));
        match timeout(PATIENCE, whole).await {
            Ok(permit) => Room {
                permit: permit.expect("nobody closes the semaphore"),
                bytes: stored(WHOLE.0),
            },
            Err(_late) => self.event().await,
        }
    }

    /// Room for one event.
    pub(super) async fn event(&self) -> Room {
        let units = count(units(SHORT.0) + LAST_EVENT);
        let permit = self.short.clone().acquire_many_owned(units).await;
        Room {
            permit: permit.expect("nobody closes the semaphore"),
            bytes: stored(SHORT.0),
        }
    }
}

impl Room {
    /// The answer's bytes, which keep as much of the room as they need until the last of them is gone.
    pub(super) fn keep(mut self, mut text: String) -> Bytes {
        text.shrink_to_fit();
        let spare = self.permit.num_permits().saturating_sub(units(text.len()));
        drop(self.permit.split(spare));
        Bytes::from_owner(Kept {
            text,
            _room: self.permit,
        })
    }
}

struct Kept {
    text: String,
    _room: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(UNIT)
}

fn count(units: usize) -> u32 {
    u32::try_from(units).expect("a room is a few thousand units")
}

fn stored(bytes: usize) -> i64 {
    i64::try_from(bytes).expect("a room is a few million bytes")
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pages_grow_short_before_anybody_waits_and_whole_again_when_the_answers_are_gone() {
        let rooms = Rooms::default();
        let mut answers = Vec::new();
        for _ in 0..WHOLE.1 {
            let room = rooms.page().await;
            assert_eq!(room.bytes, stored(WHOLE.0));
            answers.push(room.keep("x".repeat(WHOLE.0)));
        }
        let since = Instant::now();
        assert_eq!(rooms.page().await.bytes, stored(SHORT.0));
        assert!(
            since.elapsed() <= PATIENCE + Duration::from_millis(5),
            "{:?}",
            since.elapsed()
        );
        for _ in 0..SHORT.1 {
            let room = rooms.event().await;
            assert_eq!(room.bytes, stored(SHORT.0));
            answers.push(room.keep("x".repeat(SHORT.0 + LAST_EVENT * UNIT)));
        }
        let long = Duration::from_secs(3600);
        assert!(timeout(long, rooms.page()).await.is_err() && timeout(long, rooms.event()).await.is_err());
        answers.pop();
        timeout(long, rooms.event()).await.expect("a short page is gone");
        answers.swap_remove(0);
        let room = timeout(long, rooms.page()).await.expect("a whole page is gone");
        assert_eq!(room.bytes, stored(WHOLE.0));
    }

    #[tokio::test]
    async fn small_answers_keep_as_little_as_they_are() {
        let rooms = Rooms::default();
        let answers: Vec<Bytes> = futures_util::future::join_all((0..1000).map(async |n| {
            let text = format!("page {n}");
            rooms.page().await.keep(text)
        }))
        .await;
        assert_eq!(answers[999], "page 999");
        let taken = WHOLE.1 * units(WHOLE.0) - rooms.whole.available_permits();
        assert!(taken <= answers.len(), "{taken} units");
    }
}
