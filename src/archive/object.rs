//! Objects as files: filled with their digest, read line by line.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::manifest::Contents;
use super::storage::{self, failed};
use super::{ArchiveError, Month};
use crate::domain::packed::PackedEvent;

/// Longest line; an event is far smaller.
const LINE_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// A file on its way, gone when this is dropped.
#[derive(Debug)]
pub(super) struct Spool {
    path: PathBuf,
    file: File,
}

impl Spool {
    pub(super) fn create(path: PathBuf) -> Result<Self, ArchiveError> {
        let file = storage::create(&path).map_err(failed("make", &path))?;
        Ok(Self { path, file })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn sync(&self) -> Result<(), ArchiveError> {
        self.file.sync_all().map_err(failed("write", &self.path))
    }

    pub(super) fn hashing(self) -> Result<Filling, ArchiveError> {
        let file = self.file.try_clone().map_err(failed("write", &self.path))?;
        Ok(Filling {
            file: BufWriter::new(file),
            digest: Digesting::default(),
            spool: self,
        })
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        // Renamed to its place, it is not there any more.
        let _ = fs::remove_file(&self.path);
    }
}

#[derive(Debug, Default)]
struct Digesting {
    sha256: Sha256,
    bytes: u64,
}

impl Digesting {
    fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        self.bytes += u64::try_from(bytes.len()).expect("a buffer");
    }

    fn end(self) -> (String, u64) {
        (hex::encode(self.sha256.finalize()), self.bytes)
    }
}

/// A file that is being filled.
pub(super) struct Filling {
    file: BufWriter<File>,
    digest: Digesting,
    spool: Spool,
}

impl Filling {
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.digest.update(bytes);
        self.file.write_all(bytes).map_err(failed("write", &self.spool.path))
    }

    pub(super) fn finish(mut self) -> Result<Hashed, ArchiveError> {
        self.file.flush().map_err(failed("write", &self.spool.path))?;
        let (sha256, bytes) = self.digest.end();
        Ok(Hashed {
            sha256,
            bytes,
            place: Place::Spooled(self.spool),
        })
    }
}

impl Write for Filling {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.digest.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

#[derive(Debug)]
enum Place {
    /// Where it is kept.
    Kept(PathBuf),
    /// A copy, or not yet there.
    Spooled(Spool),
}

/// A whole file and its digest.
#[derive(Debug)]
pub(super) struct Hashed {
    pub(super) sha256: String,
    pub(super) bytes: u64,
    place: Place,
}

impl Hashed {
    /// The digest of a file that is kept; `None` where there is none.
    pub(super) fn existing(path: &Path) -> Result<Option<Self>, ArchiveError> {
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("read", path)(error)),
        };
        let (mut digest, mut buffer) = (Digesting::default(), vec![0; 64 * 1024]);
        loop {
            let read = file.read(&mut buffer).map_err(failed("read", path))?;
            if read == 0 {
                break;
            }
            digest.update(&buffer[..read]);
        }
        let (sha256, bytes) = digest.end();
        Ok(Some(Self {
            sha256,
            bytes,
            place: Place::Kept(path.to_owned()),
        }))
    }

    pub(super) fn path(&self) -> &Path {
        match &self.place {
            Place::Kept(path) => path,
            Place::Spooled(spool) => &spool.path,
        }
    }

    /// The file to put in place, where it is one.
    pub(super) fn spool(&self) -> Option<&Spool> {
        match &self.place {
            Place::Kept(_) => None,
            Place::Spooled(spool) => Some(spool),
        }
    }

    /// Whether it is what a manifest says, as far as a digest tells.
    pub(super) fn is(&self, contents: &Contents) -> bool {
        self.sha256 == contents.sha256 && self.bytes == contents.bytes
    }

    /// Its lines.
    pub(super) fn lines(&self, month: Month) -> Result<Lines, ArchiveError> {
        let file = File::open(self.path()).map_err(failed("read", self.path()))?;
        Ok(Lines {
            month,
            reader: BufReader::with_capacity(64 * 1024, GzDecoder::new(BufReader::with_capacity(64 * 1024, file))),
            number: 0,
            last: (i64::MIN, i64::MIN),
        })
    }
}

/// A line of an object and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// As it is in the object, without its end.
    pub(super) text: String,
    /// What it says.
    pub(super) event: PackedEvent,
}

impl Line {
    /// A row as a line.
    pub(super) fn of(event: PackedEvent) -> Self {
        let text = serde_json::to_string(&event).expect("a row is plain data");
        Self { text, event }
    }

    /// Its place among the lines.
    pub(super) fn place(&self) -> (i64, i64) {
        (self.event.epoch, self.event.seq)
    }
}

/// Reads an object line by line, refusing what does not belong there.
pub(super) struct Lines {
    month: Month,
    reader: BufReader<GzDecoder<BufReader<File>>>,
    number: u64,
    last: (i64, i64),
}

impl Lines {
    /// The next line; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<Line>, ArchiveError> {
        self.number += 1;
        let number = self.number;
        let unusable = |what: String| ArchiveError::Unusable {
            key: self.month.object(),
            what: format!("line {number} {what}"),
        };
        let mut text = Vec::new();
        let read = (&mut self.reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut text);
        let read = read.map_err(|error| unusable(format!("cannot be unpacked ({error})")))?;
        if read == 0 {
            return Ok(None);
        }
        if text.pop() != Some(b'\n') {
            return Err(unusable("is cut".to_owned()));
        }
        let event = PackedEvent::deserialize(&mut serde_json::Deserializer::from_slice(&text))
            .map_err(|error| unusable(format!("is no event ({error})")))?;
        if !(self.month.start_ms()..self.month.end_ms()).contains(&event.received_at) {
            return Err(unusable(format!("is not of {}", self.month)));
        }
        let text = String::from_utf8(text).map_err(|_| unusable("is no text".to_owned()))?;
        let line = Line { text, event };
        if line.place() <= self.last {
            return Err(unusable("is out of order".to_owned()));
        }
        self.last = line.place();
        Ok(Some(line))
    }

    /// Up to `most` lines; none at the end.
    pub(super) fn page(&mut self, most: usize) -> Result<Vec<Line>, ArchiveError> {
        let mut page = Vec::new();
        while page.len() < most
            && let Some(line) = self.next()?
        {
            page.push(line);
        }
        Ok(page)
    }
}

/// Writes an object line by line.
pub(super) struct Writer {
    gzip: GzEncoder<Filling>,
    pub(super) count: u64,
}

impl Writer {
    pub(super) fn new(spool: Spool) -> Result<Self, ArchiveError> {
        Ok(Self {
            gzip: GzEncoder::new(spool.hashing()?, Compression::new(6)),
            count: 0,
        })
    }

    pub(super) fn write(&mut self, line: &Line) -> Result<(), ArchiveError> {
        let written = self
            .gzip
            .write_all(line.text.as_bytes())
            .and_then(|()| self.gzip.write_all(b"\n"));
        self.count += 1;
        written.map_err(failed("write", &self.gzip.get_ref().spool.path))
    }

    pub(super) fn finish(self) -> Result<(Hashed, Contents), ArchiveError> {
        let path = self.gzip.get_ref().spool.path.clone();
        let hashed = self.gzip.finish().map_err(failed("write", &path))?.finish()?;
        let contents = Contents {
            count: self.count,
            sha256: hashed.sha256.clone(),
            bytes: hashed.bytes,
        };
        Ok((hashed, contents))
    }
}
