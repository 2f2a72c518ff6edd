//! The ends of runs that the database has confirmed, kept until no switch can lose them any more.
//!
//! ```text
//!   beat 7 sent     end A answered    end B answered     beat 8 sent        beat 9 sent
//!      |                 |                 |                 |                  |
//!                        '------ bucket of beat 8 -----------'
//! ```
//!
//! What is lost in a switch is a tail: a server that shows beat 8 has all that was answered before beat 8 was sent. So an end goes
//! to the bucket of the next beat; after a switch, the buckets later than the beat that the new primary shows are said again; and a
//! bucket goes when every other configured host has shown its beat, or after [`KEPT`].
//!
//! Bounds: complete records up to a number of bytes of what can be reduced; beyond it the oldest are, which is enough to keep their jobs from
//! running again; beyond a number of records the oldest go. A server that shows less than what went has lost something that nobody
//! can say again: it is *not covered*, and a person must decide.
//!
//! Neither age nor number lets a bucket go whose beat no primary has answered yet: the next one to start, even the same after a
//! crash without any loss, would not be covered. Only twice the number does.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::ids::Beat;
use crate::time::Mono;

/// After so long an end is forgotten, proven or not.
pub const KEPT: Duration = Duration::from_secs(15 * 60);

/// What is kept of one end.
pub trait Record {
    /// How many bytes it holds that [`Record::reduce`] would free, about.
    fn size(&self) -> usize;
    /// Leaves only what keeps the job from running again.
    fn reduce(&mut self);
}

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes, by [`Record::size`]; beyond it the oldest records are reduced.
    pub bytes: usize,
    /// Records; beyond it the oldest go.
    pub records: usize,
}

