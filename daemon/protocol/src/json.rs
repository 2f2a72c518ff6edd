//! JSON handled as text, so that numbers keep every digit and members keep their order.
//!
//! Invariant: what [`storable`] lets through, PostgreSQL's `jsonb` takes, and nothing in it was changed but U+0000, which
//! becomes a visible mark.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Stands where U+0000 stood: neither `text` nor `jsonb` can hold that character.
const NUL_MARK: char = '\u{2400}';

/// Deeper values are kept as text: readers in many languages give up near a hundred levels.
const MAX_DEPTH: usize = 100;

/// What `numeric` holds: digits before and after the decimal point.
const MAX_WHOLE_DIGITS: i64 = 131_072;
const MAX_FRACTION_DIGITS: i64 = 16_383;

/// `1e131071` is eight bytes here and 131,072 in each answer of the database: all exponents of one value together may
/// add this many digits.
const MAX_ADDED_DIGITS: i64 = 1 << 20;

/// Any bytes as text that PostgreSQL stores: invalid UTF-8 becomes U+FFFD, NUL a visible mark.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace('\0', "\u{2400}")
}

/// `text` as a JSON string.
pub(crate) fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// `text` as JSON that `jsonb` accepts, each number and member as it was written; `None` when it is no JSON or cannot be
/// stored as such (a lone surrogate, a number beyond `numeric`, more than a hundred levels).
pub(crate) fn storable(text: &str) -> Option<String> {
    let json: &RawValue = serde_json::from_str(text).ok()?;
    Scan::new(json.get()).run()
}

/// A walk over text that is known to be well-formed JSON.
struct Scan<'a> {
    rest: &'a str,
    out: String,
    depth: usize,
    added_digits: i64,
}

impl<'a> Scan<'a> {
    fn new(json: &'a str) -> Self {
        Self {
            rest: json,
            out: String::with_capacity(json.len()),
            depth: 0,
            added_digits: 0,
        }
    }

    fn run(mut self) -> Option<String> {
        while let Some(next) = self.rest.bytes().next() {
            match next {
                b'"' => self.string()?,
                b'-' | b'0'..=b'9' => self.number()?,
                b'[' | b'{' => {
                    self.depth += 1;
                    self.copy(1);
                }
                b']' | b'}' => {
                    self.depth -= 1;
                    self.copy(1);
                }
                _ => self.copy(1),
            }
            if self.depth > MAX_DEPTH {
                return None;
            }
        }
        Some(self.out)
    }

    fn copy(&mut self, bytes: usize) {
        let (now, rest) = self.rest.split_at(bytes);
        self.out.push_str(now);
        self.rest = rest;
    }

    fn string(&mut self) -> Option<()> {
        self.copy(1);
        loop {
            self.copy(self.rest.find(['"', '\\'])?);
            if self.rest.starts_with('"') {
                self.copy(1);
                return Some(());
            }
            match escaped_unit(self.rest) {
                None => self.copy(2),
                Some(0) => {
                    self.out.push(NUL_MARK);
                    self.rest = &self.rest[6..];
                }
                Some(0xD800..=0xDBFF) => {
                    let low = escaped_unit(&self.rest[6..])?;
                    if !(0xDC00..=0xDFFF).contains(&low) {
                        return None;
                    }
                    self.copy(12);
                }
                Some(0xDC00..=0xDFFF) => return None,
                Some(_) => self.copy(6),
            }
        }
    }

    fn number(&mut self) -> Option<()> {
        let end = self
            .rest
            .find(|c: char| !matches!(c, '0'..='9' | '+' | '-' | '.' | 'e' | 'E'))
            .unwrap_or(self.rest.len());
        self.added_digits += added_digits(&self.rest[..end])?;
        if self.added_digits > MAX_ADDED_DIGITS {
            return None;
        }
        self.copy(end);
        Some(())
    }
}

