//! Where objects are kept: a directory, or a bucket of an S3-compatible store.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{BackoffConfig, ClientOptions, ObjectStoreExt, RetryConfig, WriteMultipart};
use url::{Host, Url};

use super::ArchiveError;
use super::object::{Hashed, Spool};
use crate::config::{Archive, ArchiveS3};

/// What is sent in one piece; larger objects go in parts.
const PART_BYTES: usize = 8 * 1024 * 1024;
/// Parts under way at once.
const PARTS_MAX: usize = 2;
/// How long one request may take without any answer.
const REQUEST_MAX: Duration = Duration::from_secs(60);
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How often, and for how long, a request is tried again.
const RETRIES_MAX: usize = 3;
const RETRY_MAX: Duration = Duration::from_secs(30);

/// A place for objects.
#[derive(Debug)]
pub enum Storage {
    /// A directory.
    Local(PathBuf),
    /// A bucket.
    S3(Box<Bucket>),
}

/// A bucket, and where files lie on the way to it and from it.
#[derive(Debug)]
pub struct Bucket {
    store: AmazonS3,
    prefix: String,
    name: String,
    scratch: PathBuf,
}

impl Storage {
    /// The place that is configured.
    pub fn open(archive: &Archive) -> Result<Self, ArchiveError> {
        match &archive.s3 {
            None => Ok(Self::Local(archive.dir.clone())),
            Some(s3) => Bucket::open(s3, archive.scratch.clone()).map(|bucket| Self::S3(Box::new(bucket))),
        }
    }

    /// Its name for people.
    pub fn name(&self) -> String {
        match self {
            Self::Local(dir) => format!("local:{}", dir.display()),
            Self::S3(bucket) => bucket.name.clone(),
        }
    }

    /// A small object; `None` where there is none.
    pub(super) async fn get(&self, key: &str) -> Result<Option<Vec<u8>>, ArchiveError> {
        let Some(hashed) = self.fetch(key).await? else {
            return Ok(None);
        };
        let path = hashed.path();
        fs::read(path).map(Some).map_err(failed("read", path))
    }

    /// An object as a file with its digest; `None` where there is none.
    pub(super) async fn fetch(&self, key: &str) -> Result<Option<Hashed>, ArchiveError> {
        match self {
            Self::Local(dir) => Hashed::existing(&dir.join(key)),
            Self::S3(bucket) => bucket.fetch(key).await,
        }
    }

    /// A file to fill, near to where it will be put.
    pub(super) fn spool(&self, key: &str) -> Result<Spool, ArchiveError> {
        match self {
            Self::Local(dir) => {
                let place = dir.join(key);
                let parent = place.parent().expect("a key below the directory");
                fs::create_dir_all(parent).map_err(failed("make", parent))?;
                // Left behind by a run that was ended; the month is locked, so nobody fills it.
                let path = place.with_extension("part");
                Spool::create(path)
            }
            Self::S3(bucket) => bucket.spool(),
        }
    }

    /// Puts a filled file in place of an object, whole or not at all.
    pub(super) async fn put(&self, key: &str, spool: &Spool) -> Result<(), ArchiveError> {
        match self {
            Self::Local(dir) => {
                let place = dir.join(key);
                spool.sync()?;
                fs::rename(spool.path(), &place).map_err(failed("write", &place))?;
                // The new name must outlive a power cut as the bytes do.
                let parent = place.parent().expect("a key below the directory");
                File::open(parent)
                    .and_then(|opened| opened.sync_all())
                    .map_err(failed("write", parent))
            }
            Self::S3(bucket) => bucket.put(key, spool.path()).await,
        }
    }

    /// Puts a small object in place, whole or not at all.
    pub(super) async fn put_bytes(&self, key: &str, bytes: &[u8]) -> Result<(), ArchiveError> {
        let spool = self.spool(key)?;
        spool.fill(bytes)?;
        self.put(key, &spool).await
    }
}

