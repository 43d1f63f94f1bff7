//! What a test asks of the shared SQS-compatible server itself.

use std::time::Duration;

use aws_credential_types::Credentials;
use aws_sigv4::{
    http_request::{SignableBody, SignableRequest, SigningSettings, sign},
    sign::v4,
};
use url::{Url, form_urlencoded};

use super::{broker::required, process::wall_clock};

/// A queue of the test's own.
pub(crate) struct Queue {
    pub(crate) url: Url,
    pub(crate) access_key: String,
    pub(crate) secret_key: String,
}

impl Queue {
    /// Makes a queue.
    pub(crate) async fn new(name: &str) -> Self {
        let mut url: Url = required("OV_TEST_SQS_URL", "sqs")
            .parse()
            .expect("OV_TEST_SQS_URL is an address");
        let path = url
            .path()
            .rsplit_once('/')
            .map(|(account, _)| format!("{account}/{name}"));
        url.set_path(&path.expect("the path of a queue"));
        let queue = Self {
            url,
            access_key: required("OV_TEST_SQS_ACCESS_KEY", "sqs"),
            secret_key: required("OV_TEST_SQS_SECRET_KEY", "sqs"),
        };
        queue.ask(&[("Action", "CreateQueue"), ("QueueName", name)]).await;
        queue
    }

    /// Puts a message of any text into it.
    pub(crate) async fn put(&self, body: &str) {
        self.ask(&[("Action", "SendMessage"), ("MessageBody", body)]).await;
    }

    /// How many messages wait in it, and how many are received and not deleted.
    pub(crate) async fn counts(&self) -> (u32, u32) {
        let answer = self
            .ask(&[("Action", "GetQueueAttributes"), ("AttributeName.1", "All")])
            .await;
        let count = |name: &str| -> u32 {
            let value = answer
                .split_once(&format!("<Name>{name}</Name>"))
                .expect("the attribute")
                .1;
            let value = value
                .split_once("<Value>")
                .and_then(|(_, rest)| rest.split_once('<'))
                .expect("its value")
                .0;
            value.parse().expect("a number")
        };
        (
            count("ApproximateNumberOfMessages"),
            count("ApproximateNumberOfMessagesNotVisible"),
        )
    }

    async fn ask(&self, parameters: &[(&str, &str)]) -> String {
        let form = {
            let mut form = form_urlencoded::Serializer::new(String::new());
            form.append_pair("Version", "2012-11-05")
                .extend_pairs(parameters)
                .finish()
        };
        let identity = Credentials::new(&self.access_key, &self.secret_key, None, None, "test").into();
        let signing = v4::SigningParams::builder()
            .identity(&identity)
            .region("us-east-1")
            .name("sqs")
            .time(wall_clock())
            .settings(SigningSettings::default())
            .build()
            .expect("parameters")
            .into();
        let headers = [("content-type", "application/x-www-form-urlencoded")];
        let body = SignableBody::Bytes(form.as_bytes());
        let signable = SignableRequest::new("POST", self.url.as_str(), headers.into_iter(), body).expect("a request");
        let (signed, _) = sign(signable, &signing).expect("a signature").into_parts();
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(20))
            .build()
            .expect("a client");
        let mut request = client.post(self.url.clone()).body(form);
        for (name, value) in headers.into_iter().chain(signed.headers()) {
            request = request.header(name, value);
        }
        let response = request.send().await.expect("the server answers");
        let status = response.status();
        let text = response.text().await.expect("text");
        assert!(status.is_success(), "{parameters:?}: {status} {text}");
        text
    }
}
