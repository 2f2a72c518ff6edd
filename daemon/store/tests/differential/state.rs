//! The whole state of both sides, as lines that can be compared.

use tenure_core::model::{Database, Gate, Job, Place, Stop, Waits, WorkerStatus};

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

fn flags(job: &Job) -> i32 {
    i32::from(job.keyed) | if job.edit.is_some() { 4 } else { 0 } | (i32::from(job.alone) * 128)
}

pub(crate) fn gate(gate: Gate) -> &'static str {
    match gate {
        Gate::Open => "open",
        Gate::Window => "window",
        Gate::Hold => "hold",
    }
}

fn place(job: &Job) -> (&'static str, String) {
    match &job.place {
        Place::Ready { .. } => ("pending", "ready".to_owned()),
        Place::Later { due, waits } => {
            let waits = match waits {
                Waits::Time => "time",
                Waits::Retry => "retry",
                Waits::Snooze => "snooze",
                Waits::Window => "window",
            };
            ("scheduled", format!("later {due} {waits}"))
        }
        Place::Leased(it) => {
            let until = or_dash(it.until);
            let text = format!(
                "lease {} {} {} {} {} {until} {} {}",
                it.token,
                it.worker,
                it.call,
                it.epoch_no,
                it.max_attempts,
                it.started_at,
                i32::from(it.leaves_effects) * 32 + i32::from(it.given_up) * 64
            );
            ("running", text)
        }
        Place::Ended(it) => {
            let (token, worker) = (or_dash(it.token), or_dash(it.worker));
            let result = or_dash(it.result.as_ref());
            let text = format!("outcome {token} {worker} {} {result}", it.epoch_no);
            (it.status.name(), text)
        }
    }
}

pub(crate) fn of_model(model: &Database) -> Vec<String> {
    let mut lines = Vec::new();
    let mut queue = Vec::new();
    for (id, job) in &model.jobs {
        let asked = &job.asked;
        let (status, place) = place(job);
        let (key, max) = (
            or_dash(asked.unique_key.as_ref()),
            or_dash(asked.max_attempts),
        );
        lines.push(format!(
            "job {id} {} {} {} {key} {max} {}",
            asked.job_type, asked.tenant, asked.priority, asked.created_at
        ));
        lines.push(format!(
            "place {id} {status} {} {} {} {place}",
            job.run,
            job.attempts,
            flags(job)
        ));
        lines.push(format!("edit {id} {}", or_dash(job.edit.as_ref())));
        if let Place::Ready { pos } = job.place {
            queue.push((&asked.job_type, asked.priority, pos, id));
        }
    }
    queue.sort();
    for heads in queue.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
        let ids: Vec<String> = heads.iter().map(|head| head.3.to_string()).collect();
        lines.push(format!(
            "queue {} {} {}",
            heads[0].0,
            heads[0].1,
            ids.join(",")
        ));
    }
    for ((job_type, tenant, key), owner) in &model.keys {
        lines.push(format!("key {job_type} {tenant} {key} {owner}"));
    }
    for ((job, run, token, applied), outcome) in &model.attempts {
        lines.push(format!("attempt {job} {run} {token} {outcome} {applied}"));
    }
    for ((tenant, name), it) in &model.watermarks {
        lines.push(format!(
            "watermark {tenant} {name} {} {} {}",
            it.value, it.job, it.epoch_no
        ));
    }
    for ((job, run), letter) in &model.letters {
        let review = or_dash(letter.review.map(|it| it.name()));
        lines.push(format!("letter {job} {run} {} {review}", letter.attempts));
    }
    for (job, stop) in &model.stops {
        let kind = match stop {
            Stop::Cancel => "cancel",
            Stop::Complete => "complete",
            Stop::Dead => "dead",
        };
        lines.push(format!("stop {job} {kind}"));
    }
    for ((worker, job, token), at) in &model.revocations {
        lines.push(format!("revocation {worker} {job} {token} {at}"));
    }
    for (id, it) in &model.workers {
        let status = match it.status {
            WorkerStatus::Live => "live",
            WorkerStatus::Draining => "draining",
            WorkerStatus::Stopped => "stopped",
            WorkerStatus::Lost => "lost",
        };
        lines.push(format!(
            "worker {id} {status} {} {} {} {} {} {} {}",
            it.lease_ttl, it.heartbeat, it.admitted, it.started_at, it.beat, it.beat_at, it.settled
        ));
    }
    for (id, it) in &model.expected {
        lines.push(format!(
            "expected {id} {} {} {}",
            it.lease_ttl, it.spoken, it.absent
        ));
    }
    for (epoch_no, it) in &model.switches {
        lines.push(format!(
            "switch {epoch_no} {} {} {} {} {}",
            it.other_system, it.uncovered, it.decided, it.closed, it.claimed
        ));
    }
    for ((epoch_no, job, run, what), worker) in &model.switch_jobs {
        let worker = or_dash(worker.as_ref());
        lines.push(format!(
            "switched {epoch_no} {job} {run} {} {worker}",
            what.name()
        ));
    }
    for (token, job) in &model.effects {
        lines.push(format!("effect {token} {job}"));
    }
    for job_type in &model.job_types {
        lines.push(format!(
            "lane {job_type} {}",
            model.paused.contains(job_type)
        ));
    }
    lines.push(format!(
        "cluster {} {} {} {} {} {} {} {}",
        model.epoch,
        model.epoch_no,
        gate(model.gate),
        model.opened_at,
        model.here,
        model.swept_at,
        model.unaccepted,
        model.uncovered
    ));
    lines.sort();
    lines
}

