//! The stream that processes share: each entry goes to one of them, is acknowledged when it was handed over, and is gone.

use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value, cmd, pipe};
use tokio::time::timeout;

use super::answered;
use super::connection::Failure;
use crate::signal::distinct;
use crate::{Inbound, Signal};

/// The group that all processes are in.
const GROUP: &str = "workers";

/// Roughly how many entries the stream holds at most. The oldest go first: nobody has wanted them for long.
const ENTRIES_MAX: usize = 100_000;

/// Entries taken at a time.
const TAKE: usize = 100;

/// How long a read waits for an entry, in milliseconds.
const BLOCK_MS: u64 = 5000;

/// A read that took this much longer than it was to wait will never end.
const READ: Duration = Duration::from_millis(BLOCK_MS + 2000);

/// Between two looks for entries that another process took and never acknowledged.
const RECLAIM_EVERY: Duration = Duration::from_secs(30);

/// An entry that was taken so long ago is anybody's, in milliseconds.
const RECLAIM_IDLE_MS: u64 = 60_000;

/// Entries reclaimed in one look: rounds of [`TAKE`].
const RECLAIM_ROUNDS: usize = 100;

/// A member of the group that has asked for nothing for so long is dead, in milliseconds.
const DEAD_IDLE_MS: i64 = 600_000;

/// Names of the stream and of this process in it.
pub(super) struct Queue {
    stream: String,
    consumer: String,
}

/// An entry of the stream: its id, and what it says where it is a signal.
type Entry = (Vec<u8>, Option<Signal>);

impl Queue {
    /// The stream under this prefix, for this process.
    pub(super) fn new(prefix: &str, instance: &str) -> Self {
        Self {
            stream: format!("{prefix}q:fabric.queue"),
            consumer: instance.to_owned(),
        }
    }

    /// Adds the signals.
    pub(super) fn add(&self, pipeline: &mut Pipeline, signals: &[Signal]) {
        for signal in distinct(signals) {
            // `a` and `m` are how often it was tried and may be, for readers of other makes; here nothing is tried again.
            let entry = pipeline
                .cmd("XADD")
                .arg(&self.stream)
                .arg("MAXLEN")
                .arg("~")
                .arg(ENTRIES_MAX)
                .arg("*");
            entry
                .arg("d")
                .arg(signal.to_json())
                .arg("a")
                .arg(1)
                .arg("m")
                .arg(5)
                .ignore();
        }
    }

    /// May entries be added? Rights are judged before the arguments, so an id that is none is refused either way, and
    /// nothing is added.
    pub(super) async fn check(&self, connection: &mut MultiplexedConnection) -> Result<(), Failure> {
        let mut add = cmd("XADD");
        add.arg(&self.stream).arg("NOMKSTREAM").arg("none").arg("d").arg("");
        match answered(add.query_async::<()>(connection)).await {
            Err(Failure::Refused(_)) => Ok(()),
            done => done,
        }
    }

    /// Sees to it that the stream and its group exist. Those that do stay as they are.
    pub(super) async fn ensure(&self, connection: &mut MultiplexedConnection) -> Result<(), Failure> {
        let mut create = cmd("XGROUP");
        create
            .arg("CREATE")
            .arg(&self.stream)
            .arg(GROUP)
            .arg("0")
            .arg("MKSTREAM");
        match answered(create.query_async::<()>(connection)).await {
            Err(Failure::Refused(text)) if text.starts_with("BUSYGROUP") => Ok(()),
            done => done,
        }
    }

    /// Takes entries, hands them over and acknowledges them, until something fails.
    pub(super) async fn consume(
        &self,
        mut connection: MultiplexedConnection,
        inbound: &Inbound,
    ) -> Result<std::convert::Infallible, Failure> {
        let mut read = cmd("XREADGROUP");
        read.arg("GROUP").arg(GROUP).arg(&self.consumer).arg("COUNT").arg(TAKE);
        read.arg("BLOCK")
            .arg(BLOCK_MS)
            .arg("STREAMS")
            .arg(&self.stream)
            .arg(">");
        let mut reclaimed: Option<Instant> = None;
        loop {
            if reclaimed.is_none_or(|at| at.elapsed() >= RECLAIM_EVERY) {
                match self.reclaim(&mut connection, inbound).await {
                    Err(failure) if self.is_gone(&failure) => self.again(&mut connection).await?,
                    done => done?,
                }
                reclaimed = Some(Instant::now());
            }
            match ask(&read, &mut connection).await {
                Ok(reply) => self.take(&mut connection, inbound, entries_read(reply)).await?,
                Err(failure) if self.is_gone(&failure) => self.again(&mut connection).await?,
                Err(failure) => return Err(failure),
            }
        }
    }

    /// The group, or the stream with it, was removed: by a flush, by an operator, or by a server that kept nothing.
    fn is_gone(&self, failure: &Failure) -> bool {
        matches!(failure, Failure::Refused(text) if text.starts_with("NOGROUP") || text.starts_with("UNBLOCKED"))
    }

    /// Makes the group again, without haste: whoever removes it might go on doing so.
    async fn again(&self, connection: &mut MultiplexedConnection) -> Result<(), Failure> {
        tracing::warn!("valkey-v1: the group {GROUP} of {} was gone", self.stream);
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.ensure(connection).await
    }

