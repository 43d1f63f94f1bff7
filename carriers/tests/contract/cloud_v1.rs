//! What only a queue over HTTP can do to its carrier: judge signatures and clocks, answer in part, redirect.

use std::time::{Duration, SystemTime};

use carriers::{Class, SignalError};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::support::process::{Process, Variables, open, unique, wall_clock};
use super::support::wait::{SOON, eventually};
use super::support::world::{Backing, World};

/// A queue that gives one answer to everything, and keeps what it was asked.
struct Stub {
    url: String,
    asked: Arc<Mutex<Vec<String>>>,
    _server: AbortOnDropHandle<()>,
}

impl Stub {
    async fn answering(answer: impl Into<String>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}/123/q", listener.local_addr().expect("an address"));
        let (asked, answer) = (Arc::new(Mutex::new(Vec::new())), answer.into());
        let kept = Arc::clone(&asked);
        let server = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let mut request = Vec::new();
                let mut part = [0; 4096];
                while let Ok(read @ 1..) = client.read(&mut part).await {
                    request.extend_from_slice(&part[..read]);
                    let text = String::from_utf8_lossy(&request);
                    let length = text
                        .split_once("content-length: ")
                        .and_then(|(_, rest)| rest.split_once("\r\n"));
                    let body = text.split_once("\r\n\r\n").map(|(_, body)| body.len());
                    if let (Some((length, _)), Some(body)) = (length, body)
                        && length.parse() == Ok(body)
                    {
                        break;
                    }
                }
                kept.lock().push(String::from_utf8_lossy(&request).into_owned());
                let _ = client.write_all(answer.as_bytes()).await;
            }
        });
        Self {
            url,
            asked,
            _server: AbortOnDropHandle::new(server),
        }
    }

    fn variables(&self) -> Variables {
        Variables::from([
            ("CLOUD_QUEUE_URL", self.url.clone()),
            ("CLOUD_QUEUE_REGION", "eu-west-3".into()),
            ("CLOUD_QUEUE_ACCESS_KEY", "AKIDTEST".into()),
            ("CLOUD_QUEUE_SECRET_KEY", "hush".into()),
        ])
    }

    fn process(&self) -> Process {
        Process::open(carriers::descriptor("cloud-v1").expect("registered"), &self.variables())
    }
}

