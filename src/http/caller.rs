//! Who calls, and whether they may: an extractor that runs before anything else of a request is read.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::clock;
use crate::identity::limits::{Exceeded, Limit};
use crate::identity::{self, Capability, Refusal, TokenError};
use crate::problem::{ApiError, TokenFault};
use crate::telemetry;

use super::api::Api;

/// What a route asks of its caller.
pub(super) trait Authority: Send + Sync {
    /// The capability its token must hold.
    const CAPABILITY: Capability;
    /// The limit that its requests count for.
    const LIMIT: Limit;
}

macro_rules! authorities {
    ($($(#[$doc:meta])* $name:ident: $capability:ident, $limit:ident;)+) => {
        $($(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $name;

        impl Authority for $name {
            const CAPABILITY: Capability = Capability::$capability;
            const LIMIT: Limit = Limit::$limit;
        })+
    };
}

authorities! {
    /// Storing events.
    Publish: EventPublish, EventPublish;
    /// Pages of the log.
    PullEvents: EventRead, EventPull;
    /// One event.
    ReadEvent: EventRead, EventRead;
    /// A stored position.
    ReadCheckpoint: EventRead, CheckpointRead;
    /// Storing a position.
    WriteCheckpoint: EventRead, CheckpointWrite;
    /// Making a subscription.
    CreateSubscription: SubscriptionManage, SubscriptionCreate;
    /// The caller's subscriptions.
    ListSubscriptions: SubscriptionManage, SubscriptionList;
    /// One of them.
    ReadSubscription: SubscriptionManage, SubscriptionRead;
    /// Changing one.
    UpdateSubscription: SubscriptionManage, SubscriptionUpdate;
    /// Enabling or disabling one.
    ToggleSubscription: SubscriptionManage, SubscriptionToggle;
    /// A new secret.
    RotateSecret: SubscriptionManage, SubscriptionRotate;
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
    authority: PhantomData<A>,
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
        let caller = identity::first_party(&api.verifier, &parts.headers, A::CAPABILITY, now_s).await?;
        if let Some(limits) = &api.limits
            && !never_counted(A::LIMIT, &caller.subject)
            && let Err(exceeded) = limits.admit(A::LIMIT, &caller.subject, now_s)
        {
            return Err(refused(&exceeded, &caller.subject));
        }
        Ok(Self {
            caller,
            authority: PhantomData,
        })
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
                return Self::CapabilityDenied(
                    format!("this route needs a service token that holds {}", capability).into(),
                );
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
