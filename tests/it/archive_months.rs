//! Exports and restores of a month in a directory: byte for byte, and whole whatever happens between the steps.

use std::{fs, io::Read, path::PathBuf};

use flate2::read::GzDecoder;
use openvibe_events::{
    archive::{ArchiveError, Exported, Month, Restored, Storage, export, restore},
    domain::envelope::Envelope,
    store::{Addresses, ArchiveSession, StoreError},
};
use serde_json::Value;

use crate::{
    store_fixture::{Fixture, event_of, events_of, put},
    support::process::{Account, Directory},
    tiers_world::{in_month, move_all, rows, walk},
};

pub(crate) const MARCH: &str = "2024-03";

pub(crate) struct Months {
    pub(crate) fixture: Fixture,
    pub(crate) directory: Directory,
}

impl Months {
    pub(crate) async fn new() -> Self {
        Self {
            fixture: Fixture::new().await,
            directory: Account::for_servers().directory("archive"),
        }
    }

    /// Events that were received in this month of 2024, in the replay tier.
    pub(crate) async fn fill(&self, month: u8, count: usize) -> Vec<i64> {
        self.fill_with(month, &events_of("live.month.x", count)).await
    }

    /// As [`Self::fill`], with these events.
    pub(crate) async fn fill_with(&self, month: u8, events: &[Envelope]) -> Vec<i64> {
        let all = put(&self.fixture.store, None, events, None).await.expect("stored");
        let (at, first, last) = (in_month(month), all[0], all[all.len() - 1]);
        self.fixture
            .sql(&format!(
                "UPDATE events SET received_at = {at} WHERE seq BETWEEN {first} AND {last}"
            ))
            .await;
        assert_eq!(
            move_all(&self.fixture.store).await,
            u64::try_from(all.len()).expect("small")
        );
        all
    }

    pub(crate) fn local(&self) -> Storage {
        Storage::Local(self.directory.path().join("archive"))
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join("archive/2024").join(name)
    }

    pub(crate) async fn session(&self) -> ArchiveSession {
        let url = self.fixture.url();
        let addresses = Addresses::parse(url, url).expect("a URL");
        let mut session = ArchiveSession::open(&addresses).await.expect("a connection");
        session.lock(MARCH, || ()).await.expect("the month");
        session
    }

    pub(crate) async fn export_to(&self, storage: &Storage) -> Result<Exported, ArchiveError> {
        export(&mut self.session().await, storage, month(), 90, &mut |_, _| {}).await
    }

    pub(crate) async fn export(&self) -> Result<Exported, ArchiveError> {
        self.export_to(&self.local()).await
    }

    pub(crate) async fn restore_from(&self, storage: &Storage) -> Result<Restored, ArchiveError> {
        restore(&mut self.session().await, storage, month(), 30, &mut |_, _| {}).await
    }

    pub(crate) async fn restore(&self) -> Result<Restored, ArchiveError> {
        self.restore_from(&self.local()).await
    }

    /// Every row of the replay tier as it was before a restore could change what it says of the tier itself.
    pub(crate) async fn image(&self) -> String {
        sqlx::query_scalar(
            "SELECT coalesce(string_agg(to_jsonb(a)::text, E'\\n' ORDER BY seq), '') \
             FROM (SELECT id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, env, received_at, \
                   redacted_at, redacts, encode(body, 'hex') AS body, archived_at, actor_id, size_bytes FROM events_archive) a",
        )
        .fetch_one(self.fixture.pool())
        .await
        .expect("rows")
    }
}

pub(crate) fn month() -> Month {
    MARCH.parse().expect("a month")
}

fn lines(path: &PathBuf) -> Vec<String> {
    let mut text = String::new();
    GzDecoder::new(fs::File::open(path).expect("an object"))
        .read_to_string(&mut text)
        .expect("text");
    text.lines().map(str::to_owned).collect()
}

fn figures(done: &Exported) -> (u64, u64, u64, u64) {
    (done.exported, done.count, done.deleted, done.changed)
}

