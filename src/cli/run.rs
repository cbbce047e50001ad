//! `hames run`: one run, in this process or on a server.
//!
//! In this process, without a settings file and without a `store.url`, the database and the directories of the
//! run are temporary and gone afterwards. With either, the configured database is used: the run is kept, and, as a
//! server would, hames also goes on with runs that were left waiting there.

use std::collections::BTreeMap;

use anyhow::Context as _;
use clap::Args;
use reqwest::Url;
use tokio::io::AsyncReadExt as _;

use super::exit::{self, Exit};
use super::feed::Executor;
use super::follow::{self, Followed, OnSignal};
use super::output::Output;
use super::remote::{Remote, parse_url};
use super::render::Renderer;
use super::{ConfigArgs, GIVE_CONFIG, demo, quiet_log, with_telemetry};
use crate::app::{App, Surroundings};
use crate::config::{self, Config, Env};
use crate::domain::{LimitsPatch, RunInput, RunRequest};
use crate::shutdown::{Ended, Shutdown, Signals};
use crate::telemetry::Metrics;

/// What to run, and where.
#[derive(Debug, Args)]
#[command(after_help = exit::table())]
pub(super) struct RunArgs {
    /// What to work on; `-` reads it from standard input.
    prompt: String,
    /// The agent; the default agent when absent.
    #[arg(long)]
    agent: Option<String>,
    /// The model, PROVIDER/MODEL, among those of the agent.
    #[arg(long)]
    model: Option<String>,
    /// The workspace, among those of the agent.
    #[arg(long)]
    workspace: Option<String>,
    /// A label of the run; can be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_label)]
    metadata: Vec<(String, String)>,
    /// Most time for the run, such as 90s or 5m.
    #[arg(long, value_name = "TIME", value_parser = parse_millis)]
    timeout: Option<u64>,
    /// Print each frame of the event stream as one line {"id":…,"event":…,"data":…}. The data are as they were sent,
    /// whole and in their order; the id is a cursor for `tail --after`, null where there is none.
    #[arg(long)]
    json: bool,
    /// Run it on this server; in this process when absent.
    #[arg(long, value_parser = parse_url, conflicts_with = "config")]
    url: Option<Url>,
    #[command(flatten)]
    config: ConfigArgs,
}

impl RunArgs {
    fn request(&self, prompt: String) -> RunRequest {
        RunRequest {
            agent: self.agent.clone(),
            input: RunInput::Text(prompt),
            model: self.model.clone(),
            workspace: self.workspace.clone(),
            limits: LimitsPatch { timeout_ms: self.timeout, ..LimitsPatch::default() },
            metadata: self.metadata.iter().cloned().collect::<BTreeMap<_, _>>(),
            ..RunRequest::default()
        }
    }
}

pub(super) async fn run(args: RunArgs, env: &Env, mut signals: Signals) -> anyhow::Result<Exit> {
    let prompt = match args.prompt.as_str() {
        "-" => tokio::select! {
            read = read_prompt() => read?,
            signal = signals.recv() => return Ok(Exit::Signal(signal)),
        },
        prompt => prompt.to_owned(),
    };
    let request = args.request(prompt);
    if let Some(url) = &args.url {
        let executor = Executor::Remote(Remote::new(url.clone())?);
        return show(&executor, request, args.json, &mut signals).await;
    }
    args.config.tell_of_unused_file(GIVE_CONFIG);
    let mut config = config::load(args.config.config.as_deref(), env)?;
    let mut temporary = None;
    if args.config.config.is_none() && !config.is_given("store.url") {
        let directory = tempfile::Builder::new().prefix("hames-run-").tempdir()?;
        config = in_directory(config, directory.path())?;
        temporary = Some(directory);
    }
    let (telemetry, log) = (config.telemetry.clone(), quiet_log(&config));
    let json = args.json;
    let exit = with_telemetry(&telemetry, &log, async move |metrics| {
        run_here(config, request, json, env, signals, metrics).await
    })
    .await?;
    if let Exit::Signal(_) = exit {
        return Ok(exit);
    }
    if let Some(directory) = temporary {
        directory.close().context("the temporary directory cannot be removed")?;
    }
    Ok(exit)
}

