//! The command line: what can be asked for. `exit` has the exit code of each end.

mod check;
mod demo;
mod exit;
mod feed;
mod follow;
mod health;
mod output;
mod remote;
mod render;
mod run;
mod serve;
mod tail;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};

use crate::config::{Config, Env, LogConfig, TelemetryConfig};
use crate::shutdown::Signals;
use crate::telemetry::{FLUSH, Metrics, Telemetry};
use crate::time::{Clock as _, Ids, SystemClock};
use crate::tool::supervise;
use exit::{Code, Exit};

/// Executes LLM agents: durable runs, resumable streams, tools under control.
#[derive(Debug, Parser)]
#[command(version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the HTTP interface until SIGINT or SIGTERM.
    Serve(serve::ServeArgs),
    /// Execute one run and show what happens.
    Run(Box<run::RunArgs>),
    /// Follow the events of a run.
    Tail(tail::TailArgs),
    /// Check the settings and print every problem.
    Check(ConfigArgs),
    /// Ask a server whether it accepts runs; exits with 0 when it does, else with 1.
    Health(health::HealthArgs),
    /// Print the description of the HTTP interface, openapi.yaml.
    Openapi,
}

/// Where the settings are.
#[derive(Debug, Args)]
struct ConfigArgs {
    /// The settings file; without one there is a demo agent, and one for OPENAI_API_KEY if it is set.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl ConfigArgs {
    /// A file that looks like it is meant is not read without being named; to say nothing would leave that to be found
    /// out.
    fn tell_of_unused_file(&self, advice: &str) {
        if self.config.is_none() && Path::new(SETTINGS).exists() {
            eprintln!("settings: built in; ./{SETTINGS} is not used{advice}");
        }
    }
}

/// The usual name of a settings file.
const SETTINGS: &str = "hames.toml";

/// What to do about an unused file.
const GIVE_CONFIG: &str = ", give --config hames.toml";

/// Runs the program.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match start(cli) {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("hames: {}", output::told(&error));
            Exit::Code(Code::Failed).into()
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<Exit> {
    // Commands of agents run as the same user: they must not read keys out of this process.
    supervise::hide_from_other_processes().context("this process cannot be hidden from the commands it starts")?;
    let env = environment();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let exit = runtime.block_on(async {
        match cli.command {
            Command::Serve(args) => serve::serve(args, &env, Signals::from_system()?).await,
            Command::Run(args) => run::run(*args, &env, Signals::from_system()?).await,
            Command::Tail(args) => tail::tail(args, Signals::from_system()?).await,
            Command::Check(args) => {
                args.tell_of_unused_file(GIVE_CONFIG);
                check::check(&args, &env, &mut std::io::stdout())
            }
            Command::Health(args) => health::health(args, &env).await,
            Command::Openapi => {
                output::print(&mut std::io::stdout(), &crate::http::openapi_yaml()?)?;
                Ok(Exit::Code(Code::Done))
            }
        }
    });
    // A read of standard input or a stuck disk must not hold the program.
    runtime.shutdown_background();
    exit
}

/// The log of a command that shows a run on the same screen: warnings only, unless a level is given.
fn quiet_log(config: &Config) -> LogConfig {
    let mut log = config.log.clone();
    if !config.is_given("log.level") {
        log.level = "warn".to_owned();
    }
    log
}

/// Does the work of a program that tells of itself. However that ends, what it told is sent, for a short time at most:
/// the end that nobody wanted is what its operator looks for.
async fn with_telemetry(
    config: &TelemetryConfig,
    log: &LogConfig,
    work: impl AsyncFnOnce(Metrics) -> anyhow::Result<Exit>,
) -> anyhow::Result<Exit> {
    let instance = Ids::default().next(SystemClock.now());
    let telemetry = Telemetry::new(config, &instance.to_string())?;
    telemetry.start(log)?;
    let ended = work(telemetry.metrics().clone()).await;
    let most = match &ended {
        // Somebody asked for the end more than once.
        Ok(Exit::Signal(_)) => FLUSH / 4,
        Ok(Exit::Code(_)) | Err(_) => FLUSH,
    };
    telemetry.shutdown(most).await;
    ended
}

#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the environment")]
fn environment() -> Env {
    std::env::vars_os().collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn contradictions_are_refused() {
        for line in [
            "hames serve --demo --config f",
            "hames run hi --config f --url http://127.0.0.1:1",
            "hames run",
            "hames health --url 127.0.0.1:8080",
            "hames health --url http://h --config f",
            "hames tail",
            "hames tail run_1",
            "hames tail run_019000000000700080000000000000ab --after x",
            "hames run hi --metadata novalue",
            "hames run hi --timeout soon",
            "hames run hi --url ftp://x",
            "hames",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
