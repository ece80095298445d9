"""The comparison of masks by what models learn: its tasks ask what they say, its masks are what they say, and runs become tables."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from pathlib import Path

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import DynamicMaskAttention, IndexedAttention, IndexRecipe, ScoreRecipe
from dmattn_bench import two_ways
from layers import layer_with

JOBS = Path(__file__).resolve().parents[2] / "research" / "jobs"
SMALL = {"length": 128, "visible": 16, "batch": 2, "layers": 1, "width": 32, "heads": 2, "pairs": 2, "symbols": 8, "steps": 2,
         "evaluations": 1, "eval_batches": 1, "teach_rows": 8, "plain_local": 4, "compile": False}  # fmt: skip


@pytest.fixture
def quality():
    import quality

    return quality


@pytest.fixture
def excerpt(monkeypatch, quality):
    """A corpus of few bytes in place of the installed one."""
    import quality_tasks

    generator = torch.Generator().manual_seed(0)
    parts = [bytes(torch.randint(32, 127, (5000,), generator=generator).tolist()) for _ in range(2)]
    monkeypatch.setattr(quality_tasks, "corpus", lambda suffix: (*parts, suffix))


def task(quality, **settings):
    return quality.task_of(quality.settings_of({"variant": "dense", **SMALL, **settings}), "cpu")


@pytest.mark.parametrize("split", ["held", "near"])
def test_associative_recall_asks_for_what_was_said(quality, split):
    drawn = task(quality, task="mqar", batch=50, pairs=4).draw(torch.Generator().manual_seed(1), split)
    for tokens, targets in zip(drawn.tokens.tolist(), drawn.targets.tolist(), strict=True):
        asked = [place for place, target in enumerate(targets) if target >= 0]
        assert len(asked) == 4
        for place in asked:
            said = tokens.index(tokens[place])
            assert said < place
            assert tokens[said] < 8 <= tokens[said + 1] < 16
            assert targets[place] == tokens[said + 1] == tokens[place + 1]
            assert (said < 32 and place >= 64) == (split == "held")


@pytest.mark.parametrize("split", ["held", "near"])
def test_secrets_are_asked_for_at_the_end(quality, excerpt, split):
    drawn = task(quality, task="passkey", batch=20, symbols=3, length=1024).draw(torch.Generator().manual_seed(1), split)
    for tokens, targets, asked in zip(drawn.tokens, drawn.targets, drawn.asked, strict=True):
        text = bytes(tokens.tolist())
        for answer in targets[asked].view(2, 3).tolist():
            first = text.index(bytes(answer))  # three letters of 36 are hardly there by chance
            name = text[first - 5 : first - 4]
            assert text.count(b"# key " + name + b" is ") == 2
            assert (first < 256) == (split == "held")


def test_what_a_sliding_window_could_reach_is_refused(quality):
    with pytest.raises(ValueError, match="visible: expected at most"):
        task(quality, task="mqar", layers=3)


def test_held_out_text_is_not_in_training(quality):
    import quality_tasks

    train, held, _ = quality_tasks.corpus(limit=20_000)
    assert 0.02 < len(held) / len(train) < 0.08
    assert held[5000:5400] not in train


def test_a_mask_shows_sinks_neighbours_and_the_best_of_the_others(quality):
    import quality_model

    settings = quality.settings_of({"task": "mqar", "variant": "taught", **SMALL, "local": 5, "sink": 2, "plain_heads": 1})
    attention = quality_model.Attention(settings)
    score = torch.randint(0, 9, (2, 2, 60)).float()  # with ties
    shown = attention.selected(score, 4).to_bool(60, 60)
    for b in range(2):
        for position in range(60):
            plain = {j for j in range(position + 1) if j < 2 or position - j < settings.plain_local}
            assert set(shown[b, 0, position].nonzero().flatten().tolist()) == plain
            best = sorted(range(2, position - 4), key=lambda j: (score[b, 1, j].item(), j))[-4:]
            near = {j for j in range(position + 1) if j < 2 or position - j < 5}
            assert set(shown[b, 1, position].nonzero().flatten().tolist()) == near | set(best)


def test_queries_that_explore_attend_to_all(quality):
    import quality_model

    settings = quality.settings_of({"task": "mqar", "variant": "taught+local+explore", **SMALL, "teach_rows": 128})
    attention = quality_model.Attention(settings)
    query, key, value = torch.randn(3, 1, 2, 128, 16).unbind()
    out, _ = attention.explored(query, key, value, None, torch.zeros(1, 2, 128), torch.full_like(query, torch.nan))
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    seen = ~out.isnan()
    assert seen.any(3).sum() >= 2 * 100
    torch.testing.assert_close(out[seen], dense[seen])


@pytest.mark.parametrize(
    "name",
    [
        "taught+local4+recency+mixed",
        "taught+local4+recency+mixed+barely+rows4+peak+explore+last",
        "taught+local4+recency+mixed+rows4+peak+explore+last+nearby",
        "linear+local+recency+sink",
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_layer_is_what_was_measured(quality, name, kv_heads):
    """With the same weights and random queries `DynamicMaskAttention` has the benchmark's output and, where it is taught, its loss."""
    from quality_model import Attention

    settings = quality.settings_of({"task": "text", "variant": name, **SMALL, "width": 64, "heads": 4, "kv_heads": kv_heads})
    measured, s = Attention(settings), settings
    torch.nn.init.normal_(measured.to_score.weight)
    layer = layer_with(
        s.width, s.heads, s.window, num_kv_heads=kv_heads, local=s.local, sink_keys=s.sink, local_heads=s.plain_heads, score="linear",
        select_only=s.bias == "none", queries=s.teach_rows, last=s.teach_last, sharp=s.teach_peak, explore=s.explore, recency=s.recency,
        partial_rotary_factor=s.rope_share, rotated_heads=s.plain_heads if s.rope_plain else None,
    )  # fmt: skip
    parts = measured.qkv.weight.split([64, 16 * kv_heads, 16 * kv_heads])
    weights = {
        "q_proj": parts[0],
        "k_proj": parts[1],
        "v_proj": parts[2],
        "o_proj": measured.out.weight,
        "score_proj": measured.to_score.weight,
    }
    state = {f"{module}.weight": weight for module, weight in weights.items()}
    layer.load_state_dict(state | {"score_proj.bias": measured.to_score.bias, "log_slope": measured.log_slope})
    hidden = torch.randn(2, s.length, s.width)
    torch.manual_seed(0)
    expected = measured(hidden, s.window, torch.tensor(0.0))
    torch.manual_seed(0)
    out, loss = layer(hidden, with_score_loss=True)
    torch.testing.assert_close(out, expected[0])
    if s.teach:
        torch.testing.assert_close(loss, expected[1])
    ours, theirs = layer.q_proj.weight, measured.qkv.weight
    grad, expected_grad = torch.autograd.grad(out.square().sum(), ours), torch.autograd.grad(expected[0].square().sum(), theirs)
    torch.testing.assert_close(grad[0], expected_grad[0][: s.width])


