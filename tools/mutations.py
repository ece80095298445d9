"""Mutations of the sources: one small slip each, such as ``<`` for ``<=``, made by operators on the syntax tree or on C++ tokens.

A mutation is named by file, function, operator and how many of that operator come before it in the function, so other functions and
lines may change without renaming it. ``sample`` draws some with a fixed seed, of every operator about as many.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEED = 36
# Which files an area has, and which of these make no result.
AREAS = {
    "python": (["python/dmattn/**/*.py"], ["_version.py"]),
    "cpu": (["cpp/*.h", "cpp/*.cpp", "cpp/cpu/*"], ["schema.cpp", "module.cpp", "library.cpp"]),
    "cuda_common": (["cpp/cuda/**/*.*"], ["/sm80/", "/sm90/"]),
    "cuda_sm80": (["cpp/cuda/sm80/**/*.*"], []),
    "cuda_sm90": (["cpp/cuda/sm90/**/*.*"], []),
}


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Text from ``start`` to ``end`` of a file becomes ``new``."""

    area: str
    file: str
    function: str
    operator: str
    occurrence: int
    start: int
    end: int
    new: str
    edit: str  # what becomes what, in its line

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}: {self.operator} {self.occurrence}"

    def applied(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


Edit = tuple[str, str, int, int, str]  # function, operator, start, end, new text

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPPOSITES = {
    "min": "max",
    "minimum": "maximum",
    "amin": "amax",
    "any": "all",
    "fmin": "fmax",
    "fminf": "fmaxf",
    "min_of": "max_of",
}
OPPOSITES |= {opposite: name for name, opposite in OPPOSITES.items()}
UNREAD = {"annotation", "returns", "decorator_list", "bases"}  # fields of the tree in which a slip changes no result


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    """What each operator makes of one node of a Python tree: operator, the first and the last node that go, the text that comes."""

    def whole(operator: str, new: ast.AST) -> tuple[str, ast.AST, ast.AST, str]:
        words = ast.unparse(ast.fix_missing_locations(new))
        return operator, node, node, words if isinstance(new, ast.stmt | ast.Constant) else f"({words})"

    new = copy.copy(node)
    if isinstance(node, ast.Compare):
        for i, kind in enumerate(map(type, node.ops)):
            if kind in COMPARISONS:
                yield whole(
                    "comparison",
                    ast.Compare(node.left, [*node.ops[:i], COMPARISONS[kind](), *node.ops[i + 1 :]], node.comparators),
                )
    elif isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        sides = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
        if not any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) or is_text(side) for side in sides):
            new.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield whole("arithmetic", new)
    elif isinstance(node, ast.BoolOp):
        yield whole("and, or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield whole("dropped not", node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield whole("true, false", ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield whole("off by one", ast.Constant(node.value + 1))
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func).rpartition(".")
        if called[2] in OPPOSITES:
            yield "minimum, maximum", node.func, node.func, called[0] + called[1] + OPPOSITES[called[2]]
        for a, b in zip(node.args, node.args[1:], strict=False):
            if type(a) is type(b) and isinstance(a, ast.Name | ast.Attribute) and ast.dump(a) != ast.dump(b):
                yield "swapped arguments", a, b, f"{ast.unparse(b)}, {ast.unparse(a)}"
    elif isinstance(node, ast.Raise):
        yield whole("removed raise", ast.Pass())
    is_written = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if is_written or isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield whole("removed statement", ast.Pass())


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def python_edits(text: str) -> Iterator[Edit]:
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def visit(node: ast.AST, function: str) -> Iterator[Edit]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                return
            function = f"{function}.{node.name}".lstrip(".")
        for operator, first, last, new in changes(node):
            yield function, operator, place(first.lineno, first.col_offset), place(last.end_lineno, last.end_col_offset), new
        if isinstance(node, ast.JoinedStr | ast.Raise) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            return
        for field, value in ast.iter_fields(node):
            for child in (value if isinstance(value, list) else [value]) if field not in UNREAD else []:
                if isinstance(child, ast.AST) and getattr(child, "arg", None) != "strict":  # of zip: an assertion
                    yield from visit(child, function)

    yield from visit(ast.parse(text), "")


