//! The pages of a service that `dev` started: what runs here, and a small live view. No other service has them.

use axum::Router;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::config::Config;

const HOME: &str = include_str!("page/index.html");
const LIVE: &str = include_str!("page/live.html");
const SCRIPT: &str = include_str!("page/live.js");
const STYLE: &str = include_str!("page/style.css");

/// The pages. They load nothing from elsewhere, and talk to the issuer of `config` alone.
pub(super) fn routes(config: &Config) -> Router {
    let issuer = escaped(&config.identity.issuer);
    let service = format!("http://{}", config.http.listen);
    let filled = |page: &str| page.replace("{issuer}", &issuer).replace("{service}", &service);
    let policy = format!(
        "default-src 'self'; connect-src 'self' {}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        config.identity.issuer
    );
    let served = |content_type: &'static str, text: String| {
        let headers = [
            (CONTENT_TYPE, content_type.to_owned()),
            (CONTENT_SECURITY_POLICY, policy.clone()),
            (CACHE_CONTROL, "no-store".to_owned()),
        ];
        get(move || async move { (headers, text).into_response() })
    };
    Router::new()
        .route("/", served("text/html; charset=utf-8", filled(HOME)))
        .route("/dev/live", served("text/html; charset=utf-8", filled(LIVE)))
        .route(
            "/dev/live.js",
            served("text/javascript; charset=utf-8", SCRIPT.to_owned()),
        )
        .route("/dev/style.css", served("text/css; charset=utf-8", STYLE.to_owned()))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_loaded_from_elsewhere_and_nothing_stands_in_the_page_that_its_policy_forbids() {
        for page in [HOME, LIVE] {
            assert!(page.contains("Development only"));
            for forbidden in [
                "src=\"http",
                "src=\"//",
                "url(",
                "style=",
                "<style",
                "onclick",
                "<script>",
                "@import",
            ] {
                assert!(!page.contains(forbidden), "{forbidden}");
            }
        }
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import"));
        assert!(!SCRIPT.contains("innerHTML"), "what was published is text");
    }

    #[test]
    fn an_address_cannot_leave_its_place() {
        assert_eq!(escaped("http://a/?b&\"<c"), "http://a/?b&amp;&quot;&lt;c");
    }
}
