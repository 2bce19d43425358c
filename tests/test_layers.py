"""The arrows between the packages go one way, and so do those between the rooms in a package."""

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from rackrun.contract import phases
from rackrun.contract.tasks import PLATFORM, TASKS

ROOT = Path(__file__).parents[1]

PACKAGES = ("rackrun", *PLATFORM, *(task for task in TASKS if (ROOT / task).is_dir()))

MAY_IMPORT = {
    "rackrun": set(),
    "launcher": {"nginx", "rackrun"},
    "nginx": {"rackrun"},
    "shards": {"rackrun"},
    "convert": {"shards", "rackrun"},
    "training": {"shards", "rackrun"},
    **{task: {"training", "shards", "rackrun"} for task in TASKS},
}

ROOF = ("rackrun/cli/", "rackrun/__main__.py", "rackrun/__init__.py", "launcher/__main__.py")
"""What calls every package, and is imported by none: the commands, and what users import."""

MAY_NAME = {
    "launcher": {"training", "catdog"},  # ranks, the check of a task's options, the demo's images
    "catdog": {"convert"},  # the images that the demo has drawn
    "rackrun/contract/tasks.py": {"training"},  # the table of tasks
}
"""Package or file -> the packages it names without importing them, to start a program of theirs."""

PROGRAMS = (
    "rackrun.launcher.remote.agent.shim",
    "rackrun.launcher.detached",
    "rackrun.training.data.worker_preload",
)
"""What runs in a process of its own: whoever starts it by its name does not import it."""


