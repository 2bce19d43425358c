"""A run on hosts reached over SSH: connect, upload code, serve data, check, launch."""

from __future__ import annotations

from dataclasses import replace

from launcher.commands.parse import recorded
from launcher.commands.reach import addresses, chosen, connected
from launcher.commands.settings import SshOptions
from launcher.commands.show import check, deep_check, show_plan
from launcher.commands.upload import code_there, pending
from launcher.detached.known_runs import forget, remember
from launcher.lifecycle.attempts import Launch
from launcher.lifecycle.launch_settings import resolved
from launcher.lifecycle.serving import served
from launcher.lifecycle.task_check import check_task_options, is_demo, make_demo_data
from launcher.run.job import Work
from launcher.run.result import Result
from rackrun.commands import called
from rackrun.errors import SaveError

SHORT_ID = 8  # characters of a run's id: enough to find it again


def start(work: Work, options: SshOptions, typed: tuple[str, ...]) -> int:
    """Check, plan or launch as the options demand; `typed` is the command to type again."""
    settings = resolved(options, recorded("ssh", options, work, typed))
    with (
        connected(options, settings.restarts) as (hosts, network),
        check_task_options(work, "ssh", str(options.hosts)) as refuse,
    ):
        if options.check:
            found = network.try_each(hosts)
            refuse()
            with served(work, options.serving, addresses(hosts, found)) as there:
                ahead = replace(settings, pending=pending(work, options))
                refused = check(hosts, found, there, ahead, options.json, [options.hosts])
                if refused or not options.deep:
                    return refused
                return attached(
                    deep_check(hosts, found, there, settings, options), options
                ).exit_code
        hosts, places = chosen(hosts, network, settings, options)
        refuse()
        if is_demo(work) and not options.dry_run and (failed := make_demo_data()):
            return failed
        if options.detach and not options.dry_run:
            from launcher.commands.ssh_detach import start_detached

            return start_detached(hosts, places, work, settings, options)
        with served(work, options.serving, addresses(hosts, places)) as there:
            if options.dry_run:
                ahead = replace(settings, pending=pending(work, options))
                return show_plan(hosts, places, there, ahead, options.json, [options.hosts])
            code = code_there(hosts, places, work, options)
            if options.scaling:
                from launcher.scaling.sweep import sweep

                return sweep(
                    there,
                    options.scaling,
                    len(hosts),
                    settings.jobs,
                    lambda count, jobs: attached(
                        Launch(
                            hosts[:count], places[:count], there, replace(settings, jobs=jobs), code
                        ),
                        options,
                    ),
                )
            return attached(Launch(hosts, places, there, settings, code), options).exit_code


def stay(work: Work, options: SshOptions) -> Result:
    """Launch, and return the result."""
    settings = resolved(options, recorded("ssh", options, work))
    with (
        connected(options, settings.restarts) as (hosts, network),
        check_task_options(work, "ssh", str(options.hosts)) as refuse,
    ):
        hosts, places = chosen(hosts, network, settings, options)
        refuse()
        if is_demo(work) and make_demo_data():
            raise SaveError("the demo's images were not made; the lines above have the reason")
        with served(work, options.serving, addresses(hosts, places)) as there:
            code = code_there(hosts, places, work, options)
            return attached(Launch(hosts, places, there, settings, code), options)


def attached(launch: Launch, options: SshOptions) -> Result:
    """Run attempts from this terminal; print how to clean hosts that may not be clean yet."""
    for attempt in launch.attempts():
        run, names = attempt.plan.run_id, {host.name for host in attempt.plan.hosts}
        hosts = [host for host in launch.hosts if host.label in names]
        forgotten = remember(
            run,
            hosts,
            options.runs,
            options.ssh_config,
            launch.settings.jobs.name,
            launch.work.name,
        )
        result = attempt.supervise()
        attempt.note(attempt.fetch_results())
        attempt.note(advice(options, run, result, forgotten))
    return launch.final


def advice(options: SshOptions, run: str, result: Result, forgotten: str) -> str:
    """Return what to type if hosts could not be verified; otherwise forget the hosts of the run.

    `forgotten`: why they could not be recorded, if so.
    """
    doubtful = [name for name, state in result.hosts.items() if state != "clean"]
    if not doubtful:
        forget(run)
        return ""
    named = f"-H {options.host_list}" if options.host_list else f"--hosts {options.hosts}"
    words = f"{named} {run}" if forgotten else run[:SHORT_ID]
    return f"once {', '.join(doubtful)} can be reached, type: {called('stop')} {words}"
