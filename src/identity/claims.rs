//! The claims of a service or app token, and every rule they must meet.

use serde_json::{Map, Value};

use crate::domain::app::Env;
use crate::domain::ids::{is_prefixed_id, is_slug};

/// What a verified token says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The whole `sub` claim, such as `svc:media`.
    pub subject: String,
    /// Who that is.
    pub principal: Principal,
    /// The granted capability ids and families, as they were written.
    pub capabilities: Vec<String>,
    /// The environment the token is for; production where it names none.
    pub env: Env,
    /// The token's own id.
    pub token_id: String,
    /// When it was issued, in seconds since 1970.
    pub issued_at_s: i64,
    /// When it ends, in seconds since 1970.
    pub expires_at_s: i64,
}

/// Who a token speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Principal {
    /// A first-party service.
    Service {
        /// Its name, also the `source` of its events.
        slug: String,
    },
    /// A developer app.
    App(AppPrincipal),
    /// A kind of principal that the network knows and no route of ours accepts.
    Other(UnlistedPrincipal),
}

/// A developer app, as its token describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppPrincipal {
    /// `app_` and a ULID. An export token carries its project's ULID here, so the app need not exist.
    pub app_id: String,
    /// `prj_` and a ULID.
    pub project_id: String,
    /// Sandbox or production.
    pub env: Env,
    /// The person the app acts for: `usr_` and a ULID.
    pub on_behalf_of: Option<String>,
    /// The `ns` claim; empty where the token has none.
    pub namespaces: Vec<String>,
}

/// Principals that are refused on every route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnlistedPrincipal {
    /// A mod.
    Mod,
    /// A node.
    Node,
    /// An agent.
    Agent,
}

