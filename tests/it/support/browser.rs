//! A real browser without a window, and a server for the one page it opens. What the page sees it posts back.

use std::{
    process::{Child, Command, Stdio},
    sync::Arc,
};

use parking_lot::Mutex;
use serde_json::Value;
use tokio::{
    io::{AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    http1,
    process::{Account, Directory, kill_family},
};

/// A page on an origin of its own. Everything that it posts is kept.
#[derive(Debug)]
pub(crate) struct Page {
    origin: String,
    html: Arc<Mutex<String>>,
    posted: Arc<Mutex<Vec<Value>>>,
    _server: AbortOnDropHandle<()>,
}

impl Page {
    /// Serves an empty page on a free loopback port.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free loopback port");
        let origin = format!("http://{}", listener.local_addr().expect("a bound port"));
        let (html, posted) = (Arc::default(), Arc::default());
        let server = serve(listener, Arc::clone(&html), Arc::clone(&posted));
        Self {
            origin,
            html,
            posted,
            _server: AbortOnDropHandle::new(tokio::spawn(server)),
        }
    }

    /// `http://host:port`.
    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }

    /// What the page is from now on.
    pub(crate) fn show(&self, html: &str) {
        html.clone_into(&mut self.html.lock());
    }

    /// Everything that was posted so far, in order.
    pub(crate) fn posted(&self) -> Vec<Value> {
        self.posted.lock().clone()
    }
}

async fn serve(listener: TcpListener, html: Arc<Mutex<String>>, posted: Arc<Mutex<Vec<Value>>>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(converse(stream, Arc::clone(&html), Arc::clone(&posted)));
        while connections.try_join_next().is_some() {}
    }
}

async fn converse(stream: TcpStream, html: Arc<Mutex<String>>, posted: Arc<Mutex<Vec<Value>>>) {
    let mut stream = BufReader::new(stream);
    while let Ok(Some(request)) = http1::read_request(&mut stream).await {
        let (status, body) = match (request.method.as_str(), request.path()) {
            ("GET", "/") => (200, html.lock().clone()),
            ("POST", "/") => {
                let body = serde_json::from_slice(&request.body).expect("the page posts JSON");
                posted.lock().push(body);
                (200, String::new())
            }
            _ => (404, String::new()),
        };
        let answer = format!(
            "HTTP/1.1 {status} Answer\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// A running browser. It ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Browser {
    program: Child,
    _directory: Directory,
}

impl Browser {
    /// Opens a page.
    pub(crate) fn open(url: &str) -> Self {
        let Some(binary) = std::env::var_os("OV_TEST_CHROMIUM") else {
            panic!("OV_TEST_CHROMIUM is not set; run: eval \"$(scripts/services.sh up chromium)\"");
        };
        let directory = Account::for_servers().directory("browser");
        let mut command = Command::new(binary);
        command
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
            ])
            .args([
                "--disable-sync",
                "--disable-extensions",
                "--no-proxy-server",
                "--mute-audio",
            ])
            .args([
                "--disable-background-timer-throttling",
                "--disable-renderer-backgrounding",
            ])
            .arg(format!("--user-data-dir={}", directory.path().display()))
            .arg(url)
            .env("HOME", directory.path())
            .env("XDG_RUNTIME_DIR", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self {
            program: command.spawn().expect("the browser starts"),
            _directory: directory,
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        kill_family(&mut self.program);
    }
}