fn http(status: &str, body: &str) -> String {
    format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn one_signal_is_one_signed_message_of_two_ids() {
    let stub = Stub::answering(http("200 OK", r#"{"MessageId":"m"}"#)).await;
    let signal = unique(Class::Queue);
    stub.process()
        .send(Class::Queue, std::slice::from_ref(&signal))
        .await
        .expect("taken");
    let asked = stub.asked.lock().clone();
    let [request] = asked.as_slice() else {
        panic!("{} requests", asked.len())
    };
    let (head, body) = request.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("POST /123/q HTTP/1.1\r\n"), "{head}");
    assert!(
        head.contains("authorization: AWS4-HMAC-SHA256 Credential=AKIDTEST/"),
        "{head}"
    );
    assert!(head.contains("/eu-west-3/sqs/aws4_request"), "{head}");
    assert!(
        head.contains("SignedHeaders=content-type;host;x-amz-content-sha256;x-amz-date"),
        "{head}"
    );
    assert!(!request.contains("hush"));
    let form: Vec<(String, String)> = url::form_urlencoded::parse(body.as_bytes()).into_owned().collect();
    let message = serde_json::to_string(&signal).expect("JSON");
    let wanted = [
        ("Action", "SendMessage"),
        ("Version", "2012-11-05"),
        ("MessageBody", &message),
    ];
    assert_eq!(form, wanted.map(|(name, value)| (name.to_owned(), value.to_owned())));
}

#[tokio::test]
async fn a_request_is_one_operation_however_many_signals_it_holds() {
    let stub = Stub::answering(http("200 OK", "")).await;
    let process = stub.process();
    let signals: Vec<_> = (0..25).map(|_| unique(Class::Queue)).collect();
    process.send(Class::Queue, &signals).await.expect("taken");
    let counted = process.carrier.operations().expect("it counts itself");
    assert_eq!(counted.load(std::sync::atomic::Ordering::Relaxed), 3);
    assert_eq!(stub.asked.lock().len(), 3);
}

#[tokio::test]
async fn without_keys_nothing_is_signed() {
    let stub = Stub::answering(http("200 OK", "")).await;
    let mut variables = stub.variables();
    variables.retain(|name, _| !name.ends_with("_KEY"));
    let process = Process::open(carriers::descriptor("cloud-v1").expect("registered"), &variables);
    process
        .send(Class::Queue, &[unique(Class::Queue)])
        .await
        .expect("taken");
    assert!(!stub.asked.lock()[0].contains("authorization"));
}

#[tokio::test]
async fn what_is_no_success_is_named() {
    let partly = "<R><BatchResultErrorEntry><Id>1</Id><Code>InternalError</Code></BatchResultErrorEntry></R>";
    let endless = "x".repeat(100_000);
    let cases = [
        (http("503 Service Unavailable", ""), "refused: queue answered 503"),
        (http("200 OK", partly), "refused: 1 of a batch failed: InternalError"),
        (
            http("403 Forbidden", "<Code>InvalidClientTokenId</Code>"),
            "permission denied",
        ),
        (
            http("200 OK", &endless),
            "refused: its answer is longer than 65536 bytes",
        ),
        (
            "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n".into(),
            "refused: queue answered 302",
        ),
    ];
    for (answer, wanted) in cases {
        let stub = Stub::answering(answer).await;
        let sent = stub
            .process()
            .send(Class::Queue, &[unique(Class::Queue), unique(Class::Queue)])
            .await;
        assert_eq!(sent.expect_err("no success").to_string(), wanted);
        assert_eq!(stub.asked.lock().len(), 1, "nothing is sent twice or elsewhere");
    }
    let stub = Stub::answering("no HTTP at all").await;
    let sent = stub
        .process()
        .send(Class::Queue, &[unique(Class::Queue)])
        .await
        .expect_err("no success");
    let text = sent.to_string();
    assert!(
        matches!(sent, SignalError::Lost(_)) && !text.contains("127.0.0.1"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_key_is_denied_by_a_server_that_checks() {
    let world = World::of("cloud-v1").await;
    let right = Process::open(world.descriptor, &world.variables);
    right
        .send(Class::Queue, &[unique(Class::Queue)])
        .await
        .expect("the right key");
    for (name, value) in [
        ("CLOUD_QUEUE_SECRET_KEY", "wrong"),
        ("CLOUD_QUEUE_ACCESS_KEY", "AKIAWRONG"),
    ] {
        let mut variables = world.variables.clone();
        variables.insert(name, value.into());
        let wrong = Process::open(world.descriptor, &variables);
        let sent = wrong.send(Class::Queue, &[unique(Class::Queue)]).await;
        assert_eq!(sent, Err(SignalError::Denied), "{name}");
    }
}

#[tokio::test]
async fn a_wrong_clock_is_called_one() {
    fn ahead() -> SystemTime {
        wall_clock() + Duration::from_secs(3600)
    }
    let refused = "<Error><Code>SignatureDoesNotMatch</Code></Error>";
    let written = httpdate::fmt_http_date(wall_clock());
    let answer = http("403 Forbidden", refused).replacen("\r\n", &format!("\r\nDate: {written}\r\n"), 1);
    let stub = Stub::answering(answer).await;
    let opened = open(
        carriers::descriptor("cloud-v1").expect("registered"),
        &stub.variables(),
        "test",
        ahead,
    );
    let carrier = opened.expect("good variables").expect("configured");
    let sent = carrier
        .signal(Class::Queue, &[unique(Class::Queue)])
        .await
        .expect_err("refused");
    let SignalError::Clock(text) = sent else {
        panic!("{sent:?}")
    };
    assert!(text.starts_with("by 36") || text.starts_with("by 35"), "{text}");
    assert_eq!(
        stub.process().send(Class::Queue, &[unique(Class::Queue)]).await,
        Err(SignalError::Denied)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strange_messages_are_deleted_and_what_is_behind_them_arrives() {
    let world = World::of("cloud-v1").await;
    let Backing::Sqs(queue) = &world.backing else {
        panic!("a queue")
    };
    let long = "<&\"".repeat(80_000);
    for body in [
        "nonsense",
        r#"{"event_id":1}"#,
        "<Message><Body>{}</Body></Message>",
        "&amp;#0;",
        &long,
    ] {
        queue.put(body).await;
    }
    let one = world.process();
    let real = unique(Class::Queue);
    one.send(Class::Queue, std::slice::from_ref(&real))
        .await
        .expect("taken");
    eventually("the real one arrives", SOON, async || one.signals() == [real.clone()]).await;
    eventually("the queue is empty", SOON, async || match queue.counts().await {
        (0, 0) => Ok(()),
        counts => Err(format!("{counts:?}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_switch_nothing_is_received() {
    let world = World::of("cloud-v1").await;
    let mut variables = world.variables.clone();
    variables.remove("CLOUD_QUEUE_CONSUME");
    let mut one = Process::start(world.descriptor, &variables);
    one.carrier.probe().await.expect("nothing to ask");
    assert_eq!(world.line.accepted(), 0, "an idle queue is asked nothing");
    one.send(Class::Queue, &[unique(Class::Queue)]).await.expect("taken");
    let Backing::Sqs(queue) = &world.backing else {
        panic!("a queue")
    };
    assert_eq!(queue.counts().await, (1, 0));
    one.stop().await;
    assert!(one.signals().is_empty());
}
