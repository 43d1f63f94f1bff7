//! The service under test, as its operators and subscribers call it.

use std::net::{SocketAddr, ToSocketAddrs as _};

use serde_json::{Value, json};

use crate::fault::Fault;
use crate::keys::Signer;
use crate::receiver::Receiver;
use crate::wire::Connection;

/// Where the service is, and who may call it.
pub(crate) struct Service {
    /// Its address.
    pub(crate) address: SocketAddr,
    /// The value of the Host header.
    pub(crate) host: String,
    /// Signs the tokens.
    pub(crate) signer: Signer,
}

/// A subscription of the tool's.
#[derive(Debug)]
pub(crate) struct Subscription {
    consumer: String,
    id: String,
}

impl Service {
    /// The service at `http://HOST:PORT`.
    pub(crate) fn at(url: &str, signer: Signer) -> Result<Self, Fault> {
        let wrong = || Fault::Address(url.to_owned());
        let host = url.strip_prefix("http://").ok_or_else(wrong)?.trim_end_matches('/');
        let address = host
            .to_socket_addrs()
            .ok()
            .and_then(|mut all| all.next())
            .ok_or_else(wrong)?;
        Ok(Self {
            address,
            host: host.to_owned(),
            signer,
        })
    }

    /// Calls a route as the service `slug`.
    pub(crate) async fn call(&self, method: &str, path: &str, slug: &str, body: Option<Value>) -> Result<Value, Fault> {
        let request = format!("{method} {path}");
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let bytes = format!(
            "{request} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.host,
            self.signer.token(slug)?,
            body.len()
        );
        let mut connection = Connection::new(self.address);
        let (status, answer) = connection
            .exchange(bytes.as_bytes())
            .await
            .map_err(|source| Fault::Wire {
                request: request.clone(),
                source,
            })?;
        if !(200..300).contains(&status) {
            return Err(Fault::Refused {
                request,
                status,
                body: String::from_utf8_lossy(answer).into_owned(),
            });
        }
        Ok(serde_json::from_slice(answer).unwrap_or(Value::Null))
    }

    /// Subscribes `count` consumers to a type, each with an endpoint of the receiver.
    pub(crate) async fn subscribe(
        &self,
        receiver: &Receiver,
        event_type: &str,
        count: usize,
        max_inflight: u8,
    ) -> Result<Vec<Subscription>, Fault> {
        let endpoints = (0..count).map(|index| receiver.endpoint(index));
        let (made, secrets) = self.subscribe_endpoints(endpoints, event_type, max_inflight).await?;
        receiver.trust(secrets);
        Ok(made)
    }

    /// Subscribes a consumer for each endpoint to a type; answers the subscriptions and their secrets.
    pub(crate) async fn subscribe_endpoints(
        &self,
        endpoints: impl IntoIterator<Item = String>,
        event_type: &str,
        max_inflight: u8,
    ) -> Result<(Vec<Subscription>, Vec<String>), Fault> {
        let run = format!("{:08x}", rand::random::<u32>());
        let (mut made, mut secrets) = (Vec::new(), Vec::new());
        for (index, endpoint) in endpoints.into_iter().enumerate() {
            let consumer = format!("load-{run}-{index}");
            let secret = format!("load_{:032x}", rand::random::<u128>());
            let body = json!({"topic_pattern": event_type, "endpoint": endpoint, "secret": secret,
                "max_inflight": max_inflight});
            let answer = self
                .call("POST", "/api/v1/subscriptions", &consumer, Some(body))
                .await?;
            let id = answer["id"].as_str().unwrap_or_default().to_owned();
            secrets.push(secret);
            made.push(Subscription { consumer, id });
        }
        Ok((made, secrets))
    }

    /// Pauses them, so that they take no part in later runs.
    pub(crate) async fn unsubscribe(&self, subscriptions: &[Subscription]) -> Result<(), Fault> {
        for subscription in subscriptions {
            let path = format!("/api/v1/subscriptions/{}/disable", subscription.id);
            self.call("POST", &path, &subscription.consumer, None).await?;
        }
        Ok(())
    }

    /// Sets the policy of a type or pattern.
    pub(crate) async fn put_policy(&self, pattern: &str, policy: Value) -> Result<(), Fault> {
        let path = format!("/api/v1/delivery-policies/{pattern}");
        self.call("PUT", &path, "ops", Some(policy)).await.map(drop)
    }

    /// Which carrier would ring for a type now, and why.
    pub(crate) async fn placement(&self, event_type: &str) -> Result<Value, Fault> {
        let path = format!("/api/v1/placement?event_type={event_type}");
        let mut explained = self.call("GET", &path, "ops", None).await?;
        Ok(explained["placement"].take())
    }

    /// Deliveries that are stored and not finished, over all subscriptions.
    pub(crate) async fn unfinished(&self) -> Result<u64, Fault> {
        let ready = self.call("GET", "/api/ready", "ops", None).await?;
        let count = |status: &str| ready["deliveries"][status].as_u64().unwrap_or_default();
        Ok(count("pending") + count("failed"))
    }
}
