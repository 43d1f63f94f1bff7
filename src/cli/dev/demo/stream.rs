//! The step of the tour that follows live streams, as a browser would.

use std::time::Duration;

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE};
use serde_json::Value;

use super::TourError;
use super::events::{Draft, mention_made, poll_opened};
use super::guide::{Guide, PATIENCE, brief, late, short};

/// The person who looks.
const PERSON: &str = "usr_01K7DDE5FG6HJ7KM8NP9QR0STV";

/// What is followed.
const TOPIC: &str = "community.*";

/// The longest that one stream of the tour lives.
const STREAM_MAX: Duration = Duration::from_secs(60);

/// 10. Streams, from the ticket to the resume.
pub(super) async fn streamed(guide: &mut Guide<'_>) -> Result<(), TourError> {
    let terminal = guide.stage.terminal;
    terminal.step(10, "Browsers see events as they come, and miss none across a cut");
    let ticket = ticket(guide).await?;
    let mut anybody = Stream::open(guide, "", None).await?;
    let mut person = Stream::open(guide, &ticket, None).await?;
    guide.expect(
        anybody.viewer == "anonymous" && person.viewer == "user",
        "one stream is open for nobody in particular, one for a person",
    )?;

    let (public, hers) = (poll_opened("poll-1"), mention_made(PERSON));
    guide.send(&[hers.clone(), public.clone()], 201).await?;
    let seen = person.events(guide, 2).await?;
    guide.expect(
        seen == ids(&[&hers, &public]),
        "she sees that she was mentioned, then the poll, which is public",
    )?;
    let seen = anybody.events(guide, 1).await?;
    guide.expect(seen == ids(&[&public]), "everybody else sees the poll alone")?;

    let position = anybody.position.clone();
    drop(anybody);
    terminal.seen("the connection is cut");
    let missed = [poll_opened("poll-2"), poll_opened("poll-3")];
    guide.send(&missed, 201).await?;
    let mut again = Stream::open(guide, "", Some(&position)).await?;
    let seen = again.events(guide, 2).await?;
    guide.expect(
        seen == ids(&[&missed[0], &missed[1]]) && again.gaps == 0,
        "the stream that resumes gets both events that came meanwhile, in order, and no gap",
    )?;

    let used = request(guide, &ticket).send().await?;
    let status = used.status().as_u16();
    let body: Value = serde_json::from_slice(&used.bytes().await?).unwrap_or_default();
    terminal.call("GET", "/realtime/stream?ticket=…", status, brief(&body, &["code"]));
    guide.expect(
        status == 401 && body["code"] == "ticket.used",
        "her ticket opens no second stream; her browser asks for a new one",
    )
}

/// A session of the person, and a ticket for it.
async fn ticket(guide: &Guide<'_>) -> Result<String, TourError> {
    let issuer = guide.stage.issuer.url();
    let http = guide.stage.http;
    let session = http
        .post(format!("{issuer}/person/token"))
        .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
        .body(format!("subject={PERSON}"));
    let session = told(guide, "/person/token", session, "access_token", &["subject"]).await?;
    let ticket = http
        .post(format!("{issuer}/api/v1/realtime/ticket"))
        .header(AUTHORIZATION, format!("Bearer {session}"));
    told(
        guide,
        "/api/v1/realtime/ticket",
        ticket,
        "ticket",
        &["subject", "expires_in"],
    )
    .await
}

/// Sends a request to the issuer, tells it, and answers a member of the answer.
async fn told(
    guide: &Guide<'_>,
    path: &str,
    request: reqwest::RequestBuilder,
    member: &str,
    shown: &[&str],
) -> Result<String, TourError> {
    let answer = request.send().await?;
    let status = answer.status().as_u16();
    let body: Value = serde_json::from_slice(&answer.bytes().await?).unwrap_or_default();
    guide.stage.terminal.call("POST", path, status, brief(&body, shown));
    let value = body[member].as_str().filter(|_| status == 200);
    value
        .map(str::to_owned)
        .ok_or_else(|| TourError::Unmet(format!("{path} to answer {member}, got {status} {body}")))
}

