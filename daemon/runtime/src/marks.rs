//! Positions up to which nothing is left in a lane and priority: claims start there, and so step over no dead row.
//!
//! Pure. A position that was seen becomes a mark only when the database says that nobody can still commit below it
//! (`settle_marks`); all are forgotten at a new epoch, since positions repeat.

use std::collections::BTreeMap;

use tenure_core::ids::Lane;
use tenure_store::claim::Mark;

/// More priorities than this are not kept: they would make claims slower, not faster.
const MOST: usize = 500;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    places: BTreeMap<(Lane, i32), Place>,
    horizon: i64,
    fresh: bool,
}

#[derive(Debug, Default)]
struct Place {
    mark: i64,
    /// Seen before the last question.
    asked: i64,
    seen: i64,
}

impl Marks {
    /// A job was claimed from there.
    pub(crate) fn saw(&mut self, lane: Lane, priority: i32, pos: i64) {
        if self.places.len() >= MOST && !self.places.contains_key(&(lane, priority)) {
            return;
        }
        let place = self.places.entry((lane, priority)).or_default();
        place.seen = place.seen.max(pos);
        self.fresh = true;
    }

    /// For a claim of these lanes.
    #[must_use]
    pub(crate) fn of(&self, lanes: &[Lane]) -> Vec<Mark> {
        let of = |(&(lane, priority), place): (&(Lane, i32), &Place)| Mark {
            lane,
            priority,
            pos: place.mark,
        };
        self.places
            .iter()
            .filter(|((lane, _), place)| place.mark > 0 && lanes.contains(lane))
            .map(of)
            .collect()
    }

    /// What to ask, if anything was seen since the last question: the marks, what was seen before that question, and the
    /// horizon with which it was answered.
    pub(crate) fn question(&mut self) -> Option<(Vec<Mark>, Vec<i64>, i64)> {
        if !std::mem::take(&mut self.fresh) {
            return None;
        }
        let mut marks = Vec::with_capacity(self.places.len());
        let mut seen = Vec::with_capacity(self.places.len());
        for (&(lane, priority), place) in &mut self.places {
            marks.push(Mark {
                lane,
                priority,
                pos: place.mark,
            });
            seen.push(place.asked.max(place.mark));
            place.asked = place.seen;
        }
        // An answer that does not come must not be asked for again with what has been seen meanwhile.
        Some((marks, seen, std::mem::take(&mut self.horizon)))
    }

    /// The answer: new marks, and the horizon of what is seen by now.
    pub(crate) fn settled(&mut self, marks: &[Mark], horizon: i64) {
        self.horizon = horizon;
        for mark in marks {
            if let Some(place) = self.places.get_mut(&(mark.lane, mark.priority)) {
                place.mark = place.mark.max(mark.pos);
                self.fresh |= place.mark < place.seen;
            }
        }
    }

    /// The question was not answered: ask again.
    pub(crate) fn unanswered(&mut self) {
        self.fresh = true;
    }

    /// A new epoch.
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn mark(pos: i64) -> Mark {
        Mark {
            lane: Lane(1),
            priority: 0,
            pos,
        }
    }

    #[test]
    fn after_a_lost_answer_nothing_is_asked_with_the_old_horizon() {
        let mut marks = Marks::default();
        marks.saw(Lane(1), 0, 10);
        marks.question();
        marks.settled(&[mark(0)], 77);
        marks.question();
        // What is seen now may lie above a position that was drawn after the horizon 77.
        marks.saw(Lane(1), 0, 20);
        marks.unanswered();
        let (_, _, horizon) = marks.question().unwrap();
        assert_eq!(horizon, 0, "0 moves no mark");
    }

    #[test]
    fn a_position_is_asked_about_only_with_the_horizon_of_a_later_answer() {
        let mut marks = Marks::default();
        marks.saw(Lane(1), 0, 10);
        // Nothing had been seen before the first question: it only brings a horizon.
        assert_eq!(marks.question(), Some((vec![mark(0)], vec![0], 0)));
        marks.saw(Lane(1), 0, 20);
        marks.settled(&[mark(0)], 77);
        assert_eq!(marks.question(), Some((vec![mark(0)], vec![10], 77)));
        marks.settled(&[mark(10)], 88);
        assert_eq!(marks.of(&[Lane(1)]), [mark(10)]);
        assert_eq!(marks.question(), Some((vec![mark(10)], vec![20], 88)));
        marks.settled(&[mark(20)], 99);
        assert_eq!(marks.question(), None);
        marks.forget();
        assert_eq!(marks.of(&[Lane(1)]), []);
    }
}
