//! The modes: what each sets up, measures and writes down.

use std::net::Ipv4Addr;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::process::Command;

use crate::account::{Account, Standing};
use crate::company::{Company, Trouble};
use crate::fault::Fault;
use crate::kinds::{Kind, Types, ordered};
use crate::ledger::Order;
use crate::percentiles::Latency;
use crate::progress::Progress;
use crate::publisher::{Load, Tally, per_s};
use crate::receiver::Receiver;
use crate::relay;
use crate::requests::{SOURCE, Shape};
use crate::service::{Service, Subscription};
use crate::sheet::Sheet;
use crate::watch::{Watch, Watched};

/// Between two looks at the account while a backlog empties.
const LOOK: Duration = Duration::from_millis(5);

/// What every publish load is made of.
#[derive(Debug, Clone)]
pub(crate) struct Publishing {
    /// Connections.
    pub(crate) connections: usize,
    /// How long.
    pub(crate) length: Duration,
    /// Ends earlier after so many events.
    pub(crate) events: Option<u64>,
    /// Events in one request.
    pub(crate) batch: usize,
    /// Bytes of each payload.
    pub(crate) payload_bytes: usize,
    /// Requests a second; closed loop without.
    pub(crate) rate: Option<f64>,
    /// Keys whose order is promised and checked; 0: none.
    pub(crate) keys: usize,
}

/// What every run with a receiver is made of.
#[derive(Debug, Clone)]
pub(crate) struct Receiving {
    /// Subscriptions, each of a consumer of its own.
    pub(crate) subscriptions: usize,
    /// Their `max_inflight`.
    pub(crate) max_inflight: u8,
    /// Every so many signatures one is checked; 0: none.
    pub(crate) check_every: u64,
    /// How long nothing may arrive before the rest counts as lost.
    pub(crate) patience: Duration,
    /// The kinds of work that are published; none: a type without a policy, or with that of its keys.
    pub(crate) kinds: Vec<Kind>,
}

impl Publishing {
    async fn run(&self, service: &Service, types: &Types, account: &Arc<Account>) -> Result<Tally, Fault> {
        let token = service.signer.token(SOURCE)?;
        let shape = |event_type| Shape {
            host: &service.host,
            token: &token,
            event_type,
            batch: self.batch,
            payload_bytes: self.payload_bytes,
        };
        let load = Load {
            address: service.address,
            shapes: types.all.iter().map(|one| shape(one)).collect(),
            connections: self.connections,
            keys: self.keys,
            length: self.length,
            events: self.events,
            rate: self.rate,
        };
        load.run(account).await
    }
}

/// Publishes to nobody.
pub(crate) async fn publish(
    service: &Service,
    publishing: &Publishing,
    warm_up: Duration,
    watched: &[Watched],
) -> Result<Sheet, Fault> {
    let types = Types::fresh(&[]);
    if !warm_up.is_zero() {
        let warming = Publishing {
            length: warm_up,
            events: None,
            ..publishing.clone()
        };
        let account = Arc::new(Account::new(0, Order::Free));
        warming.run(service, &types, &account).await?;
    }
    let account = Arc::new(Account::new(0, Order::Free));
    let progress = Progress::of(&account);
    let watch = Watch::start(watched);
    let tally = publishing.run(service, &types, &account).await?;
    drop(progress);
    let mut sheet = Sheet::new("publish");
    describe(&mut sheet, publishing);
    tally.write(&mut sheet);
    watch.finish(&mut sheet, tally.events);
    Ok(sheet)
}

/// Publishes to subscriptions and waits until everything has arrived.
pub(crate) async fn deliver(
    mode: &str,
    service: &Service,
    publishing: &Publishing,
    receiving: &Receiving,
    watched: &[Watched],
) -> Result<Sheet, Fault> {
    let run = Run::prepare(service, publishing, receiving).await?;
    run.deliver(mode, service, publishing, receiving, watched).await
}