#[tokio::test]
async fn a_month_leaves_and_comes_back_byte_for_byte() {
    let months = Months::new().await;
    let all = months.fill(3, 600).await;
    let other = months.fill(4, 3).await;
    let image = months.image().await;
    let done = months.export().await.expect("exported");
    assert_eq!(figures(&done), (600, 600, 600, 0));
    assert_eq!(rows(&months.fixture, "events_archive").await, 3);
    assert_eq!(
        walk(&months.fixture.store, 0, "*", 100).await,
        (other.clone(), vec![(1, all[599])]),
        "a reader is told"
    );
    let object = months.file("events-2024-03.ndjson.gz");
    assert_eq!(lines(&object).len(), 600);
    let manifest: Value =
        serde_json::from_slice(&fs::read(months.file("events-2024-03.json")).expect("a manifest")).expect("JSON");
    assert_eq!(
        (&manifest["format"], &manifest["count"]),
        (&Value::from("openvibe.events.archive@1"), &Value::from(600))
    );
    assert!(manifest.get("next").is_none());
    let back = months.restore().await.expect("restored");
    assert_eq!((back.count, back.inserted, back.skipped), (600, 600, 0));
    assert_eq!(months.image().await, image);
    assert_eq!(
        walk(&months.fixture.store, all[0], "*", 100).await,
        ([&all[1..], &other].concat(), vec![])
    );
    // Held against a prune that would take it at once.
    months.fixture.store.expire_replay(0).await.expect("a batch");
    assert_eq!(rows(&months.fixture, "events_archive").await, 600);
    let again = months.restore().await.expect("restored");
    assert_eq!((again.inserted, again.skipped), (0, 600));
    let bytes = fs::read(&object).expect("an object");
    let done = months.export().await.expect("exported again");
    assert_eq!(figures(&done), (600, 600, 600, 0));
    assert_eq!(
        fs::read(&object).expect("an object"),
        bytes,
        "the same rows are the same bytes"
    );
}

#[tokio::test]
async fn later_exports_merge_and_a_row_replaces_its_line() {
    let months = Months::new().await;
    let first = months.fill(3, 4).await;
    let rest = months.fill(3, 3).await;
    months
        .fixture
        .sql(&format!(
            "UPDATE events_archive SET received_at = now_ms() WHERE seq >= {}",
            rest[0]
        ))
        .await;
    assert_eq!(figures(&months.export().await.expect("exported")), (4, 4, 4, 0));
    assert_eq!(
        figures(&months.export().await.expect("exported")),
        (0, 4, 0, 0),
        "nothing is left to export"
    );
    months
        .fixture
        .sql(&format!(
            "UPDATE events_archive SET received_at = {} WHERE seq >= {}",
            in_month(3),
            rest[0]
        ))
        .await;
    months.restore().await.expect("restored");
    months
        .fixture
        .sql(&format!(
            "UPDATE events_archive SET redacted_at = 77 WHERE seq = {}",
            first[1]
        ))
        .await;
    assert_eq!(figures(&months.export().await.expect("exported")), (7, 7, 7, 0));
    let object = lines(&months.file("events-2024-03.ndjson.gz"));
    let redacted: Vec<bool> = object.iter().map(|line| line.contains("\"redacted_at\":77")).collect();
    assert_eq!(redacted, [false, true, false, false, false, false, false]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_changes_while_it_is_exported_stays_and_a_restore_leaves_it_alone() {
    let months = Months::new().await;
    let all = months.fill(3, 5).await;
    let mut session = months.session().await;
    let pool = months.fixture.pool().clone();
    let seq = all[2];
    let changed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = std::sync::Arc::clone(&changed);
    let handle = tokio::runtime::Handle::current();
    let storage = months.local();
    // Between the reading and the deleting somebody redacts.
    let mut redact = move |what: &'static str, _| {
        if what == "verifying" && !seen.swap(true, std::sync::atomic::Ordering::Relaxed) {
            let (pool, statement) = (
                pool.clone(),
                format!("UPDATE events_archive SET redacted_at = 5 WHERE seq = {seq}"),
            );
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    handle.block_on(async {
                        sqlx::raw_sql(sqlx::AssertSqlSafe(statement))
                            .execute(&pool)
                            .await
                            .expect("redacted")
                    })
                });
            });
        }
    };
    let done = tokio::task::block_in_place(|| {
        tokio::runtime::Handle::current().block_on(export(&mut session, &storage, month(), 90, &mut redact))
    });
    assert_eq!(figures(&done.expect("exported")), (5, 5, 4, 1));
    drop(session);
    let back = months.restore().await.expect("restored");
    assert_eq!((back.inserted, back.skipped), (4, 1));
    assert_eq!(
        months
            .fixture
            .number(&format!("SELECT redacted_at FROM events_archive WHERE seq = {seq}"))
            .await,
        5
    );
    assert_eq!(figures(&months.export().await.expect("exported")), (5, 5, 5, 0));
    assert!(lines(&months.file("events-2024-03.ndjson.gz"))[2].contains("\"redacted_at\":5"));
}

