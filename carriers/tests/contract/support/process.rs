//! A process that uses a carrier: what it hears is kept.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use carriers::{Arrivals, Class, Descriptor, DynCarrier, Env, Health, Heard, Opened, Signal, SignalError, channel};
use parking_lot::Mutex;
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use super::wait::{SOON, eventually, within};

/// What carriers are told, by name.
pub(crate) type Variables = BTreeMap<&'static str, String>;

/// The wall clock; tests of clocks have their own.
#[expect(clippy::disallowed_methods, reason = "what a carrier is handed")]
pub(crate) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Opens a carrier as one more process would.
pub(crate) fn open(
    descriptor: &Descriptor,
    variables: &Variables,
    instance: &str,
    clock: fn() -> SystemTime,
) -> Opened {
    open_as(descriptor, variables, instance, clock, true)
}

fn open_as(
    descriptor: &Descriptor,
    variables: &Variables,
    instance: &str,
    clock: fn() -> SystemTime,
    consumes: bool,
) -> Opened {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider's versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    // As in the service: what is not declared is not there. The database is the service's own.
    let declared =
        |name: &str| name.starts_with("DATABASE_") || descriptor.variables.iter().any(|variable| variable.name == name);
    (descriptor.open)(&Env {
        variables: &|name| variables.get(name).filter(|_| declared(name)).cloned(),
        instance,
        consumes,
        tls: &tls,
        clock,
    })
}

/// A name that no other process of this run has.
pub(crate) fn new_instance() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed))
}

/// One process.
pub(crate) struct Process {
    pub(crate) carrier: Arc<dyn DynCarrier>,
    pub(crate) heard: Arc<Mutex<Vec<Heard>>>,
    running: Option<(CancellationToken, JoinHandle<()>)>,
}

impl Process {
    /// A process that runs the carrier and takes whatever it hears at once.
    pub(crate) fn start(descriptor: &Descriptor, variables: &Variables) -> Self {
        let mut process = Self::open(descriptor, variables);
        process.run();
        process
    }

    /// A process that publishes and sends no webhook: it takes no wake-ups meant for one of several.
    pub(crate) fn publisher(descriptor: &Descriptor, variables: &Variables) -> Self {
        let opened = open_as(descriptor, variables, &new_instance(), wall_clock, false);
        let mut process = Self {
            carrier: opened.expect("good variables").expect("configured"),
            heard: Arc::default(),
            running: None,
        };
        process.run();
        process
    }

    /// A process that has opened the carrier and does not run it.
    pub(crate) fn open(descriptor: &Descriptor, variables: &Variables) -> Self {
        let carrier = open(descriptor, variables, &new_instance(), wall_clock)
            .expect("good variables")
            .expect("configured");
        Self {
            carrier,
            heard: Arc::default(),
            running: None,
        }
    }

    /// Runs the carrier.
    pub(crate) fn run(&mut self) {
        let (inbound, mut arrivals) = channel(1024);
        let (stop, heard) = (CancellationToken::new(), Arc::clone(&self.heard));
        tokio::spawn(async move {
            while let Some(arrival) = arrivals.next().await {
                heard.lock().push(arrival.heard.clone());
            }
        });
        let (carrier, stopped) = (Arc::clone(&self.carrier), stop.clone());
        let task = tokio::spawn(async move { carrier.run(inbound, stopped).await });
        self.running = Some((stop, task));
    }

    /// Runs the carrier with a way in that nobody empties.
    pub(crate) fn run_unheard(&mut self, capacity: usize) -> Arrivals {
        let (inbound, arrivals) = channel(capacity);
        let stop = CancellationToken::new();
        let (carrier, stopped) = (Arc::clone(&self.carrier), stop.clone());
        let task = tokio::spawn(async move { carrier.run(inbound, stopped).await });
        self.running = Some((stop, task));
        arrivals
    }

    /// Waits until the carrier stands like this.
    #[track_caller]
    pub(crate) fn stands(&self, wanted: Health, deadline: Duration) -> impl Future<Output = ()> {
        let what = format!("{wanted:?}");
        let carrier = Arc::clone(&self.carrier);
        eventually("the carrier's health", deadline, async move || match carrier.health() {
            health if health == wanted => Ok(()),
            health => Err(format!("{health:?} instead of {what}")),
        })
    }

    /// Sends as the fabric does, with its longest deadline.
    pub(crate) async fn send(&self, class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        match timeout(Duration::from_secs(3), self.carrier.signal(class, signals)).await {
            Ok(sent) => sent,
            Err(_) => Err(SignalError::Lost("the deadline of the fabric".into())),
        }
    }

    /// The signals heard so far.
    pub(crate) fn signals(&self) -> Vec<Signal> {
        let heard = self.heard.lock();
        let signals = heard.iter().filter_map(|heard| match heard {
            Heard::Signals(signals) => Some(signals.clone()),
            Heard::Everything => None,
        });
        signals.flatten().collect()
    }

    /// Whether `run` still runs.
    pub(crate) fn runs(&self) -> bool {
        self.running.as_ref().is_some_and(|(_, task)| !task.is_finished())
    }

    /// Tells `run` to stop, and fails where it does not at once.
    pub(crate) async fn stop(&mut self) {
        let (stop, task) = self.running.take().expect("it runs");
        stop.cancel();
        within("run stops when told", Duration::from_secs(3), task)
            .await
            .expect("run does not panic");
    }

    /// Sends signals until one is heard by any of these: it works again.
    pub(crate) async fn reaches_any(&self, others: &[&Self], class: Class) {
        eventually("a signal is heard", SOON, async || {
            let signal = unique(class);
            let sent = self.send(class, std::slice::from_ref(&signal)).await;
            let arrived = async || {
                while !others.iter().any(|other| other.signals().contains(&signal)) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            match timeout(Duration::from_secs(1), arrived()).await {
                Ok(()) => Ok(()),
                Err(_) => Err(format!("{signal:?} was sent ({sent:?}) and not heard")),
            }
        })
        .await;
    }
}

/// A signal that nobody has sent yet, as the fabric would send it in this class.
pub(crate) fn unique(class: Class) -> Signal {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Relaxed);
    Signal {
        event_id: format!("evt_{}{n:08}", std::process::id()),
        subscription_id: (class != Class::Topic || n.is_multiple_of(2)).then(|| format!("sub_{n}")),
    }
}
