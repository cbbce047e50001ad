//! A process tree that is hard to end, for tests of everything that has to end it.

use super::support::{marked, until};

/// Forty children and ten grandchildren that have left the session by a double fork. All ignore SIGTERM.
pub(crate) const TREE: &str = "trap '' TERM; i=0
while [ $i -lt 40 ]; do sleep 1000 & i=$((i+1)); done
while [ $i -lt 50 ]; do (setsid sh -c 'sleep 1000 &' &); i=$((i+1)); done
echo planted; wait; sleep 1000";

/// The tree, its shell, and the supervisor.
const TREE_SIZE: usize = 40 + 10 + 1 + 1;

/// Settings of a command `tree` that grows it. The marker is an argument of its shell and has to be the call's id,
/// which all of the tree carries in its environment.
pub(crate) fn tree_config(marker: &str) -> String {
    format!("[commands.tree]\nexecutable = \"sh\"\nargs = [\"-c\", {TREE:?}, {marker:?}]\n")
}

/// Waits until all of it runs.
pub(crate) async fn grown(marker: &str) {
    let is_sleeper = |pid: &i32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|arguments| arguments == b"sleep\x001000\0")
    };
    until("the whole tree runs", || {
        let tree = marked(marker);
        tree.len() == TREE_SIZE && tree.iter().filter(|pid| is_sleeper(pid)).count() == 50
    })
    .await;
}