@pytest.mark.parametrize("part", ["", "+mixed"])
@pytest.mark.parametrize(
    "options", [{}, {"index_shared": True, "index_block": 4}, {"kv_heads": 2, "conv": 3, "conv_hidden": True}], ids=str
)
def test_the_layer_whose_queries_choose_is_what_is_measured(quality, options, part):
    """With the same weights and random queries `IndexedAttention` has the study's output and loss."""
    from quality_model import Attention

    name = f"query+local+recency+barely+rows4+peak+explore+last{part}"
    s = quality.settings_of({"task": "text", "variant": name, **SMALL, "width": 64, "heads": 4, "plain_local": 8, **options})
    measured = Attention(s)
    recipe = IndexRecipe(
        groups=1 if s.index_shared else "heads",
        block_size=s.index_block,
        recency=s.recency,
        queries=s.teach_rows,
        last=s.teach_last,
        conv=s.conv,
        **({"local_heads": "half"} if part else {}),
    )
    layer = IndexedAttention.recommended(s.width, s.heads, s.visible, num_kv_heads=s.kv, recipe=recipe)
    assert (layer.window, layer.local, layer.local_heads) == (s.window, s.local, s.plain_heads)
    weights = dict(zip(("q_proj", "k_proj", "v_proj"), measured.qkv.weight.split([64, 16 * s.kv, 16 * s.kv]), strict=True))
    state = {f"{module}.weight": weight for module, weight in (weights | {"o_proj": measured.out.weight}).items()}
    state |= {name: p for name, p in measured.state_dict().items() if name.startswith(("indexer", "log_slope"))}
    if s.conv > 1:
        state["conv.weight"] = torch.nn.init.normal_(measured.taps)
    layer.load_state_dict(state)
    hidden = torch.randn(2, s.length, s.width)
    results = []
    for call in (lambda: layer(hidden, with_index_loss=True), lambda: measured(hidden, s.window, torch.tensor(0.0))[:2]):
        torch.manual_seed(0)
        results.append(call())
    torch.testing.assert_close(*results)


