//! The connection to NATS that each of its carriers has for itself.

use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, ServerAddr, ServerError};
use percent_encoding::percent_decode_str;
use tokio::sync::mpsc;

use crate::{Env, Health, SignalError, Takes, Variable};

const SCHEMES: &[&str] = &["nats", "tls"];
const PREFIX: &str = "ov.events.";
const PREFIX_ALLOWED: &str = "be tokens of letters, digits, - and _, each ending in a dot, such as ov.events.";

pub(crate) const URL: Variable = Variable::new(
    "NATS_URL",
    "NATS, nats://[user:password@]host:4222; nats-v1 and nats-js-v1 need it.",
)
.takes(Takes::Address(SCHEMES))
.secret();
pub(crate) const SUBJECT_PREFIX: Variable = Variable::new("NATS_SUBJECT_PREFIX", "Prefix of every NATS subject.")
    .or(PREFIX)
    .takes(Takes::Checked {
        allowed: PREFIX_ALLOWED,
        fits: is_prefix,
    });

const CONNECT: Duration = Duration::from_secs(2);

/// Three pings without an answer end a connection.
const PING: Duration = Duration::from_secs(2);

/// Messages of one subscription that wait to be read; what comes beyond them is lost, as signals may be.
const WAITING_MAX: usize = 1024;

/// Where NATS is, and what it is told apart by there.
#[derive(Clone)]
pub(crate) struct Access {
    address: ServerAddr,
    login: Login,
    tls: rustls::ClientConfig,
    /// In front of every subject, with its last dot.
    pub(crate) prefix: String,
    pub(crate) instance: String,
}

#[derive(Clone)]
enum Login {
    Open,
    Token(String),
    User(String, String),
}

/// Why NATS cannot be used. No text in it holds an address or a secret.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It forbids something.
    Denied(String),
    /// It is not there.
    Lost(String),
}

impl Failure {
    /// How the carrier stands after this.
    pub(crate) fn health(&self, id: &str) -> Health {
        match self {
            Self::Denied(_) => Health::permission_denied(id),
            Self::Lost(_) => Health::not_connected(id),
        }
    }

    /// What happened.
    pub(crate) fn cause(&self) -> &str {
        match self {
            Self::Denied(cause) | Self::Lost(cause) => cause,
        }
    }
}

impl From<Failure> for SignalError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Denied(_) => Self::Denied,
            Failure::Lost(cause) => Self::Lost(cause),
        }
    }
}

/// An open connection. It is given up at the first sign of a loss; its carrier then opens another.
pub(crate) struct Connection {
    pub(crate) client: Client,
    troubles: mpsc::Receiver<Failure>,
}

/// Whether this is a name of letters, digits, - and _.
pub(crate) fn is_name(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    !text.is_empty() && text.bytes().all(plain)
}

fn is_prefix(text: &str) -> bool {
    text.strip_suffix('.')
        .is_some_and(|tokens| tokens.split('.').all(is_name))
}

impl Access {
    /// Reads `NATS_URL` and `NATS_SUBJECT_PREFIX`.
    pub(crate) fn read(env: &Env<'_>) -> Result<Option<Self>, String> {
        let Some(mut url) = env.address("NATS_URL", SCHEMES)? else {
            return Ok(None);
        };
        let prefix = env.get_or("NATS_SUBJECT_PREFIX", PREFIX);
        if !is_prefix(&prefix) {
            return Err(format!("NATS_SUBJECT_PREFIX must {PREFIX_ALLOWED}"));
        }
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let login = match (url.username(), url.password()) {
            ("", None) => Login::Open,
            (token, None) => Login::Token(decoded(token)),
            (user, Some(password)) => Login::User(decoded(user), decoded(password)),
        };
        // From here on the address can be shown.
        let cleaned = url.set_username("").and_then(|()| url.set_password(None));
        let address = cleaned.ok().and_then(|()| ServerAddr::from_url(url).ok());
        Ok(Some(Self {
            address: address.ok_or("NATS_URL must be an address of NATS")?,
            login,
            tls: env.broker_tls(),
            prefix,
            instance: env.instance.to_owned(),
        }))
    }

    /// Connects, once.
    pub(crate) async fn connect(&self) -> Result<Connection, Failure> {
        let (sender, troubles) = mpsc::channel(16);
        let mut options = ConnectOptions::new()
            .name("openvibe-events")
            .connection_timeout(CONNECT)
            .ping_interval(PING)
            .subscription_capacity(WAITING_MAX)
            .custom_inbox_prefix(format!("{}_inbox", self.prefix))
            .tls_client_config(self.tls.clone())
            .require_tls(self.address.scheme() == "tls")
            .ignore_discovered_servers()
            // The carrier connects anew by itself, with waits of its own.
            .max_reconnects(1)
            .event_callback(move |event| {
                if let Some(trouble) = trouble(event) {
                    // A full channel holds troubles enough.
                    let _ = sender.try_send(trouble);
                }
                async {}
            });
        options = match &self.login {
            Login::Open => options,
            Login::Token(token) => options.token(token.clone()),
            Login::User(user, password) => options.user_and_password(user.clone(), password.clone()),
        };
        match options.connect(self.address.clone()).await {
            Ok(client) => Ok(Connection { client, troubles }),
            Err(error) if error.kind() == ConnectErrorKind::AuthorizationViolation => {
                Err(Failure::Denied("authorization violation".into()))
            }
            Err(error) => Err(Failure::Lost(error.to_string())),
        }
    }
}

impl Connection {
    /// The next thing that is wrong with it.
    pub(crate) async fn trouble(&mut self) -> Failure {
        match self.troubles.recv().await {
            Some(trouble) => trouble,
            None => Failure::Lost("the connection ended".into()),
        }
    }
}

fn trouble(event: Event) -> Option<Failure> {
    match event {
        Event::Disconnected | Event::Closed => Some(Failure::Lost("the connection ended".into())),
        Event::ServerError(ServerError::AuthorizationViolation) => {
            Some(Failure::Denied("authorization violation".into()))
        }
        Event::ServerError(ServerError::Other(text)) if text.to_ascii_lowercase().contains("permissions violation") => {
            Some(Failure::Denied(text.chars().take(200).collect()))
        }
        Event::ServerError(error) => {
            tracing::debug!("NATS says: {error}");
            None
        }
        _ => None,
    }
}
