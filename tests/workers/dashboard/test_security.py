"""Who comes in, who may act, and what another site's page can do: nothing."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from collections import Counter
from datetime import timedelta
from ipaddress import ip_network

import httpx
import pytest
from starlette.requests import Request

from tests.patience import until
from tests.security.doors import serving
from tests.workers.dashboard.browsing import BASE, Person, token_in
from tests.workers.dashboard.conftest import ACCOUNTS, PASSWORD, QUICK, MakeSite
from workers.dashboard.access import Access, AccessError, TrustedProxy
from workers.dashboard.accounts import Account, Accounts, Role, hash_password, make_token, parse_accounts
from workers.dashboard.cookies import MOST_ENDED, BrowserSession, Signer
from workers.dashboard.door import Door
from workers.dashboard.serving import DashboardServer
from workers.dashboard.site import Site
from workers.dashboard.throttle import LoginThrottle, Waits
from workers.dashboard.visit import ActionTaken, Refusal
from workers.queue import Queue

SECRET = "0123456789abcdef-shared"
PAUSE = ("/queue/pause", ("queue", "mail"), ("confirmed", "yes"))


async def test_without_an_account_it_shows_and_does_not_act(make_site: MakeSite, queue: Queue) -> None:
    """On loopback, where it needs a decision to act."""
    person = Person(make_site(Access()).app)
    page = await person.sees("/queue?name=mail")
    assert "shows only" in page
    assert "/queue/pause" not in page
    refused = await person.sends(PAUSE[0], *PAUSE[1:], page="/queue?name=mail")
    assert refused.status_code == 403
    assert "You may look, and not act." in refused.text
    assert not await queue.manage.is_paused()


@pytest.mark.parametrize("bind", ["0.0.0.0", "192.0.2.7", "::"])
def test_without_an_account_it_listens_on_loopback_only(bind: str) -> None:
    """Also if it would only show."""
    with pytest.raises(AccessError, match="loopback"):
        Access(bind=bind, allow_actions=True)
    Access(bind=bind, accounts=ACCOUNTS)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8765", 200),
        ("127.0.0.1:8765", 200),
        ("[::1]:8765", 200),
        ("evil.test:8765", 421),
        ("127.0.0.1.evil.test", 421),
        ("localhost.", 421),
        ("", 421),
        ("[", 421),
    ],
)
async def test_a_name_that_is_not_its_own_is_not_answered(acting: Site, host: str, status: int) -> None:
    """A site that points its name at our address, as by DNS rebinding, reads and does nothing here."""
    answer = await Person(acting.app).client.get("/queues", headers={"host": host})
    assert answer.status_code == status
    assert ("mail" in answer.text) == (status == 200)


async def test_behind_a_proxy_it_is_called_by_its_url(make_site: MakeSite) -> None:
    """Its cookie is for TLS and this host alone then."""
    site = make_site(Access(accounts=ACCOUNTS, url="https://ops.example", bind="0.0.0.0"))
    answer = await Person(site.app, base="http://ops.example").client.get("/login")
    assert answer.status_code == 200
    assert answer.headers["set-cookie"].startswith("__Host-dashboard=")
    assert "; Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "path", ["/queues", "/nowhere", "/login", "/static/x/live.js", "/live?topic=none", "/queue?name=no"]
)
async def test_every_answer_forbids_foreign_content_and_frames(acting: Site, path: str) -> None:
    """Scripts and styles come from its own files only, and no other page may show it in a frame."""
    answer = await Person(acting.app).client.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_pages_have_no_inline_script_or_style(acting: Site, queue: Queue) -> None:
    """Otherwise the policy would break them."""
    await queue.enqueue(1, id="one")
    person = Person(acting.app)
    for path in ("/queues", "/workers", "/queue?name=mail", "/job?queue=mail&id=one"):
        page = await person.sees(path)
        assert " style=" not in page
        assert "<style" not in page
        assert page.count("<script") == 1
        assert " onclick" not in page


@pytest.mark.parametrize("token", ["none", "malformed", "anothers"])
async def test_a_form_without_the_token_of_its_session_does_nothing(acting: Site, queue: Queue, token: str) -> None:
    """CSRF: the browser sends the cookie, and the other site knows no token."""
    person, other = Person(acting.app), Person(acting.app)
    await person.sees("/queue?name=mail")
    sent = {
        "none": [],
        "malformed": [("form_token", "é" * 70)],
        "anothers": [("form_token", await other.token("/queue?name=mail"))],
    }
    refused = await person.posts(PAUSE[0], *PAUSE[1:], *sent[token])
    assert refused.status_code == 403
    assert not await queue.manage.is_paused()


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_form_that_began_elsewhere_does_nothing_even_with_the_token(
    acting: Site, queue: Queue, headers: dict[str, str]
) -> None:
    """Another port of this machine is another site, too, although cookies do not tell them apart."""
    person = Person(acting.app)
    refused = await person.sends(PAUSE[0], *PAUSE[1:], page="/queue?name=mail", **headers)
    assert refused.status_code == 403
    assert not await queue.manage.is_paused()
    good = {"origin": "http://localhost:8765", "sec-fetch-site": "same-origin"}
    assert (await person.sends(PAUSE[0], *PAUSE[1:], page="/queue?name=mail", **good)).status_code == 303
    assert await queue.manage.is_paused()


async def test_actions_are_not_taken_from_an_address(acting: Site, queue: Queue) -> None:
    """A link or an image cannot act."""
    answer = await Person(acting.app).client.get("/queue/pause?queue=mail&confirmed=yes")
    assert answer.status_code in (404, 405)
    assert not await queue.manage.is_paused()


@pytest.mark.parametrize(
    ("kind", "size", "status"), [("text/plain", 10, 415), ("application/x-www-form-urlencoded", 300_000, 413)]
)
async def test_what_is_no_form_or_too_large_is_refused(acting: Site, kind: str, size: int, status: int) -> None:
    """Before it is all read."""
    answer = await Person(acting.app).client.post("/jobs", content="a" * size, headers={"content-type": kind})
    assert answer.status_code == status


async def test_with_accounts_nothing_is_seen_before_the_login(with_accounts: Site) -> None:
    """Not even whether a page exists; the address is kept for afterwards."""
    person = Person(with_accounts.app)
    for path in ("/queues", "/nowhere", "/queue?name=mail"):
        answer = await person.client.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=")
    assert (await person.client.get("/live?topic=queues")).status_code == 401
    assert (await person.sends(PAUSE[0], *PAUSE[1:], page="/login")).status_code == 403


async def test_a_viewer_looks_and_an_operator_acts(with_accounts: Site, queue: Queue, done: list[ActionTaken]) -> None:
    """By the account; the log says who it was."""
    vera, olga = Person(with_accounts.app), Person(with_accounts.app)
    assert (await vera.logs_in("vera", PASSWORD)).status_code == 303
    page = await vera.sees("/queue?name=mail")
    assert "vera, viewer" in page
    assert "/queue/pause" not in page
    refused = await vera.posts(PAUSE[0], *PAUSE[1:], ("form_token", token_in(page)))
    assert refused.status_code == 403
    assert not await queue.manage.is_paused()
    await olga.logs_in("olga", PASSWORD)
    assert (await olga.sends(PAUSE[0], *PAUSE[1:], page="/queue?name=mail")).status_code == 303
    assert await queue.manage.is_paused()
    assert done == [ActionTaken(by="olga", action="queues pause", subject="mail", affected=1)]


async def test_the_login_gives_a_new_session_and_ends_the_old_one(with_accounts: Site) -> None:
    """Session fixation: whoever planted a session in somebody's browser has nothing when they log in."""
    victim, thief = Person(with_accounts.app), Person(with_accounts.app)
    await thief.sees("/login")
    victim.takes_cookies_of(thief)
    await victim.logs_in("olga", PASSWORD)
    assert victim.cookies.keys() == thief.cookies.keys()
    assert victim.cookies != thief.cookies
    assert (await thief.client.get("/queues")).status_code == 303
    assert (await victim.client.get("/queues")).status_code == 200


