//! Load on a real server, beside a floor: `make bench`.
//!
//! The floor is a bare handler that makes the same calls of the model and the same durable commits through a
//! group-commit writer, and nothing else. It runs on the same machine in the same minute, with the same allocator, so
//! what is judged is a ratio. This program is the load, the model and, as `floor`, the floor; hames is the release
//! binary with its default settings. All of them share the machine: at full load it is the sum of their work that
//! decides the rate.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a benchmark that cannot go on stops")]
#![expect(clippy::disallowed_methods, reason = "tasks end with the program, and what is measured is real time")]

mod client;
mod figure;
mod floor;
mod model;
mod scenario;
mod server;

use std::process::ExitCode;

use figure::Report;
use model::Model;
use scenario::SCENARIOS;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const USAGE: &str = "usage: load [SCENARIO]...   (none: all of them; `list` names them)";

fn main() -> ExitCode {
    // `cargo bench` adds `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["floor", database, model] => {
            runtime.block_on(floor::serve(database, model));
            ExitCode::SUCCESS
        }
        ["list"] => {
            SCENARIOS.iter().for_each(|scenario| println!("{:12} {}", scenario.name, scenario.about));
            ExitCode::SUCCESS
        }
        ref names => {
            let unknown = names.iter().find(|name| SCENARIOS.iter().all(|scenario| scenario.name != **name));
            if let Some(unknown) = unknown {
                eprintln!("no scenario `{unknown}`\n{USAGE}");
                return ExitCode::from(2);
            }
            runtime.block_on(measure(names))
        }
    }
}

/// Runs the scenarios one after the other and says which bars hold.
async fn measure(names: &[&str]) -> ExitCode {
    let model = Model::start().await;
    let mut report = Report::default();
    for scenario in SCENARIOS.iter().filter(|scenario| names.is_empty() || names.contains(&scenario.name)) {
        println!("\n{}: {}", scenario.name, scenario.about);
        (scenario.run)(&model, &mut report).await;
    }
    report.close()
}
