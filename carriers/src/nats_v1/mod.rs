//! `nats-v1`: TOPIC signals to every other process, over core NATS. Nothing is kept, nothing is acknowledged.
//!
//! Each process also hears what it says itself. That it does is the proof, twice a second, that the server is there,
//! takes what this process sends, and sends what others do. So a signal has been taken when it is heard here again: its
//! last message has a mark of its own, by which it is told from earlier ones.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_nats::{Client, HeaderMap};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::nats::{self, Access, Failure};
use crate::signal::{Announced, Announcement, announced};
use crate::{Backoff, Carrier, Class, Descriptor, Env, Health, Inbound, Opened, Probed, Signal, SignalError, Standing};

const ID: &str = "nats-v1";

pub(crate) const DESCRIPTOR: Descriptor = Descriptor {
    id: ID,
    classes: &[Class::Topic],
    capabilities: &["events:gateway"],
    provider: "nats",
    region: "cell",
    price_unit: "signal-operation",
    rate_card: "rc-nats-v1",
    default_latency_ms: 1.0,
    variables: &[nats::URL, nats::SUBJECT_PREFIX],
    open,
};

/// Between two words to itself.
const WORD: Duration = Duration::from_millis(500);

/// A server that has let nothing through for so long is gone. Signals are not acknowledged, so those of this time are lost.
const SILENCE: Duration = Duration::from_millis(1500);

/// After a refusal the connection is opened anew so often: rights are given to connections.
const DENIED: Duration = Duration::from_secs(10);

/// The header of the mark.
const MARK: &str = "Openvibe-Mark";

struct Nats {
    access: Access,
    subject: String,
    standing: Standing,
    client: Mutex<Option<Client>>,
    marks: AtomicU64,
    /// Those who wait to hear their own message again, by its mark.
    echoes: Mutex<HashMap<u64, oneshot::Sender<()>>>,
}

/// A wait for a message of one's own; it ends when this is let go.
struct Echo<'a> {
    nats: &'a Nats,
    mark: u64,
    heard: oneshot::Receiver<()>,
}

impl Drop for Echo<'_> {
    fn drop(&mut self) {
        self.nats.echoes.lock().remove(&self.mark);
    }
}

fn open(env: &Env<'_>) -> Opened {
    let Some(access) = Access::read(env)? else {
        return Ok(None);
    };
    Ok(Some(Arc::new(Nats {
        subject: format!("{}fabric.topic", access.prefix),
        access,
        standing: Standing::new(ID, Health::not_connected(ID)),
        client: Mutex::new(None),
        marks: AtomicU64::new(0),
        echoes: Mutex::default(),
    })))
}

impl Carrier for Nats {
    fn health(&self) -> Health {
        self.standing.get()
    }

    async fn signal(&self, class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        if class != Class::Topic {
            return Err(SignalError::Refused(format!("it carries no {class}")));
        }
        let client = self.client()?;
        let mut messages: Vec<String> = Announcement::of(&self.access.instance, signals).collect();
        let Some(last) = messages.pop() else { return Ok(()) };
        for message in messages {
            self.say(&client, message).await?;
        }
        // The server keeps the order of a connection: where this one is heard, those before it were taken.
        self.say_and_hear(&client, last).await
    }

    async fn probe(&self) -> Result<Probed, SignalError> {
        let client = self.client()?;
        self.say_and_hear(&client, Announcement::of_nothing(&self.access.instance))
            .await?;
        Ok(Probed::Answered)
    }

    async fn run(&self, inbound: Inbound, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while let Some(ended) = stop.run_until_cancelled(self.session(&inbound, &mut backoff)).await {
            *self.client.lock() = None;
            let Err(failure) = ended;
            self.standing.set(failure.health(ID), failure.cause());
            if stop.run_until_cancelled(sleep(backoff.wait())).await.is_none() {
                break;
            }
        }
        *self.client.lock() = None;
        self.standing.stopped(Health::not_connected(ID));
    }
}

