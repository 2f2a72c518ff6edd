//! The facts behind `tenure job explain`, and a job's history: two statements, each of one moment.

use serde::Serialize;
use tenure_core::explain::Facts;
use tenure_core::pattern::Pattern;
use tokio_postgres::types::Type;
use uuid::Uuid;

use crate::error::StoreError;
use crate::look::{missing, time_text as at};
use crate::session::Session;
use crate::value::RawJson;

/// Something that happened to a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Happened {
    /// When, RFC 3339.
    pub at: String,
    /// What.
    pub what: String,
}

fn facts_sql() -> String {
    format!(
        "WITH j AS (SELECT * FROM %job WHERE id = $1),
         place AS (
           SELECT r.id, r.lane, r.priority, r.pos, r.flags, r.ready_at FROM j JOIN %ready r ON r.lane = j.lane AND r.priority = j.priority AND r.pos = j.pos AND r.id = j.id
           UNION ALL SELECT r.id, r.lane, r.priority, r.pos, r.flags, r.ready_at FROM j JOIN %requeued q ON q.id = j.id JOIN %ready r ON r.lane = q.lane AND r.priority = q.priority AND r.pos = q.pos AND r.id = q.id)
         SELECT jsonb_strip_nulls(jsonb_build_object(
           'job_type', j.job_type, 'status', a.status, 'error', a.last_error,
           'waits_for', l.waits_for, 'due', {due}, 'is_due', coalesce(l.due <= now(), false),
           'ahead', (SELECT count(*) FROM (SELECT FROM %ready r WHERE r.lane = p.lane AND (r.priority, r.pos) < (p.priority, p.pos) LIMIT {most}) x),
           'ready_at', {ready_at}, 'alone', coalesce(p.flags, l.flags, s.flags, 0) & 128 <> 0,
           'waits_for_window', coalesce(p.pos <= c.mark OR p.flags & 17 <> 0, l.waits_for = 'window', false),
           'parents', coalesce((SELECT jsonb_agg(jsonb_build_array(d.depends_on_job_id, (SELECT x.status FROM %jobs_all x WHERE x.id = d.depends_on_job_id)))
             FROM %job_dependencies d WHERE d.job_id = j.id AND NOT EXISTS (SELECT FROM %outcome o WHERE o.id = d.depends_on_job_id AND o.status = 'completed')), '[]'),
           'holder', CASE WHEN s.id IS NOT NULL THEN jsonb_build_object('name', coalesce(w.name, s.worker::text), 'status', coalesce(w.status, 'unknown'),
             'since', {since}, 'last_heartbeat', {beat_at}, 'lease_ttl', w.lease_ttl::text, 'until', {until}) END,
           'stop', CASE WHEN q.id IS NOT NULL THEN jsonb_build_object('kind', q.kind, 'by', q.requested_by, 'at', {asked}, 'reason', q.reason) END,
           'dead_letter', (SELECT d.id FROM %dead_letter d WHERE d.job_id = j.id AND d.reviewed_at IS NULL ORDER BY d.failed_at DESC LIMIT 1),
           'paused', CASE WHEN lane.paused_at IS NOT NULL THEN jsonb_build_array({paused_at}, lane.paused_by) END,
           'gate', CASE WHEN EXISTS (SELECT FROM %here h WHERE h.epoch = c.epoch) THEN c.gate ELSE 'lost' END,
           'hold_reason', nullif(%hold_reason(c), ''),
           'waited_for', coalesce((SELECT jsonb_agg(coalesce(x.name, e.worker::text)) FROM %expected e LEFT JOIN %worker x ON x.id = e.worker WHERE e.spoken_at IS NULL), '[]'),
           'workers', coalesce((SELECT jsonb_agg(jsonb_build_object('name', x.name, 'status', x.status, 'job_types', x.job_types, 'concurrency', x.concurrency,
             'in_flight', b.in_flight, 'admitted', x.admitted)) FROM %worker x JOIN %beat b ON b.worker = x.id WHERE x.status IN ('live', 'draining')), '[]'))) AS facts
         FROM j JOIN %jobs_all a ON a.id = j.id CROSS JOIN %cluster c JOIN %lane lane ON lane.lane = j.lane
           LEFT JOIN place p ON p.id = j.id LEFT JOIN %later l ON l.id = j.id LEFT JOIN %lease s ON s.id = j.id
           LEFT JOIN %worker w ON w.id = s.worker LEFT JOIN %beat b ON b.worker = s.worker LEFT JOIN %stop_request q ON q.id = j.id",
        due = at("l.due"),
        ready_at = at("p.ready_at"),
        since = at("s.started_at"),
        beat_at = at("b.beat_at"),
        until = at("s.until"),
        asked = at("q.requested_at"),
        paused_at = at("lane.paused_at"),
        most = tenure_core::explain::MOST_AHEAD,
    )
}

