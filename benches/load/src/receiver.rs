//! The receiver of deliveries: a small HTTP/1.1 server that stamps each arrival, checks its signature and answers 204.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::account::Account;
use crate::fault::Fault;
use crate::requests::number_of;
use crate::sheet::Sheet;
use crate::wire::{WireFault, content_length};

const HEADERS_MAX: usize = 40;
const HEAD_MAX: usize = 32 * 1024;
const BUFFER: usize = 8 * 1024;
const NO_CONTENT: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";
const NOT_FOUND: &[u8] = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";

/// A running receiver; it ends with the runtime.
#[derive(Debug)]
pub(crate) struct Receiver {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    account: Arc<Account>,
    /// By subscription; set once they are made.
    secrets: OnceLock<Vec<String>>,
    check_every: u64,
    arrivals: AtomicU64,
    checked: AtomicU64,
    signature_faults: AtomicU64,
    unreadable: AtomicU64,
}

/// What a delivery says that the receiver looks at.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delivery<'a> {
    /// The last segment of its path: which subscription.
    pub(crate) subscription: usize,
    /// The number of its event.
    pub(crate) number: u64,
    /// The value of `X-OpenVibe-Signature-V2`.
    pub(crate) signature: &'a str,
    /// The value of `X-OpenVibe-Timestamp`.
    pub(crate) timestamp: &'a str,
    /// The bytes that were signed.
    pub(crate) body: &'a [u8],
    /// Bytes of the whole request.
    pub(crate) length: usize,
}

impl Receiver {
    /// Listens on a free loopback port. Every `check_every`th signature is checked; 0 for none.
    pub(crate) async fn start(account: &Arc<Account>, check_every: u64) -> Result<Self, Fault> {
        let failed = |source| Fault::Io {
            what: "the receiver cannot listen",
            source,
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let state = Arc::new(State {
            account: Arc::clone(account),
            secrets: OnceLock::new(),
            check_every,
            arrivals: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            signature_faults: AtomicU64::new(0),
            unreadable: AtomicU64::new(0),
        });
        let serving = Arc::clone(&state);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(converse(stream, Arc::clone(&serving)));
            }
        });
        Ok(Self { address, state })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The endpoint of a subscription.
    pub(crate) fn endpoint(&self, subscription: usize) -> String {
        format!("http://{}/load/{subscription}", self.address)
    }

    /// The secrets, by subscription.
    pub(crate) fn trust(&self, secrets: Vec<String>) {
        let _ = self.state.secrets.set(secrets);
    }

    /// Writes down what it saw that has nothing to do with the account.
    pub(crate) fn write(&self, sheet: &mut Sheet) {
        sheet.count("signatures_checked", self.state.checked.load(Ordering::Relaxed));
        sheet.must_be_zero("signature_faults", self.state.signature_faults.load(Ordering::Relaxed));
        sheet.must_be_zero("unreadable_requests", self.state.unreadable.load(Ordering::Relaxed));
    }
}

async fn converse(mut stream: TcpStream, state: Arc<State>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
        while !buffer.is_empty() {
            let (length, answer) = match delivery(&buffer) {
                Ok(None) => break,
                Ok(Some(delivery)) => (delivery.length, state.take(&delivery)),
                Err(_) => {
                    state.unreadable.fetch_add(1, Ordering::Relaxed);
                    stream.write_all(NOT_FOUND).await?;
                    return Ok(());
                }
            };
            buffer.drain(..length);
            stream.write_all(answer).await?;
        }
    }
}

