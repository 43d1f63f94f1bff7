//! What a carrier offers: where it is, what it can do, how fast it was, what it costs, and whether it is there.

use crate::Text;

/// Who runs what is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Trust {
    /// The network itself.
    FirstParty,
    /// The user.
    UserOwned,
    /// A partner.
    Partner,
    /// The community.
    Community,
    /// Anybody else.
    External,
}

impl Trust {
    /// Every trust, in the order in which a refusal names them.
    pub const ALL: [Self; 5] = [
        Self::FirstParty,
        Self::UserOwned,
        Self::Partner,
        Self::Community,
        Self::External,
    ];

    /// Its name in offers and reasons.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FirstParty => "first-party",
            Self::UserOwned => "user-owned",
            Self::Partner => "partner",
            Self::Community => "community",
            Self::External => "external",
        }
    }
}

/// What an offer says of its health. The choice knows only whether it may be chosen: both up and degraded may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// It works.
    Up,
    /// It works, and something is wrong.
    Degraded,
    /// It does not work.
    Down,
    /// It takes no new work.
    Draining,
}

impl Status {
    /// Its name in offers and reasons.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Degraded => "degraded",
            Self::Down => "down",
            Self::Draining => "draining",
        }
    }
}

/// What is free, where that is known, and how busy it is, each load from 0 to 1.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Capacity {
    /// Free processor cores.
    pub available_cores: Option<f64>,
    /// Free memory in MB.
    pub available_memory_mb: Option<f64>,
    /// The kind of its GPU, when it has one.
    pub gpu_type: Option<Text>,
    /// Free workers by kind.
    pub workers: Vec<(Text, u32)>,
    /// How busy processor, memory, disk and GPU are, as far as known; the busiest decides.
    pub utilization: Vec<f64>,
}

/// How an offer is paid.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Pricing {
    /// Paid already: costs nothing until it is busy, and its card does not count.
    pub prepaid: bool,
    /// The rate card that prices it.
    pub rate_card: Option<Text>,
    /// USD for a unit, where no card is found.
    pub marginal_usd_per_unit: Option<f64>,
}

/// One offer.
#[derive(Debug, Clone, PartialEq)]
pub struct Offer {
    /// What the answer names it by; for a carrier its id.
    pub id: Text,
    /// Whose usage it adds to.
    pub provider: Text,
    /// Where it is; `global` is everywhere.
    pub region: Text,
    /// Where else data stays with it.
    pub regions: Vec<Text>,
    /// Who runs it. Unknown is never allowed.
    pub trust: Option<Trust>,
    /// What it can do.
    pub capabilities: Vec<Text>,
    /// Latency in milliseconds by operation.
    pub latency_ms: Vec<(Text, f64)>,
    /// Whether it is there.
    pub status: Option<Status>,
    /// What is free.
    pub capacity: Capacity,
    /// How it is paid.
    pub pricing: Pricing,
}

impl Offer {
    /// A healthy first-party offer that is paid by the card `rate_card`, as carriers make them.
    pub fn of(id: impl Into<Text>, provider: impl Into<Text>, rate_card: impl Into<Text>) -> Self {
        Self {
            id: id.into(),
            provider: provider.into(),
            region: Text::Borrowed("cell"),
            regions: Vec::new(),
            trust: Some(Trust::FirstParty),
            capabilities: Vec::new(),
            latency_ms: Vec::new(),
            status: Some(Status::Up),
            capacity: Capacity::default(),
            pricing: Pricing {
                rate_card: Some(rate_card.into()),
                ..Pricing::default()
            },
        }
    }

    /// The latency that counts, in milliseconds: that of the operation, else the best of all p95, else unknown. One that
    /// is no finite number is unknown too.
    pub fn latency(&self, op: Option<&str>) -> Option<f64> {
        let known = || self.latency_ms.iter().filter(|(_, ms)| ms.is_finite());
        let named = op.and_then(|op| known().find(|(name, _)| name == op));
        if let Some((_, ms)) = named {
            return Some(*ms);
        }
        known()
            .filter(|(name, _)| name.contains("p95"))
            .map(|(_, ms)| *ms)
            .min_by(f64::total_cmp)
    }
}
