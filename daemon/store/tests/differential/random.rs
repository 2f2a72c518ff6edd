//! The only source of chance: splitmix64, so that a seed tells the whole story.

use uuid::Uuid;

pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not zero.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below a usize")
    }

    /// Between the two, with both.
    pub(crate) fn between(&mut self, first: i64, last: i64) -> i64 {
        first + i64::try_from(self.next() % (last - first + 1).unsigned_abs()).expect("small")
    }

    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.below(from.len())].clone())
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// An id of a worker, or a token that nobody has.
    pub(crate) fn uuid(&mut self) -> Uuid {
        Uuid::from_u64_pair(self.next(), self.next())
    }

    /// A UUIDv7 of that time.
    pub(crate) fn uuid_v7(&mut self, ms: i64) -> Uuid {
        let mut bytes = self.uuid().into_bytes();
        bytes[..6].copy_from_slice(&ms.to_be_bytes()[2..]);
        bytes[6] = bytes[6] & 0x0F | 0x70;
        bytes[8] = bytes[8] & 0x3F | 0x80;
        Uuid::from_bytes(bytes)
    }
}
