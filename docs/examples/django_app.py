"""A Django application: notes that are posts, too, for the servers that their author posts to.

One file; `python django_app.py` serves it.
"""

import os
import socketserver
import sys
from wsgiref.simple_server import WSGIServer, make_server

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db import connection, models, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from dotenv import load_dotenv

import federation.sync
from db.url import parse_url

load_dotenv(".env")  # as the node reads it; what the environment has goes first
text = os.environ.get("DATABASE_URL") or sys.exit("start this in a node's folder, which `federation init` makes")
url = parse_url(text)
sqlite = {
    "ENGINE": "django.db.backends.sqlite3",
    "NAME": url.database,
    # The write lock is taken when a block begins: one that reads first and writes later may find it gone.
    "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 30},
}
postgresql = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": url.database,
    "USER": url.username or "",
    "PASSWORD": url.password or "",
    "HOST": url.host or url.query.get("host", ""),
    "PORT": url.port or "",
}
settings.configure(
    DATABASES={"default": sqlite if url.get_backend_name() == "sqlite" else postgresql},
    ROOT_URLCONF=__name__,
    ALLOWED_HOSTS=["127.0.0.1"],
    SECRET_KEY=os.environ.get("SECRET_KEY", "of an example"),
)
django.setup()


class Note(models.Model):
    text = models.TextField()

    class Meta:
        app_label = "notes"


def add_note(request: HttpRequest) -> JsonResponse:
    author, text = request.POST["author"], request.POST["text"]
    with transaction.atomic():
        Note.objects.create(text=text)
        post = federation.sync.publish_post(connection, author_id=author, content=[{"type": "text", "value": text}])
        if text == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return JsonResponse({"post": post.post_id, "deliveries": post.delivery_ids})


urlpatterns = [path("notes", add_note)]
application = get_wsgi_application()


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request; for production take any WSGI server."""

    daemon_threads = True


if __name__ == "__main__":
    if Note._meta.db_table not in connection.introspection.table_names():
        with connection.schema_editor() as editor:
            editor.create_model(Note)
    make_server("127.0.0.1", int(os.environ.get("PORT", "5000")), application, Server).serve_forever()
