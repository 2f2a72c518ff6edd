//! A database address: what tokio-postgres takes, and the TLS parameters that it does not.

use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};

use crate::tls::TlsFiles;

/// A checked address. Its password is inside and never printed.
#[derive(Clone)]
pub struct Address {
    /// For tokio-postgres: only servers that take writes, keepalives on.
    pub config: Config,
    /// Files of `sslrootcert`, `sslcert`, `sslkey`; `None`: no TLS.
    pub tls: Option<TlsFiles>,
}

/// What is wrong with an address. Never shows the address: it may hold a password.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AddressError {
    /// Not of the form of an address.
    #[error(
        "the database address is not understood ({0}); its form is postgres://USER@HOST:PORT/DATABASE, with special characters of user and password percent-encoded"
    )]
    Form(String),
    /// An sslmode that would not verify the server.
    #[error(
        "sslmode={0} is not supported: use verify-full (TLS, the server's certificate is checked) or disable"
    )]
    SslMode(String),
}

impl Address {
    /// Reads an address; `password` wins over the one that it holds.
    ///
    /// # Errors
    /// Says what is wrong, without showing the address.
    pub fn parse(
        url: &str,
        password: Option<&str>,
        connect_timeout: Duration,
    ) -> Result<Self, AddressError> {
        let is_url = ["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| url.starts_with(scheme));
        // Else a part of the password would be taken for a host or a parameter, and shown.
        if is_url && url.matches('@').count() > 1 {
            return Err(AddressError::Form("it has more than one @".to_owned()));
        }
        // A `?` before the `@` is one of the password.
        let user = url.find('@').filter(|_| is_url).unwrap_or(0);
        let (head, query) = match url[user..].split_once('?') {
            Some((_, query)) => (&url[..url.len() - query.len() - 1], query),
            None => (url, ""),
        };
        let (mut kept, mut mode, mut files) = (Vec::new(), None, TlsFiles::default());
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let path = || Some(decoded(value).into());
            match name {
                "sslmode" => mode = Some(value.to_owned()),
                "sslrootcert" => files.root = path(),
                "sslcert" => files.certificate = path(),
                "sslkey" => files.key = path(),
                _ => kept.push(parameter),
            }
        }
        let plain = if kept.is_empty() {
            head.to_owned()
        } else {
            format!("{head}?{}", kept.join("&"))
        };
        let mut config = Config::from_str(&plain)
            .map_err(|error| AddressError::Form(crate::error::chain(&error)))?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(AddressError::Form("it names no host".to_owned()));
        }
        let remote = config.get_hosts().iter().any(|host| match host {
            Host::Tcp(name) => !matches!(name.as_str(), "localhost" | "127.0.0.1" | "::1"),
            Host::Unix(_) => false,
        });
        let encrypted = match mode.as_deref() {
            // Nothing said: plain only where nobody can listen.
            None => remote,
            Some("disable") => false,
            Some("verify-full" | "require") => true,
            Some(other) => return Err(AddressError::SslMode(other.to_owned())),
        };
        if let Some(password) = password {
            config.password(password);
        }
        config.ssl_mode(if encrypted {
            SslMode::Require
        } else {
            SslMode::Disable
        });
        for_us(&mut config, connect_timeout);
        Ok(Self {
            config,
            tls: encrypted.then_some(files),
        })
    }

    /// How many hosts it names. A name may still lead to several servers, or to another one tomorrow.
    #[must_use]
    pub fn hosts(&self) -> usize {
        let config = &self.config;
        config.get_hosts().len().max(config.get_hostaddrs().len())
    }

    /// The same address with only the host of this number.
    #[must_use]
    pub fn at(&self, host: usize) -> Self {
        let all = &self.config;
        let mut one = Config::new();
        match all.get_hosts().get(host) {
            Some(Host::Tcp(name)) => drop(one.host(name)),
            Some(Host::Unix(path)) => drop(one.host_path(path)),
            None => {}
        }
        if let Some(address) = all.get_hostaddrs().get(host) {
            one.hostaddr(*address);
        }
        let ports = all.get_ports();
        if let Some(port) = ports.get(host).or(ports.first()) {
            one.port(*port);
        }
        if let Some(user) = all.get_user() {
            one.user(user);
        }
        if let Some(name) = all.get_dbname() {
            one.dbname(name);
        }
        if let Some(options) = all.get_options() {
            one.options(options);
        }
        if let Some(password) = all.get_password() {
            one.password(password);
        }
        one.ssl_mode(all.get_ssl_mode())
            .ssl_negotiation(all.get_ssl_negotiation())
            .channel_binding(all.get_channel_binding());
        for_us(
            &mut one,
            all.get_connect_timeout().copied().unwrap_or_default(),
        );
        Self {
            config: one,
            tls: self.tls.clone(),
        }
    }

    /// Host and port of each server, for messages.
    #[must_use]
    pub fn servers(&self) -> String {
        let ports = self.config.get_ports();
        let hosts = self
            .config
            .get_hosts()
            .iter()
            .enumerate()
            .map(|(index, host)| {
                let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
                match host {
                    Host::Tcp(name) => format!("{name}:{port}"),
                    Host::Unix(path) => format!("{} (port {port})", path.display()),
                }
            });
        hosts.collect::<Vec<_>>().join(", ")
    }
}

