//! The `hames` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = hames::tool::supervise::run_if_requested(std::env::args_os()) {
        return code;
    }
    ExitCode::SUCCESS
}
