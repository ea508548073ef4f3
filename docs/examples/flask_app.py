"""A Flask application: notes that another server shall have."""

import json
import os
import uuid

from flask import Flask, request
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert
from sqlalchemy.orm import Session

import federation.sync
from db.url import parse_url

engine = create_engine(parse_url(os.environ["DATABASE_URL"]))
notes = Table("notes", MetaData(), Column("id", Integer, primary_key=True), Column("text", Text))
notes.create(engine, checkfirst=True)
app = Flask(__name__)


@app.post("/notes")
def add_note() -> dict[str, str]:
    server = request.form["server"]
    note = {"id": str(uuid.uuid4()), "text": request.form["text"]}
    post = {"method": "FEDERATE_POST", "federationUrl": os.environ["BETTER_AUTH_URL"], "post": note}
    with Session(engine) as session, session.begin():
        session.execute(insert(notes).values(text=request.form["text"]))
        delivery = federation.sync.enqueue_delivery(
            session, "deliver-post", f"{server}/api/auth/social/posts", server, json.dumps(post)
        )
        if request.form["text"] == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return {"delivery": delivery}


if __name__ == "__main__":
    app.run(port=int(os.environ.get("PORT", "5000")), threaded=True)
