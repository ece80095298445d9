"""Files that somebody changed: masks, state dicts and programs are refused with an exception, or do what their tensors say. Nothing crashes.

HYPOTHESIS_PROFILE=nightly reads 10,000 files, otherwise some hundreds. A failing one is made again from its kind and its number alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import random
import re
import struct
import zipfile

import dmattn
import pytest
import torch
from dmattn import BlockMask, BoundedCache, IndexMask, IntervalMask
from dmattn.eviction import EvictionCache, Streaming
from dmattn.masks.data import MaskData
from dmattn.nn import IndexedCache, MaskBuffer, MixedCache
from dmattn.testing import AttentionCase, strategies
from dmattn.testing.checks import assert_same_bits, run
from dmattn.testing.tolerance import assert_close_to_reference

SQ, SK = 20, 24
LARGEST = 1e30  # beyond it squares may overflow in bounds on errors, and NaN has none
NUMBERS = [0, 1, -1, 2, 7, 31, 32, 255, 256, 65535, 1 << 20, (1 << 20) + 1, (1 << 31) - 1, -(1 << 31), 1 << 62]


def rows(*size, seed=0):
    return strategies.random_tensor(size, seed, torch.float64, "cpu")


def bools(*size):
    return torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.5


# What is in the files -----------------------------------------------------------------------------------------------------------------

MASKS = {
    "interval": lambda: IntervalMask.padding(SK, torch.tensor([9, SK])) & IntervalMask.sliding_window(SK, 9),
    "documents": lambda: IntervalMask.documents(SK, torch.tensor([0, 10, SK])),
    "any length": lambda: IntervalMask(torch.tensor([3], dtype=torch.int32), torch.tensor([19], dtype=torch.int32)),
    "block": lambda: BlockMask.from_bool(bools(2, 2, SQ, SK), 32),
    "index": lambda: IndexMask(torch.randint(-1, SK // 2, (2, 2, SQ, 5)), 2, is_causal=True, local=3, sink_keys=1),
    "all three": lambda: MASKS["documents"]() & MASKS["block"]() & MASKS["index"](),
}


def bounded():
    return BoundedCache(2, 2, 4, 8, local=3, sink_keys=2, rewind=2, dtype=torch.float64)


CACHES = {
    "bounded": bounded,
    "mixed": lambda: MixedCache(BoundedCache(2, 1, 0, 8, local=4, sink_keys=1, dtype=torch.float64),
                                BoundedCache(2, 1, 4, 8, local=2, dtype=torch.float64)),
    "eviction": lambda: EvictionCache(Streaming(6, every=3, local=2), 2, 4, 2, 8, dtype=torch.float64),
    "indexed": lambda: IndexedCache(2, 2, 40, 8, local_heads=1, local=4, sink_keys=1, groups=0, index_dim=8, dtype=torch.float64),
}  # fmt: skip
KINDS = [*MASKS, *(f"buffer of {name}" for name in MASKS), *CACHES, "program"]
COUNT = -(-10_000 // len(KINDS)) if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 40


def take(cache, tokens, seed=0, at_once=True):
    """Attention of more tokens, at once or one after another."""
    query, key, value = (rows(2, heads, tokens, 8, seed=seed + i) for i, heads in enumerate((4, 2, 2)))
    scores = rows(2, 2, tokens, seed=seed + 3)
    if isinstance(cache, IndexedCache):
        lists = IndexMask(torch.arange(3).expand(2, 1, tokens, 3).int(), is_causal=True)
        return cache.attend(query, key, value, None, lists)[0]
    parts = zip(*(x.split(tokens if at_once else 1, 2) for x in (query, key, value, scores)), strict=True)
    return torch.cat([cache.attend(*part) for part in parts], 2)


class Program(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cache, self.visible = bounded(), MaskBuffer(MASKS["interval"]())

    def forward(self, query, key, value, scores, block):
        out = self.cache.attend(query, key, value, scores)
        return (
            out
            + dmattn.attention(query, key, value, block)
            + dmattn.dynamic_mask_attention(query, key, value, scores, 4, local=2)
        )


def program_inputs():
    block = BlockMask.from_bool(bools(2, 2, 10, 10), 32)
    return rows(2, 4, 10, 8), rows(2, 2, 10, 8, seed=1), rows(2, 2, 10, 8, seed=2), rows(2, 2, 10, seed=3), block


@functools.cache
def original(kind):
    """A mask, a state dict, or the bytes of a program."""
    torch.manual_seed(0)
    if kind == "program":
        file = io.BytesIO()
        with torch.no_grad():
            torch.export.save(torch.export.export(Program(), program_inputs()).run_decompositions({}), file)
        return file.getvalue()
    if kind in CACHES:
        cache = CACHES[kind]()
        take(cache, 13)
        return cache.state_dict()
    return MASKS[kind]() if kind in MASKS else MaskBuffer(MASKS[kind.removeprefix("buffer of ")]()).state_dict()


@functools.cache
def records(kind):
    """The file as an archive: what its records hold."""
    given, file = original(kind), io.BytesIO()
    file.write(given) if isinstance(given, bytes) else torch.save(given, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# Mutations ----------------------------------------------------------------------------------------------------------------------------


def mutated_bytes(data, drawn):
    """Some bytes changed, left out, put in; or a number of 4 or 8 bytes, or in text, that is another."""
    data = bytearray(data)
    for _ in range(drawn.choice([1, 1, 2, 8])):
        at, how = drawn.randrange(len(data) + 1), drawn.randrange(6)
        numbers = list(re.finditer(rb"\d+", data)) if how == 5 else []
        if numbers:
            number = drawn.choice(numbers)
            data[number.start() : number.end()] = b"%d" % drawn.choice(NUMBERS)
        elif how == 4:
            wide = drawn.random() < 0.5
            at -= at % (8 if wide else 4)
            number = drawn.choice([n for n in NUMBERS if wide or n < 1 << 31])
            data[at : at + (8 if wide else 4)] = struct.pack("<q" if wide else "<i", number)
        elif how == 3:
            data[at:at] = drawn.randbytes(drawn.choice([1, 4, 32]))
        elif how == 2:
            del data[at : at + drawn.choice([1, 4, 32, len(data)])]
        else:
            data[at : at + 1] = [drawn.randrange(256)]
    return bytes(data)


def archive_of(held):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return file.getvalue()


def mutated_file(kind, drawn):
    """The archive with one record changed, and checksums that are right; sometimes the bytes of the whole file."""
    held = dict(records(kind))
    if drawn.random() < 0.1:
        return mutated_bytes(archive_of(held), drawn)
    name = drawn.choice([*held, *(name for name in held if name.endswith((".pkl", ".json")))])
    held[name] = mutated_bytes(held[name], drawn)
    return archive_of(held)


def strange(value, drawn):
    """Something else in place of a field or an entry of a state dict."""
    others = [None, "x", [], 1.5, True, *NUMBERS]
    if not isinstance(value, torch.Tensor) or drawn.random() < 0.1:
        return drawn.choice(others)
    number = drawn.choice(NUMBERS)
    with_number = value.clone()
    if value.numel():
        with_number.view(-1)[drawn.randrange(value.numel())] = (
            number if value.dtype == torch.int64 else max(-(1 << 31), min(number, (1 << 31) - 1))
        )
    return drawn.choice([
        with_number, with_number, with_number, value.float(), value.long(), value[..., :-1] if value.dim() else value, value.flatten(),
        value[None], value.to_sparse(), torch.zeros_like(value), value.new_empty(0), value.new_zeros(()).expand(value.shape),
        value.to(torch.bool), value.to(torch.complex64), value.flip(-1) if value.dim() else value, value.half(),
    ])  # fmt: skip


def mutated(kind, drawn):
    """The bytes of a file that was changed, or that holds an object of which one field was."""
    given = original(kind)
    if isinstance(given, bytes) or drawn.random() < 0.5:
        return mutated_file(kind, drawn)
    given, file = copy.copy(given), io.BytesIO()
    fields = vars(given) if isinstance(given, MaskData) else given
    name = drawn.choice(list(fields))
    fields[name] = strange(fields[name], drawn)
    torch.save(given, file)
    return file.getvalue()


# Uses: each returns what remains to be compared ---------------------------------------------------------------------------------------


def use_mask(mask):
    if not isinstance(mask, MaskData):
        raise TypeError("no mask any more")
    visible = mask.to_bool()[..., :SQ, :SK] if isinstance(mask, BlockMask) else mask.to_bool(SQ, SK)
    case = AttentionCase(rows(2, 4, SQ, 8), rows(2, 2, SK, 8, seed=1), rows(2, 2, SK, 8, seed=2), mask, visible)
    results = run(case)
    return lambda: assert_close_to_reference(case, results)


def use_cache(name, state):
    cache = CACHES[name]()
    cache.load_state_dict(state)
    if name != "bounded":
        for tokens in (1, 12):
            take(cache, tokens)
        if name != "eviction":
            cache.reorder(torch.tensor([1, 1]))
        return lambda: None
    both = [copy.deepcopy(cache) for _ in range(2)]
    for one, at_once in zip(both, (True, False), strict=True):
        take(one, 12, at_once=at_once)
    out, lse = cache.attend(*(rows(2, heads, 1, 8, seed=heads) for heads in (4, 2, 2)), rows(2, 2, 1), return_lse=True)
    visible = cache.sizes.visible()
    slots = (x[:, :, :visible] for x in (cache.key, cache.value))
    case = AttentionCase(
        rows(2, 4, 1, 8, seed=4), *slots, visible=cache.position[:, :, None, :visible] >= 0, key_bias=cache.score[:, :, :visible]
    )
    case = copy.deepcopy(case)
    cache.rewind(cache.kept[:, 0])

    def compare():
        if max(x.abs().amax() for x in (case.key, case.value, out, lse)) < LARGEST:
            assert_close_to_reference(case, {"out": out, "lse": lse})
        assert_same_bits(*(one.state_dict() for one in both))

    return compare


@contextlib.contextmanager
def assertions_refuse():
    """torch asserts some of what it reads."""
    try:
        yield
    except AssertionError as error:
        raise ValueError("asserted by torch") from error


def use(kind, data):
    file = io.BytesIO(data)
    with assertions_refuse():
        if kind == "program":
            torch.export.load(file).module()(*program_inputs())
            return lambda: None
        loaded = torch.load(file, weights_only=True)
    if kind in CACHES:
        return use_cache(kind, loaded)
    if kind in MASKS:
        return use_mask(loaded)
    holder = MaskBuffer(MASKS[kind.removeprefix("buffer of ")]())
    before = holder.state_dict()
    try:
        holder.load_state_dict(loaded)
    except (TypeError, ValueError):
        if "all" not in kind:  # of several parts some may have been loaded
            assert_same_bits(before, holder.state_dict())
        raise
    return use_mask(holder.mask)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_refused_or_means_what_it_holds(kind):
    use(kind, archive_of(records(kind)))()
    refused = 0
    for number in range(COUNT):
        data = mutated(kind, random.Random(f"{kind} {number}"))
        try:
            compare = use(kind, data)
        except AssertionError:
            raise
        except Exception:
            refused += 1
        else:
            compare()
    assert 0 < refused < COUNT


@pytest.mark.parametrize(
    ("name", "at", "number"),
    [
        ("steps", (0, 0), -1), ("steps", (0, 1), 12), ("kept", (0, 0), 3), ("kept", (0, 0), -1), ("position", (0, 0, 0), 1),
        ("position", (0, 0, 3), 9), ("position", (0, 0, 5), 10), ("position", (0, 0, 6), 6), ("position", (0, 0, 9), 13),
        ("entered", (0, 0, 0), 2), ("entered", (0, 0, 1), 9), ("score", (0, 0, 6), float("nan")), ("score", (0, 0, 6), -float("inf")),
    ],
)  # fmt: skip
def test_a_cache_refuses_a_state_that_no_tokens_leave(name, at, number):
    cache, state = bounded(), {key: x.clone() for key, x in original("bounded").items()}
    state[name][at] = number
    before = {key: x.clone() for key, x in cache.state_dict().items()}
    with pytest.raises(ValueError, match=rf"^{name}: expected the state that tokens leave in a cache, got {number} at "):
        cache.load_state_dict(state)
    assert_same_bits(before, cache.state_dict())


def test_a_state_of_fewer_slots_is_left_to_torch():
    cache, state = bounded(), bounded().state_dict()
    state["position"] = state["position"][..., 1:]
    with pytest.raises(RuntimeError, match="size mismatch for position"):
        cache.load_state_dict(state)


def test_an_empty_slot_has_no_score():
    cache, state = bounded(), bounded().state_dict()
    state["score"][0, 0, 6] = 1.0
    with pytest.raises(ValueError, match=r"^score: expected the state that tokens leave in a cache, got 1.0 at \[0, 0, 6\]"):
        cache.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("mixed", "selecting.steps", r"streaming.steps: expected \[12, 13\] like selecting.steps, .*, got \[13, 13\]"),
        ("mixed", "streaming.kept", r"streaming.kept: expected \[0, 0\] like selecting.kept, .*, got \[-1, 0\]"),
        ("indexed", "length", r"streaming.steps: expected \[12, 13\] like length, .*, got \[13, 13\]"),
        ("buffer of all three", "block._extra_state", "Sq=19 queries like the block mask, got one for 20"),
    ],
)
def test_parts_of_other_lengths_are_refused(kind, name, message):
    """Each part by itself could have been saved; all of them are left as they were."""
    state = {key: x.clone() for key, x in original(kind).items()}
    state[name][0] -= 1
    holder = CACHES[kind]() if kind in CACHES else MaskBuffer(MASKS["all three"]())
    before = {key: x.clone() for key, x in holder.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        holder.load_state_dict(state)
    assert_same_bits(before, holder.state_dict())
