//! A real PgBouncer in transaction mode, of a test's own.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use url::Url;

use super::{
    database::Database,
    process::{Account, Directory, kill_family},
    service::free_port,
    wait::{SOON, eventually},
};

/// A running PgBouncer in front of one database. It ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct PgBouncer {
    url: String,
    directory: Directory,
    program: Child,
}

impl PgBouncer {
    /// Starts one that gives all its clients together so many server connections.
    pub(crate) async fn start(database: &Database, connections: u32) -> Self {
        let Some(binary) = std::env::var_os("OV_TEST_PGBOUNCER") else {
            panic!("OV_TEST_PGBOUNCER is not set; run: eval \"$(scripts/services.sh up pgbouncer)\"");
        };
        let account = Account::for_servers();
        let directory = account.directory("pgbouncer");
        let port = free_port();
        let server = Url::parse(database.url()).expect("a database URL");
        let password = server
            .password()
            .map(|word| format!(" password={word}"))
            .unwrap_or_default();
        let configuration = format!(
            "[databases]\n* = host={} port={} user={}{password}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
             default_pool_size = {connections}\nmax_db_connections = {connections}\nmax_client_conn = 200\n\
             log_connections = 0\nlog_disconnections = 0\nlogfile = {}\n",
            server.host_str().expect("a host"),
            server.port().unwrap_or(5432),
            server.username(),
            directory.path().join("log").display(),
        );
        let path = directory.path().join("pgbouncer.ini");
        fs::write(&path, configuration).expect("a configuration");
        let mut command = Command::new(PathBuf::from(binary));
        command
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        account.lend_to(&mut command);
        let mut url = server;
        url.set_ip_host([127, 0, 0, 1].into()).expect("a host to replace");
        url.set_port(Some(port)).expect("a port to replace");
        let bouncer = Self {
            url: url.into(),
            directory,
            program: command.spawn().expect("PgBouncer starts"),
        };
        eventually(
            "PgBouncer answers",
            SOON,
            async || match tokio::net::TcpStream::connect(("127.0.0.1", port)).await {
                Ok(_) => Ok(()),
                Err(error) => Err(format!("{error}\n{}", bouncer.log())),
            },
        )
        .await;
        bouncer
    }

    /// The database's URL through it.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// What it has written.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.directory.path().join("log")).unwrap_or_default()).into_owned()
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("PgBouncer wrote:\n{}", self.log());
        }
        kill_family(&mut self.program);
    }
}
