//! One line on a terminal that says how far a run is.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::account::Account;

/// Shows the account each second, where standard error is a terminal, until it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(Option<JoinHandle<()>>);

impl Progress {
    /// Starts to show.
    pub(crate) fn of(account: &Arc<Account>) -> Self {
        if !io::stderr().is_terminal() {
            return Self(None);
        }
        let account = Arc::clone(account);
        Self(Some(tokio::spawn(async move {
            let since = Instant::now();
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                let standing = account.standing();
                let _ = write!(
                    io::stderr(),
                    "\r\x1b[K{:>4} s  stored {}  arrived {}  waiting {}",
                    since.elapsed().as_secs(),
                    standing.stored,
                    standing.arrived,
                    standing.waiting
                );
            }
        })))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
