//! The last commits are lost, and what hung on them.

use chaos_tests::{Cluster, Plan, What};

/// Loses commits: enqueues, claims and completions.
fn lose_commits(cluster: &mut Cluster<'_>) {
    cluster.cut_replication();
    cluster.until_more_acknowledged(15);
    cluster.until_more_witnessed(What::End, 15);
    cluster.random.dawdle(800);
    cluster.strike(|primary| primary.kill9().unwrap());
    cluster.random.dawdle(800);
    cluster.promote();
}

/// The new primary does not know that it ever was there.
#[test]
fn a_daemon_registered_in_the_lost_tail() {
    let mut cluster = Cluster::start("a_daemon_registered_in_the_lost_tail", Plan::default());
    let new = cluster.any_daemon();
    cluster.load();
    cluster.kill_daemon(new);
    cluster.cut_replication();
    cluster.start_daemon(new);
    let pid = cluster.daemon(new).pid();
    cluster.lab.wait_for(|| {
        let lines = cluster.lab.witnesses();
        let own = lines.iter().filter(|line| line.parent == pid);
        match own.filter(|line| line.what == What::End).count() {
            0..3 => Err("the new daemon has done nothing yet".to_owned()),
            _ => Ok(()),
        }
    });
    lose_commits(&mut cluster);
    cluster.finish();
}

/// Each effect is there exactly once, for each job that is completed, and only for these.
#[test]
fn effects_in_the_same_database() {
    let plan = Plan {
        handlers: "[handlers.\"effects-*\"]\nexec = { command = {witness}, kill_grace = \"500ms\" }\nretry = { delay = \"1s\" }\n\
                   after_lost_commits = \"rerun\"\n",
        rerun: &["effects"],
        mix: &["effects-1", "effects-3", "effects-10", "ticks-1"],
        ..Plan::default()
    };
    let mut cluster = Cluster::start("effects_in_the_same_database", plan);
    cluster
        .lab
        .run("CREATE TABLE public.effects (job uuid, token uuid)");
    cluster.load();
    cluster.until_more_acknowledged(20);
    lose_commits(&mut cluster);
    let judgement = cluster.finish().judgement;
    let once = "SELECT count(*) FROM (SELECT id FROM tenure.jobs WHERE job_type LIKE 'effects-%' AND status = 'completed') jobs \
                FULL JOIN (SELECT job, count(*) AS rows FROM public.effects GROUP BY job) effects ON job = id \
                WHERE rows IS DISTINCT FROM 1 OR id IS NULL";
    assert_eq!(
        cluster.lab.value(once),
        "0",
        "effects are not there exactly once"
    );
    assert!(!judgement.unwritten.is_empty(), "no completion was lost");
}

/// A completion that is written again brings its follow-up jobs with it, and no second set of them.
#[test]
fn follow_up_jobs_of_lost_completions() {
    let plan = Plan {
        mix: &["parent-1", "parent-2", "ticks-2", "ticks-20"],
        ..Plan::default()
    };
    let mut cluster = Cluster::start("follow_up_jobs_of_lost_completions", plan);
    cluster.load();
    lose_commits(&mut cluster);
    let judgement = cluster.finish().judgement;
    assert!(!judgement.unwritten.is_empty(), "no completion was lost");
    let wrong = "SELECT count(*) FROM (SELECT id, number FROM tenure.jobs, generate_series(1, 2) number WHERE job_type LIKE 'parent-%' AND status = 'completed') parents \
                 FULL JOIN (SELECT (data ->> 'parent')::uuid AS id, (data ->> 'number')::int AS number, count(*) AS jobs FROM tenure.jobs WHERE data ? 'parent' GROUP BY 1, 2) children \
                 USING (id, number) WHERE jobs IS DISTINCT FROM 1";
    assert_eq!(
        cluster.lab.value(wrong),
        "0",
        "follow-up jobs are not there exactly once"
    );
}
