//! A Postgres of its own, from the installed binaries, that can be stopped and started.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{SystemTime, UNIX_EPOCH};

use tempfile::TempDir;

use crate::server::free_address;

/// A running instance. Stopped when dropped.
pub(crate) struct Postgres {
    folder: TempDir,
    programs: PathBuf,
    port: u16,
}

impl Postgres {
    pub(crate) async fn start() -> Self {
        let found = Command::new("pg_config").arg("--bindir").output();
        let found = found.unwrap_or_else(|error| panic!("pg_config is needed, install Postgres: {error}"));
        let programs = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
        let folder = tempfile::tempdir().unwrap();
        if is_root() {
            // Postgres refuses to run as root.
            succeed(Command::new("chown").arg("postgres").arg(folder.path()));
        }
        let postgres = Self { folder, programs, port: free_address().port() };
        let data = postgres.data();
        succeed(postgres.command("initdb").args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "-D"]).arg(&data));
        postgres.begin();
        succeed(
            postgres
                .command("createdb")
                .args(["-h", "127.0.0.1", "-U", "postgres", "-p"])
                .args([postgres.port.to_string(), "hames".to_owned()]),
        );
        postgres
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/hames", self.port)
    }

    /// Starts it and waits until it answers.
    pub(crate) fn begin(&self) {
        let options = format!(
            "-p {} -c listen_addresses=127.0.0.1 -c max_connections=200 -k {}",
            self.port,
            self.folder.path().display()
        );
        let log = self.folder.path().join("log");
        succeed(
            self.command("pg_ctl").args(["-w", "-o", &options, "-l"]).arg(log).arg("-D").arg(self.data()).arg("start"),
        );
    }

    /// Stops it, in a mode of `pg_ctl`: `fast` ends connections, `immediate` is a crash.
    pub(crate) fn stop(&self, mode: &str) {
        succeed(self.command("pg_ctl").args(["-w", "-m", mode, "-D"]).arg(self.data()).arg("stop"));
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let program = self.programs.join(program);
        let mut command = if is_root() {
            let mut command = Command::new("runuser");
            command.args(["-u", "postgres", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.current_dir(self.folder.path());
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let stopped =
            self.command("pg_ctl").args(["-w", "-m", "immediate", "-D"]).arg(self.data()).arg("stop").output();
        drop(stopped);
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root() && Path::new("/usr/sbin/runuser").exists()
}

fn succeed(command: &mut Command) -> Output {
    // What pg_ctl starts keeps its standard output: a pipe would never end.
    let status = command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null()).status();
    let status = status.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?} ended with {status}");
    Output { status, stdout: Vec::new(), stderr: Vec::new() }
}

/// Makes a database on a server and gives its URL.
pub(crate) fn fresh_database(url: &str) -> String {
    let name = format!("chaos_{}", SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos());
    succeed(Command::new("psql").args(["-q", "-c", &format!("CREATE DATABASE {name}"), url]));
    let (before, parameters) =
        url.split_once('?').map_or((url, String::new()), |(url, rest)| (url, format!("?{rest}")));
    let path = before.find("://").map_or(0, |at| at + 3);
    let server = before[path..].find('/').map_or(before, |at| &before[..path + at]);
    format!("{server}/{name}{parameters}")
}
