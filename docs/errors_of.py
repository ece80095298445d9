"""Lists every error that python/dmattn and the ops raise, by their source, as docs/generated/errors.md (``make docs``)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/dmattn"
OPS = "Ops called directly"
# What users see of a file, the first that fits; a heading for each.
TOPICS = (
    ("masks/", "Masks"),
    ("nn/", "Layers"),
    ("distributed/", "Several ranks"),
    ("sharding", "Several ranks"),
    ("integrations/", "Integrations"),
    ("compat/", "Functions of other libraries"),
    ("testing/", "Testing"),
    ("cache", "Caches and decoding"),
    ("decode", "Caches and decoding"),
    ("eviction", "Caches and decoding"),
    ("__main__", "Command line and loading"),
    ("shape", "Command line and loading"),
    ("plan", "Command line and loading"),
    ("_library", "Command line and loading"),
    ("", "Attention"),
)
ORDER = ("Attention", *dict.fromkeys(topic for _, topic in TOPICS[:-1]), OPS)


class Error(NamedTuple):
    """One place that raises: what, with which message, where, and what the docstring says of it."""

    kind: str
    message: str
    function: str
    file: str
    line: int
    about: str


def errors_of(path: Path) -> Iterator[Error]:
    """Every place in a file that raises an error of its own, in order; one that is raised again is that of another place."""
    tree = ast.parse(path.read_text())
    yield from _within(tree, [], [], path.relative_to(PACKAGE).as_posix())


def _within(node: ast.AST, names: list[str], docs: list[str], file: str) -> Iterator[Error]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _within(child, [*names, child.name], [*docs, ast.get_docstring(child) or ""], file)
            continue
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call | ast.Name):
            call = child.exc
            raised = call.func if isinstance(call, ast.Call) else call
            kind = ast.unparse(raised)
            if kind[0].isupper() or "." in kind or isinstance(call, ast.Call):
                message = message_of(call.args[0]) if isinstance(call, ast.Call) and call.args else ""
                about = next((said for doc in reversed(docs) if (said := said_of(doc, kind))), "")
                yield Error(kind, message, ".".join(names), file, child.lineno, about)
        yield from _within(child, names, docs, file)


def message_of(node: ast.expr) -> str:
    """The text of a message, with {...} in the place of values; of two messages of which one is raised, both."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(message_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        if isinstance(inner, ast.Name | ast.Attribute):
            name = inner.id if isinstance(inner, ast.Name) else inner.attr
            return "{...}" if name.startswith("_") else "{" + name + "}"
        return message_of(inner) if isinstance(inner, ast.JoinedStr | ast.Constant) else "{...}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message_of(node.left) + message_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{message_of(node.body)} / {message_of(node.orelse)}"
    return "{...}"


def said_of(docstring: str, kind: str) -> str:
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
    return "{" + (part if re.fullmatch(r"\w+", part) else "...") + "}"


def topic_of(file: str) -> str:
    if file.startswith("cpp/"):
        return OPS
    return next(topic for start, topic in TOPICS if file.startswith(start))


def all_errors() -> list[Error]:
    """Those that say something; methods that a class leaves to others say nothing."""
    python = [error for path in sorted(PACKAGE.rglob("*.py")) for error in errors_of(path)]
    sources = sorted(path for path in (ROOT / "cpp").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))
    ops = [error for path in sources if path.name != "errors.h" for error in errors_of_ops(path)]
    return [error for error in (*python, *ops) if error.message]


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    """As code in a table: a fence that the text does not have."""
    fence = "``" if "`" in text else "`"
    pad = " " if fence == "``" else ""
    return f"{fence}{pad}{cell(text)}{pad}{fence}" if text.strip() else ""


def page(errors: list[Error]) -> str:
    """A table for each topic: the message and what the docstring says of it, the error and its function."""
    parts = []
    for topic in ORDER:
        of_topic = [error for error in errors if topic_of(error.file) == topic]
        if not of_topic:
            continue
        lines = [f"### {topic}", "", "| message, and when | error, raised by |", "|---|---|"]
        for error in of_topic:
            module = error.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            where = f"{module}.{error.function}" if error.function else error.file
            message, raised = code(error.message), f"{code(error.kind)} <br> {code(where)}"
            lines.append(f"| {message}{f' <br> {cell(error.about)}' if error.about else ''} | {raised} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "errors.md").write_text(page(all_errors()))


if __name__ == "__main__":
    write(Path(__file__).parent / "generated")