def test_lists_choose_within_a_bounded_cache(quality):
    """No query sees a key beyond the lifetime that scores give it."""
    from quality_model import Attention

    s = quality.settings_of({"task": "text", "variant": "query+local4+living2", **SMALL})
    attention, hidden = Attention(s).eval(), torch.randn(1, 128, s.width)
    torch.nn.init.normal_(attention.to_score.weight)
    before = attention(hidden, s.window, torch.tensor(0.0))[0]
    lives = IntervalMask.top_k(attention.scores(hidden).detach(), s.lifetime_window, local=s.local).to_bool(128, 128)
    dead = int((~lives[0, :, 127]).all(0).nonzero()[-1])
    hidden[0, dead, 0] += 1e-3  # its score hardly moves
    changed = (attention(hidden, s.window, torch.tensor(0.0))[0] - before).abs().amax(2)[0]
    assert changed[dead] > 0
    assert changed[127] == 0


def test_neighbouring_layers_share_lists(quality, monkeypatch):
    from quality_model import Model

    options = {**SMALL, "layers": 4, "heads": 4, "kv_heads": 2}
    settings = quality.settings_of({"task": "mqar", "variant": "query+local4+mixed+recency+pairs", **options})
    torch.manual_seed(0)
    model, attended = Model(settings, 8), []
    assert [hasattr(block.attention, "indexer") for block in model.blocks] == [True, False, True, False]

    def attention(query, key, value, mask, **given):
        if isinstance(mask, dmattn.IndexMask):
            attended.append(mask)
        return original(query, key, value, mask, **given)

    original = dmattn.attention
    monkeypatch.setattr(dmattn, "attention", attention)
    tokens = torch.randint(8, (1, 64))
    model(tokens, tokens, settings.window, torch.tensor(0.0))
    first, second, third, fourth = attended
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(third.indices, fourth.indices)
    assert not torch.equal(first.indices, third.indices)
    assert len({(mask.local, mask.sink_keys, mask.is_causal, mask.block_size) for mask in attended}) == 1


def test_a_dense_model_is_converted(quality):
    """The indexers learn nothing before the dense part ends, and alone where it does; then queries read what they list."""
    name = "query+local4+recency+explore+converted"
    s = quality.settings_of({"task": "mqar", "variant": name, **SMALL, "steps": 10, "index_warm_up": 3, "lr": 0.01})
    trained, seen = quality.Run(s, "cpu"), []
    indexer = trained.model.blocks[0].attention.indexer
    warm_up = trained.teach_indexers

    def states():
        parts = {"indexer": indexer, "model": trained.model}
        return {part: copy.deepcopy(module.state_dict()) for part, module in parts.items()}

    def changed(before, after):
        return [name for name in before if not torch.equal(before[name], after[name])]

    trained.teach_indexers = lambda: (seen.append(states()), warm_up(), seen.append(states()))
    first = states()
    assert trained.train(float("inf"))
    before, after = seen
    assert not changed(first["indexer"], before["indexer"])
    assert "head.weight" in changed(first["model"], before["model"])
    learned = changed(before["model"], after["model"])
    assert learned
    assert all(".indexer." in name for name in learned)
    assert "head.weight" in changed(after["model"], states()["model"])
    batch = trained.held["held"][0]
    with torch.no_grad():
        dense, sparse = (trained.forward(batch, window)[0] for window in (None, s.window))
    assert not torch.equal(dense, sparse)