impl Nats {
    fn client(&self) -> Result<Client, SignalError> {
        let client = self.client.lock().clone().ok_or(SignalError::NotConnected)?;
        match self.standing.get() {
            Health::Up | Health::Degraded(_) => Ok(client),
            Health::Down(_) => Err(SignalError::Denied),
        }
    }

    async fn say(&self, client: &Client, message: String) -> Result<(), SignalError> {
        client.publish(self.subject.clone(), message.into()).await.map_err(lost)
    }

    async fn say_and_hear(&self, client: &Client, message: String) -> Result<(), SignalError> {
        let mark = self.marks.fetch_add(1, Relaxed);
        let (sender, heard) = oneshot::channel();
        self.echoes.lock().insert(mark, sender);
        let mut echo = Echo {
            nats: self,
            mark,
            heard,
        };
        let mut headers = HeaderMap::new();
        headers.insert(MARK, mark.to_string());
        client
            .publish_with_headers(self.subject.clone(), headers, message.into())
            .await
            .map_err(lost)?;
        match timeout(SILENCE, &mut echo.heard).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(SignalError::Lost("a word to itself was not heard".into())),
        }
    }

    /// Tells whoever waits for this message that it was heard.
    fn heard_again(&self, headers: Option<&HeaderMap>) {
        let mark = headers.and_then(|headers| headers.get(MARK)?.as_str().parse().ok());
        if let Some(waiting) = mark.and_then(|mark: u64| self.echoes.lock().remove(&mark)) {
            let _ = waiting.send(());
        }
    }

    /// Connects, listens and talks to itself until the connection is no good.
    async fn session(&self, inbound: &Inbound, backoff: &mut Backoff) -> Result<std::convert::Infallible, Failure> {
        let mut connection = self.access.connect().await?;
        let client = connection.client.clone();
        let broken = |error: SignalError| Failure::Lost(error.to_string());
        let mut messages = client
            .subscribe(self.subject.clone())
            .await
            .map_err(lost)
            .map_err(broken)?;
        *self.client.lock() = Some(client.clone());
        let (mut heard, mut word) = (Instant::now(), Instant::now());
        let mut denied: Option<(Instant, String)> = None;
        let again = Backoff::new(DENIED, DENIED).wait();
        loop {
            let until = match &denied {
                None => heard + SILENCE,
                Some((since, _)) => *since + again,
            };
            tokio::select! {
                message = messages.next() => {
                    let Some(message) = message else { return Err(Failure::Lost("the subscription ended".into())) };
                    match announced(&message.payload, &self.access.instance) {
                        Announced::Own => {
                            if self.standing.get() != Health::Up {
                                backoff.reset();
                                self.standing.set(Health::Up, "heard");
                                // What was announced before, nobody here heard.
                                inbound.offer_everything();
                            }
                            (heard, denied) = (Instant::now(), None);
                            self.heard_again(message.headers.as_ref());
                        }
                        Announced::Signals(signals) => inbound.offer_all(signals),
                        Announced::Everything => inbound.offer_everything(),
                        Announced::Strange => inbound.ignore(),
                    }
                }
                trouble = connection.trouble() => match trouble {
                    Failure::Denied(cause) => {
                        self.standing.set(Health::permission_denied(ID), &cause);
                        denied.get_or_insert((Instant::now(), cause));
                    }
                    lost @ Failure::Lost(_) => return Err(lost),
                },
                () = sleep_until(word) => {
                    word = Instant::now() + WORD;
                    self.say(&client, Announcement::of_nothing(&self.access.instance)).await.map_err(broken)?;
                }
                () = sleep_until(until) => return Err(match denied {
                    None => Failure::Lost(format!("nothing heard for {SILENCE:?}")),
                    Some((_, cause)) => Failure::Denied(cause),
                }),
            }
        }
    }
}

fn lost(error: impl std::error::Error) -> SignalError {
    SignalError::Lost(error.to_string())
}
