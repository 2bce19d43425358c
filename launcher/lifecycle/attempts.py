"""A run on hosts that are already reached: look at them, plan, run; again after a failure.

The hosts are places: behind SSH for a launcher, behind outposts for the keeper of a detached run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher.errors import HostError
from launcher.files.download import fetch_results
from launcher.files.working_tree import Code, code_of
from launcher.lifecycle.interruptible import ended_by_a_signal
from launcher.lifecycle.restart_policy import RestartPolicy, RestartState, after
from launcher.lifecycle.session import Note, OpenScreen, open_screen, run, with_a_free_port
from launcher.output.console import last_line, say
from launcher.preflight.checks import CHECKS, check_allowed, examine, refusal, warnings
from launcher.preflight.facts import FactGatherer, HostFacts, Requirements, survey
from launcher.run.container import ContainerSpec, container_of
from launcher.run.hosts import Host
from launcher.run.job import Job, RunFolder, Work, data_of, new_run_folder
from launcher.run.plan import Plan, PlannedHost, make_plan, on_the_host
from launcher.run.result import Result
from launcher.run.settings import HostOptions
from launcher.transport.base import Transport
from rackrun.errors import Problem


@dataclass(frozen=True)
class RunObserver:
    """Who hears of a run."""

    say: Callable[[str], object] = say
    """Takes what is said between attempts."""
    screens: OpenScreen = open_screen
    """Shows an attempt."""
    mark: str = ""
    """What the ids of all attempts begin with."""
    advise: Callable[[str, Result], str] = lambda run, result: ""
    """What to type, by the id of an attempt and its end, about hosts that may not be clean."""


CODE = "code"
"""The check, and the question behind it."""

HERE = RunObserver()
"""Who sits at this terminal."""


def launch_there(
    hosts: Sequence[Host],
    places: Sequence[Transport],
    work: Work,
    options: HostOptions,
    audience: RunObserver = HERE,
    code: Code | None = None,
) -> Result:
    """Look at the hosts, plan, and run; again after a failure, as far as the options go.

    Every attempt holds the hosts to the `code` of the first one: by default what lies here now.
    """
    course = course_of(hosts, options)
    launch = Launch(work, options, audience, code or code_here(options, audience.say))
    place_of = {host.label: place for host, place in zip(hosts, places, strict=True)}
    result: Result | None = None
    while True:
        active = course.active()
        is_first = not launch.runs  # that a spare is not fit is known at once
        looked_at = course.hosts if is_first else active
        there = [place_of[host.label] for host in looked_at]
        try:
            result = launch.attempt(looked_at, there, len(active))
        except HostError as error:
            if result is None or not error.hosts:
                raise
            for line in str(error).splitlines():
                audience.say(f"left out: {line}")
            following = course.without(error.hosts)
            if following is None:
                audience.say(f"too few hosts are left; {last_line(result)}")
        else:
            following = None if launch.hurried else course.after(result)
            if following is not None:
                launch.runs.insert(0, str(options.runs / result.folder.name))
                audience.say(f"restart {following.restarts} of {options.max_restarts}")
        if following is None:
            return result
        course = following


def course_of(hosts: Sequence[Host], options: HostOptions) -> RestartState:
    """How to go on after failures; raises UsageError for options that the hosts cannot keep."""
    check_allowed(options.ignore_check)
    return RestartState(
        RestartPolicy(options.max_restarts, options.spares, options.min_hosts), tuple(hosts)
    )


@dataclass
class Launch:
    """The attempts of one launch: what they have in common, and what has become of them."""

    work: Work
    options: HostOptions
    audience: RunObserver
    code: Code | None
    """What hosts are held to; None where git does not know the folder."""
    runs: list[str] = field(default_factory=list)
    """The run folders of failed attempts, the newest first."""
    hurried: bool = False
    """Whether somebody did not wait for results: there is to be no further attempt."""

    def attempt(self, hosts: Sequence[Host], places: Sequence[Transport], count: int) -> Result:
        """Run once on the first `count` of these hosts, when all of them are fit for it."""

        def once() -> Result:
            work = after(self.work, self.runs)
            with look(
                hosts, places, work, self.options, self.code, self.audience, self.runs
            ) as seen:
                found = seen.first(count)
                folder = new_run_folder(
                    self.options.runs, self.options.name or work.name, self.options.share
                )
                job = self.options.job(work, folder, self.audience.mark)
                plan = plan_for(job, found, self.options)
                return run(
                    job,
                    plan,
                    found.successors(places[:count], [host.container for host in plan.hosts]),
                    self.options.plain,
                    partial(self.conclude, places[0], plan, folder),
                    screens=self.audience.screens,
                )

        return with_a_free_port(once)

    def conclude(
        self, place: Transport, plan: Plan, folder: RunFolder, result: Result, note: Note
    ) -> str:
        """Fetch the results of a run that has ended; what there is to tell and to type."""
        told = (
            self.bring_back(place, plan, folder, result, note),
            self.audience.advise(plan.run_id, result),
        )
        return "; ".join(filter(None, told))

    def bring_back(
        self, place: Transport, plan: Plan, folder: RunFolder, result: Result, note: Note
    ) -> str:
        """Fetch what the first host has in its run folder; what came, or why nothing did."""
        first = plan.hosts[0]
        left = f"the results are still on {first.name}, in {first.folder}"
        if result.hosts[first.name] != "clean":
            return left
        try:
            with ended_by_a_signal():
                return str(fetch_results(place, first, plan.run_id, folder.path, say=note))
        except KeyboardInterrupt:
            self.hurried = True
            return f"not waited for: {left}"
        except (Problem, OSError) as error:
            return f"{left}: {str(error).removeprefix(f'{first.name}: ')}"


@contextmanager
def look(
    hosts: Sequence[Host],
    places: Sequence[Transport],
    work: Work,
    options: HostOptions,
    code: Code | None,
    audience: RunObserver = HERE,
    before: Sequence[str] = (),
) -> Iterator[FactGatherer]:
    """The quick part of the preflight; raises what keeps the run from starting.

    `before`: earlier attempts of the same launch. Since then the code may have changed in a folder
    that all hosts share, which is no reason to end it.
    """
    found = survey(hosts, places, wanted(work, options, code))
    try:
        shared = (CODE,) if before and changed_alike(found) else ()
        rows = examine(found, CHECKS, (*options.ignore_check, *shared))
        for line in warnings(rows):
            audience.say(f"warning: {line}")
        if error := refusal(found, rows):
            raise error
        yield found
    finally:
        found.close()


def changed_alike(found: FactGatherer) -> bool:
    """Whether the code of all hosts differs from ours, and in the same way."""
    answers = [finding[CODE] for finding in found.findings if finding.error is None]
    return bool(answers and answers[0]) and all(answer == answers[0] for answer in answers)


def code_here(
    options: HostOptions, say: Callable[[str], object], own: Sequence[Path] = ()
) -> Code | None:
    """The code in this folder, but for what is the launcher's; `say` hears what is odd about it."""
    return code_of(Path.cwd(), say, own, options.runs)


