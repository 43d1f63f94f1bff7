//! `nats-js-v1`: STREAM signals in a JetStream stream that processes share through one durable pull consumer.
//!
//! The broker keeps a signal until some process has handed it over. It decides nothing: an entry that comes twice finds
//! its row done, and one that never comes leaves its row to the poll.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::context::{
    ContextBuilder, CreateStreamErrorKind, GetStreamErrorKind, PublishError, PublishErrorKind,
};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use futures_util::StreamExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::nats::{self, Access, Failure};
use crate::signal::distinct;
use crate::{
    Backoff, Carrier, Class, Descriptor, Env, Health, Inbound, Opened, Probed, Signal, SignalError, Standing, Takes,
    Variable,
};

const ID: &str = "nats-js-v1";

const STREAM: &str = "OV_EVENTS_STREAM";
const STREAM_ALLOWED: &str = "be 1 to 64 letters, digits, - and _";

pub(crate) const DESCRIPTOR: Descriptor = Descriptor {
    id: ID,
    classes: &[Class::Stream],
    capabilities: &["events:gateway", "events:durable", "events:ordered"],
    provider: "nats",
    region: "cell",
    price_unit: "stream-operation",
    rate_card: "rc-nats-js-v1",
    default_latency_ms: 1.0,
    variables: &[
        nats::URL,
        nats::SUBJECT_PREFIX,
        Variable::new("NATS_JETSTREAM", "on or off. off: nats-js-v1 is not used.")
            .or("on")
            .takes(Takes::Switch),
        Variable::new("NATS_STREAM", "Name of the JetStream stream.")
            .or(STREAM)
            .takes(Takes::Checked {
                allowed: STREAM_ALLOWED,
                fits: is_stream,
            }),
    ],
    open,
};

/// The consumer that all processes pull from.
const CONSUMER: &str = "events_workers";

/// How long JetStream may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// Between two looks whether the stream and its consumer are still there.
const LOOK: Duration = Duration::from_secs(5);

/// Between two looks whether what was forbidden is allowed now.
const DENIED: Duration = Duration::from_secs(10);

/// Signals pulled at a time.
const TAKE: usize = 256;

/// Signals that wait for the acknowledgement of the stream, at most.
const UNACKNOWLEDGED_MAX: usize = 4096;

/// What the stream holds at most, in bytes; the oldest signals go first.
const STREAM_BYTES_MAX: i64 = 256 * 1024 * 1024;

/// A message that means nothing: whether the stream takes it is what counts.
const TRIAL: &[u8] = b"{}";

const DAY: Duration = Duration::from_secs(86_400);

struct JetStream {
    access: Access,
    stream: String,
    /// What signals are published on: the stream has all subjects beside it too.
    subject: String,
    consumes: bool,
    standing: Standing,
    context: Mutex<Option<Context>>,
    /// Makes the ids of messages differ.
    sent: AtomicU64,
    /// The stream may be gone.
    doubt: Notify,
}

/// Why signals cannot go on.
enum Ended {
    /// Nobody answers.
    Lost(String),
    /// JetStream answers, and the stream or its consumer cannot be used.
    NotReady(String),
}

fn is_stream(text: &str) -> bool {
    text.len() <= 64 && nats::is_name(text)
}

fn open(env: &Env<'_>) -> Opened {
    let stream = env.get_or("NATS_STREAM", STREAM);
    if !is_stream(&stream) {
        return Err(format!("NATS_STREAM must {STREAM_ALLOWED}"));
    }
    let wanted = env.switch("NATS_JETSTREAM", true)?;
    let Some(access) = Access::read(env)?.filter(|_| wanted) else {
        return Ok(None);
    };
    Ok(Some(Arc::new(JetStream {
        subject: format!("{}fabric.stream._", access.prefix),
        access,
        stream,
        consumes: env.consumes,
        standing: Standing::new(ID, Health::not_connected(ID)),
        context: Mutex::new(None),
        sent: AtomicU64::new(0),
        doubt: Notify::new(),
    })))
}

impl Carrier for JetStream {
    fn health(&self) -> Health {
        self.standing.get()
    }

