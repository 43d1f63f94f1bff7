//! What is to be woken; a name inside the service, on no public wire.

use std::fmt;

/// The carrier class that a delivery policy asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Fan-out to every process: no acknowledgement, nothing kept.
    Topic,
    /// One process of several is woken.
    Queue,
    /// One process of several, the signal retained until it is handed over.
    Stream,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 3] = [Self::Topic, Self::Queue, Self::Stream];

    /// Its name in records, answers and metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Topic => "TOPIC",
            Self::Queue => "QUEUE",
            Self::Stream => "STREAM",
        }
    }

    /// The class of that name.
    pub fn of_label(label: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.label() == label)
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}