ROOMS: dict[str, dict[str, str]] = {
    "launcher": {
        "__init__": "commands run",
        "commands": "catalog detached errors files lifecycle output preflight remote "
        "rendezvous run schedulers search settings_file supervision transport transport/ssh",
        "catalog": "detached errors output preflight remote run transport transport/ssh",
        "settings_file": "run",
        "detached": "errors files lifecycle output preflight remote run settings_file supervision "
        "transport transport/ssh",
        "lifecycle": "errors files output preflight remote run supervision transport",
        "preflight": "errors files output remote run transport",
        "files": "errors remote run transport",
        "supervision": "errors output remote remote/agent rendezvous run transport",
        "transport/ssh": "errors run transport",
        "output": "run",
        "rendezvous": "errors remote run",
        "search": "catalog lifecycle output run",
        "schedulers": "run",
        "transport": "errors remote run",
        "remote/agent": "remote",
        "run": "errors",
        "__main__": "",
        "errors": "",
        "remote": "",
    },
    "training": {
        "__main__": "deep_check entry export judge predict run track",
        "entry": "conditions config data dry_step loop models precheck predict tasks",
        "dry_step": "config layers task",
        "precheck": "conditions config data models run schedule weights_file",
        "tasks/classify": "config data models settings task",
        "loop": "config data dry_step monitor phases ranks run schedule state sync task",
        "phases": "checkpoint conditions config counts data data/order device differences dry_step "
        "layers models monitor ranks run schedule settings state sync task world",
        "deep_check": "config device ranks world",
        "export": "settings trained",
        "judge": "config counts data device layers ranks settings trained world",
        "predict": "data settings trained",
        "trained": "checkpoint config counts data differences models run settings task tasks",
        "models": "checkpoint config data differences layers ranks",
        "run": "checkpoint config counts data differences layers monitor ranks schedule settings "
        "state track weights_file",
        "track": "",
        "monitor": "ranks settings",
        "sync": "checkpoint ranks schedule settings state",
        "state": "config counts layers optimizer settings",
        "counts": "differences ranks",
        "device": "config ranks settings",
        "task": "data",
        "data": "data/order ranks settings",
        "data/order": "",
        "optimizer": "counts layers settings",
        "layers": "settings",
        "checkpoint": "weights_file",
        "weights_file": "",
        "differences": "",
        "world": "device ranks settings",
        "ranks": "",
        "schedule": "config settings",
        "conditions": "config settings",
        "config": "settings",
        "settings": "",
        "__init__": "",
        "tasks": "config task",
    },
    "shards": {
        "open": "cache folder http index source",
        "peers": "block_store cache index open source traffic",
        "cache": "block_store index samples source traffic",
        "traffic": "",
        "folder": "http index source",
        "http": "index source",
        "samples": "index source writer",
        "block_store": "source",
        "source": "index",
        "writer": "index",
        "index": "",
        "__init__": "",
        "pillow": "images",
        "resize": "",
        "images": "",
    },
    "convert": {
        "__main__": "commands signals",
        "rackrun": "",
        "commands": "catdog folder hf imagenet indexing mnist packing signals summary table verify "
        "versions",
        "signals": "",
        "catdog": "options packing readers",
        "folder": "options packing readers",
        "hf": "options packing readers",
        "indexing": "images packing progress readers",
        "mnist": "options packing readers",
        "table": "options packing readers",
        "imagenet": "devkit images options packing readers",
        "doctor": "images packing progress readers",
        "verify": "images packing progress readers",
        "versions": "folder images indexing options packing progress readers table",
        "packing": "images options progress readers",
        "options": "images",
        "images": "readers",
        "summary": "images",
        "devkit": "readers",
        "__init__": "",
        "progress": "",
        "readers": "",
    },
    "rackrun": {
        "__main__": "cli commandline terminal",
        "cli": "commandline commands contract errors runs user_code",
        "run_report": "atomic commandline commands contract errors npy run_folder "
        "run_history runs shapes terminal units",
        "user_code": "atomic commandline contract errors",
        "commandline": "__init__ contract errors shapes signals terminal",
        "commands": "contract",
        "runs": "commands contract errors run_folder shapes",
        "run_folder": "atomic contract errors",
        "tables": "atomic errors terminal",
        "run_history": "shapes",
        "shard_folder": "commands contract",
        "__init__": "",
        "atomic": "errors",
        "reports": "contract",
        "contract": "",
        "cuda": "",
        "errors": "",
        "machine": "contract",
        "npy": "",
        "shapes": "",
        "signals": "",
        "terminal": "",
        "units": "",
    },
    "nginx": {
        "serve": "docker native site",
        "docker": "native site",
        "__main__": "serve site",
        "native": "",
        "site": "",
        "__init__": "",
    },
    "catdog": {
        "demo": "archive",
        "archive": "drawing",
        "model": "recipes",
        "__init__": "",
        "__main__": "",
        "drawing": "",
        "recipes": "",
    },
}
"""Package -> room -> the rooms it may import. A room is a folder, or a file beside the folders."""

