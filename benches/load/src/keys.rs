//! The key that the tool signs tokens with. The service under test is told to trust it by `OV_NETWORK_PUBLIC_KEY`.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::SystemTime;

use aws_lc_rs::encoding::{AsDer as _, Pkcs8V1Der, PublicKeyX509Der};
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::{KeyPair, KeySize};
use aws_lc_rs::signature::{KeyPair as _, RSA_PKCS1_SHA256};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::json;

use crate::fault::Fault;

/// How long a token holds, in seconds: longer than any run.
const LIFETIME_S: u64 = 6 * 3600;

/// What the tool may do, under any name.
const CAPABILITIES: [&str; 4] = [
    "events.event.publish",
    "events.event.read",
    "events.subscription.manage",
    "events.delivery.admin",
];

/// Signs tokens of any service.
pub(crate) struct Signer {
    key: KeyPair,
    issuer: String,
}

impl Signer {
    /// Uses the key in `file`, which is made there when it is missing; tokens name `issuer`.
    pub(crate) fn open(file: &Path, issuer: &str) -> Result<Self, Fault> {
        let failed = |source| Fault::File {
            path: file.to_owned(),
            source,
        };
        if !file.exists() {
            let made = KeyPair::generate(KeySize::Rsa2048).map_err(|_| Fault::Key)?;
            let der: Pkcs8V1Der<'_> = made.as_der().map_err(|_| Fault::Key)?;
            let mut options = fs::OpenOptions::new();
            options.write(true).create_new(true);
            #[cfg(unix)]
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            let mut out = options.open(file).map_err(failed)?;
            out.write_all(der.as_ref()).map_err(failed)?;
        }
        let der = fs::read(file).map_err(failed)?;
        let key = KeyPair::from_pkcs8(&der).map_err(|_| Fault::Content {
            path: file.to_owned(),
            what: "no RSA key; delete it and a new one is made".to_owned(),
        })?;
        Ok(Self {
            key,
            issuer: issuer.to_owned(),
        })
    }

    /// The public half as PEM.
    pub(crate) fn public_pem(&self) -> Result<String, Fault> {
        let der: PublicKeyX509Der<'_> = self.key.public_key().as_der().map_err(|_| Fault::Key)?;
        let text = STANDARD.encode(der.as_ref());
        let lines: Vec<_> = text.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
        Ok(format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            lines.join("\n")
        ))
    }

    /// A token of the service `slug`.
    pub(crate) fn token(&self, slug: &str) -> Result<String, Fault> {
        let now_s = unix_now().as_secs();
        let part = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!(
            "{}.{}",
            part(json!({"alg": "RS256", "typ": "JWT"})),
            part(json!({
                "iss": self.issuer, "sub": format!("svc:{slug}"), "actor_type": "service", "aud": ["openvibe.events"],
                "cap": CAPABILITIES, "ns": [], "iat": now_s, "exp": now_s + LIFETIME_S,
                "jti": format!("load-{:016x}", rand::random::<u64>()),
            })),
        );
        let mut signature = vec![0; self.key.public_modulus_len()];
        let random = SystemRandom::new();
        self.key
            .sign(&RSA_PKCS1_SHA256, &random, signed.as_bytes(), &mut signature)
            .map_err(|_| Fault::Key)?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }
}

/// Time since the Unix epoch.
#[expect(
    clippy::disallowed_methods,
    reason = "the tool's one reader of the wall clock: ids and tokens carry real times"
)]
pub(crate) fn unix_now() -> std::time::Duration {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
}
