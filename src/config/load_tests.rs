//! Every problem the settings can have, as it is printed.

use secrecy::ExposeSecret;

use super::super::{OpenaiChatConfig, WireConfig};
use super::*;
use crate::domain::ModelRef;

/// The rest of a file that is good.
const GOOD: &str = r#"
[providers.local]
kind = "openai_chat"
base_url = "http://127.0.0.1:8000/v1"
[agents.coder]
model = "local/qwen"
"#;

/// Loads a file of `text`; the problems with its directory left out of them.
fn load_text(text: &str, env: &Env) -> Result<Config, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hames.toml");
    fs::write(&path, text).unwrap();
    let shown = format!("{}/", directory.path().display());
    load(Some(&path), env).map_err(|problems| problems.to_string().replace(&shown, ""))
}

fn chat<'c>(config: &'c Config, name: &str) -> &'c OpenaiChatConfig {
    match &config.providers[name].wire {
        WireConfig::OpenaiChat(chat) => chat,
        WireConfig::Scripted(script) => panic!("{script:?}"),
    }
}

#[track_caller]
fn refused(text: &str, expected: &[&str]) {
    refused_with(text, &Env::default(), expected);
}

#[track_caller]
fn refused_with(text: &str, env: &Env, expected: &[&str]) {
    let problems = load_text(text, env).map(|_| "no problem").unwrap_err();
    assert_eq!(problems.lines().collect::<Vec<_>>(), expected, "{problems}");
}

#[test]
fn a_good_file_loads_over_the_defaults() {
    let text = format!("server.bind = '127.0.0.1:9000'\n{GOOD}");
    let config = load_text(&text, &Env::default()).unwrap();
    assert_eq!(config.server.bind.to_string(), "127.0.0.1:9000");
    assert_eq!(config.server.max_body_bytes, 4 * 1024 * 1024);
    assert_eq!(config.agents.keys().collect::<Vec<_>>(), ["coder"]);
    assert_eq!(config.providers.keys().collect::<Vec<_>>(), ["local"]);
    assert_eq!(chat(&config, "local").idle_timeout_ms, 30_000);
}

#[test]
fn what_was_given_is_told_from_what_is_a_default() {
    let text = format!("log.level = 'info'\n{GOOD}");
    let env = Env::from_iter([("HAMES_STORE__URL", "sqlite:hames.db")]);
    let config = load_text(&text, &env).unwrap();
    for given in ["log", "log.level", "store.url", "providers.local.base_url"] {
        assert!(config.is_given(given), "{given}");
    }
    for default in ["log.format", "store.durability", "run", "run.max_queued", "providers.local.models", ""] {
        assert!(!config.is_given(default), "{default}");
    }
    let builtin = load(None, &Env::default()).unwrap();
    assert!(!builtin.is_given("log.level") && !builtin.is_given("agents.demo"));
}

#[test]
fn variables_win_over_the_file_and_take_any_type() {
    let text = format!("run.max_queued = 5\n{GOOD}");
    let env = Env::from_iter([
        ("HAMES_RUN__MAX_QUEUED", "7"),
        ("HAMES_LOG__LEVEL", "warn"),
        ("HAMES_AGENTS__CODER__TOOLS", "[read_file, \"fs.*\"]"),
        ("HAMES_AGENTS__CODER__INSTRUCTIONS", "42"),
        ("HAMES_RUN_ID", "run_0"),
        ("HAMES_PORT", "tcp://10.0.0.1:80"),
        ("OTHER__THING", "1"),
    ]);
    let config = load_text(&text, &env).unwrap();
    assert_eq!(config.run.max_queued, 7);
    assert_eq!(config.log.level, "warn");
    assert_eq!(config.agents["coder"].tools, ["read_file", "fs.*"]);
    assert_eq!(config.agents["coder"].instructions.as_deref(), Some("42"));
}

#[test]
fn without_a_file_there_is_an_agent_that_needs_no_key() {
    let config = load(None, &Env::default()).unwrap();
    assert_eq!(config.agents.keys().collect::<Vec<_>>(), ["demo"]);
    assert_eq!(config.providers.keys().collect::<Vec<_>>(), ["demo"]);
    assert_eq!(config.run.default_agent, "demo");
    assert!(serde_json::from_str::<serde_json::Value>(super::super::DEMO_SCRIPT).is_ok());
}

