//! How long runs of each lane took lately, as heartbeats tell it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tenure_core::ids::Lane;

/// With each beat the past counts a tenth less: at a beat each 3 s, the last half minute counts most.
const FADE: f64 = 0.9;
/// Below this many runs a lane is left out.
const FORGET: f64 = 0.05;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Stats(Mutex<BTreeMap<Lane, (f64, f64)>>);

impl Stats {
    /// A run took so long.
    pub(crate) fn ended(&self, lane: Lane, took: Duration) {
        let mut lanes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (runs, seconds) = lanes.entry(lane).or_default();
        *runs += 1.0;
        *seconds += took.as_secs_f64();
    }

    /// For one beat: lane → [runs, seconds].
    #[must_use]
    pub(crate) fn take(&self) -> String {
        let mut lanes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = lanes
            .iter()
            .map(|(lane, (runs, seconds))| format!("\"{lane}\":[{runs:.3},{seconds:.6}]"))
            .collect::<Vec<_>>();
        lanes.retain(|_, (runs, seconds)| {
            *runs *= FADE;
            *seconds *= FADE;
            *runs > FORGET
        });
        format!("{{{}}}", text.join(","))
    }
}
