//! Patterns of job types, by which handlers and pools are chosen.
//!
//! `*` stands for any characters, also none, and is the only wildcard. Among the patterns that fit a job type an exact one
//! wins, then the one with the longest text before its first `*`. Two that could fit the same type with neither winning
//! are refused when the configuration is read, so that a choice never depends on an order.

use std::cmp::Ordering;
use std::fmt;
use thiserror::Error;

/// A job type, or several by means of `*`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern(String);

/// A pattern, or a set of patterns, that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PatternError {
    /// Nothing there.
    #[error("a job type pattern is empty: write a job type, or `*` for all")]
    Empty,
    /// A character that no job type has.
    #[error("the job type pattern {0:?} has a control character: remove it")]
    Control(String),
    /// Two patterns of which neither is more specific.
    #[error(
        "the job type patterns \"{0}\" and \"{1}\" can fit the same job type and neither is more specific: write more text before the first `*` of one of them"
    )]
    Ambiguous(Pattern, Pattern),
    /// The same pattern twice.
    #[error("the job type pattern \"{0}\" is there twice: merge the two")]
    Twice(Pattern),
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// When it is empty or has control characters.
    pub fn new(text: &str) -> Result<Self, PatternError> {
        if text.is_empty() {
            return Err(PatternError::Empty);
        }
        if text.contains(char::is_control) {
            return Err(PatternError::Control(text.to_owned()));
        }
        Ok(Self(text.to_owned()))
    }

    /// The pattern as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it names one job type only.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        !self.0.contains('*')
    }

    /// Whether it fits the job type. A `*` in a job type is an ordinary character.
    #[must_use]
    pub fn matches(&self, job_type: &str) -> bool {
        let Some((head, rest)) = self.0.split_once('*') else {
            return self.0 == job_type;
        };
        let Some(mut left) = job_type.strip_prefix(head) else {
            return false;
        };
        let (middle, tail) = rest.rsplit_once('*').unwrap_or(("", rest));
        for part in middle.split('*') {
            // The first place is as good as any other: what follows can only gain room by it.
            match left.find(part) {
                Some(at) => left = &left[at + part.len()..],
                None => return false,
            }
        }
        left.ends_with(tail)
    }

    /// The pattern for SQL's `LIKE` with its default escape, the backslash.
    #[must_use]
    pub fn to_sql_like(&self) -> String {
        let mut like = String::with_capacity(self.0.len());
        for c in self.0.chars() {
            match c {
                '*' => like.push('%'),
                '%' | '_' | '\\' => like.extend(['\\', c]),
                c => like.push(c),
            }
        }
        like
    }

    /// Which of two is more specific, for types that both fit.
    fn specificity(&self, other: &Self) -> Ordering {
        let key = |p: &Self| (p.is_exact(), p.0.find('*').unwrap_or(p.0.len()));
        key(self).cmp(&key(other))
    }

    /// Whether some job type fits both: walks both patterns at once, keeping the places of `other` that can be reached.
    fn overlaps(&self, other: &Self) -> bool {
        let other: Vec<char> = other.0.chars().collect();
        // A place of `other` reaches the next one for free when a `*` stands there.
        let free = |reached: &mut Vec<bool>| {
            for (at, c) in other.iter().enumerate() {
                reached[at + 1] |= *c == '*' && reached[at];
            }
        };
        let mut reached = vec![false; other.len() + 1];
        reached[0] = true;
        free(&mut reached);
        for mine in self.0.chars() {
            let mut next = vec![false; other.len() + 1];
            for at in 0..=other.len() {
                if !reached[at] {
                    continue;
                }
                if mine == '*' {
                    // My star takes none of the other's text, or all that follows.
                    next[at..].fill(true);
                    break;
                }
                match other.get(at) {
                    Some('*') => next[at] = true,
                    Some(theirs) if *theirs == mine => next[at + 1] = true,
                    _ => {}
                }
            }
            free(&mut next);
            reached = next;
        }
        reached[other.len()]
    }
}

/// Refuses a set in which a job type could have two equally specific patterns.
///
/// # Errors
/// Names the first such pair.
pub fn check(patterns: &[Pattern]) -> Result<(), PatternError> {
    for (i, a) in patterns.iter().enumerate() {
        for b in &patterns[i + 1..] {
            if a == b {
                return Err(PatternError::Twice(a.clone()));
            }
            if a.specificity(b).is_eq() && a.overlaps(b) {
                return Err(PatternError::Ambiguous(a.clone(), b.clone()));
            }
        }
    }
    Ok(())
}

