//! `cloud-v1`: QUEUE signals to an SQS-compatible queue, and from it where `CLOUD_QUEUE_CONSUME` is on.
//!
//! There is no connection to keep and nothing is asked of an idle queue, since every request is paid for. So whether it
//! would answer is known only while it is used, and said to be unverified otherwise.

mod answers;
mod request;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::signal::distinct;
use crate::{Backoff, Carrier, Class, Descriptor, Env, Health, Inbound, Opened, Signal, SignalError, Takes, Variable};
use answers::{Received, failed_entries, received};
use request::Endpoint;

const ID: &str = "cloud-v1";

const REGION: &str = "us-east-1";

pub(crate) const DESCRIPTOR: Descriptor = Descriptor {
    id: ID,
    classes: &[Class::Queue],
    capabilities: &["events:gateway"],
    provider: "cloud",
    region: "cloud",
    price_unit: "queue-operation",
    rate_card: "rc-cloud-queue-v1",
    default_latency_ms: 1.0,
    variables: &[
        Variable::new(
            "CLOUD_QUEUE_URL",
            "Address of an SQS-compatible queue; cloud-v1 needs it.",
        )
        .takes(Takes::Address(&["http", "https"]))
        .secret(),
        Variable::new("CLOUD_QUEUE_REGION", "Region the queue's requests are signed for.").or(REGION),
        Variable::new("CLOUD_QUEUE_PREFIX", "Path in front of the queue's operations."),
        Variable::new(
            "CLOUD_QUEUE_ACCESS_KEY",
            "Access key of the queue; a local queue needs none.",
        )
        .with("CLOUD_QUEUE_SECRET_KEY"),
        Variable::new("CLOUD_QUEUE_SECRET_KEY", "Secret of the access key.")
            .secret()
            .with("CLOUD_QUEUE_ACCESS_KEY"),
        Variable::new(
            "CLOUD_QUEUE_CONSUME",
            "on or off. on: this process also receives from the queue.",
        )
        .or("off")
        .takes(Takes::Switch),
    ],
    open,
};

/// Messages in one request: the queue takes no more.
const BATCH: usize = 10;

/// Requests under way at a time.
const UNDER_WAY: usize = 8;

/// The longest answer to anything but a receive, in bytes.
const ANSWER_BYTES_MAX: usize = 64 * 1024;

/// The longest answer to a receive, in bytes. Ten messages of others can be longer; one cannot.
const RECEIVE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// How long an answer shows that it answers.
const SHOWN: Duration = Duration::from_secs(300);

/// How long the queue may wait for a message before it answers, in seconds.
const WAIT_S: u64 = 20;

/// How long others do not see a received message, in seconds.
const HIDDEN_S: u64 = 30;

struct Cloud {
    endpoint: Endpoint,
    consumes: bool,
    /// When it last answered a request; nothing where the last one failed.
    answered: Mutex<Option<Instant>>,
}

fn open(env: &Env<'_>) -> Opened {
    let consume = env.switch("CLOUD_QUEUE_CONSUME", false)?;
    let Some(endpoint) = Endpoint::read(env)? else {
        return Ok(None);
    };
    Ok(Some(Arc::new(Cloud {
        endpoint,
        consumes: consume && env.consumes,
        answered: Mutex::new(None),
    })))
}

impl Carrier for Cloud {
    fn health(&self) -> Health {
        match *self.answered.lock() {
            Some(at) if at.elapsed() < SHOWN => Health::Up,
            _ => Health::Degraded(format!("unverified ({ID})").into()),
        }
    }

    async fn signal(&self, class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        if class != Class::Queue {
            return Err(SignalError::Refused(format!("it carries no {class}")));
        }
        let bodies: Vec<_> = distinct(signals).into_iter().map(Signal::to_json).collect();
        let batches: Vec<_> = bodies.chunks(BATCH).map(<[String]>::to_vec).collect();
        let sent = stream::iter(batches)
            .map(|batch| self.send(batch))
            .buffer_unordered(UNDER_WAY);
        // One batch that fails does not keep the others.
        self.asked(sent.fold(Ok(()), |all, one| async { all.and(one) })).await
    }

    /// Every request is paid for: a batch is one, and so is each question for messages.
    fn operations(&self) -> Option<&AtomicU64> {
        Some(&self.endpoint.requests)
    }

