//! Live streams as their clients read them: strict frames off one connection.
//!
//! A frame that is not exactly one of those that are promised fails the test: what a payload could forge would be seen.

use std::{collections::VecDeque, time::Duration};

use reqwest::{Method, RequestBuilder, header::HeaderMap};
use serde_json::Value;

use super::{
    client::{Client, Response},
    ledger::position_of,
    wait::{SOON, within},
};

/// Where streams are opened.
pub(crate) const PATH: &str = "/realtime/stream";

/// Longer than any test.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// What comes on a stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    /// An event under its cursor.
    Event(String, Value),
    /// Events that are left out.
    Gap(Value),
    /// A sign of life.
    Heartbeat,
}

/// What was read next.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    /// A frame.
    Frame(Frame),
    /// The stream was ended, with its last chunk.
    End,
    /// The connection ended in the middle.
    Cut,
}

/// An open stream.
#[derive(Debug)]
pub(crate) struct Sse {
    /// The headers of the answer.
    pub(crate) headers: HeaderMap,
    /// Who the service says is looking.
    pub(crate) viewer: String,
    answer: reqwest::Response,
    seen: Vec<u8>,
    frames: VecDeque<Frame>,
    last: String,
}

/// A request for a stream: `query` stands behind the `?`.
pub(crate) fn ask(client: &Client, query: &str, token: Option<&str>) -> RequestBuilder {
    client
        .request(Method::GET, &format!("{PATH}?{query}"), token)
        .timeout(FOR_EVER)
}

/// A request that goes on after the event of this cursor.
pub(crate) fn after(request: RequestBuilder, cursor: Option<&str>) -> RequestBuilder {
    match cursor {
        Some(cursor) => request.header("Last-Event-ID", cursor),
        None => request,
    }
}

impl Sse {
    /// Opens a stream, and reads its first words; or answers the refusal.
    pub(crate) async fn open(request: RequestBuilder) -> Result<Self, Response> {
        let opened = Self::try_open(request);
        within("an answer", SOON, opened).await.expect("an answer")
    }

    /// As [`Sse::open`], when no answer may come.
    pub(crate) async fn try_open(request: RequestBuilder) -> Result<Result<Self, Response>, reqwest::Error> {
        let answer = request.send().await?;
        if answer.status() != 200 {
            return Ok(Err(Response::read(answer).await?));
        }
        let mut stream = Self {
            headers: answer.headers().clone(),
            viewer: String::new(),
            answer,
            seen: Vec::new(),
            frames: VecDeque::new(),
            last: String::new(),
        };
        while stream.viewer.is_empty() {
            let Some(block) = stream.block() else {
                match stream.answer.chunk().await? {
                    Some(more) => stream.seen.extend(more),
                    None => panic!("a stream that ends before its first word"),
                }
                continue;
            };
            let viewer = block.strip_prefix("retry: 3000\n: connected ");
            viewer.expect("how a stream opens").clone_into(&mut stream.viewer);
        }
        Ok(Ok(stream))
    }

    /// A stream of a client's process, which must be given.
    pub(crate) async fn of(client: &Client, query: &str, token: Option<&str>) -> Self {
        Self::open(ask(client, query, token))
            .await
            .unwrap_or_else(|refusal| panic!("{}: {}", refusal.status, refusal.text))
    }

    /// What comes next.
    pub(crate) async fn next(&mut self) -> Part {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                if let Frame::Event(cursor, _) = &frame {
                    self.last.clone_from(cursor);
                }
                return Part::Frame(frame);
            }
            match self.answer.chunk().await {
                Ok(Some(more)) => self.seen.extend(more),
                Ok(None) => {
                    assert!(self.seen.is_empty(), "half a frame: {:?}", self.seen);
                    return Part::End;
                }
                Err(_) => return Part::Cut,
            }
            while let Some(block) = self.block() {
                self.frames.push_back(frame(&block));
            }
        }
    }

    /// The next frame that is no heartbeat; none at the end of the stream.
    pub(crate) async fn word(&mut self) -> Option<Frame> {
        loop {
            match self.next().await {
                Part::Frame(Frame::Heartbeat) => {}
                Part::Frame(frame) => return Some(frame),
                Part::End | Part::Cut => return None,
            }
        }
    }

    /// The next frame, which must be an event and come soon; answers its envelope.
    pub(crate) async fn event(&mut self) -> Value {
        match within("an event", SOON, self.word()).await {
            Some(Frame::Event(_, envelope)) => envelope,
            other => panic!("an event was expected: {other:?}"),
        }
    }

    /// The cursor of the last event that was given.
    pub(crate) fn last_cursor(&self) -> &str {
        &self.last
    }

    /// The next event's id, which must come soon.
    pub(crate) async fn event_id(&mut self) -> String {
        self.event().await["event_id"].as_str().expect("an id").to_owned()
    }

    /// The next frame, which must be a gap and come soon.
    pub(crate) async fn gap(&mut self) -> Value {
        match within("a gap", SOON, self.word()).await {
            Some(Frame::Gap(gap)) => gap,
            other => panic!("a gap was expected: {other:?}"),
        }
    }

    /// Waits for the end, before which nothing but heartbeats may come: `End` or `Cut`.
    pub(crate) async fn ended(&mut self, deadline: Duration) -> Part {
        let end = async {
            loop {
                match self.next().await {
                    Part::Frame(Frame::Heartbeat) => {}
                    Part::Frame(frame) => panic!("the end was expected: {frame:?}"),
                    end => return end,
                }
            }
        };
        within("the end of the stream", deadline, end).await
    }

    /// The text before the next empty line.
    fn block(&mut self) -> Option<String> {
        let end = self.seen.windows(2).position(|two| two == b"\n\n")?;
        let block = self.seen[..end].to_vec();
        self.seen.drain(..end + 2);
        Some(String::from_utf8(block).expect("a stream is UTF-8"))
    }
}

fn frame(block: &str) -> Frame {
    assert!(!block.contains('\r'), "a carriage return ends a line too: {block:?}");
    let lines: Vec<&str> = block.split('\n').collect();
    let data = |line: &str| -> Value {
        let text = line.strip_prefix("data: ").expect("data");
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    match lines[..] {
        [": hb"] => Frame::Heartbeat,
        ["event: gap", line] => Frame::Gap(data(line)),
        [id, line] => {
            let cursor = id.strip_prefix("id: ").unwrap_or_else(|| panic!("no frame: {block:?}"));
            assert!(position_of(cursor).is_some(), "an id is a cursor: {cursor}");
            let mut data = data(line);
            assert_eq!(data.as_object().map(serde_json::Map::len), Some(1), "{data}");
            Frame::Event(cursor.to_owned(), data["event"].take())
        }
        _ => panic!("no frame: {block:?}"),
    }
}
