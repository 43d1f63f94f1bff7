//! What a carrier is opened with: variables by name, and what the process shares with it.

use std::fmt;
use std::time::SystemTime;

use url::Url;

/// The surroundings of a carrier. It reads nothing else, so two of them in one test are two processes.
#[derive(Clone, Copy)]
pub struct Env<'a> {
    /// What a variable holds.
    pub variables: &'a dyn Fn(&str) -> Option<String>,
    /// A name no other process has, new at each start: what this process sends is told by it. 1–64 of `[A-Za-z0-9_-]`.
    pub instance: &'a str,
    /// Whether this process sends webhooks, so that it may take wake-ups meant for one process of several.
    pub consumes: bool,
    /// The authorities that outbound TLS trusts.
    pub tls: &'a rustls::ClientConfig,
    /// The wall clock, for what the far side judges by it.
    pub clock: fn() -> SystemTime,
}

impl fmt::Debug for Env<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Env")
            .field("instance", &self.instance)
            .field("consumes", &self.consumes)
            .finish_non_exhaustive()
    }
}

impl Env<'_> {
    /// What the variable holds; empty counts as unset.
    pub fn get(&self, name: &str) -> Option<String> {
        (self.variables)(name).filter(|value| !value.is_empty())
    }

    /// What the variable holds, or else `default`.
    pub fn get_or(&self, name: &str, default: &str) -> String {
        self.get(name).unwrap_or_else(|| default.to_owned())
    }

    /// Whether the variable says `on`; `default` where it is unset.
    ///
    /// # Errors
    /// A sentence that names the variable, where it says neither `on` nor `off`.
    pub fn switch(&self, name: &str, default: bool) -> Result<bool, String> {
        match self.get(name).as_deref() {
            None => Ok(default),
            Some("on") => Ok(true),
            Some("off") => Ok(false),
            Some(other) => Err(format!("{name} must be on or off, got {other:?}")),
        }
    }

    /// TLS for brokers, which speak no HTTP.
    pub(crate) fn broker_tls(&self) -> rustls::ClientConfig {
        let mut tls = self.tls.clone();
        tls.alpn_protocols.clear();
        tls
    }

    /// The address the variable holds, of one of these schemes and with a host.
    ///
    /// # Errors
    /// A sentence that names the variable and shows nothing of its value, which may hold a password.
    pub(crate) fn address(&self, name: &str, schemes: &[&str]) -> Result<Option<Url>, String> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match Url::parse(&text) {
            Ok(url) if schemes.contains(&url.scheme()) && url.host_str().is_some_and(|host| !host.is_empty()) => {
                Ok(Some(url))
            }
            _ => Err(format!(
                "{name} must be an address that begins with {}://",
                schemes.join(":// or ")
            )),
        }
    }
}