    async fn run(&self, inbound: Inbound, stop: CancellationToken) {
        if !self.consumes {
            return stop.cancelled().await;
        }
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        // The first answer is not waited for: it shows that the queue is there.
        let (mut at_once, mut wait_s, mut failing) = (BATCH, 0, false);
        while let Some(taken) = stop
            .run_until_cancelled(self.asked(self.take(&inbound, at_once, wait_s)))
            .await
        {
            let Err(error) = taken else {
                (at_once, wait_s, failing) = (BATCH, WAIT_S, false);
                backoff.reset();
                continue;
            };
            if !failing {
                tracing::warn!(carrier = ID, "{ID} receives nothing: {error}");
            }
            // Perhaps the messages are too long for one answer: alone each of them fits.
            (at_once, wait_s, failing) = (1, 0, true);
            if stop.run_until_cancelled(sleep(backoff.wait())).await.is_none() {
                break;
            }
        }
    }
}

/// Notes when a request was answered, at its end.
struct Note<'a> {
    answered: &'a Mutex<Option<Instant>>,
    at: Option<Instant>,
}

impl Drop for Note<'_> {
    fn drop(&mut self) {
        *self.answered.lock() = self.at;
    }
}

impl Cloud {
    /// Asks, and notes whether there was an answer. One that is given up had none.
    async fn asked<T>(&self, request: impl Future<Output = Result<T, SignalError>>) -> Result<T, SignalError> {
        let mut note = Note {
            answered: &self.answered,
            at: None,
        };
        let result = request.await;
        note.at = result.is_ok().then(Instant::now);
        result
    }

    /// Sends one request's worth.
    async fn send(&self, mut batch: Vec<String>) -> Result<(), SignalError> {
        if batch.len() > 1 {
            return self.batch("SendMessageBatch", "MessageBody", batch.into_iter()).await;
        }
        let parameters: Vec<_> = batch
            .pop()
            .map(|body| ("MessageBody".to_owned(), body))
            .into_iter()
            .collect();
        self.endpoint
            .ask("SendMessage", &parameters, ANSWER_BYTES_MAX)
            .await
            .map(drop)
    }

    /// Receives once, hands over what came and deletes it.
    async fn take(&self, inbound: &Inbound, at_once: usize, wait_s: u64) -> Result<(), SignalError> {
        let parameters = [
            ("MaxNumberOfMessages".to_owned(), at_once.to_string()),
            ("WaitTimeSeconds".to_owned(), wait_s.to_string()),
            ("VisibilityTimeout".to_owned(), HIDDEN_S.to_string()),
        ];
        let limit = Duration::from_secs(WAIT_S + 5);
        let answer = timeout(
            limit,
            self.endpoint.ask("ReceiveMessage", &parameters, RECEIVE_BYTES_MAX),
        )
        .await;
        let messages = received(&answer.map_err(|_| SignalError::Lost(format!("nothing within {limit:?}")))??);
        if messages.is_empty() {
            return Ok(());
        }
        let signals = messages.iter().filter_map(|message| {
            let signal = Signal::from_json(message.body.as_bytes());
            if signal.is_none() {
                inbound.ignore();
            }
            signal
        });
        inbound.handled(signals.collect()).await;
        let receipts = messages.into_iter().map(|Received { receipt, .. }| receipt);
        let deleted = timeout(limit, self.batch("DeleteMessageBatch", "ReceiptHandle", receipts)).await;
        deleted.map_err(|_| SignalError::Lost(format!("nothing within {limit:?}")))?
    }

    async fn batch(&self, action: &str, field: &str, values: impl Iterator<Item = String>) -> Result<(), SignalError> {
        let entries = values.enumerate().flat_map(|(n, value)| {
            let entry = format!("{action}RequestEntry.{}", n + 1);
            [
                (format!("{entry}.Id"), n.to_string()),
                (format!("{entry}.{field}"), value),
            ]
        });
        let answer = self
            .endpoint
            .ask(action, &entries.collect::<Vec<_>>(), ANSWER_BYTES_MAX)
            .await?;
        match failed_entries(&answer) {
            None => Ok(()),
            Some((failed, code)) => Err(SignalError::Refused(format!("{failed} of a batch failed: {code}"))),
        }
    }
}
