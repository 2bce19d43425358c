"""The GPUs of hosts, judged: which no run can use, which are suspicious, which unlike others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from launcher.preflight.facts import FactGatherer, HostFacts, first_answer
from launcher.transport.rpc import Answer
from rackrun.cuda import gpu_problem
from rackrun.units import duration, gibibytes, plural

USED_MIB = 1024
HOT = 10  # degrees to which a temperature is rounded up, so that like hosts share a line
STRONG = 100  # the same in W
ON_CPU = "for a task on the CPU type --device cpu, for a command --ignore-check driver"
SICK_HINT = "reset the GPU (nvidia-smi --gpu-reset) or boot the host; else leave it out (--exclude)"
SLOWED = {
    "hw_slowdown": "slowed by hardware",
    "hw_thermal_slowdown": "slowed by heat",
    "hw_power_brake_slowdown": "slowed by the power supply",
    "sw_thermal_slowdown": "slowed by heat",
}


def models(host: HostFacts) -> str:
    """Return number, models, memory and compute capability."""
    kinds = _distinct(host, lambda gpu: f"{gpu['name']} {_memory_of(gpu)}")
    capabilities = " and ".join(sorted(set(host["gpus"].get("capabilities", ()))))
    shown = f"{host['look']['gpus']} {kinds}".strip()
    return f"{shown}, {capabilities}" if capabilities else shown


def gpu_model(host: HostFacts) -> str:
    """Return the model of the GPUs that a run may use; empty where they were not looked at."""
    return _distinct(host, _model).replace("NVIDIA ", "")


def wrong_count(host: HostFacts, survey: FactGatherer) -> str:
    """Return why the number of GPUs does not fit the hosts file or the other hosts."""
    there, wanted = host["look"]["gpus"], host.host.slots
    if wanted is not None:
        highest = max((wanted, *(device + 1 for device in host.host.devices or ())))
        return f"slots ask for {highest} GPUs" if 0 < there < highest else ""
    first = first_answer(survey)
    same = there == first["look"]["gpus"]
    return "" if same else f"{first.host.label} has {first['look']['gpus']}; write slots=N"


def driver(host: HostFacts) -> str:
    """Return the version of the driver."""
    return str(host["gpus"].get("driver", ""))


def unusable(host: HostFacts, survey: FactGatherer) -> str:
    """Return why the torch of the ranks cannot use the GPUs that they are counted by."""
    seen, look = host["gpus"], host["look"]
    interpreter = look["interpreter"]
    torch = str(interpreter.get("torch", ""))
    if survey.on_cpu or not look["gpus"] or "driver" not in seen or not torch:
        return ""
    return gpu_problem(
        torch,
        str(interpreter.get("cuda", "")),
        interpreter.get("archs", ""),
        seen["driver"],
        seen.get("capabilities", ()),
    )


def state(host: HostFacts) -> str:
    """Return temperature and power of the hottest GPU, rounded up, and the NVLinks of each."""
    found = [gpu for _, gpu in _used(host)]
    hottest = max((gpu.get("temperature", 0) for gpu in found), default=0)
    strongest = max((gpu.get("power", 0) for gpu in found), default=0)
    return ", ".join(
        [
            *([f"to {-(-hottest // HOT) * HOT} °C"] if hottest else []),
            *([f"to {-(-strongest // STRONG) * STRONG} W"] if strongest else []),
            *([f"{links} NVLinks"] if (links := _distinct(host, _links)) else []),
        ]
    )


def sick(host: HostFacts, survey: FactGatherer) -> str:
    """Return why no rank can compute on some of the GPUs, unless all ranks are on the CPU."""
    return "" if survey.on_cpu else "; ".join(_each(host, troubles))


def suspicious(host: HostFacts, survey: FactGatherer) -> str:
    """Return what may slow GPUs down, or end a run later."""
    return "" if survey.on_cpu else "; ".join(_each(host, signs))


def suspects(gpus: Answer, seconds: int) -> str:
    """Return what is wrong with the GPUs of a host, and happened no longer ago than that."""
    found = []
    for number, gpu in enumerate(gpus.get("gpus", ())):
        recent = [xid for xid in gpu.get("xids", ()) if xid["seconds"] <= seconds]
        if wrong := [*troubles(gpu), *signs({**gpu, "xids": recent})]:
            found.append(f"GPU {number}: {', '.join(wrong)}")
    return "; ".join(found)


def troubles(gpu: Answer) -> list[str]:
    """Return why a GPU cannot be computed on."""
    uncorrected, found = gpu.get("uncorrected", 0), []
    if uncorrected:
        found.append(f"{plural(uncorrected, 'uncorrected ECC error')} since the driver was loaded")
    if gpu.get("remapping") == "failed":
        found.append("its broken memory cannot be remapped: replace it")
    if "re" in gpu.get("recovery", "").lower():  # Reset, Reboot, Drain and Reset
        found.append(f"asks for: {gpu['recovery']}")
    return found


def signs(gpu: Answer) -> list[str]:
    """Return what is suspicious about a GPU."""
    found = [SLOWED.get(reason, reason) for reason in gpu.get("slowed", ())]
    if gpu.get("remapping") == "pending":
        found.append("remaps broken memory at its next reset")
    newest = {xid["code"]: xid["seconds"] for xid in gpu.get("xids", ())}
    found += [f"Xid {code} {duration(seconds)} ago" for code, seconds in newest.items()]
    return list(dict.fromkeys(found))


def odd_one_out(host: HostFacts, survey: FactGatherer) -> str:
    """Return in what the GPUs of a host differ from those of most hosts."""
    hosts = [one for one in survey.findings if one.error is None and one["gpus"].get("gpus")]
    if host not in hosts:
        return ""
    found = []
    for name, read in ASPECTS.items():
        usual = Counter(map(read, hosts)).most_common(1)[0][0]
        if read(host) != usual:
            found.append(f"{name} {read(host) or '?'}, elsewhere {usual or '?'}")
    return "; ".join(found)


def memory(host: HostFacts) -> str:
    """Return the memory in use on the fullest GPU."""
    gpus = host["gpus"].get("gpus", [])
    return f"{max(gpu['used'] for gpu in gpus)} MiB in use at most" if gpus else ""


def busy(host: HostFacts, survey: FactGatherer) -> str:
    """Return which GPUs are in use, and by whom."""
    gpus = enumerate(host["gpus"].get("gpus", []))
    busy = [f"GPU {number}: {gpu['used']} MiB" for number, gpu in gpus if gpu["used"] > USED_MIB]
    who = [f"{process['pid']} ({process['name']})" for process in host["gpus"].get("processes", [])]
    in_use = f"in use: {', '.join(busy)}" if busy else ""
    return "; ".join(filter(None, (in_use, f"processes {', '.join(who)}" if who else "")))


def _each(host: HostFacts, judge: Callable[[Answer], list[str]]) -> Iterator[str]:
    for number, gpu in _used(host):
        if found := judge(gpu):
            yield f"GPU {number}: {', '.join(found)}"


def _used(host: HostFacts) -> list[tuple[int, Answer]]:
    """Return the GPUs that a run may use, with their numbers."""
    chosen = host.host.devices
    found = enumerate(host["gpus"].get("gpus", ()))
    return [(number, gpu) for number, gpu in found if chosen is None or number in chosen]


def _distinct(host: HostFacts, read: Callable[[Answer], str]) -> str:
    return " and ".join(sorted({read(gpu) for _, gpu in _used(host)} - {""}))


def _model(gpu: Answer) -> str:
    return str(gpu["name"])


def _links(gpu: Answer) -> str:
    return str(gpu.get("links") or "")


def _memory_of(gpu: Answer) -> str:
    return gibibytes(gpu["total"] << 20)


ASPECTS: dict[str, Callable[[HostFacts], str]] = {
    "model": lambda host: _distinct(host, _model),
    "memory": lambda host: _distinct(host, _memory_of),
    "power limit": lambda host: _distinct(host, lambda gpu: f"{gpu.get('power_limit', 0)} W"),
    "NVLinks": lambda host: _distinct(host, _links),
    "driver": driver,
}
"""What GPUs of hosts are compared by, in words."""
