//! Looking up the addresses of a host, all of which must be public.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, SystemTime};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolveHosts, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::Name;
use parking_lot::Mutex;
use tokio::time::timeout;

use super::address::is_public;
use super::{Refused, Unresolved};

/// What the whole lookup of a host may take.
const LOOKUP_DEADLINE: Duration = Duration::from_secs(5);
/// How long a name server is given before it is asked again, where the system does not say.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// Addresses that are dialled at most, however many a name has.
const DIALLED_MAX: usize = 8;
/// Where the system says which name servers it asks.
const SYSTEM_FILE: &str = "/etc/resolv.conf";

/// Looks hosts up, each time anew: an answer that is kept would be older than the attempt it is for.
pub(super) enum Names {
    /// At these name servers alone.
    At(TokioResolver),
    /// As the system's files say, which are read again when they have changed.
    System(Mutex<Option<System>>),
}

pub(super) struct System {
    changed_at: Option<SystemTime>,
    resolver: TokioResolver,
}

impl Names {
    /// No server means those of the system.
    pub(super) fn new(servers: &[SocketAddr]) -> Self {
        if servers.is_empty() {
            Self::System(Mutex::new(None))
        } else {
            Self::At(at(servers))
        }
    }

    /// The addresses of a host to dial, at least one; all that it has are public.
    pub(super) async fn public_addresses(&self, host: &str) -> Result<Vec<IpAddr>, Refused> {
        let addresses = self.addresses(host).await.map_err(Refused::Unresolved)?;
        if !addresses.iter().all(|address| is_public(*address)) {
            return Err(Refused::NotPublic);
        }
        Ok(addresses.into_iter().take(DIALLED_MAX).collect())
    }

    async fn addresses(&self, host: &str) -> Result<Vec<IpAddr>, Unresolved> {
        let mut name = Name::from_ascii(host).map_err(|_| Unresolved::NoSuchHost)?;
        // Whole as it stands: the system's search list is for people who type.
        name.set_fqdn(true);
        let resolver = self.resolver()?;
        let found = timeout(LOOKUP_DEADLINE, resolver.lookup_ip(name))
            .await
            .map_err(|_elapsed| Unresolved::TimedOut)?
            .map_err(|error| {
                tracing::debug!(error = %error, "a host could not be looked up: {error}");
                unresolved(&error)
            })?;
        let addresses: Vec<IpAddr> = found.iter().collect();
        if addresses.is_empty() {
            return Err(Unresolved::NoAddress);
        }
        Ok(addresses)
    }

    fn resolver(&self) -> Result<TokioResolver, Unresolved> {
        let cell = match self {
            Self::At(resolver) => return Ok(resolver.clone()),
            Self::System(cell) => cell,
        };
        let changed_at = Path::new(SYSTEM_FILE).metadata().and_then(|file| file.modified()).ok();
        let mut kept = cell.lock();
        if let Some(system) = &*kept
            && system.changed_at == changed_at
        {
            return Ok(system.resolver.clone());
        }
        let resolver = system().map_err(|error| {
            tracing::warn!(error = %error, "no host can be looked up: {SYSTEM_FILE} cannot be used: {error}");
            Unresolved::Failed
        })?;
        *kept = Some(System {
            changed_at,
            resolver: resolver.clone(),
        });
        Ok(resolver)
    }
}

fn system() -> Result<TokioResolver, NetError> {
    let mut builder = TokioResolver::builder_tokio()?;
    forgetful(builder.options_mut());
    builder.build()
}

fn at(servers: &[SocketAddr]) -> TokioResolver {
    let servers = servers.iter().map(|server| {
        let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()].map(|mut connection| {
            connection.port = server.port();
            connection
        });
        NameServerConfig::new(server.ip(), true, connections.into())
    });
    let config = ResolverConfig::from_parts(None, Vec::new(), servers.collect());
    let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    let options = builder.options_mut();
    forgetful(options);
    options.use_hosts_file = ResolveHosts::Never;
    options.timeout = SERVER_TIMEOUT;
    builder
        .build()
        .expect("only TLS to name servers, which is not used, can fail")
}

fn forgetful(options: &mut hickory_resolver::config::ResolverOpts) {
    options.cache_size = 0;
    options.positive_max_ttl = Some(Duration::ZERO);
    options.negative_max_ttl = Some(Duration::ZERO);
}

fn unresolved(error: &NetError) -> Unresolved {
    if error.is_nx_domain() {
        Unresolved::NoSuchHost
    } else if error.is_no_records_found() {
        Unresolved::NoAddress
    } else if matches!(error, NetError::Timeout) {
        Unresolved::TimedOut
    } else {
        Unresolved::Failed
    }
}
