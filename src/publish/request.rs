//! Stage A: from a body to a request that may be stored, or the first reason why not.

use crate::domain::batch::{self, BatchFault, PublishBody};
use crate::domain::envelope::{Envelope, FieldError, TraceOrigin};
use crate::domain::ids::new_request_id;
use crate::domain::sources::{SourceFault, SourceMap};

/// What may be published.
#[derive(Debug, Clone)]
pub struct Rules {
    /// Who owns which namespaces.
    pub sources: SourceMap,
    /// The longest payload, in bytes of compact JSON.
    pub max_payload_bytes: usize,
}

/// An event that passed validation.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// What to store.
    pub envelope: Envelope,
    /// Its trace was named by the caller, so the loop guard looks at it.
    pub guarded: bool,
}

/// A validated request.
#[derive(Debug, Clone)]
pub struct PublishRequest {
    /// Its events, in order.
    pub events: Vec<Prepared>,
    /// The principal that publishes, such as `svc:live`.
    pub publisher: String,
    /// An id of the server's own: the loop guard counts requests by it, and no caller can choose it.
    pub request_id: String,
    /// Roughly what it holds in memory.
    pub bytes: usize,
    /// The body was a batch, and is answered as one.
    pub batch: bool,
}

/// Why a request is not valid.
#[derive(Debug, thiserror::Error)]
pub enum RequestFault {
    /// The body as a whole.
    #[error(transparent)]
    Batch(#[from] BatchFault),
    /// One item of it.
    #[error("{fault}")]
    Item {
        /// Its place in the batch; `None` for a single envelope.
        index: Option<usize>,
        /// What is wrong.
        fault: ItemFault,
    },
}

/// What is wrong with one event.
#[derive(Debug, thiserror::Error)]
pub enum ItemFault {
    /// It is no envelope.
    #[error("the event does not fit the envelope; see errors")]
    Envelope(Vec<FieldError>),
    /// Its id stands earlier in the batch.
    #[error("event_id {0} stands earlier in this batch; send each event once")]
    Repeated(String),
    /// Its payload is too long.
    #[error("payload is {bytes} bytes of JSON; at most {limit} are accepted")]
    PayloadTooLarge {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// It asks for a redaction, which this version cannot do.
    #[error("payload.redacts asks for a redaction, which this version does not carry out; nothing was stored")]
    Redaction,
    /// It speaks for another source than the caller.
    #[error("source is {given:?}; a service publishes its own source, {own:?}")]
    SourceMismatch {
        /// The event's source.
        given: String,
        /// The caller's.
        own: String,
    },
    /// The caller owns no namespace.
    #[error("source {0:?} owns no event types here")]
    UnknownSource(String),
    /// The type lies outside what the caller owns.
    #[error("event_type must start with one of {}", .allowed.join(", "))]
    TypeNotAllowed {
        /// The prefixes the caller's source may use.
        allowed: Vec<String>,
    },
}

impl PublishRequest {
    /// Reads a body that a service sent: `slug` is its own source, `default_trace` the trace of the request, and
    /// `trace_given` tells whether the caller named that one. Checks run in a fixed order and the
    /// first failure ends it.
    pub fn of_service(
        body: &str,
        slug: &str,
        default_trace: &str,
        trace_given: bool,
        rules: &Rules,
    ) -> Result<Self, RequestFault> {
        let (items, batch) = match batch::split(body)? {
            PublishBody::Single(item) => (vec![item], false),
            PublishBody::Batch(items) => (items, true),
        };
        let mut events: Vec<Prepared> = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let prepared = prepare(item, slug, default_trace, trace_given, rules)
                .and_then(|prepared| refuse_repeat(&events, prepared))
                .map_err(|fault| RequestFault::Item {
                    index: batch.then_some(index),
                    fault,
                })?;
            events.push(prepared);
        }
        Ok(Self {
            events,
            publisher: format!("svc:{slug}"),
            request_id: new_request_id(),
            bytes: body.len(),
            batch,
        })
    }
}

fn prepare(
    item: &str,
    slug: &str,
    default_trace: &str,
    trace_given: bool,
    rules: &Rules,
) -> Result<Prepared, ItemFault> {
    let (envelope, origin) = Envelope::parse(item, default_trace).map_err(ItemFault::Envelope)?;
    let bytes = envelope.payload.len();
    if bytes > rules.max_payload_bytes {
        return Err(ItemFault::PayloadTooLarge {
            bytes,
            limit: rules.max_payload_bytes,
        });
    }
    if envelope.payload_member("redacts").is_some() {
        return Err(ItemFault::Redaction);
    }
    if envelope.source != slug {
        return Err(ItemFault::SourceMismatch {
            given: envelope.source,
            own: slug.to_owned(),
        });
    }
    match rules.sources.may_publish(&envelope.source, &envelope.event_type) {
        Ok(()) => {}
        Err(SourceFault::UnknownSource) => return Err(ItemFault::UnknownSource(envelope.source)),
        Err(SourceFault::TypeNotAllowed) => {
            let allowed = rules.sources.prefixes_of(&envelope.source).map(str::to_owned).collect();
            return Err(ItemFault::TypeNotAllowed { allowed });
        }
    }
    Ok(Prepared {
        guarded: trace_given || origin == TraceOrigin::Given,
        envelope,
    })
}

fn refuse_repeat(earlier: &[Prepared], next: Prepared) -> Result<Prepared, ItemFault> {
    if earlier
        .iter()
        .any(|event| event.envelope.event_id == next.envelope.event_id)
    {
        return Err(ItemFault::Repeated(next.envelope.event_id.to_string()));
    }
    Ok(next)
}