def wanted(work: Work, options: HostOptions, code: Code | None, full: bool = False) -> Requirements:
    """What the hosts are asked about."""
    return Requirements(
        workdir=options.workdir or str(Path.cwd()),
        python=options.python,
        code=code if code and code.files else None,
        data=data_of(work),
        environment=(*options.environment, *options.secrets),
        port=options.port,
        full=full,
        image=container_of(options.image, options.volume),
    )


def plan_for(job: Job, found: FactGatherer, options: HostOptions) -> Plan:
    """The plan for the hosts as they were found."""
    run_folder = options.runs / job.folder.path.name
    image = container_of(options.image, options.volume)
    facts = [facts_of(finding, found, run_folder, image) for finding in found.findings]
    return make_plan(job, facts, found.port)


def facts_of(
    finding: HostFacts, found: FactGatherer, run_folder: Path, image: ContainerSpec | None
) -> PlannedHost:
    """What the plan needs to know of one host."""
    host, seen = finding.host, finding["look"]
    folder = str(Path(seen["workdir"]) / run_folder)
    devices = ",".join(map(str, host.devices or ()))
    first = finding is found.findings[0]
    return PlannedHost(
        name=host.label,
        address=found.master if first else host.address or finding["route"]["address"],
        processes=host.slots or seen["gpus"] or 1,
        python=seen["python"],
        workdir=seen["workdir"],
        folder=folder,
        cores=seen["cores"],
        interface=host.interface or finding["route"].get("interface", ""),
        environment=(*((("CUDA_VISIBLE_DEVICES", devices),) if devices else ()), *host.env),
        agent_python=seen["python"],
        locks=finding.locks,
        container=partial(image.words, seen, folder) if image else on_the_host,
    )
