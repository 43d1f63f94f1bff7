//! Connections to Valkey: address, credentials, TLS as everywhere in the process, and what a failure means.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::aio::{MultiplexedConnection, SendError};
use redis::{AsyncConnectionConfig, ErrorKind, ProtocolVersion, PushInfo, RedisConnectionInfo, RedisError};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::{Env, SignalError};

pub(super) const SCHEMES: &[&str] = &["redis", "rediss", "valkey", "valkeys"];

const CONNECT: Duration = Duration::from_secs(2);

/// A command that no deadline ends sooner is given up after this.
const ANSWER: Duration = Duration::from_secs(5);

/// How to reach the server.
pub(super) struct Access {
    host: String,
    port: u16,
    tls: Option<TlsConnector>,
    login: RedisConnectionInfo,
}

/// What a connection is for.
pub(super) enum Line {
    /// Short commands; what the server says unasked goes to the closure.
    Hearing(Box<dyn Fn(PushInfo) -> Result<(), SendError> + Send + Sync>),
    /// Commands that wait at the server.
    Waiting,
}

/// An open connection. Dropping it closes it, and commands under way fail.
pub(super) struct Open {
    connection: MultiplexedConnection,
    ended: CancellationToken,
    _driver: AbortOnDropHandle<()>,
}

/// Why the server cannot be used. No text in it holds an address or a secret.
#[derive(Debug)]
pub(super) enum Failure {
    /// It forbids something.
    Denied(String),
    /// It answered that it did not.
    Refused(String),
    /// It is not there.
    Lost(String),
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        let text = match error.detail() {
            Some(detail) => format!("{} {detail}", error.code().unwrap_or_default()),
            None => error.to_string(),
        };
        let text = text.chars().take(200).collect();
        if error.kind() == ErrorKind::AuthenticationFailed {
            return Self::Denied(text);
        }
        // Commands that were sent together have their answers one by one.
        let Some(answers) = error.into_server_errors() else {
            return Self::Lost(text);
        };
        let is_denial = |code: &str| ["NOPERM", "WRONGPASS", "NOAUTH"].contains(&code);
        match answers.iter().any(|(_, answer)| is_denial(answer.code())) {
            true => Self::Denied(text),
            false => Self::Refused(text),
        }
    }
}

impl From<Failure> for SignalError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Denied(_) => Self::Denied,
            Failure::Refused(text) => Self::Refused(text),
            Failure::Lost(text) => Self::Lost(text),
        }
    }
}

impl Access {
    /// Reads `VALKEY_URL`.
    pub(super) fn read(env: &Env<'_>) -> Result<Option<Self>, String> {
        let Some(url) = env.address("VALKEY_URL", SCHEMES)? else {
            return Ok(None);
        };
        let database = match url.path().trim_matches('/') {
            "" => 0,
            number => number
                .parse()
                .map_err(|_| "VALKEY_URL must end in the number of a database, or in none")?,
        };
        let mut login = RedisConnectionInfo::default().set_db(database);
        let decoded = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        if !url.username().is_empty() {
            login = login.set_username(decoded(url.username()));
        }
        if let Some(password) = url.password() {
            login = login.set_password(decoded(password));
        }
        let tls = matches!(url.scheme(), "rediss" | "valkeys").then(|| TlsConnector::from(Arc::new(env.broker_tls())));
        Ok(Some(Self {
            host: url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
            port: url.port().unwrap_or(6379),
            tls,
            login,
        }))
    }

    /// Connects and logs in.
    pub(super) async fn connect(&self, line: Line) -> Result<Open, Failure> {
        match timeout(CONNECT, self.connect_now(line)).await {
            Ok(connected) => connected,
            Err(_) => Err(Failure::Lost(format!("no connection within {CONNECT:?}"))),
        }
    }

    async fn connect_now(&self, line: Line) -> Result<Open, Failure> {
        let io = |error: std::io::Error| Failure::Lost(error.to_string());
        let tcp = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(io)?;
        tcp.set_nodelay(true).map_err(io)?;
        let stream: Pin<Box<dyn Stream>> = match &self.tls {
            None => Box::pin(tcp),
            Some(tls) => {
                let name = ServerName::try_from(self.host.clone()).map_err(|error| Failure::Lost(error.to_string()))?;
                Box::pin(tls.connect(name, tcp).await.map_err(io)?)
            }
        };
        let (protocol, config) = match line {
            Line::Hearing(hears) => {
                let config = AsyncConnectionConfig::new()
                    .set_response_timeout(Some(ANSWER))
                    .set_push_sender(hears);
                (ProtocolVersion::RESP3, config)
            }
            Line::Waiting => (
                ProtocolVersion::RESP2,
                AsyncConnectionConfig::new().set_response_timeout(None),
            ),
        };
        let login = self.login.clone().set_protocol(protocol).set_skip_set_lib_name();
        let (connection, driver) = MultiplexedConnection::new_with_config(&login, stream, config).await?;
        let ended = CancellationToken::new();
        let end = ended.clone();
        let driver = tokio::spawn(async move {
            driver.await;
            end.cancel();
        });
        Ok(Open {
            connection,
            ended,
            _driver: AbortOnDropHandle::new(driver),
        })
    }
}

impl Open {
    /// A handle for commands.
    pub(super) fn connection(&self) -> MultiplexedConnection {
        self.connection.clone()
    }

    /// Returns when the connection has ended.
    pub(super) async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Stream for T {}
