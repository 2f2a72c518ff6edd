//! Questions to the database, and when to ask them again.

use crate::time::Mono;
use std::time::Duration;

/// A question that is repeated until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Due(Mono),
    Asked(Mono),
}

impl Ask {
    /// When it is to be asked next, if nothing happens.
    pub(super) fn next(self, answer_within: Duration) -> Mono {
        match self {
            Self::Due(at) => at,
            Self::Asked(at) => at + answer_within,
        }
    }

    /// Notes it as asked now, if it is time.
    pub(super) fn again(&mut self, now: Mono, answer_within: Duration) -> bool {
        let due = now >= self.next(answer_within);
        if due {
            *self = Self::Asked(now);
        }
        due
    }
}
