//! Decisions on record, and that they stay there while a process acts on them.

use crate::store_fixture::Fixture;

#[tokio::test]
async fn a_decision_is_said_to_be_in_use_now_and_then_and_no_oftener() {
    let fixture = Fixture::new().await;
    let record = "INSERT INTO delivery_placements (carrier_class, carrier, result, decided_at)
                  VALUES ('QUEUE', 'pg-v1', '{}', 0), ('QUEUE', 'pg-v1', '{}', 0)";
    fixture.sql(record).await;
    let first = fixture.number("SELECT min(id) FROM delivery_placements").await;
    let say = async || fixture.store.use_placements(&[first]).await.expect("it is said");
    let age = async || {
        fixture
            .number("SELECT now_ms() - max(used_at) FROM delivery_placements")
            .await
    };
    say().await;
    assert!(age().await < 10_000);
    assert_eq!(
        fixture.number("SELECT count(used_at) FROM delivery_placements").await,
        1,
        "of no other"
    );
    for (minutes, again) in [(4, false), (6, true)] {
        let earlier = format!("UPDATE delivery_placements SET used_at = now_ms() - {minutes} * 60000");
        fixture.sql(&earlier).await;
        say().await;
        assert_eq!(age().await < 60_000, again, "{minutes} minutes later");
    }
}
