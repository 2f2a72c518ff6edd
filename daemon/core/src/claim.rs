//! How many jobs to ask for.
//!
//! A claim never asks for more than can start now: what is claimed and waits would be withheld from workers with free
//! slots. Each pool asks for itself, since the lanes of one call share its total.

use crate::ids::Lane;

/// What of a pool matters to a claim. A lane belongs to one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool<'a> {
    /// Slots in which a job could start now.
    pub free: usize,
    /// The lanes that its job types stand for, without those that are paused.
    pub lanes: &'a [Lane],
}

/// The arguments of one claim call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The index of the pool whose slots it fills.
    pub pool: usize,
    /// `p_lanes`.
    pub lanes: Vec<Lane>,
    /// `p_limits`: the most from each lane, in the order of `lanes`.
    pub limits: Vec<i32>,
    /// The most from all lanes together.
    pub total: i32,
}

/// One call for each pool that has a free slot and a lane, of at most `max_batch` jobs.
#[must_use]
pub fn asks(pools: &[Pool<'_>], max_batch: i32) -> Vec<Ask> {
    let ask = |(pool, Pool { free, lanes }): (usize, &Pool<'_>)| {
        let total = i32::try_from(*free).unwrap_or(i32::MAX).min(max_batch);
        (total > 0 && !lanes.is_empty()).then(|| Ask {
            pool,
            lanes: lanes.to_vec(),
            limits: vec![total; lanes.len()],
            total,
        })
    };
    pools.iter().enumerate().filter_map(ask).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_for_what_can_start_now() {
        let (some, none) = ([Lane(3), Lane(5)], []);
        let pool = |free, lanes| Pool { free, lanes };
        let asks = asks(
            &[
                pool(0, &some[..]),
                pool(7, &some),
                pool(900, &some[..1]),
                pool(4, &none),
            ],
            200,
        );
        assert_eq!(
            asks[0],
            Ask {
                pool: 1,
                lanes: some.to_vec(),
                limits: vec![7, 7],
                total: 7
            }
        );
        assert_eq!(
            asks[1],
            Ask {
                pool: 2,
                lanes: vec![Lane(3)],
                limits: vec![200],
                total: 200
            }
        );
        assert_eq!(asks.len(), 2);
    }
}
