//! Presets: what is refused, what the model is told.

use super::*;

fn config(executable: &str, args: &[&str]) -> CommandConfig {
    serde_json::from_value(json!({ "executable": executable, "args": args })).unwrap()
}

fn environment(pairs: &[(&str, &str)]) -> BTreeMap<OsString, OsString> {
    pairs.iter().map(|(key, value)| (key.into(), value.into())).collect()
}

fn tool(presets: &[(&str, CommandConfig)]) -> Result<Option<CommandTool>, Vec<CommandError>> {
    let presets = presets.iter().map(|(name, config)| ((*name).to_owned(), config.clone())).collect();
    CommandTool::new(&presets, &environment(&[("PATH", "/usr/bin:/bin")]), CommandHost::this_program())
}

fn arguments(command: &str) -> Map<String, Value> {
    Map::from_iter([("command".to_owned(), json!(command))])
}

#[test]
fn no_commands_make_no_tool() {
    assert!(tool(&[]).unwrap().is_none());
}

#[test]
fn every_preset_that_cannot_work_is_named_with_its_key() {
    let cases = [
        (config("no-such-program-here", &[]), "commands.x.executable: no program `no-such-program-here` in PATH"),
        (config("/no/such", &[]), "commands.x.executable: `/no/such` does not exist"),
        (config("/etc/passwd", &[]), "commands.x.executable: `/etc/passwd` is not an executable file"),
        (config("/usr/bin", &[]), "commands.x.executable: `/usr/bin` is not an executable file"),
        (config("bin/sh", &[]), "commands.x.executable: `bin/sh` is a relative path"),
        (config("./sh", &[]), "commands.x.executable: `./sh` is a relative path"),
        (config("..", &[]), "commands.x.executable: `..` is a relative path"),
        (config("s\0h", &[]), "commands.x.executable: `s\0h` contains a NUL character"),
    ];
    for (config, expected) in cases {
        let errors = tool(&[("x", config), ("good", self::config("sh", &[]))]).unwrap_err();
        let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert!(texts.len() == 1 && texts[0].starts_with(expected), "{expected}: {texts:?}");
    }
    assert_eq!(tool(&[("a", config("/no", &[])), ("b", config("/no", &[]))]).unwrap_err().len(), 2);
}

#[test]
fn effect_and_polling_are_those_of_the_preset() {
    let read = CommandConfig { effect: Effect::ReadOnly, pollable: true, ..config("sh", &[]) };
    let write = CommandConfig { effect: Effect::Idempotent, ..config("sh", &[]) };
    let tool = tool(&[("read", read), ("write", write)]).unwrap().unwrap();
    assert_eq!(tool.effect(&arguments("read")), Effect::ReadOnly);
    assert_eq!(tool.effect(&arguments("write")), Effect::Idempotent);
    assert_eq!(tool.effect(&arguments("other")), Effect::Idempotent);
    assert_eq!(tool.effect(&Map::new()), Effect::Idempotent);
    assert!(tool.is_pollable(&arguments("read")));
    assert!(!tool.is_pollable(&arguments("write")));
    assert!(!tool.is_pollable(&Map::new()));
}

#[test]
fn the_model_is_told_of_every_preset() {
    let test = CommandConfig { description: Some("Runs the tests.".to_owned()), ..config("sh", &["-c", "exit 0"]) };
    let tool = tool(&[("test", test), ("look", config("/bin/ls", &[]))]).unwrap().unwrap();
    let description = &tool.spec().description;
    for part in [
        "\n- `look`: (no description)\n  runs: /bin/ls\n  timeout: 60000 ms; can change things",
        "\n- `test`: Runs the tests.\n  runs: sh -c \"exit 0\"\n  timeout: 60000 ms; can change things",
    ] {
        assert!(description.contains(part), "{part} in {description}");
    }
    assert_eq!(tool.spec().name.as_str(), "run_command");
    assert_eq!(tool.spec().parameters["properties"]["command"]["enum"], json!(["look", "test"]));
    assert_eq!(tool.spec().parameters["additionalProperties"], json!(false));
}

#[test]
fn programs_are_not_looked_up_in_the_workspace() {
    let path = |path: &str| absolute_path_entries(Some(&path.into()));
    assert_eq!(path("/usr/bin::.:bin:/bin"), "/usr/bin:/bin");
    assert_eq!(path("."), DEFAULT_PATH);
    assert_eq!(path(""), DEFAULT_PATH);
    assert_eq!(absolute_path_entries(None), DEFAULT_PATH);
}

#[test]
fn a_command_ends_before_the_call_does() {
    let ms = Duration::from_millis;
    for (command, call, expected) in [
        (60_000, 30_000, Limit::Call { time: ms(29_000), call: ms(30_000) }),
        (29_000, 30_000, Limit::Command(ms(29_000))),
        (29_001, 30_000, Limit::Call { time: ms(29_000), call: ms(30_000) }),
        (60_000, 1_000, Limit::Call { time: ms(800), call: ms(1_000) }),
        (60_000, 1, Limit::Call { time: Duration::from_micros(800), call: ms(1) }),
    ] {
        assert_eq!(Limit::of(ms(command), ms(call)), expected, "{command} {call}");
    }
    assert_eq!(Limit::of(ms(5), Duration::MAX), Limit::Command(ms(5)));
    assert_eq!(Limit::of(ms(5), ms(10)).timed_out(), "timed out after 5 ms and was killed");
    assert_eq!(
        Limit::of(ms(60_000), ms(30_000)).timed_out(),
        "timed out after 29000 ms and was killed: a tool call of this run may take 30000 ms in all"
    );
}

#[test]
fn the_result_has_its_fixed_form() {
    let stdout = Captured { text: "a\n".to_owned(), total: 9, left_out: 7, invalid: 0, controls: 0 };
    let stderr = Captured { text: "b".to_owned(), total: 1, left_out: 0, invalid: 2, controls: 3 };
    assert_eq!(
        render("exit code: 1", Duration::from_millis(12), 2, &stdout, &stderr),
        "exit code: 1\nduration: 12 ms\nstdout: 9 bytes, 7 left out of the middle\nstderr: 1 bytes; note: 2 bytes are \
         not UTF-8 and shown as \u{fffd}; note: 3 control characters are shown as symbols\n\
         left behind: 2 processes, killed\n--- stdout ---\na\n--- stderr ---\nb\n"
    );
}