def test_a_hybrid_has_a_dense_layer_in_three(quality):
    from quality_model import Model

    settings = quality.settings_of(
        {"task": "text", "variant": "sliding+recency+mixed+barely+hybrid", **SMALL, "layers": 6, "heads": 4}
    )
    masks = [block.attention.settings.mask for block in Model(settings, 8).blocks]
    assert masks == ["sliding", "sliding", "dense"] * 2


def test_the_first_layers_alone_have_local_heads(quality):
    from quality_model import Model

    options = {**SMALL, "layers": 3, "heads": 4, "plain_layers": 2}
    settings = quality.settings_of({"task": "mqar", "variant": "query+local4+mixed+recency", **options})
    model = Model(settings, 8)
    assert [block.attention.indexer.groups for block in model.blocks] == [2, 2, 4]
    assert [block.attention.settings.window for block in model.blocks] == [24, 24, 12]
    tokens = torch.randint(8, (1, 64))
    assert model(tokens, tokens, settings.window, torch.tensor(0.0))[0].isfinite().all()


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_jobs_are_runs_that_there_can_be(quality, path):
    jobs = [json.loads(line) for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    assert jobs
    for job in jobs:
        settings = quality.settings_of({name: value for name, value in job.items() if name != "seeds"})
        assert settings.visible <= settings.length


def test_runs_that_differ_in_one_setting_have_different_descriptions(quality):
    from dmattn_bench.quality_report import described

    jobs = [json.loads(line) for line in (JOBS / "query_nearby.jsonl").read_text().splitlines() if line.startswith("{")]
    said = [described(dataclasses.asdict(quality.settings_of(job))) for job in jobs if job["task"] == "text" and job["seed"] == 1]
    assert len(set(said)) == len(said) == 14


VARIANTS = (
    "dense",
    "dense+recency",
    "sliding+recency",
    "streaming",
    "dynamic",
    "dynamic+local+recency+noise",
    "linear+key+scaled+warm",
    "taught+local+sink+mixed+mlp+anneal",
    "taught+local+ahead+explore",
    "taught+local+recency+quarter+barely+flat",
    "gated+local4+recency+mixed+barely",
    "gated+local4+sink",
    "gated+distilled+local4",
    "query+local4+recency+mixed+barely+rows4+peak+explore+last",
    "query+local+recency+block4+pooled+shared+hybrid",
    "query+local4+recency+mixed+living2+explore",
    "query+local4+recency+mixed+pairs+explore",
)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_trains(quality, name):
    result = quality.result_of({"task": "mqar", "variant": name, **SMALL})
    assert result["complete"]
    assert result["steps"] == 2
    (point,) = result["curve"]
    assert point["held_bits"] > 0
    assert 0 <= point["held_accuracy"] <= 1
    json.dumps(result)


@pytest.mark.parametrize("name", ["dense", "linear+value+local+explore", "query+local4+recency+mixed+living2+explore"])
def test_heads_in_groups_train(quality, name):
    assert quality.result_of({"task": "mqar", "variant": name, **SMALL, "heads": 4, "kv_heads": 2})["complete"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dense", "query+local4+recency+mixed+explore", "query+local4+recency+mixed+explore+warm"])
def test_a_replayed_step_has_the_gradients_of_the_batch_it_is_given(quality, name):
    trained = quality.Run(quality.settings_of({"task": "mqar", "variant": name, **SMALL, "teach": 0.0, "replayed": True}), "cuda")
    trained.warm_up()
    batch = trained.task.draw(trained.generator, "train")
    for window in (*trained.replayed, *trained.replayed):
        losses, gradients = [], []
        for step in (trained.replayed[window], lambda batch, window=window: trained.gradients(batch, window, 0.0)):
            torch.manual_seed(0)
            losses.append(step(batch))
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained.model.parameters()])
            trained.optimizer.zero_grad()
        torch.testing.assert_close(*losses)
        for replayed, expected in zip(*gradients, strict=True):
            two_ways.assert_same_by_another_way(replayed, expected, torch.bfloat16)


