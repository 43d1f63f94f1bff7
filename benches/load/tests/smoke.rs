//! The built tool, as a script uses it: its answers, its exit codes, its files.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;

use serde_json::Value;

fn load(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_load"))
        .args(arguments)
        .output()
        .expect("the built tool")
}

/// A file name of this test only.
fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()))
}

fn key() -> String {
    let file = scratch(&format!("key-{:?}", thread::current().id()).replace(['(', ')'], ""));
    file.to_str().expect("a plain path").to_owned()
}

#[test]
fn the_floor_is_measured_and_nothing_is_lost() {
    let run = load(&[
        "floor",
        "--rate",
        "200",
        "--seconds",
        "0.5",
        "--connections",
        "4",
        "--json",
    ]);
    assert!(run.status.success(), "{run:?}");
    let sheet: Value = serde_json::from_slice(&run.stdout).expect("one JSON object");
    assert_eq!(sheet["published"], 100);
    assert_eq!(sheet["delivered"], 100);
    assert_eq!(sheet["lost"], 0);
    let (p50, p99) = (&sheet["received_p50_ms"], &sheet["received_p99_ms"]);
    assert!(p50.as_f64() > Some(0.0) && p99.as_f64() >= p50.as_f64(), "{sheet}");
}

#[test]
fn a_key_is_made_once() {
    let file = key();
    let made = load(&["key", "--key", &file]);
    assert!(
        made.status.success() && made.stdout.starts_with(b"-----BEGIN PUBLIC KEY-----\n"),
        "{made:?}"
    );
    assert_eq!(load(&["key", "--key", &file]).stdout, made.stdout);
    fs::remove_file(&file).expect("the key was written");
}

#[test]
fn exit_codes_tell_no_result_from_a_bad_one() {
    let file = key();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let publish = [
        "publish",
        "--url",
        &url,
        "--key",
        &file,
        "--connections",
        "1",
        "--events",
        "3",
        "--warm-up",
        "0",
        "--json",
    ];
    let refusing = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the tool connects");
        let mut request = [0; 16 * 1024];
        while matches!(stream.read(&mut request), Ok(1..)) {
            stream
                .write_all(b"HTTP/1.1 429 Slow down\r\nContent-Length: 4\r\n\r\nlate")
                .expect("it listens");
        }
    });
    let refused = load(&publish);
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    let sheet: Value = serde_json::from_slice(&refused.stdout).expect("it was measured all the same");
    assert_eq!((&sheet["published"], &sheet["answered_429"]), (&0.into(), &3.into()));
    refusing.join().expect("the server ended with its connection");

    let nobody = load(&publish);
    assert_eq!(nobody.status.code(), Some(1), "nobody listens any more: {nobody:?}");
    assert_eq!(load(&["publish", "--batch", "101"]).status.code(), Some(2));
    fs::remove_file(&file).expect("the key was written");
}

#[test]
fn a_table_is_written_and_what_people_wrote_stays() {
    let (results, page, json) = (scratch("results"), scratch("page.md"), scratch("page.json"));
    let lines = concat!(
        r#"{"measure":"r1","round":1,"sheet":{"per_s":10000}}"#,
        "\n",
        r#"{"measure":"publish","round":1,"sheet":{"published_per_s":9000,"cpu_us_per_event":100}}"#,
    );
    fs::write(&results, lines).expect("a scratch file");
    let paths = [&results, &page, &json].map(|path| path.to_str().expect("a plain path"));
    let table = [
        "table",
        "--results",
        paths[0],
        "--markdown",
        paths[1],
        "--json-file",
        paths[2],
    ];
    let run = load(&table);
    assert!(run.status.success(), "{run:?}");
    let first = fs::read_to_string(&page).expect("the page");
    assert!(
        first.contains("0.90 | **missed**") && first.contains("100 µs | – | – | met"),
        "{first}"
    );
    fs::write(&page, format!("{first}\nThe disk bounds it.\n")).expect("the page");
    assert!(load(&table).status.success());
    assert!(
        fs::read_to_string(&page)
            .expect("the page")
            .ends_with("\nThe disk bounds it.\n")
    );
    let figures: Value = serde_json::from_slice(&fs::read(&json).expect("the figures")).expect("JSON");
    assert_eq!(figures["figures"][0]["ratio"], 0.9);
    for path in [results, page, json] {
        fs::remove_file(path).expect("it was written");
    }
}
