//! What a carrier is: the trait its author writes, and the form in which the fabric holds it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use planner::Class;
use tokio_util::sync::CancellationToken;

use crate::{Env, Health, Inbound, Signal, Variable};

/// What is known of a carrier without opening it.
#[derive(Debug, Clone, Copy)]
pub struct Descriptor {
    /// Its id in `EVENTS_CARRIERS`, in records, answers and metrics: a name and the version of its protocol.
    pub id: &'static str,
    /// What it can wake.
    pub classes: &'static [Class],
    /// What its offers say it can do: `events:gateway`, and `events:durable` and `events:ordered` where they are true.
    pub capabilities: &'static [&'static str],
    /// Whose it is.
    pub provider: &'static str,
    /// Where it is: `cell` for what stands beside the service.
    pub region: &'static str,
    /// What its price counts.
    pub price_unit: &'static str,
    /// The rate card that prices it. Without that card it is shown and never chosen.
    pub rate_card: &'static str,
    /// The latency it is given while nothing was measured, in milliseconds.
    pub default_latency_ms: f64,
    /// What `open` reads. Only what is declared here is there to be read.
    pub variables: &'static [Variable],
    /// Opens it as configured, without any input or output: `run` connects.
    pub open: fn(&Env<'_>) -> Opened,
}

/// A carrier as configured; `None` where nothing configures it; else a sentence that names the variable that is wrong.
pub type Opened = Result<Option<Arc<dyn DynCarrier>>, String>;

/// A way to wake others. The fabric wraps deadlines, latency, breaker, metrics and the queue of signals around it.
///
/// Every method may be dropped at any await. Nothing that fails in here reaches a publisher.
pub trait Carrier: Send + Sync + 'static {
    /// How it stands now. Cheap, and reading it changes nothing.
    fn health(&self) -> Health;

    /// Sends these, once each, in as few round trips as it can. It waits for nothing but its own input and output, and
    /// fails at once where it is not connected.
    ///
    /// # Errors
    /// [`SignalError`] where any of them is not known to have been taken; some may have been.
    fn signal(&self, class: Class, signals: &[Signal]) -> impl Future<Output = Result<(), SignalError>> + Send;

    /// Asks the far side for any answer, so that an idle carrier has a latency too. The default asks nothing.
    ///
    /// # Errors
    /// [`SignalError`] where no answer came.
    fn probe(&self) -> impl Future<Output = Result<Probed, SignalError>> + Send {
        async { Ok(Probed::Nothing) }
    }

    /// Where it counts its operations itself, as its price unit means them. Without it, each signal that was taken is one.
    fn operations(&self) -> Option<&AtomicU64> {
        None
    }

    /// Keeps its connection and receives until `stop`, then lets go of everything it holds on the far side. It connects
    /// and reconnects by itself; one that returns earlier is run again. A carrier that only sends, without a connection
    /// to keep, has the default.
    ///
    /// What it hears goes to [`Inbound::offer`], or, where it acknowledges, to [`Inbound::handled`] before the
    /// acknowledgement.
    fn run(&self, inbound: Inbound, stop: CancellationToken) -> impl Future<Output = ()> + Send {
        async move {
            drop(inbound);
            stop.cancelled().await;
        }
    }
}

/// What a probe found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probed {
    /// The far side answered: the time it took is a sample.
    Answered,
    /// There is nothing to ask, so there is no sample.
    Nothing,
}

/// Why signals are not known to have been taken. No text in it holds an address or a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignalError {
    /// There is no connection.
    #[error("not connected")]
    NotConnected,
    /// The far side forbids it.
    #[error("permission denied")]
    Denied,
    /// The far side judges times, and its clock and ours differ.
    #[error("the clock of this machine and that of the queue differ: {0}")]
    Clock(String),
    /// The far side answered that it did not.
    #[error("refused: {0}")]
    Refused(String),
    /// The connection failed, or nobody answered in time.
    #[error("no answer: {0}")]
    Lost(String),
}

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// [`Carrier`] as an object. It is implemented once, for every carrier.
pub trait DynCarrier: Send + Sync + 'static {
    /// See [`Carrier::health`].
    fn health(&self) -> Health;
    /// See [`Carrier::signal`].
    fn signal<'a>(&'a self, class: Class, signals: &'a [Signal]) -> Boxed<'a, Result<(), SignalError>>;
    /// See [`Carrier::probe`].
    fn probe(&self) -> Boxed<'_, Result<Probed, SignalError>>;
    /// See [`Carrier::operations`].
    fn operations(&self) -> Option<&AtomicU64>;
    /// See [`Carrier::run`].
    fn run(&self, inbound: Inbound, stop: CancellationToken) -> Boxed<'_, ()>;
}

impl<C: Carrier> DynCarrier for C {
    fn health(&self) -> Health {
        Carrier::health(self)
    }

    fn signal<'a>(&'a self, class: Class, signals: &'a [Signal]) -> Boxed<'a, Result<(), SignalError>> {
        Box::pin(Carrier::signal(self, class, signals))
    }

    fn probe(&self) -> Boxed<'_, Result<Probed, SignalError>> {
        Box::pin(Carrier::probe(self))
    }

    fn operations(&self) -> Option<&AtomicU64> {
        Carrier::operations(self)
    }

    fn run(&self, inbound: Inbound, stop: CancellationToken) -> Boxed<'_, ()> {
        Box::pin(Carrier::run(self, inbound, stop))
    }
}
