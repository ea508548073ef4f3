"""The pages of queues: all of them, one with its jobs by state, one job, and the workers; and what is done to these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias
from urllib.parse import urlencode

from starlette.responses import Response

from workers.dashboard import charts, queue_calls, task_pages
from workers.dashboard.catalog import AT_ONCE, QueueCatalog, QueueLine, answer
from workers.dashboard.cron_pages import CronCommand, cron_command, cron_part
from workers.dashboard.feed import Fragments, LiveSource, Parameters
from workers.dashboard.job_actions import ACTIONS, JobAction, act_on
from workers.dashboard.rendering import MenuItem, Templates
from workers.dashboard.site import SitePart
from workers.dashboard.task_pages import TASKS, tasks_page
from workers.dashboard.text import counted, grouped, short
from workers.dashboard.visit import Confirmation, Refusal, Visit, uncarried
from workers.jobs import JobState
from workers.queue import Queue

Command: TypeAlias = Callable[[str, Queue, Sequence[str]], str]
"""Returns the command that does the same: to which queue, and to which jobs."""

QUEUES: Final = MenuItem(title="Queues", path="/queues")
WORKERS: Final = MenuItem(title="Workers", path="/workers")

_STYLES: Final = (
    (JobState.FAILED, "bad"),
    (JobState.FAILING, "warn"),
    (JobState.PROCESSING, "main"),
    (JobState.QUEUED, "second"),
    (JobState.SCHEDULED, "none"),
    (JobState.WAITING, "none"),
)
"""What is drawn of a queue, in this order; jobs that completed or were cancelled are of no concern any more."""


def python_command(verb: str, queue: Queue, ids: Sequence[str]) -> str:
    """Return the Python that does the same: the queue core has no command for it."""
    if verb in ("pause", "resume"):
        return f"await queue.manage.{verb}()  # queue {queue.storage.queue!r}"
    shown = ", ".join(repr(job_id) for job_id in ids[:3]) + (", ..." if len(ids) > 3 else "")
    return f"await queue.manage.{verb}([{shown}])  # queue {queue.storage.queue!r}"


def queue_part(
    queues: QueueCatalog, *, command: Command = python_command, of_crons: CronCommand = cron_command
) -> SitePart:
    """Return the pages of these queues; `command` and `of_crons` return the commands that they show."""
    pages, crons = QueuePages(queues, command), cron_part(queues, command=of_crons)
    return SitePart(
        menu=(QUEUES, TASKS, *crons.menu, WORKERS),
        pages={
            **crons.pages,
            "/queues": pages.all,
            "/queue": pages.one,
            "/job": pages.job,
            "/workers": pages.workers,
            TASKS.path: tasks_page(queues),
        },
        actions={"/queue/pause": pages.pause, "/queue/resume": pages.resume, "/jobs": pages.act, **crons.actions},
        live={
            "queues": lambda templates: _live(templates, queues, "parts/queues.html", "queues-live"),
            "workers": lambda templates: _live(templates, queues, "parts/workers.html", "workers-live"),
            "queue": lambda templates: _live_states(templates, queues),
        },
        calls=(*queue_calls.api.routes, *task_pages.api.routes, *crons.calls),
        gives=(queues,),
    )


class QueuePages:
    """What the pages show and do."""

    def __init__(self, queues: QueueCatalog, command: Command) -> None:
        self._queues = queues
        self._command = command

    async def all(self, visit: Visit) -> Response:
        """Show every queue."""
        return visit.page("queues.html", _shown(await self._queues.lines()), live="queues")

    async def workers(self, visit: Visit) -> Response:
        """Show the workers, those that are not heard of any more among them."""
        return visit.page("workers.html", _shown(await self._queues.lines()), live="workers")

    async def one(self, visit: Visit) -> Response:
        """Show one queue, with the jobs of one state."""
        name = visit.query.get("name", "")
        line = await self._queues.line(name)
        state = _state(visit.query.get("state"), line)
        listed = None if line.problem else await self._queues.jobs(name, state, visit.query.get("after"))
        shown = {
            "here": QUEUES.path,
            "line": line,
            "state": state,
            "listed": listed,
            "limits": {} if line.problem else await self._queues.limits(name),
            "is_first": visit.query.get("after") is None,
            "actions": {key: each for key, each in ACTIONS.items() if state in each.states},
            "most": AT_ONCE,
        }
        return visit.page("queue.html", shown, live="queue", parameters=(("name", name), ("state", state.value)))

    async def job(self, visit: Visit) -> Response:
        """Show one job."""
        name, job_id = visit.query.get("queue", ""), visit.query.get("id", "")
        if "carried" in visit.query:  # from the form that searches, into which somebody has pasted an id
            name, job_id = uncarried(visit.query["carried"]), job_id.strip()
        if not job_id:
            raise Refusal(400, "Write the id of a job.")
        found = await self._queues.job(name, job_id)
        if found is None:
            raise Refusal(
                404, f"Queue {short(name)} knows no job {short(job_id)}: there was none, or its record is over."
            )
        status = found.status
        actions = {key: each for key, each in ACTIONS.items() if status.state in each.states}
        encoded = status.encoded_progress
        progress = None if encoded is None else encoded.decode(errors="replace")
        back = f"/job?{urlencode({'queue': name, 'id': job_id})}"
        shown = {
            "here": QUEUES.path,
            "queue": name,
            "job": status,
            "meta": found.meta,
            "actions": actions,
            "progress": progress,
            "waits": await self._queues.held_back(name, status),
            "back": back,
        }
        return visit.page("job.html", shown)

    async def pause(self, visit: Visit) -> Response:
        """Let no worker claim a job of the queue."""
        return await self._switch(visit, pauses=True)

    async def resume(self, visit: Visit) -> Response:
        """Let workers claim jobs of the queue again."""
        return await self._switch(visit, pauses=False)

    async def _switch(self, visit: Visit, *, pauses: bool) -> Response:
        name, verb = visit.carried("queue"), "pause" if pauses else "resume"
        queue = self._queues.named(name)
        back = _queue_address(name)
        if not visit.is_confirmed:
            line = await self._queues.line(name)
            question = f"Pause queue {short(name)}?" if pauses else f"Let queue {short(name)} go on?"
            until = "No worker takes a job of it, in any process, until it goes on. Running jobs go on, new ones wait."
            rows = f"{counted(line.waiting, 'job')} {'is' if line.waiting == 1 else 'are'} waiting in it."
            return visit.confirm(
                Confirmation(
                    question=question,
                    rows=f"{rows} {until}" if pauses else rows,
                    verb="Pause" if pauses else "Go on",
                    back=back,
                    command=self._command(verb, queue, ()),
                )
            )
        await answer(queue.manage.pause() if pauses else queue.manage.resume())
        await visit.record(f"queues {verb}", name, 1)
        return visit.back(back, "The queue is paused." if pauses else "The queue goes on.")

    async def act(self, visit: Visit) -> Response:
        """Retry, promote or remove jobs: those that were chosen, or the first of a whole state."""
        name, key = visit.carried("queue"), visit.field("action")
        queue, action = self._queues.named(name), ACTIONS.get(key)
        if action is None:
            raise Refusal(400, "There is no such action.")
        state = _state(visit.field("state"), None)
        back = visit.carried("back") if visit.carried("back").startswith("/job?") else _queue_address(name, state)
        takes_all = visit.field("all") == "yes" and state in action.states
        if not visit.is_confirmed:
            ids = visit.all_carried("id")
            total = (await self._queues.line(name)).counts[state] if takes_all else len(ids)
            return visit.confirm(self._question(queue, action, key, ids, total, state if takes_all else None, back))
        page = await answer(queue.manage.list(state, limit=AT_ONCE)) if takes_all else None
        ids = visit.all_carried("id") if page is None else [job.id for job in page.jobs]
        done, problem = await act_on(queue, key, ids)
        await visit.record(f"jobs {key}", f"{name}: {', '.join(ids)}", done, problem=problem)
        return visit.back(
            back if key != "remove" else _queue_address(name, state), _report(action, len(ids), done, problem)
        )

    def _question(
        self,
        queue: Queue,
        action: JobAction,
        key: str,
        ids: Sequence[str],
        total: int,
        whole: JobState | None,
        back: str,
    ) -> Confirmation:
        number = min(total, AT_ONCE)
        if not number:
            raise Refusal(400, "No job was chosen.")
        jobs = (
            counted(number, "job")
            if whole is None
            else f"{grouped(number)} {whole.value} {'job' if number == 1 else 'jobs'}"
        )
        rest = f" {grouped(total - number)} more are left for another time." if total > number else ""
        first = ", ".join(short(job_id, 40) for job_id in ids[:3])
        rows = f"In queue {short(queue.storage.queue)}: {counted(number, 'row')}.{rest}"
        return Confirmation(
            question=action.does.format(f"job {short(ids[0], 60)}" if len(ids) == 1 and whole is None else jobs),
            rows=f"{rows} {first}{', …' if len(ids) > 3 else ''}".strip(),
            verb=action.verb,
            back=back,
            command=self._command(key, queue, ids or ["..."]),
            is_grave=action.is_grave,
        )


def _report(action: JobAction, asked: int, done: int, problem: str | None) -> str:
    left = asked - done
    told = f"{counted(done, 'job')} {'is' if done == 1 else 'are'} {action.done}."
    if left and problem is None:
        told += (
            f" {counted(left, 'job')} had changed meanwhile, and stayed as {'it was' if left == 1 else 'they were'}."
        )
    return f"{told} {short(problem, 300)}." if problem else told


def _state(text: str | None, line: QueueLine | None) -> JobState:
    """Return the state that was asked for; otherwise the first that needs somebody, or has jobs."""
    if text in list(JobState):
        return JobState(text or "")
    order = (
        JobState.FAILED,
        JobState.FAILING,
        JobState.PROCESSING,
        JobState.QUEUED,
        JobState.SCHEDULED,
        JobState.COMPLETED,
    )
    return next((state for state in order if line is not None and line.counts[state]), JobState.QUEUED)


def _queue_address(name: str, state: JobState | None = None) -> str:
    chosen = {"name": name} | ({} if state is None else {"state": state.value})
    return f"/queue?{urlencode(chosen)}"


def _shown(lines: Sequence[QueueLine]) -> dict[str, object]:
    """Return what templates show of queues."""
    return {"lines": lines, "lede": _lede(lines), "bars": {line.name: _bar(line) for line in lines}}


def _bar(line: QueueLine) -> list[charts.Share]:
    return charts.shares([(state.value, line.counts[state], style) for state, style in _STYLES])


def _lede(lines: Sequence[QueueLine]) -> tuple[str, str]:
    """Say how the queues stand: first what matters, then the rest."""
    silent = [line.name for line in lines if line.problem]
    failed, running, waiting = (sum(getattr(line, name) for line in lines) for name in ("failed", "running", "waiting"))
    paused = [line.name for line in lines if line.paused]
    if silent:
        first = f"{short(silent[0])} does not answer." if len(silent) == 1 else f"{len(silent)} queues do not answer."
    elif paused:
        first = f"{short(paused[0])} is paused." if len(paused) == 1 else f"{len(paused)} queues are paused."
    else:
        first = f"{counted(failed, 'job')} failed." if failed else "No job failed."
    rest = f"{grouped(running)} running, {grouped(waiting)} waiting" + (
        f", {grouped(failed)} failed." if silent or paused else "."
    )
    return first, rest


def _live(templates: Templates, queues: QueueCatalog, part: str, element: str) -> LiveSource:
    async def read(_parameters: Parameters) -> Fragments:
        return {element: templates.render(part, **_shown(await queues.lines()))}

    return read


def _live_states(templates: Templates, queues: QueueCatalog) -> LiveSource:
    async def read(parameters: Parameters) -> Fragments:
        chosen = dict(parameters)
        line = await queues.line(chosen.get("name", ""))
        state = _state(chosen.get("state"), line)
        return {"queue-live": templates.render("parts/states.html", line=line, state=state)}

    return read
