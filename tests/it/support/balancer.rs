//! One address in front of several: each connection goes to the next one that answers, and all can be cut.

use std::{net::SocketAddr, sync::Arc};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

/// A running balancer. It ends, with every connection through it, when the value is dropped.
#[derive(Debug)]
pub(crate) struct Balancer {
    address: SocketAddr,
    generation: Arc<watch::Sender<u64>>,
    _server: AbortOnDropHandle<()>,
}

impl Balancer {
    /// Starts one on a free loopback port in front of these (`host:port`).
    pub(crate) async fn start(upstreams: &[String]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let address = listener.local_addr().expect("a bound port");
        let generation = Arc::new(watch::Sender::new(0));
        let server = serve(listener, upstreams.to_vec(), Arc::clone(&generation));
        Self {
            address,
            generation,
            _server: AbortOnDropHandle::new(tokio::spawn(server)),
        }
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection there is.
    pub(crate) fn drop_connections(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }
}

async fn serve(listener: TcpListener, upstreams: Vec<String>, generation: Arc<watch::Sender<u64>>) {
    let mut connections = JoinSet::new();
    for turn in 0.. {
        let Ok((client, _)) = listener.accept().await else {
            return;
        };
        while connections.try_join_next().is_some() {}
        let order: Vec<String> = (0..upstreams.len())
            .map(|n| upstreams[(turn + n) % upstreams.len()].clone())
            .collect();
        connections.spawn(join(client, order, generation.subscribe()));
    }
}

async fn join(mut client: TcpStream, order: Vec<String>, mut generation: watch::Receiver<u64>) {
    for upstream in order {
        let Ok(mut server) = TcpStream::connect(upstream).await else {
            continue;
        };
        client.set_nodelay(true).ok();
        server.set_nodelay(true).ok();
        tokio::select! {
            _ = copy_bidirectional(&mut client, &mut server) => {}
            _ = generation.changed() => {}
        }
        return;
    }
}
