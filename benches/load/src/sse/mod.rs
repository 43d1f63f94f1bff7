//! Fan-out of live streams: many open streams, one topic that all follow, and topics that few follow.

mod follow;
mod writer;

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::fault::Fault;
use crate::pace::Schedule;
use crate::requests::{event_id, payload};
use crate::service::Service;
use crate::sheet::Sheet;
use crate::watch::{Watch, Watched};
use crate::wire::Connection;

use follow::{Arrivals, Kind};

pub(crate) use writer::serve;

/// Streams that follow a narrow topic.
const FOLLOWERS: usize = 10;
/// Connections that publish to narrow topics; each answer is awaited before the next request.
const PUBLISHERS: usize = 4;
/// Streams opened at a time.
const OPENING: usize = 64;
/// How long the last frames may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is fanned out to whom.
#[derive(Debug, Clone)]
pub(crate) struct Fan {
    /// Open streams.
    pub(crate) connections: usize,
    /// Events a second to all of them.
    pub(crate) wide: f64,
    /// Events a second to ten of them.
    pub(crate) narrow: f64,
    /// How long.
    pub(crate) length: Duration,
    /// Bytes of each payload.
    pub(crate) payload_bytes: usize,
    /// The target writes frames that it is given, and is no service.
    pub(crate) writer: bool,
}

