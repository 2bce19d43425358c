"""A run on hosts that are already reached: look at them, plan, run; again after a failure.

The hosts are places: behind SSH for a launcher, behind outposts for the keeper of a detached run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.carry import fetch_results
from launcher.code import code_of
from launcher.data import data_of
from launcher.errors import LauncherError
from launcher.hosts import Host
from launcher.image import Image, image_of
from launcher.job import Job, RunFolder, Work, new_run_folder
from launcher.options import HostOptions
from launcher.place import Place
from launcher.plan import Facts, Plan, make_plan, on_the_host
from launcher.preflight import CHECKS, check_allowed, examine, refusal, warnings
from launcher.restart import Course, Rules, after
from launcher.result import Result
from launcher.screen import last_line, say
from launcher.session import OpenScreen, open_screen, run, with_a_free_port
from launcher.survey import Finding, Survey, Wanted, survey


@dataclass(frozen=True)
class Audience:
    """Who hears of a run."""

    say: Callable[[str], object] = say
    """Takes what is said between attempts."""
    screens: OpenScreen = open_screen
    """Shows an attempt."""
    mark: str = ""
    """What the ids of all attempts begin with."""
    advise: Callable[[str, Result], str] = lambda run, result: ""
    """What to type, by the id of an attempt and its end, about hosts that may not be clean."""


HERE = Audience()
"""Who sits at this terminal."""


def launch_there(
    hosts: Sequence[Host],
    places: Sequence[Place],
    work: Work,
    options: HostOptions,
    audience: Audience = HERE,
) -> Result:
    """Look at the hosts, plan, and run; again after a failure, as far as the options go."""
    course = course_of(hosts, options)
    place_of = {host.label: place for host, place in zip(hosts, places, strict=True)}
    result: Result | None = None
    runs: list[str] = []  # the newest first
    while True:
        active = course.active()
        looked_at = active if runs else course.hosts  # that a spare is not fit is known at once
        there = [place_of[host.label] for host in looked_at]
        count = len(active)
        try:
            result = attempt(looked_at, there, count, after(work, runs), options, audience)
        except LauncherError as error:
            if result is None or not error.hosts:
                raise
            for line in str(error).splitlines():
                audience.say(f"left out: {line}")
            following = course.without(error.hosts)
            if following is None:
                audience.say(f"too few hosts are left; {last_line(result)}")
        else:
            following = course.after(result)
            if following is not None:
                runs.insert(0, str(options.runs / result.folder.name))
                audience.say(f"restart {following.restarts} of {options.max_restarts}")
        if following is None:
            return result
        course = following


def course_of(hosts: Sequence[Host], options: HostOptions) -> Course:
    """How to go on after failures; raises UsageError for options that the hosts cannot keep."""
    check_allowed(options.allow)
    return Course(Rules(options.max_restarts, options.spares, options.min_hosts), tuple(hosts))


def attempt(
    hosts: Sequence[Host],
    places: Sequence[Place],
    count: int,
    work: Work,
    options: HostOptions,
    audience: Audience = HERE,
) -> Result:
    """One run on the first `count` of these hosts, when all of them are fit for it."""

    def once() -> Result:
        with look(hosts, places, work, options, audience) as seen:
            found = seen.first(count)
            folder = new_run_folder(options.runs, options.name or work.name)
            job = options.job(work, folder, audience.mark)
            plan = plan_for(job, found, options)
            return run(
                job,
                plan,
                found.successors(places[:count], [host.container for host in plan.hosts]),
                options.plain,
                partial(conclude, places[0], plan, folder, audience),
                screens=audience.screens,
            )

    return with_a_free_port(once)


def conclude(
    place: Place, plan: Plan, folder: RunFolder, audience: Audience, result: Result
) -> str:
    """Fetch the results of a run that has ended; what there is to tell and to type."""
    told = (bring_back(place, plan, folder, result), audience.advise(plan.run_id, result))
    return "; ".join(filter(None, told))


def bring_back(place: Place, plan: Plan, folder: RunFolder, result: Result) -> str:
    """Fetch what the first host has in its run folder; what came, or why nothing did."""
    first = plan.hosts[0]
    if result.hosts[first.name] != "clean":
        return f"the results are still on {first.name}, in {first.folder}"
    try:
        files = fetch_results(place, first, plan.run_id, folder.path)
    except (LauncherError, OSError) as error:
        return f"the results are still on {first.name}, in {first.folder}: {error}"
    noun = "file" if len(files) == 1 else "files"
    return f"{len(files)} {noun} came back from {first.name}" if files else ""


@contextmanager
def look(
    hosts: Sequence[Host],
    places: Sequence[Place],
    work: Work,
    options: HostOptions,
    audience: Audience = HERE,
) -> Iterator[Survey]:
    """The quick part of the preflight; raises what keeps the run from starting."""
    found = survey(hosts, places, wanted(work, options, audience.say))
    try:
        rows = examine(found, CHECKS, options.allow)
        for line in warnings(rows):
            audience.say(f"warning: {line}")
        if error := refusal(found, rows):
            raise error
        yield found
    finally:
        found.close()


def wanted(
    work: Work, options: HostOptions, say: Callable[[str], object], full: bool = False
) -> Wanted:
    """What the hosts are asked about; `say` hears what is odd about the code here."""
    here = Path.cwd()
    return Wanted(
        workdir=options.workdir or str(here),
        python=options.python,
        code=code_of(here, say),
        data=data_of(work),
        environment=(*options.environment, *options.secrets),
        port=options.port,
        full=full,
        image=image_of(options.image, options.volume),
    )


def plan_for(job: Job, found: Survey, options: HostOptions) -> Plan:
    """The plan for the hosts as they were found."""
    run_folder = options.runs / job.folder.path.name
    image = image_of(options.image, options.volume)
    facts = [facts_of(finding, found, run_folder, image) for finding in found.findings]
    return make_plan(job, facts, found.port)


def facts_of(finding: Finding, found: Survey, run_folder: Path, image: Image | None) -> Facts:
    """What the plan needs to know of one host."""
    host, seen = finding.host, finding["look"]
    folder = str(Path(seen["workdir"]) / run_folder)
    devices = ",".join(map(str, host.devices or ()))
    first = finding is found.findings[0]
    return Facts(
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
