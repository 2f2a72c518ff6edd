//! What one run of a scenario has shown, as one line of JSON.

use std::env;
use std::fs::File;
use std::io::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use tenure_verdict::Times;
use tenure_verdict::switches::Judgement;

/// Numbers of one run. Times are absent where the run did not show them; no test asserts on them.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The scenario.
    pub scenario: String,
    /// What decided its delays.
    pub seed: u64,
    /// What was lost, and what ran twice.
    pub judgement: Judgement,
    /// The times of its last switch.
    pub times: Times,
}

impl Report {
    /// One line of JSON.
    #[must_use]
    pub fn line(&self) -> String {
        let seconds = |time: Option<Duration>| -> Value {
            // Hundredths are all that the clock has.
            time.map_or(Value::Null, |time| {
                json!((time.as_secs_f64() * 100.0).round() / 100.0)
            })
        };
        let (judgement, times) = (&self.judgement, &self.times);
        json!({
            "scenario": self.scenario,
            "seed": self.seed,
            "acknowledged": judgement.acknowledged,
            "cut_off": judgement.cut_off.len(),
            "unwritten": judgement.unwritten.len(),
            "lost_by_cluster": judgement.lost_by_cluster,
            "lost": judgement.lost,
            "twice": judgement.twice,
            "rerun": judgement.rerun,
            "faults": judgement.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "detection": seconds(times.detection),
            "detection_by_all": seconds(times.detection_by_all),
            "outage": seconds(times.outage),
            "first_claim": seconds(times.first_claim),
            "new_job": seconds(times.new_job),
        })
        .to_string()
    }

    /// Appends it to the file that `TENURE_CHAOS_REPORT` names, if any.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self) {
        if let Some(path) = env::var_os("TENURE_CHAOS_REPORT") {
            let file = File::options().create(true).append(true).open(path);
            file.and_then(|mut file| file.write_all(format!("{}\n", self.line()).as_bytes()))
                .expect("the report can be written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_line() {
        let report = Report {
            scenario: "s".to_owned(),
            seed: 7,
            judgement: Judgement::default(),
            times: Times {
                outage: Some(Duration::from_millis(1_234)),
                ..Times::default()
            },
        };
        let line = report.line();
        assert!(
            !line.contains('\n') && line.contains(r#""outage":1.23"#),
            "{line}"
        );
        assert!(line.contains(r#""detection":null"#), "{line}");
    }
}
