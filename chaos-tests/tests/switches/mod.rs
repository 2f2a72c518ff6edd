//! The primary changes. Each scenario is played by `TENURE_CHAOS_SEED`, is judged by what the handlers and producers wrote, and
//! reports its numbers (`scripts/failover-table`). A scenario's name is that of its test.

mod clocks;
mod commits;
mod crashes;
mod decisions;
mod networks;
mod partitions;
mod planned;
mod rivals;