#[tokio::test]
async fn an_event_that_was_published_anew_meanwhile_is_not_restored_beside_it() {
    let months = Months::new().await;
    let event = event_of("live.anew.x");
    let seq = put(&months.fixture.store, None, std::slice::from_ref(&event), None)
        .await
        .expect("stored")[0];
    months
        .fixture
        .sql(&format!("UPDATE events SET received_at = {}", in_month(3)))
        .await;
    move_all(&months.fixture.store).await;
    months.export().await.expect("exported");
    months.fixture.sql("TRUNCATE idempotency_receipts").await;
    put(&months.fixture.store, None, &[event], None)
        .await
        .expect("stored anew");
    let back = months.restore().await.expect("restored");
    assert_eq!((back.inserted, back.skipped), (0, 1));
    assert_eq!(months.fixture.number("SELECT count(*) FROM event_log").await, 1);
    assert!(seq > 0);
}

#[tokio::test]
async fn what_is_restored_is_known_as_published_for_as_long_as_it_is_held() {
    let months = Months::new().await;
    months.fill(3, 2).await;
    months.export().await.expect("exported");
    months
        .fixture
        .sql("UPDATE idempotency_receipts SET processed_at = 1")
        .await;
    months.fixture.store.forget_receipts(1, 0).await.expect("a pass");
    months.restore().await.expect("restored");
    assert_eq!(
        months
            .fixture
            .number("SELECT count(*) FROM idempotency_receipts WHERE processed_at > now_ms() + 86400000")
            .await,
        2
    );
}

#[tokio::test]
async fn a_run_that_was_cut_between_any_two_steps_is_made_good_by_the_next() {
    // What a cut leaves behind: the manifest that announces, with the object as it was or as it was to become.
    for merging in [false, true] {
        for object_written in [false, true] {
            let months = Months::new().await;
            if merging {
                months.fill(3, 2).await;
                months.export().await.expect("exported");
            }
            let place = months.file("events-2024-03.ndjson.gz");
            let before = fs::read(&place).ok();
            let old: Option<Value> = fs::read(months.file("events-2024-03.json"))
                .ok()
                .map(|text| serde_json::from_slice(&text).expect("JSON"));
            months.fill(3, 3).await;
            let image = months.image().await;
            months.export().await.expect("exported");
            let after = fs::read(&place).expect("an object");
            let new: Value = serde_json::from_slice(&fs::read(months.file("events-2024-03.json")).expect("a manifest"))
                .expect("JSON");
            // Back to the moment of the cut: nothing had been deleted.
            let mut cut = old.clone().unwrap_or_else(|| {
                serde_json::json!({"format": new["format"], "month": new["month"], "count": 0, "sha256": "", "bytes": 0, "exported_at": ""})
            });
            cut["next"] = serde_json::json!({"count": new["count"], "sha256": new["sha256"], "bytes": new["bytes"]});
            fs::write(months.file("events-2024-03.json"), cut.to_string()).expect("written");
            match (object_written, before) {
                (true, _) => fs::write(&place, &after).expect("written"),
                (false, Some(before)) => fs::write(&place, before).expect("written"),
                (false, None) => fs::remove_file(&place).expect("removed"),
            }
            fs::write(months.file("events-2024-03.ndjson.part"), "half of it").expect("written");
            months
                .fixture
                .sql("UPDATE store_floor SET value = 0 WHERE name = 'events'")
                .await;
            unarchive(&months, &image).await;
            let count = if merging { 5 } else { 3 };
            let done = months.export().await.expect("the next run");
            assert_eq!(
                figures(&done),
                (3, count, 3, 0),
                "merging {merging}, written {object_written}"
            );
            assert_eq!(lines(&place).len(), usize::try_from(count).expect("small"));
            assert!(!months.file("events-2024-03.ndjson.part").exists());
            assert_eq!(months.restore().await.expect("restored").inserted, count);
        }
    }
}

/// Puts rows back as they were.
async fn unarchive(months: &Months, image: &str) {
    for row in image.lines() {
        sqlx::query(
            "INSERT INTO events_archive SELECT id, seq, epoch, event_type, source, subject_type, subject_id, visibility, project_id, \
             env, received_at, redacted_at, redacts, decode(text, 'hex'), archived_at, NULL, actor_id, size_bytes \
             FROM (SELECT (jsonb_populate_record(NULL::events_archive, $1::jsonb - 'body')).*, $1::jsonb ->> 'body' AS text) r",
        )
        .bind(row)
        .execute(months.fixture.pool())
        .await
        .expect("a row");
    }
}

