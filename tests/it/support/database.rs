//! Databases of a test's own: clones of one migrated template, dropped when the test ends.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use openvibe_events::store::{self, Addresses};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use sqlx::{
    AssertSqlSafe, Connection, PgConnection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::sync::OnceCell;
use url::Url;

/// The advisory lock (on the server's own database) under which a template is looked for and built.
const TEMPLATE_LOCK: i64 = 0x6f76_5f74_656d_706c;

/// A database that nobody else uses.
#[derive(Debug)]
pub(crate) struct Database {
    server: Server,
    name: String,
    url: Url,
    pool: PgPool,
}

/// A PostgreSQL server, by the URL of an administrator.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    url: Url,
    /// Its databases end with it.
    private: bool,
}

impl Server {
    /// The one that most tests share.
    pub(crate) fn shared() -> Self {
        Self::named("OV_TEST_PG_URL", "postgres")
    }

    /// PostgreSQL 18, shared.
    pub(crate) fn eighteen() -> Self {
        Self::named("OV_TEST_PG18_URL", "postgres18")
    }

    /// A server of the test's own, which may be killed and ends with the test.
    pub(crate) fn private(url: &str) -> Self {
        Self {
            url: Url::parse(url).expect("the URL of a server"),
            private: true,
        }
    }

    fn named(variable: &str, service: &str) -> Self {
        let Ok(url) = std::env::var(variable) else {
            panic!("{variable} is not set; run: eval \"$(scripts/services.sh up {service})\"");
        };
        Self {
            url: Url::parse(&url).unwrap_or_else(|error| panic!("{variable} is no postgres:// URL: {error}")),
            private: false,
        }
    }

    /// A connection of its administrator.
    pub(crate) async fn admin(&self) -> PgConnection {
        PgConnection::connect(self.url.as_str())
            .await
            .unwrap_or_else(|error| panic!("no server answers at the test's URL: {error}"))
    }

    /// The name of the template for the migrations as they are now.
    async fn template(&self) -> String {
        static TEMPLATES: Mutex<BTreeMap<String, Arc<OnceCell<String>>>> = Mutex::new(BTreeMap::new());
        let cell = Arc::clone(TEMPLATES.lock().entry(self.url.to_string()).or_default());
        cell.get_or_init(|| ready_template(self)).await.clone()
    }
}

impl Database {
    /// A fresh database with every migration applied.
    pub(crate) async fn create() -> Self {
        Self::create_on(&Server::shared()).await
    }

    /// As [`Database::create`], on this server.
    pub(crate) async fn create_on(server: &Server) -> Self {
        Self::clone_of(server, &server.template().await).await
    }

    /// A fresh database without a single table.
    pub(crate) async fn empty() -> Self {
        Self::empty_on(&Server::shared()).await
    }

    /// As [`Database::empty`], on this server.
    pub(crate) async fn empty_on(server: &Server) -> Self {
        Self::clone_of(server, "template0").await
    }

    /// The URL of the database, with the rights to change its schema.
    pub(crate) fn url(&self) -> &str {
        self.url.as_str()
    }

    /// The same database as seen through another address, such as a proxy's.
    pub(crate) fn url_through(&self, address: std::net::SocketAddr) -> String {
        let mut url = self.url.clone();
        url.set_ip_host(address.ip())
            .expect("a server URL has a host to replace");
        url.set_port(Some(address.port()))
            .expect("a server URL has a port to replace");
        url.into()
    }

    /// The host and port of the server, for a proxy in front of it.
    pub(crate) fn server(&self) -> String {
        let host = self.url.host_str().expect("a server URL has a host");
        format!("{host}:{}", self.url.port().unwrap_or(5432))
    }

