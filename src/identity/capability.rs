//! The capabilities this service judges, and the rule by which a token's grants cover one.

/// A capability one of our routes asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Capability {
    /// Publish events as a first-party service.
    EventPublish,
    /// Pull events, keep checkpoints and open a stream as a first-party service.
    EventRead,
    /// Manage the subscriptions of a first-party service.
    SubscriptionManage,
    /// Inspect and steer deliveries, delivery policies and placement.
    DeliveryAdmin,
    /// Publish events as a developer app.
    AppPublish,
    /// Pull events and keep checkpoints as a developer app.
    AppRead,
    /// Manage the subscriptions of a developer app.
    AppSubscribe,
}

impl Capability {
    /// The id as tokens and manifests spell it.
    #[must_use]
    pub const fn id(self) -> &'static str {
        match self {
            Self::EventPublish => "events.event.publish",
            Self::EventRead => "events.event.read",
            Self::SubscriptionManage => "events.subscription.manage",
            Self::DeliveryAdmin => "events.delivery.admin",
            Self::AppPublish => "events.app.publish",
            Self::AppRead => "events.app.read",
            Self::AppSubscribe => "events.app.subscribe",
        }
    }
}

/// Whether a token's `cap` entries cover `id`: one equals it, or is a family such as `events.event.*` that it belongs to.
#[must_use]
pub fn granted(caps: &[String], id: &str) -> bool {
    caps.iter().any(|entry| {
        // The dot stays in the prefix, so that `events.app.*` never covers `events.apple.read`.
        entry == id
            || entry
                .strip_suffix('*')
                .is_some_and(|family| family.ends_with('.') && id.starts_with(family))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_the_id_or_its_family_and_nothing_looser() {
        let table = [
            ("events.event.publish", true, false),
            ("events.event.*", true, false),
            ("events.*", true, true),
            ("events.event.pub*", false, false),
            ("*", false, false),
            ("events.*.publish", false, false),
            ("events.event", false, false),
            ("events.event.publish.more", false, false),
            ("events.event.publish.*", false, false),
            ("", false, false),
        ];
        for (entry, publish, admin) in table {
            let caps = [entry.to_owned()];
            assert_eq!(
                granted(&caps, Capability::EventPublish.id()),
                publish,
                "{entry} on publish"
            );
            assert_eq!(
                granted(&caps, Capability::DeliveryAdmin.id()),
                admin,
                "{entry} on delivery admin"
            );
        }
        assert!(!granted(&[], Capability::EventRead.id()), "no entry, no grant");
        assert!(
            !granted(&["events.app.*".to_owned()], "events.apple.read"),
            "a family ends at its dot"
        );
    }
}
