//! Who may speak to the HTTP interface.
//!
//! With a token, whoever has it. Without one only this machine is served, and then a browser is the danger: a page of
//! somebody else's could make it send requests here. So foreign names in `Host` (a name that was made to point here),
//! requests from other sites, and bodies that a plain form can send are refused.

use axum::http::{HeaderMap, Method, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// What a request must show.
#[derive(Clone)]
pub struct Access {
    /// The digest of the token: comparing digests takes the same time whatever the lengths.
    token: Option<[u8; 32]>,
    local_names_only: bool,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No token, or a wrong one.
    #[error("a valid token is needed: send `Authorization: Bearer TOKEN`")]
    Token,
    /// A name in `Host` that is none of this machine's own.
    #[error("the Host header must be localhost, 127.0.0.1 or [::1] unless api.token_file is set")]
    Host,
    /// A page of another site sent it.
    #[error("requests from pages of other sites are refused")]
    CrossSite,
    /// A body that is not declared as JSON.
    #[error("send the body with `Content-Type: application/json`")]
    ContentType,
}

impl Access {
    /// Demands `token` if there is one; else, on a network address, only local names are served.
    #[must_use]
    pub fn new(token: Option<&str>, on_network: bool) -> Self {
        Self {
            token: token.map(digest),
            local_names_only: token.is_none() && on_network,
        }
    }

    /// Lets a request for jobs or metrics pass, or says why not.
    ///
    /// # Errors
    /// The reason.
    pub fn check(&self, method: &Method, headers: &HeaderMap) -> Result<(), Denied> {
        self.check_site(headers)?;
        if let Some(token) = &self.token
            && !bearer(headers).is_some_and(|given| bool::from(digest(given).ct_eq(token)))
        {
            return Err(Denied::Token);
        }
        if method == Method::POST && !is_json(headers) {
            return Err(Denied::ContentType);
        }
        Ok(())
    }

    /// The part that holds for every request, also for the health of the process.
    ///
    /// # Errors
    /// The reason.
    pub fn check_site(&self, headers: &HeaderMap) -> Result<(), Denied> {
        let host = text(headers, "host");
        if self.local_names_only && !host.is_some_and(is_local) {
            return Err(Denied::Host);
        }
        if text(headers, "sec-fetch-site")
            .is_some_and(|site| site != "same-origin" && site != "none")
        {
            return Err(Denied::CrossSite);
        }
        let same = |origin: &str| {
            origin
                .split_once("://")
                .is_some_and(|(_, name)| Some(name) == host)
        };
        if text(headers, "origin").is_some_and(|origin| !same(origin)) {
            return Err(Denied::CrossSite);
        }
        Ok(())
    }
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    // A value that is no text is as good as a foreign one.
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = text(headers, header::AUTHORIZATION.as_str())?.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case("bearer")
        .then_some(token.trim())
}

fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    name.eq_ignore_ascii_case("localhost") || name == "127.0.0.1" || name == "[::1]"
}

/// JSON, or nothing at all: a form of another site always declares its body.
fn is_json(headers: &HeaderMap) -> bool {
    match text(headers, "content-type") {
        Some(kind) => kind
            .split(';')
            .next()
            .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")),
        None => {
            text(headers, "content-length").is_none_or(|length| length == "0")
                && !headers.contains_key("transfer-encoding")
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    fn local(method: &Method, pairs: &[(&'static str, &str)]) -> Result<(), Denied> {
        Access::new(None, true).check(method, &headers(pairs))
    }

    #[test]
    fn only_local_names_without_a_token() {
        for host in [
            "localhost",
            "localhost:7171",
            "127.0.0.1:7171",
            "[::1]:7171",
            "[::1]",
            "LOCALHOST:1",
        ] {
            assert_eq!(local(&Method::GET, &[("host", host)]), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example:7171",
            "127.0.0.1.evil.example",
            "",
            "10.0.0.1:7171",
        ] {
            assert_eq!(
                local(&Method::GET, &[("host", host)]),
                Err(Denied::Host),
                "{host}"
            );
        }
        assert_eq!(local(&Method::GET, &[]), Err(Denied::Host));
        assert_eq!(
            Access::new(None, false).check(&Method::GET, &headers(&[("host", "x")])),
            Ok(())
        );
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let host = ("host", "localhost:7171");
        assert_eq!(
            local(&Method::GET, &[host, ("sec-fetch-site", "same-origin")]),
            Ok(())
        );
        assert_eq!(
            local(&Method::GET, &[host, ("origin", "http://localhost:7171")]),
            Ok(())
        );
        for header in [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", "http://localhost:8080"),
        ] {
            assert_eq!(
                local(&Method::GET, &[host, header]),
                Err(Denied::CrossSite),
                "{header:?}"
            );
        }
    }

    #[test]
    fn a_post_is_json_or_empty() {
        let host = ("host", "localhost");
        for good in [
            &[host, ("content-type", "application/json")][..],
            &[host, ("content-type", "Application/JSON; charset=utf-8")],
            &[host],
            &[host, ("content-length", "0")],
        ] {
            assert_eq!(local(&Method::POST, good), Ok(()), "{good:?}");
        }
        for bad in [
            ("content-type", "text/plain"),
            ("content-type", "application/x-www-form-urlencoded"),
            ("content-length", "2"),
            ("transfer-encoding", "chunked"),
        ] {
            assert_eq!(
                local(&Method::POST, &[host, bad]),
                Err(Denied::ContentType),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_token_is_demanded_and_compared_whole() {
        let access = Access::new(Some("secret"), true);
        let given = |value: &str| {
            access.check(
                &Method::GET,
                &headers(&[("host", "any.example"), ("authorization", value)]),
            )
        };
        assert_eq!(given("Bearer secret"), Ok(()));
        assert_eq!(given("bearer secret"), Ok(()));
        for wrong in [
            "Bearer secre",
            "Bearer secrets",
            "Bearer ",
            "secret",
            "Basic secret",
            "",
        ] {
            assert_eq!(given(wrong), Err(Denied::Token), "{wrong}");
        }
        assert_eq!(
            access.check_site(&headers(&[("host", "any.example")])),
            Ok(())
        );
    }
}
