//! The demonstration: a workspace with a few real files, and a first run over them.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use anyhow::Context as _;

use super::feed::{Executor, Feed, Heard};
use super::output::Output;
use super::remote::{Remote, parse_url};
use super::render::Renderer;
use crate::config::{DEMO, DEMO_FILES};
use crate::domain::{RunInput, RunRequest};

/// The workspace of `hames serve --demo`, in the working directory.
pub(super) const DIRECTORY: &str = "hames-demo";

/// What is printed once the server stops; a terminal has shown `^C` before it.
pub(super) const STOPPING: &str = "\nStopping; a second Ctrl-C ends the program at once.\n";

const PROMPT: &str = "What does the shop need?";

/// Makes the directory with its files. What is there already stays as it is.
pub(super) fn write_files(directory: &Path) -> anyhow::Result<()> {
    for (name, content) in DEMO_FILES {
        let path = directory.join(name);
        let parent = path.parent().unwrap_or(directory);
        let context = || format!("{} cannot be written", path.display());
        DirBuilder::new().recursive(true).mode(0o700).create(parent).with_context(context)?;
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(mut file) => file.write_all(content.as_bytes()).with_context(context)?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(context),
        }
    }
    fs::metadata(directory)?;
    Ok(())
}

/// Creates a run on the server, shows it, and says how to make another.
pub(super) async fn show(address: SocketAddr, output: &mut Output<'_>) -> anyhow::Result<()> {
    let url = parse_url(&format!("http://{address}")).map_err(anyhow::Error::msg)?;
    let executor = Executor::Remote(Remote::new(url)?);
    let request =
        RunRequest { agent: Some(DEMO.to_owned()), input: RunInput::Text(PROMPT.to_owned()), ..RunRequest::default() };
    output.print(&format!("The agent `{DEMO}` is asked: {PROMPT}\n\n"))?;
    let run = executor.create(request).await?;
    let mut feed: Feed = executor.follow(run).await?;
    let mut renderer = Renderer::text();
    while let Some(heard) = feed.next().await? {
        let shown = match heard {
            Heard::Frame(frame) => renderer.frame(&frame),
            Heard::Trouble(what) => renderer.trouble(&what),
        };
        output.print(&shown.text)?;
        if shown.end.is_some() {
            break;
        }
    }
    output.print(&format!(
        "\nAnother one, streamed as it goes:\n\
         \n  curl -N http://{address}/runs -H 'content-type: application/json' -H 'accept: text/event-stream' \\\
         \n    -d '{{\"agent\": \"{DEMO}\", \"input\": \"{PROMPT}\"}}'\n\
         \nWhat is kept of the first:\n\
         \n  curl http://{address}/runs/{run}\
         \n  curl http://{address}/runs/{run}/messages\n\
         \nServing on http://{address}; Ctrl-C stops it.\n"
    ))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn files_are_made_once_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let workspace = directory.path().join("demo");
        write_files(&workspace).unwrap();
        fs::write(workspace.join("README.md"), "mine").unwrap();
        write_files(&workspace).unwrap();
        let read: Vec<_> =
            DEMO_FILES.iter().map(|(name, _)| fs::read_to_string(workspace.join(name)).unwrap()).collect();
        assert_eq!(read, ["mine", DEMO_FILES[1].1, DEMO_FILES[2].1]);
        assert_eq!(fs::metadata(&workspace).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn the_script_reads_the_files_that_exist() {
        let names: Vec<_> = DEMO_FILES.iter().map(|(name, _)| *name).collect();
        for name in names {
            assert!(crate::config::DEMO_SCRIPT.contains(&format!("\"{name}\"")), "{name}");
        }
    }
}
