//! Who may call what: every route by every kind of caller, with the exact answer that each gets.
//!
//! A request is as empty as its method allows, so a caller that is let in gets the route's answer to nothing at all, which
//! is written down as well: a guard that lets somebody in is seen by the answer behind it.

use serde_json::{Value, json};

use crate::{
    api_world::{Site, consumer, routes, send},
    support::{
        envelopes::id,
        network::{ADMIN_CAP, APP_CAPS, AUDIENCE, SERVICE_CAPS, TokenSpec},
    },
};

/// What guards a route, and what it answers to a caller that it lets in.
#[derive(Debug, Clone, Copy)]
enum Guard {
    /// Services that hold this capability.
    Service(&'static str),
    /// Those, and apps that hold the other one.
    Shared(&'static str, &'static str),
}

use Guard::{Service, Shared};

const PUBLISH: Guard = Shared("events.event.publish", "events.app.publish");
const READ: Guard = Shared("events.event.read", "events.app.read");
const SUBSCRIBE: Guard = Shared("events.subscription.manage", "events.app.subscribe");
const ADMIN: Guard = Service(ADMIN_CAP);

/// Status and code; without a code it is no problem document.
type Told = (u16, &'static str);

const OK: Told = (200, "");
const NOT_FOUND: Told = (404, "events.not_found");

/// Each route, its guard, and its answer to an empty request.
const ROUTES: [(&str, &str, Guard, Told); 23] = [
    ("GET", "/api/v1/events", READ, OK),
    ("POST", "/api/v1/events", PUBLISH, (422, "events.invalid_envelope")),
    ("GET", "/api/v1/events/:id", READ, NOT_FOUND),
    ("GET", "/api/v1/checkpoints", READ, (400, "events.bad_topic")),
    ("PUT", "/api/v1/checkpoints", READ, (400, "events.bad_request")),
    ("GET", "/api/v1/subscriptions", SUBSCRIBE, OK),
    ("POST", "/api/v1/subscriptions", SUBSCRIBE, (422, "events.bad_topic")),
    ("GET", "/api/v1/subscriptions/:id", SUBSCRIBE, NOT_FOUND),
    ("PATCH", "/api/v1/subscriptions/:id", SUBSCRIBE, NOT_FOUND),
    ("POST", "/api/v1/subscriptions/:id/enable", SUBSCRIBE, NOT_FOUND),
    ("POST", "/api/v1/subscriptions/:id/disable", SUBSCRIBE, NOT_FOUND),
    ("POST", "/api/v1/subscriptions/:id/rotate-secret", SUBSCRIBE, NOT_FOUND),
    ("GET", "/api/v1/deliveries", ADMIN, OK),
    ("POST", "/api/v1/deliveries/replay", ADMIN, NOT_FOUND),
    ("POST", "/api/v1/deliveries/skip", ADMIN, NOT_FOUND),
    ("GET", "/api/v1/delivery-policies", ADMIN, OK),
    (
        "GET",
        "/api/v1/delivery-policies/resolve",
        ADMIN,
        (400, "events.bad_request"),
    ),
    ("PUT", "/api/v1/delivery-policies/:id", ADMIN, (422, "events.bad_topic")),
    (
        "DELETE",
        "/api/v1/delivery-policies/:id",
        ADMIN,
        (422, "events.bad_topic"),
    ),
    ("GET", "/api/v1/placement", ADMIN, (400, "events.bad_request")),
    ("GET", "/api/v1/placement/deliveries/:id/:id", ADMIN, NOT_FOUND),
    ("GET", "/api/v1/carriers", ADMIN, OK),
    ("PUT", "/api/v1/carriers/:id", ADMIN, (400, "events.bad_request")),
];

/// Routes that ask nobody who calls.
const OPEN: [(&str, Told); 4] = [
    ("/api/health", OK),
    ("/api/ready", OK),
    ("/metrics", OK),
    ("/nowhere", NOT_FOUND),
];

/// A caller, and what each kind of guard answers; `None` lets it in.
struct Caller {
    name: &'static str,
    token: Option<String>,
    of_services: Option<Told>,
    shared: Option<Told>,
}

const MISSING: Option<Told> = Some((401, "token.missing"));
const DENIED: Option<Told> = Some((403, "capability.denied"));

fn callers() -> Vec<Caller> {
    let every_cap: Vec<&str> = SERVICE_CAPS.into_iter().chain(APP_CAPS).chain([ADMIN_CAP]).collect();
    let service = || TokenSpec::service(&consumer()).caps(&every_cap);
    let (app_id, project) = (id("app"), id("prj"));
    let app = |env: &str| TokenSpec::app(&app_id, &project, env).caps(&every_cap);
    let caller = |name, token: TokenSpec, of_services, shared| Caller {
        name,
        token: Some(token.sign()),
        of_services,
        shared,
    };
    let everywhere = |name, token: TokenSpec, told| caller(name, token, told, told);
    let refused = |name, token: TokenSpec, code| everywhere(name, token, Some((401, code)));
    vec![
        Caller {
            name: "nobody",
            token: None,
            of_services: MISSING,
            shared: MISSING,
        },
        Caller {
            name: "a broken token",
            token: Some("not.a.token".to_owned()),
            of_services: Some((401, "token.malformed")),
            shared: Some((401, "token.malformed")),
        },
        refused(
            "a forged service",
            service().signed_by("stranger"),
            "token.bad_signature",
        ),
        refused(
            "a forged app",
            app("production").signed_by("stranger"),
            "token.bad_signature",
        ),
        refused("an expired service", service().shifted(-400), "token.expired"),
        refused("an expired app", app("production").shifted(-400), "token.expired"),
        refused(
            "a service of elsewhere",
            service().claim("aud", json!(["openvibe.live"])),
            "token.wrong_audience",
        ),
        refused(
            "an app of elsewhere",
            app("sandbox").claim("aud", json!(["openvibe.live"])),
            "token.wrong_audience",
        ),
        refused(
            "another issuer's",
            service().claim("iss", "https://other.example"),
            "token.wrong_issuer",
        ),
        refused(
            "an app without a project",
            app("production").without("project_id"),
            "token.invalid_claims",
        ),
        refused(
            "an app that says it is a service",
            app("production").claim("actor_type", "service"),
            "token.invalid_claims",
        ),
        refused("a person", TokenSpec::person(&id("usr")), "token.wrong_audience"),
        refused(
            "a person with this audience",
            TokenSpec::person(&id("usr")).claim("aud", json!([AUDIENCE])),
            "token.invalid_claims",
        ),
        refused("a ticket", TokenSpec::ticket(&id("usr")), "token.wrong_issuer"),
        everywhere("a service with every capability", service(), None),
        everywhere("a service with none", service().caps(&[]), DENIED),
        everywhere("a service with those of apps", service().caps(&APP_CAPS), DENIED),
        caller("a production app", app("production"), DENIED, None),
        caller(
            "a sandbox app",
            app("sandbox"),
            Some((401, "token.sandbox_refused")),
            None,
        ),
        caller(
            "an export token",
            app("production").claim("purpose", "export"),
            DENIED,
            None,
        ),
        everywhere(
            "a production app with no capability",
            app("production").caps(&[]),
            DENIED,
        ),
        everywhere(
            "a production app with those of services",
            app("production").caps(&SERVICE_CAPS),
            DENIED,
        ),
        caller(
            "a sandbox app with no capability",
            app("sandbox").caps(&[]),
            Some((401, "token.sandbox_refused")),
            DENIED,
        ),
        everywhere(
            "a mod",
            TokenSpec::other("mod", &format!("mod:{}", id("mod")), &every_cap),
            DENIED,
        ),
        everywhere(
            "a node",
            TokenSpec::other("node", &format!("node:{}", id("nod")), &every_cap),
            DENIED,
        ),
        everywhere(
            "an agent",
            TokenSpec::other("agent", &format!("agent:{}", id("agt")), &every_cap)
                .claim("on_behalf_of", id("usr"))
                .claim("project_id", project.as_str())
                .claim("env", "production"),
            DENIED,
        ),
    ]
}

async fn told(site: &Site, method: &str, path: &str, token: Option<&str>) -> (u16, String) {
    // What an app may pull it has to name.
    let path = match (method, path) {
        ("GET", "/api/v1/events") => "/api/v1/events?topic=live.stream.started",
        _ => path,
    };
    let answer = send(site.one(), method, path, token, "{}".to_owned()).await;
    let code = answer.body["code"].as_str().unwrap_or_default().to_owned();
    let problem = matches!(answer.status, 400..) && answer.body["type"] != Value::Null;
    assert_eq!(problem, answer.status >= 400, "{method} {path}: {}", answer.text);
    (answer.status, code)
}

#[test]
fn every_route_has_a_row() {
    let served = routes(":id");
    let served: Vec<(&str, &str)> = served.iter().map(|(method, path)| (*method, path.as_str())).collect();
    let rows: Vec<(&str, &str)> = ROUTES.iter().map(|(method, path, ..)| (*method, *path)).collect();
    assert_eq!(served, rows);
}

#[tokio::test]
async fn each_caller_gets_the_answer_that_is_written_down_on_each_route() {
    let site = Site::shared().await;
    let mut wrong = Vec::new();
    for caller in callers() {
        for (method, path, guard, inside) in ROUTES {
            let expected = match guard {
                Guard::Service(_) => caller.of_services,
                Guard::Shared(..) => caller.shared,
            };
            let expected = expected.unwrap_or(inside);
            let path = path.replace(":id", &id("sub"));
            let (status, code) = told(&site, method, &path, caller.token.as_deref()).await;
            if (status, code.as_str()) != expected {
                wrong.push(format!(
                    "{method} {path} by {}: {status} {code}, not {expected:?}",
                    caller.name
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn one_capability_opens_its_own_routes_and_no_others() {
    let site = Site::shared().await;
    let (app_id, project) = (id("app"), id("prj"));
    let mut wrong = Vec::new();
    for held in SERVICE_CAPS.into_iter().chain(APP_CAPS).chain([ADMIN_CAP]) {
        let service = TokenSpec::service(&consumer()).caps(&[held]).sign();
        let app = TokenSpec::app(&app_id, &project, "production").caps(&[held]).sign();
        for (method, path, guard, inside) in ROUTES {
            let path = path.replace(":id", &id("sub"));
            let (of_services, of_apps) = match guard {
                Guard::Service(own) => (own, None),
                Guard::Shared(own, of_apps) => (own, Some(of_apps)),
            };
            for (token, opens) in [(&service, held == of_services), (&app, Some(held) == of_apps)] {
                let expected = if opens { inside } else { (403, "capability.denied") };
                let (status, code) = told(&site, method, &path, Some(token)).await;
                if (status, code.as_str()) != expected {
                    wrong.push(format!(
                        "{method} {path} with {held}: {status} {code}, not {expected:?}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn routes_that_ask_nobody_answer_everybody_alike() {
    let site = Site::shared().await;
    for caller in callers() {
        for (path, expected) in OPEN {
            let (status, code) = told(&site, "GET", path, caller.token.as_deref()).await;
            assert_eq!((status, code.as_str()), expected, "{path} by {}", caller.name);
        }
    }
}