/// As [`deliver`], while subscriptions to the same events lead to endpoints in trouble. Those are not waited for.
pub(crate) async fn fair(
    service: &Service,
    publishing: &Publishing,
    receiving: &Receiving,
    troubles: &[Trouble],
    watched: &[Watched],
) -> Result<Sheet, Fault> {
    let run = Run::prepare(service, publishing, receiving).await?;
    let company = Company::start(troubles).await?;
    let (beside, _secrets) = service
        .subscribe_endpoints(company.endpoints(), &run.types.pattern, receiving.max_inflight)
        .await?;
    let mut sheet = run.deliver("fair", service, publishing, receiving, watched).await?;
    sheet.count("beside", troubles.len() as u64);
    company.write(&mut sheet);
    service.unsubscribe(&beside).await?;
    Ok(sheet)
}

/// Fills a backlog on a service that delivers nothing, then lets another process deliver it.
pub(crate) async fn drain(
    service: &Service,
    publishing: &Publishing,
    receiving: &Receiving,
    worker: &str,
    watched: &[Watched],
) -> Result<Sheet, Fault> {
    let run = Run::prepare(service, publishing, receiving).await?;
    let progress = Progress::of(&run.account);
    let tally = publishing.run(service, &run.types, &run.account).await?;
    let filled = run.account.standing();
    if filled.arrived > 0 {
        return Err(Fault::Other(
            "deliveries arrived while the backlog was filled: start that service with EVENTS_WORKER=off".to_owned(),
        ));
    }
    let mut command = Command::new("sh");
    command
        .args(["-c", worker])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    let mut child = command.spawn().map_err(|source| Fault::Io {
        what: "the worker command",
        source,
    })?;
    let mut watched = watched.to_vec();
    watched.extend(child.id().map(|pid| Watched::new("worker", pid)));
    let began = loop {
        tokio::time::sleep(Duration::from_micros(500)).await;
        if let Some(first) = run.account.standing().first {
            break first;
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(Fault::Other(format!(
                "the worker command ended before it delivered: {status}"
            )));
        }
    };
    let watch = Watch::start(&watched);
    let end = wait_until_empty(&run.account, receiving.patience).await;
    drop(progress);
    let whole = end.last.unwrap_or(began).duration_since(began);
    let mut sheet = Sheet::new("drain");
    run.describe(&mut sheet, receiving);
    tally.write(&mut sheet);
    sheet.count("backlog", filled.waiting);
    sheet.count("delivered", end.arrived);
    sheet.number("delivered_in_s", whole.as_secs_f64());
    sheet.number("delivered_per_s", per_s(end.arrived, whole));
    watch.finish(&mut sheet, end.arrived);
    run.finish(service, &mut sheet).await?;
    let _ = child.kill().await;
    Ok(sheet)
}

