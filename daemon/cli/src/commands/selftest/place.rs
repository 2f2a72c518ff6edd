//! Where a self-test happens: which servers, in which database and schema.

use std::time::Duration;

use tenure_runtime::settings::{Database, Pooler, Secret};
use tenure_store::error::StoreError;
use tenure_store::migrate::Migrator;
use tenure_store::session::{Session, Target};

use super::own::Own;
use super::theirs::{self, Injection};
use crate::arguments::SelftestArguments;
use crate::commands::Context;
use crate::config;
use crate::output::{Exit, Failure};

/// Everything happens in a schema of its own.
pub(super) const SCHEMA: &str = "tenure_selftest";

/// Where it happens.
pub(super) enum Servers {
    Own(Box<Own>),
    Theirs(Vec<Injection>),
}

/// Starts servers, or reads where the user's are.
pub(super) fn servers(
    context: &Context,
    arguments: &SelftestArguments,
) -> Result<(Servers, Database), Failure> {
    if arguments.this_cluster {
        let common = &context.common;
        let database = config::database(common.config.as_deref(), &common.set)?;
        return Ok((Servers::Theirs(theirs::injections(arguments)), database));
    }
    context.note("Starting three PostgreSQL servers.");
    let own = Own::start()?;
    context.note(&format!(
        "PostgreSQL {} runs, with two standbys.",
        own.version()
    ));
    let database = Database {
        url: Secret::new(own.url()),
        direct_url: None,
        password: None,
        schema: SCHEMA.to_owned(),
        pool_size: 2,
        pooler: Pooler::None,
        connect_timeout: Duration::from_secs(5),
        statement_timeout: Duration::from_secs(10),
    };
    Ok((Servers::Own(Box::new(own)), database))
}

/// How the daemons find the database.
pub(super) fn environment(database: &Database) -> Vec<(&'static str, String)> {
    let mut environment = vec![("TENURE_DATABASE__URL", database.url.expose().to_owned())];
    if let Some(direct) = &database.direct_url {
        environment.push(("TENURE_DATABASE__DIRECT_URL", direct.expose().to_owned()));
    }
    if let Some(password) = &database.password {
        environment.push(("TENURE_DATABASE__PASSWORD", password.expose().to_owned()));
    }
    if database.pooler == Pooler::Transaction {
        environment.push(("TENURE_DATABASE__POOLER", "transaction".to_owned()));
    }
    environment
}

/// Faults hit everything on these servers, so no installation of tenure in this database may hold jobs.
pub(super) async fn refuse_what_matters(target: &Target) -> Result<(), Failure> {
    let (session, _) = Session::open(target).await?;
    let sql = format!(
        "SELECT n.nspname::text AS schema FROM pg_catalog.pg_namespace n WHERE n.nspname <> '{SCHEMA}' AND 4 = (\
           SELECT count(*) FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relname IN ('job', 'lease', 'outcome', 'migration'))"
    );
    for row in session.rows("selftest", &sql, &[]).await? {
        let schema: String = row.try_get("schema").map_err(StoreError::from)?;
        let quoted = schema.replace('"', "\"\"");
        let holds = format!(
            "(SELECT FROM \"{quoted}\".job LIMIT 1) UNION ALL (SELECT FROM \"{quoted}\".worker WHERE status = 'live' LIMIT 1)"
        );
        if !session.rows("selftest", &holds, &[]).await?.is_empty() {
            return Err(Failure::new(
                Exit::Refused,
                "holds_jobs",
                format!("this database holds jobs or workers of others, in the schema {schema}"),
            )
            .hint("a self-test kills servers: give it a cluster on which nothing else runs"));
        }
    }
    Ok(())
}

pub(super) async fn make_schema(target: &Target) -> Result<(), Failure> {
    let (session, _) = Session::open(target).await?;
    let there = format!(
        "SELECT FROM pg_catalog.pg_tables WHERE schemaname = '{SCHEMA}' AND tablename = 'beat'"
    );
    if !session.rows("selftest", &there, &[]).await?.is_empty() {
        let lives = "SELECT FROM %beat b JOIN %worker w ON w.id = b.worker WHERE w.status = 'live' AND b.beat_at > clock_timestamp() - interval '30 s'";
        if !session.rows("selftest", lives, &[]).await?.is_empty() {
            let busy = "another self-test works in this database, or was killed less than half a minute ago";
            return Err(Failure::new(Exit::Refused, "busy", busy));
        }
    }
    // What a self-test left that failed.
    session
        .batch(
            "selftest",
            &format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE"),
        )
        .await?;
    Migrator::new(&session, SCHEMA).up().await?;
    Ok(())
}

pub(super) async fn drop_schema(target: &Target) -> Result<(), Failure> {
    let (session, _) = Session::open(target).await?;
    session
        .batch("selftest", &format!("DROP SCHEMA {SCHEMA} CASCADE"))
        .await?;
    Ok(())
}
