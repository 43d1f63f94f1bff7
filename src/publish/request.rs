//! Stage A: from a body to a request that may be stored, or the first reason why not.

use crate::domain::app::{App, Project};
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
    /// The app that publishes; `None` for a service.
    pub app: Option<App>,
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
    #[error("source is {given:?}; the caller publishes its own source, {own:?}")]
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
    /// An app's event names an actor that the app does not speak for.
    #[error("actor must be the app itself, or the person that its token acts for")]
    ActorMismatch,
}

/// The names that a publisher's events must have.
enum Names<'a> {
    /// A service publishes its own source.
    Service { slug: &'a str },
    /// An app publishes for its project.
    App(&'a App),
}

/// The trace of a request.
#[derive(Debug, Clone, Copy)]
pub struct RequestTrace<'a> {
    /// The trace that events get which name none.
    pub id: &'a str,
    /// The caller named it.
    pub given: bool,
}

impl PublishRequest {
    /// Whose events these are; `None` for a service's.
    pub fn project(&self) -> Option<&Project> {
        self.app.as_ref().map(|app| &app.project)
    }

    /// Reads a body that a service sent; `slug` is its own source. Checks run in a fixed order and the first failure ends it.
    pub fn of_service(body: &str, slug: &str, trace: RequestTrace<'_>, rules: &Rules) -> Result<Self, RequestFault> {
        let (events, batch) = read(body, &Names::Service { slug }, trace, rules)?;
        Ok(Self {
            events,
            publisher: format!("svc:{slug}"),
            app: None,
            request_id: new_request_id(),
            bytes: body.len(),
            batch,
        })
    }

    /// Reads a body that a developer app sent, likewise.
    pub fn of_app(body: &str, app: App, trace: RequestTrace<'_>, rules: &Rules) -> Result<Self, RequestFault> {
        let (events, batch) = read(body, &Names::App(&app), trace, rules)?;
        Ok(Self {
            events,
            publisher: app.consumer(),
            app: Some(app),
            request_id: new_request_id(),
            bytes: body.len(),
            batch,
        })
    }
}

fn read(
    body: &str,
    names: &Names<'_>,
    trace: RequestTrace<'_>,
    rules: &Rules,
) -> Result<(Vec<Prepared>, bool), RequestFault> {
    let (items, batch) = match batch::split(body)? {
        PublishBody::Single(item) => (vec![item], false),
        PublishBody::Batch(items) => (items, true),
    };
    let mut events: Vec<Prepared> = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let prepared = prepare(item, names, trace, rules)
            .and_then(|prepared| refuse_repeat(&events, prepared))
            .map_err(|fault| RequestFault::Item {
                index: batch.then_some(index),
                fault,
            })?;
        events.push(prepared);
    }
    Ok((events, batch))
}

fn prepare(item: &str, names: &Names<'_>, trace: RequestTrace<'_>, rules: &Rules) -> Result<Prepared, ItemFault> {
    let (mut envelope, origin) = Envelope::parse(item, trace.id).map_err(ItemFault::Envelope)?;
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
    match names {
        Names::Service { slug } => names_of_service(&envelope, slug, rules)?,
        Names::App(app) => {
            names_of_app(&envelope, app)?;
            // Whom an app acts for is what its token says, and nothing that it says itself.
            if envelope
                .on_behalf_of
                .as_ref()
                .is_some_and(|person| !app.acts_for(person))
            {
                envelope.on_behalf_of = None;
            }
        }
    }
    Ok(Prepared {
        guarded: trace.given || origin == TraceOrigin::Given,
        envelope,
    })
}

fn names_of_service(envelope: &Envelope, slug: &str, rules: &Rules) -> Result<(), ItemFault> {
    if envelope.source != slug {
        return Err(ItemFault::SourceMismatch {
            given: envelope.source.clone(),
            own: slug.to_owned(),
        });
    }
    match rules.sources.may_publish(&envelope.source, &envelope.event_type) {
        Ok(()) => Ok(()),
        Err(SourceFault::UnknownSource) => Err(ItemFault::UnknownSource(envelope.source.clone())),
        Err(SourceFault::TypeNotAllowed) => {
            let allowed = rules.sources.prefixes_of(&envelope.source).map(str::to_owned).collect();
            Err(ItemFault::TypeNotAllowed { allowed })
        }
    }
}

fn names_of_app(envelope: &Envelope, app: &App) -> Result<(), ItemFault> {
    let own = app.source();
    if envelope.source != own {
        return Err(ItemFault::SourceMismatch {
            given: envelope.source.clone(),
            own,
        });
    }
    let prefix = app.prefix();
    if !envelope.event_type.starts_with(&prefix) {
        return Err(ItemFault::TypeNotAllowed { allowed: vec![prefix] });
    }
    match app.speaks_for(&envelope.actor) {
        true => Ok(()),
        false => Err(ItemFault::ActorMismatch),
    }
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