def test_gates_are_distilled_from_the_dense_model(quality):
    """While gates stay shut, the predictions are those of the teacher; where they evict, they are not, and a step comes nearer."""
    trained = quality.Run(quality.settings_of({"task": "mqar", "variant": "gated+distilled+local4", **SMALL, "lr": 0.01}), "cpu")
    torch.nn.init.normal_(trained.model.head.weight)
    (block,) = trained.model.blocks
    batch, places = trained.held["held"][0], range(4)
    trained.teacher = copy.deepcopy(trained.model)
    torch.nn.init.constant_(block.attention.to_score.bias, 1e4)
    shut = trained.forward(batch, 12, teacher=trained.teacher)[0]
    torch.testing.assert_close(shut, torch.zeros_like(shut))
    torch.nn.init.constant_(block.attention.to_score.bias, -100.0)
    far = [trained.loss(batch, 12, 0.0)[0] for _ in places]
    assert min(far) > 100 * shut.abs().max()
    trained.step = 1
    for _ in range(20):
        trained.one_step(0.5)
    assert max(trained.loss(batch, 12, 0.0)[0] for _ in places) < min(far)


def finished(quality, variant, seed, bits, **more):
    """A run as `quality.py` writes it."""
    settings = dataclasses.asdict(quality.settings_of({"task": "text", "variant": variant, "seed": seed, **more}))
    whole = dict.fromkeys(("parameters", "steps", "seconds", "tokens_per_second", "cuda", "torch", "uncommitted_changes"), 0)
    curve = [{"step": 1, "seconds": 2.0, "held_bits": bits, "train_bits": 9.0, "coverage": [[1.0]]}]
    return {**whole, "name": variant, "complete": True, "settings": settings, "machine": {"gpu": "none"}, "commit": "abc",
            "date": "2020-01-01", "curve": curve, "memory_bytes": 3}  # fmt: skip


def test_kept_runs_become_tables(quality, tmp_path):
    """The best first, means and distances over seeds, and one line a mask however often it was run."""
    from dmattn_bench import quality_report

    run = functools.partial(finished, quality)
    runs = [run("dense+recency", 1, 1.5), run("dense+recency", 2, 1.25), run("taught+local4+recency+mixed", 1, 1.75),
            run("dense", 1, 7.0, seconds=3.0), run("sliding", 1, 1.0), run("sliding", 1, 1.125)]  # fmt: skip
    kept = [quality_report.kept(one) for one in runs]
    assert "memory_bytes" not in kept[0]
    assert kept[0]["curve"] == [{"step": 1, "seconds": 2.0, "held_bits": 1.5}]
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200/quality.jsonl").write_text("".join(json.dumps(one) + "\n" for one in kept))
    lines = [line for line in quality_report.table("quality-text", tmp_path).splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines] == [
        "mask", "sliding window", "dense, recency",
        "taught scores, 128 local, 4 of 8 heads with 128 local keys alone, recency",
    ]  # fmt: skip
    assert "| 1.125 | 0 | 1 |" in lines[1]  # the later of two runs with one seed
    assert "| all | 1.375 ± 0.125 | 0 | 2 |" in lines[2]
    assert "7.000" in quality_report.table("quality-seconds", tmp_path)


