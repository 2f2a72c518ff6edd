//! As whom handlers run and what they may use: `user`, `group`, `nice`, `private_tmp` and `limits` of `exec` and `process`.

use std::fmt;

use nix::unistd::{Gid, Group, Uid, User, getegid, geteuid, getgrouplist};
use serde::de::{Deserialize, Deserializer, Error, Visitor};
use tenure_runtime::settings::{Account, Confinement, ProcessLimits};

use super::resolve::Check;
use super::value::{Count, Size, Span};

#[derive(Debug, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct LimitsSection {
    pub(crate) cpu: Option<Span>,
    pub(crate) memory: Option<Size>,
    pub(crate) processes: Option<Count>,
    pub(crate) open_files: Option<Count>,
    pub(crate) file_size: Option<Size>,
    pub(crate) output: Option<Size>,
}

/// The keys of a handler that this file is about.
pub(crate) struct Keys<'a> {
    /// Where they stand: `handlers`, the name, `exec` or `process`.
    pub(crate) section: [&'a str; 3],
    pub(crate) user: Option<&'a Name>,
    pub(crate) group: Option<&'a Name>,
    pub(crate) nice: Option<Nice>,
    pub(crate) private_tmp: bool,
    pub(crate) limits: &'a LimitsSection,
}

impl Keys<'_> {
    /// Reads them; what is wrong goes to `check`.
    pub(crate) fn resolve(&self, check: &mut Check<'_>) -> Confinement {
        let [handlers, name, kind] = self.section;
        let limits = self.limits;
        if limits.output.is_some() && kind != "exec" {
            let what = "is for exec only: a process goes on from job to job; worker.max_result limits each of its lines";
            check.refuse(&[handlers, name, kind, "limits", "output"], what);
        }
        if limits.cpu.is_some_and(|cpu| cpu.0.as_secs() == 0) {
            let what = "at least a second is expected, such as \"60s\"";
            check.refuse(&[handlers, name, kind, "limits", "cpu"], what);
        }
        let account = account(self.user, self.group).unwrap_or_else(|(key, why)| {
            check.refuse(&[handlers, name, kind, key], why);
            None
        });
        if self.nice.is_some_and(|nice| nice.0 < 0) && !geteuid().is_root() {
            let what = "below 0 takes root; from 0 to 19 is expected";
            check.refuse(&[handlers, name, kind, "nice"], what);
        }
        let bytes = |size: Option<Size>| size.map(|size| u64::try_from(size.0).unwrap_or(u64::MAX));
        let count = |count: Option<Count>| count.map(|count| u64::from(count.0));
        Confinement {
            account,
            nice: self.nice.map(|nice| nice.0),
            private_tmp: self.private_tmp,
            limits: ProcessLimits {
                cpu: limits.cpu.map(|cpu| cpu.0),
                memory: bytes(limits.memory),
                processes: count(limits.processes),
                open_files: count(limits.open_files),
                file_size: bytes(limits.file_size),
                output: bytes(limits.output),
            },
        }
    }
}

/// Whom a handler runs as; `None`: as the daemon does. On an error the key that is wrong.
fn account(
    user: Option<&Name>,
    group: Option<&Name>,
) -> Result<Option<Account>, (&'static str, String)> {
    if user.is_none() && group.is_none() {
        return Ok(None);
    }
    let user = match user {
        None => Found::of(User::from_uid(geteuid()).ok().flatten(), geteuid()),
        Some(Name::Number(number)) => {
            let id = Uid::from_raw(*number);
            Found::of(User::from_uid(id).ok().flatten(), id)
        }
        Some(Name::Text(name)) => match User::from_name(name) {
            Ok(Some(user)) => Found {
                id: user.uid,
                user: Some(user),
            },
            Ok(None) => {
                return Err((
                    "user",
                    format!(
                        "there is no user {name:?} on this host; create it (useradd --system {name}) or give a number"
                    ),
                ));
            }
            Err(error) => {
                return Err((
                    "user",
                    format!("the user {name:?} cannot be looked up: {error}"),
                ));
            }
        },
    };
    let group = match group {
        Some(Name::Number(number)) => Gid::from_raw(*number),
        Some(Name::Text(name)) => match Group::from_name(name) {
            Ok(Some(group)) => group.gid,
            Ok(None) => {
                return Err((
                    "group",
                    format!(
                        "there is no group {name:?} on this host; create it (groupadd --system {name}) or give a number"
                    ),
                ));
            }
            Err(error) => {
                return Err((
                    "group",
                    format!("the group {name:?} cannot be looked up: {error}"),
                ));
            }
        },
        None => match &user.user {
            Some(entry) => entry.gid,
            None => {
                return Err((
                    "user",
                    format!(
                        "the user {} has no entry in the host's list, so its group is not known; add `group`",
                        user.id
                    ),
                ));
            }
        },
    };
    if !geteuid().is_root() {
        // Who is already that needs no rights to become it.
        if (user.id, group) == (geteuid(), getegid()) {
            return Ok(None);
        }
        let key = if user.id == geteuid() {
            "group"
        } else {
            "user"
        };
        let own = User::from_uid(geteuid())
            .ok()
            .flatten()
            .map_or_else(|| geteuid().to_string(), |user| user.name);
        return Err((
            key,
            format!(
                "takes root: this daemon runs as {own} and cannot become another; start it as root, or leave this out"
            ),
        ));
    }
    let groups = user
        .user
        .as_ref()
        .and_then(|entry| {
            let name = std::ffi::CString::new(entry.name.as_str()).ok()?;
            getgrouplist(&name, group).ok()
        })
        .unwrap_or_else(|| vec![group]);
    Ok(Some(Account {
        name: user
            .user
            .map_or_else(|| user.id.to_string(), |entry| entry.name),
        user: user.id.as_raw(),
        group: group.as_raw(),
        groups: groups.into_iter().map(Gid::as_raw).collect(),
    }))
}

/// A user, who need not have an entry in the host's list.
struct Found {
    id: Uid,
    user: Option<User>,
}

impl Found {
    fn of(user: Option<User>, id: Uid) -> Self {
        Self { id, user }
    }
}

/// A user or group, by name or number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Name {
    Text(String),
    Number(u32),
}

/// How a process yields to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Nice(pub(crate) i32);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl Visitor<'_> for Either {
            type Value = Name;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name such as \"reports\", or a number")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Name, E> {
                Ok(text
                    .parse()
                    .map_or_else(|_| Name::Text(text.to_owned()), Name::Number))
            }
            fn visit_i64<E: Error>(self, number: i64) -> Result<Name, E> {
                let other = || {
                    E::custom(format!(
                        "found {number}: a number from 0 to 4294967294 is expected"
                    ))
                };
                // The last number means "leave it".
                u32::try_from(number)
                    .ok()
                    .filter(|number| *number != u32::MAX)
                    .map(Name::Number)
                    .ok_or_else(other)
            }
            fn visit_u64<E: Error>(self, number: u64) -> Result<Name, E> {
                self.visit_i64(i64::try_from(number).unwrap_or(i64::MAX))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

impl<'de> Deserialize<'de> for Nice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let number = i32::deserialize(deserializer)?;
        if (-20..=19).contains(&number) {
            return Ok(Self(number));
        }
        Err(D::Error::custom(format!(
            "found {number}: from -20, which takes root, to 19, which yields to everybody, is expected"
        )))
    }
}