async def test_cookies_are_out_of_reach(with_accounts: Site) -> None:
    """Of scripts, and of requests that begin elsewhere."""
    answer = await Person(with_accounts.app).client.get("/login")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]


async def test_a_logout_ends_the_session_itself(with_accounts: Site) -> None:
    """A cookie that somebody has copied is worth nothing any more."""
    person, thief = Person(with_accounts.app), Person(with_accounts.app)
    await person.logs_in("olga", PASSWORD)
    thief.takes_cookies_of(person)
    assert (await thief.client.get("/queues")).status_code == 200
    await person.sends("/logout", page="/queue?name=mail")
    assert (await thief.client.get("/queues")).status_code == 303


@pytest.mark.parametrize(
    "next_", ["//evil.test", "https://evil.test", "/\\evil.test", "javascript:alert(1)", "/\x01/x", "//[", ""]
)
async def test_the_login_leads_nowhere_else(with_accounts: Site, next_: str) -> None:
    """Only to pages of the dashboard."""
    person = Person(with_accounts.app)
    fields = (("name", "olga"), ("secret", PASSWORD), ("next", next_))
    answer = await person.sends("/login", *fields, page="/login")
    assert answer.headers["location"] == "/"


@pytest.mark.parametrize(("field", "status"), [("name", 400), ("secret", 400), ("next", 400)])
async def test_a_login_with_what_nothing_stores_is_refused(with_accounts: Site, field: str, status: int) -> None:
    """It is neither looked up nor counted as a guess."""
    person = Person(with_accounts.app)
    fields = {"name": "olga", "secret": PASSWORD, "next": "/", field: "a\x00b"}
    assert (await person.sends("/login", *fields.items(), page="/login")).status_code == status


