"""Alice, and notes that go out in her name: views of a Django project on the node's database, and their URLs."""

from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path, re_path
from django.utils.crypto import get_random_string as word
from django.views.decorators.csrf import csrf_exempt

from federation import activitypub, sync


def add_note(request: HttpRequest) -> JsonResponse:
    alice, text, to = request.build_absolute_uri("/users/alice"), request.GET["text"], request.GET["to"]
    bob = activitypub.Recipient(id=to, inbox=request.GET["inbox"])
    note = {"id": f"{alice}/notes/{word(20)}", "type": "Note", "attributedTo": alice, "to": [to], "content": text}
    with transaction.atomic():  # your own writes belong into it, too
        sync.activitypub.add_actor(connection, alice)  # her keys, unless they are there already
        return JsonResponse(sync.activitypub.send(connection, activitypub.create(note), [bob]).delivery_ids, safe=False)


def show(asked: HttpRequest) -> HttpResponse:  # `actor=` returns documents of your own
    target, client = asked.get_full_path(), asked.META["REMOTE_ADDR"]  # who posts too much is told so
    status, headers, body = activitypub.respond(asked.method, target, asked.headers, asked.body, client=client)
    return HttpResponse(body, status=status, headers=headers)


urlpatterns = [path("notes", csrf_exempt(add_note)), re_path("", csrf_exempt(show))]  # neither has a form's token