/// The same lines from the tables, and lines that must never be there: a job without its one place, or a place in `ready` that
/// cannot be found by the job's id.
pub(crate) const OF_DATABASE: &str = "
SELECT format('job %s %s %s %s %s %s %s', id, job_type, tenant, priority, coalesce(unique_key, '-'), coalesce(max_attempts::text, '-'), ms(created_at)) FROM job
UNION ALL SELECT format('place %s pending %s %s %s ready', id, run, attempts, flags & 133) FROM ready
UNION ALL SELECT format('place %s scheduled %s %s %s later %s %s', id, run, attempts, flags & 133, ms(due), waits_for) FROM later
UNION ALL SELECT format('place %s running %s %s %s lease %s %s %s %s %s %s %s %s', id, run, attempts, flags & 133, token, worker, call, epoch_no, max_attempts,
  coalesce(ms(until)::text, '-'), ms(started_at), flags & 96) FROM lease
UNION ALL SELECT format('place %s %s %s %s %s outcome %s %s %s %s', id, status, run, attempts, flags & 133, coalesce(token::text, '-'), coalesce(worker::text, '-'), epoch_no,
  coalesce(result::text, '-')) FROM outcome
UNION ALL SELECT format('edit %s %s', j.id, coalesce(e.data::text, '-')) FROM job j LEFT JOIN edit e ON e.id = j.id
UNION ALL SELECT format('queue %s %s %s', l.job_type, r.priority, string_agg(r.id::text, ',' ORDER BY r.pos)) FROM ready r JOIN lane l ON l.lane = r.lane GROUP BY l.job_type, r.priority
UNION ALL SELECT format('key %s %s %s %s', job_type, tenant, key, id) FROM key_owner
UNION ALL SELECT format('attempt %s %s %s %s %s', job_id, run, token, outcome, CASE WHEN applied THEN 'true' ELSE 'false' END) FROM attempt
UNION ALL SELECT format('watermark %s %s %s %s %s', tenant, name, value, job_id, epoch_no) FROM watermark
UNION ALL SELECT format('letter %s %s %s %s', job_id, run, attempts, coalesce(review_action, '-')) FROM dead_letter
UNION ALL SELECT format('stop %s %s', id, kind) FROM stop_request
UNION ALL SELECT format('revocation %s %s %s %s', worker, job_id, token, ms(revoked_at)) FROM revocation
UNION ALL SELECT format('worker %s %s %s %s %s %s %s %s %s', w.id, w.status, extract(epoch FROM w.lease_ttl * 1000)::bigint, extract(epoch FROM w.heartbeat * 1000)::bigint,
  CASE WHEN w.admitted THEN 'true' ELSE 'false' END, ms(w.started_at), b.beat, ms(b.beat_at), b.settled) FROM worker w LEFT JOIN beat b ON b.worker = w.id
UNION ALL SELECT format('expected %s %s %s %s', worker, extract(epoch FROM lease_ttl * 1000)::bigint, word(spoken_at IS NOT NULL), word(absent)) FROM expected
UNION ALL SELECT format('switch %s %s %s %s %s %s', epoch_no, word(cause = 'other system'), word(uncovered_until IS NOT NULL), word(decided_at IS NOT NULL),
  word(closed_at IS NOT NULL), word(first_claim_at IS NOT NULL)) FROM switch
UNION ALL SELECT format('switched %s %s %s %s %s', epoch_no, job_id, run, what, coalesce(worker::text, '-')) FROM switch_job
UNION ALL SELECT DISTINCT format('effect %s %s', token, job_id) FROM effect
UNION ALL SELECT format('lane %s %s', job_type, CASE WHEN paused_at IS NULL THEN 'false' ELSE 'true' END) FROM lane
UNION ALL SELECT format('cluster %s %s %s %s %s %s %s %s', c.epoch, c.epoch_no, c.gate, ms(c.opened_at),
  CASE WHEN EXISTS (SELECT FROM here h WHERE h.epoch = c.epoch) THEN 'true' ELSE 'false' END, ms(s.swept_at), word(c.unaccepted), word(c.uncovered)) FROM cluster c, sweep s
UNION ALL SELECT format('not in one place %s', j.id) FROM job j LEFT JOIN jobs_all a ON a.id = j.id GROUP BY j.id HAVING count(a.id) <> 1
UNION ALL SELECT format('requeued without ready %s', q.id) FROM requeued q
  WHERE NOT EXISTS (SELECT FROM ready r WHERE (r.lane, r.priority, r.pos, r.id) = (q.lane, q.priority, q.pos, q.id) AND r.flags & 2 <> 0)
UNION ALL SELECT format('flag 2 without requeued %s', r.id) FROM ready r WHERE r.flags & 2 <> 0 AND NOT EXISTS (SELECT FROM requeued q WHERE q.id = r.id)
UNION ALL SELECT format('beat without worker %s', b.worker) FROM beat b WHERE NOT EXISTS (SELECT FROM worker w WHERE w.id = b.worker)";

/// Milliseconds since 1970, and a truth as Rust writes it, for the lines.
pub(crate) const MS: &str = "CREATE OR REPLACE FUNCTION ms(t timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT round(extract(epoch FROM t) * 1000)::bigint';
CREATE OR REPLACE FUNCTION word(b boolean) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT CASE WHEN b THEN 'true' ELSE 'false' END $$";