def test_a_cookie_is_good_only_as_it_was_written() -> None:
    """By the process that wrote it, in time, and unchanged."""
    signer, session = Signer(), BrowserSession.begin("olga")
    cookie = signer.written(session)
    assert signer.read(cookie) == session
    assert Signer().read(cookie) is None
    assert signer.read(signer.written(BrowserSession(id="x", name="olga", until=1.0))) is None
    text, _, signature = cookie.partition(".")
    for changed in ("", ".", "é.é", f"{text}x.{signature}", f"{text}.{signature[:-1]}", signature, "x" * 9_000, None):
        assert signer.read(changed) is None
    signer.end(session)
    assert signer.read(cookie) is None


def test_a_cookie_of_an_ended_session_stays_worthless_and_little_is_kept_of_it() -> None:
    """However many log out; of sessions that name nobody, which anybody can have, nothing is kept."""
    signer = Signer()
    first = BrowserSession.begin("olga")
    signer.end(first)
    later = [
        BrowserSession(id=str(number), name="olga", until=first.until + number) for number in range(MOST_ENDED + 5)
    ]
    for session in later:
        signer.end(session)
        signer.end(BrowserSession.begin())
    assert all(signer.read(signer.written(session)) is None for session in (first, *later))
    assert len(signer._ended) == MOST_ENDED
    another = BrowserSession(id="another", name="vera", until=first.until + 10)
    assert signer.read(signer.written(another)) == another


SLOW = Waits(free=-1, forget=timedelta(hours=1), first=timedelta(hours=1), longest=timedelta(hours=1))


def test_each_guess_waits_longer_up_to_a_limit() -> None:
    """By account and client; after a while they are forgotten."""
    now = [0.0]
    throttle = LoginThrottle(each=Waits(free=2, forget=timedelta(seconds=30)), now=lambda: now[0])

    def waited(name: str, client: str) -> float:
        begun = throttle.begin(name, client)
        throttle.looked_at(begun)
        return begun.wait.total_seconds()

    assert [waited("olga", "192.0.2.1") for _ in range(9)] == [0, 0, 0.5, 1, 2, 4, 8, 15, 15]
    assert waited("olga", "192.0.2.2") == 0
    assert waited("vera", "192.0.2.1") == 0
    now[0] += 30 * 12
    assert waited("olga", "192.0.2.1") == 0


