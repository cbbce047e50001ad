//! `hames.example.toml`: every key, with its default.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::Path;

use hames::config::{AgentConfig, CommandConfig, Config, Env, ProviderConfig, WorkspaceConfig};

const EXAMPLE: &str = include_str!("../../../hames.example.toml");

/// The keys of a type of settings: what its own reader offers for a key that does not exist.
fn keys<T: serde::de::DeserializeOwned>() -> Vec<&'static str> {
    let probe = figment::value::Value::from(BTreeMap::from([("?".to_owned(), true)]));
    match probe.deserialize::<T>().map(|_| ()).unwrap_err().kind {
        figment::error::Kind::UnknownField(_, known) => known.to_vec(),
        other => panic!("{other}"),
    }
}

/// The keys of a section in the example, and whether each stands commented out, as those do that have no default.
fn written(section: &str) -> BTreeMap<String, bool> {
    let mut current = "";
    let mut found = BTreeMap::new();
    for line in EXAMPLE.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            current = name.0;
            continue;
        }
        let (text, commented) = line.strip_prefix("# ").map_or((line, false), |rest| (rest, true));
        let Some((key, _)) = text.split_once(" = ") else { continue };
        let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        if current == section && is_key {
            assert!(!found.contains_key(key), "{section}.{key} stands twice");
            found.insert(key.to_owned(), commented);
        }
    }
    found
}

/// Both hold the same keys; those with a default are not commented out.
#[track_caller]
fn every_key<T: serde::de::DeserializeOwned>(section: &str) {
    let mut expected = keys::<T>();
    expected.sort_unstable();
    assert_eq!(written(section).keys().collect::<Vec<_>>(), expected, "[{section}]");
}

#[track_caller]
fn same<T: Debug>(section: &str, found: &T, default: &T) {
    assert_eq!(format!("{found:#?}"), format!("{default:#?}"), "[{section}]");
}

fn example() -> Config {
    hames::config::load(Some(Path::new("hames.example.toml")), &Env::default()).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn every_key_of_every_section_is_in_the_example() {
    let sections = [
        "server",
        "store",
        "run",
        "retention",
        "limits",
        "log",
        "telemetry",
        "providers",
        "agents",
        "workspaces",
        "commands",
    ];
    assert_eq!(keys::<Config>(), sections);
    every_key::<hames::config::ServerConfig>("server");
    every_key::<hames::config::StoreConfig>("store");
    every_key::<hames::config::RunConfig>("run");
    every_key::<hames::config::CeilingConfig>("limits");
    every_key::<hames::config::LogConfig>("log");
    every_key::<hames::config::TelemetryConfig>("telemetry");
    every_key::<ProviderConfig>("providers.local");
    every_key::<AgentConfig>("agents.default");
    every_key::<WorkspaceConfig>("workspaces.repo");
    every_key::<CommandConfig>("commands.test");
}

#[test]
fn the_example_is_good_and_holds_the_defaults() {
    let (config, default) = (example(), Config::default());
    same("server", &config.server, &default.server);
    same("store", &config.store, &default.store);
    same("run", &config.run, &default.run);
    same("limits", &config.limits, &default.limits);
    same("log", &config.log, &default.log);
    same("telemetry", &config.telemetry, &default.telemetry);
}

/// The defaults inside the entries: an entry with nothing but the keys whose values are examples.
#[test]
fn entries_of_the_example_hold_the_defaults_of_their_kind() {
    let config = example();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("short.toml");
    let short = r#"
        [providers.local]
        kind = "openai_chat"
        base_url = "http://127.0.0.1:8000/v1"
        models = ["qwen3-32b"]
        [agents.default]
        model = "local/qwen3-32b"
        tools = ["list_dir", "read_file", "search_files", "run_command"]
        workspace = "repo"
        [workspaces.repo]
        path = "."
        [commands.test]
        executable = "make"
        args = ["test"]
    "#;
    std::fs::write(&path, short).unwrap();
    let short = hames::config::load(Some(&path), &Env::default()).unwrap_or_else(|e| panic!("{e}"));
    same("providers", &config.providers, &short.providers);
    same("agents", &config.agents, &short.agents);
    same("workspaces", &config.workspaces, &short.workspaces);
    same("commands", &config.commands, &short.commands);
}

#[test]
fn the_settings_in_the_readme_are_good() {
    let readme = include_str!("../../../README.md");
    let (_, rest) = readme.split_once("```toml\n").unwrap();
    let (settings, _) = rest.split_once("```").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hames.toml");
    std::fs::write(&path, settings).unwrap();
    let env = Env::from_iter([("PATH", "/usr/local/bin:/usr/bin:/bin")]);
    let loaded = hames::config::read(Some(&path), &env);
    let found = hames::app::verify(&loaded, &env);
    assert_eq!((loaded.problems(), found.problems, found.hints), (&[][..], Vec::new(), Vec::new()));
}

/// A commented key is one without a default: its comment line before says what its absence means.
#[test]
fn what_is_commented_out_is_optional() {
    let optional: Vec<_> =
        ["telemetry", "providers.local", "agents.default", "workspaces.repo", "commands.test", "server", "run"]
            .into_iter()
            .flat_map(|section| {
                written(section)
                    .into_iter()
                    .filter(|(_, commented)| *commented)
                    .map(move |(key, _)| format!("{section}.{key}"))
            })
            .collect();
    let expected = [
        "telemetry.otlp_endpoint",
        "providers.local.api_key_env",
        "providers.local.max_output_tokens",
        "providers.local.reasoning_field",
        "providers.local.script",
        "agents.default.description",
        "agents.default.instructions",
        "commands.test.description",
    ];
    assert_eq!(optional, expected);
}
