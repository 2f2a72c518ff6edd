//! `tenure cluster`: status, accept, resume, switches.

use serde::Serialize;
use tenure_store::cluster::{ClusterStatus, Switch, SwitchJob};

use super::Context;
use crate::arguments::{ClusterCommand, SwitchesCommand};
use crate::output::{Failure, Report, View};

/// Carries out one of the commands about the database and its switches.
pub(super) async fn cluster(context: &Context, command: ClusterCommand) -> Result<(), Failure> {
    let session = context.connect().await?;
    let output = &context.output;
    match command {
        ClusterCommand::Status => output.print(&Standing(session.cluster_status().await?)),
        ClusterCommand::Accept { reason, timeline } => {
            let who = context.who();
            let gate = session.accept_cluster(&reason, timeline, &who).await?;
            output.print(&Decided { gate, set_aside: 0 })
        }
        ClusterCommand::Resume { rerun } => {
            let (gate, set_aside) = session.resume_cluster(rerun, &context.who()).await?;
            output.print(&Decided { gate, set_aside })
        }
        ClusterCommand::Switches(SwitchesCommand::List { limit }) => {
            output.print(&Switches(session.switches(limit).await?))
        }
        ClusterCommand::Switches(SwitchesCommand::Show { epoch_no, jobs }) => {
            let switch = session.switch(epoch_no).await?;
            if jobs {
                output.print(&Jobs(session.switch_jobs(epoch_no).await?))
            } else {
                output.print(&Shown(Box::new(switch)))
            }
        }
    }
}

#[derive(Serialize)]
struct Standing(ClusterStatus);

impl Report for Standing {
    fn view(&self) -> View {
        let status = &self.0;
        let gate = match status.gate.as_str() {
            "open" => "open: jobs are claimed",
            "window" => {
                "window: workers re-attach after a switch; jobs from before it are not claimed yet"
            }
            _ => "hold: nothing is claimed until a person decides",
        };
        let mut fields = vec![("gate", gate.to_owned())];
        let mut optional =
            |name, text: Option<String>| fields.extend(text.map(|text| (name, text)));
        optional("why", status.hold_reason.clone());
        optional("what to do", status.hold_reason.as_deref().map(advice));
        optional("waits for", status.waits_for.as_deref().map(listed));
        optional("epoch", Some(status.epoch_no.to_string()));
        optional("since", Some(status.opened_at.clone()));
        optional("system", status.system_id.map(|id| id.to_string()));
        optional("timeline", status.timeline.map(|number| number.to_string()));
        optional("installation", Some(status.installation.to_string()));
        View::Fields(fields)
    }
}

/// What ends a hold, by its reason.
fn advice(reason: &str) -> String {
    let mut steps = Vec::new();
    if reason.contains("nobody has accepted it") {
        steps.push("if this copy is the one to use, and no daemon works on the original: `tenure cluster accept --reason WHY`; else stop this daemon");
    }
    if reason.contains("restored") {
        steps.push("`tenure cluster resume` makes dead letters of what may have run, for a person to review; `tenure cluster resume --rerun` runs it again");
    }
    steps.join("\n")
}

#[derive(Serialize)]
struct Decided {
    gate: String,
    set_aside: i64,
}

impl Report for Decided {
    fn view(&self) -> View {
        let gate = match self.gate.as_str() {
            "open" => "The gate is open.",
            "window" => "The gate opens when all workers have re-attached.",
            _ => "The gate is still on hold: `tenure cluster status` says why.",
        };
        View::Line(match self.set_aside {
            0 => gate.to_owned(),
            count => format!("{gate} {count} jobs became dead letters: `tenure dead list`."),
        })
    }
}

#[derive(Serialize)]
struct Switches(Vec<Switch>);

