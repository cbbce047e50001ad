//! `Dockerfile`, `.dockerignore` and `docker-compose.yml` as data: what they say has to agree with each other, with the
//! program and with the README.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use hames::config::Config;
use serde_json::{Value, json};

use crate::cli::program::Program;
use crate::support::client::ApiClient;

const DOCKERFILE: &str = include_str!("../../Dockerfile");
const COMPOSE: &str = include_str!("../../docker-compose.yml");
const IGNORED: &str = include_str!("../../.dockerignore");
const README: &str = include_str!("../../README.md");

/// Where the image keeps its state.
const STATE: &str = "/var/lib/hames";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The instructions: name and the rest, with lines that go on joined.
fn instructions() -> Vec<(String, String)> {
    let lines: Vec<_> = DOCKERFILE.lines().filter(|line| !line.starts_with('#')).collect();
    let joined = lines.join("\n").replace("\\\n", " ");
    let lines = joined.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|line| {
            let (name, rest) = line.split_once(' ').unwrap();
            (name.to_owned(), rest.split_whitespace().collect::<Vec<_>>().join(" "))
        })
        .collect()
}

/// The instructions of this name in the last stage, which is what runs.
fn of_the_image(name: &str) -> Vec<String> {
    let all = instructions();
    let last = all.iter().rposition(|(name, _)| name == "FROM").unwrap();
    all[last..].iter().filter(|(found, _)| found == name).map(|(_, rest)| rest.clone()).collect()
}

fn only(name: &str) -> String {
    let mut found = of_the_image(name);
    assert_eq!(found.len(), 1, "{name}: {found:?}");
    found.remove(0)
}

fn list(text: &str) -> Vec<String> {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{text} is not in exec form: {error}"))
}

fn compose() -> Value {
    serde_yaml_ng::from_str(COMPOSE).unwrap()
}

