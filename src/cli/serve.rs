//! `serve`: the service, until SIGTERM or SIGINT.

use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::App;
use crate::config::Config;
use crate::telemetry;

/// The longest stop; a process that hangs must not hold up a deploy.
const STOP_MAX: Duration = Duration::from_secs(10);

/// Serves, with the pages in front that only a development service has.
pub(super) fn main(pages: Option<fn(&Config) -> Router>) -> ExitCode {
    let (config, database) = match super::configured() {
        Ok(configured) => configured,
        Err(code) => return code,
    };
    if let Err(message) = telemetry::log_to_stderr(&config.log_filter, config.log_format) {
        return super::refused(&message);
    }
    let runtime = match super::runtime::build() {
        Ok(runtime) => runtime,
        Err(error) => return super::failed(&error),
    };
    runtime.block_on(async {
        let stop = CancellationToken::new();
        if let Err(error) = stop_on_signals(stop.clone()) {
            return super::failed(&error);
        }
        let started = tokio::select! {
            started = App::start(&config, &database) => started,
            // Asked to stop before there was anything to stop.
            () = stop.cancelled() => return ExitCode::SUCCESS,
        };
        let app = match started {
            Ok(app) => match pages {
                Some(pages) => app.behind(pages(&config)),
                None => app,
            },
            Err(error) => return super::failed(&error),
        };
        let deadline = async {
            stop.cancelled().await;
            tokio::time::sleep(STOP_MAX).await;
        };
        tokio::select! {
            ended = app.serve(stop.clone()) => match ended {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => super::failed(&error),
            },
            () = deadline => {
                tracing::error!("the stop took longer than {STOP_MAX:?}; what is unfinished is left to its leases");
                ExitCode::FAILURE
            }
        }
    })
}

/// Cancels `stop` at the first SIGTERM or SIGINT.
fn stop_on_signals(stop: CancellationToken) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.cancel();
    });
    Ok(())
}
