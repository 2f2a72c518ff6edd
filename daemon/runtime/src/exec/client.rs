//! The HTTP clients: how a connection to a handler is made, whom it trusts and where it may lead.
//!
//! Invariant: with an allow-list no connection is made to an address outside of it, whatever a name resolves to at that moment: the
//! addresses that are looked up are the ones that are connected to.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, Url};

use super::http::{PrepareError, chain};
use crate::settings::{Authorities, HttpSettings};

/// The most headers of an answer.
const MOST_HEADERS: usize = 256;

/// The HTTP clients of a daemon, one for each way to connect; each keeps its connections.
#[derive(Debug, Default)]
pub struct Clients(BTreeMap<Way, Client>);

/// A way to connect.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Way {
    connect_timeout: Duration,
    idle_timeout: Duration,
    socket: Option<PathBuf>,
    authorities: Option<Authorities>,
    allow: Vec<IpNet>,
}

impl Clients {
    pub(super) fn of(&mut self, settings: &HttpSettings) -> Result<Client, PrepareError> {
        let way = Way {
            connect_timeout: settings.connect_timeout,
            idle_timeout: settings.idle_timeout,
            socket: settings.socket.clone(),
            authorities: settings.authorities.clone(),
            allow: settings.allow.clone(),
        };
        if let Some(client) = self.0.get(&way) {
            return Ok(client.clone());
        }
        let client = way.client()?;
        self.0.insert(way, client.clone());
        Ok(client)
    }
}

impl Way {
    fn client(&self) -> Result<Client, PrepareError> {
        // Whoever comes first installs it; the client panics where there is none.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = Client::builder()
            .user_agent(concat!("tenure/", env!("CARGO_PKG_VERSION")))
            .redirect(Policy::none())
            .referer(false)
            .no_proxy()
            .http1_only()
            .http1_max_headers(MOST_HEADERS)
            .connect_timeout(self.connect_timeout)
            .pool_idle_timeout(self.idle_timeout);
        if self.idle_timeout.is_zero() {
            builder = builder.pool_max_idle_per_host(0);
        }
        if let Some(socket) = &self.socket {
            builder = builder.unix_socket(socket.as_path());
        }
        if let Some(authorities) = &self.authorities {
            builder = builder.tls_certs_only(certificates(authorities)?);
        }
        if !self.allow.is_empty() {
            builder = builder.dns_resolver(AllowList(self.allow.as_slice().into()));
        }
        builder
            .build()
            .map_err(|error| PrepareError::Client(chain(error)))
    }
}

fn certificates(authorities: &Authorities) -> Result<Vec<Certificate>, PrepareError> {
    let refused = |why: String| PrepareError::Authorities {
        file: authorities.file.clone(),
        why,
    };
    let certificates = Certificate::from_pem_bundle(authorities.pem.as_bytes())
        .map_err(|error| refused(format!("is no PEM: {}", chain(error))))?;
    if certificates.is_empty() {
        return Err(refused("holds no certificate".to_owned()));
    }
    Ok(certificates)
}

/// An address outside of the allow-list.
#[derive(Debug, thiserror::Error)]
#[error("{host} is at {}, which `allow` does not name", list(addresses))]
pub(super) struct NotAllowed {
    host: String,
    addresses: Vec<IpAddr>,
}

/// Refuses an address that is written as numbers: nobody looks that one up.
pub(super) fn check_host(url: &Url, allow: &[IpNet]) -> Result<(), NotAllowed> {
    let host = url.host_str().unwrap_or_default();
    let number = host.trim_matches(['[', ']']).parse::<IpAddr>();
    match number {
        Ok(address) if !allow.is_empty() && !names(allow, address) => Err(NotAllowed {
            host: host.to_owned(),
            addresses: vec![address],
        }),
        _ => Ok(()),
    }
}

/// Looks names up and answers with those of their addresses that are allowed.
struct AllowList(Arc<[IpNet]>);

impl Resolve for AllowList {
    fn resolve(&self, name: Name) -> Resolving {
        let allow = Arc::clone(&self.0);
        Box::pin(async move {
            let host = name.as_str();
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let (allowed, refused): (Vec<_>, Vec<_>) = found
                .into_iter()
                .partition(|address| names(&allow, address.ip()));
            if allowed.is_empty() && !refused.is_empty() {
                let addresses = refused.iter().map(SocketAddr::ip).collect();
                let host = host.to_owned();
                return Err(NotAllowed { host, addresses }.into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

/// Whether one of these networks has the address. An IPv4 address that is written as an IPv6 one is that IPv4 address.
fn names(allow: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    allow.iter().any(|network| network.contains(&address))
}

fn list(addresses: &[IpAddr]) -> String {
    let all: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn allows(allow: &str, url: &str) -> bool {
        check_host(&Url::parse(url).unwrap(), &[allow.parse().unwrap()]).is_ok()
    }

    #[test]
    fn numbers_are_checked_as_they_are_connected_to() {
        assert!(allows("10.0.0.0/8", "http://10.1.2.3:80/"));
        assert!(!allows("10.0.0.0/8", "http://11.1.2.3/"));
        assert!(allows("10.0.0.0/8", "http://[::ffff:10.1.2.3]/"));
        assert!(!allows("10.0.0.0/8", "http://[::1]/"));
        assert!(allows("::1/128", "http://[::1]/"));
        // The URL standard reads these as 127.0.0.1 and 10.0.0.1.
        assert!(!allows("10.0.0.0/8", "http://2130706433/"));
        assert!(allows("10.0.0.0/8", "http://0x0a000001/"));
        assert!(check_host(&Url::parse("http://10.1.1.1/").unwrap(), &[]).is_ok());
    }
}
