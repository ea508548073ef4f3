"""Owe one server a post from plain code: `python owe_delivery.py https://peer.example alice "hello"`.

`publish_post` does it for all servers that are to have it, and stores the post; see script.py. This runs in the folder
of a node (`federation init`). `federation run` or `federation workers run` delivers.
"""

import json
import os
import sys
import uuid
from datetime import UTC, datetime

from dotenv import load_dotenv

import federation.sync


def main(server: str, author: str, text: str) -> None:
    load_dotenv(".env")  # as the node reads it; what the environment has goes first
    post = {
        "id": str(uuid.uuid4()),
        "authorId": author,
        "content": [{"type": "text", "value": text}],
        "published": datetime.now(UTC).isoformat(),
        "isPrivate": False,
    }
    payload = {"method": "FEDERATE_POST", "federationUrl": os.environ["BETTER_AUTH_URL"], "post": post}
    with federation.sync.transaction() as session:  # commits at the end; your own writes go into the same session
        delivery = federation.sync.enqueue_delivery(
            session, "deliver-post", server + "/api/auth/social/posts", server, json.dumps(payload)
        )
    print(f"owed as {delivery}; `federation deliveries show {delivery}` tells what becomes of it")


if __name__ == "__main__":
    main(*sys.argv[1:])
