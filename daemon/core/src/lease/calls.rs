//! The account of claim calls.
//!
//! A claim whose answer was lost has still been carried out, and its jobs would be leased for as long as this worker beats,
//! to nobody. So each beat tells the database: all calls up to `settled` were answered or given up, and of these only the
//! `open` ones still have jobs. A lease of any other settled call goes back.
//!
//! Invariant: a call that may still be answered is never settled, and a call with a job whose end the database has not
//! confirmed is never missing among the open ones.

use crate::ids::Call;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Default)]
pub(super) struct Calls {
    last: i64,
    unanswered: BTreeSet<Call>,
    /// How many jobs of each call are not confirmed as ended; never zero.
    open: BTreeMap<Call, usize>,
}

impl Calls {
    /// Numbers a new call. Numbers go on when the worker registers anew.
    pub(super) fn send(&mut self) -> Call {
        self.last = self.last.saturating_add(1);
        self.unanswered.insert(Call(self.last));
        Call(self.last)
    }

    /// Says whether the answer still counts: one that comes after its call was given up brings nothing.
    pub(super) fn answer(&mut self, call: Call, jobs: usize) -> bool {
        let counts = self.unanswered.remove(&call);
        if counts && jobs > 0 {
            self.open.insert(call, jobs);
        }
        counts
    }

    pub(super) fn give_up(&mut self, call: Call) {
        self.unanswered.remove(&call);
    }

    pub(super) fn give_up_all(&mut self) {
        self.unanswered.clear();
    }

    /// The database has confirmed the end of one job of the call.
    pub(super) fn confirm(&mut self, call: Call) {
        if let Some(jobs) = self.open.get_mut(&call) {
            *jobs -= 1;
            if *jobs == 0 {
                self.open.remove(&call);
            }
        }
    }

    pub(super) fn unanswered(&self) -> usize {
        self.unanswered.len()
    }

    pub(super) fn forget(&mut self) {
        self.unanswered.clear();
        self.open.clear();
    }

    /// All calls up to this one were answered or given up.
    pub(super) fn settled(&self) -> Call {
        self.unanswered
            .first()
            .map_or(Call(self.last), |first| Call(first.0 - 1))
    }

    /// The settled calls that still have jobs.
    pub(super) fn open(&self) -> Vec<Call> {
        self.open
            .range(..=self.settled())
            .map(|(call, _)| *call)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_settled_once_no_earlier_one_waits() {
        let mut calls = Calls::default();
        let (a, b, c) = (calls.send(), calls.send(), calls.send());
        assert!(calls.answer(b, 2));
        assert_eq!((calls.settled(), calls.open()), (Call(0), vec![]));
        calls.give_up(a);
        assert_eq!((calls.settled(), calls.open()), (b, vec![b]));
        assert!(!calls.answer(a, 1));
        assert!(calls.answer(c, 0));
        calls.confirm(b);
        assert_eq!((calls.settled(), calls.open()), (c, vec![b]));
        calls.confirm(b);
        assert_eq!(calls.open(), vec![]);
    }
}
