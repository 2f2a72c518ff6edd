//! What a handler wrote, kept in bounded memory however much it was.
//!
//! States: all bytes kept → head and tail kept, the middle counted. Invariant: memory stays under the cap and half of it
//! again, plus one pushed chunk.

use crate::json;

/// The bytes that were kept, and whether they are all there were.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Output {
    /// What was written; where something was left out, a visible marker says how much.
    pub bytes: Vec<u8>,
    /// Nothing was left out.
    pub complete: bool,
    /// `"tenure"` stands somewhere in what was written, also in what was left out.
    pub names_tenure: bool,
}

impl Output {
    /// The first bytes of something of which the rest was not read.
    pub fn beginning(bytes: Vec<u8>) -> Self {
        Self {
            names_tenure: holds_key(&bytes),
            bytes,
            complete: false,
        }
    }

    /// As text that PostgreSQL stores; `None` when there is nothing but white space.
    pub fn text(&self) -> Option<String> {
        let text = json::text(&self.bytes);
        let text = text.trim_end();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// The last `limit` bytes as such text.
    pub fn tail(&self, limit: usize) -> Option<String> {
        let cut = self.bytes.len().saturating_sub(limit);
        if cut == 0 {
            return self.text();
        }
        let text = json::text(&self.bytes[cut..]);
        Some(format!(
            "… {}",
            text.trim_start_matches('\u{FFFD}').trim_end()
        ))
    }
}

/// The key that asks for more than a result.
const KEY: &[u8] = b"\"tenure\"";

/// Collects a stream: the first bytes and the last, with a marker between.
#[derive(Debug)]
pub struct Capped {
    head: Vec<u8>,
    tail: Vec<u8>,
    head_cap: usize,
    tail_cap: usize,
    total: usize,
    /// The last bytes before the next ones, in which the key may have begun.
    seam: Vec<u8>,
    names_tenure: bool,
}

impl Capped {
    /// Keeps `cap` bytes, a quarter of them from the beginning.
    pub fn new(cap: usize) -> Self {
        let head_cap = cap / 4;
        Self {
            head: Vec::new(),
            tail: Vec::new(),
            head_cap,
            tail_cap: cap - head_cap,
            total: 0,
            seam: Vec::new(),
            names_tenure: false,
        }
    }

    /// Takes the next bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total = self.total.saturating_add(bytes.len());
        self.look_for_key(bytes);
        let to_head = bytes.len().min(self.head_cap - self.head.len());
        let (head, rest) = bytes.split_at(to_head);
        self.head.extend_from_slice(head);
        let rest = &rest[rest.len().saturating_sub(self.tail_cap)..];
        self.tail.extend_from_slice(rest);
        // The front is dropped in pieces of at least half a tail, so that moving bytes costs little.
        if self.tail.len() > self.tail_cap.saturating_add(self.tail_cap / 2) {
            self.drop_front();
        }
    }

    fn look_for_key(&mut self, bytes: &[u8]) {
        self.seam
            .extend_from_slice(&bytes[..bytes.len().min(KEY.len() - 1)]);
        self.names_tenure |= holds_key(&self.seam) || holds_key(bytes);
        if bytes.len() >= KEY.len() {
            self.seam = bytes[bytes.len() - (KEY.len() - 1)..].to_vec();
        } else {
            self.seam
                .drain(..self.seam.len().saturating_sub(KEY.len() - 1));
        }
    }

    fn drop_front(&mut self) {
        let excess = self.tail.len().saturating_sub(self.tail_cap);
        self.tail.drain(..excess);
    }

    /// What was kept. Where the middle is missing, both ends are cut at a character.
    pub fn finish(mut self) -> Output {
        self.drop_front();
        let complete = self.total == self.head.len() + self.tail.len();
        if !complete {
            let whole = whole_chars(&self.head);
            self.head.truncate(whole);
            let broken = self
                .tail
                .iter()
                .take(3)
                .take_while(|b| (**b & 0xC0) == 0x80)
                .count();
            self.tail.drain(..broken);
            let left_out = self.total - self.head.len() - self.tail.len();
            self.head
                .extend_from_slice(format!("… [tenure: {left_out} bytes left out] …").as_bytes());
        }
        self.head.append(&mut self.tail);
        Output {
            bytes: self.head,
            complete,
            names_tenure: self.names_tenure,
        }
    }
}

