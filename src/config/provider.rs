//! Model endpoints: the settings of each kind, and the section of the file they are read from.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use reqwest::Url;
use secrecy::SecretString;
use serde::Deserialize;

use super::builtin::DEMO;
use super::problem::meant;

/// Tokens a request and its answer may have together, unless set.
pub const DEFAULT_CONTEXT_WINDOW: u64 = 128_000;

/// Further attempts after a failure that may pass, unless set.
pub const DEFAULT_MAX_RETRIES: u32 = 2;

const DEFAULT_CONNECT_TIMEOUT_MS: u64 = 10_000;
const DEFAULT_IDLE_TIMEOUT_MS: u64 = 30_000;

/// A model endpoint.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "ProviderSection")]
pub struct ProviderConfig {
    /// Models to show in `GET /models`; others can be used as well.
    pub models: Vec<String>,
    /// Tokens a request and its answer may have together.
    pub context_window: u64,
    /// Most tokens of an answer; sent with each request and kept free in the window.
    pub max_output_tokens: Option<u32>,
    /// Further attempts after a failure that may pass.
    pub max_retries: u32,
    /// Which wire it speaks, and what that needs.
    pub wire: WireConfig,
}

/// What a kind of provider needs.
#[derive(Clone, Debug)]
pub enum WireConfig {
    /// See [`ProviderKind::OpenaiChat`].
    OpenaiChat(OpenaiChatConfig),
    /// See [`ProviderKind::Scripted`]: what it plays.
    Scripted(ScriptSource),
}

/// A server of the chat completions wire.
#[derive(Clone, Debug)]
pub struct OpenaiChatConfig {
    /// Where it is.
    pub base_url: BaseUrl,
    /// The environment variable that holds its key; no key is sent when absent.
    pub api_key_env: Option<String>,
    /// The key, read from that variable when the settings are loaded; never from the file.
    pub api_key: Option<SecretString>,
    /// Most time for a connection, in milliseconds.
    pub connect_timeout_ms: u64,
    /// Most time without a byte from the provider, in milliseconds; comments count as bytes.
    pub idle_timeout_ms: u64,
    /// Where it wants its reasoning back on tool turns; `None`: it is not sent back.
    pub reasoning_field: Option<ReasoningField>,
}

/// What a scripted provider plays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptSource {
    /// The built-in demonstration, [`super::DEMO_SCRIPT`].
    Demo,
    /// A file.
    File(PathBuf),
}

impl ProviderConfig {
    /// A provider with the default settings.
    pub const fn new(wire: WireConfig) -> Self {
        Self {
            models: Vec::new(),
            context_window: DEFAULT_CONTEXT_WINDOW,
            max_output_tokens: None,
            max_retries: DEFAULT_MAX_RETRIES,
            wire,
        }
    }

    /// Which wire it speaks.
    pub const fn kind(&self) -> ProviderKind {
        match self.wire {
            WireConfig::OpenaiChat(_) => ProviderKind::OpenaiChat,
            WireConfig::Scripted(_) => ProviderKind::Scripted,
        }
    }

    /// Its key, if it has one.
    pub const fn api_key(&self) -> Option<&SecretString> {
        match &self.wire {
            WireConfig::OpenaiChat(chat) => chat.api_key.as_ref(),
            WireConfig::Scripted(_) => None,
        }
    }

    /// The environment variable that holds its key, if it has one.
    pub fn api_key_env(&self) -> Option<&str> {
        match &self.wire {
            WireConfig::OpenaiChat(chat) => chat.api_key_env.as_deref(),
            WireConfig::Scripted(_) => None,
        }
    }
}

impl OpenaiChatConfig {
    /// A server that wants no key, with the default settings.
    pub const fn at(base_url: BaseUrl) -> Self {
        Self {
            base_url,
            api_key_env: None,
            api_key: None,
            connect_timeout_ms: DEFAULT_CONNECT_TIMEOUT_MS,
            idle_timeout_ms: DEFAULT_IDLE_TIMEOUT_MS,
            reasoning_field: None,
        }
    }
}

/// Which wire a provider speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProviderKind {
    /// `POST …/chat/completions`, as OpenAI and most servers speak it.
    OpenaiChat,
    /// Plays a script; for demonstrations and tests.
    Scripted,
}

impl ProviderKind {
    /// The spelling of the settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OpenaiChat => "openai_chat",
            Self::Scripted => "scripted",
        }
    }
}

/// Where a server wants its reasoning back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningField {
    /// Text, as DeepSeek names it.
    ReasoningContent,
    /// Text.
    Reasoning,
    /// The entries of OpenRouter, with their signatures.
    ReasoningDetails,
}

impl ReasoningField {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::ReasoningContent, Self::Reasoning, Self::ReasoningDetails];

    /// The field's name on the wire and in the settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ReasoningContent => "reasoning_content",
            Self::Reasoning => "reasoning",
            Self::ReasoningDetails => "reasoning_details",
        }
    }
}

impl FromStr for ReasoningField {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|field| field.as_str() == text).ok_or_else(|| {
            format!("{text:?} is not a known field; {}", meant(text, Self::ALL.map(Self::as_str).iter().copied()))
        })
    }
}

/// The address of a server with its version (`http://127.0.0.1:8000/v1`): `http` or `https`, without user name,
/// password, query and fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl(Url);

