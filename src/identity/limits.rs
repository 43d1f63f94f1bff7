//! How many requests a caller may send: fixed windows per limit and principal, counted in this process (D10).

use hashlink::LruCache;
use parking_lot::Mutex;

/// Counters kept at most; the least recently used one is forgotten first.
const COUNTERS_MAX: usize = 50_000;
const MINUTE_S: i64 = 60;
const HOUR_S: i64 = 3_600;

/// A named limit. Routes that share one share its count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Limit {
    /// Publishing, by a developer app.
    AppPublish,
    /// Reading checkpoints.
    CheckpointRead,
    /// Storing checkpoints.
    CheckpointWrite,
    /// The operators' list of deliveries.
    DeliveryList,
    /// Putting deliveries back into the queue.
    DeliveryReplay,
    /// Ending deliveries that wait.
    DeliverySkip,
    /// Pages of the log.
    EventPull,
    /// Publishing, by a service.
    EventPublish,
    /// One event by id.
    EventRead,
    /// Every delivery policy.
    DeliveryPolicyList,
    /// The delivery policy in force for a type.
    DeliveryPolicyRead,
    /// Writing and removing delivery policies.
    DeliveryPolicyWrite,
    /// How deliveries are woken, and why.
    PlacementRead,
    /// How the carriers stand.
    CarrierList,
    /// Switching carriers.
    CarrierSwitch,
    /// Making subscriptions.
    SubscriptionCreate,
    /// Lists of subscriptions.
    SubscriptionList,
    /// One subscription.
    SubscriptionRead,
    /// New secrets.
    SubscriptionRotate,
    /// Enabling and disabling.
    SubscriptionToggle,
    /// Changing one.
    SubscriptionUpdate,
}

/// Requests allowed in each window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// In a minute.
    pub minute: u32,
    /// In an hour.
    pub hour: u32,
}

/// A window of a limit, aligned to the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    /// 60 s.
    Minute,
    /// 3600 s.
    Hour,
}

impl Window {
    /// The word on the wire and in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Minute => "minute",
            Self::Hour => "hour",
        }
    }
}

/// A request that was not counted, because a window is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    /// The limit.
    pub limit: Limit,
    /// The full window with the longest wait.
    pub window: Window,
    /// Requests it allows.
    pub max: u32,
    /// Whole seconds to its end, at least 1.
    pub retry_after_s: u64,
}

impl Limit {
    /// Every limit, ordered by id.
    pub const ALL: [Self; 21] = [
        Self::AppPublish,
        Self::CarrierList,
        Self::CarrierSwitch,
        Self::CheckpointRead,
        Self::CheckpointWrite,
        Self::DeliveryPolicyList,
        Self::DeliveryPolicyRead,
        Self::DeliveryPolicyWrite,
        Self::DeliveryList,
        Self::DeliveryReplay,
        Self::DeliverySkip,
        Self::EventPublish,
        Self::EventPull,
        Self::EventRead,
        Self::PlacementRead,
        Self::SubscriptionCreate,
        Self::SubscriptionList,
        Self::SubscriptionRead,
        Self::SubscriptionRotate,
        Self::SubscriptionToggle,
        Self::SubscriptionUpdate,
    ];

    /// The name on the wire and in metrics.
    pub fn id(self) -> &'static str {
        match self {
            Self::AppPublish => "events.app.publish",
            Self::CheckpointRead => "events.checkpoint.read",
            Self::CheckpointWrite => "events.checkpoint.write",
            Self::DeliveryList => "events.delivery.list",
            Self::DeliveryReplay => "events.delivery.replay",
            Self::DeliverySkip => "events.delivery.skip",
            Self::EventPublish => "events.event.publish",
            Self::DeliveryPolicyList => "events.delivery-policy.list",
            Self::DeliveryPolicyRead => "events.delivery-policy.read",
            Self::DeliveryPolicyWrite => "events.delivery-policy.write",
            Self::PlacementRead => "events.placement.read",
            Self::CarrierList => "events.carrier.list",
            Self::CarrierSwitch => "events.carrier.switch",
            Self::EventPull => "events.event.pull",
            Self::EventRead => "events.event.read",
            Self::SubscriptionCreate => "events.subscription.create",
            Self::SubscriptionList => "events.subscription.list",
            Self::SubscriptionRead => "events.subscription.read",
            Self::SubscriptionRotate => "events.subscription.rotate",
            Self::SubscriptionToggle => "events.subscription.toggle",
            Self::SubscriptionUpdate => "events.subscription.update",
        }
    }

    /// What it allows; `None` takes the configured default.
    fn own(self) -> Option<Allowance> {
        let (minute, hour) = match self {
            Self::AppPublish => (60, 1_200),
            Self::EventPublish | Self::EventPull | Self::CheckpointWrite => (600, 20_000),
            Self::SubscriptionCreate
            | Self::SubscriptionToggle
            | Self::SubscriptionUpdate
            | Self::CarrierSwitch
            | Self::DeliveryPolicyWrite => (30, 300),
            Self::SubscriptionRotate => (10, 100),
            Self::DeliveryReplay | Self::DeliverySkip => (6, 60),
            Self::CheckpointRead
            | Self::DeliveryPolicyList
            | Self::DeliveryPolicyRead
            | Self::DeliveryList
            | Self::EventRead
            | Self::PlacementRead
            | Self::CarrierList
            | Self::SubscriptionList
            | Self::SubscriptionRead => return None,
        };
        Some(Allowance { minute, hour })
    }
}

