"""Small changes of the code of a module, made by mutmut, and a sample of them."""

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from mutmut.mutation.file_mutation import (
    Mutation,
    combine_mutations_to_source,
    create_mutations,
    deep_replace,
)
from mutmut.mutation.trampoline_templates import mangle_function_name

from tests.mutation.mutate import Mutant

LINES_PER_MUTANT = 100
SPARED = (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString, cst.Raise, cst.Annotation)


def mutate(path: str, whole: bool) -> tuple[str, list[Mutant]]:
    """Return the code of a module with some of its mutants, or all, and the mutants.

    No mutant only changes a text or a `raise`, gives None instead of a value, or leaves out an
    argument that a call needs. Which ones are drawn depends on what each is, so a change of a
    module leaves most of its sample as it was.
    """
    module, mutations, classes, functions = create_mutations(path, Path(path).read_text())
    spared = set(_spared(module))
    owners = dict(_functions(module))
    keys: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for each in mutations:
        function = each.contained_by_top_level_function
        before, after = map(module.code_for_node, (each.original_node, each.mutated_node))
        if function not in owners or id(each.original_node) in spared:
            continue
        gives_none = after.endswith("= None") or after.count("None") > before.count("None")
        if gives_none or _too_few(each):
            continue  # mostly a TypeError, which any test notices that gets there
        change = f"{path} {owners[function]} {function.name.value} {before} -> {after}"
        keys[id(each)] = hashlib.sha256(f"{change} {seen[change]}".encode()).hexdigest()
        seen[change] += 1
    drawn = sorted(keys.values())
    if not whole:
        drawn = drawn[: max(1, len(module.code.splitlines()) // LINES_PER_MUTANT)]
    mutations = [each for each in mutations if keys.get(id(each)) in drawn]
    code = combine_mutations_to_source(module, mutations, classes, functions).code
    code = code.replace(
        "from mutmut.mutation.trampoline import wrap_in_trampoline as _mutmut_mutated",
        "from tests.mutation.switch import switched as _mutmut_mutated",
    )
    return code, list(_described(path, module, mutations, owners))


def _described(
    path: str,
    module: cst.Module,
    mutations: list[Mutation],
    owners: dict[cst.FunctionDef, str],
) -> Iterator[Mutant]:
    """Yield mutants with the names that mutmut gives them: a number in each function."""
    numbers: Counter[cst.FunctionDef] = Counter()
    package = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    for each in mutations:
        function = each.contained_by_top_level_function
        assert function is not None
        owner, name = owners[function], function.name.value
        numbers[function] += 1
        mangled = mangle_function_name(name=name, class_name=owner or None)
        mutated = deep_replace(function, each.original_node, each.mutated_node)
        assert isinstance(mutated, cst.FunctionDef)
        texts = (module.code_for_node(node).splitlines() for node in (function, mutated))
        changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
        before, after = (
            " ".join(line[2:].strip() for line in changed if line[0] == sign) for sign in "-+"
        )
        key = f"{package}.{mangled}__mutmut_{numbers[function]}"
        called = f"{owner}.{name}" if owner else name
        yield Mutant(path, called, before or "(nothing)", after or "(left out)", key)


def _functions(module: cst.Module) -> Iterator[tuple[cst.FunctionDef, str]]:
    """Yield what mutmut mutates, with the name of its class."""
    for statement in module.body:
        if isinstance(statement, cst.FunctionDef):
            yield statement, ""
        elif isinstance(statement, cst.ClassDef):
            for method in statement.body.body:
                if isinstance(method, cst.FunctionDef):
                    yield method, statement.name.value


def _too_few(mutation: Mutation) -> bool:
    """Return whether a call loses an argument that probably has no default, or only `strict=`."""
    call, mutated = mutation.original_node, mutation.mutated_node
    if not (isinstance(call, cst.Call) and isinstance(mutated, cst.Call)):
        return False
    if len(mutated.args) == len(call.args):
        return False
    lost = next(arg for arg in call.args if arg not in mutated.args)
    if lost.keyword:
        return bool(lost.keyword.value == "strict")
    return lost is not call.args[-1]


def _spared(node: cst.CSTNode, inside: bool = False) -> Iterator[int]:
    """Yield the identities of nodes in texts, errors, annotations and `strict=`."""
    strict = isinstance(node, cst.Arg) and node.keyword and node.keyword.value == "strict"
    inside = inside or isinstance(node, SPARED) or bool(strict)
    if inside:
        yield id(node)
    for child in node.children:
        yield from _spared(child, inside)
