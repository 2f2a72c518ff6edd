//! A handler's output becomes a result: JSON if it is JSON, else text, and never a reason for the job to fail to be stored.
//!
//! Invariant: `result` is JSON that `jsonb` accepts, with every digit of every number as the handler wrote it.

use crate::directives::{BadDirective, Directives};
use crate::json::{self, Members, Object};
use crate::output::Output;

/// What a handler answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HandlerResult {
    /// JSON text for the job's `result`; `None` when the handler said nothing.
    pub result: Option<String>,
    /// What it asks for beside.
    pub directives: Directives,
}

/// Reads what a handler answered.
///
/// Output that is not JSON, or that `jsonb` cannot hold as it is, is kept as a JSON string without its last line breaks.
///
/// # Errors
/// When a `"tenure"` key is there and cannot be carried out as a whole.
pub fn parse(output: &Output) -> Result<HandlerResult, BadDirective> {
    if output.bytes.trim_ascii().is_empty() {
        return Ok(HandlerResult::default());
    }
    let json = std::str::from_utf8(&output.bytes)
        .ok()
        .filter(|_| output.complete)
        .and_then(|text| json::storable(text.trim_ascii()));
    match json {
        Some(json) => take_directives(json),
        None => as_text(output),
    }
}

fn as_text(output: &Output) -> Result<HandlerResult, BadDirective> {
    let text = json::text(&output.bytes);
    let is_object = text
        .trim_start_matches('\u{FEFF}')
        .trim_start()
        .starts_with('{');
    if is_object && asks(output, &text) {
        let problem = if output.complete {
            "the output is not one JSON object that can be stored (well-formed, at most 100 levels deep, no lone surrogates, numbers that \
             PostgreSQL holds), so the key cannot be read"
        } else {
            "the output is over its limit and was cut, so the key cannot be read; write less"
        };
        return Err(BadDirective::new("tenure", problem));
    }
    Ok(HandlerResult {
        result: Some(json::string(text.trim_end_matches(['\r', '\n']))),
        directives: Directives::default(),
    })
}

/// Whether the key is there, also where letters of it are escaped.
fn asks(output: &Output, text: &str) -> bool {
    let named = output.names_tenure || text.contains("\"tenure\"");
    named
        || Members::of(text).is_some_and(|Members(all)| all.iter().any(|(key, _)| key == "tenure"))
}

fn take_directives(json: String) -> Result<HandlerResult, BadDirective> {
    let members = Members::of(&json).map_or_else(Vec::new, |Members(members)| members);
    let mut given = members.iter().filter(|(key, _)| key == "tenure");
    let directives = match (given.next(), given.next()) {
        (None, _) => {
            return Ok(HandlerResult {
                result: Some(json),
                directives: Directives::default(),
            });
        }
        (Some((_, value)), None) => Directives::parse(value.get())?,
        (Some(_), Some(_)) => return Err(BadDirective::new("tenure", "is given twice")),
    };
    let mut rest = Object::with_capacity(json.len());
    for (key, value) in members.iter().filter(|(key, _)| key != "tenure") {
        rest.raw(key, value.get());
    }
    Ok(HandlerResult {
        result: Some(rest.finish()),
        directives,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn output(bytes: &[u8]) -> Output {
        Output {
            bytes: bytes.to_vec(),
            complete: true,
            names_tenure: false,
        }
    }

    fn result(bytes: impl AsRef<[u8]>) -> Option<String> {
        parse(&output(bytes.as_ref())).unwrap().result
    }

    #[test]
    fn json_stays_as_written() {
        let json = "{ \"b\": 18446744073709551616,\n \"a\": 0.10000000000000000000001 }";
        assert_eq!(result(format!("\n{json}\n")).unwrap(), json);
        assert_eq!(result("42\n").unwrap(), "42");
        assert_eq!(result("null").unwrap(), "null");
    }

    #[test]
    fn the_rest_is_text() {
        assert_eq!(result("done\r\n\n").unwrap(), r#""done""#);
        assert_eq!(result("NaN").unwrap(), r#""NaN""#);
        assert_eq!(result(" \n\t"), None);
        assert_eq!(result(b"a\0b\xff").unwrap(), "\"a␀b\u{FFFD}\"");
        assert_eq!(result(r#""\ud800""#).unwrap(), r#""\"\\ud800\"""#);
        assert_eq!(result("1e999999").unwrap(), r#""1e999999""#);
        assert_eq!(
            result(r#"{"a\u0000":"x\u0000y"}"#).unwrap(),
            r#"{"a␀":"x␀y"}"#
        );
    }

    #[test]
    fn the_tenure_key_is_taken_off() {
        let parsed = parse(&output(
            br#"{"b": 1.0,"tenure":{"snooze":"10m"},"a":[1, 2]}"#,
        ))
        .unwrap();
        assert_eq!(parsed.result.unwrap(), r#"{"b":1.0,"a":[1, 2]}"#);
        assert_eq!(parsed.directives.snooze, Some(Duration::from_mins(10)));
        assert_eq!(result(r#"{"\u0074enure":{}}"#).unwrap(), "{}");
        assert_eq!(
            result(r#"{"x":{"tenure":1}}"#).unwrap(),
            r#"{"x":{"tenure":1}}"#
        );
    }

    #[test]
    fn a_directive_is_never_lost() {
        assert_eq!(
            parse(&output(br#"{"tenure":{},"tenure":{}}"#))
                .unwrap_err()
                .path,
            "tenure"
        );
        assert_eq!(
            parse(&output(br#"{"tenure":{"x":1}}"#)).unwrap_err().path,
            "tenure.x"
        );
        let cut = Output {
            complete: false,
            names_tenure: true,
            ..output(br#"{"tenure":{"enqueue":[... [tenure: 5 bytes left out]"#)
        };
        assert_eq!(parse(&cut).unwrap_err().path, "tenure");
        for unstorable in [
            r#"{"tenure":{"enqueue":[{"job_type":"a","data":1e200000}]}}"#,
            r#"{"\ud800":1,"tenure":{"snooze":"1m"}}"#,
            r#"{"\u0074enure":{"snooze":"1m"},"x":"\ud800"}"#,
            "\u{FEFF}{\"tenure\":{\"snooze\":\"1m\"}}",
            "{\"tenure\":{\"snooze\":\"1m\"}}\n{}",
        ] {
            let error = parse(&output(unstorable.as_bytes())).unwrap_err();
            assert_eq!(error.path, "tenure", "{unstorable}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_stored(bytes: Vec<u8>) {
            if let Ok(HandlerResult { result: Some(json), .. }) = parse(&output(&bytes)) {
                prop_assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok());
                prop_assert!(!json.contains("\\u0000") && !json.contains('\0'));
            }
        }

        #[test]
        fn json_like_text_can_be_stored(text in r#"[\[\]{}",:\\u0dD8eE+\-. ]{0,40}"#) {
            if let Ok(HandlerResult { result: Some(json), .. }) = parse(&output(text.as_bytes())) {
                prop_assert!(json::storable(&json).is_some(), "{json}");
            }
        }
    }
}