def test_guesses_from_many_addresses_wait_too() -> None:
    """Together they have so many."""
    throttle = LoginThrottle(together=Waits(free=10, forget=timedelta(seconds=2)), now=lambda: 0.0)
    waits = [throttle.begin("olga", f"192.0.2.{number}").wait for number in range(13)]
    assert waits == [*[timedelta()] * 10, *(timedelta(seconds=each) for each in (0.5, 1, 2))]


def test_where_too_many_wait_the_last_try_of_whoever_has_most_is_refused() -> None:
    """The client, and of its tries one for the account that has most: never a new one in favour of those."""
    throttle = LoginThrottle(most_waiting=6)
    begun = [
        throttle.begin(name, client)
        for name, client in (("vera", "a"), ("olga", "a"), ("olga", "a"), ("olga", "a"), ("vera", "b"), ("vera", "b"))
    ]

    def refused_by(name: str, client: str) -> list[int]:
        before = {each for each in begun if each.refused.is_set()}
        begun.append(throttle.begin(name, client))
        return [number for number, each in enumerate(begun) if each.refused.is_set() and each not in before]

    assert refused_by("vera", "c") == [3]
    assert refused_by("vera", "c") == [2]
    assert refused_by("vera", "d") == [7]
    throttle.looked_at(begun[0])
    assert refused_by("olga", "d") == []


def test_what_is_kept_of_a_try_is_small_however_long_its_name_is() -> None:
    """Also of one with characters that no encoding has."""
    throttle = LoginThrottle()
    tracemalloc.start()
    try:
        for number in range(200):
            throttle.looked_at(throttle.begin(f"\ud800{number}" + 100_000 * "x", "192.0.2.1"))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000


async def test_the_right_password_comes_in_while_a_stranger_guesses(make_site: MakeSite) -> None:
    """Behind a proxy that nobody named both have one address; whoever is in already notices nothing."""
    quick = Waits(
        free=3, forget=timedelta(hours=1), first=timedelta(milliseconds=1), longest=timedelta(milliseconds=20)
    )
    site = make_site(Access(accounts=ACCOUNTS), throttle=LoginThrottle(each=quick))
    stranger, inside, owner = (Person(site.app) for _ in range(3))
    await inside.logs_in("olga", PASSWORD)
    statuses: list[int] = []

    async def guess() -> None:
        while True:
            statuses.append((await stranger.logs_in("olga", "guess")).status_code)

    guessing = asyncio.create_task(guess())
    await until(lambda: len(statuses) > 8)
    assert (await owner.logs_in("olga", PASSWORD)).status_code == 303
    assert (await inside.client.get("/queues")).status_code == 200
    guessing.cancel()
    assert set(statuses) == {401}


@pytest.mark.timeout(180)
async def test_a_room_full_of_guesses_keeps_nobody_out(make_site: MakeSite) -> None:
    """More guess than there is room for, without end: another address comes in, and another account from theirs."""
    site = make_site(Access(accounts=ACCOUNTS))
    statuses: Counter[int] = Counter()

    async def guess() -> None:
        stranger = Person(site.app, address="192.0.2.66")
        while True:
            statuses[(await stranger.logs_in("olga", "guess")).status_code] += 1
            await asyncio.sleep(1)  # so often does each of them guess

    guessing = [asyncio.create_task(guess()) for _ in range(80)]
    await until(lambda: statuses[429] > 16)
    owner, neighbour = Person(site.app, address="198.51.100.1"), Person(site.app, address="192.0.2.66")
    answers = await asyncio.gather(owner.logs_in("olga", PASSWORD), neighbour.logs_in("vera", PASSWORD))
    for each in guessing:
        each.cancel()
    await asyncio.wait(guessing)
    assert [answer.status_code for answer in answers] == [303, 303]
    assert statuses.keys() <= {401, 429}


