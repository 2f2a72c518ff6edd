//! Waiting for the end of a job, through outages of the database too.

use std::time::Duration;

use serde::Serialize;
use tenure_store::session::Session;
use tenure_store::view::Ending;
use tokio::time::Instant;
use uuid::Uuid;

use super::Context;
use crate::output::{Exit, Failure, Report, View};

/// From the first look at a job to the second.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The longest pause between two looks.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// For how long the database may be away before waiting makes no sense any more.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until the job ended, and prints how. The failure of a job is the failure of the command.
pub(super) async fn for_end(
    context: &Context,
    session: Session,
    id: Uuid,
    timeout: Option<Duration>,
) -> Result<(), Failure> {
    let looking = until_ended(context, session, id);
    let ending = match timeout {
        None => looking.await?,
        Some(limit) => tokio::time::timeout(limit, looking).await.map_err(|_| {
            let message = format!("job {id} has not ended within {limit:?}; it goes on");
            Failure::new(Exit::Failed, "timeout", message)
        })??,
    };
    let outcome = match ending.status.as_str() {
        "completed" => Ok(()),
        status => {
            let why = ending
                .last_error
                .as_deref()
                .map(|error| format!(": {error}"))
                .unwrap_or_default();
            Err(Failure::new(
                Exit::Failed,
                format!("job_{status}"),
                format!("job {id} {}{why}", told(status)),
            )
            .hint(format!("tenure job show {id}")))
        }
    };
    context.output.print_with(&Ended(ending), outcome)
}

async fn until_ended(context: &Context, mut session: Session, id: Uuid) -> Result<Ending, Failure> {
    let mut pause = FIRST_PAUSE;
    let mut last_answer = Instant::now();
    let mut told = None;
    loop {
        match session.ending(id).await {
            Ok(ending)
                if matches!(
                    ending.status.as_str(),
                    "completed" | "failed" | "discarded" | "cancelled"
                ) =>
            {
                return Ok(ending);
            }
            Ok(ending) => {
                last_answer = Instant::now();
                if ending.waiting_for != told {
                    tell(context, &ending);
                    told = ending.waiting_for;
                }
            }
            Err(error) if error.breaks_connection() && last_answer.elapsed() < PATIENCE => {
                if let Ok(fresh) = context.connect().await {
                    session = fresh;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(pause).await;
        pause = LONGEST_PAUSE.min(pause * 3 / 2);
    }
}

fn told(status: &str) -> String {
    if status == "failed" {
        "failed".to_owned()
    } else {
        format!("was {status}")
    }
}

/// Says what the job waits for, where a person watches.
fn tell(context: &Context, ending: &Ending) {
    if let Some(reason) = &ending.waiting_for {
        context.note(&format!("{}: waiting for {reason}", ending.status));
    }
}

#[derive(Serialize)]
struct Ended(Ending);

impl Report for Ended {
    fn view(&self) -> View {
        let mut fields = vec![
            ("id", self.0.id.to_string()),
            ("status", self.0.status.clone()),
        ];
        fields.extend(
            self.0
                .result
                .as_ref()
                .map(|result| ("result", result.0.clone())),
        );
        fields.extend(self.0.last_error.clone().map(|error| ("error", error)));
        View::Fields(fields)
    }
}
