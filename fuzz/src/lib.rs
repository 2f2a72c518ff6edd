//! What several targets check: that PostgreSQL can store what was made of foreign bytes.
//!
//! Written from PostgreSQL's side and without any code of ours, so that a fault there cannot hide itself.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde_json::value::RawValue;
use tenure_protocol::output::{Capped, Output};
use tenure_protocol::verdict::{Ended, Verdict};

/// How deep `jsonb` may be here: far less than PostgreSQL itself takes.
const DEPTH: usize = 101;

/// An error for a table: what happened, and 500 characters of what the handler said.
const ERROR: usize = 1000;

/// Demands that `text` be JSON that `jsonb` takes: no U+0000, no lone surrogate, no number beyond `numeric`.
pub fn assert_jsonb(text: &str) {
    assert!(!text.contains('\0'), "{text:?}");
    let value: &RawValue =
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    assert_value(value, DEPTH);
}

fn assert_value(value: &RawValue, depth: usize) {
    assert!(depth > 0, "too deep");
    let text = value.get();
    match text.as_bytes()[0] {
        b'"' => assert_text(&decoded(text)),
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(text).unwrap();
            items.iter().for_each(|item| assert_value(item, depth - 1));
        }
        b'{' => {
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(text).unwrap();
            for (key, item) in members {
                assert_text(&key);
                assert_value(item, depth - 1);
            }
        }
        b'-' | b'0'..=b'9' => assert_number(text),
        _ => assert!(["true", "false", "null"].contains(&text), "{text}"),
    }
}

/// A string of JSON; it has none where a surrogate stands alone.
fn decoded(json: &str) -> String {
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

/// Demands what `numeric` holds: 131072 digits before the point and 16383 after it.
fn assert_number(text: &str) {
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let exponent = i64::from_str(exponent).unwrap();
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let whole = i64::try_from(whole.trim_start_matches('-').len()).unwrap();
    let fraction = i64::try_from(fraction.len()).unwrap();
    assert!(whole + exponent <= 131_072, "{text}");
    assert!(fraction - exponent <= 16_383, "{text}");
}

/// Demands that `text` be one that the type `text` takes.
pub fn assert_text(text: &str) {
    assert!(!text.contains('\0'), "{text:?}");
}

/// Demands that an end can be stored and shown, and says of each verdict what it must.
pub fn assert_ended(ended: &Ended) {
    if let Some(result) = &ended.result {
        assert_jsonb(result);
    }
    if let Some(error) = &ended.error {
        assert_text(error);
        assert!(!error.is_empty());
        assert!(error.chars().count() <= ERROR, "{error}");
    }
    ended.log_tail.iter().for_each(|log| assert_text(log));
    let good = matches!(ended.verdict, Verdict::Done | Verdict::Snooze(_));
    assert_eq!(good, ended.error.is_none(), "{ended:?}");
    assert!(good || ended.result.is_none() && ended.directives == Default::default());
    for job in &ended.directives.enqueue {
        assert_jsonb(&job.to_json());
    }
}

/// What is kept of `chunks`.
pub fn collected<'a>(cap: usize, chunks: impl Iterator<Item = &'a [u8]>) -> Output {
    let mut capped = Capped::new(cap);
    chunks.for_each(|chunk| capped.push(chunk));
    capped.finish()
}

/// Cuts `bytes` into pieces whose lengths follow from `seed`; some are empty, some long.
pub fn pieces(bytes: &[u8], seed: u8) -> impl Iterator<Item = &[u8]> {
    let (mut rest, mut state) = (bytes, u32::from(seed) | 0x100);
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let length = match state >> 30 {
            0 => state >> 24 & 0x3,
            1 => state >> 24 & 0xF,
            2 => state >> 20 & 0xFF,
            _ => state >> 16 & 0x1FFF,
        };
        let (piece, after) = rest.split_at(rest.len().min(length as usize));
        let done = rest.is_empty();
        rest = after;
        (!done).then_some(piece)
    })
}