    /// A small pool of the test's own, for looking at and preparing rows.
    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// The name of the database.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    async fn clone_of(server: &Server, template: &str) -> Self {
        let name = format!("ov_it_{}", ulid::Ulid::generate().to_string().to_lowercase());
        let mut admin = server.admin().await;
        // Copying by WAL keeps clones from forcing checkpoints on each other.
        run(
            &mut admin,
            &format!("CREATE DATABASE {name} TEMPLATE {template} STRATEGY WAL_LOG ENCODING 'UTF8'"),
        )
        .await;
        admin.close().await.ok();
        let mut url = server.url.clone();
        url.set_path(&name);
        let options: PgConnectOptions = url
            .as_str()
            .parse()
            .expect("a database URL made from a good server URL");
        let pool = PgPoolOptions::new().max_connections(4).connect_lazy_with(options);
        Self {
            server: server.clone(),
            name,
            url,
            pool,
        }
    }
}

impl Drop for Database {
    /// Drops the database whoever is still connected, and waits for it: the process may end right after.
    fn drop(&mut self) {
        if self.server.private {
            return;
        }
        let (name, server) = (self.name.clone(), self.server.clone());
        let dropped = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime of its own for the clean-up").block_on(async {
                run(
                    &mut server.admin().await,
                    &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"),
                )
                .await;
            });
        });
        if dropped.join().is_err() {
            eprintln!("the test database {} is left behind", self.name);
        }
    }
}

/// The name of the template for the migrations as they are now, built if it is not there.
///
/// The name holds a hash of the migrations, so an old template is never taken for a new one. A finished template
/// carries PostgreSQL's own template mark: one without it was being built when its builder died, and is built anew.
async fn ready_template(server: &Server) -> String {
    let name = format!(
        "ov_template_{}",
        migrations_hash(&Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations"))
    );
    let mut admin = server.admin().await;
    sqlx::query("SELECT pg_advisory_lock($1)")
        .bind(TEMPLATE_LOCK)
        .execute(&mut admin)
        .await
        .expect("the lock");
    let finished: Option<bool> = sqlx::query_scalar("SELECT datistemplate FROM pg_database WHERE datname = $1")
        .bind(&name)
        .fetch_optional(&mut admin)
        .await
        .expect("a look at the server's databases");
    if finished != Some(true) {
        run(&mut admin, &format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
        run(
            &mut admin,
            &format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'"),
        )
        .await;
        let mut url = server.url.clone();
        url.set_path(&name);
        migrate(url.as_str()).await;
        run(
            &mut admin,
            &format!("ALTER DATABASE {name} WITH IS_TEMPLATE true ALLOW_CONNECTIONS false"),
        )
        .await;
    }
    // Closing the connection gives the lock back.
    admin.close().await.expect("a clean end of the connection");
    name
}

/// The one call into the product: every migration, as a process applies them at its start.
async fn migrate(url: &str) {
    let addresses = Addresses::parse(url, url).expect("a database URL made from a good server URL");
    store::migrate(&addresses)
        .await
        .expect("every migration applies to an empty database");
}

/// The first 16 hex digits of a hash over the names and contents of every file below `directory`.
pub(crate) fn migrations_hash(directory: &Path) -> String {
    let mut hash = Sha256::new();
    for file in files_below(directory) {
        let content = fs::read(&file).expect("a readable migration");
        hash.update(
            file.strip_prefix(directory)
                .expect("a file below it")
                .to_string_lossy()
                .as_bytes(),
        );
        hash.update([0]);
        hash.update((content.len() as u64).to_be_bytes());
        hash.update(content);
    }
    hex::encode(&hash.finalize()[..8])
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut files = Vec::new();
    for path in entries.map(|entry| entry.expect("a readable directory").path()) {
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

async fn run(connection: &mut PgConnection, statement: &str) {
    // Names cannot be bound as parameters; these are made here from letters, digits and underscores.
    sqlx::raw_sql(AssertSqlSafe(statement))
        .execute(connection)
        .await
        .unwrap_or_else(|error| panic!("{statement}: {error}"));
}