impl Bucket {
    fn open(s3: &ArchiveS3, scratch: PathBuf) -> Result<Self, ArchiveError> {
        let endpoint = s3.endpoint.as_deref().ok_or(ArchiveError::Settings(
            "EVENTS_ARCHIVE_S3_ENDPOINT must be set where EVENTS_ARCHIVE_S3_BUCKET is",
        ))?;
        let credentials = s3.credentials.as_ref().ok_or(ArchiveError::Settings(
            "EVENTS_ARCHIVE_S3_ACCESS_KEY_ID and EVENTS_ARCHIVE_S3_SECRET_ACCESS_KEY must be set where \
             EVENTS_ARCHIVE_S3_BUCKET is",
        ))?;
        let url = Url::parse(endpoint).map_err(|_| ArchiveError::Settings("EVENTS_ARCHIVE_S3_ENDPOINT is no URL"))?;
        let loopback = match url.host() {
            Some(Host::Domain(name)) => name == "localhost",
            Some(Host::Ipv4(address)) => address.is_loopback(),
            Some(Host::Ipv6(address)) => address.is_loopback(),
            None => false,
        };
        if url.scheme() != "https" && !loopback {
            return Err(ArchiveError::Settings(
                "EVENTS_ARCHIVE_S3_ENDPOINT must be an https address, unless it is on this machine",
            ));
        }
        let store = AmazonS3Builder::new()
            .with_bucket_name(&s3.bucket)
            .with_endpoint(endpoint)
            .with_region(&s3.region)
            .with_access_key_id(&credentials.access_key)
            .with_secret_access_key(credentials.secret_key.expose())
            .with_allow_http(loopback)
            .with_client_options(
                ClientOptions::new()
                    .with_allow_http(loopback)
                    .with_connect_timeout(CONNECT_MAX)
                    .with_timeout(REQUEST_MAX),
            )
            .with_retry(RetryConfig {
                backoff: BackoffConfig {
                    init_backoff: Duration::from_millis(100),
                    max_backoff: Duration::from_secs(2),
                    base: 2.0,
                },
                max_retries: RETRIES_MAX,
                retry_timeout: RETRY_MAX,
            })
            .build()
            .map_err(|source| ArchiveError::Bucket {
                storage: endpoint.to_owned(),
                key: s3.bucket.clone(),
                hint: "the bucket cannot be opened",
                source: Box::new(source),
            })?;
        let host = url.host_str().unwrap_or_default();
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        Ok(Self {
            store,
            name: format!("s3:{host}{port}/{}/{}", s3.bucket, s3.prefix),
            prefix: s3.prefix.clone(),
            scratch,
        })
    }

    fn key(&self, key: &str) -> Key {
        Key::from(format!("{}{key}", self.prefix))
    }

    fn spool(&self) -> Result<Spool, ArchiveError> {
        let name = format!("openvibe-events-archive-{:016x}.part", rand::random::<u64>());
        Spool::create(self.scratch.join(name))
    }

    async fn fetch(&self, key: &str) -> Result<Option<Hashed>, ArchiveError> {
        let got = match self.store.get(&self.key(key)).await {
            Ok(got) => got,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(self.failed(key, error)),
        };
        let mut filling = self.spool()?.hashing()?;
        let mut chunks = got.into_stream();
        while let Some(chunk) = chunks.next().await {
            filling.write(&chunk.map_err(|error| self.failed(key, error))?)?;
        }
        filling.finish().map(Some)
    }

    async fn put(&self, key: &str, path: &Path) -> Result<(), ArchiveError> {
        let mut file = File::open(path).map_err(failed("read", path))?;
        let mut part = read_part(&mut file).map_err(failed("read", path))?;
        let put = if part.len() < PART_BYTES {
            self.store.put(&self.key(key), part.into()).await.map(|_| ())
        } else {
            let upload = self.store.put_multipart(&self.key(key)).await;
            let upload = upload.map_err(|error| self.failed(key, error))?;
            let mut upload = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
            loop {
                if let Err(error) = upload.wait_for_capacity(PARTS_MAX).await {
                    // Parts that were sent cost room until they are given up; that may fail as well.
                    let _ = upload.abort().await;
                    return Err(self.failed(key, error));
                }
                if part.is_empty() {
                    break;
                }
                upload.put(part.into());
                part = read_part(&mut file).map_err(failed("read", path))?;
            }
            upload.finish().await.map(|_| ())
        };
        match put {
            // Told by a server that took the object and named no ETag. What it took is read back before anything is deleted.
            Err(error) if chain(&error).contains("ETag Header missing") => Ok(()),
            put => put.map_err(|error| self.failed(key, error)),
        }
    }

    fn failed(&self, key: &str, source: object_store::Error) -> ArchiveError {
        let text = chain(&source);
        let hint = if text.contains("RequestTimeTooSkewed") {
            "the clocks of this machine and of the bucket's server differ too much"
        } else if text.contains("SignatureDoesNotMatch") || text.contains("InvalidAccessKeyId") {
            "the bucket's server does not know this access key, or its secret is another"
        } else if text.contains("AccessDenied") || text.contains("403") {
            "the bucket's server does not allow this"
        } else if text.contains("NoSuchBucket") {
            "there is no such bucket"
        } else {
            "the bucket's server did not do its part; run the command again"
        };
        ArchiveError::Bucket {
            storage: self.name.clone(),
            key: key.to_owned(),
            hint,
            source: Box::new(source),
        }
    }
}

/// The next part of a file; less than a whole one is the last, empty there is none.
fn read_part(file: &mut File) -> io::Result<Vec<u8>> {
    let mut part = Vec::new();
    file.take(u64::try_from(PART_BYTES).expect("some megabytes"))
        .read_to_end(&mut part)?;
    Ok(part)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// Opens a file that only its owner's group may read, anew.
pub(super) fn create(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    OpenOptions::new()
        .write(true)
        .read(true)
        .create_new(true)
        .mode(0o640)
        .open(path)
}

/// What a file could not be used for.
pub(super) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ArchiveError {
    let path = path.to_owned();
    move |source| ArchiveError::File { what, path, source }
}

impl Spool {
    fn fill(&self, bytes: &[u8]) -> Result<(), ArchiveError> {
        let mut file = self.file();
        file.write_all(bytes).map_err(failed("write", self.path()))
    }
}
