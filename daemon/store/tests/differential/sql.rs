//! The statements of the model as SQL, and its answers as the rows that PostgreSQL gives.

use std::fmt::Write as _;

use tenure_core::ids::{Call, Epoch, JobId, Run, WorkerId};
use tenure_core::model::{
    Asked, BeatAnswer, Claim, End, EndAnswer, Heartbeat, Hold, Kept, Memory, NewJob, Probe,
    Reattach, ReattachAnswer, Registration, Review, RunEnd, Statement, Stop,
};
use uuid::Uuid;

use super::names::Names;
use super::state;

fn text(value: Option<&str>) -> String {
    value.map_or("NULL".to_owned(), |text| {
        format!("'{}'", text.replace('\'', "''"))
    })
}

fn number<T: ToString>(value: Option<T>) -> String {
    value.map_or("NULL".to_owned(), |number| number.to_string())
}

fn uuid(value: Uuid) -> String {
    format!("'{value}'::uuid")
}

fn at(ms: i64) -> String {
    format!("to_timestamp({ms} / 1000.0)")
}

fn list(items: impl IntoIterator<Item = impl ToString>) -> String {
    items
        .into_iter()
        .map(|item| item.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The options of a job that belongs to this series, or to none.
fn series(watermark: Option<&str>) -> String {
    watermark.map_or("'{}'::jsonb".to_owned(), |name| {
        format!("jsonb_build_object('watermark', '{name}')")
    })
}

fn new_job(names: &Names, job: &NewJob) -> String {
    format!(
        "jsonb_build_object('job_type', {}, 'tenant', '{}', 'priority', {}, 'run_at', {}, 'unique_key', {}, 'max_attempts', {}, 'id', {}, 'options', {})",
        text(Some(&job.job_type)),
        job.tenant,
        job.priority,
        job.run_at.map_or("NULL".to_owned(), at),
        text(job.unique_key.as_deref()),
        number(job.max_attempts),
        job.id
            .map_or("NULL".to_owned(), |id| uuid(names.database(id.0))),
        series(job.watermark.as_deref())
    )
}

pub(crate) fn enqueue(names: &Names, job: &NewJob) -> String {
    format!(
        "SELECT enqueue({}, priority => {}, run_at => {}, tenant => '{}', unique_key => {}, max_attempts => {}, id => {}, options => {})",
        text(Some(&job.job_type)),
        job.priority,
        job.run_at.map_or("NULL".to_owned(), at),
        job.tenant,
        text(job.unique_key.as_deref()),
        number(job.max_attempts),
        job.id
            .map_or("NULL".to_owned(), |id| uuid(names.database(id.0))),
        series(job.watermark.as_deref())
    )
}

pub(crate) fn enqueue_many(names: &Names, jobs: &[NewJob]) -> String {
    let jobs = list(jobs.iter().map(|job| new_job(names, job)));
    format!("SELECT * FROM enqueue_many(jsonb_build_array({jobs}))")
}

pub(crate) fn insert(names: &Names, job: &NewJob) -> String {
    format!(
        "INSERT INTO jobs (job_type, priority, run_at, tenant_id, unique_key, max_attempts, id, options) VALUES ({}, {}, {}, '{}', {}, {}, {}, {}) RETURNING id",
        text(Some(&job.job_type)),
        job.priority,
        job.run_at.map_or("NULL".to_owned(), at),
        job.tenant,
        text(job.unique_key.as_deref()),
        number(job.max_attempts),
        job.id
            .map_or("NULL".to_owned(), |id| uuid(names.database(id.0))),
        series(job.watermark.as_deref())
    )
}

pub(crate) fn open_epoch(worker: WorkerId, seen: i64) -> String {
    format!(
        "SELECT epoch, epoch_no, gate, beat FROM open_epoch('{worker}', jsonb_build_object('epoch_no', {seen}))"
    )
}

pub(crate) fn register(worker: WorkerId, it: Registration) -> String {
    format!(
        "SELECT epoch, epoch_no, gate FROM register_worker('{worker}', 'model', 'v1', {} * interval '1 ms', {} * interval '1 ms', '{{*}}')",
        it.lease_ttl, it.heartbeat
    )
}

pub(crate) fn heartbeat(names: &Names, worker: WorkerId, epoch: Epoch, said: &Heartbeat) -> String {
    let open = list(said.open.iter().map(|call| call.0));
    format!(
        "WITH h AS MATERIALIZED (SELECT * FROM heartbeat('{worker}', {}, {}, {}, ARRAY[{open}]::bigint[], 0, jsonb_build_object('draining', {}))) \
         SELECT 'beat', gate, ghosts::text FROM h UNION ALL SELECT 'worker', e ->> 'id', NULL FROM h, jsonb_array_elements(workers) e \
         UNION ALL SELECT DISTINCT 'revoked', e ->> 'job', e ->> 'token' FROM h, jsonb_array_elements(revoked) e",
        uuid(names.database(epoch.0)),
        said.beat,
        said.settled,
        said.draining
    )
}

pub(crate) fn heartbeat_lines(answer: &BeatAnswer) -> Vec<String> {
    let mut lines = vec![format!(
        "beat {} {}",
        state::gate(answer.gate),
        answer.ghosts
    )];
    lines.extend(answer.workers.iter().map(|id| format!("worker {id} -")));
    lines.extend(
        answer
            .revoked
            .iter()
            .map(|(job, token)| format!("revoked {job} {token}")),
    );
    lines
}

pub(crate) fn claim(names: &Names, worker: WorkerId, epoch: Epoch, claim: &Claim) -> String {
    let lanes = list(
        claim
            .lanes
            .iter()
            .map(|lane| format!("(SELECT lane FROM lane WHERE job_type = '{}')", lane.0)),
    );
    let rerun = list(claim.rerun.iter().map(|it| text(Some(it))));
    format!(
        "SELECT token, id, run, attempt, max_attempts FROM claim_job_batch('{worker}', {}, {}, ARRAY[{lanes}]::int[], ARRAY[{}]::int[], {}, ARRAY[{}]::int[], \
         options => jsonb_build_object('rerun', ARRAY(SELECT lane FROM lane WHERE job_type IN ({rerun}))))",
        uuid(names.database(epoch.0)),
        claim.call,
        list(claim.lanes.iter().map(|lane| lane.1)),
        number(claim.total),
        list(claim.lanes.iter().map(|lane| lane.2))
    )
}

/// The keys of an end, for `finish` and `reattach`.
fn end(names: &Names, it: &RunEnd) -> String {
    format!(
        "'kind', '{}', 'job', {}, 'run', {}, 'token', {}, 'delay_ms', {}, 'final', {}, 'result', {}::jsonb, 'watermark', {}::jsonb, 'enqueue', jsonb_build_array({})",
        it.end.name(),
        uuid(names.database(it.job.0)),
        it.run,
        uuid(names.database(it.token.0)),
        it.delay,
        it.end == End::Failed { last: true },
        text(it.result.as_deref()),
        text(it.watermark.as_deref()),
        list(it.follow_ups.iter().map(|job| new_job(names, job)))
    )
}

pub(crate) fn finish(names: &Names, worker: WorkerId, epoch: Epoch, ends: &[RunEnd]) -> String {
    let items = list(
        ends.iter()
            .map(|it| format!("jsonb_build_object({})", end(names, it))),
    );
    format!(
        "SELECT job, run, token, answer, status FROM finish('{worker}', {}, jsonb_build_array({items}))",
        uuid(names.database(epoch.0))
    )
}

pub(crate) fn end_line(said: &RunEnd, answer: EndAnswer) -> String {
    let answer = match answer {
        EndAnswer::Done(status) => format!("done {status}"),
        EndAnswer::Known => "done -".to_owned(),
        EndAnswer::History => "history -".to_owned(),
    };
    format!("{} {} {} {answer}", said.job, said.run, said.token)
}

pub(crate) fn hold(names: &Names, worker: WorkerId, epoch: Epoch, holds: &[Hold]) -> String {
    let items = holds.iter().map(|it| {
        format!(
            "jsonb_build_object('job', {}, 'token', {}, 'for_ms', {})",
            uuid(names.database(it.job.0)),
            uuid(names.database(it.token.0)),
            it.for_ms
        )
    });
    format!(
        "SELECT job, answer FROM hold('{worker}', {}, jsonb_build_array({}), '{{\"at_least\": {}}}')",
        uuid(names.database(epoch.0)),
        list(items),
        holds.iter().all(|it| it.at_least)
    )
}

fn row(asked: &Asked) -> String {
    format!(
        "jsonb_build_object('created_at', {}, 'priority', {}, 'max_attempts', {}, 'job_type', {}, 'tenant', '{}', 'unique_key', {}, 'options', {})",
        at(asked.created_at),
        asked.priority,
        number(asked.max_attempts),
        text(Some(&asked.job_type)),
        asked.tenant,
        text(asked.unique_key.as_deref()),
        series(asked.watermark.as_deref())
    )
}

fn memory(names: &Names, it: &Memory) -> String {
    format!(
        "'job', {}, 'run', {}, 'token', {}, 'call', {}, 'attempt', {}, 'max_attempts', {}, 'epoch_no', {}, 'started_at', {}, 'until_ms', {}, 'row', {}, 'rerun', {}",
        uuid(names.database(it.job.0)),
        it.run,
        uuid(names.database(it.token.0)),
        it.call,
        it.attempt,
        it.max_attempts,
        it.epoch_no,
        at(it.started_at),
        number(it.until_ms),
        it.asked.as_ref().map_or("NULL".to_owned(), row),
        it.rerun
    )
}

pub(crate) fn reattach(names: &Names, worker: WorkerId, epoch: Epoch, said: &Reattach) -> String {
    let statements = said.statements.iter().map(|it| match it {
        Statement::Hold(it) => format!("jsonb_build_object('kind', 'hold', {})", memory(names, it)),
        Statement::Ended {
            memory: it,
            end: ended,
            confirmed,
        } => format!(
            "jsonb_build_object({}) || jsonb_build_object({}, 'confirmed', {confirmed})",
            memory(names, it),
            end(names, ended)
        ),
    });
    let mut options = String::from("'{}'::jsonb");
    if let Some(it) = said.registration {
        let _ = write!(
            options,
            " || jsonb_build_object('name', 'model', 'lease_ttl_ms', {}, 'heartbeat_ms', {}, 'job_types', '[\"*\"]'::jsonb)",
            it.lease_ttl, it.heartbeat
        );
    }
    if !said.predecessors.is_empty() {
        let _ = write!(
            options,
            " || jsonb_build_object('predecessors', ARRAY[{}])",
            list(said.predecessors.iter().map(|id| uuid(id.0)))
        );
    }
    if said.more {
        options.push_str(" || '{\"more\": true}'");
    }
    if !said.held.is_empty() {
        let held = said.held.iter().map(|it| uuid(names.database(it.0)));
        let _ = write!(
            options,
            " || jsonb_build_object('held', ARRAY[{}])",
            list(held)
        );
    }
    if !said.covers.is_empty() {
        let covers = said.covers.iter().map(|it| {
            format!(
                "jsonb_build_object('worker', {}, 'from', {}, 'ms', 5000, 'predecessor', {})",
                uuid(it.worker.0),
                it.from,
                it.predecessor
            )
        });
        let _ = write!(
            options,
            " || jsonb_build_object('covers', jsonb_build_array({}))",
            list(covers)
        );
    }
    format!(
        "SELECT job, run, token, answer, status FROM reattach('{worker}', {}, {}, jsonb_build_array({}), ARRAY[{}]::uuid[], {options})",
        uuid(names.database(epoch.0)),
        said.beat,
        list(statements),
        list(said.roster.iter().map(|id| uuid(id.0)))
    )
}

pub(crate) fn reattach_line(said: &Statement, answer: &ReattachAnswer) -> String {
    match (said, answer) {
        (Statement::Ended { end, .. }, ReattachAnswer::Ended(answer)) => end_line(end, *answer),
        (said, answer) => {
            let answer = match answer {
                ReattachAnswer::Held(Kept::Keep) => "kept",
                ReattachAnswer::Held(Kept::Rerun) => "rerun",
                _ => "stop",
            };
            let it = said.memory();
            format!("{} {} {} {answer} -", it.job, it.run, it.token)
        }
    }
}

pub(crate) fn probe(worker: WorkerId) -> String {
    format!("SELECT epoch, epoch_no, gate, in_epoch, beat FROM probe('{worker}')")
}

pub(crate) fn probe_line(it: &Probe) -> String {
    let in_epoch = if it.in_epoch { "t" } else { "f" };
    let beat = it.beat.map_or("-".to_owned(), |beat| beat.to_string());
    format!(
        "{} {} {} {in_epoch} {beat}",
        it.epoch,
        it.epoch_no,
        state::gate(it.gate)
    )
}

pub(crate) fn stop(names: &Names, job: JobId, stop: Stop) -> String {
    let id = uuid(names.database(job.0));
    match stop {
        Stop::Cancel => format!("SELECT cancel({id})"),
        Stop::Complete => format!("SELECT complete_manually({id}, 'model')"),
        Stop::Dead => format!("SELECT move_to_dead_letter({id})"),
    }
}

pub(crate) fn review(
    names: &Names,
    job: JobId,
    run: Run,
    review: Review,
    edit: Option<&str>,
) -> String {
    let id = uuid(names.database(job.0));
    format!(
        "SELECT review_dead_letter(coalesce((SELECT id FROM dead_letter WHERE job_id = {id} AND run = {run}), {id}), '{}', 'model', data => {}::jsonb)",
        review.name(),
        text(edit)
    )
}

/// A call of a worker that says nothing, for a worker and an epoch that may both be wrong.
pub(crate) fn plain_beat(names: &Names, worker: WorkerId, epoch: Epoch, settled: Call) -> String {
    let said = Heartbeat {
        beat: 0,
        settled,
        open: Vec::new(),
        draining: false,
    };
    heartbeat(names, worker, epoch, &said)
}
