//! What outbound TLS trusts: the system's certificate authorities, and those of the file that `SSL_CERT_FILE` names.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject};
use rustls::{ClientConfig, RootCertStore};

/// Where systems keep their authorities. The usual search looks nowhere but into the file of `SSL_CERT_FILE` where that
/// is set, so these are read as well then.
const SYSTEM_STORES: [&str; 3] = ["/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/ssl/cert.pem"];

/// Why a file of authorities cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    /// The file is missing, may not be read, or is not PEM.
    #[error("it cannot be read: {0}")]
    Unreadable(#[from] pem::Error),
    /// One of its certificates is no X.509 certificate.
    #[error("a certificate in it is damaged: {0}")]
    Damaged(#[from] rustls::Error),
    /// It holds no certificate.
    #[error("it holds no certificate")]
    Empty,
}

/// Certificate authorities that are trusted besides the system's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Authorities(Vec<CertificateDer<'static>>);

impl Authorities {
    /// Reads a PEM file of at least one certificate.
    ///
    /// # Errors
    /// [`AuthoritiesError`]; one bad certificate spoils the file, so that none is missing unnoticed.
    pub fn read(file: &Path) -> Result<Self, AuthoritiesError> {
        let certificates = CertificateDer::pem_file_iter(file)?.collect::<Result<Vec<_>, _>>()?;
        let mut usable = RootCertStore::empty();
        for certificate in &certificates {
            usable.add(certificate.clone())?;
        }
        if usable.is_empty() {
            return Err(AuthoritiesError::Empty);
        }
        Ok(Self(certificates))
    }
}

/// What every HTTP client of this process trusts. It is loaded once; clones share what was loaded.
#[derive(Debug, Clone)]
pub struct Trust(ClientConfig);

impl Trust {
    /// The authorities of this system and `more`. A system without any is no mistake: plain http works without.
    #[must_use]
    pub fn load(more: &Authorities) -> Self {
        let mut found = rustls_native_certs::load_native_certs().certs;
        if *more != Authorities::default() {
            found.extend(stored(&SYSTEM_STORES));
        }
        let roots = roots(found, more);
        tracing::debug!(authorities = roots.len(), "loaded the authorities for outbound TLS");
        if roots.is_empty() {
            tracing::warn!(
                "this system has no certificate authorities: https addresses cannot be reached; SSL_CERT_FILE names a file of them"
            );
        }
        Self::of(roots)
    }

    /// A builder of clients that trust this and nothing else. They speak HTTP/1.1: below HTTP/2 a request may be sent again
    /// without anybody's knowing, and one connection would serve what is to be kept apart.
    pub fn client_builder(&self) -> reqwest::ClientBuilder {
        reqwest::Client::builder()
            .http1_only()
            .tls_backend_preconfigured(self.0.clone())
    }

    /// The same for clients that speak no HTTP.
    pub fn client_config(&self) -> &ClientConfig {
        &self.0
    }

    fn of(roots: RootCertStore) -> Self {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider supports the versions that rustls supports")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self(config)
    }
}

fn stored(stores: &[&str]) -> Vec<CertificateDer<'static>> {
    let read = |store: &&str| {
        let path = Path::new(store);
        let (file, directory) = if path.is_dir() {
            (None, Some(path))
        } else {
            (Some(path), None)
        };
        rustls_native_certs::load_certs_from_paths(file, directory).certs
    };
    stores.iter().flat_map(read).collect()
}

/// Each authority once. One of the system's that cannot be parsed is passed over, so that it does not cost the others.
fn roots(mut found: Vec<CertificateDer<'static>>, more: &Authorities) -> RootCertStore {
    found.extend(more.0.iter().cloned());
    found.sort_unstable_by(|left, right| left.as_ref().cmp(right.as_ref()));
    found.dedup();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found);
    roots
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/tls/ca.pem");
    const OTHER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/tls/other-ca.pem");

    #[test]
    fn authorities_of_the_system_and_of_the_file_are_trusted_together_and_once() {
        let own = Authorities::read(Path::new(OWN)).expect("a good file");
        let found = stored(&["/nowhere", OTHER, OTHER]);
        assert_eq!(roots(found.clone(), &Authorities::default()).len(), 1);
        assert_eq!(roots([found, own.0.clone()].concat(), &own).len(), 2);
    }

    #[test]
    fn an_odd_certificate_of_the_system_costs_no_other() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/tls");
        let found = stored(&[folder]);
        assert_eq!(found.len(), 4, "the damaged one is among them");
        assert_eq!(roots(found, &Authorities::default()).len(), 3);
    }

    #[tokio::test]
    async fn a_system_without_authorities_still_sends_http() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}/", listener.local_addr().expect("bound"));
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let asked = stream.read(&mut [0; 1024]).await.expect("a request");
            assert!(asked > 0);
            stream
                .write_all(b"HTTP/1.1 204 No Content\r\n\r\n")
                .await
                .expect("sent");
        });
        let client = Trust::of(RootCertStore::empty()).client_builder().no_proxy().build();
        let answer = client.expect("a client").get(url).send().await.expect("an answer");
        assert_eq!(answer.status(), 204);
    }

    #[test]
    fn a_file_without_a_good_certificate_is_refused() {
        let refused = |file: &str| Authorities::read(Path::new(file)).expect_err(file);
        assert!(matches!(
            refused("/nowhere.pem"),
            AuthoritiesError::Unreadable(pem::Error::Io(_))
        ));
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/");
        assert!(matches!(
            refused(&format!("{folder}Cargo.toml")),
            AuthoritiesError::Empty
        ));
        let key = format!("{folder}tests/it/support/tls/server-key.pem");
        assert!(matches!(refused(&key), AuthoritiesError::Empty));
        let damaged = format!("{folder}tests/it/support/tls/damaged.pem");
        assert!(matches!(refused(&damaged), AuthoritiesError::Damaged(_)));
    }
}
