//! How a carrier stands, and where it keeps that.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::RwLock;

/// Whether a carrier can be used now. Reasons are shown to operators as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It works.
    Up,
    /// It works, and something about it does not.
    Degraded(Arc<str>),
    /// It does not work.
    Down(Arc<str>),
}

impl Health {
    /// Down: there is no connection.
    pub fn not_connected(id: &str) -> Self {
        Self::Down(format!("not connected ({id})").into())
    }

    /// Down: there is a connection, and the far side forbids what the carrier needs.
    pub fn permission_denied(id: &str) -> Self {
        Self::Down(format!("permission denied ({id})").into())
    }

    /// Whether it can be used.
    pub fn is_usable(&self) -> bool {
        !matches!(self, Self::Down(_))
    }

    /// What is wrong.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Up => None,
            Self::Degraded(reason) | Self::Down(reason) => Some(reason),
        }
    }
}

/// Where a carrier keeps its health. Each change is logged once, with its cause, and so is what is found first.
#[derive(Debug)]
pub struct Standing {
    id: &'static str,
    health: RwLock<Health>,
    told: AtomicBool,
}

impl Standing {
    /// The carrier `id` stands like this as yet.
    pub fn new(id: &'static str, health: Health) -> Self {
        Self {
            id,
            health: RwLock::new(health),
            told: AtomicBool::new(false),
        }
    }

    /// How it stands.
    pub fn get(&self) -> Health {
        self.health.read().clone()
    }

    /// It was told to stop and stands like this until it runs again. That is no trouble, and what is found then is told
    /// anew.
    pub fn stopped(&self, health: Health) {
        *self.health.write() = health;
        self.told.store(false, Relaxed);
        tracing::info!(carrier = self.id, "{} has stopped", self.id);
    }

    /// It stands like this from now on. The cause is for the log: it must hold no address and no secret.
    pub fn set(&self, health: Health, cause: &str) {
        let before = std::mem::replace(&mut *self.health.write(), health.clone());

        let told = self.told.swap(true, Relaxed);
        if told && before == health {
            return;
        }
        match health.reason() {
            None => tracing::info!(carrier = self.id, "{} is up: {cause}", self.id),
            Some(reason) => tracing::warn!(carrier = self.id, "{}: {reason}: {cause}", self.id),
        }
    }
}
