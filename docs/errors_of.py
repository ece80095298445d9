"""Lists every error that python/dmattn and the ops raise, by their source, as docs/generated/errors.md (``make docs``)."""

from __future__ import annotations

import ast
import functools
import html
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/dmattn"
ARGUMENT = r"[A-Za-z_]\w*(?:\.\w+)?"
VALUE = re.compile("\x01(.*?)\x02")  # a value in a message, by its name


class Error(NamedTuple):
    """One message of one place that raises: what, with which words, where, and what the docstring says of it."""

    kind: str
    message: str
    function: str
    file: str
    line: int
    about: str

    def argument(self) -> str:
        """The argument or arguments before the colon, without "dmattn: "; "" where the message names none."""
        found = re.match(rf"({ARGUMENT}(?:, {ARGUMENT})*):", re.sub("^dmattn: ", "", self.message))
        return found[1] if found and not found[1].endswith("Error") else ""

    def tail(self) -> str:
        """The message behind the argument, which may stand once more in a comparison."""
        argument = self.argument() or value("name")
        behind = re.sub(f"^(dmattn: )?{re.escape(argument)}: ", "", self.message)
        return behind.replace(f"<= {argument} <", f"<= {value('name')} <")

    def pattern(self) -> str:
        """A regular expression that fits the messages a user sees."""
        return "".join(".*" if index % 2 else re.escape(part) for index, part in enumerate(VALUE.split(self.message)))

    def where(self) -> str:
        module = self.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        return f"{module}.{self.function}" if self.function else self.file


def value(name: str) -> str:
    return f"\x01{name}\x02"


# Python --------------------------------------------------------------------------------------------------------------------------------