ONE_DOOR = {  # a foreign library -> the only places that may know it
    "cryptography": {"launcher/transport/certificate.py", "launcher/transport/ssh/identities.py"},
    "fabric": {"launcher/transport/ssh"},
    "imagehash": {"convert/doctor/fingerprints.py"},
    "paramiko": {"launcher/transport/ssh"},
    "ray": {"launcher/transport/ray.py"},
    "rich": {
        "rackrun/units.py",
        "launcher/output/dashboard.py",
        "launcher/output/host_table.py",
        "rackrun/tables.py",
        "convert/progress.py",
        "training/judge/output.py",
        "training/predict.py",
        "catdog/demo.py",
    },
    "torch": {"training", *TASKS},
    "torchvision": {"training", *TASKS},
    "webdataset": {"training"},
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return what a file consists of: read and parsed once, for every test here looks at it."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def nodes_of_import(path: Path) -> list[ast.AST]:
    """Return what an import of a file reads: not what it does as a program, under `__main__`.

    `python convert/imagenet.py` is `convert imagenet`, whose table of commands names that file.
    """
    tree = ast.parse(path.read_text())
    is_main = ast.dump(ast.parse('__name__ == "__main__"', mode="eval").body)
    tree.body = [
        node for node in tree.body if not isinstance(node, ast.If) or ast.dump(node.test) != is_main
    ]
    return list(ast.walk(tree))


def package_of(module: str) -> str:
    """Return the package of a module: `training` for `rackrun.training.loop`."""
    first, *rest = module.split(".")
    return rest[0] if first == "rackrun" and rest and rest[0] in PACKAGES else first


def imports(path: Path) -> set[str]:
    """Return the packages a file imports from, wherever in the file."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {package_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(package_of(node.module))
    return names


FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
NAMES = {path: str(path.relative_to(ROOT)) for path in FILES}


def module_of(path: Path) -> str:
    """Return the name by which a file is imported."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("rackrun") else f"rackrun.{name}"


MODULES = {module_of(path): path for path in FILES}


def named_modules(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the modules of the product that strings name, such as those for import_module.

    The name of a package alone is a word like any other.
    """
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    names = {text.partition(":")[0] for text in texts if isinstance(text, str)}
    return {
        name
        for name in names
        if name.count(".") > 1 and name in MODULES and not name.startswith(PROGRAMS)
    }


def started_packages(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the packages of the product that lists of arguments start by `-m`."""
    started: set[str] = set()
    for node in nodes:
        if isinstance(node, (ast.List, ast.Tuple)):
            texts = [getattr(element, "value", None) for element in node.elts]
            pairs = zip(texts, texts[1:], strict=False)
            following = (after for before, after in pairs if before == "-m")
            started |= {package_of(text) for text in following if isinstance(text, str)}
    return started & set(PACKAGES)


def imported(path: Path) -> set[str]:
    """Return the modules of the product a file imports: also lazily, for types, or by a string."""
    is_roof = str(path.relative_to(ROOT)).startswith(ROOF)  # it is there to name them all
    read = nodes_of_import(path)
    modules = set() if is_roof else named_modules(read)
    for node in read:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {name if name in MODULES else node.module for name in names}
    return modules & set(MODULES) - {module_of(path)}


@cache
def all_arrows() -> dict[str, set[str]]:
    """Return, for each module, the others that it imports."""
    return {module: imported(path) for module, path in MODULES.items()}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return a circle of arrows through each name that has one, the shortest first."""

    def back_to(start: str) -> list[str]:
        came_from, waiting = dict[str, str](), [start]
        for name in waiting:
            for target in arrows.get(name, ()):
                if target == start:
                    way = [name]
                    while way[-1] != start:
                        way.append(came_from[way[-1]])
                    return way[::-1]
                if target not in came_from:
                    came_from[target] = name
                    waiting.append(target)
        return []

    return sorted(filter(None, map(back_to, arrows)), key=len)


def room(module: str) -> str:
    """Return the room of a module within its package: its folder, or itself at the top."""
    file = MODULES[module].relative_to(ROOT)
    return "/".join(file.parts[1:-1]) or file.stem


def arrows_of(package: str) -> dict[str, set[str]]:
    """Return, for each room of a package, the others that its files import."""
    arrows: dict[str, set[str]] = {}
    for module, needs in all_arrows().items():
        if package_of(module) == package:
            ours = {room(need) for need in needs if package_of(need) == package}
            arrows.setdefault(room(module), set()).update(ours - {room(module)})
    return arrows


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_what_it_may(package):
    """A new arrow is a decision: it is written into ROOMS, and closes no circle."""
    allowed = {name: set(may.split()) for name, may in ROOMS[package].items()}
    assert not circles(allowed)
    result = arrows_of(package)
    assert result.keys() == allowed.keys()
    assert not {name: new for name in result if (new := result[name] - allowed[name])}


def test_the_map_for_contributors_has_every_room():
    """Each folder with code is in the first column of docs/contributing.md, and no other is."""
    text = (ROOT / "docs/contributing.md").read_text().partition("## To add")[0]
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in row.split("`")[1::2]
    }
    assert listed == {f"{path.parent.relative_to(ROOT)}/" for path in FILES}


def test_circles_are_found():
    """The search for circles sees one, and none where there is none."""
    assert circles({"a": ["b"], "b": ["c", "d"], "c": ["a"]})[0] == ["a", "b", "c"]
    assert circles({"a": ["b", "c"], "b": ["c"]}) == []


@pytest.mark.parametrize(
    ("text", "modules", "packages"),
    [
        ("import_module('rackrun.convert.commands').main()", {"rackrun.convert.commands"}, set()),
        ("TABLE = {'load': 'rackrun.training.trained:load'}", {"rackrun.training.trained"}, set()),
        ("run([sys.executable, '-m', 'rackrun.training', task])", set(), {"training"}),
        ("('python', '-m', 'rackrun.convert.commands')", {"rackrun.convert.commands"}, {"convert"}),
        ("args = ['convert', 'training', '-m', 'pip']", set(), set()),
    ],
)
def test_a_module_is_seen_in_a_string(text, modules, packages):
    """In a call, in a table, and behind `-m`."""
    tree = list(ast.walk(ast.parse(text)))
    assert (named_modules(tree), started_packages(tree)) == (modules, packages)


def test_no_file_imports_itself_by_way_of_others():
    """Lazy imports, those for types, and those by a string count, too."""
    assert not circles(all_arrows())


def test_a_file_imports_only_what_its_package_may():
    """Arrows go one way, and one place imports each foreign library."""
    wrong = {name: result for path, name in NAMES.items() if (result := not_allowed(path))}
    assert not wrong


def not_allowed(path: Path) -> set[str]:
    """Return the packages and libraries that a file imports and may not, nor name or start."""
    relative = path.relative_to(ROOT)
    package = relative.parts[0]
    folders = {str(relative), *map(str, relative.parents)}
    named = {package_of(module) for module in named_modules(nodes(path))}
    named |= started_packages(nodes(path))
    named -= set().union(*(MAY_NAME.get(folder, set()) for folder in folders))
    elsewhere = {library for library, doors in ONE_DOOR.items() if not doors & folders}
    others = set(PACKAGES) - MAY_IMPORT[package] - {package}
    if str(relative).startswith(ROOF):
        others = set()
    return (imports(path) | named) & (others | elsewhere)


def test_the_roof_is_imported_by_nothing():
    """What names every package cannot be ground to stand on."""
    roof = {module for module, path in MODULES.items() if NAMES[path].startswith(ROOF)}
    roof -= {"rackrun"}  # its version; what it names is imported when a user asks for it
    users = {module: needs & roof for module, needs in all_arrows().items() if module not in roof}
    assert not {module: needs for module, needs in users.items() if needs}


SENT = ("rackrun.launcher.remote", "rackrun.contract")
SENT_FILES = sorted(path for name, path in MODULES.items() if name.startswith(SENT))


@pytest.mark.parametrize("path", SENT_FILES, ids=lambda path: path.stem)
def test_what_is_sent_to_hosts_needs_nothing_but_the_standard_library(path):
    """It goes to hosts where the project may not be installed, and takes these rooms along."""
    assert imports(path) <= sys.stdlib_module_names | {"launcher", "rackrun"}
    for node in nodes(path):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            name = getattr(node, "module", None) or node.names[0].name
            assert name.startswith(SENT) or not name.startswith(("launcher", "rackrun"))


OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
STARTERS = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "exec_command"}
STARTERS |= {"system", "popen", "execvp", "execv", "execve", "spawn"}
SHELLS = {"sh", "bash", "dash", "/bin/sh", "/bin/bash"}
MAY_START_A_SHELL = {
    "launcher/transport/ssh/connect.py": 1,  # ProxyCommand: a shell's line, of ssh_config
    "launcher/remote/transfer.py": 1,  # a constant: what makes the environment
}


def is_formatted(node: ast.expr) -> bool:
    """Return whether a string is formatted there, so that it may hold foreign text."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "format"
    return isinstance(node, (ast.JoinedStr, ast.BinOp))


def shells(node: ast.Call) -> bool:
    """Return whether a list of words starts a shell with a command line."""
    lists = [node_ for node_ in node.args if isinstance(node_, ast.List)]
    args = [getattr(name, "value", None) for elements in lists for name in elements.elts]
    return "-c" in args and bool(SHELLS & {name for name in args if isinstance(name, str)})


def offences(nodes: Iterable[ast.AST]) -> list[str]:
    """Return what no file may do: pass words to a shell, or pickles to other ranks."""
    result = []
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in OBJECT_COLLECTIVES:
                result.append(name)
        if not isinstance(node, ast.Call):
            continue
        asked = {keyword.arg: getattr(keyword.value, "value", "?") for keyword in node.keywords}
        result += ["shell=True"] * (asked.get("shell", False) is not False)
        result += ["weights_only=False"] * (asked.get("weights_only", True) is not True)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in STARTERS:
            result += ["a formatted command"] * any(map(is_formatted, node.args[:1]))
            result += ["a shell"] * shells(node)
    return result


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("subprocess.run('ls', shell=True)", "shell=True"),
        ("subprocess.run(['ls'], shell=maybe)", "shell=True"),
        ("subprocess.Popen(f'ls {name}')", "a formatted command"),
        ("channel.exec_command('ls %s' % name)", "a formatted command"),
        ("os.system('ls {}'.format(name))", "a formatted command"),
        ("run(['sh', '-c', line])", "a shell"),
        ("dist.all_gather_object(found, mine)", "all_gather_object"),
        ("from x import y\nbroadcast_object_list(found)", "broadcast_object_list"),
        ("torch.load(path, weights_only=False)", "weights_only=False"),
        ("subprocess.run(['ls', name])\nchannel.exec_command(command)", ""),
    ],
)
def test_the_lint_sees_what_it_is_there_for(text, says):
    """Each kind of offence is found, and nothing is found where there is none."""
    assert offences(ast.walk(ast.parse(text))) == [says] * bool(says)


