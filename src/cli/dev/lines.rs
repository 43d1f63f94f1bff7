//! Lines to paste: every one works as it stands against what runs here.

use crate::clock;
use crate::domain::ids::EventId;

use super::issuer::Issuer;
use super::receiver::{Arrival, Receiver};
use super::terminal::Terminal;

/// The client that the printed token is for: a source of the built-in map, so it can publish as well as read.
const CLIENT: &str = "media";

/// Prints the lines.
pub(super) fn print(terminal: Terminal, issuer: &Issuer, base: &str, hook: &str) {
    for (heading, line) in lines(&issuer.long_token(CLIENT), issuer.url(), base, hook) {
        terminal.heading(heading);
        terminal.line(line);
    }
    terminal.heading("Follow it live");
    terminal.line(format_args!("curl -N '{base}/realtime/stream?topics=*'"));
    terminal.line(format_args!("or open {base}/dev/live in a browser"));
    terminal.line("\nDeliveries to the receiver are shown below. Ctrl-C stops everything.\n");
}

/// Each line with its heading.
fn lines(token: &str, issuer: &str, base: &str, hook: &str) -> [(&'static str, String); 9] {
    let json = "-H 'content-type: application/json'";
    let auth = "-H \"authorization: Bearer $TOKEN\"";
    let event = format!(
        r#"{{"event_id":"{}","event_type":"media.vod.ready","version":1,"source":"{CLIENT}","actor":{{"type":"service","id":"{CLIENT}"}},"timestamp":"{}","subject":{{"type":"vod","id":"vod-1"}},"payload":{{"title":"Hello"}}}}"#,
        EventId::generate(),
        clock::now()
    );
    [
        ("A token of svc:media, valid for 12 hours", format!("TOKEN={token}")),
        (
            "Or ask for one, as any service does (lifetime_s is a convenience of this issuer)",
            format!(
                "curl -s {issuer}/oauth/token -d grant_type=client_credentials -d client_id={CLIENT} -d lifetime_s=43200"
            ),
        ),
        (
            "Subscribe the receiver",
            format!(
                "curl -s {base}/api/v1/subscriptions {auth} {json} -d '{{\"topic_pattern\":\"media.*\",\"endpoint\":\"{hook}\"}}'"
            ),
        ),
        (
            "Publish an event (twice: the second answers duplicate)",
            format!("curl -s {base}/api/v1/events {auth} {json} -d '{event}'"),
        ),
        (
            "Pull from the beginning",
            format!("curl -s '{base}/api/v1/events?topic=media.*&limit=10' {auth}"),
        ),
        (
            "Remember how far you are: the next_cursor of a pull",
            format!(
                "curl -s -X PUT {base}/api/v1/checkpoints {auth} {json} -d \"{{\\\"topic\\\":\\\"media.*\\\",\\\"cursor\\\":\\\"$(curl -s '{base}/api/v1/events?topic=media.*' {auth} | sed 's/.*\"next_cursor\":\"\\([^\"]*\\)\".*/\\1/')\\\"}}\""
            ),
        ),
        (
            "And read it back",
            format!("curl -s '{base}/api/v1/checkpoints?topic=media.*' {auth}"),
        ),
        (
            "What became of the deliveries",
            format!("curl -s '{base}/api/v1/deliveries?limit=10' {auth}"),
        ),
        (
            "Which carrier rings for them, and why",
            format!("curl -s '{base}/api/v1/placement?event_type=media.vod.ready' {auth}"),
        ),
    ]
}

/// Shows what arrives at the receiver from now on. It does not end.
pub(super) async fn follow(terminal: Terminal, receiver: &Receiver) {
    let mut seen = receiver.since(0).last().map_or(0, |arrival| arrival.number);
    loop {
        for arrival in receiver.next(seen).await {
            seen = arrival.number;
            show(terminal, &arrival);
        }
    }
}

fn show(terminal: Terminal, arrival: &Arrival) {
    terminal.line(format_args!(
        "received   POST {}  {}  {}  attempt {}",
        arrival.path,
        arrival.header("x-openvibe-event-type"),
        arrival.event_id(),
        arrival.attempt()
    ));
    terminal.seen(format_args!(
        "x-openvibe-signature-v2: {}",
        arrival.header("x-openvibe-signature-v2")
    ));
    terminal.seen(String::from_utf8_lossy(&arrival.body));
}
