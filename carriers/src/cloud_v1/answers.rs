//! Reads what the queue answers: a few elements of an XML document, and what a refusal means.

use std::time::{Duration, SystemTime};

use crate::SignalError;

/// Clocks that differ by more make signatures invalid.
const SKEW_MAX: Duration = Duration::from_secs(300);

/// A received message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Received {
    /// What it says.
    pub(super) body: String,
    /// What deletes it.
    pub(super) receipt: String,
}

/// The messages of an answer to `ReceiveMessage`. One without a receipt cannot be deleted and is left out.
pub(super) fn received(document: &str) -> Vec<Received> {
    let messages = elements(document, "Message");
    let read = messages.filter_map(|message| {
        Some(Received {
            body: unescaped(elements(message, "Body").next().unwrap_or_default()),
            receipt: unescaped(elements(message, "ReceiptHandle").next()?),
        })
    });
    read.collect()
}

/// How many entries of a batch failed, and why the first of them did.
pub(super) fn failed_entries(document: &str) -> Option<(usize, String)> {
    let mut failed = elements(document, "BatchResultErrorEntry");
    let code = elements(failed.next()?, "Code")
        .next()
        .map_or_else(|| "no code".into(), plain);
    Some((1 + failed.count(), code))
}

/// What an answer other than 2xx means. `theirs` is the time the queue wrote on it.
pub(super) fn refusal(status: u16, document: &str, theirs: Option<SystemTime>, ours: SystemTime) -> SignalError {
    let code = elements(document, "Code").next().map(plain).unwrap_or_default();
    let text = elements(document, "Message").next().unwrap_or_default();
    let judged_by_time = ["RequestExpired", "RequestTimeTooSkewed", "RequestInTheFuture"].contains(&code.as_str())
        || ["Signature expired", "Signature not yet current"]
            .iter()
            .any(|words| text.contains(words));
    let signature = ["SignatureDoesNotMatch", "InvalidSignatureException", "InvalidSignature"];
    let apart = theirs.map(|theirs| difference(theirs, ours));
    if judged_by_time || (signature.contains(&code.as_str()) && apart.is_some_and(|apart| apart > SKEW_MAX)) {
        return SignalError::Clock(match apart {
            Some(apart) => format!("by {} s; {code}", apart.as_secs()),
            None => code,
        });
    }
    if matches!(status, 401 | 403) {
        return SignalError::Denied;
    }
    let code = Some(code)
        .filter(|code| !code.is_empty())
        .map(|code| format!(" {code}"))
        .unwrap_or_default();
    SignalError::Refused(format!("queue answered {status}{code}"))
}

fn difference(a: SystemTime, b: SystemTime) -> Duration {
    a.duration_since(b).unwrap_or_else(|earlier| earlier.duration())
}

/// A code, made fit for a log line.
fn plain(code: &str) -> String {
    code.chars()
        .filter(|c| c.is_ascii_alphanumeric() || ".-_".contains(*c))
        .take(80)
        .collect()
}

/// What stands between the tags of each element of this name. Such elements do not stand within one another here.
fn elements<'a>(document: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let (start, end) = (format!("<{name}>"), format!("</{name}>"));
    let mut rest = document;
    std::iter::from_fn(move || {
        let (_, after) = rest.split_once(&start)?;
        let (element, after) = after.split_once(&end)?;
        rest = after;
        Some(element)
    })
}

/// The characters that escapes stand for. What is no escape stays.
fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('&') {
        plain.push_str(before);
        let escape = after.split_once(';').filter(|(name, _)| name.len() <= 8);
        match escape.and_then(|(name, after)| Some((character(name)?, after))) {
            Some((character, after)) => {
                plain.push(character);
                rest = after;
            }
            None => {
                plain.push('&');
                rest = after;
            }
        }
    }
    plain + rest
}

fn character(escape: &str) -> Option<char> {
    match escape {
        "quot" => Some('"'),
        "amp" => Some('&'),
        "lt" => Some('<'),
        "gt" => Some('>'),
        "apos" => Some('\''),
        _ => {
            let number = escape.strip_prefix('#')?;
            let code = match number.strip_prefix('x') {
                Some(hex) => u32::from_str_radix(hex, 16).ok()?,
                None => number.parse().ok()?,
            };
            char::from_u32(code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn messages_are_read_with_their_escapes_and_one_without_a_receipt_is_left() {
        let document = "<R><Message><MessageId>1</MessageId><ReceiptHandle>a&amp;b</ReceiptHandle>\
            <Body>{&quot;event_id&quot;:&#34;e&#x22;} &nope; &</Body></Message><Message><Body>x</Body></Message></R>";
        let body = "{\"event_id\":\"e\"} &nope; &".to_owned();
        let receipt = "a&b".to_owned();
        assert_eq!(received(document), [Received { body, receipt }]);
        assert_eq!(received("<Message><ReceiptHandle>a"), []);
        assert_eq!(received(""), []);
    }

    #[test]
    fn a_batch_that_was_taken_in_part_names_what_failed() {
        let document = "<SendMessageBatchResult><SendMessageBatchResultEntry><Id>0</Id></SendMessageBatchResultEntry>\
            <BatchResultErrorEntry><Id>1</Id><Code>InternalError</Code></BatchResultErrorEntry>\
            <BatchResultErrorEntry><Id>2</Id><Code>Other</Code></BatchResultErrorEntry></SendMessageBatchResult>";
        assert_eq!(failed_entries(document), Some((2, "InternalError".into())));
        assert_eq!(
            failed_entries("<SendMessageBatchResult></SendMessageBatchResult>"),
            None
        );
        assert_eq!(failed_entries(r#"{"MessageId":"m"}"#), None);
    }

    #[test]
    fn a_wrong_clock_is_called_one_and_a_wrong_key_is_not() {
        let mismatch = "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message></Error>";
        assert_eq!(refusal(403, mismatch, Some(at(1000)), at(1001)), SignalError::Denied);
        assert_eq!(refusal(403, mismatch, None, at(1001)), SignalError::Denied);
        let clock = |error| matches!(error, SignalError::Clock(_));
        assert!(clock(refusal(403, mismatch, Some(at(1000)), at(2000))));
        assert!(clock(refusal(403, mismatch, Some(at(2000)), at(1000))));
        assert!(clock(refusal(403, "<Code>RequestExpired</Code>", None, at(0))));
        let expired = "<Code>SignatureDoesNotMatch</Code><Message>Signature expired: 1 is now earlier than 2</Message>";
        assert!(clock(refusal(403, expired, None, at(0))));
    }

    #[test]
    fn a_refusal_shows_its_status_and_nothing_the_queue_made_up() {
        assert_eq!(
            refusal(500, "", None, at(0)),
            SignalError::Refused("queue answered 500".into())
        );
        let odd = "<Code>a\nb&lt;c</Code>";
        assert_eq!(
            refusal(400, odd, None, at(0)),
            SignalError::Refused("queue answered 400 abltc".into())
        );
    }
}