TOKEN = re.compile(
    r'(?P<unread>//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*|R"(?P<raw>\w*)\(.*?\)(?P=raw)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    r"|(?P<number>\d[\w.']*)|(?P<word>[A-Za-z_]\w*)|<<=|>>=|->|\+\+|--|&&|\|\||::|[-+*/%&|^<>=!]=|<<|>>|\S",
    re.DOTALL | re.MULTILINE,
)
# clang-format puts blanks around binary operators, and none around template brackets, signs and references.
BINARY = {
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "arithmetic": {"+": "-", "-": "+", "+=": "-=", "-=": "+="},
    "and, or": {"&&": "||", "||": "&&"},
}
ASSIGNMENTS = {"=", "+=", "-=", "*=", "/=", "&=", "|=", "^=", "<<=", ">>="}
KEYWORDS = {
    "if", "for", "while", "do", "switch", "case", "return", "break", "continue", "else", "const", "constexpr", "auto", "static",
    "using", "typename", "template", "asm",
}  # fmt: skip
WAITS = re.compile(r"sync|barrier|wait|arrive|fence|acquire|release")


class Tokens:
    """The tokens of a C++ or CUDA file, without comments, texts and preprocessor lines, and the brackets that belong together."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found = [match for match in TOKEN.finditer(text) if not match["unread"]]
        self.words = [match[0] for match in self.found]
        self.closing: dict[int, int] = {}
        opened: list[int] = []
        for i, word in enumerate(self.words):
            if word in ("(", "[", "{"):
                opened.append(i)
            elif word in (")", "]", "}") and opened:
                self.closing[opened.pop()] = i

    def is_word(self, i: int) -> bool:
        return i < len(self.words) and bool(self.found[i]["word"]) and self.words[i] not in KEYWORDS

    def is_binary(self, i: int) -> bool:
        start, end = self.found[i].span()
        return self.text[start - 1 : start].isspace() and self.text[end : end + 1].isspace()

    def statement(self, i: int) -> tuple[str, int] | None:
        """A call or an assignment that begins with token i: the last name it calls or assigns, and its semicolon."""
        if not self.is_word(i):
            return None
        last, j = self.words[i], i + 1
        while j < len(self.words):
            word = self.words[j]
            if word in (".", "->", "::") and self.is_word(j + 1):
                last, j = self.words[j + 1], j + 2
            elif word in ("(", "["):
                j = self.closing.get(j, len(self.words)) + 1
            elif word == "<" and not self.is_binary(j):
                j += 1
                while j < len(self.words) and self.words[j] not in (">", ";"):
                    j += 1
                j += 1
            else:
                break
        if j < len(self.words) and self.words[j] in ASSIGNMENTS:
            while j < len(self.words) and self.words[j] not in (";", ")", "}"):
                j = self.closing.get(j, j) + 1
            return (last, j) if self.words[j : j + 1] == [";"] else None
        is_call = self.words[j - 1] == ")" and self.words[j : j + 1] == [";"]
        return (last, j) if is_call and last != "static_assert" else None


def scope_of(header: list[str]) -> str:
    """The name of the class or function whose body follows these tokens; empty for a namespace."""
    text = re.sub(r"\b(alignas|__\w+__) (\( \( .*? \) \)|\( .*? \))", "", " ".join(header))
    if found := re.search(r".*\b(?:struct|class|union|enum) (?:class )?(\w+)[^()]*$", text):
        return found[1]
    found = re.search(r"(operator [^\w\s]+(?: \))?|~ \w+|\b(?!decltype|requires|noexcept)\w+) \(", text)
    return found[1].replace(" ", "") if found else ""


def cpp_edits(text: str) -> Iterator[Edit]:
    tokens = Tokens(text)
    words = tokens.words
    scopes: list[tuple[str, bool]] = []  # of each open brace: the name, and whether it is a function's
    begin = 0
    for i, word in enumerate(words):
        start, end = tokens.found[i].span()
        name, inside = scopes[-1] if scopes else ("", False)
        if word == "{":
            own = "" if inside else scope_of(words[begin:i])
            is_function = inside or (bool(own) and "(" in words[begin:i] and words[i - 1] not in ("=", ","))
            scopes.append((f"{name}.{own}".strip("."), is_function))
        elif word == "}" and scopes:
            scopes.pop()
        if word in (";", "{", "}"):
            begin = i + 1
        if not inside:
            continue
        before = words[i - 1]
        for operator, pairs in BINARY.items():
            if word in pairs and tokens.is_binary(i):
                yield name, operator, start, end, pairs[word]
        if word == "!":
            yield name, "dropped not", start, end, ""
        if re.fullmatch(r"\d+[uUlL]*", word):
            yield name, "off by one", start, end, re.sub(r"^\d+", lambda number: str(int(number[0]) + 1), word)
        if word in ("true", "false"):
            yield name, "true, false", start, end, "false" if word == "true" else "true"
        if word in OPPOSITES and words[i + 1] == "(":
            yield name, "minimum, maximum", start, end, OPPOSITES[word]
        if (
            before in ("(", ",")
            and tokens.is_word(i)
            and words[i + 1] == ","
            and tokens.is_word(i + 2)
            and words[i + 3] in (",", ")")
        ):
            second = tokens.found[i + 2]
            if word != second[0]:
                yield name, "swapped arguments", start, second.end(), f"{second[0]}, {word}"
        if before in (";", "{", "}", ")", "else") and (found := tokens.statement(i)):
            last, semicolon = found
            operator = "removed barrier" if WAITS.search(last) else "removed statement"
            yield name, operator, start, tokens.found[semicolon].start(), ""


def edit_of(text: str, start: int, end: int, new: str) -> str:
    """An edit with a few words before and after it, on one line."""
    before, after = text[:start].rpartition("\n")[2].lstrip()[-30:], text[end:].partition("\n")[0][:30]
    old, new = (
        short if len(short := re.sub(r"\s+", " ", words)) <= 60 else f"{short[:57]}..." for words in (text[start:end], new)
    )
    return f"{before}[{old} -> {new}]{after}"


def mutations_of(area: str, root: Path = ROOT) -> list[Mutation]:
    """Every mutation of an area, by file and place."""
    globs, left_out = AREAS[area]
    files = sorted({path.relative_to(root).as_posix() for glob in globs for path in root.glob(glob) if path.is_file()})
    found = []
    for file in files:
        if any(part in f"/{file}" for part in left_out) or Path(file).suffix not in (".py", ".h", ".cpp", ".cuh", ".cu"):
            continue
        text = (root / file).read_text()
        counts: dict[tuple[str, str], int] = {}
        for function, operator, start, end, new in python_edits(text) if area == "python" else cpp_edits(text):
            occurrence = counts[function, operator] = counts.get((function, operator), 0) + 1
            found.append(Mutation(area, file, function, operator, occurrence, start, end, new, edit_of(text, start, end, new)))
    return found


def sample(mutations: list[Mutation], seed: int = SEED) -> list[Mutation]:
    """All of them in a drawn order: the first of every operator, the second of every operator, and so on.

    Within an operator, a place depends on the seed and the name alone: mutations that come or go leave the order of the others as it was.
    """
    drawn: dict[str, list[Mutation]] = {}
    for mutation in sorted(mutations, key=lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest()):
        drawn.setdefault(mutation.operator, []).append(mutation)
    return [ms[i] for i in range(max(map(len, drawn.values()))) for _, ms in sorted(drawn.items()) if i < len(ms)]
