//! The events of the tour: what four services of the network would publish.

use serde_json::{Value, json};

use crate::clock;
use crate::domain::ids::EventId;

/// An event ready to be published.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    /// Its id.
    pub(super) id: String,
    /// The service that publishes it.
    pub(super) source: &'static str,
    /// The whole envelope.
    pub(super) envelope: Value,
}

fn draft(source: &'static str, event_type: &str, subject: (&str, &str), payload: &Value) -> Draft {
    let id = EventId::generate().to_string();
    let envelope = json!({
        "event_id": id,
        "event_type": event_type,
        "version": 1,
        "source": source,
        "actor": { "type": "service", "id": source },
        "timestamp": clock::now().to_iso(),
        "subject": { "type": subject.0, "id": subject.1 },
        "payload": payload,
    });
    Draft { id, source, envelope }
}

/// A recording that can be watched.
pub(super) fn vod_ready(vod: &str, minutes: u32) -> Draft {
    let payload = json!({ "title": "Sunday speedruns", "duration_s": minutes * 60, "renditions": ["1080p60", "720p"] });
    draft("media", "media.vod.ready", ("vod", vod), &payload)
}

/// A recording that could not be converted.
pub(super) fn vod_failed(vod: &str) -> Draft {
    draft(
        "media",
        "media.vod.failed",
        ("vod", vod),
        &json!({ "reason": "audio track is empty" }),
    )
}

/// A stream that went live.
pub(super) fn stream_started(stream: &str) -> Draft {
    let payload = json!({ "title": "Late night synths", "category": "music" });
    draft("live", "live.stream.started", ("stream", stream), &payload)
}

/// An invoice that was paid.
pub(super) fn invoice_paid(invoice: &str) -> Draft {
    let payload = json!({ "amount": "12.50", "currency": "EUR" });
    draft("billing", "billing.invoice.paid", ("invoice", invoice), &payload)
}

/// A post in a community.
pub(super) fn post_created(post: &str) -> Draft {
    let payload = json!({ "community": "pixel-art", "title": format!("Sketch {post}") });
    draft("community", "community.post.created", ("post", post), &payload)
}

/// A poll that everybody may see.
pub(super) fn poll_opened(poll: &str) -> Draft {
    let payload = json!({ "question": "Which engine next?" });
    let mut draft = draft("community", "community.poll.opened", ("poll", poll), &payload);
    draft.envelope["visibility"] = "public".into();
    draft
}

/// Somebody was named in a post, which concerns nobody else.
pub(super) fn mention_made(person: &str) -> Draft {
    let payload = json!({ "post": "post-1" });
    let mut draft = draft("community", "community.mention.created", ("user", person), &payload);
    draft.envelope["visibility"] = "subject".into();
    draft
}

/// A comment under a post.
pub(super) fn comment_created(comment: &str) -> Draft {
    let payload = json!({ "post": "post-1", "text": format!("Comment {comment}") });
    let id = format!("comment-{comment}");
    draft("community", "community.comment.created", ("comment", &id), &payload)
}

/// Money that went out.
pub(super) fn payout_settled(payout: &str) -> Draft {
    let payload = json!({ "amount": "80.00", "currency": "EUR" });
    let id = format!("payout-{payout}");
    draft("billing", "billing.payout.settled", ("payout", &id), &payload)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::ids::is_event_type;
    use crate::domain::sources::SourceMap;

    #[test]
    fn each_is_owned_by_the_service_that_publishes_it() {
        let sources = SourceMap::default();
        let all = [
            vod_ready("1", 2),
            vod_failed("2"),
            stream_started("3"),
            invoice_paid("4"),
            post_created("5"),
            comment_created("6"),
            payout_settled("7"),
            poll_opened("8"),
            mention_made("usr_01K7DDE5FG6HJ7KM8NP9QR0STV"),
        ];
        for event in all {
            let event_type = event.envelope["event_type"].as_str().expect("a type");
            assert!(is_event_type(event_type), "{event_type}");
            assert!(sources.may_publish(event.source, event_type).is_ok(), "{event_type}");
        }
    }
}
