//! `SSL_CERT_FILE`: an authority it names is trusted for deliveries and for the issuer's keys, and for nothing else.

use serde_json::json;

use crate::support::{
    database::Database,
    envelopes::envelope,
    network::{self, Network},
    service::Service,
    tls::{CA_FILE, HttpsServer, OTHER_CA_FILE},
    wait::{SOON, eventually},
};

#[tokio::test]
async fn an_authority_of_ones_own_is_trusted_when_the_variable_names_it() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let keys = HttpsServer::start(200, json!({ "keys": [network::jwk(network::FIRST_KEY)] }).to_string());
    let receiver = HttpsServer::start(200, String::new());
    let issuer = keys.url("");
    let env = [("OV_NETWORK_INTERNAL_URL", issuer.as_str()), ("SSL_CERT_FILE", CA_FILE)];
    // It starts ready, so it has fetched the keys.
    let service = Service::start(&database, &network, &env).await;
    assert!(keys.requests() >= 1);

    let client = service.client();
    let event = envelope("live");
    let subscription = json!({ "topic_pattern": event.type_name(), "endpoint": receiver.url("/hook") });
    client
        .post(
            "/api/v1/subscriptions",
            Some(&client.service_token("chat")),
            &subscription,
        )
        .await
        .expect(201);
    client.publish(&event).await.expect(201);
    eventually("the event is delivered over https", SOON, async || {
        receiver.requests() == 1
    })
    .await;
}

#[tokio::test]
async fn an_authority_that_nothing_names_is_not_trusted() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let receiver = HttpsServer::start(200, String::new());
    for (number, env) in [&[][..], &[("SSL_CERT_FILE", OTHER_CA_FILE)]].into_iter().enumerate() {
        let service = Service::start(&database, &network, env).await;
        let client = service.client();
        let event = envelope("live");
        let endpoint = receiver.url(&format!("/hook{number}"));
        let subscription = json!({ "topic_pattern": event.type_name(), "endpoint": endpoint });
        client
            .post(
                "/api/v1/subscriptions",
                Some(&client.service_token("chat")),
                &subscription,
            )
            .await
            .expect(201);
        client.publish(&event).await.expect(201);
        let failed = eventually("the attempt fails", SOON, async || {
            let sql = "SELECT last_error FROM deliveries WHERE event_id = $1 AND last_error IS NOT NULL";
            let rows: Option<String> = sqlx::query_scalar(sql)
                .bind(event.id())
                .fetch_optional(database.pool())
                .await
                .expect("the deliveries");
            rows.ok_or("no failure yet")
        })
        .await;
        assert!(failed.contains("UnknownIssuer"), "{failed}");
    }
    assert_eq!(receiver.requests(), 0);
}

/// How many authorities a process trusts, by what it logs.
async fn authorities(database: &Database, network: &Network, env: &[(&str, &str)]) -> usize {
    let service = Service::start(database, network, &[&[("EVENTS_LOG", "debug")], env].concat()).await;
    let log = service.log();
    let number = log
        .split("authorities=")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next());
    number
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no number in\n{log}"))
}

#[tokio::test]
async fn the_systems_authorities_stay_trusted_beside_the_files() {
    let (database, network) = tokio::join!(Database::create(), Network::start());
    let plain = authorities(&database, &network, &[]).await;
    let both = authorities(&database, &network, &[("SSL_CERT_FILE", CA_FILE)]).await;
    assert!(both > plain, "{both} with the file, {plain} without");
}
