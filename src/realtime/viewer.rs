//! Who looks at a stream, and what they may see. Live events and history are judged by the one rule that stands here.

use std::sync::Arc;

use crate::domain::envelope::{Envelope, SubjectKind, Visibility};
use crate::identity::Person;

/// Whoever opened a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Viewer {
    /// Nobody that we know.
    Anonymous,
    /// A person.
    Person(Person),
    /// A first-party service.
    Service,
}

impl Viewer {
    /// What the stream says of its viewer.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Anonymous => "anonymous",
            Self::Person(_) => "user",
            Self::Service => "service",
        }
    }

    pub(super) fn audience(&self) -> Audience {
        match self {
            Self::Person(Person {
                subject: Some(subject), ..
            }) => Audience::Person(subject.as_str().into()),
            // A person that has no canonical id is the subject of nothing.
            Self::Anonymous | Self::Person(_) => Audience::Anyone,
            Self::Service => Audience::Service,
        }
    }
}

/// Viewers that see the same events. The order groups them in the topic index.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Audience {
    /// Sees what is public.
    Anyone,
    /// Sees what is public, and what is about or by this person.
    Person(Arc<str>),
    /// Sees everything.
    Service,
}

impl Audience {
    /// Whether an event may be shown to them.
    pub(super) fn may_see(&self, event: &Envelope) -> bool {
        match (event.visibility, self) {
            (_, Self::Service) | (Visibility::Public, _) => true,
            (Visibility::Subject, Self::Person(own)) => persons(event).any(|person| person == &**own),
            (Visibility::Subject | Visibility::Internal, _) => false,
        }
    }

    /// The id of the one person they are.
    pub(super) fn person(&self) -> Option<&str> {
        match self {
            Self::Person(subject) => Some(subject),
            Self::Anyone | Self::Service => None,
        }
    }
}

/// The people that an event is about or by. One may come twice.
pub(super) fn persons(event: &Envelope) -> impl Iterator<Item = &str> {
    let user = SubjectKind::User;
    let by = (event.actor.kind() == user).then(|| event.actor.id());
    let about = (event.subject.kind == user.as_str()).then_some(event.subject.id.as_str());
    by.into_iter().chain(about)
}