/// Reads the claims. Issuer, audience and times are compared elsewhere; here each claim must only have its shape.
///
/// # Errors
/// One fixed sentence per broken rule, joined by `; `. None repeats what the token said.
pub(super) fn read(claims: &Map<String, Value>) -> Result<Claims, String> {
    let mut faults = Vec::new();
    let mut rule = |holds: bool, fault: &'static str| {
        if !holds {
            faults.push(fault);
        }
    };
    let text = |name: &str| claims.get(name).and_then(Value::as_str);
    let texts = |name: &str| claims.get(name).and_then(strings);

    let subject = text("sub");
    let kind = subject.and_then(Kind::of_subject);
    rule(kind.is_some(), "sub must name a service, app, mod, node or agent");
    let actor_type = text("actor_type");
    rule(
        actor_type.is_some_and(|name| Kind::named(name).is_some()),
        "actor_type must be service, app, mod, node or agent",
    );
    if let (Some(kind), Some(actor)) = (kind, actor_type.and_then(Kind::named)) {
        rule(kind == actor, "sub and actor_type must agree");
    }

    let audience = texts("aud");
    let named = |audience: &Vec<&str>| !audience.is_empty() && audience.iter().all(|entry| is_audience(entry));
    rule(
        audience.as_ref().is_some_and(named),
        "aud must be a list of at least one audience",
    );
    let capabilities = texts("cap");
    rule(
        capabilities
            .as_ref()
            .is_some_and(|caps| caps.iter().all(|cap| is_grant(cap))),
        "cap must be a list of grants",
    );
    let issued_at_s = claims.get("iat").and_then(integer);
    rule(issued_at_s.is_some(), "iat must be an integer");
    let expires_at_s = claims.get("exp").and_then(integer);
    rule(expires_at_s.is_some(), "exp must be an integer");
    let token_id = text("jti");
    rule(
        token_id.is_some_and(|id| id.chars().count() >= 8),
        "jti must be at least 8 characters",
    );

    let acts_for_a_project = matches!(kind, Some(Kind::App | Kind::Agent));
    let optional = |name: &str, valid: fn(&Value) -> bool| claims.get(name).is_none_or(valid);
    rule(
        optional("ns", |value| strings(value).is_some()),
        "ns must be a list of strings",
    );
    rule(
        optional("project_id", |value| is_id(value, "prj")) && (text("project_id").is_some() || !acts_for_a_project),
        "project_id must be a project's id",
    );
    let env = text("env").and_then(Env::named);
    rule(
        env.is_some() || (claims.get("env").is_none() && !acts_for_a_project),
        "env must be sandbox or production",
    );
    rule(
        optional("on_behalf_of", |value| is_id(value, "usr"))
            && (text("on_behalf_of").is_some() || kind != Some(Kind::Agent)),
        "on_behalf_of must be a person's id",
    );
    rule(
        optional("cap_confirm", |value| {
            strings(value).is_some_and(|codes| codes.iter().all(|code| is_dotted(code, false)))
        }),
        "cap_confirm must be a list of capabilities",
    );
    rule(
        optional("act", is_host),
        "act must name a service or an app and nothing else",
    );

    let (Some(subject), Some(kind), Some(capabilities), Some(issued_at_s), Some(expires_at_s), Some(token_id), true) = (
        subject,
        kind,
        capabilities,
        issued_at_s,
        expires_at_s,
        token_id,
        faults.is_empty(),
    ) else {
        return Err(faults.join("; "));
    };
    let env = env.unwrap_or(Env::Production);
    let name = subject.split_once(':').map_or("", |(_, name)| name).to_owned();
    let principal = match kind {
        Kind::Service => Principal::Service { slug: name },
        Kind::App => Principal::App(AppPrincipal {
            app_id: name,
            project_id: text("project_id").unwrap_or_default().to_owned(),
            env,
            on_behalf_of: text("on_behalf_of").map(str::to_owned),
            namespaces: texts("ns").unwrap_or_default().into_iter().map(str::to_owned).collect(),
        }),
        Kind::Mod => Principal::Other(UnlistedPrincipal::Mod),
        Kind::Node => Principal::Other(UnlistedPrincipal::Node),
        Kind::Agent => Principal::Other(UnlistedPrincipal::Agent),
    };
    Ok(Claims {
        subject: subject.to_owned(),
        principal,
        capabilities: capabilities.into_iter().map(str::to_owned).collect(),
        env,
        token_id: token_id.to_owned(),
        issued_at_s,
        expires_at_s,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Service,
    App,
    Mod,
    Node,
    Agent,
}

impl Kind {
    fn named(actor_type: &str) -> Option<Self> {
        match actor_type {
            "service" => Some(Self::Service),
            "app" => Some(Self::App),
            "mod" => Some(Self::Mod),
            "node" => Some(Self::Node),
            "agent" => Some(Self::Agent),
            _ => None,
        }
    }

    fn of_subject(subject: &str) -> Option<Self> {
        let (prefix, name) = subject.split_once(':')?;
        let (kind, valid) = match prefix {
            "svc" => (Self::Service, is_slug(name)),
            "app" => (Self::App, is_prefixed_id("app", name)),
            "mod" => (Self::Mod, is_prefixed_id("mod", name)),
            "node" => (Self::Node, is_prefixed_id("nod", name)),
            "agent" => (Self::Agent, is_prefixed_id("agt", name)),
            _ => return None,
        };
        valid.then_some(kind)
    }
}

fn strings(value: &Value) -> Option<Vec<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}

/// An integer in the sense of JSON Schema: `5.0` is one too.
fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        value
            .as_f64()
            .filter(|number| number.fract() == 0.0)
            .map(|number| number as i64)
    })
}

fn is_id(value: &Value, prefix: &str) -> bool {
    value.as_str().is_some_and(|id| is_prefixed_id(prefix, id))
}

fn is_audience(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-'))
}

fn is_grant(entry: &str) -> bool {
    is_dotted(entry, true)
}

/// Two or more segments joined by dots; `stars` may stand anywhere but in the first.
fn is_dotted(entry: &str, stars: bool) -> bool {
    let word = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
    let Some((first, rest)) = entry.split_once('.') else {
        return false;
    };
    first.starts_with(|first: char| first.is_ascii_lowercase())
        && first.bytes().all(word)
        && rest
            .split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| word(byte) || (stars && byte == b'*')))
}

fn is_host(act: &Value) -> bool {
    let Some(act) = act.as_object() else { return false };
    let host = act.get("sub").and_then(Value::as_str).and_then(Kind::of_subject);
    act.len() == 1 && matches!(host, Some(Kind::Service | Kind::App))
}
