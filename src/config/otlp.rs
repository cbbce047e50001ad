//! Where telemetry is exported to, and the headers that a collector may ask for.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use reqwest::Url;
use reqwest::header::{HeaderName, HeaderValue};
use secrecy::SecretString;
use serde::Deserialize;

use super::TelemetryConfig;
use super::env::Env;
use super::load::Sources;
use super::problem::{Origin, Problem};

/// The standard variable for the address of a collector (OpenTelemetry specification, "OTLP exporter").
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// The standard variable for headers.
pub(super) const OTLP_HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";

/// The base URL of a collector (`http://127.0.0.1:4318`): `http` or `https`, without user name, password, query and
/// fragment. `/v1/traces` and `/v1/metrics` are added.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct OtlpEndpoint(Url);

/// Why an address is none. The address is never repeated: it may hold a key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OtlpEndpointError {
    /// Not a URL at all.
    #[error("is not a URL ({0}); expected one such as http://127.0.0.1:4318")]
    Form(String),
    /// Another scheme.
    #[error("has the scheme `{0}`; expected http or https")]
    Scheme(String),
    /// A key in the open.
    #[error("holds a user name or password; use otlp_headers_env for keys")]
    Credentials,
    /// More than an address.
    #[error("has a query or fragment; expected the plain address, such as http://127.0.0.1:4318")]
    Query,
}

impl OtlpEndpoint {
    /// `http` or `https`.
    pub fn scheme(&self) -> &str {
        self.0.scheme()
    }

    /// The address of a signal below the base, such as `v1/traces`.
    pub fn signal(&self, path: &str) -> Url {
        let mut url = self.0.clone();
        // Addresses of http and https always have a path.
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path.split('/'));
        }
        url
    }
}

impl FromStr for OtlpEndpoint {
    type Err = OtlpEndpointError;

    fn from_str(text: &str) -> Result<Self, OtlpEndpointError> {
        let url = Url::parse(text).map_err(|error| OtlpEndpointError::Form(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            Err(OtlpEndpointError::Scheme(url.scheme().to_owned()))
        } else if !url.username().is_empty() || url.password().is_some() {
            Err(OtlpEndpointError::Credentials)
        } else if url.query().is_some() || url.fragment().is_some() {
            Err(OtlpEndpointError::Query)
        } else {
            Ok(Self(url))
        }
    }
}

impl TryFrom<String> for OtlpEndpoint {
    type Error = OtlpEndpointError;

    fn try_from(text: String) -> Result<Self, OtlpEndpointError> {
        text.parse()
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Headers for a collector. `Debug` shows their names and never their values.
#[derive(Clone, Debug, Default)]
pub struct OtlpHeaders(BTreeMap<String, SecretString>);

impl OtlpHeaders {
    /// The headers.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &SecretString)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Reads the form of the standard variable: `NAME=VALUE,NAME=VALUE`, values percent-encoded where needed.
    /// `None` for anything else.
    fn parse(text: &str) -> Option<Self> {
        let mut headers = BTreeMap::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=')?;
            let (name, value) = (name.trim(), decoded(value.trim())?);
            if HeaderName::from_str(name).is_err() || HeaderValue::from_str(&value).is_err() {
                return None;
            }
            headers.insert(name.to_ascii_lowercase(), SecretString::from(value));
        }
        Some(Self(headers))
    }
}

/// Text with its `%XX` replaced by the bytes they stand for. A `%` without two digits is an error, which `percent-encoding`
/// would leave as it is: a key that was cut is better told of than sent.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        match (*first, after) {
            (b'%', [high, low, after @ ..]) => {
                let digits = [char::from(*high).to_digit(16)?, char::from(*low).to_digit(16)?];
                bytes.push(u8::try_from(digits[0] * 16 + digits[1]).ok()?);
                rest = after;
            }
            (b'%', _) => return None,
            (byte, _) => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).ok()
}

/// Fills in what the environment says.
pub(super) fn from_environment(
    config: &mut TelemetryConfig,
    env: &Env,
    sources: &Sources,
    problems: &mut Vec<Problem>,
) {
    let endpoint_key = ["telemetry", "otlp_endpoint"];
    if !sources.has(&endpoint_key)
        && let Some(value) = env.get(OTLP_ENDPOINT).filter(|value| !value.is_empty())
    {
        match value.to_str().unwrap_or_default().parse() {
            Ok(endpoint) => config.otlp_endpoint = Some(endpoint),
            Err(error) => problems.push(Problem {
                origin: Origin::Environment(OTLP_ENDPOINT.to_owned()),
                key: String::new(),
                message: OtlpEndpointError::to_string(&error),
            }),
        }
    }
    let headers_key = ["telemetry", "otlp_headers_env"];
    let variable = &config.otlp_headers_env;
    match env.get(variable).filter(|value| !value.is_empty()).map(|value| value.to_str()) {
        // The standard variable is looked for, and any other one is asked for.
        None if variable == OTLP_HEADERS => {}
        None => problems.push(Problem {
            origin: sources.origin(&headers_key),
            key: headers_key.join("."),
            message: format!("names the variable {variable:?}, which is not set; set it, or take this key out"),
        }),
        Some(text) => match text.and_then(OtlpHeaders::parse) {
            Some(headers) => config.otlp_headers = headers,
            None => problems.push(Problem {
                origin: Origin::Environment(variable.clone()),
                key: String::new(),
                message: "holds no headers; expected NAME=VALUE,NAME=VALUE".to_owned(),
            }),
        },
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    #[test]
    fn signals_are_below_the_base() {
        for (base, expected) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
            ("https://host/otlp", "https://host/otlp/v1/traces"),
        ] {
            assert_eq!(base.parse::<OtlpEndpoint>().unwrap().signal("v1/traces").as_str(), expected);
        }
        for bad in ["", "127.0.0.1:4318", "grpc://x", "http://a:b@x", "http://x/?q", "http://x/#f"] {
            assert!(bad.parse::<OtlpEndpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn headers_are_read_and_never_shown() {
        let headers = OtlpHeaders::parse("X-Key=abc%20d, authorization=Basic%20eA==,").unwrap();
        let read: Vec<_> = headers.iter().map(|(name, value)| (name, value.expose_secret())).collect();
        assert_eq!(read, [("authorization", "Basic eA=="), ("x-key", "abc d")]);
        assert!(!format!("{headers:?}").contains("eA=="), "{headers:?}");
        for bad in ["x", "a b=c", "=c", "a=%", "a=%2", "a=%zz", "a=b%0Ac"] {
            assert!(OtlpHeaders::parse(bad).is_none(), "{bad}");
        }
    }
}
