//! Checks JSON values against the schemas of `contracts/`. Reads that folder only, never the network.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use jsonschema::{Registry, Validator};
use serde_json::Value;

/// What every schema's `$id` starts with; the file's path in `contracts/` follows.
const ID_BASE: &str = "https://openvibe.network/contracts/";

/// One schema of `contracts/`, ready to judge values.
pub(crate) struct Contract {
    /// The schema's file.
    pub(crate) path: PathBuf,
    /// The schema as written.
    pub(crate) schema: Value,
    validator: Validator,
}

impl Contract {
    /// Every mistake of `value`, each as a JSON Pointer and a message; empty when it is valid.
    pub(crate) fn mistakes(&self, value: &Value) -> Vec<String> {
        let describe = |error: jsonschema::ValidationError<'_>| match error.instance_path().as_str() {
            "" => format!("/: {error}"),
            pointer => format!("{pointer}: {error}"),
        };
        self.validator.iter_errors(value).map(describe).collect()
    }
}

/// All contracts by id, such as `events.event-envelope@1`.
///
/// # Panics
///
/// When a file is not JSON or a schema does not compile, naming the file.
pub(crate) fn all() -> &'static BTreeMap<String, Contract> {
    static ALL: LazyLock<BTreeMap<String, Contract>> = LazyLock::new(load);
    &ALL
}

/// Fails the test, with every mistake in the message, unless `value` fulfils the contract `id@major`.
///
/// ```ignore
/// assert_valid("events.publish-result@1", &answer);
/// ```
#[track_caller]
pub(crate) fn assert_valid(contract: &str, value: &Value) {
    let known = || all().keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let found = all()
        .get(contract)
        .unwrap_or_else(|| panic!("no contract {contract}; there are {}", known()));
    let mistakes = found.mistakes(value);
    assert!(
        mistakes.is_empty(),
        "not a valid {contract}:\n  {}\nin {value:#}",
        mistakes.join("\n  ")
    );
}

/// The folder the schemas live in.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("contracts")
}

/// The JSON value in the file at `path`.
pub(crate) fn read_json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The paths in `folder` in the order of their names; none when there is no such folder.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(listing) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut paths: Vec<PathBuf> = listing.map(|entry| entry.expect("a readable folder").path()).collect();
    paths.sort();
    paths
}

fn load() -> BTreeMap<String, Contract> {
    let files: Vec<(PathBuf, Value)> = entries(&folder())
        .iter()
        .flat_map(|area| entries(area))
        .filter(|path| path.is_file())
        .map(|path| {
            let schema = read_json(&path);
            (path, schema)
        })
        .collect();
    let documents = files.iter().map(|(path, schema)| (uri(path), schema));
    let registry = Registry::new()
        .extend(documents)
        .and_then(|builder| builder.prepare())
        .unwrap_or_else(|error| panic!("a schema refers to what is not in contracts/: {error}"));
    files
        .iter()
        .map(|(path, schema)| {
            let validator = jsonschema::draft202012::options()
                .should_validate_formats(true)
                .should_ignore_unknown_formats(false)
                .with_base_uri(uri(path))
                .with_registry(&registry)
                .offline()
                .build(schema)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (
                id(path),
                Contract {
                    path: path.clone(),
                    schema: schema.clone(),
                    validator,
                },
            )
        })
        .collect()
}

/// The `$id` that belongs to the schema file at `path`.
pub(crate) fn uri(path: &Path) -> String {
    let inside = path.strip_prefix(folder()).expect("a path below contracts/");
    format!("{ID_BASE}{}", inside.to_str().expect("an ASCII path"))
}

/// `…/events/cursor.v1.json` is `events.cursor@1`.
fn id(path: &Path) -> String {
    let named = || {
        let area = path.parent()?.file_name()?.to_str()?;
        let (name, major) = path.file_name()?.to_str()?.strip_suffix(".json")?.rsplit_once(".v")?;
        Some(format!("{area}.{name}@{major}"))
    };
    named().unwrap_or_else(|| panic!("{} is not named <area>/<name>.v<major>.json", path.display()))
}
