//! Finds the line of a key in a TOML text.
//!
//! The reader of the values knows no lines, so an error that names a key is looked up here, in the same text.

use toml_edit::{ImDocument, Item, Value};

/// The line, counted from 1, of the key at `path`, or of the innermost part of `path` that is there. Members of
/// arrays are named by their index. `None` if not even the first part is there, or if the text is no TOML.
pub(crate) fn line_of(text: &str, path: &[String]) -> Option<usize> {
    let document = ImDocument::parse(text).ok()?;
    let mut place = Place::Item(document.as_item());
    let mut found = None;
    for part in path {
        let Some((at, next)) = place.step(part) else {
            break;
        };
        found = at.or(found);
        place = next;
    }
    found.map(|offset| line_at(text, offset))
}

/// The line, counted from 1, of the byte at `offset`.
pub(crate) fn line_at(text: &str, offset: usize) -> usize {
    text.bytes()
        .take(offset)
        .filter(|byte| *byte == b'\n')
        .count()
        + 1
}

enum Place<'a> {
    Item(&'a Item),
    Value(&'a Value),
    Table(&'a toml_edit::Table),
}

impl<'a> Place<'a> {
    /// One part further down: where it begins, and what it is.
    fn step(&self, part: &str) -> Option<(Option<usize>, Place<'a>)> {
        let start = |span: Option<std::ops::Range<usize>>| span.map(|range| range.start);
        match *self {
            Place::Item(Item::Value(value)) => Place::Value(value).step(part),
            Place::Item(Item::Table(table)) => Place::Table(table).step(part),
            Place::Item(Item::ArrayOfTables(tables)) => {
                let table = tables.get(part.parse().ok()?)?;
                Some((start(table.span()), Place::Table(table)))
            }
            Place::Item(Item::None) => None,
            Place::Table(table) => {
                let (key, item) = table.get_key_value(part)?;
                Some((start(key.span()), Place::Item(item)))
            }
            Place::Value(Value::InlineTable(table)) => {
                let (key, item) = table.get_key_value(part)?;
                Some((start(key.span()), Place::Item(item)))
            }
            Place::Value(Value::Array(array)) => {
                let value = array.get(part.parse().ok()?)?;
                Some((start(value.span()), Place::Value(value)))
            }
            Place::Value(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
[worker]
name = "a"
concurrency = 3

[[pools]]
name = "one"
job_types = [
  "a",
  "b",
]

[[pools]]
name = "two"

[handlers."email_*"]
http = { url = "x", timeout = "30s" }

[handlers.report.retry]
delay = "1m"

[handlers]
late.exec.timeout = "3s"
"#;

    fn line(path: &str) -> Option<usize> {
        let path: Vec<String> = path.split('/').map(str::to_owned).collect();
        line_of(TEXT, &path)
    }

    #[test]
    fn each_shape_of_toml_is_found() {
        assert_eq!(line("worker"), Some(2));
        assert_eq!(line("worker/concurrency"), Some(4));
        assert_eq!(line("pools/0/name"), Some(7));
        assert_eq!(line("pools/0/job_types/1"), Some(10));
        assert_eq!(line("pools/1"), Some(13));
        assert_eq!(line("pools/1/name"), Some(14));
        assert_eq!(line("handlers/email_*/http/timeout"), Some(17));
        assert_eq!(line("handlers/report/retry/delay"), Some(20));
        assert_eq!(line("handlers/late/exec/timeout"), Some(23));
    }

    #[test]
    fn what_is_missing_is_named_by_what_holds_it() {
        assert_eq!(line("pools/1/job_types"), Some(13));
        assert_eq!(line("handlers/email_*/http/secret"), Some(17));
        assert_eq!(line("nothing/at/all"), None);
    }
}