    async fn signal(&self, class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        if class != Class::Stream {
            return Err(SignalError::Refused(format!("it carries no {class}")));
        }
        let context = self.context()?;
        let mut answers = Vec::with_capacity(signals.len());
        for signal in distinct(signals) {
            // The id lets the broker drop what the connection repeats. It names this sending, since the same delivery is
            // signalled again when it is retried or replayed.
            let sent = self.sent.fetch_add(1, Relaxed);
            let subscription_id = signal.subscription_id.as_deref().unwrap_or("_");
            let id = format!("{}:{subscription_id}:{}:{sent}", signal.event_id, self.access.instance);
            let message = PublishMessage::build().payload(signal.to_json().into()).message_id(id);
            answers.push(
                context
                    .send_publish(self.subject.clone(), message)
                    .await
                    .map_err(|error| self.unsent(&error))?,
            );
        }
        for answer in join_all(answers.into_iter().map(IntoFuture::into_future)).await {
            let stored = answer.map_err(|error| self.unsent(&error))?;
            if stored.stream != self.stream {
                return Err(SignalError::Refused(format!(
                    "another stream took it: {}",
                    stored.stream
                )));
            }
        }
        Ok(())
    }

    async fn probe(&self) -> Result<Probed, SignalError> {
        self.context()?
            .get_stream(&self.stream)
            .await
            .map_err(|error| lost(&error))?;
        Ok(Probed::Answered)
    }

    async fn run(&self, inbound: Inbound, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while let Some(ended) = stop.run_until_cancelled(self.session(&inbound, &mut backoff)).await {
            *self.context.lock() = None;
            let Err(failure) = ended;
            self.standing.set(failure.health(ID), failure.cause());
            let wait = match failure {
                Failure::Denied(_) => Backoff::new(DENIED, DENIED).wait(),
                Failure::Lost(_) => backoff.wait(),
            };
            if stop.run_until_cancelled(sleep(wait)).await.is_none() {
                break;
            }
        }
        *self.context.lock() = None;
        self.standing.stopped(Health::not_connected(ID));
    }
}

impl JetStream {
    fn context(&self) -> Result<Context, SignalError> {
        self.context.lock().clone().ok_or(SignalError::NotConnected)
    }

    /// What a failed publish says, with a closer look where it may mean that the stream is gone.
    fn unsent(&self, error: &PublishError) -> SignalError {
        match error.kind() {
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe | PublishErrorKind::MaxAckPending => {
                return lost(error);
            }
            PublishErrorKind::StreamNotFound => self.doubt.notify_one(),
            _ => {}
        }
        SignalError::Refused(texts(error))
    }

    /// Connects and works until the connection is no good.
    async fn session(&self, inbound: &Inbound, backoff: &mut Backoff) -> Result<Infallible, Failure> {
        let mut connection = self.access.connect().await?;
        let context = ContextBuilder::new()
            .timeout(ANSWER)
            .max_ack_inflight(UNACKNOWLEDGED_MAX)
            .backpressure_on_inflight(false)
            .build(connection.client.clone());
        let mut waits = Backoff::new(Duration::from_millis(500), Duration::from_secs(30));
        loop {
            let ended = tokio::select! {
                trouble = connection.trouble() => return Err(trouble),
                ended = self.work(&context, inbound, backoff, &mut waits) => ended,
            };
            *self.context.lock() = None;
            match ended {
                Err(Ended::Lost(cause)) => return Err(Failure::Lost(cause)),
                Err(Ended::NotReady(cause)) => {
                    self.standing
                        .set(Health::Down(format!("stream not ready ({ID}): {cause}").into()), &cause);
                }
            }
            if let Ok(trouble) = timeout(waits.wait(), connection.trouble()).await {
                return Err(trouble);
            }
        }
    }