#[test]
fn without_a_file_a_key_that_is_found_brings_a_provider_and_an_agent() {
    let config = load(None, &Env::from_iter([("OPENAI_API_KEY", "sk-canary")])).unwrap();
    assert_eq!(config.agents.keys().collect::<Vec<_>>(), ["default", "demo"]);
    assert_eq!(config.run.default_agent, "default");
    let openai = chat(&config, "openai");
    assert_eq!(openai.base_url.to_string(), "https://api.openai.com/v1");
    assert_eq!(openai.api_key.as_ref().unwrap().expose_secret(), "sk-canary");
    let model = ModelRef { provider: "openai".into(), model: "gpt-5-mini".into() };
    assert_eq!(config.agents["default"].model, model);

    let empty = load(None, &Env::from_iter([("OPENAI_API_KEY", "")])).unwrap();
    assert_eq!(empty.agents.keys().collect::<Vec<_>>(), ["demo"]);

    let problems = load(None, &Env::from_iter([("OPENAI_API_KEY", "sk-canary\n")])).unwrap_err();
    let expected = "built-in settings: providers.openai.api_key_env: names the variable \"OPENAI_API_KEY\", which holds \
                    white space or other characters that no key has (a line end, perhaps)";
    assert_eq!(problems.to_string(), expected);
}

#[test]
fn debug_output_holds_no_secret() {
    let env = Env::from_iter([("OPENAI_API_KEY", "sk-canary")]);
    let config = load(None, &env).unwrap();
    assert!(!format!("{config:?} {env:?}").contains("canary"));
}

#[test]
fn unknown_keys_name_the_one_meant() {
    refused(
        &format!("[server]\nbnd = '127.0.0.1:1'\ncolour = 1\n[sever]\nbind = 'x'\n{GOOD}instruction = 'x'\n"),
        &[
            "hames.toml: agents.coder.instruction: unknown key; did you mean `instructions`?",
            "hames.toml: server.bnd: unknown key; did you mean `bind`?",
            "hames.toml: server.colour: unknown key; known: bind, allow_unauthenticated, hosts, max_body_bytes, \
             max_connections, header_timeout_ms, body_timeout_ms, write_timeout_ms, keep_alive_ms",
            "hames.toml: sever: unknown key; did you mean `server`?",
        ],
    );
}

#[test]
fn a_key_in_the_file_is_pointed_to_the_environment_and_not_repeated() {
    refused(
        &GOOD.replace("[agents", "api_key = 'sk-canary'\n[agents"),
        &["hames.toml: providers.local.api_key: unknown key; did you mean `api_key_env`?"],
    );
}

#[test]
fn wrong_types_say_what_was_expected() {
    let text = r#"
        server = { bind = "nowhere", max_body_bytes = "big", max_connections = -1 }
        limits = { max_steps = 5000000000, timeout_ms = 1.5 }
        run = 3
        log.format = "xml"
        [providers.local]
        kind = "openai"
        base_url = "http://127.0.0.1:1/v1"
        [agents.coder]
        model = "qwen"
        models = ["a", "local/b", 3, "c"]
        tools = "read_file"
        [workspaces]
        repo = "/srv"
    "#;
    refused(
        text,
        &[
            "hames.toml: providers.local.kind: `openai` is not allowed; expected one of openai_chat, scripted",
            "hames.toml: agents.coder.model: `qwen` is not a model; expected `provider/model`",
            "hames.toml: agents.coder.models.0: `a` is not a model; expected `provider/model`",
            "hames.toml: agents.coder.models.2: expected a string, found 3",
            "hames.toml: agents.coder.models.3: `c` is not a model; expected `provider/model`",
            "hames.toml: agents.coder.tools: expected a list, found the text \"read_file\"",
            "hames.toml: limits.max_steps: expected a whole number from 0 to 4294967295, found 5000000000",
            "hames.toml: limits.timeout_ms: expected a whole number, zero or more, found 1.5",
            "hames.toml: log.format: `xml` is not allowed; expected one of text, json",
            "hames.toml: run: expected a section, found 3",
            "hames.toml: server.bind: `nowhere`: invalid socket address syntax; expected ADDRESS:PORT such as 127.0.0.1:8080",
            "hames.toml: server.max_body_bytes: expected a whole number, zero or more, found the text \"big\"",
            "hames.toml: server.max_connections: expected a whole number, zero or more, found -1",
            "hames.toml: workspaces.repo: expected a section, found the text \"/srv\"",
        ],
    );
}