def test_the_table_of_models_has_their_runs_alone(quality, tmp_path):
    """Means of the latest run of each seed with the line's settings; what has no run is said to be not measured."""
    from dmattn_bench import quality_report, report

    run = functools.partial(finished, quality, steps=2000)
    of_lists, _, half_local, ours, _, dense, _, sliding = quality_report.NAMES
    runs = [run(ours, 1, 9.0), run(ours, 1, 1.0), run(ours, 1, 5.0, conv=3), run(ours, 1, 3.0, conv=3, conv_hidden=True),
            run(ours, 2, 2.0), run(dense, 1, 1.25), run("dense", 1, 5.0), run(sliding, 1, 7.0, visible=64),
            run(sliding, 1, 8.0) | {"complete": False}, run(ours, 3, 9.0, plain_local=64),
            run(dense, 1, 0.25, task="headers", conv=3, conv_hidden=True),
            run(sliding, 1, 1.75, length=32768, kv_heads=2, seconds=250) | {"tokens_per_second": 1234.5}]  # fmt: skip
    for path, found in (
        ("nvidia-h200/quality.jsonl", runs),
        ("another/quality.jsonl", [run(of_lists, 1, 0.5), run(half_local, 1, 0.75, plain_local=256), run(half_local, 2, 9.0)]),
    ):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("".join(json.dumps(quality_report.kept(one)) + "\n" for one in found))
    lines = report.table_of("models", tmp_path).splitlines()
    assert lines[0] == "|  | per-query | half local | per-key | dense+ | hybrid | sliding+ |"
    texts = "0.500 (1 seed) | 0.750 (1 seed) | 1.500 ± 0.500 | 1.250 (1 seed) | not measured | not measured"
    assert lines[2:9] == [
        f"| 8,192 tokens: bits per byte, 2,000 steps | {texts} |",
        f"| 8,192 tokens, convolved: bits per byte, 2,000 steps |{' not measured |' * 2} 3.000 (1 seed) |{' not measured |' * 3}",
        f"| 32,768 tokens, convolved: bits per byte, 2,000 steps |{' not measured |' * 6}",
        f"| 8,192 tokens of C++ headers, convolved: bits per byte, 2,000 steps |{' not measured |' * 3} 0.250 (1 seed) |{' not measured |' * 2}",
        f"| 32,768 tokens: bits per byte, 250 seconds |{' not measured |' * 5} 1.750 (1 seed) |",
        f"| the same, 12 layers of 1,024, 16 heads on 4, 20 minutes |{' not measured |' * 6}",
        "| 32,768 tokens: tokens per second in training | not measured | not measured | not measured | not measured | not measured | 1,234 |",
    ]
    kept_whole = 6 * 2 * 8 * 8192 * 64 * 2  # layers, key and value, heads, tokens, size, bytes
    assert lines[9].startswith("| decode memory after 8,192 tokens | ")
    assert f"| {kept_whole / 1e6:.1f} MB |" in lines[9]


def test_the_figure_of_models_has_runs_without_the_convolution(quality, tmp_path, monkeypatch):
    from dmattn_bench import plots, quality_report

    drawn, ours = [], quality_report.NAMES["dense+recency+barely"]
    draw_curves = plots.draw_curves
    monkeypatch.setattr(plots, "draw_curves", lambda ax, *given: drawn.append(given[0]) or draw_curves(ax, *given))
    monkeypatch.setattr(plots, "save", lambda figure, path: plots.pyplot().close(figure))
    run = functools.partial(finished, quality, "dense+recency+barely", 1)
    runs = [run(1.0, steps=2000), run(2.0, steps=2000, conv=3), run(3.0, length=32768, kv_heads=2, seconds=250)]
    runs.append(run(4.0, steps=2500, task="mqar", length=2048, visible=256, pairs=16, symbols=64, conv=3))
    runs += [
        dict(runs[-1], settings={**runs[-1]["settings"], "conv_hidden": hidden, "seed": seed})
        for seed, hidden in ((2, True), (3, False))
    ]
    for one in runs[3:]:
        one["curve"][0]["held_accuracy"] = 0.5
    plots.draw_models(runs, tmp_path)
    of_recall = runs[4:5]  # those that convolve as the layer does
    assert [chosen[ours] for chosen in drawn] == [runs[:1], runs[2:3], of_recall]


def gated(window=6, **options):
    from experiments import GatedAttention

    torch.manual_seed(0)
    return GatedAttention(64, 4, window, num_kv_heads=2, head_dim=16, local=4, sink_keys=1, **options)


def test_gates_that_stay_shut_are_dense_attention():
    layer, hidden = gated(recipe=ScoreRecipe(local_heads=0)), torch.randn(2, 50, 64)
    torch.nn.init.constant_(layer.score_proj.bias, 1e4)
    layer.dropout = 0.0
    dense = DynamicMaskAttention(64, 4, 50, num_kv_heads=2, head_dim=16, local=4, recipe=ScoreRecipe(local_heads=0))
    dense.load_state_dict(layer.state_dict())
    two_ways.assert_same_in_another_order(layer(hidden), dense.eval()(hidden), torch.float32)
    _, loss = layer(hidden, with_score_loss=True)
    older = sum(range(50 - 4 - 1, 0, -1)) / 50  # keys 1 to 45 are older ones to 45 to 1 queries
    torch.testing.assert_close(loss, torch.tensor(older / 6 - 1))
    assert layer(hidden, with_score_loss=True, window=50)[1] == 0