    /// Sees to it that everything is there, then carries signals until it is not any more.
    async fn work(
        &self,
        context: &Context,
        inbound: &Inbound,
        backoff: &mut Backoff,
        waits: &mut Backoff,
    ) -> Result<Infallible, Ended> {
        let stream = self.ensure(context).await?;
        let consumer = match self.consumes {
            true => Some(self.consumer(&stream).await?),
            false => None,
        };
        // Nobody can read a thing out of it; that it is taken shows that signals will be.
        let tried = context
            .publish(self.subject.clone(), TRIAL.into())
            .await
            .map_err(|error| unready(&error))?;
        tried.await.map_err(|error| unready(&error))?;
        backoff.reset();
        *self.context.lock() = Some(context.clone());
        self.standing.set(Health::Up, "the stream is ready");
        let consuming = async {
            match &consumer {
                Some(consumer) => self.consume(consumer, inbound).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ended = self.watch(context, waits) => ended,
            ended = consuming => ended,
        }
    }

    /// The stream, made where there is none. One that exists is used as it is.
    async fn ensure(&self, context: &Context) -> Result<Stream, Ended> {
        match context.get_stream(&self.stream).await {
            Err(error) if is_code(&error.kind(), ErrorCode::STREAM_NOT_FOUND) => {}
            found => return found.map_err(|error| unready(&error)),
        }
        let made = context.create_stream(Config {
            name: self.stream.clone(),
            subjects: vec![format!("{}fabric.stream.>", self.access.prefix)],
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            discard: DiscardPolicy::Old,
            max_age: DAY,
            max_bytes: STREAM_BYTES_MAX,
            max_message_size: 1024,
            duplicate_window: Duration::from_secs(120),
            num_replicas: 1,
            ..Config::default()
        });
        match made.await {
            Err(error) if matches!(error.kind(), CreateStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NAME_EXIST) => {
                context.get_stream(&self.stream).await.map_err(|error| unready(&error))
            }
            made => made.map_err(|error| unready(&error)),
        }
    }

    /// The consumer that all processes share, made where there is none.
    async fn consumer(&self, stream: &Stream) -> Result<PullConsumer, Ended> {
        let config = pull::Config {
            durable_name: Some(CONSUMER.to_owned()),
            deliver_policy: DeliverPolicy::New,
            ack_policy: AckPolicy::Explicit,
            ack_wait: Duration::from_secs(30),
            max_deliver: 5,
            max_ack_pending: 10_000,
            inactive_threshold: DAY,
            ..pull::Config::default()
        };
        stream
            .get_or_create_consumer(CONSUMER, config)
            .await
            .map_err(|error| unready(&error))
    }

    /// Pulls signals, hands them over and acknowledges them.
    async fn consume(&self, consumer: &PullConsumer, inbound: &Inbound) -> Result<Infallible, Ended> {
        let pulling = consumer
            .stream()
            .max_messages_per_batch(TAKE)
            .expires(Duration::from_secs(10))
            .heartbeat(Duration::from_secs(3))
            .messages();
        let messages = pulling.await.map_err(|error| unready(&error))?;
        let mut batches = messages.ready_chunks(TAKE);
        while let Some(batch) = batches.next().await {
            let (mut taken, mut signals) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
            for message in batch {
                let message = message.map_err(|error| unready(&error))?;
                match Signal::from_json(&message.payload) {
                    Some(signal) => signals.push(signal),
                    None if message.payload.as_ref() == TRIAL => {}
                    None => inbound.ignore(),
                }
                taken.push(message);
            }
            inbound.handled(signals).await;
            for message in taken {
                message.ack().await.map_err(|error| Ended::Lost(error.to_string()))?;
            }
        }
        Err(Ended::NotReady("the consumer ended".into()))
    }

    /// Looks now and then whether the stream is still there.
    async fn watch(&self, context: &Context, waits: &mut Backoff) -> Result<Infallible, Ended> {
        loop {
            tokio::select! {
                () = sleep(LOOK) => {}
                () = self.doubt.notified() => {}
            }
            context
                .get_stream(&self.stream)
                .await
                .map_err(|error| unready(&error))?;
            waits.reset();
        }
    }
}

fn is_code(kind: &GetStreamErrorKind, code: ErrorCode) -> bool {
    matches!(kind, GetStreamErrorKind::JetStream(error) if error.error_code() == code)
}

/// What a failure of JetStream means: silence is that of the broker.
fn unready(error: &(dyn std::error::Error + 'static)) -> Ended {
    let text = texts(error);
    match text.contains("timed out") {
        true => Ended::Lost(text),
        false => Ended::NotReady(text),
    }
}

/// An error and what caused it, in bounded length.
fn texts(error: &(dyn std::error::Error + 'static)) -> String {
    error.to_string().chars().take(200).collect()
}

fn lost(error: &dyn std::error::Error) -> SignalError {
    SignalError::Lost(error.to_string())
}
