//! `valkey-v1`: QUEUE signals in a stream that processes share, TOPIC signals on a channel that each of them hears.
//!
//! One connection writes and hears the channel; another waits for the stream, so that a wait never holds up a signal.

mod connection;
mod queue;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value, cmd, pipe};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::signal::{Announced, Announcement, announced};
use crate::{
    Backoff, Carrier, Class, Descriptor, Env, Health, Inbound, Opened, Probed, Signal, SignalError, Standing, Takes,
    Variable,
};
use connection::{Access, Failure, Line, Open};
use queue::Queue;

const ID: &str = "valkey-v1";

const PREFIX: &str = "ov:events:";

pub(crate) const DESCRIPTOR: Descriptor = Descriptor {
    id: ID,
    classes: &[Class::Queue, Class::Topic],
    capabilities: &["events:gateway"],
    provider: "valkey",
    region: "cell",
    price_unit: "signal-operation",
    rate_card: "rc-valkey-v1",
    default_latency_ms: 2.0,
    variables: &[
        Variable::new(
            "VALKEY_URL",
            "Valkey, redis://[user:password@]host:6379; valkey-v1 needs it.",
        )
        .takes(Takes::Address(connection::SCHEMES))
        .secret(),
        Variable::new("VALKEY_PREFIX", "Prefix of every key in Valkey.").or(PREFIX),
    ],
    open,
};

/// Between two looks whether the server still answers.
const LOOK: Duration = Duration::from_secs(2);

/// A server that takes longer to answer is gone.
const ANSWER: Duration = Duration::from_secs(2);

/// How long leaving may hold up a stop.
const LEAVE: Duration = Duration::from_millis(500);

/// Between two looks whether what was forbidden is allowed now.
const DENIED: Duration = Duration::from_secs(5);

struct Valkey {
    access: Access,
    channel: String,
    queue: Queue,
    instance: String,
    consumes: bool,
    standing: Standing,
    writer: Mutex<Option<MultiplexedConnection>>,
}

fn open(env: &Env<'_>) -> Opened {
    let Some(access) = Access::read(env)? else {
        return Ok(None);
    };
    let prefix = env.get_or("VALKEY_PREFIX", PREFIX);
    Ok(Some(Arc::new(Valkey {
        access,
        channel: format!("{prefix}ps:fabric.topic"),
        queue: Queue::new(&prefix, env.instance),
        instance: env.instance.to_owned(),
        consumes: env.consumes,
        standing: Standing::new(ID, Health::not_connected(ID)),
        writer: Mutex::new(None),
    })))
}

impl Carrier for Valkey {
    fn health(&self) -> Health {
        self.standing.get()
    }

    async fn signal(&self, class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        let mut writer = self.writer()?;
        let mut pipeline = pipe();
        match class {
            Class::Queue => self.queue.add(&mut pipeline, signals),
            Class::Topic => {
                for message in Announcement::of(&self.instance, signals) {
                    pipeline.publish(&self.channel, message).ignore();
                }
            }
            Class::Stream => return Err(SignalError::Refused("it carries no STREAM".into())),
        }
        let sent = pipeline.query_async::<()>(&mut writer).await.map_err(Failure::from);
        if let Err(Failure::Denied(cause)) = &sent {
            self.standing.set(Health::permission_denied(ID), cause);
        }
        Ok(sent?)
    }

    async fn probe(&self) -> Result<Probed, SignalError> {
        let mut writer = self.writer()?;
        cmd("PING")
            .query_async::<()>(&mut writer)
            .await
            .map_err(Failure::from)?;
        Ok(Probed::Answered)
    }

    async fn run(&self, inbound: Inbound, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while let Err(failure) = self.session(&inbound, &mut backoff, &stop).await {
            *self.writer.lock() = None;
            let wait = match &failure {
                Failure::Denied(cause) => {
                    self.standing.set(Health::permission_denied(ID), cause);
                    Backoff::new(DENIED, DENIED).wait()
                }
                Failure::Refused(cause) | Failure::Lost(cause) => {
                    self.standing.set(Health::not_connected(ID), cause);
                    backoff.wait()
                }
            };
            if stop.run_until_cancelled(sleep(wait)).await.is_none() {
                break;
            }
        }
        *self.writer.lock() = None;
        self.standing.stopped(Health::not_connected(ID));
    }
}

