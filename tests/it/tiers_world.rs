//! What the tests of tiers and of the archive share: events of any age, a prune from end to end, and what a reader sees.

use openvibe_events::{
    domain::{cursor::Cursor, time::Millis},
    store::{Aged, Store},
};

use crate::store_fixture::{Fixture, pull};

pub(crate) const DAY_MS: i64 = 86_400_000;
/// The age at which events of these tests leave the hot store.
pub(crate) const HOT_MS: i64 = 30 * DAY_MS;

/// Makes the events at these positions as old as that.
pub(crate) async fn age(fixture: &Fixture, positions: &[i64], days: i64) {
    let ids = positions.iter().map(i64::to_string).collect::<Vec<_>>().join(",");
    fixture
        .sql(&format!(
            "UPDATE events SET received_at = now_ms() - {days} * 86400000::bigint WHERE seq IN ({ids})"
        ))
        .await;
}

/// Moves everything that is old enough to the replay tier; answers how many events that were.
pub(crate) async fn move_all(store: &Store) -> u64 {
    let (mut moved, mut from) = (0, Aged::FIRST);
    loop {
        let batch = store.move_to_replay(HOT_MS, from).await.expect("a batch");
        moved += batch.events;
        from = match batch.next {
            _ if batch.expired > 0 => from,
            Some(next) => next,
            None => return moved,
        };
    }
}

/// Where a reader stands that walks in pages of `limit` from a position to the head, every event it saw, and every gap it was
/// told of, as positions `(from, to)`.
pub(crate) async fn walk(store: &Store, after: i64, topic: &str, limit: i64) -> (Vec<i64>, Vec<(i64, i64)>) {
    let (mut at, mut seen, mut gaps) = (after, Vec::new(), Vec::new());
    loop {
        let cursor = Cursor { epoch: 0, position: at };
        let page = pull(store, Some(cursor), topic, limit).await;
        if at < page.positions.floor {
            gaps.push((at + 1, page.positions.floor));
        }
        seen.extend(page.events.iter().map(|event| event.cursor.position));
        at = page.examined.max(at);
        if at >= page.positions.head {
            return (seen, gaps);
        }
    }
}

/// A moment in a month that ended long ago: 2024-`month`-10.
pub(crate) fn in_month(month: u8) -> i64 {
    let text = format!("2024-{month:02}-10T12:00:00Z");
    openvibe_events::domain::time::parse_rfc3339(&text).map_or(0, |Millis(at)| at)
}

/// How many rows a table has.
pub(crate) async fn rows(fixture: &Fixture, table: &str) -> i64 {
    fixture.number(&format!("SELECT count(*) FROM {table}")).await
}
