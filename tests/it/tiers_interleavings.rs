//! Publishes, prunes, pulls and resumes in any order: a reader sees each event once, or is told what it cannot see.

use std::{collections::BTreeSet, sync::Arc};

use openvibe_events::{
    domain::cursor::Cursor,
    store::{Aged, SharedStore},
};

use crate::{
    store_fixture::{Fixture, events_of, pull, put},
    support::dice::Dice,
    tiers_world::{DAY_MS, HOT_MS},
};

/// A reader and what it knows.
#[derive(Default)]
struct Reader {
    at: i64,
    seen: BTreeSet<i64>,
    told: Vec<(i64, i64)>,
}

impl Reader {
    /// Reads one page by the rules of the wire.
    async fn read(&mut self, store: &SharedStore, topic: &str, limit: usize) {
        let cursor = Cursor {
            epoch: 0,
            position: self.at,
        };
        let page = pull(store, Some(cursor), topic, i64::try_from(limit).expect("small")).await;
        assert!(
            self.at <= page.positions.head,
            "the head never steps back behind a reader"
        );
        if self.at < page.positions.floor {
            self.told.push((self.at + 1, page.positions.floor));
        }
        for event in page.events {
            assert!(
                self.seen.insert(event.cursor.position),
                "{} was seen twice",
                event.cursor.position
            );
        }
        self.at = page.examined.max(self.at).max(page.positions.floor);
    }

    fn missed(&self, all: &[i64]) -> Vec<i64> {
        let told = |seq: &i64| self.told.iter().any(|(from, to)| (from..=to).contains(&seq));
        all.iter()
            .copied()
            .filter(|seq| *seq <= self.at && !self.seen.contains(seq) && !told(seq))
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_order_of_publish_prune_pull_and_resume_shows_each_event_once_or_a_gap() {
    for seed in 1..=6 {
        let fixture = Fixture::new().await;
        let stores = [Arc::clone(&fixture.store), fixture.another().await];
        let mut dice = Dice::of(seed);
        let mut all = Vec::new();
        let mut readers: Vec<Reader> = (0..4).map(|_| Reader::default()).collect();
        for step in 0..90 {
            let store = &stores[dice.below(2)];
            match dice.below(8) {
                0 | 1 => {
                    let events = events_of("live.mix.x", 1 + dice.below(8));
                    all.extend(put(store, None, &events, None).await.expect("stored"));
                }
                2 => {
                    // Time passes for some, the older ones rather: ages need not follow positions.
                    let (part, days) = (2 + dice.below(3), 20 + dice.below(400));
                    fixture
                        .sql(&format!(
                            "UPDATE events SET received_at = received_at - {days} * 86400000::bigint WHERE seq % {part} > 0"
                        ))
                        .await;
                }
                3 => {
                    let one = stores[0].move_to_replay(HOT_MS, Aged::FIRST);
                    let two = stores[1].move_to_replay(HOT_MS, Aged::FIRST);
                    let reading = readers[0].read(store, "*", 3);
                    let (one, two, ()) = tokio::join!(one, two, reading);
                    one.and(two).expect("moved");
                }
                4 if dice.below(3) == 0 => {
                    let removing = stores[1].expire_replay(365 * DAY_MS);
                    let moving = stores[0].move_to_replay(HOT_MS, Aged::FIRST);
                    let (removed, moved) = tokio::join!(removing, moving);
                    removed.map(|_| ()).and(moved.map(|_| ())).expect("pruned");
                }
                _ => {
                    let reader = dice.below(readers.len());
                    let topic = ["*", "live.*", "live.mix.x"][dice.below(3)];
                    let limit = 1 + dice.below(6);
                    // Rows that are removed between others are past any floor: only what all readers passed may go.
                    readers[reader].read(store, topic, limit).await;
                }
            }
            let hidden: BTreeSet<i64> = gone(&fixture, &all).await;
            for reader in &readers {
                let missed: Vec<i64> = reader
                    .missed(&all)
                    .into_iter()
                    .filter(|seq| !hidden.contains(seq))
                    .collect();
                assert!(
                    missed.is_empty(),
                    "seed {seed}, step {step}: {missed:?} were neither seen nor told"
                );
            }
        }
        for reader in &mut readers {
            while reader.at < *all.last().unwrap_or(&0) {
                reader.read(&stores[0], "*", 50).await;
            }
        }
        let hidden = gone(&fixture, &all).await;
        for reader in &readers {
            let missed: Vec<i64> = reader
                .missed(&all)
                .into_iter()
                .filter(|seq| !hidden.contains(seq))
                .collect();
            assert!(missed.is_empty(), "seed {seed}: {missed:?} were neither seen nor told");
        }
    }
}

/// What was removed above the floor, since it was older than what stands before it: no tier has it.
async fn gone(fixture: &Fixture, all: &[i64]) -> BTreeSet<i64> {
    let there: Vec<i64> = sqlx::query_scalar("SELECT seq FROM events UNION ALL SELECT seq FROM events_archive")
        .fetch_all(fixture.pool())
        .await
        .expect("positions");
    let floor = fixture
        .number("SELECT value FROM store_floor WHERE name = 'events'")
        .await;
    let there: BTreeSet<i64> = there.into_iter().collect();
    all.iter()
        .copied()
        .filter(|seq| *seq > floor && !there.contains(seq))
        .collect()
}
