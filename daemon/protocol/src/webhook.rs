//! The signature of Standard Webhooks 1.0.0, by which a receiver knows that a request is ours.
//!
//! Signed is `{id}.{timestamp}.{body}` with HMAC-SHA256; the receiver compares in constant time and refuses an old timestamp.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// A secret that a handler shares with us. It never shows in a log.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

/// A secret that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// What follows `whsec_` is not base64.
    #[error(
        "the webhook secret starts with whsec_, but what follows is no base64; copy the whole secret"
    )]
    NotBase64,
    /// There is nothing in it.
    #[error(
        "the webhook secret is empty; write a random one into its file, for example from `openssl rand -base64 32`"
    )]
    Empty,
}

impl Secret {
    /// Reads a secret as its file holds it: `whsec_` and base64, or else the bytes themselves; white space around it does
    /// not belong to it.
    ///
    /// # Errors
    /// When it is empty, or is not base64 after `whsec_`.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let text = text.trim();
        let key = match text.strip_prefix("whsec_") {
            Some(encoded) => STANDARD
                .decode(encoded)
                .map_err(|_| SecretError::NotBase64)?,
            None => text.as_bytes().to_vec(),
        };
        if key.is_empty() {
            return Err(SecretError::Empty);
        }
        Ok(Self(key))
    }

    /// Reads the secrets of a file, one a line: while a secret is being replaced, the new one and the old one.
    ///
    /// # Errors
    /// When there is none, or one of them cannot be used.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, SecretError> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let secrets = lines.map(Self::parse).collect::<Result<Vec<_>, _>>()?;
        if secrets.is_empty() {
            return Err(SecretError::Empty);
        }
        Ok(secrets)
    }

    /// The value of the `webhook-signature` header. `timestamp` is in seconds since 1970.
    pub fn sign(&self, id: &str, timestamp: u64, body: &[u8]) -> String {
        #[expect(clippy::expect_used, reason = "HMAC takes keys of any length")]
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body);
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    }
}

/// The value of the `webhook-signature` header with the signatures of all `secrets`: a receiver that knows one of them accepts it.
pub fn sign_all(secrets: &[Secret], id: &str, timestamp: u64, body: &[u8]) -> String {
    let signatures = secrets
        .iter()
        .map(|secret| secret.sign(id, timestamp, body));
    signatures.collect::<Vec<_>>().join(" ")
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn signs_as_the_specification_does() {
        let secret = Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").unwrap();
        let signature = secret.sign(
            "msg_p5jXN8AQM9LXM0D4loKWxJek",
            1_614_265_330,
            br#"{"test": 2432232314}"#,
        );
        assert_eq!(signature, "v1,xJxlVAWM6fywIsw0Ue6ha8U7a1usOM/a0VHs0k2Gkh4=");
    }

    #[test]
    fn a_file_may_hold_the_new_secret_and_the_old_one() {
        let all =
            Secret::parse_all("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n\n old one \r\n").unwrap();
        let [new, old] = all.as_slice() else {
            unreachable!("two lines")
        };
        assert_eq!(*old, Secret::parse("old one").unwrap());
        let signed = sign_all(&all, "a", 1, b"{}");
        assert_eq!(
            signed,
            format!("{} {}", new.sign("a", 1, b"{}"), old.sign("a", 1, b"{}"))
        );
        assert_eq!(Secret::parse_all("\n \n"), Err(SecretError::Empty));
        assert_eq!(Secret::parse_all("a\nwhsec_%"), Err(SecretError::NotBase64));
    }

    #[test]
    fn bad_secrets_are_named_and_good_ones_hidden() {
        assert_eq!(Secret::parse("whsec_%%"), Err(SecretError::NotBase64));
        assert_eq!(Secret::parse(" \n"), Err(SecretError::Empty));
        assert_eq!(
            format!("{:?}", Secret::parse("hunter2").unwrap()),
            "Secret(…)"
        );
    }
}