fn service(name: &str) -> Value {
    compose()["services"][name].clone()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// The text with its variables filled in: `${NAME:-default}` with the default, `${NAME:?…}` with `given`.
fn filled(text: &str, given: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("${") {
        let (variable, after) = after.split_once('}').unwrap();
        out.push_str(before);
        match variable.split_once(":-") {
            Some((_, default)) => out.push_str(default),
            None => {
                assert!(variable.contains(":?"), "{variable} has neither a default nor a demand");
                out.push_str(given);
            }
        }
        rest = after;
    }
    out + rest
}

/// The environment of the container of hames.
fn environment() -> BTreeMap<String, String> {
    let environment = service("hames")["environment"].clone();
    let entries = environment.as_object().unwrap().iter();
    entries.map(|(name, value)| (name.clone(), filled(value.as_str().unwrap(), "secret"))).collect()
}

fn seconds(value: &Value) -> Duration {
    Duration::from_secs(value.as_str().unwrap().strip_suffix('s').unwrap().parse().unwrap())
}

#[test]
fn what_is_copied_exists_and_is_not_ignored() {
    let kept: Vec<_> = IGNORED.lines().filter_map(|line| line.strip_prefix('!')).collect();
    assert_eq!(IGNORED.lines().find(|line| !line.starts_with('#')), Some("*"), "everything else is left out");
    let mut copied = Vec::new();
    for (_, rest) in instructions().iter().filter(|(name, rest)| name == "COPY" && !rest.starts_with("--from=")) {
        let paths: Vec<_> = rest.split(' ').collect();
        copied.extend(paths[..paths.len() - 1].iter().map(|path| (*path).to_owned()));
    }
    for path in &copied {
        assert!(root().join(path).exists(), "{path} does not exist");
    }
    let mut kept: Vec<_> = kept.into_iter().map(str::to_owned).collect();
    kept.sort();
    copied.sort();
    assert_eq!(kept, copied);
    assert!(instructions().iter().all(|(name, _)| name != "ADD"));
}

#[test]
fn versions_are_those_of_the_project_and_none_is_the_latest() {
    let toolchain = include_str!("../../rust-toolchain.toml");
    let (_, rest) = toolchain.split_once("channel = \"").unwrap();
    let channel = rest.split('"').next().unwrap();
    let bases: Vec<_> = instructions().into_iter().filter(|(name, _)| name == "FROM").map(|(_, rest)| rest).collect();
    assert_eq!(bases, [format!("rust:{channel}-bookworm AS build"), "debian:bookworm-slim".to_owned()]);
    let version = env!("CARGO_PKG_VERSION");
    assert!(only("LABEL").contains(&format!("org.opencontainers.image.version=\"{version}\"")));
    assert_eq!(service("hames")["image"], format!("hames:{version}"));
    let services = compose()["services"].clone();
    for (name, service) in services.as_object().unwrap() {
        let image = service["image"].as_str().unwrap();
        assert!(image.split_once(':').is_some_and(|(_, tag)| tag != "latest"), "{name}: {image}");
    }
}

#[test]
fn no_secret_stands_in_a_layer_or_in_the_file() {
    assert!(instructions().iter().all(|(name, _)| name != "ARG" && name != "ENV"));
    for (name, service) in compose()["services"].as_object().unwrap() {
        for (variable, value) in service["environment"].as_object().unwrap() {
            let value = value.as_str().unwrap();
            let is_secret = ["PASSWORD", "KEY", "URL", "TOKEN", "SECRET"].iter().any(|word| variable.contains(word));
            assert!(!is_secret || value.contains("${"), "{name}: {variable}");
        }
    }
    assert!(include_str!("../../.gitignore").lines().any(|line| line == "/.env"));
}

#[test]
fn containers_have_no_rights_that_they_do_not_need() {
    let user = only("USER");
    assert_eq!(service("hames")["user"], user.as_str());
    let made = only("RUN");
    let (uid, gid) = user.split_once(':').unwrap();
    assert!(made.contains(&format!("--uid {uid} --gid {gid}")) && made.contains(&format!("-o {uid} -g {gid}")));
    for (name, service) in compose()["services"].as_object().unwrap() {
        let ids: Vec<u32> = service["user"].as_str().unwrap().split(':').map(|id| id.parse().unwrap()).collect();
        assert!(ids.len() == 2 && ids.iter().all(|id| *id != 0), "{name}");
        assert_eq!(service["read_only"], true, "{name}");
        assert_eq!(service["cap_drop"], json!(["ALL"]), "{name}");
        assert_eq!(service["security_opt"], json!(["no-new-privileges:true"]), "{name}");
        assert!(service["cap_add"].is_null() && service["privileged"].is_null(), "{name}");
        assert!(service["healthcheck"]["test"].is_array() && service["restart"].is_string(), "{name}");
        assert!(service["logging"]["options"]["max-size"].is_string(), "{name}");
    }
    assert_eq!(compose()["networks"]["database"]["internal"], true);
    assert!(service("postgres")["ports"].is_null());
}

#[test]
fn state_is_in_volumes_and_all_else_may_be_read_only() {
    assert_eq!((only("WORKDIR").as_str(), only("VOLUME").as_str()), (STATE, STATE));
    let named = compose()["volumes"].clone();
    for (service, place) in [("hames", STATE), ("postgres", "/var/lib/postgresql/data")] {
        let volumes = texts(&self::service(service)["volumes"]);
        let [volume] = volumes.as_slice() else { panic!("{service}: {volumes:?}") };
        let (name, path) = volume.split_once(':').unwrap();
        assert!(named.as_object().unwrap().contains_key(name) && path == place, "{volume}");
        assert!(texts(&self::service(service)["tmpfs"]).iter().any(|mount| mount.starts_with("/tmp:")), "{service}");
    }
    // Relative, so that the working directory decides.
    let default = Config::default();
    assert!(default.run.scratch_dir.is_relative());
    assert!(default.store.url.expose().strip_prefix("sqlite:").is_some_and(|path| Path::new(path).is_relative()));
}

#[test]
fn ports_agree_and_are_published_on_this_machine_only() {
    let ports = texts(&service("hames")["ports"]);
    assert_eq!(ports.iter().map(|port| filled(port, "")).collect::<Vec<_>>(), ["127.0.0.1:8080:8080"]);
    assert_eq!(environment()["HAMES_SERVER__BIND"], format!("0.0.0.0:{}", only("EXPOSE")));
    assert!(README.contains("curl -s http://127.0.0.1:8080/runs"));
    assert_eq!(Config::default().server.bind.port().to_string(), only("EXPOSE"));
}

#[test]
fn a_container_stops_by_a_signal_and_has_the_time_for_it() {
    assert_eq!(only("STOPSIGNAL"), "SIGTERM");
    let drain = Duration::from_millis(Config::default().run.drain_ms);
    let most = drain + hames::shutdown::HARD_STOP + hames::telemetry::FLUSH;
    assert!(seconds(&service("hames")["stop_grace_period"]) > most, "{most:?}");
    assert!(!environment().contains_key("HAMES_RUN__DRAIN_MS"));
    assert_eq!(service("hames")["depends_on"]["postgres"]["condition"], "service_healthy");
}

#[test]
fn the_database_of_hames_is_that_of_postgres() {
    let postgres = service("postgres")["environment"].clone();
    let text = |name: &str| filled(postgres[name].as_str().unwrap(), "secret");
    let expected = format!(
        "postgres://{}:{}@postgres:5432/{}",
        text("POSTGRES_USER"),
        text("POSTGRES_PASSWORD"),
        text("POSTGRES_DB")
    );
    assert_eq!(environment()["HAMES_STORE__URL"], expected);
}

/// The program with the settings of the container, but for its database and its port, which are of this machine.
fn contained<'a>(args: impl IntoIterator<Item = &'a str>, directory: &Path, bind: &str) -> Program {
    let mut program = Program::new(args).current_dir(directory);
    for (name, value) in environment() {
        program = program.env(&name, value);
    }
    program.env("HAMES_STORE__URL", "sqlite:hames.db").env("HAMES_SERVER__BIND", bind)
}