impl State {
    fn take(&self, delivery: &Delivery<'_>) -> &'static [u8] {
        let at = Instant::now();
        let count = self.arrivals.fetch_add(1, Ordering::Relaxed);
        if self.check_every > 0 && count.is_multiple_of(self.check_every) {
            self.checked.fetch_add(1, Ordering::Relaxed);
            let secret = self.secrets.get().and_then(|all| all.get(delivery.subscription));
            if !secret.is_some_and(|secret| is_genuine(secret, delivery)) {
                self.signature_faults.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.account.arrived(delivery.subscription, delivery.number, at);
        NO_CONTENT
    }
}

/// Reads a delivery at the start of `bytes`; `None` while it is not complete.
pub(crate) fn delivery(bytes: &[u8]) -> Result<Option<Delivery<'_>>, WireFault> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut request = httparse::Request::new(&mut headers);
    let head_bytes = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() > HEAD_MAX => return Err(WireFault::Malformed("a huge head")),
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(WireFault::Malformed("its head")),
    };
    let body_bytes = content_length(request.headers)?.ok_or(WireFault::Malformed("no Content-Length"))?;
    let length = head_bytes + body_bytes;
    if bytes.len() < length {
        return Ok(None);
    }
    let path = request.path.unwrap_or_default();
    let subscription = path.strip_prefix("/load/").and_then(|rest| rest.parse().ok());
    let (mut number, mut signature, mut timestamp) = (None, "", "");
    for header in request.headers.iter() {
        if header.name.eq_ignore_ascii_case("x-openvibe-event-id") {
            number = number_of(header.value);
        } else if header.name.eq_ignore_ascii_case("x-openvibe-signature-v2") {
            signature = str::from_utf8(header.value).unwrap_or_default();
        } else if header.name.eq_ignore_ascii_case("x-openvibe-timestamp") {
            timestamp = str::from_utf8(header.value).unwrap_or_default();
        }
    }
    match (subscription, number) {
        (Some(subscription), Some(number)) => Ok(Some(Delivery {
            subscription,
            number,
            signature,
            timestamp,
            body: &bytes[head_bytes..length],
            length,
        })),
        _ => Err(WireFault::Malformed("not one of ours")),
    }
}

/// Whether one of the signatures is that of the body at the time given. Its age is not judged here.
fn is_genuine(secret: &str, delivery: &Delivery<'_>) -> bool {
    let mut parts = delivery.signature.split(',');
    if parts.next().and_then(|part| part.strip_prefix("t=")) != Some(delivery.timestamp) {
        return false;
    }
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(delivery.timestamp.as_bytes());
    mac.update(b".");
    mac.update(delivery.body);
    parts
        .filter_map(|part| hex::decode(part.strip_prefix("v2=")?).ok())
        .any(|signature| mac.clone().verify_slice(&signature).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    fn request(signature: &str, body: &str) -> Vec<u8> {
        format!(
            "POST /load/3 HTTP/1.1\r\nhost: h\r\nx-openvibe-event-id: evt_01K7AAB2CD3EF4GH5J00000010\r\n\
             x-openvibe-timestamp: 1761033600\r\nX-OpenVibe-Signature-V2: {signature}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }

    // The published vector of version 2.
    const GOOD: &str = "t=1761033600,v2=45c000a8052ab1b1240ecb8ed34207dd76ecc9ec6d364659bf2f514c982bd136";

    #[test]
    fn a_delivery_is_read_once_it_is_complete() {
        let bytes = request(GOOD, r#"{"event":{}}"#);
        for cut in 0..bytes.len() {
            assert_eq!(delivery(&bytes[..cut]).expect("so far so good"), None, "cut at {cut}");
        }
        let read = delivery(&bytes).expect("a delivery").expect("complete");
        assert_eq!((read.subscription, read.number, read.length), (3, 32, bytes.len()));
    }

    #[test]
    fn a_signature_counts_for_its_body_its_time_and_its_secret() {
        let genuine = |secret: &str, signature: &str, body: &str| {
            let bytes = request(signature, body);
            is_genuine(secret, &delivery(&bytes).expect("a delivery").expect("complete"))
        };
        let body = r#"{"event":{}}"#;
        assert!(genuine(SECRET, GOOD, body));
        let rotated = GOOD.replace(",v2=", &format!(",v2={},v2=", "0".repeat(64)));
        assert!(genuine(SECRET, &rotated, body), "any of two");
        assert!(!genuine("another secret", GOOD, body));
        assert!(!genuine(SECRET, GOOD, r#"{"event":{ }}"#));
        assert!(!genuine(SECRET, &GOOD.replace("t=1761033600", "t=1761033601"), body));
        assert!(!genuine(SECRET, "", body));
    }
}
