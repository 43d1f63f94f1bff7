"""Runs an SQS- and S3-compatible server that refuses what is not signed with its key. Started by scripts/services.sh.

    sqs-server.py PORT FILE

FILE gets its access key, secret key and queue's address, a line each, once the server answers. The bucket is `events`.
"""

import json
import os
import sys
import time
import urllib.request

port, ready = sys.argv[1:]
endpoint = f"http://127.0.0.1:{port}"
os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)

import boto3  # noqa: E402
from botocore.config import Config  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

server = ThreadedMotoServer(ip_address="127.0.0.1", port=int(port), verbose=False)
server.start()


def client(service, access_key, secret_key):
    return boto3.client(
        service,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        endpoint_url=endpoint,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}),
    )


# Until now anybody may do anything: make the one user, who may use queues and buckets and nothing else.
iam = client("iam", "setup", "setup")
iam.create_user(UserName="events")
key = iam.create_access_key(UserName="events")["AccessKey"]
statement = {"Effect": "Allow", "Action": ["sqs:*", "s3:*"], "Resource": "*"}
policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
iam.put_user_policy(UserName="events", PolicyName="queues-and-buckets", PolicyDocument=policy)
# From the next request on, signatures are checked.
check = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"}, method="POST")
urllib.request.urlopen(check).close()

queue = client("sqs", key["AccessKeyId"], key["SecretAccessKey"]).create_queue(QueueName="events")["QueueUrl"]
client("s3", key["AccessKeyId"], key["SecretAccessKey"]).create_bucket(Bucket="events")
with open(ready + ".part", "w") as file:
    file.write(f"{key['AccessKeyId']}\n{key['SecretAccessKey']}\n{queue}\n")
os.rename(ready + ".part", ready)
while True:
    time.sleep(3600)
