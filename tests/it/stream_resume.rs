//! Streams that are whole: whoever follows the log over two processes has every event once and in order, or is told of
//! the gap, while eight publishers are at work, connections break and processes come and go.

use std::time::Duration;

use crate::{
    fabric_world::{keyed, topic},
    store_fixture::number,
    stream_world::{ARRIVES, Kinds, Pair, TOPICS, TYPES},
    support::{
        client::Client,
        envelopes::envelope,
        follower::{Follower, gaps},
        ledger::{cursor_of, position_of},
        proxy::Proxy,
        sse::{Frame, Sse, after, ask},
        wait::{SOON, within},
    },
};

#[tokio::test(flavor = "multi_thread")]
async fn streams_stay_whole_while_connections_break_and_processes_are_replaced() {
    const EVENTS: usize = 2_080;
    let pair = Pair::start(Kinds::All, &[("REALTIME_REPLAY_MAX", "10000")]).await;
    // Types of every class of policy, interleaved.
    keyed(&pair.clients[0], TYPES[0], "domain", "optional").await;
    topic(&pair.clients[0], TYPES[1]).await;
    keyed(&pair.clients[1], TYPES[2], "domain", "required").await;
    let line = Proxy::start(&pair.addresses()[0]).await;
    let through = Client::new(&format!("http://{}", line.address()));
    let service = pair.service_token();
    let broken = {
        let token = service.clone();
        move |_| ask(&through, TOPICS, Some(&token))
    };
    let steady = Follower::start(pair.asking(Some(service.clone())), None, (0, 0)).await;
    let restless = Follower::start(pair.asking(Some(service.clone())), None, (40, 1)).await;
    let broken = Follower::start(broken, None, (0, 0)).await;
    let person = Follower::start(pair.asking(Some(pair.person_token())), None, (60, 2)).await;
    let anyone = Follower::start(pair.asking(None), None, (60, 3)).await;

    let upheaval = async {
        pair.progress(EVENTS / 8).await;
        line.drop_connections();
        pair.progress(EVENTS / 5).await;
        pair.take(0).kill().await;
        pair.run(0).await;
        pair.progress(EVENTS / 3).await;
        line.drop_connections();
        let (exit, _) = pair.take(1).terminate().await;
        assert_eq!(exit.code, Some(0));
        pair.run(1).await;
        // In the middle of it, from the beginning.
        let first = number(pair.database.pool(), "SELECT min(seq) FROM events").await;
        let first = Some(cursor_of(0, first));
        let late = Follower::start(pair.asking(Some(service.clone())), first, (0, 0)).await;
        let calm = EVENTS * 3 / 4;
        pair.progress(calm).await;
        line.drop_connections();
        late
    };
    let ((), late) = tokio::join!(pair.publish(EVENTS, Duration::ZERO), upheaval);

    let pool = pair.database.pool();
    assert_eq!(number(pool, "SELECT count(*) FROM events").await, EVENTS as i64);
    let own = pair.own();
    for (name, follower, own) in [
        ("steady", &steady, "true"),
        ("restless", &restless, "true"),
        ("broken", &broken, "true"),
        ("person", &person, own.as_str()),
        ("anyone", &anyone, "visibility = 'public'"),
    ] {
        follower.assert_whole(pool, 0, own, ARRIVES).await;
        let (opened, gaps) = follower.look(|seen| (seen.opened, gaps(seen)));
        println!("{name}: {opened} streams, {gaps} gaps");
        assert!(opened > 1, "{name}: no stream ended");
        assert_eq!(gaps, 0, "{name}: nothing was out of reach");
    }
    let first = number(pool, "SELECT min(seq) FROM events").await;
    late.assert_whole(pool, first, "true", ARRIVES).await;
    assert_eq!(late.look(gaps), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_misses_more_than_is_replayed_is_told_what_and_has_the_rest() {
    const EVENTS: usize = 640;
    let pair = Pair::start(Kinds::All, &[("REALTIME_REPLAY_MAX", "7")]).await;
    let token = pair.service_token();
    let restless = Follower::start(pair.asking(Some(token.clone())), None, (30, 4)).await;
    let comes_back = async {
        pair.progress(EVENTS / 10).await;
        let first = number(pair.database.pool(), "SELECT min(seq) FROM events").await;
        let first = cursor_of(0, first);
        for round in 2..=8 {
            pair.progress(EVENTS * round / 10).await;
            let request = ask(&pair.clients[round % 2], TOPICS, Some(&token));
            let mut stream = Sse::open(after(request, Some(&first))).await.expect("a stream");
            for _ in 0..7 {
                stream.event().await;
            }
            let gap = stream.gap().await;
            assert_eq!(gap["reason"], "replay_limit", "{gap}");
            pair.clients[0]
                .publish(&envelope("live").event_type(TYPES[0]))
                .await
                .expect(201);
            let Some(Frame::Event(next, _)) = within("what is live", SOON, stream.word()).await else {
                panic!("what is live comes after the gap");
            };
            let (left_out, next) = (gap["to_seq"].as_i64(), position_of(&next));
            let (left_out, next) = (left_out.expect("a position"), next.expect("a cursor"));
            let between = format!("SELECT count(*) FROM events WHERE seq > {left_out} AND seq < {next}");
            let between = number(pair.database.pool(), &between).await;
            assert_eq!(
                between, 0,
                "what was committed between the two is no part of the replay"
            );
        }
    };
    tokio::join!(pair.publish(EVENTS, Duration::ZERO), comes_back);
    restless.assert_whole(pair.database.pool(), 0, "true", ARRIVES).await;
    let (opened, gaps) = restless.look(|seen| (seen.opened, gaps(seen)));
    println!("restless: {opened} streams, {gaps} gaps");
    assert!(opened > 3 && gaps > 0);
}
