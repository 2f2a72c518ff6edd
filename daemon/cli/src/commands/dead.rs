//! `tenure dead`: list, show, retry, discard, fix.

use serde::Serialize;
use tenure_store::person::Decision;
use tenure_store::view::DeadLetter;

use super::{Acted, Context, payload};
use crate::arguments::{DeadCommand, ReviewArguments};
use crate::output::{Failure, Report, View};

/// Carries out one of the commands about dead letters.
pub(super) async fn dead(context: &Context, command: DeadCommand) -> Result<(), Failure> {
    match command {
        DeadCommand::List {
            job_type,
            all,
            limit,
        } => {
            let session = context.connect().await?;
            let letters = session
                .dead_letters(job_type.as_deref(), all, limit)
                .await?;
            context.output.print(&Letters(letters))
        }
        DeadCommand::Show { id } => {
            let session = context.connect().await?;
            context
                .output
                .print(&Letter(session.dead_letter_of(id).await?))
        }
        DeadCommand::Retry { review, data } => {
            let data = data.as_deref().map(payload::read).transpose()?;
            decide(context, review, Decision::Retry, data.as_deref()).await
        }
        DeadCommand::Discard { review } => decide(context, review, Decision::Discard, None).await,
        DeadCommand::Fix { review } => decide(context, review, Decision::Fixed, None).await,
    }
}

async fn decide(
    context: &Context,
    review: ReviewArguments,
    decision: Decision,
    data: Option<&str>,
) -> Result<(), Failure> {
    let session = context.connect().await?;
    let letter = session.dead_letter_of(review.id).await?;
    let reviewer = review.reviewer.unwrap_or_else(|| context.who());
    let status = session
        .review_dead_letter(letter.id, decision, &reviewer, review.note.as_deref(), data)
        .await?;
    context.output.print(&Acted {
        id: letter.original_job_id,
        status,
    })
}

#[derive(Serialize)]
struct Letters(Vec<DeadLetter>);

impl Report for Letters {
    fn view(&self) -> View {
        let row = |letter: &DeadLetter| {
            vec![
                letter.id.to_string(),
                letter.original_job_id.to_string(),
                letter.job_type.clone(),
                letter.attempts.to_string(),
                letter.failed_at.clone(),
                letter
                    .review_action
                    .clone()
                    .unwrap_or_else(|| "-".to_owned()),
                letter.last_error.clone().unwrap_or_default(),
            ]
        };
        View::Rows(
            &[
                "ID", "JOB", "TYPE", "ATTEMPTS", "FAILED", "DECIDED", "ERROR",
            ],
            self.0.iter().map(row).collect(),
            "No dead letters.",
        )
    }
}

#[derive(Serialize)]
struct Letter(DeadLetter);

impl Report for Letter {
    fn view(&self) -> View {
        let letter = &self.0;
        let mut fields = vec![
            ("id", letter.id.to_string()),
            ("job", letter.original_job_id.to_string()),
            ("type", letter.job_type.clone()),
            ("attempts", letter.attempts.to_string()),
            ("failed", letter.failed_at.clone()),
        ];
        let mut optional =
            |name, text: Option<String>| fields.extend(text.map(|text| (name, text)));
        optional("error", letter.last_error.clone());
        optional("data", letter.data.as_ref().map(|data| data.0.clone()));
        optional("decided", letter.review_action.clone());
        optional("by", letter.reviewed_by.clone());
        optional("at", letter.reviewed_at.clone());
        optional("note", letter.review_note.clone());
        View::Fields(fields)
    }
}
