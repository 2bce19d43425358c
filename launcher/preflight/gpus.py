"""The checks of GPUs: which no run can use, which are suspicious, which differ from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rackrun.cuda import gpu_problem
from rackrun.launcher.preflight.examine import Fault
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts, first_responding
from rackrun.launcher.preflight.replies import Gpu, Gpus
from rackrun.launcher.remote.gpus import VISIBLE
from rackrun.units import gibibytes, plural

USED_MIB = 1024
HOT = 10  # degrees to which a temperature is rounded up, so that like hosts share a line


def models(host: HostFacts) -> str:
    """Return number, models, memory and compute capability."""
    kinds = _distinct(host, lambda gpu: f"{gpu.name} {_memory_of(gpu)}")
    capabilities = " and ".join(sorted(set(host[Gpus].capabilities)))
    shown = f"{host.basics.gpus} {kinds}".strip()
    return f"{shown}, {capabilities}" if capabilities else shown


def gpu_model(host: HostFacts) -> str:
    """Return the model of the GPUs that a run may use; empty where they were not looked at."""
    return _distinct(host, lambda gpu: gpu.name).replace("NVIDIA ", "")


def number_and_kind(host: HostFacts, cluster: ClusterFacts) -> Iterator[Fault]:
    """Yield what does not fit the hosts file or the other hosts, and which GPUs are in use."""
    if problem := _wrong_number(host, cluster):
        hint_here = "each rank of a task needs its own; to train on the CPU type --device cpu"
        yield Fault(problem, hint_here=hint_here)
    if differences := _odd_one_out(host, cluster):
        yield Fault(differences, "ranks wait for the slowest", warns=True)
    full = [
        f"GPU {number}: {gpu.used} MiB"
        for number, gpu in enumerate(host[Gpus].gpus)
        if gpu.used > USED_MIB
    ]
    if full:
        yield Fault(f"in use: {', '.join(full)}", "look with nvidia-smi", warns=True)


def _wrong_number(host: HostFacts, cluster: ClusterFacts) -> str:
    count, ranks = host.basics.gpus, host.host.slots
    devices, requirements = host.host.devices or (), cluster.requirements
    if requirements.on_gpus and not count:
        return "--device cuda, and there is none, or CUDA_VISIBLE_DEVICES hides it"
    if ranks is None and devices:
        option = VISIBLE[0] if requirements.is_here else "--include"
        named = f"{option} names GPU {max(devices)}"
        return f"{named}, and there are {count}" if max(devices) >= count else ""
    if ranks is not None:
        if requirements.on_cpu or (requirements.is_here and requirements.own_command):
            return ""
        if devices and ranks > len(devices):
            return f"slots ask for {ranks} GPUs, and {plural(len(devices), 'GPU')} may be used"
        highest = max((ranks, *(device + 1 for device in devices)))
        return f"slots ask for {highest} GPUs" if 0 < count < highest else ""
    first = first_responding(cluster)
    same = count == first.basics.gpus
    return "" if same else f"{first.host.label} has {first.basics.gpus}; write slots=N"


def _odd_one_out(host: HostFacts, cluster: ClusterFacts) -> str:
    """Return in what the GPUs of a host differ from those of most hosts."""
    hosts = [facts for facts in cluster.hosts if facts.error is None and facts[Gpus].gpus]
    if host not in hosts:
        return ""
    differences = []
    for name, read in ASPECTS.items():
        # Of two hosts that differ, the first counts as usual.
        usual = Counter(map(read, hosts)).most_common(1)[0][0]
        if read(host) != usual:
            differences.append(f"{name} {read(host) or '?'}, elsewhere {usual or '?'}")
    return "; ".join(differences)


def driver(host: HostFacts) -> str:
    """Return the version of the driver."""
    return host[Gpus].driver


def unusable(host: HostFacts, cluster: ClusterFacts) -> Iterator[Fault]:
    """Yield why the ranks cannot use the GPUs that they are counted by: driver, or torch."""
    gpus, interpreter = host[Gpus], host.basics.interpreter
    if cluster.requirements.on_cpu or not host.basics.gpus:
        return
    problem, torch = gpus.problem, interpreter.torch
    if not problem and torch:
        cuda, archs = interpreter.cuda, interpreter.archs
        problem = gpu_problem(torch, cuda, archs, gpus.driver, gpus.capabilities)
    if problem:
        yield Fault(
            problem, "for a task on the CPU type --device cpu, for a command --ignore-check driver"
        )


def temperature(host: HostFacts) -> str:
    """Return the temperature of the hottest GPU, rounded up."""
    hottest = max((gpu.temperature for _, gpu in _used(host)), default=0)
    return f"to {-(-hottest // HOT) * HOT} °C" if hottest else ""


def sick(host: HostFacts, cluster: ClusterFacts) -> Iterator[Fault]:
    """Yield on which GPUs no rank can compute, and which are slow; none if ranks use the CPU."""
    if cluster.requirements.on_cpu:
        return
    if problems := "; ".join(_each(host, troubles)):
        yield Fault(
            problems,
            "reset the GPU (nvidia-smi --gpu-reset) or boot the host; else leave it out"
            " (--exclude)",
        )
    if slow := "; ".join(_each(host, signs)):
        yield Fault(slow, "see nvidia-smi -q -d PERFORMANCE", warns=True)


def suspects(gpus: Gpus) -> str:
    """Return what is wrong with the GPUs of a host."""
    problems = []
    for number, gpu in enumerate(gpus.gpus):
        if wrong := [*troubles(gpu), *signs(gpu)]:
            problems.append(f"GPU {number}: {', '.join(wrong)}")
    return "; ".join(problems)


def troubles(gpu: Gpu) -> list[str]:
    """Return why a GPU cannot be computed on."""
    errors = plural(gpu.uncorrected, "uncorrected ECC error")
    return [f"{errors} since the driver was loaded"] if gpu.uncorrected else []


def signs(gpu: Gpu) -> list[str]:
    """Return what slows a GPU down."""
    return [f"slowed by {gpu.slowed}"] if gpu.slowed else []


def _each(host: HostFacts, problems_of: Callable[[Gpu], list[str]]) -> Iterator[str]:
    for number, gpu in _used(host):
        if problems := problems_of(gpu):
            yield f"GPU {number}: {', '.join(problems)}"


def _used(host: HostFacts) -> list[tuple[int, Gpu]]:
    chosen = host.host.devices
    gpus = enumerate(host[Gpus].gpus)
    return [(number, gpu) for number, gpu in gpus if chosen is None or number in chosen]


def _distinct(host: HostFacts, read: Callable[[Gpu], str]) -> str:
    return " and ".join(sorted({read(gpu) for _, gpu in _used(host)} - {""}))


def _memory_of(gpu: Gpu) -> str:
    return gibibytes(gpu.total << 20)


ASPECTS: dict[str, Callable[[HostFacts], str]] = {
    "model": lambda host: _distinct(host, lambda gpu: gpu.name),
    "memory": lambda host: _distinct(host, _memory_of),
    "driver": driver,
}
"""What GPUs of hosts are compared by, in words."""
