//! `pg-v1`: the floor. Its signals are `NOTIFY` to every other process that listens on the same database.
//!
//! It delivers without them too, by the dispatcher's poll, so it is never down; without a listener it is degraded.

use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Connection, PgConnection};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::signal::{Announced, Announcement, announced};
use crate::{Backoff, Carrier, Class, Descriptor, Env, Health, Inbound, Opened, Probed, Signal, SignalError, Standing};

const ID: &str = "pg-v1";

pub(crate) const DESCRIPTOR: Descriptor = Descriptor {
    id: ID,
    classes: &Class::ALL,
    capabilities: &["events:gateway", "events:durable", "events:ordered"],
    provider: "postgres",
    region: "cell",
    price_unit: "delivery-operation",
    rate_card: "rc-pg-v1",
    // Half the interval of the poll, by default.
    default_latency_ms: 250.0,
    // The database is the service's own, so its variables are declared there.
    variables: &[],
    open,
};

/// The channel on which processes of one database call each other.
const CHANNEL: &str = "openvibe_events";

/// PostgreSQL refuses payloads of 8000 bytes or more.
const PAYLOAD_BYTES_MAX: usize = 7999;

const CONNECT: Duration = Duration::from_secs(3);

/// A listener that has heard nothing for so long asks whether anybody is there.
const QUIET: Duration = Duration::from_secs(3);

const ANSWER: Duration = Duration::from_secs(3);

/// Connections of its own, since a pooler in transaction mode loses what a session listens to.
struct Doorbell {
    options: PgConnectOptions,
    instance: String,
    standing: Standing,
    /// Not here while it is in use: one that was left in the middle of a question is never used again.
    ringing: Mutex<Option<PgConnection>>,
}

fn open(env: &Env<'_>) -> Opened {
    let (name, url) = ["DATABASE_DIRECT_URL", "DATABASE_URL"]
        .into_iter()
        .find_map(|name| Some((name, env.get(name)?)))
        .ok_or("DATABASE_URL must be set: pg-v1 listens on the database")?;
    if !["postgres://", "postgresql://"]
        .iter()
        .any(|scheme| url.starts_with(scheme))
    {
        return Err(format!("{name} must begin with postgres:// or postgresql://"));
    }
    let options: PgConnectOptions = url
        .parse()
        .map_err(|_| format!("{name} must be a PostgreSQL address"))?;
    Ok(Some(Arc::new(Doorbell {
        options: options.application_name("openvibe-events pg-v1"),
        instance: env.instance.to_owned(),
        standing: Standing::new(ID, not_listening()),
        ringing: Mutex::new(None),
    })))
}

fn not_listening() -> Health {
    Health::Degraded(format!("not listening ({ID})").into())
}

impl Carrier for Doorbell {
    fn health(&self) -> Health {
        self.standing.get()
    }

    async fn signal(&self, _class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        let mut messages = Announcement::of(&self.instance, signals);
        let Some(first) = messages.next() else { return Ok(()) };
        let message = if messages.next().is_none() && first.len() <= PAYLOAD_BYTES_MAX {
            first
        } else {
            Announcement::of_everything(&self.instance)
        };
        self.on_the_line(Some(&message)).await
    }

    async fn probe(&self) -> Result<Probed, SignalError> {
        self.on_the_line(None).await?;
        Ok(Probed::Answered)
    }

    async fn run(&self, inbound: Inbound, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while let Some(ended) = stop
            .run_until_cancelled(Box::pin(self.listen(&inbound, &mut backoff)))
            .await
        {
            let Err(error) = ended;
            self.standing.set(not_listening(), &error.to_string());
            if stop
                .run_until_cancelled(tokio::time::sleep(backoff.wait()))
                .await
                .is_none()
            {
                break;
            }
        }
        self.standing.stopped(not_listening());
        self.ringing.lock().await.take();
    }
}

impl Doorbell {
    /// Calls this, or asks whether anybody is there: on the line that was kept, or on a fresh one where none was, or where
    /// it had died since the last time.
    async fn on_the_line(&self, message: Option<&str>) -> Result<(), SignalError> {
        let mut ringing = self.ringing.lock().await;
        if let Some(mut kept) = ringing.take()
            && say(&mut kept, message).await.is_ok()
        {
            *ringing = Some(kept);
            return Ok(());
        }
        let mut fresh = PgConnection::connect_with(&self.options).await.map_err(lost)?;
        say(&mut fresh, message).await.map_err(lost)?;
        *ringing = Some(fresh);
        Ok(())
    }

    /// Listens until the connection fails.
    async fn listen(&self, inbound: &Inbound, backoff: &mut Backoff) -> Result<std::convert::Infallible, SignalError> {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(CONNECT)
            .connect_lazy_with(self.options.clone());
        let mut listener = in_time(CONNECT, PgListener::connect_with(&pool)).await?;
        listener.eager_reconnect(false);
        in_time(ANSWER, listener.listen(CHANNEL)).await?;
        backoff.reset();
        self.standing.set(Health::Up, "listening");
        // Whatever was called before, nobody here heard it.
        inbound.offer_everything();
        loop {
            match timeout(QUIET, listener.try_recv()).await {
                Ok(Ok(Some(notification))) => match announced(notification.payload().as_bytes(), &self.instance) {
                    Announced::Own => {}
                    Announced::Signals(signals) => inbound.offer_all(signals),
                    Announced::Everything => inbound.offer_everything(),
                    Announced::Strange => inbound.ignore(),
                },
                Ok(Ok(None)) => return Err(SignalError::Lost("the connection ended".into())),
                Ok(Err(error)) => return Err(lost(error)),
                Err(_) => in_time(ANSWER, ask(&mut listener)).await?,
            }
        }
    }
}

async fn say(line: &mut PgConnection, message: Option<&str>) -> Result<(), sqlx::Error> {
    let Some(message) = message else { return ask(line).await };
    // A notification makes its transaction a writing one, and its commit would wait for the disk: each ring a flush
    // that publishes and results stand behind.
    sqlx::query("SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)")
        .bind(CHANNEL)
        .bind(message)
        .execute(line)
        .await?;
    Ok(())
}

/// Asks whether anybody is there.
async fn ask<'c>(line: impl sqlx::PgExecutor<'c>) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT 1").persistent(false).execute(line).await?;
    Ok(())
}

async fn in_time<T>(limit: Duration, work: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, SignalError> {
    match timeout(limit, work).await {
        Ok(done) => done.map_err(lost),
        Err(_) => Err(SignalError::Lost(format!("nothing within {limit:?}"))),
    }
}

fn lost(error: sqlx::Error) -> SignalError {
    SignalError::Lost(error.to_string())
}
