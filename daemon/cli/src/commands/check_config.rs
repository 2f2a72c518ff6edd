//! `tenure check-config`: what is in force.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;
use tenure_runtime::daemon::Daemon;

use super::Context;
use crate::config;
use crate::output::{Failure, Report, View};

/// Reads the configuration as a daemon does and prints it; secrets are shown as `[secret]`.
pub(super) fn check_config(context: &Context) -> Result<(), Failure> {
    let (settings, sources) =
        config::settings(context.common.config.as_deref(), &context.common.set)?;
    // Made to be asked, not to be run; what it refuses the configuration has been asked about.
    if let Some(caution) = Daemon::new(settings.clone())
        .ok()
        .and_then(|daemon| daemon.caution())
    {
        context.warn(&caution);
    }
    context.output.print(&InForce {
        file: sources.file().map(PathBuf::from),
        settings: config::shown(&settings),
    })
}

#[derive(Serialize)]
struct InForce {
    file: Option<PathBuf>,
    settings: Value,
}

impl Report for InForce {
    fn view(&self) -> View {
        let file = self
            .file
            .as_ref()
            .map_or_else(|| "none".to_owned(), |file| file.display().to_string());
        let mut rows = vec![vec!["configuration file".to_owned(), file]];
        flatten(&self.settings, String::new(), &mut rows);
        View::Rows(&["KEY", "VALUE"], rows, "")
    }
}

/// One row for each value that is no table.
fn flatten(value: &Value, key: String, rows: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let below = if key.is_empty() {
                    name.clone()
                } else {
                    format!("{key}.{name}")
                };
                flatten(member, below, rows);
            }
        }
        Value::String(text) => rows.push(vec![key, text.clone()]),
        Value::Null => rows.push(vec![key, "-".to_owned()]),
        other => rows.push(vec![key, other.to_string()]),
    }
}