/// One run in this process.
async fn run_here(
    config: Config,
    request: RunRequest,
    json: bool,
    env: &Env,
    mut signals: Signals,
    metrics: Metrics,
) -> anyhow::Result<Exit> {
    let drain = std::time::Duration::from_millis(config.run.drain_ms);
    let app = App::build(config, Surroundings::of_this_program(env.clone(), metrics)).await?;
    let executor = Executor::Local { supervisor: app.supervisor().clone(), streams: app.streams().clone() };
    let shutdown = Shutdown::new();
    // Signals reach the run until it has ended, and the rest of the program after that.
    let mut working = std::pin::pin!(app.work(shutdown.clone()));
    let shown = tokio::select! {
        shown = show(&executor, request, json, &mut signals) => shown,
        worked = &mut working => {
            worked?;
            anyhow::bail!("the work stopped before the run had ended")
        }
    };
    shutdown.soft().cancel();
    match &shown {
        Ok(Exit::Signal(_)) => return shown,
        Ok(Exit::Code(_)) => {}
        // Nobody sees how the run goes on. The database is closed before its directory goes.
        Err(_) => shutdown.hard().cancel(),
    }
    match shutdown.run(signals, drain, working).await {
        Ended::Finished(worked) => {
            let exit = shown?;
            worked.map(|()| exit)
        }
        Ended::Forced(signal) => Ok(Exit::Signal(signal)),
        Ended::Stuck(tasks) => anyhow::bail!("did not stop in time: {}", tasks.join(", ")),
    }
}

/// Everything a run leaves behind goes into one directory.
fn in_directory(mut config: Config, directory: &std::path::Path) -> anyhow::Result<Config> {
    config.store.url = format!("sqlite:{}", directory.join("hames.db").display()).into();
    config.run.scratch_dir = directory.join("scratch");
    let workspace = directory.join("demo");
    demo::write_files(&workspace)?;
    Ok(config.with_demo_workspace(workspace))
}

async fn show(executor: &Executor, request: RunRequest, json: bool, signals: &mut Signals) -> anyhow::Result<Exit> {
    let mut stdout = std::io::stdout();
    let mut renderer = Renderer::new(json, &stdout);
    let mut output = Output::new(&mut stdout);
    let run = tokio::select! {
        run = executor.create(request) => run?,
        signal = signals.recv() => return Ok(Exit::Signal(signal)),
    };
    let mut feed = executor.follow(run).await?;
    let on_signal = OnSignal::Abort(executor);
    match follow::follow(run, &mut feed, on_signal, signals, &mut renderer, &mut output).await? {
        Followed::Ended(run) => Ok(follow::exit(&run)),
        Followed::Signal(signal) => Ok(Exit::Signal(signal)),
        Followed::Past | Followed::Closed => anyhow::bail!("the events of {run} stopped before its end"),
    }
}

async fn read_prompt() -> anyhow::Result<String> {
    let mut prompt = String::new();
    let read = tokio::io::stdin().read_to_string(&mut prompt).await;
    read.context("the prompt cannot be read from standard input")?;
    Ok(prompt)
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn parse_millis(text: &str) -> Result<u64, String> {
    let duration: jiff::SignedDuration =
        text.parse().map_err(|_| "expected a time such as 90s, 5m or 1h30m".to_owned())?;
    match u64::try_from(duration.as_millis()) {
        Ok(millis) if millis > 0 => Ok(millis),
        Ok(_) | Err(_) => Err("expected more than nothing".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, millis) in
            [("90s", 90_000), ("5m", 300_000), ("1h30m", 5_400_000), ("250ms", 250), ("2 min", 120_000)]
        {
            assert_eq!(parse_millis(text), Ok(millis), "{text}");
        }
        for text in ["", "90", "-5s", "0s", "soon"] {
            assert!(parse_millis(text).is_err(), "{text}");
        }
    }

    #[test]
    fn labels_split_at_the_first_sign() {
        assert_eq!(parse_label("a=b=c"), Ok(("a".to_owned(), "b=c".to_owned())));
        assert!(parse_label("a").is_err());
    }

    #[test]
    fn the_request_says_only_what_was_given() {
        let args = RunArgs {
            prompt: "hi".to_owned(),
            agent: None,
            model: None,
            workspace: None,
            metadata: vec![("k".to_owned(), "v".to_owned())],
            timeout: Some(5),
            json: false,
            url: None,
            config: ConfigArgs { config: None },
        };
        assert_eq!(
            serde_json::to_value(args.request("hi".to_owned())).unwrap(),
            serde_json::json!({
                "input": "hi", "limits": {"timeout_ms": 5}, "context": {"strategy": "trim"}, "on_busy": "reject", "on_repeat": "warn",
                "parallel_tools": "read_only", "metadata": {"k": "v"},
            })
        );
    }
}