def test_no_file_hands_words_to_a_shell_or_pickles_to_ranks():
    """SSH-4, NET-1, CKPT-1: no shell=True, no formatted command, no `*_object` collective."""
    by_file = {name: done for path, name in NAMES.items() if (done := offences(nodes(path)))}
    assert by_file == {name: ["a shell"] * count for name, count in MAY_START_A_SHELL.items()}


VERBS = (
    "accept add admit adopt advance allow answer append apply ask assemble assign attach begin "
    "bind block blur bring build call cancel carry change check choose claim clean clear close "
    "collect compare complain compute confirm connect continue convert convince copy correct "
    "count cover create cut decide declare decode delete describe detach display do download draw "
    "drop encode end enforce enter escape estimate evaluate exchange exit expand expect explain "
    "export extend fail feed fetch fill filter find finish flag flush follow forget fork format "
    "forward free gather get give go group guard guess halve handle hang hash have hear hide hint "
    "hold identify ignore import index inflate inform inherit initialise insert inspect install "
    "interpolate interrupt join keep kill label launch lay lead learn leave let limit link list "
    "listen load locate lock log look loop make map mark mask match measure meet merge mirror mix "
    "mount move name narrow normalise note notice observe obtain offer open order pack parse pass "
    "patch pause permit pick place plan point poll predict prefer preload prepare press print "
    "promise protect prove publish put query queue quote raise reach read rebuild receive "
    "reconnect record redraw reduce refuse register reject relay release remember remove rename "
    "render reopen repeat replace report request reserve reset resolve restart restore resume "
    "retry return reuse reveal rewrite run save say scale schedule seal search seed select send "
    "serve set settle shorten show shuffle shut sign signal skip sleep sort spawn speak split "
    "squeeze start step stop store strip substitute sum summarise supervise suspend swap switch "
    "sync take talk tell terminate test throttle tie time touch trace track train transform "
    "translate trim truncate trust try turn undo unlock unpack unwrap update upload use validate "
    "verify wait wake walk warm warn watch weigh widen withdraw wrap write yield"
)
"""What a function may begin its docstring with. To add a verb is fine; a noun is not."""