fn holds_key(bytes: &[u8]) -> bool {
    bytes.windows(KEY.len()).any(|window| window == KEY)
}

/// The length of `bytes` without a character that is cut off at the end.
fn whole_chars(bytes: &[u8]) -> usize {
    let last = bytes.iter().rev().take(4).position(|b| (*b & 0xC0) != 0x80);
    let Some(from_end) = last else {
        return bytes.len();
    };
    let start = bytes.len() - from_end - 1;
    match std::str::from_utf8(&bytes[start..]) {
        Err(error) if error.error_len().is_none() => start,
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn collect(cap: usize, chunks: &[&[u8]]) -> Output {
        let mut capped = Capped::new(cap);
        for chunk in chunks {
            capped.push(chunk);
        }
        capped.finish()
    }

    #[test]
    fn the_key_is_seen_wherever_it_stands() {
        let filler = [b'x'; 100];
        for parts in [
            vec![&b"{\"tenure\":"[..]],
            vec![&filler, b"\"ten", b"u", b"re\"", &filler],
            vec![b"\"tenur", &filler, b"e\""],
        ] {
            let expected = parts
                .concat()
                .windows(KEY.len())
                .any(|window| window == KEY);
            assert_eq!(collect(8, &parts).names_tenure, expected, "{parts:?}");
        }
    }

    #[test]
    fn up_to_the_cap_all_is_kept() {
        let out = collect(8, &[b"abc", b"defgh"]);
        assert_eq!(
            (out.bytes.as_slice(), out.complete),
            (&b"abcdefgh"[..], true)
        );
    }

    #[test]
    fn any_cap_can_be_asked_for() {
        let out = collect(usize::MAX, &[b"abc"]);
        assert_eq!((out.bytes.as_slice(), out.complete), (&b"abc"[..], true));
    }

    #[test]
    fn beyond_it_head_and_tail_with_a_marker() {
        let out = collect(8, &[b"0123456789abcdefghij"]);
        assert_eq!(
            String::from_utf8(out.bytes).unwrap(),
            "01… [tenure: 12 bytes left out] …efghij"
        );
        assert!(!out.complete);
    }

    #[test]
    fn characters_are_not_cut() {
        let out = collect(16, &["ééééééééééééééééé".as_bytes(), b"x"]);
        assert_eq!(
            String::from_utf8(out.bytes).unwrap(),
            "éé… [tenure: 20 bytes left out] …éééééx"
        );
    }

    #[test]
    fn a_tail_is_the_end() {
        let output = collect(100, &["aéb\0c \n".as_bytes()]);
        assert_eq!(output.tail(100).as_deref(), Some("aéb␀c"));
        assert_eq!(output.tail(6).as_deref(), Some("… b␀c"));
        assert_eq!(collect(100, &[b" \n"]).tail(100), None);
    }

    #[test]
    fn memory_is_bounded() {
        let mut capped = Capped::new(4096);
        for _ in 0..10_000 {
            capped.push(&[b'x'; 1000]);
        }
        assert!(capped.head.capacity() + capped.tail.capacity() < 4 * 4096);
        assert!(capped.finish().bytes.len() < 4096 + 100);
    }

    proptest! {
        #[test]
        fn keeps_the_ends_of_any_stream(cap in 0usize..64, chunks: Vec<Vec<u8>>) {
            let all: Vec<u8> = chunks.concat();
            let mut capped = Capped::new(cap);
            chunks.iter().for_each(|c| capped.push(c));
            let out = capped.finish();
            prop_assert_eq!(out.complete, all.len() <= cap);
            if out.complete {
                prop_assert_eq!(out.bytes, all);
            } else {
                prop_assert!(out.bytes.len() <= cap + 60);
            }
        }
    }
}
