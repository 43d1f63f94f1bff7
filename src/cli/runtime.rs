//! The threads that the service runs on.

use std::io;
use std::thread::available_parallelism;

use tokio::runtime::{Builder, Runtime};

/// The runtime of a process: a worker thread for every two processors, since PostgreSQL usually has the others. Work that
/// is not handed to and fro between threads is answered sooner.
pub(super) fn build() -> io::Result<Runtime> {
    let threads = available_parallelism()?.get().div_ceil(2);
    Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}
