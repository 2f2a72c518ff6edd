//! Numbers that are the same for the same seed, so that a run can be played again.

use std::env;
use std::thread;
use std::time::Duration;

/// A source of such numbers (xorshift).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The source for this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// `TENURE_CHAOS_SEED`, or 1.
    ///
    /// # Panics
    /// When that is no number.
    #[must_use]
    pub fn seed() -> u64 {
        env::var("TENURE_CHAOS_SEED").map_or(1, |seed| {
            seed.parse().expect("TENURE_CHAOS_SEED is a number")
        })
    }

    /// A number from 0 to below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    /// One of these.
    pub fn choose<'a, T>(&mut self, among: &'a [T]) -> &'a T {
        let count = u64::try_from(among.len()).unwrap_or(u64::MAX);
        &among[usize::try_from(self.below(count)).unwrap_or_default()]
    }

    /// Sleeps between two moments of a scenario for up to so many milliseconds: where exactly something strikes differs from
    /// seed to seed. Not for waiting: nothing may depend on its length.
    pub fn dawdle(&mut self, milliseconds: u64) {
        thread::sleep(Duration::from_millis(self.below(milliseconds + 1)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_sequence() {
        let play = |seed| -> Vec<u64> {
            let mut random = Random::new(seed);
            (0..20).map(|_| random.below(100)).collect()
        };
        assert_eq!(play(7), play(7));
        assert_ne!(play(7), play(8));
        assert!([1, 2, 3].contains(Random::new(3).choose(&[1, 2, 3])));
    }
}