class Scope(NamedTuple):
    """Where a name is looked up: the functions around it, from the outside in, and their file."""

    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    names: tuple[str, ...]
    file: str

    def about(self, kind: str) -> str:
        docs = [ast.get_docstring(function) or "" for function in reversed(self.functions)]
        return next((text for doc in docs if (text := raises_of(doc, kind))), "")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def calls_by_name() -> dict[str, list[tuple[ast.Call, Scope]]]:
    """The calls of the package by the last name of what is called."""
    found: dict[str, list[tuple[ast.Call, Scope]]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node, scope in walk(parsed(path), Scope((), (), path.relative_to(PACKAGE).as_posix())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                for call in each_of(node):
                    found.setdefault(last_name(call.func), []).append((call, scope))
    return found


@functools.cache
def constants() -> dict[str, str]:
    """Numbers and texts of the package by their upper-case names."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
                if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int | float | str):
                    found[node.targets[0].id] = str(node.value.value)
                elif re.fullmatch(r"[\d\s*+<-]+", text := ast.unparse(node.value)):
                    found[node.targets[0].id] = str(eval(text))  # such as 1 << 20
    return found


def each_of(call: ast.Call) -> list[ast.Call]:
    """The calls check("a", a), check("b", b) that checks.each(check, a=a, b=b) makes, or the call itself."""
    if last_name(call.func) != "each":
        return [call]
    return [ast.Call(call.args[0], [ast.Constant(word.arg), word.value], []) for word in call.keywords]


def last_name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def walk(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = Scope((*scope.functions, child), (*scope.names, child.name), scope.file)
        elif isinstance(child, ast.ClassDef):
            inner = Scope(scope.functions, (*scope.names, child.name), scope.file)
        yield child, inner
        yield from walk(child, inner)


def errors_of(path: Path) -> Iterator[Error]:
    """Every place in a file that raises an error of its own, in order; one that is raised again is that of another place."""
    for node, scope in walk(parsed(path), Scope((), (), path.relative_to(PACKAGE).as_posix())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func)
            messages = [text for given in arguments_of_calls(scope) for text in texts_of(node.exc.args[0], scope, given)]
            for message in dict.fromkeys(messages):
                yield Error(kind, message, ".".join(scope.names), scope.file, node.lineno, scope.about(kind))


Given = dict[str, list[str]]  # the texts that an argument may be, where they are known


@functools.cache
def arguments_of_calls(scope: Scope, depth: int = 3) -> list[Given]:
    """What the calls of a function give for its arguments, once each; [{}] where nothing calls it, or with no text of its own."""
    if not scope.functions or not depth:
        return [{}]
    function, found = scope.functions[-1], []
    for call, its_scope in calls_by_name().get(function.name, ()):
        bound = bound_to(call, function)
        for outer in arguments_of_calls(its_scope, depth - 1):
            for in_loop in loops_of(function, bound):
                texts = {name: texts_of(node, its_scope, outer) for name, node in {**bound, **in_loop}.items()}
                known = {name: given for name, given in texts.items() if all(map(says_something, given))}
                if known not in found:
                    found.append(known)
    return found or [{}]


def loops_of(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: dict[str, ast.expr]) -> list[dict[str, ast.expr]]:
    """What the names of a loop over tuples hold, for each of them: of the first such loop that has names of texts."""
    for node in ast.walk(function):
        if isinstance(node, ast.For) and isinstance(node.target, ast.Tuple):
            rows = bound.get(node.iter.id) if isinstance(node.iter, ast.Name) else node.iter
            names = [target.id for target in node.target.elts if isinstance(target, ast.Name)]
            if isinstance(rows, ast.Tuple) and all(
                isinstance(row, ast.Tuple) and len(row.elts) == len(names) for row in rows.elts
            ):
                return [dict(zip(names, row.elts, strict=True)) for row in rows.elts if isinstance(row, ast.Tuple)]
    return [{}]


def bound_to(call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """The arguments of a call by their names, with the function's defaults."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    bound = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
    names = names[1:] if names[:1] == ["self"] else names
    given = itertools.takewhile(lambda node: not isinstance(node, ast.Starred), call.args)
    if function.args.vararg:
        bound[function.args.vararg.arg] = ast.Tuple(call.args[len(names) :])
    return {**bound, **dict(zip(names, given, strict=False)), **{word.arg: word.value for word in call.keywords if word.arg}}


def texts_of(node: ast.expr, scope: Scope, given: Given) -> list[str]:
    """The texts that an expression may be, with marks in the place of values; [name of the value] where it is no text."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        got = next(
            (place for place, part in enumerate(node.values) if isinstance(part, ast.Constant) and "got " in part.value), None
        )
        return joined(node.values, scope, given, got)
    if isinstance(node, ast.FormattedValue):
        spec = ast.unparse(node.format_spec)[2:-1] if node.format_spec else ""
        texts = texts_of(node.value, scope, given)
        return [format(float(text), spec) if spec and re.fullmatch(r"[\d.e+]+", text) else text for text in texts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not ast.unparse(node.right).isdigit():
        return joined([node.left, node.right], scope, given)
    if isinstance(node, ast.IfExp):
        return [*texts_of(node.body, scope, given), *texts_of(node.orelse, scope, given)]
    if isinstance(node, ast.Name | ast.Attribute) and last_name(node) in constants():
        return [constants()[last_name(node)]]
    if isinstance(node, ast.Name):
        own = [text for assigned in assigned_to(node.id, scope) for text in texts_of(assigned, scope, given)]
        texts = list(dict.fromkeys(own or given.get(node.id, [])))
        if any(map(says_something, texts)):
            return texts
    return [value(name_of(node))]


def says_something(text: str) -> bool:
    """Whether a text is more than the name of a value."""
    return not VALUE.fullmatch(text)


def joined(parts: Sequence[ast.expr], scope: Scope, given: Given, got: int | None = None) -> list[str]:
    """Texts one after the other; a name that stands twice has one text, and one behind "got" is a value."""
    texts = {ast.dump(part): texts_of(part, scope, given) for part in parts}
    for part in parts[got:] if got is not None else ():
        if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
            texts[ast.dump(part)] = [value(name_of(part.value))]
    choices = [dict(zip(texts, choice, strict=True)) for choice in itertools.product(*texts.values())]
    return ["".join(choice[ast.dump(part)] for part in parts) for choice in choices]


def assigned_to(name: str, scope: Scope) -> Iterator[ast.expr]:
    """What the innermost function that assigns to a name assigns; what needs the name itself is left out."""
    for function in reversed(scope.functions):
        if values := assignments(function).get(name):
            yield from (
                each for each in values if name not in {inner.id for inner in ast.walk(each) if isinstance(inner, ast.Name)}
            )
            return


@functools.cache
def assignments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


def name_of(node: ast.expr) -> str:
    """A short name of a value: that of its variable, "shape of x", "type of x", or its expression where that is short."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        if node.attr == "__name__":
            return name_of(node.value)
        of = node.value
        return node.attr.strip("_") if isinstance(of, ast.Name) and of.id in ("self", "checks", "sizes") else ast.unparse(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        called, arguments = last_name(node.func), node.args
        if called in ("shape_of", "type_of", "type") and len(arguments) == 1:
            return f"{called.removesuffix('_of')} of {name_of(arguments[0])}"
        if called in ("list", "tuple", "int", "str", "repr", "sorted", "join", "_shown", "map") and arguments:
            inner = arguments[-1]
            if isinstance(inner, ast.Attribute) and inner.attr == "shape":
                return f"shape of {name_of(inner.value)}"
            return name_of(inner.elt if isinstance(inner, ast.GeneratorExp) else inner)
        if called in ("tolist", "item", "removeprefix", "fspath", "format", "replace", "stride", "_asdict") and isinstance(
            node.func, ast.Attribute
        ):
            return name_of(arguments[0] if called == "fspath" else node.func.value)
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
        return name_of(node.value)
    if isinstance(node, ast.BoolOp):
        return name_of(node.values[0])
    text = ast.unparse(node).replace("'", "").replace("self.", "").replace("checks.", "")
    return text if len(text) <= 32 else "value"


def raises_of(docstring: str, kind: str) -> str:
    """What the Raises of a docstring says of a kind of error, its first sentence."""
    section = re.search(r"^Raises:\n((?:[ \t]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if section is None:
        return ""
    entries = re.split(r"\n(?=    \S)", section[1].rstrip())
    for entry in entries:
        kinds, _, about = " ".join(entry.split()).partition(": ")
        if kind in re.split(r",\s*", kinds):
            return about
    return ""


# C++ -----------------------------------------------------------------------------------------------------------------------------------


def errors_of_ops(path: Path) -> Iterator[Error]:
    """Every ``fail(parts...)`` and ``check(condition, parts...)`` of a C++ file (cpp/errors.h)."""
    text = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), path.read_text())
    for call in re.finditer(r"(?<![\w:.])(fail|check)\(", text):
        parts = arguments_at(text, call.end())
        words = [message_of_part(part) for part in (parts[1:] if call[1] == "check" else parts)]
        name = path.relative_to(ROOT).as_posix()
        yield Error("RuntimeError", "dmattn: " + "".join(words), "", name, text.count("\n", 0, call.start()) + 1, "")


def arguments_at(text: str, at: int) -> list[str]:
    """The arguments of a call from behind its bracket on."""
    parts, depth, begin = [], 0, at
    for token in re.finditer(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|[()\[\]{},]', text[at:]):
        letter, place = token[0], at + token.start()
        if letter in "([{":
            depth += 1
        elif letter in ")]}" and depth:
            depth -= 1
        elif letter in ")," and not depth:
            parts.append(text[begin:place].strip())
            begin = place + 1
            if letter == ")":
                break
    return parts


def message_of_part(part: str) -> str:
    if re.fullmatch(r'(?:"(?:\\.|[^"\\])*"\s*)+', part):
        return "".join(re.findall(r'"((?:\\.|[^"\\])*)"', part)).replace('\\"', '"')
    if number := re.search(rf"constexpr \w+ {re.escape(part)} = (?:int64_t\{{1\}} << (\d+)|([\w.]+));", sources_of_ops()):
        return str(1 << int(number[1]) if number[1] else ast.literal_eval(number[2]))
    if shape := re.fullmatch(r"shape_text\(\*?(\w+)\)", part):
        return value(f"shape of {shape[1]}")
    short = re.sub(r"^(p|shape|sizes)\.", "", part)
    return value(short if re.fullmatch(r"[\w.():\[\] *+-]{1,32}", short) else "value")


@functools.cache
def sources_of_ops() -> str:
    return "".join(path.read_text() for path in (ROOT / "cpp").rglob("*.h"))


# The page ------------------------------------------------------------------------------------------------------------------------------


def all_errors() -> list[Error]:
    """Those that say something; methods that a class leaves to others say nothing."""
    python = [error for path in sorted(PACKAGE.rglob("*.py")) for error in errors_of(path)]
    sources = sorted(path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
    ops = [error for path in sources if path.name != "errors.h" for error in errors_of_ops(path)]
    return [error for error in (*python, *ops) if error.message]


MOST_OF_A_KIND = 6  # arguments with messages of their own; more have one entry for all
ANY = "any argument"


def entry(errors: Sequence[Error]) -> str:
    """An item of a list for those that have one message: the message, its arguments, the error, the functions, what their docstrings say."""
    arguments = list(dict.fromkeys(error.argument() for error in errors if error.argument()))
    message = (
        errors[0].message if len(arguments) == 1 else f"{value('name')}: {errors[0].tail()}" if arguments else errors[0].message
    )
    shown = VALUE.sub(r"<var>&lt;\1&gt;</var>", html.escape(message, quote=False)).replace("\n", " ")
    raised = ", ".join(dict.fromkeys(f"<code>{error.where()}</code>" for error in errors))
    lines = [
        f"<code>{shown}</code>",
        f"of {', '.join(sorted(arguments))}" if len(arguments) > 1 else "",
        f"{errors[0].kind}, {raised}",
    ]
    lines += dict.fromkeys(html.escape(error.about, quote=False).replace("``", "") for error in errors)
    return f"<li>{'<br>'.join(filter(None, lines))}</li>"


def grouped(errors: list[Error]) -> dict[str, list[list[Error]]]:
    """Entries by argument, then message; what many arguments share is one entry of any argument."""
    of_place: dict[tuple[str, str, str], list[Error]] = {}
    for error in errors:
        if error.argument() or error.message.startswith("\x01"):
            of_place.setdefault((error.kind, error.where(), error.tail()), []).append(error)
    shared = {id(error) for of_one in of_place.values() if len(of_one) > MOST_OF_A_KIND for error in of_one}
    groups: dict[str, dict[tuple[str, str], list[Error]]] = {}
    for error in errors:
        is_any = id(error) in shared or error.message.startswith("\x01")
        group = "called directly" if error.file.startswith("cpp/") else ANY if is_any else error.argument() or "none"
        text = error.tail() if is_any else error.message
        groups.setdefault(group, {}).setdefault((text, error.kind), []).append(error)
    return {group: [entries[key] for key in sorted(entries)] for group, entries in groups.items()}


def page(errors: list[Error]) -> str:
    """Lists of messages, sorted: those of any argument, of each, of none, and of ops called directly."""
    groups = grouped(errors)

    def listed(group: str) -> str:
        return "\n".join(['<ul class="errors">', *map(entry, groups[group]), "</ul>"])

    arguments = sorted(set(groups) - {ANY, "none", "called directly"}, key=str.lower)
    return "\n\n".join(
        [
            f"### Of many arguments\n\n{listed(ANY)}",
            "### By argument",
            *(f"#### {group}\n\n{listed(group)}" for group in arguments),
            f"### Without an argument\n\n{listed('none')}",
            f"### Ops called directly\n\n{listed('called directly')}\n",
        ]
    )


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "errors.md").write_text(page(all_errors()))


if __name__ == "__main__":
    write(Path(__file__).parent / "generated")
