//! What an `exec` handler prints, in any pieces, and how it exits.
//!
//! Input: a letter for the limit, one for the exit code, one for how the output is cut into pieces; then the output.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use tenure_fuzz::{assert_ended, assert_text, collected, pieces};
use tenure_protocol::output::Output;
use tenure_protocol::verdict::{
    Ended, ExitCodes, ExitMeaning, Verdict, exit_verdict, explained, last_line,
};

/// What is kept, at most: small ones, so that the fuzzer reaches them.
const LIMITS: [usize; 12] = [1 << 20, 0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, usize::MAX];

/// A mark between head and tail.
const MARK: usize = 64;

fuzz_target!(|data: &[u8]| {
    let [limit, code, seed, printed @ ..] = data else {
        return;
    };
    let limit = LIMITS[usize::from(limit.wrapping_sub(b'a')) % LIMITS.len()];
    let output = collected(limit, [printed].into_iter());
    assert_kept(limit, printed, &output);
    assert_eq!(output, collected(limit, pieces(printed, *seed)));
    assert_eq!(output, collected(limit, printed.chunks(1)));

    let ended = Ended::answered(&output);
    assert_ended(&ended);
    assert_as_written(&output, &ended);

    let log = output.text();
    assert_text(log.as_deref().unwrap_or_default());
    let own = ExitCodes::from([(3, ExitMeaning::Done), (0, ExitMeaning::Retry)]);
    for codes in [ExitCodes::new(), own] {
        let verdict = exit_verdict(i32::from(*code), &codes);
        if verdict != Verdict::Done {
            let words = log.as_deref().and_then(last_line);
            let why = explained(&format!("exit code {code}"), words);
            assert_ended(&Ended::because(verdict, why));
        }
    }
});

/// Demands the bounds, and that nothing is called complete that is not.
fn assert_kept(limit: usize, printed: &[u8], output: &Output) {
    assert_eq!(output.complete, printed.len() <= limit);
    let named = printed.windows(8).any(|window| window == b"\"tenure\"");
    assert_eq!(output.names_tenure, named);
    if output.complete {
        assert_eq!(output.bytes, printed);
    } else {
        assert!(output.bytes.len() <= limit + MARK);
    }
    // Whoever prints UTF-8 finds no broken character, wherever it was cut.
    assert!(std::str::from_utf8(printed).is_err() || std::str::from_utf8(&output.bytes).is_ok());
    for limit in LIMITS {
        let tail = output.tail(limit).unwrap_or_default();
        assert_text(&tail);
        // A byte that is no UTF-8 becomes three.
        assert!(tail.len() <= limit.saturating_mul(3).saturating_add("… ".len()));
    }
}

/// Demands that JSON is kept as it was written, and that no directive is lost in silence.
fn assert_as_written(output: &Output, ended: &Ended) {
    let text = String::from_utf8_lossy(&output.bytes);
    let Ok(json) = serde_json::from_str::<&RawValue>(&text) else {
        return;
    };
    if !output.complete {
        return;
    }
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(json.get()).unwrap_or_default();
    match members.get("tenure") {
        // It was carried out, and taken off, or the attempt failed.
        Some(_) => {
            let result = ended.result.as_deref().unwrap_or("{}");
            let kept: BTreeMap<String, &RawValue> = serde_json::from_str(result).unwrap();
            assert!(!kept.contains_key("tenure"), "{text}");
        }
        None if text.contains('\\') => {}
        // The key stands further inside an object that cannot be stored, and is not looked for there.
        None if ended.error.is_some() => assert!(output.names_tenure, "{text}"),
        None => {
            let result = ended.result.as_deref().unwrap_or_default();
            let as_text = serde_json::to_string(text.trim_end_matches(['\r', '\n'])).unwrap();
            assert!(result == json.get() || result == as_text, "{text}");
        }
    }
}