def test_hard_gates_are_a_mask_and_a_cache():
    layer, hidden = gated().eval(), torch.randn(2, 40, 64)
    torch.nn.init.normal_(layer.score_proj.weight)
    torch.nn.init.zeros_(layer.score_proj.bias)
    with torch.no_grad():
        ranks, _ = layer.ranked(hidden, layer.projected(hidden)[2])
        scores = layer.score_proj(hidden).transpose(1, 2)
        older = layer.mask(ranks).to_bool(40, 40)[:, 1] & ~IntervalMask.streaming(40, 1, 4).to_bool(40, 40)[:, 0]
        assert not older[(scores[:, 1] < 0)[:, None].expand_as(older)].any()
        assert 1 < int(older.sum(2).max()) <= 6
        expected, cache = layer(hidden), layer.new_cache(2)
        parts = torch.cat([layer(hidden[:, a:b], cache=cache) for a, b in ((0, 20), (20, 21), (21, 40))], 1)
    two_ways.assert_same_in_another_order(parts, expected, torch.float32)
    with pytest.raises(ValueError, match="with_score_loss: expected False in eval mode"):
        layer(hidden, with_score_loss=True)
    with pytest.raises(ValueError, match="hidden_states: expected no other argument"):
        layer.train()(hidden, IntervalMask.causal(40))


def test_gates_learn_from_a_teacher_which_keys_to_keep():
    """A dense teacher recalls marked tokens; its student, distilled from its logits within a budget, keeps those and lets the others go."""
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(40, 64), torch.nn.Linear(64, 8)
    layer = gated(12, recipe=ScoreRecipe(local_heads=0, recency=None), rope_theta=None)
    torch.nn.init.normal_(layer.score_proj.weight, std=0.02)
    everything = torch.nn.ModuleList((embedding, head, layer))

    def batch(size=32):
        """Noise (tokens 16 to 38), one of 8 marked tokens in the first half, and at the end a question (39) whose answer it is."""
        tokens, kinds = torch.randint(16, 39, (size, 48)), torch.randint(0, 8, (size, 1))
        tokens.scatter_(1, torch.randint(1, 24, (size, 1)), kinds)
        tokens[:, -1] = 39
        return tokens, kinds[:, 0]

    def trained(steps, loss_of):
        gates = {id(parameter) for parameter in layer.score_proj.parameters()}
        groups = [[p for p in everything.parameters() if (id(p) in gates) == is_gate] for is_gate in (False, True)]
        optimizer = torch.optim.Adam([{"params": groups[0], "lr": 3e-3}, {"params": groups[1], "lr": 2e-2}])
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(*batch()).backward()
            optimizer.step()

    def logits(tokens, **options):
        out = layer(embedding(tokens), **options)
        out, loss = out if isinstance(out, tuple) else (out, None)
        return head(out[:, -1] + embedding(tokens[:, -1])), loss

    trained(120, lambda tokens, answer: F.cross_entropy(logits(tokens)[0], answer))
    teacher = copy.deepcopy(everything).requires_grad_(False)
    torch.nn.init.constant_(teacher[2].score_proj.bias, 1e4)  # all keys stay

    def distilled(tokens, answer):
        student, loss = logits(tokens, with_score_loss=True, window=4)
        hidden = teacher[2](teacher[0](tokens))[:, -1] + teacher[0](tokens[:, -1])
        return (
            F.kl_div(student.log_softmax(1), teacher[1](hidden).log_softmax(1), log_target=True, reduction="batchmean")
            + 0.1 * loss
        )

    trained(150, distilled)
    layer.eval()
    tokens, answer = batch(256)
    with torch.no_grad():
        accuracy = (logits(tokens)[0].argmax(1) == answer).float().mean()
        stays = layer.scores(embedding(tokens)) > -torch.inf
    staying = stays.any(1).float()  # one head is enough
    shares = staying[tokens < 8].mean(), staying[tokens >= 8].mean()
    assert shares[0] > 2 * shares[1]
    assert shares[1] < 0.4
    assert accuracy > 0.6  # 12 keys of 43 drawn by lot would give less than 0.4