#[test]
fn missing_keys_are_named_once_and_what_refers_to_the_entry_is_not_blamed() {
    refused(
        "[providers.local]\n[agents.a]\nmodel = 'local/x'\n[agents.b]\n[workspaces.w]\n[commands.c]\n",
        &[
            "hames.toml: providers.local.kind: is required and missing",
            "hames.toml: agents.b.model: is required and missing",
            "hames.toml: commands.c.executable: is required and missing",
            "hames.toml: workspaces.w.path: is required and missing",
        ],
    );
}

#[test]
fn variables_are_named_where_they_are_wrong() {
    let env = Env::from_iter([
        ("HAMES_SERVER__BIND", "0.0.0.0:8080"),
        ("HAMES_RUN__MAX_CONCURRENT", "many"),
        ("HAMES_RUN__MAX_QUEUD", "1"),
        ("HAMES_AGENTS__CODER__MODEL", "lokal/qwen"),
    ]);
    refused_with(
        GOOD,
        &env,
        &[
            "environment variable HAMES_RUN__MAX_CONCURRENT: run.max_concurrent: expected a whole number, zero or \
             more, found the text \"many\"",
            "environment variable HAMES_RUN__MAX_QUEUD: run.max_queud: unknown key; did you mean `max_queued`?",
            "environment variable HAMES_SERVER__BIND: server.bind: 0.0.0.0:8080 can be reached from other machines, \
             and there are no API keys yet that would protect it; use a loopback address such as 127.0.0.1:8080, \
             or, where something else keeps others out, set server.allow_unauthenticated = true",
            "environment variable HAMES_AGENTS__CODER__MODEL: agents.coder.model: `lokal/qwen` names the provider \
             `lokal`, which does not exist; did you mean `local`?",
        ],
    );
}

#[test]
fn a_variable_that_is_not_text_is_refused() {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    let env = Env::from_iter([(OsString::from("HAMES_LOG__LEVEL"), OsString::from_vec(vec![0xff]))]);
    refused_with(GOOD, &env, &["environment variable HAMES_LOG__LEVEL: log.level: is not valid UTF-8"]);
}

#[test]
fn numbers_are_in_range() {
    let text = r#"
        server.max_body_bytes = 0
        server.max_connections = 0
        server.header_timeout_ms = 0
        server.body_timeout_ms = 0
        server.write_timeout_ms = 0
        server.keep_alive_ms = 0
        run = { max_concurrent = 0, max_queued = 0, drain_ms = 9000000000000000000, repeat_limit = 1, scratch_dir = "" }
        limits.max_steps = 0
        limits.max_tool_calls = 0
        limits.max_tokens = 0
        limits.timeout_ms = 0
        limits.model_timeout_ms = 0
        limits.tool_timeout_ms = 0
        limits.max_tool_result_chars = 0
    "#;
    let time = |key: &str| format!("hames.toml: {key}: is 0; expected milliseconds from 1 to 2592000000 (30 days)");
    let count = |key: &str| format!("hames.toml: {key}: is 0; expected at least 1");
    let expected = [
        count("server.max_body_bytes"),
        count("server.max_connections"),
        time("server.header_timeout_ms"),
        time("server.body_timeout_ms"),
        time("server.write_timeout_ms"),
        time("server.keep_alive_ms"),
        count("run.max_concurrent"),
        count("run.max_queued"),
        "hames.toml: run.drain_ms: is 9000000000000000000; expected milliseconds from 1 to 2592000000 (30 days)".into(),
        "hames.toml: run.repeat_limit: is 1; expected at least 2, since one call repeats nothing".into(),
        "hames.toml: run.scratch_dir: is empty; expected a directory, which is made when it is missing".into(),
        count("limits.max_steps"),
        count("limits.max_tool_calls"),
        count("limits.max_tokens"),
        time("limits.timeout_ms"),
        time("limits.model_timeout_ms"),
        time("limits.tool_timeout_ms"),
        count("limits.max_tool_result_chars"),
    ];
    refused(&format!("{text}\n{GOOD}"), &expected.each_ref().map(String::as_str));
}

