//! Holds `contracts/` to its own rules: schemas compile, stay inside the folder, and judge their fixtures rightly.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::contracts::{self, Contract, all, assert_valid, entries, folder, read_json};

#[test]
fn every_schema_names_its_dialect_and_its_own_place() {
    for contract in all().values() {
        let path = contract.path.display();
        assert_eq!(
            contract.schema["$schema"], "https://json-schema.org/draft/2020-12/schema",
            "{path}"
        );
        assert_eq!(contract.schema["$id"], contracts::uri(&contract.path), "{path}");
        for text in ["title", "description"] {
            assert!(
                contract.schema[text].as_str().is_some_and(|text| !text.is_empty()),
                "{path} has no {text}"
            );
        }
    }
}

#[test]
fn no_schema_refers_outside_the_folder() {
    let files: BTreeSet<PathBuf> = all().values().map(|contract| contract.path.clone()).collect();
    for contract in all().values() {
        each_ref(&contract.schema, &mut |target| {
            let path = contract.path.display();
            assert!(!target.contains("://"), "{path}: {target} is not relative");
            let file = target.split('#').next().unwrap_or_default();
            let inside = file.is_empty() || files.contains(&joined(&contract.path, file));
            assert!(inside, "{path}: {target} is not a schema of contracts/");
        });
    }
}

#[test]
fn every_schema_accepts_its_valid_fixtures() {
    each_fixture("valid", |contract, file, value| {
        let mistakes = contract.mistakes(value);
        assert!(
            mistakes.is_empty(),
            "{} is refused:\n  {}",
            file.display(),
            mistakes.join("\n  ")
        );
    });
}

#[test]
fn every_schema_refuses_its_invalid_fixtures() {
    each_fixture("invalid", |contract, file, value| {
        assert!(!contract.mistakes(value).is_empty(), "{} is accepted", file.display());
    });
}

#[test]
fn every_fixture_belongs_to_a_schema() {
    let owned: BTreeSet<PathBuf> = all().values().map(fixture_folder).collect();
    for area in entries(&folder()).iter().filter(|path| path.is_dir()) {
        for found in entries(&area.join("fixtures")) {
            assert!(owned.contains(&found), "{} has no schema", found.display());
            for kind in entries(&found) {
                assert!(
                    kind.ends_with("valid") || kind.ends_with("invalid"),
                    "{} is never read",
                    kind.display()
                );
            }
        }
    }
}

#[test]
fn lists_end_at_their_stated_length() {
    for (id, fixture, list, most) in [
        ("events.publish-request@1", "batch-of-one", "events", 100),
        ("events.publish-result@1", "batch-with-a-pruned-repeat", "results", 100),
        ("events.read-result@1", "page", "events", 1000),
        ("events.delivery-admin-request@1", "by-event-ids", "event_ids", 1000),
        ("events.delivery-admin-result@1", "list", "deliveries", 1000),
    ] {
        let contract = &all()[id];
        let mut value = read_json(&fixture_folder(contract).join(format!("valid/{fixture}.json")));
        let item = value[list][0].clone();
        value[list] = Value::Array(vec![item.clone(); most]);
        assert_valid(id, &value);
        value[list] = Value::Array(vec![item; most + 1]);
        assert!(!contract.mistakes(&value).is_empty(), "{id} takes {} {list}", most + 1);
    }
}

#[test]
fn every_mistake_is_reported_with_its_place() {
    let envelope = json!({
        "event_id": "evt_1", "event_type": "media.vod.ready", "version": 1, "source": "media",
        "actor": { "type": "service", "id": "media" }, "timestamp": "2026-10-21T08:15:30",
        "subject": { "type": "vod" }, "payload": {},
    });
    let mut places: Vec<String> = all()["events.event-envelope@1"]
        .mistakes(&envelope)
        .iter()
        .map(|mistake| mistake.split(": ").next().unwrap_or_default().to_owned())
        .collect();
    places.sort();
    assert_eq!(places, ["/event_id", "/subject", "/timestamp"]);
}

#[test]
#[should_panic(expected = "no contract events.event-envelope@2")]
fn an_unknown_major_is_not_silently_valid() {
    assert_valid("events.event-envelope@2", &json!({}));
}

/// Calls `judge` with each fixture of `kind`, and fails for a contract that has none.
fn each_fixture(kind: &str, judge: impl Fn(&Contract, &Path, &Value)) {
    for (id, contract) in all() {
        let files = entries(&fixture_folder(contract).join(kind));
        assert!(!files.is_empty(), "{id} has no {kind} fixture");
        for file in files {
            judge(contract, &file, &read_json(&file));
        }
    }
}

/// `events/cursor.v1.json` keeps its fixtures in `events/fixtures/cursor.v1`.
fn fixture_folder(contract: &Contract) -> PathBuf {
    contract
        .path
        .with_file_name("fixtures")
        .join(contract.path.file_stem().expect("a schema file has a name"))
}

/// Calls `visit` with the target of every reference in `schema`.
fn each_ref(schema: &Value, visit: &mut impl FnMut(&str)) {
    match schema {
        Value::Object(members) => {
            for (name, member) in members {
                match member {
                    Value::String(target) if name == "$ref" || name == "$dynamicRef" => visit(target),
                    other => each_ref(other, visit),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| each_ref(item, visit)),
        _ => {}
    }
}

/// The file that `relative` names for a reader of `from`.
fn joined(from: &Path, relative: &str) -> PathBuf {
    relative.split('/').fold(
        from.parent().expect("a file has a folder").to_owned(),
        |mut at, segment| {
            match segment {
                ".." => {
                    at.pop();
                }
                name => at.push(name),
            }
            at
        },
    )
}