async def test_no_more_tries_wait_than_there_is_room_for() -> None:
    """The one that has to go is told to come back, and was not looked at."""
    throttle = LoginThrottle(each=SLOW, most_waiting=2)
    door = Door(Access(accounts=ACCOUNTS), throttle=throttle)
    waiting = [
        asyncio.create_task(door.log_in("192.0.2.1", "olga", PASSWORD, gone=asyncio.Event().wait)) for _ in range(4)
    ]
    refused, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(waiting[1:3])
    assert refused <= {*waiting[1:3]}
    for each in waiting[1:3]:
        with pytest.raises(Refusal, match="Too many logins"):
            each.result()
    assert not waiting[0].done()
    assert not waiting[3].done()
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)


async def test_whoever_leaves_waits_no_longer(make_site: MakeSite) -> None:
    """Its place is free again."""
    throttle = LoginThrottle(each=SLOW)
    site = make_site(Access(accounts=ACCOUNTS), throttle=throttle)
    person = Person(site.app)
    fields = {"form_token": await person.token("/login"), "name": "olga", "secret": PASSWORD}
    client = httpx.AsyncClient(base_url=BASE, cookies=person.client.cookies)
    request = client.build_request("POST", "/login", data=fields)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    async with serving(DashboardServer(site.app, before_stop=site.feed.end_streams)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /login HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        await until(lambda: throttle.waiting == 1)
        writer.transport.abort()
        await until(lambda: throttle.waiting == 0)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.5", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.5", "203.0.113.1, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.5", "198.51.100.7, 10.0.0.9", "198.51.100.7"),
        ("10.0.0.5", "2001:db8:1:2:3::4", "2001:db8:1:2::"),
        ("10.0.0.5", "nonsense", "10.0.0.5"),
        ("10.0.0.5", "", "10.0.0.5"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "", "2001:db8:1:2::"),
    ],
)
def test_a_named_proxy_is_believed_for_whom_it_asks(peer: str, forwarded: str, client: str) -> None:
    """Nobody else is; of IPv6 a network counts as one."""
    door = Door(Access(accounts=ACCOUNTS, proxies=[ip_network("10.0.0.0/24")]))
    headers = {"x_forwarded_for": forwarded} if forwarded else {}
    assert door.client(proxied(client=peer, **headers)) == client


def test_an_account_comes_in_by_its_password_or_its_token() -> None:
    """And by nothing else."""
    token, digest = make_token()
    [bot] = parse_accounts(f"bot:viewer:{digest}")
    accounts = Accounts([*ACCOUNTS, bot])
    assert accounts.check("olga", PASSWORD) == ACCOUNTS[0]
    assert accounts.check("bot", token) == bot
    for name, secret in (
        ("olga", token),
        ("bot", PASSWORD),
        ("nobody", PASSWORD),
        ("olga", ""),
        ("olga", "x" * 100_000),
    ):
        assert accounts.check(name, secret) is None
    assert Accounts([bot]).check("nobody", token) is None


def test_an_empty_secret_is_nobodys() -> None:
    """Even of an account whose hash is one of it: older versions made such accounts."""
    hashes = QUICK.hash(""), f"sha256:{hashlib.sha256().hexdigest()}"
    for each in hashes:
        accounts = Accounts(parse_accounts(f"ben:viewer:{each}"))
        assert accounts.check("ben", "") is None
        assert accounts.of_token("") is None


def test_accounts_are_read_from_one_line() -> None:
    """What is malformed is refused without quoting a hash."""
    hashed = QUICK.hash("x")
    assert [each.name for each in parse_accounts(f" anna:operator:{hashed}\n ben:viewer:{hashed} ")] == ["anna", "ben"]
    assert "argon2" not in repr(Account(name="anna", role=Role.VIEWER, hash=hashed))
    bad = ["", "anna:", "anna:root:", "anna:viewer:plain-", "anna:viewer:sha256:", "a b:viewer:", "<b>:viewer:"]
    for text in [*(f"{each}{hashed}" for each in bad), f"anna:viewer:{hashed} anna:operator:{hashed}", "anna:viewer:"]:
        with pytest.raises(ValueError, match=r"account|role|hash|token|twice") as refused:
            parse_accounts(text)
        assert hashed not in str(refused.value)
    with pytest.raises(ValueError, match="the role of anna must be viewer or operator"):
        parse_accounts(f"anna:root:{hashed}")


