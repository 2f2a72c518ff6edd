//! Jobs come in.

use super::{Asked, Database, Gate, Job, Moment, Place, Refused, Waits};
use crate::ids::{JobId, Run};
use std::collections::BTreeMap;

/// A job to put in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewJob {
    /// Its own id; `None`: one is made.
    pub id: Option<JobId>,
    /// Its job type.
    pub job_type: String,
    /// Its tenant.
    pub tenant: String,
    /// Lower numbers run first.
    pub priority: i32,
    /// Not before; `None`: at once.
    pub run_at: Option<Moment>,
    /// Admits one live job of this type and tenant.
    pub unique_key: Option<String>,
    /// `None`: as the claimer says.
    pub max_attempts: Option<i32>,
    /// The series of jobs that it belongs to.
    pub watermark: Option<String>,
}

impl NewJob {
    fn is_wrong(&self) -> bool {
        let key = self.unique_key.as_deref();
        self.job_type.is_empty()
            || self.job_type.contains('*')
            || key == Some("")
            || self.max_attempts.is_some_and(|max| max < 1)
    }
}

impl Database {
    /// Puts jobs in, one after the other, and says under which id each is known: its own, or that of the live job that owns
    /// its unique key. A known id, also that of an ended job, changes nothing. An id that stands twice in one batch is one
    /// enqueue, the first.
    ///
    /// # Errors
    /// [`Refused::Input`] when one of them is wrong.
    pub fn enqueue(&mut self, now: Moment, new: &[NewJob]) -> Result<Vec<JobId>, Refused> {
        if new.iter().any(NewJob::is_wrong) {
            return Err(Refused::Input);
        }
        let mut given = BTreeMap::new();
        let mut ids = Vec::new();
        for job in new {
            self.job_types.insert(job.job_type.clone());
            let pos = self.next_pos();
            let id = match job.id {
                Some(id) => *given
                    .entry(id)
                    .or_insert_with(|| self.put(now, id, job, pos)),
                None => {
                    let id = JobId(self.name());
                    self.put(now, id, job, pos)
                }
            };
            ids.push(id);
        }
        Ok(ids)
    }

    /// The jobs that came in with completions are ready together.
    ///
    /// # Errors
    /// [`Refused::Input`] when one of them is wrong.
    pub(super) fn enqueue_together(&mut self, now: Moment, new: &[NewJob]) -> Result<(), Refused> {
        let first = (self.last_pos + 1, 0);
        for id in self.enqueue(now, new)? {
            if let Some(Place::Ready { pos }) = self.jobs.get_mut(&id).map(|job| &mut job.place) {
                *pos = (*pos).min(first);
            }
        }
        Ok(())
    }

    fn put(&mut self, now: Moment, id: JobId, new: &NewJob, pos: (u64, u64)) -> JobId {
        if self.jobs.contains_key(&id) {
            return id;
        }
        let asked = Asked {
            job_type: new.job_type.clone(),
            tenant: new.tenant.clone(),
            priority: new.priority,
            unique_key: new.unique_key.clone(),
            max_attempts: new.max_attempts,
            watermark: new.watermark.clone(),
            created_at: now,
        };
        if let Some(key) = asked.key() {
            let owner = *self.keys.entry(key).or_insert(id);
            if owner != id {
                return owner;
            }
        }
        let place = match new.run_at {
            Some(due) if due > now => Place::Later {
                due,
                waits: Waits::Time,
            },
            _ => Place::Ready { pos },
        };
        let keyed = asked.unique_key.is_some();
        let repeated = new.id.is_some() && !(self.here && self.gate == Gate::Open);
        let job = Job {
            asked,
            run: Run(0),
            attempts: 0,
            first_pos: matches!(place, Place::Ready { .. }).then_some(pos.0),
            place,
            edit: None,
            keyed,
            repeated,
            alone: false,
        };
        self.jobs.insert(id, job);
        id
    }
}