/// Nothing of it is replaced: a check connects to nothing.
#[tokio::test]
async fn the_program_takes_the_environment_of_the_container() {
    let directory = tempfile::tempdir().unwrap();
    let mut program = Program::new(["check"]).current_dir(directory.path());
    for (name, value) in environment() {
        program = program.env(&name, value);
    }
    let checked = program.finish().await;
    assert_eq!((checked.code, checked.stderr.as_str()), (Some(0), ""), "{}", checked.stdout);
    assert!(checked.stdout.starts_with("listens on 0.0.0.0:8080, ") && checked.stdout.ends_with("no problems\n"));
    assert!(
        checked.stdout.contains("@postgres:5432/hames") && !checked.stdout.contains("secret"),
        "{}",
        checked.stdout
    );
}

#[tokio::test]
async fn the_container_is_healthy_answers_the_first_steps_and_writes_in_its_directory_only() {
    let entry = list(&only("ENTRYPOINT"));
    assert_eq!(entry, ["hames"]);
    let command = list(&only("CMD"));
    let check = only("HEALTHCHECK").split_once("CMD ").map(|(_, check)| list(check)).unwrap();
    assert_eq!(service("hames")["healthcheck"]["test"], json!([&["CMD".to_owned()], check.as_slice()].concat()));
    let directory = tempfile::tempdir().unwrap();
    let served = contained(command.iter().map(String::as_str), directory.path(), "0.0.0.0:0");
    // Where a container has nothing that can be written.
    let mut running = served.env("HOME", "/nonexistent").env("TMPDIR", "/nonexistent").start().await;
    running.wait_for_stderr("listening address=").await;
    running.wait_for_stderr("\n").await;
    let told = running.stderr().split("address=0.0.0.0:").nth(1).unwrap().to_owned();
    let port: String = told.chars().take_while(char::is_ascii_digit).collect();
    let health = contained(check[1..].iter().map(String::as_str), directory.path(), &format!("0.0.0.0:{port}"));
    let health = health.finish().await;
    assert_eq!((health.code, health.stdout.as_str(), health.stderr.as_str()), (Some(0), "ready\n", ""));
    let (_, body) = README.split_once("-d '").unwrap();
    let body: Value = serde_json::from_str(body.split('\'').next().unwrap()).unwrap();
    let client = ApiClient::new(format!("127.0.0.1:{port}").parse().unwrap());
    let request = client.request(reqwest::Method::POST, "/runs").header("prefer", "wait=30").json(&body);
    let answer = client.send(request).await;
    assert_eq!((answer.status, &answer.body["status"]), (200, &json!("completed")), "{}", answer.text);
    running.terminate();
    assert_eq!(running.finish().await.code, Some(0));
    let entries = std::fs::read_dir(directory.path()).unwrap();
    let mut left: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert!(left.contains(&"hames.db".to_owned()) && left.contains(&"hames-scratch".to_owned()), "{left:?}");
}

/// How Compose is called here, if it is there.
fn compose_program() -> Option<Vec<&'static str>> {
    let programs = [vec!["docker", "compose"], vec!["docker-compose"]];
    programs.into_iter().find(|program| {
        let version = Command::new(program[0]).args(&program[1..]).arg("version").output();
        version.is_ok_and(|output| output.status.success())
    })
}

#[test]
fn compose_reads_the_file_and_wants_a_password() {
    let Some(program) = compose_program() else {
        #[expect(clippy::disallowed_methods, reason = "whoever runs the tests says what has to be there")]
        let required = std::env::var("HAMES_TEST_REQUIRE").unwrap_or_default();
        let is_required = required.split(',').any(|name| name == "docker-compose");
        assert!(!is_required, "HAMES_TEST_REQUIRE names docker-compose, and neither it nor `docker compose` is there");
        eprintln!("SKIPPED: `docker compose` is not there; HAMES_TEST_REQUIRE=docker-compose makes this a failure");
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    // The first version knows everything but the name.
    let is_first = program.len() == 1;
    let file: String =
        COMPOSE.lines().filter(|line| !is_first || !line.starts_with("name:")).collect::<Vec<_>>().join("\n");
    std::fs::write(directory.path().join("docker-compose.yml"), file).unwrap();
    std::fs::write(directory.path().join(".env"), "").unwrap();
    let run = |password: &str| {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).args(["config", "--quiet"]).current_dir(directory.path());
        command.env("POSTGRES_PASSWORD", password).output().unwrap()
    };
    let good = run("secret");
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    let refused = run("");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && told.contains("set it in .env, see README.md"), "{told}");
}