fn history_sql() -> String {
    let by = |worker: &str| {
        format!(
            "coalesce(' by worker ' || (SELECT w.name FROM %worker w WHERE w.id = {worker}), '')"
        )
    };
    format!(
        "SELECT {at}, what FROM (
           SELECT j.created_at AS at, 'put in' || CASE WHEN j.run_at > j.created_at THEN ', to run at ' || {run_at} ELSE '' END AS what FROM %job j WHERE j.id = $1
           UNION ALL SELECT a.finished_at, CASE WHEN a.applied THEN coalesce('attempt ' || a.attempt || ' ', '') || a.outcome ELSE a.outcome || ' was said too late and changed nothing' END
             || {by_attempt} || coalesce(', after ' || round(extract(epoch FROM a.finished_at - a.started_at)::numeric, 3) || ' s', '') || coalesce(': ' || a.error, '')
             FROM %attempt a WHERE a.job_id = $1
           UNION ALL SELECT o.finished_at, o.status || {by_outcome} || coalesce(', after ' || round(extract(epoch FROM o.finished_at - o.started_at)::numeric, 3) || ' s', '') || coalesce(': ' || o.error, '')
             FROM %outcome o WHERE o.id = $1
           UNION ALL SELECT l.started_at, 'attempt ' || l.attempts || ' began' || {by_lease} FROM %lease l WHERE l.id = $1
           UNION ALL SELECT d.reviewed_at, 'dead letter reviewed by ' || d.reviewed_by || ': ' || d.review_action || coalesce(' (' || d.review_note || ')', '') FROM %dead_letter d
             WHERE d.job_id = $1 AND d.reviewed_at IS NOT NULL
           UNION ALL SELECT e.edited_at, 'data edited by ' || e.edited_by FROM %edit e WHERE e.id = $1
           UNION ALL SELECT s.opened_at, 'switch ' || s.epoch_no || ' (' || s.cause || '): ' || replace(k.what, '_', ' ') FROM %switch_job k JOIN %switch s ON s.epoch_no = k.epoch_no
             WHERE k.job_id = $1
         ) x ORDER BY x.at",
        at = at("at"),
        run_at = at("j.run_at"),
        by_attempt = by("a.worker"),
        by_outcome = by("o.worker"),
        by_lease = by("l.worker"),
    )
}

impl Session {
    /// What the database shows of a job and of what it depends on.
    ///
    /// # Errors
    /// `Refused` (TN005) when there is no such job.
    pub async fn job_facts(&self, job: Uuid) -> Result<Facts, StoreError> {
        let rows = self
            .rows("explain", &facts_sql(), &[(&job, Type::UUID)])
            .await?;
        let Some(row) = rows.first() else {
            return Err(missing("job", job));
        };
        let facts: RawJson = row.try_get("facts")?;
        let mut facts: Facts = serde_json::from_str(&facts.0)
            .map_err(|error| StoreError::Failed(error.to_string()))?;
        let job_type = facts.job_type.clone();
        let takes = |pattern: &String| Pattern::new(pattern).is_ok_and(|it| it.matches(&job_type));
        facts
            .workers
            .retain(|worker| worker.job_types.iter().any(takes));
        Ok(facts)
    }

    /// What happened to a job, the first first.
    ///
    /// # Errors
    /// When the database does not answer.
    pub async fn job_history(&self, job: Uuid) -> Result<Vec<Happened>, StoreError> {
        let rows = self
            .rows("explain", &history_sql(), &[(&job, Type::UUID)])
            .await?;
        let happened = |row: &tokio_postgres::Row| {
            Ok(Happened {
                at: row.try_get(0)?,
                what: row.try_get(1)?,
            })
        };
        rows.iter().map(happened).collect()
    }
}
