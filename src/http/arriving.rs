//! Bounds the memory of what is on its way in: parts of requests that are not whole yet. When the budget is used up, those
//! that have been at it longest make room, so that a crowd of slow ones stops nobody who sends at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;

/// Bytes that parts on their way may hold together.
#[derive(Debug)]
pub(super) struct Budget {
    bytes_max: usize,
    shares: Mutex<Shares>,
}

#[derive(Debug)]
struct Shares {
    held: usize,
    next: u64,
    /// Oldest first.
    by_age: BTreeMap<u64, (usize, Arc<Notice>)>,
}

/// How a share learns that it has to make room.
#[derive(Debug, Default)]
struct Notice {
    given: AtomicBool,
    waker: AtomicWaker,
}

/// What one part holds of a budget, until it is dropped.
#[derive(Debug)]
pub(super) struct Share<'b> {
    budget: &'b Budget,
    age: u64,
    notice: Arc<Notice>,
}

impl Budget {
    pub(super) const fn new(bytes_max: usize) -> Self {
        Self {
            bytes_max,
            shares: Mutex::new(Shares {
                held: 0,
                next: 0,
                by_age: BTreeMap::new(),
            }),
        }
    }

    /// A share of nothing yet, the youngest of all.
    pub(super) fn share(&self) -> Share<'_> {
        let notice = Arc::<Notice>::default();
        let mut shares = self.shares.lock();
        let age = shares.next;
        shares.next += 1;
        shares.by_age.insert(age, (0, Arc::clone(&notice)));
        drop(shares);
        Share {
            budget: self,
            age,
            notice,
        }
    }
}

impl Share<'_> {
    /// Holds so many bytes from now on. The oldest others are told to go until all that stay fit.
    pub(super) fn hold(&self, bytes: usize) {
        let mut shares = self.budget.shares.lock();
        let Some((own, _)) = shares.by_age.get_mut(&self.age) else {
            // It was told to go itself.
            return;
        };
        let former = std::mem::replace(own, bytes);
        shares.held = shares.held - former + bytes;
        while shares.held > self.budget.bytes_max {
            let oldest = shares.by_age.keys().copied().find(|age| *age != self.age);
            let Some((freed, notice)) = oldest.and_then(|oldest| shares.by_age.remove(&oldest)) else {
                break;
            };
            shares.held -= freed;
            notice.given.store(true, Ordering::Release);
            notice.waker.wake();
        }
    }

    /// Ready once it has to make room.
    pub(super) fn poll_told(&self, cx: &Context<'_>) -> Poll<()> {
        self.notice.waker.register(cx.waker());
        if self.notice.given.load(Ordering::Acquire) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        let mut shares = self.budget.shares.lock();
        if let Some((bytes, _)) = shares.by_age.remove(&self.age) {
            shares.held -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_oldest_make_room_and_what_is_dropped_is_free_again() {
        let budget = Budget::new(100);
        let is_told = |share: &Share<'_>| poll_fn(|cx| share.poll_told(cx)).now_or_never().is_some();
        let shares: Vec<Share<'_>> = (0..4).map(|_| budget.share()).collect();
        for share in &shares {
            share.hold(25);
        }
        assert!(!shares.iter().any(is_told), "they fit");
        shares[1].hold(35);
        assert_eq!(
            shares.iter().map(is_told).collect::<Vec<_>>(),
            [true, false, false, false]
        );
        shares[3].hold(90);
        assert_eq!(
            shares.iter().map(is_told).collect::<Vec<_>>(),
            [true, true, true, false]
        );
        shares[0].hold(90);
        assert!(!is_told(&shares[3]), "who has to go gets nothing");
        drop(shares);
        let alone = budget.share();
        alone.hold(1000);
        assert!(!is_told(&alone), "there is nobody else");
        drop(alone);
        assert_eq!(budget.shares.lock().held, 0);
    }

    #[tokio::test]
    async fn who_waits_is_woken() {
        let budget = Budget::new(10);
        let (old, young) = (budget.share(), budget.share());
        old.hold(10);
        let waiting = poll_fn(|cx| old.poll_told(cx));
        let growing = async {
            tokio::task::yield_now().await;
            young.hold(1);
        };
        tokio::join!(waiting, growing);
    }
}
