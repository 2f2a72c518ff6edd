//! What is wrong with a configuration, in the words of whoever wrote it.

use std::fmt;

use figment::error::{Actual, Kind};

/// One thing that is wrong: where, which key, what was expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// File and line, variable or flag; `None` where nothing was written at all.
    pub(crate) place: Option<String>,
    /// The key, with dots; empty for what concerns a whole file.
    pub(crate) key: String,
    /// What is wrong and what to write.
    pub(crate) what: String,
}

/// A configuration that cannot be used: all that is wrong with it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) struct ConfigError(pub(crate) Vec<Problem>);

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.what)
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

/// The path of a key as people write it: with dots, and quoted where a part needs it.
pub(crate) fn dotted(path: &[String]) -> String {
    let mut text = String::new();
    for part in path {
        if part.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() {
            text.push_str(&format!("[{part}]"));
            continue;
        }
        if !text.is_empty() {
            text.push('.');
        }
        if part
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        {
            text.push_str(part);
        } else {
            text.push_str(&format!("\"{part}\""));
        }
    }
    text
}

/// Whether the value at `path` may be or hold a secret, and is therefore never shown.
pub(crate) fn is_secret(path: &[String]) -> bool {
    let named =
        |part: &String| ["password", "url", "direct_url", "headers"].contains(&part.as_str());
    path.iter().any(named) || path.last().is_some_and(|part| part == "http")
}

/// What figment found, as a sentence; the second part is the key to add to the path of the error.
pub(crate) fn explain(kind: &Kind, secret: bool) -> (String, Option<String>) {
    let found = |actual: &Actual| match actual {
        _ if secret => "something else".to_owned(),
        Actual::Str(text) => format!("the text \"{text}\""),
        Actual::Unsigned(number) => number.to_string(),
        Actual::Signed(number) => number.to_string(),
        Actual::Float(number) => number.to_string(),
        Actual::Bool(value) => value.to_string(),
        Actual::Seq => "a list".to_owned(),
        Actual::Map => "a table".to_owned(),
        other => other.to_string(),
    };
    match kind {
        Kind::UnknownField(key, known) => (unknown(key, known), Some(key.clone())),
        Kind::UnknownVariant(value, known) => (
            format!("found \"{value}\": one of {} is expected", quoted(known)),
            None,
        ),
        Kind::InvalidType(actual, expected) | Kind::InvalidValue(actual, expected) => (
            format!(
                "found {}: {} is expected",
                found(actual),
                in_words(expected)
            ),
            None,
        ),
        Kind::MissingField(key) => (format!("`{key}` is missing"), None),
        Kind::Message(text) if secret => {
            (text.split(": ").last().unwrap_or_default().to_owned(), None)
        }
        Kind::Message(text) => (text.clone(), None),
        other => (other.to_string(), None),
    }
}

fn unknown(key: &str, known: &[&str]) -> String {
    let mut text = "unknown key".to_owned();
    let near = known.iter().map(|name| (distance(key, name), name)).min();
    if let Some((1..=2, name)) = near {
        text.push_str(&format!("; did you mean `{name}`?"));
    }
    match known {
        [] => text.push_str(" (no key is expected here)"),
        known => text.push_str(&format!(" (expected here: {})", known.join(", "))),
    }
    text
}

fn quoted(names: &[&str]) -> String {
    names
        .iter()
        .map(|name| format!("\"{name}\""))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Serde's names of types in words.
fn in_words(expected: &str) -> String {
    match expected {
        "a string" | "string" | "path string" => "a text in quotes".to_owned(),
        "a sequence" => "a list such as [\"a\", \"b\"]".to_owned(),
        "a map" => "a table".to_owned(),
        other => match other.strip_prefix("struct ") {
            Some(_) => "a table".to_owned(),
            None => other.to_owned(),
        },
    }
}

/// How many letters must be put in, left out or changed to make `a` of `b`.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, left) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, right) in b.iter().enumerate() {
            let change = diagonal + usize::from(left != *right);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_read_as_toml() {
        let path =
            |parts: &[&str]| dotted(&parts.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>());
        assert_eq!(path(&["worker", "name"]), "worker.name");
        assert_eq!(path(&["pools", "1", "name"]), "pools[1].name");
        assert_eq!(
            path(&["handlers", "email_*", "exec"]),
            "handlers.\"email_*\".exec"
        );
    }

    #[test]
    fn a_slip_of_the_key_gets_a_hint() {
        let (text, key) = explain(
            &Kind::UnknownField("lease_tll".into(), &["name", "lease_ttl"]),
            false,
        );
        assert_eq!(
            text,
            "unknown key; did you mean `lease_ttl`? (expected here: name, lease_ttl)"
        );
        assert_eq!(key.as_deref(), Some("lease_tll"));
        assert_eq!(distance("abc", "abc"), 0);
        assert_eq!(distance("abc", "acb"), 2);
    }
}