/// Opens the streams, publishes, waits for every frame, and tells what it took.
pub(crate) async fn run(service: &Service, fan: &Fan, watched: &[Watched]) -> Result<Sheet, Fault> {
    let mut sheet = Sheet::new(if fan.writer { "sse-writer" } else { "sse" });
    let run = format!("{:08x}", rand::random::<u32>());
    let count = |rate: f64| Schedule::new(Instant::now(), rate).count(fan.length);
    let (wide, narrow) = (count(fan.wide), count(fan.narrow));
    let arrivals = Arc::new(Arrivals::new(wide, narrow));

    let before_kb = rss_kb(watched);
    open_all(service, fan, &run, &arrivals).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    if let (Some(before), Some(after)) = (before_kb, rss_kb(watched)) {
        sheet.number("rss_kb_per_connection", (after - before) / fan.connections as f64);
    }

    let watch = Watch::start(watched);
    let start = Instant::now();
    let mut publishing = JoinSet::new();
    let narrow_topics = fan.connections / FOLLOWERS;
    let mut publish = |kind: Kind, rate: f64, events: u64, lanes: usize| {
        let schedule = Schedule::new(start, rate);
        for lane in 0..lanes {
            let publisher = Publisher {
                connection: Connection::new(service.address),
                host: service.host.clone(),
                token: service.signer.token("live")?,
                payload: payload(fan.payload_bytes),
                writer: fan.writer,
                arrivals: Arc::clone(&arrivals),
            };
            let (run, step) = (run.clone(), lanes as u64);
            publishing.spawn(async move {
                let mut publisher = publisher;
                for number in (lane as u64..events).step_by(step as usize) {
                    tokio::time::sleep_until(schedule.due(number).into()).await;
                    let topic = match kind {
                        Kind::Wide => wide_topic(&run),
                        Kind::Narrow => narrow_topic(&run, number as usize * 7919 % narrow_topics),
                    };
                    publisher.publish(kind, number, &topic).await?;
                }
                Ok::<_, Fault>(())
            });
        }
        Ok::<_, Fault>(())
    };
    publish(Kind::Wide, fan.wide, wide, 1)?;
    publish(Kind::Narrow, fan.narrow, narrow, PUBLISHERS)?;
    while let Some(done) = publishing.join_next().await {
        done.map_err(|error| Fault::Other(error.to_string()))??;
    }
    let frames = wide * fan.connections as u64 + narrow * FOLLOWERS as u64;
    let deadline = Instant::now() + PATIENCE;
    while arrivals.frames() < frames && Instant::now() < deadline {
        show("frames", arrivals.frames());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let elapsed = start.elapsed().as_secs_f64();

    sheet.count("connections", fan.connections as u64);
    sheet.count("frames", arrivals.frames());
    sheet.number("frames_per_s", arrivals.frames() as f64 / elapsed);
    sheet.latency("wide", &arrivals.latency(Kind::Wide, fan.connections));
    sheet.latency("narrow", &arrivals.latency(Kind::Narrow, FOLLOWERS));
    watch.finish(&mut sheet, arrivals.frames());
    sheet.must_be_zero("frames_missing", frames.saturating_sub(arrivals.frames()));
    sheet.must_be_zero("frames_too_many", arrivals.frames().saturating_sub(frames));
    Ok(sheet)
}

async fn open_all(service: &Service, fan: &Fan, run: &str, arrivals: &Arc<Arrivals>) -> Result<(), Fault> {
    let mut opening = JoinSet::new();
    for index in 0..fan.connections {
        if opening.len() >= OPENING {
            finished(opening.join_next().await)?;
        }
        let topics = format!("{},{}", wide_topic(run), narrow_topic(run, index / FOLLOWERS));
        opening.spawn(follow::open(
            service.address,
            service.host.clone(),
            topics,
            Arc::clone(arrivals),
        ));
        show("streams", index as u64);
    }
    while !opening.is_empty() {
        finished(opening.join_next().await)?;
    }
    Ok(())
}

/// Says how far it is, where somebody looks.
fn show(what: &str, count: u64) {
    let mut stderr = io::stderr();
    if stderr.is_terminal() && count.is_multiple_of(100) {
        let _ = write!(stderr, "\r{count} {what} ");
    }
}

fn finished(done: Option<Result<Result<(), Fault>, tokio::task::JoinError>>) -> Result<(), Fault> {
    match done {
        Some(Ok(opened)) => opened,
        Some(Err(error)) => Err(Fault::Other(error.to_string())),
        None => Ok(()),
    }
}

fn wide_topic(run: &str) -> String {
    format!("live.fan_{run}.all")
}

fn narrow_topic(run: &str, topic: usize) -> String {
    format!("live.fan_{run}.some_{topic}")
}

/// One connection that publishes.
struct Publisher {
    connection: Connection,
    host: String,
    token: String,
    payload: String,
    writer: bool,
    arrivals: Arc<Arrivals>,
}

impl Publisher {
    async fn publish(&mut self, kind: Kind, number: u64, topic: &str) -> Result<(), Fault> {
        let tagged = kind.tag(number);
        let event = format!(
            r#"{{"event_id":"{}","event_type":"{topic}","version":1,"source":"live","actor":{{"type":"service","id":"live"}},"timestamp":"2026-10-21T08:15:30Z","visibility":"public","subject":{{"type":"load","id":"1"}},"payload":{}}}"#,
            event_id(tagged),
            self.payload
        );
        let (path, body) = match self.writer {
            true => (
                format!("/frame?topic={topic}"),
                format!("id: c1.0.MTIzNDU2\ndata: {{\"event\":{event}}}\n\n"),
            ),
            false => ("/api/v1/events".to_owned(), event),
        };
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.host,
            self.token,
            body.len()
        );
        let answer = self.connection.exchange(request.as_bytes()).await;
        let (status, answer) = answer.map_err(|source| Fault::Wire {
            request: format!("POST {path}"),
            source,
        })?;
        if !(200..300).contains(&status) {
            return Err(Fault::Refused {
                request: format!("POST {path}"),
                status,
                body: String::from_utf8_lossy(answer).into_owned(),
            });
        }
        self.arrivals.committed(kind, number, Instant::now());
        Ok(())
    }
}

/// Resident memory of the first process that is watched, in KiB.
fn rss_kb(watched: &[Watched]) -> Option<f64> {
    watched.first()?.rss_mb().map(|mb| mb * 1024.0)
}
