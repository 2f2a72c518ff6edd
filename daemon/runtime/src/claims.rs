//! Claims: one call for each pool that has free slots, or two where some of its handlers ask for replicated claims.

use std::collections::BTreeMap;
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
    /// The free slots of that pool.
    slots: i32,
    request: ClaimRequest,
    /// Of each lane that is asked for.
    cares: Vec<(Lane, Care)>,
}

/// What the lanes of one call have in common: the section, if its handler has little room, and whether claims are replicated.
type Part = (Option<Arc<str>>, bool);

/// The calls for these asks: one for each pool, and one more for each handler of it with less room than the pool has slots, and for those that
/// ask for replicated claims. The slots of a pool are shared by its calls, in an order left to chance.
pub(crate) fn wants(lanes: &Lanes, marks: &Marks, asks: &[Ask]) -> Vec<Want> {
    let mut wants = Vec::new();
    for ask in asks {
        let care = |lane: &Lane| {
            lanes
                .route(*lane)
                .map_or(Care::default(), |route| route.care)
        };
        let mut parts: BTreeMap<Part, (Vec<Lane>, i32)> = BTreeMap::new();
        for lane in &ask.lanes {
            let room = lanes
                .section_room(*lane)
                .filter(|(_, room)| *room < ask.total);
            let most = room.as_ref().map_or(ask.total, |(_, room)| *room);
            let part = (room.map(|(section, _)| section), care(lane).replicated);
            parts
                .entry(part)
                .or_insert((Vec::new(), most))
                .0
                .push(*lane);
        }
        let mut parts: Vec<_> = parts.into_iter().map(|part| (random(), part)).collect();
        parts.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        for (_, ((_, replicated), (of, total))) in parts {
            let durability = replicated.then_some(Durability::Replicated);
            let attempts = |route: &Route| route.retry.max_attempts();
            wants.push(Want {
                pool: ask.pool,
                slots: ask.total,
                cares: of.iter().map(|lane| (*lane, care(lane))).collect(),
                request: ClaimRequest {
                    max_attempts: of
                        .iter()
                        .map(|lane| lanes.route(*lane).map_or(1, attempts))
                        .collect(),
                    marks: marks.of(&of),
                    limits: of.iter().map(|lane| lanes.limit(*lane, total)).collect(),
                    total,
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
        // What of the pool's slots is left, and no more than this call is for.
        want.request.total = want.request.total.min(want.slots - taken.1);
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
