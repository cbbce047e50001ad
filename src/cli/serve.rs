//! `hames serve`: the HTTP interface, until a signal.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use super::exit::{Code, Exit};
use super::output::{Output, told};
use super::{ConfigArgs, GIVE_CONFIG, demo, quiet_log, with_telemetry};
use crate::app::{App, Surroundings};
use crate::config::{self, Config, Env};
use crate::shutdown::{Ended, Shutdown, Signals};
use crate::telemetry::Metrics;

/// What to serve.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// Make a workspace with a few files in ./hames-demo and show a run of the demo agent over it.
    #[arg(long, conflicts_with = "config")]
    demo: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) async fn serve(args: ServeArgs, env: &Env, signals: Signals) -> anyhow::Result<Exit> {
    args.config.tell_of_unused_file(if args.demo { " by --demo" } else { GIVE_CONFIG });
    let config = config::load(args.config.config.as_deref(), env)?;
    let (telemetry, log) = (config.telemetry.clone(), if args.demo { quiet_log(&config) } else { config.log.clone() });
    with_telemetry(&telemetry, &log, async move |metrics| serve_config(config, args.demo, env, signals, metrics).await)
        .await
}

async fn serve_config(
    mut config: Config,
    is_demo: bool,
    env: &Env,
    signals: Signals,
    metrics: Metrics,
) -> anyhow::Result<Exit> {
    if is_demo {
        let workspace = PathBuf::from(demo::DIRECTORY);
        demo::write_files(&workspace)?;
        config = config.with_demo_workspace(workspace);
    }
    let (bind, drain) = (config.server.bind, Duration::from_millis(config.run.drain_ms));
    let listener = listen(bind)
        .await
        .with_context(|| format!("cannot listen on {bind}; is another server running there? (server.bind)"))?;
    let address = listener.local_addr()?;
    let app = App::build(config, Surroundings::of_this_program(env.clone(), metrics)).await?;
    let shutdown = Shutdown::new();
    tracing::info!(%address, "listening");
    if is_demo {
        let soft = shutdown.soft().clone();
        shutdown.tasks().spawn("demo", async move {
            let mut stdout = std::io::stdout();
            let mut output = Output::new(&mut stdout);
            if let Some(Err(error)) = soft.run_until_cancelled(demo::show(address, &mut output)).await {
                tracing::error!("the demonstration failed: {}", told(&error));
            }
            soft.cancelled().await;
            // The log, which says the same, is quiet here.
            if let Err(error) = output.print(demo::STOPPING) {
                tracing::error!("standard output cannot be written: {error}");
            }
        });
    }
    match shutdown.run(signals, drain, app.serve(listener, shutdown.clone())).await {
        Ended::Finished(served) => {
            served?;
            tracing::info!("stopped");
            Ok(Exit::Code(Code::Done))
        }
        Ended::Forced(signal) => Ok(Exit::Signal(signal)),
        Ended::Stuck(tasks) => anyhow::bail!("did not stop in time: {}", tasks.join(", ")),
    }
}

/// How long an address that is in use is waited for, and how often it is tried.
const PATIENCE: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(20);

/// Listens. A server that was killed may leave a child behind which was about to start a command, and holds its parent's
/// sockets until it does: so there are a few attempts.
async fn listen(bind: SocketAddr) -> io::Result<TcpListener> {
    let begun = Instant::now();
    loop {
        match TcpListener::bind(bind).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && begun.elapsed() < PATIENCE => sleep(LOOK).await,
            other => return other,
        }
    }
}
