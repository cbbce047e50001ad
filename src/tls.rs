//! HTTP clients: TLS by the ring library with the system's certificates, set up where it is used, so that no process-wide
//! default is needed.

use std::sync::Arc;

use reqwest::{Client, ClientBuilder};

/// What every client of ours has, for an address of this scheme. Without `https` no certificate is read, as a container may
/// have none. Redirects are not followed, since they would carry keys elsewhere, and proxies of the environment not used.
///
/// # Errors
/// The library or the system's certificates do not work.
pub fn client_builder(scheme: &str) -> Result<ClientBuilder, rustls::Error> {
    Ok(Client::builder()
        .tls_backend_preconfigured(tls(scheme)?)
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("hames/", env!("CARGO_PKG_VERSION"))))
}

fn tls(scheme: &str) -> Result<rustls::ClientConfig, rustls::Error> {
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        rustls::ClientConfig::builder_with_provider(Arc::clone(&ring)).with_safe_default_protocol_versions()?;
    let mut config = if scheme == "https" {
        let verifier = rustls_platform_verifier::Verifier::new(ring)?;
        builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier)).with_no_client_auth()
    } else {
        builder.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth()
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}