#[test]
fn a_provider_fits_its_kind() {
    let text = r#"
        [providers.a]
        kind = "openai_chat"
        script = "a.json"
        reasoning_field = "reasoning_contents"
        context_window = 100
        max_output_tokens = 100
        connect_timeout_ms = 0
        idle_timeout_ms = 0
        max_retries = 21
        models = ["m", "", "m"]
        [providers.b]
        kind = "scripted"
        base_url = "http://127.0.0.1"
        api_key_env = "B_KEY"
        idle_timeout_ms = 5
        reasoning_field = "reasoning"
        [providers.c]
        kind = "scripted"
        script = "/nowhere/at/all.json"
        [providers.d]
        kind = "scripted"
        script = "/"
        [providers."x/y"]
        kind = "openai_chat"
        base_url = "http://127.0.0.1"
        context_window = 0
        [agents.a]
        model = "a/m"
    "#;
    refused_with(
        text,
        &Env::from_iter([("B_KEY", "b")]),
        &[
            "hames.toml: providers.a.base_url: is required and missing; the address with its version, such as \
             http://127.0.0.1:8000/v1",
            "hames.toml: providers.a.script: does not apply to kind `openai_chat`; take it out, or set kind = \
             \"scripted\"",
            "hames.toml: providers.a.reasoning_field: \"reasoning_contents\" is not a known field; did you mean \
             `reasoning_content`?",
            "hames.toml: providers.a.models.1: is empty; expected a model's name",
            "hames.toml: providers.a.models: lists `m` twice",
            "hames.toml: providers.a.max_output_tokens: is 100; expected at least 1 and less than context_window (100)",
            "hames.toml: providers.a.connect_timeout_ms: is 0; expected milliseconds from 1 to 2592000000 (30 days)",
            "hames.toml: providers.a.idle_timeout_ms: is 0; expected milliseconds from 1 to 2592000000 (30 days)",
            "hames.toml: providers.a.max_retries: is 21; expected at most 20",
            "hames.toml: providers.b.base_url: does not apply to kind `scripted`, which plays a file; take it out",
            "hames.toml: providers.b.api_key_env: does not apply to kind `scripted`, which plays a file; take it out",
            "hames.toml: providers.b.idle_timeout_ms: does not apply to kind `scripted`, which plays a file; take it \
             out",
            "hames.toml: providers.b.reasoning_field: does not apply to kind `scripted`, which plays a file; take it \
             out",
            "hames.toml: providers.b.script: is required and missing; the path of the JSON file to play",
            "hames.toml: providers.c.script: /nowhere/at/all.json cannot be read: No such file or directory (os error \
             2)",
            "hames.toml: providers.d.script: / is not a file",
            "hames.toml: providers.x/y: is not a name; expected 1 to 64 of A-Z a-z 0-9 _ - starting with a letter",
            "hames.toml: providers.x/y.context_window: is 0; expected at least 1",
        ],
    );
}

/// What refers to a provider that cannot be made is not wrong for that, and its key is still nobody else's.
#[test]
fn a_provider_that_cannot_be_made_is_the_only_one_to_blame() {
    let text = r#"
        [providers.local]
        kind = "openai_chat"
        base_url = "localhost"
        api_key_env = "LOCAL_KEY"
        [agents.coder]
        model = "local/qwen"
        [commands.c]
        executable = "true"
        env = ["LOCAL_KEY"]
    "#;
    refused(
        text,
        &[
            "hames.toml: providers.local.base_url: is not a URL (relative URL without a base); expected one such as \
             http://127.0.0.1:8000/v1",
            "hames.toml: providers.local.api_key_env: names the variable \"LOCAL_KEY\", which is not set; set it, or \
             take this key out when the provider wants none",
            "hames.toml: commands.c.env.0: LOCAL_KEY holds the key of provider `local`; commands never get it",
        ],
    );
}