def other_openings(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the functions whose docstring does not begin with a verb; properties may be nouns."""
    others, verbs = [], set(VERBS.split())
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = (ast.get_docstring(node) or "return").split(maxsplit=1)[0]
        is_property = any("property" in ast.unparse(mark) for mark in node.decorator_list)
        if not is_property and first.rstrip(",.;:").lower() not in verbs:
            others.append(f"{node.name}: {first}")
    return others


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('def hosts():\n  """The hosts of a run."""', ["hosts: The"]),
        ('class A:\n  async def end(self):\n    """Returns it."""', ["end: Returns"]),
        ('@property\ndef hosts():\n  """The hosts of a run."""', []),
        ('def hosts():\n  """Return, in order, the hosts."""\ndef _bare(): ...', []),
    ],
)
def test_the_lint_distinguishes_imperatives_from_descriptions(text, expected):
    """A noun and a third person are found; properties and functions without a word pass."""
    assert other_openings(ast.walk(ast.parse(text))) == expected


def test_docstrings_say_what_a_function_does():
    """Each begins with a verb, as the field writes them: `Return the hosts.`"""
    by_file = {name: other_openings(nodes(path)) for path, name in NAMES.items()}
    assert not {name: others for name, others in by_file.items() if others}


VARIABLE = re.compile(r"RACKRUN_[A-Z]")
SPELLED = re.compile(r"python -m rackrun(\.(convert|nginx|launcher)| |$)|\./run-(ssh|local|ray)")


def test_messages_name_commands_as_the_user_calls_them():
    """By `called`, for rackrun may be installed, or be a checkout; docstrings may name either."""
    assert texts_like(SPELLED).keys() <= {"rackrun/commands.py"}


def test_variables_are_named_in_one_place():
    """Launcher, ranks and programs for hosts read each other's: a name that differs is silence."""
    assert texts_like(VARIABLE).keys() == {"rackrun/contract/variables.py"}


PHASES = {word for name, word in vars(phases).items() if name.isupper()}


def spelled_phases(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the phases that are compared, passed or sent as a string instead of by name."""
    result = []
    for node in nodes:
        if isinstance(node, (ast.Compare, ast.Call, ast.Dict)):
            parts = list(ast.iter_child_nodes(node))
            parts += [part.value for part in parts if isinstance(part, ast.keyword)]
            args = [part.value for part in parts if isinstance(part, ast.Constant)]
            args = [arg for arg in args if isinstance(arg, str) and arg in PHASES]
            result += args if args and "phase" in ast.unparse(node) else []
    return result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('rank.phase != "train"', ["train"]),
        ('progress.phase("save")', ["save"]),
        ('report(phase="evaluate")', ["evaluate"]),
        ('send({"phase": "start"})', ["start"]),
        ('host.state == "done" and rank.phase != phases.TRAIN', []),
    ],
)
def test_the_lint_sees_a_phase_that_is_spelled(text, expected):
    """Each way to spell one is found; a state of the same name is none."""
    assert spelled_phases(ast.walk(ast.parse(text))) == expected


def test_phases_are_named_in_one_place():
    """Ranks report them and launchers judge by them: a word that differs is never noticed."""
    assert not {name: args for path, name in NAMES.items() if (args := spelled_phases(nodes(path)))}


def texts_like(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    """Return the strings of each file that hold what is searched for."""
    by_file = {name: list(filter(pattern.search, texts_of(path))) for path, name in NAMES.items()}
    return {name: texts for name, texts in by_file.items() if texts}


def texts_of(path: Path) -> list[str]:
    """Return the strings of a file, but for its docstrings."""
    docstrings = {node.value for node in nodes(path) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "bench").glob("*.py")))
def test_measurements_find_what_they_import(name):
    """No other test runs them, and they use what tests use."""
    import_module(f"bench.{name}")
