//! What a command prints: one envelope as JSON, a table on a terminal, tab-separated fields in a pipe.
//!
//! A report says both what it is (it serialises) and how a person reads it (its [`View`]). Texts of users reach a terminal
//! only through [`cell::shown`], so no payload can move the cursor or colour the screen. Nothing here is coloured.

mod cell;
mod failure;

use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde::Serialize;

pub(crate) use failure::{Exit, Failure};

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table, also into a pipe.
    Table,
    /// One JSON envelope: {"success":…,"data":…,"error":…}.
    Json,
}

/// Where results go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    style: Style,
    pretty: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Table,
    Tabs,
    Json,
}

/// What a command found or did.
pub(crate) trait Report: Serialize {
    /// How a person reads it.
    fn view(&self) -> View;
}

/// What a person reads.
pub(crate) enum View {
    /// One row for each thing, below a heading; the text stands for no row at all.
    Rows(&'static [&'static str], Vec<Vec<String>>, &'static str),
    /// The parts of one thing. A text of several lines is shown below its name.
    Fields(Vec<(&'static str, String)>),
    /// A sentence.
    Line(String),
}

impl Output {
    /// Chooses by `asked`, else by what standard output is.
    pub(crate) fn new(asked: Option<Format>) -> Self {
        let terminal = io::stdout().is_terminal();
        let style = match asked {
            Some(Format::Table) => Style::Table,
            Some(Format::Json) => Style::Json,
            None if terminal => Style::Table,
            None => Style::Tabs,
        };
        Self {
            style,
            pretty: terminal,
        }
    }

    /// Whether a person, not a program, reads the result.
    pub(crate) fn is_for_people(self) -> bool {
        self.style == Style::Table
    }

    /// Prints a result.
    pub(crate) fn print(self, report: &impl Report) -> Result<(), Failure> {
        self.print_with(report, Ok(()))
    }

    /// Prints a result that is a failure all the same, such as a job that was waited for and failed. The caller ends with
    /// the failure's exit code; as JSON, both stand in the one envelope.
    pub(crate) fn print_with(
        self,
        report: &impl Report,
        outcome: Result<(), Failure>,
    ) -> Result<(), Failure> {
        let text = match self.style {
            Style::Json => self.envelope(Some(report), outcome.as_ref().err())?,
            Style::Table => report.view().table(),
            Style::Tabs => report.view().tabs(),
        };
        write_out(&text)?;
        outcome.map_err(|failure| match self.style {
            Style::Json => failure.printed(),
            _ => failure,
        })
    }

    /// Prints a failure: as JSON to standard output, else to standard error.
    pub(crate) fn print_failure(self, failure: &Failure) {
        if failure.is_printed() {
            return;
        }
        if self.style == Style::Json
            && let Ok(text) = self.envelope(None::<&()>, Some(failure))
            && write_out(&text).is_ok()
        {
            return;
        }
        failure.tell();
    }

    fn envelope<T: Serialize>(
        self,
        data: Option<&T>,
        failure: Option<&Failure>,
    ) -> Result<String, Failure> {
        #[derive(Serialize)]
        struct Envelope<'a, T> {
            success: bool,
            data: Option<&'a T>,
            error: Option<&'a Failure>,
        }
        let envelope = Envelope {
            success: failure.is_none(),
            data,
            error: failure,
        };
        let text = match self.pretty {
            true => serde_json::to_string_pretty(&envelope),
            false => serde_json::to_string(&envelope),
        };
        text.map(|text| text + "\n")
            .map_err(|error| Failure::failed(format!("the result is no JSON: {error}")))
    }
}

impl View {
    fn table(self) -> String {
        match self {
            Self::Line(line) => cell::shown(&line) + "\n",
            Self::Fields(fields) => listed(&fields),
            Self::Rows(_, rows, none) if rows.is_empty() => format!("{none}\n"),
            Self::Rows(head, rows, _) => {
                let mut table = comfy_table::Table::new();
                table
                    .load_style(comfy_table::TableStyle::new())
                    .set_header(head.iter().copied());
                for row in rows {
                    table.add_row(row.iter().map(|text| cell::short(text)));
                }
                table
                    .lines()
                    .map(|line| line.trim_end().to_owned() + "\n")
                    .collect()
            }
        }
    }

    fn tabs(self) -> String {
        let line = |cells: &[&str]| {
            cells
                .iter()
                .map(|text| cell::shown(text))
                .collect::<Vec<_>>()
                .join("\t")
                + "\n"
        };
        match self {
            Self::Line(text) => line(&[&text]),
            Self::Fields(fields) => fields
                .iter()
                .map(|(name, text)| line(&[name, text]))
                .collect(),
            Self::Rows(_, rows, _) => rows
                .iter()
                .map(|row| line(&row.iter().map(String::as_str).collect::<Vec<_>>()))
                .collect(),
        }
    }
}

/// Names and values side by side; what has several lines comes below its name.
fn listed(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in fields {
        if value.trim_end().contains('\n') {
            text.push_str(&format!("{name}\n"));
            for line in value.trim_end().lines() {
                text.push_str(&format!("  {}\n", cell::shown(line)));
            }
        } else {
            text.push_str(&format!(
                "{name:width$}  {}\n",
                cell::shown(value.trim_end())
            ));
        }
    }
    text
}

/// Writes to standard output. A reader that has seen enough, such as `head`, ends the program quietly.
pub(crate) fn write_out(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            Err(Failure::failed(String::new()).printed())
        }
        Err(error) => Err(Failure::failed(format!(
            "the result cannot be written: {error}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> View {
        View::Rows(
            &["id", "error"],
            vec![
                vec!["1".into(), "a\tb\x1b[31m\n".into()],
                vec!["22".into(), "密".into()],
            ],
            "no jobs",
        )
    }

    #[test]
    fn a_table_has_a_heading_and_no_escapes() {
        assert_eq!(
            rows().table(),
            " id  error\n 1   a\\tb\\u{1b}[31m\\n\n 22  密\n"
        );
        assert_eq!(
            View::Rows(&["id"], Vec::new(), "no jobs").table(),
            "no jobs\n"
        );
    }

    #[test]
    fn a_pipe_gets_fields_without_a_heading() {
        assert_eq!(rows().tabs(), "1\ta\\tb\\u{1b}[31m\\n\n22\t密\n");
        assert_eq!(View::Rows(&["id"], Vec::new(), "no jobs").tabs(), "");
    }

    #[test]
    fn long_texts_stand_below_their_name() {
        let fields = View::Fields(vec![
            ("id", "1".into()),
            ("log tail", "one\ntwo\x07\n".into()),
        ]);
        assert_eq!(
            fields.table(),
            "id        1\nlog tail\n  one\n  two\\u{7}\n"
        );
    }
}
