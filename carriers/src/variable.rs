//! What a carrier reads from the environment, declared so that whoever starts it can read, check, show and document it.

/// One environment variable of a carrier.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Its name. Two carriers of one broker may declare the same variable, alike.
    pub name: &'static str,
    /// What it holds where it is not set.
    pub default: Option<&'static str>,
    /// Whether its value is never shown.
    pub secret: bool,
    /// What it may hold.
    pub takes: Takes,
    /// The variable that must be set where this one is.
    pub with: Option<&'static str>,
    /// What it is for: a sentence or two.
    pub help: &'static str,
}

/// What a variable may hold.
#[derive(Debug, Clone, Copy)]
pub enum Takes {
    /// Any text.
    Text,
    /// `on` or `off`.
    Switch,
    /// An address with a host and one of these schemes.
    Address(&'static [&'static str]),
    /// What a rule of the carrier's own lets pass.
    Checked {
        /// Completes the sentence "NAME must …".
        allowed: &'static str,
        /// The rule.
        fits: fn(&str) -> bool,
    },
}

impl Variable {
    /// A variable that holds any text, or nothing.
    pub const fn new(name: &'static str, help: &'static str) -> Self {
        Self {
            name,
            default: None,
            secret: false,
            takes: Takes::Text,
            with: None,
            help,
        }
    }

    /// The same with a default.
    #[must_use]
    pub const fn or(mut self, default: &'static str) -> Self {
        self.default = Some(default);
        self
    }

    /// The same, which is never shown.
    #[must_use]
    pub const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// The same, which holds nothing but this.
    #[must_use]
    pub const fn takes(mut self, takes: Takes) -> Self {
        self.takes = takes;
        self
    }

    /// The same, where another must be set as well.
    #[must_use]
    pub const fn with(mut self, other: &'static str) -> Self {
        self.with = Some(other);
        self
    }
}
