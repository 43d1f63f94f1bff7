//! `uds-v1`: TOPIC signals to another process on this host, over a Unix datagram socket.
//!
//! Signals are lost when the peer is slow or away; the poll delivers those rows.

use std::sync::Arc;

use carriers::{
    Backoff, Carrier, Class, Descriptor, Env, Health, Inbound, Opened, Signal, SignalError, Standing, Variable,
};
use parking_lot::Mutex;
use tokio::net::UnixDatagram;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

const ID: &str = "uds-v1";

pub(crate) const DESCRIPTOR: Descriptor = Descriptor {
    id: ID,
    classes: &[Class::Topic],
    capabilities: &["events:gateway"],
    provider: "host",
    region: "cell",
    price_unit: "signal-operation",
    rate_card: "rc-uds-v1",
    default_latency_ms: 0.1,
    variables: &[
        Variable::new("UDS_PATH", "Socket that this process listens on; uds-v1 needs it.").with("UDS_PEER"),
        Variable::new("UDS_PEER", "Socket of the other process.").with("UDS_PATH"),
    ],
    open,
};

struct Uds {
    own: String,
    peer: String,
    standing: Standing,
    socket: Mutex<Option<Arc<UnixDatagram>>>,
}

fn open(env: &Env<'_>) -> Opened {
    let (own, peer) = match (env.get("UDS_PATH"), env.get("UDS_PEER")) {
        (None, None) => return Ok(None), // not configured here
        (Some(own), Some(peer)) => (own, peer),
        _ => return Err("UDS_PATH and UDS_PEER must both be set, or neither".into()),
    };
    let standing = Standing::new(ID, Health::not_connected(ID));
    let socket = Mutex::new(None);
    Ok(Some(Arc::new(Uds {
        own,
        peer,
        standing,
        socket,
    })))
}

impl Carrier for Uds {
    fn health(&self) -> Health {
        self.standing.get()
    }

    async fn signal(&self, _class: Class, signals: &[Signal]) -> Result<(), SignalError> {
        let socket = self.socket.lock().clone().ok_or(SignalError::NotConnected)?;
        for signal in signals {
            let message = serde_json::to_vec(signal).map_err(|error| SignalError::Refused(error.to_string()))?;
            let sent = socket.send_to(&message, &self.peer).await;
            sent.map_err(|error| SignalError::Lost(error.to_string()))?;
        }
        Ok(())
    }

    async fn run(&self, inbound: Inbound, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        while let Some(Err(error)) = stop.run_until_cancelled(self.listen(&inbound)).await {
            self.socket.lock().take();
            self.standing.set(Health::not_connected(ID), &error.to_string());
            if stop.run_until_cancelled(sleep(backoff.wait())).await.is_none() {
                break;
            }
        }
        self.socket.lock().take();
        self.standing.stopped(Health::not_connected(ID));
    }
}

impl Uds {
    async fn listen(&self, inbound: &Inbound) -> std::io::Result<()> {
        let _ = std::fs::remove_file(&self.own); // a crash leaves the socket's file behind
        let socket = Arc::new(UnixDatagram::bind(&self.own)?);
        *self.socket.lock() = Some(Arc::clone(&socket));
        self.standing.set(Health::Up, "listening");
        inbound.offer_everything(); // what was said before, nobody here heard
        let mut buffer = [0; 1024];
        loop {
            let read = socket.recv(&mut buffer).await?;
            match serde_json::from_slice::<Signal>(&buffer[..read]) {
                Ok(signal) => inbound.offer(signal), // which drops ids that cannot be ids
                Err(_) => inbound.ignore(),
            }
        }
    }
}
