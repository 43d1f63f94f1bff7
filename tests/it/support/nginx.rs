//! A real nginx with the shipped configuration, of a test's own.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{
    process::{Account, Directory, kill_family},
    service::{Service, free_port},
    wait::{SOON, eventually},
};

/// A running nginx in front of services. It ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Nginx {
    plain: String,
    secure: String,
    directory: Directory,
    program: Child,
}

impl Nginx {
    /// Starts one with the files of `deploy/nginx`, in which only addresses and places are the test's.
    pub(crate) async fn start(services: &[Service]) -> Self {
        let Some(binary) = std::env::var_os("OV_TEST_NGINX") else {
            panic!("OV_TEST_NGINX is not set; run: eval \"$(scripts/services.sh up nginx)\"");
        };
        let directory = Account::for_servers().directory("nginx");
        let (plain, secure) = (free_port(), free_port());
        let own = |name: &str| directory.path().join(name).display().to_string();
        let tls = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/support/tls");
        for name in ["server.pem", "server-key.pem"] {
            fs::copy(Path::new(tls).join(name), own(name)).expect("a certificate of these tests");
        }
        let upstream: String = services
            .iter()
            .map(|service| format!("server {};", service.base().trim_start_matches("http://")))
            .collect();
        let mut site = shipped("openvibe.events.conf");
        for (given, ours) in [
            ("server 127.0.0.1:4300;", upstream),
            ("    listen [::]:80;\n", String::new()),
            ("    listen [::]:443 ssl http2;\n", String::new()),
            ("listen 80;", format!("listen 127.0.0.1:{plain};")),
            ("listen 443 ssl http2;", format!("listen 127.0.0.1:{secure} ssl http2;")),
            ("/etc/letsencrypt/live/openvibe.events/fullchain.pem", own("server.pem")),
            (
                "/etc/letsencrypt/live/openvibe.events/privkey.pem",
                own("server-key.pem"),
            ),
            ("/var/log/nginx/", own("")),
        ] {
            assert!(site.contains(given), "the shipped configuration has no {given:?}");
            site = site.replace(given, &ours);
        }
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|name| format!("{name}_temp_path {};\n", own(name)))
            .collect();
        let whole = format!(
            "daemon off;\nmaster_process off;\npid {};\nerror_log {} info;\nevents {{ worker_connections 4096; }}\n\
             http {{\naccess_log off;\n{temporary}{}\n{site}\n}}\n",
            own("pid"),
            own("main.error.log"),
            shipped("log_format_events_noquery.conf"),
        );
        fs::write(own("nginx.conf"), whole).expect("a configuration");
        let mut command = Command::new(PathBuf::from(binary));
        command
            .args(["-p", &own(""), "-e", &own("main.error.log"), "-c", &own("nginx.conf")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let nginx = Self {
            plain: format!("http://127.0.0.1:{plain}"),
            secure: format!("https://127.0.0.1:{secure}"),
            program: command.spawn().expect("nginx starts"),
            directory,
        };
        eventually("nginx answers", SOON, async || {
            match tokio::net::TcpStream::connect(("127.0.0.1", secure)).await {
                Ok(_) => Ok(()),
                Err(error) => Err(format!("{error}\n{}", nginx.log("main.error.log"))),
            }
        })
        .await;
        nginx
    }

    /// `https://127.0.0.1:port`.
    pub(crate) fn secure(&self) -> &str {
        &self.secure
    }

    /// `http://127.0.0.1:port`.
    pub(crate) fn plain(&self) -> &str {
        &self.plain
    }

    /// What it has written of every request.
    pub(crate) fn access_log(&self) -> String {
        self.log("openvibe.events.access.log")
    }

    /// Everything it has written anywhere.
    pub(crate) fn logs(&self) -> String {
        let names = [
            "openvibe.events.access.log",
            "openvibe.events.error.log",
            "main.error.log",
        ];
        names.map(|name| self.log(name)).join("\n")
    }

    fn log(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.directory.path().join(name)).unwrap_or_default()).into_owned()
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("nginx wrote:\n{}", self.log("openvibe.events.access.log"));
        }
        kill_family(&mut self.program);
    }
}

fn shipped(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/nginx").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
