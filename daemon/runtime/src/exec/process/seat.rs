//! One job in a process: given, waited for, stopped.

use std::sync::Arc;

use tenure_core::crew::Fate;
use tenure_protocol::lines;
use tenure_protocol::verdict::{Ended, Verdict};
use tokio::sync::oneshot;
use tokio::time::sleep_until;

use super::member::{Member, Over};
use super::{Fleet, NoPlace};
use crate::exec::{Executor, StopSignal, Task, after, next_order, stopped};

/// Why a job was told to end.
enum Told {
    TimedOut,
    Stopped(String),
}

/// Runs one attempt in a process of the fleet.
///
/// The job is told to end by a `cancel` line. If its process has not answered for it when the grace is over, the process is killed, and
/// the other jobs in it are given back. Dropping the future kills the process.
pub(crate) async fn run(
    fleet: &Fleet,
    executor: &Executor,
    task: &Task,
    mut stop: StopSignal,
) -> Ended {
    loop {
        let member = tokio::select! {
            biased;
            (_, reason) = next_order(&mut stop) => return stopped(&reason),
            place = fleet.place(executor, task.alone) => match place {
                Ok(member) => member,
                Err(NoPlace::Stopping) => return stopped("the daemon stops"),
                Err(NoPlace::NotReady(why)) => return Ended::because(Verdict::RETRY_LONG, why),
            },
        };
        let deadline = task.deadline();
        let line = lines::job(&task.envelope(&deadline));
        // A process that is just dying takes nothing, and then the job has not begun.
        if let Some(answer) = member.give(task.job, task.token, &line, executor.limits.log) {
            fleet.given(&member);
            let seat = Seat {
                member,
                task,
                over: false,
            };
            return seat.wait(answer, &mut stop, fleet).await;
        }
        fleet.state().crew.not_given(member.id);
    }
}

struct Seat<'a> {
    member: Arc<Member>,
    task: &'a Task,
    over: bool,
}

impl Seat<'_> {
    async fn wait(
        mut self,
        mut answer: oneshot::Receiver<Over>,
        stop: &mut StopSignal,
        fleet: &Fleet,
    ) -> Ended {
        let mut told = None;
        let mut killed = false;
        let mut next = after(self.task.timeout);
        let over = loop {
            tokio::select! {
                biased;
                over = &mut answer => break over,
                (grace, reason) = next_order(stop) => {
                    let kill_at = after(grace);
                    match told {
                        None => {
                            self.member.cancel(self.task.job);
                            told = Some(Told::Stopped(reason));
                            next = kill_at;
                        }
                        Some(_) => next = next.min(kill_at),
                    }
                }
                () = sleep_until(next), if !killed => {
                    if told.is_none() {
                        self.member.cancel(self.task.job);
                        told = Some(Told::TimedOut);
                        next = after(fleet.0.settings.kill_grace);
                        continue;
                    }
                    killed = true;
                    let job = self.task.job;
                    self.member.kill(format!("job {job} in it did not end when it was told to"));
                }
            }
        };
        self.over = true;
        conclude(over.ok(), told, self.task)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.member
                .kill(format!("job {} in it was given up", self.task.job));
        }
    }
}

/// `None`: the task that looks after the process is no more, and with it the process.
fn conclude(over: Option<Over>, told: Option<Told>, task: &Task) -> Ended {
    let (ended, log) = match over {
        None => (stopped("its process was given up"), None),
        Some(Over::Answered { ended, log }) => (*ended, log),
        Some(Over::Died { fate, death, log }) => {
            let ended = match fate {
                Fate::Released => stopped(&death.why),
                Fate::Failed => Ended {
                    exit_code: death.exit_code,
                    signal: death.signal,
                    ..Ended::because(Verdict::RETRY, death.why)
                },
                Fate::Marked => Ended::because(Verdict::Crashed, death.why),
            };
            (ended, log)
        }
    };
    let ended = match told {
        None => ended,
        Some(Told::Stopped(reason)) => stopped(&reason),
        Some(Told::TimedOut) => {
            let limit = humantime::format_duration(task.timeout);
            Ended::because(Verdict::RETRY, format!("timed out after {limit}"))
        }
    };
    Ended {
        log_tail: log,
        ..ended
    }
}