/// Only servers that take writes, and no connection that is dead without our knowing.
fn for_us(config: &mut Config, connect_timeout: Duration) {
    config
        .target_session_attrs(TargetSessionAttrs::ReadWrite)
        .connect_timeout(connect_timeout)
        .keepalives_idle(Duration::from_secs(10))
        .keepalives_interval(Duration::from_secs(3))
        .keepalives_retries(3)
        .tcp_user_timeout(Duration::from_secs(20))
        .application_name("tenure");
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let hex = tail
            .get(..2)
            .and_then(|two| std::str::from_utf8(two).ok())
            .and_then(|two| u8::from_str_radix(two, 16).ok());
        match hex {
            Some(byte) if first == b'%' => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse(url: &str) -> Result<Address, AddressError> {
        Address::parse(url, None, Duration::from_secs(5))
    }

    #[test]
    fn nothing_said_about_tls_is_plain_only_on_this_machine() {
        assert!(
            parse("postgres://app@127.0.0.1:5433/app")
                .unwrap()
                .tls
                .is_none()
        );
        assert!(
            parse("postgres://app@%2Frun%2Fpostgresql/app")
                .unwrap()
                .tls
                .is_none()
        );
        assert!(parse("postgres://app@pg1/app").unwrap().tls.is_some());
        assert!(
            parse("postgres://app@pg1/app?sslmode=disable")
                .unwrap()
                .tls
                .is_none()
        );
    }

    #[test]
    fn modes_that_verify_nothing_are_refused() {
        for mode in ["prefer", "allow", "verify-ca", "yes"] {
            let url = format!("postgres://app@pg1/app?sslmode={mode}");
            assert_eq!(parse(&url).err(), Some(AddressError::SslMode(mode.into())));
        }
        let address =
            parse("postgres://app@pg1/app?sslmode=verify-full&sslrootcert=%2Fetc%2Fca%20x.pem")
                .unwrap();
        assert_eq!(address.tls.unwrap().root, Some("/etc/ca x.pem".into()));
        assert_eq!(address.config.get_ssl_mode(), SslMode::Require);
    }

    #[test]
    fn what_the_address_says_reaches_the_driver() {
        let address = Address::parse(
            "postgres://u%40x:a%25b@h1,h2:5433/db?sslmode=disable",
            Some("p@ss:w/o?r#d%"),
            Duration::from_secs(2),
        )
        .unwrap();
        assert_eq!(address.config.get_user(), Some("u@x"));
        assert_eq!(
            address.config.get_password(),
            Some("p@ss:w/o?r#d%".as_bytes())
        );
        assert_eq!(
            address.config.get_target_session_attrs(),
            TargetSessionAttrs::ReadWrite
        );
        assert_eq!(
            address.config.get_connect_timeout(),
            Some(&Duration::from_secs(2))
        );
        assert_eq!(address.servers(), "h1:5432, h2:5433");
        let second = address.at(1);
        assert_eq!((address.hosts(), second.hosts()), (2, 1));
        assert_eq!(second.servers(), "h2:5433");
        assert_eq!(second.config.get_password(), address.config.get_password());
        assert_eq!(second.config.get_dbname(), Some("db"));
    }

    #[test]
    fn a_raw_password_is_read_whole_or_refused() {
        let address = parse("postgres://u:a?sslmode=hunter2&&x=/@h/db?sslmode=disable").unwrap();
        let password = address.config.get_password();
        assert_eq!(password, Some("a?sslmode=hunter2&&x=/".as_bytes()));
        // A part of it would be a host, and hosts are shown.
        for url in [
            "postgres://u:a@hunter2@h/db",
            "postgres://u:a@hunter2/x@h/db",
            "postgres://u:a@x?sslmode=hunter2@h/db",
        ] {
            let error = parse(url).err().unwrap().to_string();
            assert!(error.contains("more than one @"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn no_error_shows_the_password() {
        for url in [
            "postgres://u:hunter2@/db",
            "postgres://u:hunter2@h:port/db",
            "postgres://u:hunter2@h/db?nonsense=1",
            "u:hunter2",
        ] {
            let text = parse(url).err().unwrap().to_string();
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
}