/// The UTF-16 unit of a `\uXXXX` at the start of `text`.
fn escaped_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok()
}

/// How many digits the exponent of `number` adds to those written; `None` when `numeric` cannot hold it.
fn added_digits(number: &str) -> Option<i64> {
    let (mantissa, exponent) = match number.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (number, 0),
    };
    let mantissa = mantissa.trim_start_matches('-');
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let written = |digits: &str| i64::try_from(digits.len()).ok();
    let (whole, fraction) = (written(whole)?, written(fraction)?);
    let exponent = i64::from(exponent);
    let fits = whole + exponent <= MAX_WHOLE_DIGITS && fraction - exponent <= MAX_FRACTION_DIGITS;
    fits.then_some(exponent.abs())
}

/// The members of a JSON object, in their order, each value as it was written.
pub(crate) struct Members<'a>(pub(crate) Vec<(String, &'a RawValue)>);

impl<'a> Members<'a> {
    /// `None` when `json` is not an object.
    pub(crate) fn of(json: &'a str) -> Option<Self> {
        serde_json::from_str(json).ok()
    }
}

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

/// Writes an object member by member; raw values go in as they are.
pub(crate) struct Object(String);

impl Object {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self(String::with_capacity(bytes))
    }

    /// Adds a member whose value is JSON already.
    pub(crate) fn raw(&mut self, key: &str, json: &str) -> &mut Self {
        self.0.push(if self.0.is_empty() { '{' } else { ',' });
        self.0.push_str(&string(key));
        self.0.push(':');
        self.0.push_str(json);
        self
    }

    /// Adds a member whose value is a string.
    pub(crate) fn text(&mut self, key: &str, text: &str) -> &mut Self {
        self.raw(key, &string(text))
    }

    /// The finished object.
    pub(crate) fn finish(mut self) -> String {
        if self.0.is_empty() {
            self.0.push('{');
        }
        self.0.push('}');
        self.0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
    use super::*;

    #[test]
    fn numbers_keep_every_digit() {
        let json = r#"{"id":1970670598291982290,"u":18446744073709551616,"d":0.10000000000000000000001,"e":-1.50E+3}"#;
        assert_eq!(storable(json).as_deref(), Some(json));
    }

    #[test]
    fn only_numbers_that_numeric_holds_pass() {
        for good in ["0", "-0", "1e131071", "1e-16383", "0.5e-3"] {
            assert_eq!(storable(good).as_deref(), Some(good));
        }
        for bad in ["1e131072", "1e-16384", "1e99999999999", "0e-99999"] {
            assert_eq!(storable(bad), None, "{bad}");
        }
        assert!(storable(&"9".repeat(131_072)).is_some());
        assert!(storable(&"9".repeat(131_073)).is_none());
    }

    #[test]
    fn exponents_that_blow_up_together_are_refused() {
        let some = ["1e131071"; 8].join(",");
        assert!(storable(&format!("[{some}]")).is_some());
        assert!(storable(&format!("[{some},1e131071]")).is_none());
    }

    #[test]
    fn nul_becomes_visible_in_values_and_keys() {
        let out = storable(r#"{"a\u0000b":["x\u0000y","\\u0000"]}"#).unwrap();
        assert_eq!(out, r#"{"a␀b":["x␀y","\\u0000"]}"#);
    }

    #[test]
    fn surrogates_pass_in_pairs_only() {
        assert!(storable(r#""\ud83d\ude00""#).is_some());
        for lone in [
            r#""\ud83d""#,
            r#""\ude00""#,
            r#""\ud83dx""#,
            r#""\ud83d\u0041""#,
        ] {
            assert_eq!(storable(lone), None, "{lone}");
        }
    }

    #[test]
    fn depth_has_an_end() {
        let nested = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(storable(&nested(100)).is_some());
        assert!(storable(&nested(101)).is_none());
        assert!(storable(&nested(200_000)).is_none());
    }
}
