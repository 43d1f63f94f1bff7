//! Who calls, and whether they may: an extractor that runs before anything else of a request is read.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use crate::clock;
use crate::identity::{self, Capability, Refusal, TokenError};
use crate::problem::{ApiError, TokenFault};

use super::api::Api;

/// A capability that routes ask for.
pub(super) trait Authority: Send + Sync {
    /// Which one.
    const CAPABILITY: Capability;
}

macro_rules! authorities {
    ($($(#[$doc:meta])* $name:ident: $capability:ident;)+) => {
        $($(#[$doc])*
        #[derive(Debug)]
        pub(super) struct $name;

        impl Authority for $name {
            const CAPABILITY: Capability = Capability::$capability;
        })+
    };
}

authorities! {
    /// `events.event.publish`.
    Publish: EventPublish;
    /// `events.event.read`.
    Read: EventRead;
    /// `events.subscription.manage`.
    Subscribe: SubscriptionManage;
    /// `events.delivery.admin`.
    Operate: DeliveryAdmin;
}

/// A caller that holds the capability.
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
        Ok(Self {
            caller,
            authority: PhantomData,
        })
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
                TokenError::Unavailable(_) => return Self::KeysUnavailable { retry_after_s: 5 },
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
