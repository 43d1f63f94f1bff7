//! A real browser with its own `EventSource`: two processes behind one address, connections that break at random,
//! processes that are replaced, and eight publishers.

use std::time::Duration;

use serde_json::Value;

use crate::{
    store_fixture::number,
    stream_world::{ARRIVES, Kinds, Pair, TOPICS},
    support::{
        balancer::Balancer,
        browser::{Browser, Page},
        follower::{Entry, Log},
        ledger::position_of,
        wait::eventually,
    },
};

const EVENTS: usize = 5_000;
/// Between two batches of a publisher, so that there is time for things to happen.
const PACE: Duration = Duration::from_millis(60);

#[derive(Debug)]
struct Told {
    entries: [Vec<Entry>; 2],
    opened: [u64; 2],
}

fn told(page: &Page) -> Told {
    let posted = page.posted();
    let entries = [0, 1].map(|way| {
        let all = posted.iter().filter_map(|post| post["seen"][way].as_array());
        all.flatten().map(entry).collect()
    });
    let last = posted.last();
    let opened = [0, 1].map(|way| last.and_then(|post| post["opened"][way].as_u64()).unwrap_or(0));
    Told { entries, opened }
}

fn entry(seen: &Value) -> Entry {
    match &seen["gap"] {
        Value::Null => {
            let position = position_of(seen["cursor"].as_str().expect("a cursor")).expect("a cursor");
            Entry::Event(position, seen["id"].as_str().expect("an id").to_owned())
        }
        gap => {
            let number = |name: &str| gap[name].as_i64().expect("a position");
            Entry::Gap(number("from_seq"), number("to_seq"), String::new())
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_has_each_event_once_and_in_order_whatever_breaks() {
    let page = Page::start().await;
    let origin = page.origin().to_owned().leak();
    let pair = Pair::start(
        Kinds::Public,
        &[("REALTIME_CORS_ORIGINS", origin), ("REALTIME_REPLAY_MAX", "10000")],
    )
    .await;
    let front = Balancer::start(&pair.addresses()).await;
    let stream = format!("http://{}/realtime/stream?{TOPICS}", front.address());
    page.show(&include_str!("stream_page.html").replace("STREAM", &stream));
    let _browser = Browser::open(page.origin());
    eventually("the page has opened its streams", Duration::from_secs(30), async || {
        let opened = told(&page).opened;
        (opened[0] > 0 && opened[1] > 0)
            .then_some(())
            .ok_or(format!("{opened:?}"))
    })
    .await;

    let upheaval = async {
        for (progress, replaced) in [(5, None), (20, Some(0)), (45, None), (60, Some(1)), (80, None)] {
            pair.progress(EVENTS * progress / 100).await;
            match replaced {
                None => front.drop_connections(),
                Some(0) => {
                    pair.take(0).kill().await;
                    pair.run(0).await;
                }
                Some(other) => {
                    pair.take(other).terminate().await;
                    pair.run(other).await;
                }
            }
        }
    };
    tokio::join!(pair.publish(EVENTS, PACE), upheaval);
    assert_eq!(
        number(pair.database.pool(), "SELECT count(*) FROM events").await,
        EVENTS as i64
    );

    let log = Log::of(pair.database.pool(), 0, "true").await;
    eventually("the page has everything", ARRIVES, async || {
        let told = told(&page);
        let missing = told.entries.each_ref().map(|entries| log.missing(entries).len());
        (missing == [0, 0])
            .then_some(())
            .ok_or(format!("{missing:?} are missing; opened {:?}", told.opened))
    })
    .await;
    let told = told(&page);
    for entries in &told.entries {
        log.assert_in_order(entries);
        assert!(
            entries.iter().all(|entry| matches!(entry, Entry::Event(..))),
            "a gap, and nothing was out of reach"
        );
    }
    println!("streams the page opened: {:?}", told.opened);
    assert!(told.opened[0] >= 3 && told.opened[1] >= 5, "{:?}", told.opened);
}
