//! The kinds of values that a configuration holds: durations, sizes and counts.
//!
//! Each refuses what is not clearly meant (a number without its unit, a month, a zero) and says what it expects.

use std::fmt;
use std::time::Duration;

use humantime_serde::re::humantime;
use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};

/// A duration with its unit, such as `30s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span(pub(crate) Duration);

/// A number of bytes with its unit, such as `1MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) usize);

/// A whole number from 1 to 1,000,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count(pub(crate) u32);

/// What a duration looks like.
pub(crate) const SPAN: &str = "a duration with its unit, such as \"30s\", \"5m\" or \"1h 30m\"";

/// Longer ones are not meant, and clocks that they are added to would overflow.
const LONGEST: Duration = Duration::from_hours(24 * 3660);

/// Reads a duration as people write it; months and years are refused, because `M` is too easily written for `m`.
pub(crate) fn parse_span(text: &str) -> Result<Duration, String> {
    let unit = |name: &str| {
        text.split(|c: char| !c.is_alphabetic())
            .any(|word| word == name)
    };
    for long in ["M", "month", "months", "y", "yr", "year", "years"] {
        if unit(long) {
            return Err(format!(
                "months and years are not exact: {SPAN} is expected (a minute is \"m\")"
            ));
        }
    }
    match humantime::parse_duration(text) {
        Ok(span) if span <= LONGEST => Ok(span),
        Ok(_) => Err("at most ten years (3660d) are expected".to_owned()),
        Err(_) => Err(format!("{SPAN} is expected")),
    }
}

/// Reads a size: a whole number and `B`, `KiB`, `MiB` or `GiB`.
fn parse_size(text: &str) -> Option<usize> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let number: usize = text[..digits].parse().ok()?;
    let shift = match text[digits..].trim_start() {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Words;
        impl Visitor<'_> for Words {
            type Value = Span;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(SPAN)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Span, E> {
                parse_span(text)
                    .map(Span)
                    .map_err(|why| E::custom(format!("found \"{text}\": {why}")))
            }
        }
        deserializer.deserialize_any(Words)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Words;
        impl Visitor<'_> for Words {
            type Value = Size;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size with its unit, such as \"64KiB\" or \"1MiB\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                parse_size(text)
                    .map(Size)
                    .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(Words)
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number from 1 to 1000000")
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Count, E> {
                u32::try_from(number)
                    .ok()
                    .filter(|n| (1..=1_000_000).contains(n))
                    .map(Count)
                    .ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Count, E> {
                self.visit_i64(i64::try_from(number).unwrap_or(i64::MAX))
            }
        }
        deserializer.deserialize_any(Number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_needs_a_unit_and_is_never_a_month() {
        assert_eq!(parse_span("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(parse_span("1h 30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_span("1m"), Ok(Duration::from_secs(60)));
        for bad in [
            "30",
            "",
            "1M",
            "1y",
            "2 months",
            "1h1M",
            "-3s",
            "s",
            "3 s econds",
            "3661d",
            "18446744073709551615s",
        ] {
            assert!(parse_span(bad).is_err(), "{bad} was taken");
        }
        assert!(parse_span("1M").unwrap_err().contains("a minute is \"m\""));
    }

    #[test]
    fn a_size_needs_a_binary_unit() {
        assert_eq!(parse_size("512B"), Some(512));
        assert_eq!(parse_size("64 KiB"), Some(65_536));
        assert_eq!(parse_size("1MiB"), Some(1_048_576));
        for bad in [
            "",
            "1",
            "1MB",
            "MiB",
            "-1B",
            "99999999999999999999B",
            "18446744073709551615GiB",
        ] {
            assert_eq!(parse_size(bad), None, "{bad} was taken");
        }
    }
}
