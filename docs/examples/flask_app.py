"""A Flask application: notes that are posts, too, for the servers that their author posts to."""

import os
import sys

from dotenv import load_dotenv
from flask import Flask, request
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert
from sqlalchemy.orm import Session

import federation.sync
from db.url import parse_url

load_dotenv(".env")  # as the node reads it; what the environment has goes first
url = os.environ.get("DATABASE_URL") or sys.exit("start this in a node's folder, which `federation init` makes")
engine = create_engine(parse_url(url))
notes = Table("notes", MetaData(), Column("id", Integer, primary_key=True), Column("text", Text))
notes.create(engine, checkfirst=True)
app = Flask(__name__)


@app.post("/notes")
def add_note() -> dict[str, object]:
    author, text = request.form["author"], request.form["text"]
    with Session(engine) as session, session.begin():
        session.execute(insert(notes).values(text=text))
        post = federation.sync.publish_post(session, author_id=author, content=[{"type": "text", "value": text}])
        if text == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return {"post": post.post_id, "deliveries": post.delivery_ids}


if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "5000")), threaded=True)