HEAD = "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ"
DIGEST = "A" * 43


@pytest.mark.parametrize(
    "rest", ["$argon2id", "$argon2id$v=19", "$argon2id$v=19$m=8,t=x,p=1$YQ$YQ", HEAD, f"{HEAD}${DIGEST[1:]}"]
)
def test_a_hash_with_a_part_cut_off_is_refused_by_its_accounts_name(rest: str) -> None:
    """A shell that expands `$`, or a line that was not copied whole; nobody could log in by it."""
    with pytest.raises(ValueError, match="the hash of anna must be one of Argon2, whole"):
        parse_accounts(f"anna:operator:{rest}")
    assert parse_accounts(f"anna:operator:{HEAD}${DIGEST}")


def test_a_password_is_hashed_so_that_it_takes_its_time() -> None:
    """By Argon2, with the parameters that RFC 9106 recommends."""
    assert hash_password("x" * 8).startswith("$argon2id$v=19$m=65536,t=3,p=4$")


@pytest.mark.parametrize("password", ["", " " * 12, "x", "sevench", " sevench ", "x" * 1_001])
def test_a_password_that_keeps_nobody_out_is_no_password(password: str) -> None:
    """Nor is one that is longer than what a login takes."""
    with pytest.raises(ValueError, match="a password must have at"):
        hash_password(password)


def proxied(**headers: str) -> Request:
    client = headers.pop("client", "10.0.0.5")
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "client": (client, 1), "method": "GET", "path": "/"})


GOOD = {"x_dashboard_user": "pia", "x_dashboard_role": "operator", "x_dashboard_secret": SECRET}


@pytest.mark.parametrize(
    ("changed", "role"),
    [
        ({}, Role.OPERATOR),
        ({"client": "::ffff:10.0.0.5"}, Role.OPERATOR),
        ({"x_dashboard_role": ""}, None),
        ({"x_dashboard_role": "root"}, None),
        ({"x_dashboard_user": ""}, None),
        ({"x_dashboard_user": "<b>"}, None),
        ({"x_dashboard_secret": ""}, None),
        ({"x_dashboard_secret": SECRET + "x"}, None),
        ({"client": "10.0.1.5"}, None),
        ({"client": "nonsense"}, None),
    ],
)
def test_a_proxy_is_believed_from_its_address_with_its_secret(changed: dict[str, str], role: Role | None) -> None:
    """One of the two is not enough."""
    proxy = TrustedProxy(networks=[ip_network("10.0.0.0/24")], secret=SECRET)
    visitor = proxy.visitor(proxied(**{**GOOD, **changed}))
    assert (visitor.role if visitor else None) == role


async def test_behind_a_proxy_that_says_who_it_is_nobody_else_comes_in(make_site: MakeSite) -> None:
    """The page says what is missing; a form needs its token all the same."""
    proxy = TrustedProxy(networks=[ip_network("10.0.0.0/24")], secret=SECRET)
    site = make_site(Access(proxy=proxy, bind="0.0.0.0", url="http://localhost"))
    named = {name.replace("_", "-"): value for name, value in GOOD.items()}
    pia = Person(site.app, address="10.0.0.5", **named)
    other = Person(site.app, address="10.0.1.5", **named)
    assert "pia" in await pia.sees("/queues")
    assert (await other.client.get("/queues", follow_redirects=True)).status_code == 403
    assert (await pia.posts(*PAUSE)).status_code == 403
    assert (await pia.sends(*PAUSE, page="/queue?name=mail")).status_code == 303


def test_a_short_secret_of_a_proxy_is_refused() -> None:
    """It would be guessed."""
    with pytest.raises(AccessError, match="secret"):
        Access(proxy=TrustedProxy(networks=[], secret="short"))
