//! A name server that says what a test wants it to say, and something else the next time.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::net::UdpSocket;
use tokio_util::task::AbortOnDropHandle;

/// Seconds that every answer claims to hold: whoever keeps one is found out.
const TTL_S: u32 = 300;
const A: u16 = 1;
const AAAA: u16 = 28;

/// What is said of a name.
#[derive(Debug, Clone)]
pub(crate) enum Says {
    /// It has these addresses; none of them means that it exists and has no address.
    Addresses(Vec<IpAddr>),
    /// Each question for IPv4 addresses gets the next of these answers, in turns.
    Turns(Vec<IpAddr>),
    /// There is no such name.
    NoSuchName,
    /// The server failed.
    Failure,
    /// Nothing, ever.
    Nothing,
}

/// A running name server. It ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct NameServer {
    address: SocketAddr,
    zone: Arc<Mutex<Zone>>,
    _server: AbortOnDropHandle<()>,
}

#[derive(Debug, Default)]
struct Zone {
    names: BTreeMap<String, Says>,
    asked: BTreeMap<String, usize>,
}

impl NameServer {
    /// Starts it on this address; it knows no name.
    pub(crate) async fn start(address: &str) -> Self {
        let socket = UdpSocket::bind(address).await.expect("an address for the name server");
        let address = socket.local_addr().expect("a bound port");
        let zone = Arc::new(Mutex::new(Zone::default()));
        let server = AbortOnDropHandle::new(tokio::spawn(serve(socket, Arc::clone(&zone))));
        Self {
            address,
            zone,
            _server: server,
        }
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// From the next question on.
    pub(crate) fn say(&self, name: &str, says: Says) {
        self.zone.lock().names.insert(name.to_owned(), says);
    }

    /// As [`NameServer::say`], of these addresses.
    pub(crate) fn say_addresses(&self, name: &str, addresses: &[&str]) {
        self.say(name, Says::Addresses(parsed(addresses)));
    }

    /// How often the IPv4 addresses of a name were asked for.
    pub(crate) fn asked(&self, name: &str) -> usize {
        self.zone.lock().asked.get(name).copied().unwrap_or(0)
    }
}

/// Addresses from their texts.
pub(crate) fn parsed(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().map(|text| text.parse().expect(text)).collect()
}

async fn serve(socket: UdpSocket, zone: Arc<Mutex<Zone>>) {
    let mut question = [0; 1500];
    while let Ok((length, asker)) = socket.recv_from(&mut question).await {
        if let Some(answer) = answer(&question[..length], &zone) {
            socket.send_to(&answer, asker).await.ok();
        }
    }
}

fn answer(query: &[u8], zone: &Mutex<Zone>) -> Option<Vec<u8>> {
    let mut labels = Vec::new();
    let mut at = 12;
    loop {
        let length = usize::from(*query.get(at)?);
        let label = query.get(at + 1..at + 1 + length)?;
        at += 1 + length;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(label).to_lowercase());
    }
    let question = query.get(12..at + 4)?;
    let kind = u16::from_be_bytes(query.get(at..at + 2)?.try_into().ok()?);
    let name = labels.join(".");
    let mut zone = zone.lock();
    let asked = zone.asked.entry(name.clone()).or_default();
    let turn = *asked;
    *asked += usize::from(kind == A);
    let (code, addresses) = match zone.names.get(&name).unwrap_or(&Says::NoSuchName) {
        Says::Nothing => return None,
        Says::NoSuchName => (3, Vec::new()),
        Says::Failure => (2, Vec::new()),
        Says::Addresses(all) => (0, all.clone()),
        Says::Turns(all) => (0, vec![all[turn % all.len()]]),
    };
    let records: Vec<Vec<u8>> = addresses
        .iter()
        .filter_map(|address| match (kind, address) {
            (A, IpAddr::V4(address)) => Some(address.octets().to_vec()),
            (AAAA, IpAddr::V6(address)) => Some(address.octets().to_vec()),
            _ => None,
        })
        .collect();
    let count = u16::try_from(records.len()).expect("a few records");
    let mut answer = Vec::from(&query[..2]);
    // An answer to a question that allowed recursion; one question, so many records, nothing else.
    answer.extend([0x81, 0x80 | code, 0, 1]);
    answer.extend(count.to_be_bytes());
    answer.extend([0, 0, 0, 0]);
    answer.extend(question);
    for record in records {
        // The name of the question, by its place.
        answer.extend([0xc0, 12]);
        answer.extend(kind.to_be_bytes());
        answer.extend([0, 1]);
        answer.extend(TTL_S.to_be_bytes());
        answer.extend(u16::try_from(record.len()).expect("an address").to_be_bytes());
        answer.extend(record);
    }
    Some(answer)
}