impl Report for Switches {
    fn view(&self) -> View {
        let row = |switch: &Switch| {
            vec![
                switch.epoch_no.to_string(),
                switch.opened_at.clone(),
                switch.cause.clone(),
                seconds(switch.without_primary_sec),
                seconds(switch.first_claim_sec),
                switch.written_again.to_string(),
                switch.claimed_again.to_string(),
                switch.put_back.to_string(),
                switch.recovered.to_string(),
                switch.rerun.to_string(),
                switch.ran_twice.to_string(),
                seconds(switch.uncovered_sec),
            ]
        };
        View::Rows(
            &[
                "N",
                "AT",
                "CAUSE",
                "NO PRIMARY",
                "FIRST CLAIM",
                "WRITTEN AGAIN",
                "CLAIMED AGAIN",
                "PUT BACK",
                "RECOVERED",
                "RERUN",
                "RAN TWICE",
                "UNCOVERED",
            ],
            self.0.iter().map(row).collect(),
            "No switch was seen.",
        )
    }
}

#[derive(Serialize)]
struct Shown(Box<Switch>);

impl Report for Shown {
    fn view(&self) -> View {
        let switch = &self.0;
        let from_to = |before: Option<String>, after: Option<String>| match (before, after) {
            (Some(before), Some(after)) if before != after => Some(format!("{before} → {after}")),
            (_, after) => after,
        };
        let mut fields = vec![
            ("switch", switch.epoch_no.to_string()),
            ("cause", switch.cause.clone()),
            ("at", switch.opened_at.clone()),
        ];
        let mut optional =
            |name, text: Option<String>| fields.extend(text.map(|text| (name, text)));
        let text = |number: &Option<i32>| number.map(|number| number.to_string());
        let id = |number: &Option<i64>| number.map(|number| number.to_string());
        optional(
            "timeline",
            from_to(text(&switch.previous_timeline), text(&switch.timeline)),
        );
        optional(
            "system",
            from_to(id(&switch.previous_system_id), id(&switch.system_id)),
        );
        optional(
            "without a primary",
            some_seconds(switch.without_primary_sec),
        );
        optional(
            "until workers had re-attached",
            Some(match switch.window_sec {
                Some(length) => some_seconds(Some(length)).unwrap_or_default(),
                None => "not yet: `tenure cluster status`".to_owned(),
            }),
        );
        optional(
            "until the first claim after that",
            some_seconds(switch.first_claim_sec),
        );
        for (name, count) in [
            (
                "completions and failures written again",
                switch.written_again,
            ),
            ("claims taken again", switch.claimed_again),
            ("jobs put back", switch.put_back),
            ("jobs of absent workers recovered", switch.recovered),
            ("jobs given back to run again", switch.rerun),
            ("handlers stopped", switch.stopped),
            ("jobs set aside as dead letters", switch.set_aside),
            ("jobs that ran twice", switch.ran_twice),
        ] {
            optional(name, Some(count.to_string()));
        }
        optional(
            "absent workers",
            switch.absent_workers.as_deref().map(listed),
        );
        optional(
            "not covered",
            switch.uncovered_until.as_ref().map(|until| {
                let from = switch
                    .uncovered_from
                    .as_deref()
                    .unwrap_or("an unknown time");
                format!("from {from} to {until}: no worker remembers what ended then")
            }),
        );
        optional("decision", switch.decision.clone());
        optional("decided by", switch.decided_by.clone());
        optional("decided at", switch.decided_at.clone());
        View::Fields(fields)
    }
}

#[derive(Serialize)]
struct Jobs(Vec<SwitchJob>);

impl Report for Jobs {
    fn view(&self) -> View {
        let row = |job: &SwitchJob| {
            vec![
                job.job_id.to_string(),
                job.job_type.clone().unwrap_or_default(),
                job.what.replace('_', " "),
                job.run.to_string(),
                job.status.clone().unwrap_or_else(|| "gone".to_owned()),
                job.worker_id.map_or_else(String::new, |id| id.to_string()),
            ]
        };
        View::Rows(
            &["JOB", "TYPE", "WHAT", "RUN", "STATUS NOW", "WORKER"],
            self.0.iter().map(row).collect(),
            "This switch touched no job.",
        )
    }
}

fn listed(ids: &[uuid::Uuid]) -> String {
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    ids.join(", ")
}

fn seconds(length: Option<f64>) -> String {
    some_seconds(length).unwrap_or_default()
}

fn some_seconds(length: Option<f64>) -> Option<String> {
    length.map(|length| format!("{length:.2} s"))
}
