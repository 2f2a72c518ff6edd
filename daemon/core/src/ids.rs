//! Names of things. Each is a type of its own, so that no two can be confused.

use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$inner> for $name {
            fn from(inner: $inner) -> Self {
                Self(inner)
            }
        }
    };
}

id! {
    /// One piece of work (UUIDv7).
    JobId(Uuid)
}
id! {
    /// One running daemon. Random, and new at each registration after the first was lost.
    WorkerId(Uuid)
}
id! {
    /// The fencing token of one lease. Random: only equality has a meaning, its order has none.
    Token(Uuid)
}
id! {
    /// What the database is called since its last switch, crash or restore. Random.
    Epoch(Uuid)
}
id! {
    /// How many times a job was claimed or a person acted on it. Never reset.
    Run(i32)
}
id! {
    /// Number of one claim call of a worker, rising from 1.
    Call(i64)
}
id! {
    /// Number of one heartbeat of a worker, rising from 1.
    Beat(i64)
}
id! {
    /// A shard and a job type: what a claim asks for.
    Lane(i32)
}

impl Beat {
    /// The beat after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}
