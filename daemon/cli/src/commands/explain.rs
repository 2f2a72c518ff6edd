//! `tenure job explain`.

use serde::Serialize;
use tenure_core::explain::{Reason, reasons};
use tenure_store::explain::Happened;
use tenure_store::session::Session;
use uuid::Uuid;

use super::Context;
use crate::output::{Failure, Report, View};

/// Says why a job stands where it stands.
pub(super) async fn explain(context: &Context, session: &Session, id: Uuid) -> Result<(), Failure> {
    let facts = session.job_facts(id).await?;
    context.output.print(&Explained {
        id,
        reasons: reasons(&facts),
        job_type: facts.job_type,
        status: facts.status,
        history: session.job_history(id).await?,
    })
}

#[derive(Serialize)]
struct Explained {
    id: Uuid,
    job_type: String,
    status: String,
    /// The most important first; none for a job that has ended well.
    reasons: Vec<Reason>,
    /// The first first.
    history: Vec<Happened>,
}

impl Report for Explained {
    fn view(&self) -> View {
        let mut fields = vec![
            ("id", self.id.to_string()),
            ("type", self.job_type.clone()),
            ("status", self.status.clone()),
        ];
        for reason in &self.reasons {
            fields.push(("because", reason.text.clone()));
            fields.extend(reason.release.clone().map(|text| ("to release it", text)));
        }
        for Happened { at, what } in &self.history {
            fields.push(("history", format!("{at} {what}")));
        }
        View::Fields(fields)
    }
}