#[derive(Default, Clone, Copy)]
struct Count {
    window: i64,
    requests: u32,
}

impl Count {
    fn in_window(self, window: i64) -> u32 {
        if self.window == window { self.requests } else { 0 }
    }

    fn add(&mut self, window: i64) {
        self.requests = self.in_window(window) + 1;
        self.window = window;
    }
}

/// The counters of this process.
pub struct Limits {
    default: Allowance,
    /// By limit and principal: this minute and this hour.
    counts: Mutex<LruCache<(Limit, String), (Count, Count)>>,
}

impl Limits {
    /// Starts with empty counters.
    pub fn new(default: Allowance) -> Self {
        Self {
            default,
            counts: Mutex::new(LruCache::new(COUNTERS_MAX)),
        }
    }

    /// What a limit allows.
    pub fn allowance(&self, limit: Limit) -> Allowance {
        limit.own().unwrap_or(self.default)
    }

    /// Counts a request of a principal, or refuses it without counting when either window is full.
    pub fn admit(&self, limit: Limit, principal: &str, now_s: i64) -> Result<(), Exceeded> {
        let allowed = self.allowance(limit);
        let (minute, hour) = (now_s.div_euclid(MINUTE_S), now_s.div_euclid(HOUR_S));
        let mut counts = self.counts.lock();
        let key = (limit, principal.to_owned());
        let (this_minute, this_hour) = counts.get(&key).copied().unwrap_or_default();
        let full = |window, max, span_s: i64| {
            Err(Exceeded {
                limit,
                window,
                max,
                retry_after_s: (span_s - now_s.rem_euclid(span_s)).max(1).unsigned_abs(),
            })
        };
        // The longer wait is the one that counts.
        if this_hour.in_window(hour) >= allowed.hour {
            return full(Window::Hour, allowed.hour, HOUR_S);
        }
        if this_minute.in_window(minute) >= allowed.minute {
            return full(Window::Minute, allowed.minute, MINUTE_S);
        }
        let (mut this_minute, mut this_hour) = (this_minute, this_hour);
        this_minute.add(minute);
        this_hour.add(hour);
        counts.insert(key, (this_minute, this_hour));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Allowance = Allowance { minute: 3, hour: 5 };

    fn limits() -> Limits {
        Limits::new(SMALL)
    }

    #[test]
    fn a_full_minute_refuses_and_counts_nothing_until_the_next_one() {
        let limits = limits();
        let at = |now_s| limits.admit(Limit::EventRead, "svc:live", now_s);
        for _ in 0..3 {
            assert_eq!(at(7_210), Ok(()));
        }
        let refused = Exceeded {
            limit: Limit::EventRead,
            window: Window::Minute,
            max: 3,
            retry_after_s: 50,
        };
        for _ in 0..9 {
            assert_eq!(at(7_210), Err(refused));
        }
        assert_eq!(at(7_260), Ok(()));
        assert_eq!(at(7_261), Ok(()), "refused requests did not count for the hour");
        let hour = at(7_262).expect_err("five in the hour");
        assert_eq!((hour.window, hour.max, hour.retry_after_s), (Window::Hour, 5, 3_538));
        assert_eq!(at(10_800), Ok(()));
    }

    #[test]
    fn limits_and_principals_count_apart() {
        let limits = limits();
        for _ in 0..3 {
            limits.admit(Limit::EventRead, "svc:live", 0).expect("room");
        }
        assert!(limits.admit(Limit::EventRead, "svc:live", 0).is_err());
        assert!(limits.admit(Limit::EventRead, "svc:media", 0).is_ok());
        assert!(limits.admit(Limit::CheckpointRead, "svc:live", 0).is_ok());
    }

    #[test]
    fn the_last_second_of_a_window_waits_one_second() {
        let limits = limits();
        for _ in 0..3 {
            limits.admit(Limit::EventRead, "svc:live", 59).expect("room");
        }
        assert_eq!(
            limits
                .admit(Limit::EventRead, "svc:live", 59)
                .expect_err("full")
                .retry_after_s,
            1
        );
    }

    #[test]
    fn ids_are_in_order_and_their_numbers_are_the_documented_ones() {
        let ids: Vec<&str> = Limit::ALL.iter().map(|limit| limit.id()).collect();
        assert!(ids.is_sorted());
        let limits = limits();
        for (limit, minute, hour) in [
            (Limit::AppPublish, 60, 1_200),
            (Limit::EventPublish, 600, 20_000),
            (Limit::EventPull, 600, 20_000),
            (Limit::CheckpointWrite, 600, 20_000),
            (Limit::SubscriptionCreate, 30, 300),
            (Limit::SubscriptionToggle, 30, 300),
            (Limit::SubscriptionUpdate, 30, 300),
            (Limit::SubscriptionRotate, 10, 100),
            (Limit::DeliveryReplay, 6, 60),
            (Limit::DeliverySkip, 6, 60),
            (Limit::EventRead, 3, 5),
        ] {
            assert_eq!(limits.allowance(limit), Allowance { minute, hour }, "{}", limit.id());
        }
    }
}
