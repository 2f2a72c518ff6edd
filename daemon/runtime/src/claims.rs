//! Claims: one call for each pool that has free slots, or two where some of its handlers ask for replicated claims.

use std::sync::Arc;

use tenure_core::claim::Ask;
use tenure_core::ids::{Call, Lane};
use tenure_core::lease::event::Event;
use tenure_store::claim::{ClaimRequest, Claimed, Durability};
use tenure_store::error::StoreError;
use tenure_store::session::Db;

use crate::dispatch::not_a_member;
use crate::held::Held;
use crate::lanes::{Care, Lanes, Route};
use crate::leases::Leases;
use crate::marks::Marks;
use crate::tasks::random;

/// What the claims for all pools have brought.
#[derive(Default)]
pub(crate) struct ClaimAnswer {
    pub(crate) jobs: Vec<(Call, Vec<Arc<Held>>)>,
    /// Some pool got as many as it asked for.
    pub(crate) full: bool,
    /// Why the last one failed.
    pub(crate) failed: Option<StoreError>,
}

/// One call.
pub(crate) struct Want {
    /// For which pool.
    pool: usize,
    request: ClaimRequest,
    /// Of each lane that is asked for.
    cares: Vec<(Lane, Care)>,
}

/// The calls for these asks. The slots of a pool are shared by its two calls, if there are two, in an order left to chance.
pub(crate) fn wants(lanes: &Lanes, marks: &Marks, asks: &[Ask]) -> Vec<Want> {
    let mut wants = Vec::new();
    for ask in asks {
        let care = |lane: &Lane| {
            lanes
                .route(*lane)
                .map_or(Care::default(), |route| route.care)
        };
        let (careful, plain): (Vec<Lane>, Vec<Lane>) =
            ask.lanes.iter().partition(|lane| care(lane).replicated);
        let mut parts = [(plain, None), (careful, Some(Durability::Replicated))];
        if random() < 0.5 {
            parts.reverse();
        }
        for (of, durability) in parts.into_iter().filter(|(of, _)| !of.is_empty()) {
            let attempts = |route: &Route| route.retry.max_attempts();
            wants.push(Want {
                pool: ask.pool,
                cares: of.iter().map(|lane| (*lane, care(lane))).collect(),
                request: ClaimRequest {
                    max_attempts: of
                        .iter()
                        .map(|lane| lanes.route(*lane).map_or(1, attempts))
                        .collect(),
                    marks: marks.of(&of),
                    limits: of
                        .iter()
                        .map(|lane| lanes.limit(*lane, ask.total))
                        .collect(),
                    total: ask.total,
                    rerun: of.iter().copied().filter(|lane| care(lane).rerun).collect(),
                    durability,
                    lanes: of,
                },
            });
        }
    }
    wants
}

/// Makes the calls one after the other, until one fails.
pub(crate) async fn claim(db: &Db, leases: &Leases, wants: Vec<Want>) -> ClaimAnswer {
    let mut answer = ClaimAnswer::default();
    let mut taken = (0, 0);
    for mut want in wants {
        if taken.0 != want.pool {
            taken = (want.pool, 0);
        }
        want.request.total -= taken.1;
        if want.request.total <= 0 {
            continue;
        }
        match claim_one(db, leases, &want, &mut answer).await {
            Ok(count) => taken.1 += count,
            Err(error) => {
                answer.failed = Some(error);
                break;
            }
        }
    }
    answer
}

/// Whether some lane brought as many as was asked of it although others might have brought more.
fn fills_a_lane(request: &ClaimRequest, claimed: &[Claimed]) -> bool {
    let of = |lane| claimed.iter().filter(|job| job.lane == lane).count();
    request
        .lanes
        .iter()
        .zip(&request.limits)
        .any(|(lane, limit)| {
            *limit < request.total && usize::try_from(*limit).is_ok_and(|limit| of(*lane) >= limit)
        })
}

async fn claim_one(
    db: &Db,
    leases: &Leases,
    want: &Want,
    answer: &mut ClaimAnswer,
) -> Result<i32, StoreError> {
    // A call is numbered only when it is sent: what is numbered counts as under way.
    let (careful, pooled);
    let session = if want.request.durability.is_some() {
        careful = db.careful().await?;
        &*careful
    } else {
        pooled = db.session().await?;
        &pooled
    };
    let (call, worker, epoch) = leases.claim().ok_or_else(not_a_member)?;
    let epoch_no = leases.epoch_no();
    match session.claim(worker, epoch, call, &want.request).await {
        Ok(claimed) => {
            let count = i32::try_from(claimed.len()).unwrap_or(i32::MAX);
            answer.full |= count >= want.request.total || fills_a_lane(&want.request, &claimed);
            let care = |lane| {
                let found = want.cares.iter().find(|(of, _)| *of == lane);
                found.map_or(Care::default(), |(_, care)| *care)
            };
            let held = |job: Claimed| {
                Arc::new(Held {
                    care: care(job.lane),
                    job,
                    call,
                    epoch_no,
                })
            };
            answer
                .jobs
                .push((call, claimed.into_iter().map(held).collect()));
            Ok(count)
        }
        Err(error) => {
            leases.on(Event::ClaimGivenUp { call });
            leases.failed(worker, epoch, &error);
            Err(error)
        }
    }
}
