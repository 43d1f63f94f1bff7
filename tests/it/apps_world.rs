//! What the tests of developer apps share: apps with tokens, their events, and worlds whose limits are out of the way.

use serde_json::{Value, json};

use crate::{
    api_world::Site,
    support::{
        client::{Client, Response},
        envelopes::{self, Envelope, id, now_text},
        network::TokenSpec,
    },
};

/// No limit of callers and no quota: for what is not about them.
pub(crate) const FREE: [(&str, &str); 7] = [
    ("EVENTS_LIMITS", "off"),
    ("EVENTS_APP_PUBLISH_PER_MINUTE", "0"),
    ("EVENTS_APP_SANDBOX_PUBLISH_PER_MINUTE", "0"),
    ("EVENTS_APP_RETAINED_BYTES", "0"),
    ("EVENTS_APP_SANDBOX_RETAINED_BYTES", "0"),
    ("EVENTS_APP_MAX_SUBSCRIPTIONS", "0"),
    ("EVENTS_APP_SANDBOX_MAX_SUBSCRIPTIONS", "0"),
];

/// An endpoint whose address is public. Nothing is sent there: no process of these worlds delivers.
pub(crate) const HOOK: &str = "https://8.8.8.8/hook";

/// A developer app in one environment.
#[derive(Debug, Clone)]
pub(crate) struct App {
    /// `app_` and a ULID.
    pub(crate) id: String,
    /// `prj_` and a ULID.
    pub(crate) project: String,
    /// `sandbox` or `production`.
    pub(crate) env: &'static str,
}

impl App {
    /// A new app of a new project.
    pub(crate) fn new(env: &'static str) -> Self {
        Self {
            id: id("app"),
            project: id("prj"),
            env,
        }
    }

    /// Another app of the same project and environment.
    pub(crate) fn colleague(&self) -> Self {
        Self {
            id: id("app"),
            ..self.clone()
        }
    }

    /// The same app in the other environment.
    pub(crate) fn elsewhere(&self) -> Self {
        let env = if self.env == "sandbox" { "production" } else { "sandbox" };
        Self { env, ..self.clone() }
    }

    /// What its event types begin with.
    pub(crate) fn prefix(&self) -> String {
        format!("app.p{}.", self.project["prj_".len()..].to_lowercase())
    }

    /// The pattern for everything of its project.
    pub(crate) fn all(&self) -> String {
        format!("{}*", self.prefix())
    }

    /// Its events' source.
    pub(crate) fn source(&self) -> String {
        format!("app-{}", self.id["app_".len()..].to_lowercase())
    }

    /// Its consumer name.
    pub(crate) fn consumer(&self) -> String {
        format!("app:{}", self.id)
    }

    /// A token to be changed and signed.
    pub(crate) fn spec(&self) -> TokenSpec {
        TokenSpec::app(&self.id, &self.project, self.env)
    }

    /// A token that holds now.
    pub(crate) fn token(&self) -> String {
        self.spec().sign()
    }

    /// An event of its own.
    pub(crate) fn event(&self, name: &str) -> Envelope {
        envelopes::envelope("live")
            .set("source", self.source())
            .event_type(&format!("{}{name}", self.prefix()))
            .set("actor", json!({ "type": "app", "id": self.id }))
    }

    /// Publishes a body as this app.
    pub(crate) async fn publish(&self, client: &Client, body: &Value) -> Response {
        client.post("/api/v1/events", Some(&self.token()), body).await
    }

    /// Publishes an event that is accepted, and yields its id.
    pub(crate) async fn published(&self, client: &Client, event: &Envelope) -> String {
        self.publish(client, event.json()).await.expect(201);
        event.id().to_owned()
    }

    /// The ids it reads for a topic, from the beginning of the log.
    pub(crate) async fn reads(&self, client: &Client, topic: &str) -> Vec<String> {
        pulled(client, &self.token(), topic).await
    }

    /// Asks for a subscription.
    pub(crate) async fn subscribe(&self, client: &Client, pattern: &str, path: &str) -> Response {
        let body = json!({ "topic_pattern": pattern, "endpoint": format!("{HOOK}/{path}") });
        client.post("/api/v1/subscriptions", Some(&self.token()), &body).await
    }
}

/// The ids that a caller reads for a topic, page by page to the head.
pub(crate) async fn pulled(client: &Client, token: &str, topic: &str) -> Vec<String> {
    let (mut ids, mut after) = (Vec::new(), String::new());
    loop {
        let page = client
            .get(
                &format!("/api/v1/events?topic={topic}&limit=1000&after={after}"),
                Some(token),
            )
            .await
            .expect(200);
        let events = page["events"].as_array().expect("a page");
        ids.extend(
            events
                .iter()
                .map(|item| item["event"]["event_id"].as_str().expect("an id").to_owned()),
        );
        if page["next_cursor"] == page["latest_cursor"] {
            return ids;
        }
        page["next_cursor"].as_str().expect("a cursor").clone_into(&mut after);
    }
}

/// An event of the network about an app, at this time.
pub(crate) fn of_network(event_type: &str, app: &App, at: &str, payload: Value) -> Envelope {
    envelopes::envelope("network")
        .event_type(event_type)
        .set("actor", json!({ "type": "system", "id": "network" }))
        .subject("app", &app.id)
        .set("timestamp", at)
        .payload(payload)
}

/// A revocation that is in force from now on.
pub(crate) fn revocation(app: &App) -> Envelope {
    let payload = json!({ "project_id": app.project, "environment": app.env, "reason": "staff" });
    of_network("network.app.revoked", app, &now_text(), payload)
}

/// The withdrawal of the grant to subscribe.
pub(crate) fn withdrawal(app: &App) -> Envelope {
    let payload = json!({ "project_id": app.project, "capability": "events.app.subscribe",
        "audience": "openvibe.events", "from": "approved", "to": "revoked" });
    of_network("network.grant.changed", app, &now_text(), payload)
}

/// A world of the test's own without limits.
pub(crate) async fn free(processes: usize) -> Site {
    Site::own(processes, &FREE).await
}
