//! The wall between developer apps and the network inside: where their webhooks may go.
//!
//! An endpoint is read once, into a type without which nothing is sent. A name is looked up for every connection, its
//! addresses are judged there, and only those are dialled. Errors say which rule was broken and never what a name led to.

mod address;
mod endpoint;
mod names;

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::domain::endpoint::EndpointFault;
use crate::tls::Trust;

use names::Names;

pub use address::is_public;
pub use endpoint::AppEndpoint;

/// Why nothing may be sent to an endpoint; at its creation each is a 422 `events.endpoint_not_allowed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is no endpoint that anybody may have.
    #[error(transparent)]
    Syntax(EndpointFault),
    /// Its scheme is not https.
    #[error("endpoint must begin with https://")]
    NotHttps,
    /// Its host is a name that means something only inside a network.
    #[error(
        "endpoint's host must be a full name of the public internet, not one label, localhost, *.local, *.internal"
    )]
    LocalName,
    /// Its host is an address that is not public, or has one.
    #[error("endpoint's host must have public addresses only")]
    NotPublic,
    /// The addresses of its host are not known now.
    #[error("endpoint's host cannot be resolved: {0}")]
    Unresolved(Unresolved),
}

/// Why the addresses of a host are not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unresolved {
    /// There is no such name.
    #[error("there is no such host")]
    NoSuchHost,
    /// The name has no address.
    #[error("it has no address")]
    NoAddress,
    /// No name server answered in time.
    #[error("the lookup took too long")]
    TimedOut,
    /// Name servers could not be asked, or answered with an error.
    #[error("the lookup failed")]
    Failed,
}

impl Refused {
    /// Whether waiting does not help.
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Unresolved(_))
    }

    /// The refusal that a request failed with, if that was it.
    pub fn of(error: &reqwest::Error) -> Option<Self> {
        let mut cause: Option<&dyn Error> = error.source();
        while let Some(found) = cause {
            if let Some(refused) = found.downcast_ref() {
                return Some(*refused);
            }
            cause = found.source();
        }
        None
    }
}

/// Judges endpoints, and the addresses of every connection to them. Clones share what they know.
#[derive(Clone)]
pub struct Guard(Arc<Names>);

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Guard")
    }
}

impl Guard {
    /// A guard that asks these name servers, or those of the system where there are none.
    pub fn new(name_servers: &[SocketAddr]) -> Self {
        Self(Arc::new(Names::new(name_servers)))
    }

    /// Reads the endpoint of an app and looks at all addresses that its host has now.
    ///
    /// # Errors
    /// The rule that it breaks. It takes a few seconds at most.
    pub async fn check_endpoint(&self, text: &str) -> Result<AppEndpoint, Refused> {
        let endpoint = AppEndpoint::parse(text)?;
        if let Some(host) = endpoint.name() {
            self.0.public_addresses(host).await?;
        }
        Ok(endpoint)
    }

    /// A client for endpoints of apps. It makes a connection for each request, dials only what was judged for that
    /// connection, and goes nowhere that an answer or the environment would send it.
    ///
    /// # Errors
    /// When no client can be built.
    pub fn client(&self, trust: &Trust) -> Result<Client, reqwest::Error> {
        trust
            .client_builder()
            .dns_resolver(Arc::new(self.clone()))
            .https_only(true)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .no_proxy()
            .tcp_nodelay(true)
            // Not even a second request to the same host meets an address that was judged for the first.
            .pool_max_idle_per_host(0)
            .referer(false)
            .build()
            .map(Client)
    }
}

impl Resolve for Guard {
    fn resolve(&self, host: Name) -> Resolving {
        let names = Arc::clone(&self.0);
        Box::pin(async move {
            let addresses = names.public_addresses(host.as_str()).await?;
            // The port is the URL's.
            let dialled: Addrs = Box::new(addresses.into_iter().map(|address| SocketAddr::new(address, 0)));
            Ok(dialled)
        })
    }
}

/// Sends to endpoints of apps and to nothing else.
#[derive(Debug, Clone)]
pub struct Client(reqwest::Client);

impl Client {
    /// A request to the endpoint.
    pub fn post(&self, endpoint: AppEndpoint) -> reqwest::RequestBuilder {
        self.0.post(endpoint.into_url())
    }
}