impl Default for Bounds {
    /// 64 MiB, 200,000 records: beyond that the memory itself, and writing it to a journal, would hold up heartbeats.
    fn default() -> Self {
        Self {
            bytes: 64 << 20,
            records: 200_000,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Replay<R> {
    bounds: Bounds,
    /// Never empty ones.
    buckets: BTreeMap<Beat, Bucket<R>>,
    bytes: usize,
    records: usize,
    /// The last bucket that went, and when its last end had been answered.
    gone: (Beat, Mono),
    /// All that had ended by then was proven when it went.
    proven: Mono,
    /// The last beat that a primary has answered.
    shown: Beat,
}

#[derive(Debug)]
struct Bucket<R> {
    records: VecDeque<R>,
    /// How many at its front are reduced.
    reduced: usize,
    /// When its last end was answered.
    last: Mono,
}

impl<R: Record> Replay<R> {
    /// Empty, at this time; `gone` is what a predecessor has forgotten.
    #[must_use]
    pub fn new(now: Mono, bounds: Bounds, gone: Beat) -> Self {
        Self {
            bounds,
            buckets: BTreeMap::new(),
            bytes: 0,
            records: 0,
            gone: (gone, now),
            proven: now,
            shown: Beat(0),
        }
    }

    /// An end was answered; the last beat that was sent is `sent`.
    pub fn answered(&mut self, now: Mono, sent: Beat, record: R) {
        self.put(now, sent.next(), record);
        self.keep_bounds();
    }

    /// The primary has answered this beat.
    pub fn shown(&mut self, beat: Beat) {
        self.shown = self.shown.max(beat);
    }

    /// Every other configured host has shown this beat.
    pub fn proven(&mut self, beat: Beat) {
        while let Some(first) = self
            .buckets
            .first_entry()
            .filter(|first| *first.key() <= beat)
        {
            self.proven = self.proven.max(first.get().last);
            self.drop_first();
        }
        if self.buckets.is_empty() && beat >= self.gone.0 {
            self.proven = self.proven.max(self.gone.1);
        }
    }

    /// What is older than [`KEPT`] goes.
    pub fn expire(&mut self, now: Mono) {
        while self
            .buckets
            .first_key_value()
            .is_some_and(|(beat, first)| now - first.last > KEPT && *beat <= self.shown)
        {
            self.drop_first();
        }
    }

    /// What a server may lack that shows this beat, in the order in which it was answered; `None`: it does not know this worker.
    pub fn after(&self, found: Option<Beat>) -> impl Iterator<Item = &R> {
        self.buckets
            .iter()
            .filter(move |(beat, _)| found.is_none_or(|found| **beat > found))
            .flat_map(|(_, bucket)| &bucket.records)
    }

    /// All that is kept, each with its bucket.
    pub fn all(&self) -> impl Iterator<Item = (Beat, &R)> {
        self.buckets
            .iter()
            .flat_map(|(beat, bucket)| bucket.records.iter().map(|record| (*beat, record)))
    }

    /// What a new primary may have lacked was said to it: it showed `found`, and the last beat that was sent is `sent`. For that,
    /// only what is shown of beats sent to this one proves anything from now on: an old primary shows the beats from before without
    /// what was said since.
    pub fn moved(&mut self, found: Option<Beat>, sent: Beat) {
        let said = match found {
            Some(found) => self.buckets.split_off(&found.next()),
            None => std::mem::take(&mut self.buckets),
        };
        for (_, bucket) in said {
            self.records -= bucket.records.len();
            self.bytes -= bucket.records.iter().map(Record::size).sum::<usize>();
            for record in bucket.records {
                self.put(bucket.last, sent.next(), record);
            }
        }
    }

    /// A server that shows this beat or a later one has lost nothing that is not kept here.
    #[must_use]
    pub fn covers_from(&self) -> Beat {
        self.gone.0
    }

    /// For how long all has been kept.
    #[must_use]
    pub fn covers_for(&self, now: Mono) -> Duration {
        now - self.gone.1
    }

    /// Of how much time the ends were forgotten though not every other host had shown them.
    #[must_use]
    pub fn uncovered(&self) -> Duration {
        self.gone.1 - self.proven
    }

    /// How many ends are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    fn put(&mut self, now: Mono, beat: Beat, record: R) {
        self.bytes += record.size();
        self.records += 1;
        let bucket = self.buckets.entry(beat).or_insert_with(|| Bucket {
            records: VecDeque::new(),
            reduced: 0,
            last: now,
        });
        bucket.last = bucket.last.max(now);
        bucket.records.push_back(record);
    }

    fn keep_bounds(&mut self) {
        while self.records > self.bounds.records
            && let Some(mut first) = self.buckets.first_entry()
            && (*first.key() <= self.shown || self.records > 2 * self.bounds.records)
        {
            let (beat, last) = (*first.key(), first.get().last);
            let bucket = first.get_mut();
            if let Some(record) = bucket.records.pop_front() {
                self.bytes -= record.size();
                self.records -= 1;
                bucket.reduced = bucket.reduced.saturating_sub(1);
            }
            if bucket.records.is_empty() {
                first.remove();
            }
            // What is left of the bucket still keeps its jobs from running again.
            self.gone = (self.gone.0.max(beat), self.gone.1.max(last));
        }
        let mut buckets = self.buckets.values_mut();
        let mut bucket = buckets.next();
        while self.bytes > self.bounds.bytes
            && let Some(present) = &mut bucket
        {
            let Some(record) = present.records.get_mut(present.reduced) else {
                bucket = buckets.next();
                continue;
            };
            self.bytes -= record.size();
            record.reduce();
            self.bytes += record.size();
            present.reduced += 1;
        }
    }

    fn drop_first(&mut self) {
        if let Some((beat, bucket)) = self.buckets.pop_first() {
            self.gone = (self.gone.0.max(beat), self.gone.1.max(bucket.last));
            self.records -= bucket.records.len();
            self.bytes -= bucket.records.iter().map(Record::size).sum::<usize>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, PartialEq)]
    struct End(u32, usize);

    impl Record for End {
        fn size(&self) -> usize {
            self.1
        }

        fn reduce(&mut self) {
            self.1 = 0;
        }
    }

    fn at(seconds: u64) -> Mono {
        Mono::from_millis(seconds * 1_000)
    }

    fn filled(bounds: Bounds) -> Replay<End> {
        let mut replay = Replay::new(at(0), bounds, Beat(0));
        for (second, sent) in [(1, 7), (2, 7), (4, 8), (8, 9)] {
            replay.answered(
                at(second),
                Beat(sent),
                End(u32::try_from(second).unwrap_or(0), 10),
            );
        }
        replay
    }

    fn after(replay: &Replay<End>, found: Option<i64>) -> Vec<u32> {
        replay.after(found.map(Beat)).map(|end| end.0).collect()
    }

    #[test]
    fn a_server_that_shows_a_beat_has_what_was_answered_before_it_was_sent() {
        let replay = filled(Bounds::default());
        assert_eq!(after(&replay, None), [1, 2, 4, 8]);
        assert_eq!(after(&replay, Some(7)), [1, 2, 4, 8]);
        assert_eq!(after(&replay, Some(8)), [4, 8]);
        assert_eq!(after(&replay, Some(10)), [] as [u32; 0]);
        assert_eq!(replay.covers_from(), Beat(0));
    }

    #[test]
    fn what_all_have_shown_goes_and_older_servers_are_not_covered() {
        let mut replay = filled(Bounds::default());
        replay.proven(Beat(8));
        assert_eq!(after(&replay, None), [4, 8]);
        assert_eq!(
            (replay.covers_from(), replay.uncovered()),
            (Beat(8), Duration::ZERO)
        );
        assert_eq!(replay.covers_for(at(10)), Duration::from_secs(8));
    }

    #[test]
    fn after_a_quarter_of_an_hour_it_goes_unproven() {
        let mut replay = filled(Bounds::default());
        replay.expire(at(3) + KEPT);
        assert_eq!(replay.len(), 4, "no primary has answered that beat");
        replay.shown(Beat(8));
        replay.expire(at(2) + KEPT);
        assert_eq!(replay.len(), 4);
        replay.expire(at(60) + KEPT);
        assert_eq!(after(&replay, None), [4, 8]);
        assert_eq!(
            (replay.covers_from(), replay.uncovered()),
            (Beat(8), Duration::from_secs(2))
        );
        // A late proof makes it good.
        replay.proven(Beat(10));
        assert_eq!(replay.uncovered(), Duration::ZERO);
    }

    #[test]
    fn bounds_reduce_the_oldest_and_then_drop_them() {
        let replay = filled(Bounds {
            bytes: 25,
            records: 9,
        });
        let kept: Vec<_> = replay.after(None).cloned().collect();
        assert_eq!(kept, [End(1, 0), End(2, 0), End(4, 10), End(8, 10)]);
    }

    #[test]
    fn beyond_a_number_the_oldest_of_a_beat_that_was_answered_go_one_by_one() {
        let few = Bounds {
            bytes: 99,
            records: 3,
        };
        let mut replay = filled(few);
        assert_eq!(after(&replay, None), [1, 2, 4, 8]);
        replay.shown(Beat(8));
        replay.answered(at(9), Beat(9), End(9, 10));
        assert_eq!(after(&replay, None), [4, 8, 9]);
        assert_eq!(replay.covers_from(), Beat(8));
        replay.answered(at(10), Beat(9), End(10, 10));
        // Beat 9 has not been answered.
        assert_eq!(after(&replay, None), [4, 8, 9, 10]);
        assert_eq!(replay.covers_from(), Beat(8));
        for second in 11..14 {
            replay.answered(at(second), Beat(9), End(11, 10));
        }
        assert_eq!(after(&replay, None), [8, 9, 10, 11, 11, 11]);
        assert_eq!(replay.covers_from(), Beat(9));
    }

    #[test]
    fn after_a_switch_only_beats_of_the_new_primary_prove() {
        let mut replay = filled(Bounds::default());
        replay.moved(Some(Beat(8)), Beat(12));
        // The new primary had shown beat 8, and so whoever shows it has what was answered before.
        assert_eq!(after(&replay, Some(8)), [4, 8]);
        replay.proven(Beat(8));
        assert_eq!(after(&replay, None), [4, 8]);
        replay.proven(Beat(12));
        assert_eq!(after(&replay, Some(12)), [4, 8]);
        replay.proven(Beat(13));
        assert!(replay.is_empty());
        let mut replay = filled(Bounds::default());
        replay.moved(None, Beat(12));
        assert_eq!(after(&replay, Some(12)), [1, 2, 4, 8]);
    }
}
