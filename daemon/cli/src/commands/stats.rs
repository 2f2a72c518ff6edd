//! `tenure stats`.

use serde::Serialize;
use tenure_store::view::Numbers;

use super::Context;
use crate::output::{Failure, Report, View};

/// Prints the numbers of each job type.
pub(super) async fn stats(context: &Context) -> Result<(), Failure> {
    let session = context.connect().await?;
    context.output.print(&Stats(session.numbers().await?))
}

#[derive(Serialize)]
struct Stats(Vec<Numbers>);

impl Report for Stats {
    fn view(&self) -> View {
        let seconds = |value: Option<f64>| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}s"))
        };
        let row = |numbers: &Numbers| {
            vec![
                numbers.job_type.clone(),
                numbers.pending_count.to_string(),
                numbers.running_count.to_string(),
                numbers.failed_count.to_string(),
                seconds(numbers.avg_duration_sec),
                seconds(numbers.oldest_pending_age_sec),
            ]
        };
        View::Rows(
            &[
                "TYPE",
                "PENDING",
                "RUNNING",
                "FAILED",
                "AVERAGE",
                "OLDEST PENDING",
            ],
            self.0.iter().map(row).collect(),
            "No job was ever put in.",
        )
    }
}
