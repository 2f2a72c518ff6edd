//! Asks all hosts what they are, side by side, each with its own short wait.
//!
//! Each host has a connection that is kept. One that does not answer in time is given up, and another is made in the background,
//! so no host that is silent holds up what the others say. Now and then a connection is made anew although it works: its name may
//! lead to another server by now.

use std::time::Duration;

use futures_util::future::join_all;
use tenure_core::ids::{Beat, Epoch, WorkerId};
use tenure_core::primary::{Facts, Sight};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::types::Type;

use crate::error::StoreError;
use crate::row::get;
use crate::session::{Session, Target};
use crate::wire::detach;

/// For an answer on a connection that stands.
const ANSWER: Duration = Duration::from_millis(600);
/// The same for the first answer after one that did not come in time.
const SECOND_ANSWER: Duration = Duration::from_millis(1_200);
/// For a connection that is being made; it goes on in the background.
const CONNECT: Duration = Duration::from_millis(150);
/// A connection is given up after this: one that a dying server has taken in would else keep us from the next.
const GIVE_UP: Duration = Duration::from_secs(2);
/// A connection that works is made anew after so many answers.
const ANSWERS: u32 = 10;

/// The hosts of one address.
pub struct Prober {
    hosts: Vec<Host>,
}

/// What one host has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// What it is.
    pub sight: Sight,
    /// What stands in its database; `None` when it is away.
    pub epoch: Option<Shows>,
    /// Why it is away.
    pub error: Option<String>,
}

/// What stands in the database of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shows {
    /// The epoch.
    pub epoch: Epoch,
    /// `false`: it is over; `None` on a standby.
    pub current: Option<bool>,
    /// It waits for standbys at each commit.
    pub synchronous: bool,
}

struct Host {
    target: Target,
    session: Option<Session>,
    /// Takes the place of the session when it is there.
    making: Option<JoinHandle<Result<Session, StoreError>>>,
    /// It did not answer the last time.
    missed: bool,
    answers: u32,
}

impl Prober {
    /// Connects to nothing yet.
    #[must_use]
    pub fn new(target: &Target) -> Self {
        let hosts = (0..target.address.hosts()).map(|host| {
            let mut address = target.address.at(host);
            address
                .config
                .target_session_attrs(TargetSessionAttrs::Any)
                .application_name("tenure probe");
            Host {
                target: Target {
                    address,
                    connect_timeout: target.connect_timeout.min(GIVE_UP),
                    ..target.clone()
                },
                session: None,
                making: None,
                missed: false,
                answers: 0,
            }
        });
        Self {
            hosts: hosts.collect(),
        }
    }

    /// How many hosts there are.
    #[must_use]
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Host and port of one of them, for messages.
    #[must_use]
    pub fn name(&self, host: usize) -> String {
        self.hosts
            .get(host)
            .map_or_else(String::new, |host| host.target.address.servers())
    }

    /// Asks all of them; each answer says what it shows of `worker`.
    pub async fn round(&mut self, worker: Option<WorkerId>) -> Vec<Shown> {
        join_all(self.hosts.iter_mut().map(|host| host.ask(worker))).await
    }
}

impl Host {
    async fn ask(&mut self, worker: Option<WorkerId>) -> Shown {
        match self.answer(worker).await {
            Ok(shown) => {
                self.missed = false;
                self.answers += 1;
                if self.answers.is_multiple_of(ANSWERS) {
                    self.connect();
                }
                shown
            }
            Err(error) => {
                self.missed = true;
                Shown {
                    sight: Sight::Away,
                    epoch: None,
                    error: Some(error.to_string()),
                }
            }
        }
    }

    async fn answer(&mut self, worker: Option<WorkerId>) -> Result<Shown, StoreError> {
        let finished = self.making.as_ref().is_some_and(JoinHandle::is_finished);
        if self.session.is_none() || finished {
            self.connected().await?;
        }
        let Some(session) = &self.session else {
            return Err(StoreError::Timeout("probe"));
        };
        let wait = if self.missed { SECOND_ANSWER } else { ANSWER };
        let answer = timeout(wait, session.probe(worker))
            .await
            .unwrap_or(Err(StoreError::Timeout("probe")));
        if answer.is_err() {
            self.session = None;
        }
        answer
    }

    fn connect(&mut self) -> &mut JoinHandle<Result<Session, StoreError>> {
        let target = &self.target;
        self.making.get_or_insert_with(|| {
            let target = target.clone();
            detach(async move {
                let opened = Session::open_by(&target, &target.address.config, None).await?;
                Ok(opened.0)
            })
        })
    }

    /// Waits a little for the connection that is being made.
    async fn connected(&mut self) -> Result<(), StoreError> {
        let servers = self.target.address.servers();
        let made = timeout(CONNECT, self.connect())
            .await
            .map_err(|_| StoreError::Unreachable(format!("{servers} does not answer")))?;
        self.making = None;
        match made.map_err(|error| StoreError::Failed(error.to_string()))? {
            Ok(session) => self.session = Some(session),
            Err(error) if self.session.is_none() => return Err(error),
            // The one that works is better than none.
            Err(_) => {}
        }
        Ok(())
    }
}

impl Session {
    /// What this server is and what it shows, also on a standby.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn probe(&self, worker: Option<WorkerId>) -> Result<Shown, StoreError> {
        let sql = "SELECT in_recovery, read_only, synchronous, system_id, timeline, (extract(epoch FROM started_at) * 1000000)::int8 AS started, \
                   epoch, in_epoch, beat, (extract(epoch FROM swept_at) * 1000000)::int8 AS swept, \
                   received, epoch_no, instead_of, installation FROM %probe($1)";
        let id = worker.map_or_else(uuid::Uuid::nil, |worker| worker.0);
        let rows = self.rows("probe", sql, &[(&id, Type::UUID)]).await?;
        let Some(row) = rows.first() else {
            return Err(StoreError::Failed("probe answered nothing".to_owned()));
        };
        let facts = Facts {
            system: get(row, "system_id")?,
            timeline: get(row, "timeline")?,
            started: get(row, "started")?,
            beat: get::<Option<i64>>(row, "beat")?.map(Beat),
            swept_at: get(row, "swept")?,
            received: get(row, "received")?,
            epoch_no: get(row, "epoch_no")?,
            instead_of: get(row, "instead_of")?,
            installation: get(row, "installation")?,
        };
        let sight = if get(row, "in_recovery")? {
            Sight::Standby(facts)
        } else if get(row, "read_only")? {
            Sight::ReadOnly
        } else {
            Sight::Primary(facts)
        };
        Ok(Shown {
            sight,
            epoch: Some(Shows {
                epoch: Epoch(get(row, "epoch")?),
                current: get(row, "in_epoch")?,
                synchronous: get(row, "synchronous")?,
            }),
            error: None,
        })
    }
}
