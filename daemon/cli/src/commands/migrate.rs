//! `tenure migrate`: up, status, down.

use serde::Serialize;
use tenure_store::migrate::{Line, Migrator};

use super::Context;
use crate::arguments::{MigrateAction, MigrateArguments};
use crate::config;
use crate::output::{Exit, Failure, Report, View};

/// Carries out one of the commands about the schema.
pub(super) async fn migrate(context: &Context, arguments: MigrateArguments) -> Result<(), Failure> {
    let schema = config::database(context.common.config.as_deref(), &context.common.set)?.schema;
    let session = context.connect_directly().await?;
    let migrator = Migrator::new(&session, &schema);
    match (
        arguments.action.unwrap_or(MigrateAction::Up),
        arguments.dry_run,
    ) {
        (MigrateAction::Status, _) => {
            let lines = migrator.status().await?;
            context
                .output
                .print_with(&Lines(lines), migrator.check().await.map_err(Failure::from))
        }
        (MigrateAction::Up, true) => {
            let pending = migrator
                .status()
                .await?
                .into_iter()
                .filter(|line| line.state == "pending");
            context.output.print(&Changes::would_apply(
                pending.map(|line| line.name).collect(),
            ))
        }
        (MigrateAction::Up, false) => {
            let applied = migrator.up().await?;
            for role in migrator.missing_roles().await? {
                context.warn(&format!(
                    "the role {role} is missing and this role may not create it; let an administrator run \
                     CREATE ROLE {role} NOLOGIN, and then SELECT {schema}.grant_roles()"
                ));
            }
            context.output.print(&Changes::applied(applied))
        }
        (MigrateAction::Down { drop_schema }, dry_run) => {
            down(context, &migrator, &schema, drop_schema, dry_run).await
        }
    }
}

/// Removes the schema, if its name was given once more. Migrations go forward only: this is the way to be rid of tenure,
/// not the way back to an older version.
async fn down(
    context: &Context,
    migrator: &Migrator<'_>,
    schema: &str,
    confirmed: Option<String>,
    dry_run: bool,
) -> Result<(), Failure> {
    if migrator
        .status()
        .await?
        .iter()
        .all(|line| line.state == "pending")
    {
        return Err(Failure::new(
            Exit::NotFound,
            "not_found",
            format!("there is no schema \"{schema}\" of tenure"),
        ));
    }
    if dry_run {
        return context.output.print(&Changes::would_drop(schema));
    }
    if confirmed.as_deref() != Some(schema) {
        let message =
            format!("this would remove the schema \"{schema}\" with every job and its history");
        return Err(
            Failure::new(Exit::Refused, "unconfirmed", message).hint(format!(
                "if that is what you want: tenure migrate down --drop-schema {schema}"
            )),
        );
    }
    migrator.drop_everything().await?;
    context.output.print(&Changes::dropped(schema))
}

#[derive(Serialize)]
struct Lines(Vec<Line>);

impl Report for Lines {
    fn view(&self) -> View {
        let row = |line: &Line| {
            vec![
                line.name.clone(),
                line.state.to_owned(),
                if line.breaking {
                    "breaking"
                } else {
                    "compatible"
                }
                .to_owned(),
                line.applied_at.clone().unwrap_or_default(),
            ]
        };
        View::Rows(
            &["MIGRATION", "STATE", "KIND", "APPLIED"],
            self.0.iter().map(row).collect(),
            "No migrations.",
        )
    }
}

/// What was done, or would be.
#[derive(Serialize)]
struct Changes {
    done: bool,
    migrations: Vec<String>,
    #[serde(skip)]
    sentence: String,
}

impl Changes {
    fn applied(migrations: Vec<String>) -> Self {
        let sentence = match migrations.as_slice() {
            [] => "The schema is up to date.".to_owned(),
            names => format!("Applied {}.", names.join(", ")),
        };
        Self {
            done: true,
            migrations,
            sentence,
        }
    }

    fn would_apply(migrations: Vec<String>) -> Self {
        let sentence = match migrations.as_slice() {
            [] => "The schema is up to date.".to_owned(),
            names => format!("Would apply {}.", names.join(", ")),
        };
        Self {
            done: false,
            migrations,
            sentence,
        }
    }

    fn dropped(schema: &str) -> Self {
        Self {
            done: true,
            migrations: Vec::new(),
            sentence: format!("Removed the schema \"{schema}\"."),
        }
    }

    fn would_drop(schema: &str) -> Self {
        Self {
            done: false,
            migrations: Vec::new(),
            sentence: format!("Would remove the schema \"{schema}\" with every job."),
        }
    }
}

impl Report for Changes {
    fn view(&self) -> View {
        View::Line(self.sentence.clone())
    }
}