/// Settings read without the loader, by a program that embeds hames.
#[test]
fn a_section_read_by_itself_is_checked_too() {
    let read = |json: &str| serde_json::from_str::<super::super::ProviderConfig>(json).map_err(|e| e.to_string());
    let chat = read(r#"{"kind": "openai_chat", "base_url": "http://h/v1", "idle_timeout_ms": 7}"#).unwrap();
    let WireConfig::OpenaiChat(chat) = chat.wire else { panic!("{chat:?}") };
    assert_eq!((chat.base_url.to_string().as_str(), chat.idle_timeout_ms), ("http://h/v1", 7));
    for (json, expected) in [
        (r#"{"kind": "openai_chat"}"#, "`base_url` is required and missing"),
        (r#"{"kind": "openai_chat", "base_url": "ftp://canary"}"#, "`base_url` has the scheme `ftp`"),
        (
            r#"{"kind": "openai_chat", "base_url": "http://h", "reasoning_field": "x"}"#,
            "`reasoning_field` \"x\" is not",
        ),
        (r#"{"kind": "openai_chat", "base_url": "http://h", "script": "a"}"#, "`script` does not apply"),
        (r#"{"kind": "scripted"}"#, "`script` is required and missing"),
        (r#"{"kind": "scripted", "script": "a", "base_url": "b"}"#, "`base_url` does not apply"),
        (r#"{"kind": "scripted", "script": "a", "scrpt": "b"}"#, "unknown field `scrpt`"),
    ] {
        let error = read(json).unwrap_err();
        assert!(error.starts_with(expected) && !error.contains("canary"), "{json}: {error}");
    }
}

#[test]
fn addresses_of_providers_are_plain_and_never_repeated() {
    for (url, message) in [
        ("localhost", "is not a URL (relative URL without a base); expected one such as http://127.0.0.1:8000/v1"),
        ("http://", "is not a URL (empty host); expected one such as http://127.0.0.1:8000/v1"),
        ("ftp://canary/v1", "has the scheme `ftp`; expected http or https"),
        ("localhost:8000/v1", "has the scheme `localhost`; expected http or https"),
        ("http://canary:x@host/v1", "holds a user name or password; use api_key_env for keys"),
        ("http://canary@host/v1", "holds a user name or password; use api_key_env for keys"),
        ("http://host/v1?key=canary", "has a query or fragment; expected the plain address with its version"),
        ("http://host/v1#canary", "has a query or fragment; expected the plain address with its version"),
        (
            "http://host/v1/chat/completions/",
            "ends in /chat/completions, which is added to it; end it with the version, such as /v1",
        ),
    ] {
        let text = GOOD.replace("http://127.0.0.1:8000/v1", url);
        refused(&text, &[&format!("hames.toml: providers.local.base_url: {message}")]);
    }
}

#[test]
fn a_key_is_found_whole() {
    let text = GOOD.replace("[agents", "api_key_env = 'LOCAL_KEY'\n[agents");
    let unset = "hames.toml: providers.local.api_key_env: names the variable \"LOCAL_KEY\", which is not set; set it, \
                 or take this key out when the provider wants none";
    let unfit = "hames.toml: providers.local.api_key_env: names the variable \"LOCAL_KEY\", which holds white space \
                 or other characters that no key has (a line end, perhaps)";
    refused(&text, &[unset]);
    refused_with(&text, &Env::from_iter([("LOCAL_KEY", "")]), &[unset]);
    refused_with(&text, &Env::from_iter([("LOCAL_KEY", "sk-canary\n")]), &[unfit]);
    refused_with(&text, &Env::from_iter([("LOCAL_KEY", "sk-cánary")]), &[unfit]);
    let config = load_text(&text, &Env::from_iter([("LOCAL_KEY", "sk-canary")])).unwrap();
    assert_eq!(chat(&config, "local").api_key.as_ref().unwrap().expose_secret(), "sk-canary");
}

#[test]
fn agents_refer_to_what_exists() {
    let text = r#"
        run.default_agent = "codr"
        [providers.local]
        kind = "openai_chat"
        base_url = "http://127.0.0.1:8000/v1"
        [workspaces.repo]
        path = "/"
        [agents.coder]
        model = "nobody/qwen"
        models = ["local/a", "loca/b", "local/a"]
        tools = ["read_file", "fs.*", "9lives", "rm -rf", "", "read_file"]
        workspace = "rep"
        workspaces = ["repo", "home", "repo"]
        [agents."my agent"]
        model = "local/a"
    "#;
    refused(
        text,
        &[
            "hames.toml: agents.coder.model: `nobody/qwen` names the provider `nobody`, which does not exist; known: \
             local",
            "hames.toml: agents.coder.models.1: `loca/b` names the provider `loca`, which does not exist; did you mean \
             `local`?",
            "hames.toml: agents.coder.models: lists `local/a` twice",
            "hames.toml: agents.coder.tools.2: \"9lives\" is neither a tool nor a pattern; expected 1 to 128 of A-Z \
             a-z 0-9 _ - . / and *, starting with a letter or *",
            "hames.toml: agents.coder.tools.3: \"rm -rf\" is neither a tool nor a pattern; expected 1 to 128 of A-Z \
             a-z 0-9 _ - . / and *, starting with a letter or *",
            "hames.toml: agents.coder.tools.4: \"\" is neither a tool nor a pattern; expected 1 to 128 of A-Z a-z 0-9 \
             _ - . / and *, starting with a letter or *",
            "hames.toml: agents.coder.tools: lists `read_file` twice",
            "hames.toml: agents.coder.workspace: no workspace `rep`; did you mean `repo`?",
            "hames.toml: agents.coder.workspaces.1: no workspace `home`; known: repo",
            "hames.toml: agents.coder.workspaces: lists `repo` twice",
            "hames.toml: agents.my agent: is not a name; expected 1 to 64 of A-Z a-z 0-9 _ - starting with a letter",
            "hames.toml: run.default_agent: no agent `codr`; did you mean `coder`?",
        ],
    );
    refused("", &["hames.toml: agents: there is none; add an [agents.NAME] section with a `model`"]);
}

#[test]
fn workspaces_and_commands_are_usable() {
    let text = r#"
        [workspaces.gone]
        path = "/nowhere/at/all"
        max_file_bytes = 0
        max_files = 0
        [workspaces.file]
        path = "/proc/self/status"
        [commands.c]
        executable = ""
        args = ["a", "b\u0000c"]
        timeout_ms = 0
        max_output_bytes = 0
        env = ["HOME", "A=B", "LOCAL_KEY", "HOME"]
        [commands."2nd"]
        executable = "true"
    "#;
    refused_with(
        &format!("{}{text}", GOOD.replace("[agents", "api_key_env = 'LOCAL_KEY'\n[agents")),
        &Env::from_iter([("LOCAL_KEY", "k")]),
        &[
            "hames.toml: workspaces.file.path: /proc/self/status is not a directory",
            "hames.toml: workspaces.gone.path: /nowhere/at/all cannot be used: No such file or directory (os error 2); \
             expected a directory that exists",
            "hames.toml: workspaces.gone.max_file_bytes: is 0; expected at least 1",
            "hames.toml: workspaces.gone.max_files: is 0; expected at least 1",
            "hames.toml: commands.2nd: is not a name; expected 1 to 64 of A-Z a-z 0-9 _ - starting with a letter",
            "hames.toml: commands.c.executable: is empty; expected a path, or a name to look up in PATH",
            "hames.toml: commands.c.args.1: holds a NUL, which no argument can",
            "hames.toml: commands.c.timeout_ms: is 0; expected milliseconds from 1 to 2592000000 (30 days)",
            "hames.toml: commands.c.max_output_bytes: is 0; expected at least 1",
            "hames.toml: commands.c.env.1: \"A=B\" is not the name of a variable",
            "hames.toml: commands.c.env.2: LOCAL_KEY holds the key of provider `local`; commands never get it",
            "hames.toml: commands.c.env: lists `HOME` twice",
        ],
    );
}

#[test]
fn the_address_of_the_database_is_of_a_known_form() {
    let unknown = "is no address of a database; expected `sqlite:PATH` or \
        `postgres://USER:PASSWORD@HOST:PORT/DATABASE`";
    for (url, message) in [
        ("mysql://u:canary@h/d", unknown),
        ("postgres:u:canary@h/d", unknown),
        ("hames.db", unknown),
        ("sqlite:", "names no file; expected `sqlite:PATH`"),
        ("sqlite::memory:", "names no file; expected `sqlite:PATH`"),
    ] {
        refused(&format!("store.url = '{url}'\n{GOOD}"), &[&format!("hames.toml: store.url: {message}")]);
    }
}

#[test]
fn a_misspelt_log_level_is_not_taken_for_a_module() {
    for level in ["inof", "", "info,hames", "info,hames=loud"] {
        let message = format!(
            "hames.toml: log.level: {level:?} is not a level; expected error, warn, info, debug or trace, or \
             directives such as `info,hames::run=debug`"
        );
        refused(&format!("log.level = '{level}'\n{GOOD}"), &[&message]);
    }
    for level in ["debug", "warn,hames::run=debug", "off"] {
        assert!(load_text(&format!("log.level = '{level}'\n{GOOD}"), &Env::default()).is_ok(), "{level}");
    }
}

#[test]
fn a_network_address_is_refused_and_loopback_is_not() {
    for bind in ["0.0.0.0:80", "192.168.0.4:80", "[::]:80"] {
        let problems = load_text(&format!("server.bind = '{bind}'\n{GOOD}"), &Env::default()).unwrap_err();
        assert!(problems.starts_with(&format!("hames.toml: server.bind: {bind} can be reached")), "{problems}");
        let allowed = format!("server.bind = '{bind}'\nserver.allow_unauthenticated = true\n{GOOD}");
        assert!(load_text(&allowed, &Env::default()).is_ok(), "{bind}");
    }
    for bind in ["127.0.0.1:0", "127.9.9.9:80", "[::1]:80"] {
        assert!(load_text(&format!("server.bind = '{bind}'\n{GOOD}"), &Env::default()).is_ok(), "{bind}");
    }
}

#[test]
fn hosts_are_names_without_more() {
    let env = Env::from_iter([("HAMES_SERVER__HOSTS", "[\"hames\"]")]);
    assert_eq!(load_text(GOOD, &env).unwrap().server.hosts, ["hames"]);
    let message = |index: usize, host: &str| {
        format!(
            "hames.toml: server.hosts.{index}: \"{host}\" is not a host; expected a name or an address, without port"
        )
    };
    refused(
        &format!("server.hosts = ['', 'good', '*.example', 'http://h']\n{GOOD}"),
        &[&message(0, ""), &message(2, "*.example"), &message(3, "http://h")],
    );
}

#[test]
fn a_file_that_cannot_be_read_is_said_to_be_so() {
    let problems = load(Some(Path::new("/nowhere/hames.toml")), &Env::default()).unwrap_err();
    let message = "/nowhere/hames.toml: cannot be read: No such file or directory (os error 2)";
    assert_eq!(problems.to_string(), message);
    let problems = load_text("a = [1\nb = 2", &Env::default()).unwrap_err();
    assert!(problems.starts_with("hames.toml: is not valid TOML: TOML parse error at line 2"), "{problems}");
    let problems = load_text("[server]\nbind = 'a'\nbind = 'b'", &Env::default()).unwrap_err();
    assert!(problems.contains("duplicate key `bind`"), "{problems}");
}

#[test]
fn telemetry_has_an_address_and_headers_of_the_environment() {
    let text = format!("telemetry.trace_ratio = 1\n{GOOD}");
    let env = Env::from_iter([("HAMES_TELEMETRY__TRACE_RATIO", "0.25"), ("KEYS", "x-key=canary%2C")]);
    let config = load_text(&text, &env).unwrap();
    assert_eq!(config.telemetry.trace_ratio, 0.25);
    assert!(config.telemetry.otlp_endpoint.is_none() && config.telemetry.otlp_headers.iter().next().is_none());

    let text = format!("telemetry.otlp_headers_env = 'KEYS'\n{GOOD}");
    let config = load_text(&text, &env).unwrap();
    let headers: Vec<_> =
        config.telemetry.otlp_headers.iter().map(|(name, value)| (name, value.expose_secret())).collect();
    assert_eq!(headers, [("x-key", "canary,")]);
    assert!(!format!("{config:?}").contains("canary"));

    let text = format!(
        "[telemetry]\notlp_endpoint = 'http://u:canary@h'\notlp_headers_env = 'NONE'\ntrace_ratio = 2\nservice_name = ''\n\
         otlp_timeout_ms = 0\n[commands.c]\nexecutable = 'c'\nenv = ['NONE']\n{GOOD}"
    );
    refused(
        &text,
        &[
            "hames.toml: telemetry.otlp_endpoint: holds a user name or password; use otlp_headers_env for keys",
            "hames.toml: telemetry.otlp_headers_env: names the variable \"NONE\", which is not set; set it, or take this \
             key out",
            "hames.toml: telemetry.otlp_timeout_ms: is 0; expected milliseconds from 1 to 2592000000 (30 days)",
            "hames.toml: telemetry.trace_ratio: is 2; expected a number from 0 to 1",
            "hames.toml: telemetry.service_name: is empty; expected a name",
            "hames.toml: commands.c.env.0: holds headers for the collector (telemetry.otlp_headers_env); commands never \
             get it",
        ],
    );
    let env = Env::from_iter([("OTEL_EXPORTER_OTLP_HEADERS", "canary")]);
    let expected = "environment variable OTEL_EXPORTER_OTLP_HEADERS: holds no headers; expected NAME=VALUE,NAME=VALUE";
    refused_with(GOOD, &env, &[expected]);
}