/// Why an address is none. The address is never repeated: it may hold a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BaseUrlError {
    /// Not a URL at all.
    #[error("is not a URL ({0}); expected one such as http://127.0.0.1:8000/v1")]
    Form(String),
    /// Another scheme.
    #[error("has the scheme `{0}`; expected http or https")]
    Scheme(String),
    /// A key in the open.
    #[error("holds a user name or password; use api_key_env for keys")]
    Credentials,
    /// More than an address.
    #[error("has a query or fragment; expected the plain address with its version")]
    Query,
    /// The whole address of the wire.
    #[error("ends in /chat/completions, which is added to it; end it with the version, such as /v1")]
    Path,
}

impl BaseUrl {
    /// The address.
    pub const fn as_url(&self) -> &Url {
        &self.0
    }
}

impl FromStr for BaseUrl {
    type Err = BaseUrlError;

    fn from_str(text: &str) -> Result<Self, BaseUrlError> {
        let url = Url::parse(text).map_err(|error| BaseUrlError::Form(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            Err(BaseUrlError::Scheme(url.scheme().to_owned()))
        } else if !url.username().is_empty() || url.password().is_some() {
            Err(BaseUrlError::Credentials)
        } else if url.query().is_some() || url.fragment().is_some() {
            Err(BaseUrlError::Query)
        } else if url.path().trim_end_matches('/').ends_with("/chat/completions") {
            Err(BaseUrlError::Path)
        } else {
            Ok(Self(url))
        }
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A `[providers.NAME]` section as it is written: the keys of all kinds. [`ProviderSection::read`] turns it into
/// the settings of its kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProviderSection {
    pub(super) kind: ProviderKind,
    base_url: Option<String>,
    pub(super) api_key_env: Option<String>,
    #[serde(default)]
    pub(super) models: Vec<String>,
    #[serde(default = "default_context_window")]
    pub(super) context_window: u64,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) connect_timeout_ms: Option<u64>,
    pub(super) idle_timeout_ms: Option<u64>,
    #[serde(default = "default_max_retries")]
    pub(super) max_retries: u32,
    reasoning_field: Option<String>,
    script: Option<PathBuf>,
}

const fn default_context_window() -> u64 {
    DEFAULT_CONTEXT_WINDOW
}

const fn default_max_retries() -> u32 {
    DEFAULT_MAX_RETRIES
}

/// Takes the problems of a section: the key and what is wrong with it.
pub(super) type Report<'a> = dyn FnMut(&'static str, String) + 'a;

impl ProviderSection {
    /// The settings of the provider `name`, without its key; `None` when what they need most is missing or wrong.
    pub(super) fn read(self, name: &str, report: &mut Report<'_>) -> Option<ProviderConfig> {
        let Self {
            kind,
            base_url,
            api_key_env,
            models,
            context_window,
            max_output_tokens,
            connect_timeout_ms,
            idle_timeout_ms,
            max_retries,
            reasoning_field,
            script,
        } = self;
        let wire = match kind {
            ProviderKind::OpenaiChat => {
                let base_url = required_url(base_url, report);
                if script.is_some() {
                    let message = "does not apply to kind `openai_chat`; take it out, or set kind = \"scripted\"";
                    report("script", message.to_owned());
                }
                let reasoning_field = reasoning_field
                    .and_then(|field| field.parse().map_err(|message| report("reasoning_field", message)).ok());
                WireConfig::OpenaiChat(OpenaiChatConfig {
                    base_url: base_url?,
                    api_key_env,
                    api_key: None,
                    connect_timeout_ms: connect_timeout_ms.unwrap_or(DEFAULT_CONNECT_TIMEOUT_MS),
                    idle_timeout_ms: idle_timeout_ms.unwrap_or(DEFAULT_IDLE_TIMEOUT_MS),
                    reasoning_field,
                })
            }
            ProviderKind::Scripted => {
                for (key, given) in [
                    ("base_url", base_url.is_some()),
                    ("api_key_env", api_key_env.is_some()),
                    ("connect_timeout_ms", connect_timeout_ms.is_some()),
                    ("idle_timeout_ms", idle_timeout_ms.is_some()),
                    ("reasoning_field", reasoning_field.is_some()),
                ] {
                    if given {
                        let message = "does not apply to kind `scripted`, which plays a file; take it out";
                        report(key, message.to_owned());
                    }
                }
                match script {
                    Some(file) => WireConfig::Scripted(ScriptSource::File(file)),
                    None if name == DEMO => WireConfig::Scripted(ScriptSource::Demo),
                    None => {
                        report("script", "is required and missing; the path of the JSON file to play".to_owned());
                        return None;
                    }
                }
            }
        };
        Some(ProviderConfig { models, context_window, max_output_tokens, max_retries, wire })
    }
}

fn required_url(text: Option<String>, report: &mut Report<'_>) -> Option<BaseUrl> {
    let Some(text) = text else {
        let message = "is required and missing; the address with its version, such as http://127.0.0.1:8000/v1";
        report("base_url", message.to_owned());
        return None;
    };
    text.parse().map_err(|error: BaseUrlError| report("base_url", error.to_string())).ok()
}

/// Why a section makes no provider: its first problem.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct InvalidProvider(String);

impl TryFrom<ProviderSection> for ProviderConfig {
    type Error = InvalidProvider;

    fn try_from(section: ProviderSection) -> Result<Self, InvalidProvider> {
        let mut first = None;
        let config = section.read("", &mut |key, message| {
            first.get_or_insert_with(|| format!("`{key}` {message}"));
        });
        match (first, config) {
            (None, Some(config)) => Ok(config),
            (problem, _) => Err(InvalidProvider(problem.unwrap_or_else(|| "the section is not complete".to_owned()))),
        }
    }
}