    async fn take(
        &self,
        connection: &mut MultiplexedConnection,
        inbound: &Inbound,
        entries: Vec<Entry>,
    ) -> Result<(), Failure> {
        if entries.is_empty() {
            return Ok(());
        }
        let (ids, signals): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
        signals
            .iter()
            .filter(|signal| signal.is_none())
            .for_each(|_| inbound.ignore());
        inbound.handled(signals.into_iter().flatten().collect()).await;
        // No transaction: a refusal of one of them would hide behind that of the whole.
        let mut pipeline = pipe();
        pipeline.cmd("XACK").arg(&self.stream).arg(GROUP).arg(&ids).ignore();
        pipeline.cmd("XDEL").arg(&self.stream).arg(&ids).ignore();
        answered(pipeline.query_async::<()>(connection)).await
    }

    /// Takes over what processes that are no more have left, and removes these from the group.
    async fn reclaim(&self, connection: &mut MultiplexedConnection, inbound: &Inbound) -> Result<(), Failure> {
        let mut cursor = b"0-0".to_vec();
        for _ in 0..RECLAIM_ROUNDS {
            let mut claim = cmd("XAUTOCLAIM");
            claim
                .arg(&self.stream)
                .arg(GROUP)
                .arg(&self.consumer)
                .arg(RECLAIM_IDLE_MS);
            claim.arg(&cursor).arg("COUNT").arg(TAKE);
            let (next, entries) = entries_claimed(ask(&claim, connection).await?);
            self.take(connection, inbound, entries).await?;
            if next == b"0-0" {
                break;
            }
            cursor = next;
        }
        for (name, _) in self.members(connection).await?.into_iter().filter(|(name, member)| {
            *name != self.consumer.as_bytes() && member.pending == 0 && member.idle_ms > DEAD_IDLE_MS
        }) {
            self.remove(connection, &name).await?;
        }
        Ok(())
    }

    /// Leaves the group, unless entries are still in this process's name: those are reclaimed by others.
    pub(super) async fn leave(&self, connection: &mut MultiplexedConnection) -> Result<(), Failure> {
        let members = self.members(connection).await?;
        let own = members.iter().find(|(name, _)| *name == self.consumer.as_bytes());
        match own {
            Some((name, member)) if member.pending == 0 => self.remove(connection, name).await,
            _ => Ok(()),
        }
    }

    async fn members(&self, connection: &mut MultiplexedConnection) -> Result<Vec<(Vec<u8>, Member)>, Failure> {
        let mut list = cmd("XINFO");
        list.arg("CONSUMERS").arg(&self.stream).arg(GROUP);
        Ok(elements(ask(&list, connection).await?)
            .into_iter()
            .filter_map(member)
            .collect())
    }

    async fn remove(&self, connection: &mut MultiplexedConnection, name: &[u8]) -> Result<(), Failure> {
        let mut remove = cmd("XGROUP");
        remove.arg("DELCONSUMER").arg(&self.stream).arg(GROUP).arg(name);
        ask(&remove, connection).await.map(drop)
    }
}

/// A member of the group.
#[derive(Debug, Default, PartialEq, Eq)]
struct Member {
    pending: i64,
    idle_ms: i64,
}

/// Commands of the waiting connection have this deadline only: one of them waits at the server.
async fn ask(command: &Cmd, connection: &mut MultiplexedConnection) -> Result<Value, Failure> {
    match timeout(READ, command.query_async::<Value>(connection)).await {
        Ok(reply) => Ok(reply?),
        Err(_) => Err(Failure::Lost(format!("no answer within {READ:?}"))),
    }
}

// Replies are read by hand: an entry may hold any bytes, even as the names of its fields, and must not spoil its neighbours.

fn elements(value: Value) -> Vec<Value> {
    match value {
        Value::Array(elements) => elements,
        // The same list, where the connection speaks the newer protocol.
        Value::Map(pairs) => pairs.into_iter().flat_map(|(name, value)| [name, value]).collect(),
        _ => Vec::new(),
    }
}

fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        _ => None,
    }
}

/// The entries in `[[stream, [entry…]]…]`.
fn entries_read(reply: Value) -> Vec<Entry> {
    let streams = elements(reply)
        .into_iter()
        .filter_map(|stream| elements(stream).into_iter().nth(1));
    streams.flat_map(elements).filter_map(entry).collect()
}

/// The next cursor and the entries in `[cursor, [entry…], [deleted…]]`.
fn entries_claimed(reply: Value) -> (Vec<u8>, Vec<Entry>) {
    let mut parts = elements(reply).into_iter();
    let cursor = parts.next().and_then(bytes).unwrap_or_else(|| b"0-0".to_vec());
    let entries = parts.next().map(elements).unwrap_or_default();
    (cursor, entries.into_iter().filter_map(entry).collect())
}

/// `[id, [name, value…]]`; the fields are missing where the entry was deleted meanwhile.
fn entry(value: Value) -> Option<Entry> {
    let mut parts = elements(value).into_iter();
    let id = parts.next().and_then(bytes)?;
    let mut fields = parts.next().map(elements).unwrap_or_default().into_iter();
    while let (Some(name), Some(value)) = (fields.next(), fields.next()) {
        if let (Some(b"d"), Value::BulkString(message)) = (bytes(name).as_deref(), value) {
            return Some((id, Signal::from_json(&message)));
        }
    }
    Some((id, None))
}

/// `[name, …, pending, …, idle, …]`, by names.
fn member(value: Value) -> Option<(Vec<u8>, Member)> {
    let mut fields = elements(value).into_iter();
    let (mut name, mut member) = (None, Member::default());
    while let (Some(field), Some(value)) = (fields.next(), fields.next()) {
        match (bytes(field).as_deref(), value) {
            (Some(b"name"), value) => name = bytes(value),
            (Some(b"pending"), Value::Int(pending)) => member.pending = pending,
            (Some(b"idle"), Value::Int(idle)) => member.idle_ms = idle,
            _ => {}
        }
    }
    Some((name?, member))
}