/// Reads the whole log in pages.
pub(crate) async fn pull(service: &Service, limit: u32, watched: &[Watched]) -> Result<Sheet, Fault> {
    let token = service.signer.token(SOURCE)?;
    let mut connection = crate::wire::Connection::new(service.address);
    let (mut after, mut rows, mut bytes, mut pages) = (String::new(), 0_u64, 0_u64, 0_u64);
    let mut latency = Latency::new();
    let watch = Watch::start(watched);
    let start = Instant::now();
    loop {
        let path = format!("/api/v1/events?limit={limit}{after}");
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {token}\r\n\r\n",
            service.host
        );
        let sent = Instant::now();
        let (status, body) = connection
            .exchange(request.as_bytes())
            .await
            .map_err(|source| Fault::Wire {
                request: format!("GET {path}"),
                source,
            })?;
        if status != 200 {
            return Err(Fault::Refused {
                request: format!("GET {path}"),
                status,
                body: String::from_utf8_lossy(body).into_owned(),
            });
        }
        latency.record(sent.elapsed());
        let found = count(body, br#"{"cursor":""#);
        if found == 0 {
            break;
        }
        let next =
            member(body, br#""next_cursor":""#).ok_or_else(|| Fault::Other("a page without next_cursor".to_owned()))?;
        after = format!("&after={next}");
        rows += found;
        bytes += body.len() as u64;
        pages += 1;
    }
    let elapsed = start.elapsed();
    let mut sheet = Sheet::new("pull");
    sheet.count("rows", rows);
    sheet.count("pages", pages);
    sheet.number("elapsed_s", elapsed.as_secs_f64());
    sheet.number("rows_per_s", per_s(rows, elapsed));
    sheet.number("mb_per_s", per_s(bytes, elapsed) / 1e6);
    sheet.latency("page", &latency);
    watch.finish(&mut sheet, rows);
    Ok(sheet)
}

/// Publishes through a relay that stores nothing: what HTTP in and HTTP out cost by themselves.
pub(crate) async fn floor(publishing: &Publishing, patience: Duration) -> Result<Sheet, Fault> {
    let account = Arc::new(Account::new(1, Order::Free));
    let receiver = Receiver::start(&account, 0).await?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.and_then(TcpListener::into_std).map_err(|source| Fault::Io {
        what: "the relay cannot listen",
        source,
    })?;
    let address = listener.local_addr().map_err(|source| Fault::Io {
        what: "the relay has no address",
        source,
    })?;
    relay::start(listener, receiver.address());
    let load = Load {
        address,
        shapes: vec![Shape {
            host: "relay",
            token: "none",
            event_type: "live.load.happened",
            batch: 1,
            payload_bytes: publishing.payload_bytes,
        }],
        connections: publishing.connections,
        keys: 0,
        length: publishing.length,
        events: publishing.events,
        rate: publishing.rate,
    };
    let progress = Progress::of(&account);
    let tally = load.run(&account).await?;
    let end = wait_until_empty(&account, patience).await;
    drop(progress);
    let mut sheet = Sheet::new("floor");
    describe(&mut sheet, publishing);
    tally.write(&mut sheet);
    sheet.count("delivered", end.arrived);
    sheet.latency("received", &account.latency());
    sheet.must_be_zero("lost", account.balance().missing);
    Ok(sheet)
}

/// A receiver and the subscriptions that lead to it.
struct Run {
    account: Arc<Account>,
    receiver: Receiver,
    types: Types,
    subscriptions: Vec<Subscription>,
    order: Order,
}

impl Run {
    /// Publishes, and waits until everything has arrived.
    async fn deliver(
        &self,
        mode: &str,
        service: &Service,
        publishing: &Publishing,
        receiving: &Receiving,
        watched: &[Watched],
    ) -> Result<Sheet, Fault> {
        let progress = Progress::of(&self.account);
        let watch = Watch::start(watched);
        let start = Instant::now();
        let tally = publishing.run(service, &self.types, &self.account).await?;
        let backlog = self.account.standing().waiting;
        let end = wait_until_empty(&self.account, receiving.patience).await;
        drop(progress);
        let mut sheet = Sheet::new(mode);
        describe(&mut sheet, publishing);
        self.describe(&mut sheet, receiving);
        tally.write(&mut sheet);
        let whole = end
            .last
            .unwrap_or(start)
            .max(start + tally.elapsed)
            .duration_since(start);
        sheet.count("delivered", end.arrived);
        sheet.number("delivered_per_s", per_s(end.arrived, whole));
        sheet.number("delivered_in_s", whole.as_secs_f64());
        sheet.count("backlog_when_published", backlog);
        sheet.latency("received", &self.account.latency());
        watch.finish(&mut sheet, end.arrived);
        self.finish(service, &mut sheet).await?;
        Ok(sheet)
    }

    async fn prepare(service: &Service, publishing: &Publishing, receiving: &Receiving) -> Result<Self, Fault> {
        let order = if publishing.keys > 0 {
            Order::PerKey
        } else {
            Order::Free
        };
        let account = Arc::new(Account::new(receiving.subscriptions, order));
        let receiver = Receiver::start(&account, receiving.check_every).await?;
        let types = Types::fresh(&receiving.kinds);
        if order == Order::PerKey {
            service.put_policy(&types.pattern, ordered()).await?;
        }
        types.announce(service).await?;
        let subscriptions = service
            .subscribe(
                &receiver,
                &types.pattern,
                receiving.subscriptions,
                receiving.max_inflight,
            )
            .await?;
        Ok(Self {
            account,
            receiver,
            types,
            subscriptions,
            order,
        })
    }

    fn describe(&self, sheet: &mut Sheet, receiving: &Receiving) {
        sheet.count("subscriptions", receiving.subscriptions as u64);
        sheet.count("max_inflight", receiving.max_inflight.into());
        let order = match self.order {
            Order::PerKey => "per key",
            Order::Free => "not promised, not checked",
        };
        sheet.text("order", order);
    }

    /// Judges the account and lets the service forget the run.
    async fn finish(&self, service: &Service, sheet: &mut Sheet) -> Result<(), Fault> {
        let balance = self.account.balance();
        sheet.count("owed", balance.owed);
        sheet.must_be_zero("lost", balance.missing);
        // At least once is what is promised: a repeat is a cost, and no fault.
        sheet.count("repeats", balance.repeats);
        sheet.must_be_zero("order_faults", balance.order_faults);
        sheet.must_be_zero("strangers", balance.strangers);
        self.receiver.write(sheet);
        self.types.write(service, sheet).await?;
        sheet.count("unfinished_in_store", service.unfinished().await?);
        service.unsubscribe(&self.subscriptions).await
    }
}

fn describe(sheet: &mut Sheet, publishing: &Publishing) {
    match publishing.rate {
        None => sheet.text("loop", "closed"),
        Some(rate) => {
            sheet.text("loop", "open");
            sheet.number("rate_per_s", rate);
        }
    }
    sheet.count("connections", publishing.connections as u64);
    sheet.count("batch", publishing.batch as u64);
    sheet.count("payload_bytes", publishing.payload_bytes as u64);
}

/// Waits until nothing is owed, or nothing has arrived for as long as `patience`.
async fn wait_until_empty(account: &Account, patience: Duration) -> Standing {
    let mut arrived = account.standing().arrived;
    let mut since = Instant::now();
    loop {
        let standing = account.standing();
        if standing.waiting == 0 || since.elapsed() > patience {
            return standing;
        }
        if standing.arrived > arrived {
            arrived = standing.arrived;
            since = Instant::now();
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// How often `what` is in `text`.
fn count(text: &[u8], what: &[u8]) -> u64 {
    let first = what[0];
    let mut found = 0;
    let mut rest = text;
    while let Some(at) = rest.iter().position(|&byte| byte == first) {
        rest = &rest[at..];
        if rest.starts_with(what) {
            found += 1;
            rest = &rest[what.len()..];
        } else {
            rest = &rest[1..];
        }
    }
    found
}

/// The text behind the last `name`, up to its quotation mark.
fn member<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a str> {
    let at = text.windows(name.len()).rposition(|window| window == name)? + name.len();
    let rest = &text[at..];
    let end = rest.iter().position(|&byte| byte == b'"')?;
    str::from_utf8(&rest[..end]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_counted_without_being_parsed() {
        let page = br#"{"events":[{"cursor":"c1.0.MQ","event":{}},{"cursor":"c1.0.Mg","event":{}}],"next_cursor":"c1.0.Mg","latest_cursor":"c1.0.Mw"}"#;
        assert_eq!(count(page, br#"{"cursor":""#), 2);
        assert_eq!(member(page, br#""next_cursor":""#), Some("c1.0.Mg"));
        assert_eq!(member(b"{}", br#""next_cursor":""#), None);
    }

    #[tokio::test]
    async fn waiting_gives_up_when_nothing_arrives() {
        let account = Account::new(1, Order::Free);
        let first = account.sending(1, 0, Instant::now());
        account.stored(first, 1);
        let standing = wait_until_empty(&account, Duration::from_millis(30)).await;
        assert_eq!(standing.waiting, 1);
    }
}
