//! The domain types judge the fixtures of the contracts they implement as the schemas do.

use std::fs;
use std::path::{Path, PathBuf};

use super::batch::{PublishBody, split};
use super::envelope::{Envelope, SubjectRef};
use super::json::{Members, check_document};
use super::retry::RetryPolicy;
use super::topic::TopicPattern;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// The texts of one contract's fixtures, as they are written; `kind` is `valid` or `invalid`.
fn fixtures(contract: &str, kind: &str) -> Vec<(PathBuf, String)> {
    let (area, name) = contract.split_once('/').expect("an area and a name");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("contracts")
        .join(area)
        .join("fixtures")
        .join(name)
        .join(kind);
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).expect("a text"));
    let all: Vec<_> = files.map(|file| read(file.expect("a file").path())).collect();
    assert!(!all.is_empty(), "{} has none", folder.display());
    all
}

/// Every valid fixture must be accepted and every invalid one refused.
fn judge(contract: &str, accepts: impl Fn(&str) -> bool) {
    for (kind, verdict) in [("valid", true), ("invalid", false)] {
        for (path, text) in fixtures(contract, kind) {
            assert_eq!(accepts(&text), verdict, "{}", path.display());
        }
    }
}

/// As a body is read: first as a document, then by its own rules.
fn is_document(json: &str) -> bool {
    check_document(json.as_bytes()).is_ok()
}

fn is_envelope(json: &str) -> bool {
    is_document(json) && Envelope::parse(json, TRACE).is_ok()
}

#[test]
fn envelopes() {
    judge("events/event-envelope.v1", is_envelope);
}

#[test]
fn accepted_envelopes_are_written_as_valid_ones() {
    for (path, text) in fixtures("events/event-envelope.v1", "valid") {
        let (envelope, _) = Envelope::parse(&text, TRACE).expect("valid");
        let mut out = String::new();
        envelope.write_json(&mut out);
        assert_eq!(
            Envelope::parse(&out, "").expect("valid").0,
            envelope,
            "{}",
            path.display()
        );
    }
}

#[test]
fn publish_requests() {
    let accepts = |json: &str| match split(json) {
        Ok(PublishBody::Single(one)) => is_envelope(one),
        Ok(PublishBody::Batch(items)) => items.into_iter().all(is_envelope),
        Err(_) => false,
    };
    judge("events/publish-request.v1", |json| is_document(json) && accepts(json));
}

#[test]
fn subject_references() {
    judge("identity/subject-ref.v1", |json| {
        is_document(json) && SubjectRef::parse_json(json).is_some()
    });
}

#[test]
fn topic_patterns() {
    judge("events/topic-pattern.v1", |json| {
        serde_json::from_str::<String>(json).is_ok_and(|text| TopicPattern::parse(&text).is_some())
    });
}

/// Of a subscription request only the policy is judged here; each that an invalid fixture holds is what is wrong with it.
#[test]
fn retry_policies_of_subscription_requests() {
    for (kind, verdict) in [("valid", true), ("invalid", false)] {
        let mut policies = 0;
        for (path, text) in fixtures("events/subscription-request.v1", kind) {
            let members = Members::parse(&text);
            if let Some(policy) = members.as_ref().and_then(|members| members.get("retry_policy")) {
                assert_eq!(RetryPolicy::parse(policy.get()).is_ok(), verdict, "{}", path.display());
                policies += 1;
            }
        }
        assert!(policies > 0, "no {kind} one has a policy");
    }
}