/// The index of the most specific pattern that fits, if any does. The set must have passed [`check`].
pub fn select<'a>(
    patterns: impl IntoIterator<Item = &'a Pattern>,
    job_type: &str,
) -> Option<usize> {
    patterns
        .into_iter()
        .enumerate()
        .filter(|(_, pattern)| pattern.matches(job_type))
        .max_by(|(_, a), (_, b)| a.specificity(b))
        .map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn set(texts: &[&str]) -> Vec<Pattern> {
        texts.iter().map(|t| Pattern::new(t).unwrap()).collect()
    }

    #[test]
    fn exact_then_longest_prefix() {
        let patterns = set(&["*", "email_*", "email_vip_*", "email_vip_now"]);
        check(&patterns).unwrap();
        assert_eq!(select(&patterns, "email_vip_now"), Some(3));
        assert_eq!(select(&patterns, "email_vip_later"), Some(2));
        assert_eq!(select(&patterns, "email_"), Some(1));
        assert_eq!(select(&patterns, "report"), Some(0));
        assert_eq!(select(&patterns[1..], "report"), None);
    }

    #[test]
    fn ties_are_refused_only_where_a_type_could_meet_both() {
        assert!(matches!(
            check(&set(&["a*b*", "a*c*"])),
            Err(PatternError::Ambiguous(..))
        ));
        assert!(matches!(
            check(&set(&["*", "**"])),
            Err(PatternError::Ambiguous(..))
        ));
        assert!(matches!(
            check(&set(&["x", "x"])),
            Err(PatternError::Twice(_))
        ));
        check(&set(&["*-mail", "*-report", "b*", "c*"])).unwrap();
        check(&set(&["a*b", "a*c"])).unwrap();
    }

    #[test]
    fn messages_name_both_patterns() {
        let error = check(&set(&["a*b*", "a*c*"])).unwrap_err().to_string();
        assert!(error.contains("\"a*b*\" and \"a*c*\""), "{error}");
        assert_eq!(Pattern::new(""), Err(PatternError::Empty));
        assert!(matches!(
            Pattern::new("a\nb"),
            Err(PatternError::Control(_))
        ));
    }

    #[test]
    fn sql_like_escapes_its_own_wildcards() {
        assert_eq!(set(&[r"a_b%c\*"])[0].to_sql_like(), r"a\_b\%c\\%");
    }

    /// The plainest definition of a match, to compare with.
    fn plain(pattern: &str, text: &str) -> bool {
        match pattern.chars().next() {
            None => text.is_empty(),
            Some('*') => {
                let rest = &pattern[1..];
                text.char_indices()
                    .map(|(i, _)| i)
                    .chain([text.len()])
                    .any(|i| plain(rest, &text[i..]))
            }
            Some(c) => text
                .strip_prefix(c)
                .is_some_and(|text| plain(&pattern[c.len_utf8()..], text)),
        }
    }

    proptest! {
        #[test]
        fn matches_as_defined(pattern in "[abé*]{1,7}", text in "[abé]{0,8}") {
            prop_assert_eq!(Pattern::new(&pattern).unwrap().matches(&text), plain(&pattern, &text));
        }

        #[test]
        fn what_fits_both_overlaps(a in "[ab*]{1,6}", b in "[ab*]{1,6}", text in "[ab]{0,8}") {
            let (a, b) = (Pattern::new(&a).unwrap(), Pattern::new(&b).unwrap());
            prop_assert_eq!(a.overlaps(&b), b.overlaps(&a));
            if a.matches(&text) && b.matches(&text) {
                prop_assert!(a.overlaps(&b));
            }
        }

        #[test]
        fn a_checked_set_has_one_winner(texts in prop::collection::vec("[ab*]{1,4}", 1..5), text in "[ab]{0,6}") {
            let patterns: Vec<_> = texts.iter().map(|t| Pattern::new(t).unwrap()).collect();
            if check(&patterns).is_ok() {
                let winner = select(&patterns, &text).map(|i| &patterns[i]);
                let reversed = select(patterns.iter().rev(), &text).map(|i| &patterns[patterns.len() - 1 - i]);
                prop_assert_eq!(winner, reversed);
            }
        }
    }
}