#[tokio::test]
async fn objects_that_do_not_belong_are_refused_and_nothing_is_deleted() {
    let months = Months::new().await;
    months.fill(3, 3).await;
    months.export().await.expect("exported");
    let (object, manifest) = (
        months.file("events-2024-03.ndjson.gz"),
        months.file("events-2024-03.json"),
    );
    let (good, stated) = (
        fs::read(&object).expect("bytes"),
        fs::read_to_string(&manifest).expect("text"),
    );
    months.fill(3, 2).await;
    let image = months.image().await;
    let spoilt = [
        ("is cut", Some(good[..good.len() - 5].to_vec()), Some(stated.clone())),
        ("is foreign", Some(b"hello".to_vec()), Some(stated.clone())),
        ("is not there", None, Some(stated.clone())),
        ("has no manifest", Some(good.clone()), None),
        (
            "has a manifest of another format",
            Some(good.clone()),
            Some(stated.replace("archive@1", "archive@2")),
        ),
        (
            "has the manifest of another month",
            Some(good.clone()),
            Some(stated.replace("2024-03", "2024-02")),
        ),
        (
            "has a wrong count",
            Some(good.clone()),
            Some(stated.replace("\"count\": 3", "\"count\": 4")),
        ),
        ("has a manifest that is none", Some(good.clone()), Some("{".to_owned())),
    ];
    for (what, bytes, text) in spoilt {
        let write = |path: &PathBuf, content: Option<&[u8]>| match content {
            Some(content) => fs::write(path, content).expect("written"),
            None => fs::remove_file(path).expect("removed"),
        };
        write(&object, bytes.as_deref());
        write(&manifest, text.as_deref().map(str::as_bytes));
        let exported = months.export().await.expect_err(what);
        let restored = months.restore().await.expect_err(what);
        for error in [exported, restored] {
            assert!(
                matches!(error, ArchiveError::Unusable { .. }),
                "an object that {what}: {error}"
            );
        }
        assert_eq!(months.image().await, image, "an object that {what}");
        fs::write(&object, &good).expect("written");
        fs::write(&manifest, &stated).expect("written");
    }
    assert_eq!(
        figures(&months.export().await.expect("the right object again")),
        (2, 5, 2, 0)
    );
}

#[tokio::test]
async fn a_month_that_is_open_absent_or_locked_is_told() {
    let months = Months::new().await;
    let mut session = months.session().await;
    let open: Month = "9998-12".parse().expect("a month");
    let error = export(&mut session, &months.local(), open, 0, &mut |_, _| {})
        .await
        .expect_err("open");
    assert!(matches!(error, ArchiveError::OpenMonth(month) if month == open));
    let error = restore(&mut session, &months.local(), month(), 1, &mut |_, _| {})
        .await
        .expect_err("absent");
    assert!(matches!(error, ArchiveError::Absent { .. }));
    let done = export(&mut session, &months.local(), month(), 90, &mut |_, _| {})
        .await
        .expect("nothing to do");
    assert_eq!(figures(&done), (0, 0, 0, 0));
    assert!(!months.file("events-2024-03.json").exists());
    // A second one waits until the first has ended.
    let url = months.fixture.url();
    let mut second = ArchiveSession::open(&Addresses::parse(url, url).expect("a URL"))
        .await
        .expect("a connection");
    let (told, waits) = tokio::sync::oneshot::channel::<()>();
    let locking = tokio::spawn(async move { second.lock(MARCH, || drop(told)).await.map(|()| second) });
    waits.await.expect_err("the second is told that it waits");
    assert!(!locking.is_finished());
    drop(session);
    locking.await.expect("a task").expect("the month");
}

#[tokio::test]
async fn a_directory_that_takes_no_file_is_told_and_nothing_is_deleted() {
    let months = Months::new().await;
    months.fill(3, 2).await;
    let image = months.image().await;
    fs::write(
        months.directory.path().join("archive"),
        "a file where the directory should be",
    )
    .expect("written");
    let error = months.export().await.expect_err("no directory");
    assert!(matches!(error, ArchiveError::File { .. }), "{error}");
    assert_eq!(months.image().await, image);
    // A device that is full.
    fs::remove_file(months.directory.path().join("archive")).expect("removed");
    let full = Storage::Local(PathBuf::from("/dev/full/x"));
    assert!(matches!(
        months.export_to(&full).await.expect_err("full"),
        ArchiveError::File { .. }
    ));
    assert_eq!(months.image().await, image);
    assert_eq!(figures(&months.export().await.expect("exported")), (2, 2, 2, 0));
}

#[tokio::test]
async fn a_database_without_the_tables_is_told() {
    let database = crate::support::database::Database::empty().await;
    let addresses = Addresses::parse(database.url(), database.url()).expect("a URL");
    let error = ArchiveSession::open(&addresses).await.err().expect("refused");
    assert!(matches!(error, StoreError::NotMigrated));
}