impl Valkey {
    fn writer(&self) -> Result<MultiplexedConnection, SignalError> {
        self.writer.lock().clone().ok_or(SignalError::NotConnected)
    }

    /// Connects, and works until something fails or it is told to stop.
    async fn session(&self, inbound: &Inbound, backoff: &mut Backoff, stop: &CancellationToken) -> Result<(), Failure> {
        let Some(connected) = stop.run_until_cancelled(self.connect(inbound)).await else {
            return Ok(());
        };
        let (writing, reading) = connected?;
        let mut writer = writing.connection();
        *self.writer.lock() = Some(writer.clone());
        backoff.reset();
        self.standing.set(Health::Up, "connected");
        // What was announced before, nobody here heard.
        inbound.offer_everything();
        let consuming = async {
            match &reading {
                Some(reading) => self.queue.consume(reading.connection(), inbound).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            failed = consuming => Some(failed),
            failed = self.watch(&mut writer) => Some(failed),
            () = writing.ended() => Some(Err(Failure::Lost("the connection ended".into()))),
            () = stop.cancelled() => None,
        };
        if let Some(Err(failure)) = ended {
            return Err(failure);
        }
        if reading.is_some() {
            drop(reading);
            // One that cannot leave now is removed by another process later.
            let _ = timeout(LEAVE, self.queue.leave(&mut writing.connection())).await;
        }
        Ok(())
    }

    /// The connection that writes and, where this process takes signals, the one that waits for them.
    async fn connect(&self, inbound: &Inbound) -> Result<(Open, Option<Open>), Failure> {
        let hears = {
            let (inbound, instance) = (inbound.clone(), self.instance.clone());
            move |push: PushInfo| {
                hear(&push, &instance, &inbound);
                Ok::<(), redis::aio::SendError>(())
            }
        };
        let writing = self.access.connect(Line::Hearing(Box::new(hears))).await?;
        let mut writer = writing.connection();
        self.check(&mut writer).await?;
        let reading = match self.consumes {
            true => {
                let reading = self.access.connect(Line::Waiting).await?;
                self.queue.ensure(&mut reading.connection()).await?;
                Some(reading)
            }
            false => None,
        };
        Ok((writing, reading))
    }

    /// Asks now and then whether the server answers and, after a refusal, whether it allows now what it forbade.
    async fn watch(&self, writer: &mut MultiplexedConnection) -> Result<std::convert::Infallible, Failure> {
        loop {
            if self.standing.get() == Health::Up {
                sleep(LOOK).await;
                answered(cmd("PING").query_async::<()>(writer)).await?;
            } else {
                sleep(DENIED).await;
                self.check(writer).await?;
                self.standing.set(Health::Up, "allowed again");
            }
        }
    }

    /// Does everything once that signals need, leaving nothing behind.
    async fn check(&self, writer: &mut MultiplexedConnection) -> Result<(), Failure> {
        let mut pipeline = pipe();
        pipeline
            .publish(&self.channel, Announcement::of_nothing(&self.instance))
            .ignore();
        answered(pipeline.query_async::<()>(writer)).await?;
        answered(writer.subscribe(&self.channel)).await?;
        self.queue.check(writer).await
    }
}

/// Takes what came over the channel.
fn hear(push: &PushInfo, own: &str, inbound: &Inbound) {
    let (PushKind::Message, [_, Value::BulkString(message)]) = (&push.kind, push.data.as_slice()) else {
        return; // the server's own remarks
    };
    match announced(message, own) {
        Announced::Own => {}
        Announced::Signals(signals) => inbound.offer_all(signals),
        Announced::Everything => inbound.offer_everything(),
        Announced::Strange => inbound.ignore(),
    }
}

/// What the server answers in time.
async fn answered<T>(asked: impl Future<Output = redis::RedisResult<T>>) -> Result<T, Failure> {
    match timeout(ANSWER, asked).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Failure::Lost(format!("no answer within {ANSWER:?}"))),
    }
}
