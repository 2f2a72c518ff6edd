//! Texts of users on a terminal.

/// The longest text in a table's cell, in characters.
const LONGEST: usize = 60;

/// `text` with everything that could act on a terminal made visible: control characters, escapes, and the marks that
/// reorder what is read.
pub(crate) fn shown(text: &str) -> String {
    let acts = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// [`shown`], cut where a table's cell would become too long.
pub(crate) fn short(text: &str) -> String {
    let shown = shown(text);
    match shown.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_acts_on_the_terminal() {
        assert_eq!(
            shown("a\u{1b}]0;title\u{7}\r\n\u{202e}b\u{9b}1m"),
            "a\\u{1b}]0;title\\u{7}\\r\\n\\u{202e}b\\u{9b}1m"
        );
        assert_eq!(
            shown("plain \"text\" \\ ü 密🙂"),
            "plain \"text\" \\ ü 密🙂"
        );
    }

    #[test]
    fn long_cells_are_cut_between_characters() {
        assert_eq!(short(&"é".repeat(60)), "é".repeat(60));
        assert_eq!(short(&"é".repeat(61)), format!("{}…", "é".repeat(60)));
    }
}