fn request(guide: &Guide<'_>, ticket: &str) -> reqwest::RequestBuilder {
    let mut url = format!("{}/realtime/stream?topics={TOPIC}", guide.service.base());
    if !ticket.is_empty() {
        url.push_str("&ticket=");
        url.push_str(ticket);
    }
    guide.stage.http.get(url).timeout(STREAM_MAX)
}

fn ids(drafts: &[&Draft]) -> Vec<String> {
    drafts.iter().map(|draft| draft.id.clone()).collect()
}

/// An open stream, read frame by frame.
#[derive(Debug)]
struct Stream {
    answer: reqwest::Response,
    /// Bytes of a frame that is not whole yet.
    rest: Vec<u8>,
    /// As whom the service says that it was opened.
    viewer: String,
    /// The id of the last event.
    position: String,
    gaps: usize,
}

impl Stream {
    async fn open(guide: &Guide<'_>, ticket: &str, position: Option<&str>) -> Result<Self, TourError> {
        let mut request = request(guide, ticket);
        if let Some(position) = position {
            request = request.header("last-event-id", position);
        }
        let answer = request.send().await?;
        let status = answer.status().as_u16();
        if status != 200 {
            let body = answer.text().await?;
            return Err(TourError::Unmet(format!("a stream, got {status} {body}")));
        }
        let mut stream = Self {
            answer,
            rest: Vec::new(),
            viewer: String::new(),
            position: String::new(),
            gaps: 0,
        };
        let opening = stream.frame().await?;
        stream.viewer = field(&opening, ": connected ").to_owned();
        let with = match (ticket, position) {
            ("", None) => String::new(),
            ("", Some(position)) => format!("  Last-Event-ID: {position}"),
            _ => "&ticket=…".to_owned(),
        };
        let path = format!("/realtime/stream?topics={TOPIC}{with}");
        let said = format!("connected {}", stream.viewer);
        guide.stage.terminal.call("GET", &path, status, said);
        Ok(stream)
    }

    /// The ids of the next so many events.
    async fn events(&mut self, guide: &Guide<'_>, count: usize) -> Result<Vec<String>, TourError> {
        let terminal = guide.stage.terminal;
        let what = "for events to arrive on the stream";
        let reading = async {
            let mut ids = Vec::new();
            while ids.len() < count {
                let frame = self.frame().await?;
                let data = field(&frame, "data: ");
                if field(&frame, "event: ") == "gap" {
                    self.gaps += 1;
                    terminal.seen(format_args!("event: gap  data: {}", short(data)));
                    continue;
                }
                let Ok(data) = serde_json::from_str::<Value>(data) else {
                    continue;
                };
                self.position = field(&frame, "id: ").to_owned();
                let event = brief(&data["event"], &["event_type", "event_id"]);
                terminal.seen(format_args!("id: {}  {event}", self.position));
                ids.push(data["event"]["event_id"].as_str().unwrap_or_default().to_owned());
            }
            Ok(ids)
        };
        let outcome = terminal.waiting(what, PATIENCE, reading).await;
        outcome.unwrap_or_else(|| Err(late(what)))
    }

    /// The lines of the next frame.
    async fn frame(&mut self) -> Result<String, TourError> {
        loop {
            if let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
                let frame = self.rest.drain(..end + 2).collect::<Vec<u8>>();
                return Ok(String::from_utf8_lossy(&frame).into_owned());
            }
            match self.answer.chunk().await? {
                Some(bytes) => self.rest.extend_from_slice(&bytes),
                None => return Err(TourError::Unmet("a stream that goes on".to_owned())),
            }
        }
    }
}

/// What follows `name` on the first line that begins with it.
fn field<'a>(frame: &'a str, name: &str) -> &'a str {
    let mut lines = frame.lines();
    lines.find_map(|line| line.strip_prefix(name)).unwrap_or_default()
}
