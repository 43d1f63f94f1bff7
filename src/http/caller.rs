//! Who calls, and whether they may: an extractor that runs before anything else of a request is read.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::clock;
use crate::domain::app::{App, Withdrawn};
use crate::domain::topic::TopicPattern;
use crate::identity::limits::{Exceeded, Limit};
use crate::identity::{self, Capability, Refusal, TokenError};
use crate::problem::{ApiError, TokenFault};
use crate::telemetry;

use super::api::Api;

/// What a route asks of its caller.
pub(super) trait Authority: Send + Sync {
    /// The capability that a service's token must hold.
    const CAPABILITY: Capability;
    /// The limit that a service's requests count for.
    const LIMIT: Limit;
    /// What it asks of developer apps; `None` where it serves none.
    const APPS: Option<AppAuthority>;
}

/// What a route asks of a developer app.
#[derive(Debug, Clone, Copy)]
pub(super) struct AppAuthority {
    capability: Capability,
    limit: Limit,
    /// The store judges once more, in the transaction that does the work.
    judged_again: bool,
}

macro_rules! authorities {
    ($($(#[$doc:meta])* $name:ident: $capability:ident, $limit:ident
       $(, apps $app:ident, $app_limit:ident $($again:ident)?)?;)+) => {
        $($(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $name;

        impl Authority for $name {
            const CAPABILITY: Capability = Capability::$capability;
            const LIMIT: Limit = Limit::$limit;
            const APPS: Option<AppAuthority> = authorities!(@apps $($app, $app_limit $($again)?)?);
        })+
    };
    (@apps) => { None };
    (@apps $app:ident, $limit:ident) => { authorities!(@some $app, $limit, false) };
    (@apps $app:ident, $limit:ident judged_again) => { authorities!(@some $app, $limit, true) };
    (@some $app:ident, $limit:ident, $again:literal) => {
        Some(AppAuthority { capability: Capability::$app, limit: Limit::$limit, judged_again: $again })
    };
}

authorities! {
    /// Storing events.
    Publish: EventPublish, EventPublish, apps AppPublish, AppPublish judged_again;
    /// Pages of the log.
    PullEvents: EventRead, EventPull, apps AppRead, EventPull;
    /// One event.
    ReadEvent: EventRead, EventRead, apps AppRead, EventRead;
    /// A stored position.
    ReadCheckpoint: EventRead, CheckpointRead, apps AppRead, CheckpointRead;
    /// Storing a position.
    WriteCheckpoint: EventRead, CheckpointWrite, apps AppRead, CheckpointWrite;
    /// Making a subscription.
    CreateSubscription: SubscriptionManage, SubscriptionCreate, apps AppSubscribe, SubscriptionCreate;
    /// The caller's subscriptions.
    ListSubscriptions: SubscriptionManage, SubscriptionList, apps AppSubscribe, SubscriptionList;
    /// One of them.
    ReadSubscription: SubscriptionManage, SubscriptionRead, apps AppSubscribe, SubscriptionRead;
    /// Changing one.
    UpdateSubscription: SubscriptionManage, SubscriptionUpdate, apps AppSubscribe, SubscriptionUpdate;
    /// Enabling or disabling one.
    ToggleSubscription: SubscriptionManage, SubscriptionToggle, apps AppSubscribe, SubscriptionToggle;
    /// A new secret.
    RotateSecret: SubscriptionManage, SubscriptionRotate, apps AppSubscribe, SubscriptionRotate;
    /// The state of deliveries.
    ListDeliveries: DeliveryAdmin, DeliveryList;
    /// Putting deliveries back into the queue.
    ReplayDeliveries: DeliveryAdmin, DeliveryReplay;
    /// Ending deliveries that wait.
    SkipDeliveries: DeliveryAdmin, DeliverySkip;
    /// Every delivery policy.
    ListPolicies: DeliveryAdmin, DeliveryPolicyList;
    /// The policy in force for a type.
    ReadPolicy: DeliveryAdmin, DeliveryPolicyRead;
    /// Writing or removing a policy.
    WritePolicy: DeliveryAdmin, DeliveryPolicyWrite;
    /// How deliveries are woken, and why.
    ReadPlacement: DeliveryAdmin, PlacementRead;
    /// How the carriers stand.
    ListCarriers: DeliveryAdmin, CarrierList;
    /// Switching a carrier off or on.
    SwitchCarrier: DeliveryAdmin, CarrierSwitch;
}

/// A caller that holds the capability and is within its limit.
pub(super) struct Caller<A> {
    caller: identity::Caller,
    withdrawn: Withdrawn,
    authority: PhantomData<A>,
}

impl<A> Caller<A> {
    /// Lets a pattern through that the caller may ask for.
    pub(super) fn naming(&self, pattern: &TopicPattern) -> Result<(), ApiError> {
        match &self.app {
            Some(app) if !app.may_name(pattern) => Err(ApiError::TopicNotAllowed { own: app.prefix() }),
            _ => Ok(()),
        }
    }

    /// Lets a caller through that may still make subscriptions run.
    pub(super) fn subscribing(&self) -> Result<(), ApiError> {
        match &self.app {
            Some(app) if self.withdrawn.ends_subscribing(app.issued_at_s) => Err(subscribing_withdrawn()),
            _ => Ok(()),
        }
    }
}

/// The refusal of an app whose grant to subscribe was withdrawn after its token was issued.
pub(super) fn subscribing_withdrawn() -> ApiError {
    let capability = Capability::AppSubscribe.id();
    ApiError::CapabilityDenied(format!("{capability} was withdrawn after this token was issued").into())
}

impl<A> Deref for Caller<A> {
    type Target = identity::Caller;

    fn deref(&self) -> &identity::Caller {
        &self.caller
    }
}

impl<A: Authority> FromRequestParts<Arc<Api>> for Caller<A> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Self, ApiError> {
        let now_s = clock::now().0.div_euclid(1000);
        let (caller, withdrawn, limit) = match A::APPS.filter(|_| api.apps) {
            None => {
                let caller = identity::first_party(&api.verifier, &parts.headers, A::CAPABILITY, now_s).await?;
                (caller, Withdrawn::default(), A::LIMIT)
            }
            Some(apps) => {
                let known = identity::authenticate(&api.verifier, &parts.headers, A::CAPABILITY, now_s).await?;
                let withdrawn = match known.app() {
                    Some(app) => in_force(api, app, apps.judged_again).await?,
                    None => Withdrawn::default(),
                };
                let limit = if known.app().is_some() { apps.limit } else { A::LIMIT };
                (known.holding(A::CAPABILITY, Some(apps.capability))?, withdrawn, limit)
            }
        };
        if let Some(limits) = &api.limits
            && !never_counted(limit, &caller.subject)
            && let Err(exceeded) = limits.admit(limit, &caller.subject, now_s)
        {
            return Err(refused(&exceeded, &caller.subject));
        }
        Ok(Self {
            caller,
            withdrawn,
            authority: PhantomData,
        })
    }
}

/// What was withdrawn from an app; one that is revoked gets no further. What this process has in memory is enough where the
/// store judges again; elsewhere the store is asked, because another process may have stored a revocation a moment ago.
async fn in_force(api: &Api, app: &App, judged_again: bool) -> Result<Withdrawn, ApiError> {
    let consumer = app.consumer();
    let withdrawn = match judged_again {
        true => api.store.view().withdrawn(&consumer),
        false => api.store.withdrawn(&consumer).await?,
    };
    match withdrawn.ends_token(app.issued_at_s) {
        true => Err(ApiError::Token(TokenFault::Revoked)),
        false => Ok(withdrawn),
    }
}

/// The network's own events carry revocations, cut-offs and deletions; nothing may hold them up.
fn never_counted(limit: Limit, subject: &str) -> bool {
    limit == Limit::EventPublish && subject == "svc:network"
}

fn refused(exceeded: &Exceeded, subject: &str) -> ApiError {
    let (limit, max) = (exceeded.limit.id(), exceeded.max);
    tracing::warn!(%subject, limit, "[limits] {subject} is past {limit}: {max} per {}", exceeded.window.label());
    telemetry::rate_limited(limit, exceeded.window);
    ApiError::RateLimited {
        limit,
        max: max.into(),
        window: exceeded.window,
        retry_after_s: exceeded.retry_after_s,
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let fault = match refusal {
            Refusal::MissingToken => TokenFault::Missing,
            Refusal::Denied { capability } => {
                return Self::CapabilityDenied(format!("this route needs a token that holds {capability}").into());
            }
            Refusal::Token(error) => match error {
                TokenError::Unavailable(unavailable) => return unavailable.into(),
                TokenError::Malformed(_) => TokenFault::Malformed,
                TokenError::BadSignature => TokenFault::BadSignature,
                TokenError::Expired(_) => TokenFault::Expired,
                TokenError::WrongIssuer => TokenFault::WrongIssuer,
                TokenError::WrongAudience(_) => TokenFault::WrongAudience,
                TokenError::InvalidClaims(_) => TokenFault::InvalidClaims,
                TokenError::SandboxRefused => TokenFault::SandboxRefused,
            },
        };
        Self::Token(fault)
    }
}
