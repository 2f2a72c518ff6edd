//! JSON that comes from the command line, a file or standard input.

use std::io::Read;

use crate::output::Failure;

/// Reads `text` itself, `@FILE`, or `-` for standard input, and checks that it is JSON. It is passed on as it was written.
pub(super) fn read(text: &str) -> Result<String, Failure> {
    let json = match (text, text.strip_prefix('@')) {
        ("-", _) => {
            let mut all = String::new();
            std::io::stdin().read_to_string(&mut all).map_err(|error| {
                Failure::usage(format!("standard input cannot be read: {error}"))
            })?;
            all
        }
        (_, Some(file)) => std::fs::read_to_string(file)
            .map_err(|error| Failure::usage(format!("{file} cannot be read: {error}")))?,
        _ => text.to_owned(),
    };
    match serde_json::from_str::<serde::de::IgnoredAny>(&json) {
        Ok(_) => Ok(json),
        Err(error) => Err(Failure::usage(format!("the data are no JSON: {error}"))
            .hint("a text needs quotes of its own: --data '\"text\"'; an object looks like --data '{\"key\": 1}'")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn json_passes_as_it_was_written() {
        assert_eq!(
            read("{\"a\": 0.10000000000000000000001}").unwrap(),
            "{\"a\": 0.10000000000000000000001}"
        );
        assert!(read("hello").is_err() && read("{").is_err() && read("@/nowhere").is_err());
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "[1]\n").unwrap();
        assert_eq!(
            read(&format!("@{}", file.path().display())).unwrap(),
            "[1]\n"
        );
    }
}
