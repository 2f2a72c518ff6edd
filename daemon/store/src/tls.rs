//! TLS to the server: either none, or one whose certificate is verified. Never something in between.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use thiserror::Error;
use tokio_postgres_rustls::MakeRustlsConnect;

/// The TLS parameters of a database address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// `sslrootcert`: certificates of authorities; `None`: those of the system.
    pub root: Option<PathBuf>,
    /// `sslcert`: our certificate chain.
    pub certificate: Option<PathBuf>,
    /// `sslkey`: its key.
    pub key: Option<PathBuf>,
}

/// Why TLS cannot be set up.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file cannot be read or holds nothing of use.
    #[error("{parameter} {}: {reason}", path.display())]
    File {
        /// The parameter that names it.
        parameter: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No authority is known.
    #[error(
        "the system has no CA certificates: install the package ca-certificates, or name a file with sslrootcert"
    )]
    NoRoots,
    /// One of certificate and key is missing.
    #[error("sslcert and sslkey go together: give both or none")]
    HalfIdentity,
    /// rustls does not accept it.
    #[error("TLS: {0}")]
    Rustls(#[from] rustls::Error),
}

/// A connector that verifies the server's certificate and host name.
///
/// # Errors
/// Names the file or parameter.
pub fn connector(files: &TlsFiles) -> Result<MakeRustlsConnect, TlsError> {
    let mut roots = RootCertStore::empty();
    match &files.root {
        Some(path) => {
            for certificate in certificates("sslrootcert", path)? {
                roots.add(certificate)?;
            }
        }
        None => {
            let _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err(TlsError::NoRoots);
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let config = match (&files.certificate, &files.key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(certificate), Some(key)) => builder
            .with_client_auth_cert(certificates("sslcert", certificate)?, private_key(key)?)?,
        _ => return Err(TlsError::HalfIdentity),
    };
    Ok(MakeRustlsConnect::new(config))
}

fn certificates(
    parameter: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |reason: String| TlsError::File {
        parameter,
        path: path.to_owned(),
        reason,
    };
    let file = File::open(path).map_err(|error| wrong(error.to_string()))?;
    let found = CertificateDer::pem_reader_iter(BufReader::new(file))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| wrong(error.to_string()))?;
    if found.is_empty() {
        Err(wrong("holds no PEM certificate".into()))
    } else {
        Ok(found)
    }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|error| TlsError::File {
        parameter: "sslkey",
        path: path.to_owned(),
        reason: error.to_string(),
    })
}
