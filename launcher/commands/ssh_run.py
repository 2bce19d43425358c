"""A run on hosts reached over SSH: connect, upload code, serve data, check, launch."""

from __future__ import annotations

from dataclasses import replace

from launcher.commands.parse import recorded
from launcher.commands.reach import addresses, chosen, connected
from launcher.commands.settings import SshOptions
from launcher.commands.show import check, deep_check, show_plan
from launcher.commands.upload import code_there, pending, planned_code
from launcher.detached.known_runs import forget, remember
from launcher.lifecycle.attempts import Launch
from launcher.lifecycle.launch_settings import resolved
from launcher.lifecycle.serving import served
from launcher.lifecycle.task_check import check_task_options, is_demo, make_demo_data
from launcher.run.job import Work, elastic
from launcher.run.result import Result
from rackrun.commands import called
from rackrun.errors import SaveError
from rackrun.runs import SHORT_ID


def start(work: Work, options: SshOptions, typed: tuple[str, ...]) -> int:
    """Check, plan or launch as the options demand; `typed` is the command to type again."""
    settings = resolved(options, recorded("ssh", options, work, typed), options.sync)
    is_the_demo, work = is_demo(work), elastic(work) if options.elastic else work
    with (
        connected(options, settings.restarts) as (hosts, network),
        check_task_options(work, "ssh", str(options.hosts)) as refuse,
    ):
        if options.check:
            outcomes = network.try_each(hosts)
            settings = settings.with_needs(refuse())
            with served(work, options.serving, addresses(hosts, outcomes)) as served_work:
                planned = replace(settings, pending=pending(work, options))
                exit_code = check(
                    hosts, outcomes, served_work, planned, options.json, [options.hosts]
                )
                if exit_code or not options.deep:
                    return exit_code
                return attached(
                    deep_check(hosts, outcomes, served_work, settings, options), options
                ).exit_code
        choice = chosen(hosts, network, settings, options)
        hosts, transports = choice.hosts, choice.transports
        settings = choice.settings.with_needs(refuse())
        if options.detach:
            from launcher.commands.ssh_detach import refuse_what_stays, start_detached

            refuse_what_stays(work, options, addresses(hosts, transports))
        if is_the_demo and not options.dry_run and (failed := make_demo_data()):
            return failed
        if options.detach and not options.dry_run:
            return start_detached(hosts, transports, work, settings, options, choice.probed)
        with served(work, options.serving, addresses(hosts, transports)) as served_work:
            if options.dry_run:
                planned_code(hosts, work, options)  # refuses what --sync would
                planned = replace(settings, pending=pending(work, options))
                excluded = [options.hosts]
                return show_plan(
                    *(hosts, transports, served_work, planned, options.json, excluded),
                    choice.probed,
                )
            code = code_there(hosts, transports, work, options)
            if options.scaling:
                choice.probed.close()  # each launch asks the hosts it needs
                from launcher.search.scaling import counts_of, measure_scaling

                return measure_scaling(
                    served_work,
                    counts_of(options.scaling, len(hosts)),
                    settings.jobs,
                    lambda count, jobs: attached(
                        Launch(
                            hosts[:count],
                            transports[:count],
                            served_work,
                            replace(settings, jobs=jobs),
                            code,
                        ),
                        options,
                    ),
                )
            launch = Launch(hosts, transports, served_work, settings, code, probed=choice.probed)
            return attached(launch, options).exit_code


def launch_attached(work: Work, options: SshOptions) -> Result:
    """Launch in the foreground, and return the result."""
    settings = resolved(options, recorded("ssh", options, work), options.sync)
    is_the_demo, work = is_demo(work), elastic(work) if options.elastic else work
    with (
        connected(options, settings.restarts) as (hosts, network),
        check_task_options(work, "ssh", str(options.hosts)) as refuse,
    ):
        choice = chosen(hosts, network, settings, options)
        hosts, transports = choice.hosts, choice.transports
        settings = choice.settings.with_needs(refuse())
        if is_the_demo and make_demo_data():
            raise SaveError("the demo's images were not made; the lines above have the reason")
        with served(work, options.serving, addresses(hosts, transports)) as served_work:
            code = code_there(hosts, transports, work, options)
            launch = Launch(hosts, transports, served_work, settings, code, probed=choice.probed)
            return attached(launch, options)


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
    args = f"{named} {run}" if forgotten else run[:SHORT_ID]
    return f"once {', '.join(doubtful)} can be reached, type: {called('stop')} {args}"
