//! What every carrier offers and what is charged for it, in the forms the network agreed on.

use serde_json::{Value, json};

use crate::{
    api_world::{Site, text},
    fabric_world::{carrier, carriers},
    support::{
        contracts::assert_valid,
        wait::{SOON, eventually},
    },
};

/// Every carrier of this release, its classes, and what it can do beside waking.
const ALL: [(&str, &[&str], bool); 5] = [
    ("pg-v1", &["topic_p95", "queue_p95", "stream_p95"], true),
    ("valkey-v1", &["topic_p95", "queue_p95"], false),
    ("nats-v1", &["topic_p95"], false),
    ("nats-js-v1", &["stream_p95"], true),
    ("cloud-v1", &["queue_p95"], false),
];

#[tokio::test]
async fn every_carrier_makes_an_offer_that_anybody_in_the_network_can_read() {
    let env = [
        ("VALKEY_URL", "redis://127.0.0.1:9"),
        ("NATS_URL", "nats://127.0.0.1:9"),
        ("CLOUD_QUEUE_URL", "http://127.0.0.1:9/1/events"),
        ("EVENTS_CARRIERS_DISABLED", "nats-v1"),
    ];
    let site = Site::own(1, &env).await;
    eventually("the floor listens", SOON, async || {
        carrier(site.one(), "pg-v1").await["state"] == "up"
    })
    .await;
    let listed = carriers(site.one()).await;
    let cards: Value = serde_json::from_str(include_str!("../../rate-cards/rate-cards.json")).expect("JSON");
    let card = |id: &Value| cards.as_array().expect("a list").iter().find(|card| card["id"] == *id);
    assert_eq!(listed.len(), ALL.len());
    for (carrier, (id, operations, keeps)) in listed.iter().zip(ALL) {
        let offer = &carrier["offer"];
        assert_valid("platform.resource-offer@1", offer);
        for member in ["offer_id", "adapter"] {
            assert_eq!(text(offer, member), id);
        }
        let measured = offer["latency_ms"].as_object().expect("latencies");
        assert!(
            measured.len() == operations.len() && operations.iter().all(|operation| measured.contains_key(*operation)),
            "{id}: {measured:?}"
        );
        let capabilities = offer["capabilities"].as_array().expect("capabilities");
        for (capability, has) in [
            ("events:gateway", true),
            ("events:durable", keeps),
            ("events:ordered", keeps),
        ] {
            assert_eq!(capabilities.contains(&json!(capability)), has, "{id}: {capability}");
        }
        // Nobody answers, one is switched off, and nothing was asked of the cloud queue yet.
        let status = match id {
            "pg-v1" => "up",
            "cloud-v1" => "degraded",
            _ => "down",
        };
        assert_eq!(text(&offer["health"], "status"), status, "{id}");
        // Card and offer mean the same usage of the same provider.
        match card(&offer["pricing"]["rate_card"]) {
            None => assert_eq!(id, "cloud-v1", "only this one is not priced"),
            Some(card) => {
                assert_eq!(card["provider"], offer["provider"], "{id}");
                assert_eq!(card["metric"], offer["pricing"]["unit"], "{id}");
                assert_eq!(card["adapter"], id);
            }
        }
    }
    assert_eq!(cards.as_array().map(Vec::len), Some(4));
    assert!(card(&json!("rc-cloud-queue-v1")).is_none());
}
