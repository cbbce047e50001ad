//! The `hames` program.

use std::process::ExitCode;

/// Runs begin on one thread and end on another, which the system's allocator takes much longer for: see
/// docs/performance.md.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // This program is also the supervisor of the command trees it starts. Before anything else: see there.
    if let Some(code) = hames::tool::supervise::run_if_requested(std::env::args_os()) {
        return code;
    }
    hames::cli::main()
}
